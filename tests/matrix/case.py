"""A model class with a tiny configuration and the inputs of one forward."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from . import by_name


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape)


def encode_and_decode(module: Any, sample: torch.Tensor) -> Any:
    """What pipelines call of an autoencoder, which is never its forward."""
    encoded = module.encode(sample)
    latents = next(tensors_of(encoded)) if not hasattr(encoded, "latent_dist") else encoded.latent_dist.mode()
    return encoded, module.decode(latents)


@dataclass(frozen=True)
class Case:
    """A class, what builds it, and what calls it once."""

    name: str
    """The class, as `library` exports it."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """What the class, or for transformers the class of its configuration, is built from, beside what `by_name` says."""
    given: Mapping[str, Any] | Callable[[], dict[str, Any]] = field(default_factory=dict)
    """The arguments of one call, beside what `by_name` says, or what makes all of them. A tuple is the shape of random numbers,
    a list of numbers is a tensor, and a function makes what it returns."""
    call: Callable[..., Any] | None = None
    """What is called with the module and these arguments, for a class whose users do not call its forward."""
    build: Callable[[], nn.Module] | None = None
    """Builds the module, for a class that is made from another model."""
    library: str = "diffusers"

    @property
    def cls(self) -> Any:
        return getattr(importlib.import_module(self.library), self.name)

    def inputs(self) -> dict[str, Any]:
        """The arguments of one call, on the CPU."""
        if callable(self.given):
            return self.given()
        usual = by_name.inputs_of(self.cls) if self.library == "diffusers" and self.call is None else {}
        return {name: _made(value) for name, value in {**usual, **self.given}.items()}

    def make(self) -> nn.Module:
        """The module in `eval` mode, with the same weights each time, none of which is zero."""
        torch.manual_seed(0)
        if self.build is not None:
            module = self.build()
        elif self.library == "transformers":
            module = self.cls(self.cls.config_class(**self.config))
        else:
            module = self.cls(**{**by_name.config_of(self.cls), **self.config})
        _fill(module)
        return module.eval()

    def run(self, module: nn.Module, put: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> list[torch.Tensor]:
        """The tensors of one call's output: the same inputs and the same random numbers each time.

        Args:
            put: moves an input to where the module computes.
        """
        torch.manual_seed(1)
        inputs = mapped(self.inputs(), put)
        torch.manual_seed(2)
        with torch.no_grad():
            return list(tensors_of(module(**inputs) if self.call is None else self.call(module, **inputs)))


def _made(value: Any) -> Any:
    if isinstance(value, tuple):
        return torch.randn(value)
    if isinstance(value, list) and all(isinstance(each, int | float) for each in value):
        return torch.tensor(value)
    return value() if callable(value) else value


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with all tensors in lists, tuples and dicts changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: mapped(item, change) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(item, change) for item in value)
    return value


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    """All tensors of an output, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(parameters := getattr(value, "parameters", None), torch.Tensor):  # a distribution of latents
        yield parameters


def _fill(module: nn.Module) -> None:
    """Give every weight a value: some begin as zeros, which hide what comes before them, and some with what memory held."""
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.is_floating_point():
                weight.normal_(0, 0.05)
                if weight.dim() == 1 and name.endswith("weight"):
                    weight.add_(1)
