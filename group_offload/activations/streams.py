"""The two streams that activations move on, and every wait that their copies need.

[Note: The life of an activation]
A storage that is saved for backward leaves the device once and may come back several times. Compute writes it, the copy
to RAM reads it: that copy starts behind *packed*, recorded on compute's stream. Its device memory goes back to the
allocator only after compute waited for *left*, recorded behind the copy: the host is ahead of the device, so that the
host let go of it says nothing. In backward its new memory is allocated for compute's stream; the copy back starts behind
*born*, recorded there (what had the memory before may still be running), and behind *left* (the RAM has to be written).
Compute waits for *arrived* before it reads. The RAM is used again behind *left* and the last *arrived*.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..device import Backend, Event, Stream
from .slab import Block
from .trace import Tracer


class CopyStreams:
    """Copies of activations of one device. See [Note: The life of an activation]. Thread-safe as the backend is."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._out = backend.new_stream()
        """D2H, beside forward; and beside backward's H2D, which takes the other direction of the link."""
        self._back = backend.new_stream()
        """H2D, beside backward."""
        self.tracer: Tracer | None = None

    def send(self, block: Block, source: torch.Tensor, stream: Stream, name: str) -> Event:
        """Copy `source`, which was written on `stream`, to RAM.

        Args:
            name: of the group, for a trace.

        Returns:
            *left*: recorded behind the copy.
        """
        packed = self._backend.new_event()
        packed.record(stream)
        self._out.wait_event(packed)
        for use in block.range.last_uses:
            self._out.wait_event(use)
        begun = None if self.tracer is None else self.tracer.now(self._out)
        self._backend.copy(block.memory, source, self._out)
        left = self._backend.new_event()
        left.record(self._out)
        if self.tracer is not None and begun is not None:
            self.tracer.left(name, begun, left, source.numel())
        return left

    def allocate(self, sizes: Iterable[int], stream: Stream) -> tuple[list[torch.Tensor], Event]:
        """Device memory for activations that come back, owned by `stream`, and *born*, recorded behind it."""
        memories = [self._backend.empty(num_bytes, stream) for num_bytes in sizes]
        born = self._backend.new_event()
        born.record(stream)
        return memories, born

    def bring(self, memory: torch.Tensor, source: torch.Tensor, born: Event, left: Event | None, name: str) -> Event:
        """Copy RAM to `memory`.

        Returns:
            *arrived*: recorded behind the copy.
        """
        self._back.wait_event(born)
        if left is not None:
            self._back.wait_event(left)
        begun = None if self.tracer is None else self.tracer.now(self._back)
        self._backend.copy(memory, source, self._back)
        arrived = self._backend.new_event()
        arrived.record(self._back)
        if self.tracer is not None and begun is not None:
            self.tracer.came_back(name, begun, arrived, memory.numel())
        return arrived

    def drain(self) -> None:
        """Wait until no copy is on its way."""
        for stream in (self._out, self._back):
            end = self._backend.new_event()
            end.record(stream)
            end.synchronize()
