"""Reads files ahead of compute, with several threads, and sends what was read on to the device.

[Note: The life of a chunk]
What a slot needs from files is one *job*, cut into chunks. A chunk gets room in the staging memory, a ring that is
page-locked once; a thread of the pool reads it there; then its copy to the slot is enqueued, and once that copy is done
its room is free again. Chunks are read side by side and in any order, and enqueued in the order of their jobs: so the
drive, the link to the device and compute are all busy at once, and the first groups that are needed come first.

One thread for each reader, the pump, does all of this but the reading. It is there as long as there is something to do.
Compute has to wait for the slot's *ready* event, which is recorded only when the job's last copy was enqueued: whoever
launches compute waits for that first (`Job.wait`). It waits for the drive then, never for the device.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache

import torch

from ..device import Backend, Event, Stream
from ..errors import GroupFileError
from ..stores.base import memory_of
from ..stores.files import Proof, SourceFile
from ..stores.mapping import flat_view, map_anonymous
from ..stores.pinned import unlock
from ..stores.reading import BLOCK, MIN_BYTES_PER_THREAD, blocks_around, num_threads, pool
from .trace import Tracer

CHUNK_BYTES = 16 << 20
"""Large enough for the drive and the link to be at full speed, small enough for both to be busy with one group."""
_MAX_READS_PER_CHUNK = 64
"""Small pieces are read one after another by one thread: that many, at most."""
_MAX_PUMPS = 64


@dataclass(slots=True)
class Read:
    """Bytes of a file, and where in the slot they go."""

    at: int
    source: SourceFile
    position: int
    num_bytes: int
    direct: bool
    label: str
    proof: Proof | None = None


class Job:
    """All that one slot needs from files."""

    def __init__(
        self,
        reader: Reader,
        target: torch.Tensor,
        reads: Sequence[Read],
        stream: Stream,
        after: Sequence[Event],
        ready: Event,
        tracer: Tracer | None,
    ) -> None:
        """
        Args:
            target: the slot's memory.
            stream: what copies run on, once all of `after` is reached.
            ready: recorded behind the last copy.
        """
        self.target: torch.Tensor | None = target
        self.stream = stream
        self.after = after
        self.ready = ready
        self.tracer = tracer
        self.chunks = deque(_Chunk(part, self) for part in _parts(reads, CHUNK_BYTES))
        self.num_left = len(self.chunks)
        """Chunks that were not enqueued yet."""
        self.is_begun = False
        self.is_over = threading.Event()
        self.error: BaseException | None = None
        self._reader = reader

    def wait(self) -> None:
        """Return once `ready` is recorded.

        Raises:
            GroupFileError: a file could not be read; the slot does not hold what it should.
        """
        self.is_over.wait()
        if self.error is not None:
            raise self.error

    def abandon(self) -> None:
        """Enqueue nothing more. What was enqueued before is behind `ready`."""
        self._reader.abandon(self)


class _Chunk:
    """Pieces of files that are read by one thread, one after another, to one place in the staging memory."""

    def __init__(self, reads: list[Read], job: Job) -> None:
        self.reads = reads
        self.job = job
        self.num_bytes = sum(blocks_around(read.position, read.num_bytes) for read in reads)
        self.start = 0
        """Where in the staging memory."""
        self.is_read = False
        self.error: BaseException | None = None
        self.sent: Event | None = None
        """Reached once its copies are done; None as long as none is enqueued."""

    def places(self) -> Iterator[tuple[Read, int]]:
        """Each read, and where in the staging memory its blocks begin."""
        start = self.start
        for read in self.reads:
            yield read, start
            start += blocks_around(read.position, read.num_bytes)


_readers: weakref.WeakSet[Reader] = weakref.WeakSet()


def _forget_all() -> None:
    for reader in [*_readers]:
        reader.forget()


class Reader:
    """Brings bytes of files to slots of one device. Jobs come from one thread at a time."""

    def __init__(self, backend: Backend) -> None:
        _readers.add(self)
        self._backend = backend
        self._changed = threading.Condition()
        """Guards everything below, and is notified when a chunk was read or a job came."""
        self._jobs: deque[Job] = deque()
        """Those that have chunks nobody began to read."""
        self._live: set[Job] = set()
        """All that are not over."""
        self._reading: deque[_Chunk] = deque()
        """In the order in which they will be enqueued."""
        self._copying: deque[_Chunk] = deque()
        """Enqueued: their room is free once `sent` is reached."""
        self._is_pumping = False
        self._staging_limit = 0
        self._staging: torch.Tensor | None = None
        self._head = 0
        self._unpin: Callable[[], object] = _nothing
        self._spare: list[Event] = []
        self.last_copy = backend.new_event()
        self.num_copies = 0
        self.bytes_read = {False: 0, True: 0}
        """Through the page cache, and past it."""

    @property
    def staging_bytes(self) -> int:
        return 0 if self._staging is None else self._staging.numel()

    def prepare_for(self, file_bytes: int) -> None:
        """Size the staging memory for images of so many bytes in all. At rest only."""
        limit = min(num_threads(), 1 + -(-file_bytes // CHUNK_BYTES)) * CHUNK_BYTES
        if limit != self._staging_limit:
            self.close()
            self._staging_limit = limit

    def submit(self, job: Job) -> None:
        with self._changed:
            self._jobs.append(job)
            self._live.add(job)
            self._changed.notify_all()
            if self._is_pumping:
                return
            self._is_pumping = True
        try:
            pumps().submit(self._pump)
        except RuntimeError:  # no more threads, or the interpreter is about to exit
            self._pump()

    def begin_all(self) -> None:
        """Let copies that do not come from here also wait for all that jobs so far have to wait for.

        A job's slot may have taken the place of a larger one, and what is copied now the rest of that.
        """
        if self._live:
            with self._changed:
                for job in self._live:
                    self._begin(job)

    def abandon(self, job: Job) -> None:
        with self._changed:
            if not job.is_over.is_set():
                self._end(job, None)
                self._changed.notify_all()

    def drain(self) -> None:
        """Return once no job is left and nothing is read."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_pumping)

    def abandon_all(self) -> None:
        """Begin no more reads, and return once none is under way."""
        with self._changed:
            for job in [*self._live]:
                self._end(job, None)
            self._changed.notify_all()
        self.drain()

    def forget(self) -> None:
        """In a child process, which has none of the parent's threads: forget what they were at, and whatever they hold."""
        self._changed = threading.Condition()
        for job in self._live:
            job.is_over = threading.Event()
            job.error, job.target = RuntimeError("This process was forked while the file was read."), None
            job.is_over.set()
        self._live, self._jobs, self._reading = set(), deque(), deque()
        self._is_pumping = False

    def close(self) -> None:
        """Give the staging memory back. Nothing may be read."""
        assert not self._is_pumping
        self._unpin()
        self._unpin, self._staging = _nothing, None
        self._head = 0
        self._copying.clear()

    # ---------------------------------------------------------------- the pump

    def _pump(self) -> None:
        try:
            while self._step():
                pass
        except BaseException as error:  # nobody else would tell those who wait
            self._fail(error)

    def _step(self) -> bool:
        """Do one thing, or wait until there is one. False if all is done."""
        with self._changed:
            if self._reading and self._reading[0].is_read:
                self._enqueue(self._reading.popleft())
                return True
            while self._jobs and (self._jobs[0].is_over.is_set() or not self._jobs[0].chunks):
                self._jobs.popleft()
            if self._jobs:
                chunk = self._jobs[0].chunks[0]
                if self._find_room(chunk):
                    self._jobs[0].chunks.popleft()
                    self._reading.append(chunk)
                    _on_pool(self._read, chunk)
                    return True
                oldest = self._copying[0] if self._copying else None
                if oldest is None:  # all of it is being read into
                    self._changed.wait()
                    return True
            elif self._reading:
                self._changed.wait()
                return True
            else:
                self._is_pumping = False
                self._changed.notify_all()
                return False
        assert oldest.sent is not None
        oldest.sent.synchronize()  # as long as the link takes for a chunk
        return True

    def _find_room(self, chunk: _Chunk) -> bool:
        if self._staging is None:
            memory = flat_view(map_anonymous(self._staging_limit), 0, self._staging_limit)
            unpin = self._backend.pin(memory)
            if unpin is not None:
                # A model that is dropped without remove() must not leave its pages locked.
                finalizer = weakref.finalize(self, unlock, self.last_copy.synchronize, unpin, memory)
                finalizer.atexit = False
                self._unpin = finalizer
            self._staging = memory
        while self._copying:
            sent = self._copying[0].sent
            assert sent is not None
            if not sent.query():
                break
            self._spare.append(sent)
            self._copying.popleft()
        start = self._head if self._head + chunk.num_bytes <= self._staging.numel() else 0
        end = start + chunk.num_bytes
        if any(c.start < end and start < c.start + c.num_bytes for c in (*self._copying, *self._reading)):
            return False
        chunk.start, self._head = start, end
        return True

    def _read(self, chunk: _Chunk) -> None:
        """Read a chunk, on a thread of the pool."""
        job = chunk.job
        try:
            assert self._staging is not None
            memory = memory_of(self._staging)
            for read, start in chunk.places():
                if job.is_over.is_set():
                    break
                area = memory[start : start + blocks_around(read.position, read.num_bytes)]
                started = time.perf_counter()
                with _naming(read):
                    is_direct = read.source.read(area, read.position, read.num_bytes, direct=read.direct)
                self._count(is_direct, read.num_bytes)
                if job.tracer is not None:
                    job.tracer.read(read.label, started, time.perf_counter(), read.num_bytes)
        except BaseException as error:
            chunk.error = error
        finally:
            with self._changed:
                chunk.is_read = True
                self._changed.notify_all()

    def read_now(self, target: torch.Tensor, reads: Sequence[Read], tracer: Tracer | None) -> None:
        """Read into memory that the CPU computes from, with several threads, and return when it is there.

        Raises:
            GroupFileError: a file could not be read. No thread writes to `target` any more.
        """
        num_bytes = sum(read.num_bytes for read in reads)
        limit = max(MIN_BYTES_PER_THREAD, min(CHUNK_BYTES, -(-num_bytes // num_threads())))
        tasks = [_on_pool(self._read_straight, target, part, tracer) for part in _parts(reads, limit)]
        wait(tasks)  # all of them, also if one failed
        for task in tasks:
            task.result()
        for read in reads:
            _prove(read, target[read.at : read.at + read.num_bytes])

    def _read_straight(self, target: torch.Tensor, reads: Sequence[Read], tracer: Tracer | None) -> None:
        for read in reads:
            part = target[read.at : read.at + read.num_bytes]
            started = time.perf_counter()
            is_direct = read.direct and not read.source.is_cached(read.position, read.num_bytes)
            with _naming(read):
                if is_direct:
                    size = blocks_around(read.position, read.num_bytes)
                    blocks = flat_view(map_anonymous(size), 0, size)
                    is_direct = read.source.read(memory_of(blocks), read.position, read.num_bytes, direct=True)
                    part.copy_(blocks[read.position % BLOCK :][: read.num_bytes])
                else:
                    read.source.read_straight(memory_of(part), read.position)
            self._count(is_direct, read.num_bytes)
            if tracer is not None:
                tracer.read(read.label, started, time.perf_counter(), read.num_bytes)

    def _count(self, is_direct: bool, num_bytes: int) -> None:
        with self._changed:
            self.bytes_read[is_direct] += num_bytes

    def _enqueue(self, chunk: _Chunk) -> None:
        job = chunk.job
        if chunk.error is not None and not job.is_over.is_set():
            self._end(job, chunk.error)
        if job.is_over.is_set():
            return  # its room is free
        assert self._staging is not None and job.target is not None
        self._begin(job)
        try:
            for read, start in chunk.places():
                begin = start + read.position % BLOCK
                _prove(read, self._staging[begin : begin + read.num_bytes])
        except GroupFileError as error:
            self._end(job, error)
            return
        begun = None if job.tracer is None else job.tracer.now(job.stream)
        for read, start in chunk.places():
            begin = start + read.position % BLOCK
            self._backend.copy(
                job.target[read.at : read.at + read.num_bytes],
                self._staging[begin : begin + read.num_bytes],
                job.stream,
            )
            self.num_copies += 1
        chunk.sent = self._spare.pop() if self._spare else self._backend.new_event()
        chunk.sent.record(job.stream)
        self._copying.append(chunk)
        if job.tracer is not None and begun is not None:
            names, num_bytes = [read.label for read in chunk.reads], sum(read.num_bytes for read in chunk.reads)
            job.tracer.copied(names, begun, job.stream, num_bytes)
        job.num_left -= 1
        if not job.num_left:
            self._end(job, None)

    def _begin(self, job: Job) -> None:
        if not job.is_begun:
            job.is_begun = True
            for event in job.after:
                job.stream.wait_event(event)

    def _end(self, job: Job, error: BaseException | None) -> None:
        job.error = error
        self._live.discard(job)
        self._begin(job)  # also if it brought nothing: who takes these bytes next waits for this job only
        job.ready.record(job.stream)
        self.last_copy.record(job.stream)
        job.target = None  # the job may be kept longer than the slot
        job.chunks.clear()  # these refer to the job: files would stay mapped until the garbage collector comes
        job.is_over.set()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            for job in [*self._live]:
                with suppress(Exception):  # it may be the device that fails
                    self._end(job, error)
                job.error = error
                job.is_over.set()
            self._live.clear()
            self._jobs.clear()
            self._changed.wait_for(lambda: all(chunk.is_read for chunk in self._reading))
            self._reading.clear()
            self._is_pumping = False
            self._changed.notify_all()


def _parts(reads: Sequence[Read], limit: int) -> Iterator[list[Read]]:
    """What one thread reads at a time: a piece of at most `limit` bytes, whole blocks, or several small ones."""
    batch: list[Read] = []
    batch_bytes = 0
    for read in reads:
        done = 0
        while done < read.num_bytes:
            position = read.position + done
            size = min(read.num_bytes - done, max(BLOCK, limit // BLOCK * BLOCK) - position % BLOCK)
            room = blocks_around(position, size)
            if batch and (batch_bytes + room > limit or len(batch) == _MAX_READS_PER_CHUNK):
                yield batch
                batch, batch_bytes = [], 0
            batch.append(replace(read, at=read.at + done, position=position, num_bytes=size))
            batch_bytes += room
            done += size
    if batch:
        yield batch


def _on_pool(task: Callable[..., None], *args: object) -> Future[None]:
    """Run a task on the pool; here and now if it has no thread and gets none."""
    once = threading.Lock()
    result: Future[None] = Future()

    def run() -> None:
        if not once.acquire(blocking=False):
            return  # the pool took it, although it said that it could not
        try:
            task(*args)
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(None)

    try:
        pool().submit(run)
    except RuntimeError:  # no more threads, or the interpreter is about to exit
        run()
    return result


def _prove(read: Read, data: torch.Tensor) -> None:
    if read.proof is not None:
        with _naming(read):
            read.proof.update(memory_of(data))


@contextmanager
def _naming(read: Read) -> Iterator[None]:
    """Tell in an error which group could not be read."""
    try:
        yield
    except GroupFileError as error:
        raise GroupFileError(f"Group {read.label!r} cannot be onloaded. {error}") from error


@cache
def pumps() -> ThreadPoolExecutor:
    """The threads of all readers of the process that have something to do."""
    os.register_at_fork(after_in_child=pumps.cache_clear)
    return ThreadPoolExecutor(_MAX_PUMPS, thread_name_prefix="group_offload-pump")


def _nothing() -> None:
    pass


os.register_at_fork(after_in_child=_forget_all)
