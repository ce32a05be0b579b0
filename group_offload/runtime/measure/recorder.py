"""The recorder keeps timelines of the last passes that were measured, for reports and traces.

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
from ...base.timeline import COMPUTE, COPIES, STALLS, Slice
from ...errors import StateError
from .trace import WeightTrace

NUM_RECORDED = 4
"""The number of last recorded passes that are kept. A forward and its backward are two."""
_INSTANT = 1e-9
"""Seconds. Clocks that are compared are no more exact: what only touches a pass is no part of it."""
SENT_AHEAD = "what was sent ahead"
"""The name of copies that a pass that is not recorded has begun for the next one."""


@dataclass(slots=True)
class RecordedPass:
    """A pass that was recorded. Its times are read from the device when they are asked for."""

    what: str
    """"forward" or "backward"."""
    number: int
    """The number of the forward, or of the last one before the backward, since the module was offloaded."""
    top: str
    """The class of the module that was called."""
    kind: Any
    """The kind of a forward whose compute is measured, until that is read; None for other passes."""
    before: WeightTrace | None
    """What was recorded just before: copies that were sent ahead."""
    ahead: Event | None
    """Behind the copies that were sent ahead, if they were not recorded."""
    trace: WeightTrace
    begun: Event
    ended: Event

    def slices(self) -> tuple[float, list[Slice]]:
        """The seconds that the pass took, and its slices from its beginning on. Waits for the device."""
        zero_seconds = self.trace.host_seconds(self.begun)
        seconds = max(0.0, self.trace.host_seconds(self.ended) - zero_seconds)
        traces = [self.trace] if self.before is None else [self.before, self.trace]
        found = [each for trace in traces for each in trace.slices(self.begun, zero_seconds)]
        if self.ahead is not None:
            found.append(Slice(COPIES, SENT_AHEAD, 0.0, self.trace.host_seconds(self.ahead) - zero_seconds, 0))
        return seconds, [each for each in found if each.end > _INSTANT and each.start < seconds - _INSTANT]


class Recorder:
    """Decides which passes get a trace. Used under the engine's lock; `trace` may be read by the thread that runs a pass."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._idle: Stream | None = None
        self.trace: WeightTrace | None = None
        """The trace that all work is reported to. None: nothing is recorded."""
        self._now: RecordedPass | None = None
        self.passes: deque[RecordedPass] = deque(maxlen=NUM_RECORDED)
        """The last passes that were recorded and completed."""
        self._all: list[WeightTrace] | None = None
        """All traces since `begin_all`."""
        self._arrived: Event | None = None
        """Since the trace began: the event at which compute came to wait for a group."""
        self._open: dict[str, Event] = {}
        """For each group in use, the event at which its compute began."""

    def begin(self, what: str, number: int, top: str, stream: Stream, copy_stream: Stream, *, kind: Any = None) -> None:
        """A pass begins.

        Args:
            what: "forward" or "backward". A backward is recorded if the forward before was.
            kind: The kind of a forward whose compute is to be measured. It is recorded.
        """
        self._now = None
        last = self.passes[-1] if self.passes else None
        is_backward_of_last = last is not None and last.number == number
        if self._all is None and kind is None and not is_backward_of_last:
            self.trace = None
            return
        was_recorded = last is not None and last.trace is self.trace
        before, trace = self.trace, self._new_trace()
        self.trace, begun = trace, trace.now(stream)
        ahead = None if was_recorded or copy_stream == stream else trace.now(copy_stream)
        self._now = RecordedPass(what, number, top, kind, before, ahead, trace, begun, begun)

    def end(self, stream: Stream) -> None:
        """The pass completed. Its trace goes on until the next one begins: copies for that are on their way."""
        now, self._now = self._now, None
        if now is None:
            return
        now.ended = now.trace.now(stream)
        self.passes.append(now)

    def measured(self, names: Collection[str]) -> Iterator[tuple[Any, dict[str, float], float, float]]:
        """Each measured pass that the device is past by now, once: its kind, the seconds of these groups' compute, those of
        all other compute, and those of the whole pass."""
        for each in self.passes:
            total = None if each.kind is None else self._backend.seconds_between(each.begun, each.ended)
            if total is not None:
                kind, each.kind = each.kind, None
                by_group, waited = each.trace.compute_seconds(names)
                yield kind, by_group, max(0.0, total - waited - sum(by_group.values())), total

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
        for each in self.passes:
            each.kind = None
        if self._all is None:
            self.trace = None

    def clear(self) -> None:
        """Forget all passes: the groups are given up."""
        self.forget_measured()
        self.passes.clear()

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
