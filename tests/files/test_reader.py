"""Files that are read under a running model: faults, slow drives, threads, forks; on the CPU and on the simulated device.

Whatever happens, a forward gives the right bits or raises `GroupFileError`, and once the fault is gone it is right again.
"""

from __future__ import annotations

import copy
import errno
import fcntl
import gc
import json
import logging
import os
import random
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from group_offload import GroupFileError, apply_group_offloading
from group_offload.base import pool, reading
from group_offload.base.device import HostBackend
from group_offload.base.mapping import cached_bytes, forget_writes
from group_offload.plan.planner import Place
from group_offload.runtime.copies import jobs, reader
from group_offload.runtime.measure import drive
from group_offload.stores.source import SourceFile

from ..conftest import SPEEDS
from ..engine.test_streams import DIM, Model, Stop, exercise, from_file, late_reads, raise_interrupt, watch_file_reads
from ..support.simulated import SimulatedDevice, use_simulated_device
from .test_files import run_python

WIDTHS = [300] * 4
"""Blocks of several chunks of `SMALL_CHUNK`."""
SMALL_CHUNK = 8192
TIERS = ("checkpoint", "folder")
DEVICES = ("cpu", "simulated")

every_tier = pytest.mark.parametrize("tier", TIERS)
every_device = pytest.mark.parametrize("where", DEVICES)


class Rig:
    """A model that rests in files, and its twin that does not."""

    def __init__(self, where: str, tier: str, folder: Path, widths: list[int] = WIDTHS, **options: Any) -> None:
        self.device = SimulatedDevice(0) if where == "simulated" else None
        torch.manual_seed(0)
        self.resident = Model(widths).eval()
        self.x = torch.randn(2, DIM)
        if tier == "checkpoint":
            self.model: Any = from_file(self.resident, folder / "model.safetensors")
            self.options = {"offload_device": "disk", **options}
        else:
            self.model = copy.deepcopy(self.resident)
            self.options = {"offload_to_disk_path": folder, **options}
        self.folder = folder
        self.handle: Any = None
        self._scope = ExitStack()

    def __enter__(self) -> Rig:
        with ExitStack() as scope:
            if self.device is not None:
                scope.enter_context(use_simulated_device(self.device))
                scope.enter_context(watch_file_reads(self.device))
            scope.callback(self._end)
            self.handle = apply_group_offloading(self.model, "cpu", **self.options)
            self._scope = scope.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._scope.__exit__(*error)

    def _end(self) -> None:
        if self.handle is not None:
            self.handle.remove()
            self.handle = None
        self.clear()
        if self.device is not None:
            self.device.synchronize()
            if self.model is not None:
                assert self.device.pinned_bytes == 0
            # Dropped without remove(): a thread may still be on its way out.
            assert eventually(lambda: self.device is not None and self.device.pinned_bytes == 0)
            assert self.device.allocated_bytes == 0

    def clear(self) -> None:
        self.resident.alive.clear()
        if self.model is not None:
            self.model.alive.clear()

    def forward(self) -> torch.Tensor:
        """The output, on the host; what the next pass needs first may still be on its way."""
        self.clear()
        with torch.no_grad():
            if self.device is None:
                result: torch.Tensor = self.model(self.x)
                return result
            with self.device.running():
                output = self.model(self.device.put(self.x))
            return self.device.get(output)

    def settle(self) -> None:
        """Return once nothing is read."""
        self.handle._engine.transfer.wait_until_enqueued()

    def expected(self) -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = self.resident(self.x)
        return result

    def check(self, passes: int = 1) -> None:
        for _ in range(passes):
            assert torch.equal(self.forward(), self.expected())

    def check_at_rest(self) -> None:
        state = self.resident.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in self.model.state_dict().items())

    def paths(self) -> list[Path]:
        """The files that are read for a forward."""
        return sorted(self.folder.glob("*.safetensors"))

    def drop(self) -> None:
        """Without remove()."""
        self.model = self.handle = None
        gc.collect()


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "CHUNK_BYTES", SMALL_CHUNK)


@pytest.fixture(params=[(where, tier) for where in DEVICES for tier in TIERS], ids="-".join)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    with Rig(*request.param, tmp_path) as rig:
        yield rig


