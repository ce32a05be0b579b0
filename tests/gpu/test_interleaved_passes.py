"""Forwards that share passes on a real accelerator: bits, streams of threads, memory, and what moves."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from group_offload import apply_group_offloading

from ..support.asserts import assert_same
from ..support.models import Model
from ..support.participants import in_threads
from ..support.rigs import run

pytestmark = pytest.mark.gpu

WIDTH = 1024

OPTIONS: list[dict[str, Any]] = [{}, {"record_stream": True}, {"offload_type": "leaf_level"}, {"use_stream": False}]


def draw(seed: int, device: torch.device) -> torch.Tensor:
    return torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16).to(device)


@pytest.mark.parametrize("has_streams", [False, True], ids=["one stream", "a stream each"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_threads(options: dict[str, Any], has_streams: bool, model: nn.Module, device: torch.device) -> None:
    resident = copy.deepcopy(model).to(device)
    handle = apply_group_offloading(model, device, interleave_forwards=True, **options)

    def job(number: int) -> Callable[[], None]:
        def work() -> None:
            stream = torch.cuda.Stream(device) if has_streams else torch.cuda.current_stream(device)
            with torch.cuda.stream(stream):
                for at in range(8):
                    x = draw(10 * number + at, device)
                    assert_same(run(model, x), run(resident, x))
            stream.synchronize()

        return work

    in_threads([job(number) for number in range(4)], 120)
    assert handle.stats().forwards_interleaved >= 12
    handle.remove()


class Loop:
    """Steps of guidance. `timestep / 10` is another tensor in each call."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.prompts = [draw(1, device), draw(2, device)]

    def run(self, model: nn.Module, num_steps: int = 6) -> list[torch.Tensor]:
        latents, found = draw(3, self.device), []
        with torch.no_grad():
            for step in range(num_steps):
                timestep = torch.tensor([step + 1.0], device=self.device)
                one = model(latents, timestep / 10, self.prompts[0])
                two = model(latents, timestep / 10, self.prompts[1])
                latents = latents - 0.1 * (two + 2 * (one - two))
                found.append(latents)
        return found


class Guided(Model):
    def forward(self, x: torch.Tensor, timestep: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward((x * timestep + prompt).to(x.dtype))


def _reserved_by(loop: Loop, model: nn.Module) -> int:
    """The peak of reserved memory with the least memory for weights, what other tests left included."""
    handle = apply_group_offloading(model, loop.device, interleave_forwards=True, vram_budget=None)
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(loop.device)
    loop.run(model)
    handle.remove()
    return torch.accelerator.max_memory_reserved(loop.device)


@pytest.mark.parametrize("options", [*OPTIONS, {"compress": True}, {"vram_budget": "400MiB"}], ids=str)
def test_guidance(options: dict[str, Any], device: torch.device) -> None:
    torch.manual_seed(0)
    model = Guided(60 if "vram_budget" in options else 12, WIDTH).to(torch.bfloat16).eval()
    loop, resident = Loop(device), copy.deepcopy(model).to(device)
    wanted = loop.run(resident)
    if "vram_budget" in options:  # room for a second forward, workspaces included, but not for all weights, 480 MiB
        options = {"vram_budget": _reserved_by(loop, model) + (400 << 20)}
    handle = apply_group_offloading(model, device, interleave_forwards=True, **options)
    for _ in range(2):
        for one, other in zip(loop.run(model), wanted, strict=True):
            assert_same(one, other)
    assert handle.stats().forwards_speculated >= 8
    before = torch.accelerator.memory_allocated(device)
    for _ in range(3):
        loop.run(model)
    gc.collect()
    # (With a budget, residents may still come.)
    assert "vram_budget" in options or torch.accelerator.memory_allocated(device) <= before + (1 << 20)
    handle.remove()


def test_autocast_and_a_stream_of_the_caller(device: torch.device) -> None:
    torch.manual_seed(0)
    model = Guided(6, WIDTH).eval()
    loop, resident = Loop(device), copy.deepcopy(model).to(device)
    handle = apply_group_offloading(model, device, interleave_forwards=True)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream), torch.autocast(device.type, dtype=torch.bfloat16):
        wanted = loop.run(resident)
        for one, other in zip(loop.run(model), wanted, strict=True):
            assert_same(one, other)
    stream.synchronize()
    assert handle.stats().forwards_speculated == 5
    handle.remove()
