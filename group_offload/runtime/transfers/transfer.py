"""Copies of blobs, from where they are stored into slots."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from ...base.device import Event, Stream, plain_empty
from ...config import OffloadConfig
from ...stores.base import PlacedBlob, PlacedImage
from ...stores.moves import Copy, Decompress, Move, PageableMemory, Read, Tier, joined, sent_bytes
from ..multi_gpu.shard_reads import ShardJob
from ..multi_gpu.sharded_transfers import Shard, ShardedTransfers
from ..slots.compressed_buffers import CompressedBuffers
from .jobs import Job, ReadJob
from .last import LastCopies
from .reader import Reader
from .write_order import Landing, WriteOrder


class Transfer:
    """Enqueues the copies of blobs, and counts them. Used by one thread at a time.

    Bytes in files are left to a reader: their copies are enqueued later, by other threads, on the same stream.
    """

    def __init__(self, config: OffloadConfig) -> None:
        self._backend = backend = config.backend
        # Copies have a stream of their own, so that they overlap with compute.
        self._copy_stream = backend.new_stream() if config.use_stream else None
        # So has decompression: in the copy stream the link would stand still meanwhile, and while a slot is in use.
        decompresses = config.use_stream and config.compress
        self._decompress_stream = backend.new_stream() if decompresses else None
        self._order = WriteOrder(backend, has_two_streams=decompresses)
        self.reader = Reader(backend, self._order)
        # Without a stream, `non_blocking` decides whether copies block the host.
        self._blocking = not config.use_stream and not config.non_blocking
        self._reads_memory = False
        """Whether threads may be reading blobs in RAM that is not pinned."""
        self.last_copies = LastCopies(backend)
        self._num_copies = 0
        self._bytes_pinned = 0
        self.bytes_sent = dict.fromkeys(Tier, 0)
        self._bytes_decompressed = 0
        self.sharing: ShardedTransfers | None = None
        """The other GPUs that bring their shares of each group; None if there are none."""

    def __del__(self) -> None:
        reader = self.__dict__.get("reader")  # none, if an interrupt came first
        if reader is not None and not sys.is_finalizing():  # the driver is gone then
            reader.retire()  # threads read for a model that was dropped

    @property
    def num_copies(self) -> int:
        return self._num_copies + self.reader.num_copies

    @property
    def bytes_decompressed(self) -> int:
        return self._bytes_decompressed + self.reader.bytes_decompressed

    @property
    def bytes_read(self) -> dict[str, int]:
        """Bytes that came from files, by the way in which they were read."""
        through_cache, direct = self.reader.bytes_read[False], self.reader.bytes_read[True]
        return {"pinned": self._bytes_pinned, "page cache": through_cache, "direct": direct}

    @property
    def stream(self) -> Stream:
        """The stream that copies run on: the copy stream, or the one that computes if there is none."""
        return self._copy_stream if self._copy_stream is not None else self._backend.current_stream()

    @property
    def writers(self) -> list[Stream]:
        """The streams that write to slots: of copies and of decompression. (What other GPUs send is in no stream of ours.)"""
        return [self.stream] if self._decompress_stream is None else [self.stream, self._decompress_stream]

    @property
    def compute_stream(self) -> Stream:
        """The stream that the calling thread computes on."""
        return self._backend.current_stream()

    def reads_of(self, blobs: Sequence[PlacedBlob]) -> list[Read]:
        """The bytes in files, and in RAM that is not pinned, that `send` will need, if they can be read ahead of slots."""
        if not self._backend.has_streams:
            return []
        # A blob that does not hold edits does not tell of later ones either: they would be lost if it was read already.
        if not all(placed.blob.detects_edits and not placed.blob.is_outdated for placed in blobs):
            return []
        shared = None if self.sharing is None or self.sharing.host_group is None else self.sharing
        moves = shared.moves_of(shared.parts_of(blobs)) if shared else joined(placed.moves() for placed in blobs)
        return [move for move in moves if isinstance(move, Read)]

    def read_ahead(self, reads: Sequence[Read]) -> ReadJob:
        """Begin to read."""
        self._reads_memory |= _has_memory(reads)
        return self.reader.announce(reads)

    def send(
        self,
        blobs: Sequence[PlacedBlob | PlacedImage],
        landing: Landing,
        copies: Sequence[Move] = (),
        *,
        job: ReadJob | None = None,
        alone: bool = False,
    ) -> Job | None:
        """Bring blobs to a slot once all of `landing.after` is reached, and record `landing.ready` behind the last copy.

        Args:
            copies: How one group in RAM gets there, in place of its blobs.
            job: The job that `read_ahead` gave for these blobs, if any.
            alone: Whether other GPUs will not bring their shares.

        Returns:
            A job if bytes have yet to be read from files, or are gathered: until it is over, `landing.ready` tells nothing.
        """
        if self.sharing is not None and self.sharing.host_group is not None:
            return self._send_share(self.sharing, self.sharing.parts_of(blobs, alone=alone), landing, job)
        return self._send(copies or joined(placed.moves() for placed in blobs), landing, job)

    def _send_share(
        self, sharing: ShardedTransfers, parts: Sequence[Shard], landing: Landing, job: ReadJob | None
    ) -> Job | None:
        """`send` where other GPUs bring their shares: see [Note: A shared group]."""
        if job is not None and any(not part.part_bytes for part in parts):
            job.cancel()  # it has this rank's share only
            job = None
        moves = sharing.moves_of(parts)
        memory, buffers = landing.memory, landing.compressed_buffers
        shared = sharing.job_for(
            parts, memory, landing.ready, lambda shared: self._bring_rest(parts, shared, memory, buffers)
        )
        if shared is None:
            return self._send(moves, landing, job)
        landing.ready = shared.sent
        try:
            shared.reads = self._send(moves, landing, job, shared)
            shared.post("submit", shared)
            if self._copy_stream is not None:
                return shared
            shared.wait()  # copies run on the stream that computes: no kernel may come in between
        except BaseException:
            shared.cancel()
            raise
        return None

    def _bring_rest(
        self, parts: Sequence[Shard], shared: ShardJob, memory: torch.Tensor, buffers: CompressedBuffers | None
    ) -> None:
        """Bring what other GPUs did not: behind this rank's share, in whose place in the slot nothing is left."""
        assert self.sharing is not None
        landing = Landing(memory, (), shared.rest, buffers)
        reads = self._send(self.sharing.rest_of(parts, shared), landing, None)
        if reads is not None:
            reads.wait()

    def _send(
        self, moves: Sequence[Move], landing: Landing, job: ReadJob | None, shared: ShardJob | None = None
    ) -> ReadJob | None:
        """Enqueue `moves`, and leave what has to be read to the reader.

        Args:
            shared: What several GPUs bring.
        """
        landing.stream = landing.copy_stream = self.stream
        if self._decompress_stream is not None and any(map(_is_compressed, moves)):
            # All that goes to the slot does: see [Note: The life of a compressed buffer].
            landing.stream = self._decompress_stream
        stream, streams = landing.stream, {landing.stream, landing.copy_stream}
        for each in streams:
            self.last_copies.expect(each)
        reads, is_host = [move for move in moves if isinstance(move, Read)], not self._backend.has_streams
        if shared is not None:
            self._wait_for_room(landing)
            shared.begin(stream)
        has_failed = True
        try:
            for move in moves:
                match move:
                    case Copy():
                        self._wait_for_room(landing)
                        target = landing.memory[move.at : move.at + move.num_bytes]
                        source = move.memory[move.start : move.start + move.num_bytes]
                        self._backend.copy(target, source, stream, blocking=self._blocking)
                        self._num_copies += 1
                    case Decompress():
                        self._decompress(landing, move)
            if reads and is_host:
                self.reader.read_now(landing.memory, reads)
                self._num_copies += len(reads)
            has_failed = False
        finally:  # what was enqueued reads blobs, and writes to the slot, also if the rest cannot be enqueued
            if has_failed or not reads or is_host:
                landing.ready.record(stream)
            for each in streams:
                self.last_copies.record(each)
        for move in moves:
            self.bytes_sent[move.tier] += sent_bytes(move)
            self._bytes_pinned += move.num_bytes if isinstance(move, Copy) and move.tier is Tier.FILE else 0
        if not reads or is_host:
            return None
        self._reads_memory |= _has_memory(reads)
        job = self.reader.submit(reads, landing, job)
        if self._copy_stream is not None:
            return job
        job.wait()  # copies run on the stream that computes: no kernel may come in between
        return None

    def fetch(self, source: torch.Tensor, after: Event) -> torch.Tensor:
        """Device bytes that compute changes before `after`, on the host, which waits for them."""
        target = plain_empty(source.numel(), torch.device("cpu"))
        stream = self._backend.current_stream()
        stream.wait_event(after)
        self._backend.copy(target, source, stream, blocking=True)
        self._num_copies += 1
        return target

    def wait_for_copies(self) -> None:
        """Wait until no copy reads a blob any more, because blobs are about to change.

        Copies of bytes that were read from files are not waited for: they read staging memory only.
        """
        self.last_copies.synchronize()
        if self._reads_memory:
            self.reader.wait_until_enqueued()
            self._reads_memory = False

    def recover(self, *, is_whole: bool) -> None:
        """Give up the copies that were not enqueued yet, and return once no copy is on its way.

        Args:
            is_whole: Whether the state of the reader is known. If not, its threads are left alone, and a new one takes over.
        """
        if self.sharing is not None:
            self.sharing.recover()
        if is_whole:
            self.reader.cancel_pending()
        else:
            self.last_copies.synchronize_streams()  # the interrupt may have come before an event was recorded behind a copy
            self.reader = self.reader.successor()
        self.last_copies.synchronize_streams()

    def _decompress(self, landing: Landing, move: Decompress) -> None:
        compressed, buffer = move.compressed, None
        assert compressed is not None
        if not move.is_on_device:
            assert landing.compressed_buffers is not None
            buffer = landing.compressed_buffers.next()
            for start, end in move.sent:
                self._order.fill(landing, buffer, start, compressed[start:end], blocking=self._blocking)
                self._num_copies += 1
            compressed = buffer.memory[: compressed.numel()]
        self._wait_for_room(landing)
        self._order.decompress(landing, move, compressed, buffer)
        self._bytes_decompressed += move.num_bytes

    def _wait_for_room(self, landing: Landing) -> None:
        if landing.after is None:
            return
        # A job's slot may have taken the place of a larger one, and this landing the place of the rest of that.
        self.reader.order_behind_jobs()
        self._order.wait_for_room(landing)


def _is_compressed(move: Move) -> bool:
    return isinstance(move, Decompress) or (isinstance(move, Read) and move.decompress is not None)


def _has_memory(reads: Sequence[Read]) -> bool:
    return any(isinstance(read.source, PageableMemory) for read in reads)
