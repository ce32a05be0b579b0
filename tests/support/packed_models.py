"""Models whose weights pack well, offloaded packed, and compared with the resident model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from group_offload import OffloadHandle, OffloadStats
from group_offload.runtime.groups.group import Group

from .inside import engine_of, wait_until_enqueued
from .models import RoutedModel
from .on_device import Twins, from_file
from .simulated import SimulatedDevice


def routed(widths: list[int], *, counts: bool = False) -> RoutedModel:
    torch.manual_seed(0)
    return RoutedModel(widths, counts=counts).bfloat16()


def twin_of(resident: RoutedModel, source: str, folder: Path) -> Any:
    """The same model: from a checkpoint in `folder`, or with weights in RAM."""
    return from_file(resident, folder / "model.safetensors") if source == "checkpoint" else copy.deepcopy(resident)


def packed_twins(device: SimulatedDevice, source: str, resident: RoutedModel, folder: Path, **options: Any) -> Twins:
    """The same model, whose packed files are in a folder `groups`."""
    options = {"pack": True, "offload_to_disk_path": folder / "groups", **options}
    return Twins(device, twin_of(resident, source, folder), resident, **options)


def scale(model: Any, factor: float, block: int = 1) -> None:
    """Edit a weight."""
    with torch.no_grad():
        model.blocks[block].up.weight.mul_(factor)


def settled(handle: OffloadHandle) -> OffloadStats:
    """Once all that is read ahead was read."""
    wait_until_enqueued(handle)
    return handle.stats()


def gained(handle: OffloadHandle, before: OffloadStats, name: str) -> int:
    now, then = getattr(settled(handle), name), getattr(before, name)
    return sum(now.values()) - sum(then.values()) if isinstance(now, dict) else now - then


def groups_of(handle: OffloadHandle) -> list[Group]:
    """Those that are packed."""
    return [group for group in engine_of(handle).groups if group.packed_bytes]
