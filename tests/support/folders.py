"""Folders of group files as the engine leaves them, without a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from group_offload.base.layout import TensorSpec, lay_out
from group_offload.compression.layout import CompressedLayout
from group_offload.stores.files import write_blob
from group_offload.stores.folder import Folder
from group_offload.stores.safetensors_file import content_of_file
from group_offload.stores.source import SourceFile

GROUPS = ("blocks_0", "blocks_1")


def weights(seed: int = 0, group: str = "blocks_0") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"{group}.{name}": torch.randn(3, 5, generator=generator) for name in ("up", "down")}


def put(folder: Folder, named: dict[str, torch.Tensor], group: str = "blocks_0") -> SourceFile:
    """Find or write the file of a group."""
    tensors = list(named.values())
    return write_blob(lay_out(list(named), tensors), tensors, folder, group, lambda num_bytes: None).source


def set_up(path: Path, seed: int = 0, model_class: str = "Model") -> list[SourceFile]:
    """What the engine does for a model of two groups."""
    folder = Folder(path, model_class)
    with folder.hold(1000):
        return [put(folder, weights(seed, group), group) for group in GROUPS]


def assert_holds(files: Sequence[SourceFile], seed: int = 0) -> None:
    for file, group in zip(files, GROUPS, strict=True):
        loaded = load_file(file.path)
        for name, value in weights(seed, group).items():
            assert torch.equal(loaded[name], value)


@dataclass(frozen=True)
class Header:
    """What a group file says about itself."""

    group_id: str
    model_class: str
    tensors: tuple[TensorSpec, ...]
    compressed: CompressedLayout | None


def headers_in(path: Path) -> dict[str, Header]:
    """The headers of the group files of a folder. All of them are safetensors files, and whole."""
    found = {}
    for file in sorted(path.glob("group_*.safetensors")):
        with safe_open(file, "pt") as opened:
            metadata = {key.removeprefix("group_offload."): value for key, value in opened.metadata().items()}
        with open(file, "rb") as opened:
            start = 8 + int.from_bytes(opened.read(8), "little")
            assert content_of_file(opened.fileno(), start) == metadata["content"], f"the data of {file.name} is damaged"
        tensors = tuple(
            TensorSpec(fqn, getattr(torch, dtype), tuple(shape), tuple(stride), offset)
            for fqn, dtype, shape, stride, offset in json.loads(metadata["tensors"])
        )
        compressed = CompressedLayout.from_json(metadata["compressed"]) if "compressed" in metadata else None
        found[file.name] = Header(metadata["group"], metadata["model_class"], tensors, compressed)
    return found


def facts(path: Path) -> dict[str, tuple[int, int, bytes]]:
    """Inode, time of change and bytes of all files: the same if nobody wrote any, not even through a mapping."""
    found = {str(file.relative_to(path)): (file, file.stat()) for file in path.rglob("*")}
    return {
        name: (stat.st_ino, stat.st_mtime_ns, file.read_bytes() if file.is_file() else b"")
        for name, (file, stat) in found.items()
    }


def names(path: Path) -> set[str]:
    return {file.name for file in path.iterdir()}
