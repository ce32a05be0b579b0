"""The search for the placement with the fastest pass within the budgets.

RAM and the device are filled in a few *orders*, where a group without room is passed over. Where there are few placements, all
of them are tried. A placement is simulated if it fits, and if its limit doesn't say that it is slower than another one.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import product

from .pass_model import PassModel
from .placement import Placement, smallest_ram_bytes

_AS_FAST = 1 - 1e-9
"""A placement takes the place of one found before if a pass takes less than this share of its time: rounding is no gain."""
_FEW_PLACEMENTS = 300
"""So many are all tried: those of 8 groups that stay or do not, or of 5 that may stay compressed too."""
_NUM_LEFT, _TAILS = (1, 2, 3, 4, 6), (4, 2)
"""So many groups are left to the last of an order, out of the first 1/4 and 1/2 of it."""
_NUM_LARGEST = 4
"""If groups differ, each of so many of the largest comes first in an order to RAM."""
_MANY_USES = 150
"""In a longer pass groups are small beside budgets, and only the first orders are tried."""
_GOLDEN = (5**0.5 - 1) / 2
_FIRST = 0.25
"""Where in its round the golden section begins: of 0, 0.25, 0.5 and 0.75 this one spreads FLUX best."""

Rests = tuple[Placement, ...]


def find_fastest(model: PassModel) -> tuple[Rests, Sequence[Placement]]:
    """Where groups are stored (`Rests`), and the placements, in the fastest pass within the budgets."""
    best: tuple[Rests, Sequence[Placement]] = (), ()
    best_seconds = math.inf

    def is_faster(rests: Rests, placements: Sequence[Placement]) -> bool:
        nonlocal best, best_seconds
        footprint, enough = model.footprint(placements), best_seconds * _AS_FAST
        if footprint.device_bytes <= model.device_budget and model.limit_seconds(footprint) < enough:
            seconds = model.run(placements, footprint)
            if seconds < enough:
                best, best_seconds = (rests, placements), seconds
        return best_seconds < enough

    for rests in _ways_to_rest(model):
        for placements in _ways_to_stay(model, rests):
            is_faster(rests, placements)
    assert best_seconds < math.inf  # the smallest budgets fit some rests
    if model.has_compressed and model.problem.rests is None and model.problem.ram_budget is not None:
        # What is read plain is not decompressed: that can save more than RAM does.
        for index in reversed(_spread(model)[-_MANY_USES:]):
            if best[1][index] is Placement.RAM and model.groups[index].is_in_file:
                fewer = (tuple(Placement.FILE if i == index else at for i, at in enumerate(each)) for each in best)
                if not is_faster(*fewer):
                    break
    return best


def _spread(model: PassModel) -> list[int]:
    """The groups that are used, so that any that follow one another in this order lie spread evenly over the pass.

    The n-th group of the pass has the place of (n * golden section) modulo 1. No ratio is further from fractions, so neither
    the first of these groups, nor the last, nor those in between come in heaps, however many they are.
    """
    used = model.used
    return [used[n] for n in sorted(range(len(used)), key=lambda n: (n * _GOLDEN + _FIRST) % 1)]


def _ways_to_rest(model: PassModel) -> Iterator[Rests]:
    """Where groups may rest within the RAM budget."""
    problem = model.problem
    everything = tuple[Placement, ...](Placement.RAM for _ in model.groups)
    if problem.rests is not None or problem.ram_budget is None:
        yield problem.rests or everything
        return
    able = [i for i in dict.fromkeys([*_spread(model), *range(len(model.groups))]) if model.groups[i].is_in_file]
    orders = [sorted(able, key=lambda i: -model.num_sent[i])]
    if 2 * len(set(model.sizes)) > len(model.sizes) <= _MANY_USES:  # then a group without room may waste much of it
        by_size = sorted(able, key=lambda i: (not model.num_sent[i], -model.sent[i]))
        orders += [by_size[first:] + by_size[:first] for first in range(_NUM_LARGEST)]
    for order in orders:
        room, rests = problem.ram_budget - smallest_ram_bytes(problem), list(everything)
        for index in order:
            if model.sent[index] <= room:
                room -= model.sent[index]
            else:
                rests[index] = Placement.FILE
        yield tuple(rests)


def _ways_to_stay(model: PassModel, rests: Rests) -> Iterator[Sequence[Placement]]:
    """Placements of groups that are stored at `rests`. Of those that are equally fast, one that sends less comes first."""
    if not model.has_residents:
        yield rests
        return
    choices = [model.choices(index, rests[index]) for index in model.used]
    if math.prod(map(len, choices)) <= _FEW_PLACEMENTS:
        yield from _all_placements(model, rests, choices)
        return
    able = [index for index in _spread(model)[::-1] if Placement.DEVICE in model.choices(index, rests[index])]
    compressed = {index for index in able if Placement.COMPRESSED in model.choices(index, rests[index])}
    all_compressed = [Placement.COMPRESSED if index in compressed else at for index, at in enumerate(rests)]
    for number, order in enumerate(_orders(model, able, rests)):
        as_they_are = [(index, Placement.DEVICE) for index in order]
        # Compressed first, then as they are; the second needs no space for compressed bytes on their way.
        if compressed and number < 2:
            as_compressed = [
                (index, Placement.COMPRESSED if index in compressed else Placement.DEVICE) for index in order
            ]
            yield _filled(model, rests, as_compressed + as_they_are)
            yield _filled(model, all_compressed, as_they_are)
        yield _filled(model, rests, as_they_are)
    if len(model.uses) <= _MANY_USES:
        for kept in [Placement.COMPRESSED, Placement.DEVICE] if compressed else [Placement.DEVICE]:
            yield from _filled_evenly(model, rests, sorted(able, key=model.used.index), kept)
    yield rests  # a resident can disturb how evenly the others come


def _all_placements(
    model: PassModel, rests: Rests, choices: Sequence[Sequence[Placement]]
) -> Iterator[Sequence[Placement]]:
    """Every placement, those with the lowest limits first: most others need no simulation then."""
    everything = []
    for chosen in product(*choices):
        placements = list(rests)
        for index, placement in zip(model.used, chosen, strict=True):
            placements[index] = placement
        footprint = model.footprint(placements)
        everything.append((model.limit_seconds(footprint), footprint.h2d_bytes, placements))
    return (placements for *_, placements in sorted(everything, key=lambda each: each[:2]))


def _orders(model: PassModel, able: list[int], rests: Rests) -> Iterator[list[int]]:
    """What is read comes first. Else what is left to send is spread evenly, or slots are small."""
    first = sorted(able, key=lambda index: rests[index] is not Placement.FILE)
    yield first
    yield sorted(able, key=lambda i: (rests[i] is not Placement.FILE, -model.num_sent[i], -model.sizes[i]))
    if len(model.uses) > _MANY_USES:
        return
    # Where few groups are left to be read, it matters more than elsewhere how evenly they come.
    for tail, num_left in product(_TAILS, _NUM_LEFT):
        among = sorted(first[: len(first) // tail], key=model.used.index)
        left = {among[(4 * n + 1) * len(among) // (4 * num_left)] for n in range(num_left)} if among else set()
        yield sorted(first, key=lambda index: index in left)


def _filled(
    model: PassModel, start: Sequence[Placement], steps: Sequence[tuple[int, Placement]]
) -> Sequence[Placement]:
    """The placements `start`, with the device filled by these steps."""
    sizes, num_slots = model.sizes, model.problem.num_slots
    room = model.device_budget - model.footprint(start).device_bytes
    placements, streamed = list(start), sorted(sizes)
    for index, at in steps:
        if placements[index] is Placement.DEVICE:
            continue
        if at is Placement.COMPRESSED:
            taken = model.sent[index]
        else:
            # If the slots were made for this group, they get smaller: the next largest group takes its share of them.
            taken = min(sizes[index], streamed[-1 - num_slots]) if len(streamed) > num_slots else 0
            if placements[index] is Placement.COMPRESSED:
                taken -= model.sent[index]
        if taken <= room:
            room -= taken
            placements[index] = at
            if at is Placement.DEVICE:
                streamed.pop(bisect_left(streamed, sizes[index]))
    return placements


def _filled_evenly(model: PassModel, rests: Rests, able: list[int], kept: Placement) -> Iterator[Sequence[Placement]]:
    """Placements that leave to the link what comes evenly along compute: it counts where these take equally long.

    Args:
        kept: as what the others stay on the device, where that is possible.
    """
    placed = list(rests)
    for index in able:
        placed[index] = kept if kept in model.choices(index, rests[index]) else Placement.DEVICE
    sizes = [
        size if at is Placement.DEVICE else sent for size, sent, at in zip(model.sizes, model.sent, placed, strict=True)
    ]
    seconds = [group.compute_seconds for group in model.groups] if model.compute_seconds else sizes
    all_seconds, all_bytes = sum(seconds[index] for index in able), sum(sizes[index] for index in able)
    num_shares = 2 * len(able)
    # With a smaller share left out, more would stay than the device has room for.
    for share in range(max(0, num_shares * (all_bytes - model.device_budget) // max(1, all_bytes)), num_shares):
        placements, left, now = list(placed), 0, 0.0
        for index in able:
            now += seconds[index]
            if (left + sizes[index] / 2) * all_seconds * num_shares <= all_bytes * share * now:
                left += sizes[index]
                placements[index] = rests[index]
        yield placements
