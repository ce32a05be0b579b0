"""How long a pass takes with a given placement.

`simulate(problem, placements)` predicts one placement. The functions here touch no device, no file and no clock, and give
the same answer every time.

[Note: The model of a pass]
Passes follow one another, and the prediction is for one pass of many. Three things work at the same time, each on one
item at a time and in order of use: the drive reads, the link copies to the device, the device computes.

- A resident group (`Placement.DEVICE`) is computed as soon as the use before it is. Every other group is sent for each
  use, except that uses that follow each other directly are one. If all groups that are used and not resident fit in the
  slots together, they stay there and none is sent.
- The slots are a ring of bytes. A use can take its bytes as soon as the last of the earlier uses that had them was
  computed. `ring` decides which bytes these are, for the engine too. (The engine may send several small groups together;
  in this model each has a slot to itself.)
- The link is one copy stream. It begins a use once the use before it has arrived and the slot is free. A use that comes
  from a file arrives no sooner than the drive has read it, and the uses behind it wait, even those that come from RAM.
- The drive is never further ahead of the link than the staging memory. It reads on while slots are taken.
- A packed group in RAM is sent strip by strip. A strip needs no slot to be sent, but one of the berths, which are free once the
  strip that many before was unpacked: when it had arrived and its slot was free. So the link is ahead of the slot by as many
  strips. A group that stays on the device packed takes no time on the link.
- A packed group in a file is read packed. Its strips need the reading berth, one after another.
- The device computes nothing else while it unpacks. (It does, but how much slower was not measured.)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import accumulate, groupby

from ..base.timeline import COMPUTE, COPIES, DECODE, READS, STALLS, Slice
from .placement import NUM_BERTHS, Placement, Problem
from .ring import Geometry

_CHUNK_BYTES = 16 << 20
"""The last chunk of a group is sent after it was read, so the link needs the time of this many bytes more."""
_MIN_PASSES, _MAX_PASSES = 3, 8
"""How many passes are simulated. The first begins with nothing on its way; later ones soon take equally long."""
_SAME_PASS = 1e-4
"""Two passes take equally long if their times differ by a smaller share than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One pass in steady state, by [Note: The model of a pass]. Times in seconds."""

    step_seconds: float
    stall_seconds: float
    """How long compute waits for bytes."""
    stalls: tuple[tuple[str, float], ...]
    """Names of the groups that compute waits for, and how long in one pass; the longest wait first."""
    h2d_bytes: int
    drive_bytes: int
    h2d_seconds: float
    drive_seconds: float
    compute_seconds: float
    unpack_bytes: int = 0
    """Bytes of weights that the device unpacks."""
    unpack_seconds: float = 0.0

    @property
    def bound(self) -> str:
        """The part of the machine that is busy longest: "compute" (which unpacking is a part of), "PCIe" or "drive"."""
        compute = self.compute_seconds + self.unpack_seconds
        busy = {"compute": compute, "PCIe": self.h2d_seconds, "drive": self.drive_seconds}
        return max(busy, key=lambda name: busy[name])

    @property
    def limit_seconds(self) -> float:
        """How long that part is busy: no order of work makes this placement faster."""
        return max(self.compute_seconds + self.unpack_seconds, self.h2d_seconds, self.drive_seconds)


def simulate(problem: Problem, placements: Sequence[Placement]) -> Prediction:
    """Predict one pass with group i resting on `placements[i]`, within the budgets or not.

    Raises:
        ValueError: a number of placements that is not the number of groups, or a tier where a group cannot rest.
    """
    if len(placements) != len(problem.groups):
        raise ValueError(f"{len(placements)} placements for {len(problem.groups)} groups")
    for group, placement in zip(problem.groups, placements, strict=True):
        why_not = group.why_not(placement)
        if why_not:
            raise ValueError(f"group {group.name!r} {why_not}")
    model = PassModel(problem)
    footprint = model.footprint(placements)
    return model.predict(footprint, model.run(placements, footprint))


def foresee(problem: Problem, placements: Sequence[Placement]) -> list[Slice]:
    """What the drive, the link and compute do in one pass in steady state, in seconds from its beginning.

    What is begun before the pass, or is for the next one, is a part of it: such slices begin before 0, or end after the pass.
    """
    model = PassModel(problem)
    footprint = model.footprint(placements)
    unpack = [0.0] * len(model.groups)
    if footprint.unpack_bytes:
        unpack = [
            size / problem.speeds.unpack if is_unpacked else 0.0
            for size, is_unpacked in zip(model.sizes, model.are_unpacked(placements), strict=True)
        ]
    if not footprint.h2d_bytes:
        return [*_computes(model, {}, unpack)]
    sent = _sent_uses(model, placements, footprint.slot_bytes)
    clocks = _Clocks(sent)
    for _ in range(_MIN_PASSES):
        clocks.run_pass()
    moves: list[_Move] = []
    stalls = clocks.run_pass(moves)
    num_uses = len(stalls)
    clocks.run_pass(moves)
    sent_turns = [turn for turn, (index, _) in enumerate(model.uses) if placements[index] is not Placement.DEVICE]
    found = [*_computes(model, dict(zip(sent_turns, stalls, strict=True)), unpack)]
    first_name = model.groups[sent.groups[0]].name
    first = next(each.start for each in found if each.name == first_name and each.lane in (DECODE, COMPUTE))
    zero, end = moves[0][2] - first, found[-1].end
    for turn, (start, arrived, _, is_read) in enumerate(moves):
        if arrived is None:
            continue
        index, read = sent.groups[turn % num_uses], sent.reads[turn % num_uses]
        group = model.groups[index]
        num_bytes = model.sent[index] if unpack[index] else group.num_bytes
        if read is not None:
            found.append(Slice(READS, group.name, is_read - zero - read.seconds, is_read - zero, num_bytes))
        # A copy that waits for the drive is not busy all the time: what counts is its end.
        start = max(start, arrived - num_bytes / problem.speeds.h2d)
        found.append(Slice(COPIES, group.name, start - zero, arrived - zero, num_bytes))
    return [each for each in found if each.end > 0 and each.start < end]


def _computes(model: PassModel, stalls: Mapping[int, float], unpack: Sequence[float]) -> Iterator[Slice]:
    """Compute of each use, and what comes before it: the stall, by the turn of the use, and unpacking, by the group."""
    now = 0.0
    for turn, (index, seconds) in enumerate(model.uses):
        group, stall = model.groups[index], stalls.get(turn, 0.0)
        if stall > 0:
            yield Slice(STALLS, group.name, now, now + stall, 0)
        now += stall
        if unpack[index] > 0:
            yield Slice(DECODE, group.name, now, now + unpack[index], group.num_bytes)
            now += unpack[index]
        yield Slice(COMPUTE, group.name, now, now + seconds, group.num_bytes)
        now += seconds


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a placement takes, and bytes that it moves in one pass."""

    slot_bytes: int
    berth_bytes: int
    """What packed bytes land in before they are unpacked."""
    device_bytes: int
    """Resident groups, packed or not, slots, and berths."""
    not_resident_bytes: int
    """Groups that are used and not resident, whether they are sent each time or all fit in the slots."""
    h2d_bytes: int
    drive_bytes: int
    unpack_bytes: int


