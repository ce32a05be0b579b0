"""A timeline of work on a device and in threads, for people to look at.

The file is in the Trace Event Format of Chrome (https://ui.perfetto.dev and chrome://tracing open it). Times on the device
are those of its own events, times of threads those of the host; both count from when the timeline was made.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..errors import GroupFileError
from .device import Backend, Event, Stream

T = TypeVar("T", bound="Timeline")

READS, COPIES, COMPUTE = "file reads", "H2D", "compute"
"""The lanes of weights on their way, and of the work that needs them."""
STALLS = "stalls"
"""In this lane slices that take no time are left out: they are waits for events that had been reached."""
DECODE, GATHERS = "decode", "gathers"
"""Lanes that are left out if nothing is in them."""
_NO_TIME = 1e-6


@dataclass(frozen=True, slots=True)
class Slice:
    """Work of one lane, in seconds since a point of the device."""

    lane: str
    name: str
    start: float
    end: float
    num_bytes: int


class _Moment:
    """A point of a device whose work is done when the call returns: the host's clock tells its time."""

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def record(self, stream: Stream, /) -> None:
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


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

    def __init__(
        self,
        backend: Backend,
        title: str,
        *,
        host_lanes: Sequence[str],
        device_lanes: Sequence[str],
        idle: Stream | None = None,
    ) -> None:
        """
        Args:
            idle: A stream that never has work, so that the host need not wait for the device to compare their clocks.
        """
        self._backend = backend
        self._title = title
        self._device_lanes = tuple(device_lanes)
        self._on_device: list[_OnDevice] = []
        self._on_host: dict[str, list[_OnHost]] = {lane: [] for lane in host_lanes}
        self._origin = self.now(idle or backend.current_stream())
        if idle is None:
            self._origin.synchronize()
        self._origin_seconds = time.perf_counter()

    def now(self, stream: Stream) -> Event:
        """A point on the device, for `add`."""
        if not self._backend.has_streams:
            return _Moment()
        event = self._backend.new_event()
        event.record(stream)
        return event

    def add(self, lane: str, name: str, start: Event, end: Event, num_bytes: int = 0) -> None:
        self._on_device.append(_OnDevice(lane, name, start, end, num_bytes))

    def add_on_host(self, lane: str, name: str, started: float, ended: float, num_bytes: int) -> None:
        """A thread was busy between two values of `time.perf_counter`."""
        self._on_host[lane].append(_OnHost(name, started, ended, num_bytes))

    def joined(self: T, others: Sequence[T]) -> T:
        """A timeline that begins as this one does, with the slices of others of the same device and lanes too."""
        found, timelines = copy(self), (self, *others)
        found._on_device = [each for timeline in timelines for each in timeline._on_device]
        found._on_host = {lane: [each for one in timelines for each in one._on_host[lane]] for lane in self._on_host}
        return found

    def host_seconds(self, point: Event) -> float:
        """The value of `time.perf_counter` when the device came to `point`. Waits for it."""
        return self._origin_seconds + self._seconds(self._origin, point)

    def slices(self, zero: Event | None = None, zero_seconds: float | None = None) -> list[Slice]:
        """Wait for the device, and return all slices, those of each lane in the order in which they were added.

        Args:
            zero, zero_seconds: The point that times count from, and the host's time then. Default: the timeline's beginning.
        """
        if zero is None or zero_seconds is None:
            zero, zero_seconds = self._origin, self._origin_seconds
        found = [
            Slice(lane, each.name, each.start - zero_seconds, each.end - zero_seconds, each.num_bytes)
            for lane, mine in self._on_host.items()
            for each in [*mine]
        ]
        for each in [*self._on_device]:
            start, end = self._seconds(zero, each.start), self._seconds(zero, each.end)
            if each.lane != STALLS or end - start >= _NO_TIME:
                found.append(Slice(each.lane, each.name, start, end, each.num_bytes))
        return found

    def _seconds(self, start: Event, end: Event) -> float:
        if isinstance(start, _Moment) and isinstance(end, _Moment):
            return end.seconds - start.seconds
        start.synchronize()
        end.synchronize()
        seconds = self._backend.seconds_between(start, end)
        assert seconds is not None
        return seconds

    def events(self) -> list[dict[str, object]]:
        """Wait for the device, and return all slices as events of a trace."""
        slices = self.slices()
        rows: dict[str, list[Slice]] = {}
        for lane in self._on_host:
            # A lane shows one thing at a time, and several threads work: so there is one for each of them.
            for number, row in enumerate(side_by_side([each for each in slices if each.lane == lane]) or [[]], 1):
                rows[lane if number == 1 else f"{lane} {number}"] = row
        used = {each.lane for each in slices}
        lanes = [*rows, *(lane for lane in self._device_lanes if lane not in (DECODE, GATHERS) or lane in used)]
        found: list[dict[str, object]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": self._title}}]
        for index, lane in enumerate(lanes):
            where = {"ph": "M", "pid": 1, "tid": index}
            found.append({**where, "name": "thread_name", "args": {"name": lane}})
            found.append({**where, "name": "thread_sort_index", "args": {"sort_index": index}})
        on_device = [(each.lane, each) for each in slices if each.lane not in self._on_host]
        for lane, each in (*((lane, each) for lane, row in rows.items() for each in row), *on_device):
            micros = {"ts": each.start * 1e6, "dur": (each.end - each.start) * 1e6}
            args = {"bytes": each.num_bytes} if each.num_bytes else {}
            found.append({"ph": "X", "pid": 1, "tid": lanes.index(lane), "name": each.name, **micros, "args": args})
        return found


def write(path: Path, timeline: Timeline) -> None:
    """Wait for the device, and write a trace of what the timeline collected.

    Raises:
        GroupFileError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps({"traceEvents": timeline.events(), "displayTimeUnit": "ms"}))
    except OSError as error:
        raise GroupFileError(f"Cannot write {path}: {error.strerror}.") from error


def side_by_side(slices: Iterable[Slice]) -> list[list[Slice]]:
    """The slices in as few rows as possible, without overlap in any."""
    rows: list[list[Slice]] = []
    for each in sorted(slices, key=lambda each: each.start):
        row = next((row for row in rows if row[-1].end <= each.start), None)
        if row is None:
            rows.append(row := [])
        row.append(each)
    return rows
