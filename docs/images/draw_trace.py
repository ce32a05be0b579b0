"""Draws a timeline that `OffloadHandle.trace` wrote as an SVG: file reads, copies, compute, stalls. Standard library only.

python docs/images/draw_trace.py trace-ours-block-checkpoint.json --title "FLUX.1-size, from the drive"
python docs/images/draw_trace.py TRACE.json --start 1.0 --seconds 2.5        a part of it
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from svg import close_picture, line, open_picture, text

WIDTH, LEFT, RIGHT, TOP = 860, 110, 24, 62
LANE, ROW, GAP = 30, 7, 14
"""Heights: of a lane, of one of the rows of reads side by side, between lanes."""
LANES = ("file reads", "H2D", "gathers", "decode", "compute", "stalls")
OPTIONAL = ("gathers", "decode")
"""Lanes that are left out if nothing is in them."""
COLOURS = {
    "file reads": ("#2a6f97", "#6fa8c7"),
    "H2D": ("#c98a1b", "#e0b566"),
    "gathers": ("#7a5195", "#a98bbd"),
    "decode": ("#5c6b73", "#97a6ad"),
    "compute": ("#4b7f52", "#8db893"),
    "stalls": ("#b0413e", "#cf817f"),
}
"""By turns, so that two slices side by side are told apart."""
NARROW = 0.4
"""Slices that lie closer than this, in units of the picture, are drawn as one."""


@dataclass(frozen=True, slots=True)
class Slice:
    row: int
    start: float
    """Seconds."""
    end: float
    name: str
    num_bytes: int


def read_slices(trace: Mapping[str, Any]) -> dict[str, list[Slice]]:
    """The slices of each lane, in order of time. Reads side by side have rows of their own."""
    names = {
        event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event.get("name") == "thread_name"
    }
    lanes: dict[str, list[Slice]] = {lane: [] for lane in LANES}
    for event in trace["traceEvents"]:
        if event["ph"] != "X":
            continue
        lane = next(lane for lane in LANES if names[event["tid"]].startswith(lane))
        number = names[event["tid"]].removeprefix(lane).strip()
        start = event["ts"] / 1e6
        num_bytes = event.get("args", {}).get("bytes", 0)
        lanes[lane].append(
            Slice(int(number or 1) - 1, start, start + event["dur"] / 1e6, event.get("name", ""), num_bytes)
        )
    return {
        lane: sorted(slices, key=lambda each: each.start)
        for lane, slices in lanes.items()
        if slices or lane not in OPTIONAL
    }


def busy_seconds(slices: Sequence[Slice], begin: float, end: float) -> float:
    """How long at least one of the slices was going on, in a part of the time."""
    busy, reached = 0.0, begin
    for each in slices:
        start, stop = max(each.start, reached), min(each.end, end)
        if stop > start:
            busy += stop - start
            reached = stop
    return busy


def draw(trace: Mapping[str, Any], *, title: str, start: float = 0, seconds: float | None = None) -> str:
    """The picture.

    Raises:
        ValueError: nothing happened in that time.
    """
    lanes = read_slices(trace)
    every = [each for slices in lanes.values() for each in slices]
    if not every:
        raise ValueError("The trace is empty.")
    first, last = min(each.start for each in every), max(each.end for each in every)
    begin = first + start
    stop = min(last, begin + seconds) if seconds is not None else last
    if begin >= stop:
        raise ValueError(f"The trace is over after {last - first:.3f} s.")
    num_rows = {lane: 1 + max((each.row for each in slices), default=0) for lane, slices in lanes.items()}
    heights = {lane: max(LANE, ROW * num_rows[lane]) for lane in lanes}
    height = TOP + sum(heights.values()) + GAP * len(lanes) + 34

    def x(at: float) -> float:
        return LEFT + (at - begin) / (stop - begin) * (WIDTH - LEFT - RIGHT)

    parts = open_picture(WIDTH, height, title, " · ".join(_facts(lanes, begin, stop)), 16)
    bottom = height - 34
    step = next(step for step in _steps() if (stop - begin) / step <= 8)
    for number in range(int((stop - begin) / step) + 1):
        at = x(begin + number * step)
        parts += [line(at, TOP - 6, at, bottom, "#e4e4e4"), text(at, bottom + 17, _seconds(number * step), "middle")]
    y = float(TOP)
    for lane in lanes:
        parts += [text(LEFT - 10, y + heights[lane] / 2 + 4, lane, "end")]
        parts += _rectangles(lanes[lane], COLOURS[lane], x, begin, stop, y, heights[lane] / num_rows[lane])
        y += heights[lane] + GAP
    return close_picture(parts)


def _facts(lanes: Mapping[str, Sequence[Slice]], begin: float, end: float) -> Iterator[str]:
    yield _seconds(end - begin)
    for lane in lanes:
        if lanes[lane]:
            yield f"{lane} busy {busy_seconds(lanes[lane], begin, end) / (end - begin):.0%}"
    num_bytes = sum(
        each.num_bytes * (min(each.end, end) - max(each.start, begin)) / max(each.end - each.start, 1e-9)
        for each in lanes["file reads"]
        if each.end > begin and each.start < end
    )
    if num_bytes:
        yield f"read at {num_bytes / (end - begin) / 1e9:.2f} GB/s"


def _rectangles(
    slices: Sequence[Slice], colours: tuple[str, str], x: Any, begin: float, end: float, top: float, height: float
) -> Iterator[str]:
    for row in sorted({each.row for each in slices}):
        y = top + row * height
        mine = [each for each in slices if each.row == row and each.end > begin and each.start < end]
        turn = 0
        drawn: tuple[float, float] | None = None
        for number, each in enumerate(mine):
            left, right = x(max(each.start, begin)), x(min(each.end, end))
            if drawn is not None and left - drawn[0] < NARROW:  # too narrow to be seen by itself
                left = drawn[0]
            elif drawn is not None:
                yield _rectangle(*drawn, y, height, colours[turn])
                turn = 1 - turn
            drawn = (left, max(right, left + 0.2))
            if number == len(mine) - 1:
                yield _rectangle(*drawn, y, height, colours[turn])


def _rectangle(left: float, right: float, y: float, height: float, colour: str) -> str:
    return f'<rect x="{left:.2f}" y="{y:.1f}" width="{right - left:.2f}" height="{height - 0.6:.1f}" fill="{colour}"/>'


def _steps() -> Iterator[float]:
    power = 1e-6
    while True:
        yield from (power, 2 * power, 5 * power)
        power *= 10


def _seconds(value: float) -> str:
    return f"{value * 1e3:g} ms" if 0 < value < 0.01 else f"{value:.3g} s"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, metavar="TRACE.json")
    parser.add_argument("--title", default="", help="default: the file's name")
    parser.add_argument("--start", type=float, default=0, help="seconds from the beginning (default 0)")
    parser.add_argument("--seconds", type=float, help="so much of it (default: all)")
    parser.add_argument("--output", type=Path, help="default: trace.svg beside this script")
    options = parser.parse_args()
    picture = draw(
        json.loads(options.trace.read_text()),
        title=options.title or options.trace.stem,
        start=options.start,
        seconds=options.seconds,
    )
    (options.output or Path(__file__).parent / "trace.svg").write_text(picture)
