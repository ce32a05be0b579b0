"""Stream order of backward: views of weights that are kept, and what each part of the engine is needed for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import make_dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from group_offload import apply_group_offloading
from group_offload.runtime import backward as backward_module
from group_offload.runtime.slots import slot as slots

from ..support.asserts import same_bits
from ..support.backward import LoraModel, check, make, offloaded
from ..support.models import Blocks
from ..support.rigs import OnloadedOnly
from ..support.training import CHECKPOINTS, DIM, STEPS, TOKENS, Put, assert_same_bits, data, plain, train


class Stashing(torch.autograd.Function):
    """Keeps its weight where no hook sees it, as kernels for quantized weights do."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.kept = weight.t()
        return x @ context.kept

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient @ context.kept.t(), None


class StashingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / 4, requires_grad=False)
        self.lora = nn.Linear(DIM, DIM, bias=False)
        self.lora.weight.data /= 10
        with torch.inference_mode():  # such tensors are bound in another way
            for name in ("table", "other"):
                self.register_buffer(name, torch.randn(DIM))

    def forward(self, x: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Stashing.apply(x, self.weight)
        return (result + self.lora(x)).sin()


def stashing(num_blocks: int = 6) -> LoraModel:
    model = make(1)
    model.blocks = nn.ModuleList(StashingBlock() for _ in range(num_blocks))
    model.embed = nn.Linear(DIM, DIM).requires_grad_(False)
    model.order = list(range(num_blocks))
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    return model


@pytest.mark.parametrize("options", [{}, {"offload_type": "leaf_level"}, {"record_stream": True}], ids=str)
def test_weights_that_are_kept_past_our_hooks_stay_as_they_are(
    options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Gradients are right: what somebody keeps views of is not used again before they go. Hazard: an autograd function
    keeps a weight in its context, past all hooks (quantized kernels)."""
    for step in (plain, STEPS["two_by_two"]):
        check(step, "random", tmp_path, stashing, num_steps=3, **options)
    if not options:
        assert any("are still referenced after their call" in message for message in caplog.messages)


def test_slots_that_somebody_keeps_views_of_go_to_no_other_model(tmp_path: Path) -> None:
    other = stashing().requires_grad_(False)

    def step(model: nn.Module, put: Put) -> torch.Tensor:
        loss = model(data(0, put)).square().mean()
        with torch.no_grad():
            for _ in range(3):
                other(data(1, put))
        loss.backward()
        return loss.detach()

    expected = train(stashing(), step)
    with offloaded(stashing(), "random", tmp_path) as (model, handle, put, get):
        other_handle = apply_group_offloading(other, "cpu")
        assert_same_bits(train(model, step, put), expected, get)
        handle.remove()
        other_handle.remove()


@pytest.mark.parametrize("wrap", [dict, make_dataclass("Output", ["x", "queries"], frozen=True)])
def test_a_block_that_gives_its_weight_away(wrap: Any, tmp_path: Path) -> None:
    """What a call returns is the caller's, also if it is a view of a weight whose slot is used again."""

    class Giving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries = nn.Parameter(torch.randn(TOKENS, DIM))
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: torch.Tensor) -> Any:
            return wrap(x=torch.tanh(self.linear(x)), queries=(self.queries[1:], [self.queries.t()]))

    class Taking(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            given = []
            for block in self.blocks:
                found = block(x)
                x, queries = (found["x"], found["queries"]) if isinstance(found, dict) else (found.x, found.queries)
                given.append(queries)
            return sum((first.sum() + second[0].cos().sum() for first, second in given), x)

    torch.manual_seed(0)
    model = Taking(*(Giving() for _ in range(6))).requires_grad_(False)
    reference = copy.deepcopy(model)

    def slope(model: nn.Module, put: Put) -> torch.Tensor:
        x = data(0, put).requires_grad_()
        return torch.autograd.grad(model(x).square().sum(), x)[0]

    for level, seed in product(("block_level", "leaf_level"), range(3)):
        with offloaded(model, "random", tmp_path, seed, offload_type=level) as (_, _, put, get):
            for _ in range(3):
                with torch.no_grad():
                    assert same_bits(get(model(data(0, put))), reference(data(0, torch.clone)))
                assert same_bits(get(slope(model, put)), slope(reference, torch.clone))


def everything(folder: Path) -> None:
    for options in ({}, {"offload_type": "leaf_level"}):
        check(plain, "random", folder, lambda: make(6), **options)
    check(plain, "random", folder, stashing)
    test_a_block_that_gives_its_weight_away(dict, folder)
    for run_part in (None, CHECKPOINTS[1]):
        test_kernels_read_weights_on_the_device_only(run_part, folder)


@pytest.mark.parametrize("run_part", [None, *CHECKPOINTS])
def test_kernels_read_weights_on_the_device_only(run_part: Any, tmp_path: Path) -> None:
    """Hazard: a checkpoint calls a part of a block again while its weights are offloaded."""
    model = make(run_part=run_part)
    with offloaded(model, "cpu", tmp_path) as (_, _, put, _):
        plain(model, put)  # from now on what is trained is where it stays
        frozen = nn.Module()
        frozen.parts = nn.ParameterList(p for p in model.parameters() if not p.requires_grad)
        with OnloadedOnly(frozen):
            plain(model, put)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "let go at once": lambda patch: patch.setattr(
        backward_module.Backward, "bring", _let_go_after(backward_module.Backward.bring)
    ),
    "saved as they are": lambda patch: [
        patch.setattr(backward_module.Backward, name, lambda *args: None) for name in ("_packed", "_recast")
    ],
    "no gates inside of groups": lambda patch: patch.setattr(
        "group_offload.runtime.gates.Gates._needs_of_inner", lambda self, gates: {}
    ),
    "views that are kept are not noticed": lambda patch: patch.setattr(slots.Slot, "is_aliased", False),
    "what a call returns is not made its own": lambda patch: patch.setattr(
        "group_offload.runtime.gates.Gates.detach_from_slots", lambda self, output, groups: output
    ),
    "not waited for": lambda patch: patch.setattr(backward_module.Backward, "bring", _without_wait),
}


def _let_go_after(bring: Any) -> Any:
    def mutant(self: Any, saved: Any) -> torch.Tensor:
        found: torch.Tensor = bring(self, saved)
        with self._passes.lock:
            for now in self._tasks.values():
                self._release(now, ())
        return found

    return mutant


def _without_wait(self: Any, saved: Any) -> torch.Tensor:
    group = self._passes.group_of(saved.part)
    if group.slot is None:
        return self.copy_of(saved)
    start = group.offset + saved.part.offset + saved.offset
    return backward_module.view_of(group.slot.memory, start, saved.dtype, saved.size, saved.stride)


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_every_part_is_needed(
    mutant: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any of them the tests above fail, on a device where a missing wait is an error. Hazard: autograd's view
    of a slot is refilled before backward: silently wrong gradients."""
    mutant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        everything(tmp_path)
