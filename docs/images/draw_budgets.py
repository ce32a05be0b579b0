"""Draws budgets.svg: the time of a step against `vram_budget`, from a result of `python -m benchmarks weights`.

python docs/images/draw_budgets.py benchmarks/results/weights/flux1-budgets-h200.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from svg import close_picture, line, open_picture, text

GIB = 1 << 30
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 360, 64, 24, 70, 60


def draw(report: Mapping[str, Any]) -> str:
    """Measured steps in a row, what was predicted, and the limit: compute, or what is sent over the link's bandwidth."""
    arms = [arm for name, arm in report["arms"].items() if name.startswith("ours block vram=") and "step_s" in arm]
    arms.sort(key=lambda arm: arm["vram_budget"])
    resident = report["arms"]["resident"]["in_a_row_s"]
    link = report["machine"]["pinned_h2d_bytes_per_s"]
    most = max(arm["in_a_row_s"] for arm in arms) * 1.15
    widest = arms[-1]["vram_budget"] * 1.05

    def x(num_bytes: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * num_bytes / widest

    def y(seconds: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * seconds / most

    limits = [max(resident, arm["h2d_bytes"] / link) for arm in arms]
    facts = f"FLUX.1-size transformer, weights in RAM; one {report['machine']['device']}; points are measured"
    parts = open_picture(WIDTH, HEIGHT, "Time a step against the device memory that is given", facts, LEFT)
    for tenth in range(int(most * 10) + 1):
        parts += [line(LEFT, y(tenth / 10), WIDTH - RIGHT, y(tenth / 10), "#dddddd")]
        parts += [text(LEFT - 8, y(tenth / 10) + 4, f"{tenth / 10:.1f} s", anchor="end")]
    for gib in range(0, int(widest / GIB) + 1, 4):
        parts += [text(x(gib * GIB), HEIGHT - BOTTOM + 18, f"{gib} GiB", anchor="middle")]
    points = " ".join(f"{x(a['vram_budget']):.1f},{y(s):.1f}" for a, s in zip(arms, limits, strict=True))
    parts.append(f'<polyline points="{points}" fill="none" stroke="#c98a1b" stroke-width="2"/>')
    for arm in arms:
        cx, cy = x(arm["vram_budget"]), y(arm["in_a_row_s"])
        parts.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="4" fill="#2a6f97"/>')
        parts.append(text(cx, cy - 9, f"{arm['in_a_row_s']:.3f}", anchor="middle"))
    parts += [line(LEFT, y(resident), WIDTH - RIGHT, y(resident), "#777777")]
    parts += [text(WIDTH - RIGHT, y(resident) + 16, f"resident: {resident:.3f} s", anchor="end")]
    parts += [
        text(LEFT, HEIGHT - 14, "line: the limit (compute, or the bytes that are sent over the link's bandwidth)")
    ]
    return close_picture(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    options = parser.parse_args()
    report = json.loads(options.result.read_text())
    (Path(__file__).parent / "budgets.svg").write_text(draw(report))


if __name__ == "__main__":
    main()
