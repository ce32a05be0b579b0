"""Backward over offloaded weights: losses, gradients and trained parameters are those of the resident model, bit by bit."""

from __future__ import annotations

import copy
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from group_offload import OffloadHandle, StateError, apply_activation_offloading, apply_group_offloading
from group_offload.runtime import backward as backward_module

from .common import same_bits
from .simulated import SimulatedDevice, use_simulated_device
from .test_activations import CHECKPOINTS, DIM, STEPS, Put, Step, assert_same_bits, data, in_part, plain, train

__all__ = ["train"]


class Lora(nn.Module):
    """A frozen layer, and a small one beside it that is trained."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.base = nn.Linear(num_in, num_out).requires_grad_(False)
        self.down = nn.Linear(num_in, 2, bias=False)
        self.up = nn.Linear(2, num_out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x) + 0.5 * self.up(self.down(x))
        return result


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = Lora(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        result: torch.Tensor = self.out((q @ k.transpose(-1, -2)).softmax(-1) @ v)
        return result


class Block(nn.Module):
    """A norm, parts that a checkpoint may be around, dropout, and weights that are used in more ways than a layer does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM).requires_grad_(False)
        self.attention = Attention()
        self.up = nn.Linear(DIM, 2 * DIM).requires_grad_(False)
        self.down = Lora(2 * DIM, DIM)
        self.scale = nn.Parameter(torch.randn(3, DIM), requires_grad=False)
        self.mix = nn.Parameter(torch.randn(DIM, DIM) / 4, requires_grad=False)
        self.run_part: Callable[..., torch.Tensor] = lambda part, *args: part(*args)

    def forward(self, x: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        shift, gain, gate = self.scale.chunk(3)
        x = x + F.dropout(self.run_part(self.attention, self.norm(x) * gain + shift), 0.2, self.training) * gate
        x = x * shared + x @ self.mix.t() @ self.mix
        return x + self.run_part(self.down, F.gelu(self.run_part(self.up, x)))


class Model(nn.Module):
    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.shift = nn.Parameter(torch.randn(DIM), requires_grad=False)
        self.head = nn.Linear(DIM, DIM)
        self.run_block: Callable[..., torch.Tensor] = lambda block, *args: block(*args)
        self.order = list(range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) * self.shift
        if torch.is_grad_enabled() and not x.requires_grad:
            x.requires_grad_()  # as `enable_input_require_grads` does, for reentrant checkpoints
        shared = torch.sigmoid(x.mean(1, keepdim=True)).expand_as(x).contiguous()
        for index in self.order:
            x = self.run_block(self.blocks[index], x, shared)
        result: torch.Tensor = self.head(x)
        return result


def make(num_blocks: int = 4, run_part: Any = None, **attributes: Any) -> Model:
    torch.manual_seed(0)
    model = Model(num_blocks)
    for name, value in attributes.items():
        setattr(model, name, value)
    for block in model.blocks:
        if run_part is not None:
            block.run_part = run_part  # type: ignore[assignment]
    return model


OPTIONS: dict[str, dict[str, Any]] = {
    "block": {},
    "pairs": {"num_blocks_per_group": 2},
    "no stream": {"use_stream": False},
    "record_stream": {"record_stream": True},
    "leaf": {"offload_type": "leaf_level"},
    "leaf, no stream": {"offload_type": "leaf_level", "use_stream": False},
    "files": {"in_files": True},
    "files, leaf": {"in_files": True, "offload_type": "leaf_level"},
    "checkpoint": {"in_checkpoint": True},
    "budget": {"vram_budget": 120_000},
}


@contextmanager
def offloaded(
    model: nn.Module, device: str, folder: Path, seed: int = 0, **options: Any
) -> Iterator[tuple[nn.Module, OffloadHandle, Put, Put]]:
    """The model, offloaded: how a tensor gets to the device, and how it comes back."""
    with ExitStack() as stack:
        put: Put = torch.clone
        get: Put = torch.clone
        simulated = None
        if device != "cpu":
            simulated = SimulatedDevice(seed, device)  # type: ignore[arg-type]
            stack.enter_context(use_simulated_device(simulated))
            put, get = simulated.put, simulated.get
        if options.pop("in_checkpoint", False):
            save_file(model.state_dict(), folder / "model.safetensors")
            os.utime(folder / "model.safetensors", (1e9, 1e9))
            model.load_state_dict(load_file(folder / "model.safetensors"), assign=True)
            options["offload_device"] = "disk"
        if options.pop("in_files", False):
            options["offload_to_disk_path"] = folder
        handle = apply_group_offloading(model, "cpu", **options)
        if simulated is not None:
            stack.enter_context(simulated.running())
        yield model, handle, put, get
        if simulated is not None:
            simulated.synchronize()


def frozen_bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters() if not parameter.requires_grad}


