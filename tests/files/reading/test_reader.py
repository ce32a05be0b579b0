"""Files that are read under a running model: what is left, reads that come late in any order, and errors of the disk."""

from __future__ import annotations

import errno
import os
import random
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from group_offload import StorageError
from group_offload.base import pool
from group_offload.runtime.transfers import jobs, reader

from ...support.models import Stop
from ...support.reading import (
    SMALL_CHUNK,
    TIERS,
    WIDTHS,
    Preadv,
    Rig,
    assert_tells,
    eventually,
    every_rig,
    every_tier,
    is_direct,
    num_fds,
    num_mappings,
    num_threads,
    within,
)
from ...support.reads import late_reads
from ...support.tuning import tune

# ---------------------------------------------------------------- what is left


@every_rig
@pytest.mark.parametrize(
    ("how", "fault"),
    [("remove", "none"), ("remove", "error"), ("drop", "none"), ("drop", "error"), ("drop", "interrupt")],
)
def test_nothing_is_left(how: str, fault: str, where: str, tier: str, tmp_path: Path, preadv: Preadv) -> None:
    """Neither descriptors nor mappings, and no threads beyond those of the pools; also if the disk fails to the end, as
    offloaded weights do not go the way of the reader."""

    def once(folder: Path) -> None:
        folder.mkdir()
        with Rig(where, tier, folder) as rig:
            rig.check()
            if fault == "error":
                preadv.fail(errno.EIO, 3, 10**6)
                with pytest.raises(StorageError):
                    rig.check(3)
                if how == "remove":
                    within(60, rig.handle.remove)
                    rig.check_at_rest()
                preadv.arm(-1, -1)
                if how == "drop":
                    rig.check()
            if fault == "interrupt":
                rig.model.stop_at = 2
                with pytest.raises(Stop):
                    rig.forward()
                rig.model.stop_at = -1
                rig.check()
            if how == "drop":
                rig.drop()

    once(tmp_path / "first")  # what is opened once a process is open now
    assert eventually(lambda: num_mappings(tmp_path) == 0)
    before = num_fds()
    for number in range(2):
        once(tmp_path / str(number))
    assert eventually(lambda: num_mappings(tmp_path) == 0)
    assert eventually(lambda: num_fds() <= before), (num_fds(), before)
    assert num_threads() <= pool.num_threads()


@every_tier
def test_staging_memory_is_a_formula(tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed number of chunks, or fewer for a small model."""
    for frames, widths in ((1, WIDTHS), (2, WIDTHS), (4, WIDTHS), (18, [8]), (18, WIDTHS)):
        tune(monkeypatch, num_frames=frames)
        with Rig("simulated", tier, tmp_path, widths) as rig:
            for path in rig.paths():
                path.rename(path.with_suffix(".gone"))
            assert rig.device is not None
            file_bytes = sum(group.num_bytes for group in rig.handle.groups)
            rig.check(3)
            rig.settle()
            expected = min(frames, 1 - -file_bytes // SMALL_CHUNK) * SMALL_CHUNK
            assert rig.handle.stats().staging_bytes == rig.device.pinned_bytes == expected


# ---------------------------------------------------------------- late, in any order


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.sampled_from(["random", "eager"]), st.sampled_from(TIERS))
def test_late_reads_of_which_some_fail(seed: int, laziness: Any, tier: str) -> None:
    """Every forward is right or says that a file cannot be read, and those without a fault become right again. Hazard: reads on
    the thread that launches compute overlap with nothing (diffusers #11682)."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch, late_reads(rng):
        preadv = Preadv(patch)
        rig = Rig("simulated", tier, Path(folder), [rng.choice([4, 24, 300]) for _ in range(rng.randint(1, 5))])
        assert rig.device is not None
        rig.device.laziness = laziness
        with rig:
            for _ in range(4):
                if rng.random() < 0.7:
                    first = rng.randrange(30)
                    preadv.fail(errno.EIO, first, first + rng.choice([0, 0, 3]))
                with suppress(StorageError):
                    rig.check(rng.randint(1, 2))
            rig.settle()
            preadv.arm(-1, -1)
            with suppress(StorageError):  # of what was read ahead
                rig.check()
            rig.check(2)


# ---------------------------------------------------------------- errors of the disk


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
        except StorageError as error:
            assert_tells(error, rig, os.strerror(errno.EIO))
            num_told += 1
        rig.settle()
        rig.check_at_rest()
        preadv.arm(-1, -1)
        rig.check()
        rig.check()
    assert num_told <= num_reads and (num_told == num_reads or rig.device is not None)


@every_rig
@pytest.mark.parametrize(("size", "direct"), [(1, False), (5000, False), (4096, True), (1000, True)])
def test_reads_that_return_less(
    size: int, direct: bool, where: str, tier: str, tmp_path: Path, preadv: Preadv, request: pytest.FixtureRequest
) -> None:
    """Hazard: a read returns less than was asked for, and the rest of the buffer is garbage."""
    if direct:
        request.getfixturevalue("scarce_ram")

    def short(real: Any, fd: int, buffers: Any, position: int) -> int:
        count: int = real(fd, buffers, position)
        if is_direct(fd) == direct:
            count = min(count, size)
            buffers[0][count:] = bytes(len(buffers[0]) - count)  # it did not come
        return count

    with Rig(where, tier, tmp_path) as rig:
        preadv.arm(0, 40 if size == 1 else 10**9, short)  # byte by byte takes too long
        rig.check(2)
        assert preadv.num_faults


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
    with Rig(where, tier, tmp_path, verify_checksums=tier == "checkpoint") as rig:
        rig.check()
        rig.settle()
        paths = rig.paths()
        before = [(path.read_bytes(), path.stat()) for path in paths]
        for path, (content, _) in zip(paths, before, strict=True):
            os.truncate(path, len(content) - 100)
        for _ in range(3):
            with pytest.raises(StorageError, match=r"^Failed to read .* at byte .*Reload the model") as caught:
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
    with pytest.raises(StorageError) as caught:
        rig.check(2)
    assert_tells(caught.value, rig, "ends there")
    del caught
    preadv.arm(-1, -1)
    rig.check(3)
