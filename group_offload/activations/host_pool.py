"""The pool of pinned host memory that holds offloaded activations: a few large segments, cut into buffers."""

from __future__ import annotations

import logging
import weakref
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ..base.device import Backend
from ..base.mapping import flat_view, map_anonymous
from ..base.page_lock import PageLock
from ..base.tuning import tuning
from .stats import ActivationStats

logger = logging.getLogger("group_offload")

_ALIGNMENT = 512
_MOST_IDLE = 32
"""The forwards for which a segment stays that none of them needs. To pin memory takes time."""


@dataclass(slots=True, eq=False)
class _Segment:
    memory: torch.Tensor
    unpin: Callable[[], object] | None
    """Unpins the memory once no copy is under way; None if it isn't pinned."""
    free: list[tuple[int, int]]
    """The ranges that no buffer has: first byte and end, in order."""
    used_in: int
    """The number of the last forward that took a buffer of it, or found one in use."""

    @property
    def is_unused(self) -> bool:
        return self.free == [(0, self.memory.numel())]


class HostPool:
    """Pinned host memory for one device. It grows when it is full. Segments that the last forwards had no use for are freed.

    A buffer is the first free range that has room for it, and ranges that are side by side become one again. So it makes no
    difference which sizes there were before, or that some graphs are never freed.

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
        self._segments: list[_Segment] = []
        self._is_exhausted = False
        """The system refused to pin more."""
        self._num_forwards = 0

    def begin_forward(self) -> None:
        """Free the segments that the last forwards had no use for."""
        self._num_forwards += 1
        for segment in [*self._segments]:
            if not segment.is_unused:
                segment.used_in = self._num_forwards
            elif self._num_forwards - segment.used_in > _MOST_IDLE:
                self._segments.remove(segment)
                self._stats.host_bytes -= segment.memory.numel()
                if segment.unpin is not None:
                    self._stats.pinned_bytes -= segment.memory.numel()
                    segment.unpin()
                self._is_exhausted = False

    def take(self, num_bytes: int) -> torch.Tensor | None:
        """A buffer of `num_bytes`. None if there is none, and the system pins no more."""
        size = round_up(num_bytes)
        found = next((each for each in map(partial(self._cut, size), self._segments) if each is not None), None)
        if found is None and not self._is_exhausted and (segment := self._grow(size)) is not None:
            found = self._cut(size, segment)
        if found is None:
            return None
        self._stats.used_host_bytes += size
        self._stats.peak_used_host_bytes = max(self._stats.peak_used_host_bytes, self._stats.used_host_bytes)
        return found[:num_bytes]

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back."""
        size = round_up(buffer.numel())
        self._stats.used_host_bytes -= size
        for segment in self._segments:
            start = buffer.data_ptr() - segment.memory.data_ptr()
            if 0 <= start < segment.memory.numel():
                end, free = start + size, segment.free
                index = bisect_left(free, (start, end))
                if index < len(free) and free[index][0] == end:
                    end = free.pop(index)[1]
                if index and free[index - 1][1] == start:
                    index -= 1
                    start = free.pop(index)[0]
                free.insert(index, (start, end))

    def _cut(self, size: int, segment: _Segment) -> torch.Tensor | None:
        for index, (start, end) in enumerate(segment.free):
            if end - start >= size:
                segment.free[index : index + 1] = [(start + size, end)] if end - start > size else []
                segment.used_in = self._num_forwards
                return segment.memory[start : start + size]
        return None

    def _grow(self, num_bytes: int) -> _Segment | None:
        size = max(num_bytes, tuning().activation_segment_bytes, round_up(self._stats.host_bytes // 4))
        memory = flat_view(map_anonymous(size), 0, size)
        unpin: Callable[[], object] | None = None
        if self._backend.has_streams:
            memory.zero_()  # by all of torch's threads: the driver would touch the pages with one
            lock = PageLock.take(self._backend, memory, self._wait)
            if lock is not None:
                unpin = lock.release
            elif (by_driver := self._backend.empty_pinned(size)) is not None:
                memory = by_driver
                unpin = weakref.finalize(self, _keep_until, self._wait, memory)
                unpin.atexit = False
            else:
                self._is_exhausted = True
                logger.warning(
                    "Couldn't pin %d MiB of host memory for activations of %s beyond the %d MiB in use. Activations that "
                    "don't fit stay on the device. Raise `ulimit -l`, or the memory of the container or WSL2.",
                    size >> 20,
                    self._backend.device,
                    self._stats.host_bytes >> 20,
                )
                return None
            self._stats.pinned_bytes += size
        # else every copy is done when it returns: pinning would gain nothing
        self._stats.host_bytes += size
        self._segments.append(_Segment(memory, unpin, [(0, size)], self._num_forwards))
        return self._segments[-1]


def round_up(num_bytes: int) -> int:
    return max(1, -(-num_bytes // _ALIGNMENT)) * _ALIGNMENT


def _keep_until(wait: Callable[[], None], memory: torch.Tensor) -> None:
    wait()
