"""Counts of an engine's work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Counts of an engine's work so far."""

    passes: int = 0
    """The number of forwards."""
    backward_passes: int = 0
    shared: int = 0
    """Forwards that shared a pass with another one."""
    predicted: int = 0
    """Forwards that ran before they were called."""
    discarded: int = 0
    """Those of them whose results nobody called for."""
    onloads: int = 0
    stalls: int = 0
    changed: int = 0
    """Tensors that forwards have changed."""
    brought_back: int = 0
    """Those of them that were copied back from the device."""
    rebuilds: int = 0
    peak_device_bytes: int = 0
