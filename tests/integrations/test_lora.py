"""What diffusers changes in a model while it is offloaded: fused projections, casts, added modules.

A resident and an offloaded transformer go through the same change, and give the same bits before it and after it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from group_offload import apply_group_offloading, handle_of

from ..matrix.case import mapped
from ..support import tiny_models as tiny
from ..support.pipelines import any_case, tier_options
from ..support.rigs import LEVELS, run_onloaded


def forward(model: Any) -> torch.Tensor:
    fit = lambda value: value.to(model.device, model.dtype if value.is_floating_point() else None)  # noqa: E731
    return tiny.call(model, mapped(tiny.flux_inputs(), fit))


def fuse(model: Any) -> None:
    """Hazard: `fuse_qkv_projections` after offloading isn't noticed."""
    model.fuse_qkv_projections()
    with torch.no_grad():  # a fused product may round as the three did: make the difference visible
        for block in model.transformer_blocks:
            block.attn.to_qkv.weight.mul_(1.25)


def add_modules(model: Any) -> None:
    """As IP adapters do: a module is hung in and its forward is called from a hook. Hazard: `add_adapter` and
    `load_ip_adapter` after offloading aren't noticed."""
    block, device = model.proj_out, tiny.device() if handle_of(model) is None else "cpu"
    block.extra, model.ip = (tiny.seeded(seed, lambda: nn.Linear(4, 4)).to(device) for seed in (9, 10))
    old = type(block).forward
    block.forward = lambda x: model.ip(old(block, x)) + block.extra(old(block, x))


CHANGES: dict[str, tuple[Callable[[Any], object], ...]] = {
    "fused projections": (fuse, lambda model: model.unfuse_qkv_projections()),
    "added modules": (add_modules,),
    # Hazard: `enable_layerwise_casting` after offloading, to files too, isn't noticed.
    "fp8": (lambda model: model.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32),),
    "fp16": (lambda model: model.enable_layerwise_casting(torch.float16, torch.float32),),
    # Hazard: `.to(dtype)` after offloading isn't noticed.
    "bf16": (lambda model: model.to(dtype=torch.bfloat16),),
    # Hazard: diffusers takes `.to(device, dtype)` for a move, and leaves out the cast too, also of what is kept in float32.
    "bf16 on the device": (
        lambda model: (model.to(torch.bfloat16).proj_out.float(), model.to(tiny.device(), torch.bfloat16)),
    ),
}


@pytest.mark.parametrize("order", ["before", "after"])
@any_case
@pytest.mark.parametrize("name", CHANGES)
def test_changes(name: str, tier: str, level: str, order: str, device: torch.device, tmp_path: Path) -> None:
    """Hazard: what diffusers changes in an offloaded model isn't noticed, and it computes as before."""
    resident, model = tiny.flux_transformer().to(device), tiny.flux_transformer()
    outputs = [forward(resident)]

    def offload() -> None:
        apply_group_offloading(model, device, offload_type=level, **tier_options(tier, tmp_path))

    if order == "after":
        offload()
        assert torch.equal(forward(model), outputs[-1])
    for number, change in enumerate(CHANGES[name]):
        change(resident)
        change(model)
        outputs.append(forward(resident))
        assert not torch.equal(outputs[-1], outputs[-2]), "the change itself"
        if order == "before" and not number:
            offload()
        for _ in range(2):
            assert torch.equal(forward(model), outputs[-1])
    for (fqn, weight), expected in zip(model.named_parameters(), resident.parameters(), strict=True):
        assert weight.dtype == expected.dtype, fqn
        assert torch.equal(weight.detach().float().cpu(), expected.detach().float().cpu()), fqn
    handle: Any = handle_of(model)
    copied_back = handle.stats().tensors_copied_back
    forward(model)
    assert handle.stats().tensors_copied_back == copied_back, "eviction is free"


@pytest.mark.parametrize("level", LEVELS)
def test_a_lora_that_is_scaled_for_one_forward(level: str, device: torch.device) -> None:
    """By `attention_kwargs`: what a forward changes in its modules is changed back at its end. Hazard: the scale of one
    forward is taken for a change of weights."""
    model, reference = tiny.flux_transformer(), tiny.flux_transformer().to(device)
    handle = apply_group_offloading(model, device, offload_type=level)
    for each in (model, reference):
        each.load_lora_adapter(tiny.lora_of(each, ("to_q", "proj_out")), prefix=None, adapter_name="one")
    seen = []
    for scale in (1.0, 0.3, 1.0):
        inputs = {**tiny.flux_inputs(), "joint_attention_kwargs": {"scale": scale}}
        seen.append(tiny.call(reference, inputs))
        assert torch.equal(run_onloaded(model, **inputs)[0].cpu(), seen[-1])
    assert torch.equal(seen[0], seen[2]) and not torch.equal(seen[0], seen[1])
    assert handle.stats().rebuilds <= 1
