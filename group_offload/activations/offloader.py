"""What was saved for backward, and how it leaves for host memory and comes back. See [Note: The life of an activation]."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import groupby

import torch

from ..base.device import Backend, Event, Stream
from .host_pool import HostPool
from .stats import ActivationStats
from .streams import CopyStreams

Remains = tuple[torch.Tensor | None, Event | None, list[Stream], torch.Tensor | None]
"""What a dead stash leaves behind: device memory that a copy still uses, its `guard` and `streams`, and host memory."""


class StashState(Enum):
    """Where the bytes of a stash are."""

    ON_DEVICE = auto()
    """On the device only: one of the last groups saved it, or there is no host memory for it."""
    OFFLOADING = auto()
    """On the device; its copy to host memory is under way."""
    OFFLOADED = auto()
    """In host memory only."""
    RELOADED = auto()
    """In host memory; and on the device, or on its way there."""
    LOST = auto()
    """Nowhere: an interrupt broke off work on it. See [Note: Interrupts of activation offloading]."""


@dataclass(eq=False, repr=False)
class Stash:
    """A storage, or a part of one, that was saved for backward. It lives as long as autograd holds a view of it.

    Only its offloader changes it, under the session's lock.
    """

    memory: torch.Tensor | None
    """The bytes on the device, as uint8: an alias of the saved storage, or memory that was allocated for a copy back."""
    streams: list[Stream]
    """The streams that wait for `guard` before `memory` is freed. The first one owns the memory."""
    remains: deque[Remains]
    """Where it leaves what its offloader has to clean up once it is dead."""
    num_bytes: int
    state: StashState = StashState.ON_DEVICE
    position: int = -1
    """The last position of the tape at which it was saved."""
    host: torch.Tensor | None = None
    """The host memory that holds the bytes, or that they are on their way to."""
    left: Event | None = None
    """Recorded behind the copy to host memory."""
    arrived: Event | None = None
    """What compute waits for before it uses `memory`: recorded behind the last copy back, or `left` if nothing came back."""
    guard: Event | None = None
    """The copy that still uses `memory`; None once `streams` have waited for it."""

    def lose(self) -> None:
        """Free all bytes. Call it only when no copy is under way."""
        self.state = StashState.LOST
        self.memory = self.host = self.guard = self.left = self.arrived = None

    def __del__(self) -> None:
        # This runs at any time, in any thread, perhaps in the middle of the offloader's own work. So it only leaves a note.
        if self.state is not StashState.ON_DEVICE and self.state is not StashState.LOST:
            memory = None if self.guard is None else self.memory
            self.remains.append((memory, self.guard, self.streams, self.host))


class DeviceOffloader:
    """The streams and the host memory for one device's activations. All calls are made under the session's lock.

    Order of calls for a stash: `offload`, then any number of `keep` (and `offload`), then any number of `restore` (with `fetch`
    ahead of it, if the stash is predicted). Each time that compute reaches another group, `free_offloaded` comes first.
    """

    def __init__(self, backend: Backend, stats: ActivationStats) -> None:
        self.backend = backend
        self._stats = stats
        self._streams = CopyStreams(backend)
        self._pool = HostPool(backend, stats, self._streams.drain)
        self._offloading: deque[weakref.ref[Stash]] = deque()
        """Stashes whose device memory is to be freed, in the order of their copies to host memory."""
        self._last_wait: tuple[Stream, Event] | None = None
        """Copies of a batch share an event: a stream that waited for one need not wait for the next."""
        self.remains: deque[Remains] = deque()
        """What dead stashes left behind, in whichever thread they died."""

    def abandon(self) -> None:
        """Return once no copy is under way that was started here. Call no other method afterwards."""
        self._streams.drain()
        self.remains.clear()
        self._stats.host_bytes = self._stats.used_host_bytes = 0

    # To host memory

    def offload(self, stashes: Iterable[Stash]) -> None:
        """Start to copy stashes to host memory. Those that are there let go of their device memory; those for which there is
        no room stay."""
        self.clean_up()
        stats, leaving = self._stats, list[Stash]()
        for stash in stashes:
            if stash.state is StashState.RELOADED:
                self._free(stash)
                continue
            assert stash.state is StashState.ON_DEVICE
            stash.host = self._pool.take(stash.num_bytes)
            if stash.host is None:
                stats.refused_bytes += stash.num_bytes
                continue
            stash.state = StashState.OFFLOADING
            stats.offloads += 1
            stats.offloaded_bytes += stash.num_bytes
            leaving.append(stash)
            self._offloading.append(weakref.ref(stash))
        for stream, group in groupby(leaving, lambda stash: stash.streams[0]):
            mine = [*group]
            copies = [(stash.host, stash.memory) for stash in mine]
            for stash, left in zip(mine, self._streams.copy_out(copies, stream), strict=True):  # type: ignore[arg-type]
                stash.left = stash.guard = left
        if not self.backend.has_streams:
            self.free_offloaded()

    def keep(self, stash: Stash, memory: torch.Tensor) -> None:
        """A later group saved a stash too, and `memory` has its bytes: they stay on the device as long as that group's."""
        if stash.state is StashState.OFFLOADING:
            self._stay(stash)
        elif stash.state is StashState.OFFLOADED:
            stash.memory, stash.streams = memory, [self.backend.current_stream()]
            stash.state = StashState.RELOADED

    # Device memory

    def free_offloaded(self) -> None:
        """Free the device memory of what was offloaded, and what dead stashes left behind: compute waits for its copies."""
        self.clean_up()
        while self._offloading:
            stash = self._offloading.popleft()()
            if stash is not None and stash.state is StashState.OFFLOADING:
                self._free(stash)

    def _free(self, stash: Stash) -> None:
        """Free the device memory of a stash, once compute has waited for the copy that uses it."""
        if stash.guard is not None:
            for stream in stash.streams:
                self._wait(stream, stash.guard)
        stash.state = StashState.OFFLOADED
        stash.memory = stash.guard = None

    def _stay(self, stash: Stash) -> None:
        """Backward, or a later group, needs a stash before its device memory was freed: nothing has to come back."""
        stash.state = StashState.RELOADED
        stash.arrived = stash.left  # a backward may change the bytes in place: behind the copy that reads them

    def clean_up(self) -> None:
        """Free what dead stashes left behind."""
        for _ in range(len(self.remains)):  # more may come meanwhile
            memory, guard, streams, host = self.remains.popleft()
            if guard is not None:
                for stream in streams:
                    self._wait(stream, guard)
            del memory
            if host is not None:
                self._pool.give(host)

    def _wait(self, stream: Stream, event: Event) -> None:
        """Let a stream wait for an event that is recorded once, unless the last call here was the same."""
        if self._last_wait is None or self._last_wait[1] is not event or self._last_wait[0] != stream:
            stream.wait_event(event)
            self._last_wait = stream, event

    # Back to the device

    def fetch(self, stashes: Sequence[Stash], stream: Stream) -> int:
        """Start to bring stashes back for compute on `stream`.

        Returns:
            How many were not on the device.
        """
        for stash in stashes:
            if stash.state is StashState.OFFLOADING:
                self._stay(stash)
        away = [stash for stash in stashes if stash.state is StashState.OFFLOADED]
        if not away:
            return 0
        memories, born = self._streams.allocate((stash.num_bytes for stash in away), stream)
        copies = [(memory, stash.host) for memory, stash in zip(memories, away, strict=True)]
        after = [born, *(stash.left for stash in away if stash.left is not None)]
        arrivals = self._streams.copy_back(copies, after)  # type: ignore[arg-type]
        for stash, memory, arrived in zip(away, memories, arrivals, strict=True):
            stash.memory, stash.streams = memory, [stream]
            stash.arrived = stash.guard = arrived
            stash.state = StashState.RELOADED
            self._stats.reloads += 1
            self._stats.reloaded_bytes += stash.num_bytes
        return len(away)

    def restore(self, stash: Stash, stream: Stream) -> torch.Tensor:
        """The bytes of a stash on the device, for compute on `stream` from now on."""
        if stash.state is not StashState.RELOADED:
            self.fetch([stash], stream)
        assert stash.memory is not None
        if stash.arrived is not None:
            self._wait(stream, stash.arrived)
            if stash.streams == [stream]:
                stash.guard = None
        if stream != stash.streams[0]:
            self.backend.record_stream(stash.memory, stream)
        return stash.memory