class Preadv:
    """Stands in for `os.preadv`: counts calls, and lets `fault` act in those numbered from `first` to `last`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._real = os.preadv
        self._lock = threading.Lock()
        self.fault: Callable[..., int] | None = None
        self.arm(-1, -1)
        patch.setattr(os, "preadv", self)

    def arm(self, first: int, last: int, fault: Callable[..., int] | None = None) -> None:
        with self._lock:
            self.num_calls = self.num_direct = self.num_faults = 0
            self.first, self.last, self.fault = first, last, fault

    def fail(self, code: int, first: int, last: int | None = None) -> None:
        def raising(*args: Any) -> int:
            raise OSError(code, os.strerror(code))

        self.arm(first, first if last is None else last, raising)

    def __call__(self, fd: int, buffers: Any, position: int) -> int:
        with self._lock:
            number = self.num_calls
            self.num_calls += 1
            self.num_direct += is_direct(fd)
            acts = self.fault is not None and self.first <= number <= self.last
            self.num_faults += acts
            fault = self.fault
        if acts and fault is not None:
            return fault(self._real, fd, buffers, position)
        return self._real(fd, buffers, position)


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.fixture
def preadv(monkeypatch: pytest.MonkeyPatch) -> Preadv:
    return Preadv(monkeypatch)


@pytest.fixture
def scarce_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    """All files are to be read past the page cache, and nothing is in it."""
    monkeypatch.setattr("group_offload.stores.ways.available_ram", lambda: 0)
    monkeypatch.setattr(SourceFile, "is_cached", lambda *args: False)


def has_direct_reads(folder: Path) -> bool:
    (folder / "probe").write_bytes(bytes(4096))
    try:
        os.close(os.open(folder / "probe", os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def assert_tells(error: GroupFileError, rig: Rig, what: str) -> None:
    """The message has the file, the group, the place, what happened and what to do."""
    message = str(error)
    assert any(str(path) in message for path in (rig.folder, *rig.paths())), message
    assert any(repr(group.group_id) in message for group in rig.handle.groups), message
    assert re.search(r"at byte [\d,]+", message), message
    assert what in message and "load the model again" in message, message


def eventually(holds: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Threads of the pools may still be on their way out of a read."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
        gc.collect()
    return True


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """What `call` returns or raises; a failure if it does neither."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def task() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=task, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"it hangs: nothing after {seconds} s"
    if errors:
        raise errors[0]
    return results[0]


def within_here(seconds: float, call: Callable[[], Any]) -> Any:
    """The same in this thread, which has to be the main one: also where no other can be started any more."""

    def hangs(*args: Any) -> None:
        raise AssertionError(f"it hangs: nothing after {seconds} s")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_mappings(folder: Path) -> int:
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


def num_threads(kind: str) -> int:
    """Of the pool that there is now, or by their name."""
    names = [each.name for each in threading.enumerate() if getattr(each, "_pool", pool._pool) is pool._pool]
    return sum(name.startswith(f"group_offload-{kind}") for name in names)


# ---------------------------------------------------------------- errors of the drive


