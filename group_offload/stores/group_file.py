"""Blobs in group files: one safetensors file a group, in a folder of ours. They are checkpoints that this package wrote."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence

import torch

from ..base.layout import BlobLayout
from ..base.mapping import flat_view, map_file
from ..errors import GroupFileError
from .files import Checkpoint, FileBlob
from .folder import Folder
from .source import Piece


def write_blob(
    layout: BlobLayout,
    tensors: Sequence[torch.Tensor],
    folder: Folder,
    group_id: str,
    on_written: Callable[[int], None],
) -> FileBlob:
    """A blob in a file of its own, which is written unless the folder has it.

    Raises:
        GroupFileError: the file cannot be written, or mapped.
    """
    found = folder.find_or_write(group_id, layout, tensors, on_written)
    size = found.stamp.st_size
    start = size - layout.num_bytes
    try:
        source = Checkpoint(found.path, found.fd, start, size, found.stamp)
        rest = layout.views_by_extent(lambda extent: _map(found.fd, start + extent.offset, extent.num_bytes))
    except OSError as error:
        raise GroupFileError(
            f"Cannot map {found.path} ({size:,} bytes), which group {group_id!r} rests in: {error.strerror or error}. A "
            f"limit of address space (ulimit -v) has to leave room for all weights twice."
        ) from error
    finally:
        os.close(found.fd)
    source.is_ours = True
    pieces = [Piece(0, start, layout.num_bytes)] if layout.num_bytes else []
    blob = FileBlob(layout, pieces, rest, [start + spec.offset for spec in layout.specs], source)
    blob.content = found.content
    return blob


def _map(fd: int, position: int, num_bytes: int) -> torch.Tensor:
    """Bytes of the file in a mapping of their own: pages that were edited are freed once the weight is in RAM."""
    if not num_bytes:
        return flat_view(b"", 0, 0)
    first = position // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    return flat_view(map_file(fd, position + num_bytes - first, first), position - first, num_bytes)
