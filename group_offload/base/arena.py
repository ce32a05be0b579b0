"""The device memory that the package takes: all of it is taken here, and others give way for it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TypeVar

import torch

from .device import Backend, Event, Stream
from .system import forked_free

R = TypeVar("R")


class Holding:
    """What one module has of the arena, and how it frees that: `DeviceMemory` overrides the two methods."""

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        """What rings and compressed buffers are cut from; None before the first pass, and once another module took it over."""
        self.pooled_bytes = 0
        """The bytes of slots in no ring, allocated just in time."""
        self.resident_bytes = 0
        """The bytes of residents: groups that stay between passes, until they are evicted."""
        self.protected: Mapping[Holding, int] = weakref.WeakKeyDictionary()
        """Other modules whose residents this one does not displace, and the bytes that each wants to have."""
        self.thread = 0
        """The thread that runs a pass of the module: then no other module takes anything, but one inside of it. Else 0."""
        self.turn = 0
        """A number that is higher the later the module has run."""
        self.num_passes = 0

    @property
    def slot_bytes(self) -> int:
        """The bytes of slots and compressed buffers, without residents."""
        return (0 if self.memory is None else self.memory.numel()) + self.pooled_bytes

    @property
    def num_bytes(self) -> int:
        return self.slot_bytes + self.resident_bytes

    def evict_residents(self, num_bytes: int) -> None:
        """Evict residents until `num_bytes` are free. In the module's own pass: those that are needed last, none in use."""
        raise NotImplementedError

    def take_back(self) -> tuple[torch.Tensor | None, list[Event]]:
        """Empty all slots but residents, and let go of their memory.

        Returns:
            The memory, and the events behind all that is done to it and that compute has not waited for. None if other code
            keeps views of the memory: then it is freed with the last view, and not given to others.
        """
        raise NotImplementedError


