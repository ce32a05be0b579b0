"""Graphs over offloaded weights: what they hold, what others see of them, hooks around and inside."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from group_offload.runtime import backward as backward_module

from ..support.asserts import same_bits
from ..support.backward import LoraModel, check, make, offloaded
from ..support.inside import engine_of
from ..support.quantised import Quantised
from ..support.training import DIM, Put, data, plain


def test_gradients_inside_of_a_forward(tmp_path: Path) -> None:
    """Guidance: a gradient with regard to the input, computed while the model's own forward is in progress."""

    class Guided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make()
            self.last = nn.Linear(DIM, DIM).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.inner(x).square().mean(), [x])
            return self.last(x + gradient)

    torch.manual_seed(0)
    model = Guided()
    reference = copy.deepcopy(model)
    with offloaded(model, "random", tmp_path) as (_, _, put, get):
        for _ in range(3):
            torch.manual_seed(5)
            expected = reference(data(0, torch.clone))
            torch.manual_seed(5)
            assert same_bits(get(model(data(0, put))).detach(), expected.detach())


def count_saved() -> int:
    return sum(type(each) is backward_module.SavedWeight for each in gc.get_objects())


def test_graphs_that_are_dropped_hold_nothing(tmp_path: Path) -> None:
    model = make()
    with offloaded(model, "cpu", tmp_path) as (_, handle, put, _):
        plain(model, put)
        engine = weakref.ref(engine_of(handle))
        gc.collect()
        gc.disable()
        try:
            before = count_saved()
            loss = model(data(0, put)).square().mean()
            assert count_saved() > before
            del loss
            assert count_saved() == before
        finally:
            gc.enable()
        handle.remove()
        del handle
    gc.collect()
    assert engine() is None


def test_hooks_of_others_around_and_inside(tmp_path: Path) -> None:
    """`save_on_cpu` around the model gets what is no weight; inside of a block it gets all, which is right as well."""
    for where in ("around", "inside"):

        def run_block(block: nn.Module, *args: torch.Tensor, where: str = where) -> torch.Tensor:
            with torch.autograd.graph.save_on_cpu() if where == "inside" else nullcontext():
                result: torch.Tensor = block(*args)
            return result

        def step(model: nn.Module, put: Put, where: str = where) -> torch.Tensor:
            with torch.autograd.graph.save_on_cpu() if where == "around" else nullcontext():
                loss = model(data(0, put)).square().mean()
            loss.backward()
            return loss.detach()

        check(step, "cpu", tmp_path, lambda run_block=run_block: make(run_block=run_block))


class Product(torch.autograd.Function):
    """Saves the quantised weight itself, and restores it in backward, as the layers of such libraries do."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        context.save_for_backward(weight)
        return x @ weight.dequantised()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        (weight,) = context.saved_tensors
        return gradient @ weight.dequantised().t(), None


class QuantisedProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(Quantised.of(torch.randn(DIM, DIM)), requires_grad=False)

    def forward(self, x: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Product.apply(x, self.weight)
        return result.sin()


def test_weights_that_are_tensor_subclasses(tmp_path: Path) -> None:
    def quantised() -> LoraModel:
        model = make(1)
        model.blocks = nn.ModuleList(QuantisedProduct() for _ in range(5))
        model.order = list(range(5))
        torch.manual_seed(0)
        return model

    for device in ("cpu", "random"):
        for level in ("block_level", "leaf_level"):
            stats = check(plain, device, tmp_path, quantised, offload_type=level)
            assert stats.backward_passes == 2
