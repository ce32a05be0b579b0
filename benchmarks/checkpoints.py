"""Checkpoints of random weights, as `save_pretrained` writes them."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .disk import files_in, size_of
from .machine import GIB, forget_device_peak
from .models import Model, make_model
from .processes import say


@contextmanager
def folder_of(options: argparse.Namespace) -> Iterator[Path]:
    """The folder of the checkpoint: the user's, which stays, or a temporary one."""
    if options.checkpoint is not None:
        yield options.checkpoint
        return
    with tempfile.TemporaryDirectory(prefix="group-offload-checkpoint-", dir=options.disk) as folder:
        yield Path(folder)


def make_sure(model: Model, device: torch.device, folder: Path, shard_bytes: int | None) -> None:
    """Save the model's checkpoint if it is not there yet. This process holds no memory of the device afterwards."""
    if not (folder / "config.json").exists():
        save(model, device, folder, shard_bytes)
    forget_device_peak(device)


def save(
    model: Model, device: torch.device, folder: Path, shard_bytes: int | None, dtype: torch.dtype | None = None
) -> None:
    """Write the model's checkpoint: the weights of `make_model`. It is on the drive, and in the page cache, afterwards.

    Args:
        shard_bytes: the most that a file has; default: what `save_pretrained` takes.
        dtype: default: the model's own.
    """
    start = time.perf_counter()
    module: Any = make_model(model, device, resident=False, dtype=dtype)
    module.save_pretrained(folder, **({} if shard_bytes is None else {"max_shard_size": shard_bytes}))
    for file in files_in(folder):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    took = time.perf_counter() - start
    say(f"checkpoint of {size_of(files_in(folder)) / GIB:.2f} GiB saved in {took:.1f} s")
