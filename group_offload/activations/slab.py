"""Page-locked RAM that activations rest in: a few large segments, cut into blocks."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..base.device import Backend, Event
from ..base.mapping import flat_view, map_anonymous
from ..base.page_lock import PageLock
from .ranges import ALIGNMENT, Range, Ranges

logger = logging.getLogger("group_offload")

SEGMENT_BYTES = 256 << 20
"""A segment is at least this large, or what is left of the budget; later ones are a quarter of all before."""
_SEGMENT_SPACING = 1 << 48


@dataclass(slots=True, eq=False)
class Block:
    """A part of the slab."""

    memory: torch.Tensor
    range: Range


class Slab:
    """The page-locked RAM for one device. It grows when it is full, and is given back as a whole with its owner.

    A block that is given back may still be read or written by copies: `Range.last_uses` says which, and whoever takes it
    next waits for those, on the device. Not thread-safe.
    """

    def __init__(self, backend: Backend, budget_bytes: int | None, wait: Callable[[], None]) -> None:
        self._backend = backend
        self._budget_bytes = budget_bytes
        self._wait = wait
        """Returns once no copy is on its way: before that the pages stay locked. Holds no reference to the slab."""
        self._locks: list[PageLock] = []
        """Of the segments that are page-locked."""
        self._segments: list[torch.Tensor] = []
        self._ranges = Ranges()
        self._is_refused = False
        self.num_bytes = 0
        self.used_bytes = 0
        self.peak_used_bytes = 0
        self.pinned_bytes = 0

    def take(self, num_bytes: int) -> Block | None:
        """A block, or None if the budget, or what the system lets be locked, is used up."""
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
        return Block(found.memory, found)

    def give(self, block: Block, *last_uses: Event | None) -> None:
        """Take a block back. The copies behind `last_uses` may still be using it."""
        block.range.last_uses = tuple(use for use in last_uses if use is not None)
        self._ranges.give(block.range)
        self.used_bytes -= block.range.num_bytes

    def _grow(self, num_bytes: int) -> bool:
        num_bytes = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        size = max(num_bytes, SEGMENT_BYTES, self.num_bytes // 4 // ALIGNMENT * ALIGNMENT)
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
                "Could not page-lock %d bytes of RAM for activations of %s beyond %d bytes: what finds no room stays on the "
                "device. Set host_budget_bytes, and disk_path for the rest.",
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
