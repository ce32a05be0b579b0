"""A plan, for people to read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from .budgets import describe_bytes
from .planner import Place, Plan

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """What a module's budgets come to. `print` shows it as a table, with one sentence about what bounds a forward."""

    model: str
    details: Plan | None
    """The plan itself: places, predicted times, stalls and bytes. None if no weights take turns."""

    @property
    def step_seconds(self) -> float | None:
        """What a forward is predicted to take once all is in place."""
        return None if self.details is None else self.details.prediction.step_seconds

    @property
    def verdict(self) -> str:
        """What bounds a forward, how far from that limit it is, and what more memory would bring."""
        if self.details is None:
            return "There are no weights that take turns."
        return " ".join([self.details.verdict(), *_gains(self.details)])

    def __str__(self) -> str:
        plan = self.details
        if plan is None:
            return f"{self.model}: {self.verdict}"
        rows = [("groups", "number", "size", "rests on"), *_rows(plan)]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip() for row in rows
        ]
        lines.insert(1, "-" * max(map(len, lines)))
        resident = plan.device_bytes - plan.slot_bytes
        p = plan.prediction
        lines += [
            f"{self.model}: on the device {describe_bytes(resident)} stay and {describe_bytes(plan.slot_bytes)} are slots; "
            f"{describe_bytes(plan.ram_bytes)} of RAM; each forward sends {describe_bytes(p.h2d_bytes)} and reads "
            f"{describe_bytes(p.drive_bytes)} from the drive.",
            self.verdict,
        ]
        return "\n".join(lines)


def _rows(plan: Plan) -> Iterator[tuple[str, str, str, str]]:
    """Neighbours that rest on the same tier are one row."""
    groups = [(g, place) for g, place in zip(plan.problem.groups, plan.places, strict=True) if g.num_bytes]
    for place, run in groupby(groups, key=lambda each: each[1]):
        mine = [group for group, _ in run]
        name = mine[0].name if len(mine) == 1 else f"{mine[0].name} to {mine[-1].name}"
        yield name, str(len(mine)), describe_bytes(sum(group.num_bytes for group in mine)), _WHERE[place]


_WHERE = {Place.DEVICE: "device", Place.RAM: "RAM", Place.FILE: "drive"}


def _gains(plan: Plan) -> Iterator[str]:
    budgets = plan.problem.budgets
    if budgets.device_bytes is not None:
        yield f"One GiB more of VRAM would save {plan.gain_from(device_bytes=_GIB):.3g} s."
    if budgets.ram_bytes is not None:
        yield f"One GiB more of RAM would save {plan.gain_from(ram_bytes=_GIB):.3g} s."
