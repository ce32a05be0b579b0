"""Rings: device memory that groups share, one after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic

import torch

from ...base.device import Backend
from ...plan.ring import Geometry
from .slot import Slot, T

_MAX_KNOWN = 1024
"""How many slots a ring keeps for the next time that a run of groups of the same size comes to the same place."""


class Ring(Generic[T]):
    """A run of device memory that slots are cut from, round and round.

    Groups are needed in much the same order in each pass, so the oldest slots are the first that are not needed any more.
    A group that comes to the place where it was before finds its slot, and the views in it, again.
    """

    def __init__(self, memory: torch.Tensor, backend: Backend, largest: int) -> None:
        self._memory = memory
        self._geometry = Geometry(memory.numel(), largest)
        self._backend = backend
        self._head = 0
        self._live: deque[Slot[T]] = deque()
        self._known: dict[tuple[int, int], Slot[T]] = {}

    def place(
        self, num_bytes: int, may_evict: Callable[[Slot[T]], bool], *, is_first: bool
    ) -> tuple[Slot[T], list[Slot[T]]] | None:
        """A slot of `num_bytes`, and the slots that it takes the place of; None if `may_evict` lets no place be taken.

        Args:
            is_first: Whether passes begin with this slot.
        """
        begins = [slot.start for slot in self._live]
        for start in self._geometry.starts(num_bytes, self._head, begins, is_first=is_first):
            end = start + num_bytes
            evicted = [slot for slot in self._live if slot.start < end and start < slot.start + slot.memory.numel()]
            if not all(map(may_evict, evicted)):
                continue
            for slot in evicted:
                self._live.remove(slot)
            known = self._known.get((start, num_bytes))
            slot = known or Slot(self._memory[start:end], self._backend.new_event(), self._backend.new_event(), start)
            if len(self._known) >= _MAX_KNOWN:
                self._known = {key: slot for key, slot in self._known.items() if slot in self._live}
            self._known[start, num_bytes] = slot
            self._live.append(slot)
            self._head = end
            return slot, evicted
        return None

    @property
    def slots(self) -> tuple[Slot[T], ...]:
        """The slots whose bytes nothing has taken since. An evicted slot may be among them."""
        return tuple(self._live)
