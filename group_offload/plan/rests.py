"""Where groups rest, RAM or FILE: decided by the RAM budget alone, so it stays as it is whatever the device has room for."""

from __future__ import annotations

from .pass_model import PassModel
from .placement import Placement, Problem, ram_bytes_of, smallest_ram_bytes

_GOLDEN = (5**0.5 - 1) / 2
_FIRST = 0.25
"""Where in its round the golden section begins: of 0, 0.25, 0.5 and 0.75 this one spreads FLUX best."""


def spread_order(model: PassModel) -> list[int]:
    """The groups that are used, so that any that follow one another in this order lie spread evenly over the pass.

    The n-th group of the pass has the place of (n * golden section) modulo 1. No ratio is further from fractions, so neither
    the first of these groups, nor the last, nor those in between come in heaps, however many they are.
    """
    return [model.used[n] for n in sorted(range(len(model.used)), key=lambda n: (n * _GOLDEN + _FIRST) % 1)]


def share_out_ram(problem: Problem) -> tuple[Placement, ...]:
    """Where each group rests: in RAM, as far as the budget goes.

    Groups get RAM in one order, whatever the budget: those with most uses first, else that of `spread_order`, and those that
    the pass does not use last. The first one without room ends it, so what rests in RAM with less of it does so with more too.
    Where groups all differ (a UNet) that would waste too much: RAM is filled with the largest that fit.
    """
    ram = problem.budgets.ram_bytes
    all_in_ram = (Placement.RAM,) * len(problem.groups)
    if ram is None or ram_bytes_of(problem, all_in_ram) <= ram:
        return all_in_ram
    model = PassModel(problem)
    rests = [Placement.FILE if group.is_in_file else Placement.RAM for group in problem.groups]
    room = ram - smallest_ram_bytes(problem)
    all_differ = 2 * len(set(model.sizes)) > len(model.sizes)
    order = dict.fromkeys([*spread_order(model), *range(len(rests))])
    for index in sorted(order, key=lambda index: (-model.num_sent[index], -model.sent[index] if all_differ else 0)):
        if rests[index] is Placement.FILE and model.sent[index] <= room:
            rests[index] = Placement.RAM
            room -= model.sent[index]
        elif rests[index] is Placement.FILE and not all_differ:
            break
    return tuple(rests)
