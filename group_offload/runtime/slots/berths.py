"""Berths: the device memory that packed bytes are copied to, before the device unpacks them into a slot.

[Note: The life of a berth]
Three streams hand a group on: packed bytes are copied to a berth on the copy stream, unpacked from there into the group's slot
on the *unpack stream*, and used on the stream that computes. Each event keeps two of them apart.

- *arrived* is recorded on the copy stream behind each copy, and the unpack stream waits for it.
- *unpacked* is recorded on the unpack stream behind the kernel that read the berth. The next copy to the berth waits for it.
- The slot's *ready* is recorded on the unpack stream too, which waits for its *last use*: see [Note: The life of a slot]. So
  packed bytes cross the link while compute still needs the slot that they will be unpacked into.

A berth holds one strip ([Note: A packed image]), and a group may have many. What threads read from files has a berth of its
own, the *reading berth*: those threads enqueue chunk by chunk, one strip after another, while the thread that computes uses the
other berths. The reads may be canceled between two chunks.
"""

from __future__ import annotations

import torch

from ...base.device import Backend
from ...plan.placement import NUM_BERTHS


class Berth:
    """Device memory for one strip of packed bytes at a time. See [Note: The life of a berth]."""

    __slots__ = ("arrived", "memory", "unpacked")

    def __init__(self, memory: torch.Tensor, backend: Backend) -> None:
        self.memory = memory
        self.arrived, self.unpacked = backend.new_event(), backend.new_event()


class Berths:
    """The berths of one module. They lie in the memory that its slots lie in."""

    def __init__(self, memory: torch.Tensor, backend: Backend, reading_bytes: int = 0) -> None:
        """
        Args:
            reading_bytes: The part of the memory, at its end, that is the reading berth.
        """
        memory, reading = memory[: memory.numel() - reading_bytes], memory[memory.numel() - reading_bytes :]
        self.reading = Berth(reading, backend)
        self._berths = [Berth(part, backend) for part in memory.tensor_split(NUM_BERTHS)]
        self.last_uses = [*(berth.unpacked for berth in self._berths), self.reading.arrived, self.reading.unpacked]
        """The events behind the last uses of the memory."""

    def next(self) -> Berth:
        """The berth that was used longest ago."""
        self._berths.append(self._berths.pop(0))
        return self._berths[-1]
