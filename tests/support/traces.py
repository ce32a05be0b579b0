"""Reads the timelines that `OffloadHandle.trace` writes."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any


def lanes_of(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The slices of each lane, in order of time. What several threads read is in one here."""
    trace = json.loads(path.read_text())
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"}
    lanes: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            lanes[names[event["tid"]]].append(event)
        else:
            assert event["ph"] == "M"
    for name in [name for name in lanes if name.startswith("file reads ")]:
        slices = lanes.pop(name)
        assert_no_overlap(sorted(slices, key=lambda each: each["ts"]))
        lanes["file reads"] += slices
    return {name: sorted(slices, key=lambda each: each["ts"]) for name, slices in lanes.items()}


def assert_no_overlap(slices: list[dict[str, Any]]) -> None:
    for before, after in pairwise(slices):
        assert before["ts"] + before["dur"] <= after["ts"] + 1e-3
