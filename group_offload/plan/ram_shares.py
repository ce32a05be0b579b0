"""Shares of one RAM budget among the components of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from .placement import exact_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentLoad:
    """One component of a pipeline, as far as sharing RAM needs to know it.

    Raises:
        ValueError: negative bytes or uses, or `must_bytes` larger than `num_bytes`.
    """

    num_bytes: int
    uses: float
    """Passes for one image."""
    must_bytes: int
    """Bytes that no file holds: they take RAM always."""

    def __post_init__(self) -> None:
        if not 0 <= self.must_bytes <= self.num_bytes:
            raise ValueError(f"must_bytes={self.must_bytes} has to be from 0 to num_bytes={self.num_bytes}")
        if not 0 <= self.uses < math.inf:
            raise ValueError(f"uses={self.uses} has to be finite, 0 or more")


def share_ram(components: Sequence[ComponentLoad], ram_bytes: int) -> tuple[int, ...]:
    """Bytes of RAM for each component. Components run one after another.

    A byte that rests in RAM saves one read from the drive in each pass. So the components with most passes get RAM first.
    Components with equally many passes get the same fraction of the bytes that they lack.

    Raises:
        ConfigError: too little RAM for the weights that no file holds. The message names the smallest budget that works.
    """
    if ram_bytes < 0:
        raise ValueError(f"ram_bytes={ram_bytes} is negative")
    shares = [component.must_bytes for component in components]
    room = ram_bytes - sum(shares)
    if room < 0:
        raise ConfigError(
            f"the RAM budget for weights is {exact_bytes(ram_bytes)}; the smallest that works is "
            f"{exact_bytes(sum(shares))}: all weights that have no file"
        )
    for uses in sorted({component.uses for component in components}, reverse=True):
        alike = [index for index, component in enumerate(components) if component.uses == uses]
        total = sum(components[index].num_bytes - shares[index] for index in alike)
        given = min(room, total)
        for index in alike:
            shares[index] += (components[index].num_bytes - shares[index]) * given // (total or 1)
        room -= given  # what rounding leaves goes to nobody, so that no share gets less of a larger budget
    return tuple(shares)
