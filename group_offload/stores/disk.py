"""Images in files of their own: one safetensors file a group, read in full for each onload."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import stat
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from ..errors import GroupFileError
from ..layout import ImageLayout, as_bytes
from .base import Mover, Tier, memory_of
from .mapping import flat_view, map_file
from .pagemap import written_pages
from .reading import read_into
from .safetensors_file import encode_header, holds, pieces, publish

logger = logging.getLogger("group_offload")


_lock = threading.Lock()
_num_users: Counter[Path] = Counter()
"""Images of this process that rest in each file. Models with equal weights share files."""
_written_here: set[Path] = set()
"""Files that this process wrote: it may delete them once their content is out of date."""


def file_name(group_id: str) -> str:
    """The name of a group's file: diffusers' own, so that a folder of either can be told by its names."""
    return f"group_{hashlib.sha256(group_id.encode()).hexdigest()[:16]}.safetensors"


class Folder:
    """A folder of group files.

    Files are only ever added. One that is found under a group's name is used if every byte is what would be written;
    else it belongs to another model, or to other weights: it is left alone and the next name is tried.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._num_in_the_way = 0

    def report(self) -> None:
        """Say once what was found in the way since the last call."""
        if self._num_in_the_way:
            logger.warning(
                "%d files in %s have the names of groups but hold other weights (another model's, or older ones). They were "
                "left alone, and other names were used.",
                self._num_in_the_way,
                self.path,
            )
            self._num_in_the_way = 0

    def prepare(self, num_bytes: int) -> None:
        """Make the folder and check that files of `num_bytes` in all can be written, before any weight is touched.

        Raises:
            GroupFileError: it cannot be made or written to, or holds too little room.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".probe.{os.getpid()}.{os.urandom(4).hex()}.tmp"
            probe.touch(exist_ok=False)
            probe.unlink()
        except OSError as error:
            raise GroupFileError(
                f"Cannot write group files to {self.path}: {error.strerror}. Pass a folder that this user can write to as "
                f"offload_to_disk_path."
            ) from error
        present = sum(file.lstat().st_size for file in self.path.glob("group_*.safetensors"))
        free = shutil.disk_usage(self.path).free
        if num_bytes > free + present:  # files that are present may turn out to be ours
            raise GroupFileError(
                f"{self.path} has {free:,} bytes free, and the group files take {num_bytes:,}. Free some room, or pass "
                f"another folder as offload_to_disk_path. The weights were left where they are."
            )

    def find_or_write(
        self,
        group_id: str,
        layout: ImageLayout,
        tensors: Sequence[torch.Tensor],
        on_written: Callable[[int], None],
        outdated: Path | None = None,
    ) -> tuple[Path, int]:
        """A file that is proven to hold `tensors`, and a descriptor of it.

        `outdated` is a file of this group that holds other values, and is still needed until the new one is durable.

        Raises:
            GroupFileError: it cannot be written.
        """
        header = encode_header(layout, group_id)
        for attempt in range(1000):
            path = self.path / file_name(group_id if attempt == 0 else f"{group_id}@{attempt}")
            if path == outdated:
                continue
            fd = self._open_if_it_holds(path, header, layout, tensors)
            if fd is None and not os.path.lexists(path):
                fd = self._write(path, group_id, header, layout, tensors, on_written)
                if fd is not None:
                    with _lock:
                        _written_here.add(path)
                    return path, fd
                fd = self._open_if_it_holds(path, header, layout, tensors)  # another process was quicker
            if fd is not None:
                on_written(layout.num_bytes)
                return path, fd
            logger.info("%s is not what group %r rests in: left alone, another name is used.", path, group_id)
            self._num_in_the_way += 1
        raise GroupFileError(
            f"{self.path} holds 1000 files with the names of group {group_id!r}. Empty it, or pass another folder."
        )

    @staticmethod
    def _open_if_it_holds(
        path: Path, header: bytes, layout: ImageLayout, tensors: Sequence[torch.Tensor]
    ) -> int | None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would wait for a writer
        except OSError:
            return None
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode) and holds(fd, header, pieces(layout, tensors)):
                return fd
        except OSError:  # a drive that fails: not a file to rely on
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def _write(
        self,
        path: Path,
        group_id: str,
        header: bytes,
        layout: ImageLayout,
        tensors: Sequence[torch.Tensor],
        on_written: Callable[[int], None],
    ) -> int | None:
        try:
            return publish(path, header, pieces(layout, tensors), on_written)
        except OSError as error:
            raise GroupFileError(
                f"Cannot write group {group_id!r} ({len(header) + layout.num_bytes:,} bytes) to {path}: {error.strerror}. "
                f"Free some room or pass another folder as offload_to_disk_path. The weights are still in RAM."
            ) from error


def _leave(path: Path) -> None:
    with _lock:
        _num_users[path] -= 1


def _delete_if_unused(path: Path) -> None:
    with _lock:
        if _num_users[path] > 0 or path not in _written_here:
            return
        _written_here.discard(path)
    with contextlib.suppress(OSError):
        path.unlink()


class FileImage:
    """An image in a group file.

    At rest the tensors are views of a private mapping of the file: they take no RAM until they are read, and an edit
    lands in pages of its own. The way to the device reads with `preadv`, never through the mapping: a file that was
    cut off then raises an error instead of a SIGBUS. A file that was deleted, or replaced by one of the same name, is
    still held by the mapping: only then it is read from there.
    """

    tier = Tier.FILE
    pinned_bytes = 0
    is_stable = True
    is_outdated = False

    def __init__(
        self,
        layout: ImageLayout,
        tensors: Sequence[torch.Tensor],
        folder: Folder,
        group_id: str,
        on_written: Callable[[int], None],
    ) -> None:
        self.layout = layout
        self.generation = 0
        self._folder = folder
        self._group_id = group_id
        self._adopt(tensors, on_written)

    @property
    def store(self) -> FileImage:
        return self  # a file holds one image

    def take_up_edits(self, wait: Callable[[], None]) -> bool:
        """Put what was written into `rest` into a new file. Nothing reads the old one: its bytes are staged when sent.

        Raises:
            GroupFileError: it cannot be written (the edits stay in RAM, nothing is lost), or somebody changed the file.
        """
        is_there = self._same_file()
        if not self._was_edited():
            return False
        path, leave = self.path, self._leave
        self._adopt(self.rest, lambda num_bytes: None, outdated=path)  # the edited pages go with the old `rest`
        self.generation += 1
        leave()
        if is_there:
            _delete_if_unused(path)
        return True

    def write(self, index: int, value: torch.Tensor) -> bool:
        with torch.inference_mode(False), torch.no_grad():
            as_bytes(self.rest[index]).copy_(value)
        return True

    def send(self, mover: Mover, at: int) -> None:
        if not self._same_file():
            mover.stage(at, self.layout.num_bytes, self._fill_from_mapping)
            return
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._lost(f"opening it failed: {error.strerror}") from error
        try:
            mover.stage(at, self.layout.num_bytes, partial(self._fill, fd))
        finally:
            os.close(fd)

    def close(self, *, forget: bool) -> None:
        self._leave()
        if not forget:
            with _lock:
                _written_here.discard(self.path)  # it stays, for whoever comes next
            return
        with contextlib.suppress(GroupFileError):
            if self._same_file():
                _delete_if_unused(self.path)

    def check(self) -> None:
        self._same_file()

    @property
    def where(self) -> str:
        return self.path.name

    def _adopt(
        self, tensors: Sequence[torch.Tensor], on_written: Callable[[int], None], outdated: Path | None = None
    ) -> None:
        self.path, fd = self._folder.find_or_write(self._group_id, self.layout, tensors, on_written, outdated)
        try:
            self._stamp = os.fstat(fd)
            self._data_start = self._stamp.st_size - self.layout.num_bytes
            self._mapping = map_file(fd, self._stamp.st_size)
        finally:
            os.close(fd)
        with _lock:
            _num_users[self.path] += 1
        self._leave: Callable[[], object] = weakref.finalize(self, _leave, self.path)
        self.rest = self.layout.views_by_extent(
            lambda extent: flat_view(self._mapping, self._data_start + extent.offset, extent.num_bytes)
        )

    def _fill(self, fd: int, chunk: torch.Tensor, start: int) -> None:
        try:
            count = read_into(fd, memory_of(chunk), self._data_start + start)
        except OSError as error:
            raise self._lost(f"reading at byte {start:,} failed: {error.strerror}") from error
        if count < chunk.numel():
            raise self._lost(f"it ends at byte {start + count:,} of {self.layout.num_bytes:,}")

    def _fill_from_mapping(self, chunk: torch.Tensor, start: int) -> None:
        chunk.copy_(flat_view(self._mapping, self._data_start + start, chunk.numel()))

    def _was_edited(self) -> bool:
        whole = flat_view(self._mapping, 0, self._stamp.st_size)
        ranges = written_pages(whole.data_ptr(), whole.numel())
        if ranges is not None:
            return bool(ranges)
        # The system does not tell which pages were written: compare. Slow, and right.
        fd = self._folder._open_if_it_holds(
            self.path, encode_header(self.layout, self._group_id), self.layout, self.rest
        )
        if fd is not None:
            os.close(fd)
        return fd is None

    def _same_file(self) -> bool:
        """Whether the name still leads to the file that was opened."""
        try:
            now = self.path.stat()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._lost(str(error.strerror)) from error
        if (now.st_dev, now.st_ino) != (self._stamp.st_dev, self._stamp.st_ino):
            return False
        if (now.st_size, now.st_mtime_ns) != (self._stamp.st_size, self._stamp.st_mtime_ns):
            raise self._lost("another program changed it after it was written")
        return True

    def _lost(self, what: str) -> GroupFileError:
        return GroupFileError(
            f"Cannot read group {self._group_id!r} from {self.path}: {what}. Its weights cannot be had from there any more: "
            f"load the model again, and keep other programs out of this folder."
        )
