"""One copy of weights for all ranks of a host: the first rank makes segments of RAM, and the others map them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ...base.mapping import TwiceMapped
from .rendezvous import OtherModel, Rendezvous

_MOST_OPEN = 4
"""How many segments the first rank makes before the others have mapped them: until then each takes descriptors."""


class SharedHostMemory:
    """The RAM that the ranks of a host have in common while one model is set up. See `HostAllocator`."""

    def __init__(self, rendezvous: Rendezvous, model: str, ranks: Sequence[int]) -> None:
        self._rendezvous, self._model = rendezvous, model
        self._first, self._others = ranks[0], ranks[1:]
        self.turn = 0
        self._open: deque[tuple[int, TwiceMapped]] = deque()

    @property
    def is_first(self) -> bool:
        return self._rendezvous.rank == self._first

    def names(self, num_bytes: int) -> Sequence[str]:
        self.turn += 1
        if self.is_first:
            if len(self._open) >= _MOST_OPEN:
                self._seal()
            return []
        size, names = self._rendezvous.hear(self._first, self._topic("made", self.turn), f"{self._model}/all made")
        return names if size == num_bytes else []

    def was_filled(self, twice: TwiceMapped, num_bytes: int) -> None:
        if self.is_first:
            self._open.append((self.turn, twice))
            self._rendezvous.tell(self._topic("made", self.turn), [num_bytes, twice.names])
            return
        twice.seal()
        self._rendezvous.tell(self._topic("mapped", self.turn), 0)

    def differs(self, fqn: str) -> Exception:
        return OtherModel(self._rendezvous.rank, self._first, f"{fqn!r} has other values")

    def end(self) -> None:
        """All segments are made."""
        self._rendezvous.tell(f"{self._model}/all made", [-1, []])
        self._rendezvous.tell(f"{self._model}/all mapped", 0)
        while self._open:
            self._seal()

    def _seal(self) -> None:
        turn, twice = self._open.popleft()
        for rank in self._others:
            self._rendezvous.hear(rank, self._topic("mapped", turn), f"{self._model}/all mapped")
        twice.seal()

    def _topic(self, what: str, turn: int) -> str:
        return f"{self._model}/{what} {turn}"
