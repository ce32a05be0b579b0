"""Reading files with several threads: every byte in its place, short files and errors told, nothing left running."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from group_offload.base import reading
from group_offload.base.reading import read_into

MIB = 1 << 20


@pytest.fixture
def data(tmp_path: Path) -> Iterator[tuple[int, bytes]]:
    content = os.urandom(9 * MIB + 123)
    path = tmp_path / "data"
    path.write_bytes(content)
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd, content
    finally:
        os.close(fd)


@pytest.fixture(autouse=True, params=[1, 2, 8])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "num_threads", lambda: request.param)


@pytest.mark.parametrize("most", [1 << 30, 100_000])
def test_reads_what_is_there(data: tuple[int, bytes], most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From anywhere; short reads are continued; a file that ends early is told."""
    fd, content = data
    read_at = reading.read_at
    monkeypatch.setattr(reading, "read_at", lambda fd, target, position: read_at(fd, target[:most], position))
    places = [(0, len(content)), (4097, 8 * MIB), (77, 3 * MIB + 1), (5, 10), (0, 0)]
    for position, size in (*places, *((len(content) - left, 8 * MIB) for left in (0, 1, MIB, 5 * MIB + 7))):
        target, expected = bytearray(size), content[position : position + size]
        assert read_into(fd, memoryview(target), position) == len(expected)
        assert target[: len(expected)] == expected
