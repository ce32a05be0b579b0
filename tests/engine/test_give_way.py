"""Nothing that the package takes of a device fails as long as a resident could give way: who is refused memory asks again."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import group_offload
from group_offload.base import arena
from group_offload.base.arena import Arena

from ..support import activations, backward, simulated, training
from ..support.allocator import Memory
from ..support.models import Blocks
from ..support.on_device import Twins, exercise
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.tuning import tune

PACKAGE, TORCH = (str(Path(each.__file__).parent) for each in (group_offload, torch))
MODULES = f"{TORCH}/nn/"
BETWEEN = (simulated.__file__, arena.__file__, contextlib.__file__)


def place_in_package() -> str:
    """The function of the package that takes memory now; empty if the model takes it, or a test."""
    frame = sys._getframe(2)
    while True:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        is_torch = file.startswith(TORCH) and not file.startswith(MODULES)
        if not (is_torch or file in BETWEEN or name == "<listcomp>"):
            return f"{Path(file).stem}.{name}" if file.startswith(PACKAGE) else ""
        assert frame.f_back is not None
        frame = frame.f_back


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each place of the package has asked for memory. It gets some every second time, and something gives way."""
    asked, malloc = Counter[str](), Memory.malloc

    def reluctant(self: Memory, num_bytes: int, stream: Any) -> Any:
        place = place_in_package()
        asked[place] += 1
        if place and asked[place] % 2:
            self.num_refused += 1
            self.refusal.note(num_bytes)
            raise torch.OutOfMemoryError("It is full.")
        return malloc(self, num_bytes, stream)

    monkeypatch.setattr(Memory, "malloc", reluctant)
    monkeypatch.setattr(Arena, "give_way", lambda *args: True)
    return asked


def test_what_forwards_take(asked: Counter[str]) -> None:
    for options in (
        {"vram_budget": 40_000},
        {"vram_budget": 40_000, "offload_type": "leaf_level", "in_files": True},
        {"vram_budget": 1 << 20, "record_stream": True},
        {"vram_budget": 4 << 20, "compress": True},
    ):
        for seed in range(2):
            exercise(seed, "random", options)
    # Which of them keeps groups is a matter of measured times.
    assert asked["memory.take"] and asked["memory.resident_slot"]


def test_what_a_backward_takes(asked: Counter[str], tmp_path: Path) -> None:
    """Trained parameters, slots, and copies of weights for a graph that may outlive them."""
    for step in (training.plain, training.doubled):
        backward.check(step, "random", tmp_path, vram_budget=120_000)
    assert asked["trained._move"] and asked["backward.copy_of"]


def test_what_activations_take(asked: Counter[str]) -> None:
    activations.check(training.plain, "random")
    assert asked["streams.allocate"]


class LooksUp(Blocks):
    """Looks rows up."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(64, 64) for _ in range(3)))
        self.table = nn.Embedding(4096, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.table(x))


class ReturnsWeight(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight


@pytest.mark.parametrize("place", ["embedding_lookup._brought", "gates._made"])
def test_what_rows_and_outputs_take(place: str, asked: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tune(monkeypatch, table_bytes=1 << 16)
    model = LooksUp().eval()
    if place == "gates._made":
        model.blocks[2] = ReturnsWeight(64, 64)
    with use_simulated_device(SimulatedDevice(0, "random")) as device, Twins(device, model) as twins:
        twins.run(2, torch.tensor([[1, 5, 4000]]))
    assert asked[place]
