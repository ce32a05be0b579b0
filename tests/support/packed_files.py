"""Packed files: written as a set-up does, found in a folder `groups`, and what happens to them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from group_offload.base.system import open_to_read
from group_offload.packing.codec import unpack
from group_offload.stores.folder import Folder
from group_offload.stores.packed_files import PackedFile, Wanted, find_or_pack, packed_from
from group_offload.stores.safetensors_file import PackedFrom
from group_offload.stores.source import Piece, SourceFile

from .files import flip_a_bit
from .packing import image_of


def origin_of(checkpoint: Path, tensor: torch.Tensor, position: int = 64) -> PackedFrom:
    """What a blob of the one tensor of a checkpoint is packed from."""
    source = SourceFile(checkpoint, open_to_read(checkpoint), 0, checkpoint.stat().st_size)
    origin = packed_from(source, [Piece(0, position, tensor.nbytes)], image_of([tensor])[1])
    assert origin is not None
    return origin


def packed(path: Path, tensors: Sequence[torch.Tensor], origin: PackedFrom | None = None) -> PackedFile:
    """The packed file of a blob, found or written."""
    folder = Folder(path, "Model")
    with folder.locked(1000):
        found = find_or_pack(folder, Wanted("blocks_0", image_of(tensors)[1], tensors, origin))
    assert found is not None
    return found


def image_in(found: PackedFile) -> torch.Tensor:
    """What it unpacks to."""
    memory = torch.empty(found.packed.packed_bytes, dtype=torch.uint8)
    found.read(memory)
    image = torch.empty(found.packed.plain_bytes, dtype=torch.uint8)
    unpack(memory, found.packed, image)
    return image


def packed_names(folder: Path) -> list[Path]:
    files = (folder / "groups").glob("group_*.safetensors")
    return sorted(file for file in files if b'"group_offload.packed"' in file.read_bytes()[:8192])


def flip(file: Path) -> None:
    """Below what `stat` tells: as a drive that fails does."""
    flip_a_bit(file, file.stat().st_size - 3000)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (lambda file: os.truncate(file, file.stat().st_size - 4096), "it was cut off"),
    "written to": (lambda file: (flip(file), os.utime(file)), "another program changed it"),
    "a byte, quietly": (flip, r"is wrong \(XXH3"),
}
