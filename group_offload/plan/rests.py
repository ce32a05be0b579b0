"""Where groups rest, RAM or FILE: decided by the RAM budget alone, so it stays as it is whatever the device has room for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from .pass_model import PassModel
from .placement import Budgets, Placement, Problem, ram_bytes_of, smallest_ram_bytes

_AS_FAST = 1.01
"""A later way to fill RAM has to be faster than an earlier one by this: the first ones spread best for any device budget."""
_STARTS = (0.5, 1.0)
"""Where along the pass the first group is left in a file: see `spread`."""
_MAX_EFFORT = 5_000
"""Once so many uses were simulated, no further way is tried."""


def share_out_ram(problem: Problem) -> tuple[Placement, ...]:
    """Where each group rests: in RAM, as far as the budget goes.

    What is left in files is spread over the pass in a few ways, of which the fastest counts, with nothing on the device. Groups
    that the pass does not use get RAM last.
    """
    ram = problem.budgets.ram_bytes
    all_in_ram = (Placement.RAM,) * len(problem.groups)
    if ram is None or ram_bytes_of(problem, all_in_ram) <= ram:
        return all_in_ram
    model = PassModel(replace(problem, rests=None, budgets=Budgets(device_bytes=None, ram_bytes=ram)))
    fastest, best, effort = math.inf, None, 0
    for rests in _ways_to_fill(model, ram - smallest_ram_bytes(problem)):
        run = model.run(rests, model.footprint(rests))
        if best is None or run.step_seconds * _AS_FAST < fastest:
            fastest, best = run.step_seconds, rests
        effort += run.num_uses
        if effort > _MAX_EFFORT:
            break
    assert best is not None
    return best


def _ways_to_fill(model: PassModel, room: int) -> Iterator[tuple[Placement, ...]]:
    """Rests that fill `room` bytes of RAM, each in another way."""
    used = [index for index in model.used if model.groups[index].is_in_file]
    unused = [index for index, group in enumerate(model.groups) if group.is_in_file and not model.num_sent[index]]
    for weights, start in product(ways_to_spread(model), _STARTS):
        if weights is None and start != _STARTS[0]:
            continue
        in_ram = spread(used, room, model.sent, weights, start)
        for others in (used, unused):
            left = room - sum(model.sent[index] for index in in_ram)
            in_ram |= spread([index for index in others if index not in in_ram], left, model.sent, None)
        yield tuple(
            Placement.FILE if group.is_in_file and index not in in_ram else Placement.RAM
            for index, group in enumerate(model.groups)
        )


def ways_to_spread(model: PassModel) -> list[Sequence[float] | None]:
    """What groups are spread evenly over: compute time, or bytes. None: they are not, and the largest are taken first."""
    seconds = [group.compute_seconds for group in model.groups]
    return [seconds, model.sizes, None] if model.compute_seconds else [model.sizes, None]


def spread(
    indices: Sequence[int], room: float, sizes: Sequence[int], weights: Sequence[float] | None, start: float = 0.5
) -> set[int]:
    """Which of `indices` to take into `room` bytes, so that those left out come at an even rate along `weights`.

    Args:
        sizes: What each group takes there.
        weights: None: the largest groups are taken.
        start: the larger, the later comes the first group that is left out.
    """
    taken: set[int] = set()
    if weights is None:
        for index in sorted(indices, key=lambda i: -sizes[i]):
            if sizes[index] <= room:
                taken.add(index)
                room -= sizes[index]
        return taken
    total = sum(weights[i] for i in indices) or 1
    left_out_in_all = max(0, sum(sizes[i] for i in indices) - room)
    left_out, progress = 0, 0.0
    for index in indices:
        progress += weights[index] / total
        if sizes[index] <= room and left_out + sizes[index] * start > left_out_in_all * progress:
            taken.add(index)
            room -= sizes[index]
        else:
            left_out += sizes[index]
    return taken
