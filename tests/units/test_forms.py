"""Sizes, strides and dtypes of tensors, compared with guards of torch's compiler."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from group_offload.runtime.groups.forms import Forms


def _tensors() -> list[torch.Tensor]:
    return [
        nn.Parameter(torch.randn(6, 6)),
        torch.empty(0, 3),
        torch.randn(3, 4, dtype=torch.bfloat16),
        torch.tensor(1),
    ]


def test_torch_has_guards_that_take_what_is_asked() -> None:
    """If not, all works, slower. Then this tells."""
    seen = Forms(_tensors())
    assert seen.are_of(_tensors())
    assert seen._guards is not None


@pytest.mark.parametrize(
    ("index", "change"),
    [
        (0, lambda tensor: tensor.t()),
        (0, lambda tensor: tensor[:3]),
        (0, lambda tensor: tensor[:, :3]),
        (0, lambda tensor: tensor.view(4, 9)),
        (0, lambda tensor: tensor.view(6, 6, 1)),
        (0, lambda tensor: tensor.double()),
        (1, lambda tensor: tensor.view(3, 0)),
        (2, lambda tensor: tensor.view(torch.float16)),
        (3, lambda tensor: tensor[None]),
        (3, lambda tensor: tensor.int()),
    ],
    ids=["transposed", "rows", "columns", "reshaped", "more sizes", "cast", "empty", "other bits", "not scalar", "int"],
)
def test_any_other_form_is_seen(index: int, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = _tensors()
    seen = Forms(tensors)
    for _ in range(2):
        assert seen.are_of(tensors)
        before = tensors[index].data
        tensors[index].data = change(before)
        assert not seen.are_of(tensors)
        assert not seen.are_of(tensors)
        tensors[index].data = before


def test_what_is_no_form_does_not_matter() -> None:
    tensors = _tensors()
    seen = Forms(tensors)
    tensors[0].data = torch.zeros(6, 6)
    assert seen.are_of(tensors)
    for _ in range(2):
        tensors[0].requires_grad_(not tensors[0].requires_grad)
        assert seen.are_of(tensors)
        with torch.inference_mode():
            assert seen.are_of(tensors)
        with torch.no_grad():
            assert seen.are_of(tensors)
    assert Forms([]).are_of([])
