"""What ranks agree on: offers, the log, and who waits in vain."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from group_offload.base.system import name_of_shared_file, new_shared_file, open_shared_file
from group_offload.runtime.multi_gpu import host_ranks
from group_offload.runtime.multi_gpu.shared_state import SHARED_STATE_BYTES, RankStates, SharedState


@pytest.mark.parametrize("its_digest", ["same", "other"])
def test_the_last_offer_enters_the_log(its_digest: str) -> None:
    """Groups with other bytes are never gathered: they are there without places."""
    found = RankStates()
    for rank in (2, 0):
        found.offer(rank, "1/a", "same", (7, rank), 3)
        assert found.log == []
    found.offer(1, "1/a", its_digest, (7, 1), 3)
    places = {str(rank): (7, rank) for rank in range(3)} if its_digest == "same" else {}
    found.break_off("1")
    assert found.log == [("1/a", places)] and not found.offers, "what is in it arrives"


def test_ranks_that_wait_for_each_other_break_off() -> None:
    found = RankStates()
    found.offer(0, "1/a", "", (), 3)
    found.wait_for(0, "1/a")
    found.offer(1, "1/b", "", (), 3)
    found.offer(1, "1/a", "", (), 3)
    found.wait_for(1, "1/b")  # the first one may come to it
    assert not found.breaks
    found.offer(2, "1/c", "", (), 3)
    found.wait_for(2, "1/c")
    assert found.breaks == {"1": 1} and not found.offers
    found.offer(0, "1/a", "", (), 3)
    found.wait_for(0, "1/a")  # what the others waited for is gone
    assert found.breaks == {"1": 1}


def test_nothing_is_left_of_a_model_that_all_have_left() -> None:
    """Else the shared state is full after some hundred models."""
    found = RankStates()
    for rank in (0, 1):
        found.offer(rank, "1/b", str(rank), (), 3)
    found.residents = {"1/device": ["a"], "2/device": ["a"]}
    for rank in (0, 1):
        found.leave(rank, "1", 2)
    assert found == RankStates(residents={"2/device": ["a"]})


@pytest.fixture
def shared_states() -> Iterator[list[SharedState]]:
    """The state as each of three ranks has it."""
    fd = new_shared_file(SHARED_STATE_BYTES)
    found = [SharedState(open_shared_file(name_of_shared_file(fd)), rank, 3) for rank in range(3)]
    os.close(fd)
    yield found
    for each in found:
        each.close()


def test_what_was_sent_is_said_without_a_turn(shared_states: list[SharedState]) -> None:
    with shared_states[0].change() as found:
        for rank in range(3):
            found.offer(rank, "1/a", "", (), 3)
    turn = shared_states[0].turn
    for number, shared_state in enumerate(shared_states):
        shared_state.has_sent(number + (1 << 32))
    assert [shared_state.sent for shared_state in shared_states] == [
        [1 << 32, (1 << 32) + 1, (1 << 32) + 2]
    ] * 3 and shared_states[0].turn == turn
    assert len(shared_states[0].read().log) == 1
    with shared_states[2].change() as found:
        assert not found.log


def test_a_change_that_breaks_off_leaves_the_state_before(shared_states: list[SharedState]) -> None:
    with shared_states[0].change() as found:
        found.offer(0, "1/a", "", (), 3)
    turn = shared_states[1].turn

    def break_off() -> None:
        with shared_states[1].change() as found:
            found.offer(1, "1/a", "", (), 3)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        break_off()
    assert shared_states[0].turn == turn and shared_states[0].read().offers == {"1/a": {"0": ("", ())}}


def test_a_shared_state_that_another_rank_cannot_open_is_closed() -> None:
    def exchange(topic: str, mine: Any, here: list[int]) -> list[Any]:
        return [mine, "rank 1 failed" if topic == "1/opened" else ""]

    rendezvous: Any = SimpleNamespace(rank=0, exchange=exchange)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(host_ranks._CannotShare, match="rank 1 failed"):
        host_ranks._open_shared_state(rendezvous, "1", [0, 1])
    assert os.listdir("/proc/self/fd") == before
