"""Training a LoRA over packed weights: the same bits, and backward unpacks what it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ..support.backward import LoraBlock, LoraModel, check
from ..support.on_device import packing
from ..support.training import DIM, STEPS


class WideBlock(LoraBlock):
    """Wide enough for packing to be worth it."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(DIM, 1000).requires_grad_(False)
        self.back = nn.Linear(1000, DIM).requires_grad_(False)

    def forward(self, x: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        x = super().forward(x, shared)
        return x + torch.tanh(self.back(torch.tanh(self.wide(x))))


class PackedModel(LoraModel):
    block_class = WideBlock

    def embedded(self, x: torch.Tensor) -> torch.Tensor:
        return super().embedded(x.to(self.embed.weight.dtype))


def make() -> nn.Module:
    torch.manual_seed(0)
    return PackedModel(4).bfloat16()


CASES: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    ("stopped_backward", {"record_stream": True}),
    ("two_by_two", {"in_checkpoint": True}),
    ("plain", {"vram_budget": 420_000}),
    ("plain", {"offload_type": "leaf_level"}),
]


@pytest.mark.parametrize(("step", "options"), CASES, ids=str)
def test_a_lora_is_trained_over_packed_weights(step: str, options: dict[str, Any], tmp_path: Path) -> None:
    with packing():
        stats = check(STEPS[step], "random", tmp_path, make, num_steps=3, pack=True, **options)
    assert stats.bytes_unpacked and stats.packed_bytes and stats.backward_passes
