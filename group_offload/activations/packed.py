"""What autograd holds instead of a tensor that it saves for backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import StateError
from .stash import Stash


class Kept:
    """A tensor that stays where it is. Without its graph, so that a saved output does not hold itself alive."""

    __slots__ = ("_name", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self._version = tensor._version
        self._name = _describe(tensor)

    def unpack(self) -> torch.Tensor:
        check_version(self._tensor, self._version, self._name)
        return self._tensor


class Passed:
    """A tensor that is left to the saved-tensor hooks around ours."""

    __slots__ = ("_packed", "_unpack")

    def __init__(self, packed: Any, unpack: Callable[[Any], torch.Tensor]) -> None:
        self._packed = packed
        self._unpack = unpack

    def unpack(self) -> torch.Tensor:
        return self._unpack(self._packed)


class Away:
    """A view of a stash."""

    __slots__ = ("_dtype", "_name", "_offset", "_probe", "_size", "_stride", "_version", "position", "stash")

    def __init__(self, tensor: torch.Tensor, stash: Stash, start: int, position: int) -> None:
        self.stash = stash
        self.position = position
        self._dtype = tensor.dtype
        self._size = tensor.size()
        self._stride = tensor.stride()
        self._offset = int(tensor.storage_offset()) - start // tensor.itemsize
        self._version = tensor._version
        self._name = _describe(tensor)
        # It shares the version counter of `tensor`, and none of its memory.
        self._probe = tensor.detach()
        self._probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def check(self) -> None:
        """Raise as autograd would, whose own check saved-tensor hooks switch off."""
        check_version(self._probe, self._version, self._name)

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        offset = int(memory.storage_offset()) // self._dtype.itemsize + self._offset
        view = torch.empty(0, dtype=self._dtype, device=memory.device)
        return view.set_(memory.untyped_storage(), offset, self._size, self._stride)


def check_version(tensor: torch.Tensor, expected: int, name: str) -> None:
    """
    Raises:
        StateError: the tensor was modified since it was saved.
    """
    if tensor._version != expected:
        raise StateError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: {name} is at "
            f"version {tensor._version}; expected version {expected} instead. Without activation offloading, "
            f"torch.autograd.set_detect_anomaly(True) shows the operation that saved it."
        )


def _describe(tensor: torch.Tensor) -> str:
    of = "" if tensor.grad_fn is None else f", which is an output of {tensor.grad_fn.name()}"
    return f"[{tensor.dtype} {list(tensor.shape)} on {tensor.device}]{of},"
