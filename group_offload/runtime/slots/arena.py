"""The device memory that slots are cut from, shared by all modules that are offloaded to one device."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from ...base.device import Backend, Event, Stream
from ...base.system import forked_free
from ...plan.ring import Geometry
from .berths import Berths
from .slot import Slot, T

R = TypeVar("R")

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
        """A slot of `num_bytes`, and the slots that it takes the place of; None if every place is needed.

        Args:
            may_evict: A function that tells whether a slot's bytes may be taken.
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
            slot = known or Slot(self._memory[start:end], self._backend.new_event, start=start, owner=None)
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


class Holding(Generic[T]):
    """What one module has of the arena. The module's engine holds it, so that the memory goes with the module."""

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        """What rings and berths are cut from; None before the first pass, and once another module took it over."""
        self.rings: dict[int, Ring[T]] = {}
        """For each height of groups, the memory that these groups take turns in."""
        self.berths: Berths | None = None
        """The part of the memory that packed bytes land in."""
        self.pooled: list[Slot[T]] = []
        """Slots in no ring, each allocated for one run of groups that takes turns."""
        self.pooled_bytes = 0
        self.residents: list[Slot[Any]] = []
        """The slots of groups that stay between passes, unless they give way."""
        self.resident_bytes = 0
        self.wanted_bytes = 0
        """What would stay if the module had the device to itself."""
        self.spared: Collection[Holding[Any]] = ()
        """Other modules whose residents are worth as much as this one's, or more."""
        self.is_busy = False
        """Whether a pass of the module is running: then no other module takes anything."""
        self.thread = 0
        """The thread of that pass."""
        self.turn = 0
        """A number that is higher the later the module has run."""
        self.num_passes = 0

    @property
    def num_bytes(self) -> int:
        return self.slot_bytes + self.resident_bytes

    @property
    def slot_bytes(self) -> int:
        """The bytes that groups take turns in now."""
        return (0 if self.memory is None else self.memory.numel()) + self.pooled_bytes

    @property
    def slots(self) -> list[Slot[T]]:
        rings = self.rings.values()
        return [*self.residents, *self.pooled, *(slot for ring in rings for slot in ring.slots)]

    def evict_residents(self, num_bytes: int) -> None:
        """Evict residents until `num_bytes` are free. In the module's own pass: those that are needed last, none in use."""

    def take_back(self) -> tuple[torch.Tensor, list[Event]]:
        """Take back all but residents. Whatever is in it, or on its way there, is forgotten.

        Returns:
            The memory, and the events behind all that is done to it and that compute has not waited for.
        """
        memory, unread = self.memory, [] if self.berths is None else [*self.berths.last_uses]
        for slot in (*self.pooled, *(slot for ring in self.rings.values() for slot in ring.slots)):
            slot.evict()
            if slot.waited_on is None:
                unread.append(slot.ready)
        assert memory is not None
        # At once and at the end: after an interrupt the memory is either taken back or still has slots that are known.
        self.memory, self.rings, self.pooled, self.pooled_bytes, self.berths = None, {}, [], 0, None
        return memory, unread

    @property
    def is_aliased(self) -> bool:
        """Whether other code keeps views of the memory. Then it is freed with the last view, and not given to others."""
        return any(slot.is_aliased for ring in self.rings.values() for slot in ring.slots)


