"""What is in an object: whether it has changed since, and whether that can be told."""

from __future__ import annotations

import array
import logging
import random
import re
import sys
import threading
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
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
import xxhash
from torch import nn

from ...base.compiled import Around

SIMPLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_CONTAINERS = (list, tuple, dict)
_DEPTH = 4
"""How far a look goes into objects, and into the arguments of calls."""
_MOST_OBJECTS = 100_000
"""How many objects a look goes through: a list that has itself in it would have no end."""
_FIXED = (
    type,
    FunctionType,
    MethodType,
    ModuleType,
    Around,
    Enum,
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
    weakref.ref,
    torch.layout,
    torch.memory_format,
    torch.Stream,
    torch.Event,
)
"""What has no contents that a forward would change, or none that could tell anything."""


class Inside:
    """What is in containers and objects, at one time. The objects are kept: see `Survey`."""

    def __init__(self, watched: Iterable[Any]) -> None:
        self._objects: list[Any] = []
        self._versions: list[int] = []
        self._states: list[Any] = []
        self.unseen: list[Any] = []
        """What may change, and cannot be looked into."""
        seen: set[int] = set()
        pending = [(each, _DEPTH) for each in watched]
        while pending and len(seen) < _MOST_OBJECTS:
            value, depth = pending.pop()
            if type(value) in SIMPLE or (id(value) in seen and not isinstance(value, torch.Tensor)):
                continue
            seen.add(id(value))
            if isinstance(value, torch.Tensor):
                self._versions.append(-1 if value.is_inference() else value._version)
                self.unseen += [value] if value.is_inference() else []
                continue
            state = _state_of(value)
            if state is not None:
                self._states.append(state)
                continue
            inside = _inside_of(value)
            if inside is None:
                self.unseen += [] if _is_fixed(value) else [value]
            elif depth:
                self._objects += inside
                nearer = depth - (not isinstance(value, _CONTAINERS))
                pending += [(each, nearer) for each in inside]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Inside):
            return NotImplemented
        mine, theirs = self._objects, other._objects
        is_same = self._versions == other._versions and self._states == other._states
        return is_same and len(mine) == len(theirs) and all(map(is_, mine, theirs))

    __hash__ = None  # type: ignore[assignment]


def print_of(value: Any, unseen: list[Any] | None = None, depth: int = _DEPTH) -> Any:
    """A value that differs if `value` has changed.

    Args:
        unseen: List that gets what may change, and was not looked at.
    """
    if type(value) in SIMPLE:
        return type(value), value if value == value else repr(value)
    if isinstance(value, torch.Tensor):
        if value.is_inference() and unseen is not None:
            unseen.append(value)
        return id(value), None if value.is_inference() else value._version
    state = _state_of(value)
    if state is not None:
        return state
    inside = _inside_of(value)
    if inside and not depth and unseen is not None:
        unseen.append(value)
    if inside is not None and depth:
        # Another list of the same things is the same.
        what = type(value) if type(value) in _CONTAINERS else id(value)
        return what, tuple(print_of(each, unseen, depth - 1) for each in inside)
    if inside is None and unseen is not None and not _is_fixed(value):
        unseen.append(value)
    return id(value)


def _state_of(value: Any) -> Any:
    """The state of what has no parts; None if it has some, or if that cannot be seen."""
    if isinstance(value, random.Random):
        return id(value), value.getstate()
    if isinstance(value, torch.Generator):
        return id(value), value.get_state().numpy().tobytes()
    if isinstance(value, (bytearray, array.array)):
        return id(value), bytes(value)
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.generic):
        return type(value), value.tobytes()
    if isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
        return id(value), value.shape, str(value.dtype), xxhash.xxh3_128_digest(value.tobytes())
    if isinstance(value, numpy.random.Generator):
        return id(value), repr(value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        return id(value), repr(value.get_state(legacy=False))
    return None


def _is_fixed(value: Any) -> bool:
    return isinstance(value, (*SIMPLE, *_FIXED, Number)) or (callable(value) and not isinstance(value, partial))


def _inside_of(value: Any) -> list[Any] | None:
    """What a container or an object has in it; None if that is no state of its own, or cannot be seen."""
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [*value, *_attributes_of(value)]
    if isinstance(value, Mapping):
        return [*chain.from_iterable([*value.items()]), *_attributes_of(value)]
    if isinstance(value, nn.Module):  # one that is no part of the model, else torch would know it
        return [*value.parameters(), *value.buffers()]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords, *value.keywords.values()]
    if isinstance(value, _FIXED):
        return None
    found = _attributes_of(value)
    return found if found or hasattr(value, "__dict__") else None


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
