"""How long compute waited for bytes, as the device saw it."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING

from ..device import Backend, Event, Stream

if TYPE_CHECKING:
    from .group import Group
    from .slots import Slot


class Stalls:
    """Adds up the time from where compute came to wait for a slot until the slot was ready.

    The host reads an event's time only once the device is past it, and never waits for that: what is not reached yet is
    looked at again later.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._open: weakref.WeakKeyDictionary[Slot, str] = weakref.WeakKeyDictionary()
        """Slots whose wait has not been read, and the group that compute waited for. It must not keep their memory."""
        self._later: deque[tuple[str, Event, Event]] = deque()
        """Waits whose slot was sent again before the device was past them."""
        self._seconds: dict[str, float] = {}

    def arrive(self, slot: Slot, group: Group, stream: Stream) -> None:
        """Compute on `stream` is about to wait for `slot`, first of all for `group`."""
        slot.arrived.record(stream)
        self._open[slot] = group.group_id

    def collect(self, slot: Slot) -> None:
        """The slot's events are about to be recorded again."""
        group_id = self._open.pop(slot, None)
        if group_id is not None and not self._read(group_id, slot.arrived, slot.ready):
            self._later.append((group_id, slot.arrived, slot.ready))
            slot.arrived, slot.ready = self._backend.new_event(), self._backend.new_event()
        for _ in range(min(2, len(self._later))):  # a few at a time: they come to their end in this order
            if not self._read(*self._later[0]):
                break
            self._later.popleft()

    def by_group(self) -> dict[str, float]:
        """Seconds of waiting for each group that compute has waited for, as far as the device has got."""
        while self._later and self._read(*self._later[0]):
            self._later.popleft()
        for slot in [*self._open]:
            if self._read(self._open[slot], slot.arrived, slot.ready):
                del self._open[slot]
        return dict(self._seconds)

    def _read(self, group_id: str, arrived: Event, ready: Event) -> bool:
        seconds = self._backend.seconds_between(arrived, ready)
        if seconds is None:
            return False
        if seconds > 0:
            self._seconds[group_id] = self._seconds.get(group_id, 0.0) + seconds
        return True
