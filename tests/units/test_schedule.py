"""What is foreseen from the passes before."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ..support.models import DIM
from ..support.on_device import offload
from ..support.simulated import SimulatedDevice, use_simulated_device


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
