"""Writes to slots, copied or decompressed, in the order that the memory of slots and compressed buffers asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ...base.device import Backend, Event, Stream
from ...stores.moves import Decompress
from ..slots.compressed_buffers import CompressedBuffer, CompressedBuffers


@dataclass(slots=True, eq=False)
class Landing:
    """The memory of a slot, and what writes to it wait for."""

    memory: torch.Tensor
    after: Sequence[Event] | None
    """Events behind the last use of what was in the memory before. None once what is enqueued waits for them: `WriteOrder`."""
    ready: Event
    """The event that is recorded behind the last copy."""
    compressed_buffers: CompressedBuffers | None = None
    """Where compressed bytes land; None if there are none."""
    stream: Stream = field(init=False)
    """The stream that writes to the slot. `Transfer._send` sets both streams, by what it sends."""
    copy_stream: Stream = field(init=False)
    """The stream that compressed bytes are copied on."""


class WriteOrder:
    """Enqueues writes to slots behind the last use of what was there before.

    A slot may take a part of the place of a larger one, and a later slot the rest. Only the first of the two waits for the last
    use of what was there, and the second one may be written on another stream (where blobs are decompressed), or by a thread
    that reads files. So what one stream has waited for counts for all: see also `Reader.order_behind_jobs`.
    """

    def __init__(self, backend: Backend, *, has_two_streams: bool) -> None:
        self._backend = backend
        self._waited = backend.new_event() if has_two_streams else None
        """The event behind what was waited for so far; None if there is one stream only."""
        self._stream: Stream | None = None
        """The stream that waited last."""

    def wait_for_room(self, landing: Landing) -> None:
        """Let what is enqueued on the landing's stream from now on come after the last use of what was in the memory before.

        Repeated calls do nothing.
        """
        if landing.after is None:
            return
        stream = landing.stream
        if self._waited is not None and self._stream is not None and self._stream != stream:
            stream.wait_event(self._waited)
        for event in landing.after:
            stream.wait_event(event)
        if self._waited is not None:
            self._waited.record(stream)
            self._stream = stream
        landing.after = None

    def fill(
        self, landing: Landing, buffer: CompressedBuffer, at: int, source: torch.Tensor, *, blocking: bool = False
    ) -> None:
        """Enqueue the copy of compressed bytes to byte `at` of their buffer. It waits for no slot."""
        stream = landing.copy_stream
        if not at:
            stream.wait_event(buffer.decompressed)
        self._backend.copy(buffer.memory[at : at + source.numel()], source, stream, blocking=blocking)
        buffer.arrived.record(stream)

    def decompress(
        self, landing: Landing, move: Decompress, compressed: torch.Tensor, buffer: CompressedBuffer | None
    ) -> None:
        """Enqueue the decompression of `compressed`, in memory of the device, to its place in the slot, once the slot has room.

        Args:
            buffer: What has the compressed bytes, or gets them; None if they stay on the device.
        """
        stream = landing.stream
        if buffer is not None:
            stream.wait_event(buffer.arrived)
        try:
            self._backend.transform(move.kernel, landing.memory[move.at : move.at + move.num_bytes], compressed, stream)
        finally:
            if buffer is not None:
                buffer.decompressed.record(stream)
