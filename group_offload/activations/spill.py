"""The file that activations past the budget of RAM are written to: temporary, unlinked, read and written by threads."""

from __future__ import annotations

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
from ..base.system import take_room, write_at
from ..base.tuning import tuning
from ..errors import GroupFileError
from .ranges import Range, Ranges, round_up
from .trace import READS, WRITES, ActivationTrace


class SpillJob:
    """A write or a read in progress, by several threads."""

    def __init__(self, parts: Sequence[Task[None]], *, is_read: bool) -> None:
        self._parts = parts
        self.is_read = is_read

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
        file = tempfile.TemporaryFile(prefix="group_offload-", dir=folder, buffering=0)  # noqa: SIM115
        self.fd = file.fileno()
        weakref.finalize(self, file.close)


class SpillFile:
    """A temporary file in `folder`, which no other process sees and which goes with this one. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: _OpenFile | None = None
        self._ranges = Ranges()
        self._num_bytes = 0
        self.used_bytes = 0
        self.trace: ActivationTrace | None = None

    def take(self, num_bytes: int) -> Range:
        """Room for `num_bytes`.

        Raises:
            GroupFileError: the disk is full, or the folder cannot be written to.
        """
        found = self._ranges.take(num_bytes)
        if found is None:
            self._grow(round_up(num_bytes))
            found = self._ranges.take(num_bytes)
            assert found is not None
        self.used_bytes += found.num_bytes
        return found

    def give(self, free: Range) -> None:
        self._ranges.give(free)
        self.used_bytes -= free.num_bytes

    def write(self, source: torch.Tensor, target: Range, left: Event, name: str) -> SpillJob:
        """Write RAM that is filled once the device has reached `left`.

        Args:
            target: a range of this file.
            name: the group's, for a trace.
        """
        trace = self.trace

        def write_filled(fd: int, part: memoryview, position: int) -> None:
            left.synchronize()
            started = time.perf_counter()
            write_part(fd, part, position)
            if trace is not None:
                trace.add_on_host(WRITES, name, started, time.perf_counter(), len(part))

        return self._start(write_filled, source, target, is_read=False)

    def read(self, target: torch.Tensor, source: Range, last_uses: Sequence[Event], name: str) -> SpillJob:
        """Read into RAM that is free once the device has reached `last_uses`.

        Args:
            source: a range of this file.
            name: the group's, for a trace.
        """
        trace = self.trace

        def read_when_free(fd: int, part: memoryview, position: int) -> None:
            for use in last_uses:
                use.synchronize()
            started = time.perf_counter()
            if read_part(fd, part, position) != len(part):
                raise OSError(0, "it ends too early")
            if trace is not None:
                trace.add_on_host(READS, name, started, time.perf_counter(), len(part))

        return self._start(read_when_free, target, source, is_read=True)

    def _start(
        self, work: Callable[[int, memoryview, int], None], memory: torch.Tensor, where: Range, *, is_read: bool
    ) -> SpillJob:
        assert self._file is not None
        file, area, folder = self._file, memory_of(memory), self._folder

        def run(start: int) -> None:
            part = area[start : start + tuning().spill_piece_bytes]
            try:
                work(file.fd, part, where.start + start)
            except OSError as error:
                raise GroupFileError(
                    f"Could not {'read' if is_read else 'write'} {len(part)} bytes of activations at byte "
                    f"{where.start + start} of the temporary file in {str(folder)!r}: {error.strerror or error}. Pass another "
                    f"disk_path, or a larger host_budget_bytes."
                ) from error

        return SpillJob(
            begin_all(partial(run, start) for start in range(0, len(area), tuning().spill_piece_bytes)), is_read=is_read
        )

    def _grow(self, num_bytes: int) -> None:
        try:
            if self._file is None:
                self._file = _OpenFile(self._folder)
            try:
                size = max(num_bytes, tuning().spill_step_bytes)
                take_room(self._file.fd, self._num_bytes, size)
            except OSError:
                size = num_bytes  # there may be room for less than a step
                take_room(self._file.fd, self._num_bytes, size)
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
        done += write_at(fd, source[done:], position + done)
