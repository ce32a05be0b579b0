"""Decides on which tier each group of weights rests, and predicts how long a pass takes then.

Pure functions on frozen data: `make_plan(problem)` searches for the fastest placement within the budgets, `simulate(problem,
places)` predicts one placement. Neither touches a device, a file or a clock, and both give the same answer every time.

[Note: The model of a pass]
Passes follow one another, and what is predicted is one pass of many. Three things work at the same time, each on one
thing at a time and in order of use: the drive reads, the link copies to the device, the device computes.

- A resident group (`Place.DEVICE`) is computed as soon as what comes before it is. All other groups are sent in each use,
  uses that follow each other directly being one. Only if all that are used fit in the slots together is nothing sent.
- The slots are a ring of bytes: a use has its place as soon as the last of the earlier uses whose bytes it takes was
  computed. Where in the ring that is, `ring` says, to the engine too. (What the engine sends together, small groups, has
  places of its own here.)
- The link is one copy stream: it begins a use once the use before it has arrived and its place is free. A use that comes
  from a file arrives no sooner than the drive has read it, and those behind it wait, from RAM or not.
- The drive is never further ahead of the link than the staging memory, and goes on reading while places are taken.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from heapq import nlargest, nsmallest
from itertools import accumulate, groupby, product
from operator import itemgetter

from ..errors import ConfigError
from .ring import Geometry

_CHUNK_BYTES = 16 << 20
"""What is read last of a group is sent last: no sooner than it was read."""
_MIN_PASSES, _MAX_PASSES = 3, 8
"""The first pass begins with nothing on its way; the next ones soon are all alike."""
_SAME_PASS = 1e-4
"""Passes that differ by less are alike."""
_AS_FAST = 1.001
"""Plans this near to the fastest are as good, and something else decides between them."""
_NEAR_ENOUGH = 1.005
"""A plan this near to its limit is not improved any further."""
_FULL_EFFORT = 80_000
"""Uses that are simulated for one plan, at most: a few hundred plans of 57 groups."""
_MANY_USES = 500
"""For more than so many uses in a pass, a few plans have to do: the search is not to take long for 2,000 either."""
_EFFORT_FOR_MANY = 20_000
_MAX_THRESHOLDS = 6
"""Numbers of groups that are resident whatever is spread over the rest."""
_NUM_GIVERS = 8
"""Groups near to one, and as many of its size, that are tried in exchange for it."""
_MAX_GIVERS = 3
"""Groups that make room for one together."""


class Place(StrEnum):
    """Where a group rests from pass to pass."""

    DEVICE = "device"
    """It stays there, and takes no RAM if there is a file under it."""
    RAM = "ram"
    """Page-locked; sent each time it is used."""
    FILE = "file"
    """Read from the drive each time it is used."""


class _Axis(Enum):
    """What groups are spread evenly over."""

    TIME = "time"
    """Compute: what is sent arrives at an even rate."""
    BYTES = "bytes"
    """For compute that is not known, or is all in few groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """A group of weights as far as a plan needs to know it.

    Raises:
        ValueError: negative bytes, or a compute time that is negative or not finite.
    """

    name: str
    num_bytes: int
    compute_seconds: float
    """Of all its uses in one pass together; 0 if it is not known."""
    is_in_file: bool
    """Otherwise its bytes take RAM always, wherever it rests, and `Place.FILE` is not possible."""
    may_reside: bool = True

    def __post_init__(self) -> None:
        if self.num_bytes < 0:
            raise ValueError(f"group {self.name!r}: num_bytes={self.num_bytes} is negative")
        if not 0 <= self.compute_seconds < math.inf:
            raise ValueError(f"group {self.name!r}: compute_seconds={self.compute_seconds} has to be finite, 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Bytes per second.

    Raises:
        ValueError: a speed that is not finite and above 0.
    """

    h2d: float
    """From page-locked RAM to the device."""
    drive: float
    """From the drive to page-locked RAM, past the page cache."""

    def __post_init__(self) -> None:
        for name, speed in (("h2d", self.h2d), ("drive", self.drive)):
            if not 0 < speed < math.inf:
                raise ValueError(f"{name}={speed} bytes per second has to be finite and more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Bytes for weights alone: activations and all else were subtracted by the caller. None: no budget was given.

    Raises:
        ValueError: a negative budget.
    """

    device_bytes: int | None
    """For resident groups and slots. None: nothing is resident."""
    ram_bytes: int | None
    """For groups that rest in RAM, and those that have no file. None: all may rest there."""

    def __post_init__(self) -> None:
        for name, num_bytes in (("device_bytes", self.device_bytes), ("ram_bytes", self.ram_bytes)):
            if num_bytes is not None and num_bytes < 0:
                raise ValueError(f"{name}={num_bytes} is negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a plan is made from.

    Raises:
        ValueError: no groups, no uses, a use of a group that does not exist, no slots, negative staging.
    """

    groups: tuple[PlannedGroup, ...]
    order: tuple[int, ...]
    """Indices of `groups`, in the order of use in one pass. Some may be there again, some not at all."""
    speeds: Speeds
    budgets: Budgets
    num_slots: int = 2
    """So many groups that are sent, the largest ones, fit in the slots together."""
    staging_bytes: int = 256 << 20
    """How far the drive may be ahead of the link."""

    def __post_init__(self) -> None:
        if not self.groups or not self.order:
            raise ValueError(f"nothing to plan: {len(self.groups)} groups, {len(self.order)} uses")
        wrong = [index for index in self.order if not 0 <= index < len(self.groups)]
        if wrong:
            raise ValueError(f"order uses group {wrong[0]}; there are {len(self.groups)}, counted from 0")
        if self.num_slots < 1:
            raise ValueError(f"num_slots={self.num_slots}: at least 1 is needed")
        if self.staging_bytes < 0:
            raise ValueError(f"staging_bytes={self.staging_bytes} is negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One pass in steady state, by [Note: The model of a pass]. Times in seconds."""

    step_seconds: float
    stall_seconds: float
    """Compute waits for bytes."""
    stalls: tuple[tuple[str, float], ...]
    """Names of the groups that it waits for, and how long in one pass; the worst first."""
    h2d_bytes: int
    drive_bytes: int
    h2d_seconds: float
    drive_seconds: float
    compute_seconds: float

    @property
    def bound(self) -> str:
        """What is busy longest: "compute", "PCIe" or "drive"."""
        busy = {"compute": self.compute_seconds, "PCIe": self.h2d_seconds, "drive": self.drive_seconds}
        return max(busy, key=lambda name: busy[name])

    @property
    def limit_seconds(self) -> float:
        """How long that is busy: no order of work is faster with this placement."""
        return max(self.compute_seconds, self.h2d_seconds, self.drive_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where each group rests, what that takes, and how fast it is predicted to be."""

    problem: Problem
    places: tuple[Place, ...]
    """In the order of `problem.groups`."""
    slot_bytes: int
    """What groups that are sent take turns in."""
    device_bytes: int
    """Resident groups and slots."""
    ram_bytes: int
    """Groups that rest in RAM, and those that have no file."""
    prediction: Prediction
    num_simulated_uses: int
    """What it took to find."""

    def verdict(self) -> str:
        """One sentence: what bounds a pass, and how far from that limit it is."""
        step, limit = self.prediction.step_seconds, self.prediction.limit_seconds
        if not step:
            return "Nothing is sent to the device, and how long its compute takes is not known."
        over = step / limit - 1
        distance = "which is the limit" if over < 0.001 else f"{over:.1%} over the limit of {limit:.4g} s"
        return f"{self.prediction.bound} bounds a pass: it takes {step:.4g} s, {distance}; {self._busy()}."

    def gain_from(self, *, device_bytes: int = 0, ram_bytes: int = 0) -> float:
        """Seconds that a pass would be faster with that much more of each budget.

        Without a budget for the device, more than what this plan takes there; without one for RAM there is no more to give.
        """
        given = self.problem.budgets
        device, ram = given.device_bytes, given.ram_bytes
        if device_bytes:
            device = (self.device_bytes if device is None else device) + device_bytes
        if ram is not None:
            ram += ram_bytes
        more = replace(self.problem, budgets=Budgets(device_bytes=device, ram_bytes=ram))
        return max(0.0, self.prediction.step_seconds - make_plan(more).prediction.step_seconds)

    def _busy(self) -> str:
        p = self.prediction
        compute = f"compute {p.compute_seconds:.4g} s" if p.compute_seconds else "compute not known"
        return f"{compute}, PCIe {p.h2d_seconds:.4g} s, drive {p.drive_seconds:.4g} s"


def make_plan(problem: Problem) -> Plan:
    """The fastest placement within the budgets that the search finds.

    It is the best by the model where there are few placements (up to 8 groups on 3 tiers, 12 on 2). Of plans within 0.1% the
    one that sends least is taken, then that which reads least from the drive, then that with least on the device.

    Raises:
        ConfigError: a budget that no placement fits; names the smallest that works.
    """
    _check_budgets(problem)
    case = _Case(problem)
    return _plan(_search(case, _EFFORT_FOR_MANY if len(case.uses) > _MANY_USES else _FULL_EFFORT))


def simulate(problem: Problem, places: Sequence[Place]) -> Prediction:
    """Predict one pass with group i resting on `places[i]`, within the budgets or not.

    Raises:
        ValueError: not one place for each group, or one where a group cannot rest.
    """
    if len(places) != len(problem.groups):
        raise ValueError(f"{len(places)} places for {len(problem.groups)} groups")
    for group, place in zip(problem.groups, places, strict=True):
        if place is Place.FILE and not group.is_in_file:
            raise ValueError(f"group {group.name!r} has no file that it could rest in")
        if place is Place.DEVICE and not group.may_reside:
            raise ValueError(f"group {group.name!r} may not stay on the device")
    case = _Case(problem)
    load = case.load(places)
    return _prediction(case, load, _run(case, places, load))


def least_seconds(problem: Problem) -> float:
    """No placement within the budgets makes a pass faster than that. (None need be as fast.)"""
    return _lower_bound(_Case(problem))


def smallest_device_bytes(problem: Problem) -> int:
    """The smallest budget that works for the device: slots, and nothing resident."""
    return sum(nlargest(problem.num_slots, (group.num_bytes for group in problem.groups)))


def smallest_ram_bytes(problem: Problem) -> int:
    """The smallest budget that works for RAM: the groups that have no file."""
    return sum(group.num_bytes for group in problem.groups if not group.is_in_file)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes} bytes ({num_bytes / (1 << 30):.2f} GiB)"


def _check_budgets(problem: Problem) -> None:
    budgets, wrong = problem.budgets, []
    device, ram = smallest_device_bytes(problem), smallest_ram_bytes(problem)
    if budgets.device_bytes is not None and budgets.device_bytes < device:
        largest = max(problem.groups, key=lambda group: group.num_bytes)
        wrong.append(
            f"the device budget for weights is {_gib(budgets.device_bytes)}; the smallest that works is {_gib(device)}: "
            f"{problem.num_slots} slots; the largest group is {largest.name!r} with {_gib(largest.num_bytes)}"
        )
    if budgets.ram_bytes is not None and budgets.ram_bytes < ram:
        largest = max((group for group in problem.groups if not group.is_in_file), key=lambda group: group.num_bytes)
        wrong.append(
            f"the RAM budget for weights is {_gib(budgets.ram_bytes)}; the smallest that works is {_gib(ram)}: all groups "
            f"that have no file; the largest of them is {largest.name!r} with {_gib(largest.num_bytes)}"
        )
    if wrong:
        raise ConfigError("; and ".join(wrong))


def _plan(search: _Search) -> Plan:
    case, best = search.case, search.best
    load = case.load(best.places)
    return Plan(
        problem=case.problem,
        places=tuple(best.places),
        slot_bytes=load.in_slots,
        device_bytes=load.device,
        ram_bytes=smallest_ram_bytes(case.problem) + load.in_ram,
        prediction=_prediction(case, load, best.run),
        num_simulated_uses=search.effort,
    )


@dataclass(frozen=True, slots=True)
class _Load:
    """Bytes that a placement takes, and that it moves in one pass."""

    in_slots: int
    device: int
    """Resident groups and slots."""
    in_ram: int
    """Of groups that have a file."""
    not_resident: int
    """Of groups that are used, whether they are sent each time or all fit in the slots."""
    h2d: int
    drive: int


class _Case:
    """A problem, as the simulator and the search need it."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.groups = problem.groups
        self.compute_of = [group.compute_seconds for group in self.groups]
        self.sizes = [group.num_bytes for group in self.groups]
        num_uses = [0] * len(self.groups)
        for index in problem.order:
            num_uses[index] += 1
        self.uses: list[tuple[int, float]] = []
        """The group, and the seconds of compute. Uses that follow each other directly are one."""
        for index, run in groupby(problem.order):
            share = sum(1 for _ in run) / num_uses[index]
            self.uses.append((index, share * self.compute_of[index]))
        self.num_sent = [0] * len(self.groups)
        """How often in a pass, unless resident."""
        for index, _ in self.uses:
            self.num_sent[index] += 1
        self.used = list(dict.fromkeys(index for index, _ in self.uses))
        """In the order of first use."""
        self.compute = sum(seconds for _, seconds in self.uses)
        budgets = problem.budgets
        self.device_budget = 0 if budgets.device_bytes is None else budgets.device_bytes
        self.has_residents = budgets.device_bytes is not None
        self.ram_room = math.inf if budgets.ram_bytes is None else budgets.ram_bytes - smallest_ram_bytes(problem)
        """For groups that have a file."""

    def load(self, places: Sequence[Place]) -> _Load:
        sizes, sent, device, file = self.sizes, self.num_sent, Place.DEVICE, Place.FILE
        streamed = [index for index, place in enumerate(places) if place is not device]
        in_slots = sum(nlargest(self.problem.num_slots, [sizes[index] for index in streamed]))
        resident = sum(sizes) - sum([sizes[index] for index in streamed])
        in_ram = sum(
            [sizes[index] for index in streamed if places[index] is not file and self.groups[index].is_in_file]
        )
        not_resident = sum([sizes[index] for index in streamed if sent[index]])
        if not_resident <= in_slots:
            return _Load(in_slots, resident + in_slots, in_ram, not_resident, 0, 0)
        h2d = sum([sizes[index] * sent[index] for index in streamed])
        drive = sum([sizes[index] * sent[index] for index in streamed if places[index] is file])
        return _Load(in_slots, resident + in_slots, in_ram, not_resident, h2d, drive)

    def fits(self, load: _Load) -> bool:
        return load.in_ram <= self.ram_room and (not self.has_residents or load.device <= self.device_budget)

    def limit(self, load: _Load) -> float:
        """Seconds that a pass takes at least with this placement."""
        return max(self.compute, load.h2d / self.problem.speeds.h2d, load.drive / self.problem.speeds.drive)

    def choices(self, index: int) -> list[Place]:
        """Where a group that is used may rest."""
        group = self.groups[index]
        choices = [Place.RAM]
        if group.may_reside and self.has_residents:
            choices.insert(0, Place.DEVICE)
        if group.is_in_file and self.ram_room < math.inf:
            choices.append(Place.FILE)
        return choices

    def at_first(self) -> list[Place]:
        """All on the lowest tier that there is."""
        places = [Place.FILE if group.is_in_file else Place.RAM for group in self.groups]
        if self.ram_room == math.inf:
            for index in self.used:
                places[index] = Place.RAM
        return places


@dataclass(frozen=True, slots=True)
class _Read:
    """What the drive does for one use."""

    seconds: float
    last_chunk: float
    """Seconds that the last chunk is on the link, after it was read."""
    windows: list[tuple[int, float]]
    """(i, s): it is read no sooner than s seconds after the copy i uses from files earlier has begun. See `_windows`."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """The uses in one pass of groups that are sent: lists as long as there are such uses."""

    groups: list[int]
    gaps: list[float]
    """Seconds of compute of resident groups right before each."""
    computes: list[float]
    copies: list[float]
    """Seconds on the link."""
    backs: list[int]
    """Each takes the place of the use that many before it."""
    reads: list[_Read | None]


@dataclass(frozen=True, slots=True)
class _Run:
    step: float
    stalls: dict[int, float]
    """By group."""
    num_simulated: int
    """Uses, over all passes."""


def _prediction(case: _Case, load: _Load, run: _Run) -> Prediction:
    stalls = sorted(((case.groups[i].name, s) for i, s in run.stalls.items() if s > 0), key=lambda stall: -stall[1])
    return Prediction(
        step_seconds=run.step,
        stall_seconds=run.step - case.compute,
        stalls=tuple(stalls),
        h2d_bytes=load.h2d,
        drive_bytes=load.drive,
        h2d_seconds=load.h2d / case.problem.speeds.h2d,
        drive_seconds=load.drive / case.problem.speeds.drive,
        compute_seconds=case.compute,
    )


def _run(case: _Case, places: Sequence[Place], load: _Load) -> _Run:
    """Simulate passes until they are alike."""
    if not load.h2d:
        return _Run(case.compute, {}, 0)
    sent = _sent_uses(case, places, load.in_slots)
    clocks = _Clocks(sent)
    before, after, num_passes = [0.0], clocks.run_pass(), 1
    while num_passes < _MIN_PASSES or (num_passes < _MAX_PASSES and not _alike(case.compute, before, after)):
        before, after, num_passes = after, clocks.run_pass(), num_passes + 1
    stalls: dict[int, float] = {}
    for group, one, other in zip(sent.groups, before, after, strict=True):
        stalls[group] = stalls.get(group, 0.0) + (one + other) / 2
    return _Run(case.compute + sum(stalls.values()), stalls, num_passes * len(sent.groups))


def _alike(compute: float, before: list[float], after: list[float]) -> bool:
    stalled = sum(after)
    return abs(stalled - sum(before)) <= _SAME_PASS * (compute + stalled)


class _Clocks:
    """When the drive, the link and compute are done with what they were given."""

    def __init__(self, sent: _Sent) -> None:
        self._sent = sent
        self._drive = self._link = self._compute = 0.0
        self._ends = [0.0] * len(sent.groups)
        """Of the compute of each use; a pass that took no time is before the first one."""
        self._starts = [0.0] * (sum(read is not None for read in sent.reads) + 1)
        """Of the copies of what comes from files."""

    def run_pass(self) -> list[float]:
        """The seconds that compute waits for each use."""
        ends, link, compute = self._ends, self._link, self._compute
        stalls, sent = [], self._sent
        for gap, seconds, copy, back, read in zip(
            sent.gaps, sent.computes, sent.copies, sent.backs, sent.reads, strict=True
        ):
            free = ends[-back]
            start = free if free > link else link
            link = start + copy
            if read is not None:
                link = max(link, self._read(read, start) + read.last_chunk)
            compute += gap
            stall = link - compute if link > compute else 0.0
            stalls.append(stall)
            compute += stall + seconds
            ends.append(compute)
        self._link, self._compute = link, compute
        return stalls

    def _read(self, read: _Read, start: float) -> float:
        """When all of it was read, if its copy begins at `start`."""
        self._starts.append(start)
        drive = self._drive + read.seconds
        for back, seconds in read.windows:
            drive = max(drive, self._starts[-1 - back] + seconds)
        self._drive = drive
        return drive


def _sent_uses(case: _Case, places: Sequence[Place], slot_bytes: int) -> _Sent:
    speeds, sizes = case.problem.speeds, case.sizes
    groups, gaps, computes, gap = [], [], [], 0.0
    for index, seconds in case.uses:
        if places[index] is Place.DEVICE:
            gap += seconds
        else:
            groups.append(index)
            gaps.append(gap)
            computes.append(seconds)
            gap = 0.0
    gaps[0] += gap  # what is left at the end of a pass is before the first use of the next one
    largest = max([size for size, place in zip(sizes, places, strict=True) if place is not Place.DEVICE])
    sent_sizes = [sizes[index] for index in groups]
    reads = _reads([sizes[index] for index in groups if places[index] is Place.FILE], case.problem)
    return _Sent(
        groups=groups,
        gaps=gaps,
        computes=computes,
        copies=[size / speeds.h2d for size in sent_sizes],
        backs=_backs(sent_sizes, Geometry(slot_bytes, largest)),
        reads=[next(reads) if places[index] is Place.FILE else None for index in groups],
    )


def _backs(sizes: list[int], geometry: Geometry) -> list[int]:
    """For each use of a pass, how many uses before it that one is whose compute has to be over before it has its place.

    In steady state: the uses of the pass before count too. They do not all fit, so none is more than a pass back.
    """
    live: dict[int, int] = {}
    """Where uses begin whose bytes nothing has taken since, oldest first."""
    begins: list[int] = []
    """The same in the order of the bytes: there may be many small ones."""
    ends: list[int] = []
    uses: list[int] = []
    backs, head, over = [], 0, -1
    for use, size in enumerate(sizes * 2):
        is_first = use == len(sizes)
        # Mostly the first place will do: it is free now, or as soon as the oldest use is over, before which nothing is.
        found = geometry.fit(0 if is_first else head, size)
        i, j = bisect_right(ends, found), bisect_left(begins, found + size)
        best = uses[i] if j == i + 1 else max(uses[i:j], default=-1)
        if best > over and best > next(iter(live)):
            best = use
            for start in geometry.starts(size, head, live.values(), is_first=is_first):
                last = max(uses[bisect_right(ends, start) : bisect_left(begins, start + size)], default=-1)
                if last < best:
                    found, best = start, last
                if best <= over or best == next(iter(live)):
                    break
            i, j = bisect_right(ends, found), bisect_left(begins, found + size)
        head = found + size
        over = max(over, best)
        for taken in uses[i:j]:
            del live[taken]
        live[use] = found
        begins[i:j], ends[i:j], uses[i:j] = [found], [head], [use]
        backs.append(use - over)
    return backs[len(sizes) :]


def _reads(sizes: list[int], problem: Problem) -> Iterator[_Read]:
    windows = _windows(sizes, min(problem.staging_bytes, sum(sizes)), problem.speeds.drive)
    for size, window in zip(sizes, windows, strict=True):
        yield _Read(size / problem.speeds.drive, min(size, _CHUNK_BYTES) / problem.speeds.h2d, window)


def _windows(sizes: list[int], staging_bytes: int, drive: float) -> list[list[tuple[int, float]]]:
    """For each use from a file, the copies whose begin is what lets the drive go on.

    Frames of the staging memory come free as a copy goes on, and faster than the drive fills them. So the byte that lies
    `staging_bytes` behind the first one of a copy cannot be read before that copy begins. It lies in this use.
    """
    ends = list(accumulate(sizes * 2))
    begins = [0, *ends]
    windows, first = [], 0
    for index, end in enumerate(ends):
        window = []
        while first <= index and begins[first] + staging_bytes <= end:
            window.append((index - first, (end - begins[first] - staging_bytes) / drive))
            first += 1
        windows.append(window)
    return windows[len(sizes) :]


@dataclass(frozen=True, slots=True)
class _Found:
    """A placement that was simulated."""

    places: list[Place]
    run: _Run
    taste: tuple[int, ...]
    """Bytes sent, read, not resident, on the device and in RAM: less is better where plans are as fast."""


@dataclass(slots=True)
class _Search:
    """The best placement so far, and what it took."""

    case: _Case
    max_effort: int
    effort: int = 0
    fastest: float = math.inf
    found: list[_Found] = field(default_factory=list)
    """The best one, once there is one."""

    @property
    def best(self) -> _Found:
        return self.found[0]

    @property
    def is_over(self) -> bool:
        return self.effort >= self.max_effort

    def look(self) -> None:
        """Count what it takes to make a placement and to add up its bytes, in uses that are simulated in that time."""
        self.effort += 2 * len(self.case.groups)

    def consider(self, places: list[Place]) -> bool:
        """Take a placement if it is within the budgets and better than the best so far."""
        case, load = self.case, self.case.load(places)
        limit = case.limit(load)
        if not case.fits(load) or limit > self.fastest * _AS_FAST:
            return False
        taste = (load.h2d, load.drive, load.not_resident, load.device, load.in_ram)
        if self.found and self.best.run.step <= min(self.fastest, limit) * _AS_FAST and taste >= self.best.taste:
            return False  # however fast it is
        run = _run(case, places, load)
        self.effort += run.num_simulated
        self.fastest = min(self.fastest, run.step)
        if self.found and run.step > self.fastest * _AS_FAST:
            return False
        if self.found and self.best.run.step <= self.fastest * _AS_FAST and taste >= self.best.taste:
            return False
        self.found[:] = [_Found(places, run, taste)]
        return True


def _search(case: _Case, max_effort: int) -> _Search:
    search = _Search(case, max_effort)
    near_enough = _lower_bound(case) * _NEAR_ENOUGH
    for places in _candidates(case):
        search.look()
        search.consider(places)
        if search.is_over or search.fastest <= near_enough:
            break
    if _num_placements(case) * len(case.uses) <= _FULL_EFFORT:
        _try_all(search)
        return search
    _improve(search, near_enough)
    return search


def _lower_bound(case: _Case) -> float:
    """Seconds that no placement within the budgets is faster than.

    The budgets are filled to the last byte with parts of groups, those that are sent most often first. Compute, the link and
    the drive are each taken to be busy without a pause. The fastest placement may be far above this bound, for three reasons:

    - Groups rest on a tier as a whole. Of 9 equal groups, with room for 3.4 on the device and 0.9 in RAM, this bound reads
      4.7 and every placement at least 6: 28% more.
    - Compute of uneven groups does not cover all copies. In SD 1.5's UNet, 8 groups, a large group with little compute waits
      for the link: 26 to 43% over the bound where 14 to 16% or nothing is due to whole groups.
    - Copies are in order, and the drive is ahead of them by the staging memory at most. Of 60 equal groups (Qwen-Image) two
      are read, which takes 0.618 s. Between the two the link sends 15 groups from RAM, 0.184 s, and the drive stands still
      once it has read 256 MiB, 0.122 s at 2.2 GB/s. So the pass takes 0.742 s: 20% more.

    The search was compared with all placements of 180 problems of 8 or 9 groups, of the sizes of FLUX.1, Wan, Qwen-Image and
    this UNet. The fastest placement is a median of 5% above the bound, and more than 10% in 68 problems, in 54 of them for the
    first reason alone. Without trying all placements the search finds it in 175, and is at most 2.4% slower in the others.
    """
    room = case.device_budget - _least_in_slots(case) if case.has_residents else 0
    most = case.device_budget if case.has_residents else sum(nlargest(case.problem.num_slots, case.sizes))
    used = sum(case.sizes[index] for index in case.used)
    if used <= most:  # then all of them may fit there together, resident or in slots
        room = used
    sent = _least_sent(case, case.used, room)
    read = _least_sent(case, [index for index in case.used if case.groups[index].is_in_file], room + case.ram_room)
    return max(case.compute, sent / case.problem.speeds.h2d, read / case.problem.speeds.drive)


def _least_in_slots(case: _Case) -> int:
    """The slots are no smaller than this if not all groups are resident.

    If the smallest group that they are made for has s bytes, all larger ones are resident or in the slots, so on the
    device. Hence s is no smaller than the last group that still fits there, taking groups by size.
    """
    smallest, total = 0, 0
    for size in sorted(case.sizes, reverse=True):
        total += size
        if total > case.device_budget:
            break
        smallest = size
    return smallest * min(case.problem.num_slots, len(case.sizes))


def _least_sent(case: _Case, indices: Sequence[int], room: float) -> float:
    sent = 0.0
    for index in sorted(indices, key=lambda index: -case.num_sent[index]):
        kept = min(room, case.sizes[index])
        room -= kept
        sent += (case.sizes[index] - kept) * case.num_sent[index]
    return sent


def _num_placements(case: _Case) -> int:
    return math.prod(len(case.choices(index)) for index in case.used)


def _try_all(search: _Search) -> None:
    """Look at every placement. Those with the lowest limits come first: few of the others have to be simulated then."""
    case = search.case
    fitting = []
    for chosen in product(*(case.choices(index) for index in case.used)):
        places = case.at_first()
        for index, place in zip(case.used, chosen, strict=True):
            places[index] = place
        load = case.load(places)
        if case.fits(load):
            fitting.append((case.limit(load), places))
    for limit, places in sorted(fitting, key=itemgetter(0)):
        if limit > search.fastest * _AS_FAST:
            return
        search.consider(places)


def _candidates(case: _Case) -> Iterator[list[Place]]:
    """Placements that fill the budgets, each spread evenly in another way; and one that leaves the smallest holes."""
    axes = (_Axis.TIME, _Axis.BYTES) if case.compute else (_Axis.BYTES,)
    orders = (False, True) if case.ram_room < math.inf else (False,)
    even = (
        _fill_tiers(case, residents, axis, files_first=files_first)
        for residents, axis, files_first in product(_first_residents(case), axes, orders)
    )
    yield next(even)
    yield _fill_in_order(case, _by_size(case, case.used))
    yield from even


def _first_residents(case: _Case) -> Iterator[list[int]]:
    """Groups that are resident whatever is spread: none, or the largest ones, or those that are used most often.

    Without the largest ones the slots are smaller. There are few large ones, and many sizes: not all numbers are tried.
    """
    yield []
    if not case.has_residents:
        return
    able = [index for index in case.used if case.groups[index].may_reside]
    for ranks in (case.num_sent, case.sizes):
        ranked = sorted(able, key=lambda index: (-ranks[index], -case.sizes[index]))
        steps = [n for n in range(1, len(ranked)) if ranks[ranked[n]] < ranks[ranked[n - 1]]]
        num_fitting = bisect_right(
            steps, case.device_budget, key=lambda n: case.load(_with_residents(case, ranked[:n])).device
        )
        stride = -(-num_fitting // _MAX_THRESHOLDS) or 1
        yield from (ranked[:n] for n in steps[:num_fitting][::-1][::stride])


def _with_residents(case: _Case, residents: Sequence[int]) -> list[Place]:
    places = case.at_first()
    for index in residents:
        places[index] = Place.DEVICE
    return places


def _fill_tiers(case: _Case, residents: Sequence[int], axis: _Axis, *, files_first: bool) -> list[Place]:
    """Spread groups over the tiers, so that what is sent and what is read is even along `axis`.

    `files_first`: what stays on the drive is spread over all groups, and residents over the rest. Otherwise residents are
    spread over all groups.
    """
    places = _with_residents(case, residents)
    room = max(0, case.device_budget - case.load(places).device) if case.has_residents else 0
    rest = [index for index in case.used if places[index] is not Place.DEVICE]
    if files_first:
        in_file = [index for index in rest if case.groups[index].is_in_file]
        kept = _spread(case, in_file, room + case.ram_room, axis)
        rest = [index for index in rest if index in kept or not case.groups[index].is_in_file]
    for index in _spread(case, [index for index in rest if Place.DEVICE in case.choices(index)], room, axis):
        places[index] = Place.DEVICE
    for index in _spread(case, [index for index in rest if places[index] is Place.FILE], case.ram_room, axis):
        places[index] = Place.RAM
    _top_up(case, places)
    return places


def _spread(case: _Case, indices: Sequence[int], room: float, axis: _Axis) -> set[int]:
    """Which of `indices` to take into `room` bytes, so that those left out come at an even rate along `axis`."""
    sizes = case.sizes
    lengths = [case.compute_of[i] if axis is _Axis.TIME else sizes[i] for i in indices]
    total = sum(lengths) or 1
    left_out_in_all = max(0, sum(sizes[i] for i in indices) - room)
    taken, left_out, progress = set(), 0, 0.0
    for index, length in zip(indices, lengths, strict=True):
        progress += length / total
        if sizes[index] <= room and left_out + sizes[index] / 2 > left_out_in_all * progress:
            taken.add(index)
            room -= sizes[index]
        else:
            left_out += sizes[index]
    return taken


def _top_up(case: _Case, places: list[Place]) -> None:
    """Fill what the budgets leave: what is read from the drive first, and large groups first."""
    if case.has_residents:
        _top_up_device(case, places)
    room = case.ram_room - case.load(places).in_ram
    for index in _by_size(case, [index for index in case.used if places[index] is Place.FILE]):
        if case.sizes[index] <= room:
            places[index] = Place.RAM
            room -= case.sizes[index]


def _top_up_device(case: _Case, places: list[Place]) -> None:
    able = [i for i in case.used if places[i] is not Place.DEVICE and case.groups[i].may_reside]
    room = case.device_budget - case.load(places).device
    streamed = sorted(case.sizes[i] for i, place in enumerate(places) if place is not Place.DEVICE)
    for index in sorted(_by_size(case, able), key=lambda i: places[i] is not Place.FILE):
        # A group that the slots were made for leaves its place in them to the next largest one.
        size, num_slots = case.sizes[index], case.problem.num_slots
        taken = min(size, streamed[-1 - num_slots]) if len(streamed) > num_slots else 0
        if taken <= room:
            places[index] = Place.DEVICE
            room -= taken
            streamed.pop(bisect_left(streamed, size))


def _by_size(case: _Case, indices: Sequence[int]) -> list[int]:
    return sorted(indices, key=lambda index: -case.sizes[index])


def _improve(search: _Search, near_enough: float) -> None:
    """Exchange groups between tiers, as long as that makes the plan better and effort is left."""
    while search.fastest > near_enough:
        if not any(search.consider(places) for places in _neighbours(search)):
            return


def _fill_in_order(case: _Case, indices: Sequence[int]) -> list[Place]:
    places = case.at_first()
    room = case.device_budget - case.load(places).device
    for index in indices:
        if Place.DEVICE in case.choices(index) and case.sizes[index] <= room:
            places[index] = Place.DEVICE
            room -= case.sizes[index]
    room_in_ram = case.ram_room
    for index in indices:
        if places[index] is Place.FILE and case.sizes[index] <= room_in_ram:
            places[index] = Place.RAM
            room_in_ram -= case.sizes[index]
    _top_up(case, places)
    return places


def _neighbours(search: _Search) -> Iterator[list[Place]]:
    """Placements next to the best one, those first that help where compute waits longest; none if effort is used up."""
    case, best = search.case, search.best
    position = {index: at for at, index in enumerate(case.used)}
    for stalled in sorted(best.run.stalls, key=lambda index: -best.run.stalls[index]):
        for index in _sent_before(case, best.places, position[stalled]):
            for givers in _givers(case, best.places, position, index):
                if search.is_over:
                    return
                search.look()
                neighbour = _exchange(case, best.places, index, givers)
                if neighbour is not None:
                    yield neighbour


def _sent_before(case: _Case, places: list[Place], position: int) -> list[int]:
    """The group used at `position`, and the last few sent before it: any of them may be what is late."""
    backwards = [case.used[position - back] for back in range(min(len(case.used), 8))]
    return [index for index in backwards if places[index] is not Place.DEVICE][:4]


def _givers(case: _Case, places: list[Place], position: dict[int, int], index: int) -> Iterator[list[int]]:
    """Groups that could make room for `index` on a higher tier: near to it in the pass, or in size."""
    choices = case.choices(index)
    for place in choices[: choices.index(places[index])]:
        there = [other for other in case.used if places[other] is place]
        near = nsmallest(_NUM_GIVERS, there, key=lambda other: abs(position[other] - position[index]))
        alike = nsmallest(_NUM_GIVERS, there, key=lambda other: abs(case.sizes[other] - case.sizes[index]))
        for giver in dict.fromkeys((*near, *alike)):
            yield [giver, *(other for other in near if other != giver)][:_MAX_GIVERS]


def _exchange(case: _Case, places: list[Place], index: int, givers: list[int]) -> list[Place] | None:
    """`index` rests where the givers do, and as many of those as have to go to where it was; None if that does not fit."""
    changed = list(places)
    changed[index] = places[givers[0]]
    for giver in givers:
        for place in (places[index], Place.FILE):
            changed[giver] = place if place in case.choices(giver) else Place.RAM
            if case.fits(case.load(changed)):
                _top_up(case, changed)
                return changed if changed != places else None
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentLoad:
    """One component of a pipeline, as far as sharing RAM needs to know it.

    Raises:
        ValueError: negative bytes or uses, or more bytes without a file than there are.
    """

    num_bytes: int
    uses: float
    """Passes for one image."""
    must_bytes: int
    """Have no file, so take RAM always."""

    def __post_init__(self) -> None:
        if not 0 <= self.must_bytes <= self.num_bytes:
            raise ValueError(f"must_bytes={self.must_bytes} has to be from 0 to num_bytes={self.num_bytes}")
        if not 0 <= self.uses < math.inf:
            raise ValueError(f"uses={self.uses} has to be finite, 0 or more")


def share_ram(components: Sequence[ComponentLoad], ram_bytes: int) -> tuple[int, ...]:
    """Bytes of RAM for each component; they run one after another.

    A byte that rests in RAM saves one read from the drive in each pass. So components with most passes get RAM first;
    those with as many get the same fraction of what they lack.

    Raises:
        ConfigError: too little for what has no file; names the smallest budget that works.
    """
    if ram_bytes < 0:
        raise ValueError(f"ram_bytes={ram_bytes} is negative")
    shares = [component.must_bytes for component in components]
    room = ram_bytes - sum(shares)
    if room < 0:
        raise ConfigError(
            f"the RAM budget for weights is {_gib(ram_bytes)}; the smallest that works is {_gib(sum(shares))}: all weights "
            "that have no file"
        )
    for uses in sorted({component.uses for component in components}, reverse=True):
        alike = [index for index, component in enumerate(components) if component.uses == uses]
        room -= _share_evenly(components, shares, alike, room)
    return tuple(shares)


def _share_evenly(components: Sequence[ComponentLoad], shares: list[int], alike: Sequence[int], room: int) -> int:
    """Add to the shares of the components `alike`; returns how many bytes."""
    wanted = [components[index].num_bytes - shares[index] for index in alike]
    total = sum(wanted)
    given = [want * min(room, total) // total if total else 0 for want in wanted]
    for index, num_bytes in zip(alike, given, strict=True):
        shares[index] += num_bytes
    return sum(given)
