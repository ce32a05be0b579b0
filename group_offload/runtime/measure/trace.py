"""The trace is a timeline of passes: reads, copies and compute of each group.

Times on the device are those of its own events, times of threads those of the host; both count from when the trace was made.
The file is in the Trace Event Format of Chrome (https://ui.perfetto.dev and chrome://tracing open it).
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...base.device import Backend, Event, Stream
from ...errors import GroupFileError

READS, COPIES, COMPUTE = "file reads", "H2D", "compute"
"""The lanes of weights on their way, and of the work that needs them."""
STALLS = "stalls"
DECODE, GATHERS = "decode", "gathers"
"""Lanes that are left out if nothing is in them."""
_LANES = (COPIES, GATHERS, DECODE, COMPUTE, STALLS)
_NO_TIME = 1e-6
"""Stalls that take no time are left out: they are waits for events that had been reached."""


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


class WeightTrace:
    """Lanes for file reads, copies to the device, compute, and stalls. `now`, `enqueued` and `read` are thread-safe."""

    def __init__(self, backend: Backend, idle: Stream) -> None:
        """
        Args:
            idle: A stream that never has work, so that the host need not wait for the device to compare their clocks.
        """
        self._backend = backend
        self._on_device: list[tuple[str, str, Event, Event, int]] = []
        """Lane, name, start, end and bytes."""
        self._reads: list[Slice] = []
        """In values of `time.perf_counter`."""
        self.origin = self.now(idle)
        self.origin_seconds = time.perf_counter()

    def now(self, stream: Stream) -> Event:
        """A point on the device."""
        if not self._backend.has_streams:
            return _Moment()
        event = self._backend.new_event()
        event.record(stream)
        return event

    def enqueued(self, lane: str, names: Iterable[str], begun: Event, stream: Stream, num_bytes: int) -> None:
        """Work of a lane for these groups was enqueued on `stream` behind `begun`, which `now` gave."""
        first, *others = dict.fromkeys(names)
        name = f"{first} and {len(others)} more" if others else first
        self.add(lane, name, begun, self.now(stream), num_bytes)

    def add(self, lane: str, name: str, begun: Event, ended: Event, num_bytes: int) -> None:
        """Add a slice to a lane, between two points that `now` gave."""
        self._on_device.append((lane, name, begun, ended, num_bytes))

    def compute_seconds(self, names: Collection[str]) -> tuple[dict[str, float], float]:
        """The seconds of compute of each of these groups, and those that compute waited. The device is past all of it."""
        by_group: dict[str, float] = {}
        waited = 0.0
        for lane, name, begun, ended, _ in [*self._on_device]:
            if lane == STALLS:
                waited += max(0.0, self._backend.seconds_between(begun, ended) or 0.0)
            elif lane == COMPUTE and name in names:
                by_group[name] = by_group.get(name, 0.0) + (self._backend.seconds_between(begun, ended) or 0.0)
        return by_group, waited

    def read(self, name: str, started: float, ended: float, num_bytes: int) -> None:
        """A file was read, between two values of `time.perf_counter`."""
        self._reads.append(Slice(READS, name, started, ended, num_bytes))

    def slices(self, zero: Event, zero_seconds: float) -> list[Slice]:
        """Wait for the device, and return all slices, those of each lane in the order in which they were added.

        Args:
            zero, zero_seconds: The point that times count from, and the host's time then.
        """
        found = [
            Slice(READS, each.name, each.start - zero_seconds, each.end - zero_seconds, each.num_bytes)
            for each in [*self._reads]
        ]
        for lane, name, begun, ended, num_bytes in [*self._on_device]:
            start, end = self._seconds(zero, begun), self._seconds(zero, ended)
            if lane != STALLS or end - start >= _NO_TIME:
                found.append(Slice(lane, name, start, end, num_bytes))
        return found

    def _seconds(self, start: Event, end: Event) -> float:
        if isinstance(start, _Moment) and isinstance(end, _Moment):
            return end.seconds - start.seconds
        start.synchronize()
        end.synchronize()
        seconds = self._backend.seconds_between(start, end)
        assert seconds is not None
        return seconds


def write_traces(traces: Sequence[WeightTrace], title: str, path: Path) -> None:
    """Wait for the device, and write all slices. Times count from the first trace's beginning.

    Raises:
        GroupFileError: the file cannot be written.
    """
    zero, zero_seconds = traces[0].origin, traces[0].origin_seconds
    slices = [each for trace in traces for each in trace.slices(zero, zero_seconds)]
    # A lane shows one thing at a time, and several threads read: so there is one for each of them.
    reads = _side_by_side(each for each in slices if each.lane == READS) or [[]]
    rows = {READS if number == 1 else f"{READS} {number}": row for number, row in enumerate(reads, 1)}
    on_device = {lane: [each for each in slices if each.lane == lane] for lane in _LANES}
    rows |= {lane: mine for lane, mine in on_device.items() if mine or lane not in (DECODE, GATHERS)}
    events: list[dict[str, object]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": title}}]
    for index, (lane, mine) in enumerate(rows.items()):
        where = {"pid": 1, "tid": index}
        events.append({"ph": "M", **where, "name": "thread_name", "args": {"name": lane}})
        events.append({"ph": "M", **where, "name": "thread_sort_index", "args": {"sort_index": index}})
        for each in mine:
            micros = {"ts": each.start * 1e6, "dur": (each.end - each.start) * 1e6}
            args = {"bytes": each.num_bytes} if each.num_bytes else {}
            events.append({"ph": "X", **where, "name": each.name, **micros, "args": args})
    try:
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    except OSError as error:
        raise GroupFileError(f"Cannot write {path}: {error.strerror}.") from error


def _side_by_side(slices: Iterable[Slice]) -> list[list[Slice]]:
    """The slices in as few rows as possible, without overlap in any."""
    rows: list[list[Slice]] = []
    for each in sorted(slices, key=lambda each: each.start):
        row = next((row for row in rows if row[-1].end <= each.start), None)
        if row is None:
            rows.append(row := [])
        row.append(each)
    return rows
