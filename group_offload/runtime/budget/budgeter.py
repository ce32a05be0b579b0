"""The budgeter plans where groups rest, and which of them stay on the device.

[Note: How a plan comes to be]
When a module is offloaded, the plan for all memory that it may have decides which groups rest in RAM, and which are read from
the drive. That stays so. What stays on the device is a copy, so a pass never locks, unlocks or packs anything because of it. No
group stays yet: what passes need besides weights is not known. The first pass of a kind tells (see [Note: What a pass needs]).
From the second one on as many groups stay on the device as fit beside that. Passes also measure how long each group computes.
The plan is made again with these times, and when the device has other room, and carried out if it is 3% faster. Compute is
measured again now and then: a device's speed varies, and other inputs take another time.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from statistics import median_low

from ...base.ram import available_ram, locked, ram_in_use
from ...base.recent import MOST, Recent
from ...base.tuning import tuning
from ...errors import ConfigError
from ...plan.budgets import Auto, Budget, auto_ram, describe_bytes
from ...plan.placement import (
    Budgets,
    Placement,
    PlannedGroup,
    Problem,
    Speeds,
    ram_bytes_of,
    smallest_device_bytes,
    smallest_ram_bytes,
)
from ...plan.planner import Plan, kept_plan, make_plan
from ...stores.files import FileBlob
from ..groups.group import Group
from ..measure.drive import DriveMeter
from ..packer import Packer
from .need import Kind

MIN_GAIN = 0.03
"""A plan that is made again is carried out if it is faster by this share."""
NUM_TIMED = 3
"""The number of first passes of a kind whose compute is measured. The median of as many last ones counts."""
TIMED_EVERY = 32
"""Later on one pass in this many is measured, and more often at first: the 4th, 8th, 16th, 32nd, 64th, 96th."""
NUM_TIMED_KINDS = 8
"""The number of kinds whose times are remembered."""
_STEPS = 64
"""All weights are this many steps of room on the device: a change below one step makes no new plan."""


_budgeters: weakref.WeakSet[Budgeter] = weakref.WeakSet()


class Budgeter:
    """Keeps a module within its budgets. An engine owns it, and uses it under the engine's lock."""

    def __init__(self, speeds: Callable[[], Speeds], packer: Packer, num_slots: int) -> None:
        """
        Args:
            speeds: Function that returns the speeds. It is called once, when they are first needed.
        """
        _budgeters.add(self)
        self._speeds = cache(speeds)
        self._packer = packer
        self._num_slots = num_slots
        self.drive = DriveMeter()
        """The drive's speed, measured in passes."""
        self._num_passes: Recent[Kind, int] = Recent()
        """How many passes each kind had, of the last kinds."""
        self._timed: Recent[Kind, deque[dict[str, float]]] = Recent(NUM_TIMED_KINDS)
        """Seconds by group in the last timed passes of each kind. The kind that was timed last comes last."""
        self._passes: deque[tuple[Kind, float]] = deque(maxlen=NUM_TIMED)
        """The last timed forwards since weights rest where they do now, and the seconds that each took."""
        self.clear()

    def clear(self) -> None:
        """Forget the groups, and what passes have taught of them."""
        self.plan: Plan | None = None
        self.groups: tuple[Group, ...] = ()
        """The groups that the plan places."""
        self._order: tuple[Group, ...] = ()
        self._rests: tuple[Placement, ...] | None = None
        """Where each group rests: in RAM, or in a file. It stays so until the module is cut again."""
        self.ram_bytes: int | None = None
        """RAM for weights that are in no file, and for page-locked files."""
        self.promised_bytes = 0
        """The part of the process's RAM budget that is promised to the module's weights in files."""
        self._num_passes.clear()
        self._timed.clear()
        self._passes.clear()
        self._seconds: dict[str, float] = {}
        """The seconds that each group computes in a pass, by its id, as far as they are known."""
        self._pass_seconds = 0.0
        """The sum of these when it last differed by much from the one before: plans are made for it."""
        self._for: tuple[int, float] | None = None
        """The room on the device and the `_pass_seconds` that the plan was made for."""
        self._asked_to_pack: float | None = None
        """The `_pass_seconds` at which `gain_from_packing` was asked last."""

    # ---------------------------------------------------------------- plans

    def begin(
        self,
        groups: Sequence[Group],
        order: Sequence[Group],
        ram_bytes: int | None,
        promised_bytes: int,
        device_bytes: int | None,
    ) -> None:
        """Decide where groups rest, once the module was cut into groups, before any measurement. None stays on the device.

        Args:
            ram_bytes: RAM for weights; None for no limit.
            device_bytes: Device memory that groups may have at most, later; None for no group that stays there.
        """
        self.clear()
        self.groups = tuple(g for g in groups if g.num_bytes and not g.height and not g.is_in_place)
        self._order, self.ram_bytes, self.promised_bytes = tuple(order), ram_bytes, promised_bytes
        if self.groups:
            self._rests = make_plan(self._problem(device_bytes)).rests
            self.plan = make_plan(self._problem(None))

    def describe(self, groups: Sequence[Group], order: Sequence[Group]) -> None:
        """Describe in a plan where groups rest: there is no budget."""
        self.groups, self._order = (
            tuple(group for group in groups if group.num_bytes and not group.height),
            tuple(order),
        )
        self._rests = tuple(Placement.FILE if _is_read(group) else Placement.RAM for group in self.groups)
        self.plan = make_plan(self._problem(None)) if self.groups else None

    @property
    def least_bytes(self) -> int:
        """The device memory that groups take turns in, with none that stays."""
        return smallest_device_bytes(self._problem(None)) if self.groups else 0

    @property
    def resident_bytes(self) -> int:
        """What stays on the device by the plan."""
        return 0 if self.plan is None else self.plan.device_bytes - self.plan.slot_bytes

    def refresh(self) -> None:
        """Predict the times of the plan again, with the speeds of compute and of the drive as they are known by now."""
        if self.plan is not None:
            self.plan = kept_plan(self._now(self.plan), self.plan) or self.plan  # the next pass makes another

    def before_pass(self, order: Sequence[Group], room: int) -> bool:
        """A pass begins, and groups have `room` bytes on the device, slots included.

        Returns:
            Whether there is another plan: the one before does not fit, or is slower.
        """
        self._order = tuple(order) or self._order
        before = self.plan
        if before is None:
            return False
        step = max(1, sum(group.num_bytes for group in self.groups) // _STEPS)
        asked = room // step * step, self._pass_seconds
        # Packed files may be lost: then what was to stay on the device packed cannot.
        is_possible = all(map(self._packer.packed_bytes, self.at(Placement.PACKED)))
        fits = is_possible and (before.device_bytes <= room or before.device_bytes <= self.least_bytes)
        if asked == self._for and fits:
            return False
        problem, is_kept, self._for = self._problem(room), fits and self._for is not None, asked
        self.plan = _plan_if_better(problem, before) if is_kept else make_plan(problem)
        if self.plan.placements == before.placements:
            return False
        self._passes.clear()
        return True

    def settle(self, missing: int) -> bool:
        """Groups were packed: count their packed bytes as they turned out.

        Args:
            missing: Bytes of the plan's RAM that could not be had.

        Returns:
            Whether groups are to rest elsewhere now.
        """
        before, plan = self._rests, self.plan
        if before is None or plan is None or self.ram_bytes is None:
            return False
        self.ram_bytes = max(self.ram_bytes - missing, smallest_ram_bytes(self._problem(None)))
        now, rests = self._now(plan), list(before)
        # What could not be packed leaves RAM first. Other groups in its place would have to be packed anew.
        for index in sorted(range(len(rests)), key=lambda index: self.groups[index].packed_bytes > 0):
            if ram_bytes_of(now, rests) <= self.ram_bytes:
                break
            if self.groups[index].is_in_file:
                rests[index] = Placement.FILE
        self._rests = tuple(rests)
        if self._rests == before:
            self.plan = _as_of(now, plan)
            return False
        self.plan, self._for = make_plan(replace(now, rests=self._rests)), None
        return True

    def _now(self, plan: Plan) -> Problem:
        """The problem of a plan, as of now."""
        return self._problem(plan.problem.budgets.device_bytes)

    def _problem(self, room: int | None) -> Problem:
        """
        Args:
            room: Device memory for groups; None for no limit. If it is too little, the least that works.
        """
        index = {group: number for number, group in enumerate(self.groups)}
        planned = [
            PlannedGroup(
                name=group.group_id,
                num_bytes=group.num_bytes,
                compute_seconds=self._seconds.get(group.group_id, 0.0),
                is_in_file=group.is_in_file,
                may_reside=group.detects_edits,
                packed_bytes=self._packer.packed_bytes(group),
                strip_bytes=max(group.largest_strip(is_read=False), group.largest_strip(is_read=True)),
                reads_packed=self._packer.reads_packed,
            )
            for group in self.groups
        ]
        speeds, drive = self._speeds(), self.drive.bytes_per_s
        problem = Problem(
            groups=tuple(planned),
            order=tuple(index[group] for group in self._order if group in index) or tuple(range(len(planned))),
            speeds=speeds if drive is None else replace(speeds, drive=drive),
            budgets=Budgets(device_bytes=None, ram_bytes=self.ram_bytes),
            num_slots=self._num_slots,
            staging_bytes=tuning().reading_bytes,
            rests=self._rests,
        )
        if room is None:
            return problem
        room = max(room, smallest_device_bytes(problem))
        return replace(problem, budgets=replace(problem.budgets, device_bytes=room))

    def at(self, placement: Placement) -> frozenset[Group]:
        """The groups to which the plan gives this placement."""
        return self._where(placement, () if self.plan is None else self.plan.placements)

    @property
    def in_ram(self) -> frozenset[Group]:
        """The groups that rest in RAM."""
        return self._where(Placement.RAM, self._rests or ())

    def _where(self, placement: Placement, found: Sequence[Placement]) -> frozenset[Group]:
        return frozenset(group for group, each in zip(self.groups, found, strict=False) if each is placement)

    @property
    def has_learnt_to_pack(self) -> bool:
        """Whether `gain_from_packing` may have another answer than the last time: compute was measured since."""
        is_known = any(len(timed) >= NUM_TIMED for timed in self._timed.values())
        return is_known and self._pass_seconds != self._asked_to_pack

    def gain_from_packing(self) -> float:
        """The share of a pass that would be saved if groups were packed, as far as that can be told."""
        self._asked_to_pack = self._pass_seconds
        if self.plan is None:
            return 0.0
        now = _as_of(self._now(self.plan), self.plan)
        pairs = zip(now.problem.groups, self.groups, strict=True)
        packed = [
            replace(planned, packed_bytes=self._packer.packed_bytes(group, if_on=True)) for planned, group in pairs
        ]
        try:
            then = make_plan(replace(now.problem, groups=tuple(packed))).prediction.step_seconds
        except ConfigError:
            return 0.0  # the budgets have no room for packed bytes
        of_host = tuning().packed_group_seconds * sum(planned.packed_bytes > 0 for planned in packed)
        before = now.prediction.step_seconds
        return 1 - max(then, of_host) / before if before else 0.0

    # ---------------------------------------------------------------- measurements of passes

    def count_pass(self, kind: Kind) -> bool:
        """A pass of this kind begins. Returns whether its compute is to be measured."""
        known, number = self._num_passes, self._num_passes.get(kind)
        if number is None:
            # To measure costs the host time. If each pass is of a new kind (texts of all lengths), kinds are measured as one.
            number = next(iter(known.values())) if len(known) == MOST else 0
        known[kind] = number = number + 1
        return number <= NUM_TIMED or number % min(TIMED_EVERY, 1 << (number.bit_length() - 1)) == 0

    @property
    def measured_seconds(self) -> float | None:
        """The seconds that a forward of the last kind took; None if none was timed since weights rest where they do."""
        return median_low(took for kind, took in self._passes if kind == self._passes[-1][0]) if self._passes else None

    def note_times(self, kind: Kind, by_group: dict[str, float], rest: float, total: float) -> None:
        """Note the seconds of compute in a pass of this kind: those of each group, the rest, and those of the whole pass."""
        if total and not kind.is_backward:  # the CPU has no clock of its own
            self._passes.append((kind, total))
        is_known = bool(self._timed) and len(next(reversed(self._timed.values()))) >= NUM_TIMED
        # Compute between groups (attention, at leaf level) is spread over the groups.
        timed = sum(by_group.values())
        factor = 1 + rest / timed if timed else 1.0
        last = self._timed.get(kind) or deque(maxlen=NUM_TIMED)
        last.append({name: seconds * factor for name, seconds in by_group.items()})
        self._timed[kind] = last  # the kind timed last comes last
        for name in last[-1]:
            # The faster one of two counts: the module's first pass warms up.
            self._seconds[name] = median_low(seconds[name] for seconds in last if name in seconds)
        now = sum(self._seconds.values())
        if not is_known or abs(now - self._pass_seconds) > MIN_GAIN * self._pass_seconds:
            self._pass_seconds = now


def _as_of(problem: Problem, plan: Plan) -> Plan:
    """The same placements, predicted with the sizes, speeds and times known by now; another plan if they are impossible."""
    return kept_plan(problem, plan) or make_plan(problem)


def _plan_if_better(problem: Problem, before: Plan) -> Plan:
    """Another plan if it is faster than `before` by `MIN_GAIN`; else `before`, predicted with the times known by now."""
    kept = _as_of(problem, before)
    worth_it = kept.prediction.step_seconds * (1 - MIN_GAIN)
    plan = make_plan(problem)
    return plan if plan.placements == before.placements or plan.prediction.step_seconds <= worth_it else kept


def _is_read(group: Group) -> bool:
    return any(isinstance(part.blob, FileBlob) and part.blob.is_read for part in group.parts)


def ram_for_weights(
    budget: Budget | None, in_ram: int, staging_bytes: int, *, stay: bool = True, turn_bytes: int = 0
) -> int:
    """The RAM that a module or pipeline may take for weights when offloaded; its weights take `in_ram` bytes already.

    Args:
        stay: Whether those weights stay in RAM. Else they get files, and give their RAM back.
        turn_bytes: Bytes in which weights from files take turns, where these are in RAM.
        budget: RAM for the whole process; None: `in_ram`, and the share of RAM that files are page-locked in by default.
        staging_bytes: RAM that the memory to read files into has still to take from the budget.

    Raises:
        ConfigError: The process takes more already, without any weights in files.
    """
    if budget is None:
        return in_ram + int(available_ram() * tuning().locked_share)
    if isinstance(budget, Auto):
        return in_ram + max(0, auto_ram() - staging_bytes)
    others = max(0, ram_in_use() - in_ram) + staging_bytes + tuning().ram_margin_bytes
    if not stay:
        in_ram = 0
    if budget < others + in_ram + turn_bytes:
        needs = {
            "Python, torch and the driver": others - staging_bytes,
            "read buffers": staging_bytes,
            "weights without a file (pass offload_to_disk_path to move those to disk)": in_ram,
            "buffers and activations (less with offload_type='leaf_level')": turn_bytes,
        }
        parts = [f"{describe_bytes(size, round_up=True)} for {what}" for what, size in needs.items() if size]
        raise ConfigError(
            f"ram_budget={describe_bytes(budget)} is too small. This process needs at least "
            f"{describe_bytes(others + in_ram + turn_bytes, round_up=True)}: {', '.join(parts)}."
        )
    # Files of other offloaded modules have the RAM that they were promised, or have locked without a budget. Files of
    # later modules may find no RAM left: they are read from the drive.
    elsewhere = max(locked.num_bytes, sum(budgeter.promised_bytes for budgeter in _budgeters))
    return max(in_ram, budget - others - elsewhere)
