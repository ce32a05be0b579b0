"""Draws front.svg, the picture of the README, from two results of `python -m benchmarks weights`.

    python docs/images/draw_front.py

On the left the time of a step against the device memory that it takes, on the right what a model in files takes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from svg import close_picture, line, open_picture, text

HERE = Path(__file__).parent
RESULTS = HERE.parent.parent / "benchmarks/results/weights"
GIB = 1 << 30
WIDTH, HEIGHT, TOP, BOTTOM, LEFT, MIDDLE = 860, 372, 92, 44, 52, 556
OURS, DIFFUSERS, RESIDENT = "#2a6f97", "#c98a1b", "#777777"
MOST_SECONDS, MOST_GIB = 0.62, 24.5
IN_FILES = {
    "group_offload": ("ours block, checkpoint @12GiB", OURS),
    "diffusers": ("diffusers block+stream, disk @12GiB", DIFFUSERS),
}
FIGURES = (
    ("a step", "step_s", 1, "s"),
    ("most RAM of the process", "rss_peak_bytes", GIB, "GiB"),
    ("written to the drive by set-up", "setup_write_bytes", GIB, "GiB"),
)


def x_of(gib: float) -> float:
    return LEFT + (MIDDLE - 48 - LEFT) * gib / MOST_GIB


def y_of(seconds: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * seconds / MOST_SECONDS


def place(arm: Mapping[str, Any]) -> tuple[float, float]:
    return x_of(arm["device_peak_bytes"] / GIB), y_of(arm["step_s"])


def point(arm: Mapping[str, Any], colour: str) -> str:
    x, y = place(arm)
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>'


def draw_steps(arms: Mapping[str, Any]) -> list[str]:
    """Each arm a point. Those of this package are a line: a budget chooses a place on it."""
    parts = [text(LEFT, TOP - 24, "Weights in RAM: time of a step against VRAM", weight="bold")]
    for tenth in range(7):
        parts += [line(LEFT, y_of(tenth / 10), MIDDLE - 48, y_of(tenth / 10), "#e4e4e4")]
        parts += [text(LEFT - 6, y_of(tenth / 10) + 4, f"{tenth / 10:.1f} s", "end", size=12, fill="#555")]
    parts += [
        text(x_of(gib), HEIGHT - BOTTOM + 18, f"{gib} GiB", "middle", size=12, fill="#555") for gib in range(0, 25, 4)
    ]
    ours = [arm for name, arm in arms.items() if name == "ours block" or name.startswith("ours block vram=")]
    ours.sort(key=lambda arm: arm["device_peak_bytes"])
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, ours))
    parts.append(f'<polyline points="{points}" fill="none" stroke="{OURS}" stroke-width="2.5"/>')
    parts += [point(arm, OURS) for arm in ours]
    resident = arms["resident"]
    parts += [
        point(resident, RESIDENT),
        text(place(resident)[0] + 8, place(resident)[1] - 12, "resident", "end", fill=RESIDENT),
    ]
    for name, arm in arms.items():
        if arm["engine"] == "diffusers":
            level = "leaf" if "leaf" in name else "block"
            x, y = place(arm)
            at = (x + 10, y + 14) if level == "leaf" else (x + 10, y - 6)
            parts += [
                point(arm, DIFFUSERS),
                text(*at, f"diffusers, {level} level: {arm['step_s']:.2f} s", fill=DIFFUSERS),
            ]
    middle, quarter = ours[len(ours) // 2], ours[len(ours) // 2 - 1]
    x, y = place(quarter)
    parts.append(text(x + 12, y - 4, "group_offload: a budget chooses the point", fill=OURS, weight="bold"))
    for arm in (ours[0], middle):
        parts.append(text(place(arm)[0] + 4, place(arm)[1] + 20, f"{arm['step_s']:.2f} s", fill=OURS))
    slow = arms["accelerate cpu_offload"]
    facts = f"accelerate, sequential: {slow['step_s']:.1f} s at {slow['device_peak_bytes'] / GIB:.1f} GiB, beyond this picture"
    return [*parts, text(MIDDLE - 48, TOP - 4, facts, "end", size=12, fill="#b0413e")]


def draw_files(arms: Mapping[str, Any]) -> list[str]:
    """Pairs of bars: for each figure, both arms."""
    parts = [text(MIDDLE, TOP - 24, "Weights in files, 12 GiB of RAM", weight="bold")]
    for number, (title, key, unit, name_of_unit) in enumerate(FIGURES):
        top = TOP + 84 * number
        parts.append(text(MIDDLE, top, title, size=12, fill="#555"))
        most = max(arms[name][key] for name, _ in IN_FILES.values())
        for at, (engine, (name, colour)) in enumerate(IN_FILES.items()):
            value = arms[name][key]
            width = max(2.0, 110 * value / most)
            y = top + 8 + 24 * at
            parts.append(f'<rect x="{MIDDLE}" y="{y}" width="{width:.1f}" height="18" rx="2" fill="{colour}"/>')
            label = f"{value / unit:.1f} {name_of_unit}, {engine}"
            parts.append(text(MIDDLE + width + 6, y + 13.5, label, size=12, fill=colour))
    return parts


def draw(budgets: Mapping[str, Any], files: Mapping[str, Any]) -> str:
    size, device = budgets["arms"]["resident"]["weight_bytes"] / GIB, budgets["machine"]["device"]
    facts = f"{size:.0f} GiB of weights, 4096 image tokens, one {device}; every output has the resident model's bits"
    parts = open_picture(WIDTH, HEIGHT, "A FLUX.1-size transformer", facts, LEFT - 36)
    return close_picture([*parts, *draw_steps(budgets["arms"]), *draw_files(files["arms"])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE)
    options = parser.parse_args()
    budgets, files = (json.loads((RESULTS / f"flux1-{name}-h200.json").read_text()) for name in ("budgets", "files"))
    (options.output / "front.svg").write_text(draw(budgets, files))


if __name__ == "__main__":
    main()
