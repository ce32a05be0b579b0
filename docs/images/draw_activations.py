"""Draws activations.svg: step and peak over the length of the sequence, from a result of `python -m benchmarks activations`.

python docs/images/draw_activations.py benchmarks/results/activations/flux1-h200.json
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from svg import close_picture, line, logarithmic, open_picture, text, ticks

WIDTH, PANEL, TOP, BOTTOM, LEFT, GAP = 960, 320, 84, 64, 56, 64
COLOURS = ("#777777", "#b0413e", "#c98a1b", "#5b4a8a", "#2a6f97", "#4b7f52", "#a0a0a0")
DASHES = ("6 4", "2 3", "10 3 2 3")
Line = Mapping[float, float]
"""The height at each number of tokens."""
Style = Mapping[str, tuple[str, str]]
"""The colour and the dashes of each line."""


def draw(report: Mapping[str, Any]) -> str:
    """Step and peak of each arm, and dashed the limits of the arm `ours`. All scales are logarithmic."""
    machine, model = report["machine"], report["model"]

    def lines(arm: str, key: str, scale: float = 1) -> dict[float, float]:
        found = {size["num_tokens"]: size["arms"].get(arm, {}).get(key) for size in report["sizes"]}
        return {tokens: value * scale for tokens, value in found.items() if value}

    arms = [arm for arm in report["sizes"][0]["arms"] if arm != "none, copies beside" and lines(arm, "step_s")]
    steps = {arm: lines(arm, "step_s") for arm in arms}
    steps |= {"bar of ours": lines("ours", "limit_s"), "both phases of ours": lines("ours", "phases_limit_s")}
    peaks = {arm: lines(arm, "peak_bytes", 2**-30) for arm in arms}
    peaks |= {"formula of ours": lines("ours", "expected_peak_bytes", 2**-30)}
    style = {arm: (COLOURS[at % len(COLOURS)], "none") for at, arm in enumerate(arms)}
    limits = [name for name in (*steps, *peaks) if name not in arms]
    style |= {name: ("#222", DASHES[at % len(DASHES)]) for at, name in enumerate(limits)}

    height = TOP + PANEL + BOTTOM + 20 * math.ceil(len(style) / 4)
    facts = f"{model['name']}, {model['what']}, one {machine['device']}, torch {machine['torch']}, {report['date']}"
    parts = open_picture(WIDTH, height, "A training step over the length of the sequence", escape(facts), LEFT)
    width = (WIDTH - LEFT - 24 - GAP) / 2
    parts += _panel(LEFT, width, "seconds a step", steps, style)
    parts += _panel(LEFT + width + GAP, width, "GiB of device memory at the peak", peaks, style)
    for at, (name, (colour, dash)) in enumerate(style.items()):
        x, y = LEFT + at % 4 * 222, TOP + PANEL + BOTTOM + 20 * (at // 4)
        parts.append(line(x, y - 4, x + 24, y - 4, colour, dash=dash, width=2))
        parts.append(text(x + 30, y, escape(name), size=12))
    return close_picture(parts)


def _panel(left: float, width: float, name: str, lines: Mapping[str, Line], style: Style) -> Iterator[str]:
    points = [point for each in lines.values() for point in each.items()]
    yield text(left, TOP - 12, name, fill="#555", size=12)
    if not points:
        yield text(left, TOP + 20, "not measured", fill="#777", size=12)
        return
    x_of = logarithmic([x for x, _ in points], left, left + width)
    y_of = logarithmic([y for _, y in points], TOP + PANEL, TOP)
    for value in ticks([y for _, y in points]):
        yield line(left, y_of(value), left + width, y_of(value), "#e4e4e4")
        yield text(left - 8, y_of(value) + 4, f"{value:g}", "end", size=12)
    for x in sorted({x for x, _ in points}):
        yield line(x_of(x), TOP, x_of(x), TOP + PANEL, "#f0f0f0")
        yield text(x_of(x), TOP + PANEL + 18, f"{x:g}", "middle", size=12)
    yield text(left + width, TOP + PANEL + 36, "tokens", "end", fill="#555", size=12)
    for label, each in lines.items():
        colour, dash = style[label]
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in sorted(each.items()))
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
        if dash == "none":
            for x, y in each.items():
                yield f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3.5" fill="{colour}"/>'


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, metavar="FILE.json")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "activations.svg", metavar="FILE.svg")
    options = parser.parse_args()
    options.output.write_text(draw(json.loads(options.result.read_text())))
