"""A timeline of training: what left, came back and was computed when, and for which group."""

from __future__ import annotations

from ..base.device import Backend, Event, Stream
from ..base.timeline import STALLS, Timeline

WRITES, READS = "file writes", "file reads"
OUT, BACK, _COMPUTE = "D2H", "H2D", "compute"


class ActivationTrace(Timeline):
    """The rows of one device: the file, copies in both directions, compute, and stalls."""

    def __init__(self, backend: Backend, title: str) -> None:
        super().__init__(backend, title, host_lanes=(WRITES, READS), device_lanes=(OUT, BACK, _COMPUTE, STALLS))
        self._current: tuple[str, Event] | None = None

    def reach(self, name: str | None, stream: Stream) -> None:
        """Compute on `stream` comes to a group; None if it comes to an end."""
        now = self.now(stream)
        if self._current is not None:
            self.add(_COMPUTE, *self._current, now)
        self._current = None if name is None else (name, now)

    def stalled(self, name: str, reached: Event, stream: Stream) -> None:
        """Compute on `stream` has waited since `reached`."""
        self.add(STALLS, name, reached, self.now(stream))
