"""Autograd functions that keep weights in their contexts, as those of bitsandbytes do, and training over such weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from group_offload import StateError

from ..support.asserts import plain_tensors
from ..support.backward import OPTIONS, make, offloaded
from ..support.training import DIM, Put, assert_same_bits, data, plain, retained, train, two_by_two


class QuantState:
    """What belongs to a packed weight: an object that is no tensor."""

    def __init__(self, scale: torch.Tensor) -> None:
        self.scale = scale


class Packed(nn.Parameter):
    quant_state: QuantState
    CB: torch.Tensor | None
    SCB: torch.Tensor | None


SEEN: list[int] = []
"""The addresses of what backward has read."""


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, state: QuantState) -> torch.Tensor:
        ctx.state, ctx.tensors = state, (None, weight.view(-1, 1))
        return x @ (weight.to(x.dtype) * state.scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _, weight = ctx.tensors
        SEEN.extend((weight.data_ptr(), ctx.state.scale.data_ptr()))
        return gradient @ (weight.view(DIM, DIM).to(gradient.dtype) * ctx.state.scale).t(), None, None


class PackedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        values = torch.randint(-127, 127, (DIM, DIM), dtype=torch.int8)
        self.weight = Packed(values, requires_grad=False)
        self.weight.quant_state = QuantState(torch.rand(DIM, 1) / 200)

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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.down = PackedLinear(), Packed8Linear(), PackedLinear()
        self.lora = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.mid(self.up(x)) + self.lora(x)))


class Model(nn.Module):
    """The weights of all layers are packed. What is trained is small beside the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.register_buffer("large", torch.zeros(64, DIM, DIM))
        self.checkpointed: bool | None = None
        """Whether the checkpoints around the blocks are reentrant; None: there are none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_() if torch.is_grad_enabled() and x.is_leaf else x
        for block in self.blocks:
            how = self.checkpointed
            x = block(x) if how is None else checkpoint(block, x, use_reentrant=how)
        return x


def packed_model(checkpointed: bool | None = None) -> Model:
    torch.manual_seed(0)
    model = Model()
    model.checkpointed = checkpointed
    return model


class Kept(torch.autograd.Function):
    """Keeps the weight itself, and its state in a list."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        ctx.weight, ctx.others = weight, [(weight.quant_state, None)]
        return x @ (weight.to(x.dtype) * weight.quant_state.scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        SEEN.extend((ctx.weight.data_ptr(), ctx.others[0][0].scale.data_ptr()))
        return gradient @ (ctx.weight.to(gradient.dtype) * ctx.weight.quant_state.scale).t(), None


def other_model() -> Model:
    model = packed_model()
    for block in model.blocks:
        for layer in (block.up, block.down):
            layer.forward = lambda x, layer=layer: Kept.apply(x, layer.weight)  # type: ignore[method-assign, union-attr]
    return model


MODELS: dict[str, Callable[[], Model]] = {
    "no checkpoint": packed_model,
    "checkpoint": partial(packed_model, False),
    "reentrant": partial(packed_model, True),
    "a context with the weight itself": other_model,
}


@pytest.mark.parametrize("device", ["cpu", "random"])
@pytest.mark.parametrize("options", ["block", "leaf", "files"])
@pytest.mark.parametrize("model_of", MODELS.values(), ids=MODELS)
def test_bits(
    model_of: Callable[[], Model], options: str, device: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Backward reads weights and scales on the device, and not where they rest. Hazard: an autograd function keeps
    scales or packed weights in its context, and reads them offloaded (bitsandbytes)."""
    caplog.set_level(logging.WARNING, "group_offload")
    for step in (plain, retained, two_by_two) if options == "block" else (plain,):
        expected = train(model_of(), step)
        SEEN.clear()
        with offloaded(model_of(), device, tmp_path, **OPTIONS[options]) as (model, _, put, get):
            assert_same_bits(train(model, step, put), expected, get)
            at_rest = {tensor.data_ptr() for _, tensor in plain_tensors(model)}
            assert SEEN and not at_rest & set(SEEN)
    assert "are still referenced" not in caplog.text


def test_a_backward_inside_of_a_forward_is_an_error(tmp_path: Path) -> None:
    class Guided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = packed_model().requires_grad_(False)
            self.last = nn.Linear(DIM, DIM).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> Any:
            x = x.detach().requires_grad_()
            return self.last(torch.autograd.grad(self.inner(x).sum(), [x])[0])

    with (
        offloaded(Guided(), "cpu", tmp_path) as (model, _, put, _),
        pytest.raises(StateError, match="bitsandbytes keeps"),
    ):
        model(data(0, put))


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
    model = packed_model() if name == "beside a context" else make().eval()
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


def test_a_weight_at_rest_that_a_hook_changes_during_backward(tmp_path: Path) -> None:
    """No node gets it any more: the change is made where the weight rests, and stays. Hazard: a hook's edit during
    backward is taken for a change by backward itself."""

    def step(model: Any, put: Put) -> torch.Tensor:
        weight = model.blocks[2].down.base.weight

        def change(_: torch.Tensor) -> None:
            with torch.no_grad():
                weight.add_(0.01)

        hook = model.blocks[2].attention.qkv.down.weight.register_post_accumulate_grad_hook(change)
        loss = plain(model, put)
        hook.remove()
        with torch.no_grad():
            return loss + model(data(1, put)).square().mean()

    expected = train(make().eval(), step)
    with offloaded(make().eval(), "cpu", tmp_path) as (model, _, put, get):
        assert_same_bits(train(model, step, put), expected, get)


def test_a_graph_without_saved_tensor_hooks_is_an_error(tmp_path: Path) -> None:
    """Hazard: backward fails with an error of torch that names nothing."""
    with offloaded(make(), "cpu", tmp_path) as (model, _, put, _):
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            with pytest.raises(StateError, match="saved-tensor hooks are forbidden"):
                model(data(0, put))
            with torch.no_grad():
                model(data(0, put))
        plain(model, put)


@pytest.mark.parametrize("device", ["cpu", "random"])
def test_a_reentrant_checkpoint_around_the_whole_model(device: str, tmp_path: Path) -> None:
    """The first call has no gradients, and the second one is inside of backward: neither looks like training."""

    def step(model: nn.Module, put: Put) -> torch.Tensor:
        loss = checkpoint(model, data(0, put).requires_grad_(), use_reentrant=True).square().mean()
        loss.backward()
        return loss.detach()

    expected = train(make(), step)
    with offloaded(make(), device, tmp_path) as (model, _, put, get):
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
