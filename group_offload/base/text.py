"""Text for people: names that came from outside, and tables."""

from __future__ import annotations

from collections.abc import Sequence


def printable(value: str) -> str:
    """`value` without what a terminal would obey: names and headers may hold anything, escape sequences too."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in value)


def table(rows: Sequence[tuple[str, str, str, str]]) -> list[str]:
    """Lines of a table whose columns two and three are numbers; the first row is its head."""
    plain = [[*map(printable, row)] for row in rows]
    first, second, third, _ = (max(map(len, column)) for column in zip(*plain, strict=True))
    lines = [f"{a:<{first}}  {b:>{second}}  {c:>{third}}  {d}".rstrip() for a, b, c, d in plain]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]
