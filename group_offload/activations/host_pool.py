"""The pool of pinned host memory that holds offloaded activations: a few large segments, cut into buffers."""

from __future__ import annotations

import logging
import weakref
from bisect import bisect_left
from collections.abc import Callable

import torch

from ..base.device import Backend
from ..base.mapping import flat_view, map_anonymous
from ..base.pinning import PinLimit
from ..base.text import describe_bytes
from ..base.tuning import tuning
from .stats import ActivationStats

logger = logging.getLogger("group_offload")

_ALIGNMENT = 512


class _Segment:
    def __init__(self, memory: torch.Tensor, lock: object) -> None:
        self.memory = memory
        self.lock = lock
        """Keeps the memory pinned."""
        self.free = [(0, memory.numel())]
        """The ranges that no buffer has: first byte and end, in order."""

    def cut(self, size: int) -> torch.Tensor | None:
        for index, (start, end) in enumerate(self.free):
            if end - start >= size:
                self.free[index : index + 1] = [(start + size, end)] if end - start > size else []
                return self.memory[start : start + size]
        return None

    def join(self, start: int, end: int) -> None:
        """A range is free again: with free ranges beside it, it is one."""
        index = bisect_left(self.free, (start, end))
        if index < len(self.free) and self.free[index][0] == end:
            end = self.free.pop(index)[1]
        if index and self.free[index - 1][1] == start:
            index -= 1
            start = self.free.pop(index)[0]
        self.free.insert(index, (start, end))


class HostPool:
    """Pinned host memory for one device. It grows when it is full.

    A buffer is the first free range that has room for it, so it makes no difference which sizes there were before, or that
    some graphs are never freed.

    A copy may still be reading a buffer that is given back: see [Note: The life of an activation]. Not thread-safe.
    """

    def __init__(self, backend: Backend, stats: ActivationStats, wait: Callable[[], None]) -> None:
        """
        Args:
            wait: A function that returns once no copy is under way: until then the pages stay pinned. It holds no reference
                to the pool.
        """
        self._backend = backend
        self._stats = stats
        self._wait = wait
        self._limit = PinLimit(backend)
        self._segments: list[_Segment] = []

    def take(self, num_bytes: int) -> torch.Tensor | None:
        """A buffer of `num_bytes`. None if there is none, and the system pins no more."""
        size = _round_up(num_bytes)
        found = next((each for segment in self._segments if (each := segment.cut(size)) is not None), None)
        if found is None and not self._limit.was_refused and self._grow(size):
            found = self._segments[-1].cut(size)
        if found is None:
            return None
        self._stats.used_host_bytes += size
        self._stats.peak_used_host_bytes = max(self._stats.peak_used_host_bytes, self._stats.used_host_bytes)
        return found[:num_bytes]

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back."""
        size = _round_up(buffer.numel())
        self._stats.used_host_bytes -= size
        for segment in self._segments:
            start = buffer.data_ptr() - segment.memory.data_ptr()
            if 0 <= start < segment.memory.numel():
                segment.join(start, start + size)

    def _grow(self, num_bytes: int) -> bool:
        """Add a segment, if the system pins another one."""
        size = max(num_bytes, tuning().activation_segment_bytes, _round_up(self._stats.host_bytes // 4))
        memory = flat_view(map_anonymous(size), 0, size)
        lock: object = None
        if self._backend.has_streams:
            memory.zero_()  # by all of torch's threads: the driver would touch the pages with one
            lock = self._limit.lock(memory, self._wait)
            if lock is None:
                by_driver = self._limit.allocate(size)
                if by_driver is None:
                    logger.warning(
                        "Couldn't pin %s of host memory for activations of %s beyond the %s in use. Activations that "
                        "don't fit stay on the device. Raise `ulimit -l`, or the memory of the container or WSL2.",
                        describe_bytes(size),
                        self._backend.device,
                        describe_bytes(self._stats.host_bytes),
                    )
                    return False
                memory = by_driver
                # Until copies are over, the memory is kept.
                weakref.finalize(self, lambda wait, memory: wait(), self._wait, memory).atexit = False
        # else every copy is done when it returns: pinning would gain nothing
        self._stats.host_bytes += size
        self._segments.append(_Segment(memory, lock))
        return True


def _round_up(num_bytes: int) -> int:
    return max(1, -(-num_bytes // _ALIGNMENT)) * _ALIGNMENT
