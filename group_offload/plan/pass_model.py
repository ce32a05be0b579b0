"""How long a pass takes with a given placement.

The functions here touch no device, no file and no clock, and give the same answer every time.

[Note: The model of a pass]
Passes follow one another, and the prediction is for one pass of many. Three things work at the same time, each on one
item at a time and in order of use: the disk reads, the link copies to the device, the device computes.

- A resident group (`Placement.DEVICE`) is computed as soon as the use before it is. Every other group is sent for each
  use, except that uses that follow each other directly are one. If all groups that are used and not resident fit in the
  slots together, they stay there and none is sent.
- The slots are a ring of bytes. A use can take its bytes as soon as the last of the earlier uses that had them was
  computed. `ring` decides which bytes these are, for the engine too. (The engine may send several small groups together;
  in this model each has a slot to itself.)
- The link is one copy stream. It begins a use once the use before it has arrived and the slot is free. A use that comes
  from a file arrives no sooner than the disk has read it, and the uses behind it wait, even those that come from RAM.
- The disk is never further ahead of the link than the staging memory. It reads on while slots are taken.
- A compressed group in RAM is sent strip by strip. A strip needs no slot to be sent, but one of the compressed buffers, which
  are free once the strip that many before was decompressed: when it had arrived and its slot was free. So the link is ahead of
  the slot by as many strips. A group that stays on the device compressed takes no time on the link.
- A compressed group in a file is read compressed. Its strips need the reading compressed buffer, one after another.
- The device computes nothing else while it decompresses. So what compute was measured to take is without that.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import accumulate, groupby

from .placement import Placement, Problem
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
    h2d_bytes: int
    disk_bytes: int
    h2d_seconds: float
    disk_seconds: float
    compute_seconds: float
    decompress_bytes: int = 0
    """Bytes of weights that the device decompresses."""
    decompress_seconds: float = 0.0

    @property
    def bound(self) -> str:
        """The part of the machine that is busy longest: "compute" (which decompression is a part of), "PCIe" or "disk"."""
        compute = self.compute_seconds + self.decompress_seconds
        busy = {"compute": compute, "PCIe": self.h2d_seconds, "disk": self.disk_seconds}
        return max(busy, key=lambda name: busy[name])

    @property
    def limit_seconds(self) -> float:
        """How long that part is busy: no order of work makes this placement faster."""
        return max(self.compute_seconds + self.decompress_seconds, self.h2d_seconds, self.disk_seconds)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a placement takes, and bytes that it moves in one pass."""

    slot_bytes: int
    compressed_buffer_bytes: int
    """What compressed bytes land in before they are decompressed."""
    device_bytes: int
    """Resident groups, compressed or not, slots, and compressed buffers."""
    h2d_bytes: int
    disk_bytes: int
    decompress_bytes: int


