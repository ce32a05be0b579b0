"""What a forward depends on, or changes, besides inputs and weights. Forwards share passes only if that is nothing."""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable
from itertools import chain, compress
from operator import attrgetter, is_, is_not
from typing import Any

import torch
from torch import nn

from ...base.caches import touch
from ...base.torch_internals import APPLY, COMPILED_CALL
from .caller import has_same_variables
from .contents import SIMPLE, Inside, RandomStates, print_of

MARKER = "group_offloading"
"""The name of the hook by which diffusers knows offloaded modules."""
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
        APPLY,
        COMPILED_CALL,
    }
)
"""Attributes of modules that change for other reasons, or that `survey` looks at."""
_TO_ENGINE = ("_group_offload_handle", APPLY, COMPILED_CALL)
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
        self._random = RandomStates(device)
        self._context = contextvars.copy_context()
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
        if self.finding is None and self._random != RandomStates(self._device):
            self.finding = "random numbers are drawn in it"  # or in another thread meanwhile
        if self.finding is None and not has_same_variables(self._context, contextvars.copy_context()):
            self.finding = "it sets a context variable"
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


class Survey:
    """The state of a module between forwards: which objects are in its modules, and how often tensors were changed in place.

    It keeps the objects. Else another one could take the place of one that is gone, and would look the same. The device has
    nothing to do while the state is looked at again, so the data is flat, for loops in C code.
    """

    __slots__ = (
        "_contents",
        "_inside",
        "_modules",
        "_names",
        "_num_names",
        "_sizes",
        "_tables",
        "_top",
        "_types",
        "_watched",
        "structure",
    )

    def __init__(self, modules: list[nn.Module]) -> None:
        top, self._modules = modules[0], modules[1:]
        self._top = weakref.ref(top)
        """The module that was looked at. Its attributes lead to the engine, and so to this."""
        self._types = [*map(type, modules)]
        attributes = [module.__dict__ for module in modules]
        self._names = [name for name in attributes[0] if name not in _TO_ENGINE]
        self._num_names = len(attributes[0])
        self.structure = hash((*map(id, modules), *self._types, *(id(each.get("processor")) for each in attributes)))
        """Tells which modules there are, and how they process attention."""
        self._tables: list[dict[Any, Any]] = [
            *attributes[1:],
            *(each[name] for name in _TABLES for each in attributes),
            *(each["_diffusers_hook"].hooks for each in attributes if each.get("_diffusers_hook") is not None),
        ]
        self._sizes = [*map(len, self._tables)]
        self._contents = self._contents_now(top)
        self._watched = [
            value
            for each in attributes
            for name, value in [*each.items()]
            if name not in _OWN and type(value) not in SIMPLE and not _is_constant(value)
        ]
        """What may change in place."""
        self._inside = Inside(self._watched)

    @property
    def unseen(self) -> list[Any]:
        """What may change, and cannot be looked into."""
        return self._inside.unseen

    @property
    def has_tensors(self) -> bool:
        """Whether there are tensors in it besides weights and buffers. It keeps their memory."""
        return self._inside.has_tensors

    def holds(self) -> bool:
        """Whether the state is still the same."""
        top = self._top()
        if top is None:
            return False
        touch(self._modules, self._tables, self._contents)
        return (
            all(map(is_, map(type, [top, *self._modules]), self._types))
            and len(top.__dict__) == self._num_names
            and all(map(is_, map(_attributes, self._modules), self._tables))
            and [*map(len, self._tables)] == self._sizes
            and self._has_same_contents(top)
            and Inside(self._watched) == self._inside
        )

    def _contents_now(self, top: nn.Module) -> list[Any]:
        return [*chain.from_iterable(map(_values, self._tables)), *map(top.__dict__.get, self._names)]

    def _has_same_contents(self, top: nn.Module) -> bool:
        now = self._contents_now(top)
        if len(now) != len(self._contents):  # another thread was faster
            return False
        if all(map(is_, now, self._contents)):
            return True
        others = compress(zip(now, self._contents, strict=True), map(is_not, now, self._contents))
        return all(print_of(new) == print_of(old) for new, old in others)  # a forward may make a list anew


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
        if any(
            each is not None and each.is_inference()
            for each in (*_values(module._parameters), *_values(module._buffers))
        ):
            return f"{_name_of(root, module)} has inference tensors, in which nobody sees changes"
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
    found = Survey(modules)
    if found.unseen:
        what = type(found.unseen[0]).__name__
        return f"an attribute of its modules has a {what} in it, and whether that changes cannot be told"
    return found


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
