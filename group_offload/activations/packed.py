"""The object that autograd holds in place of an offloaded tensor, and which bytes of its storage the tensor needs."""

from __future__ import annotations

import torch

from ..base.saved import check_version, describe, maker, view_of
from .offloader import Stash
from .tape import Tape

_ALIGNMENT = 256
"""A part of a storage begins at a multiple of this, like the memory that it comes back to: some kernels round by alignment."""

_nothing: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
"""A tensor without memory, for each dtype and device."""


class PackedView:
    """A view of a stash: the pack hook returns it, the unpack hook gets it back."""

    __slots__ = ("_dtype", "_made_by", "_offset", "_probe", "_size", "_stride", "_version", "position", "stash", "tape")

    def __init__(self, tensor: torch.Tensor, stash: Stash, start: int, tape: Tape) -> None:
        """
        Args:
            start: The first byte of the tensor's storage that the stash has.
            tape: The tape of the forward. The tensor was saved at its current position.
        """
        self.stash = stash
        self.tape = tape
        self.position = tape.position
        self._dtype = tensor.dtype
        self._size = tensor.size()
        self._stride = tensor.stride()
        self._offset = int(tensor.storage_offset()) * tensor.itemsize - start
        self._version = tensor._version
        self._made_by = maker(tensor)
        # The probe shares the version counter of `tensor`, and none of its memory.
        kind = self._dtype, tensor.device
        nothing = _nothing.get(kind)
        if nothing is None:
            with torch.inference_mode(False):
                nothing = _nothing[kind] = torch.empty(0, dtype=kind[0], device=kind[1])
        self._probe = tensor.detach()
        self._probe.data = nothing

    def check(self) -> None:
        """
        Raises:
            StateError: the tensor was modified since it was saved.
        """
        if self._probe._version != self._version:
            check_version(self._probe._version, self._version, describe(self._probe, self._size, self._made_by))

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor, as a view of the stash's bytes. It shares the version counter too: a backward may change it in place."""
        view = self._probe.detach()
        view.data = view_of(memory, self._offset, self._dtype, self._size, self._stride)
        return view


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The first and last (exclusive) byte of its storage that a tensor reaches, the first one rounded down."""
    if not tensor.numel():
        return 0, 0
    first = int(tensor.storage_offset()) * tensor.itemsize
    if tensor.is_contiguous():
        return first - first % _ALIGNMENT, first + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return first - first % _ALIGNMENT, first + (int(last) + 1) * tensor.itemsize


def needed_part(tensor: torch.Tensor, min_bytes: int) -> tuple[int, int]:
    """The first and last (exclusive) byte of its storage to move for a tensor: none if it reaches less than `min_bytes`."""
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
