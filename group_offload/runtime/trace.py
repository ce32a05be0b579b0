"""A timeline of passes, for people to look at: what was read, copied and computed when, and for which group.

The file is in the Trace Event Format of Chrome (https://ui.perfetto.dev and chrome://tracing open it): lanes for file
reads, host to device copies, compute, and stalls. Times on the device are those of its own events.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..device import Backend, Event, Stream

if TYPE_CHECKING:
    from .group import Group

LANES = ("file reads", "H2D", "compute", "stalls")


@dataclass(slots=True)
class _Slice:
    lane: str
    name: str
    start: Event
    end: Event
    num_bytes: int = 0


class Tracer:
    """Collects what happens from when it is made until `write`. Threads that read files may call `now`, `copied` and `read`."""

    def __init__(self, backend: Backend, title: str) -> None:
        self._backend = backend
        self._title = title
        self._slices: list[_Slice] = []
        self._reads: list[_FileRead] = []
        self._open: dict[Group, tuple[Event, Event]] = {}
        self._origin = self.now(backend.current_stream())
        self._origin.synchronize()
        self._origin_seconds = time.perf_counter()

    def copied(self, names: Sequence[str], begun: Event, stream: Stream, num_bytes: int) -> None:
        """Copies of these groups were enqueued on `stream` behind `begun`, which `now` gave."""
        names = [*dict.fromkeys(names)]
        name = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        self._slices.append(_Slice("H2D", name, begun, self.now(stream), num_bytes))

    def compute_arrives(self, group: Group, stream: Stream) -> None:
        """Compute on `stream` is about to wait for the group."""
        event = self.now(stream)
        self._open[group] = event, event

    def compute_begins(self, group: Group, stream: Stream) -> None:
        begun = self.now(stream)
        arrived = self._open.get(group, (begun, begun))[0]
        self._open[group] = arrived, begun

    def compute_ends(self, group: Group, stream: Stream) -> None:
        found = self._open.pop(group, None)
        if found is not None:
            arrived, begun = found
            if arrived is not begun:
                self._slices.append(_Slice("stalls", group.group_id, arrived, begun))
            self._slices.append(_Slice("compute", group.group_id, begun, self.now(stream), group.num_bytes))

    def read(self, name: str, started: float, ended: float, num_bytes: int) -> None:
        """A file was read, between two values of `time.perf_counter`."""
        self._reads.append((name, started - self._origin_seconds, ended - self._origin_seconds, num_bytes))

    def write(self, path: Path) -> None:
        """Wait for the device, and write what was collected.

        Raises:
            OSError: the file cannot be written.
        """
        events: list[dict[str, object]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": self._title}}]
        reads = _side_by_side(sorted(self._reads, key=lambda read: read[1]))
        # A lane shows one thing at a time, and several threads read: so there is one for each of them.
        names = [LANES[0], *(f"{LANES[0]} {number}" for number in range(2, len(reads) + 1)), *LANES[1:]]
        for lane, name in enumerate(names):
            events.append({"ph": "M", "pid": 1, "tid": lane, "name": "thread_name", "args": {"name": name}})
            events.append({"ph": "M", "pid": 1, "tid": lane, "name": "thread_sort_index", "args": {"sort_index": lane}})
        slices = [(names[lane], *read) for lane, mine in enumerate(reads) for read in mine]
        for each in self._slices:
            each.end.synchronize()
            start = self._backend.seconds_between(self._origin, each.start)
            end = self._backend.seconds_between(self._origin, each.end)
            assert start is not None and end is not None
            slices.append((each.lane, each.name, start, end, each.num_bytes))
        for kind, name, start, end, num_bytes in slices:
            if kind == "stalls" and end - start < 1e-6:
                continue  # a wait for what was there already
            micros = {"ts": start * 1e6, "dur": (end - start) * 1e6}
            args = {"bytes": num_bytes} if num_bytes else {}
            events.append({"ph": "X", "pid": 1, "tid": names.index(kind), "name": name, **micros, "args": args})
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def now(self, stream: Stream) -> Event:
        event = self._backend.new_event()
        event.record(stream)
        return event


_FileRead = tuple[str, float, float, int]


def _side_by_side(reads: Sequence[_FileRead]) -> list[list[_FileRead]]:
    """The reads, which come in the order of their beginnings, in as few rows as possible without overlap in any."""
    rows: list[list[_FileRead]] = []
    for read in reads:
        row = next((row for row in rows if row[-1][2] <= read[1]), None)
        if row is None:
            rows.append(row := [])
        row.append(read)
    return rows
