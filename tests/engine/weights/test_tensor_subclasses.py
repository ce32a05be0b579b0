"""Weights that are tensor subclasses, as quantisation libraries make them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from group_offload import ModuleError, apply_group_offloading

from ...support.asserts import assert_at_rest, assert_own_memory, assert_same
from ...support.kinds import wrapped
from ...support.models import WIDTH, Model, inputs, make
from ...support.on_device import forward, raise_interrupt
from ...support.quantised import Quantised
from ...support.rigs import Offload, check, pair, run
from ...support.simulated import SimulatedDevice, use_simulated_device


class QuantisedModel(Model):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                layer.weight = nn.Parameter(Quantised.of(layer.weight), requires_grad=False)
        self.register_buffer("rotation", Quantised.of(torch.randn(WIDTH, WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.linear(x, self.rotation))


def test_tensor_subclass(offload: Offload) -> None:
    """Its plain tensors are page-locked and copied ahead, as those of torchao (diffusers #13281, #13276, #13305, #13713)."""
    model, reference = pair(QuantisedModel)
    handle = offload(model)
    check(model, reference, inputs())
    assert isinstance(model.blocks[0].up.weight, nn.Parameter)
    assert type(model.blocks[0].up.weight.data) is Quantised
    assert handle.stats().rebuilds == 0
    assert_own_memory(model)
    assert_at_rest(copy.deepcopy(model), reference)
    weights = {name: id(weight) for name, weight in model.named_parameters()}
    hook = model.blocks[1].up.register_forward_hook(raise_interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(model, inputs())
    hook.remove()
    assert {name: id(weight) for name, weight in model.named_parameters()} == weights
    check(model, reference, inputs())
    handle.remove()
    assert_at_rest(model, reference)
    assert_same(run(model, inputs()), run(reference, inputs()))


@torch.no_grad()
def _through_wrapper(weight: Any) -> None:
    weight.mul_(2)


def _replace_inner_data(weight: Any) -> None:
    weight.scale.data = weight.scale.data * 2


QUANTISED_EDITS: dict[str, Callable[[Any], object]] = {
    "the scale": lambda weight: weight.scale.mul_(2),
    "through the wrapper": _through_wrapper,
    "one element through data": lambda weight: weight.qdata.data[0, 0].fill_(5),
    "another scale": lambda weight: setattr(weight, "scale", weight.scale * 2),
    "other data of the scale": _replace_inner_data,
}


# In a forward, an edit of a parameter through `.data` leaves no trace: docs/troubleshooting.md names this limit.
CASES = [
    (edit, where)
    for edit in QUANTISED_EDITS
    for where in ("between", "inside")
    if "one" not in edit or where != "inside"
]


@pytest.mark.parametrize(("edit", "where"), CASES)
def test_edit_of_a_tensor_subclass(edit: str, where: str, offload_either: Offload) -> None:
    """Between forwards, and in a hook inside of each."""
    change = QUANTISED_EDITS[edit]
    model, reference = pair(QuantisedModel)
    handle = offload_either(model)
    for twin in (model, reference):
        run(twin, inputs())
        up = twin.blocks[1].up
        if where == "inside":
            up.register_forward_hook(lambda module, args, output: (change(module.weight), None)[1])
        else:
            change(up.weight)
    check(model, reference, inputs())
    handle.remove()
    assert_at_rest(model, reference)
    assert_same(run(model, inputs()), run(reference, inputs()))


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


# ------------------------------------------------------------------------------------------------ classes that say nothing


class Packed(torch.Tensor):
    """Bytes in a subclass that knows how to read them, as GGUF's parameters are."""

    @staticmethod
    def __new__(cls: type, data: torch.Tensor, factor: float = 0.25) -> Any:
        found: Any = torch.Tensor._make_subclass(cls, data, False)
        found.factor = factor
        return found


class Statistics:
    def __init__(self, scale: torch.Tensor) -> None:
        self.scale, self.name = scale, "rows"


class ScaledBeside(nn.Parameter):
    """Scales as attributes of the parameter, as bitsandbytes keeps them."""

    offset: torch.Tensor
    statistics: Statistics

    @classmethod
    def of(cls, weight: torch.Tensor) -> ScaledBeside:
        scale = weight.detach().abs().amax(1, keepdim=True) / 127
        found = torch.Tensor._make_subclass(cls, (weight.detach() / scale).round().to(torch.int8), False)
        found.offset, found.statistics = torch.full((1,), 0.125), Statistics(scale)
        return found

    def __deepcopy__(self, memo: Any) -> ScaledBeside:
        twin = torch.Tensor._make_subclass(type(self), self.data.clone(), False)
        twin.offset, twin.statistics = self.offset.clone(), Statistics(self.statistics.scale.clone())
        return twin


class PackedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("packed", Packed(torch.randint(0, 9, (WIDTH, WIDTH), dtype=torch.uint8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        plain = self.packed.as_subclass(torch.Tensor)
        return F.linear(x, plain.to(x.dtype) * 0.25)


class ScaledLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = ScaledBeside.of(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        return F.linear(x, weight.data.to(x.dtype) * weight.statistics.scale + weight.offset)


@pytest.mark.parametrize("layer", [PackedLinear, ScaledLinear])
def test_a_class_that_nobody_knows_moves_as_bytes(layer: type[nn.Module], offload: Offload) -> None:
    # Classes without new_empty cannot be deep-copied.
    """As GGUF's parameters, which do not tell what is inside (diffusers #14691, #14698)."""
    model, reference = (make(lambda: wrapped(*(layer() for _ in range(3)))) for _ in range(2))
    handle = offload(model)
    check(model, reference, inputs())
    assert handle.stats().rebuilds == 0
    handle.remove()
    assert_at_rest(model, reference)
    assert_same(run(model, inputs()), run(reference, inputs()))


def test_attributes_of_a_weight_land_in_slots() -> None:
    """As bitsandbytes keeps scales (diffusers #10653)."""
    model, reference = pair(wrapped(*(ScaledLinear() for _ in range(4))).eval())
    with use_simulated_device(SimulatedDevice(3)) as device:
        handle = apply_group_offloading(model, "cpu")
        for seed in range(3):
            assert_same(device.get(forward(device, model, inputs(seed))), run(reference, inputs(seed)))
        stats = handle.stats()
        assert stats.pinned_bytes == stats.host_bytes > 0
        waits = device.num_host_waits
        forward(device, model, inputs())
        assert device.num_host_waits == waits
        handle.remove()


@pytest.mark.parametrize("edit", ["in place", "replaced", "another object"])
def test_edits_of_attributes_of_a_weight(edit: str, offload_either: Offload) -> None:
    model, reference = pair(wrapped(*(ScaledLinear() for _ in range(3))).eval())
    offload_either(model)
    run(model, inputs())
    for twin in (model, reference):
        weight = twin.blocks[1][0].weight
        if edit == "in place":
            weight.statistics.scale.mul_(2)
        elif edit == "replaced":
            weight.statistics.scale = weight.statistics.scale * 2
        else:
            weight.statistics = Statistics(weight.statistics.scale * 2)
    check(model, reference, inputs())


class Opaque(torch.Tensor):
    """No memory of its own, and no word of what is inside."""

    inside: torch.Tensor

    @staticmethod
    def __new__(cls: type, inside: torch.Tensor) -> Any:
        found: Any = torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype, device=inside.device)
        found.inside = inside
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = torch.utils._pytree.tree_map_only(cls, lambda tensor: tensor.inside, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        return cls(result) if func is torch.ops.aten.detach.default else result


def test_an_opaque_class_is_named(tmp_path: Path) -> None:
    model = make(Model)
    model.blocks[1].up.weight = nn.Parameter(Opaque(model.blocks[1].up.weight.detach()), requires_grad=False)
    before = run(model, inputs())
    for options in ({}, {"offload_type": "leaf_level"}, {"offload_to_disk_path": tmp_path}):
        with pytest.raises(
            ModuleError, match=r"blocks\.1\.up\.weight is a .*\.Opaque, .*__tensor_flatten__.*exclude_modules"
        ):
            apply_group_offloading(model, "cpu", **options)
    assert_same(run(model, inputs()), before)
