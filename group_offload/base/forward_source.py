"""Finds out from its source which modules below it a forward, or another method, uses without calling the modules in between.

- `F.linear(x, self.embed.weight)` reads a weight of `embed`. So do `self.embed.look_up(x)`, if that method reads `self.weight`,
  and `self.processor(self, x)`, if the processor reads `attn.embed.weight` of the `attn` that it is given.
- `self.blocks[0].norm.emb(x)` calls a part of a block, and not the block.

diffusers' `VectorQuantizer` and `DiTTransformer2DModel` do such things, and transformers' Mamba. A forward without
source, or one that reaches a module in yet another way, seems to use nothing.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from .compiled import Around

_NEEDS_NO_VALUES = frozenset(
    [
        "device",
        "dim",
        "dtype",
        "is_cuda",
        "is_floating_point",
        "ndim",
        "numel",
        "requires_grad",
        "shape",
        "size",
        "stride",
    ]
)
"""The attributes of a tensor that are the same wherever it is."""
_LOOKS_ONLY = frozenset(["hasattr", "id", "isinstance", "type"])
"""Functions that read no value of their argument."""

_EDIT_WEIGHTS = frozenset(["peft", "torch"])
"""Packages whose modules have other methods than `forward` to change weights, or to load them."""

_GOES_ON = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

_MOST_KNOWN = 4096
"""The number of functions that are remembered."""

Step = str | int | None
"""An attribute, an index, or None for any index."""


@dataclass(frozen=True, slots=True)
class _AttributePath:
    """`name.a[0].b` in the source of a function: a variable, and the way from there."""

    name: str
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class _Access:
    """A place that a function reads or calls; for a call of another function, no place and that function's name.

    `given` has the arguments that are places themselves: by position, or by name.
    """

    place: _AttributePath | None
    function: str = ""
    given: tuple[tuple[int | str, _AttributePath], ...] = ()
    is_call: bool = False


@dataclass(frozen=True, slots=True)
class UsedParts:
    """What a forward uses of the modules below its own, without a call of the modules in between."""

    root: nn.Module
    """Its own."""
    apart: Container[nn.Module]
    read: dict[nn.Module, bool] = field(default_factory=dict)
    """Modules whose parameters or buffers it reads, its own among them, and whether only in a loop over modules."""
    called: dict[nn.Module, None] = field(default_factory=dict)
    """Modules that it calls."""
    known: set[tuple[Any, ...]] = field(default_factory=set)
    """The functions that were looked at, with the modules that they were given."""


def parts_used(module: nn.Module, method: str = "forward", apart: Container[nn.Module] = ()) -> UsedParts:
    """What a method of `module` uses of the module itself, and of the modules below it.

    Args:
        apart: Modules whose public methods are looked at by themselves: what these use does not count again.
    """
    found = UsedParts(module, apart)
    held = vars(module).get(method)
    while isinstance(held, Around):
        held = held.compiled
    for function in (getattr(held, "__func__", None), *_overridden(type(module), method)):
        _follow(function, {0: module}, found)
    return found


def methods_of(module: nn.Module) -> tuple[str, ...]:
    """The public methods, beside its forward, that a module's class gives it and that take arguments."""
    cls: Any = type(module)
    return () if isinstance(module, torch.jit.ScriptModule) else _methods_of(cls)


@lru_cache(_MOST_KNOWN)
def _methods_of(cls: type) -> tuple[str, ...]:
    bases = cls.__mro__[: cls.__mro__.index(nn.Module)]
    found = {
        name: function
        for base in reversed(bases)
        if base.__module__.partition(".")[0] not in _EDIT_WEIGHTS and "save_pretrained" not in vars(base)
        for name, function in vars(base).items()
    }
    return tuple(
        name for name, function in found.items() if name[0] != "_" and name != "forward" and _computes(function)
    )


def _computes(function: Any) -> bool:
    """Whether this may be a method that computes: not one that goes on after it has returned, and none without arguments."""
    if not inspect.isfunction(function):
        return False
    code = inspect.unwrap(function).__code__
    return not code.co_flags & _GOES_ON and bool(
        code.co_argcount > 1 or code.co_kwonlyargcount or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    )


def _overridden(cls: Any, name: str) -> Iterator[Any]:
    """The methods of that name of all base classes: `super()` may lead to each."""
    bases = cls.__mro__[: cls.__mro__.index(nn.Module)] if nn.Module in cls.__mro__ else cls.__mro__
    for base in bases:
        if name in vars(base):
            yield vars(base)[name]


def _follow(function: Any, given: Mapping[int | str, nn.Module], found: UsedParts) -> None:
    """Note what `function` uses of the modules that it is given, by position or by name."""
    if not inspect.isfunction(function):
        return
    names, uses, scope = _uses_in(function)
    at_names = ((name, given.get(name, given.get(index))) for index, name in enumerate(names))
    modules = {name: module for name, module in at_names if module is not None}
    key = (function, *((name, id(module)) for name, module in modules.items()))
    if key in found.known or not modules:
        return
    found.known.add(key)
    for use in uses:
        arguments = {at: module for at, place in use.given for module, rest in _reached(modules, place) if not rest}
        if use.place is None:
            _follow(scope.get(use.function), arguments, found)
            continue
        behind_self = {at + 1 if isinstance(at, int) else at: module for at, module in arguments.items()}
        for at, rest in _reached(modules, use.place):
            with_self = {0: at, **behind_self}
            if not rest:
                if use.is_call and at is not found.root:
                    found.called[at] = None
                    if arguments:
                        _follow(inspect.getattr_static(type(at), "forward"), with_self, found)
                continue
            name = rest[0]
            if any(_found(table, name) is not None for table in (at._parameters, at._buffers)):
                found.read[at] = found.read.get(at, True) and None in use.place.steps
            elif len(rest) == 1 and isinstance(name, str):
                if at is not found.root and at in found.apart and name in methods_of(at):
                    continue
                for method in _overridden(type(at), name):
                    _follow(method, with_self, found)
                held = vars(at).get(name)
                if use.is_call and inspect.isfunction(held):
                    _follow(held, arguments, found)
                elif use.is_call and held is not None:
                    _follow(getattr(type(held), "__call__", None), behind_self, found)  # noqa: B004


