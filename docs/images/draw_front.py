"""Draws front.svg, the picture of the README, from results of `python -m benchmarks card`.

    python docs/images/draw_front.py

Seconds an image against the memory that is free on the GPU. It is as wide as a phone, and has a light and a dark scheme.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from svg import close_picture

HERE = Path(__file__).parent
RESULTS = HERE.parent.parent / "benchmarks/results/card"
GIB = 1 << 30
FREE = (4, 8, 12, 16)
FILES = (
    "8gib-h200",
    "4gib-h200",
    "4-12-16gib-h200",
    "16gib-diffusers-h200",
    "12gib-diffusers-h200",
    "8gib-diffusers-h200",
    "4gib-diffusers-h200",
)
"""The first file that has an arm is the one whose times are drawn."""
BARS = (
    ("diffusers", "diffusers", "diffusers group offloading"),
    ("ours+auto", "ours", "group_offload"),
    ("ours+auto+compress", "compressed", "group_offload, compress=True"),
)
"""The arm in the results, the class of its bar, and what readers see."""
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BASE = 440, 443, 34, 430, 112, 338
MOST_SECONDS = 5.4
BAR, GAP = 27, 3
STYLE = """<style>
.ground{fill:#fff}.halo{stroke:#fff;stroke-width:4px;paint-order:stroke}.ink{fill:#1f2328}.soft{fill:#57606a}.grid{stroke:#d8dee4}.limit{stroke:#1f2328}
.diffusers{fill:#c9851b}.ours{fill:#1f6f9f}.compressed{fill:#6fb7dd}
@media (prefers-color-scheme:dark){
.ground{fill:#0d1117}.halo{stroke:#0d1117}.ink{fill:#e6edf3}.soft{fill:#9da7b1}.grid{stroke:#30363d}.limit{stroke:#e6edf3}
.diffusers{fill:#e0a13a}.ours{fill:#3f97cf}.compressed{fill:#9ad3f2}}
</style>"""


def y_of(seconds: float) -> float:
    return BASE - (BASE - TOP) * seconds / MOST_SECONDS


def label(x: float, y: float, content: str, kind: str = "ink", *, anchor: str = "start", **style: str) -> str:
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}"{more}>{content}</text>'


def rule(y: float, kind: str, **style: str) -> str:
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    return f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="{kind}"{more}/>'


def seconds_of(arm: Mapping[str, Any]) -> float:
    """The median of all images but the first one, which sets up."""
    return median(image["s"] for image in arm["images"][1:])


def failures_of(arm: Mapping[str, Any]) -> int:
    """Images that raised, or that differ from those of the resident pipeline."""
    return sum("error" in image or not image["is_image_equal"] for image in arm["images"])


def draw_bar(x: float, kind: str, arm: Mapping[str, Any] | None) -> str:
    """A bar with its seconds, or in its place why there is none."""
    why = "not measured"
    if arm is not None:
        why = f"{failures_of(arm)} of {len(arm['images'])} images failed"
    if arm is None or failures_of(arm):
        x += BAR / 2 + 5
        turn = f"rotate(-90 {x:.1f} {BASE - 6})"
        return label(x, BASE - 6, why, "soft halo", font_size="14", transform=turn)
    seconds = seconds_of(arm)
    y = y_of(seconds)
    bar = f'<rect x="{x:.1f}" y="{y:.1f}" width="{BAR}" height="{BASE - y:.1f}" rx="2" class="{kind}"/>'
    return bar + label(x + BAR / 2, y - 5, f"{seconds:.1f}", anchor="middle", font_weight="bold")


def draw(results: list[Mapping[str, Any]]) -> str:
    arms: dict[str, Mapping[str, Any]] = {}
    for result in results:
        for name, arm in result["arms"].items():
            arms.setdefault(name, arm)
    [device] = {result["machine"]["device"].removeprefix("NVIDIA ") for result in results}
    residents = [result["arms"]["flux resident"] for result in results]
    [pixels] = {arm["images"][0]["shape"][-1] for arm in residents}
    [steps] = {result["scenario"]["num_steps"] for result in results}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH * 1.1:.0f}" '
        f'height="{HEIGHT * 1.1:.0f}" font-family="system-ui, sans-serif" font-size="15" role="img">',
        "<title>Seconds per image by free GPU memory</title>",
        STYLE,
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" class="ground"/>',
        label(12, 26, "Seconds per image, FLUX.1-size", font_size="18", font_weight="bold"),
    ]
    for number, (_, kind, title) in enumerate(BARS):
        x, y = (12, 50) if number == 0 else (12 + 150 * (number - 1), 72)
        parts += [f'<rect x="{x}" y="{y - 11}" width="13" height="13" rx="2" class="{kind}"/>', label(x + 19, y, title)]
    for tick in range(6):
        parts += [rule(y_of(tick), "grid"), label(LEFT - 8, y_of(tick) + 5, str(tick), "soft", anchor="end")]
    pitch = (RIGHT - LEFT) / len(FREE)
    bars: list[tuple[float, str, Mapping[str, Any] | None]] = []
    for at, free in enumerate(FREE):
        middle = LEFT + pitch * (at + 0.5)
        parts.append(label(middle, BASE + 20, f"{free} GiB free", anchor="middle"))
        for number, (name, kind, _) in enumerate(BARS):
            x = middle + (number - len(BARS) / 2) * (BAR + GAP) + GAP / 2
            bars.append((x, kind, arms.get(f"flux, {free} GiB, {name}")))
    bars.sort(key=lambda bar: bar[2] is None or failures_of(bar[2]) > 0)  # words lie over the line
    drawn = [draw_bar(*bar) for bar in bars]
    num_whole = sum("<rect" in bar for bar in drawn)
    resident = seconds_of(residents[0])
    most = max(FREE)
    model = arms[f"flux, {most} GiB, model"]
    assert all("OutOfMemoryError" in image["error"]["type"] for image in model["images"])
    facts = (
        f"diffusers' model offloading: out of memory, with {most} GiB too.",
        f"One {device}; another process holds the rest of its memory.",
        f"{pixels} x {pixels}, {steps} steps; median after the first image.",
    )
    parts += [
        *drawn[:num_whole],
        rule(y_of(resident), "limit", stroke_width="1.5", stroke_dasharray="5 4"),
        *drawn[num_whole:],
        label(RIGHT, TOP - 16, f"- - all weights on the GPU: {resident:.1f}", anchor="end"),
        *(label(12, BASE + 46 + 19 * at, fact, "soft", font_size="14") for at, fact in enumerate(facts)),
    ]
    return close_picture(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE)
    options = parser.parse_args()
    results = [json.loads((RESULTS / f"flux1-{name}.json").read_text()) for name in FILES]
    (options.output / "front.svg").write_text(draw(results))


if __name__ == "__main__":
    main()
