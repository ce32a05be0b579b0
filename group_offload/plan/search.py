"""The search for the placement with the fastest pass within the budgets.

[Note: More memory is never slower]
Which placements are compared does not depend on the budgets. They are all that there are, if these are few. Else there are a
few *orders* in which groups come to RAM, and to the device. A budget is filled in such an order, where a group without room is
passed over. What a filling takes, less one byte, is the next smaller budget that is filled in another way. So the search goes
through the fillings of all smaller budgets too, down to those that are slower by their limits. With more memory all of these
still fit, and others are added. Of all of them the fastest counts. (Where groups have so many sizes that a search would take
long, it ends early: `_MOST_FILLINGS`. There it holds nearly.)

A filling is left out only if it cannot be the fastest: if its limit says so, or if it is a part of another one. With more
groups in RAM nothing comes later. With more on the device neither, if slots have one size; if they have few sizes, seldom.
(Where packed groups in RAM take time to unpack, and those in files do not, more RAM may be slower, by that time.)
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import product

from .pass_model import Footprint, PassModel
from .placement import Placement, Problem, smallest_ram_bytes

_AS_FAST = 0.998
"""A placement takes the place of one found before if a pass takes less than this share of its time."""
_FEW_PLACEMENTS = 300
"""So many are all tried: those of 8 groups that stay or do not, or of 5 that may stay packed too."""
_NUM_LEFT, _TAILS = (1, 2, 3, 4, 6), (4, 2)
"""So many groups are left to the last of an order, out of the first 1/4 and 1/2 of it."""
_FEW_GROUPS, _NUM_LARGEST = 12, 4
"""If groups all differ, and are so few, smaller ones take the room in RAM that a large one leaves; and each of so many of the
largest comes first in an order."""
_MOST_RESTS, _MOST_FILLINGS = 12, 24
"""So many fillings of RAM, and of the device, are tried in an order: of groups of many sizes there is no end of them."""
_MOST_USES = 12_000
"""After so many uses that were simulated, only the largest filling of an order is tried."""
_MANY_USES = 150
"""In a longer pass groups are small beside budgets: of two orders, only the largest filling is tried."""
_GOLDEN = (5**0.5 - 1) / 2
_FIRST = 0.25
"""Where in its round the golden section begins: of 0, 0.25, 0.5 and 0.75 this one spreads FLUX best."""

Rests = tuple[Placement, ...]


def find_fastest(problem: Problem) -> tuple[Rests, Sequence[Placement], int]:
    """The rests and the placements of the fastest pass within the budgets, and how many uses were simulated to find it."""
    search = _Search(problem)
    for rests in search.rests():
        search.try_all_with(rests)
    assert search.best is not None  # the smallest budgets fit some rests
    return *search.best, search.num_uses


class _Search:
    """The fastest placement so far, and the effort that the search has taken."""

    def __init__(self, problem: Problem) -> None:
        self.model = PassModel(problem)
        self.best: tuple[Rests, Sequence[Placement]] | None = None
        self._best_seconds = math.inf
        self.num_uses = 0
        """Uses that were simulated."""
        self._known: set[tuple[Placement, ...]] = set()
        self._is_even = len(set(self.model.sizes)) == 1
        self._is_long = len(self.model.uses) > _MANY_USES
        self._all_differ = 2 * len(set(self.model.sizes)) > len(self.model.sizes) <= _MANY_USES
        used = self.model.used
        self._spread = [used[n] for n in sorted(range(len(used)), key=lambda n: (n * _GOLDEN + _FIRST) % 1)]
        """The groups that are used, so that any that follow one another in this order lie spread evenly over the pass.

        The n-th group of the pass has the place of (n * golden section) modulo 1. No ratio is further from fractions, so
        neither the first of these groups, nor the last, nor those in between come in heaps, however many they are.
        """

    # ---------------------------------------------------------------- where groups rest

    def rests(self) -> list[Rests]:
        """Where groups may rest within the RAM budget: the fillings of RAM that are no part of another one."""
        problem, groups = self.model.problem, self.model.groups
        if problem.rests is not None:
            return [problem.rests]
        ram, found = problem.budgets.ram_bytes, list[set[int]]()
        if ram is None:
            return [(Placement.RAM,) * len(groups)]
        for order in self._orders_to_ram():
            room = ram - smallest_ram_bytes(problem)
            for _ in range(_MOST_RESTS):
                if room < 0:
                    break
                taken, left = set[int](), room
                for index in order:
                    if self.model.sent[index] <= left:
                        taken.add(index)
                        left -= self.model.sent[index]
                    elif self._all_differ and len(order) > _FEW_GROUPS:
                        break  # of many fillings that are no part of one another, each would be tried
                if not any(taken <= other for other in found):
                    found.append(taken)
                if self._is_long:
                    break
                room -= left + 1
        return [
            tuple(
                Placement.FILE if group.is_in_file and index not in in_ram else Placement.RAM
                for index, group in enumerate(groups)
            )
            for in_ram in found
        ]

    def _orders_to_ram(self) -> list[list[int]]:
        """Those with most uses come first, those that the pass does not use last."""
        model = self.model
        able = [
            index
            for index in dict.fromkeys([*self._spread, *range(len(model.groups))])
            if model.groups[index].is_in_file
        ]
        orders = [sorted(able, key=lambda index: -model.num_sent[index])]
        if self._all_differ:  # then one that has no room may waste much of it
            by_size = sorted(able, key=lambda index: (not model.num_sent[index], -model.sent[index]))
            orders += [by_size[first:] + by_size[:first] for first in range(_NUM_LARGEST)]
        return orders

    # ---------------------------------------------------------------- what stays on the device

    def try_all_with(self, rests: Rests) -> None:
        """Try the placements of groups that rest there."""
        model = self.model
        base = model.footprint(rests)
        least = model.least_seconds(rests)
        if not model.fits(base) or not self._is_faster(
            least(model.device_budget if model.has_residents else base.device_bytes)
        ):
            return
        if not model.has_residents:
            self._consider(rests, rests)
            return
        choices = [model.choices(index, rests[index]) for index in model.used]
        if math.prod(map(len, choices)) <= _FEW_PLACEMENTS:
            for placements in self._all_placements(rests, choices):
                self._consider(rests, placements)
            return
        able = [index for index in self._spread[::-1] if Placement.DEVICE in model.choices(index, rests[index])]
        packed = {index for index in able if Placement.PACKED in model.choices(index, rests[index])}
        all_packed = [Placement.PACKED if index in packed else at for index, at in enumerate(rests)]
        ways = list[tuple[Sequence[Placement], list[tuple[int, Placement]]]]()
        for number, order in enumerate(self._orders(able, rests)):
            as_they_are = [(index, Placement.DEVICE) for index in order]
            if packed and number < 2:  # packed first, then as they are
                as_packed = [(index, Placement.PACKED if index in packed else Placement.DEVICE) for index in order]
                ways.append((rests, as_packed + as_they_are))
                ways.append((all_packed, as_they_are))  # which needs no room for packed bytes on their way
            ways.append((rests, as_they_are))
        for start, steps in ways[:3]:  # of placements that are equally fast, the one that sends less comes first
            room = model.device_budget - model.footprint(start).device_bytes
            if room >= 0:
                self._consider(rests, self._filled(start, steps, room)[0])
        if not self._is_long:
            for kept in [Placement.PACKED, Placement.DEVICE] if packed else [Placement.DEVICE]:
                self._fill_evenly(rests, sorted(able, key=model.used.index), kept)
        for start, steps in ways:
            self._fill(rests, start, steps, least)

    def _is_faster(self, seconds: float) -> bool:
        return seconds < self._best_seconds * _AS_FAST

    def _consider(self, rests: Rests, placements: Sequence[Placement]) -> Footprint:
        """Take a placement if it fits and is faster than the best so far. Returns what it takes."""
        model, footprint = self.model, self.model.footprint(placements)
        if model.fits(footprint) and self._is_faster(model.limit_seconds(footprint)):
            known = tuple(placements)
            if known not in self._known:
                self._known.add(known)
                seconds, num_uses = model.run(placements, footprint)
                self.num_uses += num_uses
                if self._is_faster(seconds):
                    self.best, self._best_seconds = (rests, known), seconds
        return footprint

    def _all_placements(self, rests: Rests, choices: Sequence[Sequence[Placement]]) -> list[list[Placement]]:
        """Every placement, those with the lowest limits first: most others need no simulation then."""
        model, everything = self.model, []
        for chosen in product(*choices):
            placements = list(rests)
            for index, placement in zip(model.used, chosen, strict=True):
                placements[index] = placement
            footprint = model.footprint(placements)
            everything.append((model.limit_seconds(footprint), footprint.h2d_bytes, placements))
        return [placements for *_, placements in sorted(everything, key=lambda each: each[:2])]

    def _orders(self, able: list[int], rests: Rests) -> Iterator[list[int]]:
        """What is read comes first. Else what is left to send is spread evenly, or slots are small."""
        model = self.model
        by_size = sorted(able, key=lambda index: (-model.num_sent[index], -model.sizes[index]))
        if self._all_differ and model.problem.rests is None:  # the same orders whatever rests in RAM
            may_stay = set(able)
            for order in self._orders_to_ram()[:2]:
                yield [index for index in order[::-1] if index in may_stay]
            yield by_size
            return
        first = sorted(able, key=lambda index: rests[index] is not Placement.FILE)
        yield first
        yield by_size
        if self._all_differ:
            yield sorted(by_size, key=lambda index: rests[index] is not Placement.FILE)
        if self._is_long or self._all_differ:
            return
        # Where few groups are left to be read, it matters more than elsewhere how evenly they come.
        at = {index: at for at, index in enumerate(model.used)}
        for tail, num_left in product(_TAILS, _NUM_LEFT):
            among = sorted(first[: len(first) // tail], key=lambda index: at[index])
            left = {among[(4 * n + 1) * len(among) // (4 * num_left)] for n in range(num_left)} if among else set()
            yield sorted(first, key=lambda index: index in left)

    def _fill(
        self,
        rests: Rests,
        start: Sequence[Placement],
        steps: list[tuple[int, Placement]],
        least: Callable[[int], float],
    ) -> None:
        """Consider the fillings of the device by these steps, from the largest one on, until further ones are slower."""
        base = self.model.footprint(start).device_bytes
        room = self.model.device_budget - base
        for _ in range(_MOST_FILLINGS):
            if room < 0 or not self._is_faster(least(base + room)):
                return
            placements, left = self._filled(start, steps, room)
            footprint = self._consider(rests, placements)
            if self._is_even or self._is_long or self.num_uses > _MOST_USES:
                return
            if not self._all_differ and not self._is_faster(self.model.limit_seconds(footprint)):
                return
            room -= left + 1

    def _filled(
        self, start: Sequence[Placement], steps: list[tuple[int, Placement]], room: int
    ) -> tuple[list[Placement], int]:
        """A filling, and the room that it leaves."""
        model, sizes, num_slots = self.model, self.model.sizes, self.model.problem.num_slots
        placements, streamed = list(start), sorted(sizes)
        for index, at in steps:
            if placements[index] is Placement.DEVICE:
                continue
            if at is Placement.PACKED:
                taken = model.sent[index]
            else:
                # If the slots were made for this group, they get smaller: the next largest group takes its share of them.
                taken = min(sizes[index], streamed[-1 - num_slots]) if len(streamed) > num_slots else 0
                if placements[index] is Placement.PACKED:
                    taken -= model.sent[index]
            if taken <= room:
                room -= taken
                placements[index] = at
                if at is Placement.DEVICE:
                    streamed.pop(bisect_left(streamed, sizes[index]))
        return placements, room

    def _fill_evenly(self, rests: Rests, able: list[int], kept: Placement) -> None:
        """Consider placements that leave to the link what comes evenly along compute: it counts where these take equally long.

        Args:
            kept: as what the others stay on the device, where that is possible.
        """
        model, placed = self.model, list(rests)
        for index in able:
            placed[index] = kept if kept in model.choices(index, rests[index]) else Placement.DEVICE
        sizes = [
            size if at is Placement.DEVICE else sent
            for size, sent, at in zip(model.sizes, model.sent, placed, strict=True)
        ]
        seconds = [group.compute_seconds for group in model.groups] if model.compute_seconds else sizes
        all_seconds, all_bytes = sum(seconds[index] for index in able), sum(sizes[index] for index in able)
        all_sent, num_shares = sum(model.sent[index] for index in able), 2 * len(able)
        # With a smaller share left out, more would stay than the device has room for.
        for share in range(max(0, num_shares * (all_bytes - model.device_budget) // max(1, all_bytes)), num_shares):
            # What is left out may fall short of its share by a group or two.
            if not self._is_faster(
                max(model.compute_seconds, all_sent * (share - 4) / num_shares / model.problem.speeds.h2d)
            ):
                return
            placements, left, now = list(placed), 0, 0.0
            for index in able:
                now += seconds[index]
                if (left + sizes[index] / 2) * all_seconds * num_shares <= all_bytes * share * now:
                    left += sizes[index]
                    placements[index] = rests[index]
            self._consider(rests, placements)
