"""Checkpoints of random weights, as `save_pretrained` writes them."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .disk import files_in, size_of
from .machine import GIB, said, say
from .models import Model, make_model
from .processes import QUIET


@contextmanager
def folder_of(options: argparse.Namespace) -> Iterator[Path]:
    """The folder of the checkpoint: the user's, which stays, or a temporary one."""
    if options.checkpoint is not None:
        yield options.checkpoint
        return
    with tempfile.TemporaryDirectory(prefix="group-offload-checkpoint-", dir=options.disk) as folder:
        yield Path(folder)


def make_sure(
    models: Mapping[Path, Model], device: str, shard_bytes: int | None, dtype: torch.dtype | None = None
) -> None:
    """Save those checkpoints that are not in their folders yet. The program ends if that fails.

    Args:
        shard_bytes: the most that a file has; default: what `save_pretrained` takes.
        dtype: default: that of each model.
    """
    missing = {folder: model for folder, model in models.items() if not (folder / "config.json").exists()}
    if missing and not apart(save, missing, device, shard_bytes, dtype):
        raise SystemExit("The checkpoint could not be saved.")


def apart(work: Callable[..., None], *args: Any) -> bool:
    """Call `work` in a process of its own, so that this one needs no memory of the device. Returns whether that went well."""
    process = multiprocessing.get_context("spawn").Process(target=_quietly, args=(work, *args))
    process.start()
    process.join()
    return process.exitcode == 0


def _quietly(work: Callable[..., None], *args: Any) -> None:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    work(*args)


def save(models: Mapping[Path, Model], device: str, shard_bytes: int | None, dtype: torch.dtype | None) -> None:
    """Write the weights of `make_model`. They are on the drive, and in the page cache, afterwards."""
    for folder, model in models.items():
        with said(f"save {model.name}"):
            module: Any = make_model(model, torch.device(device), resident=False, dtype=dtype)
            module.save_pretrained(folder, **({} if shard_bytes is None else {"max_shard_size": shard_bytes}))
            for file in files_in(folder):
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
        say(f"checkpoint of {size_of(files_in(folder)) / GIB:.2f} GiB")
