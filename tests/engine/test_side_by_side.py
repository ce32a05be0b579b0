"""Several models within one budget: what stays on the device while another model runs, and what gives way."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from group_offload import apply_group_offloading

from ..support.inside import engine_of
from ..support.models import WIDTH, Model, make
from ..support.on_device import forward
from ..support.pretend import (
    IMAGE,
    WITH_CONTROLNET,
    WITH_EXPERTS,
    PretendPipeline,
    peak_without_budget,
    settled,
)
from ..support.rigs import run
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.travellers import in_threads
from ..support.tuning import tune

EVERYTHING = 1 << 30


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:
    gc.collect()
    tune(monkeypatch, device_margin_bytes=0)
    with use_simulated_device(SimulatedDevice(0, "random")) as device:
        yield device


@pytest.mark.parametrize("options", [{}, {"offload_type": "leaf_level"}], ids=str)
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_a_budget_holds_for_all_models(share: float, options: dict[str, Any], device: SimulatedDevice) -> None:
    """Together; models that alternate keep what fits, and go not back and forth as a whole (diffusers #10790)."""
    names = (*WITH_CONTROLNET, "vae", "vae")
    pipe = PretendPipeline(device, vae=2)
    total = sum(tensor.nbytes for model in pipe.resident.values() for tensor in model.parameters())
    budget = peak_without_budget(device) + int(share * total)
    pipe.offload(vram_budget=budget, **options)
    device.reset_peak()
    for _ in range(3):
        for name in names:
            pipe.call(name)
            assert device.peak_bytes_in_use() <= budget, name
    pipe.remove()


def with_one_expert(device: SimulatedDevice, **options: Any) -> tuple[PretendPipeline, int]:
    """A pipeline of two experts with room for the blocks of one, and its budget."""
    pipe = PretendPipeline(device, transformer_2=5)
    one = sum(tensor.nbytes for tensor in pipe.resident["transformer"].parameters())
    budget = peak_without_budget(device) + one
    return pipe.offload(vram_budget=budget, **options), budget


@pytest.mark.parametrize("wrong", ["another step", "another model", "an error"])
def test_experts_displace_each_other(wrong: str, device: SimulatedDevice) -> None:
    """Each runs four steps in a row: with room for one of the two, the later steps of both send nothing. A wrong guess of who
    leaves costs transfers: at most once what was given up, and once what came in its place. The budget holds."""
    pipe, budget = with_one_expert(device)
    for at, passed in enumerate(settled(pipe, WITH_EXPERTS)):
        if passed.name.startswith("transformer") and WITH_EXPERTS[at - 1] == passed.name:
            assert not passed.num_bytes, passed
    one = sum(group.num_bytes for group in pipe.handles["transformer"].groups)
    device.reset_peak()
    for name in ("encoder", *["transformer"] * 3):
        pipe.call(name)
    if wrong == "an error":
        model = pipe.components["transformer"]
        assert isinstance(model, Model)
        handle = model.blocks[3].register_forward_pre_hook(_fail)
        with pytest.raises(ValueError, match="stop"):
            pipe.call("transformer")
        handle.remove()
    pipe.call("transformer")
    before = sum(sum(handle.stats().bytes_onloaded.values()) for handle in pipe.handles.values())
    pipe.call("vae" if wrong == "another model" else "transformer")
    if wrong == "another step":
        sent = sum(sum(handle.stats().bytes_onloaded.values()) for handle in pipe.handles.values()) - before
        assert sent <= 2 * one
    for name in ("transformer_2", "vae", "transformer"):
        pipe.call(name)
    assert device.peak_bytes_in_use() <= budget
    pipe.remove()


def _fail(*args: Any) -> None:
    raise ValueError("stop")


def test_a_model_that_runs_is_not_displaced(device: SimulatedDevice) -> None:
    """One that is called inside of another one's forward takes what is left."""
    pipe = PretendPipeline(device).offload(vram_budget=EVERYTHING)
    settled(pipe, IMAGE)
    other = make(Model)
    handle = apply_group_offloading(other, "cpu")
    x = torch.randn(3, WIDTH)
    held: list[int] = []

    def call_other(*args: Any) -> None:
        other(device.put(x))
        held.append(pipe.handles["transformer"].stats().resident_bytes)

    hook = pipe.components["transformer"].get_submodule("blocks.1").register_forward_pre_hook(call_other)
    pipe.call("transformer")
    hook.remove()
    groups = pipe.handles["transformer"].groups
    assert held == [sum(group.num_bytes for group in groups if "blocks" in group.group_id)]  # the others take turns
    assert engine_of(pipe.handles["vae"]).memory.residents == []
    pipe.image()
    handle.remove()
    pipe.remove()


def test_two_threads_displace_each_other(device: SimulatedDevice) -> None:
    """With room for one of two models, of no pipeline, each thread's outputs are right."""
    models = [make(Model, 5, seed=seed) for seed in range(2)]
    resident = [make(Model, 5, seed=seed) for seed in range(2)]
    num_bytes = sum(tensor.nbytes for tensor in models[0].parameters())
    handles = [apply_group_offloading(model, "cpu", vram_budget=num_bytes * 2) for model in models]
    x = torch.randn(3, WIDTH)

    def work(number: int) -> None:
        for _ in range(6):
            assert torch.equal(device.get(forward(device, models[number], x)), run(resident[number], x))

    in_threads([partial(work, number) for number in range(2)])
    assert not device.errors
    for handle in handles:
        handle.remove()
