"""One storage that was saved for backward: where its bytes are, and what its memory still has to outlive."""

from __future__ import annotations

from collections import deque
from enum import Enum, auto

import torch

from ..base.device import Event, Stream
from .ranges import Range
from .slab import Block
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


class Stash:
    """A storage, or a part of one, that was saved for backward. It lives as long as autograd holds what was packed.

    Its lane alone changes it, under the session's lock.
    """

    __slots__ = (
        "__weakref__",
        "arrived",
        "block",
        "dead",
        "device",
        "epoch",
        "guard",
        "job",
        "left",
        "memory",
        "name",
        "num_bytes",
        "positions",
        "spot",
        "state",
        "streams",
        "waited_on",
        "was_refused",
    )

    def __init__(self, name: str, memory: torch.Tensor, streams: list[Stream], dead: Dead) -> None:
        """
        Args:
            name: the FQN of the group that saves it first.
            memory: the bytes on the device, an alias of the saved storage.
            streams: the streams that use `memory`, its owner first.
            dead: where the stash leaves behind what its lane has to take back.
        """
        self.state = StashState.ON_DEVICE
        self.dead = dead
        self.name = name
        self.device = memory.device
        self.num_bytes = memory.numel()
        self.positions: list[int] = []
        """The places in the pass where it was saved."""
        self.memory: torch.Tensor | None = memory
        """The bytes on the device: an alias of the saved storage, or memory that was allocated for a copy back."""
        self.streams = streams
        """The streams that have to wait for `guard` before `memory` is freed: the stream that owns the memory comes first."""
        self.guard: Event | None = None
        """The copy that still uses `memory`; None once `streams` have waited for it."""
        self.block: Block | None = None
        """The RAM that holds the bytes, or that they are on their way to."""
        self.spot: Range | None = None
        """The part of the file that holds the bytes, or that they are on their way to."""
        self.job: SpillJob | None = None
        """What threads write from, or read into, `block`."""
        self.was_refused = False
        """Whether there was once no room for it in RAM."""
        self.left: Event | None = None
        """Recorded behind the copy to RAM."""
        self.arrived: Event | None = None
        """Recorded behind the last copy back."""
        self.waited_on: Stream | None = None
        """The last stream that waited for `arrived`."""
        self.epoch = 0
        """The lane's count of groups when the copy to RAM was asked for."""

    def lose(self) -> None:
        """Let go of all bytes. Only when no copy is under way; threads that use the RAM hold it themselves."""
        self.state = StashState.LOST
        self.memory = self.guard = self.block = self.spot = self.job = self.left = self.arrived = None

    def __del__(self) -> None:
        # At any moment, in any thread, perhaps in the middle of the lane's own work: so the lane does it later.
        state = getattr(self, "state", StashState.LOST)  # an interrupt may have come before it had one
        if state is not StashState.ON_DEVICE and state is not StashState.LOST:
            self.dead.append(Remains(self))


class Remains:
    """What a stash leaves behind, until its lane takes it back."""

    __slots__ = ("block", "guard", "job", "memory", "num_offloading_bytes", "spot", "streams", "uses")

    def __init__(self, stash: Stash) -> None:
        self.memory = stash.memory if stash.guard is not None else None
        self.guard = stash.guard
        self.streams = stash.streams
        self.block = stash.block
        self.spot = stash.spot
        self.job = stash.job
        self.uses = (stash.left, stash.arrived)
        self.num_offloading_bytes = stash.num_bytes if stash.state is StashState.OFFLOADING else 0


Dead = deque[Remains]
