"""The thread that sends what ranks have agreed on. The test is the other rank."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from group_offload import StateError
from group_offload.base.device import HostBackend
from group_offload.base.system import name_of_shared_file, new_shared_file, open_shared_file, started_at
from group_offload.runtime.sharing.board import BOARD_BYTES, Board
from group_offload.runtime.sharing.courier import Courier, Peer
from group_offload.runtime.sharing.jobs import Progress, Shared, ShareJob
from group_offload.runtime.sharing.links import PeerLink, SharedBytes

from ..support.allocations import FakeMemory
from ..support.tuning import tune


def wait_until(is_so: Callable[[], object]) -> None:
    limit = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < limit
        time.sleep(1e-3)


class Two:
    """A courier, and the board as the other rank sees it. Both have offered one group."""

    def __init__(self, other: subprocess.Popen[bytes]) -> None:
        self.other = other
        fd, backend = new_shared_file(BOARD_BYTES), HostBackend()
        self.board = Board(open_shared_file(name_of_shared_file(fd)), 1, 2)
        peers = [Peer(each + 4, pid, started_at(pid)) for each, pid in enumerate((os.getpid(), other.pid))]
        self.memory = FakeMemory()
        self.mine, self.its = torch.arange(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
        self.memory.put(5, self.mine)
        self.memory.put(6, self.its)
        self.link = PeerLink(backend, 0, 2, self.memory)
        self.courier = Courier(Board(fd, 0, 2), peers, self.link, lambda: None)
        self.shared = Shared("1/a", "digest", "a", SharedBytes(self.mine, 4, backend.new_event()))
        self.job = self.job_for(self.shared)
        self.courier.begin_pass("1", [], 5.0)
        self.courier.post("submit", self.job)
        wait_until(lambda: self.board.read()[0].offers)
        with self.board.change() as state:
            state.memories["1"] = {"6": "6"}
            state.offer(1, "1/a", "digest", (6, 0), 2)
        wait_until(lambda: self.board.sent[0] == 1)

    def other_has_sent(self) -> None:
        self.board.has_sent(1)

    def offer(self, key: str) -> None:
        """Offer a group in the other rank's name, and send its part."""
        with self.board.change() as state:
            state.offer(1, key, "digest", (6, 0), 2)
            number = state.first + len(state.log)
        self.board.has_sent(number)

    def submit(self, name: str, memory: torch.Tensor | None = None, reads: Any = None, begun: Any = None) -> ShareJob:
        """Offer another group: in `memory`, once `reads` are over; alone without."""
        event = HostBackend().new_event()
        found = None if memory is None else SharedBytes(memory, 4, event)
        job = self.job_for(Shared(f"1/{name}", "digest", name, found))
        job.reads, job.begun = reads, begun or event
        job.post("submit", job)
        return job

    def is_reading(self, *keys: str) -> Callable[[], bool]:
        return lambda: self.board.read()[0].reading.get("0") == [*keys]

    def job_for(self, shared: Shared) -> ShareJob:
        event = HostBackend().new_event()
        return ShareJob(
            model="1",
            shared=[shared],
            begun=event,
            sent=event,
            rest=event,
            ready=event,
            stream=HostBackend().new_stream(),
            post=self.courier.post,
            bring_rest=lambda job: None,
            send=lambda shared, places: self.link.send(shared.bytes, places),
        )


@pytest.fixture
def fresh() -> Iterator[Two]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield Two(process)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def two(fresh: Two) -> Iterator[Two]:
    """The first group has arrived."""
    fresh.other_has_sent()
    fresh.job.wait()
    yield fresh
    fresh.courier.leave_all()


def test_a_group_has_arrived_once_all_ranks_have_sent(fresh: Two) -> None:
    assert fresh.its.tolist() == [0, 1, 2, 3, 0, 0, 0, 0]
    fresh.courier.post("leave", "1")
    wait_until(lambda: fresh.board.read()[0].left)
    assert not fresh.job.is_settled and fresh.shared.bytes
    fresh.other_has_sent()
    fresh.job.wait()
    assert not fresh.shared.bytes
    fresh.courier.leave_all()
    assert fresh.courier.error is not None


def test_a_rank_that_ends_after_it_has_sent_is_not_missed(fresh: Two) -> None:
    fresh.other_has_sent()
    fresh.other.kill()
    fresh.job.wait()


def test_a_pass_shares_again_at_once_after_one_that_went_alone(two: Two) -> None:
    """Else short passes go alone by turns: each rank waits in vain for one that the pass before has left behind."""
    two.courier.begin_pass("1", [], 1e-3)
    two.submit("b").wait()
    assert two.courier.alone == {"1"}
    with two.board.change():  # the thread can do nothing now
        two.courier.begin_pass("1", [], 5.0)
        assert not two.courier.alone


class SlowReads:
    """A share that a drive brings once `is_over` is set."""

    is_over = False
    is_whole = False

    def wait(self) -> None: ...

    def cancel(self) -> None: ...


def test_a_rank_that_reads_is_waited_for(two: Two) -> None:
    """Else each rank reads all of the group, where the drive is what takes time."""
    two.courier.begin_pass("1", [], 1e-3)
    with two.board.change() as state:
        state.read(1, ["1/b"])
    job = two.submit("b", two.mine)
    threading.Timer(0.2, lambda: two.offer("1/b")).start()
    job.wait()
    assert not job.alone and not two.courier.alone


