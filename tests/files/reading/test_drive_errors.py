"""Errors of the drive under a running model, and how fast the drive turns out to be."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from group_offload import GroupFileError
from group_offload.base.device import HostBackend
from group_offload.plan.placement import Placement
from group_offload.runtime.copies import jobs, reader
from group_offload.runtime.copies.write_order import WriteOrder
from group_offload.runtime.measure import drive
from group_offload.runtime.measure.recorder import Recorder

from ...support.reading import SMALL_CHUNK, Preadv, Rig, assert_tells, every_rig, within
from ...support.speeds import KNOWN_SPEEDS
from ...support.tuning import tune

# ---------------------------------------------------------------- errors of the drive


def test_what_comes_while_a_worker_leaves_is_read(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that found nothing to do, and is slow to end, does not count as one that will look again. Hazard: a read
    comes while the last thread is on its way out, and the forward waits forever."""
    monkeypatch.setattr(reader, "num_threads", lambda: 1)
    next_chunk, wait, is_waited_for = reader.Reader._next, jobs.ReadJob.wait, threading.Event()

    def leave_late(self: reader.Reader) -> Any:
        found = next_chunk(self)
        if found is None:
            is_waited_for.wait(0.1)
            is_waited_for.clear()
        return found

    def wait_and_tell(self: jobs.ReadJob) -> None:
        is_waited_for.set()
        wait(self)

    monkeypatch.setattr(reader.Reader, "_next", leave_late)
    monkeypatch.setattr(jobs.ReadJob, "wait", wait_and_tell)
    within(60, lambda: rig.check(3))


def test_an_error_at_every_read(rig: Rig, preadv: Preadv) -> None:
    """One forward for each read that a forward makes, and that one read fails. What was read ahead is tried once more.
    Hazard: the disk fails in the middle of a forward (`EIO`), and the model is lost; a read that fails is reported as a
    lack of memory (ComfyUI #12332, #13598, #15255)."""
    rig.check(2)
    rig.settle()
    preadv.arm(-1, -1)
    rig.check()
    rig.settle()
    num_reads = preadv.num_calls
    assert num_reads >= 4
    num_told = 0
    for number in range(num_reads):
        preadv.fail(errno.EIO, number)
        try:
            rig.check()
        except GroupFileError as error:
            assert_tells(error, rig, os.strerror(errno.EIO))
            num_told += 1
        rig.settle()
        rig.check_at_rest()
        preadv.arm(-1, -1)
        rig.check()
        rig.check()
    assert num_told <= num_reads and (num_told == num_reads or rig.device is not None)


def test_remove_while_every_read_fails(rig: Rig, preadv: Preadv) -> None:
    """Weights at rest do not go the way of the reader."""
    rig.check()
    preadv.fail(errno.EIO, 0, 10**6)
    with pytest.raises(GroupFileError):
        rig.check(3)
    within(60, rig.handle.remove)
    rig.check_at_rest()


@pytest.mark.parametrize("size", [1, 5000])
def test_reads_that_return_less(size: int, rig: Rig, preadv: Preadv) -> None:
    """Hazard: a read returns less than was asked for, and the rest of the buffer is garbage."""
    preadv.arm(0, 10**9, lambda real, fd, buffers, position: real(fd, [buffers[0][:size]], position))
    if size == 1:
        preadv.last = 40  # some reads only: byte by byte takes too long
    rig.check(2)
    assert preadv.num_faults


# ---------------------------------------------------------------- how fast the drive is


def test_reads_at_the_same_time_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(reader, "time", SimpleNamespace(perf_counter=lambda: now))
    backend, recorder = HostBackend(), Recorder(HostBackend())
    rig = reader.Reader(backend, recorder, WriteOrder(backend, recorder, has_two_streams=False))
    for at, num_more, expected in [(1, 1, 0), (2, 1, 1), (5, -1, 4), (6, -1, 5), (10, 1, 5), (12, -1, 7)]:
        now = float(at)
        rig._count_reading(num_more)
        assert rig.busy_seconds == expected
    rig._count_reading(1)
    now += 1
    assert rig.busy_seconds == 8  # a read that is under way counts so far


