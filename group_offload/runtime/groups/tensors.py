"""Questions about tensors that are bound to other memory again and again: version, form, and whether views are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import attrgetter, eq
from typing import Any

import torch

from ...base.layout import num_uses
from ...base.torch_internals import TensorGuards

_FORMS: tuple[Callable[[torch.Tensor], Any], ...] = (torch.Tensor.size, torch.Tensor.stride, attrgetter("dtype"))


def is_kept(view: torch.Tensor, num_ours: int) -> bool:
    """Whether there are tensors of the storage of `view` beside ours, which are `num_ours`.

    A view keeps the tensor that it is a view of, which is one more.
    """
    return num_uses(view) > num_ours + view._is_view()


def fit_for(tensor: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """A tensor like `view` that `tensor.data` can be set to: an inference tensor if `tensor` was made in inference mode.

    An inference tensor never has a version counter. Bound to a normal tensor it would be neither kind, and most kernels
    would refuse it.
    """
    if tracks_version(tensor):
        return view
    with torch.inference_mode():
        alias = torch.empty(0, dtype=view.dtype, device=view.device)
        return alias.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())


def tracks_version(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a version counter: not if it was made in inference mode.

    `is_inference` would tell about the memory that the tensor is bound to now.
    """
    return version_of(tensor) >= 0


def version_of(tensor: torch.Tensor) -> int:
    """The version of a tensor; -1 if it has none."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


def same_form(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and strides."""
    return tensor.dtype == view.dtype and tensor.shape == view.shape and tensor.stride() == view.stride()


def same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of the same form have the same bits. (As numbers, 0.0 is -0.0, and NaN is not NaN.)"""
    first, second = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (tensor, other))
    return torch.equal(first, second)


def same_memory(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether two tensors have the same form and begin at the same address."""
    return tensor.data_ptr() == view.data_ptr() and same_form(tensor, view)


class Forms:
    """Sizes, strides and dtypes of tensors.

    Every weight is checked when a pass begins, while the device has nothing to do. The guards of torch's compiler compare
    all of them in one call. Where they find another difference, each tensor is compared alone.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._known = [list(map(form, tensors)) for form in _FORMS]
        self._guards: Any = None

    def are_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether `tensors`, as many, have these forms."""
        if self._guards is not None and self._guards.check(*tensors):
            return True
        if not all(all(map(eq, map(form, tensors), known)) for form, known in zip(_FORMS, self._known, strict=True)):
            return False
        # Guards compare more, such as `requires_grad` and modes of torch. They are made again for the present state.
        self._guards = None
        if tensors:
            with suppress(TypeError, RuntimeError):  # another version of torch, or a tensor that guards do not support
                self._guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        return True
