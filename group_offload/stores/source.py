"""Files that blobs are read from: checkpoints whose views weights are already, and group files that we wrote.

[Note: Ways to read a file]
Each file has one of three ways to the device.

- *Pinned*: the pages are in the page cache, and pinned there, so that copies read them where they are. This takes RAM
  from all processes, so it is done only where RAM is plentiful (`PageCachePins.choose_ways`).
- *Cached*: `preadv` through the page cache. The pages stay there as long as the kernel needs the RAM for nothing else.
- *Direct*: `preadv` past the page cache (O_DIRECT), where RAM is scarce. Direct reads have the disk's full speed, take
  hardly any CPU time, and drive nothing out of the page cache. Parts that are in the page cache are read from there all
  the same.

[Note: Which file it is]
A file is known by its device, its inode, its size, the time at which its content changed (`st_mtime_ns`) and the time at
which anything about it changed (`st_ctime_ns`). The file is checked against these as a pass begins and at each read,
through a descriptor that is held, whichever file has its name by then. Other programs share the mapped pages, so a held
descriptor does not protect the bytes: a file that lost its name is checked as strictly as one that has it.

- If the size or `st_mtime_ns` differs, the file was changed.
- If only `st_ctime_ns` differs, the file was renamed, linked, deleted, or given another mode or owner, or a program changed
  its bytes and then put `st_mtime_ns` back. If the hash of the bytes is known they are hashed once. If it is not, another
  name, number of links, mode or owner has to explain the difference.

Only shared, read-only mappings are ever registered with a driver: drivers refuse a writable mapping of a file, and the call
was seen to hang on a private one. Files are not read through a mapping: touching a page past the end of a file that was
cut off would end the process (SIGBUS), where `preadv` returns an error.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from ..base.device import Backend
from ..base.mapping import cached_bytes, page_cache_of, populate
from ..base.pagemap import PAGE, merged
from ..base.pinning import PinnedPages
from ..base.ram import pinned
from ..base.reading import BLOCK, open_direct, read_part, refuses_direct, warn_no_direct_io
from ..base.system import advise, expect_open, forked_free
from ..base.text import describe_bytes, describe_seconds
from ..base.tuning import tuning
from ..errors import StorageError

logger = logging.getLogger("group_offload")

_CHUNK_BYTES = 4 << 20
"""How much is read at once to compare or to hash it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a file that belong together, and go to `offset` in the blob."""

    offset: int
    position: int
    num_bytes: int


class Contents:
    """The bytes of a blob that lie in pieces of a file."""

    content: str | None = None
    """The XXH3 hash (128 bits, hexadecimal) of the pieces' bytes, if it is known."""
    is_proven = False
    """Whether all bytes were compared with that hash since the file was opened."""
    is_pinned = False
    """Whether the bytes are pinned in the page cache: then copies take them from there, and nothing is read."""

    def __init__(self, name: str, pieces: Sequence[Piece], source: SourceFile) -> None:
        """
        Args:
            name: The name of the blob's first weight, or of its group, for messages.
        """
        self.name, self.pieces, self.source = name, pieces, source

    def prove(self) -> None:
        """
        Raises:
            StorageError: the file does not hold the bytes any more whose hash is known.
        """
        proof = Proof(self)
        for piece in self.pieces:
            for chunk in self.source.chunks(piece.position, piece.num_bytes):
                proof.update(chunk)


