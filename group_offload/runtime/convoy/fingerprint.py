"""What a forward finds in a module besides its inputs: modules, weights, hooks, attributes.

It is looked at in each call, while the device has nothing to do. So the look is flat: into the modules' tables, and one level
deep into lists, dicts and objects that attributes hold. What lies deeper is left to [Note: The contract of shared passes].
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable
from enum import Enum
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from ...base.compiled import Around
from ...base.torch_internals import COMPILED_CALL

SIMPLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_TO_ENGINE = ("_group_offload_handle", COMPILED_CALL)
_TABLES = ("_modules", "_parameters", "_buffers", "_forward_pre_hooks", "_forward_hooks")
_OWN = frozenset(nn.Module().__dict__) | {"_diffusers_hook", *_TO_ENGINE}
"""Attributes that every module has, or that lead to the engine."""
_RECORDS = ("config", "_internal_dict", "generation_config")
"""What a model was built with."""
_FIXED = (*SIMPLE, types.FunctionType, types.BuiltinFunctionType, type, Enum, nn.Module, Around, torch.Tensor)
"""What has no contents that a forward would change, or none that are looked at here."""
_attributes = attrgetter("__dict__")


class Fingerprint:
    """Which objects the tables of a module and of those inside of it hold, and how often tensors there were changed in place.

    It keeps the objects: else another one could take the place of one that is gone, and would look the same. It is made while
    the forward of another thread may change hooks and gates. Loops over all modules run in C.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        top, self._modules = modules[0], modules[1:]
        self._top = weakref.ref(top)
        """The module that was looked at. Its attributes lead to the engine, and so to this."""
        self._types: list[Any] = [*map(type, modules)]
        attributes = [module.__dict__ for module in modules]
        self._names = [name for name in attributes[0] if name not in _TO_ENGINE]
        self._num_names = len(attributes[0])
        self.structure = hash(
            (
                *map(id, modules),
                *self._types,
                *(id(kind.forward) for kind in self._types),
                *(id(each.get("processor")) for each in attributes),
            )
        )
        """Tells which modules there are, what they call, and how they process attention."""
        self._tables: list[dict[Any, Any]] = [
            *attributes[1:],
            *(each[name] for name in _TABLES for each in attributes),
            *(each["_diffusers_hook"].hooks for each in attributes if each.get("_diffusers_hook") is not None),
        ]
        self._sizes = [*map(len, self._tables)]
        held = [(at, name, value) for at, each in enumerate(attributes) for name, value in [*each.items()]]
        held = [each for each in held if each[1] not in _OWN and not isinstance(each[2], (*SIMPLE, nn.Module))]
        self._holders = [(weakref.ref(modules[at]), name) for at, name, value in held if _items(value) is not None]
        """Attributes with something in it."""
        self._contents = self._contents_now(top)
        self._tensors = [value for _, _, value in held if isinstance(value, torch.Tensor)]
        self._tensors += [each for each in self._inside_now() if isinstance(each, torch.Tensor)]
        self._versions = self._versions_now()
        self.has_tensors = bool(self._tensors)
        """Whether there are tensors in it besides weights and buffers. It keeps their memory."""
        self.is_partial = any(name not in _RECORDS and _may_hide(value) for _, name, value in held)
        """Whether something in it may change in place, and may lie too deep for a look."""

    def holds(self) -> bool:
        """Whether all objects are the same. Equal numbers may have been made anew, and lists and dicts of the same things."""
        top = self._top()
        if top is None:
            return False
        if not (
            all(map(is_, map(type, [top, *self._modules]), self._types))
            and len(top.__dict__) == self._num_names
            and all(map(is_, map(_attributes, self._modules), self._tables))
            and [*map(len, self._tables)] == self._sizes
            and self._versions_now() == self._versions
        ):
            return False
        before, now = self._contents, self._contents_now(top)
        if len(now) != len(before):
            return False
        if not all(map(is_, now, before)):
            if not all(map(_are_remade, now, before)):
                return False
            self._contents = now
        return True

    def _contents_now(self, top: nn.Module) -> list[Any]:
        return [
            *chain.from_iterable(map(dict.values, self._tables)),
            *map(top.__dict__.get, self._names),
            *self._inside_now(),
        ]

    def _inside_now(self) -> Iterable[Any]:
        for reference, name in self._holders:
            module = reference()
            yield from _items(None if module is None else module.__dict__.get(name)) or ()

    def _versions_now(self) -> list[int]:
        return [-1 if each.is_inference() else each._version for each in self._tensors]


def _items(value: Any) -> Iterable[Any] | None:
    """What is in a container, or in the attributes of an object; None for anything else."""
    kind = type(value)
    if kind is list:
        return [*value]
    if kind is not dict:
        if not kind.__dictoffset__ or issubclass(kind, _FIXED):
            return None
        value = value.__dict__
    return [*value.values()]


def _may_hide(value: Any) -> bool:
    """Whether an attribute's value may change in place. Numbers, texts and the like do not, nor objects without attributes."""
    kind = type(value)
    if kind is tuple:
        return any(map(_may_hide, value))
    is_plain = kind.__base__ is object and "__weakref__" in kind.__dict__  # one of Python's classes, and no C library's
    return not issubclass(kind, _FIXED) and (not is_plain or bool(value.__dict__))


def are_alike(one: Any, other: Any) -> bool:
    """Whether it is the same object, or a number or a text that was made anew."""
    return one is other or (type(one) is type(other) and type(one) in SIMPLE and repr(one) == repr(other))


def _are_remade(one: Any, other: Any) -> bool:
    if type(one) is type(other) is tuple:
        return len(one) == len(other) and all(map(_are_remade, one, other))
    return are_alike(one, other) or (type(one) is type(other) and type(one) in (list, dict))


def examine(root: nn.Module, is_ours: Callable[[Any], bool]) -> Fingerprint | str:
    """Look at a module between forwards.

    Args:
        is_ours: Whether a hook belongs to the engine.

    Returns:
        The state, or why forwards cannot share passes.
    """
    added: set[int] = set()
    modules = [*root.modules()]
    for module in modules:
        attributes = module.__dict__
        # peft adds layers to a model in eval mode, and leaves them in the other.
        if type(module).__module__.startswith("peft."):
            added.update(map(id, module.modules()))
        hooks = (*attributes["_forward_pre_hooks"].values(), *attributes["_forward_hooks"].values())
        registry, own = attributes.get("_diffusers_hook"), attributes.get("forward")
        others = [] if registry is None else [*registry.hooks]
        tensors = (*module._parameters.values(), *module._buffers.values(), *attributes.values())
        if isinstance(module, torch.jit.ScriptModule):
            finding = "is scripted"
        elif attributes["training"] and id(module) not in added:
            finding = "is in training mode: call eval()"
        elif not all(map(is_ours, hooks)):
            finding = "has a hook, which would see forwards in another order"
        elif others:
            finding = f"has the hook {others[0]!r} of diffusers, which keeps state"
        elif own is not None and getattr(own, "__func__", None) is not type(module).forward:
            finding = "has a replaced forward"
        elif any(isinstance(each, torch.Tensor) and each.is_inference() for each in tensors):
            finding = "has inference tensors, whose changes can't be detected"
        else:
            continue
        name = next((name for name, each in root.named_modules() if each is module), "")
        return f"{name or type(module).__name__} {finding}"
    return Fingerprint(modules)
