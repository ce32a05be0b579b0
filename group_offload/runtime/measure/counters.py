"""What an engine has done so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """What an engine has done so far."""

    passes: int = 0
    """Forwards."""
    backward_passes: int = 0
    onloads: int = 0
    stalls: int = 0
    brought_back: int = 0
    rebuilds: int = 0
    device_bytes: int = 0
    pooled_bytes: int = 0
    """The part of it that is in no ring, and for one run of groups only."""
    resident_bytes: int = 0
    """The part of it that stays between passes."""
    peak_device_bytes: int = 0
