"""The thread that sends what ranks have agreed on. The test is the other rank."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from group_offload import StateError
from group_offload.base.device import Backend
from group_offload.base.system import name_of_shared_file, new_shared_file, open_shared_file, started_at
from group_offload.runtime.multi_gpu.host_group import HostGroup
from group_offload.runtime.multi_gpu.links import GatherSpeeds, PeerLink, SharedBytes
from group_offload.runtime.multi_gpu.rendezvous import Peer
from group_offload.runtime.multi_gpu.shard_reads import Progress, ShardJob, Shared
from group_offload.runtime.multi_gpu.shared_state import SHARED_STATE_BYTES, SharedState

from ..support.allocations import SharedFiles
from ..support.tuning import tune


def wait_until(is_so: Callable[[], object]) -> None:
    limit = time.monotonic() + 240
    while not is_so():
        assert time.monotonic() < limit
        time.sleep(1e-3)


class Two:
    """The host group of a rank, and the shared state as the other rank sees it. Both have offered one group."""

    def __init__(self, other: subprocess.Popen[bytes]) -> None:
        self.other = other
        fd, backend = new_shared_file(SHARED_STATE_BYTES), Backend()
        self.shared_state = SharedState(open_shared_file(name_of_shared_file(fd)), 1, 2)
        peers = [Peer(each + 4, pid, started_at(pid)) for each, pid in enumerate((os.getpid(), other.pid))]
        self.memory = SharedFiles()
        self.mine, self.its = self.memory.empty(8), self.memory.empty(8)
        self.mine.copy_(torch.arange(8))
        self.link = PeerLink(backend, 0, 2, self.memory)
        self.host_group = HostGroup(backend, SharedState(fd, 0, 2), peers, self.link, GatherSpeeds(1.0, 1.0))
        self.shared = Shared("1/a", "digest", SharedBytes(self.mine, 4, backend.new_event()))
        self.job = self.job_for(self.shared)
        self.host_group.begin_pass("1", 200.0)
        self.host_group.post("submit", self.job)
        wait_until(lambda: self.shared_state.read().offers)
        with self.shared_state.change() as state:
            its_link = PeerLink(backend, 1, 2, self.memory)
            self.its_place, state.memories["1"] = its_link.place_of(self.its), its_link.handles
            state.offer(1, "1/a", "digest", self.its_place, 2)
        wait_until(lambda: self.shared_state.sent[0] == 1)

    def offer(self, key: str) -> None:
        """Offer a group in the other rank's name, and send its part."""
        with self.shared_state.change() as state:
            state.offer(1, key, "digest", self.its_place, 2)
            number = state.first + len(state.log)
        self.shared_state.has_sent(number)

    def submit(self, name: str, reads: Any = None) -> ShardJob:
        """Offer another group, once `reads` are over."""
        job = self.job_for(Shared(f"1/{name}", "digest", SharedBytes(self.mine, 4, Backend().new_event())))
        job.reads = reads
        job.post("submit", job)
        return job

    def says(self, *, reads: bool) -> Callable[[], bool]:
        return lambda: self.shared_state.read().reading.get("0", []) == ["1"] * reads

    def job_for(self, shared: Shared) -> ShardJob:
        event = Backend().new_event()
        return ShardJob(
            model="1",
            shared=[shared],
            begun=event,
            sent=event,
            rest=event,
            ready=event,
            stream=Backend().new_stream(),
            post=self.host_group.post,
            bring_rest=lambda job: None,
            send=lambda shared, places: self.link.send(shared.bytes, places),
        )


@pytest.fixture
def fresh() -> Iterator[Two]:
    process = subprocess.Popen(["sleep", "inf"])
    try:
        yield Two(process)
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def two(fresh: Two) -> Iterator[Two]:
    """The first group has arrived."""
    fresh.shared_state.has_sent(1)
    fresh.job.wait()
    yield fresh
    fresh.host_group.leave_all()


def test_a_group_has_arrived_once_all_ranks_have_sent(fresh: Two) -> None:
    """Also one of a model that is left meanwhile. Else memory that other ranks give back stays taken."""
    assert fresh.its.tolist() == [0, 1, 2, 3, 0, 0, 0, 0]
    fresh.host_group.post("leave", "1")
    wait_until(lambda: fresh.shared_state.read().left)
    assert not fresh.job.is_settled and fresh.memory.opened
    fresh.shared_state.has_sent(1)
    fresh.job.wait()
    wait_until(lambda: not fresh.memory.opened)


