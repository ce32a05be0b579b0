"""Blobs in files of their own: one safetensors file a group, in a folder of group files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..base.layout import BlobLayout, as_bytes
from ..base.mapping import flat_view, forget_writes, map_file
from ..base.pagemap import NO_LOOKS, Looks, written_pages
from ..errors import GroupFileError
from .base import belongs_to_checkpoints
from .files import FileBlob
from .folder import Folder, add_user, delete_if_unused, never_delete, remove_user
from .source import Piece, SourceFile


class GroupFile(FileBlob):
    """A blob in a file of its own, in a folder of group files."""

    def __init__(
        self,
        layout: BlobLayout,
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
        return self  # each file holds one blob

    @property
    def where(self) -> str:
        return self.path.name

    @property
    def commits_late(self) -> bool:
        return False

    def rest_mappings(self) -> Sequence[tuple[int, int]]:
        return [(self._whole.data_ptr(), self.entry.num_bytes)] if self.entry.num_bytes else []

    def commit_edits(self, wait: Callable[[], None], looks: Looks = NO_LOOKS) -> bool:
        """Write edited weights into a new file.

        Copies and reads of the old file may be on their way. Its source serves them until they are done.

        Raises:
            GroupFileError: the new file cannot be written (the edits stay in RAM, nothing is lost), or another program changed
                the old one.
        """
        self.source.check()
        if not self._was_edited(looks):
            return False
        if belongs_to_checkpoints(self):
            self.is_outdated = True
            return True
        path, source = self.path, self.source
        is_there = source.has_name(path)
        self._adopt(self.rest, lambda num_bytes: None, outdated=path)  # the edited pages go with the old `rest`
        self.generation += 1
        remove_user(path, self)
        # The source is closed with the last read that is on its way, whose bytes are not used any more.
        source.unlock()
        source.is_adrift = True
        if is_there:
            self._folder.discard(path)
        return True

    def write(self, index: int, value: torch.Tensor) -> bool:
        with torch.inference_mode(False), torch.no_grad():
            as_bytes(self.rest[index]).copy_(value)
        return True

    def close(self, *, forget: bool) -> None:
        remove_user(self.path, self)
        is_there = self.source.has_name(self.path)
        self.source.release()
        if not forget:
            never_delete(self.path)
        elif is_there:
            delete_if_unused(self.path)

    def _adopt(
        self, tensors: Sequence[torch.Tensor], on_written: Callable[[int], None], outdated: Path | None = None
    ) -> None:
        found = self._folder.find_or_write(self._group_id, self.layout, tensors, on_written, outdated)
        size = found.entry.num_bytes
        start = size - self.layout.num_bytes
        try:
            source = SourceFile(found.path, found.fd, start, size, found.stamp)
            mapping = map_file(found.fd, size)
        except OSError as error:
            raise GroupFileError(
                f"Cannot map {found.path} ({size:,} bytes), which group {self._group_id!r} rests in: "
                f"{error.strerror or error}. A limit of address space (ulimit -v) has to leave room for all weights twice."
            ) from error
        finally:
            os.close(found.fd)
        source.blobs.add(self)
        pieces = [Piece(0, start, self.layout.num_bytes)] if self.layout.num_bytes else []
        rest = self.layout.views_by_extent(lambda extent: flat_view(mapping, start + extent.offset, extent.num_bytes))
        add_user(found.path, self)
        # In one step: an interrupt in between would leave weights in a mapping whose edits are not noticed.
        self.source, self._mapping, self.pieces, self.rest = source, mapping, pieces, rest
        self.path, self.entry, self.content = found.path, found.entry, found.entry.content

    @property
    def _whole(self) -> torch.Tensor:
        return flat_view(self._mapping, 0, self.entry.num_bytes)

    def _was_edited(self, looks: Looks) -> bool:
        size, whole = self.entry.num_bytes, self._whole
        written = written_pages(whole.data_ptr(), size, looks)
        if written == []:
            return False
        # Bytes are compared: locked pages count as written too, and where the system does not tell any page may be written.
        first = self.source.start
        ranges = [(max(low, first), min(high, size)) for low, high in written or [(0, size)]]
        if all(self.source.holds(low, whole[low:high]) for low, high in ranges if low < high):
            for low, high in written or ():
                forget_writes(whole.data_ptr() + low, high - low)
            return False
        if self.is_verified:
            self.prove()  # damage would become a part of the edited weights
        return True
