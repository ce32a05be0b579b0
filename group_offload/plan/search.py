"""The search for the placement with the fastest pass within the budgets.

Where each group rests is decided already (`rests`). The search decides which groups stay on the device too: it fills the device
in a few ways, and exchanges single groups near the uses that compute waits for, as long as that makes a pass faster. Where there
are few placements it tries them all instead.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest, nsmallest
from itertools import product

from .pass_model import Footprint, PassModel, SimulatedPass
from .placement import Placement, smallest_ram_bytes
from .rests import spread, ways_to_spread

_AS_FAST = 1.001
"""Plans this near to the fastest are equally good, and `_tie_break` decides between them."""
_NEAR_ENOUGH = 1.005
"""A plan this near to the lower bound is not improved any further."""
_MAX_EFFORT, _EFFORT_FOR_USE = 6_000, 12
"""How many uses are simulated for one plan, at most: some 40 placements of 57 groups, and 4 of a pass of many uses."""
_FEW_PLACEMENTS = 300
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
            if self.effort < self._max_effort:
                self.consider(placements)
        if math.prod(len(model.choices[index]) for index in model.used) <= _FEW_PLACEMENTS:
            for placements in _all_placements(model):
                self.consider(placements)
        else:
            while self.fastest > near_enough and any(map(self.consider, self._neighbours())):
                pass
        return self.best

    def consider(self, placements: list[Placement]) -> bool:
        """Take a placement if it is within the budgets and better than the best so far. Returns whether it was taken."""
        model, footprint = self.model, self.model.footprint(placements)
        self.effort += 8 + len(placements) // 4
        limit = model.limit_seconds(footprint)
        if not model.fits(footprint) or limit > self.fastest * _AS_FAST:
            return False
        wins_ties = _tie_break(footprint) < _tie_break(self.best.footprint)
        if not wins_ties and self.best.run.step_seconds <= min(self.fastest, limit) * _AS_FAST:
            return False  # it would be no better however fast it is
        found = self._simulate(placements, footprint)
        if found.run.step_seconds > self.fastest * _AS_FAST:
            return False
        if not wins_ties and self.best.run.step_seconds <= self.fastest * _AS_FAST:
            return False
        self.best = found
        return True

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
    files = [index for index in model.used if model.rests[index] is Placement.FILE]
    kinds = (Placement.DEVICE, Placement.PACKED) if any(model.is_packed) else (Placement.DEVICE,)
    for kept in kinds:
        for weights, file_room in product(ways_to_spread(model), _file_rooms(model, files)):
            yield _fill(model, kept, weights, files, file_room)
        yield _fill_with_all(model, kept)


def _file_rooms(model: PassModel, files: Sequence[int]) -> list[float]:
    """How much of the device's room groups in files get before the others: nothing, all of it, or what balances drive and link."""
    if not files:
        return [0]
    speeds, room = model.problem.speeds, _room(model, model.rests)
    sent = sum(model.sizes[index] for index in model.used) - room
    needed = sum(model.read[index] for index in files) - max(sent / speeds.h2d, model.compute_seconds) * speeds.drive
    return [room, needed, 0] if 0 < needed < room else [room, 0]


def _fill(
    model: PassModel, kept: Placement, weights: Sequence[float] | None, files: Sequence[int], file_room: float
) -> list[Placement]:
    """Copies of groups stay on the device, so that those that are sent come evenly along `weights`.

    Args:
        kept: as what copies stay, where that is possible.
        file_room: the part of the room that groups in files get first.
    """
    placements = list(model.rests)
    stays = [kept if kept in model.choices[i] else model.choices[i][0] for i in range(len(model.groups))]
    sizes = [model.sent[i] if at is Placement.PACKED else model.sizes[i] for i, at in enumerate(stays)]
    room = _room(model, placements)
    taken = spread(files, min(room, file_room), sizes, weights)
    others = [index for index in model.used if index not in taken and Placement.DEVICE in model.choices[index]]
    taken |= spread(others, room - sum(sizes[index] for index in taken), sizes, weights)
    for index in taken:
        placements[index] = stays[index]
    _top_up(model, placements, _room(model, placements))
    return placements


def _fill_with_all(model: PassModel, kept: Placement) -> list[Placement]:
    """A copy of every group that may stay does. Then no packed bytes are on their way, and they take no room."""
    placements = list(model.rests)
    for index in model.used:
        choices = model.choices[index]
        placements[index] = kept if kept in choices else choices[0]
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


# ------------------------------------------------------------------------------------------------ lower bound


def lower_bound(model: PassModel) -> float:
    """Seconds that no placement within the budgets is faster than.

    The budgets are filled to the last byte with parts of groups, those that are sent most often first. Compute, the link and
    the drive are each taken to be busy without a pause. The fastest placement may be far above this bound, for three reasons:

    - Groups rest on a tier as a whole. Of 9 equal groups, with room for 3.4 on the device and 0.9 in RAM, this bound reads
      4.7 and every placement at least 6: 28% more.
    - Compute of uneven groups does not cover all copies. In SD 1.5's UNet, 8 groups, a large group with little compute waits
      for the link: 26 to 43% over the bound where 14 to 16% or nothing is due to whole groups.
    - Copies are in order, and the drive is ahead of them by the staging memory at most. Of 60 equal groups (Qwen-Image) two
      are read, which takes 0.618 s. Between the two the link sends 15 groups from RAM, 0.184 s, and the drive stands still
      once it has read 256 MiB, 0.122 s at 2.2 GB/s. So the pass takes 0.742 s: 20% more.
    """
    room = model.device_budget - _least_slot_bytes(model) if model.has_residents else 0
    most = model.device_budget if model.has_residents else sum(nlargest(model.problem.num_slots, model.sizes))
    used = sum(model.sizes[index] for index in model.used)
    if used <= most:  # then all of them may fit on the device together, resident or in slots
        room = used
    sent = _least_sent(model, model.used, room, model.sent)
    in_file, file_room = [index for index in model.used if model.rests[index] is Placement.FILE], room
    ram = model.problem.budgets.ram_bytes
    if model.problem.rests is None and ram is not None:
        in_file = [index for index in model.used if model.groups[index].is_in_file]
        file_room += ram - smallest_ram_bytes(model.problem)
    read = _least_sent(model, in_file, file_room, model.read)
    return max(model.compute_seconds, sent / model.problem.speeds.h2d, read / model.problem.speeds.drive)


def _least_slot_bytes(model: PassModel) -> int:
    """The slots are no smaller than this if not all groups are resident.

    If the smallest group that the slots are made for has s bytes, all larger ones are resident or in the slots, so on the
    device. Hence s is no smaller than the last group that still fits there, taking groups by size.
    """
    smallest, total = 0, 0
    for size in sorted(model.sizes, reverse=True):
        total += size
        if total > model.device_budget:
            break
        smallest = size
    return smallest * min(model.problem.num_slots, len(model.sizes))


def _least_sent(model: PassModel, indices: Sequence[int], room: float, sizes: Sequence[int]) -> float:
    """The bytes of groups that are moved if those with most bytes for their room stay where there is `room`.

    Args:
        sizes: What each group moves. It takes the room of its packed bytes, if it has some.
    """
    moved = 0.0
    for index in sorted(indices, key=lambda i: -model.num_sent[i] * sizes[i] / max(1, model.sent[i])):
        kept = min(room, model.sent[index])
        room -= kept
        moved += sizes[index] * (1 - kept / max(1, model.sent[index])) * model.num_sent[index]
    return moved
