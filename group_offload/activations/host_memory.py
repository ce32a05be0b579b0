"""Where the activations of one device rest: page-locked RAM, and a file behind it once the budget of RAM is used up."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from ..base.device import Backend
from ..errors import GroupFileError
from .config import ActivationConfig
from .counters import ActivationCounters
from .host_pool import HostPool
from .spill import SpillFile, SpillJob
from .stash import Remains, Stash, StashState
from .trace import ActivationTrace

logger = logging.getLogger("group_offload")

_WRITE_AHEAD_SHARE = 0.75
"""Once this much of the budget is used the oldest activations are written to the file, so that room is there in time."""


class _Write(NamedTuple):
    """A write in progress."""

    stash: weakref.ref[Stash]
    job: SpillJob
    num_bytes: int
    """The RAM that is free once it is done."""


class HostMemory:
    """The RAM for one device's activations, and the file. All calls are made under the session's lock.

    Order of calls for a stash: `take`, `enqueue_write` once its copy to RAM is under way, later `read_ahead` or `read_now` if
    it was written meanwhile; `free` whenever its RAM is not needed any more, `take_back` when it is dead.
    """

    def __init__(
        self, backend: Backend, config: ActivationConfig, counters: ActivationCounters, wait: Callable[[], None]
    ) -> None:
        """
        Args:
            wait: a function that returns once no copy is under way, and holds no reference to this object.
        """
        self._budget_bytes = config.host_budget_bytes
        self._counters = counters
        self.pool = HostPool(backend, config.host_budget_bytes, wait)
        self._file = None if config.disk_path is None else SpillFile(config.disk_path)
        self._oldest: deque[weakref.ref[Stash]] = deque()
        """Stashes in RAM, in the order in which they are written: backward needs the first ones last."""
        self._writes: deque[_Write] = deque()
        self._reads: deque[weakref.ref[Stash]] = deque()
        """Stashes that were read ahead of their use: they can be read again."""

    @property
    def file_bytes(self) -> int:
        return 0 if self._file is None else self._file.used_bytes

    @property
    def is_writing(self) -> bool:
        return bool(self._writes)

    def set_trace(self, trace: ActivationTrace | None) -> None:
        if self._file is not None:
            self._file.trace = trace

    # RAM

    def take(self, stash: Stash) -> bool:
        """Give a stash RAM. False if there is none."""
        stash.host_range = self.pool.take(stash.num_bytes)
        return stash.host_range is not None

    def can_make_room(self, stash: Stash) -> bool:
        """Whether writing others to the file may give a stash room in RAM."""
        return self._file is not None and stash.num_bytes <= (self._budget_bytes or 0)

    def free(self, stash: Stash) -> None:
        """Take the RAM of a stash back that the file holds as well."""
        assert stash.host_range is not None
        self.pool.give(stash.host_range, stash.arrived)
        stash.host_range = stash.left = None

    def take_back(self, remains: Remains) -> None:
        """Take the RAM and the part of the file back that a dead stash had."""
        if remains.host_range is not None:
            self.pool.give(remains.host_range, *remains.uses)
        if remains.file_range is not None and self._file is not None:
            self._file.give(remains.file_range)

    def forget_dead(self) -> None:
        for references in (self._oldest, self._reads):
            while references and references[0]() is None:
                references.popleft()

    def refuse(self, stash: Stash) -> None:
        """Count a stash for which there is no room in RAM. The first one is warned of."""
        if stash.was_refused:  # it is tried again as long as it is saved
            return
        stash.was_refused = True
        if not self._counters.refused_bytes:
            self._warn_of_refusal(stash)
        self._counters.refused_bytes += stash.num_bytes

    def _warn_of_refusal(self, stash: Stash) -> None:
        budget = self._budget_bytes
        if self._file is not None and budget is not None and stash.num_bytes > budget:
            logger.warning(
                "An activation of %d bytes is larger than host_budget_bytes=%d. It would have to pass through that RAM on its "
                "way to the file, so activations of this size stay on the device. Give them a budget of at least their size.",
                stash.num_bytes,
                budget,
            )
        else:
            logger.warning(
                "Activations of more than %d bytes are saved for backward at once, which is all the RAM that they may take: "
                "the rest stays on the device. Raise host_budget_bytes%s.",
                self.pool.num_bytes if budget is None else budget,
                ", or pass disk_path" if self._file is None else "",
            )

    # To the file

    def enqueue_write(self, stash: Stash) -> None:
        """Let a stash be written to the file when its turn comes. Its copy to RAM has to be enqueued by then."""
        if self._file is not None:
            self._oldest.append(weakref.ref(stash))

    def write_ahead(self) -> None:
        """Write the stashes that have been in RAM longest to the file, so that there is room when forward needs it."""
        if self._file is not None:
            excess = self.pool.used_bytes - sum(write.num_bytes for write in self._writes)
            excess -= int(_WRITE_AHEAD_SHARE * (self._budget_bytes or 0))
            while excess > 0 and self.write_oldest():
                excess -= self._writes[-1].num_bytes

    def write_oldest(self) -> bool:
        """Start to write the stash that has been in RAM longest. False if there is none."""
        assert self._file is not None
        while self._oldest:
            reference = self._oldest.popleft()
            stash = reference()
            if stash is None or stash.host_range is None or stash.job is not None or stash.file_range is not None:
                continue
            assert stash.left is not None
            stash.file_range = self._file.take(stash.num_bytes)
            stash.job = self._file.write(stash.host_memory, stash.file_range, stash.left, stash.name)
            self._writes.append(_Write(reference, stash.job, stash.host_range.num_bytes))
            self._counters.written_bytes += stash.num_bytes
            return True
        return False

    def finish_writes(self, at_least: int = 0) -> Iterator[Stash]:
        """Take the RAM of stashes back that the file holds now. Wait for `at_least` of them.

        Yields:
            Each stash, once its RAM was taken back.

        Raises:
            GroupFileError: one could not be written. It stays in RAM.
        """
        while self._writes and (at_least > 0 or self._writes[0].job.is_done):
            write = self._writes.popleft()
            at_least -= 1
            stash = write.stash()
            if stash is not None:
                stash.job = None
                try:
                    write.job.wait()
                except GroupFileError:
                    assert self._file is not None and stash.file_range is not None
                    self._file.give(stash.file_range)
                    stash.file_range = None
                    raise
                self.free(stash)
                yield stash
            elif at_least >= 0:  # a dead one: its RAM comes back through `take_back`
                wait_for_threads(write.job)

    # From the file

    def read_ahead(self, stashes: Sequence[Stash]) -> None:
        """Start to read stashes from the file, as far as there is room in RAM."""
        if self._file is None:
            return
        for stash in stashes:
            if stash.state is StashState.OFFLOADED and stash.host_range is None:
                assert stash.file_range is not None
                if not self.take(stash):
                    return
                assert stash.host_range is not None
                stash.job = self._file.read(stash.host_memory, stash.file_range, stash.host_range.last_uses, stash.name)
                self._reads.append(weakref.ref(stash))
                self._counters.read_bytes += stash.num_bytes

    def is_filled(self, stash: Stash) -> bool:
        """Whether RAM holds the bytes of a stash, or a copy to it was enqueued."""
        if stash.host_range is None:
            return False
        if not stash.is_being_read:
            return True
        assert stash.job is not None
        if not stash.job.is_done:
            return False
        with contextlib.suppress(
            GroupFileError
        ):  # backward reads it again when it needs it, and is told if that fails too
            self.finish_read(stash)
        return stash.host_range is not None

    def finish_read(self, stash: Stash) -> None:
        """Wait until a stash that is being read is in RAM.

        Raises:
            GroupFileError: it could not be read. Its RAM was taken back.
        """
        assert stash.job is not None and stash.host_range is not None
        job, stash.job = stash.job, None
        try:
            job.wait()
        except GroupFileError:
            self._take_back_unread(stash)
            raise

    def read_now(self, stash: Stash) -> torch.Tensor:
        """Read a stash into RAM of its own, outside of the pool and pageable: there is no room in the pool.

        Raises:
            GroupFileError: it could not be read.
        """
        assert self._file is not None and stash.file_range is not None
        buffer = torch.empty(stash.num_bytes, dtype=torch.uint8, device="cpu")
        self._file.read(buffer, stash.file_range, (), stash.name).wait()
        self._counters.read_bytes += stash.num_bytes
        return buffer

    def drop_read(self) -> bool:
        """Take the RAM of a stash back that was read ahead of its use. False if there is none."""
        while self._reads:
            stash = self._reads.popleft()()
            if stash is not None and stash.state is StashState.OFFLOADED and stash.is_being_read:
                with contextlib.suppress(GroupFileError):  # backward reads it again when it needs it
                    self.finish_read(stash)
                    self._take_back_unread(stash)
                return True
        return False

    def _take_back_unread(self, stash: Stash) -> None:
        assert stash.host_range is not None
        self.pool.give(stash.host_range)
        stash.host_range = None


def wait_for_threads(job: SpillJob) -> None:
    with contextlib.suppress(GroupFileError):  # of bytes that no graph needs any more
        job.wait()
