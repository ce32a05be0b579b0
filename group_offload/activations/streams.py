"""The two streams that activations move on, and every wait that their copies need.

[Note: The life of an activation]
A storage that is saved for backward leaves the device once and may come back several times. Compute writes it, the copy
to RAM reads it: that copy starts behind *packed*, recorded on compute's stream. Its device memory goes back to the
allocator only after compute waited for *left*, recorded behind the copy: the host is ahead of the device, so that the
host let go of it says nothing. In backward its new memory is allocated for compute's stream; the copy back starts behind
*born*, recorded there (what had the memory before may still be running), and behind *left* (the RAM has to be written).
Compute waits for *arrived* before it reads. The RAM is used again behind *left* and the last *arrived*.

Events and waits cost the host more than a small copy does, so what is saved in a row shares them: copies go in convoys of
`CONVOY_BYTES`, which take the link about half a millisecond. Large activations are a convoy each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..base.device import Backend, Event, Stream
from .slab import Block
from .trace import ActivationTrace

CONVOY_BYTES = 32 << 20


class CopyStreams:
    """Copies of activations of one device. See [Note: The life of an activation]. Thread-safe as the backend is."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._out = backend.new_stream()
        """D2H, beside forward; and beside backward's H2D, which takes the other direction of the link."""
        self._back = backend.new_stream()
        """H2D, beside backward."""
        self.tracer: ActivationTrace | None = None

    def send(self, cargo: Sequence[tuple[Block, torch.Tensor, str]], stream: Stream) -> Event:
        """Copy what was written on `stream` to RAM.

        Args:
            cargo: where to, what, and the group's name, for a trace.

        Returns:
            *left*: recorded behind the copies.
        """
        packed = self._backend.new_event()
        packed.record(stream)
        self._out.wait_event(packed)
        for use in dict.fromkeys(use for block, _, _ in cargo for use in block.range.last_uses):
            self._out.wait_event(use)
        if self.tracer is None:
            self._backend.copy_all([(block.memory, source) for block, source, _ in cargo], self._out)
        else:
            for block, source, name in cargo:
                begun = self.tracer.now(self._out)
                self._backend.copy(block.memory, source, self._out)
                self.tracer.left(name, begun, self.tracer.now(self._out), source.numel())
        left = self._backend.new_event()
        left.record(self._out)
        return left

    def allocate(self, sizes: Iterable[int], stream: Stream) -> tuple[list[torch.Tensor], Event]:
        """Device memory for activations that come back, owned by `stream`, and *born*, recorded behind it."""
        owner = None if stream == self._backend.current_stream() else stream  # None is quicker
        memories = [self._backend.empty(num_bytes, owner) for num_bytes in sizes]
        born = self._backend.new_event()
        born.record(stream)
        return memories, born

    def bring(self, cargo: Sequence[tuple[torch.Tensor, torch.Tensor, str]], after: Iterable[Event]) -> list[Event]:
        """Copy RAM to the device, behind `after`: *born*, and each *left*.

        Args:
            cargo: where to, what, and the group's name, for a trace.

        Returns:
            *arrived* of each, recorded behind its copy.
        """
        for event in dict.fromkeys(after):
            self._back.wait_event(event)
        found: list[Event] = []
        for convoy in _convoys(cargo):
            if self.tracer is None:
                self._backend.copy_all([(memory, source) for memory, source, _ in convoy], self._back)
            else:
                for memory, source, name in convoy:
                    begun = self.tracer.now(self._back)
                    self._backend.copy(memory, source, self._back)
                    self.tracer.came_back(name, begun, self.tracer.now(self._back), memory.numel())
            arrived = self._backend.new_event()
            arrived.record(self._back)
            found += [arrived] * len(convoy)
        return found

    def drain(self) -> None:
        """Wait until no copy is on its way."""
        for stream in (self._out, self._back):
            end = self._backend.new_event()
            end.record(stream)
            end.synchronize()


def _convoys(
    cargo: Sequence[tuple[torch.Tensor, torch.Tensor, str]],
) -> Iterable[Sequence[tuple[torch.Tensor, torch.Tensor, str]]]:
    first = num_bytes = 0
    for index, (memory, _, _) in enumerate(cargo, 1):
        num_bytes += memory.numel()
        if num_bytes >= CONVOY_BYTES or index == len(cargo):
            yield cargo[first:index]
            first, num_bytes = index, 0
