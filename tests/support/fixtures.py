"""Fixtures that tests of several folders share; the `conftest.py` of a folder imports those it wants."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from group_offload import OffloadHandle

from .rigs import LEVELS, TIERS, Offload, offload_to


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["block_level-ram", "leaf_level-file"])
def offload_either(request: pytest.FixtureRequest, tmp_path: Path) -> Offload:
    """Like `offload`, but with two cases in place of four: each level and each tier comes once."""
    level, tier = request.param.split("-")
    return lambda module, **options: offload_to(tmp_path if tier == "disk" else None, module, level, **options)


@pytest.fixture
def folder(tier: str, tmp_path: Path) -> Path | None:
    return tmp_path / "groups" if tier == "disk" else None


@pytest.fixture
def offload(folder: Path | None, level: str) -> Offload:
    """A call that offloads a module at the level and to the tier of this case."""

    def apply(module: nn.Module, **options: Any) -> OffloadHandle:
        handle = offload_to(folder, module, level, **options)
        assert {group.tier for group in handle.groups} == {"disk" if folder else "ram"}
        return handle

    return apply


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that any user may write to; the folders that pytest makes are for one user alone."""
    path = Path(tempfile.mkdtemp(prefix="group_offload-test-"))
    path.chmod(0o777)
    yield path
    shutil.rmtree(path, ignore_errors=True)
