"""Ranges of RAM or of a file, handed out and taken back.

Training repeats itself: a step asks for the sizes that the step before gave back. So a request is first served with a free
range of exactly its size, the one that has been free longest. Only if there is none, a range is cut from larger ones.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from ..base.device import Event

ALIGNMENT = 512


@dataclass(slots=True, eq=False)
class Range:
    """Bytes from `start` on. Its holder may change everything but where it is."""

    start: int
    num_bytes: int
    last_uses: tuple[Event, ...] = ()
    """Copies that may still use the bytes."""
    memory: torch.Tensor | None = None
    """The bytes of a range of RAM. They stay with a range that is given back, because making a view takes time."""


class Ranges:
    """Free ranges of an address space that grows. Not thread-safe."""

    def __init__(self) -> None:
        self._by_size: dict[int, deque[Range]] = {}
        self._rest: list[Range] = []

    def add(self, start: int, num_bytes: int) -> None:
        """Let the address space grow. A gap before `start` is never bridged."""
        self._rest.append(Range(start, num_bytes))

    def take(self, num_bytes: int) -> Range | None:
        """`num_bytes` in one piece, rounded up to `ALIGNMENT`. None if no free piece is that large."""
        num_bytes = round_up(num_bytes)
        same_size = self._by_size.get(num_bytes)
        if same_size:
            return same_size.popleft()
        found = self._cut(num_bytes)
        if found is None and any(self._by_size.values()):
            self._merge()
            found = self._cut(num_bytes)
        return found

    def give(self, free: Range) -> None:
        self._by_size.setdefault(free.num_bytes, deque()).append(free)

    def _cut(self, num_bytes: int) -> Range | None:
        for index, free in enumerate(self._rest):
            if free.num_bytes >= num_bytes:
                left = Range(free.start + num_bytes, free.num_bytes - num_bytes, free.last_uses)
                self._rest[index : index + 1] = [left] if left.num_bytes else []
                return Range(free.start, num_bytes, free.last_uses)
        return None

    def _merge(self) -> None:
        free = [*self._rest, *(each for ranges in self._by_size.values() for each in ranges)]
        self._by_size.clear()
        self._rest = []
        for each in sorted(free, key=lambda each: each.start):
            last = self._rest[-1] if self._rest else None
            if last is not None and last.start + last.num_bytes == each.start:
                uses = tuple(use for use in dict.fromkeys((*last.last_uses, *each.last_uses)) if not use.query())
                self._rest[-1] = Range(last.start, last.num_bytes + each.num_bytes, uses)
            else:
                self._rest.append(each)


def round_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
