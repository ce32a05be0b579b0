"""Training steps of every kind, the model that they train, and the checkpoints that may be around its blocks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop

from .asserts import same_bits
from .simulated import SimulatedDevice, use_simulated_device

DIM = 16
TOKENS = 8


class TrainingBlock(nn.Module):
    """Chunks of one tensor, a product with its own transpose, an expanded tensor, dropout, and one tensor for all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x.to(self.norm.weight.dtype))).chunk(3, dim=-1)
        x = x + F.dropout(self.out((q @ k.transpose(-1, -2)).softmax(-1) @ v), 0.2, self.training)
        x = x * shared
        scale = (x @ x.transpose(-1, -2)).mean(-1, keepdim=True).expand_as(x)
        return x + torch.tanh(scale) * self.down(F.gelu(self.up(x)))


class TrainingModel(nn.Module):
    """Blocks between two layers: a test says in which order they are called, and what runs around each of them."""

    block_class: type[nn.Module] = TrainingBlock

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(self.block_class() for _ in range(num_blocks))
        self.head = nn.Linear(DIM, DIM)
        self.run_block: Callable[..., torch.Tensor] = lambda block, *args: block(*args)
        self.order = list(range(num_blocks))

    def embedded(self, x: torch.Tensor) -> torch.Tensor:
        return self.embed(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedded(x)
        shared = torch.sigmoid(x.mean(1, keepdim=True)).expand_as(x).contiguous()
        for index in self.order:
            x = self.run_block(self.blocks[index], x, shared)
        return self.head(x)


Put = Callable[[torch.Tensor], torch.Tensor]
Step = Callable[[nn.Module, Put], torch.Tensor]


@contextmanager
def training_on(device: str, seed: int = 0) -> Iterator[tuple[Put, Put]]:
    """Compute on the CPU, or on a simulated device: how a tensor gets there, and how it comes back."""
    if device == "cpu":
        yield torch.clone, torch.clone
        return
    simulated = SimulatedDevice(seed, device)  # type: ignore[arg-type]
    with use_simulated_device(simulated), simulated.running():
        yield simulated.put, simulated.get


def data(seed: int, put: Put) -> torch.Tensor:
    return put(torch.randn(2, TOKENS, DIM, generator=torch.Generator().manual_seed(seed)))


def plain(model: nn.Module, put: Put) -> torch.Tensor:
    loss = model(data(0, put)).square().mean()
    loss.backward()
    return loss.detach()


def accumulated(model: nn.Module, put: Put) -> torch.Tensor:
    losses = []
    for seed in range(3):
        loss = model(data(seed, put)).square().mean() / 3
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def retained(model: nn.Module, put: Put) -> torch.Tensor:
    loss = model(data(0, put)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    (loss * 2).backward()
    return loss.detach()


def doubled(model: nn.Module, put: Put) -> torch.Tensor:
    x = data(0, put).requires_grad_()
    loss = model(x).square().mean()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.square().sum()).backward()
    return loss.detach()


def two_by_two(model: nn.Module, put: Put) -> torch.Tensor:
    first, second = model(data(0, put)).square().mean(), model(data(1, put)).square().mean()
    first.backward()
    second.backward()
    return first.detach() + second.detach()


def both_at_once(model: nn.Module, put: Put) -> torch.Tensor:
    loss = (model(data(0, put)) * model(data(1, put))).mean()
    loss.backward()
    return loss.detach()


def autocast(model: nn.Module, put: Put) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(data(0, put)).float().square().mean()
    loss.backward()
    return loss.detach()


class StopTraining(Exception):
    """The error in the middle of a step that a test stops."""


def _stop(*args: Any) -> None:
    raise StopTraining


def stopped_forward(model: nn.Module, put: Put) -> torch.Tensor:
    hook = model.blocks[2].up.register_forward_pre_hook(_stop)  # type: ignore[union-attr, index]
    with pytest.raises(StopTraining):
        model(data(1, put))
    hook.remove()
    return plain(model, put)


def stopped_backward(model: nn.Module, put: Put) -> torch.Tensor:
    hook = model.blocks[1].down.register_full_backward_hook(_stop)  # type: ignore[union-attr, index]
    with pytest.raises(StopTraining):
        plain(model, put)
    hook.remove()
    model.zero_grad()
    return plain(model, put)


def evaluated(model: nn.Module, put: Put) -> torch.Tensor:
    with torch.no_grad():
        before = model(data(1, put)).square().mean()
    return before + plain(model, put)


def in_part(model: nn.Module, put: Put) -> torch.Tensor:
    """Gradients of some parameters, of a graph that is then dropped."""
    loss = model(data(0, put)).square().mean()
    model.head.weight.grad = torch.autograd.grad(loss, [model.head.weight])[0]  # type: ignore[union-attr]
    return loss.detach()


_WHOLE = (plain, accumulated, retained, doubled, two_by_two, both_at_once, autocast)
_OTHERS = (stopped_forward, stopped_backward, evaluated, in_part)
STEPS: dict[str, Step] = {step.__name__: step for step in (*_WHOLE, *_OTHERS)}


def reentrant(block: nn.Module, *args: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, *args, use_reentrant=True)


def non_reentrant(block: nn.Module, *args: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, *args, use_reentrant=False)


def non_reentrant_to_the_end(block: nn.Module, *args: torch.Tensor) -> torch.Tensor:
    with set_checkpoint_early_stop(False):
        return checkpoint(block, *args, use_reentrant=False)


def selective(block: nn.Module, *args: torch.Tensor, **named: Any) -> torch.Tensor:
    """Results of matrix products, and slices, are kept; the rest is computed again.

    Args:
        named: Arguments for `checkpoint`.
    """

    def run(*args: torch.Tensor) -> torch.Tensor:
        y = block(*args)
        return torch.sin(torch.cat([y[:1], y[1:]]))

    aten = torch.ops.aten
    kept = [aten.mm.default, aten.addmm.default, aten.bmm.default, aten.slice.Tensor]
    context = partial(create_selective_checkpoint_contexts, kept)
    return checkpoint(run, *args, use_reentrant=False, context_fn=context, **named)


def may_respect_hooks() -> bool:
    """Whether one says if saved-tensor hooks see what a selective checkpoint keeps: from torch 2.15 on."""
    return "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters


CHECKPOINTS: list[Callable[..., torch.Tensor]] = [reentrant, non_reentrant, non_reentrant_to_the_end]


def make(num_blocks: int = 4, model_class: type[Any] = TrainingModel, **attributes: Any) -> Any:
    torch.manual_seed(0)
    model = model_class(num_blocks)
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def train(model: nn.Module, step: Step, put: Put = torch.clone, num_steps: int = 2) -> list[torch.Tensor]:
    """Losses and all gradients of some steps with AdamW, and the parameters after them."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    bits = []
    for _ in range(num_steps):
        bits.append(step(model, put).clone())
        bits += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return bits + [parameter.detach().clone() for parameter in model.parameters()]


def assert_same_bits(actual: list[torch.Tensor], expected: list[torch.Tensor], get: Put = torch.clone) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert same_bits(get(one), other)
