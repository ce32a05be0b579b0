"""Reads files ahead of compute, with several threads, and sends the bytes to the device.

[Note: The life of a chunk]
The bytes that a slot needs from files are one *job*, cut into chunks. A chunk gets a frame of the staging memory, which is
pinned once; a thread of the pool reads the chunk into the frame; then the copy to the slot is enqueued, and once that
copy is done the frame is free again. Chunks are read side by side and in any order, and enqueued in the order of their
jobs: so the disk, the link to the device and compute are all busy at once, and the groups that are needed first come first.

Chunks of compressed bytes are copied to the reading buffer, one strip after another, and not to the slot. The last
chunk of a strip is followed by its decompression: see [Note: The life of a compressed buffer].

All jobs are in one queue. A job may be *announced* before there is a slot for it: it is read as far as there are frames.
Once it is *submitted* with its slot, it is sent, before all jobs that have none. So the disk, which is slower than the
link, works on while compute still needs the slots. A job that is needed sooner takes frames from announced jobs, whose
chunks are read again later.

Workers run on the pool as long as they find something to do. A worker that has read a chunk enqueues all copies that can be
enqueued. Compute has to wait for the slot's *ready* event, which is recorded only after the job's last copy. So the thread
that launches compute waits for that first (`ReadJob.wait`): it waits for the disk, never for the device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch

from ...base.device import Backend
from ...base.layout import memory_of
from ...base.mapping import flat_view, map_anonymous
from ...base.pool import num_copy_threads, num_threads, on_pool, run_all
from ...base.reading import BLOCK, MIN_BYTES_PER_THREAD, blocks_around
from ...base.system import forked_free
from ...base.tuning import tuning
from ...errors import StorageError
from ...stores.moves import Decompress, Read
from ...stores.source import SourceFile
from .jobs import Chunk, ReadJob, parts_of
from .staging import Staging
from .write_order import Landing, WriteOrder

_POLL_SECONDS = 2e-4


class Reader:
    """Brings bytes of files to slots of one device. Jobs come from one thread at a time."""

    def __init__(self, backend: Backend, order: WriteOrder) -> None:
        self._backend = backend
        self._order = order
        self._lock = forked_free(threading.RLock())
        """Guards everything below and all jobs. A lock that is written in C: Ctrl-C does not leave it taken."""
        self._is_retired = False
        """Whether another reader has taken the place of this one."""
        self._jobs: list[ReadJob] = []
        """The jobs that are not over. First come those with a slot, in the order in which they are copied, then the others, in
        the order in which they will be needed."""
        self._num_workers = 0
        self._is_waiting = False
        """Whether a worker waits for a copy to free a frame."""
        self._staging = Staging(backend)
        self.num_copies = 0
        self.bytes_decompressed = 0
        self.bytes_read = {False: 0, True: 0}
        """Bytes that were read through the page cache (False), and past it (True)."""

    @property
    def staging_bytes(self) -> int:
        return self._staging.num_bytes

    @property
    def has_room_ahead(self) -> bool:
        """Whether another job may be announced: the announced ones do not take all frames."""
        ahead = (len(job.chunks) + len(job.begun) for job in [*self._jobs] if job.landing is None)
        return sum(ahead) < self._staging.num_frames

    def prepare_for(self, read_bytes: int, chunk_bytes: int, num_frames: int) -> None:
        """Size the staging memory. Nothing may be read.

        Args:
            read_bytes: The bytes of all blobs that are read.
            chunk_bytes: The size of a chunk, at most.
            num_frames: The number of chunks that are in memory at once, at most.
        """
        assert not self._num_workers
        self._staging.resize(min(num_frames, 1 + -(-read_bytes // chunk_bytes)), chunk_bytes)

    def announce(self, reads: Sequence[Read]) -> ReadJob:
        """Begin to read what will be needed. Nothing is sent to the device before the job is submitted."""
        job = ReadJob(reads, self._staging.frame_bytes, self.cancel)
        with self._lock:
            self._jobs.append(job)
            self._hire()
        return job

    def submit(self, reads: Sequence[Read], landing: Landing, job: ReadJob | None = None) -> ReadJob:
        """Send what is read to a slot, behind all that was submitted before.

        Args:
            job: What `announce` gave for the same reads, if they were announced.
        """
        job = job or ReadJob(reads, self._staging.frame_bytes, self.cancel)
        with self._lock:
            if job in self._jobs:
                self._jobs.remove(job)
            job.landing = landing
            self._jobs.insert(sum(each.landing is not None for each in self._jobs), job)
            self._send_what_is_read()
            self._hire()
        return job

    def order_behind_jobs(self) -> None:
        """Let copies that other code enqueues also come after everything that the submitted jobs have to wait for.

        A job's slot may have taken a part of a larger slot, and those copies go to the rest of it.
        """
        if self._jobs:
            with self._lock:
                for job in self._jobs:
                    if job.landing is not None:
                        self._order.wait_for_room(job.landing)

    def cancel(self, job: ReadJob) -> None:
        """Enqueue nothing more of a job. See `ReadJob.cancel`."""
        with self._lock:
            if job.is_over:
                return
            self._end(job, None)
            self._hire()

    def wait_until_enqueued(self) -> None:
        """Return once the copies of all submitted jobs are enqueued, and nothing is read."""
        while self._num_workers:
            time.sleep(_POLL_SECONDS)

    def cancel_pending(self) -> None:
        """Begin no more reads, and return once none is under way."""
        with self._lock:
            for job in [*self._jobs]:
                self._end(job, None)
        self.wait_until_enqueued()

    def retire(self) -> None:
        """Enqueue nothing any more, and give the staging memory back. Threads are not waited for: one that is in the middle of
        a chunk keeps what it reads from, and the staging memory, which is not pinned any more, until that chunk is read."""
        with self._lock:
            self._is_retired = True
            self._forget_jobs(RuntimeError("The pass was interrupted."))
            self._staging.close()

    def successor(self) -> Reader:
        """Another reader in the place of this one, whose state is unknown after an interrupt."""
        other = Reader(self._backend, self._order)
        other._staging.resize(self._staging.num_frames, self._staging.frame_bytes)
        self.retire()
        other.num_copies, other.bytes_read = self.num_copies, self.bytes_read
        other.bytes_decompressed = self.bytes_decompressed
        return other

    def reset_after_fork(self) -> None:
        """Start from nothing in a child process, which has none of the parent's threads: forget what they had to do."""
        self._forget_jobs(StorageError("This process was forked while weights were read. Call the model again."))
        self._num_workers = 0
        self._is_waiting = False
        self._staging.reset_after_fork()

    def close(self) -> None:
        """Give the staging memory back. Nothing may be read."""
        assert not self._num_workers
        self._staging.close()

    # ---------------------------------------------------------------- workers

    def _hire(self) -> None:
        """Start the workers that find something to do. Call this with the lock."""
        unread = [job for job in self._jobs if job.chunks]
        num = self._staging.num_free
        if not num and not self._is_waiting and (self._staging.oldest_sent is not None or not self._num_workers):
            num = 1  # to wait for a frame, or to take one
        num, limit = min(sum(len(job.chunks) for job in unread), num), num_threads()
        if all(job.is_in_ram for job in unread):  # half of the frames are filled while the others are sent
            limit = min(num_copy_threads(), self._staging.num_frames // 2 + 1)
        for _ in range(min(num, limit - self._num_workers)):
            self._num_workers += 1
            on_pool(self._work)

    def _work(self) -> None:
        try:
            while (found := self._next()) is not None:
                self._read(*found)
        except BaseException as error:  # else the threads that wait for jobs would never be told
            self._fail(error)

    def _next(self) -> tuple[ReadJob, Chunk] | None:
        """The chunk that the calling worker reads next, with a frame; None if there is nothing for it to do."""
        while True:
            with self._lock:
                self._send_what_is_read()
                found = self._begin_chunk()
                oldest = self._staging.oldest_sent
                if found is None and (oldest is None or self._is_waiting or not any(job.chunks for job in self._jobs)):
                    self._num_workers -= 1  # under the lock still: the next job hires another one
                    return None
                if found is None:
                    self._is_waiting = True
                self._hire()
            if found is not None:
                return found
            assert oldest is not None
            try:
                oldest.synchronize()  # this takes as long as the link takes for a chunk
            finally:
                with self._lock:
                    self._is_waiting = False

    def _begin_chunk(self) -> tuple[ReadJob, Chunk] | None:
        """Give the first chunk that is not being read a frame; None if there is no such chunk, or no frame."""
        for index, job in enumerate(self._jobs):
            if job.chunks:
                start = self._staging.take()
                if start is None:
                    start = self._take_back(self._jobs[index + 1 :])
                if start is None:
                    return None
                chunk = job.chunks.popleft()
                chunk.start = start
                job.begun.append(chunk)
                return job, chunk
        return None

    def _take_back(self, jobs: Sequence[ReadJob]) -> int | None:
        """The frame of the chunk in `jobs` that is needed last. It is read again later."""
        for job in reversed(jobs):
            if job.begun and job.begun[-1].is_read:
                chunk = job.begun.pop()
                chunk.is_read, chunk.error = False, None
                job.chunks.appendleft(chunk)
                return chunk.start
        return None

    def _read(self, job: ReadJob, chunk: Chunk) -> None:
        """Read a chunk, on a thread of the pool."""
        try:
            memory = self._staging.view
            for read, start in chunk.places():
                if job.is_over:
                    break
                area = memory[start : start + blocks_around(read.position, read.num_bytes)]
                with _naming(read):
                    is_direct = read.source.read(area, read.position, read.num_bytes, direct=read.is_direct)
                if isinstance(read.source, SourceFile):
                    with self._lock:
                        self.bytes_read[is_direct] += read.num_bytes
        except BaseException as error:
            chunk.error = error
        finally:
            with self._lock:
                chunk.is_read = True
                if job.is_over:
                    self._staging.give_back(chunk.start)

    def read_now(self, target: torch.Tensor, reads: Sequence[Read]) -> None:
        """Read into memory that the CPU computes from, with several threads, and return when the bytes are there.

        Raises:
            StorageError: a file could not be read. No thread writes to `target` any more.
        """
        num_bytes = sum(read.num_bytes for read in reads)
        limit = max(MIN_BYTES_PER_THREAD, min(tuning().chunk_bytes, -(-num_bytes // num_threads())))
        run_all(partial(self._read_straight, target, part) for part in parts_of(reads, limit))
        for read in reads:
            _prove(read, target[read.at : read.at + read.num_bytes])

    def _read_straight(self, target: torch.Tensor, reads: Sequence[Read]) -> None:
        for read in reads:
            part = target[read.at : read.at + read.num_bytes]
            if not isinstance(read.source, SourceFile):
                read.source.read_straight(memory_of(part), read.position)
                continue
            is_direct = read.is_direct and not read.source.is_cached(read.position, read.num_bytes)
            with _naming(read):
                if is_direct:
                    size = blocks_around(read.position, read.num_bytes)
                    blocks = flat_view(map_anonymous(size), 0, size)
                    is_direct = read.source.read(memory_of(blocks), read.position, read.num_bytes, direct=True)
                    part.copy_(blocks[read.position % BLOCK :][: read.num_bytes])
                else:
                    read.source.read_straight(memory_of(part), read.position)
            with self._lock:
                self.bytes_read[is_direct] += read.num_bytes

    # ---------------------------------------------------------------- copies

    def _send_what_is_read(self) -> None:
        while self._jobs and not self._is_retired:
            job = self._jobs[0]
            if job.landing is None or not (job.begun and job.begun[0].is_read):
                return
            chunk = job.begun[0]
            if chunk.error is None:
                self._send(job, chunk)
            else:
                self._end(job, chunk.error)

    def _send(self, job: ReadJob, chunk: Chunk) -> None:
        memory, landing = self._staging.memory, job.landing
        assert memory is not None and landing is not None
        try:
            for read, data in chunk.pieces(memory):
                _prove(read, data)
        except StorageError as error:
            self._end(job, error)
            return
        # Compressed bytes go to a compressed buffer, which waits for nothing that the slot waits for.
        stream = landing.copy_stream if chunk.is_compressed else landing.stream
        if not chunk.is_compressed:
            self._order.wait_for_room(landing)
        job.begun.popleft()
        try:
            for read, data in chunk.pieces(memory):
                if read.decompress is None:
                    self._backend.copy(landing.memory[read.at : read.at + read.num_bytes], data, stream)
                else:
                    self._fill(landing, read, read.decompress, data)
                self.num_copies += 1
        finally:
            self._staging.give_back_after(chunk.start, stream)
        job.num_left -= 1
        if not job.num_left:
            self._end(job, None)

    def _fill(self, landing: Landing, read: Read, move: Decompress, source: torch.Tensor) -> None:
        """Copy compressed bytes to the reading buffer, and decompress the strip once all of it is there."""
        assert landing.compressed_buffers is not None
        buffer = landing.compressed_buffers.reading
        self._order.fill(landing, buffer, read.at, source)
        if read.at + read.num_bytes == move.sent[-1][1]:
            self._order.wait_for_room(landing)
            self._order.decompress(landing, move, buffer.memory[: move.strip.compressed_bytes], buffer)
            self.bytes_decompressed += move.num_bytes

    def _end(self, job: ReadJob, error: BaseException | None) -> None:
        for chunk in job.begun:
            if chunk.is_read:
                self._staging.give_back(chunk.start)
        if job in self._jobs:  # not in the middle of a call that was interrupted
            try:
                if job.landing is not None:
                    # Also if the job brought nothing: what takes these bytes next waits for this job only.
                    self._order.wait_for_room(job.landing)
                    job.landing.ready.record(job.landing.stream)
            finally:
                self._jobs.remove(job)  # only now: as long as it is there, `order_behind_jobs` waits for the lock
        job.forget(error)

    def _forget_jobs(self, error: BaseException) -> None:
        for job in self._jobs:
            job.forget(error)
        self._jobs.clear()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            for job in [*self._jobs]:
                with suppress(Exception):  # the device itself may be failing
                    self._end(job, error)
                job.forget(error)
            self._forget_jobs(error)
            self._num_workers -= 1


def _prove(read: Read, data: torch.Tensor) -> None:
    if read.proof is not None:
        with _naming(read):
            read.proof.update(memory_of(data))


@contextmanager
def _naming(read: Read) -> Iterator[None]:
    """Name the group in an error that is raised inside."""
    try:
        yield
    except StorageError as error:
        raise StorageError(f"Group {read.label!r} cannot be onloaded. {error}") from error
