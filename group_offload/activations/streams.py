"""The two streams that activations are copied on, and every wait that these copies need.

[Note: The life of an activation]
A storage that is saved for backward leaves the device once and may come back several times. Compute writes it and the copy to
host memory (D2H) reads it, so that copy waits for *packed*, recorded on compute's stream. Its device memory goes back to the
allocator only after compute has waited for *left*, recorded behind the copy: the host runs ahead of the device, so letting go
of the memory on the host isn't enough. In backward, new memory is allocated for compute's stream. The copy back (H2D) waits
for *born*, recorded there (the memory's last user may still be running), and for *left* (the host memory has to be written).
Compute waits for *arrived*, recorded behind the copy back, before it reads. Host memory is used again behind all copies back
that were enqueued until then; copies to it are on one stream, so they need no wait for each other.

Events and waits cost the host more than a small copy does. So storages that are saved one after another share them: they
are copied in batches of `Tuning.activation_batch_bytes`, which take the link about half a millisecond. A large activation
is a batch by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from ..base.arena import arena_for
from ..base.device import Backend, Event, Stream
from ..base.tuning import tuning

Copy = tuple[torch.Tensor, torch.Tensor]
"""Target and source."""


class CopyStreams:
    """Copies of activations of one device. See [Note: The life of an activation]."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self._arena = backend, arena_for(backend)
        self._out = backend.new_stream()
        """D2H, beside forward; and beside backward's H2D, which takes the other direction of the link."""
        self._back = backend.new_stream()
        """H2D, beside backward."""
        self._last_arrived: Event | None = None
        """Recorded behind the last copy back; None once `_out` has waited for it."""

    def copy_out(self, copies: Sequence[Copy], stream: Stream) -> list[Event]:
        """Copy storages that were written on `stream` to host memory.

        Returns:
            *left* of each, recorded behind its copy.
        """
        packed = self._backend.new_event()
        packed.record(stream)
        self._out.wait_event(packed)
        if self._last_arrived is not None:
            self._out.wait_event(self._last_arrived)
            self._last_arrived = None
        return self._copy(copies, self._out)

    def allocate(self, sizes: Iterable[int], stream: Stream) -> tuple[list[torch.Tensor], Event]:
        """Device memory for activations that come back, owned by `stream`, and *born*, recorded behind it."""
        owner = None if stream == self._backend.current_stream() else stream  # None is faster
        memories = [self._arena.take(num_bytes, owner) for num_bytes in sizes]
        born = self._backend.new_event()
        born.record(stream)
        return memories, born

    def copy_back(self, copies: Sequence[Copy], after: Iterable[Event]) -> list[Event]:
        """Copy host memory to the device, behind `after`: *born*, and each *left*.

        Returns:
            *arrived* of each, recorded behind its copy.
        """
        for event in dict.fromkeys(after):
            self._back.wait_event(event)
        arrivals = self._copy(copies, self._back)
        self._last_arrived = arrivals[-1]
        return arrivals

    def _copy(self, copies: Sequence[Copy], stream: Stream) -> list[Event]:
        """Start the copies, in batches. Returns the event behind each."""
        found: list[Event] = []
        for batch in _batches(copies):
            self._backend.copy_all(batch, stream)
            behind = self._backend.new_event()
            behind.record(stream)
            found += [behind] * len(batch)
        return found

    def drain(self) -> None:
        """Wait until no copy is under way."""
        for stream in (self._out, self._back):
            end = self._backend.new_event()
            end.record(stream)
            end.synchronize()


def _batches(copies: Sequence[Copy]) -> Iterator[Sequence[Copy]]:
    first = num_bytes = 0
    for index, (target, _) in enumerate(copies, 1):
        num_bytes += target.numel()
        if num_bytes >= tuning().activation_batch_bytes or index == len(copies):
            yield copies[first:index]
            first, num_bytes = index, 0
