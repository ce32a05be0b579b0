"""Copies into the memory of other ranks: which allocation is meant, and where in it."""

from __future__ import annotations

import pytest
import torch

from group_offload.base.device import HostBackend
from group_offload.runtime.sharing.links import PeerLink, SharedBytes

from ..support.allocations import FakeMemory


@pytest.fixture
def memory() -> FakeMemory:
    return FakeMemory()


def link_of(memory: FakeMemory, rank: int = 1) -> PeerLink:
    return PeerLink(HostBackend(), rank, 3, memory)


def zeros() -> torch.Tensor:
    return torch.zeros(100, dtype=torch.uint8)


def test_an_address_that_is_used_again_has_another_number(memory: FakeMemory) -> None:
    mine, link = zeros(), link_of(memory)
    memory.put(5, mine)
    assert link.place_of(mine)[0] == 5
    memory.put(9, mine)  # freed, and handed out once more
    link.forget_freed()
    assert link.handles == {}
    assert link.place_of(mine)[0] == 9 and link.handles == {"9": "9"}
    link.forget_freed()
    assert link.handles == {"9": "9"}
    memory.starts.clear()
    link.forget_freed()
    assert link.handles == {}


def test_memory_is_opened_once_and_closed_when_it_is_gone(memory: FakeMemory) -> None:
    event = HostBackend().new_event()
    mine, other = zeros(), zeros()
    memory.put(5, mine)
    memory.put(6, other)
    link = PeerLink(HostBackend(), 1, 2, memory)
    for _ in range(2):
        link.look({"0": {"6": "6"}})
        link.send(SharedBytes(mine[:4], 2, event), {"0": (6, 0)})
    assert memory.opened == ["6"] and memory.closed == []
    link.look({"0": {"7": "7"}})
    assert memory.closed == [other.data_ptr()]
