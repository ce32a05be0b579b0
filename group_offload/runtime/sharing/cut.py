"""How the bytes of a group are shared out."""

from __future__ import annotations

from dataclasses import dataclass

from ...base.layout import ALIGNMENT


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes that lie one after another, of which each rank brings an equal part: the first rank the first one."""

    start: int
    part_bytes: int
    num_ranks: int

    @property
    def num_bytes(self) -> int:
        return self.part_bytes * self.num_ranks

    def part_of(self, rank: int) -> tuple[int, int]:
        """The first and the last byte, exclusive, of a rank's part."""
        start = self.start + rank * self.part_bytes
        return start, start + self.part_bytes


@dataclass(frozen=True, slots=True)
class Cut:
    """The bytes of one group: pieces that are shared, and a rest that is too small for that. Each rank brings the rest too."""

    pieces: tuple[Piece, ...]
    rest: tuple[int, int]

    def own(self, rank: int) -> list[tuple[int, int]]:
        """The bytes that a rank brings, as first and last byte, exclusive."""
        return [*(piece.part_of(rank) for piece in self.pieces), self.rest]

    def others(self, rank: int) -> list[tuple[int, int]]:
        """The bytes that the other ranks bring."""
        found = []
        for piece in self.pieces:
            start, end = piece.part_of(rank)
            found += [(piece.start, start), (end, piece.start + piece.num_bytes)]
        return [(start, end) for start, end in found if start < end]


def cut(num_bytes: int, num_ranks: int, part_bytes: int, most_pieces: int) -> Cut:
    """Cut `num_bytes` so that each rank has a part of each piece. All parts are aligned.

    Args:
        part_bytes: What a part has at most, as long as there are fewer than `most_pieces` pieces.
    """
    units = num_bytes // num_ranks // ALIGNMENT
    num_pieces = min(most_pieces, max(1, -(-units * ALIGNMENT // max(part_bytes, ALIGNMENT))))
    pieces, start = [], 0
    for index in range(num_pieces):
        size = (units * (index + 1) // num_pieces - units * index // num_pieces) * ALIGNMENT
        if size:
            pieces.append(Piece(start, size, num_ranks))
            start += size * num_ranks
    return Cut(tuple(pieces), (start, num_bytes))
