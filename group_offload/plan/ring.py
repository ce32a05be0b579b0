"""Positions of slots in a ring of device memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True, slots=True)
class Geometry:
    """A ring in two parts, as large as the two largest groups. No slot lies in both parts.

    So a large group has room once the few small groups in one part are done with, and does not wait for all of them.
    """

    num_bytes: int
    """Size of the ring."""
    first_part: int
    """Size of the first part, in bytes."""

    def starts(self, num_bytes: int, head: int, live: Iterable[int], *, is_first: bool) -> Iterator[int]:
        """Positions where a slot of `num_bytes` may begin, the best first.

        If groups are needed in the order in which they came, the best position is right behind the last slot. It is not if
        a pass goes through the groups backwards, as a backward does: then the other positions are tried. The first slot of
        a pass goes to the begin of the ring if it can, so that each pass gives each run of groups the same position.

        Args:
            head: the end of the last slot.
            live: positions of the slots whose bytes no later slot has taken, oldest first.
            is_first: whether the slot is the first one of a pass.
        """
        before: set[int] = set()
        for start in chain((0, head) if is_first else (head,), live):
            fit = self.fit(start, num_bytes)
            if fit not in before and fit + num_bytes <= self.num_bytes:
                before.add(fit)
                yield fit

    def fit(self, start: int, num_bytes: int) -> int:
        """The position of a slot of `num_bytes` that is put at `start`, moved so that it lies in one part of the ring."""
        first_part = self.first_part
        if start < first_part < start + num_bytes and num_bytes <= first_part:
            start = first_part
        return start if start + num_bytes <= self.num_bytes else 0
