"""Whether tensors still have the sizes, strides and dtypes that they had.

Every weight is checked when a pass begins, while the device has nothing to do. The guards of torch's compiler compare
all of them in one call. Where they find another difference, each tensor is compared alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, eq
from typing import Any

import torch

from ...base.torch_internals import TensorGuards

_FORMS: tuple[Callable[[torch.Tensor], Any], ...] = (torch.Tensor.size, torch.Tensor.stride, attrgetter("dtype"))


class Forms:
    """Sizes, strides and dtypes of tensors."""

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
        self._guards = _guards_for(tensors)
        return True


def _guards_for(tensors: Sequence[torch.Tensor]) -> Any:
    if not tensors:
        return None
    try:
        return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    except (TypeError, RuntimeError):  # another version of torch, or a kind of tensor that guards do not support
        return None
