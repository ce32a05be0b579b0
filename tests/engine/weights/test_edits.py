"""Everything that users do to weights between forwards is in the next forward's output, and is kept by `remove`."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ...support.asserts import assert_at_rest, assert_same
from ...support.edits import any_edit, edit_one_element_through_data
from ...support.models import WIDTH, inputs, make
from ...support.rigs import Offload, check, offload_to, pair, run


@any_edit
def test_edit_after_a_forward(edit: Callable[[Any], None], offload_either: Offload) -> None:
    """And before the first one, twice, and right before `remove`."""
    for num_before, num_after in ((0, 1), (2, 3), (1, 0)):
        model, reference = pair()
        handle = offload_either(model)
        check(model, reference, inputs(), passes=num_before)
        for twin in (model, reference):
            edit(twin)
        x = inputs().to(next(reference.parameters()).dtype)
        if num_after:
            assert_at_rest(model, reference)
            check(model, reference, x, passes=num_after)
            assert handle.stats().rebuilds <= 2
            for twin in (model, reference):
                twin.gain.data.mul_(2)
                twin.blocks[0].down.weight.data.mul_(2)
            assert_at_rest(model, reference)
            check(model, reference, x)
        handle.remove()
        assert_at_rest(model, reference)
        assert_same(run(model, x), run(reference, x))


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs /dev/shm")
def test_edit_in_a_folder_of_ram(level: str) -> None:
    """Pages of a tmpfs file are told from edited pages too."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        model, reference = pair()
        offload_to(Path(folder), model, level)
        for _ in range(3):
            for twin in (model, reference):
                edit_one_element_through_data(twin)
                twin.gain.data[0] += 1
            check(model, reference, inputs(), passes=1)


# ---------------------------------------------------------------- weights that share memory go on sharing it


class Tied(nn.Module):
    """Embedding and head share a weight; two blocks share one; within a block two layers do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        pairs = (self.embed, self.head), (self.blocks[0][0], self.blocks[2][0]), (self.blocks[1][0], self.blocks[1][1])
        for one, other in pairs:
            if how == "parameter":
                other.weight = one.weight
            else:
                one.weight.data, other.weight.data = TIES[how](one.weight.data)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TIES: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "storage": lambda weight: (weight, weight),
    "transposed": lambda weight: (weight, weight.t()),
    "overlapping": lambda _: (lambda whole: (whole[:WIDTH], whole[4:]))(torch.randn(WIDTH + 4, WIDTH)),
    "side by side": lambda _: torch.randn(2 * WIDTH, WIDTH).chunk(2),
    "interleaved": lambda _: (lambda whole: (whole[:, ::2], whole[:, 1::2]))(torch.randn(WIDTH, 2 * WIDTH)),
}


@pytest.mark.parametrize("how", ["parameter", *TIES])
def test_tied_weights(how: str, offload: Offload) -> None:
    """In files, at leaf level, the second group would write memory that the first one has emptied already."""
    model, reference = make(Tied, how), make(Tied, how)  # a deepcopy would break the ties
    ids = torch.arange(6).reshape(2, 3)
    handle = offload(model)
    if how == "parameter":  # takes memory once
        own, stats = sum(parameter.nbytes for parameter in model.parameters()), handle.stats()
        assert own <= stats.host_bytes + stats.file_bytes <= own + 256 * (len(list(model.parameters())) + 8)
    check(model, reference, ids)
    copies = copy.deepcopy(model), copy.deepcopy(reference)
    for twin in copies:
        twin.head.weight.data.mul_(2)
    assert_at_rest(*copies)
    for twin in (model, reference):
        twin.load_state_dict(copies[1].state_dict())
    check(model, reference, ids)
    # An edit of one is an edit of the other, as before.
    for twin in (model, reference):
        twin.head.weight.data[5].mul_(2)
        with torch.no_grad():
            twin.blocks[0][0].weight[4:].add_(1)
    check(model, reference, ids)
    for twin in (model, reference):
        twin.head.weight.data = twin.head.weight.data * 2  # a tie that is broken stays broken
        twin.embed.weight.data.add_(1)
    check(model, reference, ids)
    handle.remove()
    assert_at_rest(model, reference)
    for twin in (model, reference):
        twin.head.weight.data[5].mul_(2)
        twin.blocks[1][1].weight.data.add_(1)
    assert_at_rest(model, reference)
    assert_same(run(model, ids), run(reference, ids))
