"""What graphs over offloaded weights hold: contexts that keep weights, as those of bitsandbytes do, and hooks of others."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from group_offload import StateError
from group_offload.runtime import backward as backward_module

from ..support.asserts import plain_tensors, same_bits
from ..support.backward import OPTIONS, check, make, offloaded
from ..support.inside import engine_of
from ..support.quantized import Quantized
from ..support.training import (
    CHECKPOINTS,
    DIM,
    Put,
    TrainingModel,
    assert_same_bits,
    data,
    plain,
    retained,
    train,
    two_by_two,
)


class QuantState:
    """What belongs to a packed weight: an object that is no tensor."""

    def __init__(self, scale: torch.Tensor) -> None:
        self.scale = scale


class Packed(nn.Parameter):
    quant_state: QuantState
    other_state: QuantState
    CB: torch.Tensor | None
    SCB: torch.Tensor | None


SEEN: list[int] = []
"""The addresses of what backward has read."""


class Product(torch.autograd.Function):
    """Keeps the weight itself, a view of it, and two states: by themselves, in a tuple, and in a list."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, state: QuantState) -> torch.Tensor:
        ctx.weight, ctx.tensors = weight, (None, weight.view(-1, 1))
        ctx.state, ctx.others = state, [(weight.other_state, None)]
        return x @ (weight.to(x.dtype) * state.scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        for weight, state in ((ctx.weight, ctx.state), (ctx.tensors[1].view(DIM, DIM), ctx.others[0][0])):
            SEEN.extend((weight.data_ptr(), state.scale.data_ptr()))
            found = gradient @ (weight.to(gradient.dtype) * state.scale).t()
        return found, None, None


class PackedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        values = torch.randint(-127, 127, (DIM, DIM), dtype=torch.int8)
        self.weight = Packed(values, requires_grad=False)
        self.weight.quant_state, self.weight.other_state = (QuantState(torch.rand(DIM, 1) / 200) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(x, self.weight, self.weight.quant_state)


class MatmulLtState:
    """bitsandbytes' 8-bit layers keep weight and scales in an object of this name, which the layer owns."""

    CB: torch.Tensor | None = None
    SCB: torch.Tensor | None = None


class Product8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, state: Any) -> torch.Tensor:
        ctx.state = state
        return x @ (state.CB.to(x.dtype) * state.SCB)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        SEEN.extend((ctx.state.CB.data_ptr(), ctx.state.SCB.data_ptr()))
        return gradient @ (ctx.state.CB.to(gradient.dtype) * ctx.state.SCB).t(), None, None


class Packed8Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Packed(torch.randint(-127, 127, (DIM, DIM), dtype=torch.int8), requires_grad=False)
        self.weight.CB, self.weight.SCB = self.weight.data, torch.rand(DIM, 1) / 200
        self.state = MatmulLtState()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.CB is not None:  # as bitsandbytes does in the first forward
            self.state.CB, self.state.SCB = self.weight.CB, self.weight.SCB
            self.weight.CB = self.weight.SCB = None
        result: torch.Tensor = Product8.apply(x, self.weight, self.state)
        assert self.state.CB is not None
        self.weight.data = self.state.CB
        return result


class QuantizedFunction(torch.autograd.Function):
    """Saves the quantized weight itself, and restores it in backward, as the layers of such libraries do."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        context.save_for_backward(weight)
        return x @ weight.dequantised()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        (weight,) = context.saved_tensors
        return gradient @ weight.dequantised().t(), None


class QuantizedProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(Quantized.of(torch.randn(DIM, DIM)), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = QuantizedFunction.apply(x, self.weight)
        return result.sin()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.down = PackedLinear(), Packed8Linear(), PackedLinear()
        self.quantized = QuantizedProduct()
        self.lora = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.mid(self.up(x)) + self.lora(self.quantized(x))))


def packed_model(run: Callable[..., torch.Tensor] | None = None) -> TrainingModel:
    """The weights of all layers are packed, or tensor subclasses. What is trained is small beside the buffer."""
    torch.manual_seed(0)
    model = TrainingModel(0)
    model.embed = nn.Identity()
    model.head = nn.Identity()
    model.blocks.extend(Block() for _ in range(3))
    model.order = [0, 1, 2]
    model.register_buffer("large", torch.zeros(64, DIM, DIM))
    model.run_block = lambda block, x, shared: (run or Block.__call__)(block, x.requires_grad_() if x.is_leaf else x)
    return model


@pytest.mark.parametrize("device", ["cpu", "random"])
@pytest.mark.parametrize("options", ["block", "leaf", "files"])
@pytest.mark.parametrize("run", [None, *CHECKPOINTS[:2]])
def test_bits(run: Any, options: str, device: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Backward reads weights and scales on the device, and not where they rest. Hazard: an autograd function keeps
    scales or packed weights in its context, and reads them offloaded (bitsandbytes)."""
    caplog.set_level(logging.WARNING, "group_offload")
    for step in (plain, retained, two_by_two) if options == "block" else (plain,):
        expected = train(packed_model(run), step)
        SEEN.clear()
        with offloaded(packed_model(run), device, tmp_path, **OPTIONS[options]) as (model, _, put, get):
            assert_same_bits(train(model, step, put), expected, get)
            assert SEEN and not {tensor.data_ptr() for _, tensor in plain_tensors(model)} & set(SEEN)
    assert "are still referenced" not in caplog.text


class Guided(nn.Module):
    """Takes a gradient with regard to its input while its own forward is in progress."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.last = nn.Linear(DIM, DIM).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.inner(x).square().mean(), [x])
        return self.last(x + gradient)


def test_a_backward_inside_of_a_forward(tmp_path: Path) -> None:
    """It is an error where contexts keep weights."""
    model = Guided(make().eval())
    expected = model(data(0, torch.clone))
    with offloaded(model, "random", tmp_path) as (_, _, put, get):
        for _ in range(3):
            assert same_bits(get(model(data(0, put))).detach(), expected.detach())
    packed = Guided(packed_model().requires_grad_(False))
    with offloaded(packed, "cpu", tmp_path) as (_, _, put, _), pytest.raises(StateError, match="bitsandbytes keeps"):
        packed(data(0, put))


# ---------------------------------------------------------------- weights that backward gets


class Doubling(torch.autograd.Function):
    """Changes what it has saved in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        with torch.no_grad():
            weight.mul_(2)
        return gradient @ weight.t(), None


@pytest.mark.parametrize("device", ["cpu", "random"])
@pytest.mark.parametrize("name", ["mix", "other", "beside a context"])
def test_a_weight_that_a_backward_changes_is_an_error(name: str, device: str, tmp_path: Path) -> None:
    """Another node has saved `mix` too, and would see the change. Afterwards the weights are as they were. Hazard: the
    next node computes with the changed weight, and the change is lost."""
    model: Any = packed_model() if name == "beside a context" else make().eval()
    name = "other" if name == "beside a context" else name
    model.blocks[1].other = nn.Parameter(torch.eye(DIM), requires_grad=False)

    def change(module: Any, args: Any, output: torch.Tensor) -> Any:
        return Doubling.apply(output, getattr(module, name))

    hook = model.blocks[1].register_forward_hook(change)
    with offloaded(model, device, tmp_path) as (_, _, put, get):
        with torch.no_grad():
            expected = get(model(data(0, put)))
        for _ in range(2):
            with pytest.raises(StateError, match=rf"changed the weight 'blocks\.1\.{name}' in place"):
                plain(model, put)
        with torch.no_grad():
            assert_same_bits([get(model(data(0, put)))], [expected])
        hook.remove()
    other: Any = model.blocks[1].other
    assert torch.equal(other, torch.eye(DIM))


@pytest.mark.parametrize("device", ["cpu", "random"])
def test_a_graph_without_saved_tensor_hooks_is_an_error(device: str, tmp_path: Path) -> None:
    """Hazard: backward fails with an error of torch that names nothing. Afterwards, a reentrant checkpoint around the whole
    model: its first call has no gradients, and the second one is inside of backward."""

    def step(model: nn.Module, put: Put) -> torch.Tensor:
        loss = checkpoint(model, data(0, put).requires_grad_(), use_reentrant=True).square().mean()
        loss.backward()
        return loss.detach()

    expected = train(make(), step)
    with offloaded(make(), device, tmp_path) as (model, _, put, get):
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            with pytest.raises(StateError, match="saved-tensor hooks are forbidden"):
                model(data(0, put))
            with torch.no_grad():
                model(data(0, put))
        assert_same_bits(train(model, step, put), expected, get)


class Detached(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.detach().t() + self.bias


@pytest.mark.parametrize("options", [{}, {"offload_type": "leaf_level"}], ids=["block", "leaf"])
@pytest.mark.parametrize("layer", [nn.Linear, Detached])
def test_layerwise_casting(layer: Any, options: dict[str, Any], tmp_path: Path) -> None:
    """Autograd saves views of weights that the hooks have bound to other memory, for the time of a call. Hazard: hooks
    bind weights to other memory for a call, and backward takes our bindings for an edit."""
    hooks = pytest.importorskip("diffusers.hooks")

    def cast() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(layer(DIM, DIM), nn.SiLU()) for _ in range(3))).bfloat16()
        model.requires_grad_(False)
        hooks.apply_layerwise_casting(model, torch.float8_e4m3fn, torch.bfloat16, skip_modules_pattern=())
        return model

    def gradient(model: nn.Module, edit: bool = False) -> torch.Tensor:
        x = data(0, torch.clone).bfloat16().requires_grad_()
        loss = model(x).float().square().mean()
        if edit:
            with torch.no_grad():
                model[1][0].weight.fill_(1)  # type: ignore[index]
        loss.backward()
        assert x.grad is not None
        return x.grad

    expected = gradient(cast())
    with offloaded(cast(), "cpu", tmp_path, **options) as (model, _, _, _):
        for _ in range(3):
            assert_same_bits([gradient(model)], [expected])
        with pytest.raises(StateError, match=r"inplace operation: the weight '1\.0\.weight'"):
            gradient(model, edit=True)


# ---------------------------------------------------------------- graphs


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


@pytest.mark.parametrize("where", ["around", "inside"])
def test_hooks_of_others_around_and_inside(where: str, tmp_path: Path) -> None:
    """`save_on_cpu` around the model gets what is no weight; inside of a block it gets all, which is right as well."""

    def run_block(block: nn.Module, *args: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu() if where == "inside" else nullcontext():
            result: torch.Tensor = block(*args)
        return result

    def step(model: nn.Module, put: Put) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu() if where == "around" else nullcontext():
            loss = model(data(0, put)).square().mean()
        loss.backward()
        return loss.detach()

    check(step, "cpu", tmp_path, lambda: make(run_block=run_block))
