"""Models that are stored in files, and faults of the disk: the tests in tests/files/reading/ share them."""

from __future__ import annotations

import fcntl
import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from group_offload import StorageError, apply_group_offloading
from group_offload.base import pool, reading

from .asserts import assert_at_rest
from .files import failing
from .inside import wait_until_enqueued
from .models import DIM, RoutedModel
from .on_device import forward, twin_on
from .reads import watch_file_reads
from .rigs import run
from .simulated import SimulatedDevice, use_simulated_device

WIDTHS = [300] * 4
"""Blocks of several chunks of `SMALL_CHUNK`."""
SMALL_CHUNK = 8192
TIERS = ("checkpoint", "folder")


every_tier = pytest.mark.parametrize("tier", TIERS)
RIGS = [("cpu", "checkpoint"), ("simulated", "checkpoint"), ("simulated", "folder")]
every_rig = pytest.mark.parametrize(("where", "tier"), RIGS)


class Rig:
    """A model that is stored in files, and its twin that does not."""

    def __init__(self, where: str, tier: str, folder: Path, widths: list[int] = WIDTHS, **options: Any) -> None:
        self.device = SimulatedDevice(0) if where == "simulated" else None
        torch.manual_seed(0)
        self.resident = RoutedModel(widths).eval()
        self.x = torch.randn(2, DIM)
        self.model, where_it_rests = twin_on(tier, self.resident, folder)
        self.options = {**where_it_rests, **options}
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
            assert self.device.pinned_bytes == self.device.allocated_bytes == 0

    def clear(self) -> None:
        self.resident.alive.clear()
        if self.model is not None:
            self.model.alive.clear()

    def forward(self) -> torch.Tensor:
        """The output, on the host; what the next pass needs first may still be on its way."""
        self.clear()
        if self.device is None:
            return run(self.model, self.x)
        return self.device.get(forward(self.device, self.model, self.x))

    def settle(self) -> None:
        """Return once nothing is read."""
        wait_until_enqueued(self.handle)

    def expected(self) -> Any:
        return run(self.resident, self.x)

    def check(self, passes: int = 1) -> None:
        for _ in range(passes):
            assert torch.equal(self.forward(), self.expected())

    def check_at_rest(self) -> None:
        assert_at_rest(self.model, self.resident)

    def paths(self) -> list[Path]:
        """The files that are read for a forward."""
        return sorted(self.folder.glob("*.safetensors"))

    def drop(self) -> None:
        """Without remove()."""
        self.model = self.handle = None
        gc.collect()


class Preadv:
    """Stands in for `read_at`: counts calls, and lets `fault` act in those numbered from `first` to `last`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        real = reading.read_at
        self._real = lambda fd, buffers, position: real(fd, buffers[0], position)
        self._lock = threading.Lock()
        self.fault: Callable[..., int] | None = None
        self.arm(-1, -1)
        patch.setattr(reading, "read_at", lambda fd, target, position: self(fd, [target], position))

    def arm(self, first: int, last: int, fault: Callable[..., int] | None = None) -> None:
        with self._lock:
            self.num_calls = self.num_direct = self.num_faults = 0
            self.first, self.last, self.fault = first, last, fault

    def fail(self, code: int, first: int, last: int | None = None) -> None:
        self.arm(first, first if last is None else last, failing(code))

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


def has_direct_reads(folder: Path) -> bool:
    (folder / "probe").write_bytes(bytes(4096))
    try:
        os.close(os.open(folder / "probe", os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def assert_tells(error: StorageError, rig: Rig, what: str) -> None:
    """The message has the file, the group, the place, what happened and what to do."""
    message = str(error)
    assert any(str(path) in message for path in (rig.folder, *rig.paths())), message
    assert any(repr(group.group_id) in message for group in rig.handle.groups), message
    assert re.search(r"at byte [\d,]+", message), message
    assert what in message and "Reload the model" in message, message


def eventually(holds: Callable[[], bool], seconds: float = 240.0) -> bool:
    """Threads of the pools may still be on their way out of a read."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
        gc.collect()
    return True


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """What `call` returns or raises; a failure if it does neither. In this thread, which has to be the main one."""

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


def num_threads() -> int:
    """Of the pool that there is now."""
    return sum(getattr(each, "_pool", None) is pool._pool for each in threading.enumerate())
