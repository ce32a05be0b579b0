"""What is foreseen: in the first pass from the blocks before, later from the passes before."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ..support.models import DIM
from ..support.on_device import forward, offload, options_for
from ..support.rigs import run
from ..support.simulated import SimulatedDevice, use_simulated_device


class Attention(nn.Module):
    """Registers its layers in another order than it calls them in, as diffusers' blocks do."""

    num_layers = 6

    def __init__(self) -> None:
        super().__init__()
        self.out, self.ff, self.v, self.k, self.q = (nn.Linear(DIM, DIM) for _ in range(5))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.out(self.ff(x + self.q(x) * self.k(x) + self.v(x)))


class Single(nn.Module):
    num_layers = 3

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.middle = (nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


class ModelOfLists(nn.Module):
    """Lists of blocks of several kinds, between two layers."""

    def __init__(self, kinds: list[type[Any]], num_blocks: int) -> None:
        super().__init__()
        self.proj_out = nn.Linear(DIM, DIM)
        self.lists = nn.ModuleList(nn.ModuleList(kind() for _ in range(num_blocks)) for kind in kinds)
        self.proj_in = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.proj_in(x)
        for blocks in self.lists:
            for block in blocks:
                x = block(x)
        return self.proj_out(x)


def counts(model: nn.Module, options: dict[str, Any], num_passes: int = 3) -> tuple[int, list[tuple[int, int]]]:
    """The number of groups, and the stalls and onloads of each pass."""
    device = SimulatedDevice(0, "lazy")
    resident = copy.deepcopy(model)
    with use_simulated_device(device), options_for(options) as options:
        handle = offload(model, offload_type="leaf_level", **options)
        found = []
        for _ in range(num_passes):
            before = handle.stats()
            x = torch.randn(2, DIM)
            output = forward(device, model, x)
            after = handle.stats()
            found.append((after.stalls - before.stalls, after.onloads - before.onloads))
            assert torch.equal(device.get(output), run(resident, x))
        num_groups = len(handle.groups)
        handle.remove()
    return num_groups, found


@pytest.mark.parametrize("options", [{}, {"record_stream": True}, {"in_files": True}], ids=str)
@pytest.mark.parametrize("kinds", [[Attention], [Attention, Single]], ids=["one kind", "two kinds"])
def test_the_first_pass_learns_from_its_own_blocks(kinds: list[type[Any]], options: dict[str, Any]) -> None:
    """Stalls grow with the kinds of blocks, not with the number of blocks, and little is brought in vain."""
    few, many = counts(ModelOfLists(kinds, 6), options), counts(ModelOfLists(kinds, 9), options)
    num_layers = sum(kind.num_layers for kind in kinds)
    for num_groups, passes in (few, many):
        stalls, onloads = passes[0]
        assert 0 < stalls <= num_layers + 2  # once for each layer of a kind, and what is around the blocks
        # What was foreseen wrongly is a window full of layers, for each of those stalls at most.
        assert num_groups <= onloads <= num_groups + 5 * stalls
        assert passes[1][0] == passes[2][0] == 0
        assert passes[2][1] == num_groups
    assert few[1][0][0] == many[1][0][0]
    assert few[1][0][1] - few[0] == many[1][0][1] - many[0]


class Routed(nn.Module):
    """Calls its blocks in an order that is given, twice as long or half as long from pass to pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(6))

    def forward(self, x: torch.Tensor, route: list[int]) -> torch.Tensor:
        for index in route:
            x = self.blocks[index](x)
        return x


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with use_simulated_device(SimulatedDevice(0, "lazy")) as device:
        yield device


@pytest.mark.parametrize("options", [{}, {"record_stream": True}, {"offload_type": "leaf_level"}], ids=str)
def test_a_route_that_repeats_is_learnt_and_another_one_is_right(
    options: dict[str, Any], device: SimulatedDevice
) -> None:
    model = Routed()
    resident = copy.deepcopy(model)
    handle = offload(model, **options)
    routes = [[0, 1, 0, 2, 0, 3]] * 3 + [[5, 4, 3, 2, 1, 0]] * 3 + [[2, 2, 2]] * 3 + [[], [0, 5] * 4, [0, 5] * 4]
    stalls = []
    for route in routes:
        before = handle.stats().stalls
        x = torch.randn(2, DIM)
        with torch.no_grad(), device.running():
            output = model(device.put(x), route)
        with torch.no_grad():
            expected = resident(x, route)
        assert torch.equal(device.get(output), expected), route
        stalls.append(handle.stats().stalls - before)
    # In order, or one alone: the third pass foresees all. To and fro costs a ring more, but never more than one each.
    assert stalls[5] == stalls[8] == 0 and stalls[2] <= 3
    assert all(count <= len(route) for count, route in zip(stalls, routes, strict=True))
    handle.remove()


@pytest.mark.parametrize("options", [{}, {"offload_type": "leaf_level"}], ids=str)
def test_a_longer_route_comes_back(options: dict[str, Any], device: SimulatedDevice) -> None:
    """As with caches, which skip blocks in some steps: a whole step after cached ones waits once, not for each block."""
    model = Routed()
    handle = offload(model, **options)
    stalls = []
    for last in (6, 6, 1, 1, 6, 1, 1, 1, 6, 6, 1, 6):
        before = handle.stats().stalls
        with torch.no_grad(), device.running():
            model(device.put(torch.randn(2, DIM)), list(range(last)))
        stalls.append(handle.stats().stalls - before)
    assert max(stalls[3:]) == 1 and stalls[-2:] == [0, 1], stalls
    handle.remove()
