"""Weights that share memory go on sharing it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ...support.asserts import assert_at_rest, assert_same
from ...support.models import WIDTH, make
from ...support.rigs import Offload, check, pair, run


class Tied(nn.Module):
    """Embedding and head share a weight; two blocks share one; within a block two layers do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self._tie(self.embed, self.head, how)
        self._tie(self.blocks[0][0], self.blocks[2][0], how)
        self._tie(self.blocks[1][0], self.blocks[1][1], how)

    @staticmethod
    def _tie(one: Any, other: Any, how: str) -> None:
        if how == "parameter":
            other.weight = one.weight
        elif how == "storage":
            other.weight.data = one.weight.data
        elif how == "transposed":
            other.weight.data = one.weight.data.t()
        elif how == "overlapping":
            whole = torch.randn(WIDTH + 4, WIDTH)
            one.weight.data, other.weight.data = whole[:WIDTH], whole[4:]
        elif how == "side by side":
            whole = torch.randn(2 * WIDTH, WIDTH)
            one.weight.data, other.weight.data = whole[:WIDTH], whole[WIDTH:]
        elif how == "interleaved":
            whole = torch.randn(WIDTH, 2 * WIDTH)
            one.weight.data, other.weight.data = whole[:, ::2], whole[:, 1::2]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("how", ["parameter", "storage", "transposed", "overlapping", "side by side", "interleaved"])
def test_tied_weights(how: str, offload: Offload) -> None:
    """In files, at leaf level, the second group would write memory that the first one has emptied already."""
    model, reference = make(Tied, how), make(Tied, how)  # a deepcopy would break the ties
    ids = torch.arange(6).reshape(2, 3)
    handle = offload(model)
    check(model, reference, ids)
    # An edit of one is an edit of the other, as before.
    for twin in (model, reference):
        twin.head.weight.data[5].mul_(2)
        with torch.no_grad():
            twin.blocks[0][0].weight[4:].add_(1)
    check(model, reference, ids)
    handle.remove()
    assert_at_rest(model, reference)
    for twin in (model, reference):
        twin.head.weight.data[5].mul_(2)
        twin.blocks[1][1].weight.data.add_(1)
    assert_at_rest(model, reference)
    assert_same(run(model, ids), run(reference, ids))


def test_tied_weights_take_memory_once(offload: Offload) -> None:
    model, _ = pair(Tied, "parameter")
    stats = offload(model).stats()
    resting = stats.host_bytes + stats.file_bytes
    own = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert own <= resting <= own + 256 * (len(list(model.parameters())) + 8)


@pytest.mark.parametrize("how", ["parameter", "storage", "overlapping"])
def test_tied_state_dict_and_deepcopy(how: str, offload_either: Offload) -> None:
    model, reference = make(Tied, how), make(Tied, how)
    offload_either(model)
    twin, expected = copy.deepcopy(model), copy.deepcopy(reference)
    for one in (twin, expected):
        one.head.weight.data.mul_(2)
    assert_at_rest(twin, expected)
    for one in (model, reference):
        one.load_state_dict(expected.state_dict())
    check(model, reference, torch.arange(6))
