"""The device memory that slots are cut from, shared by all modules that are offloaded to one device."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic

import torch

from ...base.device import Backend, Event, Stream
from ...base.system import forked_free
from ...plan.ring import Geometry
from .berths import Berths
from .slot import Slot, T

_MAX_KNOWN = 1024
"""How many slots a ring keeps for the next time that a run of groups of the same size comes to the same place."""


class Ring(Generic[T]):
    """A run of device memory that slots are cut from, round and round.

    Groups are needed in much the same order in each pass, so the oldest slots are the first that are not needed any more.
    A group that comes to the place where it was before finds its slot, and the views in it, again.
    """

    def __init__(self, memory: torch.Tensor, backend: Backend, first_part: int) -> None:
        """
        Args:
            first_part: The bytes of the largest group: see `Geometry`.
        """
        self._memory = memory
        self._geometry = Geometry(memory.numel(), first_part)
        self._backend = backend
        self._head = 0
        self._live: deque[Slot[T]] = deque()
        self._known: dict[tuple[int, int], Slot[T]] = {}

    @property
    def num_bytes(self) -> int:
        return self._memory.numel()

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

    def clear(self) -> None:
        """Forget all slots. The next slot waits for nothing that was in the ring."""
        self._live.clear()
        self._head = 0


class Lease(Generic[T]):
    """Memory of the arena, cut into rings. The engine of one module holds it, so that it goes with the module."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory: torch.Tensor | None = memory
        """None once the memory was taken back for another module."""
        self.rings: dict[int, Ring[T]] = {}
        """For each height of groups, the memory that these groups take turns in."""
        self.pooled: list[Slot[T]] = []
        """Slots in no ring, each allocated for one run of groups that takes turns."""
        self.berths: Berths | None = None
        """The part of the memory that packed bytes land in."""
        self.is_busy = True
        """Whether a pass is running in the memory: then it is not taken back."""

    @property
    def num_bytes(self) -> int:
        """The memory of rings, and of slots outside of them."""
        return (0 if self.memory is None else self.memory.numel()) + sum(slot.memory.numel() for slot in self.pooled)

    @property
    def is_aliased(self) -> bool:
        """Whether other code keeps views of the memory. Then it is freed with the last view, and not given to others."""
        return any(slot.is_aliased for ring in self.rings.values() for slot in ring.slots)

    def take_back(self) -> tuple[torch.Tensor, list[Event]]:
        """Take the memory back for another module. Whatever is in it, or on its way there, is forgotten.

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
        self.memory, self.rings, self.pooled, self.berths = None, {}, [], None
        return memory, unread


class Residents(Generic[T]):
    """The slots of one module's groups that stay on the device between passes. The module's engine holds it."""

    def __init__(self, evict: Callable[[], Callable[[int], None] | None] = lambda: None) -> None:
        """
        Args:
            evict: Reference to the function behind `evict`.
        """
        self._evict = evict
        self.slots: list[Slot[T]] = []
        self.wanted_bytes = 0
        """What the module would keep on the device if it had all of it to itself."""
        self.is_busy = False
        """Whether a pass of the module is running: then no other module takes its slots."""
        self.thread = 0
        """The thread of that pass."""
        self.turn = 0
        """A number that is higher the later the module has run."""
        self.num_passes = 0

    def evict(self, num_bytes: int) -> None:
        """Evict residents in the middle of the module's own pass, until `num_bytes` are free: those that are needed last, and
        none that is in use."""
        evict = self._evict()
        if evict is not None:
            evict(num_bytes)

    @property
    def num_bytes(self) -> int:
        return sum(slot.memory.numel() for slot in self.slots)


class Arena:
    """All device memory that groups take, on one device, shared by all offloaded modules of the process. Thread-safe.

    [Note: Memory that gives way]
    Everything is taken here, in one of two ways. Rings, and slots that a call waits for, are *needed*: if the device refuses
    them, residents are evicted until it does not, or none is left (`take`). Residents are *spare*: if the device refuses one,
    the group takes turns with the others (`take_spare`). A resident is a copy of a group that rests elsewhere, so evicting it
    costs one more copy, and never bits. What goes first is worth least: residents of models for which the one that runs is
    worth more (see `Succession.spared_by`), then its own that are needed last, then those of the other models.

    The model's own allocations come past the arena. If one is refused, a gate calls `give_way` and repeats its call
    (`repeat.py`).

    Rings are cut from a lease, which stays with the module that ran last: nothing is allocated for its next pass, and copies
    that are on their way arrive. When another module runs, it takes the memory over, or exchanges it for memory of another
    size. So modules take as much for rings as the running one needs, never the sum. A module that starts while another one is
    in the middle of a pass gets separate memory.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = forked_free(threading.RLock())
        self._last: weakref.ref[Lease[Any]] | None = None
        self._owner: Stream | None = None
        self._idle = backend.new_event()
        self._residents: weakref.WeakSet[Residents[Any]] = weakref.WeakSet()
        self._turn = 0
        self._num_known = backend.refusals()[0]
        """The refusals that were the arena's own, or that calls were repeated for."""

    # ---------------------------------------------------------------- taking, and giving way

    def take(
        self, num_bytes: int, mine: Residents[Any], spared: Collection[Residents[Any]], stream: Stream
    ) -> torch.Tensor:
        """Device memory that `mine` cannot do without, owned by `stream`.

        Raises:
            torch.OutOfMemoryError: no resident is left that could give way.
        """
        while True:
            memory = self._try(num_bytes, stream)
            if isinstance(memory, torch.Tensor):
                return memory
            if not self.give_way(num_bytes, mine, spared):
                try:
                    raise memory
                finally:
                    del memory  # the error holds this frame, and through it the memory of all callers

    def take_spare(self, num_bytes: int, stream: Stream) -> torch.Tensor | None:
        """Device memory for a resident, if there is some."""
        memory = self._try(num_bytes, stream)
        return memory if isinstance(memory, torch.Tensor) else None

    def _try(self, num_bytes: int, stream: Stream) -> torch.Tensor | torch.OutOfMemoryError:
        before = self._backend.refusals()[0]
        try:
            return self._backend.empty(num_bytes, stream)
        except torch.OutOfMemoryError as error:
            self._num_known += self._backend.refusals()[0] - before
            return error.with_traceback(None)

    def give_way(self, num_bytes: int, mine: Residents[Any], spared: Collection[Residents[Any]] = ()) -> bool:
        """Evict residents, those worth least first, until `num_bytes` more are free. False if there were none."""
        with self._lock:
            before = left = self.resident_bytes
            for step in (
                lambda more: self._evict_others(mine, more, spared),
                mine.evict,
                lambda more: self._evict_others(mine, more, ()),
                lambda more: self._evict_around(mine, more),
            ):
                if before - left < num_bytes:
                    step(num_bytes - (before - left))
                    left = self.resident_bytes
            if left == before:
                last = self._current()
                if last is None or last.is_busy:
                    return False
                self._free(last)
            return True

    def displace(self, mine: Residents[Any], room: int, spared: Collection[Residents[Any]] = ()) -> None:
        """Evict residents of modules other than `mine` and `spared`, until those of all others take no more than `room`."""
        with self._lock:
            self._evict_others(mine, self.others_resident_bytes(mine) - room, spared)

    def _evict_others(self, mine: Residents[Any], num_bytes: int, spared: Collection[Residents[Any]]) -> None:
        """Those of modules with fewest passes go first. Of equal ones it is the one that ran last, which in a pipeline is the
        last one to come again. Modules that run now keep theirs."""
        others = [each for each in [*self._residents] if each is not mine and not each.is_busy and each not in spared]
        for each in sorted(others, key=lambda each: (each.num_passes, -each.turn)):
            while each.slots and num_bytes > 0:
                slot = each.slots[-1]
                num_bytes -= slot.memory.numel()
                slot.evict()
                each.slots.remove(slot)
                if not slot.is_aliased:
                    self._backend.free(slot.memory)

    def _evict_around(self, mine: Residents[Any], num_bytes: int) -> None:
        """Evict residents of modules in whose forwards, in this thread, that of `mine` is called."""
        for each in [*self._residents]:
            if each.is_busy and each is not mine and each.thread == threading.get_ident():
                each.evict(num_bytes)

    @property
    def resident_bytes(self) -> int:
        """The bytes of all modules' residents."""
        return sum(each.num_bytes for each in [*self._residents])

    @property
    def has_residents(self) -> bool:
        """Whether there are any. It is asked in each call of a gate."""
        return any(each.slots for each in [*self._residents])

    def others_resident_bytes(self, mine: Residents[Any]) -> int:
        """Those of other modules than `mine` that do not run now."""
        return sum(each.num_bytes for each in [*self._residents] if each is not mine and not each.is_busy)

    def others_bytes(self, mine: Lease[Any] | None) -> int:
        """How much memory the next lease takes back from another module."""
        with self._lock:
            lease = self._current()
            return 0 if lease is None or lease is mine or lease.is_busy else lease.num_bytes

    @property
    def has_refused(self) -> bool:
        """Whether somebody else was refused memory since `answer`: an operator may have caught the error, and gone on."""
        return self._backend.refusals()[0] > self._num_known

    def answer(self) -> None:
        """Count all refusals so far as known."""
        self._num_known = self._backend.refusals()[0]

    # ---------------------------------------------------------------- leases

    def claim(self, mine: Lease[Any] | None, residents: Residents[Any]) -> None:
        """A pass begins for which `mine` was leased before: no other module takes the memory from now on, until `give_back`.

        If another module took it before, only `residents` are kept.
        """
        with self._lock:
            self._turn += 1
            residents.turn, residents.thread, residents.is_busy = self._turn, threading.get_ident(), True
            residents.num_passes += 1
            self._residents.add(residents)
            if mine is not None and mine.memory is not None:
                mine.is_busy = True

    def disclaim(self, mine: Lease[Any] | None, residents: Residents[Any]) -> None:
        """Undo `claim`. Nothing was enqueued that uses the memory."""
        with self._lock:
            residents.is_busy = False
            residents.num_passes -= 1
            if mine is not None:
                mine.is_busy = False

    def lease(
        self, mine: Lease[T] | None, num_bytes: int, writers: Sequence[Stream], take: Callable[[int], torch.Tensor]
    ) -> Lease[T]:
        """`num_bytes` of device memory until `give_back`, free to use on the current stream and on `writers`.

        Args:
            mine: The caller's last lease: it is given again, with all that is in it, if no other module came in between.
            take: Function that takes memory for the caller, owned by the current stream.

        Raises:
            torch.OutOfMemoryError: see `take`. Nothing was leased.
        """
        stream = self._backend.current_stream()
        with self._lock:
            last = self._current()
            if last is not None and last is mine:
                last.is_busy = True
                return mine
            if last is not None and last.is_busy:
                return self._new_lease(
                    take(num_bytes), stream, writers
                )  # and the arena stays with the module that runs
            lease: Lease[T] | None = None
            if last is not None:
                # Asked before the slots are forgotten, which know of the views.
                is_aliased = last.is_aliased
                memory, unread = last.take_back()
                if memory.numel() == num_bytes and not is_aliased:
                    # The last module may have computed on another stream, and may have more copies on their way. Only
                    # `stream` waits for them. `_share` comes after that: through it the copies of this lease wait too.
                    for event in (self._idle, *unread):
                        stream.wait_event(event)
                    lease = Lease(memory)
                    self._share(memory, writers, stream)
                else:
                    # Freed before the new memory is allocated, so that the two are never there at once.
                    if not is_aliased:
                        self._backend.free(memory)
                    del memory
            if lease is None:
                lease, self._owner = self._new_lease(take(num_bytes), stream, writers), stream
            # Until here `_last` is a lease whose memory was taken back, which counts as none: so an interrupt does no harm.
            self._last = weakref.ref(lease)
            return lease

    def give_back(self, lease: Lease[Any], residents: Residents[Any], stream: Stream) -> None:
        """End a pass. All compute that uses the memory of its lease is enqueued on `stream`, or done."""
        with self._lock:
            residents.is_busy = False
            assert lease.memory is not None
            if lease is not self._current():
                self._free(lease)
                return
            self._idle.record(stream)
            if stream != self._owner:
                self._backend.record_stream(lease.memory, stream)
            lease.is_busy = False

    def release(self, lease: Lease[Any]) -> None:
        """Give the memory of `lease` back to the device, if it was not taken back already."""
        with self._lock:
            if lease.memory is not None:
                self._free(lease)

    def release_idle(self) -> None:
        """Give the memory back to the device, unless a module is running in it."""
        with self._lock:
            self.displace(Residents(), 0)
            lease = self._current()
            if lease is not None and not lease.is_busy:
                self._free(lease)

    def _free(self, lease: Lease[Any]) -> None:
        is_aliased = lease.is_aliased
        memory, _ = lease.take_back()
        if not is_aliased:
            self._backend.free(memory)

    def _new_lease(self, memory: torch.Tensor, stream: Stream, writers: Sequence[Stream]) -> Lease[Any]:
        self._share(memory, writers, stream)
        return Lease(memory)

    def _share(self, memory: torch.Tensor, writers: Sequence[Stream], stream: Stream) -> None:
        """Let other streams write to memory that `stream` may use from now on."""
        for writer in writers:
            if writer != stream:
                born = self._backend.new_event()
                born.record(stream)
                writer.wait_event(born)
                self._backend.record_stream(memory, writer)

    def _current(self) -> Lease[Any] | None:
        lease = None if self._last is None else self._last()
        return None if lease is None or lease.memory is None else lease


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
