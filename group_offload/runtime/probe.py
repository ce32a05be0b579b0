"""Everybody who watches compute come to a group, wait for it, and leave it: one place that tells them all."""

from __future__ import annotations

from collections.abc import Hashable

from ..base.device import Backend, Stream
from .budget.stopwatch import Stopwatch
from .groups.group import Group
from .measure.trace import WeightTrace
from .slots.slot import Slot
from .slots.stalls import Stalls


class Probe:
    """Tells stalls, the stopwatch and a trace, if one is made, when compute arrives at a group, begins and ends."""

    def __init__(self, backend: Backend) -> None:
        self.stalls = Stalls(backend)
        self.stopwatch = Stopwatch(backend)
        self.tracer: WeightTrace | None = None

    def begin_timing(self, kind: Hashable, stream: Stream) -> None:
        """A pass of this kind begins, and its compute is to be measured."""
        self.stopwatch.begin(kind, stream)

    def end_timing(self, stream: Stream) -> None:
        self.stopwatch.end(stream)

    def arrives(self, group: Group, slot: Slot[Group], stream: Stream) -> None:
        """Compute on `stream` is about to wait for the group in `slot`."""
        if self.tracer is not None:
            self.tracer.compute_arrives(group.group_id, stream)
        self.stopwatch.arrive(stream)
        if slot.waited_on is None:
            self.stalls.arrive(slot, group.group_id, stream)

    def begins(self, group: Group, stream: Stream) -> None:
        """The group's bytes are there, and its compute is enqueued next."""
        if self.tracer is not None:
            self.tracer.compute_begins(group.group_id, stream)
        self.stopwatch.start(group, stream)

    def ends(self, group: Group, stream: Stream) -> None:
        """A use of the group is enqueued. If no other one goes on, its compute ends here."""
        if self.tracer is not None:
            self.tracer.compute_ends(group.group_id, group.num_bytes, stream)
        if not group.holds:
            self.stopwatch.stop(group, stream)

    def recover(self) -> None:
        """A pass failed: all slots and events are given up."""
        self.stalls.recover()
        self.stopwatch.clear()
