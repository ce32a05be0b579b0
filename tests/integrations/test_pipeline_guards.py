"""Devices that diffusers sees, and what is refused beside group offloading."""

from __future__ import annotations

import logging
from pathlib import Path

import accelerate
import diffusers.hooks.group_offloading as stock
import pytest
import torch
from diffusers.hooks import apply_group_offloading as imported_before_patching
from torch import nn

from group_offload import (
    ModuleError,
    StateError,
    apply_group_offloading,
    disable_group_offload,
    enable_group_offload,
    remove_group_offloading,
)

from ..support import tiny_models as tiny
from ..support.pipelines import any_level, any_tier, assert_same_weights, models_of, tier_options, traces, weights_of


@any_level
@any_tier
def test_devices_that_diffusers_sees(level: str, tier: str, device: torch.device, tmp_path: Path) -> None:
    pipe = tiny.flux_pipeline()
    enable_group_offload(pipe, onload_device=device, offload_type=level, **tier_options(tier, tmp_path))
    assert pipe._execution_device == device
    assert pipe.transformer.device == device
    assert pipe.vae.device == device
    assert pipe.transformer.dtype == torch.float32
    assert {t.device.type for t in pipe.transformer.parameters()} == {"cpu"}
    for model in models_of(pipe).values():
        assert stock._is_group_offload_enabled(model)
        assert stock._get_group_onload_device(model) == device
    disable_group_offload(pipe)
    assert pipe.device.type == "cpu"
    assert pipe._execution_device.type == "cpu"


@any_tier
def test_every_registry_has_the_hook(tier: str, device: torch.device, tmp_path: Path) -> None:
    pipe = tiny.flux_pipeline()
    enable_group_offload(pipe, onload_device=device, **tier_options(tier, tmp_path))
    for model in models_of(pipe).values():
        registries = [part._diffusers_hook for part in model.modules() if hasattr(part, "_diffusers_hook")]
        assert registries
        assert all(registry.get_hook("group_offloading") is not None for registry in registries)


@any_tier
def test_moving_an_offloaded_pipeline(
    tier: str,
    device: torch.device,
    tmp_path: Path,
    resident_outputs: dict[str, torch.Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    pipe = tiny.flux_pipeline()
    weights = weights_of(pipe.transformer)
    enable_group_offload(pipe, onload_device=device, **tier_options(tier, tmp_path))
    logger = logging.getLogger("diffusers")
    logger.addHandler(caplog.handler)
    try:
        assert pipe.to("cpu") is pipe
        assert pipe.to(device) is pipe
        assert pipe.transformer.to(device) is pipe.transformer
    finally:
        logger.removeHandler(caplog.handler)
    assert "group offloaded" in caplog.text
    assert_same_weights(pipe.transformer, weights)
    assert {t.device.type for t in pipe.transformer.parameters()} == {"cpu"}
    assert torch.equal(tiny.run(pipe), resident_outputs["flux"])


@any_tier
@pytest.mark.parametrize("call", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_other_offload_modes_are_refused(call: str, tier: str, device: torch.device, tmp_path: Path) -> None:
    pipe = tiny.flux_pipeline()
    enable_group_offload(pipe, onload_device=device, **tier_options(tier, tmp_path))
    with pytest.raises(ValueError, match="group offloading"):
        getattr(pipe, call)(device="cuda")
    pipe = tiny.flux_pipeline()
    apply_group_offloading(pipe.vae, device, **tier_options(tier, tmp_path))
    with pytest.raises(ValueError, match="group offloading"):
        getattr(pipe, call)(device="cuda")
    remove_group_offloading(pipe.vae)
    assert not pipe._maybe_raise_error_if_group_offload_active(raise_error=True)


@pytest.mark.parametrize("how", ["model", "sequential", "block", "chained"])
@pytest.mark.parametrize("through", ["function", "model", "pipeline"])
def test_modules_offloaded_by_accelerate_are_refused(
    how: str, through: str, device: torch.device, patched: None
) -> None:
    pipe = tiny.flux_pipeline()
    model = pipe.transformer
    if how == "model":
        accelerate.cpu_offload_with_hook(model, execution_device=torch.device("cpu"))
    elif how == "sequential":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    elif how == "block":
        accelerate.cpu_offload(model.transformer_blocks[0], execution_device=torch.device("cpu"))
    else:
        accelerate.hooks.add_hook_to_module(model, accelerate.hooks.ModelHook())
        accelerate.hooks.add_hook_to_module(model, accelerate.hooks.CpuOffload(torch.device("cpu")), append=True)
    before = {name: traces(part) for name, part in models_of(pipe).items()}
    with pytest.raises(ValueError, match="already offloaded by accelerate"):
        {
            "function": lambda: apply_group_offloading(model, device),
            "model": lambda: model.enable_group_offload(device),
            "pipeline": lambda: pipe.enable_group_offload(device),
        }[through]()
    for name, part in models_of(pipe).items():
        assert traces(part) == before[name], name


def test_accelerate_takes_the_weights_of_an_offloaded_model(
    device: torch.device, resident_outputs: dict[str, torch.Tensor]
) -> None:
    pipe = tiny.flux_pipeline()
    enable_group_offload(pipe, onload_device=device)
    accelerate.cpu_offload(pipe.transformer, execution_device=device)
    with pytest.raises(ModuleError, match="remove_hook_from_module"):
        tiny.run(pipe)
    accelerate.hooks.remove_hook_from_module(pipe.transformer, recurse=True)
    assert torch.equal(tiny.run(pipe), resident_outputs["flux"])


def test_a_tracing_hook_of_accelerate_is_no_offloading(device: torch.device) -> None:
    model = tiny.flux_transformer()
    accelerate.hooks.add_hook_to_module(model.proj_out, accelerate.hooks.ModelHook())
    expected = tiny.call(tiny.flux_transformer().to(device), tiny.flux_inputs())
    apply_group_offloading(model, device)
    assert torch.equal(tiny.call(model, tiny.flux_inputs()), expected)


@pytest.mark.parametrize("part", ["whole", "block"])
def test_modules_on_the_stock_engine_are_refused(part: str, device: torch.device) -> None:
    model = tiny.flux_transformer()
    target = model if part == "whole" else model.transformer_blocks
    imported_before_patching(target, device, num_blocks_per_group=1)
    with pytest.raises(StateError, match="already uses diffusers' group offloading"):
        apply_group_offloading(model, device)
    expected = tiny.call(tiny.flux_transformer().to(device), tiny.flux_inputs())
    if part == "whole":
        assert torch.equal(tiny.call(model, tiny.flux_inputs()), expected)


def test_stock_call_on_an_offloaded_module_is_refused(device: torch.device) -> None:
    model = tiny.flux_transformer()
    apply_group_offloading(model, device)
    for target in (model, nn.Sequential(model), model.transformer_blocks[0]):  # else its weights at rest would be lost
        with pytest.raises(StateError, match="already"):
            imported_before_patching(target, device, num_blocks_per_group=1)
