"""Which bytes of which file a tensor is a view of."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch

from ..base.layout import span_bytes
from ..base.mapping import FileMapping, FileMappings, is_cut_off
from ..base.pagemap import PAGE, can_detect_writes, written_pages
from ..errors import GroupFileError


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
