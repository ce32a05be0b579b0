"""A timeline of passes, for people to look at: what was read, copied and computed when, and for which group.

The file is in the Trace Event Format of Chrome (https://ui.perfetto.dev and chrome://tracing open it): lanes for file
reads, host to device copies, compute, and stalls. Times on the device are those of its own events.
"""

from __future__ import annotations

import json
import time
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
    """Collects what happens from when it is made until `write`. Used by one thread at a time."""

    def __init__(self, backend: Backend, title: str) -> None:
        self._backend = backend
        self._title = title
        self._slices: list[_Slice] = []
        self._reads: list[tuple[str, float, float, int]] = []
        self._open: dict[Group, tuple[Event, Event]] = {}
        self._copy_start: Event | None = None
        self._origin = self._now(backend.current_stream())
        self._origin.synchronize()
        self._origin_seconds = time.perf_counter()

    def copy_begins(self, stream: Stream) -> None:
        self._copy_start = self._now(stream)

    def copy_ends(self, stream: Stream, names: list[str], num_bytes: int) -> None:
        assert self._copy_start is not None
        name = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        self._slices.append(_Slice("H2D", name, self._copy_start, self._now(stream), num_bytes))

    def compute_arrives(self, group: Group, stream: Stream) -> None:
        """Compute on `stream` is about to wait for the group."""
        event = self._now(stream)
        self._open[group] = event, event

    def compute_begins(self, group: Group, stream: Stream) -> None:
        begun = self._now(stream)
        arrived = self._open.get(group, (begun, begun))[0]
        self._open[group] = arrived, begun

    def compute_ends(self, group: Group, stream: Stream) -> None:
        found = self._open.pop(group, None)
        if found is not None:
            arrived, begun = found
            if arrived is not begun:
                self._slices.append(_Slice("stalls", group.group_id, arrived, begun))
            self._slices.append(_Slice("compute", group.group_id, begun, self._now(stream), group.num_bytes))

    def read(self, name: str, started: float, ended: float, num_bytes: int) -> None:
        """A file was read, between two values of `time.perf_counter`."""
        self._reads.append((name, started - self._origin_seconds, ended - self._origin_seconds, num_bytes))

    def write(self, path: Path) -> None:
        """Wait for the device, and write what was collected.

        Raises:
            OSError: the file cannot be written.
        """
        events: list[dict[str, object]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": self._title}}]
        for lane, name in enumerate(LANES):
            events.append({"ph": "M", "pid": 1, "tid": lane, "name": "thread_name", "args": {"name": name}})
            events.append({"ph": "M", "pid": 1, "tid": lane, "name": "thread_sort_index", "args": {"sort_index": lane}})
        slices = [("file reads", *read) for read in self._reads]
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
            events.append({"ph": "X", "pid": 1, "tid": LANES.index(kind), "name": name, **micros, "args": args})
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def _now(self, stream: Stream) -> Event:
        event = self._backend.new_event()
        event.record(stream)
        return event