def check(
    step: Step, device: str, folder: Path, model: Callable[[], nn.Module] = make, num_steps: int = 2, **options: Any
) -> Any:
    """Training is the same bits as without offloading, and the frozen weights are what they were."""
    expected = train(model(), step, num_steps=num_steps)
    ours = model()
    before = frozen_bits(ours)
    with offloaded(ours, device, folder, **options) as (ours, handle, put, get):
        actual = train(ours, step, put, num_steps=num_steps)
        assert_same_bits(actual, expected, get)
        stats = handle.stats()
        gc.collect()
        handle.remove()
        for name, value in frozen_bits(ours).items():
            assert same_bits(value, before[name]), name
    return stats


# ---------------------------------------------------------------- bits


@pytest.mark.parametrize("device", ["cpu", "random"])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_bits(step: Step, device: str, tmp_path: Path) -> None:
    stats = check(step, device, tmp_path)
    if step is not in_part:  # which needs nothing of what is offloaded
        assert stats.backward_passes > 0
    assert 0 < stats.trainable_bytes < 6000


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_bits_with_options(device: str, options: dict[str, Any], tmp_path: Path) -> None:
    if device == "cpu" and {"record_stream", "vram_budget"} & options.keys():
        pytest.skip("needs a device with streams")
    for step in ("plain", "retained"):
        check(STEPS[step], device, tmp_path, **options)


def test_bits_of_twenty_steps(tmp_path: Path) -> None:
    check(plain, "cpu", tmp_path, num_steps=20)
    check(plain, "random", tmp_path, num_steps=20, offload_type="leaf_level")


@pytest.mark.parametrize("options", [{}, {"offload_type": "leaf_level"}, {"in_files": True}], ids=str)
@pytest.mark.parametrize("run_block", CHECKPOINTS)
def test_bits_with_checkpoints_around_blocks(run_block: Any, options: dict[str, Any], tmp_path: Path) -> None:
    for step in ("plain", "two_by_two", "autocast"):
        check(STEPS[step], "random", tmp_path, lambda: make(run_block=run_block), **options)


@pytest.mark.parametrize("options", [{}, {"offload_type": "leaf_level"}], ids=str)
@pytest.mark.parametrize("run_part", CHECKPOINTS)
def test_bits_with_checkpoints_inside_blocks(run_part: Any, options: dict[str, Any], tmp_path: Path) -> None:
    """What is repeated is a part of a group: nobody calls the group's own module again."""
    for step in ("plain", "retained"):
        check(STEPS[step], "random", tmp_path, lambda: make(run_part=run_part), **options)


@pytest.mark.parametrize("run_part", CHECKPOINTS[1:])
@pytest.mark.parametrize("run_block", CHECKPOINTS[1:])
def test_bits_with_checkpoints_inside_of_checkpoints(run_block: Any, run_part: Any, tmp_path: Path) -> None:
    check(plain, "random", tmp_path, lambda: make(run_block=run_block, run_part=run_part))
