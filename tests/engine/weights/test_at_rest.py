"""Between forwards, weights are on the CPU, true, and in memory of their own."""

from __future__ import annotations

import gc
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ...support.asserts import assert_at_rest, assert_own_memory, assert_same, named_tensors, same_bits
from ...support.models import WIDTH, Blocks, inputs
from ...support.rigs import Offload, offload_to, pair, run, run_onloaded


def test_weights_at_rest_are_true_and_have_memory_of_their_own(offload: Offload) -> None:
    model, reference = pair()
    before = {name: id(tensor) for name, tensor in named_tensors(model)}
    handle = offload(model)
    for _ in range(2):
        assert_at_rest(model, reference)
        assert_own_memory(model)
        assert all(tensor.is_leaf and tensor.requires_grad for tensor in model.parameters())
        run(model, inputs())
        assert {name: id(tensor) for name, tensor in named_tensors(model)} == before
    handle.remove()
    assert {name: id(tensor) for name, tensor in named_tensors(model)} == before


def test_state_dict(offload: Offload) -> None:
    """As it is, and saved: no uninitialised memory, and no larger than that of the resident model."""
    model, reference = pair()
    offload(model)
    run(model, inputs())
    state, expected = model.state_dict(), reference.state_dict()
    file, plain = io.BytesIO(), io.BytesIO()
    torch.save(state, file)
    torch.save(expected, plain)
    assert len(file.getvalue()) < 1.5 * len(plain.getvalue())
    file.seek(0)
    for found in (state, torch.load(file)):
        assert list(found) == list(expected)
        assert all(same_bits(found[name], expected[name]) for name in expected)


def test_state_dict_taken_before_stays_true_and_apart(offload: Offload) -> None:
    """What was taken at rest reads the weights as long as it is held, also after `remove`."""
    model, reference = pair()
    handle = offload(model)
    state = model.state_dict()
    run(model, inputs())
    handle.remove()
    del model, handle
    gc.collect()
    for name, expected in reference.state_dict().items():
        assert same_bits(state[name], expected)


def test_a_default_device(folder: Path | None) -> None:
    """`torch.set_default_device("cuda")`, as user interfaces have it: what the engine makes for itself is not made there."""
    model, reference = pair(nn.Linear, 10, 10)  # with room around its tensors
    for _ in range(2):
        with torch.device("meta"):
            handle = offload_to(folder, model)
        for _ in range(2):
            with torch.device("meta"):
                output = model(torch.ones(1, 10, device="cpu"))
            assert_same(output, reference(torch.ones(1, 10)))
        with torch.device("meta"), torch.no_grad():
            for twin in (model, reference):
                twin.weight.mul_(0.5)
        with torch.device("meta"):
            output = model(torch.ones(1, 10, device="cpu"))
            assert_same(output, reference(torch.ones(1, 10, device="cpu")))
            handle.remove()


def test_views_of_weights_that_are_kept_stay_right(offload_either: Offload, caplog: pytest.LogCaptureFixture) -> None:
    """By a block, or a hook, beyond the call in which they were made, without gradients."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x))

    class Collects(Blocks):
        def __init__(self) -> None:
            super().__init__(*(Keeps() for _ in range(6)))
            for block in self.blocks:
                block.linear.register_forward_hook(self.collect)

        def collect(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
            self.rows.append(module.weight.detach()[0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.rows: list[torch.Tensor] = []
            return super().forward(x) + torch.stack(self.rows).sum(0)

    torch.manual_seed(0)
    model = Collects()
    torch.manual_seed(0)
    reference = Collects()
    handle = offload_either(model)
    for _ in range(3):
        assert_same(run_onloaded(model, inputs()), run(reference, inputs()))
        assert all(torch.equal(*rows) for rows in zip(model.rows, reference.rows, strict=True))
    assert caplog.text.count("are still referenced") == int(handle.groups[0].tier == "file")
    model.rows.clear()
    handle.remove()
