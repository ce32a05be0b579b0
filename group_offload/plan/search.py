"""The search for the placement with the fastest pass within the budgets.

The search starts from placements that fill the budgets with groups spread evenly over the pass. Then it exchanges single
groups between tiers, near the uses that compute waits for, as long as that makes a pass faster. Where there are few
placements it tries them all instead.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import nlargest, nsmallest
from itertools import product
from operator import itemgetter

from .pass_model import Footprint, PassModel, SimulatedPass
from .placement import NUM_BERTHS, Placement

_AS_FAST = 1.001
"""Plans this near to the fastest are equally good, and `_tie_break` decides between them."""
_NEAR_ENOUGH = 1.005
"""A plan this near to the lower bound is not improved any further."""
_MAX_EFFORT = 80_000
"""How many uses are simulated for one plan at most: a few hundred placements of 57 groups."""
_MANY_USES, _EFFORT_FOR_MANY = 500, 20_000
"""The same for passes of more than `_MANY_USES` uses: the search is to be fast for 2,000 uses too."""
_MAX_THRESHOLDS = 6
"""How many different numbers of groups are made resident before the others are spread."""
_NUM_GIVERS = 8
"""How many groups near to one in the pass, and how many of its size, are tried in exchange for it."""
_MAX_GIVERS = 3
"""How many groups make room for one together, at most."""


class _Axis(Enum):
    """What groups are spread evenly over."""

    TIME = "time"
    """Compute time: bytes are sent at an even rate."""
    BYTES = "bytes"
    """Bytes of weights, for compute that is not known or is all in few groups."""


@dataclass(frozen=True, slots=True)
class Found:
    """A placement that was simulated."""

    placements: list[Placement]
    footprint: Footprint
    run: SimulatedPass


def _tie_break(footprint: Footprint) -> tuple[int, ...]:
    """Of placements that are equally fast, the one with the smallest tuple is the best."""
    f = footprint
    return f.h2d_bytes, f.drive_bytes, f.not_resident_bytes, f.device_bytes, f.ram_bytes


class Search:
    """The best placement so far, and the effort that the search has taken.

    Args:
        model: the problem. Its budgets have to fit the placement with each group on its lowest tier.
    """

    def __init__(self, model: PassModel) -> None:
        self.model = model
        self.effort = 0
        """Uses that were simulated."""
        self.max_effort = _EFFORT_FOR_MANY if len(model.uses) > _MANY_USES else _MAX_EFFORT
        self.fastest = math.inf
        """Seconds of the fastest pass. The best placement may be slower, by `_AS_FAST`."""
        self.best = self._simulate(model.lowest(), model.footprint(model.lowest()))

    def run(self) -> Found:
        """Search, and return the best placement."""
        near_enough = lower_bound(self.model) * _NEAR_ENOUGH
        for placements in _candidates(self.model):
            self._count_look()
            self.consider(placements)
            if self.is_over or self.fastest <= near_enough:
                break
        if _num_placements(self.model) * len(self.model.uses) <= _MAX_EFFORT:
            self._try_all()
        else:
            self._improve(near_enough)
        return self.best

    @property
    def is_over(self) -> bool:
        return self.effort >= self.max_effort

    def consider(self, placements: list[Placement]) -> bool:
        """Take a placement if it is within the budgets and better than the best so far. Returns whether it was taken."""
        model, footprint = self.model, self.model.footprint(placements)
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

    def _count_look(self) -> None:
        """Count the time to make a placement and to add up its bytes, as uses that are simulated in that time."""
        self.effort += 2 * len(self.model.groups)

    def _try_all(self) -> None:
        """Consider every placement. Those with the lowest limits come first, so most others need no simulation."""
        model = self.model
        fitting = []
        for chosen in product(*(model.choices(index) for index in model.used)):
            placements = model.lowest()
            for index, placement in zip(model.used, chosen, strict=True):
                placements[index] = placement
            footprint = model.footprint(placements)
            if model.fits(footprint):
                fitting.append((model.limit_seconds(footprint), placements))
        for limit, placements in sorted(fitting, key=itemgetter(0)):
            if limit > self.fastest * _AS_FAST:
                return
            self.consider(placements)

    def _improve(self, near_enough: float) -> None:
        """Exchange groups between tiers until no exchange makes the plan better, or the effort is used up."""
        while self.fastest > near_enough:
            if not any(self.consider(placements) for placements in self._neighbours()):
                return

    def _neighbours(self) -> Iterator[list[Placement]]:
        """Placements one exchange away from the best one, beginning with the longest stall, until the effort is used up."""
        model, best = self.model, self.best
        position = {index: at for at, index in enumerate(model.used)}
        for stalled in sorted(best.run.stalls, key=lambda index: -best.run.stalls[index]):
            for index in _sent_before(model, best.placements, position[stalled]):
                for givers in _givers(model, best.placements, position, index):
                    if self.is_over:
                        return
                    self._count_look()
                    neighbour = _exchange(model, best.placements, index, givers)
                    if neighbour is not None:
                        yield neighbour


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

    The search was compared with all placements of 180 problems of 8 or 9 groups, none of them packed, of the sizes of FLUX.1,
    Wan, Qwen-Image and this UNet. The fastest placement is a median of 5% above the bound, and more than 10% in 68 problems, in
    54 of them for the first reason alone. Without trying all placements the search finds it in 175, and is at most 2.4% slower
    in the others.
    """
    room = model.device_budget - _least_slot_bytes(model) if model.has_residents else 0
    most = model.device_budget if model.has_residents else sum(nlargest(model.problem.num_slots, model.sizes))
    used = sum(model.sizes[index] for index in model.used)
    if used <= most:  # then all of them may fit on the device together, resident or in slots
        room = used
    sent = _least_sent(model, model.used, room, model.sent)
    in_file = [index for index in model.used if model.groups[index].is_in_file]
    read = _least_sent(model, in_file, room + model.ram_room, model.read)
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


