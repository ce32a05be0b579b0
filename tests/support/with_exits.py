"""Lines that no interrupt strikes."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from types import CodeType


@cache
def exits_of(code: CodeType) -> frozenset[int]:
    """Where the code leaves a `with` block, back on the line that began it.

    Python raises nothing there from a signal: a lock that is written in C is let go by the instruction that comes next.
    """
    begins = _with_lines(code.co_filename)
    first: dict[int, int] = {}
    found = set()
    for start, _, line in code.co_lines():
        if line in begins and first.setdefault(line, start) != start:
            found.add(start)
    return frozenset(found)


@cache
def _with_lines(path: str) -> frozenset[int]:
    tree = ast.parse(Path(path).read_text())
    return frozenset(node.lineno for node in ast.walk(tree) if isinstance(node, ast.With))
