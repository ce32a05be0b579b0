"""Counts since activation offloading was applied."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ActivationCounters:
    """The part of `ActivationStats` that is counted, documented there."""

    passes: int = 0
    saved_tensors: int = 0
    offloads: int = 0
    offloaded_bytes: int = 0
    shared_tensors: int = 0
    kept_bytes: int = 0
    reloads: int = 0
    reloaded_bytes: int = 0
    stalls: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    refused_bytes: int = 0
    peak_inflight_bytes: int = 0
