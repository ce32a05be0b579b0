"""The command `group-offload compress`: a model's weights in fewer bytes, once for all later runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..api import handle_of
from ..base.progress import progress_bar
from ..base.text import table
from ..compression.codec import can_decompress
from ..errors import ConfigError
from ..integrations.loading import errors_of_loading, from_pretrained
from ..plan.budgets import describe_bytes
from ..runtime.compressor import ids_of, wanted_of
from ..stores.base import Blob
from ..stores.compressed import is_compressible
from ..stores.compressed_files import find_or_compress
from ..stores.folder import Folder
from .arguments import add_device, add_dtype, chosen_backend, find_checkpoint, new_command, path_of
from .meta_model import FoundModel, find_models, meta_model_of
from .output import say


def add_command(commands: Any) -> None:
    """Add the command to what `ArgumentParser.add_subparsers` returned."""
    text = "Compress the weights of a model or pipeline without loss, into group files in DIR. Rerun it to continue."
    command = new_command(commands, "compress", text)
    text = "the folder of a model or a pipeline, or a downloaded name of the hub"
    command.add_argument("model", metavar="MODEL", help=text)
    command.add_argument("folder", metavar="DIR", type=path_of, help="pass it later as offload_to_disk_path")
    add_dtype(command)
    add_device(command)
    command.set_defaults(run=_compress)


def _compress(arguments: argparse.Namespace) -> int:
    device = chosen_backend(arguments.device).device
    if not can_decompress(device):
        if arguments.device is not None:
            raise ConfigError(
                f"--device {arguments.device} needs Triton. Run `pip install triton`, or pass --device cpu."
            )
        device = torch.device("cpu")
    folder: Path = arguments.folder
    models, left_out = find_models(find_checkpoint(arguments.model))
    dtypes = {name: arguments.dtype or meta_model_of(model).usual_dtype for name, model in models.items()}
    found = [meta_model_of(model, dtypes[name], compresses=True) for name, model in models.items()]
    total = sum(group.num_bytes for each in found for group in each.groups if group.compressed_bytes)
    cast_bytes = sum(each.cast_bytes for each in found)
    say(f"Compressed files take less than {describe_bytes(total)} in {folder}.")
    if cast_bytes:
        say(f"Weights that are cast are written there first, and take {describe_bytes(cast_bytes)} more.")
    with Folder(folder, "models").hold(total + cast_bytes):
        pass  # there is room for all of them
    opened = {name: _open(model, folder, dtypes[name]) for name, model in models.items()}
    blobs = {name: _blobs_of(model) for name, model in opened.items()}
    rows = [("model", "original", "compressed", "ratio")]
    for name, model in opened.items():
        class_name, mine = type(model).__name__, blobs[name]
        plain = sum(blob.layout.num_bytes for blob in mine.values())
        small = _compress_all(f"Compressing {name}".rstrip(), mine, Folder(folder, class_name), total, device)
        title = f"{name} {class_name}, {len(mine)} groups".strip()
        rows.append((title, describe_bytes(plain), describe_bytes(small), f"{small / plain:.3f}" if plain else ""))
    say(*table(rows))
    say(*(f"Not compressed: {name}. {reason}" for name, reason in left_out.items()))
    return 0


def _open(model: FoundModel, folder: Path, dtype: torch.dtype) -> nn.Module:
    options: dict[str, Any] = {} if model.variant is None else {"variant": model.variant}
    options |= {"dtype": dtype, "onload_device": "cpu", "offload_to_disk_path": folder}
    with errors_of_loading(model.model_class, model.folder):
        opened: nn.Module = from_pretrained(model.model_class, model.folder, **options)
        return opened


def _blobs_of(opened: nn.Module) -> dict[str, Blob]:
    """The weights of an offloaded model, by the names of their files."""
    handle = handle_of(opened)
    assert handle is not None and handle._engine is not None
    groups = (group for group in handle._engine.groups if not group.is_table)
    return {group_id: part.blob for part, group_id in ids_of(groups).items() if part.blob.layout.num_bytes}


def _compress_all(title: str, blobs: dict[str, Blob], folder: Folder, total_bytes: int, device: torch.device) -> int:
    """Write the compressed group files of a model into a folder. Those that are there are found again.

    Args:
        total_bytes: Room for the files of all models.

    Returns:
        The bytes of all groups then: those in compressed files, and those of groups of which compression saves too little.
    """
    num_bytes = 0
    with folder.hold(total_bytes), progress_bar(sum(map(_compressible_bytes, blobs.values())), title) as on_done:
        for group_id, blob in blobs.items():
            one, size = None, blob.layout.num_bytes
            if _compressible_bytes(blob):
                one = find_or_compress(folder, wanted_of(group_id, blob), device)
                blob.check()
                on_done(size)
            num_bytes += size if one is None else one.compressed.compressed_bytes
    return num_bytes


def _compressible_bytes(blob: Blob) -> int:
    """The bytes of a blob, if runs compress it."""
    return blob.layout.num_bytes if is_compressible(blob.layout) else 0
