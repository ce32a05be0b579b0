"""Tensors that a forward changes itself keep what it gave them."""

from __future__ import annotations

import copy

import pytest
import torch

from ...support.asserts import assert_at_rest, assert_same
from ...support.changing import CHANGING, Around, Counting
from ...support.models import WIDTH, inputs
from ...support.rigs import Offload, check, pair, run


@pytest.mark.parametrize("kind", CHANGING)
def test_forward_changes_its_own_tensors(kind: str, offload_either: Offload) -> None:
    torch.manual_seed(0)
    model = Around(CHANGING[kind])
    reference = copy.deepcopy(model)
    x = inputs(0, 4, 3, WIDTH)
    handle = offload_either(model)
    check(model, reference, x, passes=4)
    handle.remove()
    assert_at_rest(model, reference)
    assert_same(run(model, x), run(reference, x))


def test_statistics_are_those_of_training_only(offload: Offload) -> None:
    torch.manual_seed(0)
    model, reference = pair(Around(CHANGING["BatchNorm"]))
    handle = offload(model)
    x = inputs(0, 4, 3, WIDTH)
    check(model, reference, x)
    for twin in (model, reference):
        twin.eval()
    brought_back = handle.stats().tensors_brought_back
    check(model, reference, x)
    assert handle.stats().tensors_brought_back == brought_back
    for twin in (model, reference):
        twin.train()
    check(model, reference, x)


def test_counter_costs_no_rebuild(offload: Offload) -> None:
    model, reference = pair(Around(Counting))
    handle = offload(model)
    check(model, reference, inputs(0, 4, 3, WIDTH))
    assert handle.stats().rebuilds == 0 and handle.stats().tensors_brought_back > 0
