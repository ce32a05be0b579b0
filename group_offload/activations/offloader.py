"""The way of one device's activations: out to RAM, and back. See [Note: The life of an activation]."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence

import torch

from ..base.device import Backend, Event, Stream
from ..base.tuning import tuning
from .config import ActivationConfig
from .counters import ActivationCounters
from .host_memory import HostMemory, wait_for_threads
from .stash import Dead, Remains, Stash, StashState
from .streams import Copy, CopyStreams
from .trace import ActivationTrace


class DeviceOffloader:
    """One device: its streams, the RAM and the file for its activations. All calls are made under the session's lock.

    Order of calls for a stash: `offload`, then any number of `restore` (with `fetch` ahead of it, if the stash is foreseen)
    and `evict`. `begin_group` says that compute came to another group. Copies to RAM are started in batches, at the latest
    when anything else is called.
    """

    def __init__(self, backend: Backend, config: ActivationConfig, counters: ActivationCounters) -> None:
        self.backend = backend
        self._max_inflight_bytes = config.max_inflight_bytes
        self._counters = counters
        self._streams = CopyStreams(backend)
        self.host = HostMemory(backend, config, counters, self._streams.drain)
        self._batch: list[Stash] = []
        """The stashes that are copied to RAM next, saved on one stream. The list holds them because device memory has to
        outlive a copy that is not enqueued yet."""
        self._batch_bytes = 0
        self._offloading: deque[weakref.ref[Stash]] = deque()
        """Stashes whose device memory is to be freed, in the order of their copies to RAM."""
        self._num_groups = 0
        self._last_wait: tuple[Stream, Event] | None = None
        """Copies of a batch share an event: a stream that waited for one need not wait for the next."""
        self.dead: Dead = deque()
        """What dead stashes left behind, in whichever thread they died."""
        self.inflight_bytes = 0

    @property
    def trace(self) -> ActivationTrace | None:
        return self._streams.trace

    def set_trace(self, trace: ActivationTrace | None) -> None:
        """Record what happens from here on in `trace`; None ends recording."""
        self._send_batch()
        self._streams.trace = trace
        self.host.set_trace(trace)

    def begin_group(self) -> None:
        """Compute came to another group. The device memory of what was offloaded two groups ago is freed now."""
        self._num_groups += 1
        self.settle()
        self._free_offloaded(None, self._num_groups - 2)
        self._finish_writes()

    def write_ahead(self) -> None:
        """Write the oldest activations to the file if RAM runs short."""
        self._send_batch()
        self.host.write_ahead()

    def settle(self) -> None:
        """Send the batch, and take back what dead stashes left behind."""
        self._send_batch()
        self._take_back_dead()

    def close(self) -> None:
        """Free all device memory that copies to RAM hold."""
        self.settle()
        self._free_offloaded(0, self._num_groups)

    def give_up(self) -> None:
        """Return once no copy is under way that was started here. No other method is called afterwards."""
        self._streams.drain()
        self.dead.clear()

    # Out

    def offload(self, stash: Stash) -> None:
        """Let the next batch copy a stash to RAM. If there is no room in RAM the stash stays on the device."""
        assert stash.state is StashState.ON_DEVICE
        if self.dead:
            self._take_back_dead()
        if not self._take_room(stash):
            self.host.refuse(stash)
            return
        if self._batch and self._batch[0].streams[0] != stash.streams[0]:
            self._send_batch()
        stash.state = StashState.OFFLOADING
        stash.offloaded_at = self._num_groups
        counters = self._counters
        counters.offloads += 1
        counters.offloaded_bytes += stash.num_bytes
        self.inflight_bytes += stash.num_bytes
        self._offloading.append(weakref.ref(stash))
        self.host.enqueue_write(stash)
        self._batch.append(stash)
        self._batch_bytes += stash.num_bytes
        if self._batch_bytes >= tuning().activation_batch_bytes or not self.backend.has_streams:
            self._send_batch()
        max_bytes = self._max_inflight_bytes
        if max_bytes is not None and self.inflight_bytes > max_bytes:
            self._free_offloaded(max_bytes, self._num_groups)
        if self.inflight_bytes > counters.peak_inflight_bytes:
            counters.peak_inflight_bytes = self.inflight_bytes

    def keep(self, stash: Stash, memory: torch.Tensor) -> None:
        """Keep a stash on the device that was to be offloaded: a last group saved it too, and `memory` has its bytes."""
        self._send_batch()
        if stash.state is StashState.OFFLOADING:
            self._stay(stash)
        elif stash.state is StashState.OFFLOADED:
            stash.memory, stash.streams = memory, [self.backend.current_stream()]
            stash.state = StashState.RELOADED

    def _take_room(self, stash: Stash) -> bool:
        """Give a stash RAM, and write others to the file for that if need be."""
        found = self.host.take(stash)
        if self.host.can_make_room(stash):
            while not found and self._make_room():
                self.settle()
                found = self.host.take(stash)
        return found

    def _make_room(self) -> bool:
        """Wait until some RAM is free that the file holds as well, or that no graph needs. False if there is none."""
        self._send_batch()
        if self.host.is_writing or self.host.write_oldest():
            self._finish_writes(at_least=1)
            return True
        if self.dead:  # a backward that was stopped: what it had begun to read is still on its way
            for index in range(len(self.dead)):  # by index: the deque may grow meanwhile
                job = self.dead[index].job
                if job is not None:
                    wait_for_threads(job)
            return True
        return self.host.drop_read()

    def _send_batch(self) -> None:
        """Start the copies of the batch."""
        if not self._batch:
            return
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        copies: list[Copy] = []
        after: list[Event] = []
        for stash in batch:
            assert stash.host_range is not None and stash.memory is not None
            copies.append(Copy(stash.host_memory, stash.memory, stash.name))
            after += stash.host_range.last_uses
        left = self._streams.copy_out(copies, after, batch[0].streams[0])
        for stash in batch:
            stash.left = stash.guard = left
        if not self.backend.has_streams:
            self._free_offloaded(0, 0)

    def _finish_writes(self, at_least: int = 0) -> None:
        """Free the device memory of stashes that the file holds now.

        Raises:
            GroupFileError: one could not be written. It stays in RAM.
        """
        for stash in self.host.finish_writes(at_least):
            if stash.state is StashState.OFFLOADING:
                self._free(stash, is_done=True)

    # Device memory

    def evict(self, stash: Stash) -> None:
        """Free the device memory of a stash that is in RAM or in the file as well."""
        if stash.state is StashState.RELOADED:
            self._free(stash, is_done=False)

    def _free_offloaded(self, max_bytes: int | None, max_group: int) -> None:
        """Free the device memory of stashes whose copies to RAM are done, and of some others.

        Args:
            max_bytes: how many bytes of the others may stay. None: none that is due.
            max_group: the others are due if they were offloaded in this group or before it.
        """
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
            is_due = stash.offloaded_at <= max_group and (max_bytes is None or self.inflight_bytes > max_bytes)
            if not is_done and not is_due:
                return
            self._offloading.popleft()
            self._free(stash, is_done=is_done)

    def _free(self, stash: Stash, *, is_done: bool) -> None:
        """Free the device memory of a stash. If the copy that uses it is not done, compute waits for that copy."""
        if stash.guard is not None and not is_done:
            for stream in stash.streams:
                self._wait(stream, stash.guard)
        if stash.state is StashState.OFFLOADING:
            self.inflight_bytes -= stash.num_bytes
        stash.state = StashState.OFFLOADED
        stash.memory = stash.guard = stash.waited_on = None

    def _stay(self, stash: Stash) -> None:
        """Backward, or a last group, came for a stash before its device memory was freed: nothing has to come back."""
        self.inflight_bytes -= stash.num_bytes
        stash.state = StashState.RELOADED

    def _take_back_dead(self) -> None:
        for _ in range(len(self.dead)):
            remains = self.dead.popleft()
            if remains.job is not None and not remains.job.is_done:
                self.dead.append(remains)  # threads are using its RAM
            else:
                self._take_back(remains)
        self.host.forget_dead()

    def _take_back(self, remains: Remains) -> None:
        if remains.guard is not None:
            for stream in remains.streams:
                self._wait(stream, remains.guard)
            remains.memory = None
        self.inflight_bytes -= remains.num_offloading_bytes
        self.host.take_back(remains)

    def _wait(self, stream: Stream, event: Event) -> None:
        """Let a stream wait for an event that is recorded once, unless the last call here was the same."""
        if self._last_wait is None or self._last_wait[1] is not event or self._last_wait[0] != stream:
            stream.wait_event(event)
            self._last_wait = stream, event

    # Back

    def fetch(self, stashes: Sequence[Stash], stream: Stream) -> int:
        """Start to bring stashes back for compute on `stream`: those in RAM at once, those in the file to RAM first.

        Returns:
            How many were not on the device.
        """
        self._send_batch()
        for stash in stashes:
            if stash.state is StashState.OFFLOADING:
                self._stay(stash)
        away = [stash for stash in stashes if stash.state is StashState.OFFLOADED]
        self.host.read_ahead(away)
        self._reload([stash for stash in away if self.host.is_filled(stash)], stream)
        return len(away)

    def restore(self, stash: Stash, stream: Stream) -> torch.Tensor:
        """The bytes of a stash on the device, for compute on `stream` from now on."""
        if stash.state is not StashState.RELOADED:
            self.fetch([stash], stream)
        if stash.state is StashState.OFFLOADED:
            self._reload_from_file(stash, stream)
        assert stash.memory is not None
        if stash.arrived is not None and (stash.waited_on is None or stash.waited_on != stream):
            reached = None if self.trace is None else self.trace.now(stream)
            self._wait(stream, stash.arrived)
            if self.trace is not None and reached is not None:
                self.trace.stalled(stash.name, reached, stream)
            stash.waited_on = stream
            if stream == stash.streams[0]:
                stash.guard = None
        if stream != stash.streams[0]:
            self.backend.record_stream(stash.memory, stream)
        return stash.memory

    def _reload(self, stashes: Sequence[Stash], stream: Stream) -> None:
        """Start the copies of stashes that are in RAM back to the device."""
        if not stashes:
            return
        memories, born = self._streams.allocate((stash.num_bytes for stash in stashes), stream)
        copies = [Copy(memory, stash.host_memory, stash.name) for stash, memory in zip(stashes, memories, strict=True)]
        after = [born, *(stash.left for stash in stashes if stash.left is not None)]
        for stash, memory, arrived in zip(stashes, memories, self._streams.copy_back(copies, after), strict=True):
            stash.arrived = arrived
            if stash.file_range is not None and stash.job is None:  # if it is needed once more, the file has it
                self.host.free(stash)
            self._came_back(stash, memory, stream)

    def _reload_from_file(self, stash: Stash, stream: Stream) -> None:
        """Bring a stash back that was not read ahead in time: the host waits for the file."""
        if stash.host_range is not None:
            self.host.finish_read(stash)
            self._reload([stash], stream)
            return
        buffer = self.host.read_now(stash)
        (memory,), _ = self._streams.allocate([stash.num_bytes], stream)
        self.backend.copy(memory, buffer, stream, blocking=True)
        stash.arrived = None
        self._came_back(stash, memory, stream)

    def _came_back(self, stash: Stash, memory: torch.Tensor, stream: Stream) -> None:
        stash.memory, stash.streams, stash.guard, stash.waited_on = memory, [stream], stash.arrived, None
        stash.state = StashState.RELOADED
        self._counters.reloads += 1
        self._counters.reloaded_bytes += stash.num_bytes
