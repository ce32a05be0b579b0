"""Fixtures of the tests of reads under a running model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from group_offload.stores.source import SourceFile

from ...support.reading import RIGS, SMALL_CHUNK, Preadv, Rig, has_direct_reads
from ...support.tuning import tune


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tune(monkeypatch, chunk_bytes=SMALL_CHUNK)


@pytest.fixture(params=RIGS, ids="-".join)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    with Rig(*request.param, tmp_path) as rig:
        yield rig


@pytest.fixture
def preadv(monkeypatch: pytest.MonkeyPatch) -> Preadv:
    return Preadv(monkeypatch)


@pytest.fixture
def scarce_ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All files are to be read past the page cache, and nothing is in it."""
    if not has_direct_reads(tmp_path):
        pytest.skip("this file system has no direct reads")
    monkeypatch.setattr("group_offload.runtime.transfers.page_cache_pins.available_ram", lambda: 0)
    monkeypatch.setattr(SourceFile, "is_cached", lambda *args: False)
