"""Lines that no interrupt strikes, though a trace function can raise there."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from types import CodeType


@cache
def unstruck(code: CodeType) -> frozenset[int]:
    """The offsets at which Python raises nothing from a signal, and where an error would leave a lock taken.

    One is where the code leaves a `with` block, back on the line that began it: a lock that is written in C is let go by the
    instruction that comes next. The other is a `try:` within a `with` block. Its only instruction does nothing, and the
    compiler leaves it out of the range in which an error ends the block.
    """
    begins, tries = _lines(code.co_filename)
    first: dict[int, int] = {}
    found = set()
    for start, _, line in code.co_lines():
        if line in tries or (line in begins and first.setdefault(line, start) != start):
            found.add(start)
    return frozenset(found)


@cache
def _lines(path: str) -> tuple[frozenset[int], frozenset[int]]:
    """The lines of a file that begin a `with` block, and those that begin a `try` within one."""
    blocks = [node for node in ast.walk(ast.parse(Path(path).read_text())) if isinstance(node, ast.With)]
    tries = [node.lineno for block in blocks for node in ast.walk(block) if isinstance(node, ast.Try)]
    return frozenset(block.lineno for block in blocks), frozenset(tries)
