"""Copies from where images rest into slots."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.profiler import record_function

from ...base.device import Backend, Event, HostBackend, Stream, plain_empty
from ...base.torch_internals import is_profiler_enabled
from ...stores.base import Image, Tier
from ...stores.files import Proof, SourceFile
from ..measure.drive import DriveMeter
from ..measure.trace import Tracer
from .last import LastCopies
from .reader import Job, Read, Reader

if TYPE_CHECKING:
    from ..slots.slot import Slot

MAX_STAGING_BYTES = 64 << 20
"""One staging buffer, at most. PCIe is at full speed with 16 MiB."""
NUM_STAGING_BUFFERS = 2


class Transfer:
    """Enqueues the copies of images, and counts them. Used by one thread at a time.

    What rests in files is handed to a reader: its copies are enqueued later, by another thread, on the same stream.
    """

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
        self._reader = Reader(backend)
        self._stream: Stream
        self._target: torch.Tensor
        self._after: Sequence[Event] = ()
        """What copies that are enqueued now still have to wait for."""
        self._collector = _Collector()
        """What the images being sent need from files."""
        self._pending: tuple[int, torch.Tensor, int, int] | None = None
        """A copy (at, memory, start, bytes) that the next one may be joined to."""
        self.last_copies = LastCopies(backend)
        self.tracer: Tracer | None = None
        self._num_copies = 0
        self._bytes_locked = 0
        self.bytes_sent = dict.fromkeys(Tier, 0)

    @property
    def num_copies(self) -> int:
        return self._num_copies + self._reader.num_copies

    @property
    def bytes_read(self) -> dict[str, int]:
        """What came from files, by how it was read."""
        through_cache, direct = self._reader.bytes_read[False], self._reader.bytes_read[True]
        return {"locked": self._bytes_locked, "page cache": through_cache, "direct": direct}

    def note_drive(self, meter: DriveMeter) -> None:
        """A pass ended: tell what was read for it."""
        reader = self._reader
        meter.note(time.perf_counter(), reader.busy_seconds, reader.bytes_read[False], reader.bytes_read[True])

    @property
    def staging_bytes(self) -> int:
        return sum(buffer.numel() for buffer, _ in self._staging) + self._reader.staging_bytes

    def prepare_for(self, largest_image: int, file_bytes: int, *, is_scarce: bool) -> None:
        """Size the staging memory: for one image, and for so many bytes in files (RAM may be scarce). At rest only."""
        size = max(1, min(MAX_STAGING_BYTES, largest_image))
        if size != self._staging_size:
            self._drop_buffers()
            self._staging_size = size
        self._reader.prepare_for(file_bytes, is_scarce=is_scarce)

    @property
    def stream(self) -> Stream:
        """What copies run on: a stream of their own, or the one that computes."""
        return self._copy_stream if self._copy_stream is not None else self._backend.current_stream()

    @property
    def compute_stream(self) -> Stream:
        """What the calling thread computes on."""
        return self._backend.current_stream()

    @property
    def has_room_ahead(self) -> bool:
        """Whether more may be read ahead of slots."""
        return self._reader.has_room_ahead

    def reads_of(self, images: Sequence[tuple[int, str, Image]]) -> list[Read]:
        """What `send` will need of the files that images rest in, if it can be read ahead."""
        if isinstance(self._backend, HostBackend):
            return []
        collector = _Collector()
        for at, collector.label, image in images:
            image.send(collector, at)
        return collector.reads

    def read_ahead(self, reads: Sequence[Read]) -> Job:
        """Begin to read."""
        return self._reader.announce(reads, self.tracer)

    def send(
        self,
        images: Sequence[tuple[int, str, Image]],
        slot: Slot,
        after: Sequence[Event],
        *,
        job: Job | None = None,
    ) -> None:
        """Bring images to their offsets in `slot` once all of `after` is reached, and record `ready` behind the last copy.

        Images come with the names of their groups. If `slot.job` is set then, that is still to happen: see `Job.wait`.

        Args:
            job: what `read_ahead` gave for what these images need, and was not submitted yet.
        """
        if is_profiler_enabled():
            with record_function(f"group_offload.onload {' '.join(dict.fromkeys(name for _, name, _ in images))}"):
                self._send(images, slot, after, job)
        else:
            self._send(images, slot, after, job)

    def _send(
        self, images: Sequence[tuple[int, str, Image]], slot: Slot, after: Sequence[Event], job: Job | None
    ) -> None:
        stream = self._stream = self.stream
        self.last_copies.expect(stream)
        self._target = slot.memory
        self._pending = None  # of a call that broke off
        self._collector = _Collector()
        self._after = after
        begun = None
        if self.tracer is not None:
            self._wait_for_room()
            begun = self.tracer.now(stream)
        num_bytes = 0
        has_failed = True
        try:
            for at, self._collector.label, image in images:
                image.send(self, at)
                num_bytes += image.layout.num_bytes
                self.bytes_sent[image.tier] += image.layout.num_bytes
                if image.tier is Tier.FILE:
                    self._bytes_locked += image.pinned_bytes
            self._flush()
            has_failed = False
        finally:  # what was enqueued reads images, and writes to the slot, also if the rest cannot be read
            if has_failed or not self._collector.reads:
                if self.tracer is not None and begun is not None:
                    self.tracer.copied([name for _, name, _ in images], begun, stream, num_bytes)
                slot.ready.record(stream)
            self.last_copies.record(stream)
            del self._target  # it would keep the memory
        reads = self._collector.reads
        if not reads:
            return
        if isinstance(self._backend, HostBackend):
            self._reader.read_now(slot.memory, reads, self.tracer)
            self._num_copies += len(reads)
            if self.tracer is not None and begun is not None:
                self.tracer.copied([name for _, name, _ in images], begun, stream, num_bytes)
            return
        slot.job = job or Job(self._reader, reads, self.tracer)
        self._reader.submit(slot.job, slot.memory, stream, self._after, slot.ready)
        if self._copy_stream is None:
            slot.job.wait()  # the stream that computes: nothing may come in between
            slot.job = None

    def fetch(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> None:
        """Copy device bytes that compute has changed, until `after`, back to the host, and wait for them."""
        stream = self._backend.current_stream()
        stream.wait_event(after)
        self._backend.copy(target, source, stream, blocking=True)
        self._num_copies += 1

    def finish(self) -> None:
        """Wait until no copy is on its way, because the memory that copies read from is about to change.

        (Copies of what was read from files read staging memory only.)
        """
        self.last_copies.synchronize()

    def drain(self) -> None:
        """Wait until all that was sent is on its way."""
        self._reader.drain()

    def abandon(self) -> None:
        """Give up what was not enqueued yet. Returns once nothing is read."""
        self._reader.abandon_all()

    def recover(self, *, is_whole: bool) -> None:
        """Give up what was not enqueued yet, and return once no copy is on its way.

        Args:
            is_whole: what threads are at is known. If not, they are left alone with what they have, and others take over.
        """
        if is_whole:
            self._reader.abandon_all()
        else:
            self._reader = self._reader.successor()
        self.last_copies.drain()

    def copy(self, at: int, memory: torch.Tensor, start: int, num_bytes: int) -> None:
        """Enqueue one copy. What lies side by side, at rest and in the slot, goes over in one."""
        last = self._pending
        if last is not None:
            if last[1] is memory and last[2] + last[3] == start and last[0] + last[3] == at:
                self._pending = (last[0], memory, last[2], last[3] + num_bytes)
                return
            self._flush()
        self._pending = (at, memory, start, num_bytes)

    def stage(self, at: int, num_bytes: int, fill: Callable[[torch.Tensor, int], None]) -> None:
        self._flush()
        if isinstance(self._backend, HostBackend):
            fill(self._target[at : at + num_bytes], 0)  # the device is this memory: no way round
            self._num_copies += 1
            return
        for start in range(0, num_bytes, self._staging_size):
            buffer, sent = self._next_staging_buffer()
            sent.synchronize()  # its last content must have left before it is filled again
            size = min(self._staging_size, num_bytes - start)
            fill(buffer[:size], start)
            self._enqueue(at + start, buffer, 0, size)
            sent.record(self._stream)

    def read(
        self, at: int, source: SourceFile, position: int, num_bytes: int, *, direct: bool, proof: Proof | None
    ) -> None:
        self._collector.read(at, source, position, num_bytes, direct=direct, proof=proof)

    def close(self) -> None:
        """Give the staging memory back. Nothing may be read (`abandon`)."""
        self._drop_buffers()
        self._reader.close()

    def _drop_buffers(self) -> None:
        self.last_copies.synchronize()
        _call_all(self._unpin)
        self._staging.clear()

    def _wait_for_room(self) -> None:
        """Let what is enqueued from now on come after the last use of what the slot takes the place of."""
        self._reader.begin_all()
        for event in self._after:
            self._stream.wait_event(event)
        self._after = ()

    def _flush(self) -> None:
        if self._pending is not None:
            self._enqueue(*self._pending)
            self._pending = None

    def _enqueue(self, at: int, memory: torch.Tensor, start: int, num_bytes: int) -> None:
        self._wait_for_room()
        self._backend.copy(
            self._target[at : at + num_bytes],
            memory[start : start + num_bytes],
            self._stream,
            blocking=self._blocking,
        )
        self._num_copies += 1

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


class _Collector:
    """A mover that moves nothing, but remembers what has to be read."""

    def __init__(self) -> None:
        self.reads: list[Read] = []
        self.label = ""
        """The name of the group that is asked now."""

    def copy(self, at: int, memory: torch.Tensor, start: int, num_bytes: int) -> None:
        pass

    def stage(self, at: int, num_bytes: int, fill: Callable[[torch.Tensor, int], None]) -> None:
        pass

    def read(
        self, at: int, source: SourceFile, position: int, num_bytes: int, *, direct: bool, proof: Proof | None
    ) -> None:
        last = self.reads[-1] if self.reads else None
        if (
            last is not None
            and last.source is source
            and last.proof is proof
            and (last.position + last.num_bytes, last.at + last.num_bytes, last.direct) == (position, at, direct)
        ):
            last.num_bytes += num_bytes  # what lies side by side is read in one
        else:
            self.reads.append(Read(at, source, position, num_bytes, direct, self.label, proof))


def _call_all(calls: list[Callable[[], None]]) -> None:
    while calls:
        calls.pop()()
