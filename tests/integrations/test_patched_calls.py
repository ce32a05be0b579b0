"""diffusers' own calls on this engine, and `compile_repeated_blocks` with it."""

from __future__ import annotations

import inspect
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import diffusers.hooks.group_offloading as stock
import pytest
import torch
import torch._dynamo.testing
from diffusers.hooks import apply_group_offloading as imported_before_patching
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from group_offload import (
    ModuleError,
    OffloadHandle,
    StateError,
    apply_group_offloading,
    disable_group_offload,
    enable_group_offload,
    handle_of,
    handles_of,
    patch_diffusers,
    remove_group_offloading,
    unpatch_diffusers,
)

from ..support import tiny_models as tiny
from ..support.asserts import snapshot
from ..support.pipelines import assert_same_weights, models_of, weights_of
from ..support.processes import ROOT

CPU = torch.device("cpu")

# ---------------------------------------------------------------- patched calls


ALL = {"onload_device": CPU, "offload_device": CPU, "offload_type": stock.GroupOffloadingType.BLOCK_LEVEL}
ALL |= {
    "num_blocks_per_group": 2,
    "block_modules": ["transformer_blocks"],
    "exclude_kwargs": ["joint_attention_kwargs"],
}


def by_roles(pipe: Any, device: torch.device, folder: Path) -> None:
    """Another profile for each role, chosen anew before each image."""
    streams = device != CPU
    for name, component in pipe.components.items():
        if not isinstance(component, nn.Module) or stock._is_group_offload_enabled(component):
            continue
        if name == "vae":
            component.to(device)
        elif name == "transformer":
            imported_before_patching(component, device, CPU, "block_level", 2, non_blocking=True, use_stream=streams)
        else:
            options = {"use_stream": streams, "record_stream": streams, "low_cpu_mem_usage": True}
            imported_before_patching(component, device, CPU, "leaf_level", **options)


def the_denoiser(pipe: Any, device: torch.device, folder: Path) -> None:
    """The others go to the device whole."""
    for model in models_of(pipe).values():
        if model is not pipe.transformer and not stock._is_group_offload_enabled(pipe.transformer):
            model.to(device)
    options = {"onload_device": device, "offload_device": CPU, "num_blocks_per_group": 1, "use_stream": device != CPU}
    imported_before_patching(pipe.transformer, offload_type="block_level", **options)


def one_by_one(pipe: Any, device: torch.device, folder: Path) -> None:
    """By a name that was imported before, and then by the method."""
    for name, model in models_of(pipe).items():
        options = {**ALL, "onload_device": device} if name == "transformer" else {}
        handle = imported_before_patching(model, **options)
        assert isinstance(handle, OffloadHandle)
        if isinstance(model, ModelMixin):
            assert model.enable_group_offload(**options) is handle


PROGRAMS: dict[str, Callable[[Any, torch.device, Path], object]] = {
    "no arguments": lambda pipe, device, folder: pipe.enable_group_offload(),
    "blocks": lambda pipe, device, folder: pipe.enable_group_offload(
        device,
        CPU,
        "block_level",
        1,
        non_blocking=False,
        use_stream=False,
        record_stream=False,
        exclude_modules=["vae"],
    ),
    "leaves in files": lambda pipe, device, folder: pipe.enable_group_offload(
        device, CPU, "leaf_level", None, False, False, False, False, str(folder), "vae"
    ),
    "the denoiser": the_denoiser,
    "one by one": one_by_one,
    "by roles": by_roles,
}
"""How programs call diffusers' group offloading: SD.Next ("blocks"), unsloth Studio ("the denoiser"), and others."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_calls_of_programs(
    name: str, device: torch.device, tmp_path: Path, patched: None, resident_outputs: dict[str, torch.Tensor]
) -> None:
    """Programs call diffusers' functions, in one thread, and the pipeline in that of a queue of requests."""
    pipe = tiny.flux_pipeline()
    with ThreadPoolExecutor(1) as queue:
        for _ in range(2):
            PROGRAMS[name](pipe, device, tmp_path)
            assert torch.equal(queue.submit(tiny.run, pipe).result(60), resident_outputs["flux"])
    handle = handle_of(pipe.transformer)
    assert handle is not None and handle.stats().forward_passes > 0
    assert (handle.config.vram_budget, handle.config.interleave_forwards) == (None, False)  # as diffusers' own call
    assert any(tmp_path.iterdir()) == (name == "leaves in files")
    assert stock._is_group_offload_enabled(pipe.vae) == (name in ("no arguments", "one by one"))
    handles = handles_of(pipe)
    pipe.disable_group_offload()
    assert any(handle.is_active for handle in handles.values()) == (name in ("the denoiser", "one by one", "by roles"))
    for model in models_of(pipe).values():
        remove_group_offloading(model)
    assert torch.equal(tiny.run(pipe.to(device)), resident_outputs["flux"])


