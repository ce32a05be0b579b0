"""Fixed places on the device that images land in, one after another.

[Note: The life of a slot]
A slot is written by copies and read by compute, on two streams that know nothing of each other. Two events keep them
apart. *ready* is recorded on the copy stream behind the copies of an image; compute waits for it before the first kernel
that reads the slot. *last use* is recorded on the compute stream behind the last kernel that read it; the copies of the
next image wait for it. Both are recorded in `Engine`, right where the work they stand for was enqueued.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import torch

from ..device import Backend, Stream

if TYPE_CHECKING:
    from .group import Group


class Slot:
    """Device memory for one image at a time. See [Note: The life of a slot]."""

    __slots__ = ("group", "is_fixed", "last_use", "memory", "ready", "views")

    def __init__(self, memory: torch.Tensor, backend: Backend, *, is_fixed: bool) -> None:
        self.memory = memory
        self.ready = backend.new_event()
        self.last_use = backend.new_event()
        self.is_fixed = is_fixed
        """Part of a lease; else the memory was taken for one image and goes back with it."""
        self.group: Group | None = None
        """Whose image is in it, or on its way."""
        self.views: weakref.WeakKeyDictionary[Group, list[torch.Tensor]] = weakref.WeakKeyDictionary()
        """The tensors of each group that was here before, as views of `memory`: they are the same every time."""


class Lease:
    """Memory of the arena, cut into slots. Held by the module that it was given to, so that it goes with the module."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory: torch.Tensor | None = memory
        """None once it was taken back for another module."""
        self.rings: dict[int, list[Slot]] = {}
        """For each height of groups, the slots that they take turns in."""

    def take_back(self) -> torch.Tensor:
        memory, self.memory, self.rings = self.memory, None, {}
        assert memory is not None
        return memory


class Arena:
    """The slot memory of one device, shared by all offloaded modules, which run one after another.

    The memory stays with the module that ran last, so that nothing is allocated for its next pass, and is exchanged when
    a module comes that needs another size: device memory is what the running module needs, never the sum. Thread-safe. A
    module that starts while another one is in the middle of a pass gets memory of its own.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._last: weakref.ref[Lease] | None = None
        self._owner: Stream | None = None
        self._is_busy = False
        self._idle = backend.new_event()

    def lease(self, mine: Lease | None, num_bytes: int, stream: Stream) -> Lease:
        """`num_bytes` of device memory until `give_back`, free to use on `stream` and on what waits for it.

        `mine` is the caller's last lease: it is given again, slots and all, if nobody else came in between.
        """
        with self._lock:
            if self._is_busy:
                return Lease(self._backend.empty(num_bytes, stream))
            lease = self._current()
            if lease is not None and lease is not mine:
                memory = lease.take_back()
                lease = Lease(memory)
            if lease is not None and lease.memory is not None and lease.memory.numel() != num_bytes:
                self._backend.free(lease.take_back())
                lease = None
            if lease is None:
                lease, self._owner = Lease(self._backend.empty(num_bytes, stream)), stream
            else:
                stream.wait_event(self._idle)  # whoever had it last may have computed on another stream
            self._last = weakref.ref(lease)
            self._is_busy = True
            return lease

    def give_back(self, lease: Lease, stream: Stream) -> None:
        """End a lease. All uses of its memory are enqueued on `stream`, or done."""
        with self._lock:
            assert lease.memory is not None
            if lease is not self._current():
                self._backend.free(lease.take_back())
                return
            self._idle.record(stream)
            if stream != self._owner:
                self._backend.record_stream(lease.memory, stream)
            self._is_busy = False

    def release(self, lease: Lease) -> None:
        """Give the memory of `lease` back to the device, if it was not taken back already."""
        with self._lock:
            if lease is self._current():
                self._backend.free(lease.take_back())

    def _current(self) -> Lease | None:
        lease = None if self._last is None else self._last()
        return None if lease is None or lease.memory is None else lease


_arenas: weakref.WeakValueDictionary[Backend, Arena] = weakref.WeakValueDictionary()
_arenas_lock = threading.Lock()


def arena_for(backend: Backend) -> Arena:
    """The arena of a device. It lives as long as anybody holds it."""
    with _arenas_lock:
        arena = _arenas.get(backend)
        if arena is None:
            arena = _arenas[backend] = Arena(backend)
        return arena
