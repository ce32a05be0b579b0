"""The objects that our saved-tensor hooks give autograd instead of a tensor, where the tensor is not offloaded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils.checkpoint import CheckpointFunction

from ..errors import StateError
from . import selective
from .torch_internals import set_eval_frame, top_saved_tensors_hooks

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]
P = ParamSpec("P")
T = TypeVar("T")
_FIRST_RUN = CheckpointFunction.forward.__code__


def hooks_in_force() -> tuple[Pack, Unpack] | None:
    """The saved-tensor hooks that were pushed last in this thread, the only ones that autograd calls."""
    found: tuple[Pack, Unpack] | None = top_saved_tensors_hooks(True)
    return found


class Kept:
    """A tensor that stays where it is. Without its graph, so that a saved output does not hold itself alive."""

    __slots__ = ("_made_by", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._made_by = maker(tensor)
        self._tensor = tensor if self._made_by is None else tensor.detach()
        self._version = tensor._version

    def unpack(self) -> torch.Tensor:
        tensor = self._tensor
        if tensor._version != self._version:
            check_version(tensor._version, self._version, describe(tensor, tensor.size(), self._made_by))
        return tensor


class Passed:
    """A tensor that other functions save: the saved-tensor hooks below ours, or those that take it apart."""

    __slots__ = ("_packed", "_unpack")

    def __init__(self, packed: Any, unpack: Unpack) -> None:
        self._packed = packed
        self._unpack = unpack

    def unpack(self) -> torch.Tensor:
        return self._unpack(self._packed)


def keep(tensor: torch.Tensor, below: tuple[Pack, Unpack] | None) -> Kept | Passed:
    """The object to hold for a tensor that is not offloaded: the result of the hooks below, if there are any."""
    if below is None:
        return Kept(tensor)
    pack, unpack = below
    return Passed(pack(tensor), unpack)


def check_version(actual: int, expected: int, name: str) -> None:
    """Check what autograd itself would check. Saved-tensor hooks switch its check off.

    Raises:
        StateError: the tensor was modified since it was saved.
    """
    if actual != expected:
        raise StateError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: {name} is at "
            f"version {actual}; expected version {expected} instead. Without offloading, "
            f"torch.autograd.set_detect_anomaly(True) shows the operation that saved it."
        )


def maker(tensor: torch.Tensor) -> str | None:
    """The name of the operation whose output a tensor is, for `describe`."""
    return None if tensor.grad_fn is None else tensor.grad_fn.name()


def describe(like: torch.Tensor, size: torch.Size, made_by: str | None) -> str:
    """A tensor of that size, and otherwise like `like`, as autograd's own errors call it."""
    of = "" if made_by is None else f", which is an output of {made_by}"
    return f"[{like.dtype} {list(size)} on {like.device}]{of},"


def first_of_two_runs() -> Any:
    """The node of the reentrant checkpoint that runs this code without gradients, and in backward once more with gradients.

    None if there is none.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _FIRST_RUN:
            return frame.f_locals["ctx"]
        frame = frame.f_back
    return None


def view_of(
    memory: torch.Tensor, num_bytes: int, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    """A tensor that begins `num_bytes` after `memory` (uint8) does."""
    view = torch.empty(0, dtype=dtype, device=memory.device)
    start = (int(memory.storage_offset()) + num_bytes) // dtype.itemsize
    return view.set_(memory.untyped_storage(), start, size, stride)


def unwatched(work: Callable[P, T]) -> Callable[P, T]:
    """The same work, seen by no compiler and by no selective checkpoint. See [Note: Selective checkpoints]."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_dynamo_compiling():
            torch._dynamo.skip_frame("group_offload has saved-tensor hooks here")
            return work(*args, **kwargs)
        compiler = set_eval_frame(None)
        modes = selective.hide()
        try:
            return work(*args, **kwargs)
        finally:
            if modes:
                selective.show(modes)
            set_eval_frame(compiler)

    return call
