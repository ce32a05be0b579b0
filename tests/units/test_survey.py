"""`Survey`: whether modules are what they were when a call began, looked at again in flat loops."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from group_offload.runtime.convoy.watch import Survey, survey


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scale, self.options, self.sizes = 1.0, {"deep": [1, [2, 3]]}, (2, 2)
        self.register_buffer("table", torch.zeros(2))
        self.plain = torch.zeros(2)


class Other(Scaled):
    pass


def _model() -> Any:
    return nn.Sequential(Scaled(), nn.ReLU(), Scaled()).eval()


def _state(model: nn.Module) -> Survey:
    found = survey(model, lambda hook: True)
    assert isinstance(found, Survey)
    return found


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an attribute": lambda model: setattr(model[2], "scale", 2.0),
    "a new attribute": lambda model: setattr(model[1], "extra", None),
    "deep in a list": lambda model: model[0].options["deep"][1].append(4),
    "a tensor in place": lambda model: model[2].plain.add_(1),
    "a parameter": lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(2, 2))),
    "a buffer": lambda model: setattr(model[0], "table", torch.ones(2)),
    "a child": lambda model: model.append(nn.ReLU()),
    "another child": lambda model: setattr(model, "1", nn.GELU()),
    "a hook": lambda model: model[0].register_forward_hook(lambda *_: None),
    "training mode": lambda model: model[1].train(),
    "a class": lambda model: setattr(model[0], "__class__", Other),
    "all attributes": lambda model: setattr(model[1], "__dict__", dict(model[1].__dict__)),
    "a processor": lambda model: setattr(model[0], "processor", SimpleNamespace()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    model = _model()
    before = _state(model)
    assert before.holds()
    CHANGES[change](model)
    assert not before.holds()
    assert _state(model.eval()).holds()


def test_what_forwards_do_is_no_change() -> None:
    model = _model()
    model[0].large, model[0].tables = 1000, [torch.zeros(2), (1000, "a")]
    before = _state(model)
    with torch.no_grad():
        model(torch.zeros(1, 2))
    assert before.holds()
    model[0].large, model[0].tables = int("1000"), [model[0].tables[0], (int("1000"), "a")]
    assert before.holds()
    model[0].tables[0].add_(1)
    assert not before.holds()


def test_another_tensor_in_a_list_that_is_made_anew() -> None:
    model = _model()
    model[0].tables = [torch.zeros(2)]
    before = _state(model)
    model[0].tables = [torch.zeros(2)]
    assert not before.holds()


def test_a_list_that_is_filled_again_as_it_was() -> None:
    model = _model()
    model[0].options["deep"] = [SimpleNamespace()]
    before = _state(model)
    model[0].options["deep"][:] = [SimpleNamespace()]  # another object, which may have the address of the one before
    assert not before.holds()
