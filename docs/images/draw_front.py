"""Draws front.svg, the picture of the README, from results of `python -m benchmarks card` and `weights`.

    python docs/images/draw_front.py

On the left the seconds of an image by the memory of the card, on the right what a model in files takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from svg import close_picture, line, open_picture, text

HERE = Path(__file__).parent
RESULTS = HERE.parent.parent / "benchmarks/results"
GIB = 1 << 30
WIDTH, HEIGHT, TOP, BOTTOM, LEFT, MIDDLE = 860, 372, 92, 44, 52, 556
OURS, PACKED, DIFFUSERS = "#2a6f97", "#61a5c2", "#c98a1b"
ARMS = {
    "diffusers": ("diffusers", DIFFUSERS),
    "ours+auto": ("group_offload", OURS),
    "ours+auto+pack": ("packed", PACKED),
}
MOST_SECONDS, BAR, GAP = 5.5, 30, 22
IN_FILES = {
    "group_offload": ("ours block, checkpoint @12GiB", OURS),
    "diffusers": ("diffusers block+stream, disk @12GiB", DIFFUSERS),
}
FIGURES = (
    ("a step", "step_s", 1, "s"),
    ("most RAM of the process", "rss_peak_bytes", GIB, "GiB"),
    ("written to the drive by set-up", "setup_write_bytes", GIB, "GiB"),
)


def y_of(seconds: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * seconds / MOST_SECONDS


def draw_images(arms: Mapping[str, Any]) -> list[str]:
    """For each size of a card a bar for each arm: the median of the images after the first one."""
    parts = [text(LEFT, TOP - 24, "Seconds of an image, by free memory of the card", weight="bold")]
    for second in range(6):
        parts += [line(LEFT, y_of(second), MIDDLE - 48, y_of(second), "#e4e4e4")]
        parts += [text(LEFT - 6, y_of(second) + 4, f"{second} s", "end", size=12, fill="#555")]
    x = LEFT + GAP / 2
    for free in sorted({arm["free_bytes"] for arm in arms.values() if arm["free_bytes"]}):
        parts.append(
            text(x + BAR * len(ARMS) / 2, HEIGHT - BOTTOM + 18, f"{free / GIB:g} GiB", "middle", size=12, fill="#555")
        )
        for name, (_, colour) in ARMS.items():
            found = [arm for arm in arms.values() if arm["free_bytes"] == free and arm["arm"] == name]
            for arm in found:
                seconds = statistics.median(image["s"] for image in arm["images"][1:])
                top = y_of(seconds)
                parts.append(
                    f'<rect x="{x:.1f}" y="{top:.1f}" width="{BAR - 2}" height="{HEIGHT - BOTTOM - top:.1f}" fill="{colour}"/>'
                )
                parts.append(text(x + BAR / 2 - 1, top - 4, f"{seconds:.1f}", "middle", size=12, fill=colour))
            x += BAR
        x += GAP
    x = LEFT
    for label, colour in ARMS.values():
        parts += [f'<rect x="{x}" y="{TOP - 14}" width="10" height="10" fill="{colour}"/>']
        parts += [text(x + 15, TOP - 5, label, size=12, fill=colour)]
        x += 34 + 7 * len(label)
    return parts


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


def draw(images: Mapping[str, Any], device: str, files: Mapping[str, Any]) -> str:
    facts = (
        f"1024 x 1024 pixels, 8 steps, one {device}, another process holds the rest; every image has the resident bits"
    )
    parts = open_picture(WIDTH, HEIGHT, "FLUX.1, 33 GiB of weights", facts, LEFT - 36)
    return close_picture([*parts, *draw_images(images), *draw_files(files["arms"])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE)
    options = parser.parse_args()
    cards = [json.loads((RESULTS / f"card/flux1-{sizes}gib-h200.json").read_text()) for sizes in ("8-12", "4-16")]
    files = json.loads((RESULTS / "weights/flux1-files-h200.json").read_text())
    images = {name: arm for card in cards for name, arm in card["arms"].items()}
    (options.output / "front.svg").write_text(draw(images, cards[0]["machine"]["device"], files))


if __name__ == "__main__":
    main()
