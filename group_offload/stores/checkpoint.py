"""Which bytes of which file a tensor is a view of, or was before it was edited."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from ..base.layout import BlobLayout, as_bytes, span_bytes
from ..base.mapping import FileMapping, FileMappings, flat_view, is_cut_off, map_file
from ..base.pagemap import PAGE, can_detect_writes, written_pages
from ..base.system import open_to_read
from ..errors import GroupFileError
from .source import SourceFile


@dataclass(frozen=True, slots=True)
class FileSpan:
    """The bytes of a file that a tensor is a view of."""

    path: str
    identity: tuple[str, int]
    """The file, as the kernel shows it: see `FileMapping`."""
    position: int
    num_bytes: int


class FileMap:
    """Finds tensors that are unchanged views of files, by the mappings that there were when it was made."""

    def __init__(self) -> None:
        self._can_detect_writes = can_detect_writes()
        self._mappings: FileMappings | None = None
        with suppress(OSError):  # this system does not tell
            self._mappings = FileMappings()

    def find(self, tensor: torch.Tensor) -> FileSpan | None:
        """The bytes that `tensor` is an unchanged view of; None for a tensor that is no view of a file, or was edited."""
        mapping = self._mapping_of(tensor)
        if mapping is None or not mapping.is_private or not self._can_detect_writes:
            return None
        address, num_bytes = tensor.data_ptr(), span_bytes(tensor)
        first = address // PAGE * PAGE
        if written_pages(first, address + num_bytes - first) != []:
            return None
        return FileSpan(mapping.path, mapping.identity, mapping.file_offset + address - mapping.start, num_bytes)

    def check(self, fqn: str, tensor: torch.Tensor) -> None:
        """
        Raises:
            GroupFileError: `tensor` is a view of a file that was cut off: reading it would end the process (SIGBUS).
        """
        mapping = self._mapping_of(tensor)
        if mapping is not None and is_cut_off(tensor.data_ptr() + span_bytes(tensor) - 1):
            raise GroupFileError(
                f"{mapping.path} was cut off after {fqn!r} was loaded from it: that weight cannot be read any more. Load the "
                f"model again, and keep other programs from changing the file."
            )

    def _mapping_of(self, tensor: torch.Tensor) -> FileMapping | None:
        num_bytes = span_bytes(tensor)
        if not num_bytes or tensor.device.type != "cpu" or self._mappings is None:
            return None
        mapping = self._mappings.at(tensor.data_ptr())
        return mapping if mapping is not None and tensor.data_ptr() + num_bytes <= mapping.end else None


class Place(NamedTuple):
    """Bytes of a checkpoint."""

    path: Path
    content: tuple[int, int, int, int]
    """That of its `SourceFile`: another file under the same name is not trusted."""
    position: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Origin:
    """The bytes of checkpoints that tensors of a blob were views of, before they were edited.

    They return there once they have these bytes again (a LoRA that was unfused).
    """

    places: Mapping[int, Place]
    """By the index of the tensor in the blob."""

    def views(self, layout: BlobLayout, rest: Sequence[torch.Tensor]) -> dict[int, torch.Tensor] | None:
        """New views of the checkpoints for these tensors, if the bytes of all of them are there now."""
        found: dict[int, torch.Tensor] = {}
        for path in dict.fromkeys(place.path for place in self.places.values()):
            mine = {index: place for index, place in self.places.items() if place.path == path}
            start = min(place.position for place in mine.values())
            start -= start % mmap.ALLOCATIONGRANULARITY
            end = max(place.position + place.num_bytes for place in mine.values())
            with ExitStack() as stack:
                try:
                    stack.callback(os.close, fd := open_to_read(path))
                    source = SourceFile(path, fd, start, end)
                    # The largest first: a LoRA is not for norms, and one difference is enough.
                    for index, place in sorted(mine.items(), key=lambda item: -item[1].num_bytes):
                        if place.content != source.content or place.num_bytes != span_bytes(rest[index]):
                            return None
                        if not source.holds(place.position, as_bytes(rest[index])):
                            return None
                    mapping = map_file(fd, end - start, start)
                    source.check()
                except OSError:  # GroupFileError too: it is gone, or somebody changes it
                    return None
            with torch.inference_mode(False), torch.no_grad():
                for index, place in mine.items():
                    spec = layout.specs[index]
                    found[index] = spec.view(flat_view(mapping, place.position - start, place.num_bytes), spec.offset)
        return found
