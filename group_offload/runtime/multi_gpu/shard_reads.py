"""What one slot gets from several GPUs: the groups in it, and how far each has come."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from ...base.device import Event, Stream
from ...base.pool import Task, signal
from ..transfers.jobs import ReadJob
from .links import Place, SharedBytes


class Progress(Enum):
    """How far a group has come."""

    SENT = "sent"
    """The copy of this rank's shard is enqueued, and has not begun."""
    OFFERED = "offered"
    """It has begun, and the group is offered to the other ranks."""
    AGREED = "agreed"
    """All ranks have offered it: their parts are on their way, from here and to here."""
    GATHERED = "gathered"
    """All parts have arrived, from here and here."""
    ALONE = "alone"
    """The rank brings the rest of the group by itself."""


def again(error: BaseException) -> BaseException:
    """A copy, to be raised. The error that is kept would keep each frame that it is raised through, with all tensors in it."""
    found = copy.copy(error)
    found.__cause__ = error.__cause__
    return found


@dataclass(slots=True, eq=False)
class Shared:
    """A group on its way: see `Progress`. The thread of the host group changes it."""

    key: str
    """The name under which the ranks agree on it."""
    digest: str
    """What the ranks have to have in common."""
    bytes: SharedBytes
    """They hold the slot's memory as long as other ranks may write to it."""
    progress: Progress = Progress.SENT
    since: float = 0.0
    """When it came as far as that."""
    sent: list[Event] = field(default_factory=list)
    """The events behind this rank's parts on their way to the others."""


@dataclass(eq=False)
class ShardJob:
    """All that one slot gets from several ranks. It takes the place of a `ReadJob`.

    The thread that computes makes it and waits; the thread of the host group does the rest.
    """

    model: str
    shared: list[Shared]
    begun: Event
    """It is reached once the copies have begun."""
    sent: Event
    """It is behind the copies of this rank's shard."""
    rest: Event
    """It is behind what `bring_rest` has brought."""
    ready: Event
    """It is behind all bytes of the slot, once `wait` has returned."""
    stream: Stream
    """The stream that `ready` is recorded on."""
    post: Callable[[str, ShardJob], None]
    """A function that asks the thread of the host group for something."""
    bring_rest: Callable[[ShardJob], None]
    """A function that brings the shares of other ranks of the groups that are `ALONE`, behind `rest`."""
    send: Callable[[Shared, Mapping[str, Place]], list[Event]]
    """A function that sends this rank's parts of a group to the places in other ranks' memory. The thread of the host group
    calls it. It returns the events behind that."""
    reads: ReadJob | None = None
    """The part of the shard that threads read from files."""
    wanted_at: float = 0.0
    """When compute came to wait for the slot; 0 if it did not."""
    is_over: bool = False
    """Whether `ready` is recorded."""
    error: BaseException | None = None
    settled: Task[None] = field(default_factory=signal)
    """It is done once each group has arrived or is alone, or there is an error."""

    @property
    def is_settled(self) -> bool:
        return all(each.progress in (Progress.GATHERED, Progress.ALONE) for each in self.shared)

    @property
    def alone(self) -> list[Shared]:
        return [each for each in self.shared if each.progress is Progress.ALONE]

    def begin(self, stream: Stream) -> None:
        """What is enqueued on `stream` next is the first copy."""
        self.begun.record(stream)

    def wait(self) -> None:
        """Return once `ready` is recorded.

        Raises:
            StorageError: a file could not be read.
            StateError: another rank has ended.
        """
        if self.reads is not None:
            self.reads.wait()
        if self.is_over:
            return
        if not self.is_settled:
            self.post("want", self)
        self.settled.wait()
        if self.error is not None:
            raise again(self.error)
        if self.alone:
            self.bring_rest(self)
        self.finish()

    def finish(self) -> None:
        self.stream.wait_event(self.sent)
        self.stream.wait_event(self.rest)
        self.ready.record(self.stream)
        self.is_over = True

    def cancel(self) -> None:
        """Gather nothing more, and return once nothing is on its way. What is enqueued is behind `ready`."""
        if self.reads is not None:
            self.reads.cancel()
        if self.is_over:
            return
        if not self.is_settled and self.error is None:
            self.post("cancel", self)
            self.settled.wait()
        self.finish()

    def settle(self, error: BaseException | None = None) -> None:
        """Let the thread that waits go on. Repeated calls do nothing, from any thread."""
        self.error = self.error or error
        self.settled.do(object())