class Arena:
    """All device memory that groups take, on one device, shared by all offloaded modules of the process. Thread-safe.

    [Note: Memory that gives way]
    Everything is taken here, in one of two ways. Rings, slots that a call waits for, trained parameters, and what a trial
    needs are *needed*: if the device refuses them, residents are evicted until it does not, or none is left (`take`).
    Residents are *spare*: if the device refuses one, the group takes turns with the others (`take_spare`). A resident is a
    copy of a group that rests elsewhere, so evicting it costs one more copy, and never bits. What goes first is worth least:
    residents of models for which the one that runs is worth more (see `Succession.spared_by`), then its own that are needed
    last, then those of the other models.

    The model's own allocations come past the arena. If one is refused, a gate calls `give_way` and repeats its call
    (`repeat.py`).

    Rings are cut from memory that stays with the module that ran last: nothing is allocated for its next pass, and copies
    that are on their way arrive. When another module runs, it takes the memory over, or exchanges it for memory of another
    size. So modules take as much for rings as the running one needs, never the sum. A module that starts while another one is
    in the middle of a pass gets separate memory.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = forked_free(threading.RLock())
        self._holdings: weakref.WeakSet[Holding[Any]] = weakref.WeakSet()
        self._last: weakref.ref[Holding[Any]] | None = None
        """The module that ran last, if it still has the memory."""
        self._owner: Stream | None = None
        self._idle = backend.new_event()
        self._turn = 0
        self._num_known = backend.refusals()[0]
        """The refusals that were the arena's own, or that calls were repeated for."""

    # ---------------------------------------------------------------- taking, and giving way

    def take(self, num_bytes: int, stream: Stream | None = None, mine: Holding[Any] | None = None) -> torch.Tensor:
        """Device memory that `mine`, or nobody's pass, cannot do without, owned by `stream` (default: the current one).

        Raises:
            torch.OutOfMemoryError: no resident is left that could give way.
        """
        return self.retried(partial(self._backend.empty, num_bytes, stream), num_bytes, mine)

    def take_spare(self, num_bytes: int, stream: Stream) -> torch.Tensor | None:
        """Device memory for a resident, if there is some."""
        return self._tried(partial(self._backend.empty, num_bytes, stream))

    def retried(self, make: Callable[[], R], num_bytes: int, mine: Holding[Any] | None = None) -> R:
        """What `make` returns, which takes `num_bytes` of device memory. Errors as `take`."""
        while (made := self._tried(make)) is None:
            if not self.give_way(num_bytes, mine):
                return make()  # which raises the device's own error
        return made

    def _tried(self, make: Callable[[], R]) -> R | None:
        before = self._backend.refusals()[0]
        try:
            return make()
        except torch.OutOfMemoryError:
            self._num_known += self._backend.refusals()[0] - before
            return None

    def give_way(self, num_bytes: int, mine: Holding[Any] | None = None) -> bool:
        """Evict residents, those worth least first, until `num_bytes` more are free. False if there was nothing to free."""
        with self._lock:
            before, others, spared = self.resident_bytes, self._others(mine), () if mine is None else mine.spared
            around = [each for each in self._ranked if each.is_busy and each.thread == threading.get_ident()]
            first = [each for each in others if each not in spared]
            self._evict([*first, *(() if mine is None else (mine,)), *others, *around], num_bytes)
            return self.resident_bytes < before or self._free_idle()

    def displace(self, mine: Holding[Any] | None, room: int, spared: Collection[Holding[Any]] = ()) -> None:
        """Evict residents of modules other than `mine` and `spared`, until those of all others take no more than `room`."""
        with self._lock:
            others = [each for each in self._others(mine) if each not in spared]
            self._evict(others, self.others_resident_bytes(mine) - room)

    def _evict(self, holdings: Sequence[Holding[Any]], num_bytes: int) -> None:
        left = self.resident_bytes - num_bytes
        for each in holdings:
            each.evict_residents(self.resident_bytes - left)

    @property
    def _ranked(self) -> list[Holding[Any]]:
        """Modules with fewest passes come first. Of equal ones it is the one that ran last, which in a pipeline is the last one
        to come again."""
        return sorted(self._all, key=lambda each: (each.num_passes, -each.turn))

    def _others(self, mine: Holding[Any] | None) -> list[Holding[Any]]:
        """The other modules that do not run now: those that run keep what they have. Worth least first."""
        return [each for each in self._ranked if each is not mine and not each.is_busy]

    @property
    def _all(self) -> list[Holding[Any]]:
        with self._lock:  # another thread may add one
            return [*self._holdings]

    @property
    def resident_bytes(self) -> int:
        """The bytes of all modules' residents."""
        return sum(each.resident_bytes for each in self._all)

    @property
    def has_residents(self) -> bool:
        """Whether there are any. It is asked in each call of a gate."""
        return any(each.residents for each in self._all)

    def others_resident_bytes(self, mine: Holding[Any] | None) -> int:
        """Those of other modules than `mine` that do not run now."""
        return sum(each.resident_bytes for each in self._all if each is not mine and not each.is_busy)

    def others_bytes(self, mine: Holding[Any]) -> int:
        """All that gives way for `mine`: the residents of others, and the memory that it takes over from another one."""
        last = self._current()
        idle = 0 if last is None or last is mine or last.is_busy else last.slot_bytes
        return idle + self.others_resident_bytes(mine)

    @property
    def has_refused(self) -> bool:
        """Whether somebody else was refused memory since `answer`: an operator may have caught the error, and gone on."""
        return self._backend.refusals()[0] > self._num_known

    def answer(self) -> None:
        """Count all refusals so far as known."""
        self._num_known = self._backend.refusals()[0]

    # ---------------------------------------------------------------- the memory that rings are cut from

    def claim(self, mine: Holding[Any]) -> None:
        """A pass begins: no other module takes anything of `mine` from now on, until `give_back` or `disclaim`."""
        with self._lock:
            self._turn += 1
            mine.turn, mine.thread, mine.is_busy = self._turn, threading.get_ident(), True
            mine.num_passes += 1
            self._holdings.add(mine)

    def disclaim(self, mine: Holding[Any]) -> None:
        """Undo `claim`. Nothing was enqueued that uses the memory."""
        with self._lock:
            mine.is_busy = False
            mine.num_passes -= 1

    def lease(self, mine: Holding[T], num_bytes: int, writers: Sequence[Stream]) -> bool:
        """Give `mine` device memory until `give_back`, free to use on the current stream and on `writers`.

        Returns:
            Whether the memory is new to the module. Else it is that of its last pass, with all that is in it.

        Raises:
            torch.OutOfMemoryError: see `take`. Nothing was leased.
        """
        stream = self._backend.current_stream()
        with self._lock:
            last = self._current()
            if last is mine:
                return False
            is_apart = last is not None and last.is_busy
            memory = None if last is None or is_apart else self._take_over(last, num_bytes, stream)
            if memory is None:
                memory = self.take(num_bytes, stream, mine)
                if not is_apart:  # else the arena stays with the module that runs
                    self._owner = stream
            for writer in writers:
                if writer != stream:
                    born = self._backend.new_event()
                    born.record(stream)
                    writer.wait_event(born)
                    self._backend.record_stream(memory, writer)
            mine.memory = memory
            # Until here `_last` has no memory, so it counts as none: an interrupt does no harm.
            if not is_apart:
                self._last = weakref.ref(mine)
            return True

    def _take_over(self, last: Holding[Any], num_bytes: int, stream: Stream) -> torch.Tensor | None:
        """The memory of the last module; None if it has another size. It is freed then, before the new memory is allocated."""
        is_aliased = last.is_aliased  # asked before the slots are forgotten, which know of the views
        memory, unread = last.take_back()
        if memory.numel() != num_bytes or is_aliased:
            if not is_aliased:
                self._backend.free(memory)
            return None
        # The last module may have computed on another stream, and may have more copies on their way. Only `stream` waits for
        # them, and what writes there from now on waits for `stream`.
        for event in (self._idle, *unread):
            stream.wait_event(event)
        return memory

    def give_back(self, mine: Holding[Any], stream: Stream) -> None:
        """End a pass. All compute that uses the memory is enqueued on `stream`, or done."""
        with self._lock:
            mine.is_busy = False
            assert mine.memory is not None
            if mine is not self._current():
                self.release(mine)
                return
            self._idle.record(stream)
            if stream != self._owner:
                self._backend.record_stream(mine.memory, stream)

    def release(self, mine: Holding[Any]) -> None:
        """Give the memory back to the device, if it was not taken back already. Residents stay."""
        with self._lock:
            if mine.memory is not None:
                is_aliased = mine.is_aliased
                memory, _ = mine.take_back()
                if not is_aliased:
                    self._backend.free(memory)

    def release_idle(self) -> None:
        """Give all memory back to the device, but that of modules that run."""
        with self._lock:
            self.displace(None, 0)
            self._free_idle()

    def _free_idle(self) -> bool:
        last = self._current()
        if last is None or last.is_busy:
            return False
        self.release(last)
        return True

    def _current(self) -> Holding[Any] | None:
        last = None if self._last is None else self._last()
        return None if last is None or last.memory is None else last


_arenas: weakref.WeakValueDictionary[Backend, Arena] = weakref.WeakValueDictionary()
_arenas_lock = forked_free(threading.RLock())


def arena_for(backend: Backend) -> Arena:
    """The arena of a device. It lives as long as an engine holds it."""
    with _arenas_lock:
        arena = _arenas.get(backend)
        if arena is None:
            arena = _arenas[backend] = Arena(backend)
        return arena


def arenas() -> list[Arena]:
    """The arenas of all devices that modules are offloaded to."""
    with _arenas_lock:
        return list(_arenas.values())
