"""Weights that are tensor subclasses, as quantisation libraries make them."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import return_and_correct_aliasing

from ...support.asserts import assert_at_rest, assert_own_memory, assert_same, plain_tensors, same_bits
from ...support.kinds import wrapped
from ...support.models import WIDTH, Model, inputs, make
from ...support.rigs import Offload, check, pair, run


class Quantised(torch.Tensor):
    """An int8 weight with a scale for each row, as quantisation libraries wrap them."""

    qdata: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls: type, qdata: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, qdata.shape, strides=qdata.stride(), dtype=scale.dtype, device=qdata.device, requires_grad=False
        )

    def __init__(self, qdata: torch.Tensor, scale: torch.Tensor) -> None:
        self.qdata, self.scale = qdata, scale

    @classmethod
    def of(cls, weight: torch.Tensor) -> Quantised:
        scale = weight.detach().abs().amax(1, keepdim=True) / 127
        return cls((weight.detach() / scale).round().to(torch.int8), scale)

    def dequantised(self) -> torch.Tensor:
        return self.qdata.to(self.scale.dtype) * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["qdata", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> Quantised:
        return cls(inner["qdata"], inner["scale"])

    def __repr__(self, **_: Any) -> str:
        return f"Quantised({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten, kwargs = torch.ops.aten, kwargs or {}
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            return return_and_correct_aliasing(
                func, args, kwargs, cls(func(args[0].qdata, **kwargs), func(args[0].scale, **kwargs))
            )
        if func is aten._to_copy.default:
            dtype, device = kwargs.get("dtype") or args[0].dtype, kwargs.get("device")
            return cls(args[0].qdata.to(device, copy=True), args[0].scale.to(device, dtype, copy=True))
        if func is aten.copy_.default and isinstance(args[1], cls):
            args[0].qdata.copy_(args[1].qdata)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        if func is aten.mul_.Tensor:
            args[0].scale.mul_(args[1])
            return args[0]
        plain = torch.utils._pytree.tree_map_only(cls, cls.dequantised, (args, kwargs))
        return func(*plain[0], **plain[1])


class QuantisedModel(Model):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                layer.weight = nn.Parameter(Quantised.of(layer.weight), requires_grad=False)


def test_tensor_subclass(offload: Offload) -> None:
    model, reference = pair(QuantisedModel)
    handle = offload(model)
    check(model, reference, inputs())
    assert isinstance(model.blocks[0].up.weight, nn.Parameter)
    assert type(model.blocks[0].up.weight.data) is Quantised
    assert handle.stats().rebuilds == 0
    assert_own_memory(model)
    handle.remove()
    assert_at_rest(model, reference)
    assert_same(run(model, inputs()), run(reference, inputs()))


def test_tensor_subclass_as_buffer(offload: Offload) -> None:
    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", Quantised.of(torch.randn(WIDTH, WIDTH)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.weight)

    model, reference = pair(wrapped(Buffered(), Buffered()).eval())
    handle = offload(model)
    check(model, reference, inputs())
    handle.remove()
    assert_at_rest(model, reference)


def _quantised_edit_scale(weight: Any) -> None:
    weight.scale.mul_(2)


def _quantised_edit_through_wrapper(weight: Any) -> None:
    with torch.no_grad():
        weight.mul_(2)


def _quantised_edit_qdata(weight: Any) -> None:
    weight.qdata.data[0, 0] = 5


def _quantised_replace_scale(weight: Any) -> None:
    weight.scale = weight.scale * 2


def _quantised_replace_inner_data(weight: Any) -> None:
    weight.scale.data = weight.scale.data * 2


QUANTISED_EDITS = [
    _quantised_edit_scale,
    _quantised_edit_through_wrapper,
    _quantised_edit_qdata,
    _quantised_replace_scale,
    _quantised_replace_inner_data,
]
# In a forward, an edit of a parameter through `.data` leaves no trace: docs/troubleshooting.md names this limit.
QUANTISED_EDITS_IN_FORWARD = [edit for edit in QUANTISED_EDITS if edit is not _quantised_edit_qdata]


@pytest.mark.parametrize("edit", QUANTISED_EDITS, ids=lambda edit: edit.__name__.removeprefix("_quantised_"))
def test_edit_of_a_tensor_subclass(edit: Callable[[Any], None], offload_either: Offload) -> None:
    model, reference = pair(QuantisedModel)
    handle = offload_either(model)
    run(model, inputs())
    for twin in (model, reference):
        edit(twin.blocks[1].up.weight)
    check(model, reference, inputs())
    handle.remove()
    assert_at_rest(model, reference)
    assert_same(run(model, inputs()), run(reference, inputs()))


@pytest.mark.parametrize("edit", QUANTISED_EDITS_IN_FORWARD, ids=lambda edit: edit.__name__.removeprefix("_quantised_"))
def test_edit_of_a_tensor_subclass_in_forward(edit: Callable[[Any], None], offload_either: Offload) -> None:
    model, reference = pair(QuantisedModel)
    offload_either(model)
    for twin in (model, reference):
        twin.blocks[1].up.register_forward_hook(lambda module, args, output: edit(module.weight))
    check(model, reference, inputs())


def test_tensor_subclass_is_tied(offload: Offload) -> None:
    model, reference = pair(QuantisedModel)
    for twin in (model, reference):
        twin.blocks[2].up.weight = twin.blocks[0].up.weight
    offload(model)
    check(model, reference, inputs())


def test_tensor_subclass_is_replaced_cast_and_loaded(offload: Offload) -> None:
    model, reference = pair(QuantisedModel)
    offload(model)
    run(model, inputs())
    other = make(QuantisedModel, seed=1)
    for twin in (model, reference):
        twin.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    check(model, reference, inputs())
    for twin in (model, reference):
        twin.load_state_dict(copy.deepcopy(make(QuantisedModel, seed=2).state_dict()))
    check(model, reference, inputs())
    for twin in (model, reference):
        twin.blocks[1].up.weight = nn.Parameter(torch.ones(2 * WIDTH, WIDTH))
    check(model, reference, inputs())
    for twin in (model, reference):
        twin.blocks[1].up.weight = nn.Parameter(Quantised.of(torch.randn(2 * WIDTH, WIDTH,
                                                generator=torch.Generator().manual_seed(3))), requires_grad=False)  # fmt: skip
    check(model, reference, inputs())


def test_tensor_subclass_deepcopy_and_state_dict(offload: Offload) -> None:
    model, reference = pair(QuantisedModel)
    offload(model)
    run(model, inputs())
    twin = copy.deepcopy(model)
    assert_at_rest(twin, reference)
    assert_same(run(twin, inputs()), run(reference, inputs()))
    expected = dict(plain_tensors(reference))
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Quantised):
            assert same_bits(tensor.qdata, expected[f"{name}.qdata"])
            assert same_bits(tensor.scale, expected[f"{name}.scale"])


def test_forward_that_raises_puts_tensor_subclasses_back(offload: Offload) -> None:
    model, reference = pair(QuantisedModel)
    offload(model)
    weights = {name: id(weight) for name, weight in model.named_parameters()}

    def fail(*args: Any) -> None:
        raise KeyboardInterrupt

    hook = model.blocks[1].up.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        run(model, inputs())
    hook.remove()
    assert {name: id(weight) for name, weight in model.named_parameters()} == weights
    assert_at_rest(model, reference)
    check(model, reference, inputs())


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
def test_torchao(offload: Offload) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = make(Model)
    quantize_(model, Int8WeightOnlyConfig())
    model, reference = pair(model)
    handle = offload(model)
    check(model, reference, inputs())
    handle.remove()
    assert_same(run(model, inputs()), run(reference, inputs()))


@pytest.mark.skipif(importlib.util.find_spec("optimum") is None, reason="needs optimum-quanto")
def test_quanto(offload: Offload) -> None:
    quanto = pytest.importorskip("optimum.quanto")

    def quantised() -> nn.Module:  # its tensors cannot be deep-copied
        model = make(Model)
        quanto.quantize(model, weights=quanto.qint8)
        quanto.freeze(model)
        return model

    model, reference = quantised(), quantised()
    handle = offload(model)
    check(model, reference, inputs())
    handle.remove()
    assert_same(run(model, inputs()), run(reference, inputs()))
