"""Fixtures of the tests of whole pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture
def flux(tmp_path: Path) -> Path:
    """The folder of a transformer, in float32."""
    tiny.flux_transformer().save_pretrained(tmp_path / "flux")
    return tmp_path / "flux"


class Outputs(dict[str, torch.Tensor]):
    def __missing__(self, kind: str) -> torch.Tensor:
        self[kind] = tiny.run(PIPELINES[kind]().to(tiny.device()))
        return self[kind]


@pytest.fixture(scope="session")
def resident_outputs() -> dict[str, torch.Tensor]:
    """What each kind of pipeline gives without offloading."""
    return Outputs()
