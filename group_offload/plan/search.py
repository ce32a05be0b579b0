"""The search for the placement with the fastest pass within the budgets, where it is decided already where groups rest.

[Note: More memory is never slower]
Which placements are compared does not depend on the budgets: all of them if there are few, else those of a few *lines*. A line
takes groups to the device one after another. With more memory the same placements fit, and others too; of those that fit the
fastest is taken, but for `_AS_FAST`. A placement is left out only if it cannot be the fastest: if its limit says so, or if it
is a part of one that fits, and all groups have one size. (With slots of one size, what is not sent delays nothing.)

RAM is given out in one order, and the first line is that order from its end. So with more RAM lines are what they were, and
what is sent from RAM delays nothing that it would not delay if it were read. (Not so where groups are packed, which takes time
to unpack, and where they all differ: see `share_out_ram`.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from .pass_model import Footprint, PassModel, SimulatedPass
from .placement import Placement
from .rests import spread_order

_AS_FAST = 0.999
"""A placement takes the place of one found before if a pass takes less than this share of its time."""
_FEW_PLACEMENTS = 300
"""So many are all tried: those of 8 groups that stay or do not, or of 5 that may stay packed too."""
_NUM_LEFT, _TAILS = (1, 2, 3, 4, 6), (4, 2)
"""So many groups are left to the last of a line, out of the first 1/4 and 1/2 of it."""
_NUM_FILLED = 2
"""So many smaller groups are taken where the next one of a line has no room."""
_MANY_USES = 150
"""In a longer pass, groups are small beside budgets: only two lines are tried, and of each the largest part that fits."""


@dataclass(frozen=True, slots=True)
class Found:
    """A placement that was simulated."""

    placements: list[Placement]
    footprint: Footprint
    run: SimulatedPass


class Search:
    """The fastest placement so far, and the effort that the search has taken."""

    def __init__(self, model: PassModel) -> None:
        self.model = model
        self.num_uses = 0
        """Uses that were simulated."""
        self._best: Found | None = None
        self._known: set[tuple[Placement, ...]] = set()
        self._is_even = len(set(model.sizes)) == 1
        self._is_long = len(model.uses) > _MANY_USES

    def run(self) -> Found:
        """Search, and return the fastest placement."""
        model = self.model
        if not model.has_residents:
            self._consider(model.rests)
        elif math.prod(len(model.choices[index]) for index in model.used) <= _FEW_PLACEMENTS:
            for placements in self._all_placements():
                self._consider(placements)
        else:
            for steps, least in self._lines():
                if self._is_faster(model.compute_seconds):
                    self._walk(steps, least)
            for placements in self._even_placements():
                if self._is_faster(model.compute_seconds):
                    self._consider(placements)
        assert self._best is not None  # the smallest budget fits the rests
        return self._best

    def _is_faster(self, seconds: float) -> bool:
        return self._best is None or seconds < self._best.run.step_seconds * _AS_FAST

    def _consider(self, placements: Sequence[Placement]) -> Footprint | None:
        """Take a placement if it is faster than the best so far. Returns what it takes; None if that is too much."""
        footprint = self.model.footprint(placements)
        if not self.model.fits(footprint):
            return None
        if self._is_faster(self.model.limit_seconds(footprint)) and tuple(placements) not in self._known:
            self._known.add(tuple(placements))
            found = Found(list(placements), footprint, self.model.run(placements, footprint))
            self.num_uses += found.run.num_uses
            if self._is_faster(found.run.step_seconds):
                self._best = found
        return footprint

    def _all_placements(self) -> list[list[Placement]]:
        """Every placement, those with the lowest limits first: most others need no simulation then."""
        model, everything = self.model, []
        for chosen in product(*(model.choices[index] for index in model.used)):
            placements = list(model.rests)
            for index, placement in zip(model.used, chosen, strict=True):
                placements[index] = placement
            footprint = model.footprint(placements)
            everything.append((model.limit_seconds(footprint), footprint.h2d_bytes, placements))
        return [placements for *_, placements in sorted(everything, key=lambda each: each[:2])]

    def _even_placements(self) -> Iterator[list[Placement]]:
        """What is left to send comes evenly along compute: where that and the link take equally long, it counts most."""
        model = self.model
        able = [] if self._is_long else [index for index in model.used if Placement.DEVICE in model.choices[index]]
        seconds = [group.compute_seconds for group in model.groups] if model.compute_seconds else model.sizes
        all_seconds, all_bytes = sum(seconds[index] for index in able), sum(model.sizes[index] for index in able)
        for num in range(1, 2 * len(able)):
            placements, left, now = list(model.rests), 0, 0.0
            for index in able:
                now += seconds[index]
                if (left + model.sizes[index] / 2) * all_seconds * 2 * len(able) <= all_bytes * num * now:
                    left += model.sizes[index]
                else:
                    placements[index] = Placement.DEVICE
            yield placements

    def _lines(self) -> Iterator[tuple[list[tuple[int, Placement]], int]]:
        """Steps from the rests to everything on the device, and how many of them a placement of the line has at least."""
        model = self.model
        for order, least in self._orders():
            if model.has_packed:
                as_packed = [
                    Placement.PACKED if Placement.PACKED in model.choices[i] else Placement.DEVICE for i in order
                ]
                steps = [*zip(order, as_packed, strict=True)]
                yield steps + [(index, Placement.DEVICE) for index, at in steps if at is Placement.PACKED], least
            yield [(index, Placement.DEVICE) for index in order], least

    def _orders(self) -> Iterator[tuple[list[int], int]]:
        """What is read comes first. Else what is left to send is spread evenly, or slots are small."""
        model = self.model
        able = [index for index in spread_order(model)[::-1] if Placement.DEVICE in model.choices[index]]
        first = sorted(able, key=lambda index: model.rests[index] is not Placement.FILE)
        yield first, 0
        yield sorted(able, key=lambda index: (-model.num_sent[index], -model.sizes[index])), 0
        if self._is_long:
            return
        # Where few groups are left to be read, it matters more than elsewhere how evenly they come.
        at = {index: at for at, index in enumerate(model.used)}
        for tail, num_left in product(_TAILS, _NUM_LEFT):
            among = sorted(first[: len(first) // tail], key=lambda index: at[index])
            left = {among[(4 * n + 1) * len(among) // (4 * num_left)] for n in range(num_left)} if among else set()
            yield sorted(first, key=lambda index: index in left), len(among) - len(left)

    def _walk(self, steps: list[tuple[int, Placement]], least: int) -> None:
        """Consider the placements of a line that fit, from the largest one on, until further ones are not faster."""
        model, placements, before, taken = self.model, list(self.model.rests), [], 0
        takes = {Placement.DEVICE: model.sizes, Placement.PACKED: model.sent}
        for index, at in steps:
            taken += takes[at][index] - (model.sent[index] if placements[index] is Placement.PACKED else 0)
            if taken > model.device_budget:
                break
            before.append(placements[index])
            placements[index] = at
        while len(before) >= least:
            footprint = self._consider(placements)
            if footprint is not None:
                self._fill(placements, steps[len(before) :])
                if self._is_even or self._is_long or not self._is_faster(model.limit_seconds(footprint)):
                    return
            if len(before) <= least:
                return
            placement = before.pop()
            placements[steps[len(before)][0]] = placement

    def _fill(self, placements: Sequence[Placement], steps: list[tuple[int, Placement]]) -> None:
        """Take smaller groups in the room that the next one of a line does not fit."""
        if self._is_even or not steps:
            return
        filled, size = list(placements), self.model.sizes[steps[0][0]]
        for index, at in [step for step in steps if self.model.sizes[step[0]] < size][:_NUM_FILLED]:
            filled[index] = at
            if self._consider(filled) is None:
                return
