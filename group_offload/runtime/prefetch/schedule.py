"""The schedule predicts the group that is needed next from the last pass. No code trusts it to be right."""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import chain, groupby, pairwise, product
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..groups.group import Group

_BLOCK = re.compile(r"(.*\.)?\d+\.")
"""The beginning of the name of a layer in a block: the name of the nearest element of a list around it."""
_INDEX = re.compile(r"\b\d+\b")
"""The place of an element of a list, in the name of a layer."""
_NUM_ROUTES = 4


class Schedule:
    """The order in which groups are needed, learned in each pass for the next one like it.

    A wrong guess costs a stall, never more: no code relies on a guess to be right. Passes that begin at different modules
    (the whole model; only a VAE's decoder) are told apart by a key. A cache of diffusers skips blocks in some steps: each key
    has several routes, and the first group that the last one lacks tells that an older one is taken.
    In the first pass of a kind the order of registration is a guess, often a wrong one inside of blocks. But blocks are alike:
    what came after `blocks.0.norm` tells what comes after `blocks.1.norm`.
    """

    def __init__(self, first_guess: Sequence[Group]) -> None:
        self._first_guess = tuple(first_guess)
        self._routes: dict[Hashable, list[tuple[Group, ...]]] = {}
        """For each key, the orders in which the last passes needed groups. The latest comes first."""
        self._followed_by: dict[Hashable, Hashable] = {}
        """For the key of each pass, the key of the pass that came after the last one of that key."""
        self._key: Hashable = None
        self._go_to(self._first_guess, 0)
        self._seen: list[Group] = []
        self.is_learning = False
        """Whether this is the first pass of its kind."""
        self._named: dict[str, Group] = {}
        """The groups of such a pass by name, if nothing but the order of registration is known."""
        self._steps: defaultdict[str, deque[tuple[str, str]]] = defaultdict(partial(deque, maxlen=8))
        """By the first one's name without indices: groups of such a pass that came one after another. The latest come first."""
        self.has_news = False
        """Whether a pass has taken a new route since `followers` was asked."""
        self._neighbors: set[tuple[str, str]] = set()
        """Layers that came one after another in a pass; "" stands for what is no layer, and for the ends of a pass."""

    def begin(self, key: Hashable, scope: set[Group], guess: Sequence[Group] | None = None) -> None:
        """Start a pass in which only groups of `scope` can be needed.

        The first one of its key is expected to need them in the order of `guess`, or else of registration.
        """
        self._followed_by[self._key] = key
        self._key = key
        order = self.order_of(key)
        self.is_learning = key not in self._routes
        if self.is_learning:
            order = tuple(group for group in guess or order if group in scope)
            self._named = {} if guess else {group.group_id: group for group in order}
        self._go_to(order, 0)
        self._seen = []

    def _go_to(self, order: tuple[Group, ...], place: int) -> None:
        """Expect the group at this place of an order next."""
        self._order, self._next = order, place
        self.expected = order[place] if place < len(order) else None
        """The group that should be the very next one."""

    @property
    def order(self) -> tuple[Group, ...]:
        """The order of the last pass, or a guess."""
        return self._order or self._first_guess

    def order_of(self, key: Hashable) -> tuple[Group, ...]:
        """The order in which passes of this key need groups, if it is known; else a guess."""
        return self._routes[key][0] if key in self._routes else self._first_guess

    def observe(self, group: Group) -> None:
        """`group` is needed now."""
        if self.is_learning and self._named and self._seen:
            before = self._seen[-1]
            if group not in (before, next(self._after(before), None)):
                self._steps[_INDEX.sub("", before.group_id)].appendleft((before.group_id, group.group_id))
        self._seen.append(group)
        if self.expected is group:
            self._go_to(self._order, self._next + 1)
            return
        for order, start in product((self._order, *self._routes.get(self._key, ())), (self._next, 0)):
            with suppress(ValueError):  # a group that was not predicted leaves the guess where it was
                self._go_to(order, order.index(group, start) + 1)
                return

    def _after(self, group: Group) -> Iterator[Group]:
        """The groups that should come after `group`, as far as blocks like its own have told."""
        met = {group}
        while True:
            name = group.group_id
            steps = self._steps[_INDEX.sub("", name)]
            found = next(filter(None, (self._named.get(_shifted(then, before, name)) for before, then in steps)), None)
            if found is None or found in met:  # steps may lead around
                return
            group = found
            met.add(group)
            yield group

    def upcoming(self, *, wraps: bool) -> Iterator[Group]:
        """The groups that should come next, soonest first, with repeats; with `wraps`, those of the next pass follow."""
        if self.is_learning:
            for last in self._seen[-1:]:
                if self.expected is last:
                    yield last  # another module needs it too
                yield from self._after(last)
            seen = {*self._seen} if self._named else ()
            yield from (group for group in self._order[self._next :] if group not in seen)
            return
        yield from self._order[self._next :]
        if wraps:
            then = self._followed_by.get(self._key, self._key)
            if then == self._key:
                yield from self._order[: self._next]
            elif then in self._routes:
                yield from self._routes[then][0]

    def end(self, *, completed: bool) -> None:
        """End the pass. One that broke off teaches nothing."""
        if completed:
            known, order = self._routes.get(self._key, []), tuple(self._seen)
            others = [each for each in known if each != order]
            self.has_news |= len(others) == len(known)
            self._routes[self._key] = [order, *others][:_NUM_ROUTES]
            self._go_to(order, len(order))  # `upcoming` now begins with the next pass
            self.is_learning = False
        self._seen = []

    def followers(self) -> dict[str, str]:
        """For layers, the layer of the same block that always came next, and after no other one."""
        self.has_news = False
        for order in chain.from_iterable(self._routes.values()):
            layers = [""]
            for group, calls in groupby(order):
                # In fewer calls not all layers were called, and it is not known which.
                is_whole = group.may_join and len([*calls]) >= len(group.layers)
                layers += group.layers if is_whole else [name for layer in group.layers for name in ("", layer, "")]
            self._neighbors.update(pairwise((*layers, "")))
        before, after = (Counter(map(itemgetter(side), self._neighbors)) for side in (0, 1))
        return {
            first: second
            for first, second in self._neighbors
            if first and second and before[first] == after[second] == 1 and _block(first, second)
        }

    def take_over(self, before: Schedule, groups: Iterable[Group]) -> None:
        """Keep what was learned before layers were joined to these groups, or parted."""
        group_of = {layer: group for group in groups for layer in group.layers}

        def now(order: Iterable[Group]) -> Iterator[Group]:
            for group, calls in groupby(order):
                layers = (group.layers[min(number, len(group.layers) - 1)] for number, _ in enumerate(calls))
                yield from (group_of[layer] for layer in layers if layer in group_of)

        self._routes = {key: [tuple(now(order)) for order in known] for key, known in before._routes.items()}
        self._key, self._followed_by = before._key, before._followed_by
        self._neighbors = before._neighbors


@lru_cache(4096)
def _shifted(name: str, before: str, like: str) -> str:
    """`name` with its indices changed as they are from `before` to `like`."""
    pairs = zip(*map(_INDEX.findall, (before, like)), strict=False)  # "conv-" and "conv-1" differ in their number
    shifts = (int(there) - int(here) for here, there in pairs)
    return _INDEX.sub(lambda found: str(int(found[0]) + next(shifts, 0)), name)


def _block(first: str, second: str) -> bool:
    """Whether two layers are of one block, or one of a block in the other's."""
    blocks = sorted("" if (found := _BLOCK.match(name)) is None else found[0] for name in (first, second))
    return blocks[1].startswith(blocks[0])


def first_guess(groups: Iterable[Group]) -> list[Group]:
    """A guess of the first pass's order: outer groups first, then each group once for each module that needs it."""
    order = [group for group in groups if group.num_bytes for _ in range(1 if group.nesting else group.num_modules)]
    return sorted(order, key=lambda group: -group.nesting)
