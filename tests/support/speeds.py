"""Speeds of a machine, given instead of measured."""

from __future__ import annotations

from typing import Any

from group_offload.plan.speeds import MachineSpeeds

MIB = 1 << 20
SIZES: dict[str, Any] = {"link_bytes": 2 * MIB, "max_drive_bytes": 4 * MIB, "min_drive_bytes": 1 * MIB}
SPEEDS = MachineSpeeds(
    h2d=10, drive=5, problem="", device="Device", filesystem="/ (1:2)", measured_at="2026-01-01T00:00:00+00:00"
)


KNOWN_SPEEDS = MachineSpeeds(h2d=50 * 10**9, drive=2 * 10**9, problem="", device="", filesystem="", measured_at="")
"""What every test takes for the speeds of this machine."""
