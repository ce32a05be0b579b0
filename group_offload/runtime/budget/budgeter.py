"""The budgeter plans where groups rest, and which of them stay on the device.

[Note: How a plan comes to be]
When a module is offloaded, RAM alone decides which groups rest there, and which are read from the drive. That stays so. What
stays on the device is a copy, so a pass never locks, unlocks or packs anything because of it. No group stays yet: what passes
need besides weights is not known. The first pass of a kind tells (see [Note: What a pass needs]). From the second one on as
many groups stay on the device as fit beside that. Passes also measure how long each group computes. The plan is made again with
these times, and when the device has other room, and carried out if it is 3% faster. Compute is measured again now and then: a
device's speed varies, and other inputs take another time.
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

    def __init__(
        self,
        speeds: Callable[[], Speeds],
        packed_bytes: Callable[[Group], int],
        num_slots: int,
        *,
        reads_packed: bool,
    ) -> None:
        """
        Args:
            speeds: Function that returns the speeds. It is called once, when they are first needed.
            packed_bytes: Function that returns what is sent of a group if it is packed; 0 if it is not to be packed.
            reads_packed: Whether packed bytes are in files too, so that these are read.
        """
        _budgeters.add(self)
        self.promised_bytes = 0
        """The part of the process's RAM budget that is promised to the module's weights in files."""
        self.ram_bytes: int | None = None
        """RAM for weights that are in no file, and for page-locked files."""
        self._speeds = cache(speeds)
        self._packed_bytes = packed_bytes
        self._reads_packed = reads_packed
        self.drive = DriveMeter()
        """The drive's speed, measured in passes."""
        self._num_slots = num_slots
        self._staging_bytes = 0
        self.plan: Plan | None = None
        self.groups: tuple[Group, ...] = ()
        """The groups that the plan places."""
        self._num_passes: Recent[Kind, int] = Recent()
        """How many passes each kind had, of the last kinds."""
        self._timed: Recent[Kind, deque[dict[str, float]]] = Recent(NUM_TIMED_KINDS)
        """Seconds by group in the last timed passes of each kind. The kind that was timed last comes last."""
        self._seconds: dict[str, float] = {}
        """The seconds that each group computes in a pass, by its id, as far as they are known."""
        self._passes: deque[tuple[Kind, float]] = deque(maxlen=NUM_TIMED)
        """The last timed forwards since weights rest where they do now, and the seconds that each took."""
        self._planned_seconds = 0.0
        """The sum of `_seconds` when it last called for a new plan."""
        self._order: tuple[Group, ...] = ()
        self._rests: tuple[Placement, ...] | None = None
        """Where each group rests: in RAM, or in a file. It stays so until the module is cut again."""
        self._for: tuple[int, int] | None = None
        """The room on the device and the `_num_learnt` that the plan was made for."""
        self._asked_to_pack = 0
        """The `_num_learnt` at which `gain_from_packing` was asked last."""
        self._num_learnt = 0
        """The number of times that compute turned out to differ from the planned seconds."""

    # ---------------------------------------------------------------- plans

    def begin(
        self, groups: Sequence[Group], order: Sequence[Group], *, ram_bytes: int | None, staging_bytes: int
    ) -> Plan | None:
        """Decide where groups rest, once the module was cut into groups, before any measurement. None stays on the device.

        Args:
            ram_bytes: RAM for weights; None for no limit.
        """
        self.plan = self._for = self._rests = None
        self.groups = tuple(g for g in groups if g.num_bytes and not g.height and not g.is_in_place)
        self._order = tuple(order)
        self.ram_bytes, self._staging_bytes = ram_bytes, staging_bytes
        self._num_passes.clear()
        self._timed.clear()
        self._seconds = {}
        self._passes.clear()
        self._planned_seconds = 0.0
        self._num_learnt = 0
        if not self.groups:
            return None
        self.plan = make_plan(self._problem(None))
        self._rests = self.plan.problem.rests
        return self.plan

    @property
    def least_bytes(self) -> int:
        """The device memory that groups take turns in, with none that stays."""
        return smallest_device_bytes(self._problem(None)) if self.groups else 0

    def describe(self, groups: Sequence[Group], order: Sequence[Group], *, staging_bytes: int) -> None:
        """Describe in a plan where groups rest: there is no budget."""
        self.plan = self._rests = None
        self.groups = tuple(group for group in groups if group.num_bytes and not group.height)
        self._order = tuple(order)
        self._staging_bytes = staging_bytes
        if self.groups:
            self._rests = tuple(Placement.FILE if _is_read(group) else Placement.RAM for group in self.groups)
            self.plan = make_plan(self._problem(None))

    def refresh(self) -> None:
        """Predict the times of the plan again, if the speed of compute or of the drive has changed."""
        plan = self.plan
        if plan is None:
            return
        drive, now = plan.problem.speeds.drive, self._problem(plan.problem.budgets.device_bytes)
        has_learnt = self._for is not None and self._for[1] != self._num_learnt
        if has_learnt or abs(now.speeds.drive - drive) > MIN_GAIN * drive:
            self.plan = kept_plan(now, plan) or plan  # the next pass makes another

    def before_pass(self, order: Sequence[Group], room: int) -> Plan | None:
        """A pass begins, and groups have `room` bytes on the device, slots included.

        Returns:
            Another plan, if the current one does not fit, or is slower.
        """
        self._order = tuple(order) or self._order
        if not self.groups:
            return None
        asked = room // self._step * self._step, self._num_learnt
        before = self.plan
        fits = before is not None and self._is_possible
        if before is not None and before.device_bytes > room:
            fits = fits and before.device_bytes <= self.least_bytes
        if asked == self._for and fits:
            return None
        is_first, self._for = self._for is None, asked
        problem, is_kept = self._problem(room), fits and not is_first
        plan = _plan_if_better(problem, before) if before is not None and is_kept else make_plan(problem)
        self.plan = plan
        if before is None or plan.placements != before.placements:
            self._passes.clear()
            return plan
        return None

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
        now = self._problem(plan.problem.budgets.device_bytes)
        rests = list(before)
        # What could not be packed leaves RAM first. Other groups in its place would have to be packed anew.
        for index in sorted(range(len(rests)), key=lambda index: self.groups[index].packed_bytes > 0):
            if ram_bytes_of(now, rests) <= self.ram_bytes:
                break
            if self.groups[index].is_in_file:
                rests[index] = Placement.FILE
        self._rests = tuple(rests)
        if self._rests == before:
            self.plan = kept_plan(now, plan) or make_plan(now)
            return False
        self.plan, self._for = make_plan(replace(now, rests=self._rests)), None
        return True

    @property
    def _step(self) -> int:
        return max(1, sum(group.num_bytes for group in self.groups) // _STEPS)

    @property
    def _is_possible(self) -> bool:
        """Whether what the plan leaves on the device packed still is packed. Packed files may be lost."""
        if self.plan is None or Placement.PACKED not in self.plan.placements:
            return True
        return all(self._packed_bytes(group) for group in self.at(Placement.PACKED))

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
                packed_bytes=self._packed_bytes(group),
                strip_bytes=max(group.largest_strip(is_read=False), group.largest_strip(is_read=True)),
                reads_packed=self._reads_packed,
            )
            for group in self.groups
        ]
        order = [index[group] for group in self._order if group in index] or range(len(planned))
        problem = Problem(
            groups=tuple(planned),
            order=tuple(order),
            speeds=self._current_speeds(),
            budgets=Budgets(device_bytes=None, ram_bytes=self.ram_bytes),
            num_slots=self._num_slots,
            staging_bytes=self._staging_bytes,
            rests=self._rests,
        )
        if room is None:
            return problem
        room = max(room, smallest_device_bytes(problem))
        return replace(problem, budgets=replace(problem.budgets, device_bytes=room))

    def _current_speeds(self) -> Speeds:
        speeds, drive = self._speeds(), self.drive.bytes_per_s
        return speeds if drive is None else replace(speeds, drive=drive)

    def at(self, placement: Placement) -> frozenset[Group]:
        """The groups to which the plan gives this placement."""
        if self.plan is None:
            return frozenset()
        return frozenset(
            group for group, found in zip(self.groups, self.plan.placements, strict=True) if found is placement
        )

    @property
    def in_ram(self) -> frozenset[Group]:
        """The groups that rest in RAM."""
        pairs = zip(self.groups, self._rests or (), strict=False)
        return frozenset(group for group, rest in pairs if rest is Placement.RAM)

    @property
    def has_learnt_to_pack(self) -> bool:
        """Whether `gain_from_packing` may have another answer than the last time: compute was measured since."""
        is_known = any(len(timed) >= NUM_TIMED for timed in self._timed.values())
        return is_known and self._num_learnt != self._asked_to_pack

    def gain_from_packing(self, packed_bytes: Callable[[Group], int]) -> float | None:
        """The share of a pass that would be saved if groups were packed; None if that cannot be told.

        Args:
            packed_bytes: Function that returns what would be sent of a group then.
        """
        self._asked_to_pack = self._num_learnt
        if self.plan is None:
            return None
        now = _as_of(self._problem(self.plan.problem.budgets.device_bytes), self.plan)
        pairs = zip(now.problem.groups, self.groups, strict=True)
        packed = [replace(planned, packed_bytes=packed_bytes(group)) for planned, group in pairs]
        problem = replace(now.problem, groups=tuple(packed))
        try:
            then = make_plan(problem).prediction.step_seconds
        except ConfigError:
            return None  # the budgets have no room for packed bytes
        of_host = tuning().packed_group_seconds * sum(planned.packed_bytes > 0 for planned in packed)
        before = now.prediction.step_seconds
        return 1 - max(then, of_host) / before if before else None

    # ---------------------------------------------------------------- measurements of passes

    def is_timed(self, kind: Kind) -> bool:
        """Whether compute is to be measured in the pass of this kind that begins."""
        known, number = self._num_passes, self._num_passes.get(kind)
        if number is None:
            # To measure costs the host time. If each pass is of a new kind (texts of all lengths), kinds are measured as one.
            number = next(iter(known.values())) if len(known) == MOST else 0
        known[kind] = number = number + 1
        return number <= NUM_TIMED or number % min(TIMED_EVERY, 1 << (number.bit_length() - 1)) == 0

    def clear(self) -> None:
        """The groups are given up."""
        self.plan = self._rests = None
        self._passes.clear()
        self.groups = self._order = ()
        self.promised_bytes = 0

    @property
    def measured_seconds(self) -> float | None:
        """The seconds that a forward of the last kind took; None if none was timed since weights rest where they do."""
        return median_low(took for kind, took in self._passes if kind == self._passes[-1][0]) if self._passes else None

    def note_times(self, kind: Kind, by_group: dict[Group, float], rest: float, total: float) -> None:
        """Note the seconds of compute in a pass of this kind: those of each group, the rest, and those of the whole pass."""
        if total and not isinstance(kind.top, str):  # the CPU has no clock of its own
            self._passes.append((kind, total))
        is_known = bool(self._timed) and len(next(reversed(self._timed.values()))) >= NUM_TIMED
        # Compute between groups (attention, at leaf level) is spread over the groups.
        timed = sum(by_group.values())
        factor = 1 + rest / timed if timed else 1.0
        last = self._timed.pop(kind, None) or deque(maxlen=NUM_TIMED)
        last.append({group.group_id: seconds * factor for group, seconds in by_group.items()})
        self._timed[kind] = last  # the kind timed last comes last
        for name in last[-1]:
            # The faster one of two counts: the module's first pass warms up.
            self._seconds[name] = median_low(seconds[name] for seconds in last if name in seconds)
        now = sum(self._seconds.values())
        if not is_known or abs(now - self._planned_seconds) > MIN_GAIN * self._planned_seconds:
            self._planned_seconds = now
            self._num_learnt += 1


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
