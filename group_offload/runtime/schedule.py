"""Which group will be needed next: what the last pass did, never trusted."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .group import Group


class Schedule:
    """The order in which groups are needed, learnt in each pass for the next one like it.

    A wrong guess costs a stall, never more: nothing relies on it for being right. Passes that begin at different modules
    (the whole model; only a VAE's decoder) are told apart by a key.
    """

    def __init__(self, first_guess: Sequence[Group]) -> None:
        self._first_guess = tuple(first_guess)
        self._learnt: dict[Hashable, tuple[Group, ...]] = {}
        self._positions: dict[Hashable, dict[Group, list[int]]] = {}
        self._key: Hashable = None
        self._order: tuple[Group, ...] = ()
        self._index: dict[Group, list[int]] = {}
        self._next = 0
        self._seen: list[Group] = []

    def begin(self, key: Hashable, scope: set[Group]) -> None:
        """Start a pass in which only groups of `scope` can be needed."""
        self._key = key
        order = self._learnt.get(key)
        if order is None:
            order = self._learnt[key] = tuple(group for group in self._first_guess if group in scope)
        self._order = order
        if key not in self._positions:
            self._positions[key] = _positions(order)
        self._index = self._positions[key]
        self._next = 0
        self._seen = []

    def observe(self, group: Group) -> None:
        """`group` is needed now."""
        self._seen.append(group)
        positions = self._index.get(group)
        if positions is not None:  # a group that was not foreseen leaves the guess where it was
            at = bisect_left(positions, self._next)
            self._next = positions[at if at < len(positions) else 0] + 1

    def upcoming(self) -> Iterator[Group]:
        """The groups that should come next, soonest first, with repeats."""
        for position in range(self._next, len(self._order)):
            yield self._order[position]

    def expects(self, group: Group) -> bool:
        """Whether `group` should be the very next one."""
        return self._next < len(self._order) and self._order[self._next] is group

    def end(self, *, completed: bool) -> None:
        """End the pass. One that broke off teaches nothing."""
        if completed:
            order = tuple(self._seen)
            if order != self._order:
                self._learnt[self._key] = order
                self._positions[self._key] = _positions(order)
        self._seen = []


def _positions(order: tuple[Group, ...]) -> dict[Group, list[int]]:
    found: dict[Group, list[int]] = {}
    for position, group in enumerate(order):
        found.setdefault(group, []).append(position)
    return found