class SourceFile:
    """A part of a file that blobs are read from. Several threads may read at once.

    See [Note: Ways to read a file] and [Note: Which file it is].
    """

    def __init__(self, path: Path, file: Any, start: int, end: int, stamp: os.stat_result | None = None) -> None:
        """
        Args:
            file: What `open_to_read` returned. It is kept for as long as this object is there.
            start, end: The first byte of the file that blobs lie in, and the one after the last.
            stamp: The result of `fstat` from before the bytes were first read.

        Raises:
            StorageError: the file is shorter than `end`.
            OSError: the file cannot be mapped.
        """
        self.path = path
        """The file's name, as far as it is known."""
        self._file = file
        self.fd: int = file.fileno()
        expect_open(self.fd)
        self.stamp = os.fstat(self.fd) if stamp is None else stamp
        """What `fstat` said when the bytes were known to be right last."""
        if end > self.stamp.st_size:
            raise self.lost(self.stamp.st_size, "it ends there: it was cut off")
        self.start, self.end = start, end
        self.bytes = page_cache_of(self.fd, end)
        """The file to `end` in the page cache, as flat uint8. Only what is pinned may be touched. See `page_cache_of`."""
        self.bytes_cached = 0
        """Bytes that were read through the page cache so far. Not exact: threads that read do not wait to count."""
        self.blobs: weakref.WeakSet[Contents] = weakref.WeakSet()
        """The blobs whose bytes lie in this file."""
        self._looking = forked_free(threading.RLock())
        """Held by the thread that hashes the bytes again. Other threads wait for the result."""
        self._has_no_direct = False
        """Whether the file cannot be opened for direct reads."""
        self._pinned_parts: dict[tuple[int, int], list[tuple[torch.Tensor, PinnedPages]]] = {}
        """The pinned ranges of `bytes`, each in parts of `Tuning.segment_bytes`."""

    def add(self, blob: Contents) -> None:
        self.blobs.add(blob)
        blob.is_pinned = self._has_pinned(blob.pieces)

    def lock(
        self, pieces: Sequence[Piece] | None, backend: Backend, wait: Callable[[], None], *, in_one: bool = False
    ) -> bool:
        """Pin the pages of `pieces` in the page cache, and no others. Pages that are not there are read first.

        Args:
            pieces: None for all bytes that blobs lie in.
            wait: A function that returns once no copy is on its way: pages stay pinned until then.
            in_one: Whether each of the pieces is pinned at once, so that one copy can have all of it.

        Returns:
            False if the device refuses, or takes longer than `Tuning.pin_timeout_seconds`: then no page is pinned.
        """
        wanted = self._pages_of([Piece(0, self.start, self.end - self.start)] if pieces is None else pieces)
        self.unlock(wanted)
        if self.bytes.is_meta:
            return False
        seconds = 0.0
        for start, end in wanted:
            if (start, end) in self._pinned_parts or start == end:
                continue
            self._advise(start, end - start, "WILLNEED")  # in long runs, not page by page
            parts: list[tuple[torch.Tensor, PinnedPages]] = []
            step = end - start if in_one else tuning().segment_bytes
            for first in range(start, end, step):
                memory = self.bytes[first : min(first + step, end)]
                # Else the driver waits for the disk, and all others for the driver.
                populate(memory)
                begun = time.perf_counter()
                lock = PinnedPages.take(backend, memory, wait, read_only=True)
                seconds += time.perf_counter() - begun
                if lock is None or seconds > tuning().pin_timeout_seconds:
                    why = "the device refused" if lock is None else f"it took {describe_seconds(seconds)} already"
                    told = describe_bytes(first), describe_bytes(end), self.path, why
                    logger.info("Pinned only %s of %s of %s in the page cache: %s.", *told)
                    if lock is not None:
                        lock.release()
                    for _, other in parts:
                        other.release()
                    self.unlock()
                    return False
                pinned.add(lock, memory.numel())
                parts.append((memory, lock))
            self._pinned_parts[start, end] = parts
        for blob in self.blobs:
            blob.is_pinned = self._has_pinned(blob.pieces)
        return True

    def pinned_parts(self, piece: Piece) -> Iterator[tuple[int, int, torch.Tensor, int]]:
        """The parts of a pinned piece, as the driver has to copy them: each lies in memory that was pinned at once.

        Yields:
            Where in the blob the part goes, its bytes, the memory, and the byte of the memory that it begins at.
        """
        first, last = piece.position, piece.position + piece.num_bytes
        found = next(key for key in self._pinned_parts if key[0] <= first and last <= key[1])
        start = found[0]
        for memory, _ in self._pinned_parts[found]:
            begin, end = max(first, start), min(last, start + memory.numel())
            if begin < end:
                yield piece.offset + begin - first, end - begin, memory, begin - start
            start += memory.numel()

    def _has_pinned(self, pieces: Sequence[Piece]) -> bool:
        """Whether all `pieces` are pinned, each in one run."""
        return bool(self._pinned_parts) and all(
            any(
                start <= piece.position and piece.position + piece.num_bytes <= end for start, end in self._pinned_parts
            )
            for piece in pieces
        )

    def _pages_of(self, pieces: Sequence[Piece]) -> list[tuple[int, int]]:
        """The whole pages around `pieces`, as ranges of `bytes` that neither overlap nor touch."""
        starts = [piece.position // PAGE * PAGE for piece in pieces]
        ends = [-(-(piece.position + piece.num_bytes) // PAGE) * PAGE for piece in pieces]
        return merged([(start, min(end, self.end)) for start, end in zip(starts, ends, strict=True)])

    def unlock(self, but: Sequence[tuple[int, int]] = ()) -> None:
        """Unpin all ranges of `bytes`, but these."""
        for blob in self.blobs:
            blob.is_pinned = False
        for found in self._pinned_parts.keys() - set(but):
            for _, lock in self._pinned_parts[found]:
                lock.release()
            del self._pinned_parts[found]

    def avoid_readahead(self) -> None:
        """Let the kernel read no more than it is asked for: the bytes beside it are read past the page cache."""
        self._advise(0, 0, "RANDOM")

    def _advise(self, start: int, num_bytes: int, advice: str) -> None:
        with suppress(OSError):
            advise(self.fd, start, num_bytes, advice)

    def is_cached(self, position: int, num_bytes: int) -> bool:
        """Whether all of these bytes are in the page cache."""
        start = position // PAGE * PAGE
        size = position + num_bytes - start
        try:
            return cached_bytes(self.bytes.data_ptr() + start, size) == size
        except OSError:
            return False

    def read(self, area: memoryview, position: int, num_bytes: int, *, direct: bool) -> bool:
        """Read bytes into `area`: byte `position` of the file lands at `position % BLOCK`.

        Args:
            area: Memory with room for the whole blocks around these bytes, aligned to blocks.
            direct: Whether bytes that are not in the page cache are read past it.

        Returns:
            Whether the bytes were read past the page cache.

        Raises:
            StorageError: the bytes cannot be read, or another program changed the file.
        """
        start = position % BLOCK
        end = start + num_bytes
        self.check()
        is_past = direct and not self.is_cached(position, num_bytes)
        read_past = self._read_direct(area, position, end) if is_past else None
        done = max(start, read_past or 0)  # it may be cut short: by a signal, or because the file ends there
        if done < end:
            self._fill(area[done:end], position + done - start)
        return read_past is not None

    def read_straight(self, target: memoryview, position: int) -> None:
        """Read bytes into `target`, through the page cache.

        Raises:
            StorageError: the bytes cannot be read, or another program changed the file.
        """
        self.check()
        self._fill(target, position)

    def holds(self, position: int, data: torch.Tensor) -> bool:
        """Whether the file holds `data` (flat uint8) from byte `position` on.

        Raises:
            StorageError: the file cannot be read, or another program changed it.
        """
        done = 0
        for chunk in self.chunks(position, data.numel()):
            found = torch.frombuffer(chunk, dtype=torch.uint8)
            if not torch.equal(found, data[done : done + len(chunk)]):
                return False
            done += len(chunk)
        return True

    def chunks(self, position: int, num_bytes: int) -> Iterator[memoryview]:
        """The bytes of the file, in chunks. Each chunk is good until the next one.

        Raises:
            StorageError: the file cannot be read.
        """
        buffer = memoryview(bytearray(min(_CHUNK_BYTES, num_bytes)))
        for start in range(0, num_bytes, _CHUNK_BYTES):
            chunk = buffer[: num_bytes - start]
            self._fill(chunk, position + start)
            yield chunk

    def check(self) -> None:
        """
        Raises:
            StorageError: another program changed the file, or it cannot be told whether one did.
        """
        try:
            now = os.fstat(self.fd)
        except OSError as error:  # a network file system whose server has gone
            raise self.lost(self.start, str(error.strerror)) from error
        was = self.stamp
        if now.st_size < was.st_size:
            raise self.lost(now.st_size, "it ends there: it was cut off")
        if state_of(now) != state_of(was):
            raise self.lost(self.start, "another program changed it after it was opened")
        if now.st_ctime_ns != was.st_ctime_ns:
            self._look_again(now)

    def named_stat(self) -> os.stat_result | None:
        """The status of the file, if its name still leads to it, unchanged."""
        with suppress(OSError):
            now = os.lstat(self.path)
            if state_of(now) == state_of(self.stamp):
                return now
        return None

    def lost(self, position: int, what: str) -> StorageError:
        return StorageError(
            f"Failed to read {self.path} at byte {position:,}: {what}. Reload the model, and don't modify checkpoint files "
            f"while they are in use."
        )

    def _pread(self, target: memoryview, position: int) -> int:
        try:
            self.bytes_cached += len(target)
            return read_part(self.fd, target, position)
        except OSError as error:
            raise self.lost(position, str(error.strerror)) from error

    def _read_direct(self, area: memoryview, position: int, num_needed: int) -> int | None:
        """How many bytes of `area` were filled; None if the file cannot be read directly."""
        direct = None if self._has_no_direct else open_direct(self.fd)
        if direct is None:
            self._has_no_direct = True
            return None
        try:
            blocks = area[: -(-num_needed // BLOCK) * BLOCK]
            return read_part(direct.fileno(), blocks, position // BLOCK * BLOCK, BLOCK)
        except OSError as error:
            if refuses_direct(error):
                warn_no_direct_io(error.errno or 0)
                self._has_no_direct = True
                return None
            raise self.lost(position, str(error.strerror)) from error

    def _fill(self, target: memoryview, position: int) -> None:
        if (done := self._pread(target, position)) < len(target):
            raise self.lost(position + done, "it ends there")

    def _look_again(self, now: os.stat_result) -> None:
        """`st_ctime_ns` changed: find out whether any byte did."""
        with self._looking:
            if now.st_ctime_ns == self.stamp.st_ctime_ns:
                return
            blobs = [*self.blobs]
            if blobs and all(blob.content for blob in blobs):
                for blob in blobs:
                    blob.prove()
            elif _status_of(now) == _status_of(self.stamp) and self.named_stat() is not None:
                raise self.lost(
                    self.start,
                    "its st_ctime says that another program may have changed it since it was opened (with "
                    "verify_checksums=True its content is compared instead)",
                )
            self.stamp = now


def state_of(found: os.stat_result) -> tuple[int, int, int, int]:
    """What differs if the content does, from file to file of a host: the file, its size, and the time of its last change."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _status_of(found: os.stat_result) -> tuple[int, int, int, int]:
    """What explains another `st_ctime_ns`, beside another name, and leaves the bytes alone."""
    return found.st_nlink, found.st_mode, found.st_uid, found.st_gid


class Proof:
    """Checks that a file still has the bytes that it had: hashes them, in the order of the pieces."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._hash = xxhash.xxh3_128()
        self._num_left = sum(piece.num_bytes for piece in contents.pieces)

    def update(self, data: memoryview) -> None:
        """Take in the next bytes. The hash of the first whole reading becomes the one that is known.

        Raises:
            StorageError: these were the last bytes, and all of them together have another hash than the known one.
        """
        self._hash.update(data)
        self._num_left -= len(data)
        if self._num_left:
            return
        found, contents = self._hash.hexdigest(), self._contents
        if contents.content is None:
            contents.content = found
        elif contents.content != found:
            raise contents.source.lost(
                contents.pieces[0].position,
                f"the content of {contents.name!r} is wrong (XXH3 {found}, not {contents.content}): another program changed "
                f"it, or the disk or memory fails",
            )
        contents.is_proven = True
