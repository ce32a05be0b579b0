"""What the README's table says of diffusers and accelerate: what they do, and what they do not."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_submodules
from diffusers import ModelMixin
from diffusers.hooks import apply_group_offloading as theirs
from torch import nn

from ..support import tiny_models as tiny

CPU = torch.device("cpu")


def offloaded_to(folder: Path, seed: int) -> tuple[nn.Module, dict[str, torch.Tensor], torch.Tensor]:
    """A model in diffusers' files, the weights that it had, and what it computed."""
    model, inputs = tiny.flux_transformer(seed), tiny.flux_inputs()
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    expected = tiny.call(model, inputs)
    options: dict[str, Any] = {"offload_type": "block_level", "num_blocks_per_group": 1}
    theirs(model, onload_device=CPU, offload_device=CPU, offload_to_disk_path=str(folder), **options)
    return model, weights, expected


def test_diffusers_has_no_budgets_and_no_way_back() -> None:
    assert not [name for name in inspect.signature(theirs).parameters if "budget" in name]
    assert not hasattr(ModelMixin, "disable_group_offload")


def test_diffusers_copies_weights_into_files_and_believes_their_names(tmp_path: Path) -> None:
    first, _, expected = offloaded_to(tmp_path, seed=0)
    second, _, wanted = offloaded_to(tmp_path, seed=1)
    assert any(tmp_path.iterdir())
    torch.testing.assert_close(tiny.call(first, tiny.flux_inputs()), expected)  # rounded: its tensors are not aligned
    assert not torch.allclose(tiny.call(second, tiny.flux_inputs()), wanted)  # with the first one's weights


def test_weights_of_diffusers_are_not_true_in_files(tmp_path: Path) -> None:
    model, weights, _ = offloaded_to(tmp_path, seed=0)
    assert not all(torch.equal(weight, weights[name]) for name, weight in model.named_parameters())


@pytest.mark.filterwarnings("ignore")
def test_accelerate_leaves_meta_tensors_and_can_be_undone() -> None:
    model = tiny.flux_transformer()
    cpu_offload(model, execution_device=CPU)
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    remove_hook_from_submodules(model)
    assert {weight.device.type for weight in model.parameters()} == {"cpu"}
