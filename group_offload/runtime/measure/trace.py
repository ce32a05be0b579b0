"""The trace is a timeline of passes: reads, copies and compute of each group."""

from __future__ import annotations

from collections.abc import Sequence

from ...base.device import Backend, Event, Stream
from ...base.timeline import STALLS, Timeline

_READS, _COPIES, _UNPACKING, _COMPUTE = "file reads", "H2D", "unpacking", "compute"


class WeightTrace(Timeline):
    """Lanes for file reads, copies to the device, compute, and stalls. Threads that read files may call `copied` and `read`."""

    def __init__(self, backend: Backend, title: str, *, unpacks: bool) -> None:
        """
        Args:
            unpacks: Whether there is a lane for unpacking, too.
        """
        lanes = (_COPIES, *([_UNPACKING] if unpacks else []), _COMPUTE, STALLS)
        super().__init__(backend, title, host_lanes=(_READS,), device_lanes=lanes)
        self._open: dict[str, tuple[Event, Event]] = {}
        """For each group in use, the events at which compute came to wait for it, and went on."""

    def copied(self, names: Sequence[str], begun: Event, stream: Stream, num_bytes: int) -> None:
        """Copies of these groups were enqueued on `stream` behind `begun`, which `now` gave."""
        names = [*dict.fromkeys(names)]
        name = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        self.add(_COPIES, name, begun, self.now(stream), num_bytes)

    def unpacked(self, name: str, begun: Event, stream: Stream, num_bytes: int) -> None:
        """Unpacking of a group was enqueued on `stream` behind `begun`, which `now` gave."""
        self.add(_UNPACKING, name, begun, self.now(stream), num_bytes)

    def compute_arrives(self, name: str, stream: Stream) -> None:
        """Compute on `stream` is about to wait for the group of this name."""
        event = self.now(stream)
        self._open[name] = event, event

    def compute_begins(self, name: str, stream: Stream) -> None:
        """Compute on `stream` has the group that it waited for."""
        begun = self.now(stream)
        arrived = self._open.get(name, (begun, begun))[0]
        self._open[name] = arrived, begun

    def compute_ends(self, name: str, num_bytes: int, stream: Stream) -> None:
        """Compute on `stream` is done with the group, which has `num_bytes`."""
        found = self._open.pop(name, None)
        if found is not None:
            arrived, begun = found
            if arrived is not begun:
                self.add(STALLS, name, arrived, begun)
            self.add(_COMPUTE, name, begun, self.now(stream), num_bytes)

    def read(self, name: str, started: float, ended: float, num_bytes: int) -> None:
        """A file was read, between two values of `time.perf_counter`."""
        self.add_on_host(_READS, name, started, ended, num_bytes)