class PassModel:
    """A problem, prepared for simulating many placements of it."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.groups = problem.groups
        self.sizes = [group.num_bytes for group in self.groups]
        self._all_bytes = sum(self.sizes)
        self._num_buffers = problem.num_compressed_buffers
        self._is_compressed = [group.compressed_bytes > 0 for group in self.groups]
        self.has_compressed = any(self._is_compressed)
        self.compressed_buffers = [group.compressed_buffer_bytes for group in self.groups]
        self.sent = [group.compressed_bytes or group.num_bytes for group in self.groups]
        """What each group takes in RAM, and on the link from there."""
        self._reads_compressed = [group.reads_compressed and group.compressed_bytes > 0 for group in self.groups]
        self.read = [
            group.compressed_bytes if compressed else group.num_bytes
            for group, compressed in zip(self.groups, self._reads_compressed, strict=True)
        ]
        """What is read of each group from its file, and sent then."""
        num_uses = Counter(problem.order)
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
        self.has_residents = problem.device_budget is not None
        self.device_budget = sys.maxsize if problem.device_budget is None else problem.device_budget
        self._known_backs: dict[tuple[int, ...], list[int]] = {}

    def choices(self, index: int, rest: Placement) -> list[Placement]:
        """Where a group may be between its uses, given where it is stored; the fastest first."""
        group = self.groups[index]
        if not group.may_reside or not self.has_residents:
            return [rest]
        is_kept_compressed = group.compressed_bytes > 0 and rest is Placement.RAM
        return [Placement.DEVICE, Placement.COMPRESSED, rest] if is_kept_compressed else [Placement.DEVICE, rest]

    def footprint(self, placements: Sequence[Placement]) -> Footprint:
        # Each candidate of the search comes through here, so the names are bound to locals.
        sizes, sent = self.sizes, self.num_sent
        device, file, kept = Placement.DEVICE, Placement.FILE, Placement.COMPRESSED
        streamed = [index for index, placement in enumerate(placements) if placement is not device]
        streamed_sizes = [sizes[index] for index in streamed]
        not_resident = sum([sizes[index] for index in streamed if sent[index]])
        slots = sum(nlargest(self.problem.num_slots, streamed_sizes))
        resident, compressed_buffers, decompressed = self._all_bytes - sum(streamed_sizes), 0, 0
        from_file = [index for index in streamed if placements[index] is file]
        from_ram = [index for index in streamed if placements[index] is not file and placements[index] is not kept]
        if self.has_compressed:
            compressed = self._is_compressed
            read_compressed = [index for index in from_file if self._reads_compressed[index]]
            stay = [index for index in streamed if placements[index] is kept]
            sent_compressed = [index for index in from_ram if compressed[index]]
            resident += sum([self.sent[index] for index in stay])
            strips = self.compressed_buffers
            compressed_buffers = self._num_buffers * max([strips[index] for index in sent_compressed], default=0)
            compressed_buffers += max([strips[index] for index in read_compressed], default=0)
            decompressed = sum([sizes[index] * sent[index] for index in (*stay, *sent_compressed, *read_compressed)])
        on_device = resident + slots + compressed_buffers
        if not_resident <= slots:
            return Footprint(slots, compressed_buffers, on_device, 0, 0, 0)
        disk = sum([self.read[index] * sent[index] for index in from_file])
        h2d = disk + sum([self.sent[index] * sent[index] for index in from_ram])
        return Footprint(slots, compressed_buffers, on_device, h2d, disk, decompressed)

    def limit_seconds(self, footprint: Footprint) -> float:
        """How long a pass takes at least: compute, the link and the disk are each busy for so long."""
        speeds, busy = self.problem.speeds, self.busy_seconds(footprint)
        return max(busy, footprint.h2d_bytes / speeds.h2d, footprint.disk_bytes / speeds.disk)

    def busy_seconds(self, footprint: Footprint) -> float:
        """How long the device computes and decompresses."""
        return self.compute_seconds + footprint.decompress_bytes / self.problem.speeds.decompress

    def run(self, placements: Sequence[Placement], footprint: Footprint) -> float:
        """Simulate passes until two take equally long. Of these two the mean counts, in seconds."""
        busy = self.busy_seconds(footprint)
        if not footprint.h2d_bytes:
            return busy
        stalls = _stalls(self.sent_uses(placements, footprint.slot_bytes), self._num_buffers)
        before, after = 0.0, next(stalls)
        for number in range(2, _MAX_PASSES + 1):
            before, after = after, next(stalls)
            if number >= _MIN_PASSES and abs(after - before) <= _SAME_PASS * (busy + after):
                break
        return busy + (before + after) / 2

    def sent_uses(self, placements: Sequence[Placement], slot_bytes: int) -> list[_Use]:
        """The uses of one pass whose groups are sent."""
        speeds, num_bytes = self.problem.speeds, self.sizes
        indices = [index for index, _ in self.uses if placements[index] is not Placement.DEVICE]
        largest = max([size for size, at in zip(num_bytes, placements, strict=True) if at is not Placement.DEVICE])
        key = (slot_bytes, largest, *(num_bytes[index] for index in indices))
        if key not in self._known_backs:  # it takes most of the time, and many placements send the same sizes
            self._known_backs[key] = _backs([*key[2:]], Geometry(slot_bytes, largest))
        backs = iter(self._known_backs[key])
        reads = _reads([self.read[index] for index in indices if placements[index] is Placement.FILE], self.problem)
        sent, gap = list[_Use](), 0.0
        for index, seconds in self.uses:
            at = placements[index]
            if at is Placement.DEVICE:
                gap += seconds
                continue
            is_compressed = self._reads_compressed[index] if at is Placement.FILE else self._is_compressed[index]
            takes = num_bytes[index] / speeds.decompress if is_compressed else 0.0
            sent_bytes = self.sent[index] if is_compressed else num_bytes[index]
            copy = sent_bytes / speeds.h2d if at is not Placement.COMPRESSED else None
            read = next(reads) if at is Placement.FILE else None
            num_strips = -(-sent_bytes // self.compressed_buffers[index]) if is_compressed else 0
            sent.append((gap, seconds + takes, copy, num_strips, next(backs), read))
            gap = 0.0
        # Residents at the end of a pass are computed before the first use of the next one.
        sent[0] = (sent[0][0] + gap, *sent[0][1:])
        return sent

    def predict(self, placements: Sequence[Placement], footprint: Footprint) -> Prediction:
        step_seconds = self.run(placements, footprint)
        return Prediction(
            step_seconds=step_seconds,
            stall_seconds=step_seconds - self.busy_seconds(footprint),
            h2d_bytes=footprint.h2d_bytes,
            disk_bytes=footprint.disk_bytes,
            h2d_seconds=footprint.h2d_bytes / self.problem.speeds.h2d,
            disk_seconds=footprint.disk_bytes / self.problem.speeds.disk,
            compute_seconds=self.compute_seconds,
            decompress_bytes=footprint.decompress_bytes,
            decompress_seconds=footprint.decompress_bytes / self.problem.speeds.decompress,
        )


@dataclass(frozen=True, slots=True)
class _DiskRead:
    """The work of the disk for one use."""

    seconds: float
    last_chunk_seconds: float
    """How long the link needs for the last chunk, after it was read."""
    windows: list[tuple[int, float]]
    """Pairs (i, s): the read ends no sooner than s seconds after the begin of the copy i reads earlier. See `_reads`."""


_Use = tuple[float, float, "float | None", int, int, "_DiskRead | None"]
"""A use whose group is sent:

