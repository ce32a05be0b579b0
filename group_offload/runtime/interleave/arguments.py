"""The arguments of one call, as later calls are compared with them: no tensor is kept alive by that, but small ones."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from ...base.arena import retried
from ...base.torch_internals import tree_flatten, tree_unflatten
from .fingerprint import SIMPLE, are_alike

_SMALL = 32
"""The most elements of a tensor that is compared by its values, and kept for that."""


class _Argument:
    """A tensor, or a plain value."""

    __slots__ = ("_kept", "_reference", "has_values", "is_tensor", "key", "version")

    def __init__(self, value: Any, *, is_top: bool) -> None:
        self.is_tensor = isinstance(value, torch.Tensor)
        self._reference: weakref.ref[torch.Tensor] | None = None
        self._kept: Any = value
        self.has_values = False
        """Whether a tensor is kept, so that another one may be compared with it by value."""
        self.version: int | None = None
        """How often a tensor was changed in place; None for a plain value, or if nobody counts that."""
        if self.is_tensor:
            self.version = None if value.is_inference() else value._version
            self.key: Any = (tuple(value.shape), value.dtype, value.device)
            self._reference = weakref.ref(value)
            self.has_values = value.numel() <= _SMALL and is_plain(value)
            self._kept = value if self.has_values else None
        else:
            # A number that a call is given may be the time, another one in each step.
            self.key = type(value) if is_top and type(value) in (int, float) else (type(value), value)

    @property
    def value(self) -> Any:
        """The argument; None if it was a tensor that is gone."""
        return self._kept if self._reference is None else self._reference()

    @property
    def is_uncounted(self) -> bool:
        return self.is_tensor and self.version is None

    def is_still(self) -> bool:
        """Whether the argument is there, and was not changed in place since. False if nobody counts that."""
        value = self.value
        return not self.is_tensor or not (value is None or self.version is None or value._version != self.version)

    def is_same(self, other: _Argument) -> bool:
        """Whether this argument is that of an earlier call: the same object, unchanged, or a kept tensor's equal."""
        if self.is_tensor != other.is_tensor or self.key != other.key:
            return False
        mine, theirs = self.value, other.value
        if not self.is_tensor:
            return repr(mine) == repr(theirs)  # 0.0 is not -0.0
        if not (self.is_still() and other.is_still()):
            return False
        if mine is theirs:
            return self.version == other.version
        is_alike = type(mine) is type(theirs) and mine.requires_grad == theirs.requires_grad
        return other.has_values and is_alike and are_equal([mine], [theirs]) and mine.stride() == theirs.stride()


class Arguments:
    """The arguments of one call of a model."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        leaves, self._form = tree_flatten((args, kwargs))
        top = {id(each) for each in (*args, *kwargs.values())}
        others = (each for each in leaves if not isinstance(each, torch.Tensor) and type(each) not in SIMPLE)
        self.other = next(others, None)
        """An object that is neither a tensor nor a plain value: it may have a state of any kind."""
        self._leaves = [] if self.other is not None else [_Argument(each, is_top=id(each) in top) for each in leaves]
        self.shared: list[bool] = []
        """For each argument, whether it is the same as in the first call of the step: see `relate`."""
        self._first = next((at for at, leaf in enumerate(self._leaves) if leaf.is_tensor), None)

    @property
    def key(self) -> Hashable:
        """What calls have in common that take the same way through a model."""
        return str(self._form), *(leaf.key for leaf in self._leaves)

    @property
    def shapes(self) -> tuple[Any, ...]:
        return tuple(leaf.key[:2] for leaf in self._leaves if leaf.is_tensor)

    @property
    def are_counted(self) -> bool:
        """Whether torch counts changes of all tensors."""
        return not any(leaf.is_uncounted for leaf in self._leaves)

    def keep(self, kept: list[Any]) -> Arguments:
        """Keep the tensors in a list, for as long as they are in it, and let later ones of equal values pass for them."""
        for leaf in self._leaves:
            if leaf.is_tensor and not leaf.has_values and leaf.value is not None:
                kept.append(leaf.value)
                leaf.has_values = True
        return self

    def are_unchanged(self, args: Any, kwargs: Any) -> bool:
        """Whether nothing was changed since the call began: no tensor in place, nor which things containers have."""
        leaves, form = tree_flatten((args, kwargs))
        return form == self._form and all(
            (leaf.is_uncounted or leaf.is_still()) and are_alike(leaf.value, now)
            for leaf, now in zip(self._leaves, leaves, strict=True)
        )

    def given(self) -> tuple[Any, Any] | None:
        """The positional arguments and those by name; None if tensors are gone, or something was changed."""
        if not all(leaf.is_still() for leaf in self._leaves):
            return None
        args, kwargs = tree_unflatten([leaf.value for leaf in self._leaves], self._form)
        return args, kwargs

    def is_of_same_step(self, other: Arguments) -> bool:
        """Whether another call of the same step had these latents: the first tensor is the same object, and unchanged."""
        if self._first is None or self._first != other._first or self._form != other._form:
            return False
        mine, theirs = self._leaves[self._first], other._leaves[self._first]
        return mine.value is theirs.value is not None and mine.version == theirs.version is not None

    def are_same(self, other: Arguments) -> bool:
        return self._form == other._form and all(
            mine.is_same(theirs) for mine, theirs in zip(self._leaves, other._leaves, strict=True)
        )

    def relate(self, first: Arguments) -> None:
        """Note which arguments are the same as in the first call of the step. Later the latents are gone."""
        if self._form == first._form:
            self.shared = [mine.is_same(before) for mine, before in zip(self._leaves, first._leaves, strict=True)]

    def predict(self, now: Arguments) -> Arguments | None:
        """The arguments of this call in the next step, which begins with `now`.

        What was the same in the first call of this step is taken from `now`, and what was not is to come again.
        """
        if self._form != now._form or now._first is None or not (self.shared and self.shared[now._first]):
            return None
        predicted = Arguments.__new__(Arguments)
        predicted._form, predicted._first = self._form, self._first
        predicted.shared, predicted.other = self.shared, None
        pairs = zip(self.shared, self._leaves, now._leaves, strict=True)
        predicted._leaves = [current if is_shared else mine for is_shared, mine, current in pairs]
        return predicted if all(leaf.is_still() for leaf in predicted._leaves) else None


def are_equal(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether tensors are equal bit for bit."""
    if len(one) != len(other):
        return False
    for a, b in zip(one, other, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device or not (is_plain(a) and is_plain(b)):
            return False
        if not torch.equal(_bytes_of(a), _bytes_of(b)):
            return False
    return True


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a tensor are all that there is to it."""
    is_lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested or is_lazy)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    flat = retried(tensor.device, tensor.detach().contiguous, tensor.nbytes).view(-1)
    if flat.stride(0) != 1:  # one element, expanded: that is contiguous too, but has no view as bytes
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)
