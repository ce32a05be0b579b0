"""A look at the calls that other threads of the process are in."""

from __future__ import annotations

import sys
from types import FrameType

_WAITING = frozenset({"concurrent", "multiprocessing", "queue", "threading"})
"""Python's modules whose functions wait for other threads."""
_MINE = __name__.partition(".")[0]


def where_it_waits(thread: int) -> FrameType | None:
    """The frame in which a thread waits for another one. None if it does not wait, or if this package made the wait."""
    frame = sys._current_frames().get(thread)
    if frame is None or _package(frame.f_globals) not in _WAITING:
        return None
    place = frame
    while frame is not None and _package(frame.f_globals) in _WAITING:
        frame = frame.f_back
    return None if frame is not None and _package(frame.f_globals) == _MINE else place


def _package(names: dict[str, object]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]
