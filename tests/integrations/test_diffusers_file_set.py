"""The files that diffusers' models are written to are those of diffusers' own engine, by name and by content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.hooks import apply_group_offloading as stock_group_offloading
from safetensors import safe_open

from group_offload import apply_group_offloading

from ..support import tiny_models as tiny
from ..support.pipelines import weights_of

DIFFUSERS_MODELS = [name for name in tiny.MODELS if name not in ("clip", "t5")]


def files_in(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors in each group file, without the bytes that align them."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            keys = [key for key in opened.keys() if not key.startswith("__padding")]  # noqa: SIM118
            found[file.name] = {key: opened.get_tensor(key) for key in keys}
    return found


def contents_of(tensors: dict[str, torch.Tensor]) -> list[tuple[Any, bytes]]:
    """Whatever their keys."""
    return sorted((tuple(each.shape), each.contiguous().numpy().tobytes()) for each in tensors.values())


@pytest.mark.parametrize(
    "options",
    [
        {"offload_type": "block_level", "num_blocks_per_group": 1},
        {"offload_type": "block_level", "num_blocks_per_group": 2},
        {"offload_type": "leaf_level"},
    ],
    ids=["one block", "two blocks", "leaves"],
)
@pytest.mark.parametrize("name", DIFFUSERS_MODELS)
def test_files_are_those_of_diffusers(name: str, options: dict[str, Any], device: torch.device, tmp_path: Path) -> None:
    """And each weight is written once."""
    make, _ = tiny.MODELS[name]
    model, expected = make(), weights_of(make())
    apply_group_offloading(model, device, offload_to_disk_path=tmp_path / "ours", **options)
    stock_group_offloading(make(), torch.device("cpu"), offload_to_disk_path=str(tmp_path / "stock"), **options)
    ours, stock = files_in(tmp_path / "ours"), files_in(tmp_path / "stock")
    assert ours.keys() == stock.keys()
    for file, tensors in ours.items():
        assert contents_of(tensors) == contents_of(stock[file]), file
    written = [(key, tensor) for tensors in ours.values() for key, tensor in tensors.items()]
    assert sorted(key for key, _ in written) == sorted(expected)
    for key, tensor in written:
        assert torch.equal(tensor, expected[key]), key
