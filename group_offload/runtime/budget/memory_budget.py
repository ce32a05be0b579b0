"""Plans where groups are stored, and which of them stay on the device.

[Note: How a plan comes to be]
When a module is offloaded, the plan for all memory that it may have decides which groups are stored in RAM, and which are read
from disk. That stays so. What stays on the device is a copy, so a pass never pins or compresses anything because of it. No
group stays yet: what passes need besides weights is not known. The first pass of a kind tells (see [Note: What a pass needs]).
From the second one on as many groups stay on the device as fit beside that. Passes also measure how long each group computes.
The plan is made again with these times, and when the device has more or less space, and carried out if it is 3% faster. That
takes some milliseconds, for which the device would wait as a pass begins. So it is done as a pass ends, while the device still
computes; before a pass only if the plan does not fit. Compute is measured again now and then: a device's speed varies, and
other inputs take another time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from statistics import median_low
from typing import Any

from ...base.arena import arena_for
from ...base.recent import MOST, Recent
from ...base.tuning import tuning
from ...config import OffloadConfig
from ...plan.placement import (
    Placement,
    PlannedGroup,
    Problem,
    Speeds,
    ram_bytes_of,
    smallest_device_bytes,
    smallest_ram_bytes,
)
from ...plan.planner import Plan, kept_plan, make_plan
from ...plan.speeds import known_speeds
from ...stores.files import FileBlob
from ..compressor import Compressor
from ..groups.group import Group
from ..transfers.page_cache_pins import PageCachePins
from ..transfers.transfer import Transfer
from .need import InputSignature

MIN_GAIN = 0.03
"""A plan that is made again is carried out if it is faster by this share."""
NUM_TIMED = 3
"""The number of first passes of a kind whose compute is measured. The median of as many last ones counts."""
TIMED_EVERY = 32
"""Later on one pass in this many is measured, and more often at first: the 4th, 8th, 16th, 32nd, 64th, 96th."""
_IN_PLACE = 1e18
"""Link speed on the CPU, in bytes per second: as good as infinite, since weights in RAM are used in place."""
_STEPS = 64
"""All weights are this many steps of space on the device: a change below one step makes no new plan."""


class MemoryBudget:
    """Has the plan for a module's budgets, and makes it again. A `Placer` owns it, and carries the plan out."""

    def __init__(self, config: OffloadConfig, files: PageCachePins, transfer: Transfer, compressor: Compressor) -> None:
        self._config, self._files = config, files
        self._transfer, self._compressor = transfer, compressor
        self.clear()

    def clear(self) -> None:
        """Forget the groups, and what passes have taught of them."""
        self.plan: Plan | None = None
        self.groups: tuple[Group, ...] = ()
        """The groups that the plan places."""
        self._order: tuple[Group, ...] = ()
        self.ram_bytes: int | None = None
        """RAM for weights that are in no file, and for pinned files."""
        self._num_passes: Recent[InputSignature, int] = Recent()
        """How many passes each kind had, of the last kinds."""
        self._timed: Recent[InputSignature, deque[dict[str, float]]] = Recent()
        """Seconds by group in the last timed passes of each kind. The kind that was timed last comes last."""
        self._passes: deque[tuple[InputSignature, float]] = deque(maxlen=NUM_TIMED)
        """The last timed forwards since groups are where they are now, and the seconds that each took."""
        self._seconds: dict[str, float] = {}
        """The seconds that each group computes in a pass, by its id, as far as they are known."""
        self._pass_seconds = 0.0
        """The sum of these when it last differed by much from the one before: plans are made for it."""
        self._made_for: tuple[int | None, float] | None = None
        """What the plan was made for: see `_basis`."""
        self._next_plan: Plan | None = None
        """The plan from the next pass on, if it was made again."""
        self._gain_from_interleaving: tuple[Any, float] = None, 0.0
        """The last answer of `gain_from_interleaving`, behind what it was made for."""

    @cached_property
    def _speeds(self) -> Speeds:
        """The speeds as they were measured, now or earlier."""
        backend, sharing = self._config.backend, self._transfer.sharing
        path = next((blob.source.path for blob in self._files.blobs), None)
        found = known_speeds(backend, path, decompresses=self._config.compress, take=arena_for(backend).take)
        h2d, decompress = found.h2d if backend.has_streams else _IN_PLACE, found.decompress
        host_group = None if sharing is None else sharing.host_group
        if sharing is not None and sharing.speeds is not None:
            h2d = min(h2d, sharing.speeds.alone) if host_group is None else sharing.speeds.shared
        if host_group is not None:
            decompress *= host_group.num_ranks  # each decompresses its share
        return replace(found, h2d=h2d, decompress=decompress)

    # ---------------------------------------------------------------- plans

    def begin(
        self, groups: Sequence[Group], order: Sequence[Group], ram_bytes: int | None, device_bytes: int | None
    ) -> None:
        """Decide where groups are stored, before any measurement. None stays on the device.

        Args:
            ram_bytes: RAM for weights; None for no limit.
            device_bytes: Device memory that groups may have at most, later; None for no group that stays there.
        """
        self.clear()
        self.groups = tuple(g for g in groups if g.num_bytes and not g.nesting and not g.is_in_place)
        self._order, self.ram_bytes = tuple(order), ram_bytes
        if self.groups:
            self.plan = make_plan(self._problem(device_bytes))
            self.plan = make_plan(self._problem(None))  # with the tiers of the first one

    def describe(self, groups: Sequence[Group], order: Sequence[Group]) -> None:
        """Without a budget: describe in a plan where groups are stored."""
        self.plan = None  # Ctrl-C below must not leave a plan of other groups
        self.groups, self._order = tuple(g for g in groups if g.num_bytes and not g.nesting), tuple(order)
        read = [any(isinstance(part.blob, FileBlob) and part.blob.is_read for part in g.parts) for g in self.groups]
        rests = tuple(Placement.FILE if each else Placement.RAM for each in read)
        self.plan = make_plan(replace(self._problem(None), rests=rests)) if rests else None

    @property
    def least_bytes(self) -> int:
        """The device memory that groups need at least: slots, and none that stays."""
        return smallest_device_bytes(self._problem(None)) if self.groups else 0

    @property
    def resident_bytes(self) -> int:
        """What stays on the device by the plan."""
        return 0 if self.plan is None else self.plan.device_bytes - self.plan.slot_bytes

    def current_plan(self) -> Plan | None:
        """The plan by what is known by now, with the time that the last forwards took."""
        if self.plan is None:
            return None
        self.plan = kept_plan(self._now, self.plan) or self.plan  # the next pass makes another
        took = [seconds for kind, seconds in self._passes if kind == self._passes[-1][0]]
        return replace(self.plan, measured_seconds=median_low(took) if took else None)

    def before_pass(self, order: Sequence[Group], space: int) -> bool:
        """A pass begins, and groups have `space` bytes on the device, slots included.

        Returns:
            Whether there is another plan: the last pass made a faster one, or the present one does not fit.
        """
        before = self.plan
        if before is None:
            return False
        self.plan, self._next_plan = self._next_plan or before, None
        if self._made_for is None or not self._fits(self.plan, space):
            self.plan = self._made_again(order, space)
        if (self.plan.placements, self.plan.slot_bytes) == (before.placements, before.slot_bytes):
            return False
        self._passes.clear()
        return True

    def after_pass(self, order: Sequence[Group], space: int) -> None:
        """A pass completed: make the plan of the next one, if it is faster with what is known by now.

        Where there is too little space for the present plan, the next pass may find more.
        """
        if self.plan is None or self._basis(space) == self._made_for or not self._fits(self.plan, space):
            return
        is_first, self._next_plan = self._made_for is None, self._made_again(order, space)
        if not is_first and self._next_plan.placements != self.plan.placements:
            kept = kept_plan(self._next_plan.problem, self.plan)
            if kept and self._next_plan.prediction.step_seconds > kept.prediction.step_seconds * (1 - MIN_GAIN):
                self._next_plan = kept

    def _fits(self, plan: Plan, space: int) -> bool:
        # Compressed files may be lost: then what was to stay on the device compressed cannot.
        is_possible = all(map(self._compressor.compressed_bytes, self.at(Placement.COMPRESSED)))
        return is_possible and (plan.device_bytes <= space or plan.device_bytes <= self.least_bytes)

    def _made_again(self, order: Sequence[Group], space: int) -> Plan:
        self._order = tuple(order) or self._order
        plan, self._made_for = make_plan(self._problem(space)), self._basis(space)
        return plan

    def _basis(self, space: int | None) -> tuple[int | None, float]:
        """What plans depend on that passes change: the space on the device, in steps, and the seconds of compute."""
        step = max(1, sum(group.num_bytes for group in self.groups) // _STEPS)
        return None if space is None else space // step * step, self._pass_seconds

    def count_compressed(self, missing: int) -> bool:
        """Groups were compressed: count their compressed bytes as they turned out.

        Args:
            missing: Bytes of the plan's RAM that could not be had.

        Returns:
            Whether groups are to be stored elsewhere now.
        """
        plan = self.plan
        if plan is None or self.ram_bytes is None:
            return False
        self.ram_bytes = max(self.ram_bytes - missing, smallest_ram_bytes(self._problem(None)))
        now, rests = self._now, [*plan.rests]
        # What could not be compressed leaves RAM first. Other groups in its place would have to be compressed anew.
        for index in sorted(range(len(rests)), key=lambda index: self.groups[index].compressed_bytes > 0):
            if ram_bytes_of(now, rests) <= self.ram_bytes:
                break
            if self.groups[index].is_in_file:
                rests[index] = Placement.FILE
        if tuple(rests) == plan.rests:
            self.plan = kept_plan(now, plan) or make_plan(now)
            return False
        self.plan, self._next_plan, self._made_for = make_plan(replace(now, rests=tuple(rests))), None, None
        return True

    @property
    def _now(self) -> Problem:
        """The problem of the plan, as of now."""
        return self._problem(None if self.plan is None else self.plan.problem.device_budget)

    def _problem(self, space: int | None) -> Problem:
        """What to plan, with `space` on the device for groups: None for no limit; if too little, the least that works."""
        index = {group: number for number, group in enumerate(self.groups)}
        planned = [
            PlannedGroup(
                name=group.group_id,
                num_bytes=group.num_bytes,
                compute_seconds=self._seconds.get(group.group_id, 0.0),
                is_in_file=group.is_in_file,
                may_reside=group.detects_edits,
                compressed_bytes=self._compressor.compressed_bytes(group),
                strip_bytes=max(group.largest_strip(is_read=False), group.largest_strip(is_read=True)),
                reads_compressed=self._compressor.reads_compressed,
            )
            for group in self.groups
        ]
        problem = Problem(
            groups=tuple(planned),
            order=tuple(index[group] for group in self._order if group in index) or tuple(range(len(planned))),
            speeds=self._speeds,
            ram_budget=self.ram_bytes,
            num_slots=self._config.num_slots,
            staging_bytes=tuning().reading_bytes,
            rests=None if self.plan is None else self.plan.rests,
        )
        return problem if space is None else replace(problem, device_budget=max(space, smallest_device_bytes(problem)))

    def at(self, placement: Placement) -> frozenset[Group]:
        """The groups to which the plan gives this placement: `RAM` to those stored there, wherever copies of them stay."""
        if self.plan is None:
            return frozenset()
        found = self.plan.rests if placement is Placement.RAM else self.plan.placements
        return frozenset(group for group, each in zip(self.groups, found, strict=True) if each is placement)

    def gain_from_interleaving(self, kinds: Sequence[InputSignature], *spaces: int | None) -> float | None:
        """The share of time that is saved if forwards of these kinds share a pass; None if their compute isn't known yet.

        A forward is about to begin, so plans are made only if what they are made from has changed.

        Args:
            spaces: Device memory for groups, slots included, in a pass of one of these forwards, and of all; None without a
                budget.
        """
        timed = [each for kind, each in self._timed.items() if kind in kinds]
        if self.plan is None or sum(map(len, timed)) < 2:  # the module's first pass warms up
            return None
        asked = [*kinds], [self._basis(space) for space in spaces]
        if asked != self._gain_from_interleaving[0]:
            seconds = {name: median_low(each[name] for each in timed[-1] if name in each) for name in timed[-1][-1]}
            took = []
            for (space, _), times in zip(asked[1], (1, len(kinds)), strict=True):
                problem = self._problem(space)
                groups = [replace(each, compute_seconds=times * seconds.get(each.name, 0.0)) for each in problem.groups]
                took.append(make_plan(replace(problem, groups=tuple(groups))).prediction.step_seconds)
            self._gain_from_interleaving = asked, 1 - took[1] / (took[0] * len(kinds)) if took[0] else 0.0
        return self._gain_from_interleaving[1]

    # ---------------------------------------------------------------- measurements of passes

    def count_pass(self, kind: InputSignature) -> bool:
        """A pass of this kind begins. Returns whether its compute is to be measured."""
        known, number = self._num_passes, self._num_passes.get(kind)
        if number is None:
            # To measure costs the host time. If each pass is of a new kind (texts of all lengths), kinds are measured as one.
            number = next(iter(known.values())) if len(known) == MOST else 0
        known[kind] = number = number + 1
        return number <= NUM_TIMED or number % min(TIMED_EVERY, 1 << (number.bit_length() - 1)) == 0

    def note_times(self, kind: InputSignature, by_group: dict[str, float], rest: float, total: float) -> None:
        """Note the seconds of compute in a forward of this kind: those of each group, the rest, and those of the whole pass."""
        if total:  # the CPU has no clock of its own
            self._passes.append((kind, total))
        is_known = bool(self._timed) and len(next(reversed(self._timed.values()))) >= NUM_TIMED
        # Compute between groups (attention, at leaf level) is spread over them. What decompression took of it counts by itself.
        timed = sum(by_group.values())
        lost = self.plan.prediction.decompress_seconds / total if self.plan and total else 0.0
        factor = (1 + rest / timed if timed else 1.0) * (1 - min(lost, 0.5))
        last = self._timed.get(kind) or deque(maxlen=NUM_TIMED)
        last.append({name: seconds * factor for name, seconds in by_group.items()})
        self._timed[kind] = last  # the kind timed last comes last
        for name in last[-1]:
            # The faster one of two counts: the module's first pass warms up.
            self._seconds[name] = median_low(seconds[name] for seconds in last if name in seconds)
        now = sum(self._seconds.values())
        if not is_known or abs(now - self._pass_seconds) > MIN_GAIN * self._pass_seconds:
            self._pass_seconds = now