class SlowReads:
    """A share that a disk brings once `is_over` is set."""

    is_over = False
    is_whole = False

    def wait(self) -> None: ...

    def cancel(self) -> None: ...


@pytest.mark.parametrize("fault", ["hangs", "breaks off", "leaves"])
def test_a_rank_that_reads_for_ever_is_not_waited_for(fault: str, monkeypatch: pytest.MonkeyPatch, two: Two) -> None:
    """One that hangs is waited for once in a pass: with each of its groups, ranks would wait for longer than sharing saves."""
    limit = 0.3 if fault == "hangs" else 60.0
    tune(monkeypatch, shard_read_timeout_seconds=limit)
    two.host_group.begin_pass("1", 1e-3 if fault == "hangs" else limit)
    with two.shared_state.change() as state:
        state.reading["1"] = ["1"]
    start = time.monotonic()
    jobs = [two.submit(name) for name in "bcd"]
    wait_until(lambda: len(two.shared_state.read().offers) == 3)
    if fault != "hangs":
        with two.shared_state.change() as state:
            state.leave(1, "1", 2) if fault == "leaves" else state.break_off("1")
    for job in jobs:
        job.wait()
    assert all(job.alone for job in jobs) and two.host_group.alone == {"1"}
    assert time.monotonic() - start >= limit or fault != "hangs"


@pytest.mark.parametrize("fault", ["given up", "fails"])
def test_what_was_not_read_is_never_offered(fault: str, two: Two) -> None:
    """Else the other ranks get what the slot had before, and compute with it. They do not wait for it either."""
    two.its.zero_()
    reads = SlowReads()
    job = two.submit("b", reads)
    wait_until(two.says(reads=True))
    with two.shared_state.change() as state:
        state.offer(1, "1/b", "digest", two.its_place, 2)
    if fault == "given up":
        job.cancel()
    reads.is_over = True
    wait_until(two.says(reads=False))
    assert job.shared[0].progress is Progress.ALONE and not two.its.any()
    assert fault == "given up" or not two.shared_state.read().offers


def test_an_offer_that_is_given_up_breaks_the_pass_off(two: Two) -> None:
    """The other rank offers that group no more, until the next pass of both. What they agreed on arrives."""
    jobs = [two.submit(name) for name in "bc"]
    wait_until(lambda: len(two.shared_state.read().offers) == 2)
    two.offer("1/b")
    jobs[0].wait()
    jobs[1].cancel()
    late = two.submit("d")
    late.wait()
    assert [len(job.alone) for job in (*jobs, late)] == [0, 1, 1] and not two.shared_state.read().offers
    two.host_group.begin_pass("1", 60.0)
    job = two.submit("c")
    wait_until(lambda: "1/c" in two.shared_state.read().offers)
    two.offer("1/c")
    job.wait()
    assert not job.alone


@pytest.mark.parametrize(
    ("fault", "why"),
    [("is killed", "Rank 5 .*ended"), ("is stopped", "^Timed out after 0.3 s waiting for weights from rank 5")],
)
def test_a_rank_that_does_not_send_is_named(fault: str, why: str, monkeypatch: pytest.MonkeyPatch, fresh: Two) -> None:
    if fault == "is stopped":
        tune(monkeypatch, shard_read_timeout_seconds=0.3)
    else:
        fresh.other.kill()
    with pytest.raises(StateError, match=why):
        fresh.job.wait()
    fresh.job.cancel()
    assert fresh.host_group._on_way  # a process that was stopped may go on, and write to the slot


def test_a_rank_that_leaves_and_ends_while_nobody_looks_is_not_missed(two: Two) -> None:
    """It ended as it should, and is not taken for one that was killed."""
    with two.shared_state.change() as state:
        state.leave(1, "1", 2)
    two.other.kill()
    two.other.wait()
    two.host_group.begin_pass("1", 5.0)
    alone = two.submit("b")
    alone.wait()
    assert alone.alone