- the seconds of compute of resident groups right before the use,
- its own seconds of compute, and of decompressing the group for it,
- the seconds that the link needs for it, or None if the group stays on the device compressed,
- how many strips the group is sent in: then the link needs compressed buffers before its slot (0: it is not compressed),
- how many uses earlier the use is that has to be computed before the slot of this one is free,
- the read from a file, or None if the group is stored in RAM.
"""


def _stalls(sent: Sequence[_Use], num_buffers: int) -> Iterator[float]:
    """The seconds that compute waits for weights, pass after pass."""
    disk = link = compute = 0.0
    """When each is done with the work that it was given."""
    ends = [0.0] * len(sent)
    """When the compute of each use ended. Before the first pass stands one that took no time."""
    compressed_buffers = [0.0] * num_buffers
    """When each strip that was sent from RAM could be decompressed: it had arrived, and its slot was free."""
    reading_compressed_buffer = 0.0
    """The same for the last strip that was read from a file."""
    starts = [0.0] * (sum([use[-1] is not None for use in sent]) + 1)
    """When the copy of each use that is read from a file began."""
    while True:
        stalled = 0.0
        for gap, seconds, copy, num_strips, back, read in sent:
            compute += gap
            if copy is not None:
                start, room = link, ends[-back]
                free = room
                if num_strips:
                    free = compressed_buffers[-num_buffers] if read is None else reading_compressed_buffer
                if free > start:
                    start = free
                link = start + copy
                num_ahead = num_buffers if read is None else 1
                if num_strips > num_ahead:  # the others wait for the slot
                    link = max(link, room + copy * (num_strips - num_ahead) / num_strips)
                if read is not None:
                    starts.append(start)
                    disk += read.seconds
                    for earlier, after in read.windows:
                        disk = max(disk, starts[-1 - earlier] + after)
                    link = max(link, disk + read.last_chunk_seconds)
                if link > compute:
                    stalled += link - compute
                    compute = link
                if num_strips and read is None:
                    for left in range(min(num_strips, num_buffers) - 1, -1, -1):
                        compressed_buffers.append(max(link - left * copy / num_strips, room))
                elif num_strips:
                    reading_compressed_buffer = max(link, room)
            compute += seconds
            ends.append(compute)
        yield stalled


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
        found, best = head, use
        for start in geometry.starts(size, head, live.values(), is_first=use == len(sizes)):
            last = max(uses[bisect_right(ends, start) : bisect_left(begins, start + size)], default=-1)
            if last < best:
                found, best = start, last
            if best <= over or best == next(iter(live)):
                break  # it is free already, or as soon as the oldest use is over: mostly the first position is
        i, j = bisect_right(ends, found), bisect_left(begins, found + size)
        head = found + size
        over = max(over, best)
        for taken in uses[i:j]:
            del live[taken]
        live[use] = found
        begins[i:j], ends[i:j], uses[i:j] = [found], [head], [use]
        backs.append(use - over)
    return backs[len(sizes) :]


def _reads(sizes: list[int], problem: Problem) -> Iterator[_DiskRead]:
    """The read of each use from a file.

    A copy frees frames of the staging memory faster than the disk fills them. So the only limit is this: the byte that lies
    `staging_bytes` behind the first byte of a copy cannot be read before that copy begins. The windows of a read are the copies
    for which that byte lies in it.
    """
    disk, staging = problem.speeds.disk, min(problem.staging_bytes, sum(sizes))
    ends = list(accumulate(sizes * 2))
    begins, first = [0, *ends], 0
    for index, (size, end) in enumerate(zip(sizes * 2, ends, strict=True)):
        windows = []
        while first <= index and begins[first] + staging <= end:
            windows.append((index - first, (end - begins[first] - staging) / disk))
            first += 1
        if index >= len(sizes):  # in the pass before, the first reads have none before them
            yield _DiskRead(size / disk, min(size, _CHUNK_BYTES) / problem.speeds.h2d, windows)
