"""Plans: where each group of weights is stored, and how fast a pass is predicted to be.

`make_plan(problem)` decides where each group is stored, within the RAM budget, and of which groups a copy stays on the
device, within the device budget. It takes the fastest placement that the search finds, by [Note: The model of a pass].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..base.text import describe_bytes, describe_seconds
from .pass_model import PassModel, Prediction
from .placement import Placement, PlannedGroup, Problem, check_budgets, num_buffers, ram_bytes_of, smallest_device_bytes
from .search import find_fastest

_SOME = 0.001
"""What saves a smaller share of a pass doesn't help."""
_STALLS = 1.01
"""A plan that takes longer than this share of its limit is tried with more compressed buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where each group rests, the memory that this takes, and how fast it is predicted to be."""

    problem: Problem
    """With the rests that the plan was made for."""
    placements: tuple[Placement, ...]
    """Where each group is between its uses, in the order of `problem.groups`."""
    slot_bytes: int
    """Device memory that groups take turns in, and that compressed bytes land in."""
    device_bytes: int
    """Resident groups and slots."""
    ram_bytes: int
    """Groups that are stored in RAM, also those of which a copy stays on the device, and groups that no file holds."""
    prediction: Prediction
    measured_seconds: float | None = None
    """The time that the last forwards took with this plan; None if none was timed."""

    @property
    def rests(self) -> tuple[Placement, ...]:
        """Where each group rests, RAM or FILE, whether a copy of it stays on the device or not."""
        assert self.problem.rests is not None  # the plan was made for them
        return self.problem.rests

    @property
    def step_seconds(self) -> float:
        """The time of a pass: as measured, else as predicted."""
        return self.prediction.step_seconds if self.measured_seconds is None else self.measured_seconds

    def verdict(self) -> str:
        """One sentence: what bounds a pass, and how long each part of the machine is busy."""
        p = self.prediction
        if not p.step_seconds:
            return "No transfers needed. Compute time hasn't been measured yet."
        told = "predicted" if self.measured_seconds is None else "measured"
        busy = [f"compute {describe_seconds(p.compute_seconds) if p.compute_seconds else 'unknown'}"]
        busy += [f"PCIe {describe_seconds(p.h2d_seconds)}", f"disk {describe_seconds(p.disk_seconds)}"]
        busy += [f"decompression {describe_seconds(p.decompress_seconds)}"] if p.decompress_bytes else []
        return f"Bottleneck: {p.bound}, {told} {describe_seconds(self.step_seconds)} a forward ({', '.join(busy)})."

    def sentences(self) -> list[str]:
        """The verdict, and what more of each memory would save: of one without a budget only if that is something."""
        problem, more, step = self.problem, self.more_bytes, self.prediction.step_seconds
        found = [self.verdict()]
        if step:
            for memory, budget, gain in (
                ("VRAM", problem.device_budget, self.gain_from(device_bytes=more)),
                ("RAM", problem.ram_budget, self.gain_from(ram_bytes=more)),
            ):
                if budget is not None or gain > step * _SOME:
                    found.append(self.would_save(memory, gain))
        return found

    def would_save(self, memory: str, gain: float) -> str:
        """A sentence about `more_bytes` of a memory, which gain so many seconds."""
        step, size = self.prediction.step_seconds, describe_bytes(self.more_bytes, round_up=True)
        if gain <= step * _SOME:
            return f"{size} more {memory} wouldn't help."
        saves = f"{describe_seconds(gain)} of {describe_seconds(step)} a forward ({gain / step:.0%})"
        return f"{size} more {memory} would save {saves}."

    @property
    def more_bytes(self) -> int:
        """The memory that gains are told for: 1 GiB, or one more group where the largest takes more than that."""
        return max([1 << 30, *(group.num_bytes for group in self.problem.groups)])

    def gain_from(self, *, device_bytes: int = 0, ram_bytes: int = 0) -> float:
        """Seconds by which a pass would be faster if the budgets were larger by so much.

        If there is no device budget, the bytes are added to what this plan takes on the device. If there is no RAM budget,
        they are added to what is stored in RAM; where that is all groups, they gain nothing.
        """
        device, ram = self.problem.device_budget, self.problem.ram_budget
        if device_bytes:
            device = (self.device_bytes if device is None else device) + device_bytes
        if ram_bytes:
            ram = (ram_bytes_of(self.problem, self.rests) if ram is None else ram) + ram_bytes
        rests = None if ram_bytes else self.rests
        more = replace(self.problem, device_budget=device, ram_budget=ram, rests=rests)
        if device is not None and rests is None:  # other rests may need a little more for compressed bytes to land in
            more = replace(more, device_budget=max(device, smallest_device_bytes(more)))
        return max(0.0, self.prediction.step_seconds - make_plan(more).prediction.step_seconds)


def make_plan(problem: Problem) -> Plan:
    """The fastest placement within the budgets that the search finds, with the rests of the problem if these are decided.

    Where there are few placements (8 groups that stay or do not, 5 that may stay compressed too), it is the best by the model.

    Raises:
        ConfigError: a budget that no placement fits. The message names the smallest budget that works.
    """
    check_budgets(problem)
    found: list[Plan] = []
    for num in num_buffers(problem):
        if not found or found[0].prediction.step_seconds > found[0].prediction.limit_seconds * _STALLS:
            model = PassModel(replace(problem, num_compressed_buffers=num))
            found.append(_plan_of(model, *find_fastest(model)))
    return min(found, key=lambda plan: plan.prediction.step_seconds)


def kept_plan(problem: Problem, before: Plan) -> Plan | None:
    """The placements of `before`, and its rests, for a problem whose groups have other sizes by now.

    Returns:
        None: they do not fit it any more, or its rests are decided in another way.
    """
    if not all(map(PlannedGroup.may_be, problem.groups, before.placements)):
        return None
    budget, device = problem.ram_budget, problem.device_budget
    if problem.rests is None and budget is not None and ram_bytes_of(problem, before.rests) > budget:
        return None
    if problem.rests not in (None, before.rests):
        return None
    problem = replace(problem, num_compressed_buffers=before.problem.num_compressed_buffers)
    kept = _plan_of(PassModel(problem), before.rests, before.placements)
    if device is not None and kept.device_bytes > device:
        return None
    return replace(kept, measured_seconds=before.measured_seconds)


def _plan_of(model: PassModel, rests: tuple[Placement, ...], placements: Sequence[Placement]) -> Plan:
    footprint = model.footprint(placements)
    return Plan(
        problem=replace(model.problem, rests=rests),
        placements=tuple(placements),
        slot_bytes=footprint.slot_bytes + footprint.compressed_buffer_bytes,
        device_bytes=footprint.device_bytes,
        ram_bytes=ram_bytes_of(model.problem, rests),
        prediction=model.predict(placements, footprint),
    )
