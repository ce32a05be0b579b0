"""The device memory that slots are cut from, shared by all modules that are offloaded to one device."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic

import torch

from ...base.device import Backend, Event, Stream
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

    def __init__(self) -> None:
        self.slots: list[Slot[T]] = []
        self.is_busy = False
        """Whether a pass of the module is running: then no other module takes its slots."""
        self.turn = 0
        """A number that is higher the later the module has run."""
        self.num_passes = 0

    @property
    def num_bytes(self) -> int:
        return sum(slot.memory.numel() for slot in self.slots)


class Arena:
    """The slot memory of one device, shared by all offloaded modules, which run one after another.

    The memory stays with the module that ran last: nothing is allocated for its next pass, and copies that are on their way
    arrive. When another module runs it takes the memory over, or exchanges it for memory of another size. So modules take
    as much device memory as the running one needs, never the sum. A module that starts while another one is in the middle
    of a pass gets separate memory. Groups that stay on the device are apart from that: they stay there while other modules run,
    until one of these displaces them. Thread-safe.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = threading.RLock()
        self._last: weakref.ref[Lease[Any]] | None = None
        self._owner: Stream | None = None
        self._idle = backend.new_event()
        self._residents: weakref.WeakSet[Residents[Any]] = weakref.WeakSet()
        self._turn = 0

    def claim(self, mine: Lease[Any] | None, residents: Residents[Any]) -> None:
        """A pass begins for which `mine` was leased before: no other module takes the memory from now on, until `give_back`.

        If another module took it before, only `residents` are kept.
        """
        with self._lock:
            self._turn += 1
            residents.turn, residents.is_busy = self._turn, True
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

    def lease(self, mine: Lease[T] | None, num_bytes: int, stream: Stream, writers: Sequence[Stream]) -> Lease[T]:
        """`num_bytes` of device memory until `give_back`, free to use on `stream` and on `writers`.

        `mine` is the caller's last lease: it is given again, with all that is in it, if no other module came in between.
        """
        with self._lock:
            last = self._current()
            if last is not None and last is mine:
                last.is_busy = True
                return mine
            if last is not None and last.is_busy:
                return self._new_lease(num_bytes, stream, writers)  # and the arena stays with the module that runs
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
                lease, self._owner = self._new_lease(num_bytes, stream, writers), stream
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

    def others_bytes(self, mine: Lease[Any] | None) -> int:
        """How much memory the next lease takes back from another module."""
        with self._lock:
            lease = self._current()
            if lease is None or lease is mine or lease.is_busy:
                return 0
            assert lease.memory is not None
            return lease.memory.numel() + sum(slot.memory.numel() for slot in lease.pooled)

    def others_resident_bytes(self, mine: Residents[Any], spared: Collection[Residents[Any]] = ()) -> int:
        """The bytes of other modules' groups that stay on the device, without `spared` and those of modules that run now."""
        with self._lock:
            return sum(each.num_bytes for each in self._displaceable(mine) if each not in spared)

    def displace(
        self, mine: Residents[Any], room: int, spared: Collection[Residents[Any]] = (), *, waits: bool = False
    ) -> None:
        """Free other modules' groups that stay on the device, until all of them take no more than `room`.

        Those of modules with fewest passes go first. Of equal ones it is the one that ran last, which in a pipeline is the last
        one to come again. `spared` stay, and so do those of modules that run now.

        Args:
            waits: Whether the host waits for copies that are on their way to that memory: then it can be used at once.
        """
        with self._lock:
            others = sorted(self._displaceable(mine), key=lambda each: (each.num_passes, -each.turn))
            over = sum(each.num_bytes for each in others) - room
            for each in others:
                while each.slots and each not in spared and over > 0:
                    slot = each.slots[-1]
                    over -= slot.memory.numel()
                    if waits and slot.waited_on is None:
                        slot.ready.synchronize()
                    slot.evict()
                    each.slots.remove(slot)
                    if not slot.is_aliased:
                        self._backend.free(slot.memory)

    def _displaceable(self, mine: Residents[Any]) -> list[Residents[Any]]:
        return [each for each in [*self._residents] if each is not mine and each.slots and not each.is_busy]

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

    def _new_lease(self, num_bytes: int, stream: Stream, writers: Sequence[Stream]) -> Lease[Any]:
        memory = self._backend.empty(num_bytes, stream)
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
_arenas_lock = threading.RLock()


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
