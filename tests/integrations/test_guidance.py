"""Beside hooks that guidance registers for one forward of each step and removes again: the bits of the resident model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    LayerSkipConfig,
    PerturbedAttentionGuidance,
    SkipLayerGuidance,
)
from torch import nn

from group_offload import apply_group_offloading

from ..support import tiny_models as tiny
from ..support.asserts import assert_same
from ..support.caches import flux, flux_inputs
from ..support.rigs import LEVELS, TIERS, run, run_onloaded

Inputs = Callable[[int], dict[str, Any]]


GUIDERS: dict[str, tuple[Callable[[], nn.Module], Inputs, Callable[[], Any]]] = {
    "skipped-layers": (
        flux,
        flux_inputs,
        lambda: SkipLayerGuidance(
            skip_layer_config=LayerSkipConfig(indices=[0], fqn="single_transformer_blocks"),
            skip_layer_guidance_start=0.0,
            skip_layer_guidance_stop=1.0,
        ),
    ),
    "perturbed-attention": (
        tiny.unet,
        tiny.unet_inputs,
        lambda: PerturbedAttentionGuidance(
            perturbed_guidance_config=LayerSkipConfig(
                indices=[0],
                fqn="down_blocks.1.attentions.0.transformer_blocks",
                skip_attention=False,
                skip_attention_scores=True,
                skip_ff=False,
            ),
            perturbed_guidance_start=0.0,
            perturbed_guidance_stop=1.0,
        ),
    ),
}


def denoise(name: str, model: nn.Module, call: Callable[..., Any] = run) -> list[Any]:
    """All forwards of three steps, in the first of which some guiders leave the model alone."""
    _, inputs, make_guider = GUIDERS[name]
    guider, outputs = make_guider(), []
    for step in range(3):
        guider.set_state(step=step, num_inference_steps=3, timestep=torch.tensor(1))
        for _ in range(guider.num_conditions):
            guider.prepare_models(model)
            torch.manual_seed(step)  # dropout
            outputs.append(call(model, **inputs(step))[0])
            guider.cleanup_models(model)
    return outputs


@cache
def expected(name: str) -> list[Any]:
    outputs = denoise(name, GUIDERS[name][0]().to(tiny.device()))
    assert not torch.equal(outputs[-1], outputs[-2]), "the guidance does something"
    return outputs


@pytest.mark.parametrize(("tier", "level"), [*zip(TIERS, LEVELS, strict=True)])
@pytest.mark.parametrize("name", GUIDERS)
def test_hooks_that_come_and_go_within_a_step(name: str, tier: str, level: str, tmp_path: Path) -> None:
    """Hazard: guidance registers hooks for one forward of a step (skipped layers, perturbed attention)."""
    model, inputs = GUIDERS[name][0](), GUIDERS[name][1]
    folder = tmp_path if tier == "file" else None
    handle = apply_group_offloading(model, tiny.device(), offload_type=level, offload_to_disk_path=folder)
    assert_same(denoise(name, model, run_onloaded), expected(name))
    handle.remove()
    last = run(model.to(tiny.device()), **inputs(2))[0]
    assert any(torch.equal(last, each) for each in expected(name)), "no hook is left"


@pytest.mark.parametrize("level", LEVELS)
def test_a_lora_that_is_scaled_for_one_forward(level: str) -> None:
    """By `attention_kwargs`: what a forward changes in its modules is changed back at its end. Hazard: the scale of one
    forward is taken for a change of weights."""
    model, reference = flux(), flux().to(tiny.device())
    handle = apply_group_offloading(model, tiny.device(), offload_type=level)
    for each in (model, reference):
        each.load_lora_adapter(tiny.lora_of(each, ("to_q", "proj_out")), prefix=None, adapter_name="one")
    seen = []
    for scale in (1.0, 0.3, 1.0):
        inputs = {**flux_inputs(0), "joint_attention_kwargs": {"scale": scale}}
        seen.append(run(reference, **inputs)[0])
        assert_same(run_onloaded(model, **inputs)[0], seen[-1])
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])
    assert handle.stats().rebuilds <= 1
