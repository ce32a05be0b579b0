"""The object that autograd holds instead of a tensor that is offloaded."""

from __future__ import annotations

import torch

from ..base.saved import check_version, describe, maker, view_of
from .stash import Stash
from .tape import Tape

_nothing: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
"""A tensor without memory, of each dtype and device."""


class PackedView:
    """A view of a stash: the pack hook returns it, the unpack hook gets it back."""

    __slots__ = ("_dtype", "_made_by", "_offset", "_probe", "_size", "_stride", "_version", "position", "stash", "tape")

    def __init__(self, tensor: torch.Tensor, stash: Stash, start: int, tape: Tape) -> None:
        """
        Args:
            start: the first byte of the tensor's storage that the stash has.
            tape: the tape of the pass. The tensor was saved at its current position.
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
            name = describe(self._probe, self._size, self._made_by)
            check_version(self._probe._version, self._version, name)

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor, as a view of the stash's bytes. It shares the version counter too: a backward may change it in place."""
        view = self._probe.detach()
        view.data = view_of(memory, self._offset, self._dtype, self._size, self._stride)
        return view
