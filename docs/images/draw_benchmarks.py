"""Draws step-and-peak.svg and rss.svg from results of `python -m benchmarks weights`.

    python docs/images/draw_benchmarks.py benchmarks/results/weights/flux1-h200.json

Several results of one model on one machine are drawn as one: an arm that is in two of them is taken from the first.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from svg import close_picture, line, logarithmic, open_picture, text, ticks

HERE = Path(__file__).parent
GIB = 1 << 30
WIDTH = 860
COLOURS = {"resident": "#777777", "diffusers": "#c98a1b", "accelerate": "#b0413e", "ours": "#2a6f97"}
NAMES = {"resident": "resident", "diffusers": "diffusers", "accelerate": "accelerate", "ours": "group_offload"}
LEFT, RIGHT, TOP = 64, 24, 78


def merge(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """The first report with the arms that the others add.

    Raises:
        ValueError: the reports are of different models or machines.
    """
    first = reports[0]
    arms: dict[str, Any] = {}
    for report in reports:
        for where, what in (("model", "name"), ("model", "num_tokens"), ("machine", "device"), ("machine", "torch")):
            if report[where].get(what) != first[where].get(what):
                raise ValueError(
                    f"{report[where].get(what)} and {first[where].get(what)} do not belong into one picture."
                )
        arms = {**report["arms"], **arms}
    return {**first, "arms": {name: arm for name, arm in arms.items() if "step_s" in arm}}


# ------------------------------------------------------------------------------------------------ the pictures


def draw_steps(report: Mapping[str, Any]) -> str:
    """Step time against device peak, both on logarithmic scales, each arm a numbered point."""
    arms = report["arms"]
    floor = next(
        arm.get("used_weight_bytes", arm["weight_bytes"]) / report["machine"]["pinned_h2d_bytes_per_s"]
        for arm in arms.values()
    )
    bottom = 62 + 18 * math.ceil(len(arms) / 2)
    height = 340 + TOP + bottom
    x_of = logarithmic([*(arm["step_s"] for arm in arms.values()), floor], LEFT, WIDTH - RIGHT)
    y_of = logarithmic([arm["device_peak_bytes"] / GIB for arm in arms.values()], height - bottom, TOP)
    parts = [*_frame(height, "Time a step against device memory", report)]
    for value in ticks([arm["device_peak_bytes"] / GIB for arm in arms.values()]):
        parts += [line(LEFT, y_of(value), WIDTH - RIGHT, y_of(value), "#e4e4e4")]
        parts += [text(LEFT - 8, y_of(value) + 4, f"{value:g}", "end")]
    for value in ticks([*(arm["step_s"] for arm in arms.values()), floor]):
        parts += [line(x_of(value), TOP, x_of(value), height - bottom, "#f0f0f0")]
        parts += [text(x_of(value), height - bottom + 18, f"{value:g} s", "middle")]
    parts += [
        text(LEFT, TOP - 10, "GiB of device memory at the peak", fill="#555", size=12),
        text(WIDTH - RIGHT, height - bottom + 36, "a step", "end", fill="#555", size=12),
        line(x_of(floor), TOP, x_of(floor), height - bottom, "#999", dash="4 4"),
        text(x_of(floor) + 5, TOP + 12, f"all weights copied once: {floor:.3f} s", fill="#777", size=12),
    ]
    parts += _points(arms, x_of, y_of)
    for number, (name, arm) in enumerate(arms.items(), 1):
        column, row = divmod(number - 1, math.ceil(len(arms) / 2))
        at, down = LEFT + column * (WIDTH - LEFT) / 2, height - bottom + 62 + 18 * row
        label = (
            f"{name.replace('ours', NAMES['ours'])}: {arm['step_s']:.3f} s, {arm['device_peak_bytes'] / GIB:.2f} GiB"
        )
        parts.append(text(at, down, str(number), "end", fill=COLOURS[arm["engine"]], weight="bold", size=12))
        parts.append(text(at + 8, down, label, size=12))
    return close_picture(parts)


def _points(arms: Mapping[str, Any], x_of: Callable[[float], float], y_of: Callable[[float], float]) -> Iterator[str]:
    """Points lie where they belong; a number that would cover another one moves up, with a line to its point."""
    taken: list[tuple[float, float]] = []
    for number, arm in enumerate(arms.values(), 1):
        colour = COLOURS[arm["engine"]]
        x, y = x_of(arm["step_s"]), y_of(arm["device_peak_bytes"] / GIB)
        at, up = x + 8, y - 6
        while any(abs(at - other) < 17 and abs(up - above) < 12 for other, above in taken):
            up -= 12
        taken.append((at, up))
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}" fill-opacity="0.85"/>'
        if up < y - 6:
            yield line(x, y, at, up, colour, width=0.6)
        yield text(at, up, str(number), fill=colour, weight="bold", size=11)


def draw_rss(report: Mapping[str, Any]) -> str:
    """A bar for each arm: RSS after the last step, and its peak as a thin line."""
    arms = {name: arm for name, arm in report["arms"].items() if arm["engine"] != "resident"}
    row, left = 24, 290
    height = TOP + row * len(arms) + 40
    top = 1.02 * max(arm["rss_peak_bytes"] for arm in arms.values()) / GIB
    weights = next(iter(arms.values()))["weight_bytes"] / GIB

    def x(gib: float) -> float:
        return left + gib / top * (WIDTH - left - 110)

    parts = [*_frame(height, "RAM of the process (RSS) after the last step; thin: its peak, set-up included", report)]
    for gib in range(0, int(top) + 1, 10):
        parts += [
            line(x(gib), TOP - 6, x(gib), height - 34, "#e4e4e4"),
            text(x(gib), height - 18, f"{gib} GiB", "middle"),
        ]
    for number, (name, arm) in enumerate(arms.items()):
        y, colour = TOP + row * number, COLOURS[arm["engine"]]
        now, peak = arm["rss_bytes"] / GIB, arm["rss_peak_bytes"] / GIB
        parts += [
            text(left - 8, y + 12, name.replace("ours", NAMES["ours"]), "end", size=12),
            f'<rect x="{left}" y="{y + 2:.1f}" width="{x(now) - left:.1f}" height="13" fill="{colour}"/>',
            line(x(now), y + 8.5, x(peak), y + 8.5, colour, width=2),
            text(
                x(max(now, peak)) + 6, y + 13, f"{now:.1f}" + (f", peak {peak:.1f}" if peak > now + 1 else ""), size=12
            ),
        ]
    parts += [
        line(x(weights), TOP - 6, x(weights), height - 34, "#555", dash="4 4"),
        text(x(weights) + 4, TOP - 8, f"the weights, {weights:.1f} GiB", fill="#555", size=12),
    ]
    return close_picture(parts)


def _frame(height: float, title: str, report: Mapping[str, Any]) -> list[str]:
    machine, model = report["machine"], report["model"]
    weights = next(iter(report["arms"].values()))["weight_bytes"] / GIB
    tokens = f", {model['num_tokens']} tokens" if "num_tokens" in model else ""
    what = f"{model['name']}, {weights:.2f} GiB{tokens}, one {machine['device']}, torch {machine['torch']}"
    return open_picture(WIDTH, height, title, f"{what}, diffusers {machine['diffusers']}, {report['date']}", LEFT)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, metavar="FILE.json")
    parser.add_argument("--output", type=Path, default=HERE, help="folder (default: where this script is)")
    options = parser.parse_args()
    merged = merge([json.loads(file.read_text()) for file in options.results])
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "step-and-peak.svg").write_text(draw_steps(merged))
    (options.output / "rss.svg").write_text(draw_rss(merged))
