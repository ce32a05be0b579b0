"""The recorder measures compute in the passes that plans learn from.

[Note: What recording costs]
A pass is recorded if plans are to know how long its groups compute (`MemoryBudget.count_pass`: the first three of each kind,
the 4th, 8th, 16th and 32nd, then every 32nd). That takes three events for each use of a group, and two for the pass. In all
other passes nothing is added. The host never waits for the device, and events are read when somebody asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from ...base.device import Backend, Event, Stream


@dataclass(slots=True)
class _Recorded:
    """A forward whose compute is measured, as pairs of events."""

    kind: Any
    begun: Event
    ended: Event
    computed: list[tuple[str, Event, Event]] = field(default_factory=list)
    """For each use of a group: its name, and the compute."""
    waits: list[tuple[Event, Event]] = field(default_factory=list)
    """Compute waited for a group."""
    arrived: Event | None = None
    """Where compute came to wait for the group that is acquired now."""
    in_use: dict[str, Event] = field(default_factory=dict)
    """For each group in use, where its compute began."""


class Recorder:
    """Decides which passes are recorded. Used under the engine's lock."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._now: _Recorded | None = None
        """The pass in progress, if it is recorded."""
        self._unread: deque[_Recorded] = deque()

    def begin(self, kind: Any, stream: Stream) -> None:
        """A pass begins.

        Args:
            kind: That of a forward whose compute is to be measured; None for other passes.
        """
        self._now = None
        if kind is not None:
            begun = self._event(stream)
            self._now = _Recorded(kind, begun, begun)

    def end(self, stream: Stream) -> None:
        """The pass completed."""
        now, self._now = self._now, None
        if now is not None:
            now.ended = self._event(stream)
            self._unread.append(now)

    def measured(self, names: Collection[str]) -> Iterator[tuple[Any, dict[str, float], float, float]]:
        """Each measured pass that the device is past by now, once: its kind, the seconds of these groups' compute, those of
        all other compute, and those of the whole pass."""
        between = self._backend.seconds_between
        while self._unread:
            found = self._unread[0]
            total = between(found.begun, found.ended)
            if total is None:
                return
            self._unread.popleft()
            by_group: dict[str, float] = {}
            for name, begun, ended in found.computed:
                if name in names:
                    by_group[name] = by_group.get(name, 0.0) + (between(begun, ended) or 0.0)
            waited = sum(max(0.0, between(begun, ended) or 0.0) for begun, ended in found.waits)
            yield found.kind, by_group, max(0.0, total - waited - sum(by_group.values())), total

    def arrives(self, stream: Stream) -> None:
        """Compute on `stream` is about to wait for a group."""
        if self._now is not None:
            self._now.arrived = self._event(stream)

    def begins(self, name: str, stream: Stream) -> None:
        """The bytes of the group of this name are there, and its compute is enqueued next."""
        if self._now is not None:
            begun, arrived, self._now.arrived = self._event(stream), self._now.arrived, None
            if arrived is not None:
                self._now.waits.append((arrived, begun))
            self._now.in_use.setdefault(name, begun)

    def ends(self, name: str, stream: Stream) -> None:
        """All uses of the group are enqueued."""
        if self._now is not None and name in self._now.in_use:
            self._now.computed.append((name, self._now.in_use.pop(name), self._event(stream)))

    def forget_measured(self) -> None:
        """Forget measured passes that were not read, and the one in progress: it failed, or the groups are given up."""
        self._now = None
        self._unread.clear()

    def _event(self, stream: Stream) -> Event:
        event = self._backend.new_event()
        event.record(stream)
        return event
