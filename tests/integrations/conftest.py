"""Fixtures of the tests of whole pipelines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch._dynamo.testing

from group_offload import patch_diffusers, unpatch_diffusers

from ..support import tiny_models as tiny
from ..support.pipelines import PIPELINES


@pytest.fixture
def device() -> torch.device:
    return tiny.device()


@pytest.fixture
def patched() -> Iterator[None]:
    patch_diffusers()
    yield
    unpatch_diffusers()


@pytest.fixture(scope="module")
def resident_outputs() -> dict[str, torch.Tensor]:
    return {kind: tiny.run(make().to(tiny.device())) for kind, make in PIPELINES.items()}


@pytest.fixture(scope="module")
def resident_calls() -> dict[str, torch.Tensor]:
    return {name: tiny.call(make().to(tiny.device()), inputs()) for name, (make, inputs) in tiny.MODELS.items()}
