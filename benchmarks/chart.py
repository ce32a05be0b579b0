"""Pictures of results: lines over one measure, in panels side by side, on logarithmic scales. Standard library only."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "docs" / "images"))

from draw_memory import line, text

Line = Mapping[float, float]
"""y of each x."""
Scale = Callable[[float], float]
_WIDTH, _PANEL, _TOP, _BOTTOM, _LEFT, _GAP = 960, 320, 84, 64, 56, 64
_COLOURS = ("#777777", "#b0413e", "#c98a1b", "#5b4a8a", "#2a6f97", "#4b7f52", "#a0a0a0")
_DASHES = ("6 4", "2 3", "10 3 2 3")


def draw_panels(
    title: str,
    facts: str,
    x_name: str,
    panels: Mapping[str, tuple[Mapping[str, Line], Mapping[str, Line]]],
) -> str:
    """An SVG picture. A panel has a name for y, lines with points, and dashed lines without."""
    names = list(dict.fromkeys(name for lines, _ in panels.values() for name in lines))
    dashed = list(dict.fromkeys(name for _, lines in panels.values() for name in lines))
    colours = {name: _COLOURS[number % len(_COLOURS)] for number, name in enumerate(names)}
    dashes = {name: _DASHES[number % len(_DASHES)] for number, name in enumerate(dashed)}
    rows = math.ceil((len(names) + len(dashed)) / 4)
    height = _TOP + _PANEL + _BOTTOM + 20 * rows
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        text(_LEFT, 24, escape(title), weight="bold"),
        text(_LEFT, 44, escape(facts), fill="#555"),
    ]
    width = (_WIDTH - _LEFT - 24 - _GAP * (len(panels) - 1)) / max(1, len(panels))
    for number, (y_name, (lines, limits)) in enumerate(panels.items()):
        parts += _panel(_LEFT + number * (width + _GAP), width, x_name, y_name, lines, limits, colours, dashes)
    for number, name in enumerate([*names, *dashed]):
        x, y = _LEFT + number % 4 * 222, _TOP + _PANEL + _BOTTOM + 20 * (number // 4)
        parts.append(line(x, y - 4, x + 24, y - 4, colours.get(name, "#222"), dash=dashes.get(name, "none"), width=2))
        parts.append(text(x + 30, y, escape(name), size=12))
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    left: float,
    width: float,
    x_name: str,
    y_name: str,
    lines: Mapping[str, Line],
    limits: Mapping[str, Line],
    colours: Mapping[str, str],
    dashes: Mapping[str, str],
) -> Iterator[str]:
    points = [point for each in (*lines.values(), *limits.values()) for point in each.items()]
    yield text(left, _TOP - 12, escape(y_name), fill="#555", size=12)
    if not points:
        yield text(left, _TOP + 20, "not measured", fill="#777", size=12)
        return
    x_low, x_high = _range([x for x, _ in points])
    y_low, y_high = _range([y for _, y in points])

    def x_of(value: float) -> float:
        return left + (math.log(value) - x_low) / (x_high - x_low) * width

    def y_of(value: float) -> float:
        return _TOP + _PANEL - (math.log(value) - y_low) / (y_high - y_low) * _PANEL

    for value in _ticks(y_low, y_high):
        yield line(left, y_of(value), left + width, y_of(value), "#e4e4e4")
        yield text(left - 8, y_of(value) + 4, f"{value:g}", "end", size=12)
    for x in sorted({x for x, _ in points}):
        yield line(x_of(x), _TOP, x_of(x), _TOP + _PANEL, "#f0f0f0")
        yield text(x_of(x), _TOP + _PANEL + 18, f"{x:g}", "middle", size=12)
    yield text(left + width, _TOP + _PANEL + 36, escape(x_name), "end", fill="#555", size=12)
    for name, each in lines.items():
        yield from _stroke(each, x_of, y_of, colours[name], "none")
        for x, y in each.items():
            yield f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3.5" fill="{colours[name]}"/>'
    for name, each in limits.items():
        yield from _stroke(each, x_of, y_of, "#222", dashes[name])


def _stroke(each: Line, x_of: Scale, y_of: Scale, colour: str, dash: str) -> Iterator[str]:
    ends = sorted(each.items())
    for (x1, y1), (x2, y2) in itertools.pairwise(ends):
        yield line(x_of(x1), y_of(y1), x_of(x2), y_of(y2), colour, dash=dash, width=2)


def _range(values: list[float]) -> tuple[float, float]:
    return math.log(min(values) * 0.9), math.log(max(values) * 1.1)


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten."""
    exponents = range(math.floor(low / math.log(10)), math.ceil(high / math.log(10)) + 1)
    return [
        base * 10.0**power for power in exponents for base in (1, 2, 5) if low <= math.log(base * 10.0**power) <= high
    ]
