"""Models whose weights pack well, offloaded packed, and compared with the resident model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from group_offload import OffloadHandle, OffloadStats
from group_offload.base.release import wait_for_releases
from group_offload.runtime.groups.group import Group

from .asserts import assert_at_rest
from .inside import engine_of, wait_until_enqueued
from .models import DIM, RoutedModel
from .on_device import forward, from_file, offload
from .rigs import run
from .simulated import SimulatedDevice


def routed(widths: list[int], *, counts: bool = False) -> RoutedModel:
    torch.manual_seed(0)
    return RoutedModel(widths, counts=counts).bfloat16()


def inputs(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, DIM, generator=torch.Generator().manual_seed(seed)).bfloat16()


def twin_of(resident: RoutedModel, source: str, folder: Path) -> Any:
    """The same model: from a checkpoint in `folder`, or with weights in RAM."""
    return from_file(resident, folder / "model.safetensors") if source == "checkpoint" else copy.deepcopy(resident)


def offloaded(source: str, resident: RoutedModel, folder: Path, **options: Any) -> tuple[Any, OffloadHandle]:
    """The same model, whose packed files are in a folder `groups`."""
    model = twin_of(resident, source, folder)
    return model, offload(model, pack=True, offload_to_disk_path=folder / "groups", **options)


def check(device: SimulatedDevice, model: Any, resident: RoutedModel, num_passes: int = 1) -> None:
    for seed in range(num_passes):
        found, expected = device.get(forward(device, model, inputs(seed))), run(resident, inputs(seed))
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16))  # of NaN too
        model.alive.clear()
        resident.alive.clear()
    assert_at_rest(model, resident)


def end(device: SimulatedDevice, model: Any, resident: RoutedModel, handle: OffloadHandle) -> None:
    model.alive.clear()
    handle.remove()
    assert_at_rest(model, resident)
    wait_for_releases()
    assert not device.pinned_bytes and not device.allocated_bytes


def scale(factor: float, *models: Any, block: int = 1) -> None:
    """Edit a weight."""
    for model in models:
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


def check_edits(device: SimulatedDevice, model: Any, resident: RoutedModel, handle: OffloadHandle) -> None:
    """Edit weights. They are sent as they are at first, and packed later."""
    for number in range(3):
        for twin in (model, resident):
            with torch.no_grad():
                if number == 1:
                    twin.blocks[number].up.weight.data = twin.blocks[number].up.weight * 3
                else:
                    twin.blocks[number].up.weight.mul_(1.5)
        check(device, model, resident, 2)
        before = settled(handle)
        check(device, model, resident)
        blocks = [group for group in handle.groups if group.group_id.startswith("blocks")]
        assert all(group.packed_bytes for group in blocks)
        assert gained(handle, before, "bytes_unpacked") > 0.95 * sum(group.num_bytes for group in blocks)
