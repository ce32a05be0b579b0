"""The pool of pinned host memory that holds offloaded activations: a few large segments, cut into buffers."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..base.device import Backend
from ..base.mapping import flat_view, map_anonymous
from ..base.page_lock import PageLock
from ..base.tuning import tuning
from .stats import ActivationStats

logger = logging.getLogger("group_offload")

_ALIGNMENT = 512


@dataclass(slots=True)
class _Segment:
    memory: torch.Tensor
    num_cut: int = 0
    """Bytes that were cut into buffers, from the beginning on."""


class HostPool:
    """Pinned host memory for one device. It grows when it is full, and is freed as a whole with its owner.

    A buffer that is given back serves the next request of its size: a training step repeats the sizes of the step before.
    When no buffer is in use, at the end of most steps, all segments are whole again, so other sizes find room too.

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
        self._locks: list[PageLock] = []
        """The locks of the segments that could be pinned in place."""
        self._segments: list[_Segment] = []
        self._free: dict[int, list[torch.Tensor]] = {}
        """Buffers that were given back, by size."""
        self._is_exhausted = False
        """The system refused to pin more."""

    def take(self, num_bytes: int) -> torch.Tensor | None:
        """A buffer of `num_bytes`. None if there is none, and the system pins no more."""
        free = self._free.get(num_bytes)
        found = free.pop() if free else self._cut(num_bytes)
        if found is not None:
            self._stats.used_host_bytes += round_up(num_bytes)
            self._stats.peak_used_host_bytes = max(self._stats.peak_used_host_bytes, self._stats.used_host_bytes)
        return found

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back."""
        self._stats.used_host_bytes -= round_up(buffer.numel())
        if self._stats.used_host_bytes:
            self._free.setdefault(buffer.numel(), []).append(buffer)
        else:
            self._free.clear()
            for segment in self._segments:
                segment.num_cut = 0

    def _cut(self, num_bytes: int) -> torch.Tensor | None:
        size = round_up(num_bytes)
        segment = next((each for each in self._segments if each.num_cut + size <= each.memory.numel()), None)
        if segment is None and not self._is_exhausted:
            segment = self._grow(size)
        if segment is None:
            return None
        start, segment.num_cut = segment.num_cut, segment.num_cut + size
        return segment.memory.narrow(0, start, num_bytes)

    def _grow(self, num_bytes: int) -> _Segment | None:
        size = max(num_bytes, tuning().activation_segment_bytes, round_up(self._stats.host_bytes // 4))
        memory = flat_view(map_anonymous(size), 0, size)
        if self._backend.has_streams:
            memory.zero_()  # by all of torch's threads: the driver would touch the pages with one
            lock = PageLock.take(self._backend, memory, self._wait)
            if lock is not None:
                self._locks.append(lock)
            elif (by_driver := self._backend.empty_pinned(size)) is not None:
                memory = by_driver
                weakref.finalize(self, _keep_until, self._wait, memory).atexit = False
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
        self._segments.append(_Segment(memory))
        return self._segments[-1]


def round_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _keep_until(wait: Callable[[], None], memory: torch.Tensor) -> None:
    wait()
