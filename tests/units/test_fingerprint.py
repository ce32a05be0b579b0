"""`Fingerprint`: whether modules are what they were when a call began, looked at again in flat loops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from group_offload.base.compiled import refuse_trace
from group_offload.runtime.interleave.fingerprint import Fingerprint, examine


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scale, self.options, self.sizes = float("1"), {"one": 1, "several": [1, 2]}, (2, 2)
        self.processor = SimpleNamespace(gain=1.0)
        self.scales, self.zeros = [1.0], {"scale": 0.0, "tensor": torch.ones(1)}
        self.register_buffer("table", torch.zeros(2))
        self.plain = torch.zeros(2)


class Other(Scaled):
    pass


def _model() -> Any:
    return nn.Sequential(Scaled(), nn.ReLU(), Scaled()).eval()


def _state(model: nn.Module) -> Fingerprint:
    found = examine(model)
    assert isinstance(found, Fingerprint)
    return found


def _put_in_its_place(layer: Any) -> None:
    before = id(layer.scale)
    for _ in range(100):
        layer.scale = 0.0
        layer.scale = 5.0 / (len(layer.sizes) + 1)
        if id(layer.scale) == before:
            break


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an attribute whose value lies where the old one was": lambda model: _put_in_its_place(model[2]),
    "a new attribute": lambda model: setattr(model[1], "extra", None),
    "in a dict": lambda model: model[0].options.update(one=2),
    "in a list": lambda model: model[0].scales.__setitem__(0, 2.0),
    "the sign of zero": lambda model: model[0].zeros.update(scale=-0.0),
    "a tensor in a dict": lambda model: model[0].zeros["tensor"].mul_(2),
    "in an object": lambda model: setattr(model[2].processor, "gain", 2.0),
    "a tensor in place": lambda model: model[2].plain.add_(1),
    "a parameter": lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(2, 2))),
    "a child": lambda model: model.append(nn.ReLU()),
    "a hook": lambda model: model[0].register_forward_hook(refuse_trace),
    "training mode": lambda model: model[1].train(),
    "a class": lambda model: setattr(model[0], "__class__", Other),
    "a processor": lambda model: setattr(model[0], "processor", SimpleNamespace()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    """By a look that is kept from call to call."""
    model = _model()
    before = _state(model)
    assert before.holds()
    CHANGES[change](model)
    assert not before.holds()
    assert _state(model.eval()).holds()


def test_what_forwards_do_is_no_change() -> None:
    """They may make a list of their own anew, with the same things in it (Qwen-Image 2.1)."""
    model = _model()
    model[0].large, model[0].tables = 1000, [torch.zeros(2), (1000, "a")]
    before = _state(model)
    with torch.no_grad():
        model(torch.zeros(1, 2))
    assert before.holds()
    for _ in range(2):  # a forward may make numbers and lists anew
        model[0].large, model[0].tables = int("1000"), [model[0].tables[0], (int("1000"), "a")]
        assert before.holds()
    model[0].tables[0].add_(1)
    assert not before.holds()
    before = _state(model)
    model[0].tables = [torch.zeros(2), (1000, "a")]
    assert not before.holds(), "another tensor"


@pytest.mark.parametrize(
    ("value", "is_partial"),
    [
        (1, False),
        ((1, "a"), False),
        (type("Plain", (), {})(), False),
        (SimpleNamespace(gain=1), True),
        ([], True),
        (partial(max, [1]), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_may_change_out_of_sight(value: Any, is_partial: bool) -> None:
    """A call of a module with such an attribute is not repeated, unless its forwards are known to be functions."""
    model = nn.Sequential(nn.Linear(2, 2)).eval()
    model[0].value = value
    assert _state(model).is_partial is is_partial
