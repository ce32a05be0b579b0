"""One place that reports to all observers when compute comes to a group, waits for it, and leaves it."""

from __future__ import annotations

from collections.abc import Hashable

from ..base.device import Backend, Stream
from .budget.stopwatch import Stopwatch
from .groups.group import Group
from .measure.recorder import Recorder
from .slots.slot import Slot
from .slots.stalls import Stalls


class Probe:
    """Tells stalls, the stopwatch and the trace, if one is recorded, when compute arrives at a group, begins and ends.

    A pass that is timed is recorded too: the stopwatch and the trace share their events.
    """

    def __init__(self, backend: Backend, recorder: Recorder) -> None:
        self.stalls = Stalls(backend)
        self.stopwatch = Stopwatch(backend)
        self._recorder = recorder

    def begin_forward(
        self, number: int, top: str, kind: Hashable, stream: Stream, copy_stream: Stream, *, is_timed: bool
    ) -> None:
        """A forward begins, which is the one of this number.

        Args:
            is_timed: Whether to measure its compute.
        """
        begun = self._recorder.begin(number, top, stream, copy_stream, is_wanted=is_timed)
        if is_timed:
            assert begun is not None
            self.stopwatch.begin(kind, begun)

    def begin_backward(self, number: int, top: str, stream: Stream, copy_stream: Stream) -> None:
        """A backward begins, after the forward of this number."""
        self._recorder.begin(number, top, stream, copy_stream, is_wanted=None)

    def end_pass(self, stream: Stream) -> None:
        """The pass, forward or backward, completed."""
        ended = self._recorder.end(stream)
        if ended is not None:
            self.stopwatch.end(ended)

    def arrives(self, group: Group, slot: Slot[Group], stream: Stream) -> None:
        """Report that compute on `stream` is about to wait for the group in `slot`."""
        trace = self._recorder.trace
        if trace is not None:
            now = trace.now(stream)
            trace.compute_arrives(group.group_id, now)
            self.stopwatch.arrive(now)
        if slot.waited_on is None:
            self.stalls.arrive(slot, group.group_id, stream)

    def begins(self, group: Group, stream: Stream) -> None:
        """Report that the group's bytes are there, and that its compute is enqueued next."""
        trace = self._recorder.trace
        if trace is not None:
            now = trace.now(stream)
            trace.compute_begins(group.group_id, now)
            self.stopwatch.start(group, now)

    def ends(self, group: Group, stream: Stream) -> None:
        """Report that a use of the group is enqueued. Its compute ends here if no other use goes on."""
        trace = self._recorder.trace
        if trace is not None:
            now = trace.now(stream)
            trace.compute_ends(group.group_id, group.num_bytes, now)
            if not group.holds:
                self.stopwatch.stop(group, now)

    def recover(self) -> None:
        """Drop all measurements of slots and events after a pass that failed."""
        self.stalls.recover()
        self.stopwatch.clear()
        self._recorder.recover()
