"""The device memory that blobs of groups land in.

[Note: The life of a slot]
Copies write to a slot and compute reads it, on two streams. Two events keep them apart. *ready* is recorded on the copy
stream behind the copies of the slot's blobs, and compute waits for it before the first kernel that reads the slot. *last
use* is recorded on the compute stream behind the last kernel that read the slot, and the copies of whatever takes its
bytes next wait for it. Each event is recorded as soon as the work that it stands for was enqueued. There is one exception:
the last use of a slot that is in no ring is recorded when it is asked for.

The content of a slot stays good until something else takes its bytes. It stays good between passes too, if copies read
other memory than the offloaded weights (`Blob.detects_edits`). Therefore the first groups of a pass are on their way before the
pass begins, and a group whose bytes nothing else needs is copied once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from ...base.device import Event, Stream
from ...base.layout import num_uses
from ..transfers.jobs import Job

T = TypeVar("T", bound=Any)
"""The groups in a slot, compressed or not."""


@dataclass(eq=False)
class Slot(Generic[T]):
    """Device memory for the blobs of one run of groups. See [Note: The life of a slot]."""

    memory: torch.Tensor
    ready: Event
    _last_use: Event
    start: int = 0
    """The byte of its ring that the slot begins at; 0 in no ring."""
    owner: Stream | None = None
    """The stream that the memory was allocated for; None in a ring, whose slots are parts of one memory."""
    is_resident: bool = False
    """Whether the slot stays between passes, until it is evicted."""
    job: Job | None = None
    """What reads the slot's bytes from files, or gathers them from other GPUs. `ready` is recorded as it ends: the host waits
    for that first."""
    _is_recorded: bool = True
    groups: list[T] = field(default_factory=list)
    """The groups whose blobs are in the slot, or on their way to it."""
    unused: set[T] = field(default_factory=set)
    """Those of `groups` that no call has needed since they were sent."""
    waited_on: Stream | None = None
    """The stream that waited for `ready` last; None if none has."""
    last_stream: Stream | None = None
    """The stream that used the slot last since the blobs were sent."""
    views: dict[T, Views] = field(default_factory=dict)
    """Views of the slot, for groups that were in it before."""
    handed: dict[Views, T] = field(default_factory=dict)
    """Those views that groups were bound to since nobody was seen to keep them. They are few: `views` may be hundreds, of all
    groups of one size."""

    def note_use(self, stream: Stream) -> None:
        """Remember that work on `stream` uses the slot. `stream` has waited for what other streams did with it before."""
        self.last_stream = stream
        # An event between two kernels takes time. Copies soon wait for a slot of a ring, and perhaps never for another one.
        self._is_recorded = self.owner is None
        if self._is_recorded:
            self._last_use.record(stream)

    def last_use(self) -> Event:
        """The event behind the last kernel that read the slot."""
        if not self._is_recorded:
            assert self.last_stream is not None
            self._last_use.record(self.last_stream)
            self._is_recorded = True
        return self._last_use

    @property
    def is_aliased(self) -> bool:
        """Whether code outside keeps views of the slot beyond the call that they were made for. No group may be bound."""
        are_kept = False
        for views, group in [*self.handed.items()]:
            if views.are_kept:
                are_kept = True
            elif not group.is_bound:
                del self.handed[views]
        return are_kept

    def alias(self, start: int, num_bytes: int) -> torch.Tensor:
        """Bytes of the slot with a storage of their own, whose count of uses shows whether a view of them is kept."""
        alias: torch.Tensor = from_dlpack(to_dlpack(self.memory[start : start + num_bytes]))
        return alias

    @property
    def is_held(self) -> bool:
        return any(group.holds for group in self.groups)

    def evict(self) -> None:
        """Forget what is in the slot. Whatever takes its bytes next still has to wait for the last use."""
        if self.job is not None:
            self.job.cancel()
            self.job = None
        for group in self.groups:
            if group.slot is self:  # else an interrupt left it here, and it has another slot since
                group.slot = None
        self.groups.clear()


@dataclass(slots=True, eq=False)
class Views:
    """A group's tensors as views of a slot, to be bound again and again."""

    offset: int
    """The byte of the slot that the group begins at."""
    memory: torch.Tensor
    """The alias of the slot that `tensors` are views of."""
    tensors: list[torch.Tensor]
    num_own_uses: int
    """How many tensors have the memory, these included."""

    @property
    def are_kept(self) -> bool:
        """Whether other code keeps one of the tensors, or a view of one. None of them is bound."""
        return num_uses(self.memory) > self.num_own_uses