@pytest.mark.parametrize("fault", ["hangs", "gives up", "leaves"])
def test_a_rank_that_reads_for_ever_is_not_waited_for(fault: str, monkeypatch: pytest.MonkeyPatch, two: Two) -> None:
    limit = 30.0 if fault == "leaves" else 0.3
    tune(monkeypatch, share_limit_seconds=limit)
    two.courier.begin_pass("1", [], 1e-3 if fault == "hangs" else 1.3 * limit)
    with two.board.change() as state:
        state.read(1, ["1/b"])
        if fault == "gives up":
            state.begin_pass(1, "1", [])
            state.decline(1, ["1/b"])
        elif fault == "leaves":
            state.leave(1, "1", 2)
        assert state.is_being_read(0, "1/b", 2) == (fault == "hangs")
    start = time.monotonic()
    job = two.submit("b")
    job.wait()
    assert job.alone and (time.monotonic() - start >= limit) == (fault != "leaves")


def test_a_rank_that_hangs_is_waited_for_once_in_a_pass(monkeypatch: pytest.MonkeyPatch, two: Two) -> None:
    """Not for each of its groups: ranks would wait for longer than sharing saves."""
    tune(monkeypatch, share_limit_seconds=2.0)
    two.courier.begin_pass("1", [], 1e-3)
    with two.board.change() as state:
        state.read(1, ["1/b", "1/c", "1/d"])
    start = time.monotonic()
    jobs = [two.submit(name) for name in "bcd"]
    for job in jobs:
        job.wait()
    assert all(job.alone for job in jobs) and 2.0 <= time.monotonic() - start < 4.0


@pytest.mark.parametrize("fault", ["given up", "fails"])
def test_what_was_not_read_is_never_offered(fault: str, two: Two) -> None:
    """Else the other ranks get what the slot had before, and compute with it. They do not wait for it either."""
    two.its.zero_()
    reads = SlowReads()
    job = two.submit("b", two.mine, reads)
    wait_until(two.is_reading("1/b"))
    with two.board.change() as state:
        state.offer(1, "1/b", "digest", (6, 0), 2)
    reads.is_over = True
    if fault == "given up":
        time.sleep(0.05)  # as the pool's threads take their time to end
        job.cancel()
    wait_until(two.is_reading())
    assert job.shared[0].progress is Progress.ALONE and not two.its.any()
    assert two.board.read()[0].declined["1"]["0"] == ["1/b"]


def test_what_is_read_and_waits_for_its_slot_is_not_being_read(two: Two) -> None:
    """The slot may be free only once another rank has gone on."""

    class Never:
        def query(self) -> bool:
            return False

    reads = SlowReads()
    two.submit("b", two.mine, reads, Never())
    wait_until(two.is_reading("1/b"))
    reads.is_over = reads.is_whole = True
    wait_until(two.is_reading())
    assert not two.board.read()[0].offers


def test_a_rank_says_what_it_reads_until_it_offers_that(two: Two) -> None:
    reads, cancelled = SlowReads(), SlowReads()
    two.submit("b", two.mine, reads)
    job = two.submit("c", two.mine, cancelled)
    wait_until(two.is_reading("1/b", "1/c"))
    assert not two.board.read()[0].offers
    job.cancel()
    wait_until(two.is_reading("1/b"))
    reads.is_over = reads.is_whole = True
    wait_until(lambda: "1/b" in two.board.read()[0].offers)
    assert two.is_reading()()


@pytest.mark.parametrize("fault", ["is killed", "is stopped"])
def test_a_rank_that_does_not_send_is_named(fault: str, monkeypatch: pytest.MonkeyPatch, fresh: Two) -> None:
    if fault == "is stopped":
        tune(monkeypatch, share_limit_seconds=0.3)
    if fault == "is killed":
        fresh.other.kill()
    with pytest.raises(
        StateError, match="Rank 5 .*ended" if fault == "is killed" else "waiting for weights from rank 5"
    ):
        fresh.job.wait()
    fresh.job.cancel()
    assert fresh.shared.bytes  # a process that was stopped may go on, and write to the slot


def test_the_last_things_of_a_process_are_sent_before_it_ends(fresh: Two) -> None:
    ended: list[Any] = []

    def end() -> None:
        fresh.other_has_sent()
        ended.append(fresh.job.is_settled)

    threading.Timer(0.1, end).start()
    fresh.courier.leave_all()
    assert ended == [False] and fresh.job.is_settled


def test_a_rank_that_leaves_and_ends_while_nobody_looks_is_not_missed(two: Two) -> None:
    """It ended as it should, and is not taken for one that was killed."""
    with two.board.change() as state:
        state.leave(1, "1", 2)
    two.other.kill()
    two.other.wait()
    two.courier.begin_pass("1", [], 5.0)
    alone = two.submit("b")
    alone.wait()
    assert alone.alone


def test_a_rank_that_ends_leaves_models_that_it_never_ran(fresh: Two) -> None:
    """Else it is taken for one that was killed."""
    fresh.other_has_sent()
    fresh.courier.post("join", "2")
    fresh.courier.leave_all()
    assert fresh.board.read()[0].left == {"1": ["0"], "2": ["0"]}


def test_a_model_that_is_left_on_the_way_is_forgotten_once_it_has_arrived(fresh: Two) -> None:
    """Else memory that other ranks give back stays taken."""
    fresh.courier.post("leave", "1")
    wait_until(lambda: fresh.board.read()[0].left)
    fresh.other_has_sent()
    fresh.job.wait()
    wait_until(lambda: fresh.memory.closed)
