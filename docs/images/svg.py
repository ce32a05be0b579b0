"""What the pictures of this folder are made of: SVG elements. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def open_picture(width: float, height: float, title: str, facts: str, left: float) -> list[str]:
    """The picture's first elements: a white ground, and two lines at the top."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        text(left, 22, title, weight="bold"),
        text(left, 42, facts, fill="#555"),
    ]


def close_picture(parts: Sequence[str]) -> str:
    return "\n".join([*parts, "</svg>", ""])


def text(x: float, y: float, content: str, anchor: str = "start", **style: Any) -> str:
    fill, weight, size = style.get("fill", "#222"), style.get("weight", "normal"), style.get("size", 13)
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" font-weight="{weight}" font-size="{size}">'
        f"{content}</text>"
    )


def line(x1: float, y1: float, x2: float, y2: float, color: str, *, dash: str = "none", width: float = 1) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" stroke-width="{width}" '
        f'stroke-dasharray="{dash}"/>'
    )