@dataclass(frozen=True, slots=True)
class SimulatedPass:
    """One pass in steady state, as the search needs it."""

    step_seconds: float
    stalls: dict[int, float]
    """Seconds that compute waits, by the index of the group that it waits for."""
    num_uses: int
    """How many uses were simulated, over all passes."""


class PassModel:
    """A problem, prepared for simulating many placements of it."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.groups = problem.groups
        self.sizes = [group.num_bytes for group in self.groups]
        self.is_packed = [group.packed_bytes > 0 for group in self.groups]
        self.berths = [group.berth_bytes for group in self.groups]
        self.sent = [group.packed_bytes or group.num_bytes for group in self.groups]
        """What each group takes in RAM, and on the link from there."""
        self.reads_packed = [group.reads_packed and group.packed_bytes > 0 for group in self.groups]
        self.read = [
            group.packed_bytes if packed else group.num_bytes
            for group, packed in zip(self.groups, self.reads_packed, strict=True)
        ]
        """What is read of each group from its file, and sent then."""
        num_uses = [0] * len(self.groups)
        for index in problem.order:
            num_uses[index] += 1
        self.uses: list[tuple[int, float]] = []
        """Group and seconds of compute of each use. Uses that follow each other directly are one."""
        for index, run in groupby(problem.order):
            share = sum(1 for _ in run) / num_uses[index]
            self.uses.append((index, share * self.groups[index].compute_seconds))
        self.num_sent = [0] * len(self.groups)
        """How often each group is sent in a pass unless it is resident."""
        for index, _ in self.uses:
            self.num_sent[index] += 1
        self.used = list(dict.fromkeys(index for index, _ in self.uses))
        """The groups that are used, in the order of their first use."""
        self.compute_seconds = sum(seconds for _, seconds in self.uses)
        budgets = problem.budgets
        self.device_budget = 0 if budgets.device_bytes is None else budgets.device_bytes
        self.has_residents = budgets.device_bytes is not None
        self.rests = problem.rests or (Placement.RAM,) * len(self.groups)
        self.choices = [self._choices(index) for index in range(len(self.groups))]
        """Where each group may be between its uses, given where it rests; the fastest first."""
        able = [index for index in self.used if Placement.DEVICE in self.choices[index]]
        self.by_size = sorted(able, key=lambda index: -self.sizes[index])
        """The groups that are used and may stay on the device, the largest first."""
        self._known_backs: dict[tuple[int, ...], list[int]] = {}

    def _choices(self, index: int) -> list[Placement]:
        group, rest = self.groups[index], self.rests[index]
        if not group.may_reside or not self.has_residents:
            return [rest]
        is_kept_packed = group.packed_bytes > 0 and rest is Placement.RAM
        return [Placement.DEVICE, Placement.PACKED, rest] if is_kept_packed else [Placement.DEVICE, rest]

    def footprint(self, placements: Sequence[Placement]) -> Footprint:
        # Each candidate of the search comes through here, so the names are bound to locals.
        sizes, sent, device, file = self.sizes, self.num_sent, Placement.DEVICE, Placement.FILE
        in_ram, kept, is_packed = self.sent, Placement.PACKED, self.is_packed
        streamed = [index for index, placement in enumerate(placements) if placement is not device]
        slots = sum(nlargest(self.problem.num_slots, [sizes[index] for index in streamed]))
        resident = sum(sizes) - sum([sizes[index] for index in streamed])
        berths, unpacked = 0, 0
        if any(is_packed):
            resident += sum([in_ram[index] for index in streamed if placements[index] is kept])
            from_file = [i for i in streamed if self.reads_packed[i] and placements[i] is file]
            packed = [i for i in streamed if is_packed[i] and placements[i] is not file]
            from_ram = [self.berths[index] for index in packed if placements[index] is not kept]
            berths = NUM_BERTHS * max(from_ram, default=0) + max([self.berths[i] for i in from_file], default=0)
            packed += from_file
            unpacked = sum([sizes[index] * sent[index] for index in packed])
        not_resident = sum([sizes[index] for index in streamed if sent[index]])
        on_device = resident + slots + berths
        if not_resident <= slots:
            return Footprint(slots, berths, on_device, not_resident, 0, 0, 0)
        drive = sum([self.read[index] * sent[index] for index in streamed if placements[index] is file])
        h2d = drive + sum(
            [in_ram[i] * sent[i] for i in streamed if placements[i] is not file and placements[i] is not kept]
        )
        return Footprint(slots, berths, on_device, not_resident, h2d, drive, unpacked)

    def are_unpacked(self, placements: Sequence[Placement]) -> list[bool]:
        """For each group, whether it is unpacked before each use that it is not there for already."""
        return [
            is_read if at is Placement.FILE else is_packed and at is not Placement.DEVICE
            for is_packed, is_read, at in zip(self.is_packed, self.reads_packed, placements, strict=True)
        ]

    def fits(self, footprint: Footprint) -> bool:
        """Whether a placement is within the device budget."""
        return not self.has_residents or footprint.device_bytes <= self.device_budget

    def limit_seconds(self, footprint: Footprint) -> float:
        """How long a pass takes at least: compute, the link and the drive are each busy for so long."""
        speeds, busy = self.problem.speeds, self.busy_seconds(footprint)
        return max(busy, footprint.h2d_bytes / speeds.h2d, footprint.drive_bytes / speeds.drive)

    def busy_seconds(self, footprint: Footprint) -> float:
        """How long the device computes and unpacks."""
        return self.compute_seconds + footprint.unpack_bytes / self.problem.speeds.unpack

    def run(self, placements: Sequence[Placement], footprint: Footprint) -> SimulatedPass:
        """Simulate passes until two take equally long. Of these two the mean counts."""
        busy = self.busy_seconds(footprint)
        if not footprint.h2d_bytes:
            return SimulatedPass(busy, {}, 0)
        sent = _sent_uses(self, placements, footprint.slot_bytes)
        clocks = _Clocks(sent)
        before, after, num_passes = [0.0], clocks.run_pass(), 1
        while num_passes < _MIN_PASSES or (num_passes < _MAX_PASSES and not _take_equally_long(busy, before, after)):
            before, after, num_passes = after, clocks.run_pass(), num_passes + 1
        stalls: dict[int, float] = {}
        for group, one, other in zip(sent.groups, before, after, strict=True):
            stalls[group] = stalls.get(group, 0.0) + (one + other) / 2
        return SimulatedPass(busy + sum(stalls.values()), stalls, num_passes * len(sent.groups))

    def backs(self, sizes: list[int], geometry: Geometry) -> list[int]:
        """`_backs`, remembered: it takes most of the time of a simulation, and many placements send the same sizes."""
        key = (geometry.num_bytes, geometry.first_part, *sizes)
        if key not in self._known_backs:
            self._known_backs[key] = _backs(sizes, geometry)
        return self._known_backs[key]

    def predict(self, footprint: Footprint, run: SimulatedPass) -> Prediction:
        stalls = sorted(((self.groups[i].name, s) for i, s in run.stalls.items() if s > 0), key=lambda stall: -stall[1])
        return Prediction(
            step_seconds=run.step_seconds,
            stall_seconds=run.step_seconds - self.busy_seconds(footprint),
            stalls=tuple(stalls),
            h2d_bytes=footprint.h2d_bytes,
            drive_bytes=footprint.drive_bytes,
            h2d_seconds=footprint.h2d_bytes / self.problem.speeds.h2d,
            drive_seconds=footprint.drive_bytes / self.problem.speeds.drive,
            compute_seconds=self.compute_seconds,
            unpack_bytes=footprint.unpack_bytes,
            unpack_seconds=footprint.unpack_bytes / self.problem.speeds.unpack,
        )


@dataclass(frozen=True, slots=True)
class _Read:
    """The work of the drive for one use."""

    seconds: float
    last_chunk_seconds: float
    """How long the link needs for the last chunk, after it was read."""
    windows: list[tuple[int, float]]
    """Pairs (i, s): the read ends no sooner than s seconds after the begin of the copy i reads earlier. See `_windows`."""


@dataclass(frozen=True, slots=True)
class _SentUses:
    """The uses of one pass whose groups are sent. Each list has one entry for each of these uses."""

    groups: list[int]
    gaps: list[float]
    """Seconds of compute of resident groups right before the use."""
    computes: list[float]
    """Seconds of compute of the use, and of unpacking the group for it."""
    copies: list[float | None]
    """Seconds that the link needs for the use. None: the group stays on the device packed."""
    num_strips: list[int]
    """How many strips the group of the use is sent in: then the link needs berths before its slot. 0: it is not packed."""
    backs: list[int]
    """How many uses earlier the use is that has to be computed before the slot of this one is free."""
    reads: list[_Read | None]
    """The read from a file. None: the group rests in RAM."""


def _take_equally_long(compute_seconds: float, before: list[float], after: list[float]) -> bool:
    """Whether two passes do, by their stalls."""
    stalled = sum(after)
    return abs(stalled - sum(before)) <= _SAME_PASS * (compute_seconds + stalled)


_Move = tuple[float, "float | None", float, float]
"""When the copy of a use begins and ends, when its unpacking or compute begins, and when the drive is done. Without an end
there is no copy."""


class _Clocks:
    """The times when the drive, the link and compute are done with the work that they were given."""

    def __init__(self, sent: _SentUses) -> None:
        self._sent = sent
        self._drive = self._link = self._compute = 0.0
        self._ends = [0.0] * len(sent.groups)
        """When the compute of each use ended. Before the first pass stands one that took no time."""
        self._berths = [0.0] * NUM_BERTHS
        """When each strip that was sent from RAM could be unpacked: it had arrived, and its slot was free."""
        self._reading_berth = 0.0
        """The same for the last strip that was read from a file."""
        self._starts = [0.0] * (sum(read is not None for read in sent.reads) + 1)
        """When the copy of each use that is read from a file began."""

    def run_pass(self, moves: list[_Move] | None = None) -> list[float]:
        """Simulate a pass. Returns the seconds that compute waits for each use.

        Args:
            moves: Gets what moves for each use.
        """
        ends, link, compute = self._ends, self._link, self._compute
        stalls, sent = [], self._sent
        for gap, seconds, copy, num_strips, back, read in zip(
            sent.gaps, sent.computes, sent.copies, sent.num_strips, sent.backs, sent.reads, strict=True
        ):
            compute += gap
            if copy is None:
                compute += seconds
                stalls.append(0.0)
                ends.append(compute)
                if moves is not None:
                    moves.append((link, None, compute - seconds, self._drive))
                continue
            room = free = ends[-back]
            if num_strips:
                free = self._berths[-NUM_BERTHS] if read is None else self._reading_berth
            start = free if free > link else link
            link = start + copy
            num_ahead = NUM_BERTHS if read is None else 1
            if num_strips > num_ahead:  # the others wait for the slot
                link = max(link, room + copy * (num_strips - num_ahead) / num_strips)
            if read is not None:
                link = max(link, self._read(read, start) + read.last_chunk_seconds)
            stall = link - compute if link > compute else 0.0
            stalls.append(stall)
            compute += stall
            if num_strips and read is None:
                for left in range(min(num_strips, NUM_BERTHS) - 1, -1, -1):
                    self._berths.append(max(link - left * copy / num_strips, room))
            elif num_strips:
                self._reading_berth = max(link, room)
            compute += seconds
            ends.append(compute)
            if moves is not None:
                moves.append((start, link, compute - seconds, self._drive))
        self._link, self._compute = link, compute
        return stalls

    def _read(self, read: _Read, start: float) -> float:
        """When the read ends, if the copy begins at `start`."""
        self._starts.append(start)
        drive = self._drive + read.seconds
        for back, seconds in read.windows:
            drive = max(drive, self._starts[-1 - back] + seconds)
        self._drive = drive
        return drive


def _sent_uses(model: PassModel, placements: Sequence[Placement], slot_bytes: int) -> _SentUses:
    speeds, sizes = model.problem.speeds, model.sizes
    groups, gaps, computes, gap = [], [], [], 0.0
    unpacked = model.are_unpacked(placements)
    for index, seconds in model.uses:
        if placements[index] is Placement.DEVICE:
            gap += seconds
        else:
            groups.append(index)
            gaps.append(gap)
            computes.append(seconds + (sizes[index] / speeds.unpack if unpacked[index] else 0.0))
            gap = 0.0
    gaps[0] += gap  # residents at the end of a pass are computed before the first use of the next one
    largest = max(size for size, placement in zip(sizes, placements, strict=True) if placement is not Placement.DEVICE)
    sent_sizes = [sizes[index] for index in groups]
    reads = _reads([model.read[index] for index in groups if placements[index] is Placement.FILE], model.problem)
    return _SentUses(
        groups=groups,
        gaps=gaps,
        computes=computes,
        copies=[
            None
            if placements[index] is Placement.PACKED
            else (model.sent[index] if unpacked[index] else sizes[index]) / speeds.h2d
            for index in groups
        ],
        num_strips=[-(-model.sent[index] // model.berths[index]) if unpacked[index] else 0 for index in groups],
        backs=model.backs(sent_sizes, Geometry(slot_bytes, largest)),
        reads=[next(reads) if placements[index] is Placement.FILE else None for index in groups],
    )


def _backs(sizes: list[int], geometry: Geometry) -> list[int]:
    """For each use of a pass: how many uses earlier the use is whose compute has to be over before a slot is free.

    This is steady state, so uses of the pass before count too. A pass does not fit in the ring as a whole, so no use waits
    for one that is more than a pass back.
    """
    live: dict[int, int] = {}
    """Where uses begin whose bytes no later use has taken, oldest first."""
    begins: list[int] = []
    """The same, in the order of the bytes, for bisection: there may be many small uses."""
    ends: list[int] = []
    uses: list[int] = []
    backs, head, over = [], 0, -1
    for use, size in enumerate(sizes * 2):
        is_first = use == len(sizes)
        # The first position mostly is the best: it is free already, or as soon as the oldest use is over.
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
    """For each use from a file: the copies that have to begin before the drive can read it to its end.

    A copy frees frames of the staging memory faster than the drive fills them. So the only limit is this: the byte that
    lies `staging_bytes` behind the first byte of a copy cannot be read before that copy begins. The copies listed for a use
    are those for which that byte lies in the use.
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
