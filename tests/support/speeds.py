"""Speeds of a machine, given instead of measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from group_offload.plan import speeds
from group_offload.plan.placement import Speeds

MIB = 1 << 20
KNOWN_SPEEDS = Speeds(h2d=50 * 10**9, disk=2 * 10**9)
"""What every test takes for the speeds of this machine."""


def use_speeds(patch: pytest.MonkeyPatch, **known: int) -> None:
    """Let plans take these for the speeds of the machine (`Speeds`), in bytes a second."""
    speeds = replace(KNOWN_SPEEDS, **known)
    patch.setattr("group_offload.runtime.budget.memory_budget.known_speeds", lambda *args, **options: speeds)


def measure_little(patch: pytest.MonkeyPatch) -> None:
    """Let measurements move 2 MiB over the link, and read files of 1 MiB."""
    for name, size in (("LINK_BYTES", 2 * MIB), ("MIN_DISK_BYTES", MIB), ("_MAX_DRIVE_BYTES", 4 * MIB)):
        patch.setattr(speeds, name, size)
