"""The models of most tests: small, and each different in one way from what is usual."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 16
"""Features of `Model` and of its blocks."""
DIM = 8
"""Features of `RoutedModel` and of what is built from its blocks."""


class Blocks(nn.Module):
    """A list of blocks that are called one after another."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    """Two linear layers, and a parameter beside them."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """A layer, a list of blocks, a norm, and a parameter of the root."""

    def __init__(self, num_blocks: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        self.proj_in = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.gain = nn.Parameter(torch.rand(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.proj_in(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) * self.gain


def make(model: nn.Module | type[nn.Module] = Model, *args: Any, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return model(*args).eval()


def aligned(module: nn.Module) -> Any:
    """The module, with weights in memory of their own. Kernels of the CPU may round by how weights are aligned, and views of
    files lie as they lie."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.clone()
    return module


def inputs(seed: int = 0, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (3, WIDTH)), generator=torch.Generator().manual_seed(seed))


class RoutedBlock(nn.Module):
    """Two linear layers of any width and, if `counts`, a buffer that each forward changes."""

    def __init__(self, width: int, counts: bool) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, width)
        self.down = nn.Linear(width, DIM)
        self.gain = nn.Parameter(torch.randn(DIM))
        if counts:
            self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.relu(self.up(x))) * self.gain
        if "calls" in self._buffers:
            self.calls.add_(1)
            x = x + self.calls.sum()
        return x / 2


class Stop(Exception):
    """The error with which a `RoutedModel` stops where a test wants it to."""


def stay(position: int) -> Any:
    return nullcontext()


class RoutedModel(nn.Module):
    """Blocks of given widths, which a test has called in any order, stopped anywhere, and run on any stream."""

    def __init__(self, widths: list[int], counts: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList([RoutedBlock(width, counts) for width in widths])
        self.shift = nn.Parameter(torch.randn(DIM))
        self.route = list(range(len(widths)))
        self.stop_at = -1
        self.on_block: Callable[[int], Any] = stay
        self.alive: list[torch.Tensor] = []
        """The activations of all blocks. Some cross streams, and a tensor that does has to be kept until it was used."""

    def forward(self, x: torch.Tensor, finish: bool = True) -> torch.Tensor:
        x = self.embed(x) + self.shift
        for position, index in enumerate(self.route):
            self.alive.append(x)
            if position == self.stop_at:
                raise Stop
            with self.on_block(position):
                x = self.blocks[index](x)
        self.alive.append(x)
        return x * self.shift if finish else x


class Normed(nn.Module):
    """A batch norm in training, a counter, and a parameter: all of several blocks in one page."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)
        self.proj = nn.Linear(DIM, DIM)
        self.register_buffer("calls", torch.zeros(1))
        self.gain = nn.Parameter(torch.randn(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        with torch.no_grad():
            self.gain.add_(0.125)
        return x + self.proj(self.norm(x)) * self.gain + self.calls
