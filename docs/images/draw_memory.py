"""Draws memory.svg from memory.json, which `python -m examples.demo --trace` has measured. Standard library only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from svg import close_picture, line, open_picture, text

HERE = Path(__file__).parent
WIDTH, HEIGHT = 860, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 64, 52
COLOURS = {"resident": "#b0413e", "diffusers": "#c98a1b", "offloaded": "#2a6f97"}


def draw(data: dict[str, Any]) -> str:
    arms = {name: data["arms"][name] for name in COLOURS if name in data["arms"]}
    last = max(arm["seconds"][-1] for arm in arms.values())
    top = 1.08 * max(max(arm["mib"]) for arm in arms.values())
    result = arms["offloaded"]["result"]
    baseline = result["baseline_rss"] / (1 << 20)

    def x(seconds: float) -> float:
        return LEFT + seconds / last * (WIDTH - LEFT - RIGHT)

    def y(mib: float) -> float:
        return HEIGHT - BOTTOM - mib / top * (HEIGHT - TOP - BOTTOM)

    title = "Memory of the process while a FLUX-class pipeline is loaded and makes an image"
    facts = (
        f"demo model, {result['num_bytes_of_weights'] / (1 << 30):.1f} GiB of weights, on a CPU "
        f"({result['device_name']}), torch {result['torch']}, {data['date']}"
    )
    parts = open_picture(WIDTH, HEIGHT, title, facts, LEFT)
    for mib in range(0, int(top), 500):
        parts += [line(LEFT, y(mib), WIDTH - RIGHT, y(mib), "#e4e4e4"), text(LEFT - 8, y(mib) + 4, f"{mib:,}", "end")]
    parts.append(text(LEFT - 8, y(top) + 2, "MiB", "end", fill="#555"))
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200) if last / step <= 10)
    for seconds in range(0, int(last) + 1, step):
        parts.append(text(x(seconds), HEIGHT - BOTTOM + 18, f"{seconds} s", "middle"))
    parts += [
        line(LEFT, y(baseline), WIDTH - RIGHT, y(baseline), "#999", dash="4 4"),
        text(WIDTH - RIGHT, y(baseline) + 15, "Python, torch and diffusers alone", "end", fill="#777"),
    ]
    for name, arm in arms.items():
        points = " ".join(f"{x(s):.1f},{y(m):.1f}" for s, m in zip(arm["seconds"], arm["mib"], strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="1.8"/>')
        parts.append(
            f'<circle cx="{x(arm["seconds"][-1]):.1f}" cy="{y(arm["mib"][-1]):.1f}" r="3.5" fill="{COLOURS[name]}"/>'
        )
    parts.append(text(LEFT, HEIGHT - 9, "Peak while making the image:", size=12, fill="#555"))
    at = LEFT + 196
    for name, arm in arms.items():
        label = f"{arm['label']} {arm['result']['peak_rss'] / (1 << 20):,.0f} MiB"
        parts.append(line(at, HEIGHT - 13, at + 18, HEIGHT - 13, COLOURS[name], width=3))
        parts.append(text(at + 23, HEIGHT - 9, label, size=12))
        at += 40 + 6.6 * len(label)
    return close_picture(parts)


if __name__ == "__main__":
    (HERE / "memory.svg").write_text(draw(json.loads((HERE / "memory.json").read_text())))
