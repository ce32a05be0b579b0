"""The budgeter decides which groups stay on the device, and which files are page-locked in RAM.

[Note: How a plan comes to be]
When a module is offloaded, files are shared out between RAM and the drive. No group stays on the device yet: the room
that activations need is not known. The first pass of a kind (a part of the model, with inputs of certain shapes) measures
that room. From then on as many groups stay on the device as fit beside it. The first three passes also measure how long
each group computes. The plan is made again with these times, and carried out if it is 3% faster. Compute is measured again
now and then: a device's speed varies, and other inputs take another time.

Inputs of other shapes get room in proportion to their size, until they were measured too. If a pass needs more room than
was measured, groups are given up: before the pass if that can be foreseen, else when the device's memory runs out.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import median_low
from typing import Any

import torch
from torch import nn

from ...base.device import Backend
from ...base.ram import available_ram, locked, ram_in_use
from ...base.torch_internals import tree_leaves
from ...base.tuning import tuning
from ...errors import ConfigError
from ...partition import Method
from ...plan.budgets import Auto, Budget, auto_ram, describe_bytes
from ...plan.pass_model import simulate
from ...plan.placement import (
    Budgets,
    Placement,
    PlannedGroup,
    Problem,
    Speeds,
    smallest_device_bytes,
    smallest_ram_bytes,
)
from ...plan.planner import Plan, kept_plan, least_seconds, make_plan
from ...stores.files import FileBlob
from ..groups.group import Group
from ..measure.drive import DriveMeter

logger = logging.getLogger("group_offload")

MIN_GAIN = 0.03
"""A plan that is made again is carried out if it is faster by this share."""
NUM_TIMED = 3
"""The number of first passes of a kind whose compute is measured. The median of as many last ones counts."""
TIMED_EVERY = 32
"""Later on one pass in this many is measured, and more often at first: the 4th, 8th, 16th, 32nd, 64th, 96th."""
NUM_TIMED_KINDS = 8
"""The number of kinds whose times are remembered."""
MOST_TOGETHER = 16
"""The most forwards that share a pass."""
NUM_RECENT = 8
"""The number of last passes whose activations have room."""
_STEPS = 64
"""All weights are this many steps of room on the device: a change below one step makes no new plan."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of passes: all of them need the same memory, and take the same time."""

    top: Hashable
    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    with_grad: bool

    @classmethod
    def of(cls, top: Hashable, args: Any, kwargs: Any) -> Kind:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        return cls(top, shapes, torch.is_grad_enabled())

    @property
    def num_elements(self) -> int:
        return sum(self._sizes)

    @property
    def _sizes(self) -> list[int]:
        return [torch.Size(shape).numel() for shape, _ in self.shapes]

    def growth_from(self, other: Kind) -> float:
        """The largest factor by which activations of these passes may exceed those of `other`.

        The input that has grown most counts: four times as many tokens of an image are few elements beside a long text.
        """
        if len(self.shapes) == len(other.shapes):
            return max([1.0, *(now / max(1, before) for now, before in zip(self._sizes, other._sizes, strict=True))])
        return max(1.0, self.num_elements / max(1, other.num_elements))


class _Measured:
    """The measurements of one kind of passes."""

    def __init__(self) -> None:
        self.activation_bytes: int | None = None
        """Device memory besides weights that a pass adds to the memory in use before it."""
        self.num_passes = 0


_budgeters: weakref.WeakSet[Budgeter] = weakref.WeakSet()


