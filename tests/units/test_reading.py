"""Reading files with several threads: every byte in its place, short files and errors told, nothing left running."""

from __future__ import annotations

import errno
import os
import threading
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


def test_an_error_waits_for_every_thread(data: tuple[int, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    fd, _ = data
    read_at, running = reading.read_at, []

    def failing(fd: int, target: memoryview, position: int) -> int:
        if position == 0:
            raise OSError(errno.EIO, "Input/output error")
        running.append(threading.current_thread())
        threading.Event().wait(0.05)
        count = read_at(fd, target, position)
        running.pop()
        return count

    monkeypatch.setattr(reading, "read_at", failing)
    with pytest.raises(OSError, match="Input/output"):
        read_into(fd, memoryview(bytearray(8 * MIB)), 0)
    assert not running


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_reads_with_threads_of_its_own(data: tuple[int, bytes]) -> None:
    fd, content = data
    read_into(fd, memoryview(bytearray(4 * MIB)), 0)
    child = os.fork()
    if child == 0:
        target = bytearray(4 * MIB)
        read_into(fd, memoryview(target), 0)
        os._exit(0 if target == content[: 4 * MIB] else 1)
    assert os.waitpid(child, 0)[1] == 0
