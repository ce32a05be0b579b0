"""Training with offloaded activations, on the CPU or on the simulated device."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from group_offload.activations import ActivationOffloadHandle, apply_activation_offloading

from .models import Blocks
from .simulated import SimulatedDevice, use_simulated_device
from .training import DIM, Put, Step, assert_same_bits, make, train

DEVICES = ["cpu", "lazy", "random", "eager"]


@contextmanager
def on(device: str, model: nn.Module, seed: int = 0) -> Iterator[tuple[Put, Put]]:
    """Train on the CPU, or on a simulated device: how a tensor gets there, and how it comes back."""
    if device == "cpu":
        yield torch.clone, torch.clone
        return
    simulated = SimulatedDevice(seed, device)  # type: ignore[arg-type]
    with use_simulated_device(simulated):
        with simulated.running():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.data = simulated.put(tensor.data)
            yield simulated.put, simulated.get
        simulated.synchronize()


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
        assert stats.used_host_bytes == stats.file_bytes == stats.inflight_bytes == 0
        handle.remove()
    return stats


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
