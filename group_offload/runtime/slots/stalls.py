"""How long compute waited for bytes, as the device saw it."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

from ...base.device import Backend, Event, Stream
from .slot import Slot


class Stalls:
    """Adds up the time from where compute came to wait for a slot (*wanted*) until the slot was *ready*.

    The host never waits for that: it reads the two events once the device is past them.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._open: weakref.WeakKeyDictionary[Slot[Any], str] = weakref.WeakKeyDictionary()
        """Slots whose wait has not been read, and the group that compute waited for. Weak: slots hold device memory."""
        self._later: deque[tuple[str, Event, Event]] = deque()
        """Waits whose slots were filled again, or freed, before the device was past them."""
        self._seconds: dict[str, float] = {}
        self._spare: list[Event] = []

    def new_event(self) -> Event:
        """An event, one of a freed slot if there is one: making an event takes longer than recording it."""
        return self._spare.pop() if self._spare else self._backend.new_event()

    def recover(self) -> None:
        """Forget everything. All slots are freed in an unknown state, so that none of their events may be used again."""
        self._open.clear()
        self._later.clear()
        self._spare.clear()

    def arrive(self, slot: Slot[Any], group_id: str, stream: Stream) -> None:
        """Compute on `stream` is about to wait for `slot`, because it needs this group."""
        slot.wanted.record(stream)
        self._open[slot] = group_id

    def collect(self, slot: Slot[Any]) -> None:
        """The slot's events are about to be recorded again."""
        if not self._could_read(slot):
            slot.wanted, slot.ready = self.new_event(), self.new_event()

    def retire(self, slot: Slot[Any]) -> None:
        """The slot was freed: nothing waits for it from now on."""
        if self._could_read(slot):
            self._spare += slot.wanted, slot.ready
        self._spare.append(slot._last_use)

    def _could_read(self, slot: Slot[Any]) -> bool:
        """End the slot's wait. False if it is to be read later, from the same events."""
        for _ in range(min(2, len(self._later))):  # a few at a time: the device passes them in this order
            if not self._read(*self._later[0]):
                break
            _, *events = self._later.popleft()
            self._spare += events
        group_id = self._open.pop(slot, None)
        if group_id is None or self._read(group_id, slot.wanted, slot.ready):
            return True
        self._later.append((group_id, slot.wanted, slot.ready))
        return False

    def by_group(self) -> dict[str, float]:
        """Seconds that compute waited for each group, as far as the device has got."""
        while self._later and self._read(*self._later[0]):
            self._later.popleft()
        for slot in [*self._open]:
            if self._read(self._open[slot], slot.wanted, slot.ready):
                self._open.pop(slot, None)  # two threads may ask at once
        return dict(self._seconds)

    def _read(self, group_id: str, wanted: Event, ready: Event) -> bool:
        seconds = self._backend.seconds_between(wanted, ready)
        if seconds is None:
            return False
        if seconds > 0:
            self._seconds[group_id] = self._seconds.get(group_id, 0.0) + seconds
        return True
