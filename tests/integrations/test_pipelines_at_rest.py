"""Weights of offloaded pipelines read, save and copy as those of resident ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline

from group_offload import apply_group_offloading, disable_group_offload, enable_group_offload

from ..support import tiny_models as tiny
from ..support.models import aligned
from ..support.pipelines import any_case, any_model, assert_same_weights, models_of, tier_options, weights_of


@pytest.mark.parametrize(("tier", "level"), [("ram", "leaf_level"), ("disk", "block_level")])
@any_model
def test_save_pretrained_of_an_offloaded_model(
    name: str, tier: str, level: str, device: torch.device, tmp_path: Path
) -> None:
    """Hazard: `save_pretrained()` after offloading to files writes uninitialized memory."""
    make, inputs = tiny.MODELS[name]
    model = make()
    apply_group_offloading(model, device, offload_type=level, **tier_options(tier, tmp_path / "groups"))
    tiny.call(model, inputs())
    model.save_pretrained(tmp_path / "saved")
    assert_same_weights(type(model).from_pretrained(tmp_path / "saved"), weights_of(make()))


@any_case
def test_weights_that_are_views_of_a_checkpoint(tier: str, level: str, device: torch.device, tmp_path: Path) -> None:
    """They are saved again as they are, and edits of them do not reach the files."""

    def load(name: str) -> Any:
        pipe = FluxPipeline.from_pretrained(tmp_path / name)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def assert_as_saved(name: str) -> None:
        for part, model in models_of(load(name)).items():
            assert_same_weights(getattr(pipe, part), weights_of(model))

    tiny.flux_pipeline().save_pretrained(tmp_path / "saved")
    before = {file: file.read_bytes() for file in (tmp_path / "saved").rglob("*.safetensors")}
    reference = load("saved")
    for model in models_of(reference).values():
        aligned(model)
    expected = tiny.run(reference.to(device))
    pipe = load("saved")
    enable_group_offload(pipe, onload_device=device, offload_type=level, **tier_options(tier, tmp_path / "groups"))
    for _ in range(2):
        assert torch.equal(tiny.run(pipe), expected)
    assert_as_saved("saved")
    with torch.no_grad():
        for parameter in pipe.transformer.parameters():
            parameter.mul_(2)
    pipe.save_pretrained(tmp_path / "edited")
    tiny.run(pipe)
    assert_as_saved("edited")
    assert {file: file.read_bytes() for file in before} == before
    with torch.no_grad():
        for parameter in pipe.transformer.parameters():
            parameter.div_(2)
    disable_group_offload(pipe)
    assert_as_saved("saved")
    assert torch.equal(tiny.run(pipe.to(device)), expected)
