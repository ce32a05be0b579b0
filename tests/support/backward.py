"""Training of LoRA layers over offloaded weights, on the CPU or on the simulated device."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from group_offload import OffloadHandle, apply_group_offloading

from .asserts import same_bits
from .on_device import lay_in_file
from .training import DIM, Put, Step, TrainingModel, assert_same_bits, train, training_on
from .training import make as make_trained


class Lora(nn.Module):
    """A frozen layer, and a small one beside it that is trained."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.base = nn.Linear(num_in, num_out).requires_grad_(False)
        self.down = nn.Linear(num_in, 2, bias=False)
        self.up = nn.Linear(2, num_out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 0.5 * self.up(self.down(x))


class LoraAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = Lora(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out((q @ k.transpose(-1, -2)).softmax(-1) @ v)


class LoraBlock(nn.Module):
    """A norm, parts that a checkpoint may be around, dropout, and weights that are used in more ways than a layer does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM).requires_grad_(False)
        self.attention = LoraAttention()
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


class LoraModel(TrainingModel):
    """The model of which only LoRA layers and the head are trained."""

    block_class = LoraBlock

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__(num_blocks)
        self.embed.requires_grad_(False)
        self.shift = nn.Parameter(torch.randn(DIM), requires_grad=False)

    def embedded(self, x: torch.Tensor) -> torch.Tensor:
        x = super().embedded(x) * self.shift
        if torch.is_grad_enabled() and not x.requires_grad:
            x.requires_grad_()  # as `enable_input_require_grads` does, for reentrant checkpoints
        return x


def make(num_blocks: int = 3, run_part: Any = None, **attributes: Any) -> LoraModel:
    model: LoraModel = make_trained(num_blocks, LoraModel, **attributes)
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
    """The model, offloaded and in the end restored: how a tensor gets to the device, and how it comes back.

    On the CPU it is in files, unless options say otherwise: weights in RAM are used in place there, and nothing moves.
    """
    with training_on(device, seed) as (put, get):
        if options.pop("in_checkpoint", False):
            lay_in_file(model, folder / "model.safetensors")
            options["offload_device"] = "disk"
        if options.pop("in_files", device == "cpu" and "offload_device" not in options):
            options["offload_to_disk_path"] = folder
        handle = apply_group_offloading(model, "cpu", **options)
        yield model, handle, put, get
        handle.remove()


def frozen_bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().clone() for name, parameter in model.named_parameters() if not parameter.requires_grad
    }


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
