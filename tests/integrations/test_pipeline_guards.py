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
from ..support.pipelines import any_case, assert_same_weights, models_of, tier_options, traces, weights_of

CPU = torch.device("cpu")


@any_case
def test_devices_that_diffusers_sees(
    level: str,
    tier: str,
    device: torch.device,
    tmp_path: Path,
    resident_outputs: dict[str, torch.Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    pipe = tiny.flux_pipeline()
    weights = weights_of(pipe.transformer)
    enable_group_offload(pipe, onload_device=device, offload_type=level, **tier_options(tier, tmp_path))
    assert pipe._execution_device == pipe.transformer.device == pipe.vae.device == device
    assert pipe.transformer.dtype == torch.float32
    for model in models_of(pipe).values():
        assert stock._is_group_offload_enabled(model)
        assert stock._get_group_onload_device(model) == device
    assert stock._get_group_onload_device(pipe.transformer.transformer_blocks[0]) == device  # a part of one, and what
    assert stock._get_group_onload_device(nn.Sequential(pipe.vae)) == device  # has one inside
    logger = logging.getLogger("diffusers")
    logger.addHandler(caplog.handler)
    try:
        assert pipe.to("cpu") is pipe.to(device) is pipe
        assert pipe.transformer.to(device) is pipe.transformer
    finally:
        logger.removeHandler(caplog.handler)
    assert "group offloaded" in caplog.text
    assert_same_weights(pipe.transformer, weights)
    assert {t.device.type for t in pipe.transformer.parameters()} == {"cpu"}
    assert torch.equal(tiny.run(pipe), resident_outputs["flux"])
    disable_group_offload(pipe)
    assert pipe.device.type == pipe._execution_device.type == "cpu"


@pytest.mark.parametrize("call", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_other_offload_modes_are_refused(call: str, device: torch.device) -> None:
    pipe = tiny.flux_pipeline()
    apply_group_offloading(pipe.vae, device)
    with pytest.raises(ValueError, match="group offloading"):
        getattr(pipe, call)(device="cuda")
    remove_group_offloading(pipe.vae)
    assert not pipe._maybe_raise_error_if_group_offload_active(raise_error=True)


@pytest.mark.parametrize("how", ["model", "sequential", "block", "chained"])
def test_modules_offloaded_by_accelerate_are_refused(how: str, device: torch.device) -> None:
    pipe = tiny.flux_pipeline()
    model = pipe.transformer
    if how == "model":
        accelerate.cpu_offload_with_hook(model, execution_device=CPU)
    elif how in ("sequential", "block"):
        accelerate.cpu_offload(model if how == "sequential" else model.transformer_blocks[0], execution_device=CPU)
    else:
        accelerate.hooks.add_hook_to_module(model, accelerate.hooks.ModelHook())
        accelerate.hooks.add_hook_to_module(model, accelerate.hooks.CpuOffload(CPU), append=True)
    before = {name: traces(part) for name, part in models_of(pipe).items()}
    for call in (lambda: apply_group_offloading(model, device), lambda: enable_group_offload(pipe, device)):
        with pytest.raises(ModuleError, match="already offloaded by accelerate"):
            call()
        assert {name: traces(part) for name, part in models_of(pipe).items()} == before


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
    imported_before_patching(model if part == "whole" else model.transformer_blocks, device, num_blocks_per_group=1)
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
