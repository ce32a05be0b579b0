"""One place that reports to all observers when compute comes to a group, waits for it, and leaves it."""

from __future__ import annotations

from ..base.device import Backend, Stream
from .groups.group import Group
from .measure.recorder import Recorder
from .slots.slot import Slot
from .slots.stalls import Stalls


class Probe:
    """Tells stalls, and the trace, if one is recorded, when compute arrives at a group, begins and ends."""

    def __init__(self, backend: Backend, recorder: Recorder) -> None:
        self.stalls = Stalls(backend)
        self.recorder = recorder

    def arrives(self, group: Group, slot: Slot[Group], stream: Stream) -> None:
        """Report that compute on `stream` is about to wait for the group in `slot`."""
        trace = self.recorder.trace
        if trace is not None:
            trace.compute_arrives(trace.now(stream))
        if slot.waited_on is None:
            self.stalls.arrive(slot, group.group_id, stream)

    def begins(self, group: Group, stream: Stream) -> None:
        """Report that the group's bytes are there, and that its compute is enqueued next."""
        trace = self.recorder.trace
        if trace is not None:
            trace.compute_begins(group.group_id, trace.now(stream))

    def ends(self, group: Group, stream: Stream) -> None:
        """Report that a use of the group is enqueued. Its compute ends here if no other use goes on."""
        trace = self.recorder.trace
        if trace is not None:
            now = trace.now(stream)
            if not group.holds:
                trace.compute_ends(group.group_id, group.num_bytes, now)

    def recover(self) -> None:
        """Drop all measurements of slots and events after a pass that failed."""
        self.stalls.recover()
        self.recorder.recover()
