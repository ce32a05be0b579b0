"""A plan, for people to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from ..base.text import printable, table
from .budgets import describe_bytes
from .planner import Place, Plan, PlannedGroup

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """What a module's budgets come to. `print` shows it as a table, with one sentence about what bounds a forward."""

    model: str
    details: Plan | None
    """The plan itself: places, predicted times, stalls and bytes. None if no weights take turns."""
    device_has_memory: bool = True
    """Of its own. Else it is the CPU, which computes with what rests in RAM where it is: all that moves is what is read."""

    @property
    def step_seconds(self) -> float | None:
        """What a forward is predicted to take once all is in place."""
        return None if self.details is None else self.details.prediction.step_seconds

    @property
    def verdict(self) -> str:
        """What bounds a forward, how far from that limit it is, and what more memory would bring."""
        if self.details is None:
            return "There are no weights that take turns."
        if self.device_has_memory:
            return " ".join([self.details.verdict(), *_gains(self.details)])
        p = self.details.prediction
        if not p.drive_bytes:
            return "All weights are in RAM: a forward waits for none."
        gain = self.details.gain_from(device_bytes=_GIB)
        return (
            f"{p.bound.capitalize()} bounds a forward: reading takes {p.drive_seconds:.4g} s. One GiB more of RAM would save "
            f"{gain:.3g} s."
        )

    def __str__(self) -> str:
        return "\n".join(map(printable, self._lines()))

    def _lines(self) -> list[str]:
        plan = self.details
        if plan is None:
            return [f"{self.model}: {self.verdict}"]
        rows = _rows(plan, _WHERE if self.device_has_memory else _WHERE_ON_CPU)
        lines = table([("groups", "number", "size", "rests on"), *rows])
        resident = plan.device_bytes - plan.slot_bytes
        p = plan.prediction
        if not self.device_has_memory:
            in_ram = sum(g.num_bytes for g, place in _places(plan) if place is not Place.FILE)
            turns = f"what is read takes turns in {describe_bytes(plan.slot_bytes)} of it; " if p.drive_bytes else ""
            what = f"{self.model}: {describe_bytes(in_ram)} stay in RAM; {turns}each forward reads"
            return [*lines, f"{what} {describe_bytes(p.drive_bytes)} from the drive.", self.verdict]
        lines += [
            f"{self.model}: on the device {describe_bytes(resident)} stay and {describe_bytes(plan.slot_bytes)} are slots; "
            f"{describe_bytes(plan.ram_bytes)} of RAM; each forward sends {describe_bytes(p.h2d_bytes)} and reads "
            f"{describe_bytes(p.drive_bytes)} from the drive.",
            self.verdict,
        ]
        return lines


def _places(plan: Plan) -> list[tuple[PlannedGroup, Place]]:
    return [(g, place) for g, place in zip(plan.problem.groups, plan.places, strict=True) if g.num_bytes]


def _rows(plan: Plan, words: Mapping[Place, str]) -> Iterator[tuple[str, str, str, str]]:
    """Neighbours that rest on the same tier are one row."""
    for where, run in groupby(_places(plan), key=lambda each: words[each[1]]):
        mine = [group for group, _ in run]
        name = mine[0].name if len(mine) == 1 else f"{mine[0].name} to {mine[-1].name}"
        yield name, str(len(mine)), describe_bytes(sum(group.num_bytes for group in mine)), where


_WHERE_ON_CPU = {Place.DEVICE: "RAM", Place.RAM: "RAM", Place.FILE: "drive"}
_WHERE = {Place.DEVICE: "device", Place.RAM: "RAM", Place.FILE: "drive"}


def _gains(plan: Plan) -> Iterator[str]:
    budgets = plan.problem.budgets
    if budgets.device_bytes is not None:
        yield f"One GiB more of VRAM would save {plan.gain_from(device_bytes=_GIB):.3g} s."
    if budgets.ram_bytes is not None:
        yield f"One GiB more of RAM would save {plan.gain_from(ram_bytes=_GIB):.3g} s."
