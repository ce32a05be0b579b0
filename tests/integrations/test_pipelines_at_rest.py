"""Weights of offloaded pipelines read, save and copy as those of resident ones."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import diffusers.hooks.group_offloading as stock
import pytest
import torch
from diffusers import FluxPipeline
from torch import nn

from group_offload import apply_group_offloading, disable_group_offload, enable_group_offload, remove_group_offloading

from ..support import tiny_models as tiny
from ..support.pipelines import any_level, any_model, any_tier, assert_same_weights, models_of, tier_options, weights_of


@any_tier
@any_level
@any_model
def test_save_pretrained_of_an_offloaded_model(
    name: str, tier: str, level: str, device: torch.device, tmp_path: Path
) -> None:
    make, inputs = tiny.MODELS[name]
    model = make()
    weights = make().state_dict()
    apply_group_offloading(model, device, offload_type=level, **tier_options(tier, tmp_path / "groups"))
    tiny.call(model, inputs())
    model.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved").state_dict()
    assert again.keys() == weights.keys()
    for key, value in again.items():
        assert torch.equal(value, weights[key]), key


@any_tier
def test_save_pretrained_of_an_offloaded_pipeline(
    tier: str, device: torch.device, tmp_path: Path, resident_outputs: dict[str, torch.Tensor]
) -> None:
    pipe = tiny.flux_pipeline()
    weights = {name: weights_of(model) for name, model in models_of(pipe).items()}
    enable_group_offload(pipe, onload_device=device, **tier_options(tier, tmp_path / "groups"))
    tiny.run(pipe)
    pipe.save_pretrained(tmp_path / "saved")
    again = FluxPipeline.from_pretrained(tmp_path / "saved")
    again.set_progress_bar_config(disable=True)
    for name, model in models_of(again).items():
        assert_same_weights(model, weights[name])


@pytest.fixture(scope="module")
def saved_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    tiny.flux_pipeline().save_pretrained(folder)
    return folder


def aligned(model: nn.Module) -> nn.Module:
    """The model, with weights in memory of their own: kernels may round differently for others."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


@any_tier
@any_level
def test_weights_that_are_views_of_a_checkpoint(
    tier: str, level: str, device: torch.device, tmp_path: Path, saved_pipeline: Path
) -> None:
    def load() -> Any:
        pipe = FluxPipeline.from_pretrained(saved_pipeline)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    reference = load()
    for model in models_of(reference).values():
        aligned(model)
    expected = tiny.run(reference.to(device))
    pipe = load()
    enable_group_offload(pipe, onload_device=device, offload_type=level, **tier_options(tier, tmp_path))
    for _ in range(2):
        assert torch.equal(tiny.run(pipe), expected)
    for name, model in models_of(load()).items():
        assert_same_weights(getattr(pipe, name), weights_of(model))
    disable_group_offload(pipe)
    for name, model in models_of(load()).items():
        assert_same_weights(getattr(pipe, name), weights_of(model))
    assert torch.equal(tiny.run(pipe.to(device)), expected)


def test_a_checkpoint_is_never_written_to(device: torch.device, tmp_path: Path, saved_pipeline: Path) -> None:
    before = {file: file.read_bytes() for file in saved_pipeline.rglob("*.safetensors")}
    pipe = FluxPipeline.from_pretrained(saved_pipeline)
    pipe.set_progress_bar_config(disable=True)
    enable_group_offload(pipe, onload_device=device, offload_to_disk_path=tmp_path)
    with torch.no_grad():
        for parameter in pipe.transformer.parameters():
            parameter.mul_(2)
    tiny.run(pipe)
    assert {file: file.read_bytes() for file in saved_pipeline.rglob("*.safetensors")} == before


@any_tier
@any_level
def test_edits_reach_the_next_run(tier: str, level: str, device: torch.device, tmp_path: Path) -> None:
    def edit(pipe: Any) -> None:
        with torch.no_grad():
            pipe.transformer.transformer_blocks[1].attn.to_q.weight.mul_(1.5)
        pipe.transformer.proj_out.bias.data.add_(0.25)
        pipe.vae.decoder.conv_in.weight = nn.Parameter(pipe.vae.decoder.conv_in.weight.detach() * 0.5)
        state = {key: value.clone() + 0.125 for key, value in pipe.text_encoder.state_dict().items()}
        pipe.text_encoder.load_state_dict(state)

    reference, pipe = tiny.flux_pipeline().to(device), tiny.flux_pipeline()
    enable_group_offload(pipe, onload_device=device, offload_type=level, **tier_options(tier, tmp_path))
    tiny.run(pipe)
    edit(reference)
    edit(pipe)
    expected = tiny.run(reference)
    for _ in range(2):
        assert torch.equal(tiny.run(pipe), expected)
    for name, model in models_of(reference).items():
        assert_same_weights(getattr(pipe, name), weights_of(model))


@any_tier
@any_level
def test_deepcopy_is_a_resident_model(tier: str, level: str, device: torch.device, tmp_path: Path) -> None:
    model = tiny.flux_transformer()
    expected = tiny.call(tiny.flux_transformer().to(device), tiny.flux_inputs())
    apply_group_offloading(model, device, offload_type=level, **tier_options(tier, tmp_path))
    tiny.call(model, tiny.flux_inputs())
    copied = copy.deepcopy(model)
    assert not stock._is_group_offload_enabled(copied)
    assert torch.equal(tiny.call(aligned(copied).to(device), tiny.flux_inputs()), expected)
    with torch.no_grad():
        copied.proj_out.weight.zero_()
    assert torch.equal(tiny.call(model, tiny.flux_inputs()), expected)
    apply_group_offloading(copied, device)
    remove_group_offloading(copied)


@any_tier
def test_a_pickle_is_a_resident_model(tier: str, device: torch.device, tmp_path: Path) -> None:
    model = tiny.flux_transformer()
    expected = tiny.call(tiny.flux_transformer().to(device), tiny.flux_inputs())
    apply_group_offloading(model, device, **tier_options(tier, tmp_path))
    read = pickle.loads(pickle.dumps(model))
    assert not stock._is_group_offload_enabled(read)
    assert torch.equal(tiny.call(aligned(read).to(device), tiny.flux_inputs()), expected)
    remove_group_offloading(model)
