"""The counts and bytes that activation offloading reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class ActivationStats:
    """Counts and bytes since activation offloading was applied. `ActivationOffloadHandle.stats` returns a copy."""

    passes: int = 0
    """Forward passes with gradients."""
    saved_tensors: int = 0
    """Tensors that autograd saved in groups and that were large enough."""
    shared_tensors: int = 0
    """Those of `saved_tensors` whose bytes the same forward had saved before: they move once."""
    offloads: int = 0
    """Copies to host memory."""
    offloaded_bytes: int = 0
    """Bytes of these copies."""
    refused_bytes: int = 0
    """Bytes that were not copied because the system pins no more host memory. What later groups save too counts again."""
    reloads: int = 0
    """Copies back to the device."""
    reloaded_bytes: int = 0
    """Bytes of these copies."""
    stalls: int = 0
    """Tensors whose copy back started only when backward reached their group, not ahead of it."""
    host_bytes: int = 0
    """Host memory in the pool. It is pinned, except with device='cpu'."""
    used_host_bytes: int = 0
    """The part of `host_bytes` that holds activations now."""
    peak_used_host_bytes: int = 0
    """The most that `used_host_bytes` has been."""
