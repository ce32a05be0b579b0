"""The recorder decides which passes are recorded: to measure compute, and for traces.

[Note: What recording costs]
A pass is recorded if plans are to know how long its groups compute (`Budgeter.count_pass`: the first three of each kind, the
4th, 8th, 16th and 32nd, then every 32nd), or while `OffloadHandle.trace` is open. That takes three events for each use of a
group, two for each copy or chunk of a file, two for the pass, and two calls of `time.perf_counter` for each read. In all other
passes nothing is added. The host never waits for the device, and events are read when somebody asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ...base.device import Backend, Event, Stream
from ...errors import StateError
from .trace import COMPUTE, STALLS, WeightTrace


@dataclass(slots=True)
class _Measured:
    """A forward whose compute is measured."""

    kind: Any
    trace: WeightTrace
    begun: Event
    ended: Event


class Recorder:
    """Decides which passes get a trace. Used under the engine's lock; `trace` may be read by the thread that runs a pass."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._idle: Stream | None = None
        self.trace: WeightTrace | None = None
        """The trace that all work is reported to. None: nothing is recorded."""
        self._now: _Measured | None = None
        self._all: list[WeightTrace] | None = None
        """All traces since `begin_all`."""
        self._unread: deque[_Measured] = deque()
        """The forwards whose compute is measured, and has not been read."""
        self._arrived: Event | None = None
        """Since the trace began: the event at which compute came to wait for a group."""
        self._open: dict[str, Event] = {}
        """For each group in use, the event at which its compute began."""

    def begin(self, kind: Any, stream: Stream) -> None:
        """A pass begins.

        Args:
            kind: That of a forward whose compute is to be measured; None for other passes.
        """
        self._now = None
        self.trace = None if self._all is None and kind is None else self._new_trace()
        if self.trace is not None and kind is not None:
            begun = self.trace.now(stream)
            self._now = _Measured(kind, self.trace, begun, begun)

    def end(self, stream: Stream) -> None:
        """The pass completed. Its trace goes on until the next one begins: copies for that are on their way."""
        now, self._now = self._now, None
        if now is not None:
            now.ended = now.trace.now(stream)
            self._unread.append(now)

    def measured(self, names: Collection[str]) -> Iterator[tuple[Any, dict[str, float], float, float]]:
        """Each measured pass that the device is past by now, once: its kind, the seconds of these groups' compute, those of
        all other compute, and those of the whole pass."""
        while self._unread:
            found = self._unread[0]
            total = self._backend.seconds_between(found.begun, found.ended)
            if total is None:
                return
            self._unread.popleft()
            by_group, waited = found.trace.compute_seconds(names)
            yield found.kind, by_group, max(0.0, total - waited - sum(by_group.values())), total

    def now(self, stream: Stream) -> Event | None:
        """A point of `stream`, for `enqueued`; None if nothing is recorded."""
        return None if self.trace is None else self.trace.now(stream)

    def enqueued(self, what: str, names: Iterable[str], begun: Event | None, stream: Stream, num_bytes: int) -> None:
        """Work for the groups of these names was enqueued on `stream` from `begun` to now."""
        if self.trace is not None and begun is not None:
            self.trace.enqueued(what, names, begun, stream, num_bytes)

    def arrives(self, stream: Stream) -> None:
        """Compute on `stream` is about to wait for a group."""
        if self.trace is not None:
            self._arrived = self.trace.now(stream)

    def begins(self, name: str, stream: Stream) -> None:
        """The bytes of the group of this name are there, and its compute is enqueued next."""
        if self.trace is not None:
            now, arrived, self._arrived = self.trace.now(stream), self._arrived, None
            if arrived is not None:
                self.trace.add(STALLS, name, arrived, now, 0)
            self._open.setdefault(name, now)

    def ends(self, name: str, num_bytes: int, stream: Stream) -> None:
        """All uses of the group are enqueued, which has `num_bytes`."""
        if self.trace is not None and name in self._open:
            self.trace.add(COMPUTE, name, self._open.pop(name), self.trace.now(stream), num_bytes)

    def forget_measured(self) -> None:
        """Forget measured passes that were not read, and the one in progress: it failed, or the groups are given up."""
        self._now = None
        self._unread.clear()
        if self._all is None:
            self.trace = None

    def begin_all(self) -> None:
        """Record everything until `end_all`.

        Raises:
            StateError: everything is being recorded already.
        """
        if self._all is not None:
            raise StateError("A trace of this module is being recorded already. End that one first.")
        self._all = []
        self.trace = self._new_trace()

    def end_all(self) -> list[WeightTrace]:
        """All traces since `begin_all`."""
        assert self._all is not None
        traces, self._all, self.trace = self._all, None, None
        return traces

    def _new_trace(self) -> WeightTrace:
        if self._idle is None:
            self._idle = self._backend.new_stream()
        trace, self._arrived, self._open = WeightTrace(self._backend, self._idle), None, {}
        if self._all is not None:
            self._all.append(trace)
        return trace
