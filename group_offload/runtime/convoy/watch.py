"""What a forward depends on, or changes, besides inputs and weights. Forwards share passes only if that is nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from ...base.torch_internals import COMPILED_CALL

MARKER = "group_offloading"
"""The name of the hook by which diffusers knows offloaded modules."""
_SIMPLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_APART = frozenset(
    {
        "_parameters",
        "_buffers",
        "_modules",
        "_diffusers_hook",
        "_forward_hooks",
        "_forward_pre_hooks",
        "_group_offload_handle",
        COMPILED_CALL,
    }
)
"""Attributes of modules that change for other reasons, or that `survey` looks at."""


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
        if self._device.type != "cpu":
            states.append(torch.get_device_module(self._device).get_rng_state(self._device).numpy().tobytes())
        return tuple(states)


@dataclass(frozen=True, slots=True)
class Survey:
    """The state of a module, as far as its modules show it."""

    reason: str | None = None
    """Why forwards cannot share passes."""
    structure: int = 0
    """Tells which modules there are, and how they process attention."""
    mark: int = 0
    """Tells which objects the attributes of modules are, and the weights."""


def survey(root: nn.Module, is_ours: Callable[[Any], bool]) -> Survey:
    """Look at a module between forwards.

    Args:
        is_ours: Whether a hook belongs to the engine.
    """
    added: set[int] = set()
    structure: list[int] = []
    marks: list[int] = []
    for module in root.modules():
        attributes = module.__dict__
        if isinstance(module, torch.jit.ScriptModule):
            return Survey(f"{_name_of(root, module)} is scripted")
        if type(module).__module__.startswith(
            "peft."
        ):  # it adds layers to a model in eval mode, and leaves them in the other
            added.update(map(id, module.modules()))
        if attributes["training"] and id(module) not in added:
            return Survey(f"{_name_of(root, module)} is in training mode: call eval()")
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            if attributes[name] and not all(map(is_ours, attributes[name].values())):
                return Survey(f"{_name_of(root, module)} has a hook, which would see forwards in another order")
        registry = attributes.get("_diffusers_hook")
        if registry is not None:
            others = [each for each in registry.hooks if each != MARKER]
            if others:
                return Survey(f"{_name_of(root, module)} has the hook {others[0]!r} of diffusers, which keeps state")
        own = attributes.get("forward")
        if own is not None and getattr(own, "__func__", None) is not type(module).forward:
            return Survey(f"the forward of {_name_of(root, module)} was replaced")
        structure += id(module), id(attributes.get("processor"))
        for value in attributes.values():
            marks.append(id(value))
            if type(value) is dict and value:
                marks += map(id, value.values())
    return Survey(None, hash(tuple(structure)), hash(tuple(marks)))


def _name_of(root: nn.Module, module: nn.Module) -> str:
    return next((name for name, each in root.named_modules() if each is module), "") or type(module).__name__


def _state_of(module: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {name: _print_of(value, 3) for name, value in module.__dict__.items() if name not in _APART}
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        found[name] = id(tensor)
    for name, child in module._modules.items():
        found[name] = id(child)
    return found


def _print_of(value: Any, depth: int) -> Any:
    """A value that differs if `value` has changed."""
    if isinstance(value, _SIMPLE):
        return type(value), value if value == value else repr(value)
    if isinstance(value, torch.Tensor):
        return id(value), None if value.is_inference() else value._version
    if isinstance(value, (nn.Module, type, FunctionType, MethodType)) or not depth:
        return id(value)
    if isinstance(value, Mapping):
        return id(value), tuple((_print_of(key, depth - 1), _print_of(each, depth - 1)) for key, each in _items(value))
    if isinstance(value, (list, tuple, set, frozenset)):
        return id(value), tuple(_print_of(each, depth - 1) for each in [*value])
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        return id(value), tuple((name, _print_of(each, depth - 1)) for name, each in _items(attributes))
    return id(value)


def _items(mapping: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    yield from [*mapping.items()]
