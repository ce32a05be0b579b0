"""What is in an object: whether it has changed since, and whether that can be told."""

from __future__ import annotations

import array
import logging
import random
import re
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from datetime import date, timedelta
from enum import Enum
from functools import partial
from itertools import chain
from numbers import Number
from operator import is_
from pathlib import PurePath
from typing import Any

import torch
import xxhash
from torch import nn

from ...base.compiled import Around
from ...base.torch_internals import OPERATORS

SIMPLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_VALUES: tuple[Any, ...] = (int, float, complex, str, bytes)
_CONTAINERS = (list, tuple, dict)
_DEPTH = 4
"""How far a look goes into objects, and into the arguments of calls."""
_MOST_OBJECTS = 100_000
"""How many objects a look goes through."""
_FIXED = (
    type,
    types.BuiltinFunctionType,
    types.FunctionType,
    types.GenericAlias,
    types.UnionType,
    type(...),
    type(NotImplemented),
    Around,
    Enum,
    Number,
    re.Pattern,
    range,
    slice,
    PurePath,
    date,
    timedelta,
    ContextVar,
    logging.Logger,
    type(threading.Lock()),
    type(threading.RLock()),
    torch.finfo,
    torch.iinfo,
    torch.layout,
    torch.memory_format,
    torch.Stream,
    torch.Event,
    *OPERATORS,
)
"""What has no contents that a forward would change, or none that could tell anything."""
OPAQUE_INPUTS = (types.FunctionType, types.MethodType, weakref.ref, nn.Module)
"""What may have any state: an input with one of them in it passes for no other. A call with it may share a pass with those of
other threads, though."""
_OF_MODULES = frozenset(nn.Module().__dict__)
_HEAP_TYPE = 1 << 9
"""The flag of classes that are made when a program runs: all of Python's, and some of C libraries."""
_WORD = 8
_HEAD_BYTES = object.__basicsize__ + 2 * _WORD
"""What an object takes that has a dictionary of attributes, and may have weak references."""


class Inside:
    """What is in containers and objects, at one time. The objects are kept: see `Survey`."""

    def __init__(self, watched: Iterable[Any]) -> None:
        self._objects: list[Any] = []
        self._versions: list[int] = []
        self._states: list[Any] = []
        self.unseen: list[Any] = []
        """What may change, and cannot be looked into."""
        seen: dict[int, int] = {}
        pending = [(each, _DEPTH) for each in watched]
        while pending:
            value, depth = pending.pop()
            if type(value) in SIMPLE or seen.get(id(value), -1) >= depth:
                continue
            seen[id(value)] = depth
            if type(value) in weakref.ProxyTypes:  # one whose object is gone raises whatever is asked
                self.unseen.append(value)
                break
            if isinstance(value, torch.Tensor):
                self._versions.append(-1 if value.is_inference() else value._version)
                self.unseen += [value] if value.is_inference() else []
                continue
            inside = _parts_of(value)
            if isinstance(inside, _State):
                self._states.append(inside)
            elif inside is None or (inside and not depth) or len(seen) > _MOST_OBJECTS:
                self.unseen.append(value)
                break
            else:
                self._objects += inside
                nearer = depth - (type(value) not in _CONTAINERS)
                pending += [(each, nearer) for each in inside]

    @property
    def has_tensors(self) -> bool:
        return bool(self._versions)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Inside):
            return NotImplemented
        mine, theirs = self._objects, other._objects
        is_same = self._versions == other._versions and self._states == other._states
        if not is_same or len(mine) != len(theirs):
            return False
        return all(map(is_, mine, theirs)) or all(map(are_alike, mine, theirs))

    __hash__ = None  # type: ignore[assignment]


def are_alike(one: Any, other: Any) -> bool:
    """Whether it is the same object, or a number or a text that was made anew."""
    return one is other or (type(one) is type(other) and type(one) in SIMPLE and repr(one) == repr(other))


class _State(tuple[Any, ...]):
    """The state of what has no parts."""

    __slots__ = ()


class _Tensor:
    """A tensor, and how often it was changed in place. It is not kept: another one may get its address."""

    __slots__ = ("_reference", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._reference = weakref.ref(tensor)
        self._version = None if tensor.is_inference() else tensor._version

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Tensor):
            return NotImplemented
        tensor = self._reference()
        return tensor is not None and tensor is other._reference() and self._version == other._version

    __hash__ = None  # type: ignore[assignment]


def print_of(value: Any, unseen: list[Any] | None = None) -> Any:
    """A value that differs if `value` has changed.

    Args:
        unseen: List that gets what may change, and was not looked at.
    """
    return _print_of(value, [] if unseen is None else unseen, _DEPTH, {})


def _print_of(value: Any, unseen: list[Any], depth: int, known: dict[tuple[int, int], Any]) -> Any:
    if type(value) in SIMPLE:
        return type(value), repr(value) if isinstance(value, (float, complex)) else value  # 0.0 is not -0.0, nan is nan
    if type(value) in weakref.ProxyTypes:
        unseen.append(value)
        return id(value)
    if isinstance(value, torch.Tensor):
        if value.is_inference():
            unseen.append(value)
        return _Tensor(value)
    key = id(value), depth
    if key in known:
        return known[key]
    known[key] = id(value)
    inside = _parts_of(value)
    if isinstance(value, OPAQUE_INPUTS):
        unseen.append(value)
    if inside is None or (inside and not depth) or len(known) > _MOST_OBJECTS:
        unseen.append(value)
    elif isinstance(inside, _State):
        known[key] = inside
    else:
        # Another list of the same things is the same.
        what = type(value) if type(value) in _CONTAINERS else id(value)
        known[key] = what, tuple(_print_of(each, unseen, depth - 1, known) for each in inside)
    return known[key]


