"""Modules of every kind that a model may be made of."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from .models import WIDTH, Block, Blocks, Model


class ReadsItsParts(nn.Linear):
    """A layer with weights that reads those of its children, in ways that its source does not tell."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.parts = nn.ModuleList([nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)])
        self.gain = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down, up = [part.weight for part in self.parts]
        weights = dict(self.named_parameters())
        return F.linear(x * weights["gain.weight"] + weights["bias"], self.weight + up @ down)


def wrapped(*layers: nn.Module) -> Blocks:
    """Each layer inside a block of its own."""
    return Blocks(*(nn.Sequential(layer) for layer in layers))


class DeepLists(nn.Module):
    """Lists and dicts in lists, three deep."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleList([nn.ModuleDict({"attn": Block(), "mlp": nn.ModuleList([Block()])}), Block()])
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for pair_of_blocks, last in self.stages:
            x = last(pair_of_blocks["mlp"][0](pair_of_blocks["attn"](x)))
        return x


class Containers(nn.Module):
    """Lists and dicts of parameters and of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({"a": Block(), "b": Block()})
        self.heads = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.gains = nn.ParameterDict({"a": torch.rand(WIDTH), "b": torch.rand(WIDTH)})
        self.shifts = nn.ParameterList([torch.rand(WIDTH), torch.rand(WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for shift, head, (name, expert) in zip(self.shifts, self.heads, self.experts.items(), strict=True):
            x = head(expert(x)) * self.gains[name] + shift
        return x


class DirectWeights(nn.Module):
    """An inner module reads its own weights, and its child's, without calling the child."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("offset", torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(F.linear(x, self.weight)) + self.offset)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.mha(x, x, x, need_weights=False)[0])


class PlainNorm(nn.Module):
    """It has a name for a weight, and no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("weight", None)


class ReadsChildren(nn.Module):
    """Computes with weights of its children, and calls one of them too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table = nn.Linear(WIDTH, WIDTH), nn.Embedding(WIDTH, WIDTH)
        self.block, self.norm = Block(), PlainNorm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._mixed(F.layer_norm(self.inner(self.block(x)), (WIDTH,), self.norm.weight))

    def _mixed(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.block.up.weight
        return F.linear(F.linear(x, self.inner.weight, self.inner.bias) @ self.table.weight, weight)[..., :WIDTH]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x)[0])


class Recursive(Block):
    """A block that calls itself."""

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = super().forward(x)
        return self(x, depth - 1) + self.scale if depth else x


class SharedModule(Blocks):
    """One module object inside of three blocks, and once more at the root."""

    def __init__(self) -> None:
        shared = nn.Linear(WIDTH, WIDTH)
        super().__init__(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), shared) for _ in range(3)))
        self.out = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(super().forward(x))


def shared_block() -> nn.Module:
    """The same block object at three places of the list."""
    shared = Block()
    return Blocks(shared, Block(), shared, shared)


def weight_normed() -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


def spectral_normed() -> nn.Module:
    """Its parametrization has buffers of its own."""
    return parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "model": Model,
    "deep lists": DeepLists,
    "containers": Containers,
    "containers in blocks": lambda: wrapped(Containers(), Containers()),
    "direct weights": lambda: wrapped(DirectWeights(), DirectWeights()),
    "MultiheadAttention": lambda: wrapped(Attention(), Attention()),
    "MultiheadAttention as root": Attention,
    "reads children": lambda: wrapped(ReadsChildren(), ReadsChildren()),
    "reads children as root": ReadsChildren,
    "TransformerEncoder": encoder,
    "LSTM": lambda: wrapped(Recurrent(), Recurrent()),
    "LSTM as child": Recurrent,
    "recursive": lambda: Blocks(Recursive(), Recursive()),
    "shared module": SharedModule,
    "shared block": shared_block,
    "reads_its_parts": lambda: wrapped(ReadsItsParts(), nn.Linear(WIDTH, WIDTH), ReadsItsParts()),
    "weight_norm": lambda: wrapped(weight_normed(), nn.Linear(WIDTH, WIDTH), spectral_normed()),
    "Linear as root": lambda: nn.Linear(WIDTH, WIDTH),
    "weight_norm as root": weight_normed,
    "Block as root": Block,
}
