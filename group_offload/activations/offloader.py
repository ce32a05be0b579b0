"""How activations of one device leave for host memory and come back. See [Note: The life of an activation]."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence

import torch

from ..base.device import Backend, Event, Stream
from ..base.tuning import tuning
from .host_pool import HostPool
from .stash import Remains, Stash, StashState
from .stats import ActivationStats
from .streams import CopyStreams


class DeviceOffloader:
    """The streams and the host memory for one device's activations. All calls are made under the session's lock.

    Order of calls for a stash: `offload`, then any number of `restore` (with `fetch` ahead of it, if the stash is predicted)
    and `evict`. `begin_group` says that compute has reached another group. Copies to host memory start in batches, at the
    latest when anything else is called.
    """

    def __init__(self, backend: Backend, stats: ActivationStats) -> None:
        self.backend = backend
        self._stats = stats
        self._streams = CopyStreams(backend)
        self._pool = HostPool(backend, stats, self._streams.drain)
        self._batch: list[Stash] = []
        """The next stashes to copy to host memory, all saved on one stream. The list holds them because device memory has to
        outlive a copy that isn't enqueued yet."""
        self._batch_bytes = 0
        self._offloading: deque[weakref.ref[Stash]] = deque()
        """Stashes whose device memory is to be freed, in the order of their copies to host memory."""
        self._num_groups = 0
        self._last_wait: tuple[Stream, Event] | None = None
        """Copies of a batch share an event: a stream that waited for one need not wait for the next."""
        self.remains: deque[Remains] = deque()
        """What dead stashes left behind, in whichever thread they died."""

    def begin_group(self) -> None:
        """Compute has reached another group. Free the device memory of what was offloaded two groups ago."""
        self._num_groups += 1
        self.clean_up()
        self._free_offloaded(self._num_groups - 2)

    def clean_up(self) -> None:
        """Start the copies of the batch, and free what dead stashes left behind."""
        self._send_batch()
        self._bury()

    def close(self) -> None:
        """Free all device memory that copies to host memory hold."""
        self.clean_up()
        self._free_offloaded(self._num_groups)

    def abandon(self) -> None:
        """Return once no copy is under way that was started here. Call no other method afterwards."""
        self._streams.drain()
        self.remains.clear()
        stats = self._stats
        stats.inflight_bytes = stats.host_bytes = stats.pinned_bytes = stats.used_host_bytes = 0

    # To host memory

    def offload(self, stash: Stash) -> None:
        """Let the next batch copy a stash to host memory. If there is no room the stash stays on the device."""
        assert stash.state is StashState.ON_DEVICE
        stats = self._stats
        if self.remains:
            self._bury()
        stash.host = self._pool.take(stash.num_bytes)
        if stash.host is None:
            stats.refused_bytes += 0 if stash.was_refused else stash.num_bytes
            stash.was_refused = True
            return
        if self._batch and self._batch[0].streams[0] != stash.streams[0]:
            self._send_batch()
        stash.state = StashState.OFFLOADING
        stash.offloaded_at = self._num_groups
        stats.offloads += 1
        stats.offloaded_bytes += stash.num_bytes
        stats.inflight_bytes += stash.num_bytes
        self._offloading.append(weakref.ref(stash))
        self._batch.append(stash)
        self._batch_bytes += stash.num_bytes
        if self._batch_bytes >= tuning().activation_batch_bytes or not self.backend.has_streams:
            self._send_batch()
        stats.peak_inflight_bytes = max(stats.peak_inflight_bytes, stats.inflight_bytes)

    def keep(self, stash: Stash, memory: torch.Tensor) -> None:
        """Keep a stash on the device that was to be offloaded: a last group saved it too, and `memory` has its bytes."""
        self._send_batch()
        if stash.state is StashState.OFFLOADING:
            self._stay(stash)
        elif stash.state is StashState.OFFLOADED:
            stash.memory, stash.streams = memory, [self.backend.current_stream()]
            stash.state = StashState.RELOADED

    def _send_batch(self) -> None:
        """Start the copies of the batch."""
        if not self._batch:
            return
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        copies = [(stash.host, stash.memory) for stash in batch]
        left = self._streams.copy_out(copies, batch[0].streams[0])  # type: ignore[arg-type]
        for stash in batch:
            stash.left = stash.guard = left
        if not self.backend.has_streams:
            self._free_offloaded(0)

    # Device memory

    def evict(self, stash: Stash) -> None:
        """Free the device memory of a stash that is in host memory as well."""
        if stash.state is StashState.RELOADED:
            self._free(stash, is_done=False)

    def _free_offloaded(self, max_group: int) -> None:
        """Free the device memory of stashes whose copies to host memory are done, or that were offloaded by `max_group`."""
        self._send_batch()
        done: Event | None = None
        while self._offloading:
            stash = self._offloading[0]()
            if stash is None or stash.state is not StashState.OFFLOADING:
                self._offloading.popleft()
                continue
            assert stash.left is not None
            is_done = stash.left is done or stash.left.query()
            done = stash.left if is_done else done
            if not is_done and stash.offloaded_at > max_group:
                return
            self._offloading.popleft()
            self._free(stash, is_done=is_done)

    def _free(self, stash: Stash, *, is_done: bool) -> None:
        """Free the device memory of a stash. If the copy that uses it isn't done, compute waits for that copy."""
        if stash.guard is not None and not is_done:
            for stream in stash.streams:
                self._wait(stream, stash.guard)
        if stash.state is StashState.OFFLOADING:
            self._stats.inflight_bytes -= stash.num_bytes
        stash.state = StashState.OFFLOADED
        stash.memory = stash.guard = stash.waited_on = None

    def _stay(self, stash: Stash) -> None:
        """Backward, or a last group, needs a stash before its device memory was freed: nothing has to come back."""
        self._stats.inflight_bytes -= stash.num_bytes
        stash.state = StashState.RELOADED

    def _bury(self) -> None:
        """Free what dead stashes left behind."""
        for _ in range(len(self.remains)):  # more may come meanwhile
            memory, guard, streams, host, inflight_bytes = self.remains.popleft()
            if guard is not None:
                for stream in streams:
                    self._wait(stream, guard)
            del memory
            self._stats.inflight_bytes -= inflight_bytes
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
        self._send_batch()
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
            stash.memory, stash.streams, stash.waited_on = memory, [stream], None
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
        if stash.arrived is not None and (stash.waited_on is None or stash.waited_on != stream):
            self._wait(stream, stash.arrived)
            stash.waited_on = stream
            if stream == stash.streams[0]:
                stash.guard = None
        if stream != stash.streams[0]:
            self.backend.record_stream(stash.memory, stream)
        return stash.memory
