"""What a plan is made from: groups of weights, the tiers that they may rest on, speeds and budgets. Frozen data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import nlargest

from ..base.tuning import tuning
from ..errors import ConfigError

ASSUMED_UNPACK = 400_000_000_000
"""Bytes of weights per second where unpacking was not measured: a third of the memory bandwidth of a card with 1.2 TB/s. An
H200 unpacks 1.65 TB/s, which is a third of its bandwidth (docs/benchmarks.md)."""
NUM_BERTHS = 3
"""How many strips of packed groups from RAM may be on their way to the device, or be unpacked there, at once: one is sent while
the one before waits for a kernel of compute to make room, and is unpacked. One more strip may be on its way from a file. So
packing takes no more than 256 MiB of device memory."""


class Placement(str, Enum):
    """Where a group rests between its uses."""

    DEVICE = "device"
    """A copy of the group stays on the device. The group keeps its place at rest, in RAM or in its file."""
    PACKED = "packed"
    """A packed copy of a group that rests in RAM stays on the device, and is unpacked there for each use."""
    RAM = "ram"
    """The group rests in page-locked RAM and is sent to the device for each use: packed, if it has packed bytes."""
    FILE = "file"
    """The group is read from the drive and sent to the device for each use: packed, if a file holds its packed bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """A group of weights, as far as a plan needs to know it.

    Raises:
        ValueError: negative bytes, or a compute time that is negative or not finite.
    """

    name: str
    num_bytes: int
    compute_seconds: float
    """Compute time of all uses of the group in one pass together. 0: the time is not known."""
    is_in_file: bool
    """Whether a file holds the weights. If not, they take RAM on every tier, and `Placement.FILE` is not possible."""
    may_reside: bool = True
    """Whether `Placement.DEVICE` and `Placement.PACKED` are possible."""
    packed_bytes: int = 0
    """What is sent of the group, and what it takes on the device, if it is packed. 0: it is not."""
    strip_bytes: int = 0
    """The largest strip of the packed bytes: what a berth has to hold. 0: it is not known yet."""
    reads_packed: bool = False
    """Whether a file holds the packed bytes, so that `Placement.FILE` reads these."""

    def __post_init__(self) -> None:
        for name, num_bytes in (("num_bytes", self.num_bytes), ("packed_bytes", self.packed_bytes)):
            if num_bytes < 0:
                raise ValueError(f"group {self.name!r}: {name}={num_bytes} is negative")
        if not 0 <= self.compute_seconds < math.inf:
            raise ValueError(f"group {self.name!r}: compute_seconds={self.compute_seconds} has to be finite, 0 or more")

    @property
    def berth_bytes(self) -> int:
        return self.strip_bytes or min(self.packed_bytes, tuning().strip_bytes)

    def why_not(self, placement: Placement) -> str:
        """What stands in the way of a placement, whatever the budgets are; empty if nothing does."""
        if placement is Placement.FILE and not self.is_in_file:
            return "has no file that it could rest in"
        if placement in (Placement.DEVICE, Placement.PACKED) and not self.may_reside:
            return "may not stay on the device"
        if placement is Placement.PACKED and not self.packed_bytes:
            return "is not packed"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Speeds in bytes per second.

    Raises:
        ValueError: a speed that is not finite and above 0.
    """

    h2d: float
    """Speed of the link: from page-locked RAM to the device."""
    drive: float
    """Speed of the drive: from a file to page-locked RAM, past the page cache."""
    unpack: float = ASSUMED_UNPACK
    """Speed at which the device unpacks weights: the bytes that it writes."""

    def __post_init__(self) -> None:
        for name, speed in (("h2d", self.h2d), ("drive", self.drive), ("unpack", self.unpack)):
            if not 0 < speed < math.inf:
                raise ValueError(f"{name}={speed} bytes per second has to be finite and more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Bytes for weights alone: the caller has subtracted activations and everything else. None: no budget was given.

    Raises:
        ValueError: a negative budget.
    """

    device_bytes: int | None
    """Device memory for resident groups and slots. None: no group is resident."""
    ram_bytes: int | None
    """RAM for groups that rest there, and for groups that no file holds. None: all groups rest in RAM."""

    def __post_init__(self) -> None:
        for name, num_bytes in (("device_bytes", self.device_bytes), ("ram_bytes", self.ram_bytes)):
            if num_bytes is not None and num_bytes < 0:
                raise ValueError(f"{name}={num_bytes} is negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Everything that a plan is made from.

    Raises:
        ValueError: no groups, no uses, a use of a group that does not exist, no slots, negative staging, or rests that are not
            one for each group, RAM or FILE, and FILE only where a file holds the group.
    """

    groups: tuple[PlannedGroup, ...]
    order: tuple[int, ...]
    """Indices into `groups`, in the order of use in one pass. A group may be used several times, or not at all."""
    speeds: Speeds
    budgets: Budgets
    num_slots: int = 2
    """The slots hold this many of the largest groups that are sent."""
    staging_bytes: int = 256 << 20
    """How many bytes the drive may be ahead of the link."""
    rests: tuple[Placement, ...] | None = None
    """Where each group rests, RAM or FILE, where that is decided already. None: the RAM budget decides."""

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
        if self.rests is not None:
            self._check_rests(self.rests)

    def _check_rests(self, rests: tuple[Placement, ...]) -> None:
        if len(rests) != len(self.groups):
            raise ValueError(f"{len(rests)} rests for {len(self.groups)} groups")
        for group, rest in zip(self.groups, rests, strict=True):
            if rest not in (Placement.RAM, Placement.FILE):
                raise ValueError(f"group {group.name!r} rests in RAM or in its file, not on {rest.name}")
            why_not = group.why_not(rest)
            if why_not:
                raise ValueError(f"group {group.name!r} {why_not}")


def smallest_device_bytes(problem: Problem) -> int:
    """The smallest device budget that works: slots, and room for packed bytes on their way, and no resident groups.

    Where the rests are not decided yet, it works for all that the RAM budget may lead to.
    """
    slots = sum(nlargest(problem.num_slots, (group.num_bytes for group in problem.groups)))
    may_be_read = problem.budgets.ram_bytes is not None
    rests = problem.rests or [None if may_be_read and group.is_in_file else Placement.RAM for group in problem.groups]
    sent = [group.berth_bytes for group, at in zip(problem.groups, rests, strict=True) if at is not Placement.FILE]
    read = [
        group.berth_bytes
        for group, at in zip(problem.groups, rests, strict=True)
        if group.reads_packed and at is not Placement.RAM
    ]
    return slots + NUM_BERTHS * max(sent, default=0) + max(read, default=0)


def smallest_ram_bytes(problem: Problem) -> int:
    """The smallest RAM budget that works: the groups that no file holds, and what is packed of them."""
    return sum(group.num_bytes + group.packed_bytes for group in problem.groups if not group.is_in_file)


def ram_bytes_of(problem: Problem, rests: Sequence[Placement]) -> int:
    """RAM of the groups that rest there, whether copies of them stay on the device or not, and of those that no file holds."""
    in_ram = [
        group.packed_bytes or group.num_bytes
        for group, rest in zip(problem.groups, rests, strict=True)
        if group.is_in_file and rest is Placement.RAM
    ]
    return smallest_ram_bytes(problem) + sum(in_ram)


def check_budgets(problem: Problem) -> None:
    """
    Raises:
        ConfigError: a budget that no placement fits. The message names the smallest budget that works.
    """
    budgets, wrong = problem.budgets, []
    device, ram = smallest_device_bytes(problem), smallest_ram_bytes(problem)
    if budgets.device_bytes is not None and budgets.device_bytes < device:
        largest = max(problem.groups, key=lambda group: group.num_bytes)
        wrong.append(
            f"the device budget for weights is {exact_bytes(budgets.device_bytes)}; the smallest that works is "
            f"{exact_bytes(device)}: {problem.num_slots} slots; the largest group is {largest.name!r} with "
            f"{exact_bytes(largest.num_bytes)}"
        )
    if budgets.ram_bytes is not None and budgets.ram_bytes < ram:
        largest = max((group for group in problem.groups if not group.is_in_file), key=lambda group: group.num_bytes)
        wrong.append(
            f"the RAM budget for weights is {exact_bytes(budgets.ram_bytes)}; the smallest that works is "
            f"{exact_bytes(ram)}: all groups that have no file; the largest of them is {largest.name!r} with "
            f"{exact_bytes(largest.num_bytes)}"
        )
    if wrong:
        raise ConfigError("; and ".join(wrong))


def exact_bytes(num_bytes: int) -> str:
    """A size to copy into an option: the exact number of bytes, and GiB to read."""
    return f"{num_bytes} bytes ({num_bytes / (1 << 30):.2f} GiB)"
