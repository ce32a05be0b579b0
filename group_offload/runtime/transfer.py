"""Copies from where images rest into slots."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from ..device import Backend, Event, HostBackend, Stream, plain_empty
from ..stores.base import Image, Tier

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
        self._target_stream: Stream
        self._last_copy = backend.new_event()
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

    def send(self, images: list[tuple[Image, torch.Tensor]], after: Event, ready: Event) -> None:
        """Bring each image to its target once `after` is reached, and record `ready` behind the last copy."""
        stream = self._target_stream = self.stream
        stream.wait_event(after)
        for image, target in images:
            image.send(target, self)
            self.bytes_sent[image.tier] += target.numel()
        ready.record(stream)
        self._last_copy.record(stream)

    def fetch(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> None:
        """Copy device bytes that compute has changed, until `after`, back to the host, and wait for them."""
        stream = self._backend.current_stream()
        stream.wait_event(after)
        self._backend.copy(target, source, stream, blocking=True)
        self.num_copies += 1

    def finish(self) -> None:
        """Wait until no copy is on its way.

        At rest the weights are anybody's to edit, and the RAM that copies read from is where they rest: a copy that was
        still waiting for its turn would send the edited bytes to a pass that came before the edit. This is the one wait
        of the host in a pass; it is for the last copy, not for compute.
        """
        self._last_copy.synchronize()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._backend.copy(target, source, self._target_stream, blocking=self._blocking)
        self.num_copies += 1

    def stage(self, target: torch.Tensor, fill: Callable[[torch.Tensor, int], None]) -> None:
        if isinstance(self._backend, HostBackend):
            fill(target, 0)  # the device is this memory: no way round
            self.num_copies += 1
            return
        for start in range(0, target.numel(), self._staging_size):
            part = target[start : start + self._staging_size]
            buffer, sent = self._next_staging_buffer()
            sent.synchronize()  # its last content must have left before it is filled again
            chunk = buffer[: part.numel()]
            fill(chunk, start)
            self.copy(part, chunk)
            sent.record(self._target_stream)

    def close(self) -> None:
        """Give the staging buffers back. Nothing may be on its way (`finish`)."""
        _call_all(self._unpin)
        self._staging.clear()

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
