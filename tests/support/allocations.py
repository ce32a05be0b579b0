"""Memory that stands for that of GPUs, in place of `PeerMemory`."""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import partial
from typing import Any

import pytest
import torch

from group_offload.base.device import Backend
from group_offload.base.system import name_of_shared_file, new_shared_file, open_shared_file
from group_offload.runtime.multi_gpu import host_ranks
from group_offload.runtime.multi_gpu.links import GatherSpeeds, PeerLink
from group_offload.runtime.multi_gpu.rendezvous import Rendezvous


class SharedFiles:
    """Each allocation of a process is in a file of its own, which other processes map."""

    def __init__(self) -> None:
        self.files: dict[int, tuple[int, int, int]] = {}
        """By the address that it begins at, the file's number, its descriptor and its size."""
        self.opened: dict[int, mmap.mmap] = {}

    def empty(self, num_bytes: int, stream: Any = None) -> torch.Tensor:
        fd = new_shared_file(max(1, num_bytes))
        memory = torch.frombuffer(mmap.mmap(fd, max(1, num_bytes)), dtype=torch.uint8)
        first, last = memory.data_ptr(), memory.data_ptr() + max(1, num_bytes)
        for start, (_, other, size) in [*self.files.items()]:
            if start < last and first < start + size:  # it was freed
                os.close(other)
                del self.files[start]
        self.files[first] = os.fstat(fd).st_ino, fd, max(1, num_bytes)
        return memory[:num_bytes]

    def start_of(self, memory: torch.Tensor) -> int:
        at = memory.data_ptr()
        return next(start for start, (_, _, size) in self.files.items() if start <= at < start + size)

    def number_at(self, address: int) -> int:
        if address not in self.files:
            raise RuntimeError("nothing is there")
        return self.files[address][0]

    def handle_of(self, memory: torch.Tensor) -> str:
        return name_of_shared_file(self.files[self.start_of(memory)][1])

    def open(self, handle: str) -> int:
        fd = open_shared_file(handle)
        mapped = mmap.mmap(fd, os.fstat(fd).st_size)
        os.close(fd)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self.opened[address] = mapped
        return address

    def close(self, address: int) -> None:
        del self.opened[address]

    def copy(self, address: int, source: torch.Tensor, stream: Any) -> None:
        ctypes.memmove(address, source.data_ptr(), source.numel())


def use_peer_links() -> None:
    """Let this process, which computes on the CPU, send as GPUs do."""
    files, patch = SharedFiles(), pytest.MonkeyPatch()
    patch.setattr(Backend, "empty", lambda self, num_bytes, stream=None: files.empty(num_bytes))
    patch.setattr(host_ranks, "_connect", partial(_connect, files))


def _connect(
    files: Any, backend: Backend, roll: Rendezvous, model: str, here: list[int]
) -> tuple[PeerLink, GatherSpeeds]:
    return PeerLink(backend, here.index(roll.rank), len(here), files), GatherSpeeds(alone=1e18, shared=1e18)
