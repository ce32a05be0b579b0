"""Autograd functions that keep weights in their contexts, as those of bitsandbytes do, and training over such weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from group_offload import StateError

from ..support.backward import OPTIONS, make, offloaded
from ..support.training import DIM, Put, Step, assert_same_bits, data, plain, retained, train, two_by_two


class QuantState:
    """What belongs to a packed weight: an object that is no tensor."""

    def __init__(self, scale: torch.Tensor) -> None:
        self.scale = scale


class Packed(nn.Parameter):
    quant_state: QuantState
    CB: torch.Tensor | None
    SCB: torch.Tensor | None


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, state: QuantState) -> torch.Tensor:
        ctx.state, ctx.tensors = state, (None, weight.view(-1, 1))
        return x @ (weight.to(x.dtype) * state.scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _, weight = ctx.tensors
        return gradient @ (weight.view(DIM, DIM).to(gradient.dtype) * ctx.state.scale).t(), None, None


class PackedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        values = torch.randint(-127, 127, (DIM, DIM), dtype=torch.int8)
        self.weight = Packed(values, requires_grad=False)
        self.weight.quant_state = QuantState(torch.rand(DIM, 1) / 200)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Product.apply(x, self.weight, self.weight.quant_state)
        return result


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


@pytest.mark.parametrize("device", ["cpu", "lazy", "random"])
@pytest.mark.parametrize("options", ["block", "leaf", "files", "files, leaf"])
@pytest.mark.parametrize("checkpointed", [None, False, True], ids=["no checkpoint", "checkpoint", "reentrant"])
@pytest.mark.parametrize("step", [plain, two_by_two])
def test_bits(
    step: Step,
    checkpointed: bool | None,
    options: str,
    device: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On the simulated device a scale that is read where it rests is an error."""
    expected = train(packed_model(checkpointed), step)
    with (
        caplog.at_level(logging.WARNING, "group_offload"),
        offloaded(packed_model(checkpointed), device, tmp_path, **OPTIONS[options]) as (model, handle, put, get),
    ):
        assert_same_bits(train(model, step, put), expected, get)
        handle.remove()
    assert "keeps views of weights" not in caplog.text


@pytest.mark.parametrize("device", ["cpu", "random"])
def test_a_graph_that_is_retained(device: str, tmp_path: Path) -> None:
    expected = train(packed_model(), retained)
    with offloaded(packed_model(), device, tmp_path) as (model, handle, put, get):
        assert_same_bits(train(model, retained, put), expected, get)
        handle.remove()


def test_no_context_holds_device_memory_after_the_forward(tmp_path: Path) -> None:
    with offloaded(packed_model(), "cpu", tmp_path) as (model, _, put, _):
        node: Any = model(data(0, put)).grad_fn.next_functions[1][0]
        assert isinstance(node.state, QuantState) and not isinstance(node.tensors[1], torch.Tensor)


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
@pytest.mark.parametrize("name", ["mix", "other"])
def test_a_weight_that_a_backward_changes_is_an_error(name: str, device: str, tmp_path: Path) -> None:
    """Another node has saved `mix` too, and would see the change. Afterwards the weights are as they were."""
    model = make().eval()
    model.blocks[1].other = nn.Parameter(torch.eye(DIM), requires_grad=False)
    message = {"mix": r"inplace operation: the weight 'blocks\.1\.mix'", "other": r"weight 'blocks\.1\.other' in place"}

    def change(module: Any, args: Any, output: torch.Tensor) -> Any:
        return Doubling.apply(output, getattr(module, name))

    hook = model.blocks[1].register_forward_hook(change)
    with offloaded(model, device, tmp_path) as (_, handle, put, get):
        with torch.no_grad():
            expected = get(model(data(0, put)))
        for _ in range(2):
            with pytest.raises(StateError, match=message[name]):
                plain(model, put)
        with torch.no_grad():
            assert_same_bits([get(model(data(0, put)))], [expected])
        hook.remove()
        handle.remove()


def test_a_graph_without_saved_tensor_hooks_is_an_error(tmp_path: Path) -> None:
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
    with offloaded(make(), device, tmp_path) as (model, handle, put, get):
        assert_same_bits(train(model, step, put), expected, get)
        handle.remove()


@pytest.mark.parametrize("options", [{}, {"offload_type": "leaf_level"}], ids=["block", "leaf"])
def test_layerwise_casting(options: dict[str, Any], tmp_path: Path) -> None:
    """Autograd saves views of weights that the hooks have bound to other memory, for the time of a call."""
    hooks = pytest.importorskip("diffusers.hooks")

    def cast() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.SiLU()) for _ in range(3))).bfloat16()
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
