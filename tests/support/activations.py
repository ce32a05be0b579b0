"""Training with offloaded activations, on the CPU or on the simulated device."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from group_offload.activations import ActivationOffloadHandle, apply_activation_offloading

from .models import Blocks
from .training import CHECKPOINTS, DIM, STEPS, Put, Step, TrainingBlock, assert_same_bits, make, train, training_on

DEVICES = ["cpu", "lazy", "random", "eager"]


@contextmanager
def on(device: str, model: nn.Module, seed: int = 0) -> Iterator[tuple[Put, Put]]:
    """Train a model that is on the device: how a tensor gets there, and how it comes back."""
    with training_on(device, seed) as (put, get):
        if device != "cpu":
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.data = put(tensor.data)
        yield put, get


def offload(model: nn.Module, **options: Any) -> ActivationOffloadHandle:
    return apply_activation_offloading(model, **{"device": "cpu", "min_bytes": 0, **options})


def check(step: Step, device: str = "cpu", seed: int = 0, model: Callable[[], nn.Module] = make, **options: Any) -> Any:
    """Training is the same bits with and without; afterwards nothing is held."""
    expected = train(model(), step)
    ours = model()
    with on(device, ours, seed) as (put, get):
        handle = offload(ours, **options)
        actual = train(ours, step, put)
        assert_same_bits(actual, expected, get)
        gc.collect()  # an exception's traceback holds its frames, and those hold graphs
        stats = handle.stats()
        assert stats.used_host_bytes == 0
        handle.remove()
    return stats


def random_training(rng: random.Random, device: str) -> None:
    """Random options, a random model and a random step."""
    options: dict[str, Any] = {
        "keep_last": rng.choice([0, 1, 1, 2, 9]),
        "prefetch": rng.choice([0, 1, 1, 2, 3]),
        "min_bytes": rng.choice([0, 0, 600]),
        "skip": rng.choice([None, lambda tensor, fqn: tensor.shape[-1] == 2 * DIM or fqn == "blocks.1"]),
        "groups": rng.choice([None, None, ["blocks.1", "blocks.2", "head"], TrainingBlock, nn.Linear]),
    }
    order = [rng.randrange(3) for _ in range(rng.randint(3, 5))] if rng.random() < 0.5 else [0, 1, 2]
    attributes = {} if rng.random() < 0.7 else {"run_block": rng.choice(CHECKPOINTS[1:])}
    step = rng.choice([step for name, step in STEPS.items() if not name.startswith("stopped")])
    check(step, device, rng.randrange(99), lambda: make(3, order=order, **attributes), **options)


class Call(nn.Module):
    """One group that runs a function."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(3)))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight)


class Calls(Blocks):
    """Groups that run one function each, one after another."""

    def __init__(self, *functions: Callable[..., torch.Tensor]) -> None:
        super().__init__(*map(Call, functions))
