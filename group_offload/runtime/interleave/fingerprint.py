"""What a forward finds in a module besides its inputs: modules, weights, hooks, attributes.

It is looked at in each call, while the device has nothing to do. So the look is flat: into the modules' tables, and one level
deep into lists, dicts and objects that attributes hold. What lies deeper is left to [Note: The contract of shared passes].
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable
from enum import Enum
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from ...base.compiled import HANDLE, Around, is_ours
from ...base.torch_internals import COMPILED_CALL

SIMPLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_TO_ENGINE = (HANDLE, COMPILED_CALL)
_TABLES = ("_modules", "_parameters", "_buffers", "_forward_pre_hooks", "_forward_hooks")
_OWN = frozenset(nn.Module().__dict__) | {"_diffusers_hook", *_TO_ENGINE}
"""Attributes that every module has, or that lead to the engine."""
_RECORDS = ("config", "_internal_dict", "generation_config")
"""What a model was built with."""
_FIXED = (*SIMPLE, types.FunctionType, types.BuiltinFunctionType, type, Enum, nn.Module, Around, torch.Tensor)
"""What has no contents that a forward would change, or none that are looked at here."""
_attributes, _tables = attrgetter("__dict__"), attrgetter(*_TABLES)


class Fingerprint:
    """Which objects the tables of a module and of those inside of it hold, and how often tensors there were changed in place.

    It keeps the objects: else another one could take the place of one that is gone, and would look the same. It is made while
    the forward of another thread may change hooks and gates. Loops over all modules run in C.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        # Attributes of the top lead to the engine, and to this.
        self._top, self._modules = weakref.ref(modules[0]), modules[1:]
        held = [(at, *item) for at, module in enumerate(modules) for item in [*module.__dict__.items()]]
        held = [each for each in held if each[1] not in _OWN and not isinstance(each[2], (*SIMPLE, nn.Module))]
        self._holders = [(at, name) for at, name, value in held if _items(value) is not None]
        """Attributes with something in it."""
        values = [value for _, _, value in held]
        values += [each for value in values for each in _items(value) or ()]
        self._tensors = [value for value in values if isinstance(value, torch.Tensor)]
        self._shape, self._objects = self._now(modules)
        self.has_tensors = bool(self._tensors)
        """Whether there are tensors in it besides weights and buffers. It keeps their memory."""
        self.is_partial = any(name not in _RECORDS and _may_hide(value) for _, name, value in held)
        """Whether something in it may change in place, and may lie too deep for a look."""

    def holds(self) -> bool:
        """Whether all objects are the same. Equal numbers may have been made anew, and lists and dicts of the same things."""
        top = self._top()
        if top is None:
            return False
        shape, now = self._now([top, *self._modules])
        if shape != self._shape or len(now) != len(self._objects):
            return False
        if not all(map(is_, now, self._objects)):
            if not all(map(_are_remade, now, self._objects)):
                return False
            self._objects = now
        return True

    def _now(self, modules: list[nn.Module]) -> tuple[list[Any], list[Any]]:
        """The modules' types, the sizes of their tables and the versions of tensors; what the tables hold."""
        attributes = [*map(_attributes, modules)]
        attributes[0] = {name: value for name, value in [*attributes[0].items()] if name not in _TO_ENGINE}
        hooks = [each["_diffusers_hook"].hooks for each in attributes if each.get("_diffusers_hook") is not None]
        tables = [*attributes, *chain.from_iterable(map(_tables, modules)), *hooks]
        inside = (_items(attributes[at].get(name)) or () for at, name in self._holders)
        versions = [-1 if each.is_inference() else each._version for each in self._tensors]
        shape = [*map(type, modules), *map(len, tables), *versions]
        return shape, [*chain.from_iterable(map(dict.values, tables)), *chain.from_iterable(inside)]


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


def examine(root: nn.Module) -> Fingerprint | str:
    """Look at a module between forwards. Returns the state, or why forwards cannot share passes."""
    added: set[int] = set()
    named = [*root.named_modules()]
    for name, module in named:
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
        return f"{name or type(module).__name__} {finding}"
    return Fingerprint([module for _, module in named])
