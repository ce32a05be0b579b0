"""How the bytes of a group are shared out."""

from __future__ import annotations

from dataclasses import dataclass

from ...base.layout import ALIGNMENT


@dataclass(frozen=True, slots=True)
class Cut:
    """The bytes of one group: an equal part for each rank, one after another, and a rest that each rank brings.

    Each part is one copy from RAM and one to each other GPU: more of them took more of the host's time than they saved
    (docs/multi-gpu.md). While a part goes on to the others, those of the next groups cross the link.
    """

    num_bytes: int
    num_ranks: int
    part_bytes: int

    @property
    def rest(self) -> tuple[int, int]:
        """The first and the last byte, exclusive, of what is too small to be shared out."""
        return self.part_bytes * self.num_ranks, self.num_bytes

    def part_of(self, rank: int) -> tuple[int, int]:
        """The first and the last byte, exclusive, of a rank's part: the first rank has the first one."""
        return rank * self.part_bytes, (rank + 1) * self.part_bytes

    def own(self, rank: int) -> list[tuple[int, int]]:
        """The bytes that a rank brings, as first and last byte, exclusive."""
        return [self.part_of(rank), self.rest]

    def others(self, rank: int) -> list[tuple[int, int]]:
        """The bytes that the other ranks bring."""
        start, end = self.part_of(rank)
        return [(first, last) for first, last in ((0, start), (end, self.rest[0])) if first < last]


def cut(num_bytes: int, num_ranks: int) -> Cut:
    """Cut `num_bytes` so that each rank has a part. All parts are aligned."""
    return Cut(num_bytes, num_ranks, num_bytes // num_ranks // ALIGNMENT * ALIGNMENT)
