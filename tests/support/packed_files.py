"""Packed files of a folder `groups`, and what happens to them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from .files import flip_a_bit


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
