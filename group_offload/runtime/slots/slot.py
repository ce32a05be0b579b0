"""Places on the device that images land in, one after another.

[Note: The life of a slot]
A slot is written by copies and read by compute, on two streams that know nothing of each other. Two events keep them
apart. *ready* is recorded on the copy stream behind the copies of the slot's images; compute waits for it before the
first kernel that reads the slot. *last use* is recorded on the compute stream behind the last kernel that read it; the
copies of whatever takes its bytes next wait for it. Both are recorded right where the work they stand for was enqueued;
but the last use of a slot that is in no ring, and whose bytes nothing takes, when somebody asks for it.

What a slot holds stays good until something else takes its bytes: between passes too, if the images' weights at rest
are not what copies read (`Image.is_stable`). So the first groups of a pass are on their way before it begins, and a group
whose bytes nobody needs is brought once.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from ...base.device import Backend, Event, Stream
from ...base.layout import num_uses
from ...plan.ring import Geometry

if TYPE_CHECKING:
    from ..copies.jobs import ReadJob
    from ..groups.group import Group


_MAX_KNOWN = 1024
"""Slots of a ring that are kept for the next time that a run of groups of their size comes to their place."""


class Slot:
    """Device memory for the images of one run of groups. See [Note: The life of a slot]."""

    __slots__ = (
        "__weakref__",
        "_is_recorded",
        "_last_use",
        "aliases",
        "arrived",
        "groups",
        "is_fixed",
        "is_resident",
        "job",
        "last_stream",
        "memory",
        "num_bytes_ahead",
        "owner",
        "ready",
        "start",
        "unused",
        "views",
        "waited_on",
    )

    def __init__(
        self, memory: torch.Tensor, new_event: Callable[[], Event], *, start: int, owner: Stream | None
    ) -> None:
        self.memory = memory
        self.start = start
        """Where it begins in its ring."""
        self.owner = owner
        """The stream whose memory was taken for one run of groups; None for a slot of a ring."""
        self.is_fixed = owner is None
        self.is_resident = False
        """Given up only if memory runs short."""
        self.ready = new_event()
        self.job: ReadJob | None = None
        """What has yet to be read from files for it: until that is over, `ready` tells nothing."""
        self.arrived = new_event()
        """When compute came to where it waits for `ready`."""
        self._last_use = new_event()
        self._is_recorded = True
        self.groups: list[Group] = []
        """Whose images are in it, or on their way."""
        self.unused: set[Group] = set()
        """Those that no call has needed since."""
        self.num_bytes_ahead = 0
        """Of a slot of no ring: its size, as long as some of its groups are unused."""
        self.waited_on: Stream | None = None
        """The stream that waited for `ready` last; None if none has."""
        self.last_stream: Stream | None = None
        """The stream that used it last since the images were sent."""
        self.views: dict[Group, Views] = {}
        """For groups that were here before."""
        self.aliases: list[StorageWeakRef] = []
        """Where a graph is recorded: storages that views of the slot were made of, for one call each."""

    def note_use(self, stream: Stream) -> None:
        """What was enqueued on `stream` so far uses the slot, and nothing elsewhere that is not awaited there."""
        self.last_stream = stream
        # A ring's slot is waited for soon. Of one that stays nobody may ever ask, and between two kernels an
        # event takes its time.
        self._is_recorded = self.is_fixed
        if self.is_fixed:
            self._last_use.record(stream)

    def last_use(self) -> Event:
        """Recorded behind the last kernel that read the slot: at once for a ring's, for others when it is asked for."""
        if not self._is_recorded:
            assert self.last_stream is not None
            self._last_use.record(self.last_stream)
            self._is_recorded = True
        return self._last_use

    def spare_event(self) -> Event:
        """That of its last use, for others: the slot is given up."""
        return self._last_use

    @property
    def is_aliased(self) -> bool:
        """Whether somebody keeps views of the slot beyond the call that they were made for. None of its groups is bound."""
        self._forget_expired()
        return bool(self.aliases) or any(views.are_kept for views in self.views.values())

    def alias(self, start: int, num_bytes: int) -> torch.Tensor:
        """Bytes of the slot, with a storage of their own, so that it is noticed if a view of them is kept."""
        alias: torch.Tensor = from_dlpack(to_dlpack(self.memory[start : start + num_bytes]))
        return alias

    def alias_once(self, start: int, num_bytes: int) -> torch.Tensor:
        """The same, of which nobody else keeps a view: not even who made them, after this call."""
        alias = self.alias(start, num_bytes)
        if len(self.aliases).bit_count() == 1:  # rarely, but again and again: of a slot that stays nobody may ever ask
            self._forget_expired()
        self.aliases.append(StorageWeakRef(alias.untyped_storage()))  # type: ignore[no-untyped-call]
        return alias

    def _forget_expired(self) -> None:
        if self.aliases:
            self.aliases = [alias for alias in self.aliases if not alias.expired()]  # type: ignore[no-untyped-call]

    @property
    def is_held(self) -> bool:
        return any(group.holds for group in self.groups)

    def evict(self) -> None:
        """Forget what is in it. Whoever takes its bytes next still has to wait for the last use."""
        if self.job is not None:
            self.job.cancel()
            self.job = None
        for group in self.groups:
            if group.slot is self:  # else an interrupt came here before, and the group has been elsewhere since
                group.slot = None
        self.groups.clear()


