"""Files that images are read from: checkpoints that weights are views of already, and group files of our own.

[Note: Ways to read a file]
Each file has one of three ways to the device.

- *Locked*: its pages are in the page cache, and page-locked there, so that copies read them where they are. That takes RAM
  from everybody, so it is done where RAM is plentiful only (`stores.ram`).
- *Cached*: `preadv` through the page cache. What is read stays there as long as nobody else needs the RAM.
- *Direct*: `preadv` past the page cache (O_DIRECT), where RAM is scarce: the drive's full speed, hardly any CPU time, and
  what is in the page cache is not driven out by what is needed once a pass. Parts that are in the page cache are read
  from there all the same.

[Note: Which file it is]
A file is what was proven once: a device, an inode, a size, a time of change of its content and one of anything about it
(`st_mtime_ns`, `st_ctime_ns`). That is looked at again as a pass begins and at each read, through a descriptor that is
held, whatever has the file's name by then. Other programs share what is mapped, so holding a file does not keep its
bytes: one that lost its name is looked at as strictly as one that has it.

- Another size, or another time of its content: it was changed.
- Only `st_ctime_ns` is another: renaming, linking, deleting, chmod and chown do that, and so does whoever changes the bytes
  and puts the other time back. If the hash of the bytes is known they are hashed once. If not, there has to be another
  name, number of links, mode or owner to explain it.
- A process has not descriptors for hundreds of files. Those without one are looked at by their names, also by the name
  that they have now, or through their mapping if the process has the privilege. A file that is *adrift*, because none of
  that leads to it, cannot be looked at: then its bytes are hashed whenever they are needed, and lost if the hash is not known.

Only shared, read-only mappings are ever registered with a driver: a writable one of a file is refused, and the call has
been seen to hang on a private one. Files are not read through a mapping: touching one that was cut off would end the
process (SIGBUS), where `preadv` and `process_vm_readv` tell.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import xxhash

from ..base.device import Backend
from ..base.layout import ImageLayout
from ..base.mapping import cached_bytes, flat_view, map_page_cache, mapping_at, read_mapped
from ..base.pagemap import PAGE
from ..base.ram import locked
from ..base.reading import BLOCK, open_direct, read_around, read_part, refuses_direct, say_that_not_direct
from ..errors import GroupFileError
from .base import Mover, Tier
from .pinned import PageLock

_MAX_KEPT_OPEN = 256
"""Descriptors of files that stay open; others are opened for each read. A process may often have 1024."""
_CHUNK_BYTES = 4 << 20
"""Read at once to compare or to hash."""

_NUM_SAMPLES, _SAMPLE_BYTES = 64, 64 << 10


class SourceFile:
    """A part of a file that images are read from, by several threads at once.

    See [Note: Ways to read a file] and [Note: Which file it is].
    """

    def __init__(self, path: Path, fd: int, start: int, end: int, stamp: os.stat_result | None = None) -> None:
        """
        Args:
            fd: of the file; the caller closes it.
            start, end: the bytes of the file that images lie in.
            stamp: what `fstat` said before anybody looked at the bytes.

        Raises:
            GroupFileError: the file is shorter.
            OSError: it cannot be mapped.
        """
        self.path = path
        """Its name, as far as that is known."""
        self._stamp = os.fstat(fd) if stamp is None else stamp
        if not stat.S_ISREG(self._stamp.st_mode):
            raise OSError(f"{path} is not a regular file")
        if end > self._stamp.st_size:
            raise self.lost(self._stamp.st_size, "it ends there: it was cut off")
        self.start = start // PAGE * PAGE
        """Where in the file `bytes` begins."""
        size = end - self.start if start < end else 0
        self.bytes = flat_view(map_page_cache(fd, self.start, size) if size else None, 0, size)
        """What the page cache holds, as flat uint8: only to be read while it is locked."""
        self.bytes_cached = 0
        """Read so far through the page cache. Not exact: threads that read do not wait for each other to count."""
        self.images: weakref.WeakSet[FileImage] = weakref.WeakSet()
        """The images that lie here."""
        self.is_adrift = False
        """It cannot be looked at: what is read has to be hashed."""
        self._looking = threading.RLock()
        """Held by the thread that looks at the bytes again: the others wait for what it finds."""
        self._fds = _Kept(fd)
        self._close_fds = weakref.finalize(self, self._fds.close)
        self._close_fds.atexit = False
        self._locked: dict[tuple[int, int], PageLock] = {}
        """The page-locked ranges of `bytes`."""
        self.num_lockings = 0
        """Goes up when other ranges are locked."""

    @property
    def num_bytes(self) -> int:
        return self.bytes.numel()

    def release(self) -> None:
        """Unlock and close the file."""
        self.unlock()
        self._close_fds()

    def unlock(self) -> None:
        self._unlock_all_but(())

    def lock(self, pieces: Sequence[Piece] | None, backend: Backend, wait: Callable[[], None]) -> bool:
        """Page-lock the pages of `pieces`, or all, in the page cache, and no others. What is not there is read first.

        `wait` returns once no copy is on its way: before that the pages stay locked.

        Returns:
            False if the device refuses: then none is locked.
        """
        wanted = [(0, self.num_bytes)] if pieces is None else self._pages_of(pieces)
        self._unlock_all_but(wanted)
        for start, end in wanted:
            if (start, end) in self._locked or start == end:
                continue
            with suppress(OSError), self._open() as fd:
                if fd is not None:  # in long runs, not page by page
                    os.posix_fadvise(fd, self.start + start, end - start, os.POSIX_FADV_WILLNEED)
            lock = PageLock.take(backend, self.bytes[start:end], wait, read_only=True)
            if lock is None:
                self._unlock_all_but(())
                return False
            locked.add(lock, end - start)
            self._locked[start, end] = lock
            self.num_lockings += 1
        return True

    def is_locked(self, pieces: Sequence[Piece]) -> bool:
        """Whether the pages of all `pieces` are locked, each in one run."""
        return bool(self._locked) and all(
            any(start <= first and last <= end for start, end in self._locked)
            for first, last in (self._pages_of([piece])[0] for piece in pieces if piece.num_bytes)
        )

    def _pages_of(self, pieces: Sequence[Piece]) -> list[tuple[int, int]]:
        """The whole pages around `pieces`, as ranges of `bytes` that neither overlap nor touch."""
        starts = [self.offset_of(piece.position) // PAGE * PAGE for piece in pieces]
        ends = [-(-(self.offset_of(piece.position) + piece.num_bytes) // PAGE) * PAGE for piece in pieces]
        return merged([(start, min(end, self.num_bytes)) for start, end in zip(starts, ends, strict=True)])

    def _unlock_all_but(self, wanted: Sequence[tuple[int, int]]) -> None:
        for found in self._locked.keys() - set(wanted):
            self._locked[found].release()
            self.num_lockings += 1
            del self._locked[found]

    def forget_cached(self, pieces: Sequence[Piece]) -> None:
        """Let the page cache give up the pages of `pieces` first of all."""
        with suppress(OSError), self._open() as fd:
            for piece in () if fd is None else pieces:
                assert fd is not None
                os.posix_fadvise(fd, piece.position, piece.num_bytes, os.POSIX_FADV_DONTNEED)

    def avoid_readahead(self) -> None:
        """Let the kernel read what is asked for and no more: what is beside it is read past the page cache."""
        if self._fds.fd is not None:
            with suppress(OSError):
                os.posix_fadvise(self._fds.fd, 0, 0, os.POSIX_FADV_RANDOM)

    def offset_of(self, position: int) -> int:
        """Where in `bytes` a byte of the file is."""
        return position - self.start

    def seems_cached(self, pieces: Sequence[Piece]) -> bool:
        """Whether all of `pieces` is in the page cache, as far as a few samples tell."""
        step = max(_SAMPLE_BYTES, sum(piece.num_bytes for piece in pieces) // _NUM_SAMPLES)
        ahead = 0
        for piece in pieces:
            while ahead < piece.num_bytes:
                if not self.is_cached(piece.position + ahead, min(_SAMPLE_BYTES, piece.num_bytes - ahead)):
                    return False
                ahead += step
            ahead -= piece.num_bytes
        return True

    def is_cached(self, position: int, num_bytes: int) -> bool:
        """Whether all of these bytes are in the page cache."""
        start = position // PAGE * PAGE
        size = position + num_bytes - start
        try:
            return cached_bytes(self.bytes.data_ptr() + start - self.start, size) == size
        except OSError:
            return False

    def read(self, area: memoryview, position: int, num_bytes: int, *, direct: bool) -> bool:
        """Bring bytes into `area`: byte `position` of the file lands at `position % BLOCK`.

        Args:
            area: has room for the whole blocks around those bytes, and is aligned to blocks.

        Returns:
            Whether they were read past the page cache.

        Raises:
            GroupFileError: they cannot be read.
        """
        inset = position % BLOCK
        with self._readable() as fd:
            if fd is None:
                self._fill(fd, area[inset : inset + num_bytes], position)
                return False
            done = None
            if direct and not self.is_cached(position, num_bytes):
                done = self._read_direct(fd, area, position, inset + num_bytes)
            is_direct = done is not None
            if done is None:
                done = inset + self._pread(fd, area[inset : inset + num_bytes], position)
            if is_direct and done < inset + num_bytes:  # cut short: by a signal, or because the file ends there
                done = max(done, inset)
                done += self._pread(fd, area[done : inset + num_bytes], position + done - inset)
            if done < inset + num_bytes:
                raise self.lost(position + done - inset, "it ends there")
            return is_direct

    def read_straight(self, target: memoryview, position: int) -> None:
        """Bring bytes into `target`, through the page cache.

        Raises:
            GroupFileError: they cannot be read.
        """
        with self._readable() as fd:
            self._fill(fd, target, position)

    def holds(self, position: int, data: torch.Tensor) -> bool:
        """Whether the file holds `data` (flat uint8) from byte `position` on.

        Raises:
            GroupFileError: it cannot be read, or was changed.
        """
        done = 0
        for chunk in self.chunks(position, data.numel()):
            found = torch.frombuffer(chunk, dtype=torch.uint8)
            if not torch.equal(found, data[done : done + len(chunk)]):
                return False
            done += len(chunk)
        return True

    def chunks(self, position: int, num_bytes: int) -> Iterator[memoryview]:
        """What the file holds there, in pieces. Each is good until the next one.

        Raises:
            GroupFileError: it cannot be read.
        """
        buffer = memoryview(bytearray(min(_CHUNK_BYTES, num_bytes)))
        with self._open() as fd:
            if fd is not None and _identity_of(self._look_at(fd)) != _identity_of(self._stamp):
                raise self._without_name()
            for start in range(0, num_bytes, _CHUNK_BYTES):
                chunk = buffer[: num_bytes - start]
                self._fill(fd, chunk, position + start)
                yield chunk

    def check(self) -> None:
        """
        Raises:
            GroupFileError: somebody changed the file, or nobody can tell.
        """
        fd = self._fds.fd
        now = self._stat_of(self.path) if fd is None else self._look_at(fd)
        self.is_adrift &= now is None
        if now is None and not self.is_adrift:
            with self._open() as fd:
                now = None if fd is None else self._look_at(fd)
        if now is not None:
            self._compare(now)
            return
        if not all(image.content for image in self.images):
            raise self._without_name()
        if not self.is_adrift:
            self.is_adrift = True
            for image in self.images:
                image.generation += 1  # what is on its way is not going to be hashed
        for image in self.images:
            image.prove()

    def has_name(self, path: Path) -> bool:
        """Whether `path` leads to this file, and it is what it was."""
        now = self._stat_of(path)
        return now is not None and _content_of(now) == _content_of(self._stamp)

    def lost(self, position: int, what: str) -> GroupFileError:
        return GroupFileError(
            f"Cannot read {self.path} at byte {position:,}: {what}. The weights in it cannot be had from there any more: load "
            f"the model again, and keep other programs from changing the file."
        )

    def _pread(self, fd: int, target: memoryview, position: int) -> int:
        try:
            self.bytes_cached += len(target)
            return read_part(fd, target, position)
        except OSError as error:
            raise self.lost(position, str(error.strerror)) from error

    def _read_direct(self, fd: int, area: memoryview, position: int, num_needed: int) -> int | None:
        """None if the file cannot be read so."""
        found = self._fds.direct(fd)
        if found is None:
            return None
        direct_fd, is_kept = found
        try:
            return read_around(direct_fd, area[: -(-num_needed // BLOCK) * BLOCK], position)
        except OSError as error:
            if refuses_direct(error):
                say_that_not_direct(error.errno or 0)
                self._fds.has_no_direct = True
                return None
            raise self.lost(position, str(error.strerror)) from error
        finally:
            if not is_kept:
                os.close(direct_fd)

    def _fill(self, fd: int | None, target: memoryview, position: int) -> None:
        if fd is not None:
            if (done := self._pread(fd, target, position)) < len(target):
                raise self.lost(position + done, "it ends there")
            return
        try:
            read_mapped(self.bytes.data_ptr() + self.offset_of(position), target)
        except OSError as error:
            what = "it was cut off" if error.errno == errno.EFAULT else str(error.strerror)
            raise self.lost(position, f"it has no name any more, and {what}") from error

    @contextmanager
    def _readable(self) -> Iterator[int | None]:
        """A descriptor of the file, which is what it was; None if it is adrift."""
        with self._open() as fd:
            if fd is not None:
                self._compare(self._look_at(fd))
            elif not self.is_adrift:
                raise self._without_name()
            yield fd

    @contextmanager
    def _open(self) -> Iterator[int | None]:
        """A descriptor of the file; None if there is none to be had."""
        if self._fds.fd is not None:
            yield self._fds.fd
            return
        fd = None if self.is_adrift else self._open_anew()
        try:
            yield fd
        finally:
            if fd is not None:
                os.close(fd)

    def _open_anew(self) -> int | None:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        if self._stat_of(self.path) is None:  # renamed, perhaps
            mapping = mapping_at(self.bytes.data_ptr())
            if mapping is None:
                return None
            if self._stat_of(Path(mapping.path)) is None:
                with suppress(OSError):
                    return os.open(f"/proc/self/map_files/{mapping.start:x}-{mapping.end:x}", flags)
                return None
            self.path = Path(mapping.path)
        try:
            return os.open(self.path, flags | os.O_NOFOLLOW)
        except OSError as error:
            raise self.lost(self.start, f"opening it failed: {error.strerror}") from error

    def _look_at(self, fd: int) -> os.stat_result:
        try:
            return os.fstat(fd)
        except OSError as error:  # a network file system whose server has gone
            raise self.lost(self.start, str(error.strerror)) from error

    def _stat_of(self, path: Path) -> os.stat_result | None:
        """What `path` leads to, without a link, if that is this file."""
        with suppress(OSError):
            now = os.lstat(path)
            if _identity_of(now) == _identity_of(self._stamp):
                return now
        return None

    def _compare(self, now: os.stat_result) -> None:
        was = self._stamp
        if _identity_of(now) != _identity_of(was):
            raise self.lost(self.start, "another file took its place")
        if now.st_size < was.st_size:
            raise self.lost(now.st_size, "it ends there: it was cut off")
        if _content_of(now) != _content_of(was):
            raise self.lost(self.start, "another program changed it after it was opened")
        if now.st_ctime_ns != was.st_ctime_ns:
            self._look_again(now)

    def _look_again(self, now: os.stat_result) -> None:
        """Something about the file changed, and perhaps no byte of it."""
        with self._looking:
            if now.st_ctime_ns == self._stamp.st_ctime_ns:
                return
            images = [*self.images]
            if images and all(image.content for image in images):
                for image in images:
                    image.prove()
            elif not self._is_explained(self._stamp, now):
                raise self.lost(
                    self.start,
                    "another program may have changed it after it was opened (its st_ctime says so, and its content is not "
                    "known: verify_files=True would)",
                )
            self._stamp = now

    def _is_explained(self, was: os.stat_result, now: os.stat_result) -> bool:
        """Whether its time of change is another for a reason that leaves its bytes alone."""
        return False

    def _without_name(self) -> GroupFileError:
        try:
            os.lstat(self.path)
            why = "another file has its name"
        except OSError as error:
            why = str(error.strerror)
        return self.lost(
            self.start,
            f"{why}. This process has not descriptors enough to hold all files of weights (ulimit -n), so it cannot be told "
            f"whether it was changed",
        )


def _identity_of(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _content_of(found: os.stat_result) -> tuple[int, int, int, int]:
    """What is another if the content is: the file itself, its size, and the time of its last change."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class _Kept:
    """The descriptors of a source that stay open, if not too many others do."""

    _lock = threading.RLock()  # a finalizer calls `close` of another one, perhaps in a thread that has the lock
    _all: ClassVar[weakref.WeakSet[_Kept]] = weakref.WeakSet()
    """They are counted, and not a number kept: an interrupt could leave that wrong."""

    def __init__(self, fd: int) -> None:
        self.fd: int | None = None
        self.has_no_direct = False
        self._direct: int | None = None
        _Kept._all.add(self)
        with _Kept._lock, suppress(OSError):  # none is left
            if self._may_keep():
                self.fd = os.dup(fd)

    @staticmethod
    def num_open() -> int:
        """Descriptors of this process that stay open."""
        return sum((each.fd is not None) + (each._direct is not None) for each in [*_Kept._all])

    @staticmethod
    def _may_keep() -> bool:
        return _Kept.num_open() < min(_MAX_KEPT_OPEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)

    def direct(self, fd: int) -> tuple[int, bool] | None:
        """A descriptor for direct reads, and whether it stays open."""
        if self.has_no_direct:
            return None
        with _Kept._lock:
            if self._direct is None:
                opened = open_direct(fd)
                if opened is None or self.fd is None or not self._may_keep():
                    self.has_no_direct = self.fd is not None and opened is None
                    return None if opened is None else (opened, False)
                self._direct = opened
            return self._direct, True

    def close(self) -> None:
        with _Kept._lock:
            fds = self.fd, self._direct
            self.fd = self._direct = None  # first of all: an interrupt must leave no number that another file may get
            for fd in fds:
                if fd is not None:
                    os.close(fd)


def merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of `ranges`, as ranges that neither overlap nor touch."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a file that belong together, and go to `offset` in the image."""

    offset: int
    position: int
    num_bytes: int


class Proof:
    """Checks that an image is read as it was before: with the hash of its bytes, in the order of its pieces."""

    def __init__(self, image: FileImage) -> None:
        self._image = image
        self._hash = xxhash.xxh3_128()
        self._num_left = sum(piece.num_bytes for piece in image.pieces)

    def update(self, data: memoryview) -> None:
        """
        Raises:
            GroupFileError: this was the last of it, and it is not what it was.
        """
        self._hash.update(data)
        self._num_left -= len(data)
        if self._num_left:
            return
        found = self._hash.hexdigest()
        if self._image.content is None:
            self._image.content = found
        elif self._image.content != found:
            raise self._image.source.lost(
                self._image.pieces[0].position,
                f"the content of {self._image.layout.specs[0].fqn!r} and what lies beside it was not what it should be (XXH3 "
                f"{found}, not {self._image.content}): the drive, or memory, fails, or another program changed it",
            )


class FileImage:
    """An image whose bytes are pieces of a file. At rest its tensors are views of a private mapping of that file.

    They take no RAM until they are read, and an edit lands in pages of its own.
    """

    is_stable = True
    is_outdated = False
    generation = 0
    layout: ImageLayout
    rest: list[torch.Tensor]
    source: SourceFile
    pieces: Sequence[Piece]

    def __init__(self, layout: ImageLayout) -> None:
        self.layout = layout
        self.content: str | None = None
        """The XXH3 hash (128 bits, hexadecimal) of what the pieces hold, if that is known."""
        self.is_verified = False
        """Each time that it is read its content is compared with what was written, or read the first time."""
        self.tier = Tier.FILE
        self.is_direct = False
        """Parts that are not in the page cache are read past it."""
        self._is_locked = False
        self._asked: tuple[SourceFile, int] | None = None
        """When that was found out."""

    @property
    def is_locked(self) -> bool:
        """Whether it is page-locked in the page cache: nothing is read then, but copied from there."""
        asked = self.source, self.source.num_lockings
        if asked != self._asked:
            self._is_locked, self._asked = self.source.is_locked(self.pieces), asked
        return self._is_locked

    @property
    def pinned_bytes(self) -> int:
        return self.layout.num_bytes if self.is_locked else 0

    @property
    def way(self) -> str:
        """How the file is read."""
        if self.is_locked:
            return "locked"
        return "direct" if self.is_direct else "page cache"

    def check(self) -> None:
        self.source.check()

    def prove(self) -> None:
        """
        Raises:
            GroupFileError: the file does not hold what it held, whose hash is known.
        """
        proof = Proof(self)
        for piece in self.pieces:
            for chunk in self.source.chunks(piece.position, piece.num_bytes):
                proof.update(chunk)

    def send(self, mover: Mover, at: int) -> None:
        source = self.source
        proof = Proof(self) if self.is_verified or source.is_adrift else None
        is_locked = self.is_locked
        for piece in self.pieces:
            if is_locked:
                mover.copy(at + piece.offset, source.bytes, source.offset_of(piece.position), piece.num_bytes)
            else:
                where = at + piece.offset, source, piece.position, piece.num_bytes
                mover.read(*where, direct=self.is_direct, proof=proof)
