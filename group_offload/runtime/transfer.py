"""Copies from where images rest into slots."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.profiler import record_function

from ..device import Backend, Event, HostBackend, Stream, plain_empty
from ..stores.base import Image, Tier
from .trace import Tracer

if TYPE_CHECKING:
    from .slots import Slot

MAX_STAGING_BYTES = 64 << 20
"""One staging buffer, at most. PCIe is at full speed with 16 MiB; this much is worth dividing among reading threads."""
NUM_STAGING_BUFFERS = 2


class Transfer:
    """Enqueues the copies of images, and counts them. Used by one thread at a time."""

    def __init__(self, backend: Backend, *, use_stream: bool, blocking: bool) -> None:
        self._backend = backend
        # Of its own, so that copies overlap with compute.
        self._copy_stream = backend.new_stream() if use_stream else None
        self._blocking = blocking
        self._staging: list[tuple[torch.Tensor, Event]] = []
        self._staging_size = 1
        self._unpin: list[Callable[[], None]] = []
        # A module that is dropped without remove() must not leave the buffers' pages locked.
        weakref.finalize(self, _call_all, self._unpin).atexit = False
        self._turn = 0
        self._stream: Stream
        self._target: torch.Tensor
        self._pending: tuple[int, torch.Tensor, int, int] | None = None
        """A copy (at, memory, start, bytes) that the next one may be joined to."""
        self.last_copy = backend.new_event()
        self._names: list[str] = []
        self.tracer: Tracer | None = None
        self.num_copies = 0
        self.bytes_sent = dict.fromkeys(Tier, 0)

    @property
    def staging_bytes(self) -> int:
        return sum(buffer.numel() for buffer, _ in self._staging)

    def prepare_for(self, largest_image: int) -> None:
        """Size the staging buffers. At rest only."""
        size = max(1, min(MAX_STAGING_BYTES, largest_image))
        if size != self._staging_size:
            self.close()
            self._staging_size = size

    @property
    def stream(self) -> Stream:
        """What copies run on: a stream of their own, or the one that computes."""
        return self._copy_stream if self._copy_stream is not None else self._backend.current_stream()

    def send(self, images: Sequence[tuple[int, Image]], slot: Slot, after: Sequence[Event], names: list[str]) -> None:
        """Bring images to their offsets in `slot` once all of `after` is reached, and record `ready` behind the last copy.

        `names` are those of the groups, for whoever looks at a profile.
        """
        if torch._C._autograd._profiler_enabled():
            with record_function(f"group_offload.onload {' '.join(names)}"):
                self._send(images, slot, after, names)
        else:
            self._send(images, slot, after, names)

    def _send(self, images: Sequence[tuple[int, Image]], slot: Slot, after: Sequence[Event], names: list[str]) -> None:
        stream = self._stream = self.stream
        self._target = slot.memory
        self._pending = None  # of a call that broke off
        for event in after:
            stream.wait_event(event)
        if self.tracer is not None:
            self.tracer.copy_begins(stream)
        self._names = names
        try:
            for at, image in images:
                image.send(self, at)
                self.bytes_sent[image.tier] += image.layout.num_bytes
            self._flush()
        finally:  # what was enqueued reads images, and writes to the slot, also if the rest cannot be read
            if self.tracer is not None:
                self.tracer.copy_ends(stream, names, sum(image.layout.num_bytes for _, image in images))
            slot.ready.record(stream)
            self.last_copy.record(stream)
            del self._target  # it would keep the memory

    def fetch(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> None:
        """Copy device bytes that compute has changed, until `after`, back to the host, and wait for them."""
        stream = self._backend.current_stream()
        stream.wait_event(after)
        self._backend.copy(target, source, stream, blocking=True)
        self.num_copies += 1

    def finish(self) -> None:
        """Wait until no copy is on its way, because the memory that copies read from is about to change."""
        self.last_copy.synchronize()

    def copy(self, at: int, memory: torch.Tensor, start: int, num_bytes: int) -> None:
        """Enqueue one copy. What lies side by side, at rest and in the slot, goes over in one."""
        last = self._pending
        if last is not None:
            if last[1] is memory and last[2] + last[3] == start and last[0] + last[3] == at:
                self._pending = (last[0], memory, last[2], last[3] + num_bytes)
                return
            self._flush()
        self._pending = (at, memory, start, num_bytes)

    def stage(self, at: int, num_bytes: int, fill: Callable[[torch.Tensor, int], None]) -> None:
        self._flush()
        if isinstance(self._backend, HostBackend):
            fill(self._target[at : at + num_bytes], 0)  # the device is this memory: no way round
            self.num_copies += 1
            return
        for start in range(0, num_bytes, self._staging_size):
            buffer, sent = self._next_staging_buffer()
            sent.synchronize()  # its last content must have left before it is filled again
            size = min(self._staging_size, num_bytes - start)
            started = time.perf_counter()
            fill(buffer[:size], start)
            if self.tracer is not None:
                self.tracer.read(self._names[0], started, time.perf_counter(), size)
            self._enqueue(at + start, buffer, 0, size)
            sent.record(self._stream)

    def close(self) -> None:
        """Give the staging buffers back. Nothing may be on its way (`finish`)."""
        _call_all(self._unpin)
        self._staging.clear()

    def _flush(self) -> None:
        if self._pending is not None:
            self._enqueue(*self._pending)
            self._pending = None

    def _enqueue(self, at: int, memory: torch.Tensor, start: int, num_bytes: int) -> None:
        self._backend.copy(
            self._target[at : at + num_bytes],
            memory[start : start + num_bytes],
            self._stream,
            blocking=self._blocking,
        )
        self.num_copies += 1

    def _next_staging_buffer(self) -> tuple[torch.Tensor, Event]:
        if len(self._staging) < NUM_STAGING_BUFFERS:
            buffer = plain_empty(self._staging_size, torch.device("cpu"))
            unpin = self._backend.pin(buffer)
            if unpin is not None:
                self._unpin.append(unpin)
            self._staging.append((buffer, self._backend.new_event()))
            return self._staging[-1]
        self._turn = (self._turn + 1) % NUM_STAGING_BUFFERS
        return self._staging[self._turn]


def _call_all(calls: list[Callable[[], None]]) -> None:
    while calls:
        calls.pop()()
