"""Finds out from its source which weights of its children a module's forward reads without calling them.

`F.linear(x, self.embed.weight)` computes with a weight of `embed`, and calls only the module around it. diffusers'
`VectorQuantizer` and transformers' Mamba do that. A forward without source, or one that reaches the child in another way than
`self.child.weight`, seems to read nothing.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from torch import nn

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

_MOST_KNOWN = 4096
"""The number of classes and methods that are remembered."""

Chain = tuple[str, ...]
"""The names in `self.a.b.c`, without `self`."""


def children_read(module: nn.Module) -> Iterator[nn.Module]:
    """The modules below `module` whose parameters or buffers its forward reads without calling them. Some may come twice."""
    cls: Any = type(module)
    for chain in _chains_of(cls, inspect.getattr_static(cls, "forward")):  # TorchScript's has no value on the class
        at = module
        for name in chain:
            child = _found(at._modules, name)
            if child is None:
                break
            at = child
        if at is not module and any(_found(table, name) is not None for table in (at._parameters, at._buffers)):
            yield at


def _found(table: Any, name: str) -> Any:
    """The value under `name`; None if there is none. (The tables of scripted modules have no method `get`.)"""
    return table[name] if name in table else None  # noqa: SIM401


@lru_cache(_MOST_KNOWN)
def _chains_of(cls: Any, forward: object) -> tuple[Chain, ...]:
    """The attributes of children that `forward` reads, and the methods that it calls, those of base classes too.

    Args:
        forward: The present forward of the class, which somebody may have exchanged.
    """
    found: dict[Chain, None] = {}
    pending, known = ["forward"], {"forward"}
    bases = cls.__mro__[: cls.__mro__.index(nn.Module)]
    while pending:
        name = pending.pop()
        for method in [vars(base)[name] for base in bases if name in vars(base)]:
            for chain in _chains_in(method) if inspect.isfunction(method) else ():
                if len(chain) > 1:
                    found[chain] = None
                elif chain[0] not in known and hasattr(cls, chain[0]):
                    known.add(chain[0])
                    pending.append(chain[0])
    return tuple(found)


@lru_cache(_MOST_KNOWN)
def _chains_in(method: Callable[..., Any]) -> tuple[Chain, ...]:
    try:
        method = inspect.unwrap(method)
        self_name = method.__code__.co_varnames[0]
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, TypeError, ValueError, SyntaxError, AttributeError, IndexError):
        return ()  # there is no source, or it is a part of an expression (a lambda)
    reader = _Reader(self_name)
    reader.visit(tree)
    return tuple(reader.chains)


class _Reader(ast.NodeVisitor):
    """Collects the attributes of `self` in one function."""

    def __init__(self, self_name: str) -> None:
        self._self_name = self_name
        self.chains: dict[Chain, None] = {}

    def visit_Attribute(self, node: ast.Attribute) -> None:
        names: list[str] = []
        at: ast.expr = node
        while isinstance(at, ast.Attribute):
            names.append(at.attr)
            at = at.value
        if not (isinstance(at, ast.Name) and at.id == self._self_name):
            self.visit(at)
        elif isinstance(node.ctx, ast.Load) and not (len(names) > 1 and names[0] in _NEEDS_NO_VALUES):
            self.chains[tuple(reversed(names))] = None

    def visit_Call(self, node: ast.Call) -> None:
        if not (isinstance(node.func, ast.Name) and node.func.id in _LOOKS_ONLY):
            self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if not all(isinstance(each, (ast.Is, ast.IsNot)) for each in node.ops):
            self.generic_visit(node)
