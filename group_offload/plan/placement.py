"""What a plan is made from: groups of weights, the tiers that they may be stored on, speeds and budgets. Frozen data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import nlargest

from ..base.tuning import tuning
from ..errors import ConfigError
from .budgets import describe_bytes

ASSUMED_DECOMPRESS = 400_000_000_000
"""Bytes of weights per second where decompression was not measured: a third of the memory bandwidth of a card with 1.2 TB/s. An
H200 decompresses 1.65 TB/s, which is a third of its bandwidth (docs/benchmarks.md)."""
NUM_COMPRESSED_BUFFERS = 3
"""How many strips of compressed groups from RAM may be on their way to the device, or be decompressed there, at once: one is
sent while the one before waits for a kernel of compute to make room, and is decompressed. One more strip may be on its way from
a file. So compression takes no more than 256 MiB of device memory, without a budget."""
_MOST_BUFFERS, _SHARE = 9, 32
"""With a budget there may be so many, if those beyond take no larger share of it."""


class Placement(str, Enum):
    """Where a group is between its uses."""

    DEVICE = "device"
    """A copy of the group stays on the device. The group stays stored too, in RAM or in its file."""
    COMPRESSED = "compressed"
    """A compressed copy of a group that is stored in RAM stays on the device, and is decompressed there for each use."""
    RAM = "ram"
    """The group is stored in pinned RAM and is sent to the device for each use: compressed, if it has compressed bytes."""
    FILE = "file"
    """The group is read from the disk and sent to the device for each use: compressed, if a file holds its compressed bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """A group of weights, as far as a plan needs to know it."""

    name: str
    num_bytes: int
    compute_seconds: float
    """Compute time of all uses of the group in one pass together. 0: the time is not known."""
    is_in_file: bool
    """Whether a file holds the weights. If not, they take RAM on every tier, and `Placement.FILE` is not possible."""
    may_reside: bool = True
    """Whether `Placement.DEVICE` and `Placement.COMPRESSED` are possible."""
    compressed_bytes: int = 0
    """What is sent of the group, and what it takes on the device, if it is compressed. 0: it is not."""
    strip_bytes: int = 0
    """The largest strip of the compressed bytes: what a compressed buffer has to hold. 0: it is not known yet."""
    reads_compressed: bool = False
    """Whether a file holds the compressed bytes, so that `Placement.FILE` reads these."""

    @property
    def compressed_buffer_bytes(self) -> int:
        return self.strip_bytes or min(self.compressed_bytes, tuning().strip_bytes)

    def may_be(self, placement: Placement) -> bool:
        """Whether a placement is possible, whatever the budgets are."""
        if placement is Placement.FILE:
            return self.is_in_file
        if placement is Placement.COMPRESSED:
            return self.may_reside and self.compressed_bytes > 0
        return placement is Placement.RAM or self.may_reside


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Speeds in bytes per second, each more than 0."""

    h2d: float
    """Speed of the link: from pinned RAM to the device."""
    disk: float
    """Speed of the disk: from a file to pinned RAM, past the page cache."""
    decompress: float = ASSUMED_DECOMPRESS
    """Speed at which the device decompresses weights: the bytes that it writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Everything that a plan is made from. Budgets are bytes for weights alone, without activations and everything else."""

    groups: tuple[PlannedGroup, ...]
    order: tuple[int, ...]
    """Indices into `groups`, in the order of use in one pass. A group may be used several times, or not at all."""
    speeds: Speeds
    device_budget: int | None = None
    """Device memory for resident groups and slots. None: no group is resident."""
    ram_budget: int | None = None
    """RAM for groups that are stored there, and for groups that no file holds. None: all groups are stored in RAM."""
    num_slots: int = 2
    """The slots hold this many of the largest groups that are sent."""
    staging_bytes: int = 256 << 20
    """How many bytes the disk may be ahead of the link."""
    rests: tuple[Placement, ...] | None = None
    """Where each group is stored, RAM or FILE, once that is decided. None: the RAM budget decides."""
    num_compressed_buffers: int = NUM_COMPRESSED_BUFFERS


def num_buffers(problem: Problem) -> list[int]:
    """How many compressed buffers to plan with: the fewest, and more that a budget has room for, so that the link is ahead."""
    budget, sizes = problem.device_budget or 0, [group.num_bytes for group in problem.groups]
    strip = max((group.compressed_buffer_bytes for group in problem.groups), default=0) or 1 << 60
    spare = budget - sum(nlargest(problem.num_slots, sizes)) - (NUM_COMPRESSED_BUFFERS + 1) * strip
    most = min(_MOST_BUFFERS, NUM_COMPRESSED_BUFFERS + min(budget // _SHARE, spare) // strip)
    return [NUM_COMPRESSED_BUFFERS, *([most] if most > NUM_COMPRESSED_BUFFERS else [])]


def smallest_device_bytes(problem: Problem) -> int:
    """The smallest device budget that works: slots, and room for compressed bytes on their way, and no resident groups.

    Where `rests` is not decided yet, it works for all that the RAM budget may lead to.
    """
    slots = sum(nlargest(problem.num_slots, (group.num_bytes for group in problem.groups)))
    may_be_read = problem.ram_budget is not None
    rests = problem.rests or [None if may_be_read and group.is_in_file else Placement.RAM for group in problem.groups]
    groups = [*zip(problem.groups, rests, strict=True)]
    sent = [group.compressed_buffer_bytes for group, at in groups if at is not Placement.FILE]
    read = [group.compressed_buffer_bytes for group, at in groups if group.reads_compressed and at is not Placement.RAM]
    return slots + NUM_COMPRESSED_BUFFERS * max(sent, default=0) + max(read, default=0)


def smallest_ram_bytes(problem: Problem) -> int:
    """The smallest RAM budget that works: the groups that no file holds, and what is compressed of them."""
    return sum(group.num_bytes + group.compressed_bytes for group in problem.groups if not group.is_in_file)


def ram_bytes_of(problem: Problem, rests: Sequence[Placement]) -> int:
    """RAM of the groups stored there, whether copies of them stay on the device or not, and of those that no file holds."""
    in_ram = [
        group.compressed_bytes or group.num_bytes
        for group, rest in zip(problem.groups, rests, strict=True)
        if group.is_in_file and rest is Placement.RAM
    ]
    return smallest_ram_bytes(problem) + sum(in_ram)


def check_budgets(problem: Problem) -> None:
    """
    Raises:
        ConfigError: a budget that no placement fits. The message names the smallest budget that works.
    """
    for name, given, least in (
        ("device", problem.device_budget, smallest_device_bytes(problem)),
        ("RAM", problem.ram_budget, smallest_ram_bytes(problem)),
    ):
        if given is not None and given < least:
            raise ConfigError(
                f"the {name} budget for weights is {describe_bytes(given)}; the smallest that works is "
                f"{describe_bytes(least, round_up=True)}"
            )
