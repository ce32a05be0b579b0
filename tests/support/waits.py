"""The statements of the package that only order work, and methods without one of them: a test has to fail with each."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

Wait = tuple[Any, str, int]
"""A class, its method, and the number of the statement among those of the method."""


def waits_of(
    modules: Iterable[ModuleType], calls: Collection[str], texts: Collection[str] = (), leave: Collection[Any] = ()
) -> tuple[list[Wait], Callable[[Any, str, int], tuple[Any, str]]]:
    """Every such statement of the classes of `modules`, and a function that makes a method without one.

    Args:
        calls: The names of methods whose calls order work.
        texts: Calls that do, as a whole.
        leave: Pairs of a class and a method to leave out, by name.

    Returns:
        The waits, and a function of a wait: its mutant, and its text.
    """

    def is_wait(node: ast.AST) -> bool:
        return (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Attribute)
            and (node.value.func.attr in calls or ast.unparse(node.value) in texts)
        )

    def without(owner: Any, name: str, index: int) -> tuple[Any, str]:
        tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(owner, name))))
        wait = [node for node in ast.walk(tree) if is_wait(node)][index]
        text = ast.unparse(wait)

        class Remove(ast.NodeTransformer):
            def visit_Expr(self, node: ast.Expr) -> ast.AST:
                return ast.copy_location(ast.Pass(), node) if node is wait else node

        scope: dict[str, Any] = {}
        module = inspect.getmodule(owner)
        assert module is not None
        exec(compile(ast.fix_missing_locations(Remove().visit(tree)), "<mutant>", "exec"), module.__dict__, scope)
        return scope[name], text

    found: list[Wait] = []
    for module in modules:
        for node in ast.parse(Path(module.__file__ or "").read_text()).body:
            for method in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(method, ast.FunctionDef) and (node.name, method.name) not in leave:
                    num_waits = sum(map(is_wait, ast.walk(method)))
                    found += [(getattr(module, node.name), method.name, at) for at in range(num_waits)]
    return found, without
