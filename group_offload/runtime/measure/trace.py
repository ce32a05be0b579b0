"""A timeline of passes: what was read, copied and computed when, and for which group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...base.device import Backend, Event, Stream
from ...base.timeline import STALLS, Timeline

if TYPE_CHECKING:
    from ..groups.group import Group

_READS, _COPIES, _COMPUTE = "file reads", "H2D", "compute"


class Tracer(Timeline):
    """Lanes for file reads, copies to the device, compute, and stalls. Threads that read files may call `copied` and `read`."""

    def __init__(self, backend: Backend, title: str) -> None:
        super().__init__(backend, title, host_lanes=(_READS,), device_lanes=(_COPIES, _COMPUTE, STALLS))
        self._open: dict[Group, tuple[Event, Event]] = {}

    def copied(self, names: Sequence[str], begun: Event, stream: Stream, num_bytes: int) -> None:
        """Copies of these groups were enqueued on `stream` behind `begun`, which `now` gave."""
        names = [*dict.fromkeys(names)]
        name = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        self.add(_COPIES, name, begun, self.now(stream), num_bytes)

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
                self.add(STALLS, group.group_id, arrived, begun)
            self.add(_COMPUTE, group.group_id, begun, self.now(stream), group.num_bytes)

    def read(self, name: str, started: float, ended: float, num_bytes: int) -> None:
        """A file was read, between two values of `time.perf_counter`."""
        self.add_on_host(_READS, name, started, ended, num_bytes)
