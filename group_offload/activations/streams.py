"""The two streams that activations move on, and every wait that their copies need.

[Note: The life of an activation]
A storage that is saved for backward leaves the device once and may come back several times. Compute writes it, and the copy
to RAM reads it: that copy starts behind *packed*, recorded on compute's stream. Its device memory goes back to the
allocator only after compute waited for *left*, recorded behind the copy: the host is ahead of the device, so that the host
let go of the memory says nothing. In backward its new memory is allocated for compute's stream. The copy back starts behind
*born*, recorded there (what had the memory before may still be running), and behind *left* (the RAM has to be written).
Compute waits for *arrived* before it reads. The RAM is used again behind *left* and the last *arrived*.

Events and waits cost the host more than a small copy does. So storages that are saved one after another share them: they
are copied in batches of `Tuning.activation_batch_bytes`, which take the link about half a millisecond. A large activation
is a batch by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from ..base.device import Backend, Event, Stream
from ..base.tuning import tuning
from .trace import BACK, OUT, ActivationTrace


class Copy(NamedTuple):
    """One storage's copy."""

    target: torch.Tensor
    source: torch.Tensor
    name: str
    """The FQN of the group that saved it, for a trace."""


class CopyStreams:
    """Copies of activations of one device. See [Note: The life of an activation]. Thread-safe as the backend is."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._out = backend.new_stream()
        """D2H, beside forward; and beside backward's H2D, which takes the other direction of the link."""
        self._back = backend.new_stream()
        """H2D, beside backward."""
        self.trace: ActivationTrace | None = None

    def copy_out(self, batch: Sequence[Copy], after: Iterable[Event], stream: Stream) -> Event:
        """Copy storages that were written on `stream` to RAM, behind the last uses of that RAM.

        Returns:
            *left*: recorded behind the copies.
        """
        packed = self._backend.new_event()
        packed.record(stream)
        self._out.wait_event(packed)
        for event in dict.fromkeys(after):
            self._out.wait_event(event)
        return self._copy(batch, self._out, OUT)

    def allocate(self, sizes: Iterable[int], stream: Stream) -> tuple[list[torch.Tensor], Event]:
        """Device memory for activations that come back, owned by `stream`, and *born*, recorded behind it."""
        owner = None if stream == self._backend.current_stream() else stream  # None is quicker
        memories = [self._backend.empty(num_bytes, owner) for num_bytes in sizes]
        born = self._backend.new_event()
        born.record(stream)
        return memories, born

    def copy_back(self, copies: Sequence[Copy], after: Iterable[Event]) -> list[Event]:
        """Copy RAM to the device, behind `after`: *born*, and each *left*.

        Returns:
            *arrived* of each, recorded behind its copy.
        """
        for event in dict.fromkeys(after):
            self._back.wait_event(event)
        found: list[Event] = []
        for batch in _batches(copies):
            found += [self._copy(batch, self._back, BACK)] * len(batch)
        return found

    def _copy(self, batch: Sequence[Copy], stream: Stream, row: str) -> Event:
        """Start the copies of a batch. Returns the event behind them."""
        if self.trace is None:
            self._backend.copy_all([(copy.target, copy.source) for copy in batch], stream)
        else:
            for target, source, name in batch:
                begun = self.trace.now(stream)
                self._backend.copy(target, source, stream)
                self.trace.add(row, name, begun, self.trace.now(stream), source.numel())
        behind = self._backend.new_event()
        behind.record(stream)
        return behind

    def drain(self) -> None:
        """Wait until no copy is under way."""
        for stream in (self._out, self._back):
            end = self._backend.new_event()
            end.record(stream)
            end.synchronize()


def _batches(copies: Sequence[Copy]) -> Iterator[Sequence[Copy]]:
    first = num_bytes = 0
    for index, copy in enumerate(copies, 1):
        num_bytes += copy.target.numel()
        if num_bytes >= tuning().activation_batch_bytes or index == len(copies):
            yield copies[first:index]
            first, num_bytes = index, 0
