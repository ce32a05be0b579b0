"""One storage that was saved for backward: where its bytes are, and what its memory still has to outlive."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto

import torch

from ..base.device import Event, Stream
from .ranges import Range
from .spill import SpillJob


class StashState(Enum):
    """Where the bytes of a stash are."""

    ON_DEVICE = auto()
    """On the device alone: a last group saved it, or there is no room elsewhere."""
    OFFLOADING = auto()
    """On the device, and a copy to RAM is under way or about to be. The device memory goes once compute has waited for it."""
    OFFLOADED = auto()
    """In RAM, or in the file."""
    RELOADED = auto()
    """In RAM or in the file, and on the device again, or on its way there."""
    LOST = auto()
    """Nowhere: an interrupt broke off work on it. See [Note: Interrupts of activation offloading]."""


class Referable:
    """An object with slots that weak references may point to. (A dataclass has an option for that from Python 3.11 on.)"""

    __slots__ = ("__weakref__",)


@dataclass(slots=True, eq=False, repr=False)
class Stash(Referable):
    """A storage, or a part of one, that was saved for backward. It lives as long as autograd holds what was packed.

    Its offloader alone changes it, under the session's lock.
    """

    name: str
    """The FQN of the group that saved it first."""
    memory: torch.Tensor | None
    """The bytes on the device, as uint8: an alias of the saved storage, or memory that was allocated for a copy back."""
    streams: list[Stream]
    """The streams that have to wait for `guard` before `memory` is freed: the stream that owns the memory comes first."""
    dead: Dead
    """Where it leaves behind what its offloader has to take back."""
    device: torch.device
    num_bytes: int
    state: StashState = StashState.ON_DEVICE
    positions: list[int] = field(default_factory=list)
    """The positions of the tape at which it was saved."""
    offloaded_at: int = 0
    """The number of groups that its offloader had seen when it asked for the copy to RAM."""
    was_refused: bool = False
    """Whether there was once no room for it in RAM."""
    host_range: Range | None = None
    """The RAM that holds the bytes, or that they are on their way to."""
    file_range: Range | None = None
    """The part of the file that holds the bytes, or that they are on their way to."""
    job: SpillJob | None = None
    """The threads' work that writes from, or reads into, `host_range`."""
    left: Event | None = None
    """Recorded behind the copy to RAM."""
    arrived: Event | None = None
    """Recorded behind the last copy back."""
    guard: Event | None = None
    """The copy that still uses `memory`; None once `streams` have waited for it."""
    waited_on: Stream | None = None
    """The last stream that waited for `arrived`."""

    @property
    def host_memory(self) -> torch.Tensor:
        """The bytes of `host_range`."""
        assert self.host_range is not None and self.host_range.memory is not None
        return self.host_range.memory

    @property
    def is_being_read(self) -> bool:
        """Whether threads read it from the file into `host_range`; true until `HostMemory.finish_read`."""
        return self.job is not None and self.job.is_read

    def lose(self) -> None:
        """Free all bytes. Call it only when no copy is under way; threads that use the RAM hold it themselves."""
        self.state = StashState.LOST
        self.memory = self.host_range = self.file_range = None
        self.guard = self.left = self.arrived = self.job = None

    def __del__(self) -> None:
        # This runs at any moment, in any thread, perhaps in the middle of the offloader's own work. So it only leaves a note.
        state = getattr(self, "state", StashState.LOST)  # an interrupt may have come before it had one
        if state is not StashState.ON_DEVICE and state is not StashState.LOST:
            self.dead.append(Remains(self))


class Remains:
    """What a stash leaves behind, until its offloader takes it back."""

    __slots__ = ("file_range", "guard", "host_range", "job", "memory", "num_offloading_bytes", "streams", "uses")

    def __init__(self, stash: Stash) -> None:
        self.memory = stash.memory if stash.guard is not None else None
        self.guard = stash.guard
        self.streams = stash.streams
        self.host_range = stash.host_range
        self.file_range = stash.file_range
        self.job = stash.job
        self.uses = (stash.left, stash.arrived)
        self.num_offloading_bytes = stash.num_bytes if stash.state is StashState.OFFLOADING else 0


Dead = deque[Remains]
