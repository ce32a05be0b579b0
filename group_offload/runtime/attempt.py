"""Whether a forward that broke off may be run again."""

from __future__ import annotations

import random
import sys
import weakref
from collections import deque
from enum import Enum
from itertools import chain
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType, NoneType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

_BY_VALUE = frozenset[type]({int, float, complex, bool, str, bytes, NoneType})
_UNCHANGEABLE = (
    *(*_BY_VALUE, Enum, type, FunctionType, BuiltinFunctionType, MethodType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)

_MINE = __name__.partition(".")[0]
_MAX_DEPTH = 3
"""Of what an attribute holds: of a list in a dictionary in a list in a dictionary only the length is looked at."""
_MAX_ITEMS = 1000
"""Of one attribute, or bytes of an array: of what is beyond only the size is looked at."""
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_BOOKS = nn.Module().__dict__.keys()
"""What torch itself keeps in each module: tables that are never exchanged, and whether it is in training."""
_AT_LEAST_TWO = "training", "training"
"""Looked at always: what gets two names or more gives a tuple."""


class State:
    """The attributes of a module and of those in it, whatever forwards may keep there (a cache, a count of steps)."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        # torch's own layers keep nothing but tensors, which are looked after elsewhere.
        self._tables = [part.__dict__ for part in module.modules() if not type(part).__module__.startswith("torch.nn.")]
        self._lay_out()

    def now(self) -> tuple[list[int], list[Any]]:
        """How many attributes each has, and what they are."""
        sizes = list(map(len, self._tables))
        try:
            if sizes == self._sizes:
                return sizes, self._values()
        except KeyError:  # one has gone, and another has come
            pass
        self._lay_out()
        return self._sizes, self._values()

    def _lay_out(self) -> None:
        """Sort modules by what their attributes are called, so that C code can loop over those with the same."""
        self._sizes = list(map(len, self._tables))
        alike: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for table in self._tables:
            alike.setdefault(tuple(name for name in table if name not in _BOOKS), []).append(table)
        self._alike = [(itemgetter(*names, *_AT_LEAST_TWO), tables) for names, tables in alike.items()]

    def _values(self) -> list[Any]:
        found = chain.from_iterable(map(get, tables) for get, tables in self._alike)
        return [
            value if type(value) in _BY_VALUE else _Marker().mark(value, _MAX_DEPTH)
            for value in chain.from_iterable(found)
        ]


class _Marker:
    """Of one attribute."""

    def __init__(self) -> None:
        self._num_left = _MAX_ITEMS

    def mark(self, value: Any, depth: int) -> Any:
        """What is equal to itself as long as `value` is this object, and has not changed. The object is not held.

        One that is replaced twice may come to lie where it was: so more than its address is remembered.
        """
        if isinstance(value, torch.Tensor):
            return id(value), weakref.ref(value), None if value.is_inference() else value._version
        if isinstance(value, _UNCHANGEABLE):
            return id(value)
        if isinstance(value, nn.Module) or type(value).__module__.startswith(_MINE):
            return id(value)  # it has a table of its own, or is what runs the forward
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray):
            return id(value), value.tobytes() if value.nbytes <= _MAX_ITEMS else None
        inside = value if isinstance(value, _CONTAINERS) else getattr(value, "__dict__", ())
        self._num_left -= len(inside)
        if not depth or self._num_left < 0:
            return id(value), len(inside)
        # At once, as another thread may change it.
        items = [*inside.keys(), *inside.values()] if isinstance(inside, dict) else [*inside]
        return id(value), [each if type(each) in _BY_VALUE else self.mark(each, depth - 1) for each in items]


class Attempt:
    """What a forward was given and what it could change, remembered before it begins.

    No tensor is held: a forward that replaces what is in a list of its own counts on the old ones being freed.
    """

    def __init__(self, state: State, args: Any, kwargs: Any, device: torch.device) -> None:
        self._state, self._attributes = state, state.now()
        self._arguments = args, kwargs
        self._leaves, self._structure = _remember(self._arguments)
        self._device = device
        self._random = _random_states(device)

    def why_not_again(self) -> str | None:
        """What would make a second run compute something else than the first; None if nothing is known that would."""
        module = self._state.module
        if module.training:
            return "the module is in training mode, where dropout and statistics depend on how often it ran"
        leaves, structure = _remember(self._arguments)
        if structure != self._structure:
            return "it has changed a list or mapping that it was given"
        for before, now in zip(self._leaves, leaves, strict=True):
            if isinstance(before, _Unknown):
                return f"it was given {before.what}, and whether it has changed that cannot be told"
            if before != now:
                return "it has changed an input in place"
        if _random_states(self._device) != self._random:
            return "it has drawn random numbers"
        for name, part in module.named_modules():
            registry = part.__dict__.get("_diffusers_hook")
            hooks = getattr(registry, "hooks", {}) if registry is not None else {}
            if any(getattr(hook, "_is_stateful", False) for hook in hooks.values()):
                return f"a hook of diffusers on {name or 'the module'!r} remembers earlier calls"
        if self._state.now() != self._attributes:
            return "it has changed attributes of modules"
        return None


class _Unknown:
    """An argument that may change without being another one."""

    def __init__(self, what: str) -> None:
        self.what = what


def _remember(arguments: Any) -> tuple[list[Any], Any]:
    """What is equal to itself later, unless an argument has changed; and the lists and mappings that they are in."""
    leaves, structure = tree_flatten(arguments)
    return [_remembered(leaf) for leaf in leaves], structure


def _remembered(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        if leaf.is_inference():
            return _Unknown("a tensor of inference mode")  # it has no version
        return id(leaf), weakref.ref(leaf), leaf._version
    if isinstance(leaf, torch.Generator):
        return leaf.get_state().numpy().tobytes()
    return leaf if isinstance(leaf, _UNCHANGEABLE) else _Unknown(f"a {type(leaf).__name__}")


def _random_states(device: torch.device) -> list[Any]:
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    found: list[Any] = [state.numpy().tobytes() for state in states]
    found.append(random.getstate())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        found.append((name, keys.tobytes(), *rest))
    return found
