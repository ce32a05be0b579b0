"""Which part of a storage is moved for a tensor that is saved."""

from __future__ import annotations

import torch

_ALIGNMENT = 256
"""A part of a storage begins at a multiple of this, as its memory does: some kernels round by alignment."""


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The first and last (exclusive) byte of its storage that a tensor reaches, the first one rounded down."""
    if not tensor.numel():
        return 0, 0
    first = int(tensor.storage_offset()) * tensor.itemsize
    if tensor.is_contiguous():
        return first - first % _ALIGNMENT, first + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return first // _ALIGNMENT * _ALIGNMENT, first + (int(last) + 1) * tensor.itemsize


def moved_part(tensor: torch.Tensor, min_bytes: int) -> tuple[int, int]:
    """The first and last (exclusive) byte of its storage that are moved. Nothing if the tensor reaches too few."""
    start, end = extent(tensor)
    if end - start < min_bytes:
        return 0, 0
    # A version counts the changes of the tensor that this one is a view of, not those of the whole storage: the parts that
    # `unsafe_chunk` returns (a GRU's gates) share a storage and are changed one by one, each with a counter of its own.
    if tensor._base is not None:
        counted = extent(tensor._base)
        if counted[1] - counted[0] <= 2 * (end - start):
            return counted
    return start, end


def bytes_of(tensor: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Bytes `start` to `end` of the tensor's storage, without its graph."""
    alias = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return alias.set_(tensor.untyped_storage(), start, (end - start,), (1,))