@pytest.mark.parametrize(
    ("what", "busy", "cached", "direct", "is_known"),
    [
        ("the drive is read all the time", 9.0, 0, 1000, True),
        ("it waits for slots", 7.0, 0, 1000, False),
        ("the page cache had much of it", 9.0, 200, 800, False),
        ("too little to tell", 9.0, 0, 99, False),
    ],
)
def test_which_passes_tell_how_fast_the_drive_is(
    what: str, busy: float, cached: int, direct: int, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(monkeypatch, min_bytes_for_speed=100)
    meter = drive.DriveMeter()
    meter.note(100.0, 50.0, 7, 7000)  # what was read before the first pass ended is set-up
    assert meter.bytes_per_s is None
    meter.note(110.0, 50.0 + busy, 7 + cached, 7000 + direct)
    assert meter.bytes_per_s == (pytest.approx(direct / busy) if is_known else None)


def test_the_drive_is_what_the_last_passes_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was held up by something else does not count, nor do those of long ago."""
    tune(monkeypatch, min_bytes_for_speed=1)
    meter, now, read = drive.DriveMeter(), 0.0, 0
    for num_bytes, expected in [(0, None), (50, 50), (50, 50), (10, 50), (50, 50), (20, 20), (20, 20)]:
        now, read = now + 1.0, read + num_bytes
        meter.note(now, now, 0, read)
        assert meter.bytes_per_s == expected, (now, num_bytes)


@pytest.mark.parametrize(
    ("tier", "budgets"), [("folder", {}), ("checkpoint", {"vram_budget": 120_000, "ram_budget": "auto"})], ids=str
)
def test_the_plan_knows_a_drive_that_became_slow(
    budgets: dict[str, Any],
    tier: str,
    tmp_path: Path,
    preadv: Preadv,
    scarce_ram: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Much slower than when it was measured: the time of a pass that the plan predicts is that of this drive."""
    monkeypatch.setattr("group_offload.runtime.budget.budgeter.known_speeds", lambda *args, **options: KNOWN_SPEEDS)
    monkeypatch.setattr("group_offload.plan.ram_shares.auto_ram", lambda: 0)
    tune(monkeypatch, min_bytes_for_speed=1)
    seconds = 0.05

    def slowly(real: Any, fd: int, buffers: Any, position: int) -> int:
        time.sleep(seconds)
        return real(fd, buffers, position)

    with Rig("simulated", tier, tmp_path, **budgets) as rig:
        preadv.arm(0, 10**9, slowly)
        most = SMALL_CHUNK / seconds * reader.num_threads()
        rig.check()
        assert rig.handle.plan.details.problem.speeds.drive == KNOWN_SPEEDS.drive > most
        rig.check(5)
        plan = rig.handle.plan.details
        planned = zip(plan.problem.groups, plan.placements, strict=True)
        read = sum(group.num_bytes for group, place in planned if place is Placement.FILE)
        assert plan.problem.speeds.drive <= most
        assert plan.prediction.drive_seconds >= read / most > 0


# ---------------------------------------------------------------- what other programs do


@every_rig
@pytest.mark.parametrize("direct", [False, True], ids=["page cache", "direct"])
def test_a_truncated_file_comes_back(
    direct: bool, where: str, tier: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Hazard: a file is truncated while the model runs: a crash, or garbage."""
    if direct:
        request.getfixturevalue("scarce_ram")
    # What is in a checkpoint can be told if it was hashed.
    with Rig(where, tier, tmp_path, verify_files=tier == "checkpoint") as rig:
        rig.check()
        rig.settle()
        paths = rig.paths()
        before = [(path.read_bytes(), path.stat()) for path in paths]
        for path, (content, _) in zip(paths, before, strict=True):
            os.truncate(path, len(content) - 100)
        for _ in range(3):
            with pytest.raises(GroupFileError) as caught:
                rig.check()
            assert any(str(path) in str(caught.value) for path in paths) and "cut off" in str(caught.value)
        for path, (content, stat) in zip(paths, before, strict=True):
            path.write_bytes(content)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        rig.check(3)
        rig.check_at_rest()


def test_a_file_that_is_cut_off_while_it_is_read(rig: Rig, preadv: Preadv) -> None:
    """After it was looked at, and before it is read: the read says that it ends."""
    rig.check()
    rig.settle()
    preadv.arm(5, 10**6, lambda *args: 0)
    with pytest.raises(GroupFileError) as caught:
        rig.check(2)
    assert_tells(caught.value, rig, "ends there")
    del caught
    preadv.arm(-1, -1)
    rig.check(3)
