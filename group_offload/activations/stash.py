"""One offloaded storage: where its bytes are, and what its memory still has to outlive."""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch

from ..base.device import Event, Stream
from .ranges import Range
from .slab import Block
from .spill import Job

if TYPE_CHECKING:
    from .lane import Lane
    from .tape import Tape


class Place(Enum):
    """Where the bytes of a stash are."""

    DEVICE = auto()
    """On the device alone: a last group's, or there is no room elsewhere."""
    LEAVING = auto()
    """On the device, and a copy to RAM was enqueued. The device memory goes when compute has waited for it."""
    HOST = auto()
    """In RAM, or in the file."""
    BACK = auto()
    """In RAM or in the file, and on the device again, or on its way there."""


class Stash:
    """A storage (or a part of it) that was saved for backward. It lives as long as autograd holds what was packed.

    Changed by its lane alone, under the session's lock.
    """

    __slots__ = (
        "__weakref__",
        "arrived",
        "block",
        "device",
        "epoch",
        "guard",
        "job",
        "lane",
        "left",
        "num_bytes",
        "place",
        "positions",
        "spot",
        "streams",
        "tape",
        "waited_on",
        "was_refused",
    )

    def __init__(self, tape: Tape, lane: Lane, device: torch.Tensor, stream: Stream) -> None:
        self.tape = tape
        self.lane = lane
        self.num_bytes = device.numel()
        self.place = Place.DEVICE
        self.positions: list[int] = []
        """The places in the pass where it was saved."""
        self.device: torch.Tensor | None = device
        """The bytes on the device: an alias of the saved storage, or memory of the lane's."""
        self.streams: list[Stream] = [stream]
        """Whoever frees `device` lets these wait for `guard` first: the one that owns the memory comes first."""
        self.guard: Event | None = None
        """The copy that still uses `device`; None once `streams` waited for it."""
        self.block: Block | None = None
        self.spot: Range | None = None
        self.job: Job | None = None
        """What threads write from, or read into, `block`."""
        self.was_refused = False
        """There was no room for it in RAM once."""
        self.left: Event | None = None
        self.arrived: Event | None = None
        self.waited_on: Stream | None = None
        """The stream that waited for `arrived` last."""
        self.epoch = 0

    @property
    def name(self) -> str:
        """Of the group that saved it first."""
        return self.tape.names[self.positions[0]] if self.positions else ""

    def __del__(self) -> None:
        # At any moment, in any thread, perhaps in the middle of the lane's own work: so the lane does it later.
        if getattr(self, "place", Place.DEVICE) is not Place.DEVICE:  # or it was interrupted before it had one
            self.lane.dead.append(Remains(self))


class Remains:
    """What a stash leaves behind, until its lane comes to it."""

    __slots__ = ("block", "device", "guard", "job", "left", "num_leaving_bytes", "spot", "streams", "uses")

    def __init__(self, stash: Stash) -> None:
        self.device = stash.device if stash.guard is not None else None
        self.guard = stash.guard
        self.streams = stash.streams
        self.block = stash.block
        self.spot = stash.spot
        self.job = stash.job
        self.uses = (stash.left, stash.arrived)
        self.num_leaving_bytes = stash.num_bytes if stash.place is Place.LEAVING else 0


Dead = deque[Remains]
