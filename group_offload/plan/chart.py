"""A picture of how long a pass takes against device memory, for several sizes of RAM."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from xml.sax.saxutils import escape

from ..base.text import printable
from .budgets import describe_bytes

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 130, 56, 50
_COLOURS = ("#b0413e", "#c98a1b", "#4b7f52", "#2a6f97", "#5b4a8a")


def draw_chart(
    title: str,
    facts: str,
    sizes: Sequence[int],
    lines: Mapping[int, Sequence[float]],
    chosen: tuple[int, float] | None,
) -> str:
    """Time on a logarithmic scale: reading files and not reading them is a difference of ten times."""
    times = [seconds for line in lines.values() for seconds in line if seconds > 0] or [1.0]
    low, high = math.log10(min(times)) - 0.05, math.log10(max(times)) + 0.05
    first, last = sizes[0], max(sizes[-1], sizes[0] + 1)

    def x(num_bytes: float) -> float:
        return _LEFT + (num_bytes - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)

    def y(seconds: float) -> float:
        return _HEIGHT - _BOTTOM - (math.log10(seconds) - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _words(16, 22, title, weight="bold"),
        _words(16, 40, f"seconds a pass, predicted; {facts}", fill="#555"),
        _words(_LEFT + (_WIDTH - _LEFT - _RIGHT) / 2, _HEIGHT - 10, "VRAM", anchor="middle"),
    ]
    for seconds in _ticks(low, high):
        parts.append(_stroke([(_LEFT, y(seconds)), (_WIDTH - _RIGHT, y(seconds))], "#e4e4e4", 1))
        parts.append(_words(_LEFT - 8, y(seconds) + 4, f"{seconds:g} s", anchor="end"))
    for number in range(5):
        num_bytes = first + (last - first) * number / 4
        parts.append(_words(x(num_bytes), _HEIGHT - _BOTTOM + 18, describe_bytes(num_bytes), anchor="middle"))
    for colour, line in zip(_COLOURS, lines.values(), strict=False):
        points = [(x(size), y(seconds)) for size, seconds in zip(sizes, line, strict=True) if seconds > 0]
        parts.append(_stroke(points, colour, 2))
    parts.append(_words(_WIDTH - _RIGHT + 10, _TOP + 4, "RAM for weights"))
    for number, (colour, ram) in enumerate(zip(_COLOURS, lines, strict=False), 1):
        at = _TOP + 4 + 20 * number
        parts.append(_stroke([(_WIDTH - _RIGHT + 10, at - 4), (_WIDTH - _RIGHT + 28, at - 4)], colour, 2))
        parts.append(_words(_WIDTH - _RIGHT + 34, at, describe_bytes(ram)))
    if chosen is not None and chosen[1] > 0:
        parts.append(
            f'<circle cx="{x(chosen[0]):.1f}" cy="{y(chosen[1]):.1f}" r="5" fill="none" stroke="#222" stroke-width="2"/>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _ticks(low: float, high: float) -> Iterator[float]:
    for power in range(math.floor(low), math.ceil(high) + 1):
        yield from (digit * 10.0**power for digit in (1, 2, 5) if low <= math.log10(digit) + power <= high)


def _words(
    x: float, y: float, content: str, *, anchor: str = "start", fill: str = "#222", weight: str = "normal"
) -> str:
    content = escape(printable(content))
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" font-weight="{weight}">{content}</text>'


def _stroke(points: Sequence[tuple[float, float]], colour: str, width: int) -> str:
    at = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{at}" fill="none" stroke="{colour}" stroke-width="{width}"/>'