def _num_placements(model: PassModel) -> int:
    return math.prod(len(model.choices(index)) for index in model.used)


# ------------------------------------------------------------------------------------------------ candidates


def _candidates(model: PassModel) -> Iterator[list[Placement]]:
    """Placements that fill the budgets, each spread evenly in another way; and one that leaves the smallest holes."""
    axes = (_Axis.TIME, _Axis.BYTES) if model.compute_seconds else (_Axis.BYTES,)
    orders = (False, True) if model.ram_room < math.inf else (False,)
    even = (
        _fill_evenly(model, residents, axis, files_first=files_first)
        for residents, axis, files_first in product(_first_residents(model), axes, orders)
    )
    yield next(even)
    yield _fill_largest_first(model)
    if any(model.is_packed) and model.has_residents:
        yield from (_fill_with_all(model, placement) for placement in (Placement.DEVICE, Placement.PACKED))
        yield from (_fill_with_packed(model, axis) for axis in axes)
    yield from even


def _first_residents(model: PassModel) -> Iterator[list[int]]:
    """Groups to make resident before the others are spread: none, or the largest ones, or those that are sent most often.

    Without the largest groups the slots are smaller. There are few large groups in a model but there may be many sizes, so
    not all numbers of groups are tried.
    """
    yield []
    if not model.has_residents:
        return
    able = [index for index in model.used if model.groups[index].may_reside]
    for ranks in (model.num_sent, model.sizes):
        ranked = sorted(able, key=lambda index: (-ranks[index], -model.sizes[index]))
        steps = [n for n in range(1, len(ranked)) if ranks[ranked[n]] < ranks[ranked[n - 1]]]
        num_fitting = bisect_right(
            steps, model.device_budget, key=lambda n: model.footprint(_with_residents(model, ranked[:n])).device_bytes
        )
        stride = -(-num_fitting // _MAX_THRESHOLDS) or 1
        yield from (ranked[:n] for n in steps[:num_fitting][::-1][::stride])


def _with_residents(model: PassModel, residents: Sequence[int]) -> list[Placement]:
    placements = model.lowest()
    for index in residents:
        placements[index] = Placement.DEVICE
    return placements


def _fill_evenly(model: PassModel, residents: Sequence[int], axis: _Axis, *, files_first: bool) -> list[Placement]:
    """Spread groups over the tiers, so that bytes are sent and read at an even rate along `axis`.

    Args:
        residents: groups that are resident in any case.
        files_first: whether the groups that stay on the drive are spread over all groups, and residents over the rest.
            False: residents are spread over all groups.
    """
    placements = _with_residents(model, residents)
    room = max(0, _room(model, placements)) if model.has_residents else 0
    rest = [index for index in model.used if placements[index] is not Placement.DEVICE]
    if files_first:
        in_file = [index for index in rest if model.groups[index].is_in_file]
        kept = _spread(model, in_file, room + model.ram_room, axis, model.sent)
        rest = [index for index in rest if index in kept or not model.groups[index].is_in_file]
    able = [index for index in rest if Placement.DEVICE in model.choices(index)]
    for index in _spread(model, able, room, axis, model.sizes):
        placements[index] = Placement.DEVICE
    in_file = [index for index in rest if placements[index] is Placement.FILE]
    for index in _spread(model, in_file, model.ram_room, axis, model.sent):
        placements[index] = Placement.RAM
    _top_up(model, placements)
    return placements


def _fill_with_all(model: PassModel, placement: Placement) -> list[Placement]:
    """Every group that may stay on the device stays there. Then no packed bytes are on their way, and they take no room."""
    placements = model.lowest()
    for index in model.used:
        choices = model.choices(index)
        placements[index] = placement if placement in choices else choices[0]
    room = model.device_budget - model.footprint(placements).device_bytes
    if room > 0:
        _top_up_device(model, placements, room)
    return placements


def _fill_with_packed(model: PassModel, axis: _Axis) -> list[Placement]:
    """Groups stay on the device packed, spread evenly, as far as they fit; those for which room is left stay as they are."""
    placements = model.lowest()
    room = max(0, _room(model, placements))
    ram_room = model.ram_room - model.footprint(placements).ram_bytes
    able = [index for index in model.used if Placement.PACKED in model.choices(index)]
    in_file = [index for index in able if placements[index] is Placement.FILE]
    if ram_room < sum(model.sent[index] for index in in_file):  # what stays there takes RAM too
        left = set(in_file) - _spread(model, in_file, ram_room, axis, model.sent)
        able = [index for index in able if index not in left]
    for index in _spread(model, able, room, axis, model.sent):
        placements[index] = Placement.PACKED
    ram_room = model.ram_room - model.footprint(placements).ram_bytes
    in_file = [index for index in model.used if placements[index] is Placement.FILE]
    for index in _spread(model, in_file, ram_room, axis, model.sent):
        placements[index] = Placement.RAM
    _top_up(model, placements)
    return placements


def _spread(model: PassModel, indices: Sequence[int], room: float, axis: _Axis, sizes: Sequence[int]) -> set[int]:
    """Which of `indices` to take into `room` bytes, so that those left out come at an even rate along `axis`.

    Args:
        sizes: What each group takes there.
    """
    lengths = [model.groups[i].compute_seconds if axis is _Axis.TIME else model.sizes[i] for i in indices]
    total = sum(lengths) or 1
    left_out_in_all = max(0, sum(sizes[i] for i in indices) - room)
    taken, left_out, progress = set(), 0, 0.0
    for index, length in zip(indices, lengths, strict=True):
        progress += length / total
        if sizes[index] <= room and left_out + sizes[index] / 2 > left_out_in_all * progress:
            taken.add(index)
            room -= sizes[index]
        else:
            left_out += sizes[index]
    return taken


def _fill_largest_first(model: PassModel) -> list[Placement]:
    """Large groups on the highest tier that has room for them, and small ones into the holes that are left."""
    by_size = _by_size(model, model.used)
    placements = model.lowest()
    room = _room(model, placements)
    for index in by_size:
        if Placement.DEVICE in model.choices(index) and model.sizes[index] <= room:
            placements[index] = Placement.DEVICE
            room -= model.sizes[index]
    ram_room = model.ram_room
    for index in by_size:
        if placements[index] is Placement.FILE and model.sent[index] <= ram_room:
            placements[index] = Placement.RAM
            ram_room -= model.sent[index]
    _top_up(model, placements)
    return placements


def _top_up(model: PassModel, placements: list[Placement]) -> None:
    """Fill the room that is left in the budgets: groups from files first, and large groups first."""
    if model.has_residents:
        _top_up_device(model, placements, _room(model, placements))
    room = model.ram_room - model.footprint(placements).ram_bytes
    for index in _by_size(model, [index for index in model.used if placements[index] is Placement.FILE]):
        if model.sent[index] <= room:
            placements[index] = Placement.RAM
            room -= model.sent[index]


def _room(model: PassModel, placements: Sequence[Placement]) -> int:
    """The room that is left on the device, less that of berths, which the first packed group in RAM will take."""
    footprint = model.footprint(placements)
    berths, packed = 0, [size for size, is_packed in zip(model.sent, model.is_packed, strict=True) if is_packed]
    if packed and min(packed) <= model.ram_room:
        largest = max(packed)
        read = max((size for size, is_read in zip(model.read, model.reads_packed, strict=True) if is_read), default=0)
        berths = max(0, NUM_BERTHS * largest + read - footprint.berth_bytes)
    return model.device_budget - footprint.device_bytes - berths


def _top_up_device(model: PassModel, placements: list[Placement], room: int) -> None:
    able = [i for i in model.used if placements[i] is not Placement.DEVICE and model.groups[i].may_reside]
    # What is packed there comes last: it is not sent, and only takes time to unpack.
    ranks = {Placement.FILE: 0, Placement.RAM: 1, Placement.PACKED: 2}
    streamed = sorted(model.sizes[i] for i, placement in enumerate(placements) if placement is not Placement.DEVICE)
    for index in sorted(_by_size(model, able), key=lambda i: ranks[placements[i]]):
        # If the slots were made for this group, they get smaller: the next largest group takes its share of them.
        size, num_slots = model.sizes[index], model.problem.num_slots
        taken = min(size, streamed[-1 - num_slots]) if len(streamed) > num_slots else 0
        if placements[index] is Placement.PACKED:
            taken -= model.sent[index]
        if taken <= room:
            placements[index] = Placement.DEVICE
            room -= taken
            streamed.pop(bisect_left(streamed, size))


def _by_size(model: PassModel, indices: Sequence[int]) -> list[int]:
    return sorted(indices, key=lambda index: -model.sizes[index])


# ------------------------------------------------------------------------------------------------ exchanges


def _sent_before(model: PassModel, placements: list[Placement], position: int) -> list[int]:
    """The group used at `position`, and the last few sent before it: any of them may be the reason for a stall."""
    backwards = [model.used[position - back] for back in range(min(len(model.used), 8))]
    return [index for index in backwards if placements[index] is not Placement.DEVICE][:4]


def _givers(model: PassModel, placements: list[Placement], position: dict[int, int], index: int) -> Iterator[list[int]]:
    """Groups that could make room for `index` on a higher tier: near to it in the pass, or in size."""
    choices = model.choices(index)
    for placement in choices[: choices.index(placements[index])]:
        there = [other for other in model.used if placements[other] is placement]
        near = nsmallest(_NUM_GIVERS, there, key=lambda other: abs(position[other] - position[index]))
        alike = nsmallest(_NUM_GIVERS, there, key=lambda other: abs(model.sizes[other] - model.sizes[index]))
        for giver in dict.fromkeys((*near, *alike)):
            yield [giver, *(other for other in near if other != giver)][:_MAX_GIVERS]


def _exchange(model: PassModel, placements: list[Placement], index: int, givers: list[int]) -> list[Placement] | None:
    """`index` rests where the givers do, and as many givers as necessary go where it was, or to their files.

    Returns:
        The new placements. None: they do not fit, or are the same.
    """
    changed = list(placements)
    changed[index] = placements[givers[0]]
    for giver in givers:
        for placement in (placements[index], Placement.FILE):
            changed[giver] = placement if placement in model.choices(giver) else Placement.RAM
            if model.fits(model.footprint(changed)):
                _top_up(model, changed)
                return changed if changed != placements else None
    return None
