"""A device on which every copy and every kernel takes the time that it is given: how long would a step take?

`TimedDevice` is a `Backend` with a clock of its own. Copies take their bytes over the bandwidth of the one link, what a
module computes is told by `compute`, and the host takes no time at all, as on a machine that launches faster than the device
runs. Nothing is copied. So the engine's own decisions, not a model of them, give the time of a step, its stalls and its
trace, in milliseconds of real time and without an accelerator.

With `launch_seconds` the host has a clock too: it is ahead of the device by what it has launched, calls of the driver take
it time, and where it waits for the device both go on from there.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .allocator import Block, Memory, OnCard

MALLOC_SECONDS, FREE_SECONDS, PAGE_SECONDS = 0.4e-3, 0.3e-3, 0.05e-3
"""What cudaMalloc and cudaFree take the host, and mapping or unmapping a page."""


class TimedStream:
    def __init__(self) -> None:
        self.now = 0.0
        """When the work that was enqueued so far is done."""

    def wait_event(self, event: TimedEvent, /) -> None:
        self.now = max(self.now, event.at)


class TimedEvent:
    def __init__(self, device: TimedDevice) -> None:
        self.device = device
        self.at = 0.0
        self.was_waited_for = False

    def record(self, stream: TimedStream, /) -> None:
        self.at, self.was_waited_for = stream.now, False

    def query(self) -> bool:
        return self.was_waited_for or self.at <= self.device.host

    def synchronize(self) -> None:
        self.device.wait_until(self.at)
        self.was_waited_for = True


class TimedDevice(OnCard):
    """Order of use: `use_simulated_device(device)`, offload a model that calls `compute` in its forward, run, look at `now`."""

    def __init__(
        self, bytes_per_second: float, *, card: Memory | None = None, launch_seconds: float | None = None
    ) -> None:
        super().__init__(card or Memory(1 << 50))
        self.bytes_per_second = bytes_per_second
        self.host = 0.0 if launch_seconds else -math.inf
        """The host's clock. Without one the host is ahead of the device, always."""
        self.launch_seconds = launch_seconds or 0.0
        self._link, self._decompressing = 0.0, list[tuple[float, float]]()
        self._compute = TimedStream()
        self._streams.append(self._compute)
        self._blocks: dict[int, tuple[Block, TimedStream, set[TimedStream]]] = {}  # by address: owner and other users
        self.copied_bytes = self.locked_bytes = self.unpinned_bytes = 0
        self.lock_bytes_per_second = math.inf
        """What pinning, and its end, take the host if the thread that launches does it."""
        self.decompressed_bytes_per_second = 20 * bytes_per_second
        self.scale = 1.0
        """Compute takes that many times what it is told to."""

    @property
    def now(self) -> float:
        """When compute is done with what was enqueued so far."""
        return self._compute.now

    def compute(self, seconds: float) -> None:
        self.host += self.launch_seconds
        begun = max(self._compute.now, self.host)
        self._compute.now = begun + seconds * self.scale
        for first, last in self._decompressing:  # which compute takes turns with
            self._compute.now += max(0.0, min(last, self._compute.now) - max(first, begun))

    def synchronize(self) -> None:
        self._wait_for(None)

    def wait_until(self, moment: float) -> None:
        if -math.inf < self.host < moment:
            self.host = moment

    def _finish(self, stream: TimedStream) -> None:
        self.wait_until(stream.now)

    def current_stream(self) -> TimedStream:
        return self._compute

    def new_stream(self) -> TimedStream:
        self._streams.append(TimedStream())
        return self._streams[-1]

    def new_event(self) -> TimedEvent:
        return TimedEvent(self)

    def seconds_between(self, start: TimedEvent, end: TimedEvent) -> float | None:
        return None if -math.inf < self.host < max(start.at, end.at) else end.at - start.at

    def empty(self, num_bytes: int, stream: TimedStream | None = None) -> torch.Tensor:
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        if num_bytes:
            address, owner = memory.data_ptr(), stream or self._compute
            with self._driver_takes_time():
                self._blocks[address] = self.card.malloc(num_bytes, owner), owner, set()
            weakref.finalize(memory, self._free, address).atexit = False
        return memory

    @contextmanager
    def _driver_takes_time(self) -> Iterator[None]:
        before = self._driver_seconds()
        try:
            yield
        finally:
            self.host += self._driver_seconds() - before

    def _driver_seconds(self) -> float:
        card = self.card
        return card.num_mallocs * MALLOC_SECONDS + card.num_frees * FREE_SECONDS + card.num_pages * PAGE_SECONDS

    def _free(self, address: int) -> None:
        block, _, users = self._blocks.pop(address)
        events = [self.new_event() for _ in users]
        for event, stream in zip(events, users, strict=True):
            event.record(stream)
        self.card.free(block, events)

    def record_stream(self, memory: torch.Tensor, stream: TimedStream) -> None:
        if memory.numel():
            _, owner, users = self._blocks[memory.untyped_storage().data_ptr()]
            users |= {stream} - {owner}

    def release_unused(self) -> None:
        with self._driver_takes_time():
            self.card.release_cached()

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: TimedStream, *, blocking: bool = False) -> None:
        begun = max(stream.now, self._link, self.host)
        seconds = target.numel() / self.bytes_per_second
        self._link = stream.now = begun + seconds
        self.copied_bytes += target.numel()
        if blocking:
            self.wait_until(stream.now)

    def transform(self, kernel: Any, target: torch.Tensor, source: torch.Tensor, stream: TimedStream) -> None:
        begun = max(stream.now, self.host)
        stream.now = begun + target.numel() / self.decompressed_bytes_per_second
        self._decompressing.append((begun, stream.now))

    def pin(self, memory: torch.Tensor, undo: list[Callable[[], None]], *, read_only: bool = False) -> bool:
        left = [memory.numel()]
        self.locked_bytes += memory.numel()
        self._pinned_pages(memory.numel())

        def unpin() -> None:
            if left:
                self._pinned_pages(left[0])
                self.unpinned_bytes += left.pop()

        undo.append(unpin)
        return True

    def _pinned_pages(self, num_bytes: int) -> None:
        if threading.current_thread() is threading.main_thread():
            self.host += num_bytes / self.lock_bytes_per_second

    def empty_pinned(self, num_bytes: int) -> torch.Tensor | None:
        return torch.empty(num_bytes, dtype=torch.uint8)
