"""Models whose weights are views of checkpoints, and what may happen to such files."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from .models import Model, make


def flip_a_bit(path: Path, position: int) -> None:
    """Flip a bit as a failing disk does: the file keeps its time of change."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 4]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def failing(code: int) -> Callable[..., Any]:
    """In the place of a call of the system: it raises this error."""

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fails


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root")


def loaded(path: Path, num_files: int = 1, num_blocks: int = 4) -> tuple[Any, Any]:
    """A model whose weights are views of checkpoints in `path`, and its resident twin."""
    reference = make(Model, num_blocks)
    names = [*reference.state_dict()]
    path.mkdir(parents=True, exist_ok=True)
    model, state = copy.deepcopy(reference), {}
    for number in range(num_files):
        mine = {name: reference.state_dict()[name] for name in names[number::num_files]}
        if mine:
            save_file(mine, path / f"{number}.safetensors")
            state |= load_file(path / f"{number}.safetensors")
    model.load_state_dict(state, assign=True)
    return model, reference
