"""The pool of page-locked RAM that activations rest in: a few large segments, cut into ranges."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

import torch

from ..base.device import Backend, Event
from ..base.mapping import flat_view, map_anonymous
from ..base.page_lock import PageLock
from ..base.tuning import tuning
from .ranges import ALIGNMENT, Range, Ranges, round_up

logger = logging.getLogger("group_offload")

_SEGMENT_SPACING = 1 << 48


class HostPool:
    """The page-locked RAM for one device. It grows when it is full, and is given back as a whole with its owner.

    Copies may still read or write a range that is given back. `Range.last_uses` says which, and whoever takes the range next
    lets its own copies wait for those, on the device. Not thread-safe.
    """

    def __init__(self, backend: Backend, budget_bytes: int | None, wait: Callable[[], None]) -> None:
        """
        Args:
            wait: a function that returns once no copy is under way: before that the pages stay locked. It holds no
                reference to the pool.
        """
        self._backend = backend
        self._budget_bytes = budget_bytes
        self._wait = wait
        self._locks: list[PageLock] = []
        """The locks of the segments that could be page-locked in place."""
        self._segments: list[torch.Tensor] = []
        self._ranges = Ranges()
        self._is_refused = False
        """Whether the system refused to page-lock more."""
        self.num_bytes = 0
        self.used_bytes = 0
        self.peak_used_bytes = 0
        self.pinned_bytes = 0

    def take(self, num_bytes: int) -> Range | None:
        """A range with its `memory`. None if the budget is used up, or the system locks no more pages."""
        found = self._ranges.take(num_bytes)
        if found is None and self._grow(num_bytes):
            found = self._ranges.take(num_bytes)
        if found is None:
            return None
        self.used_bytes += found.num_bytes
        self.peak_used_bytes = max(self.peak_used_bytes, self.used_bytes)
        if found.memory is None or found.memory.numel() != num_bytes:
            index, start = divmod(found.start, _SEGMENT_SPACING)
            with torch.inference_mode(False):
                found.memory = self._segments[index][start : start + num_bytes]
        return found

    def give(self, free: Range, *last_uses: Event | None) -> None:
        """Take a range back. The copies behind `last_uses` may still be using it."""
        free.last_uses = tuple(use for use in last_uses if use is not None)
        self._ranges.give(free)
        self.used_bytes -= free.num_bytes

    def _grow(self, num_bytes: int) -> bool:
        num_bytes = round_up(num_bytes)
        size = max(num_bytes, tuning().activation_segment_bytes, self.num_bytes // 4 // ALIGNMENT * ALIGNMENT)
        if self._budget_bytes is not None:
            size = min(size, (self._budget_bytes - self.num_bytes) // ALIGNMENT * ALIGNMENT)
        if self._is_refused or size < num_bytes:
            return False
        memory = self._segment(size)
        if memory is None:
            self._is_refused = True
            return False
        self._ranges.add(len(self._segments) * _SEGMENT_SPACING, size)
        self._segments.append(memory)
        self.num_bytes += size
        return True

    def _segment(self, size: int) -> torch.Tensor | None:
        memory = flat_view(map_anonymous(size), 0, size)
        if not self._backend.has_streams:
            return memory  # every copy is done when it returns: page-locking would buy nothing
        memory.zero_()  # by all of torch's threads: the driver would touch the pages with one
        lock = PageLock.take(self._backend, memory, self._wait)
        if lock is not None:
            self._locks.append(lock)
            self.pinned_bytes += size
            return memory
        refused = self._backend.empty_pinned(size)
        if refused is None:
            logger.warning(
                "Could not page-lock %d bytes of RAM for activations of %s beyond %d bytes: activations that find no room stay "
                "on the device. Set host_budget_bytes, and disk_path for the rest.",
                size,
                self._backend.device,
                self.num_bytes,
            )
            return None
        weakref.finalize(self, _keep_until, self._wait, refused).atexit = False
        self.pinned_bytes += size
        return refused


def _keep_until(wait: Callable[[], None], memory: torch.Tensor) -> None:
    wait()
