"""A timeline of work on a device and in threads, for people to look at.

The file is in the Trace Event Format of Chrome (https://ui.perfetto.dev and chrome://tracing open it). Times on the device
are those of its own events, times of threads those of the host; both count from when the timeline was made.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .device import Backend, Event, Stream

STALLS = "stalls"
"""In this lane slices that take no time are left out: they are waits for events that had been reached."""
_NO_TIME = 1e-6


@dataclass(slots=True)
class _OnDevice:
    lane: str
    name: str
    start: Event
    end: Event
    num_bytes: int


@dataclass(slots=True)
class _OnHost:
    name: str
    start: float
    end: float
    num_bytes: int


class Timeline:
    """Collects slices, in lanes, from its construction until `write`. `now`, `add` and `add_on_host` are thread-safe."""

    def __init__(self, backend: Backend, title: str, *, host_lanes: Sequence[str], device_lanes: Sequence[str]) -> None:
        self._backend = backend
        self._title = title
        self._device_lanes = tuple(device_lanes)
        self._on_device: list[_OnDevice] = []
        self._on_host: dict[str, list[_OnHost]] = {lane: [] for lane in host_lanes}
        self._origin = self.now(backend.current_stream())
        self._origin.synchronize()
        self._origin_seconds = time.perf_counter()

    def now(self, stream: Stream) -> Event:
        """A point on the device, for `add`."""
        event = self._backend.new_event()
        event.record(stream)
        return event

    def add(self, lane: str, name: str, start: Event, end: Event, num_bytes: int = 0) -> None:
        self._on_device.append(_OnDevice(lane, name, start, end, num_bytes))

    def add_on_host(self, lane: str, name: str, started: float, ended: float, num_bytes: int) -> None:
        """A thread was busy between two values of `time.perf_counter`."""
        origin = self._origin_seconds
        self._on_host[lane].append(_OnHost(name, started - origin, ended - origin, num_bytes))

    def events(self, process: int) -> list[dict[str, object]]:
        """Wait for the device, and return all slices as events of one process of a trace."""
        rows: dict[str, list[_OnHost]] = {}
        for lane, mine in self._on_host.items():
            # A lane shows one thing at a time, and several threads work: so there is one for each of them.
            for number, row in enumerate(_side_by_side(sorted(mine, key=lambda each: each.start)) or [[]], 1):
                rows[lane if number == 1 else f"{lane} {number}"] = row
        lanes = [*rows, *self._device_lanes]
        found: list[dict[str, object]] = [
            {"ph": "M", "pid": process, "name": "process_name", "args": {"name": self._title}}
        ]
        for index, lane in enumerate(lanes):
            where = {"ph": "M", "pid": process, "tid": index}
            found.append({**where, "name": "thread_name", "args": {"name": lane}})
            found.append({**where, "name": "thread_sort_index", "args": {"sort_index": index}})
        slices = [(lane, each.name, each.start, each.end, each.num_bytes) for lane, row in rows.items() for each in row]
        for each in self._on_device:
            each.end.synchronize()
            start = self._backend.seconds_between(self._origin, each.start)
            end = self._backend.seconds_between(self._origin, each.end)
            assert start is not None and end is not None
            if each.lane != STALLS or end - start >= _NO_TIME:
                slices.append((each.lane, each.name, start, end, each.num_bytes))
        for lane, name, start, end, num_bytes in slices:
            micros = {"ts": start * 1e6, "dur": (end - start) * 1e6}
            args = {"bytes": num_bytes} if num_bytes else {}
            found.append({"ph": "X", "pid": process, "tid": lanes.index(lane), "name": name, **micros, "args": args})
        return found


def write(path: Path, *timelines: Timeline) -> None:
    """Wait for the devices, and write a trace of what the timelines collected.

    Raises:
        OSError: the file cannot be written.
    """
    events = [event for process, timeline in enumerate(timelines, 1) for event in timeline.events(process)]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _side_by_side(slices: Sequence[_OnHost]) -> list[list[_OnHost]]:
    """The slices, which come in the order of their beginnings, in as few rows as possible without overlap in any."""
    rows: list[list[_OnHost]] = []
    for each in slices:
        row = next((row for row in rows if row[-1].end <= each.start), None)
        if row is None:
            rows.append(row := [])
        row.append(each)
    return rows
