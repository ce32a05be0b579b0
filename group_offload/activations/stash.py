"""One storage that was saved for backward: where its bytes are, and what its device memory has to outlive."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

import torch

from ..base.device import Event, Stream


class StashState(Enum):
    """Where the bytes of a stash are."""

    ON_DEVICE = auto()
    """On the device only: one of the last groups saved it, or there is no host memory for it."""
    OFFLOADING = auto()
    """On the device; its copy to host memory is under way."""
    OFFLOADED = auto()
    """In host memory only."""
    RELOADED = auto()
    """In host memory; and on the device, or on its way there."""
    LOST = auto()
    """Nowhere: an interrupt broke off work on it. See [Note: Interrupts of activation offloading]."""


@dataclass(eq=False, repr=False)
class Stash:
    """A storage, or a part of one, that was saved for backward. It lives as long as autograd holds a view of it.

    Only its offloader changes it, under the session's lock.
    """

    memory: torch.Tensor | None
    """The bytes on the device, as uint8: an alias of the saved storage, or memory that was allocated for a copy back."""
    streams: list[Stream]
    """The streams that wait for `guard` before `memory` is freed. The first one owns the memory."""
    remains: deque[Remains]
    """Where it leaves what its offloader has to clean up once it is dead."""
    num_bytes: int
    state: StashState = StashState.ON_DEVICE
    position: int = -1
    """The last position of the tape at which it was saved."""
    host: torch.Tensor | None = None
    """The host memory that holds the bytes, or that they are on their way to."""
    left: Event | None = None
    """Recorded behind the copy to host memory."""
    arrived: Event | None = None
    """What compute waits for before it uses `memory`: recorded behind the last copy back, or `left` if nothing came back."""
    guard: Event | None = None
    """The copy that still uses `memory`; None once `streams` have waited for it."""
    waited_on: Stream | None = None
    """The last stream that waited for `arrived`."""

    def lose(self) -> None:
        """Free all bytes. Call it only when no copy is under way."""
        self.state = StashState.LOST
        self.memory = self.host = self.guard = self.left = self.arrived = None

    def __del__(self) -> None:
        # This runs at any time, in any thread, perhaps in the middle of the offloader's own work. So it only leaves a note.
        if self.state is not StashState.ON_DEVICE and self.state is not StashState.LOST:
            memory = None if self.guard is None else self.memory
            inflight_bytes = self.num_bytes if self.state is StashState.OFFLOADING else 0
            self.remains.append(Remains(memory, self.guard, self.streams, self.host, inflight_bytes))


class Remains(NamedTuple):
    """What a dead stash leaves behind until its offloader cleans up."""

    memory: torch.Tensor | None
    """Device memory that a copy still uses."""
    guard: Event | None
    streams: list[Stream]
    host: torch.Tensor | None
    inflight_bytes: int
