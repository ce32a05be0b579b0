"""Slices of time, for people to look at: what was read, sent, unpacked, computed and waited for, in lanes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

READS, COPIES, COMPUTE = "file reads", "H2D", "compute"
"""The lanes of weights on their way, and of the work that needs them."""
STALLS = "stalls"
DECODE, GATHERS = "decode", "gathers"
"""Lanes that are left out if nothing is in them."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Work of one lane, in seconds since a point of the device."""

    lane: str
    name: str
    start: float
    end: float
    num_bytes: int


def side_by_side(slices: Iterable[Slice]) -> list[list[Slice]]:
    """The slices in as few rows as possible, without overlap in any."""
    rows: list[list[Slice]] = []
    for each in sorted(slices, key=lambda each: each.start):
        row = next((row for row in rows if row[-1].end <= each.start), None)
        if row is None:
            rows.append(row := [])
        row.append(each)
    return rows
