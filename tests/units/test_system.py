"""What systems do in different ways: one module knows, and what it does elsewhere is right here too."""

from __future__ import annotations

import errno
import io
import mmap
import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from group_offload import DeviceError
from group_offload.base import mapping, system
from group_offload.base.device import backend_for, default_device
from group_offload.base.progress import progress_bar

from ..support.files import failing
from ..support.participants import in_threads
from ..support.portable import IS_PORTABLE


def test_threads_read_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have one position in the file. Each read has its bytes all the same."""
    monkeypatch.delattr(os, "preadv", raising=False)
    size, num_threads = 1000, 8
    (tmp_path / "file").write_bytes(b"".join(bytes([number]) * size for number in range(num_threads)))
    fd = os.open(tmp_path / "file", os.O_RDONLY)

    def work(number: int) -> None:
        mine, found = bytes([number]) * size, bytearray(size)
        for _ in range(200):
            assert system.read_at(fd, memoryview(found), number * size) == size
            assert found == mine

    in_threads([partial(work, number) for number in range(num_threads)])
    found = bytearray(10)
    assert system.read_at(fd, memoryview(found), size * num_threads - 3) == 3  # the file ends there
    os.close(fd)


def test_a_mac_computes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("mps"))
    assert default_device() == torch.device("cpu")
    with pytest.raises(DeviceError, match="onload_device='mps' isn't supported"):
        backend_for(torch.device("mps"))


@pytest.mark.skipif(IS_PORTABLE or not hasattr(os, "memfd_create"), reason="there are no files in memory here")
def test_another_file_behind_the_name_of_a_shared_one(tmp_path: Path) -> None:
    """Its process has closed it, and opened a file of a user's since. That file is not opened to write."""
    fd = system.new_shared_file(4096)
    name = system.name_of_shared_file(fd)
    os.close(system.open_shared_file(name))
    with (tmp_path / "file").open("wb") as file:
        os.dup2(file.fileno(), fd)
        with pytest.raises(FileNotFoundError):
            system.open_shared_file(name)
    os.close(fd)


def test_a_kernel_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory(mmap.mmap):
        madvise = failing(errno.EINVAL)

    monkeypatch.setattr(mapping.mmap, "mmap", Memory)
    assert len(mapping.map_anonymous(mapping.HUGE_PAGE)) == mapping.HUGE_PAGE


@pytest.mark.parametrize(("is_terminal", "said", "shows"), [(True, "1", True), (True, "0", False), (False, "1", False)])
def test_who_sees_the_progress_bar(is_terminal: bool, said: str, shows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return is_terminal

    monkeypatch.setattr(sys, "stderr", stream := Stream())
    monkeypatch.setenv("GROUP_OFFLOAD_PROGRESS_BAR", said)
    with progress_bar(10, "Writing") as advance:
        advance(10)
    assert ("Writing" in stream.getvalue()) == shows
