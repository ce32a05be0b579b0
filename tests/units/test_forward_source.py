"""Which children's weights a forward reads, as its source tells."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from group_offload.base.forward_source import children_read, methods_of, parts_used

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


class OfLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.named = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.named(x)


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child, self.other = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.inner = nn.Sequential(nn.Linear(4, 4))
        self.inner.named = nn.Linear(4, 4)
        self.inner.missing = nn.Linear(4, 4, bias=False)
        self.scale = nn.Parameter(torch.ones(4))
        self.method, self.processor, self.function = Method(), Processor(), project

    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.child.weight)


class Reads(Parent):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.child.weight)


class ReadsInBase(Reads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


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


def reads_none(self: Any, x: torch.Tensor) -> Any:
    """The child has a place for this weight, and no weight."""
    return F.linear(x, torch.eye(4), self.inner.missing.bias)


def only_calls(self: Any, x: torch.Tensor) -> Any:
    return self.inner.named(self.child(x)) * self.scale


def only_looks(self: Any, x: torch.Tensor) -> Any:
    if isinstance(self.child.weight, nn.Parameter) and self.child.bias is not None and hasattr(self.child.weight, "a"):
        x = x.to(self.child.weight.dtype).to(self.child.weight.device)
    return x[: self.child.weight.size(0)]


def writes(self: Any, x: torch.Tensor) -> Any:
    self.child.weight = nn.Parameter(x)
    return x


FORWARDS: dict[Forward, list[str]] = {
    calls_unbound: ["child"],
    gives_itself: ["child", "inner.0"],
    gives_itself_to_its_function: ["child"],
    reads_in_a_loop: ["inner.0", "inner.named", "inner.missing"],
    reads_in_a_lambda: ["child"],
    reads_below: ["inner.named"],
    calls_itself: ["child"],
    reads_none: [],
    only_calls: [],
    only_looks: [],
    writes: [],
}
CLASSES = {Reads: ["child"], ReadsInBase: ["child"], Parent: []}
CLASSES |= {type(forward.__name__, (Parent,), {"forward": forward}): names for forward, names in FORWARDS.items()}


@pytest.mark.parametrize(("cls", "names"), CLASSES.items())
def test_children(cls: type[Parent], names: list[str]) -> None:
    """No hook runs where a class reads weights of its children (`VQModel`, `HunyuanDiT2DModel`, Mamba), or a processor those
    of the attention that it is given (`AutoencoderKLMiniMaxH3Audio`).
    """
    module = cls()
    assert {*children_read(module)} == {module.get_submodule(name) for name in names}


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"norm": Method(), "attn": nn.Linear(4, 4)}) for _ in range(3))
        self.last = nn.Sequential(Method(), nn.Linear(4, 4))


def calls_one(self: Any, x: torch.Tensor) -> Any:
    return self.blocks[0].norm.inner(x)


def calls_the_last(self: Any, x: torch.Tensor) -> Any:
    block = self.blocks[-1]
    return block.attn(x)


def calls_all(self: Any, x: torch.Tensor) -> Any:
    for _, block in enumerate(self.blocks):
        x = block.attn(x)
    return x


def calls_in_zip(self: Any, x: torch.Tensor) -> Any:
    for i, layer in zip(range(2), self.last, strict=True):
        x = layer(x) + i
    return x


@pytest.mark.parametrize(
    ("forward", "names"),
    [
        (calls_one, ["blocks.0.norm.inner"]),
        (calls_the_last, ["blocks.2.attn"]),
        (calls_all, ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]),
        (calls_in_zip, ["last.0", "last.1"]),
    ],
)
def test_parts_that_are_called_from_outside(forward: Forward, names: list[str]) -> None:
    """As `DiTTransformer2DModel` calls parts of its blocks."""
    module = type("Caller", (Deep,), {"forward": forward})()
    assert {*parts_used(module).called} == {module.get_submodule(name) for name in names}


def test_a_scripted_child() -> None:
    module = next(cls for cls in CLASSES if cls.__name__ == "reads_below")()
    module.inner = torch.jit.script(nn.Sequential(nn.Linear(4, 4)))
    assert not [*children_read(module)]  # it has no module `named`
    module.inner = torch.jit.script(OfLinear())
    assert [*children_read(module)] == [module.inner.named]


def test_a_forward_without_source() -> None:
    names: dict[str, Any] = {"Parent": Parent}
    exec("class Sourceless(Parent):\n    def forward(self, x):\n        return x @ self.child.weight", names)
    assert not [*children_read(names["Sourceless"]())]
    names["Sourceless"].forward = len
    assert not [*children_read(names["Sourceless"]())]


class Computes(Parent):
    """Methods of all sorts."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = Reads()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self._inside(x) + self.other.running_mean

    def _inside(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    @decorated
    def decode(self, **given: Any) -> torch.Tensor:
        return self.reader.helper(given["x"])

    def looks(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.scale.dtype)

    def later(self, x: torch.Tensor) -> Any:
        yield x * self.scale

    def nothing(self) -> torch.Tensor:
        return self.scale * 2

    @staticmethod
    def static(x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_methods() -> None:
    module = Computes()
    assert {*methods_of(module)} == {"encode", "decode", "looks", "helper"}
    assert [*parts_used(module, "encode").read] == [module, module.other]
    assert [*parts_used(module, "decode").read] == [module.reader.child]
    assert not parts_used(module, "looks").read and not parts_used(module).read
    assert not parts_used(module, "decode", {module, module.reader}).read, "the reader's method is looked at by itself"
    assert [*parts_used(module, "encode", {module, module.reader}).read] == [module, module.other]
    assert [*children_read(module, "encode")] == [module.other] and not [*children_read(module)]


def test_a_method_of_an_instance() -> None:
    def decode(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x * self.child.weight

    module = Computes()
    module.decode = MethodType(decode, module)
    assert {*parts_used(module, "decode").read} == {module.child, module.reader.child}
