"""Shares of one RAM budget among the modules of a process, and among the components of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..base.ram import Tally, available_ram, pinned, ram_in_use
from ..base.tuning import tuning
from ..errors import ConfigError
from .budgets import Budget, auto_ram, describe_bytes

promised = Tally()
"""The parts of the process's RAM budget that modules were promised for their weights in files."""


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

    A byte that is stored in RAM saves one read from the disk in each pass. So the components with most passes get RAM first.
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


def ram_for_weights(
    budget: Budget | None, in_ram: int, staging_bytes: int, *, stay: bool = True, turn_bytes: int = 0
) -> int:
    """The RAM that a module or pipeline may take for weights when offloaded; its weights take `in_ram` bytes already.

    Args:
        stay: Whether those weights stay in RAM. Else they get files, and give their RAM back.
        turn_bytes: Bytes in which weights from files take turns, where these are in RAM.
        budget: RAM for the whole process; None: `in_ram`, and the share of RAM that files are pinned in by default.
        staging_bytes: RAM that the memory to read files into has still to take from the budget.

    Raises:
        ConfigError: The process takes more already, without any weights in files.
    """
    if budget is None:
        return in_ram + int(available_ram() * tuning().pinned_share)
    if budget == "auto":
        return in_ram + max(0, auto_ram() - staging_bytes)
    others = max(0, ram_in_use() - in_ram) + staging_bytes + tuning().ram_margin_bytes
    if not stay:
        in_ram = 0
    if budget < others + in_ram + turn_bytes:
        needs = {
            "Python, torch and the driver": others - staging_bytes,
            "read buffers": staging_bytes,
            "weights without a file (pass offload_to_disk_path to move those to disk)": in_ram,
            "buffers and activations (less with offload_type='leaf_level')": turn_bytes,
        }
        parts = [f"{describe_bytes(size, round_up=True)} for {what}" for what, size in needs.items() if size]
        raise ConfigError(
            f"ram_budget={describe_bytes(budget)} is too small. This process needs at least "
            f"{describe_bytes(others + in_ram + turn_bytes, round_up=True)}: {', '.join(parts)}."
        )
    # Files of other offloaded modules have the RAM that they were promised, or have pinned without a budget. Files of
    # later modules may find no RAM left: they are read from the disk.
    return max(in_ram, budget - others - max(pinned.num_bytes, promised.num_bytes))
