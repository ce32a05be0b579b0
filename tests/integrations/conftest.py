"""Fixtures of the tests of whole pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from group_offload import patch_diffusers, unpatch_diffusers

from ..support import tiny_models as tiny
from ..support.fixtures import offload_either  # noqa: F401
from ..support.pipelines import PIPELINES


@pytest.fixture
def device() -> torch.device:
    return tiny.device()


@pytest.fixture
def patched() -> Iterator[None]:
    patch_diffusers()
    yield
    unpatch_diffusers()


class Computed(dict[str, torch.Tensor]):
    """Values that are computed when they are asked for."""

    def __init__(self, compute: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, name: str) -> torch.Tensor:
        self[name] = self._compute(name)
        return self[name]


@pytest.fixture(scope="session")
def resident_outputs() -> dict[str, torch.Tensor]:
    """What each kind of pipeline gives without offloading."""
    return Computed(lambda kind: tiny.run(PIPELINES[kind]().to(tiny.device())))


@pytest.fixture(scope="session")
def resident_calls() -> dict[str, torch.Tensor]:
    """What each model gives without offloading."""

    def compute(name: str) -> torch.Tensor:
        make, inputs = tiny.MODELS[name]
        return tiny.call(make().to(tiny.device()), inputs())

    return Computed(compute)