def _parts_of(value: Any) -> list[Any] | _State | None:
    """What is in an object, or its state if it has no parts; None if that cannot be seen."""
    try:
        return _state_of(value) or _inside_of(value)
    except Exception:  # an object may do anything when it is looked at
        return None


def _state_of(value: Any) -> _State | None:
    kind = type(value)
    if isinstance(value, _FIXED):
        return _State((id(value),))
    if kind in (bytearray, array.array):
        return _State((id(value), bytes(value)))
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.generic):
        return _State((kind, value.tobytes()))
    if isinstance(value, numpy.dtype):
        return _State((id(value),))
    if kind is numpy.ndarray and not value.dtype.hasobject:
        return _State((id(value), value.shape, str(value.dtype), xxhash.xxh3_128_digest(value.tobytes())))
    return None


def _inside_of(value: Any) -> list[Any] | None:
    kind = type(value)
    if kind is partial:
        return [value.func, *value.args, *value.keywords, *value.keywords.values(), *_attributes_of(value)]
    if isinstance(value, (types.MethodType, weakref.ref)):
        owner = value.__self__ if isinstance(value, types.MethodType) else value()
        return [] if isinstance(owner, nn.Module) else [owner]
    if isinstance(value, nn.Module):  # one that is no part of the model, or its gates would be seen
        return [*value.parameters(), *value.buffers(), *chain.from_iterable(map(_own_of, value.modules()))]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [*value, *_attributes_of(value)]
    if isinstance(value, Mapping):
        return [*chain.from_iterable([*value.items()]), *_attributes_of(value)]
    for base in _VALUES:
        if isinstance(value, base):
            return [base(value), *_attributes_of(value)]
    return None if _has_hidden_state(kind) else _attributes_of(value)


def _own_of(module: nn.Module) -> list[Any]:
    """What a module has besides weights and modules inside."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    hooks = [each for each in hooks if not getattr(each, "__module__", "").startswith("group_offload.")]
    own = [each for name, each in [*module.__dict__.items()] if name not in _OF_MODULES]
    return [type(module), id(module), module.training, *hooks, *own]


def _has_hidden_state(kind: type) -> bool:
    """Whether objects of a class have a state in C: it is no class of Python's, or takes more than its attributes do."""
    base = next(each for each in kind.__mro__ if not each.__flags__ & _HEAP_TYPE)
    if base not in (object, types.SimpleNamespace):
        return True
    slots = [each.__dict__.get("__slots__", ()) for each in kind.__mro__]
    num_slots = sum(1 if isinstance(each, str) else len(each) for each in slots)
    return kind.__basicsize__ > _HEAD_BYTES + _WORD * num_slots


def _attributes_of(value: Any) -> list[Any]:
    attributes = getattr(value, "__dict__", None)
    found = [*chain.from_iterable([*attributes.items()])] if isinstance(attributes, Mapping) else []
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            hidden = (
                f"_{base.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
            )
            if hidden not in ("__dict__", "__weakref__") and hasattr(value, hidden):
                found += [name, getattr(value, hidden)]
    return found


class RandomStates:
    """The states of the generators that are used where none is given: Python's, torch's, NumPy's, and the device's."""

    def __init__(self, device: torch.device) -> None:
        numpy = sys.modules.get("numpy")
        self._device = None if device.type == "cpu" else device
        self._python = random.getstate()
        self._torch = [torch.get_rng_state()]
        if self._device is not None:
            self._torch.append(torch.get_device_module(self._device).get_rng_state(self._device))
        self._numpy: Any = None if numpy is None else numpy.random.get_state(legacy=False)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RandomStates):
            return NotImplemented
        is_same = self._python == other._python and all(map(torch.equal, self._torch, other._torch))
        return is_same and _of_numpy(self._numpy) == _of_numpy(other._numpy)

    __hash__ = None  # type: ignore[assignment]

    def restore(self) -> None:
        """Let the generators go on from here again."""
        random.setstate(self._python)
        torch.set_rng_state(self._torch[0])
        if self._device is not None:
            torch.get_device_module(self._device).set_rng_state(self._torch[1], self._device)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


def _of_numpy(state: Any) -> Any:
    inner = state["state"] if isinstance(state, dict) else None
    if not isinstance(inner, dict) or "key" not in inner:  # another kind of generator, or no NumPy
        return repr(state)
    return inner["key"].tobytes(), inner["pos"], state["has_gauss"], state["gauss"]


def others_may_draw() -> bool:
    """Whether there are threads, besides this one and those that are known, which may draw random numbers meanwhile."""
    here = threading.current_thread()
    others = [each for each in threading.enumerate() if each is not here and not each.name.startswith("group_offload")]
    return any(type(each).__name__ != "TMonitor" for each in others)  # that of tqdm draws none
