"""What slots need from files, cut into chunks that threads read. See [Note: The life of a chunk] in `reader`."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from ...base.pool import signal
from ...base.reading import BLOCK, blocks_around
from ...stores.moves import Read
from ...stores.source import SourceFile
from .write_order import Landing

_MAX_READS_PER_CHUNK = 64
"""How many small pieces one thread reads one after another, at most."""


class Job(Protocol):
    """What a slot waits for before its ready event tells anything."""

    def wait(self) -> None:
        """Return once `ready` is recorded."""

    def cancel(self) -> None:
        """Enqueue nothing more. What was enqueued before is behind `ready`."""


class ReadJob:
    """All that one slot needs from files. Guarded by its reader's lock."""

    def __init__(self, reads: Sequence[Read], chunk_bytes: int, cancel: Callable[[ReadJob], None]) -> None:
        """
        Args:
            chunk_bytes: The size of a chunk, at most.
            cancel: A method of the job's reader. The job does not keep the reader alive.
        """
        ordered = _in_order_of_files(reads)
        # Compressed bytes are copied on another stream than others, and a frame waits for one stream.
        kinds = [[each for each in ordered if (each.decompress is None) is is_plain] for is_plain in (True, False)]
        self.chunks = deque(Chunk(part) for kind in kinds for part in parts_of(kind, chunk_bytes))
        """Chunks that no thread has begun to read."""
        self.begun: deque[Chunk] = deque()
        """Chunks in frames: they are being read, or were read."""
        self.is_in_ram = not any(isinstance(read.source, SourceFile) for read in reads)
        """Whether no file is read: RAM is copied to the frames."""
        self.num_left = len(self.chunks)
        """How many chunks were not enqueued yet."""
        self.landing: Landing | None = None
        """Where the bytes go, once there is a slot for them. Given up when the job is over: it may be kept longer."""
        self.error: BaseException | None = None
        self._cancel = weakref.WeakMethod(cancel)
        self._over = signal()

    @property
    def is_over(self) -> bool:
        return self._over.is_done

    @property
    def is_whole(self) -> bool:
        """Whether all of the bytes were read, and their copies are enqueued. Jobs are also over because they were given up."""
        return self.is_over and self.error is None and not self.num_left

    def wait(self) -> None:
        """Return once `Landing.ready` is recorded.

        Raises:
            StorageError: a file could not be read; the slot does not hold what it should.
        """
        self._over.wait()
        if self.error is not None:
            raise self.error

    def forget(self, error: BaseException | None) -> None:
        """The job is over. Let go of what it needed: it may be kept longer than its slot. Let the threads go on that wait."""
        if not self.is_over:
            self.error, self.landing = error, None
            self.chunks.clear()  # so that files do not stay mapped
            self.begun.clear()
            self._over.do(object())

    def cancel(self) -> None:
        """Enqueue nothing more. What was enqueued before is behind `Landing.ready`."""
        cancel = self._cancel()
        if cancel is not None:
            cancel(self)


class Chunk:
    """Pieces of files that are read by one thread, one after another, into one frame."""

    def __init__(self, reads: list[Read]) -> None:
        self.reads = reads
        self.start = 0
        """Where in the staging memory the frame begins."""
        self.is_read = False
        self.error: BaseException | None = None
        self.num_bytes = sum(read.num_bytes for read in reads)
        self.is_compressed = reads[0].decompress is not None
        """Whether these are compressed bytes, which go to a compressed buffer."""

    def places(self) -> Iterator[tuple[Read, int]]:
        """Each read, and where in the staging memory its whole blocks begin."""
        start = self.start
        for read in self.reads:
            yield read, start
            start += blocks_around(read.position, read.num_bytes)

    def pieces(self, memory: torch.Tensor) -> Iterator[tuple[Read, torch.Tensor]]:
        """Each read, and its bytes in the staging memory."""
        for read, start in self.places():
            begin = start + read.position % BLOCK
            yield read, memory[begin : begin + read.num_bytes]


def parts_of(reads: Sequence[Read], limit: int) -> Iterator[list[Read]]:
    """What one thread reads at a time: a piece of at most `limit` bytes, whole blocks, or several small ones."""
    batch: list[Read] = []
    batch_bytes = 0
    longest = max(BLOCK, limit // BLOCK * BLOCK)
    for read in reads:
        # Pieces of nearly the same size: a small one that is left over would be waited for as well.
        blocks = blocks_around(read.position, read.num_bytes)
        most = blocks_around(0, -(-blocks // max(1, -(-blocks // longest))))
        done = 0
        while done < read.num_bytes:
            position = read.position + done
            size = min(read.num_bytes - done, most - position % BLOCK)
            room = blocks_around(position, size)
            if batch and (batch_bytes + room > limit or len(batch) == _MAX_READS_PER_CHUNK):
                yield batch
                batch, batch_bytes = [], 0
            batch.append(replace(read, at=read.at + done, position=position, num_bytes=size))
            batch_bytes += room
            done += size
    if batch:
        yield batch


def _in_order_of_files(reads: Sequence[Read]) -> list[Read]:
    """Reads that lie next to each other in a file come one after the other. The first files come first.

    All that is decompressed at once comes before the next part of the same image: they go to the same compressed buffer.
    """
    turns = {key: turn for turn, key in enumerate(dict.fromkeys((read.source, read.decompress) for read in reads))}
    return sorted(reads, key=lambda read: (turns[read.source, read.decompress], read.position))
