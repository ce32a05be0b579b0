"""What every test of activations gets."""

from __future__ import annotations

import pytest

from ..support.tuning import tune


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the pool grows, and nothing clears RAM that no test needs."""
    tune(monkeypatch, activation_segment_bytes=16 << 10)
