"""The plain bytes of blobs that are packed, one after another."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

import torch

from ..base.device import Backend
from ..base.mapping import flat_view, map_anonymous
from ..base.page_lock import PageLock
from ..base.pool import Task, finish_all, on_pool, withdraw_all
from ..base.ram import fits
from ..packing.codec import hash_of
from ..stores.base import Blob
from ..stores.moves import Copy, Read
from .copies.reader import Reader, prove_all
from .groups.part import Part


class Plain(NamedTuple):
    """The plain bytes of a blob, which threads bring to memory."""

    bytes: torch.Tensor
    """Flat uint8, on the CPU. Between weights are zeros, or what a file has there."""
    generation: int
    """The generation of the blob that the bytes are of."""
    hashed: Task[str]
    """The work of the pool that hashes them."""
    reads: Sequence[Read]
    tasks: Sequence[Task[None]]


def plain_bytes(parts: Sequence[Part], reader: Reader, backend: Backend, *, reads_ahead: bool) -> Generator[Plain]:
    """The plain bytes of one blob after another, in page-locked memory. They stay until the next ones are asked for, which are
    read meanwhile.

    Args:
        reads_ahead: Whether there is RAM for the bytes of two blobs.

    Raises:
        GroupFileError: a file cannot be read.
    """
    num_bytes = max((part.blob.layout.num_bytes for part in parts), default=0)
    num_buffers = min(len(parts), 2 if reads_ahead and fits(2 * num_bytes) else 1)
    memories = [flat_view(map_anonymous(num_bytes), 0, num_bytes) for _ in range(num_buffers)]
    locks = [PageLock.take(backend, memory, _no_wait) for memory in memories]
    ahead: Plain | None = None

    def begin(number: int) -> Plain:
        blob = parts[number].blob
        return _begin_to_read(blob, memories[number % num_buffers][: blob.layout.num_bytes], reader)

    try:
        for number in range(len(parts)):
            found, ahead = ahead or begin(number), None
            finish_all(found.tasks)
            prove_all(found.bytes, found.reads)
            if num_buffers > 1 and number + 1 < len(parts):
                ahead = begin(number + 1)
            yield found
    finally:
        if ahead is not None:
            withdraw_all(ahead.tasks)
        for lock in locks:
            if lock is not None:
                lock.release()


def _begin_to_read(blob: Blob, target: torch.Tensor, reader: Reader) -> Plain:
    reads, at = [], 0
    for move in sorted(blob.moves(0, ""), key=lambda move: move.at):
        assert isinstance(move, (Copy, Read))
        target[at : move.at] = 0
        at = move.at + move.num_bytes
        if isinstance(move, Copy):
            target[move.at : at] = move.memory[move.start : move.start + move.num_bytes]
        else:
            reads.append(move)
    target[at:] = 0
    tasks = reader.begin_now(target, reads)
    hashed = on_pool(_hash_of, target, tasks)  # all of `tasks` were begun before: none waits for a thread
    return Plain(target, blob.generation, hashed, reads, tasks)


def _hash_of(target: torch.Tensor, tasks: Sequence[Task[None]]) -> str:
    finish_all(tasks)
    return hash_of(target)


def _no_wait() -> None:
    """Packing returns only once nothing reads the memory any more."""