def test_what_comes_while_a_worker_leaves_is_read(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that found nothing to do, and is slow to end, does not count as one that will look again."""
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
    """One forward for each read that a forward makes, and that one read fails. What was read ahead is tried once more."""
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


def test_errors_in_every_read_from_one_on(rig: Rig, preadv: Preadv) -> None:
    rig.check()
    rig.settle()
    for number in (0, 1, 5):
        preadv.fail(errno.EIO, number, 10**6)
        for _ in range(2):
            with pytest.raises(GroupFileError) as caught:
                rig.check(3)
            assert_tells(caught.value, rig, os.strerror(errno.EIO))
        rig.check_at_rest()
        del caught
        preadv.arm(-1, -1)
        rig.check(2)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
def test_what_the_system_says_is_told(code: int, rig: Rig, preadv: Preadv) -> None:
    preadv.fail(code, 0, 10**6)
    with pytest.raises(GroupFileError) as caught:
        rig.check(3)
    assert_tells(caught.value, rig, os.strerror(code))
    assert isinstance(caught.value.__cause__, (GroupFileError, OSError))
    preadv.arm(-1, -1)
    del caught
    rig.check(2)


def test_remove_while_every_read_fails(rig: Rig, preadv: Preadv) -> None:
    """Weights at rest do not go the way of the reader."""
    rig.check()
    preadv.fail(errno.EIO, 0, 10**6)
    with pytest.raises(GroupFileError):
        rig.check(3)
    within(60, rig.handle.remove)
    rig.check_at_rest()


@pytest.mark.parametrize("size", [1, 100, 4096, 5000])
def test_reads_that_return_less(size: int, rig: Rig, preadv: Preadv) -> None:
    preadv.arm(0, 10**9, lambda real, fd, buffers, position: real(fd, [buffers[0][:size]], position))
    if size == 1:
        preadv.last = 40  # some reads only: byte by byte takes too long
    rig.check(2)
    assert preadv.num_faults


def test_an_interrupted_system_call(rig: Rig, preadv: Preadv) -> None:
    """What a signal handler of the caller raises would come in the main thread; a read itself is made again by Python."""
    preadv.arm(3, 3, lambda real, fd, buffers, position: real(fd, [buffers[0][:1]], position))
    rig.check(2)


@every_tier
@every_device
def test_a_slow_drive(where: str, tier: str, tmp_path: Path, preadv: Preadv) -> None:
    def slowly(real: Any, fd: int, buffers: Any, position: int) -> int:
        time.sleep(0.004)
        count: int = real(fd, buffers, position)
        return count

    with Rig(where, tier, tmp_path) as rig:
        preadv.arm(0, 10**9, slowly)
        within(60, lambda: rig.check(3))


# ---------------------------------------------------------------- how fast the drive is


def test_reads_at_the_same_time_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(reader, "time", SimpleNamespace(perf_counter=lambda: now))
    rig = reader.Reader(HostBackend())
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
    monkeypatch.setattr(drive, "MIN_BYTES", 100)
    meter = drive.DriveMeter()
    meter.note(100.0, 50.0, 7, 7000)  # what was read before the first pass ended is set-up
    assert meter.bytes_per_s is None
    meter.note(110.0, 50.0 + busy, 7 + cached, 7000 + direct)
    assert meter.bytes_per_s == (pytest.approx(direct / busy) if is_known else None)


def test_the_drive_is_what_the_last_passes_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was held up by something else does not count, nor do those of long ago."""
    monkeypatch.setattr(drive, "MIN_BYTES", 1)
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
    if not has_direct_reads(tmp_path):
        pytest.skip("this file system has none")
    monkeypatch.setattr("group_offload.runtime.placer.known_speeds", lambda *args, **options: SPEEDS)
    monkeypatch.setattr("group_offload.runtime.budget.budgeter.auto_ram", lambda: 0)
    monkeypatch.setattr(drive, "MIN_BYTES", 1)
    seconds = 0.05

    def slowly(real: Any, fd: int, buffers: Any, position: int) -> int:
        time.sleep(seconds)
        count: int = real(fd, buffers, position)
        return count

    with Rig("simulated", tier, tmp_path, **budgets) as rig:
        preadv.arm(0, 10**9, slowly)
        most = SMALL_CHUNK / seconds * reader.num_threads()
        rig.check()
        assert rig.handle.plan.details.problem.speeds.drive == SPEEDS.drive > most
        rig.check(5)
        plan = rig.handle.plan.details
        planned = zip(plan.problem.groups, plan.places, strict=True)
        read = sum(group.num_bytes for group, place in planned if place is Place.FILE)
        assert plan.problem.speeds.drive <= most
        assert plan.prediction.drive_seconds >= read / most > 0


# ---------------------------------------------------------------- direct reads


@every_tier
@every_device
@pytest.mark.parametrize("widths", [WIDTHS, [3, 5, 300, 7], [1000]], ids=str)
def test_direct_reads(
    widths: list[int], where: str, tier: str, tmp_path: Path, preadv: Preadv, scarce_ram: None
) -> None:
    """At any position, also where a file ends inside a block: most of these do."""
    if not has_direct_reads(tmp_path):
        pytest.skip("this file system has none")
    with Rig(where, tier, tmp_path, widths) as rig:
        preadv.arm(-1, -1)  # set-up has looked at what else is in the folder
        rig.check(3)
        rig.settle()
        stats = rig.handle.stats()
        assert preadv.num_direct == preadv.num_calls > 0
        assert stats.bytes_read["direct"] > 0 and stats.bytes_read["page cache"] == 0
        assert {group.way for group in rig.handle.groups if group.num_bytes} == {"direct"}


@every_device
def test_a_cold_file_is_read_past_the_page_cache(
    where: str, tmp_path: Path, preadv: Preadv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is told to the reader here but that RAM is scarce: the page cache really does not have the file."""
    if not has_direct_reads(tmp_path):
        pytest.skip("this file system has none")
    monkeypatch.setattr("group_offload.stores.ways.available_ram", lambda: 0)
    monkeypatch.setattr(reader, "CHUNK_BYTES", 256 << 10)
    widths = [60_000] * 3
    with Rig(where, "checkpoint", tmp_path, widths) as rig:
        (path,) = rig.paths()
        size = path.stat().st_size
        drop_from_page_cache(path)
        if num_cached(path) > size / 5:
            pytest.skip("the page cache cannot be emptied here")
        rig.check()
        rig.settle()
        assert rig.handle.stats().bytes_read["direct"] > size * 0.7 and preadv.num_direct > 0
        assert num_cached(path) < size / 3  # and it did not get there by that
        path.read_bytes()
        preadv.arm(-1, -1)
        rig.check(2)
        rig.settle()
        assert preadv.num_direct < preadv.num_calls / 2


def drop_from_page_cache(path: Path) -> None:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):  # what is mapped stays
            start, end = (int(address, 16) for address in line.split()[0].split("-"))
            forget_writes(start, end - start)
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def num_cached(path: Path) -> int:
    whole = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
    return cached_bytes(whole.data_ptr(), whole.numel())


@pytest.fixture
def warnings_of_reads() -> Iterator[list[str]]:
    messages: list[str] = []
    logger = logging.getLogger("group_offload")
    handler = logging.Handler()

    def emit(record: logging.LogRecord) -> None:
        messages.append(record.getMessage())
        time.sleep(0.02)  # long enough for another thread that reads to have something to say

    handler.emit = emit  # type: ignore[method-assign]
    logger.addHandler(handler)
    reading._said.clear()
    yield messages
    logger.removeHandler(handler)
    reading._said.clear()


@every_tier
@every_device
@pytest.mark.parametrize(("first", "code"), [(0, errno.EINVAL), (0, errno.EFAULT), (4, errno.EOPNOTSUPP)], ids=str)
def test_direct_reads_that_are_refused(
    first: int,
    code: int,
    where: str,
    tier: str,
    tmp_path: Path,
    preadv: Preadv,
    scarce_ram: None,
    warnings_of_reads: list[str],
) -> None:
    """Then files are read through the page cache, which is said once."""
    if not has_direct_reads(tmp_path):
        pytest.skip("this file system has none")

    def refuse(real: Any, fd: int, buffers: Any, position: int) -> int:
        if is_direct(fd):
            raise OSError(code, os.strerror(code))
        count: int = real(fd, buffers, position)
        return count

    with Rig(where, tier, tmp_path) as rig:
        preadv.arm(first, 10**9, refuse)
        rig.check(3)
        rig.settle()
        assert rig.handle.stats().bytes_read["page cache"] > 0
    told = [message for message in warnings_of_reads if "Direct reads" in message]
    assert len(told) == 1 and os.strerror(code) in told[0]


@every_device
def test_files_that_cannot_be_opened_for_direct_reads(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scarce_ram: None, warnings_of_reads: list[str]
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    for tier in TIERS:
        with Rig(where, tier, tmp_path / tier if tier == "folder" else tmp_path) as rig:
            rig.check(3)
    assert len([message for message in warnings_of_reads if "Direct reads" in message]) == 1


def test_direct_reads_on_a_file_system_in_ram(scarce_ram: None) -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is none")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for where in DEVICES:
            for tier in TIERS:
                (Path(folder) / where / tier).mkdir(parents=True)
                with Rig(where, tier, Path(folder) / where / tier) as rig:
                    rig.check(3)


def test_an_error_of_a_direct_read(tmp_path: Path, preadv: Preadv, scarce_ram: None) -> None:
    """A real one: it is told, and not taken for a refusal."""
    if not has_direct_reads(tmp_path):
        pytest.skip("this file system has none")
    for where in DEVICES:
        with Rig(where, "checkpoint", tmp_path) as rig:
            preadv.fail(errno.EIO, 0, 10**6)
            with pytest.raises(GroupFileError) as caught:
                rig.check(2)
            assert_tells(caught.value, rig, os.strerror(errno.EIO))
            preadv.arm(-1, -1)
            rig.check(2)
            rig.settle()
            assert rig.handle.stats().bytes_read["page cache"] == 0


@every_tier
@every_device
@pytest.mark.parametrize("size", [4096, 512, 1000])
def test_direct_reads_that_return_less(
    size: int, where: str, tier: str, tmp_path: Path, preadv: Preadv, scarce_ram: None
) -> None:
    """The file is whole: what a read did not bring comes with the next one."""
    if not has_direct_reads(tmp_path):
        pytest.skip("this file system has none")

    def short(real: Any, fd: int, buffers: Any, position: int) -> int:
        if not is_direct(fd):
            count: int = real(fd, buffers, position)
            return count
        return min(real(fd, buffers, position), size)

    with Rig(where, tier, tmp_path) as rig:
        preadv.arm(0, 10**9, short)
        rig.check(2)
        assert preadv.num_faults


# ---------------------------------------------------------------- other programs


@every_tier
@every_device
@pytest.mark.parametrize("direct", [False, True], ids=["page cache", "direct"])
def test_a_truncated_file_comes_back(
    direct: bool, where: str, tier: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
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


@every_tier
@every_device
def test_a_file_that_is_cut_off_while_it_is_read(where: str, tier: str, tmp_path: Path, preadv: Preadv) -> None:
    """After it was looked at, and before it is read: the read says that it ends."""
    with Rig(where, tier, tmp_path) as rig:
        rig.check()
        rig.settle()
        preadv.arm(5, 10**6, lambda *args: 0)
        with pytest.raises(GroupFileError) as caught:
            rig.check(2)
        assert_tells(caught.value, rig, "ends there")
        del caught
        preadv.arm(-1, -1)
        rig.check(3)


@every_tier
@every_device
@pytest.mark.parametrize("what", ["deleted", "replaced", "replaced by a folder", "folder gone"])
def test_a_file_that_goes_under_a_running_model(what: str, where: str, tier: str, tmp_path: Path) -> None:
    """What was opened is read on, whatever has its name."""
    (tmp_path / "weights").mkdir()
    with Rig(where, tier, tmp_path / "weights") as rig:
        rig.check()
        for path in rig.paths():
            if what == "replaced":
                other = path.with_name("other")
                other.write_bytes(bytes(path.stat().st_size))
                os.replace(other, path)
            elif what != "folder gone":
                path.unlink()
                if what == "replaced by a folder":
                    path.mkdir()
        if what == "folder gone":
            shutil.rmtree(rig.folder)
        rig.check(3)
        rig.check_at_rest()


@pytest.mark.parametrize(("where", "tier"), [("simulated", "folder"), ("cpu", "checkpoint")])
def test_a_folder_that_may_not_be_entered_any_more(where: str, tier: str, tmp_path: Path) -> None:
    """By a process that is not root, which this one may be. Right or told; right again once it may be entered."""
    done = run_python(
        """
        import group_offload.stores.ways
        group_offload.stores.ways.LOCKED_SHARE = 0.0
        import tests.files.test_reader as t, tests.files.test_files
        where, tier, folder = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
        folder.mkdir()
        os.chown(folder, 12345, 12345) if os.geteuid() == 0 else None
        inner = folder / "weights"
        import torch._dynamo  # which may be where that user may not read
        if os.geteuid() == 0:
            os.setgroups([]); os.setgid(12345); os.setuid(12345)
            import ctypes
            ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: may look into its own /proc, as if it had been started so
        inner.mkdir()
        told = []
        with t.Rig(where, tier, inner) as rig:
            rig.check(2)
            for mode in (0, 0o700) * 2:
                inner.chmod(mode)
                for number in range(3):
                    try:
                        rig.check()
                    except GroupFileError as error:
                        assert str(inner) in str(error) and "Permission denied" in str(error), error
                        assert mode == 0 or number == 0, error  # of what was read ahead
                        told.append(mode)
            for path in rig.paths():
                for mode in (0, 0o600):
                    path.chmod(mode)
                    try:
                        rig.check()
                    except GroupFileError as error:  # with 0o600: of what was read ahead
                        assert str(inner) in str(error) and "Permission denied" in str(error), error
                rig.check()
            rig.check(2)
        print(len(told))
        """,
        where,
        tier,
        tmp_path_for_others(tmp_path),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    if tier == "checkpoint":
        assert int(done.stdout) == 0  # it is open


def tmp_path_for_others(tmp_path: Path) -> Path:
    """A folder that another user may reach: pytest's own are for its user alone."""
    folder = Path(tempfile.mkdtemp(prefix="group_offload-test-"))
    folder.chmod(0o755)
    _to_delete.append(folder)
    return folder / "in"


_to_delete: list[Path] = []


@pytest.fixture(autouse=True, scope="module")
def _delete_at_the_end() -> Iterator[None]:
    yield
    for folder in _to_delete:
        shutil.rmtree(folder, ignore_errors=True)


# ---------------------------------------------------------------- what is left


@every_tier
@every_device
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
def test_dropped_while_files_are_read(tier: str, tmp_path: Path, preadv: Preadv) -> None:
    def slowly(real: Any, fd: int, buffers: Any, position: int) -> int:
        time.sleep(0.003)
        count: int = real(fd, buffers, position)
        return count

    before = num_fds()
    device = SimulatedDevice(0)
    with Rig("simulated", tier, tmp_path) as rig:
        assert rig.device is not None
        device = rig.device
        rig.check(2)
        preadv.arm(0, 10**9, slowly)
        rig.check()  # what the next pass needs first is being read
        rig.drop()
        assert eventually(lambda: num_mappings(tmp_path) == 0)
    device.synchronize()
    assert eventually(lambda: device.pinned_bytes == 0)
    assert eventually(lambda: num_fds() <= before)


# ---------------------------------------------------------------- what is counted


@every_tier
@every_device
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
            # Images in a checkpoint are padded, so that tensors begin where kernels want them to.
            assert (0.9 if tier == "checkpoint" else 1) * num_bytes <= num_read <= num_bytes + stats.staging_bytes
            if where == "cpu" and number == 1:
                assert num_bytes == file_bytes
            assert stats.bytes_onloaded["ram"] == stats.bytes_onloaded["pageable ram"] == 0
            assert stats.pinned_bytes == 0 and stats.host_bytes == 0 and stats.file_bytes == file_bytes
            limit = min(reader.NUM_FRAMES, 1 - -file_bytes // SMALL_CHUNK) * SMALL_CHUNK
            assert stats.staging_bytes == (limit if where == "simulated" else 0)


@every_tier
def test_staging_memory_is_a_formula(tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed number of chunks, or fewer for a small model."""
    for frames, widths in ((1, WIDTHS), (2, WIDTHS), (4, WIDTHS), (18, [8]), (18, WIDTHS)):
        monkeypatch.setattr(reader, "NUM_FRAMES", frames)
        with Rig("simulated", tier, tmp_path, widths) as rig:
            for path in rig.paths():
                path.rename(path.with_suffix(".gone"))
            assert rig.device is not None
            file_bytes = sum(group.num_bytes for group in rig.handle.groups)
            rig.check(3)
            rig.settle()
            expected = min(frames, 1 - -file_bytes // SMALL_CHUNK) * SMALL_CHUNK
            assert rig.handle.stats().staging_bytes == rig.device.pinned_bytes == expected


@every_tier
@every_device
def test_a_trace_shows_the_reads(where: str, tier: str, tmp_path: Path) -> None:
    with Rig(where, tier, tmp_path) as rig:
        rig.check(2)
        rig.settle()
        read_before = sum(rig.handle.stats().bytes_read.values())
        with rig.handle.trace(tmp_path / "trace.json"):
            rig.check()
        num_bytes = sum(rig.handle.stats().bytes_read.values()) - read_before
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        reads = [e for e in events if e["ph"] == "X" and lanes[e["tid"]].startswith("file reads")]
        assert sum(event["args"]["bytes"] for event in reads) == num_bytes > 0
        assert {event["name"] for event in reads} <= {group.group_id for group in rig.handle.groups}
        assert len({event["name"] for event in reads}) >= len(WIDTHS)
        assert "H2D" in {lanes[event["tid"]] for event in events if event["ph"] == "X"}


# ---------------------------------------------------------------- late, in any order


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.integers(0, 2**32),
    st.sampled_from(["random", "lazy", "eager"]),
    st.sampled_from(["in_files", "in_checkpoint"]),
    st.sampled_from([{}, {"offload_type": "leaf_level"}, {"record_stream": True}, {"use_stream": False}]),
)
def test_late_and_reordered_reads(seed: int, laziness: Any, tier: str, options: dict[str, Any]) -> None:
    exercise(seed, laziness, {tier: True, **options}, num_passes=3)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.sampled_from(["random", "eager"]), st.sampled_from(TIERS))
def test_late_reads_of_which_some_fail(seed: int, laziness: Any, tier: str) -> None:
    """Every forward is right or says that a file cannot be read, and those without a fault become right again."""
    rng = random.Random(seed)
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
        late_reads(rng),
    ):
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


# ---------------------------------------------------------------- interrupts and threads


class Slow:
    """Lets reads take their time, until told otherwise."""

    def __init__(self, preadv: Preadv) -> None:
        self.go = threading.Event()
        self.waiting = threading.Event()
        preadv.arm(0, 10**9, self)

    def __call__(self, real: Any, fd: int, buffers: Any, position: int) -> int:
        self.waiting.set()
        self.go.wait(60)
        count: int = real(fd, buffers, position)
        return count


@every_tier
@every_device
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_in_the_middle_of_a_forward(
    error: type[BaseException], where: str, tier: str, tmp_path: Path, preadv: Preadv
) -> None:
    """While the next blocks are read."""
    with Rig(where, tier, tmp_path) as rig:

        @contextmanager
        def raises(position: int) -> Iterator[None]:
            if position == 1:
                raise error
            yield

        def slowly(real: Any, fd: int, buffers: Any, position: int) -> int:
            time.sleep(0.002)
            count: int = real(fd, buffers, position)
            return count

        rig.check(2)
        usual = rig.model.on_block
        preadv.arm(0, 10**9, slowly)
        for _ in range(3):
            rig.model.on_block = raises
            with pytest.raises(error):
                rig.forward()
            rig.model.on_block = usual
            rig.check()
        rig.check_at_rest()


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


@pytest.mark.parametrize(("where", "method"), [("simulated", "submit"), ("cpu", "read_now")])
def test_an_interrupt_inside_of_the_reader(
    where: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Rig(where, "checkpoint", tmp_path) as rig:
        rig.check()
        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(reader.Reader, method, raise_interrupt)
                with pytest.raises(KeyboardInterrupt):
                    rig.forward()
            rig.check(2)


@every_tier
@every_device
def test_two_threads_run_one_model(where: str, tier: str, tmp_path: Path) -> None:
    """Passes of several threads take turns."""
    with Rig(where, tier, tmp_path) as rig:
        expected = rig.expected()
        rig.model.alive = Nothing()
        outputs: list[torch.Tensor] = []
        errors: list[BaseException] = []
        lock = threading.Lock()

        def task() -> None:
            try:
                for _ in range(5):
                    with torch.no_grad():
                        if rig.device is None:
                            output = rig.model(rig.x)
                        else:
                            with lock, rig.device.running():  # activations are the caller's business
                                output = rig.device.get(rig.model(rig.device.put(rig.x)))
                    outputs.append(output)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=task, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads) and not errors
        assert len(outputs) == 15 and all(torch.equal(output, expected) for output in outputs)


class Nothing(list[torch.Tensor]):
    def append(self, value: torch.Tensor) -> None:
        pass


@every_device
def test_two_models_at_once(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share the threads that read, of which there are few."""
    (tmp_path / "other").mkdir()
    with Rig(where, "checkpoint", tmp_path) as rig:
        other = from_file(rig.resident, tmp_path / "model.safetensors")
        handle = apply_group_offloading(other, "cpu", offload_device="disk")
        expected = rig.expected()
        errors: list[BaseException] = []

        def task(model: Any) -> None:
            try:
                model.alive = Nothing()
                for _ in range(6):
                    with torch.no_grad():
                        if rig.device is None:
                            output = model(rig.x)
                        else:
                            with rig.device.running():
                                output = model(rig.device.put(rig.x))
                            output = rig.device.get(output)
                    assert torch.equal(output, expected)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=task, args=(model,), daemon=True) for model in (rig.model, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert not errors, errors
        handle.remove()


# ---------------------------------------------------------------- processes

_IN_A_CHILD = """
import group_offload.stores.ways
group_offload.stores.ways.LOCKED_SHARE = 0.0
import group_offload.runtime.copies.reader as reader, time, signal, threading
reader.CHUNK_BYTES = 8192
import tests.files.test_reader as t
where, folder = sys.argv[1], pathlib.Path(sys.argv[2])
rig = t.Rig(where, "checkpoint", folder)
rig.__enter__()
rig.check(2)
real = os.preadv
def slow(fd, buffers, position):
    time.sleep(0.02)
    return real(fd, buffers, position)
"""


@pytest.mark.parametrize(
    ("where", "end"),
    [("cpu", "return"), ("simulated", "return"), ("simulated", "raise KeyboardInterrupt")],
)
def test_interpreter_exit_with_reads_in_flight(end: str, where: str, tmp_path: Path) -> None:
    ending = {"return": "pass"}.get(end, end)
    # Not a daemon: Python ends those inside of torch's C++, which ends the process.
    begin = (
        "rig.forward()" if where == "simulated" else "threading.Thread(target=rig.forward).start(); time.sleep(0.03)"
    )
    done = run_python(f"{_IN_A_CHILD}\nos.preadv = slow\n{begin}\n{ending}", where, tmp_path)
    assert done.returncode in ((0,) if "Keyboard" not in end else (1, 130, -2)), done.stderr[-2000:]
    assert done.stderr == "" or end != "return", done.stderr[-2000:]
    assert "Fatal" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr[-2000:]


def test_a_forward_at_interpreter_exit(tmp_path: Path) -> None:
    """When no thread can be started any more: right or an error, and no hang."""
    done = run_python(
        _IN_A_CHILD
        + """
import atexit
def last():
    try:
        try:
            t.within_here(60, rig.forward)
            print("ran", flush=True)
        except (RuntimeError, GroupFileError) as error:
            print(type(error).__name__, flush=True)
        t.within_here(60, rig.handle.remove)
        print("removed", flush=True)
    except BaseException as error:
        import traceback; traceback.print_exc()
        os._exit(4)
atexit.register(last)
""",
        "simulated",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "removed" in done.stdout


def test_fork_while_files_are_read(tmp_path: Path) -> None:
    """The child has none of its parent's threads, and ends all the same; the parent goes on."""
    done = run_python(
        _IN_A_CHILD
        + """
import warnings; warnings.simplefilter("ignore")
os.preadv = slow
thread = threading.Thread(target=lambda: [rig.forward() for _ in range(3)])
thread.start()
for _ in range(4):
    time.sleep(0.03)
    child = os.fork()
    if not child:
        sys.exit(0) if _ % 2 else os._exit(0)
    for _ in range(200):
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            break
        time.sleep(0.05)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        print("the child hangs", flush=True)
        os._exit(3)
    assert status == 0, status
thread.join()
os.preadv = real
rig.check(2)
""",
        "simulated",
        tmp_path,
    )
    assert done.returncode == 0, (done.stdout, done.stderr[-2000:])


@every_tier
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_model_that_is_used_in_a_forked_child(tier: str, tmp_path: Path) -> None:
    with Rig("cpu", tier, tmp_path) as rig:
        rig.check()
        child = os.fork()
        if not child:
            code = 1
            try:
                torch.set_num_threads(1)  # OpenMP's threads are not there either
                rig.check(2)
                rig.handle.remove()
                rig.check_at_rest()
                code = 0
            finally:
                os._exit(code)
        deadline = time.monotonic() + 30
        found, status = 0, 0
        while not found and time.monotonic() < deadline:
            found, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.01)
        if not found:
            os.kill(child, 9)
            os.waitpid(child, 0)
        assert found and status == 0
        rig.check(2)


def test_a_handle_in_a_forked_child_can_be_removed(tmp_path: Path) -> None:
    """Reads were under way in the parent as it forked: nobody ends them in the child."""
    done = run_python(
        _IN_A_CHILD
        + """
import warnings; warnings.simplefilter("ignore")
os.preadv = slow
rig.forward()  # what the next pass needs first is being read
child = os.fork()
if not child:
    os.preadv = real
    try:
        t.within_here(60, rig.handle.remove)
        rig.check_at_rest()
    except BaseException:
        import traceback; traceback.print_exc()
        os._exit(4)
    os._exit(0)
status = os.waitpid(child, 0)[1]
os.preadv = real
rig.check(2)
sys.exit(0 if status == 0 else 5)
""",
        "simulated",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@every_device
def test_no_more_threads_can_be_started(where: str, tmp_path: Path) -> None:
    """A process at its limit: the forward is right or raises, and does not hang; nor does remove(). Later it works again."""
    done = run_python(
        _IN_A_CHILD
        + """
from group_offload.base import pool
rig.settle()
pool._forget()  # a new one, with no threads yet
start = threading.Thread.start
is_full = True
def refuse(thread):
    if is_full and thread.name.startswith("group_offload-io"):
        raise RuntimeError("can't start new thread")
    start(thread)
threading.Thread.start = refuse
def fails():
    try:
        rig.check(2)
    except RuntimeError as error:
        return "can't start new thread" in str(error)
    return True  # another thread did it
try:
    rig.model.route = rig.resident.route = [3, 2, 1, 0]  # so that there is something to read
    for number in range(2):
        assert t.within(60, fails), number
    is_full = False
    t.within(60, lambda: rig.check(3))
    t.within(60, rig.handle.remove)
    rig.check_at_rest()
except BaseException:
    import traceback; traceback.print_exc()
    os._exit(4)
""",
        where,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr[-2500:]
