"""Text for people: names that came from outside, and tables."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from html import escape

_NUMBERS = (1, 2)
"""The columns of tables that are numbers."""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """A question that names the nearest of `known`, with a space before it; empty if none is near."""
    close = difflib.get_close_matches(str(name), known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def short(value: object) -> str:
    """What a caller gave in place of something else, for one line of a message: its name where it would take more."""
    said = f"the class {value.__name__}" if isinstance(value, type) else repr(value)
    return said if len(said) <= 80 and said.isprintable() else type(value).__name__


def printable(value: str) -> str:
    """`value` without what a terminal would obey: names and headers may hold anything, escape sequences too."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in value)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose columns but the first, and the fourth, are numbers; the first row is its head."""
    plain = [[*map(printable, row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*plain, strict=True)]
    lines = [
        "  ".join(
            f"{cell:>{width}}" if at in _NUMBERS else f"{cell:<{width}}"
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in plain
    ]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """The same table for a notebook or a page."""
    parts = ["<table>"]
    for number, row in enumerate(rows):
        tag = "td" if number else "th"
        cells = (
            f"<{tag}{' class=number' if at in _NUMBERS else ''}>{escape(printable(cell))}</{tag}>"
            for at, cell in enumerate(row)
        )
        parts.append(f"<tr>{''.join(cells)}</tr>")
    return "".join([*parts, "</table>"])
