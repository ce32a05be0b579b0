"""The stopwatch measures by the device's clock how long groups compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import TYPE_CHECKING

from ...base.device import Backend, Event

if TYPE_CHECKING:
    from ..groups.group import Group


class _Times:
    """The events of one pass."""

    def __init__(self, kind: Hashable, begun: Event) -> None:
        self.kind = kind
        self.begun = begun
        self.ended: Event | None = None
        self.uses: list[tuple[Group, Event, Event]] = []
        self.waits: list[tuple[Event, Event]] = []


class Stopwatch:
    """Measures the compute of whole passes: the time of each group in all its uses, and the time of everything else.

    The host never waits for a measurement: a pass is read once the device is past it.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._now: _Times | None = None
        self._open: dict[Group, Event] = {}
        self._arrived: Event | None = None
        """The event at which compute came to wait for weights."""
        self._done: deque[_Times] = deque()

    def clear(self) -> None:
        """Forget the passes that were not read yet: the groups are given up."""
        self._now = self._arrived = None
        self._open.clear()
        self._done.clear()

    def begin(self, kind: Hashable, at: Event) -> None:
        """A pass of this kind is to be measured."""
        self._open.clear()
        self._now = _Times(kind, at)

    def arrive(self, at: Event) -> None:
        """Compute comes to wait for weights."""
        self._arrived = None if self._now is None else at

    def start(self, group: Group, at: Event) -> None:
        """Compute has waited for the group's weights since `arrive`, and is enqueued next."""
        if self._now is None:
            return
        if self._arrived is not None:
            self._now.waits.append((self._arrived, at))
            self._arrived = None
        if not group.height and group not in self._open:
            self._open[group] = at

    def stop(self, group: Group, at: Event) -> None:
        started = self._open.pop(group, None)
        if self._now is not None and started is not None:
            self._now.uses.append((group, started, at))

    def end(self, at: Event) -> None:
        """The pass completed."""
        now, self._now = self._now, None
        if now is not None:
            now.ended = at
            self._done.append(now)

    def results(self) -> list[tuple[Hashable, dict[Group, float], float, float]]:
        """The kind, the seconds by group, those of all other compute, and those of the whole pass.

        Each pass that is over by now is told once.
        """
        found = []
        while self._done:
            times = self._done[0]
            assert times.ended is not None
            total = self._backend.seconds_between(times.begun, times.ended)
            if total is None:
                break
            self._done.popleft()
            by_group: dict[Group, float] = {}
            for group, start, end in times.uses:
                by_group[group] = by_group.get(group, 0.0) + (self._backend.seconds_between(start, end) or 0.0)
            waited = sum(max(0.0, self._backend.seconds_between(*wait) or 0.0) for wait in times.waits)
            found.append((times.kind, by_group, max(0.0, total - waited - sum(by_group.values())), total))
        return found