def _reached(modules: Mapping[str, nn.Module], place: _AttributePath) -> Iterator[tuple[nn.Module, tuple[Step, ...]]]:
    """The last module on the way to a place, and the steps that lead on from there. An open index leads to several."""
    start = modules.get(place.name)
    pending = [] if start is None else [(start, place.steps)]
    while pending:
        at, steps = pending.pop()
        children = at._modules
        if steps and isinstance(steps[0], str) and _found(children, steps[0]) is not None:
            pending.append((_found(children, steps[0]), steps[1:]))
        elif steps and not isinstance(steps[0], str) and isinstance(at, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            inside = [child for child in children.values() if child is not None]
            index = steps[0]
            if isinstance(index, int):
                inside = inside[index : index + 1 or None]
            pending.extend((child, steps[1:]) for child in inside)
        else:
            yield at, steps


def _found(table: Any, name: Any) -> Any:
    """The value under `name`; None if there is none. (The tables of scripted modules have no method `get`.)"""
    return table[name] if name in table else None  # noqa: SIM401


@lru_cache(_MOST_KNOWN)
def _uses_in(function: Callable[..., Any]) -> tuple[tuple[str, ...], tuple[_Access, ...], Mapping[str, Any]]:
    """The names of a function's arguments, what it uses of them, and its globals."""
    try:
        function = inspect.unwrap(function)
        code = function.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, ValueError, SyntaxError, AttributeError):
        return (), (), {}  # there is no source, or it is a part of an expression (a lambda)
    reader = _SourceVisitor(names)
    reader.visit(tree)
    return names, tuple(reader.uses), function.__globals__


class _SourceVisitor(ast.NodeVisitor):
    """Collects what one function does with the modules that it is given, and with variables that stand for parts of them."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._places = {name: _AttributePath(name) for name in names}
        if names:
            self._places["super()"] = self._places[names[0]]
        self.uses: dict[_Access, None] = {}

    def _place(self, node: ast.expr) -> _AttributePath | None:
        if isinstance(node, ast.Name):
            return self._places.get(node.id)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
            return self._places.get(f"{node.func.id}()")
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            start = self._place(node.value)
            if start is None:
                return None
            step: Step = None
            if isinstance(node, ast.Attribute):
                step = node.attr
            else:
                with suppress(ValueError):
                    index = ast.literal_eval(node.slice)
                    step = index if isinstance(index, (int, str)) else None
            return _AttributePath(start.name, (*start.steps, step))
        return None

    def _bind(self, target: ast.expr, place: _AttributePath | None) -> None:
        if isinstance(target, ast.Name) and place is not None:
            self._places.setdefault(target.id, place)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self._bind(target, self._place(node.value))

    def visit_For(self, node: ast.For) -> None:
        """`for block in self.blocks`, also `enumerate(self.blocks)` and `zip(self.blocks, others)`."""
        sources, targets = [node.iter], [node.target]
        if (
            isinstance(node.iter, ast.Call)
            and isinstance(node.iter.func, ast.Name)
            and isinstance(node.target, ast.Tuple)
        ):
            sources, targets = node.iter.args, node.target.elts[node.iter.func.id == "enumerate" :]
        for source, target in zip(sources, targets, strict=False):
            place = self._place(source)
            self._bind(target, place and _AttributePath(place.name, (*place.steps, None)))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        place = self._place(node)
        if place is None:
            self.visit(node.value)
        elif isinstance(node.ctx, ast.Load) and not (len(place.steps) > 1 and node.attr in _NEEDS_NO_VALUES):
            self.uses[_Access(place)] = None

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in _LOOKS_ONLY:
            return
        arguments: list[tuple[int | str, ast.expr]] = [*enumerate(node.args)]
        arguments += [(keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg is not None]
        given = tuple((at, place) for at, value in arguments if (place := self._place(value)) is not None)
        place = self._place(node.func)
        if place is None and isinstance(node.func, ast.Attribute) and node.func.attr == "forward" and given[:1]:
            # `Block.forward(self.block, x)` is `self.block.forward(x)`
            place = _AttributePath(given[0][1].name, (*given[0][1].steps, "forward"))
            given = tuple((at - 1 if isinstance(at, int) else at, value) for at, value in given[1:])
        if place is not None and not (len(place.steps) > 1 and place.steps[-1] in _NEEDS_NO_VALUES):
            self.uses[_Access(place, given=given, is_call=True)] = None
        elif isinstance(node.func, ast.Name) and given:
            self.uses[_Access(None, node.func.id, given)] = None
        self.generic_visit(node)
