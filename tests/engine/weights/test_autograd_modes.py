"""Inference mode, and gradients through weights that are offloaded."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ...support.asserts import assert_at_rest, assert_same
from ...support.changing import CHANGING, Around
from ...support.edits import edit_in_place, edit_through_data
from ...support.kinds import KINDS
from ...support.models import WIDTH, inputs
from ...support.rigs import Offload, check, pair, run


def test_inference_mode(offload: Offload) -> None:
    model, reference = pair()
    offload(model)
    expected = run(reference, inputs())
    for _ in range(3):
        with torch.inference_mode():
            assert_same(model(inputs()), expected)
        assert not any(tensor.is_inference() for tensor in model.parameters())
        assert_at_rest(model, reference)
        check(model, reference, inputs(), passes=1)
        edit_in_place(model)
        edit_in_place(reference)
        expected = run(reference, inputs())


@pytest.mark.parametrize("is_made_inside", [True, False])
@pytest.mark.parametrize("is_used_inside", [True, False])
def test_made_or_offloaded_in_inference_mode(is_made_inside: bool, is_used_inside: bool, offload: Offload) -> None:
    with torch.inference_mode(is_made_inside):
        model, reference = pair()
    with torch.inference_mode(is_used_inside):
        handle = offload(model)
    assert is_made_inside or not any(tensor.is_inference() for tensor in model.parameters())
    for edit in (edit_in_place if is_made_inside is is_used_inside else edit_through_data, edit_through_data):
        with torch.inference_mode(is_used_inside and is_made_inside):
            check(model, reference, inputs())
            edit(model)
            edit(reference)
            check(model, reference, inputs())
    handle.remove()
    assert_at_rest(model, reference)


@pytest.mark.parametrize("kind", ["BatchNorm", "counter"])
def test_changing_model_made_in_inference_mode(kind: str, offload_either: Offload) -> None:
    torch.manual_seed(0)
    with torch.inference_mode():
        model, reference = pair(Around(CHANGING[kind]))
        offload_either(model)
        check(model, reference, inputs(0, 4, 3, WIDTH))


def gradients_of_input(model: nn.Module, x: torch.Tensor, is_checkpointing: bool) -> torch.Tensor | None:
    """What backward leaves in the input; None if it raises."""
    x = x.clone().requires_grad_()
    output = checkpoint(model, x, use_reentrant=False) if is_checkpointing else model(x)
    try:
        output.square().sum().backward()
    except RuntimeError:
        return None
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("is_checkpointing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_every_kind(kind: str, is_checkpointing: bool, offload: Offload) -> None:
    torch.manual_seed(0)
    model, reference = pair(KINDS[kind]().eval().requires_grad_(False))
    offload(model)
    for _ in range(2):
        x = inputs(0, 2, 3, WIDTH)
        expected = gradients_of_input(reference, x, is_checkpointing)
        assert expected is not None
        assert_same(gradients_of_input(model, x, is_checkpointing), expected)
        assert_at_rest(model, reference)


@pytest.mark.parametrize("kind", CHANGING)
def test_gradients_through_what_changes_itself(kind: str, offload_either: Offload) -> None:
    """Right, or an error if there is one without offloading."""
    torch.manual_seed(0)
    model = Around(CHANGING[kind]).requires_grad_(False)
    reference = copy.deepcopy(model)
    x = inputs(0, 4, 3, WIDTH)
    offload_either(model)
    for _ in range(3):
        expected = gradients_of_input(reference, x, False)
        actual = gradients_of_input(model, x, False)
        if actual is not None:
            assert_same(actual, expected)
        elif kind != "codebook, other parameter":  # the new one requires gradients, and is offloaded
            assert expected is None
        assert_at_rest(model, reference)