class Views:
    """A group's tensors as views of a slot, to be bound again and again."""

    __slots__ = ("_memory", "_num_uses", "offset", "tensors")

    def __init__(self, offset: int, memory: torch.Tensor, tensors: list[torch.Tensor]) -> None:
        """
        Args:
            offset: where in the slot.
            memory: what `tensors` are views of, with a storage of its own.
        """
        self.offset, self.tensors = offset, tensors
        self._memory = memory
        self._num_uses = num_uses(memory)

    @property
    def are_kept(self) -> bool:
        """Whether somebody else keeps one, or a view of one. None of them is bound."""
        return num_uses(self._memory) > self._num_uses


class Ring:
    """A run of device memory that slots are cut from, round and round.

    Groups are needed in much the same order in each pass, so the oldest slots are the first that nobody needs any more.
    What comes to the place where it was before finds its slot, and the views in it, again.
    """

    def __init__(self, memory: torch.Tensor, backend: Backend, first_part: int) -> None:
        """
        Args:
            first_part: bytes.
        """
        self._memory = memory
        self._geometry = Geometry(memory.numel(), first_part)
        self._backend = backend
        self._head = 0
        self._live: deque[Slot] = deque()
        self._known: dict[tuple[int, int], Slot] = {}

    @property
    def num_bytes(self) -> int:
        return self._memory.numel()

    def place(
        self, num_bytes: int, may_evict: Callable[[Slot], bool], *, is_first: bool
    ) -> tuple[Slot, list[Slot]] | None:
        """A slot of `num_bytes`, and the slots that it takes the place of; None if there is no place that nobody needs.

        Args:
            is_first: of a pass.
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
    def slots(self) -> tuple[Slot, ...]:
        """The slots whose bytes nothing has taken since. One that was evicted may be among them."""
        return tuple(self._live)

    def clear(self) -> None:
        """Forget all slots. What is placed next waits for nothing that was here."""
        self._live.clear()
        self._head = 0


class Lease:
    """Memory of the arena, cut into rings. Held by the module that it was given to, so that it goes with the module."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory: torch.Tensor | None = memory
        """None once it was taken back for another module."""
        self.rings: dict[int, Ring] = {}
        """For each height of groups, the memory that they take turns in."""
        self.loose: list[Slot] = []
        """Slots of no ring, taken for one run each."""
        self.is_busy = True
        """A pass is running in it, for which it is made: nobody takes it back."""

    @property
    def is_aliased(self) -> bool:
        """Whether somebody keeps views of the memory: then it goes when they do, and is nobody else's before."""
        return any(slot.is_aliased for ring in self.rings.values() for slot in ring.slots)

    def take_back(self) -> tuple[torch.Tensor, list[Event]]:
        """The memory, for somebody else: whatever is in it, or on its way there, is forgotten.

        Returns:
            The memory, and what copies to it that nobody has waited for are behind.
        """
        memory, unread = self.memory, []
        for slot in (*self.loose, *(slot for ring in self.rings.values() for slot in ring.slots)):
            slot.evict()
            if slot.waited_on is None:
                unread.append(slot.ready)
        assert memory is not None
        # Last of all: an interrupt leaves memory that is taken back, or slots that are known, and no group in neither.
        self.memory, self.rings, self.loose = None, {}, []
        return memory, unread


