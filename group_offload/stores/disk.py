"""Images in files of their own: one safetensors file a group, read in full for each onload."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from ..errors import GroupFileError
from ..layout import ImageLayout, as_bytes
from .base import Mover, Tier, memory_of
from .folder import Folder, delete_if_unused, keep, leave, use
from .mapping import flat_view, map_file
from .pagemap import written_pages
from .reading import read_into
from .safetensors_file import encode_header


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
        path, leave_it = self.path, self._leave
        self._adopt(self.rest, lambda num_bytes: None, outdated=path)  # the edited pages go with the old `rest`
        self.generation += 1
        leave_it()
        if is_there:
            delete_if_unused(path)
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
            keep(self.path)
            return
        with contextlib.suppress(GroupFileError):
            if self._same_file():
                delete_if_unused(self.path)

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
        use(self.path)
        self._leave: Callable[[], object] = weakref.finalize(self, leave, self.path)
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
