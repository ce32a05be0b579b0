"""Compressed buffers: the device memory that compressed bytes are copied to, before the device decompresses them into a slot.

[Note: The life of a compressed buffer]
Three streams hand a group on: compressed bytes are copied to a compressed buffer on the copy stream, decompressed from there
into the group's slot on the *decompress stream*, and used on the stream that computes. Each event keeps two of them apart.

- *arrived* is recorded on the copy stream behind each copy, and the decompress stream waits for it.
- *decompressed* is recorded on the decompress stream behind the kernel that read the compressed buffer. The next copy to the
  compressed buffer waits for it.
- The slot's *ready* is recorded on the decompress stream too, which waits for its *last use*: see [Note: The life of a slot].
  So compressed bytes cross the link while compute still needs the slot that they will be decompressed into.

A compressed buffer holds one strip ([Note: A compressed image]), and a group may have many. What threads read from files has
one of its own, the *reading* buffer: those threads enqueue chunk by chunk, one strip after another, while the thread that
computes uses the other buffers. The reads may be canceled between two chunks.
"""

from __future__ import annotations

import torch

from ...base.device import Backend


class CompressedBuffer:
    """Device memory for one strip of compressed bytes at a time. See [Note: The life of a compressed buffer]."""

    __slots__ = ("arrived", "decompressed", "memory")

    def __init__(self, memory: torch.Tensor, backend: Backend) -> None:
        self.memory = memory
        self.arrived, self.decompressed = backend.new_event(), backend.new_event()


class CompressedBuffers:
    """The compressed buffers of one module. They lie in the memory that its slots lie in."""

    def __init__(self, memory: torch.Tensor, backend: Backend, strip_bytes: int, reading_bytes: int) -> None:
        """
        Args:
            strip_bytes: The size of all others.
            reading_bytes: The size of the reading buffer, at the end of the memory.
        """
        memory, reading = memory[: memory.numel() - reading_bytes], memory[memory.numel() - reading_bytes :]
        self.reading = CompressedBuffer(reading, backend)
        self._in_turn = [CompressedBuffer(part, backend) for part in torch.split(memory, strip_bytes)]
        in_turn = (each.decompressed for each in self._in_turn)
        self.last_uses = [*in_turn, self.reading.arrived, self.reading.decompressed]
        """The events behind the last uses of the memory."""

    def next(self) -> CompressedBuffer:
        """The compressed buffer that was used longest ago."""
        self._in_turn.append(self._in_turn.pop(0))
        return self._in_turn[-1]
