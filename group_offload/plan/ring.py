"""Where in a ring of device memory the next run of groups may go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True, slots=True)
class Geometry:
    """A ring in two parts, each as large as one of the two largest groups. No slot lies in both.

    So a large group has room once the few small ones in one part are done with, not only after all.
    """

    num_bytes: int
    first_part: int
    """Its size in bytes."""

    def starts(self, num_bytes: int, head: int, live: Iterable[int], *, is_first: bool) -> Iterator[int]:
        """Where a slot of `num_bytes` may begin, the best places first.

        What is needed in the order in which it came is out of the way behind the last slot. It is not where a pass goes
        back the way that the one before went. The first slot of a pass begins the ring if it can, so that each pass gives
        each run of groups the same place.

        Args:
            head: where the last slot ended.
            live: where slots begin whose bytes nothing has taken since, oldest first.
            is_first: in its pass.
        """
        before: set[int] = set()
        for start in chain((0, head) if is_first else (head,), live):
            fit = self.fit(start, num_bytes)
            if fit not in before and fit + num_bytes <= self.num_bytes:
                before.add(fit)
                yield fit

    def fit(self, start: int, num_bytes: int) -> int:
        """Where a slot of `num_bytes` begins that is put at `start`: it lies in one part, and no further than the end."""
        first_part = self.first_part
        if start < first_part < start + num_bytes and num_bytes <= first_part:
            start = first_part
        return start if start + num_bytes <= self.num_bytes else 0
