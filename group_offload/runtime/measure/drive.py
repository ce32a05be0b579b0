"""How fast the drive is, as passes find it: what was measured once may be out of date (heat, other programs)."""

from __future__ import annotations

import statistics
from collections import deque

MIN_BYTES = 64 << 20
"""Less is too little to tell."""
MIN_BUSY = 0.8
"""Of the time of a pass: a drive that waits for slots in between is read with fewer threads than it could be."""
MIN_DIRECT = 0.9
"""Of what is read: the rest comes from the page cache, much faster."""
NUM_PASSES = 3


class DriveMeter:
    """Bytes per second in the last passes that the drive bounded."""

    def __init__(self) -> None:
        self._last: tuple[float, float, int, int] | None = None
        self._speeds: deque[float] = deque(maxlen=NUM_PASSES)

    def note(self, now: float, busy_seconds: float, cached_bytes: int, direct_bytes: int) -> None:
        """A pass ended. What was read until `now`, and for how long, counts from the reader's beginning."""
        last, self._last = self._last, (now, busy_seconds, cached_bytes, direct_bytes)
        if last is None:
            return
        seconds, busy = now - last[0], busy_seconds - last[1]
        cached, direct = cached_bytes - last[2], direct_bytes - last[3]
        if direct >= max(MIN_BYTES, MIN_DIRECT * (cached + direct)) and busy >= MIN_BUSY * seconds > 0:
            self._speeds.append(direct / busy)

    @property
    def bytes_per_s(self) -> float | None:
        """None if that is not known."""
        return statistics.median(self._speeds) if self._speeds else None
