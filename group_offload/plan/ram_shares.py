"""Shares of one RAM budget among the components of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentLoad:
    """One component of a pipeline, as far as sharing RAM needs to know it."""

    num_bytes: int
    uses: float
    """Passes for one image."""
    must_bytes: int
    """Those of them that no file holds: they take RAM always."""


def share_ram(components: Sequence[ComponentLoad], ram_bytes: int) -> tuple[int, ...]:
    """Bytes of RAM for each component. Components run one after another.

    A byte that rests in RAM saves one read from the drive in each pass. So the components with most passes get RAM first.
    Components with equally many passes get the same fraction of the bytes that they lack.

    Args:
        ram_bytes: Room for the weights that no file holds, at least.
    """
    shares = [component.must_bytes for component in components]
    room = ram_bytes - sum(shares)
    assert room >= 0
    for uses in sorted({component.uses for component in components}, reverse=True):
        alike = [index for index, component in enumerate(components) if component.uses == uses]
        total = sum(components[index].num_bytes - shares[index] for index in alike)
        given = min(room, total)
        for index in alike:
            shares[index] += (components[index].num_bytes - shares[index]) * given // (total or 1)
        room -= given  # what rounding leaves goes to nobody, so that no share gets less of a larger budget
    return tuple(shares)
