"""Which children's weights a forward reads, as its source tells."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from group_offload.base.forward_source import parts_used

Forward = Callable[..., Any]


def decorated(forward: Forward) -> Forward:
    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return call


def project(x: torch.Tensor, parent: nn.Module) -> torch.Tensor:
    return F.linear(x, parent.child.weight)


class Processor:
    def __call__(self, attn: Any, x: torch.Tensor) -> torch.Tensor:
        return project(x, parent=attn) + attn.inner[0].bias


class Method(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.inner = nn.Linear(4, 4)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child, self.other = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.inner = nn.Sequential(nn.Linear(4, 4))
        self.inner.named = nn.Linear(4, 4)
        self.inner.missing = nn.Linear(4, 4, bias=False)
        self.scale = nn.Parameter(torch.ones(4))
        self.positions = Positions(4, 4)
        self.method, self.processor, self.function = Method(), Processor(), project

    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.child.weight)


class Reads(Parent):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.child.weight)


class ReadsInBase(Reads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


class Positions(nn.Embedding):
    def look_up(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


# Forwards of `Parent`.


def calls_unbound(self: Any, x: torch.Tensor) -> Any:
    return nn.Linear.forward(self.child, x)


def gives_itself(self: Any, x: torch.Tensor) -> Any:
    return self.processor(self, x)


def gives_itself_to_its_function(self: Any, x: torch.Tensor) -> Any:
    return self.function(x, self)


def reads_in_a_loop(self: Any, x: torch.Tensor) -> Any:
    for layer in self.inner:
        weight = layer.weight
        x = x @ weight
    return x


def reads_in_a_lambda(self: Any, x: torch.Tensor) -> Any:
    return (lambda y: y + [self.child.bias.float()][0])(x)


@decorated
def reads_below(self: Any, x: torch.Tensor) -> Any:
    return x @ self.inner.named.weight.T


def calls_itself(self: Any, x: torch.Tensor) -> Any:
    return self.forward(self.helper(x))


def calls_a_method_that_calls_a_base(self: Any, x: torch.Tensor) -> Any:
    return self.positions.look_up(x)


def reads_none(self: Any, x: torch.Tensor) -> Any:
    """The child has a place for this weight, and no weight."""
    return F.linear(x, torch.eye(4), self.inner.missing.bias)


def only_calls(self: Any, x: torch.Tensor) -> Any:
    return self.inner.named(self.child(x)) * self.scale


FORWARDS: dict[Forward, list[str]] = {
    calls_unbound: ["child"],
    gives_itself: ["child", "inner.0"],
    gives_itself_to_its_function: ["child"],
    reads_in_a_loop: ["inner.0", "inner.named", "inner.missing"],
    reads_in_a_lambda: ["child"],
    reads_below: ["inner.named"],
    calls_itself: ["child"],
    calls_a_method_that_calls_a_base: ["positions"],
    reads_none: [],
    only_calls: [],
}
CLASSES = {Reads: ["child"], ReadsInBase: ["child"], Parent: []}
CLASSES |= {type(forward.__name__, (Parent,), {"forward": forward}): names for forward, names in FORWARDS.items()}


def children_read(module: nn.Module) -> set[nn.Module]:
    return parts_used(module).read.keys() - {module}


@pytest.mark.parametrize(("cls", "names"), CLASSES.items())
def test_children(cls: type[Parent], names: list[str]) -> None:
    """No hook runs where a class reads weights of its children (`VQModel`, `HunyuanDiT2DModel`, Mamba), or a processor those
    of the attention that it is given (`AutoencoderKLMiniMaxH3Audio`), or a method calls the forward of a base class
    (`ProphetNetPositionalEmbeddings`).
    """
    module = cls()
    assert children_read(module) == {module.get_submodule(name) for name in names}


def test_a_forward_without_source() -> None:
    names: dict[str, Any] = {"Parent": Parent}
    exec("class Sourceless(Parent):\n    def forward(self, x):\n        return x @ self.child.weight", names)
    assert not children_read(names["Sourceless"]())
    names["Sourceless"].forward = len
    assert not children_read(names["Sourceless"]())
