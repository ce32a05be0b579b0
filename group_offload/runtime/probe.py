"""One place that reports to all observers when compute comes to a group, waits for it, and leaves it."""

from __future__ import annotations

from collections.abc import Hashable

from ..base.device import Backend, Stream
from .budget.stopwatch import Stopwatch
from .groups.group import Group
from .measure.trace import WeightTrace
from .slots.slot import Slot
from .slots.stalls import Stalls


class Probe:
    """Tells stalls, the stopwatch and the trace, if one is recorded, when compute arrives at a group, begins and ends."""

    def __init__(self, backend: Backend) -> None:
        self.stalls = Stalls(backend)
        self.stopwatch = Stopwatch(backend)
        self.tracer: WeightTrace | None = None

    def begin_timing(self, kind: Hashable, stream: Stream) -> None:
        """Measure the compute of the pass of this kind that begins."""
        self.stopwatch.begin(kind, stream)

    def end_timing(self, stream: Stream) -> None:
        self.stopwatch.end(stream)

    def arrives(self, group: Group, slot: Slot[Group], stream: Stream) -> None:
        """Report that compute on `stream` is about to wait for the group in `slot`."""
        if self.tracer is not None:
            self.tracer.compute_arrives(group.group_id, stream)
        self.stopwatch.arrive(stream)
        if slot.waited_on is None:
            self.stalls.arrive(slot, group.group_id, stream)

    def begins(self, group: Group, stream: Stream) -> None:
        """Report that the group's bytes are there, and that its compute is enqueued next."""
        if self.tracer is not None:
            self.tracer.compute_begins(group.group_id, stream)
        self.stopwatch.start(group, stream)

    def ends(self, group: Group, stream: Stream) -> None:
        """Report that a use of the group is enqueued. Its compute ends here if no other use goes on."""
        if self.tracer is not None:
            self.tracer.compute_ends(group.group_id, group.num_bytes, stream)
        if not group.holds:
            self.stopwatch.stop(group, stream)

    def recover(self) -> None:
        """Drop all measurements of slots and events after a pass that failed."""
        self.stalls.recover()
        self.stopwatch.clear()
