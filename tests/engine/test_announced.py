"""Calls of a step that are announced: what is foreseen of them, and what is kept for how long."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from group_offload import apply_group_offloading
from group_offload.runtime.convoy.arguments import are_equal
from group_offload.runtime.convoy.steps import Branches, announce, announced, begin_step

from ..support.asserts import assert_same
from ..support.models import Model
from ..support.tiny_models import device

WIDTH = 16


class Branch:
    """As those that guiders prepare."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class Guided(nn.Module):
    """A model with a prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Model(3, WIDTH)

    def forward(self, x: torch.Tensor, prompt: torch.Tensor, more: Any = None) -> torch.Tensor:
        result: torch.Tensor = self.blocks(x + prompt.mean(0) + (0 if more is None else more["ids"]))
        return result


@pytest.fixture(autouse=True)
def nothing_announced() -> Iterator[None]:
    begin_step()
    yield
    begin_step()


def draw(seed: int, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device())


def step_of(*branches: Branch) -> Branches:
    for at, branch in enumerate(branches):
        announce(branch, at)
    found = announced()
    assert found is not None
    return found


def test_inputs_are_exchanged_wherever_they_are() -> None:
    a, b, c, d, x = (draw(seed) for seed in range(5))
    first = Branch(prompt=a, texts=[a[0], c], mask=None, layers=None)
    second = Branch(prompt=b, texts=[b[0], d], mask=c, layers=[1])
    step = step_of(first, second)
    kwargs = {"encoder": a, "more": {"texts": tuple(first.texts), "x": x}, "layers": None, "other": None}
    (call,) = step.calls_beside((x, c), kwargs)
    args, named = call
    assert args[0] is x and args[1] is d, "an input of a branch by position"
    assert named["encoder"] is b and named["more"]["x"] is x
    assert named["more"]["texts"] == (second.texts[0], d)
    assert named["layers"] == [1] and named["other"] is None, "plain values by name"
    (call,) = step.calls_beside((), {"prompt": a, "mask": None})
    assert call[1]["mask"] is c


def run(model: nn.Module, latents: torch.Tensor, prompts: list[Any], *, is_cast: bool = False) -> list[Any]:
    branches = [Branch(prompt=prompt) for prompt in prompts]
    begin_step()
    for at, branch in enumerate(branches):
        announce(branch, at)
    with torch.no_grad():
        return [model(x=latents.clone() if is_cast else latents, prompt=branch.prompt) for branch in branches]


class Listed(Guided):
    """One of the inputs is a list, longer in one branch than in the other."""

    def forward(self, x: torch.Tensor, prompt: Any, more: Any = None) -> torch.Tensor:
        return super().forward(x, torch.cat(prompt), more)


def test_from_the_second_step_on() -> None:
    """Inputs may be made anew for each call of a step, as a cast of the latents is."""
    torch.manual_seed(0)
    model, twin = Listed().eval(), Listed().eval()
    twin.load_state_dict(model.state_dict())
    twin.to(device())
    prompts = [[draw(10)], [draw(10), draw(11, rows=3)], [draw(12)]]
    handle = apply_group_offloading(model, device(), share_passes=True)
    for at in range(4):
        mine, wanted = run(model, draw(at), prompts, is_cast=True), run(twin, draw(at), prompts)
        assert_same(mine, wanted)
        assert handle.stats().passes_predicted == 2 * at
    assert not handle.stats().passes_discarded


def test_nothing_is_kept_once_the_branches_are_gone() -> None:
    model = Guided().eval()
    handle = apply_group_offloading(model, device(), share_passes=True)
    prompts = [draw(10), draw(11)]
    for seed in range(3):
        run(model, draw(seed), prompts, is_cast=True)
    assert handle.stats().passes_predicted == 2
    branches = [Branch(prompt=prompt) for prompt in prompts]
    for at, branch in enumerate(branches):
        announce(branch, at)
    latents = draw(5)
    with torch.no_grad():
        output = model(x=latents, prompt=prompts[0])
    seen = weakref.ref(latents)
    assert handle.stats().passes_predicted == 3
    del latents, output
    assert seen() is not None, "kept for the call that is to come"
    branches.clear()
    del branch
    gc.collect()
    assert seen() is None
    with torch.no_grad():
        model(x=draw(6), prompt=prompts[1])
    assert handle.stats().passes_discarded == 1


def test_a_call_that_belongs_to_no_step_begins_its_own() -> None:
    model = Guided().eval()
    handle = apply_group_offloading(model, device(), share_passes=True)
    prompts = [draw(10), draw(11)]
    for seed in range(2):
        run(model, draw(seed), prompts)
    assert announced() is None
    for seed in range(2, 6):
        latents = draw(seed)
        with torch.no_grad():
            for prompt in prompts:
                model(x=latents, prompt=prompt)
    assert handle.stats().passes_predicted >= 3 and not handle.stats().passes_discarded


def test_a_time_that_is_one_element_expanded() -> None:
    """It counts as contiguous, and has no view as bytes."""
    time = torch.tensor(0.5).expand(1)
    assert are_equal([time], [torch.tensor([0.5])])
    assert not are_equal([time], [torch.tensor([0.25])])