class Budgeter:
    """Keeps a module within its budgets. An engine owns it, and uses it under the engine's lock."""

    def __init__(
        self,
        backend: Backend,
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
        self._backend = backend
        self.vram: int | None = None
        """Device memory for the whole process, no more than the device has; None for no budget."""
        self._asked_vram: int | None = None
        self._passes_until_look = 0
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
        self.outer_bytes = 0
        self._measured: dict[Kind, _Measured] = {}
        self._timed: dict[Kind, deque[dict[str, float]]] = {}
        """Seconds by group in the last timed passes of each kind. The kind that was timed last comes last."""
        self._seconds: dict[str, float] = {}
        """The seconds that each group computes in a pass, by its id, as far as they are known."""
        self._passes: deque[tuple[Kind, float]] = deque(maxlen=NUM_TIMED)
        """The last timed forwards since weights rest where they do now, and the seconds that each took."""
        self._planned_seconds = 0.0
        """The sum of `_seconds` when it last called for a new plan."""
        self._order: tuple[Group, ...] = ()
        self._for: tuple[int | None, int] | None = None
        """The room on the device and the `_num_learnt` that the plan was made for."""
        self._asked_to_pack = 0
        """The `_num_learnt` at which `gain_from_packing` was asked last."""
        self._num_learnt = 0
        """The number of times that compute turned out to differ from the planned seconds."""
        self._kind: Kind | None = None
        self._recent: deque[Kind] = deque(maxlen=NUM_RECENT)
        self._others = 0
        self._weights = 0
        self._peak = 0
        self._is_measuring = False

    # ---------------------------------------------------------------- plans

    def begin(
        self,
        groups: Sequence[Group],
        order: Sequence[Group],
        *,
        vram: int | None,
        ram_bytes: int | None,
        outer_bytes: int,
        staging_bytes: int,
        too_small: Callable[[int], ConfigError | None],
    ) -> Plan | None:
        """Make the first plan once the module was cut into groups, before any measurement.

        Args:
            vram: Device memory for the whole process; None for no budget.
            ram_bytes: RAM for weights; None for no limit.
            outer_bytes: Device memory for groups that are needed around others.
            too_small: Function from the least `vram` that works to the error to raise; None: that becomes the budget.

        Raises:
            ConfigError: A budget is too small.
        """
        self.plan = self._for = None
        self.groups = tuple(group for group in groups if group.num_bytes and not group.height)
        self._order = tuple(order)
        self.vram = self._asked_vram = vram
        self.ram_bytes, self.outer_bytes, self._staging_bytes = ram_bytes, outer_bytes, staging_bytes
        self._measured, self._timed, self._seconds = {}, {}, {}
        self._passes.clear()
        self._planned_seconds = 0.0
        self._num_learnt = 0
        if not self.groups:
            return None
        problem = self._problem(None)
        least = smallest_device_bytes(problem)
        if self.vram is not None and self.vram < least + outer_bytes:
            error = too_small(least + outer_bytes)
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # the error holds this frame, and so all groups: the frame must not hold the error
            self.vram = self._asked_vram = least + outer_bytes
        # Half of the budget is a guess. The first pass corrects it before any group stays on the device.
        self.plan = make_plan(self._problem(None if self.vram is None else self.vram // 2))
        return self.plan

    def describe(
        self, groups: Sequence[Group], order: Sequence[Group], *, outer_bytes: int, staging_bytes: int
    ) -> None:
        """Describe in a plan where groups rest: there is no budget."""
        self.plan = None
        self.groups = tuple(group for group in groups if group.num_bytes and not group.height)
        self._order = tuple(order)
        self.outer_bytes, self._staging_bytes = outer_bytes, staging_bytes
        if self.groups:
            problem = self._problem(None)
            rests = [Placement.FILE if _is_read(group) else Placement.RAM for group in self.groups]
            self.plan = replace(make_plan(problem), placements=tuple(rests), prediction=simulate(problem, rests))

    def refresh(self) -> None:
        """Predict the times of the plan again, if the speed of compute or of the drive has changed."""
        plan = self.plan
        if plan is None:
            return
        drive, now = plan.problem.speeds.drive, self._problem(plan.problem.budgets.device_bytes)
        has_learnt = self._for is not None and self._for[1] != self._num_learnt
        if has_learnt or abs(now.speeds.drive - drive) > MIN_GAIN * drive:
            self.plan = kept_plan(now, plan) or plan  # the next pass makes another

    def before_pass(self, kind: Kind, order: Sequence[Group], others: int) -> Plan | None:
        """A pass of `kind` begins, and `others` is the device memory that is not this module's weights.

        Returns:
            Another plan, if the current one does not fit, or is slower.
        """
        if self.vram != self._asked_vram:
            self._passes_until_look -= 1
            if not self._passes_until_look:
                self._look_at_device()
        self._kind = kind
        self._recent.append(kind)
        self._order = tuple(order) or self._order
        room = self._room(kind, others)
        asked = None if room is None else room // self._step * self._step, self._num_learnt
        if not self.groups or (asked == self._for and self._is_possible):
            return None
        if room is not None and not self._is_measured:
            return None  # the module's first pass measures
        is_first, self._for = self._for is None, asked
        problem, before = self._problem(room), self.plan
        if before is not None and not is_first and (room is None or before.device_bytes <= room):
            plan = _plan_if_better(problem, before)
        else:
            plan = make_plan(problem)
        self.plan = plan
        # The first plan may equal the guess, but its groups were not brought to stay on the device yet.
        if is_first or before is None or plan.placements != before.placements:
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
        before = self.plan
        if before is None or self.ram_bytes is None:
            return False
        self.ram_bytes = max(self.ram_bytes - missing, smallest_ram_bytes(self._problem(None)))
        self.plan = _as_of(self._problem(before.problem.budgets.device_bytes), before)
        return self.plan.placements != before.placements

    def room_for_residents(self, kind: Kind, others: int) -> int:
        """Device memory that groups may stay in during this pass."""
        room = self._room(kind, others)
        if room is None or self.plan is None or not self._is_measured:
            return 0
        return max(0, room - self.plan.slot_bytes)

    def room_for_all(self, kind: Kind, others: int, *, computes: bool = True) -> int:
        """Device memory for the weights of all models in a pass of this kind; 0 if that is not known yet.

        Args:
            computes: Whether room is kept for the pass's activations.
        """
        if self.vram is None or not self._is_measured:
            return 0
        if not computes:
            return max(0, self.vram - others - tuning().device_margin_bytes - self.outer_bytes)
        return self._room(kind, others) or 0

    def forwards_that_fit(self, kind: Kind, others: int, weights: int) -> int:
        """How many forwards of this kind have room, beside `weights` that all of them compute with."""
        if self.vram is None:
            return MOST_TOGETHER
        activations = self._activation_bytes(kind)
        room = self.vram - others - tuning().device_margin_bytes - self.outer_bytes - weights
        return min(MOST_TOGETHER, room // activations) if activations else 1

    def _room(self, kind: Kind, others: int) -> int | None:
        """Device memory for weights."""
        if self.vram is None:
            return None
        # Kinds that take turns (two sizes of inputs) would else bring groups there and give them up again and again.
        # The memory that a backward finds on the device was counted among its forward's activations.
        kinds = {kind, *self._recent} if kind in self._recent else {kind}
        activations = max(map(self._activation_bytes, kinds))
        return max(0, self.vram - others - activations - tuning().device_margin_bytes - self.outer_bytes)

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
        measured = self._measured.setdefault(kind, _Measured())
        measured.num_passes += 1
        number = measured.num_passes
        return number <= NUM_TIMED or number % min(TIMED_EVERY, 1 << (number.bit_length() - 1)) == 0

    def start(self, kind: Kind, others: int, weights: int) -> bool:
        """A pass computes from here on.

        Returns:
            Whether its activations are measured for the first time: then no other group may come to stay on the device.
        """
        self._kind = kind
        self._others, self._weights = others, weights
        self._is_measuring = self._measured.setdefault(kind, _Measured()).activation_bytes is None
        if self._is_measuring:
            self._backend.reset_peak()
        self._peak = self._backend.peak_bytes_in_use()
        return self._is_measuring

    def stop(self, weights: int, *, completed: bool) -> None:
        """The pass ends, and `weights` is the device memory that weights take."""
        kind, self._kind = self._kind, None
        if kind is None or not completed or self.vram is None:
            return
        measured = self._measured[kind]
        peak = self._backend.peak_bytes_in_use()
        if self._is_measuring:
            measured.activation_bytes = max(0, peak - self._others - self._weights)
        elif peak > self._peak:
            assert measured.activation_bytes is not None
            measured.activation_bytes = max(measured.activation_bytes, peak - self._others - weights)
        if peak > self._peak and peak > self.vram:
            assert measured.activation_bytes is not None
            least = smallest_device_bytes(self._problem(None)) + self.outer_bytes + self._others
            fits = least + measured.activation_bytes <= self.vram
            logger.warning(
                "A pass took %d bytes of device memory, which is more than vram_budget (%d): activations need %d of them.%s",
                peak,
                self.vram,
                measured.activation_bytes,
                " That was not foreseen of inputs of this size: from the next pass on they have that room."
                if fits
                else "",
            )

    def clear(self) -> None:
        """The groups are given up."""
        self.plan = self._kind = None
        self._passes.clear()
        self.groups = self._order = ()
        self.promised_bytes = 0
        self._recent.clear()

    def ran_out(self, kind: Kind) -> None:
        """A pass of this kind ran out of device memory: the measured room is too small, or others have taken some.

        No group stays on the device now, and torch has given back the memory that it held without using it.
        """
        self._measured.pop(kind, None)
        self._recent.clear()
        self._look_at_device()

    def smaller_budget(self, given_up: int) -> int:
        """A budget that would have sufficed for a pass that ran out while `given_up` bytes of groups stayed on the device."""
        assert self.vram is not None and self._asked_vram is not None
        if self.vram < self._asked_vram:
            return self.vram  # the device has less than was asked for: with that, fewer groups stay
        return max(self.vram - given_up, smallest_device_bytes(self._problem(None)) + self.outer_bytes)

    def _look_at_device(self) -> None:
        """Limit the budget to the memory that the device has for this process now."""
        self._passes_until_look = tuning().passes_until_look
        if self._asked_vram is not None:
            there = self._backend.reserved_bytes() + self._backend.free_bytes()
            self.vram = min(self._asked_vram, there)

    @property
    def measured_seconds(self) -> float | None:
        """The seconds that a forward of the last kind took; None if none was timed since weights rest where they do."""
        return median_low(took for kind, took in self._passes if kind == self._passes[-1][0]) if self._passes else None

    def note_times(self, kind: Kind, by_group: dict[Group, float], rest: float, total: float) -> None:
        """Note the seconds of compute in a pass of this kind: those of each group, the rest, and those of the whole pass."""
        if total and isinstance(kind.top, (nn.Module, Method)):  # the CPU has no clock of its own
            self._passes.append((kind, total))
        is_known = bool(self._timed) and len(next(reversed(self._timed.values()))) >= NUM_TIMED
        # Compute between groups (attention, at leaf level) is spread over the groups.
        timed = sum(by_group.values())
        factor = 1 + rest / timed if timed else 1.0
        last = self._timed.pop(kind, None) or deque(maxlen=NUM_TIMED)
        last.append({group.group_id: seconds * factor for group, seconds in by_group.items()})
        self._timed[kind] = last  # the kind timed last comes last
        while len(self._timed) > NUM_TIMED_KINDS:
            del self._timed[next(iter(self._timed))]
        for name in last[-1]:
            # The faster one of two counts: the module's first pass warms up.
            self._seconds[name] = median_low(seconds[name] for seconds in last if name in seconds)
        now = sum(self._seconds.values())
        if not is_known or abs(now - self._planned_seconds) > MIN_GAIN * self._planned_seconds:
            self._planned_seconds = now
            self._num_learnt += 1

    def _activation_bytes(self, kind: Kind) -> int:
        """The measured bytes, or an estimate for inputs of another size; 0 if no kind was measured."""
        found = self._measured.get(kind)
        if found is not None and found.activation_bytes is not None:
            return found.activation_bytes
        known = {other: m.activation_bytes for other, m in self._measured.items() if m.activation_bytes is not None}
        alike = [other for other in known if other.top == kind.top and other.with_grad == kind.with_grad]
        if alike:
            return int(min(known[other] * kind.growth_from(other) for other in alike) * 1.1)
        largest = max(known, key=lambda other: other.num_elements, default=None)
        return 0 if largest is None else int(known[largest] * kind.growth_from(largest) * 1.1)

    @property
    def _is_measured(self) -> bool:
        """Whether the activations of any kind were measured."""
        return any(measured.activation_bytes is not None for measured in self._measured.values())


def _as_of(problem: Problem, plan: Plan) -> Plan:
    """The same placements, predicted with the sizes, speeds and times known by now; another plan if they are impossible."""
    return kept_plan(problem, plan) or make_plan(problem)


def _plan_if_better(problem: Problem, before: Plan) -> Plan:
    """Another plan if it is faster than `before` by `MIN_GAIN`; else `before`, predicted with the times known by now."""
    kept = _as_of(problem, before)
    worth_it = kept.prediction.step_seconds * (1 - MIN_GAIN)
    if least_seconds(problem) >= worth_it:
        return kept  # no search finds a plan worth it
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
        needs = [f"{describe_bytes(others, round_up=True)} without any weights (Python, torch, the device's driver"]
        needs[0] += f", and {describe_bytes(staging_bytes)} to read files into)" if staging_bytes else ")"
        if in_ram:
            needs.append(
                f"{describe_bytes(in_ram, round_up=True)} for weights that are in no file (with offload_to_disk_path they are)"
            )
        if turn_bytes:
            turns = f"{describe_bytes(turn_bytes, round_up=True)} for weights to take turns in, and activations"
            needs.append(f"{turns} (less with offload_type='leaf_level')")
        total = describe_bytes(others + in_ram + turn_bytes, round_up=True)
        raise ConfigError(
            f"ram_budget is {describe_bytes(budget)}, and this process needs {total}: {', '.join(needs)}. Give it that at "
            f"least."
        )
    # Files of other offloaded modules have the RAM that they were promised, or have locked without a budget. Files of
    # later modules may find no RAM left: they are read from the drive.
    elsewhere = max(locked.num_bytes, sum(budgeter.promised_bytes for budgeter in _budgeters))
    return max(in_ram, budget - others - elsewhere)
