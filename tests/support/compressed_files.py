"""Compressed files: written as a set-up does, found in a folder `groups`, what happens to them, and models that use them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from group_offload import OffloadHandle, OffloadStats
from group_offload.base.system import open_to_read
from group_offload.compression.codec import decompress
from group_offload.runtime.groups.group import Group
from group_offload.stores.compressed_files import CompressedFile, Wanted, compressed_from, find_or_compress
from group_offload.stores.folder import Folder
from group_offload.stores.safetensors_file import CompressedFrom
from group_offload.stores.source import Piece, SourceFile

from .compression import image_of
from .files import flip_a_bit
from .inside import engine_of, wait_until_enqueued
from .models import RoutedModel
from .on_device import Twins, twin_on
from .simulated import SimulatedDevice


def origin_of(checkpoint: Path, tensor: torch.Tensor, position: int = 64) -> CompressedFrom:
    """What a blob of the one tensor of a checkpoint is compressed from."""
    source = SourceFile(checkpoint, open_to_read(checkpoint), 0, checkpoint.stat().st_size)
    origin = compressed_from(source, [Piece(0, position, tensor.nbytes)], image_of([tensor])[1])
    assert origin is not None
    return origin


def compressed(path: Path, tensors: Sequence[torch.Tensor], origin: CompressedFrom | None = None) -> CompressedFile:
    """The compressed file of a blob, found or written."""
    folder = Folder(path, "Model")
    with folder.hold(1000):
        found = find_or_compress(folder, Wanted("blocks_0", image_of(tensors)[1], tensors, origin))
    assert found is not None
    return found


def image_in(found: CompressedFile) -> torch.Tensor:
    """What it decompresses to."""
    memory = torch.empty(found.compressed.compressed_bytes, dtype=torch.uint8)
    found.read(memory)
    image = torch.empty(found.compressed.plain_bytes, dtype=torch.uint8)
    decompress(memory, found.compressed, image)
    return image


def compressed_names(folder: Path) -> list[Path]:
    files = (folder / "groups").glob("group_*.safetensors")
    return sorted(file for file in files if b'"group_offload.compressed"' in file.read_bytes()[:8192])


def flip(file: Path) -> None:
    """Below what `stat` tells: as a disk that fails does."""
    flip_a_bit(file, file.stat().st_size - 3000)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (lambda file: os.truncate(file, file.stat().st_size - 4096), "it was cut off"),
    "written to": (lambda file: (flip(file), os.utime(file)), "another program changed it"),
    "a byte, quietly": (flip, r"is wrong \(XXH3"),
}


def routed(widths: list[int], *, counts: bool = False) -> RoutedModel:
    torch.manual_seed(0)
    return RoutedModel(widths, counts=counts).bfloat16()


def compressed_twins(
    device: SimulatedDevice, source: str, resident: RoutedModel, folder: Path, **options: Any
) -> Twins:
    """The same model, whose compressed files are in a folder `groups`."""
    options = {"compress": True, "offload_to_disk_path": folder / "groups", **options}
    return Twins(device, twin_on(source, resident, folder)[0], resident, **options)


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
    """Those that are compressed."""
    return [group for group in engine_of(handle).groups if group.compressed_bytes]
