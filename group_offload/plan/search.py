"""The search for the placement with the fastest pass within the budgets.

Where each group rests is decided already (`rests`). The search decides which groups stay on the device too. It fills the device
in a few ways, and exchanges single groups near the uses that compute waits for, as long as that makes a pass faster. Where
there are few placements it tries them all instead.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest, nsmallest
from itertools import product

from .bound import lower_bound
from .pass_model import Footprint, PassModel, SimulatedPass
from .placement import Placement
from .rests import spread, ways_to_spread

_AS_FAST = 1.001
"""Plans this near to the fastest are equally good, and `_tie_break` decides between them."""
_NEAR_ENOUGH = 1.005
"""A plan this near to the lower bound is not improved any further."""
_MAX_EFFORT, _EFFORT_FOR_USE = 4_500, 5
"""How many uses are simulated for one plan: 4,500 take some 7 ms. Where there are many, it is 5 for each, of which one
placement takes 3 or more."""
_FEW_PLACEMENTS = 300
"""So many are all tried: those of 8 groups that stay or do not, or of 5 that may stay packed too."""
_NUM_STALLS, _NUM_BEFORE, _NUM_GIVERS, _MAX_GIVERS = 6, 4, 4, 3
"""Exchanges are tried for so many groups that compute waits for, so many sent before each, and so many residents near those."""


@dataclass(frozen=True, slots=True)
class Found:
    """A placement that was simulated."""

    placements: list[Placement]
    footprint: Footprint
    run: SimulatedPass


def _tie_break(footprint: Footprint) -> tuple[int, ...]:
    """Of placements that are equally fast, the one with the smallest tuple is the best."""
    f = footprint
    return f.h2d_bytes, f.drive_bytes, f.not_resident_bytes, f.device_bytes


class Search:
    """The best placement so far, and the effort that the search has taken."""

    def __init__(self, model: PassModel) -> None:
        self.model = model
        self.effort = 0
        """Uses that were simulated, and the time of everything else counted as such uses."""
        self._max_effort = max(_MAX_EFFORT, _EFFORT_FOR_USE * len(model.uses))
        self.fastest = math.inf
        """Seconds of the fastest pass. The best placement may be slower, by `_AS_FAST`."""
        self.best = self._simulate(list(model.rests), model.footprint(model.rests))
        self._at = {index: at for at, index in enumerate(model.used)}

    def run(self) -> Found:
        """Search, and return the best placement."""
        model = self.model
        if not model.has_residents:
            return self.best
        near_enough = lower_bound(model) * _NEAR_ENOUGH
        for placements in _candidates(model):
            self.effort += len(placements)
            self.consider(placements)
            if self.effort >= self._max_effort:
                break
        if math.prod(len(model.choices[index]) for index in model.used) <= _FEW_PLACEMENTS:
            for placements in _all_placements(model):
                self.consider(placements)
        else:
            while self.fastest > near_enough and any(map(self.consider, self._neighbours())):
                pass
        return self.best

    def consider(self, placements: list[Placement]) -> bool:
        """Take a placement if it is within the budgets and better than the best so far. Returns whether it was taken."""
        footprint = self.model.footprint(placements)
        self.effort += 8 + len(placements) // 4
        if not self.model.fits(footprint) or not self._is_better(footprint, self.model.limit_seconds(footprint)):
            return False  # it would be no better however fast it is
        found = self._simulate(placements, footprint)
        if not self._is_better(footprint, found.run.step_seconds):
            return False
        self.best = found
        return True

    def _is_better(self, footprint: Footprint, seconds: float) -> bool:
        """Whether a placement is better than the best so far if its pass takes `seconds`."""
        if seconds > self.fastest * _AS_FAST:
            return False
        wins_ties = _tie_break(footprint) < _tie_break(self.best.footprint)
        return wins_ties or self.best.run.step_seconds > min(self.fastest, seconds) * _AS_FAST

    def _simulate(self, placements: list[Placement], footprint: Footprint) -> Found:
        run = self.model.run(placements, footprint)
        self.effort += run.num_uses
        self.fastest = min(self.fastest, run.step_seconds)
        return Found(placements, footprint, run)

    def _neighbours(self) -> Iterator[list[Placement]]:
        """Placements one exchange away from the best one, beginning with the longest stall, until the effort is used up."""
        model, places, stalls, at = self.model, self.best.placements, self.best.run.stalls, self._at
        for stalled in nlargest(_NUM_STALLS, stalls, key=lambda index: stalls[index]):
            before = [model.used[at[stalled] - back] for back in range(min(8, len(at)))]
            for index in [index for index in before if places[index] is model.rests[index]][:_NUM_BEFORE]:
                others = [other for other in model.used if places[other] is not model.rests[other]]
                near = nsmallest(_NUM_GIVERS, others, key=lambda other: abs(at[other] - at[index]))
                for giver in near:
                    if self.effort >= self._max_effort:
                        return
                    givers = [giver, *(other for other in near if other != giver)][:_MAX_GIVERS]
                    exchanged = _exchange(model, places, index, givers)
                    self.effort += len(places) // 2
                    if exchanged is not None:
                        yield exchanged


def _exchange(model: PassModel, placements: list[Placement], index: int, givers: list[int]) -> list[Placement] | None:
    """`index` stays on the device in place of as many givers as necessary; None if these are too few."""
    changed = list(placements)
    choices = model.choices[index]
    changed[index] = placements[givers[0]] if placements[givers[0]] in choices else choices[0]
    for giver in givers:
        changed[giver] = model.rests[giver]
        room = _room(model, changed)
        if room >= 0:
            _top_up(model, changed, room)
            return changed
    return None


def _all_placements(model: PassModel) -> list[list[Placement]]:
    """Every placement, those with the lowest limits first: most others need no simulation then."""
    everything = []
    for chosen in product(*(model.choices[index] for index in model.used)):
        placements = list(model.rests)
        for index, placement in zip(model.used, chosen, strict=True):
            placements[index] = placement
        everything.append((model.limit_seconds(model.footprint(placements)), placements))
    return [placements for _, placements in sorted(everything, key=lambda each: each[0])]


# ------------------------------------------------------------------------------------------------ candidates


def _candidates(model: PassModel) -> Iterator[list[Placement]]:
    """Placements that fill the device, each in another way."""
    kinds = (Placement.DEVICE, Placement.PACKED) if any(model.is_packed) else (Placement.DEVICE,)
    room = _room(model, model.rests)
    for kept in kinds:
        for weights, file_room in product(ways_to_spread(model), _file_rooms(model, room)):
            yield _fill(model, kept, weights, room, file_room)
        yield _all_but_small(model, kept)


def _file_rooms(model: PassModel, room: float) -> list[float]:
    """How much of the room groups in files get before the others: nothing, all of it, or what balances drive and link."""
    files = [index for index in model.used if model.rests[index] is Placement.FILE]
    if not files:
        return [0]
    speeds = model.problem.speeds
    sent = sum(model.sizes[index] for index in model.used) - room
    needed = sum(model.read[index] for index in files) - max(sent / speeds.h2d, model.compute_seconds) * speeds.drive
    return [room, needed, 0] if 0 < needed < room else [room, 0]


def _fill(
    model: PassModel, kept: Placement, weights: Sequence[float] | None, room: float, file_room: float
) -> list[Placement]:
    """Copies of groups stay on the device, so that those that are sent come evenly along `weights`.

    Args:
        kept: as what copies stay, where that is possible.
        room: the bytes that are filled evenly. What is left then is filled with the largest groups.
        file_room: the part of the room that groups in files get first.
    """
    placements = list(model.rests)
    stays = [kept if kept in choices else choices[0] for choices in model.choices]
    sizes = [model.sent[i] if at is Placement.PACKED else model.sizes[i] for i, at in enumerate(stays)]
    able = [index for index in model.used if Placement.DEVICE in model.choices[index]]
    taken = spread([index for index in able if placements[index] is Placement.FILE], file_room, sizes, weights)
    left = room - sum(sizes[index] for index in taken)
    taken |= spread([index for index in able if index not in taken], left, sizes, weights)
    for index in taken:
        placements[index] = stays[index]
    _top_up(model, placements, _room(model, placements))
    return placements


def _all_but_small(model: PassModel, kept: Placement) -> list[Placement]:
    """Copies of all groups stay, but for as many of the smallest as have no room: then slots are small, and berths too."""
    by_size = model.by_size[::-1]

    def without(num_left_out: int) -> list[Placement]:
        placements = list(model.rests)
        for index in by_size[num_left_out:]:
            choices = model.choices[index]
            placements[index] = kept if kept in choices else choices[0]
        return placements

    num = 0
    if _room(model, without(0)) < 0:  # the first group that is left out takes berths, each further one makes room
        num = bisect_left(range(len(by_size)), 0, lo=1, key=lambda num_left_out: _room(model, without(num_left_out)))
    placements = without(num)
    _top_up(model, placements, _room(model, placements))
    return placements


def _room(model: PassModel, placements: Sequence[Placement]) -> int:
    return model.device_budget - model.footprint(placements).device_bytes


def _top_up(model: PassModel, placements: list[Placement], room: int) -> None:
    """Fill the room that is left on the device: groups from files first, and large groups first."""
    sizes, num_slots = model.sizes, model.problem.num_slots
    streamed = sorted([sizes[index] for index, at in enumerate(placements) if at is not Placement.DEVICE])
    # What is packed there comes last: it is not sent, and only takes time to unpack.
    for tier in (Placement.FILE, Placement.RAM, Placement.PACKED):
        for index in [index for index in model.by_size if placements[index] is tier]:
            # If the slots were made for this group, they get smaller: the next largest group takes its share of them.
            taken = min(sizes[index], streamed[-1 - num_slots]) if len(streamed) > num_slots else 0
            if tier is Placement.PACKED:
                taken -= model.sent[index]
            if taken <= room:
                placements[index] = Placement.DEVICE
                room -= taken
                streamed.pop(bisect_left(streamed, sizes[index]))
