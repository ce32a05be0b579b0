"""The trace is a timeline of passes: reads, copies and compute of each group."""

from __future__ import annotations

from collections.abc import Sequence

from ...base.device import Backend, Event, Stream
from ...base.timeline import COMPUTE, COPIES, DECODE, GATHERS, READS, STALLS, Timeline

_LANES = (COPIES, GATHERS, DECODE, COMPUTE, STALLS)


class WeightTrace(Timeline):
    """Lanes for file reads, copies to the device, compute, and stalls. Threads that read files may call `copied` and `read`."""

    def __init__(self, backend: Backend, title: str, idle: Stream) -> None:
        super().__init__(backend, title, host_lanes=(READS,), device_lanes=_LANES, idle=idle)
        self._open: dict[str, tuple[Event, Event]] = {}
        """For each group in use, the events at which compute came to wait for it, and went on."""

    def copied(self, names: Sequence[str], begun: Event, stream: Stream, num_bytes: int) -> None:
        """Copies of these groups were enqueued on `stream` behind `begun`, which `now` gave."""
        names = [*dict.fromkeys(names)]
        name = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        self.add(COPIES, name, begun, self.now(stream), num_bytes)

    def unpacked(self, name: str, begun: Event, stream: Stream, num_bytes: int) -> None:
        """Unpacking of a group was enqueued on `stream` behind `begun`, which `now` gave."""
        self.add(DECODE, name, begun, self.now(stream), num_bytes)

    def gathered(self, name: str, begun: Event, stream: Stream, num_bytes: int) -> None:
        """What other GPUs have brought of a group was enqueued on `stream` behind `begun`, which `now` gave."""
        self.add(GATHERS, name, begun, self.now(stream), num_bytes)

    def compute_arrives(self, name: str, at: Event) -> None:
        """Compute is about to wait for the group of this name."""
        self._open[name] = at, at

    def compute_begins(self, name: str, at: Event) -> None:
        """Compute has the group that it waited for."""
        arrived = self._open.get(name, (at, at))[0]
        self._open[name] = arrived, at

    def compute_ends(self, name: str, num_bytes: int, at: Event) -> None:
        """Compute is done with the group, which has `num_bytes`."""
        found = self._open.pop(name, None)
        if found is not None:
            arrived, begun = found
            if arrived is not begun:
                self.add(STALLS, name, arrived, begun)
            self.add(COMPUTE, name, begun, at, num_bytes)

    def read(self, name: str, started: float, ended: float, num_bytes: int) -> None:
        """A file was read, between two values of `time.perf_counter`."""
        self.add_on_host(READS, name, started, ended, num_bytes)
