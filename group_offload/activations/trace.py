"""A timeline of training: what left, came back and was computed when, and for which group."""

from __future__ import annotations

from ..base.device import Backend, Event, Stream
from ..base.timeline import STALLS, Timeline

WRITES, READS = "file writes", "file reads"
_OUT, _BACK, _COMPUTE = "D2H", "H2D", "compute"


class ActivationTrace(Timeline):
    """One device: lanes for the file, copies in both directions, compute, and stalls."""

    def __init__(self, backend: Backend, title: str) -> None:
        super().__init__(backend, title, host_lanes=(WRITES, READS), device_lanes=(_OUT, _BACK, _COMPUTE, STALLS))
        self._current: tuple[str, Event] | None = None

    def reach(self, name: str | None, stream: Stream) -> None:
        """Compute on `stream` comes to a group; None if it comes to an end."""
        now = self.now(stream)
        if self._current is not None:
            self.add(_COMPUTE, *self._current, now)
        self._current = None if name is None else (name, now)

    def left(self, name: str, begun: Event, ended: Event, num_bytes: int) -> None:
        self.add(_OUT, name, begun, ended, num_bytes)

    def came_back(self, name: str, begun: Event, ended: Event, num_bytes: int) -> None:
        self.add(_BACK, name, begun, ended, num_bytes)

    def stalled(self, name: str, arrived: Event, stream: Stream) -> None:
        """Compute has waited since `arrived`."""
        self.add(STALLS, name, arrived, self.now(stream))
