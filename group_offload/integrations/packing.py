"""Packing a checkpoint once, for all later runs: the groups of the model, opened offloaded, in packed group files."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..api import handle_of
from ..runtime.packer import wanted_of
from ..stores.folder import Folder
from ..stores.packed import is_packable
from ..stores.packed_files import PackedFiles
from .opening import errors_of_loading, from_pretrained


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """What became of the weights of a group that are in one file."""

    group_id: str
    plain_bytes: int
    packed_bytes: int
    """Of the packed file; `plain_bytes` if there is none, because packing saves too little."""


@dataclass(frozen=True, slots=True)
class PackedModel:
    """A model that was packed."""

    groups: tuple[PackedGroup, ...]
    num_changed: int
    """The groups that had been packed before their checkpoint changed."""


def pack_model(
    model_class: Any,
    path: Path,
    folder: Path,
    *,
    dtype: torch.dtype,
    variant: str | None = None,
    device: torch.device | None = None,
    on_start: Callable[[int], Callable[[int], None]] = lambda total: lambda num_bytes: None,
) -> PackedModel:
    """Write the packed group files of a model into a folder. Those that are there are found again.

    Args:
        path: the folder that `model_class.from_pretrained` loads, its weights in `variant` and cast to `dtype`.
        device: packs. None: the CPU.
        on_start: A function that is told how many bytes there are to pack, and returns one that is told of the progress.
    """
    options: dict[str, Any] = {} if variant is None else {"variant": variant}
    with errors_of_loading(model_class, path):
        model = from_pretrained(
            model_class, path, dtype=dtype, onload_device="cpu", offload_to_disk_path=folder, **options
        )
    handle = handle_of(model)
    assert handle is not None and handle._engine is not None
    parts = [
        (group.group_id if not index else f"{group.group_id}+{index}", part)
        for group in handle._engine.groups
        if not group.is_table
        for index, part in enumerate(group.parts)
        if part.blob.layout.num_bytes
    ]
    packable = {part: group_id for group_id, part in parts if is_packable(part.blob.layout)}  # runs pack no others
    total = sum(part.blob.layout.num_bytes for part in packable)
    on_done = on_start(total)
    files = Folder(folder, type(model).__name__)
    groups: list[PackedGroup] = []
    with files.locked(total):
        packed_files = PackedFiles(files)
        found_or_packed = packed_files.find_or_pack(
            (wanted_of(group_id, part.blob) for part, group_id in packable.items()),
            device,
        )
        try:
            for group_id, part in parts:
                one, size = None, part.blob.layout.num_bytes
                if part in packable:
                    one = next(found_or_packed)
                    if one is not None:
                        os.close(one.fd)
                    part.blob.check()
                    on_done(size)
                groups.append(PackedGroup(group_id, size, size if one is None else one.packed.packed_bytes))
        finally:
            found_or_packed.close()
    return PackedModel(tuple(groups), packed_files.num_changed)
