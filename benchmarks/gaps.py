"""What compute on the device waits for: the gaps between kernels of a trace, and what the host does meanwhile."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from .machine import ALLOCATION, SYNCHRONIZATION

MIN_GAP_US = 1000.0

Span = tuple[float, float]
"""When something began and ended, in microseconds."""


class Trace:
    """Traces a CUDA device from the beginning of an image to the end of its first steps."""

    def __init__(self, num_steps: int = 3) -> None:
        self.facts: dict[str, Any] = {}
        self._left = num_steps
        self._profile = profile(activities=[ProfilerActivity.CUDA])
        self._profile.start()

    def end_step(self) -> None:
        self._left -= 1
        if self._left:
            return
        torch.cuda.synchronize()
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            self._profile.export_chrome_trace(str(path))
            self.facts = facts_of(json.loads(path.read_text())["traceEvents"])


def facts_of(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Seconds from the first to the last kernel, and how much of it is compute, copies to the device, and neither.

    A gap is a time without any kernel or copy that lasts longer than a millisecond; the longest ones tell what calls of the
    driver the host was in.
    """
    events = [event for event in events if "dur" in event]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    copies = [event for event in events if event.get("cat") == "gpu_memcpy" and "HtoD" in event["name"]]
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    computing, sending = merged(map(_span, kernels)), merged(map(_span, copies))
    begun, ended = computing[0][0], computing[-1][1]
    busy = merged([*computing, *((max(a, begun), min(b, ended)) for a, b in sending if a < ended and b > begun)])
    gaps = [(a, b) for (_, a), (b, _) in pairwise(busy) if b - a > MIN_GAP_US]
    driver: dict[str, list[float]] = {}
    for call in calls:
        if SYNCHRONIZATION.match(call["name"]) or ALLOCATION.match(call["name"]):  # with what follows: cuMemAlloc_v2
            driver.setdefault(call["name"], []).append(call["dur"] / 1e6)
    return {
        "span_s": (ended - begun) / 1e6,
        "compute_s": _sum(computing),
        "copies_s": _sum(sending),
        "neither_s": (ended - begun) / 1e6 - _sum(busy),
        "gaps": [
            {"at_s": (a - begun) / 1e6, "s": (b - a) / 1e6, "host": _host((a, b), calls)}
            for a, b in sorted(gaps, key=lambda gap: gap[0] - gap[1])[:8]
        ],
        "num_gaps": len(gaps),
        "driver_calls": {
            name: {"number": len(each), "s": sum(each), "longest_s": max(each)} for name, each in driver.items()
        },
    }


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time as spans that do not overlap."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _span(event: dict[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _sum(spans: Sequence[Span]) -> float:
    return sum(end - begin for begin, end in spans) / 1e6


def _host(gap: Span, calls: Iterable[dict[str, Any]]) -> dict[str, float]:
    """The calls of the driver that took longest in a gap, in seconds."""
    found: dict[str, float] = {}
    for call in calls:
        begin, end = _span(call)
        if begin < gap[1] and end > gap[0]:
            found[call["name"]] = found.get(call["name"], 0.0) + (min(end, gap[1]) - max(begin, gap[0])) / 1e6
    return dict(sorted(found.items(), key=lambda item: -item[1])[:3])
