"""What a forward depends on, or changes, besides inputs and weights. Forwards share passes only if that is nothing."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, compress
from operator import attrgetter, is_, is_not
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from ...base.caches import touch
from ...base.compiled import Around
from ...base.torch_internals import COMPILED_CALL

MARKER = "group_offloading"
"""The name of the hook by which diffusers knows offloaded modules."""
SIMPLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_CONTAINERS = (list, tuple, dict)
_DEPTH = 4
"""How far a look goes into containers and objects."""
_APART = frozenset(
    {
        "_parameters",
        "_buffers",
        "_modules",
        "_diffusers_hook",
        "_forward_hooks",
        "_forward_hooks_always_called",
        "_forward_hooks_with_kwargs",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
        "_group_offload_handle",
        COMPILED_CALL,
    }
)
"""Attributes of modules that change for other reasons, or that `survey` looks at."""
_OWN = frozenset(nn.Module().__dict__) | _APART
"""Attributes whose contents are looked at elsewhere: what every module has, and ours."""
_TABLES = ("_modules", "_parameters", "_buffers", "_forward_pre_hooks", "_forward_hooks")
_values, _attributes = dict.values, attrgetter("__dict__")


class Watch:
    """Looks at the modules of a forward, at each gate, for state that the forward changes."""

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        self._root = root
        self._device = device
        self._names = {module: name for name, module in root.named_modules()}
        self._before = {module: _state_of(module) for module in self._names}
        self._random = self._random_states()
        self.finding: str | None = None
        """What the forward was found to change."""

    def look_at(self, module: nn.Module) -> None:
        """Look at a module, and at those inside of it, in the middle of the forward."""
        if self.finding is None:
            self._compare(self._root._modules.values() if module is self._root else (module,))
            self._compare_one(self._root)

    def end(self) -> str | None:
        """Look at all modules after the forward.

        Returns:
            What the forward changes; None if nothing was found.
        """
        self._compare((self._root,))
        if self.finding is None and self._random != self._random_states():
            self.finding = "random numbers are drawn in it"  # or in another thread meanwhile
        return self.finding

    def _compare(self, tops: Any) -> None:
        for top in tops:
            for module in () if top is None else top.modules():
                self._compare_one(module)

    def _compare_one(self, module: nn.Module) -> None:
        if self.finding is not None:
            return
        before, now = self._before.get(module), _state_of(module)
        if before == now:
            return
        if before is None:
            self.finding = f"it adds a module ({type(module).__name__})"
            return
        changed = next(name for name in {**before, **now} if before.get(name) != now.get(name))
        where = f"{self._names[module]}.{changed}".removeprefix(".")
        self.finding = f"it changes {where} of {type(self._root).__name__}"

    def _random_states(self) -> tuple[Any, ...]:
        states: list[Any] = [random.getstate(), torch.get_rng_state().numpy().tobytes()]
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            states.append(repr(numpy.random.get_state(legacy=False)))
        if self._device.type != "cpu":
            states.append(torch.get_device_module(self._device).get_rng_state(self._device).numpy().tobytes())
        return tuple(states)


class Survey:
    """The state of a module between forwards: which objects are in its modules, and how often tensors were changed in place.

    It keeps the objects. Else another one could take the place of one that is gone, and would look the same. The device has
    nothing to do while the state is looked at again, so the data is flat, for loops in C code.
    """

    __slots__ = ("_contents", "_inside", "_modules", "_sizes", "_tables", "_types", "_watched", "structure")

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        self._types = [*map(type, modules)]
        attributes = [module.__dict__ for module in modules]
        self.structure = hash((*map(id, modules), *self._types, *(id(each.get("processor")) for each in attributes)))
        """Tells which modules there are, and how they process attention."""
        self._tables: list[dict[Any, Any]] = [
            *attributes,
            *(each[name] for name in _TABLES for each in attributes),
            *(each["_diffusers_hook"].hooks for each in attributes if each.get("_diffusers_hook") is not None),
        ]
        self._sizes = [*map(len, self._tables)]
        self._contents = [*chain.from_iterable(map(_values, self._tables))]
        self._watched = [
            value
            for each in attributes
            for name, value in [*each.items()]
            if name not in _OWN and not isinstance(value, SIMPLE) and not _is_constant(value)
        ]
        """What may change in place."""
        self._inside = _Inside(self._watched)

    def holds(self) -> bool:
        """Whether the state is still the same."""
        touch(self._modules, self._tables, self._contents)
        return (
            all(map(is_, map(type, self._modules), self._types))
            and all(map(is_, map(_attributes, self._modules), self._tables))
            and [*map(len, self._tables)] == self._sizes
            and self._has_same_contents()
            and _Inside(self._watched) == self._inside
        )

    def _has_same_contents(self) -> bool:
        now = [*chain.from_iterable(map(_values, self._tables))]
        if len(now) != len(self._contents):  # another thread was faster
            return False
        if all(map(is_, now, self._contents)):
            return True
        others = compress(zip(now, self._contents, strict=True), map(is_not, now, self._contents))
        return all(print_of(new) == print_of(old) for new, old in others)  # a forward may make a list anew


class _Inside:
    """What is in containers and objects."""

    def __init__(self, watched: Sequence[Any]) -> None:
        self._objects: list[Any] = []
        self._versions: list[int] = []
        for each in watched:
            self._look_into(each, _DEPTH)

    def _look_into(self, value: Any, depth: int) -> None:
        if type(value) in SIMPLE:
            return
        if isinstance(value, torch.Tensor):
            self._versions.append(-1 if value.is_inference() else value._version)
        elif depth:
            inside = _inside_of(value) or ()
            self._objects += inside
            for each in inside:
                self._look_into(each, depth - 1)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Inside):
            return NotImplemented
        mine, theirs = self._objects, other._objects
        return self._versions == other._versions and len(mine) == len(theirs) and all(map(is_, mine, theirs))

    __hash__ = None  # type: ignore[assignment]


def _is_constant(value: Any) -> bool:
    return type(value) is tuple and all(type(each) in SIMPLE for each in value)


def survey(root: nn.Module, is_ours: Callable[[Any], bool]) -> Survey | str:
    """Look at a module between forwards, while the forward of another thread may change its hooks and gates.

    Args:
        is_ours: Whether a hook belongs to the engine.

    Returns:
        The state, or why forwards cannot share passes.
    """
    added: set[int] = set()
    modules = [*root.modules()]
    for module in modules:
        attributes = module.__dict__
        if isinstance(module, torch.jit.ScriptModule):
            return f"{_name_of(root, module)} is scripted"
        # peft adds layers to a model in eval mode, and leaves them in the other.
        if type(module).__module__.startswith("peft."):
            added.update(map(id, module.modules()))
        if attributes["training"] and id(module) not in added:
            return f"{_name_of(root, module)} is in training mode: call eval()"
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            if attributes[name] and not all(map(is_ours, [*attributes[name].values()])):
                return f"{_name_of(root, module)} has a hook, which would see forwards in another order"
        registry = attributes.get("_diffusers_hook")
        if registry is not None:
            others = [each for each in registry.hooks if each != MARKER]
            if others:
                return f"{_name_of(root, module)} has the hook {others[0]!r} of diffusers, which keeps state"
        own = attributes.get("forward")
        if own is not None and getattr(own, "__func__", None) is not type(module).forward:
            return f"the forward of {_name_of(root, module)} was replaced"
    return Survey(modules)


def _name_of(root: nn.Module, module: nn.Module) -> str:
    return next((name for name, each in root.named_modules() if each is module), "") or type(module).__name__


def _state_of(module: nn.Module) -> dict[str, Any]:
    attributes = [*module.__dict__.items()]
    found: dict[str, Any] = {name: print_of(value) for name, value in attributes if name not in _APART}
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        found[name] = id(tensor)
    for name, child in module._modules.items():
        found[name] = id(child)
    return found


def print_of(value: Any, unseen: list[Any] | None = None, depth: int = _DEPTH) -> Any:
    """A value that differs if `value` has changed.

    Args:
        unseen: List that gets what may change, and was not looked at.
    """
    if isinstance(value, SIMPLE):
        return type(value), value if value == value else repr(value)
    if isinstance(value, torch.Tensor):
        if value.is_inference() and unseen is not None:
            unseen.append(value)
        return id(value), None if value.is_inference() else value._version
    if isinstance(value, (torch.Generator, random.Random)):
        return id(value), _random_state_of(value)
    inside = _inside_of(value) if depth else None
    if inside is not None:
        # Another list of the same things is the same.
        what = type(value) if type(value) in _CONTAINERS else id(value)
        return what, tuple(print_of(each, unseen, depth - 1) for each in inside)
    if unseen is not None and not isinstance(value, type):
        unseen.append(value)
    return id(value)


def _random_state_of(source: torch.Generator | random.Random) -> Any:
    return source.getstate() if isinstance(source, random.Random) else source.get_state().numpy().tobytes()


def _inside_of(value: Any) -> list[Any] | None:
    """What a container or an object has in it; None if that is no state of its own, or cannot be seen."""
    if isinstance(value, (nn.Module, Around, type, FunctionType, MethodType)):
        return None
    if isinstance(value, (list, tuple, set, frozenset)):
        return [*value]
    found = value if isinstance(value, Mapping) else getattr(value, "__dict__", None)
    return [each for item in [*found.items()] for each in item] if isinstance(found, Mapping) else None
