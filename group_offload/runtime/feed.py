"""The plain bytes of blobs that are packed, one after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..base.device import Backend
from ..base.mapping import flat_view, map_anonymous
from ..base.page_lock import PageLock
from ..base.pool import Task, finish_all, on_pool, withdraw_all
from ..base.ram import fits
from ..packing.codec import hash_of
from ..stores.moves import Copy, Read
from .copies.reader import prove_all
from .copies.transfer import Transfer
from .groups.part import Part


class Plain(NamedTuple):
    """The plain bytes of a part's blob, which threads bring to memory."""

    part: Part
    bytes: torch.Tensor
    """Flat uint8, on the CPU. Between weights are zeros, or what a file has there."""
    generation: int
    """The generation of the blob that the bytes are of."""
    hashed: Task[str]
    """The work of the pool that hashes them."""
    reads: Sequence[Read]
    tasks: Sequence[Task[None]]


class Feed:
    """Brings the plain bytes of one blob after another to page-locked memory, the next one while one is packed."""

    def __init__(self, parts: Sequence[Part], transfer: Transfer, backend: Backend, *, reads_ahead: bool) -> None:
        """
        Args:
            reads_ahead: Whether there is RAM for the bytes of two blobs.
        """
        self._parts, self._transfer = deque(parts), transfer
        num_bytes = max((part.blob.layout.num_bytes for part in parts), default=0)
        num_buffers = min(len(parts), 2 if reads_ahead and fits(2 * num_bytes) else 1)
        self._memories = [flat_view(map_anonymous(num_bytes), 0, num_bytes) for _ in range(num_buffers)]
        self._locks = [PageLock.take(backend, memory, _no_wait) for memory in self._memories]
        self._next: Plain | None = None

    def take(self, part: Part) -> Plain:
        """The bytes of the part's blob. They stay until `take` is called again.

        Raises:
            GroupFileError: a file cannot be read.
        """
        while self._next is None or self._next.part is not part:
            self._begin()
        found, self._next = self._next, None
        finish_all(found.tasks)
        prove_all(found.bytes, found.reads)
        return found

    def go_on(self) -> None:
        """Begin to read the next blob, if there is memory for it."""
        if len(self._memories) > 1 and self._parts:
            self._begin()

    def _begin(self) -> None:
        self._give_up()
        part, memory = self._parts.popleft(), self._memories[-1]
        self._memories = [memory, *self._memories[:-1]]
        self._next = _begin_to_read(part, memory[: part.blob.layout.num_bytes], self._transfer)

    def _give_up(self) -> None:
        if self._next is not None:
            withdraw_all(self._next.tasks)
            self._next = None

    def close(self) -> None:
        self._give_up()
        for lock in self._locks:
            if lock is not None:
                lock.release()


def _begin_to_read(part: Part, target: torch.Tensor, transfer: Transfer) -> Plain:
    reads, at = [], 0
    for move in sorted(part.blob.moves(0, ""), key=lambda move: move.at):
        assert isinstance(move, (Copy, Read))
        target[at : move.at] = 0
        at = move.at + move.num_bytes
        match move:
            case Copy():
                target[move.at : at] = move.memory[move.start : move.start + move.num_bytes]
            case Read():
                reads.append(move)
    target[at:] = 0
    tasks = transfer.reader.begin_now(target, reads)
    hashed = on_pool(_hash_of, target, tasks)  # all of `tasks` were begun before: none waits for a thread
    return Plain(part, target, part.blob.generation, hashed, reads, tasks)


def _hash_of(target: torch.Tensor, tasks: Sequence[Task[None]]) -> str:
    finish_all(tasks)
    return hash_of(target)


def _no_wait() -> None:
    """Packing returns only once nothing reads the memory any more."""
