"""The drive meter measures the drive in passes: an earlier speed may be out of date (heat, other programs)."""

from __future__ import annotations

import statistics
from collections import deque

from ...base.tuning import tuning

MIN_BUSY = 0.8
"""The least busy share of a pass: a drive that waits for slots is read with fewer threads than it could be."""
MIN_DIRECT = 0.9
"""The least share of bytes from the drive: the others come from the page cache, much faster."""
NUM_PASSES = 3


class DriveMeter:
    """Bytes per second in the last passes that the drive bounded."""

    def __init__(self) -> None:
        self._last: tuple[float, float, int, int] | None = None
        self._speeds: deque[float] = deque(maxlen=NUM_PASSES)

    def note(self, now: float, busy_seconds: float, cached_bytes: int, direct_bytes: int) -> None:
        """A pass ended at `now`. The busy seconds and the bytes count from the reader's beginning."""
        last, self._last = self._last, (now, busy_seconds, cached_bytes, direct_bytes)
        if last is None:
            return
        seconds, busy = now - last[0], busy_seconds - last[1]
        cached, direct = cached_bytes - last[2], direct_bytes - last[3]
        if (
            direct >= max(tuning().min_bytes_for_speed, MIN_DIRECT * (cached + direct))
            and busy >= MIN_BUSY * seconds > 0
        ):
            self._speeds.append(direct / busy)

    @property
    def bytes_per_s(self) -> float | None:
        """The median speed, or None if no pass has measured one."""
        return statistics.median(self._speeds) if self._speeds else None
