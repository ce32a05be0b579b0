"""Draws pass.svg: a forward over time, with two device buffers. The times are made up; the order is that of the engine.

python docs/images/draw_pass.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

from svg import close_picture, line, open_picture, text

WIDTH, HEIGHT, LEFT, RIGHT = 860, 372, 118, 16
LANES = {"disk": 82, "link": 148, "slot A": 206, "slot B": 240, "compute": 300}
HEIGHTS = {"slot A": 26, "slot B": 26}
SLOTS = ("#2a6f97", "#c98a1b")
NUM_BLOCKS, UNIT, READ, SEND, COMPUTE = 5, 1.0, 1.1, 1.15, 1.0
END_OF_PASS = "#b0413e"


def schedule() -> list[tuple[float, float, float, float, float, float]]:
    """For each block, and for two of the next pass: when it is read, sent and computed, from and to."""
    found: list[tuple[float, float, float, float, float, float]] = []
    for at in range(NUM_BLOCKS + 2):
        read = found[-1][1] if found else 0.0
        # A copy needs its slot: that of two blocks before, which compute has to be done with.
        send = max(read + 0.5, found[-1][3] if found else 0.0, found[-2][5] if at > 1 else 0.0)
        compute = max(send + SEND, found[-1][5] if found else 0.0)
        found.append((read, read + READ, send, send + SEND, compute, compute + COMPUTE))
    return found


def x_of(time: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * time / (schedule()[NUM_BLOCKS][5] + 0.9)


def box(lane: str, start: float, end: float, label: str, color: str, *, is_pale: bool = False) -> list[str]:
    height = HEIGHTS.get(lane, 32)
    end = min(end, schedule()[NUM_BLOCKS][5] + 0.9)
    if start >= end:
        return []
    place = f'x="{x_of(start):.1f}" y="{LANES[lane]}" width="{x_of(end) - x_of(start) - 1.5:.1f}" height="{height}"'
    shape = f'<rect {place} rx="3" fill="{color}" fill-opacity="{0.25 if is_pale else 1}"/>'
    at = (x_of(start) + x_of(end)) / 2
    return [
        shape,
        text(at, LANES[lane] + height / 2 + 4.5, label, "middle", fill="#222" if is_pale else "white", size=12),
    ]


def draw() -> str:
    parts = open_picture(
        WIDTH,
        HEIGHT,
        "A forward over time: two device buffers, weights in files",
        "times are made up, the order is the engine's; dotted: the event that says ready, which compute waits for",
        16,
    )
    for lane, top in LANES.items():
        parts.append(text(16, top + HEIGHTS.get(lane, 32) / 2 + 4.5, lane, weight="bold"))
    parts += [
        text(16, LANES["disk"] + 44, "threads read into the staging ring, past the buffers", size=12, fill="#555")
    ]
    times = schedule()
    for at, (read, was_read, send, was_sent, compute, computed) in enumerate(times):
        color, slot = SLOTS[at % 2], ("slot A", "slot B")[at % 2]
        name = f"block {at}" if at < NUM_BLOCKS else f"next {at - NUM_BLOCKS}"
        parts += box("disk", read, was_read, name, "#777777")
        parts += box("link", send, was_sent, name, color)
        parts += box(slot, send, computed, f"holds {name}", color, is_pale=True)
        parts += box("compute", compute, computed, name, color)
        if at < NUM_BLOCKS:  # the ready event
            parts += [
                line(x_of(was_sent) - 1, LANES["link"] + 32, x_of(was_sent) - 1, LANES["compute"], "#444", dash="3 3")
            ]
    end = x_of(times[NUM_BLOCKS - 1][5]) - 0.7
    parts += [line(end, 64, end, LANES["compute"] + 44, END_OF_PASS, dash="6 4", width=1.5)]
    parts += [
        text(end - 6, HEIGHT - 14, "the forward ends; block 0 of the next one is on its way", "end", fill=END_OF_PASS)
    ]
    return close_picture(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    (options.output / "pass.svg").write_text(draw())


if __name__ == "__main__":
    main()
