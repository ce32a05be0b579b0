"""The file that activations past the budget of RAM are written to: temporary, unlinked, read and written by threads."""

from __future__ import annotations

import os
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from ..base.device import Event
from ..base.layout import memory_of
from ..base.pool import Task, begin_all, finish_all
from ..base.reading import read_part
from ..errors import GroupFileError
from .ranges import ALIGNMENT, Range, Ranges
from .trace import READS, WRITES, ActivationTrace

STEP_BYTES = 1 << 30
"""The file is allocated in steps of this size, so that a full disk shows before anything is written."""
PIECE_BYTES = 8 << 20
"""What one thread writes or reads at a time."""


class SpillJob:
    """A write or read in progress."""

    def __init__(self, parts: Sequence[Task[None]]) -> None:
        self._parts = parts

    @property
    def is_done(self) -> bool:
        return all(part.is_done for part in self._parts)

    def wait(self) -> None:
        """Return once no thread uses the memory any more.

        Raises:
            GroupFileError: the system refused a part of it.
        """
        finish_all(self._parts)


class _OpenFile:
    """A file without a name. It is closed with its last user, which may be a thread."""

    def __init__(self, folder: Path) -> None:
        self.fd, path = tempfile.mkstemp(prefix="group_offload-", dir=folder)
        os.unlink(path)
        weakref.finalize(self, os.close, self.fd)


class SpillFile:
    """A temporary file in `folder`, which nobody else sees and which goes with the process. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: _OpenFile | None = None
        self._ranges = Ranges()
        self._num_bytes = 0
        self.used_bytes = 0
        self.tracer: ActivationTrace | None = None

    def take(self, num_bytes: int) -> Range:
        """Room for `num_bytes`.

        Raises:
            GroupFileError: the disk is full, or the folder cannot be written to.
        """
        found = self._ranges.take(num_bytes)
        if found is None:
            self._grow(-(-num_bytes // ALIGNMENT) * ALIGNMENT)
            found = self._ranges.take(num_bytes)
            assert found is not None
        self.used_bytes += found.num_bytes
        return found

    def give(self, spot: Range) -> None:
        self._ranges.give(spot)
        self.used_bytes -= spot.num_bytes

    def write(self, source: torch.Tensor, spot: Range, left: Event, name: str) -> SpillJob:
        """Write RAM that is filled once the device reached `left`. `name` is for a trace."""
        tracer = self.tracer

        def write_filled(fd: int, part: memoryview, position: int) -> None:
            left.synchronize()
            started = time.perf_counter()
            write_part(fd, part, position)
            if tracer is not None:
                tracer.add_on_host(WRITES, name, started, time.perf_counter(), len(part))

        return self._start("write", write_filled, source, spot)

    def read(self, target: torch.Tensor, spot: Range, last_uses: Sequence[Event], name: str) -> SpillJob:
        """Read into RAM that is free once the device reached `last_uses`."""
        tracer = self.tracer

        def read_when_free(fd: int, part: memoryview, position: int) -> None:
            for use in last_uses:
                use.synchronize()
            started = time.perf_counter()
            if read_part(fd, part, position) != len(part):
                raise OSError(0, "it ends too early")
            if tracer is not None:
                tracer.add_on_host(READS, name, started, time.perf_counter(), len(part))

        return self._start("read", read_when_free, target, spot)

    def _start(
        self, verb: str, work: Callable[[int, memoryview, int], None], memory: torch.Tensor, spot: Range
    ) -> SpillJob:
        assert self._file is not None
        file, area, folder = self._file, memory_of(memory), self._folder

        def run(start: int) -> None:
            part = area[start : start + PIECE_BYTES]
            try:
                work(file.fd, part, spot.start + start)
            except OSError as error:
                raise GroupFileError(
                    f"Could not {verb} {len(part)} bytes of activations at byte {spot.start + start} of the temporary file in "
                    f"{str(folder)!r}: {error.strerror or error}. Pass another disk_path, or a larger host_budget_bytes."
                ) from error

        return SpillJob(begin_all(partial(run, start) for start in range(0, len(area), PIECE_BYTES)))

    def _grow(self, num_bytes: int) -> None:
        try:
            if self._file is None:
                self._file = _OpenFile(self._folder)
            try:
                size = max(num_bytes, STEP_BYTES)
                os.posix_fallocate(self._file.fd, self._num_bytes, size)
            except OSError:
                size = num_bytes  # there may be room for less than a step
                os.posix_fallocate(self._file.fd, self._num_bytes, size)
        except OSError as error:
            raise GroupFileError(
                f"No room for {num_bytes} bytes of activations beyond {self._num_bytes} in a temporary file in "
                f"{str(self._folder)!r}: {error.strerror or error}. Pass another disk_path, or a larger host_budget_bytes."
            ) from error
        self._ranges.add(self._num_bytes, size)
        self._num_bytes += size


def write_part(fd: int, source: memoryview, position: int) -> None:
    """Write all of `source` from `position` on."""
    done = 0
    while done < len(source):
        done += os.pwrite(fd, source[done:], position + done)
