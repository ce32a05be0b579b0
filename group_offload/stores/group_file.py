"""Images in files of their own: one safetensors file a group, in a folder of group files."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from ..errors import GroupFileError
from ..layout import ImageLayout, as_bytes
from .files import FileImage, Piece, SourceFile
from .folder import Folder, delete_if_unused, keep, leave, use
from .mapping import flat_view, map_file
from .pagemap import written_pages


class GroupFile(FileImage):
    """An image in a file of its own, in a folder of group files."""

    def __init__(
        self,
        layout: ImageLayout,
        tensors: Sequence[torch.Tensor],
        folder: Folder,
        group_id: str,
        on_written: Callable[[int], None],
    ) -> None:
        super().__init__(layout)
        self._group_id = group_id
        self._folder = folder
        self._adopt(tensors, on_written)

    @property
    def store(self) -> GroupFile:
        return self  # a file holds one image

    @property
    def where(self) -> str:
        return self.path.name

    def take_up_edits(self, wait: Callable[[], None]) -> bool:
        """Put what was written into `rest` into a new file.

        Copies of the old one, and reads, may be on their way: its source serves them until they are done.

        Raises:
            GroupFileError: it cannot be written (the edits stay in RAM, nothing is lost), or somebody changed the file.
        """
        is_there = self.source.check()
        if not self._was_edited():
            return False
        path, leave_it, source = self.path, self._leave, self.source
        self._adopt(self.rest, lambda num_bytes: None, outdated=path)  # the edited pages go with the old `rest`
        self.generation += 1
        leave_it()
        source.release()
        if is_there:
            delete_if_unused(path)
        return True

    def write(self, index: int, value: torch.Tensor) -> bool:
        with torch.inference_mode(False), torch.no_grad():
            as_bytes(self.rest[index]).copy_(value)
        return True

    def close(self, *, forget: bool) -> None:
        self._leave()
        self.source.release()
        if not forget:
            keep(self.path)
            return
        with suppress(GroupFileError):
            if self.source.check():
                delete_if_unused(self.path)

    def _adopt(
        self, tensors: Sequence[torch.Tensor], on_written: Callable[[int], None], outdated: Path | None = None
    ) -> None:
        found = self._folder.find_or_write(self._group_id, self.layout, tensors, on_written, outdated)
        fd = found.fd
        try:
            size = os.fstat(fd).st_size
            start = size - self.layout.num_bytes
            self.source = SourceFile(found.path, fd, start, size, keeps_open=False)
            self._mapping = map_file(fd, size)
            self._size = size
        finally:
            os.close(fd)
        self.pieces = [Piece(0, start, self.layout.num_bytes)] if self.layout.num_bytes else []
        self.path, self.entry, self.content = found.path, found.entry, found.entry.content
        use(self.path)
        self._leave: Callable[[], object] = weakref.finalize(self, leave, self.path)
        self.rest = self.layout.views_by_extent(
            lambda extent: flat_view(self._mapping, start + extent.offset, extent.num_bytes)
        )

    def _was_edited(self) -> bool:
        whole = flat_view(self._mapping, 0, self._size)
        ranges = written_pages(whole.data_ptr(), whole.numel())
        if ranges is not None:
            return bool(ranges)
        # The system does not tell which pages were written: compare. Slow, and right.
        fd = self._folder.open_if_it_holds(self.path, self._group_id, self.layout, self.rest)
        if fd is not None:
            os.close(fd)
        return fd is None
