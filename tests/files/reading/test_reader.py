"""Files that are read under a running model: what is left, what is counted, and reads that come late in any order."""

from __future__ import annotations

import errno
import gc
import random
import signal
import tempfile
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from group_offload import GroupFileError
from group_offload.base import pool
from group_offload.base.tuning import tuning
from group_offload.runtime.copies.reader import Reader

from ...support.inside import engine_of
from ...support.models import Stop
from ...support.reading import (
    SMALL_CHUNK,
    TIERS,
    WIDTHS,
    Preadv,
    Rig,
    Slow,
    eventually,
    every_rig,
    every_tier,
    num_fds,
    num_mappings,
    num_threads,
)
from ...support.reads import late_reads
from ...support.tuning import tune

# ---------------------------------------------------------------- what is left


@every_rig
@pytest.mark.parametrize(
    ("how", "fault"), [("remove", "error"), ("drop", "none"), ("drop", "error"), ("drop", "interrupt")]
)
def test_nothing_is_left(how: str, fault: str, where: str, tier: str, tmp_path: Path, preadv: Preadv) -> None:
    """Neither descriptors nor mappings, and no threads beyond those of the pools."""

    def once(folder: Path) -> None:
        folder.mkdir()
        with Rig(where, tier, folder) as rig:
            rig.check()
            if fault == "error":
                preadv.fail(errno.EIO, 3, 10**6)
                with pytest.raises(GroupFileError):
                    rig.check(3)
                preadv.arm(-1, -1)
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
    threads = {name: num_threads(name) for name in ("io", "pump", "lock")}
    for number in range(2):
        once(tmp_path / str(number))
    assert eventually(lambda: num_mappings(tmp_path) == 0)
    assert eventually(lambda: num_fds() <= before), (num_fds(), before)
    assert num_threads("io") <= pool.num_threads()
    # One pump is enough for one model after another; one that is on its way out may make another one begin.
    assert num_threads("pump") <= threads["pump"] + 2
    assert num_threads("lock") == 0


@every_tier
def test_dropped_while_files_are_read(
    tier: str, tmp_path: Path, preadv: Preadv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread in the middle of a read keeps the file, and staging memory that is not locked. It reads no more."""
    here, read = threading.local(), Reader._read
    is_begun, may_end, has_ended = threading.Event(), threading.Event(), threading.Event()

    def reading(self: Reader, job: Any, chunk: Any) -> None:
        here.groups = {each.label for each in chunk.reads}
        read(self, job, chunk)

    def one_waits(real: Any, fd: int, buffers: Any, position: int) -> int:
        if is_needed_next and here.groups == {"blocks_0_0"} and not is_begun.is_set():
            is_begun.set()
            assert may_end.wait(60)
        return real(fd, buffers, position)

    monkeypatch.setattr(Reader, "_read", reading)
    is_needed_next: list[bool] = []
    with Rig("simulated", tier, tmp_path) as rig:
        assert rig.device is not None
        rig.check(2)
        preadv.arm(0, 10**9, one_waits)
        rig.model.blocks[0].down.register_forward_pre_hook(lambda *_: is_needed_next.append(True))
        rig.check()
        assert is_begun.wait(60)
        weakref.finalize(engine_of(rig.handle).transfer.reader, has_ended.set)
        gone = [weakref.ref(each) for each in (rig.model, engine_of(rig.handle), *rig.model.parameters())]
        rig.clear()
        gc.disable()
        try:
            rig.model = rig.handle = None
            assert not any(each() for each in gone)
        finally:
            gc.enable()
        assert rig.device.pinned_bytes == rig.device.allocated_bytes == 0 and not has_ended.is_set()
        num_calls = preadv.num_calls
        may_end.set()
        assert has_ended.wait(60) and preadv.num_calls <= num_calls + pool.num_threads()  # one each
        assert eventually(lambda: num_mappings(tmp_path) == 0)


# ---------------------------------------------------------------- what is counted


@every_rig
def test_figures(where: str, tier: str, tmp_path: Path) -> None:
    with Rig(where, tier, tmp_path) as rig:
        file_bytes = sum(group.num_bytes for group in rig.handle.groups)
        for number in range(1, 4):
            rig.check()
            rig.settle()
            stats = rig.handle.stats()
            num_bytes, num_read = stats.bytes_onloaded["file"], sum(stats.bytes_read.values())
            # What a slot still holds is not brought again; of the next pass there is what there is room for.
            least = number * file_bytes - (number - 1) * stats.peak_device_bytes
            assert least <= num_bytes <= number * file_bytes + stats.peak_device_bytes
            # Blobs in a checkpoint are padded, so that tensors begin where kernels want them to.
            assert (0.9 if tier == "checkpoint" else 1) * num_bytes <= num_read <= num_bytes + stats.staging_bytes
            if where == "cpu" and number == 1:
                assert num_bytes == file_bytes
            assert stats.bytes_onloaded["ram"] == stats.bytes_onloaded["pageable ram"] == 0
            assert stats.pinned_bytes == 0 and stats.host_bytes == 0 and stats.file_bytes == file_bytes
            limit = min(tuning().num_frames, 1 - -file_bytes // SMALL_CHUNK) * SMALL_CHUNK
            assert stats.staging_bytes == (limit if where == "simulated" else 0)


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
                with suppress(GroupFileError):
                    rig.check(rng.randint(1, 2))
            rig.settle()
            preadv.arm(-1, -1)
            with suppress(GroupFileError):  # of what was read ahead
                rig.check()
            rig.check(2)


# ---------------------------------------------------------------- exceptions and several threads


def test_an_interrupt_while_compute_waits_for_the_drive(tmp_path: Path, preadv: Preadv) -> None:
    """A real Ctrl-C, which comes in the main thread as it waits for a read that takes long."""
    import _thread

    with Rig("simulated", "checkpoint", tmp_path) as rig:
        slow = Slow(preadv)

        def interrupt() -> None:
            slow.waiting.wait(60)
            time.sleep(0.05)
            _thread.interrupt_main()
            time.sleep(0.2)
            slow.go.set()

        thread = threading.Thread(target=interrupt)
        # A shell lets what it runs in the background ignore Ctrl-C.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                rig.check(2)
            thread.join()
        finally:
            signal.signal(signal.SIGINT, before)
        preadv.arm(-1, -1)
        rig.check(3)