class Arena:
    """All memory that the package takes of one device, shared by everything in the process. Thread-safe.

    [Note: Memory that gives way]
    Everything is taken here, in one of two ways. Rings, slots that a call waits for, trained parameters, activations that come
    back, and copies of any kind are *needed*: if the device refuses them, residents are evicted until it does not, or none is
    left (`take`, `retried`). Residents are *spare*: if the device refuses one, the group streams like the others
    (`take_spare`). A resident is a copy of a group that is stored elsewhere, so evicting it costs one more copy, and never
    bits. What is worth least goes first: residents of models that the running one may displace (`PhaseOrder.protected_from`),
    then its own that are needed last, then those of the other models.

    The model's own allocations bypass the arena. If one is refused, a gate calls `give_way` and repeats its call
    (`runtime/repeat.py`).

    Rings are cut from memory that stays with the module that ran last: nothing is allocated for its next pass, and copies
    that are on their way arrive. Each pass calls `claim`, `lease` and `give_back`. The first one of another module takes the
    memory over, or exchanges it for memory of another size. So modules take as much for rings as the running one needs, never
    the sum. A module that starts in the middle of another one's pass gets memory of its own, until that pass is over.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._lock = forked_free(threading.RLock())
        self._holdings: weakref.WeakSet[Holding] = weakref.WeakSet()
        self._last: weakref.ref[Holding] | None = None
        """The module that ran last, if it still has the memory."""
        self._idle = backend.new_event()
        self._turns = count(1)
        self._num_known = backend.refusals()[0]
        """The refusals that were the arena's own, or that calls were repeated for."""

    # ---------------------------------------------------------------- taking, and giving way

    def take(self, num_bytes: int, stream: Stream | None = None, mine: Holding | None = None) -> torch.Tensor:
        """Device memory that `mine`, or nobody's pass, cannot do without, owned by `stream` (default: the current one).

        Raises:
            torch.OutOfMemoryError: no resident is left that could give way.
        """
        return self.retried(partial(self.backend.empty, num_bytes, stream), num_bytes, mine)

    def take_spare(self, num_bytes: int, stream: Stream) -> torch.Tensor | None:
        """Device memory for a resident, if there is some."""
        with suppress(torch.OutOfMemoryError):
            return self._own(partial(self.backend.empty, num_bytes, stream))
        return None

    def retried(self, make: Callable[[], R], num_bytes: int, mine: Holding | None = None) -> R:
        """What `make` returns, which takes `num_bytes` of device memory. Errors as `take`."""
        while True:
            try:
                return self._own(make)
            except torch.OutOfMemoryError:
                if not self.give_way(num_bytes, mine):
                    raise

    def _own(self, make: Callable[[], R]) -> R:
        before = self.backend.refusals()[0]
        try:
            return make()
        finally:
            self._num_known += self.backend.refusals()[0] - before

    def give_way(self, num_bytes: int, mine: Holding | None = None) -> bool:
        """Evict residents, those worth least first, until `num_bytes` more are free. False if there was nothing to free."""
        with self._lock:
            before, others, own = self.resident_bytes, self._others(mine), [] if mine is None else [mine]
            first = [each for each in others if mine is None or each not in mine.protected]
            # Of modules in whose call this one was called, those residents may go that no call uses.
            around = [each for each in self._holdings if each.thread == threading.get_ident()]
            self._evict([*first, *own, *others, *around], num_bytes)
            return self.resident_bytes < before or self._free_idle()

    def displace(self, mine: Holding | None, kept_bytes: int, protected: Collection[Holding] = ()) -> None:
        """Evict residents of other modules than `mine`, but of none `protected`, until all others have `kept_bytes` at most."""
        with self._lock:
            others = [each for each in self._others(mine) if each not in protected]
            self._evict(others, self.others_resident_bytes(mine) - kept_bytes)

    def _evict(self, holdings: Sequence[Holding], num_bytes: int) -> None:
        left = self.resident_bytes - num_bytes
        for each in holdings:
            each.evict_residents(self.resident_bytes - left)

    def _others(self, mine: Holding | None) -> list[Holding]:
        """The other modules that do not run now: those that run keep what they have.

        Modules with fewest passes come first. Of equal ones it is the one that ran last, which in a pipeline is the last one
        to come again.
        """
        with self._lock:  # another thread may add one
            others = [each for each in self._holdings if each is not mine and not each.thread]
        return sorted(others, key=lambda each: (each.num_passes, -each.turn))

    @property
    def resident_bytes(self) -> int:
        """The bytes of all modules' residents."""
        with self._lock:
            return sum(each.resident_bytes for each in self._holdings)

    def others_resident_bytes(self, mine: Holding | None) -> int:
        """Those of other modules than `mine` that do not run now."""
        return sum(each.resident_bytes for each in self._others(mine))

    def others_bytes(self, mine: Holding) -> int:
        """All that gives way for `mine`: the residents of others, and the memory that it takes over from another one."""
        last = self._current()
        idle = 0 if last is None or last is mine or last.thread else last.slot_bytes
        return idle + self.others_resident_bytes(mine)

    @property
    def has_refused(self) -> bool:
        """Whether somebody else was refused memory since `answer`: an operator may have caught the error, and gone on."""
        return self.backend.refusals()[0] > self._num_known

    def answer(self) -> None:
        """Count all refusals so far as known."""
        self._num_known = self.backend.refusals()[0]

    # ---------------------------------------------------------------- the memory that rings are cut from

    def claim(self, mine: Holding) -> None:
        """No other module takes anything of `mine` from now on, until `give_back`."""
        with self._lock:
            mine.turn, mine.thread = next(self._turns), threading.get_ident()
            self._holdings.add(mine)

    def lease(self, mine: Holding, num_bytes: int, writers: Sequence[Stream]) -> bool:
        """Give `mine` device memory until `give_back`, free to use on the current stream and on `writers`.

        Returns:
            Whether the memory is new to the module. Else it is that of its last pass, with all that is in it.

        Raises:
            torch.OutOfMemoryError: see `take`. Nothing was leased.
        """
        stream = self.backend.current_stream()
        with self._lock:
            last, memory = self._current(), None
            if last is mine:
                return False
            is_inside = last is not None and last.thread != 0
            if last is not None and not is_inside:
                memory, unread = last.take_back()
                if memory is not None and memory.numel() != num_bytes:
                    self.backend.free(memory)
                    memory = None
                elif memory is not None:
                    # The last module may have computed on another stream, and may have more copies on their way. Only
                    # `stream` waits for them, and what writes there from now on waits for `stream`.
                    for event in (self._idle, *unread):
                        stream.wait_event(event)
            if memory is None:
                memory = self.take(num_bytes, stream, mine)
            for writer in writers:
                if writer != stream:
                    born = self.backend.new_event()
                    born.record(stream)
                    writer.wait_event(born)
                    self.backend.record_stream(memory, writer)
            mine.memory = memory
            # Until here `_last` has no memory, so it counts as none: an interrupt does no harm.
            if not is_inside:
                self._last = weakref.ref(mine)
            return True

    def give_back(self, mine: Holding, stream: Stream) -> None:
        """Undo `claim`. All compute that uses the memory is enqueued on `stream`, or done."""
        with self._lock:
            mine.thread = 0
            if mine is not self._current():
                self.release(mine)
                return
            assert mine.memory is not None
            stream.wait_event(self._idle)  # after `refresh`, the last pass may have computed on another stream
            self._idle.record(stream)
            self.backend.record_stream(mine.memory, stream)

    def release(self, mine: Holding) -> None:
        """Give the memory of slots back to the device. Residents stay."""
        with self._lock:
            if mine.memory is not None:
                memory, _ = mine.take_back()
                if memory is not None:
                    self.backend.free(memory)

    def release_idle(self) -> None:
        """Give all memory back to the device, but that of modules that run."""
        with self._lock:
            self.displace(None, 0)
            self._free_idle()

    def _free_idle(self) -> bool:
        last = self._current()
        if last is None or last.thread:
            return False
        self.release(last)
        return True

    def _current(self) -> Holding | None:
        last = None if self._last is None else self._last()
        return None if last is None or last.memory is None else last


_arenas: weakref.WeakValueDictionary[Backend, Arena] = weakref.WeakValueDictionary()
_arenas_lock = forked_free(threading.RLock())


def arena_for(backend: Backend) -> Arena:
    """The arena of a device. It lives as long as somebody holds it, as engines do."""
    with _arenas_lock:
        arena = _arenas.get(backend)
        if arena is None:
            arena = _arenas[backend] = Arena(backend)
        return arena


def arenas() -> list[Arena]:
    """The arenas of all devices that somebody takes memory of."""
    with _arenas_lock:
        return list(_arenas.values())


def retried(device: torch.device, make: Callable[[], R], num_bytes: int) -> R:
    """`Arena.retried`, for memory of a device that perhaps nothing is offloaded to."""
    for arena in arenas():
        there = arena.backend.device
        if there.type == device.type and device.index in (None, there.index):
            return arena.retried(make, num_bytes)
    return make()


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor.to(device)`, for which residents give way."""
    return retried(device, partial(tensor.to, device), tensor.nbytes)
