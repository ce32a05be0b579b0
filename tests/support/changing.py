"""Modules whose forward changes their own tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from .models import WIDTH


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("num_calls", torch.zeros(()))
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls.add_(1)
        self.total += x.sum(dim=tuple(range(x.ndim - 1)))
        return self.linear(x) * self.num_calls + self.total


class CountingThroughData(Counting):
    """As moving averages of codebooks are kept."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls.data.add_(1)
        self.total.data.mul_(0.5).add_(x.sum(dim=tuple(range(x.ndim - 1))))
        return self.linear(x) * self.num_calls + self.total


class Codebook(nn.Module):
    """A parameter that forward updates: in place, or by another tensor."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.book = nn.Parameter(torch.randn(8, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.book.mean(0)
        with torch.no_grad():
            new = self.book * 0.9 + x.mean() * 0.1
            if self.how == "in place":
                self.book.copy_(new)
            elif self.how == "other data":
                self.book.data = new
            elif self.how == "other data, cast":
                self.book.data = new.to(torch.bfloat16)
            elif self.how == "other parameter":
                self.book = nn.Parameter(new)
        return x + self.book.mean(0)


class Replacing(nn.Module):
    """Registers a buffer in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.cache: torch.Tensor | None
        self.register_buffer("cache", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache = x.mean(dim=0) if self.cache is None else self.cache * 2
        return self.linear(x) + self.cache


class Channels(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


CHANGING: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm": lambda: Channels(nn.BatchNorm1d(WIDTH)).train(),
    "BatchNorm, cumulative": lambda: Channels(nn.BatchNorm1d(WIDTH, momentum=None)).train(),
    "InstanceNorm": lambda: Channels(nn.InstanceNorm1d(WIDTH, track_running_stats=True, affine=True)).train(),
    "spectral_norm": lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)).train(),
    "counter": Counting,
    "counter through data": CountingThroughData,
    "buffer from nothing": Replacing,
    **{
        f"codebook, {how}": (lambda how=how: Codebook(how))  # type: ignore[misc]
        # Not "through data": that leaves no trace, and docs/troubleshooting.md names the limit.
        for how in ("in place", "other data", "other data, cast", "other parameter")
    },
}


class Around(nn.Module):
    """The changing layer directly under the root, in a block, and in a block that is called twice."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = layer()
        self.blocks = nn.ModuleList(nn.Sequential(layer(), nn.Linear(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in (*self.blocks, self.blocks[-1]):
            x = block(x)
        return x
