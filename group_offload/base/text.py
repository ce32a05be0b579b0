"""Text for people: names that came from outside, amounts, and tables."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from html import escape

Table = Sequence[Sequence[str]]
"""Rows of cells. The first row is the head."""

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
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


def describe_bytes(num_bytes: float, *, digits: int = 3, round_up: bool = False) -> str:
    """Bytes for people: `"8 GiB"`, `"1.5 MiB"`. Budgets may be written like this.

    Args:
        round_up: whether the text never says less than `num_bytes`, as the smallest budget that works needs it.
    """
    power = 0
    while power + 1 < len(_BINARY) and num_bytes >= 1024 ** (power + 1):
        power += 1
    amount = Fraction(num_bytes) / 1024**power
    decimals = max(0, digits - len(str(int(amount)))) if power else 0
    scale = 10**decimals
    rounded = (math.ceil(amount * scale) if round_up else round(amount * scale)) / scale
    text = f"{rounded:.{decimals}f}"
    return f"{text.rstrip('0').rstrip('.') if decimals else text} {_BINARY[power]}"


def describe_seconds(value: float) -> str:
    """Seconds for people: `"805 ms"`."""
    return f"{value * 1e3:.4g} ms" if 0 < value < 1 else f"{value:.4g} s"


def table(rows: Table) -> list[str]:
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


class Shown:
    """What `print` shows as text, and notebooks and pages as HTML: tables, and sentences below them."""

    __slots__ = ()

    def _shown(self) -> tuple[Sequence[Table], Sequence[str]]:
        """The tables, and the sentences."""
        raise NotImplementedError

    def __str__(self) -> str:
        tables, sentences = self._shown()
        blocks = [*map(table, tables), [*map(printable, sentences)]]
        return "\n\n".join("\n".join(lines) for lines in blocks if lines)

    def _repr_html_(self) -> str:
        tables, sentences = self._shown()
        return "".join([*map(html_table, tables), *map(html_paragraph, sentences)])


def html_paragraph(sentence: str) -> str:
    return f"<p>{escape(printable(sentence))}</p>"


def html_table(rows: Table) -> str:
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
