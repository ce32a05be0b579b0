"""What the arguments of `group-offload` stand for: paths, models, sizes, dtypes, devices."""

from __future__ import annotations

import argparse
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..base.device import Backend, backend_for, default_device
from ..errors import ConfigError, DeviceError, StorageError
from ..plan.budgets import parse_bytes


def new_command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    """A command of what `ArgumentParser.add_subparsers` returned."""
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    return command


def add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="for programs")


def add_device(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", help="such as cuda:0 or cpu (default: the current accelerator, else the CPU)")


def add_dtype(command: argparse.ArgumentParser) -> None:
    text = "the dtype that weights are cast to, such as bfloat16 (default: that of the files)"
    command.add_argument("--dtype", type=dtype_of, help=text)


def path_of(text: str) -> Path:
    """The path that an argument is. An empty one, as of a variable that is not set, would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty. Pass a path; . is the current folder")
    return Path(text)


def size_of(text: str) -> int:
    """Bytes: `8GiB`."""
    try:
        return parse_bytes(text, "SIZE")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def positive_size_of(text: str) -> int:
    """More than 0 bytes, or bytes a second: `25GB/s`."""
    num_bytes = size_of(text.strip().removesuffix("/s"))
    if not num_bytes:
        raise argparse.ArgumentTypeError("it has to be more than 0 bytes")
    return num_bytes


def dtype_of(text: str) -> torch.dtype:
    """A dtype that weights can be cast to."""
    found = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise argparse.ArgumentTypeError(f"{text!r} is no floating point dtype of torch, such as bfloat16 or float32")
    return found


def chosen_backend(name: str | None) -> Backend:
    """That of the device that `--device` names, else of the current accelerator, else of the CPU.

    Raises:
        DeviceError: there is no device of that name, or the driver does not say which there are.
    """
    try:
        device = default_device() if name is None else torch.device(name)
    except RuntimeError as error:
        raise DeviceError(f"--device {name} isn't a device: {str(error).splitlines()[0]}") from error
    return backend_for(device, option="--device ")


def is_on_hub(name: str) -> bool:
    """Whether a name may be one of the hub: owner/model, or a folder in it."""
    return "/" in name and all(re.fullmatch(r"\w[\w.-]*", part) for part in name.split("/"))


def find_checkpoint(name: str) -> Path:
    """A file or folder; or what `huggingface_hub` has downloaded before as `name` (owner/model, or a folder in it).

    Raises:
        StorageError: there is neither.
    """
    if not name:
        raise StorageError("MODEL is empty. Pass the folder of a model; . is the current folder.")
    path = os.path.expanduser(name)
    if not path.startswith("~") and os.path.exists(path):  # Path.exists raises if the name is too long
        return Path(path)
    parts = name.split("/")
    if is_on_hub(name):
        with suppress(ImportError, OSError, ValueError):  # huggingface_hub is not there, or has no such model
            from huggingface_hub import snapshot_download

            found = Path(snapshot_download("/".join(parts[:2]), local_files_only=True), *parts[2:])
            if found.exists() and any(found.rglob("*.safetensors")):  # a part of it may have been downloaded
                return found
    raise StorageError(
        f"There is no {name}: no such file or folder, and no downloaded model. A model of the hub: hf download "
        f"{'/'.join(parts[:2]) if is_on_hub(name) else 'OWNER/MODEL'}"
    )
