"""What the arguments of `group-offload` stand for: paths, models, dtypes, devices."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

import torch

from ..base.device import default_device
from ..errors import ConfigError, DeviceError, GroupFileError


def path_of(text: str) -> Path:
    """The path that an argument is. An empty one, as of a variable that is not set, would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty. Pass a path; . is the current folder")
    return Path(text)


def find_checkpoint(name: str) -> Path:
    """A file or folder; or what `huggingface_hub` has downloaded before as `name` (owner/model, or a folder in it).

    Raises:
        GroupFileError: there is neither.
    """
    if not name:
        raise GroupFileError("MODEL is empty. Pass the folder of a model; . is the current folder.")
    path = Path(os.path.expanduser(name))  # Path's own methods raise if there is no such user,
    has_home = not str(path).startswith("~/")  # nothing in the current folder is meant by that
    if has_home and os.path.exists(path):  # or the name is too long
        return path
    found = _downloaded(name)
    if found is None:
        raise GroupFileError(
            f"There is no {name}: no such file or folder, and no downloaded model. A model of the hub: hf download "
            f"{'/'.join(name.split('/')[:2]) if _is_hub_name(name) else 'OWNER/MODEL'}"
        )
    return found


def check_dtype(dtype: torch.dtype | None) -> None:
    """
    Raises:
        ConfigError: weights cannot be cast to it.
    """
    # Scales are unsigned, and two numbers of 4 bits are one element.
    if dtype is not None and not (dtype.is_floating_point and dtype.is_signed and "_x2" not in str(dtype)):
        raise ConfigError(f"dtype={dtype}: weights are cast to a floating point dtype, such as torch.bfloat16.")


def named_dtype(name: str | None) -> torch.dtype | None:
    """The dtype that `--dtype` names.

    Raises:
        ConfigError: there is none of that name.
    """
    if name is None:
        return None
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(
            f"--dtype {name}: torch has no such dtype. Expected bfloat16, float16 or float32, for example."
        )
    return found


def _is_hub_name(name: str) -> bool:
    parts = name.split("/")
    return len(parts) > 1 and all(re.fullmatch(r"\w[\w.-]*", part) for part in parts)


def _downloaded(name: str) -> Path | None:
    """The place of a model, or of a folder in it, in the hub's cache."""
    parts = name.split("/")
    if not _is_hub_name(name):
        return None
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        folder = Path(snapshot_download("/".join(parts[:2]), local_files_only=True), *parts[2:])
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError):
        return None
    return folder if folder.exists() else None


def chosen_device(name: str | None) -> torch.device:
    """The device that `--device` names, else the current accelerator, else the CPU.

    Raises:
        DeviceError: there is no device of that name, or the driver does not say which there are.
    """
    try:
        return default_device() if name is None else torch.device(name)
    except RuntimeError as error:
        raise DeviceError(f"--device {name} is not a device: {str(error).splitlines()[0]}") from error
