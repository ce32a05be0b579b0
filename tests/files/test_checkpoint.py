"""Weights that stay in their checkpoint: `from_pretrained`, then `offload_device="disk"`, and nothing is written."""

from __future__ import annotations

import copy
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from torch import nn

from group_offload import OffloadHandle, apply_group_offloading

from ..support import edits
from ..support.asserts import assert_at_rest
from ..support.folders import facts
from ..support.models import DIM, Model, RoutedModel, inputs, make
from ..support.on_device import from_file
from ..support.rigs import LEVELS, run


def offload(module: nn.Module, level: str = "block_level", **options: Any) -> OffloadHandle:
    return apply_group_offloading(module, "cpu", offload_device="disk", offload_type=level, **options)


# ---------------------------------------------------------------- files made by hand


def write_shifted(path: Path, tensors: dict[str, torch.Tensor], *, shift: int) -> None:
    """A valid safetensors file whose data section begins `shift` bytes behind a multiple of 64: the header is not padded."""
    content = save(tensors)
    start = 8 + int.from_bytes(content[:8], "little")
    text = content[8:start].rstrip()
    text += b" " * ((shift - 8 - len(text)) % 64)
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[start:])
    os.utime(path, (1e9, 1e9))


class Odd(nn.Module):
    """Scalars, weights without elements, several dtypes, a buffer that is in no file."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.small = nn.Parameter(torch.randn(3).bfloat16())
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("bytes", torch.arange(5, dtype=torch.uint8))
        self.register_buffer("table", torch.randn(DIM), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) * self.scalar + self.table
        return x + self.small.float().sum() + self.count + self.bytes.float().sum() + self.empty.sum()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shift", [0, 1, 2, 8, 9, 14])
def test_tensors_that_lie_anywhere(shift: int, level: str, tmp_path: Path) -> None:
    """At odd places, where no dtype may lie, a loader may make of them what it likes: the weights stay right. Hazard:
    tensors lie at odd offsets, or in several dtypes; a second copy of the checkpoint is written."""
    resident: nn.Module = Odd().eval() if shift == 8 else RoutedModel([24, 40, 8]).to(torch.bfloat16).eval()
    (tmp_path / "model").mkdir()
    path = tmp_path / "model" / "model.safetensors"
    write_shifted(path, resident.state_dict(), shift=shift)
    model = copy.deepcopy(resident)
    model.load_state_dict(load_file(path), assign=True)
    before = facts(tmp_path / "model")
    handle = offload(model, level, **({"offload_to_disk_path": tmp_path / "groups"} if shift % 2 else {}))
    if not shift % 2:
        assert shift == 8 or {parameter.data_ptr() % 16 for parameter in model.parameters()} >= {shift % 16}
        assert path.name in {name for group in handle.groups if group.num_bytes for name in group.location.split(", ")}
    x = torch.randn(2, DIM, dtype=torch.float32 if shift == 8 else torch.bfloat16)
    expected = run(resident, x)
    for _ in range(3):
        assert torch.equal(run(model, x), expected)
        assert_at_rest(model, resident)
    handle.remove()
    assert_at_rest(model, resident)
    assert facts(tmp_path / "model") == before


# ---------------------------------------------------------------- edits


@pytest.mark.parametrize(
    ("level", "with_folder"), [("block_level", False), ("leaf_level", True)], ids=["", "with a folder"]
)
@pytest.mark.parametrize(
    "edit",
    [edits.edit_in_place, edits.replace_parameter, edits.append_block, edits.replace_data_with_other_strides],
    ids=lambda edit: edit.__name__,
)
def test_edits(edit: Callable[[Any], None], level: str, with_folder: bool, tmp_path: Path) -> None:
    """Right in the next pass, in state_dict() and after remove(); the file never changes."""
    resident = make(Model, 3)
    path = tmp_path / "model.safetensors"
    model = from_file(resident, path)
    content = path.read_bytes()
    handle = offload(model, level, **({"offload_to_disk_path": tmp_path / "groups"} if with_folder else {}))
    for number in range(4):
        if number in (1, 3):
            for twin in (model, resident):
                edit(twin)
        assert torch.equal(run(model, inputs()), run(resident, inputs())), number
        assert_at_rest(model, resident)
    handle.remove()
    assert_at_rest(model, resident)
    assert path.read_bytes() == content


def test_what_is_loaded_again_rests_in_the_checkpoint(tmp_path: Path) -> None:
    """Its RAM is freed. Hazard: weights that were edited once take RAM for good."""
    resident = make(Model, 3)
    path = tmp_path / "model.safetensors"
    model = from_file(resident, path)
    handle = offload(model)
    edits.edit_in_place(model)
    run(model, inputs())
    assert handle.stats().host_bytes > 0
    model.load_state_dict(load_file(path), assign=True)
    assert torch.equal(run(model, inputs()), run(resident, inputs()))
    assert handle.stats().host_bytes == 0 and {group.tier for group in handle.groups} == {"disk"}
