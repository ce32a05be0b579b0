"""What every test of activations gets."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the slab and the file grow, and nothing clears RAM that no test needs."""
    monkeypatch.setattr("group_offload.activations.host_pool.SEGMENT_BYTES", 16 << 10)
    monkeypatch.setattr("group_offload.activations.spill.STEP_BYTES", 16 << 10)
    monkeypatch.setattr("group_offload.activations.spill.PIECE_BYTES", 1 << 10)
