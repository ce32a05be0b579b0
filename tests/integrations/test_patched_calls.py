"""diffusers' own calls on this engine, and `compile_repeated_blocks` with it."""

from __future__ import annotations

import functools
import inspect
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import diffusers
import diffusers.hooks.group_offloading as stock
import pytest
import torch
import torch._dynamo.testing
from diffusers.hooks import apply_group_offloading as imported_before_patching
from diffusers.models.modeling_utils import ModelMixin

from group_offload import (
    ModuleError,
    OffloadHandle,
    apply_group_offloading,
    disable_group_offload,
    handle_of,
    patch_diffusers,
    unpatch_diffusers,
)

from ..support import tiny_models as tiny
from ..support.pipelines import PIPELINES, any_case, any_pipeline, models_of, tier_options

CPU = torch.device("cpu")

# ---------------------------------------------------------------- patched calls


@any_pipeline
def test_patched_pipeline_without_arguments(
    kind: str, patched: None, resident_outputs: dict[str, torch.Tensor]
) -> None:
    pipe = PIPELINES[kind]()
    handles = pipe.enable_group_offload()
    assert all(isinstance(handle, OffloadHandle) for handle in handles.values())
    assert torch.equal(tiny.run(pipe), resident_outputs[kind])
    assert all(handle.stats().passes for handle in handles.values())
    pipe.disable_group_offload()
    assert not any(handle.is_active for handle in handles.values())
    assert torch.equal(tiny.run(pipe.to(tiny.device())), resident_outputs[kind])


@any_case
def test_patched_pipeline_with_diffusers_arguments(
    level: str,
    tier: str,
    device: torch.device,
    tmp_path: Path,
    patched: None,
    resident_outputs: dict[str, torch.Tensor],
) -> None:
    pipe = tiny.flux_pipeline()
    count, folder = (1, None) if level == "block_level" else (None, str(tmp_path))
    pipe.enable_group_offload(device, CPU, level, count, False, False, False, False, folder, "vae")
    assert not stock._is_group_offload_enabled(pipe.vae)
    for _ in range(2):
        assert torch.equal(tiny.run(pipe), resident_outputs["flux"])
    assert any(tmp_path.iterdir()) == (tier == "disk")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"onload_device": CPU, "offload_type": "leaf_level"},
        {
            "onload_device": CPU,
            "offload_device": CPU,
            "offload_type": stock.GroupOffloadingType.BLOCK_LEVEL,
            "num_blocks_per_group": 2,
            "block_modules": ["transformer_blocks"],
            "exclude_kwargs": ["joint_attention_kwargs"],
        },
    ],
    ids=["none", "leaf", "all"],
)
def test_a_name_imported_before_patching(options: dict[str, Any], patched: None) -> None:
    if options and tiny.device().type != "cpu":
        pytest.skip("the inputs are on the accelerator")
    model = tiny.flux_transformer()
    expected = tiny.call(tiny.flux_transformer().to(tiny.device()), tiny.flux_inputs())
    handle = imported_before_patching(model, **options)
    assert isinstance(handle, OffloadHandle)
    assert model.enable_group_offload(**options) is handle
    assert diffusers.hooks.apply_group_offloading is imported_before_patching
    assert torch.equal(tiny.call(model, tiny.flux_inputs()), expected)
    assert handle.stats().passes > 0


def by_roles(pipe: Any, device: torch.device) -> None:
    """Another profile for each role, chosen anew before each image."""
    for name, component in pipe.components.items():
        if not isinstance(component, torch.nn.Module) or stock._is_group_offload_enabled(component):
            continue
        if name == "vae":
            component.to(device)
        elif name == "transformer":
            imported_before_patching(
                component, device, CPU, "block_level", 2, non_blocking=True, use_stream=device != CPU
            )
        else:
            imported_before_patching(
                component,
                device,
                CPU,
                "leaf_level",
                use_stream=device != CPU,
                record_stream=device != CPU,
                low_cpu_mem_usage=True,
            )


def test_calls_of_programs(device: torch.device, patched: None, resident_outputs: dict[str, torch.Tensor]) -> None:
    """Programs call diffusers' functions, in one thread, and the pipeline in that of a queue of requests."""
    pipe = tiny.flux_pipeline()
    with ThreadPoolExecutor(1) as queue:
        for _ in range(2):
            by_roles(pipe, device)
            assert torch.equal(queue.submit(tiny.run, pipe).result(60), resident_outputs["flux"])
    assert handle_of(pipe.transformer).stats().passes > 0


def state_of_diffusers() -> dict[str, Any]:
    apply = imported_before_patching
    names = ("enable_group_offload", "disable_group_offload")
    owners = (ModelMixin, diffusers.DiffusionPipeline, diffusers.ModularPipeline)
    return {
        "function": [apply.__code__, apply.__defaults__, apply.__kwdefaults__, dict(apply.__annotations__)],
        "names": [apply.__doc__, apply.__name__, apply.__qualname__, apply.__module__, inspect.signature(apply)],
        "methods": [owner.__dict__.get(name) for owner in owners for name in (*names, "load_components")],
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
    assert handles["transformer"].is_active and handles["transformer"].stats().passes > 0
    disable_group_offload(pipe)
    assert torch.equal(tiny.run(pipe.to(device)), resident_outputs["flux"])


def test_models_that_do_not_support_it(device: torch.device, patched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tiny.flux_pipeline()
    monkeypatch.setattr(type(pipe.transformer), "_supports_group_offloading", False)
    for each in (pipe.transformer, pipe):
        with pytest.raises(ModuleError, match=r"support group offloading .*exclude_modules"):
            each.enable_group_offload(device)
    assert not any(stock._is_group_offload_enabled(part) for part in models_of(pipe).values())


# ---------------------------------------------------------------- compiled


@functools.cache
def compiled_resident(device: torch.device) -> tuple[torch.Tensor, int]:
    """What it gives, and how many graphs it takes."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    model = tiny.flux_transformer().to(device)
    model.compile_repeated_blocks(fullgraph=True, backend=counter)
    return [tiny.call(model, tiny.flux_inputs()) for _ in range(3)][-1], counter.frame_count


@any_case
@pytest.mark.parametrize("is_first", [True, False], ids=["compiled first", "offloaded first"])
def test_compile_repeated_blocks(tier: str, level: str, is_first: bool, device: torch.device, tmp_path: Path) -> None:
    """diffusers' regional compilation, in whole graphs: as many of them as for a resident model, however many blocks."""
    expected, num_graphs = compiled_resident(device)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    model = tiny.flux_transformer()
    if is_first:
        model.compile_repeated_blocks(fullgraph=True, backend=counter)
    handle = apply_group_offloading(model, device, offload_type=level, **tier_options(tier, tmp_path))
    if not is_first:
        model.compile_repeated_blocks(fullgraph=True, backend=counter)
    for _ in range(3):
        before = handle.stats().onloads
        assert torch.equal(tiny.call(model, tiny.flux_inputs()), expected)
        num_blocks = len(model.transformer_blocks) + len(model.single_transformer_blocks)
        is_in_place = device.type == "cpu" and handle.groups[0].tier == "ram"
        assert is_in_place or handle.stats().onloads >= before + num_blocks
    assert counter.frame_count == num_graphs
    torch._dynamo.reset()
