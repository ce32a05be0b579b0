"""Tensors that a forward changes itself keep what it gave them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from ...support.asserts import assert_at_rest, assert_same
from ...support.changing import CHANGING, Around, Counting
from ...support.models import WIDTH, Blocks, Stop, inputs
from ...support.rigs import Offload, check, pair, run


@pytest.mark.parametrize("kind", CHANGING)
def test_forward_changes_its_own_tensors(kind: str, offload_either: Offload) -> None:
    """Buffers would be reset in each pass with streams, and lost with files."""
    torch.manual_seed(0)
    model = Around(CHANGING[kind])
    reference = copy.deepcopy(model)
    x = inputs(0, 4, 3, WIDTH)
    handle = offload_either(model)
    check(model, reference, x, passes=4)
    handle.remove()
    assert_at_rest(model, reference)
    assert_same(run(model, x), run(reference, x))


def test_statistics_are_those_of_training_only(offload_either: Offload) -> None:
    torch.manual_seed(0)
    model, reference = pair(Around(CHANGING["BatchNorm"]))
    handle = offload_either(model)
    for is_training in (True, False, True):
        before = handle.stats().tensors_copied_back
        check(model.train(is_training), reference.train(is_training), inputs(0, 4, 3, WIDTH))
        assert is_training or handle.stats().tensors_copied_back == before


def test_counter_costs_no_rebuild(offload_either: Offload) -> None:
    """But for one, in which it leaves its file for RAM."""
    model, reference = pair(Around(Counting))
    handle = offload_either(model)
    was_in_files = handle.stats().file_bytes > 0
    check(model, reference, inputs(0, 4, 3, WIDTH), passes=6)
    assert handle.stats().rebuilds == was_in_files


class Edited(nn.Module):
    """Edits its weights in a call as `edit` says, which counts the calls of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.edit: Callable[[Edited, int], None] | None = None
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.edit is not None:
            with torch.no_grad():
                self.edit(self, self.num_calls)
        self.num_calls += 1
        return torch.tanh(x @ self.w.float() + torch.copysign(x, self.v[0]))


class Twice(Blocks):
    """Calls each of its blocks twice in a pass."""

    def __init__(self) -> None:
        super().__init__(*(Edited() for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


def to_another_form_and_back(module: Edited, call: int) -> None:
    """Before the first of two calls, and before the second one."""
    module.w.data = (module.w.data * 2).to(torch.float32 if call % 2 else torch.float64)


def to_the_other_zero(module: Edited, call: int) -> None:
    module.v.data = torch.zeros_like(module.v) if call % 2 else -torch.zeros_like(module.v)


def in_place_and_then_by_a_copy(module: Edited, call: int) -> None:
    """The copy has the bits that its place in the slot has by then."""
    module.w.add_(1)
    module.w.data = module.w.data.clone()


def in_the_place_of_another_one(module: Edited, call: int) -> None:
    """What `v` has is edited through `w`, which gets memory of its own again."""
    kept, module.w.data = module.w.data.clone(), module.v.data
    module.w.add_(1)
    module.w.data = kept


EDITS = (
    to_another_form_and_back,
    to_the_other_zero,
    in_place_and_then_by_a_copy,
    in_the_place_of_another_one,
)


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_edits_that_leave_few_traces(edit: Callable[[Edited, int], None], offload: Offload) -> None:
    """In one pass, and not in the passes before and after it."""
    torch.manual_seed(0)
    model, reference = pair(Twice().eval())
    handle = offload(model)
    x = inputs(0, 4, WIDTH)
    for each in (None, edit, None):
        for block in (*model.blocks, *reference.blocks):
            block.edit = each
        check(model, reference, x, passes=1)
    blocks: Any = model.blocks
    assert all(block.w.data_ptr() != block.v.data_ptr() for block in blocks)
    handle.remove()
    assert_at_rest(model, reference)


def to_double(module: Edited, call: int) -> None:
    module.w.data = module.w.data.double()


def to_double_and_stop(module: Edited, call: int) -> None:
    to_double(module, call)
    raise Stop


@pytest.mark.parametrize("edit", [to_double, to_double_and_stop], ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("puts_back", [False, True])
def test_a_cast_that_is_undone_after_the_pass(
    puts_back: bool, edit: Callable[[Edited, int], None], offload: Offload
) -> None:
    """A forward casts a weight, and its caller casts it back, or puts back what was there, as pipelines do around a decoder:
    the next forward computes with that value, and not with what the last one left."""
    torch.manual_seed(0)
    model, reference = pair(Twice().eval())
    handle = offload(model)
    x = inputs(0, 4, WIDTH)
    check(model, reference, x, passes=1)
    for _ in range(2):
        blocks = [*model.blocks, *reference.blocks]
        before = [block.w.data if puts_back else None for block in blocks]  # what is kept is laid out elsewhere
        for block in blocks:
            block.edit = edit
        for each in (model, reference):
            with suppress(Stop):
                run(each, x)
        for block, value in zip(blocks, before, strict=True):
            block.edit = None
            block.w.data = block.w.data.float() + 1 if value is None else value
        check(model, reference, x, passes=2)
    handle.remove()
    assert_at_rest(model, reference)