class Arena:
    """The slot memory of one device, shared by all offloaded modules, which run one after another.

    The memory stays with the module that ran last, so that nothing is allocated for its next pass and what is on its way
    there arrives, and is exchanged when a module comes that needs another size: device memory is what the running module
    needs, never the sum. Thread-safe. A module that starts while another one is in the middle of a pass gets memory of
    its own.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = threading.RLock()
        self._last: weakref.ref[Lease] | None = None
        self._owner: Stream | None = None
        self._idle = backend.new_event()

    def claim(self, mine: Lease | None) -> None:
        """A pass begins for which `mine` was leased before. If nobody took it back meanwhile, nobody does until `give_back`."""
        with self._lock:
            if mine is not None and mine.memory is not None:
                mine.is_busy = True

    def disclaim(self, mine: Lease | None) -> None:
        """Undo `claim`: nothing was enqueued that uses the memory."""
        with self._lock:
            if mine is not None:
                mine.is_busy = False

    def lease(self, mine: Lease | None, num_bytes: int, stream: Stream, copy_stream: Stream) -> Lease:
        """`num_bytes` of device memory until `give_back`, free to use on `stream` and on `copy_stream`.

        `mine` is the caller's last lease: it is given again, with all that is in it, if nobody else came in between.
        """
        with self._lock:
            lease = self._current()
            if lease is not None and lease is mine:
                lease.is_busy = True
                return lease
            if lease is not None and lease.is_busy:
                return self._new_lease(num_bytes, stream, copy_stream)
            if lease is not None:
                is_aliased = lease.is_aliased
                memory, unread = lease.take_back()
                lease = None
                if memory.numel() == num_bytes and not is_aliased:
                    # Whoever had it last may have computed on another stream, and had more copies on their way.
                    for event in (self._idle, *unread):
                        stream.wait_event(event)
                    lease = Lease(memory)
                    self._share(memory, copy_stream, stream)
                else:
                    if not is_aliased:
                        self._backend.free(memory)
                    del memory
            if lease is None:
                lease, self._owner = self._new_lease(num_bytes, stream, copy_stream), stream
            self._last = weakref.ref(lease)
            return lease

    def give_back(self, lease: Lease, stream: Stream) -> None:
        """End a lease. All compute that uses its memory is enqueued on `stream`, or done."""
        with self._lock:
            assert lease.memory is not None
            if lease is not self._current():
                self._free(lease)
                return
            self._idle.record(stream)
            if stream != self._owner:
                self._backend.record_stream(lease.memory, stream)
            lease.is_busy = False

    def release(self, lease: Lease) -> None:
        """Give the memory of `lease` back to the device, if it was not taken back already."""
        with self._lock:
            if lease.memory is not None:
                self._free(lease)

    def others_bytes(self, mine: Lease | None) -> int:
        """Memory that the next lease takes back from another module."""
        with self._lock:
            lease = self._current()
            if lease is None or lease is mine or lease.is_busy:
                return 0
            assert lease.memory is not None
            return lease.memory.numel() + sum(slot.memory.numel() for slot in lease.loose)

    def release_idle(self) -> None:
        """Give the memory back to the device, unless a module is running in it."""
        with self._lock:
            lease = self._current()
            if lease is not None and not lease.is_busy:
                self._free(lease)

    def _free(self, lease: Lease) -> None:
        is_aliased = lease.is_aliased
        memory, _ = lease.take_back()
        if not is_aliased:
            self._backend.free(memory)

    def _new_lease(self, num_bytes: int, stream: Stream, copy_stream: Stream) -> Lease:
        memory = self._backend.empty(num_bytes, stream)
        self._share(memory, copy_stream, stream)
        return Lease(memory)

    def _share(self, memory: torch.Tensor, copy_stream: Stream, stream: Stream) -> None:
        """Let copies write to memory that `stream` may use now."""
        if copy_stream != stream:
            born = self._backend.new_event()
            born.record(stream)
            copy_stream.wait_event(born)
            self._backend.record_stream(memory, copy_stream)

    def _current(self) -> Lease | None:
        lease = None if self._last is None else self._last()
        return None if lease is None or lease.memory is None else lease


_arenas: weakref.WeakValueDictionary[Backend, Arena] = weakref.WeakValueDictionary()
_arenas_lock = threading.RLock()


def arena_for(backend: Backend) -> Arena:
    """The arena of a device. It lives as long as anybody holds it."""
    with _arenas_lock:
        arena = _arenas.get(backend)
        if arena is None:
            arena = _arenas[backend] = Arena(backend)
        return arena


def arenas() -> list[Arena]:
    """The arenas of all devices that modules are offloaded to."""
    with _arenas_lock:
        return list(_arenas.values())
