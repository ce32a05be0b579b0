"""Folders of group files as the engine leaves them, without a model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from group_offload import GroupFileError
from group_offload.base.layout import BlobLayout, lay_out
from group_offload.base.ownership import Owners
from group_offload.base.publish import remove_unused
from group_offload.stores.folder import Folder, ProvenFile
from group_offload.stores.manifest import Manifest
from group_offload.stores.safetensors_file import GroupHeader, check_group_header, content_of_file, read_header

GROUPS = ("blocks_0", "blocks_1")


def weights(seed: int = 0, group: str = "blocks_0") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"{group}.{name}": torch.randn(3, 5, generator=generator) for name in ("up", "down")}


def layout_of(named: dict[str, torch.Tensor]) -> BlobLayout:
    return lay_out(list(named), list(named.values()))


def put(folder: Folder, named: dict[str, torch.Tensor], group: str = "blocks_0", **options: Any) -> ProvenFile:
    """Find or write the file of a group, and close it."""
    found = folder.find_or_write(group, layout_of(named), list(named.values()), lambda num_bytes: None, **options)
    os.close(found.fd)
    return found


def set_up(path: Path, seed: int = 0, model_class: str = "Model") -> list[ProvenFile]:
    """What the engine does for a model of two groups."""
    folder = Folder(path, model_class)
    with folder.locked():
        folder.prepare(1000)
        files = [put(folder, weights(seed, group), group) for group in GROUPS]
        folder.publish_manifest([file.entry for file in files])
    return files


def assert_holds(files: Sequence[ProvenFile], seed: int = 0) -> None:
    for file, group in zip(files, GROUPS, strict=True):
        loaded = load_file(file.path)
        for name, value in weights(seed, group).items():
            assert torch.equal(loaded[name], value)


def headers_in(path: Path) -> dict[str, GroupHeader]:
    """The headers of the group files of a folder. All of them are whole.

    Raises:
        GroupFileError: one is damaged.
    """
    found = {}
    for file in sorted(path.glob("group_*.safetensors")):
        with open(file, "rb") as opened:
            raw = read_header(opened.fileno())
            header = check_group_header(raw, file.stat().st_size)
            if content_of_file(opened.fileno(), len(raw.raw), lambda num_bytes: None) != header.content:
                raise GroupFileError(f"the data of {file.name} is not what was written")
            found[file.name] = header
    return found


def assert_whole(path: Path) -> None:
    """All group files are whole, and so are those that manifests name, but for abandoned ones."""
    found = headers_in(path)
    for file in manifests(path):
        with open(file, "rb") as opened:
            manifest = Manifest.read(opened.fileno())
            for entry in () if manifest.is_abandoned(opened.fileno()) else manifest.entries:
                header = found[entry.file]
                assert (header.group_id, header.content) == (entry.group_id, entry.content)


def delete_unused(path: Path) -> None:
    """Delete the files that no manifest needs and that are in no use."""
    needed: set[str] = set()
    for file in manifests(path):
        with open(file, "rb") as opened:
            manifest = Manifest.read(opened.fileno())
            if not manifest.is_abandoned(opened.fileno()):
                needed |= {file.name, *(entry.file for entry in manifest.entries)}
    for name in names(path) - needed:
        remove_unused(path / name, Owners())


def names(path: Path) -> set[str]:
    return {file.name for file in path.iterdir()}


def manifests(path: Path) -> list[Path]:
    return sorted(path.glob("manifest_*"))


def edit(folder: Folder, before: list[ProvenFile], seed: int) -> tuple[Path | None, list[ProvenFile]]:
    """What the engine does when the second group changes."""
    new = put(folder, weights(seed, GROUPS[1]), GROUPS[1], outdated=before[1].path)
    folder.discard(before[1].path)
    files = [before[0], new]
    return folder.publish_manifest([file.entry for file in files]), files


def manifest_in(path: Path) -> Manifest:
    return Manifest.decode(path.read_bytes())
