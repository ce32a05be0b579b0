"""How parts that ranks have brought come to the other ranks: by copies into their memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ...base.device import Backend, Event
from ...base.peer_memory import PeerMemory

Place = Sequence[int]
"""The number of an allocation, and a byte of it."""


@dataclass(frozen=True, slots=True)
class SharedBytes:
    """What is gathered of a group."""

    memory: torch.Tensor
    """The bytes in the slot: the parts of all ranks, one after another."""
    part_bytes: int
    landed: Event
    """It is behind the copy of this rank's part."""

    def part_of(self, rank: int) -> torch.Tensor:
        return self.memory[rank * self.part_bytes : (rank + 1) * self.part_bytes]


@dataclass(frozen=True, slots=True)
class GatherSpeeds:
    """Bytes per second, as the slowest rank measured them while all were at it."""

    alone: float
    """Weights that reach each GPU if each sends all of them over its own link."""
    shared: float
    """Weights that reach each GPU if each sends its shard."""


class PeerLink:
    """GPUs that reach each other's memory: copies, which take nothing from compute, and wait for no other rank.

    Used by one thread at a time.
    """

    def __init__(self, backend: Backend, rank: int, num_ranks: int, memory: PeerMemory) -> None:
        self.handles: dict[str, str] = {}
        """What the others open this rank's memory with, by the number of the allocation."""
        self._backend, self._rank, self._memory = backend, rank, memory
        self._others = [other for other in range(num_ranks) if other != rank]
        self.streams = [backend.new_stream() for _ in self._others]
        """The streams that parts leave on."""
        self._starts: dict[str, int] = {}
        self._known: Mapping[str, Mapping[str, str]] = {}
        self._opened: dict[tuple[str, str], int] = {}
        """The addresses of other ranks' allocations, by rank and number."""

    def place_of(self, memory: torch.Tensor) -> Place:
        """Where the others write to when they write to this memory. `handles` has its number from then on."""
        start = self._memory.start_of(memory)
        number = self._memory.number_at(start)
        if str(number) not in self.handles:
            self._starts[str(number)] = start
            self.handles[str(number)] = self._memory.handle_of(memory)
        return number, memory.data_ptr() - start

    def forget_freed(self) -> None:
        """Take allocations off `handles` that are there no more."""
        for number, start in [*self._starts.items()]:
            try:
                is_there = self._memory.number_at(start) == int(number)
            except RuntimeError:
                is_there = False
            if not is_there:
                del self._starts[number], self.handles[number]

    def look(self, memories: Mapping[str, Mapping[str, str]]) -> None:
        """Take notice of the `handles` of each rank. What is no more among them is closed."""
        self._known = memories
        for rank, number in [*self._opened]:
            if number not in memories.get(rank, ()):
                self._memory.close(self._opened.pop((rank, number)))

    def send(self, shared: SharedBytes, places: Mapping[str, Place]) -> list[Event]:
        """Enqueue the way of this rank's part to the other ranks.

        Args:
            places: For each rank, where the shared bytes begin in its memory.

        Returns:
            The events behind all of it.
        """
        events, own = [], shared.part_of(self._rank)
        for other, stream in zip(self._others, self.streams, strict=True):
            number, at = places[str(other)]
            to = self._address_of(str(other), str(number)) + at + self._rank * shared.part_bytes
            stream.wait_event(shared.landed)
            self._memory.copy(to, own, stream)
            sent = self._backend.new_event()
            sent.record(stream)
            events.append(sent)
        return events

    def _address_of(self, rank: str, number: str) -> int:
        if (rank, number) not in self._opened:
            self._opened[rank, number] = self._memory.open(self._known[rank][number])
        return self._opened[rank, number]