def test_a_program_that_accelerate_launches(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("""
import torch
from accelerate import Accelerator
from group_offload import handle_of, patch_diffusers
from tests.support import tiny_models as tiny

accelerator, pipe = Accelerator(), tiny.flux_pipeline()
patch_diffusers()
pipe.enable_group_offload(accelerator.device)
pipe.transformer = accelerator.prepare(pipe.transformer)
assert torch.equal(tiny.run(pipe), tiny.run(tiny.flux_pipeline().to(accelerator.device)))
assert handle_of(pipe.transformer).stats().forward_passes
""")
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes=1",
        tmp_path / "program.py",
    ]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


def state_of_diffusers() -> dict[str, Any]:
    apply = imported_before_patching
    names = ("enable_group_offload", "disable_group_offload")
    owners = (ModelMixin, diffusers.DiffusionPipeline)
    return {
        "function": [apply.__code__, apply.__defaults__, apply.__kwdefaults__, dict(apply.__annotations__)],
        "names": [apply.__doc__, apply.__name__, apply.__qualname__, apply.__module__, inspect.signature(apply)],
        "methods": [owner.__dict__.get(name) for owner in owners for name in names],
        "has": [hasattr(owner, name) for owner in owners for name in names],
    }


def test_unpatch_restores_diffusers(device: torch.device, resident_outputs: dict[str, torch.Tensor]) -> None:
    before = state_of_diffusers()
    patch_diffusers()
    patch_diffusers()
    try:
        assert state_of_diffusers() != before
        for call in (imported_before_patching, ModelMixin.enable_group_offload):
            assert inspect.signature(call).parameters["onload_device"].default is None
        pipe = tiny.flux_pipeline()
        handles = pipe.enable_group_offload(device)
    finally:
        unpatch_diffusers()
    assert state_of_diffusers() == before
    unpatch_diffusers()
    assert state_of_diffusers() == before
    for call in (imported_before_patching, ModelMixin.enable_group_offload):
        with pytest.raises(TypeError):
            call(tiny.flux_transformer())
    model = tiny.flux_transformer()
    assert model.enable_group_offload(device, num_blocks_per_group=1) is None
    assert isinstance(stock._get_top_level_group_offload_hook(model), stock.GroupOffloadingHook)
    # What is offloaded stays so.
    for _ in range(2):
        assert torch.equal(tiny.run(pipe), resident_outputs["flux"])
        stock._maybe_remove_and_reapply_group_offloading(pipe.transformer)  # as LoRA loading does
    assert handles["transformer"].is_active and handles["transformer"].stats().forward_passes > 0
    disable_group_offload(pipe)
    assert torch.equal(tiny.run(pipe.to(device)), resident_outputs["flux"])


# ---------------------------------------------------------------- what diffusers sees, and what is refused


def test_devices_that_diffusers_sees(
    device: torch.device, resident_outputs: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    pipe = tiny.flux_pipeline()
    weights = weights_of(pipe.transformer)
    enable_group_offload(pipe, onload_device=device)
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


ACCELERATE: dict[str, Callable[[Any], object]] = {
    "model": lambda model: accelerate.cpu_offload_with_hook(model, execution_device=CPU),
    "sequential": lambda model: accelerate.cpu_offload(model, execution_device=CPU),
    "block": lambda model: accelerate.cpu_offload(model.transformer_blocks[0], execution_device=CPU),
}


@pytest.mark.parametrize("how", ACCELERATE.values(), ids=ACCELERATE)
def test_modules_offloaded_by_accelerate_are_refused(how: Callable[[Any], object], device: torch.device) -> None:
    pipe = tiny.flux_pipeline()
    how(pipe.transformer)
    before = {name: snapshot(part) for name, part in models_of(pipe).items()}
    for call in (lambda: apply_group_offloading(pipe.transformer, device), lambda: enable_group_offload(pipe, device)):
        with pytest.raises(ModuleError, match=r"already offloaded by accelerate\. Call pipe\.remove_all_hooks\(\)"):
            call()
        assert {name: snapshot(part) for name, part in models_of(pipe).items()} == before


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


def test_each_engine_refuses_modules_of_the_other(device: torch.device) -> None:
    """Else offloaded weights would be lost."""
    for part in (tiny.flux_transformer(), tiny.flux_transformer().transformer_blocks):
        imported_before_patching(part, device, num_blocks_per_group=1)
        with pytest.raises(StateError, match="already uses diffusers' group offloading, which can't be removed"):
            apply_group_offloading(nn.Sequential(part), device)
    model = tiny.flux_transformer()
    apply_group_offloading(model, device)
    for target in (model, nn.Sequential(model), model.transformer_blocks[0]):
        with pytest.raises(StateError, match="already"):
            imported_before_patching(target, device, num_blocks_per_group=1)
