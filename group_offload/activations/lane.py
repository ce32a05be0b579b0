"""The way of one device's activations: out to RAM or the file, and back. See [Note: The life of an activation]."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import deque
from collections.abc import Sequence

import torch

from ..base.device import Backend, Event, Stream
from ..errors import GroupFileError
from .config import ActivationConfig
from .counters import ActivationCounters
from .slab import Slab
from .spill import SpillFile, SpillJob
from .stash import Dead, Remains, Stash, StashState
from .streams import CONVOY_BYTES, CopyStreams
from .trace import ActivationTrace

logger = logging.getLogger("group_offload")

_WRITE_AHEAD_SHARE = 0.75
"""Once this much of the budget is used the oldest activations are written to the file, so that room is there in time."""


class Lane:
    """One device: its streams, its slab, its file. All calls are made under the session's lock.

    Order of calls for a stash: `send`, then any number of `restore` (with `fetch` ahead of it, if the stash is foreseen)
    and `evict`. `tick` marks that compute came to another group. What is sent leaves in convoys, at the latest when anything
    else is called.
    """

    def __init__(self, backend: Backend, config: ActivationConfig, counters: ActivationCounters) -> None:
        self.backend = backend
        self._config = config
        self._counters = counters
        self._streams = CopyStreams(backend)
        self._slab = Slab(backend, config.host_budget_bytes, self._streams.drain)
        self._file = None if config.disk_path is None else SpillFile(config.disk_path)
        self._convoy: list[Stash] = []
        """What is to leave next, saved on one stream. Held here: its memory has to outlive a copy that nobody has enqueued."""
        self._convoy_bytes = 0
        self._leaving: deque[weakref.ref[Stash]] = deque()
        self._oldest: deque[weakref.ref[Stash]] = deque()
        """Stashes in RAM, to be written to the file in this order: backward needs the first ones last."""
        self._writes: deque[tuple[weakref.ref[Stash], SpillJob, int]] = deque()
        self._writing_bytes = 0
        self._reads: deque[weakref.ref[Stash]] = deque()
        """Stashes that were read from the file ahead of their use: they can be read again."""
        self._epoch = 0
        self._last_wait: tuple[Stream, Event] | None = None
        """Convoys share events: a stream that waited for one need not do so again."""
        self.dead: Dead = deque()
        self.inflight_bytes = 0

    @property
    def slab(self) -> Slab:
        return self._slab

    @property
    def tracer(self) -> ActivationTrace | None:
        return self._streams.tracer

    def trace(self, tracer: ActivationTrace | None) -> None:
        """Tell `tracer` of what happens from here on, or nobody."""
        self._depart()
        self._streams.tracer = tracer
        if self._file is not None:
            self._file.tracer = tracer

    @property
    def file_bytes(self) -> int:
        return 0 if self._file is None else self._file.used_bytes

    def send(self, stash: Stash) -> None:
        """Let the next convoy copy a stash to RAM. Without room it stays where it is."""
        assert stash.state is StashState.ON_DEVICE
        if self.dead:
            self._take_back()
        if not self._take_block(stash):
            self._refuse(stash)
            return
        if self._convoy and self._convoy[0].streams[0] != stash.streams[0]:
            self._depart()
        stash.state = StashState.OFFLOADING
        stash.epoch = self._epoch
        counters = self._counters
        counters.offloads += 1
        counters.offloaded_bytes += stash.num_bytes
        self.inflight_bytes += stash.num_bytes
        reference = weakref.ref(stash)
        self._leaving.append(reference)
        if self._file is not None:
            self._oldest.append(reference)
        self._convoy.append(stash)
        self._convoy_bytes += stash.num_bytes
        if self._convoy_bytes >= CONVOY_BYTES or not self.backend.has_streams:
            self._depart()
        max_bytes = self._config.max_inflight_bytes
        if max_bytes is not None and self.inflight_bytes > max_bytes:
            self._let_go(max_bytes, self._epoch)
        if self.inflight_bytes > counters.peak_inflight_bytes:
            counters.peak_inflight_bytes = self.inflight_bytes

    def keep(self, stash: Stash, device: torch.Tensor) -> None:
        """A last group saves a stash as well that is to leave, or has left: it is on the device still."""
        self._depart()
        if stash.state is StashState.OFFLOADING:
            self._stay(stash)
        elif stash.state is StashState.OFFLOADED:
            stash.memory, stash.streams = device, [self.backend.current_stream()]
            stash.state = StashState.RELOADED

    def tick(self) -> None:
        """Compute came to another group: what began to leave two groups ago has to be gone."""
        self._epoch += 1
        self.settle()
        self._let_go(None, self._epoch - 2)
        if self._file is not None:
            self._finish_writes()

    def write_ahead(self) -> None:
        """Write what has been in RAM longest to the file, so that there is room when forward needs it."""
        if self._file is not None:
            budget = self._config.host_budget_bytes or 0
            while self._slab.used_bytes - self._writing_bytes > _WRITE_AHEAD_SHARE * budget and self._write_oldest():
                pass

    def fetch(self, stashes: Sequence[Stash], stream: Stream) -> list[Stash]:
        """Start to bring stashes back for compute on `stream`: those in RAM at once, those in the file to RAM first.

        Returns:
            Those that were not on the device.
        """
        self._depart()
        for stash in stashes:
            if stash.state is StashState.OFFLOADING:
                self._stay(stash)
        away = [stash for stash in stashes if stash.state is StashState.OFFLOADED]
        self.read_ahead(away)
        self._bring([stash for stash in away if stash.block is not None and self._is_filled(stash)], stream)
        return away

    def read_ahead(self, stashes: Sequence[Stash]) -> None:
        """Start to read stashes from the file, as far as there is room."""
        if self._file is None:
            return
        for stash in stashes:
            if stash.state is StashState.OFFLOADED and stash.block is None:
                assert stash.spot is not None
                stash.block = self._slab.take(stash.num_bytes)
                if stash.block is None:
                    return
                stash.job = self._file.read(stash.block.memory, stash.spot, stash.block.range.last_uses, stash.name)
                self._reads.append(weakref.ref(stash))
                self._counters.read_bytes += stash.num_bytes

    def restore(self, stash: Stash, stream: Stream) -> torch.Tensor:
        """The bytes on the device, for compute on `stream` from now on."""
        if stash.state is not StashState.RELOADED:
            self.fetch([stash], stream)
        if stash.state is StashState.OFFLOADED:
            self._bring_from_file(stash, stream)
        assert stash.memory is not None
        if stash.arrived is not None and (stash.waited_on is None or stash.waited_on != stream):
            reached = None if self.tracer is None else self.tracer.now(stream)
            self._wait(stream, stash.arrived)
            if self.tracer is not None and reached is not None:
                self.tracer.stalled(stash.name, reached, stream)
            stash.waited_on = stream
            if stream == stash.streams[0]:
                stash.guard = None
        if stream != stash.streams[0]:
            self.backend.record_stream(stash.memory, stream)
        return stash.memory

    def evict(self, stash: Stash) -> None:
        """Give the device memory of a stash back that is in RAM or in the file as well."""
        if stash.state is StashState.RELOADED:
            self._drop(stash, is_done=False)

    def settle(self) -> None:
        """Send what is to leave, and take back what dead stashes left behind."""
        self._depart()
        self._take_back()

    def _take_back(self) -> None:
        for _ in range(len(self.dead)):
            remains = self.dead.popleft()
            if remains.job is not None and not remains.job.is_done:
                self.dead.append(remains)  # threads are using the block
            else:
                self._bury(remains)
        for references in (self._oldest, self._reads):
            while references and references[0]() is None:
                references.popleft()

    def give_up(self) -> None:
        """Return once no copy is under way that was begun here. Nothing is called afterwards."""
        self._streams.drain()
        self.dead.clear()

    def close(self) -> None:
        """Let go of all device memory that copies to RAM hold."""
        self.settle()
        self._let_go(0, self._epoch)

    # Out

    def _depart(self) -> None:
        """Start the copies of what is to leave."""
        if not self._convoy:
            return
        convoy, self._convoy, self._convoy_bytes = self._convoy, [], 0
        cargo = []
        for stash in convoy:
            assert stash.block is not None and stash.memory is not None
            cargo.append((stash.block, stash.memory, stash.name))
        left = self._streams.send(cargo, convoy[0].streams[0])
        for stash in convoy:
            stash.left = stash.guard = left
        if not self.backend.has_streams:
            self._let_go(0, 0)

    def _wait(self, stream: Stream, event: Event) -> None:
        """Let a stream wait for an event that nobody records again, unless the last call here was the same."""
        if self._last_wait is None or self._last_wait[1] is not event or self._last_wait[0] != stream:
            stream.wait_event(event)
            self._last_wait = stream, event

    def _let_go(self, max_bytes: int | None, max_epoch: int) -> None:
        """Drop the device memory of stashes that have left: done, or older than `max_epoch`, or past `max_bytes`."""
        self._depart()
        done: Event | None = None
        while self._leaving:
            stash = self._leaving[0]()
            if stash is None or stash.state is not StashState.OFFLOADING:
                self._leaving.popleft()
                continue
            assert stash.left is not None
            is_done = stash.left is done or stash.left.query()
            done = stash.left if is_done else done
            is_due = stash.epoch <= max_epoch and (max_bytes is None or self.inflight_bytes > max_bytes)
            if not is_done and not is_due:
                return
            self._leaving.popleft()
            self._drop(stash, is_done=is_done)

    def _drop(self, stash: Stash, *, is_done: bool) -> None:
        if stash.guard is not None and not is_done:
            for stream in stash.streams:
                self._wait(stream, stash.guard)
        if stash.state is StashState.OFFLOADING:
            self.inflight_bytes -= stash.num_bytes
        stash.state = StashState.OFFLOADED
        stash.memory = stash.guard = stash.waited_on = None

    def _stay(self, stash: Stash) -> None:
        """Backward came for it before its device memory went: nothing has to come back."""
        self.inflight_bytes -= stash.num_bytes
        stash.state = StashState.RELOADED

    def _refuse(self, stash: Stash) -> None:
        if stash.was_refused:  # it is tried again as long as it is saved
            return
        stash.was_refused = True
        if not self._counters.refused_bytes:
            self._warn_of_refusal(stash)
        self._counters.refused_bytes += stash.num_bytes

    def _warn_of_refusal(self, stash: Stash) -> None:
        budget = self._config.host_budget_bytes
        if self._file is not None and budget is not None and stash.num_bytes > budget:
            logger.warning(
                "An activation of %d bytes is larger than host_budget_bytes=%d, through which all has to pass on its way to "
                "the file: such ones stay on the device. Give it that at least.",
                stash.num_bytes,
                budget,
            )
        else:
            logger.warning(
                "Activations of more than %d bytes are saved for backward at once, which is all the RAM that they may take: "
                "the rest stays on the device. Raise host_budget_bytes%s.",
                self._slab.num_bytes if budget is None else budget,
                ", or pass disk_path" if self._file is None else "",
            )

    def _bury(self, remains: Remains) -> None:
        if remains.guard is not None:
            for stream in remains.streams:
                self._wait(stream, remains.guard)
            remains.memory = None
        self.inflight_bytes -= remains.num_offloading_bytes
        if remains.block is not None:
            self._slab.give(remains.block, *remains.uses)
        if remains.spot is not None and self._file is not None:
            self._file.give(remains.spot)

    # Back

    def _bring(self, stashes: Sequence[Stash], stream: Stream) -> None:
        if not stashes:
            return
        memories, born = self._streams.allocate((stash.num_bytes for stash in stashes), stream)
        cargo, after = [], [born]
        for stash, memory in zip(stashes, memories, strict=True):
            assert stash.block is not None
            cargo.append((memory, stash.block.memory, stash.name))
            if stash.left is not None:
                after.append(stash.left)
        for stash, memory, arrived in zip(stashes, memories, self._streams.bring(cargo, after), strict=True):
            assert stash.block is not None
            stash.arrived = arrived
            if stash.spot is not None and stash.job is None:  # it is in the file, should it be needed once more
                self._slab.give(stash.block, stash.arrived)
                stash.block = stash.left = None
            self._came_back(stash, memory, stream)

    def _came_back(self, stash: Stash, memory: torch.Tensor, stream: Stream) -> None:
        stash.memory, stash.streams, stash.guard, stash.waited_on = memory, [stream], stash.arrived, None
        stash.state = StashState.RELOADED
        self._counters.reloads += 1
        self._counters.reloaded_bytes += stash.num_bytes

    def _is_filled(self, stash: Stash) -> bool:
        """Whether its block holds its bytes, or a copy to it was enqueued. A write to the file does not matter."""
        if stash.job is None or stash.left is not None:
            return True
        if not stash.job.is_done:
            return False
        with contextlib.suppress(GroupFileError):  # whoever needs it reads it again, and is told if that fails too
            self._end_read(stash)
        return stash.block is not None

    def _end_read(self, stash: Stash) -> None:
        assert stash.job is not None
        job, stash.job = stash.job, None
        try:
            job.wait()
        except GroupFileError:
            assert stash.block is not None
            self._slab.give(stash.block)
            stash.block = None
            raise

    def _bring_from_file(self, stash: Stash, stream: Stream) -> None:
        """Bring a stash back that nobody has read ahead: the host waits for the file."""
        assert self._file is not None and stash.spot is not None
        if stash.block is None:  # no room, not even for one: through pageable memory
            buffer = torch.empty(stash.num_bytes, dtype=torch.uint8, device="cpu")
            self._file.read(buffer, stash.spot, (), stash.name).wait()
            self._counters.read_bytes += stash.num_bytes
            (memory,), _ = self._streams.allocate([stash.num_bytes], stream)
            self.backend.copy(memory, buffer, stream, blocking=True)
            stash.arrived = None
            self._came_back(stash, memory, stream)
            return
        self._end_read(stash)
        self._bring([stash], stream)

    # Room

    def _take_block(self, stash: Stash) -> bool:
        stash.block = self._slab.take(stash.num_bytes)
        if self._file is not None and stash.num_bytes <= (self._config.host_budget_bytes or 0):
            while stash.block is None and self._make_room():
                self.settle()
                stash.block = self._slab.take(stash.num_bytes)
        return stash.block is not None

    def _make_room(self) -> bool:
        """Wait until some RAM that is in the file as well, or that nobody needs, can be taken. False if there is none."""
        if self._writes or self._write_oldest():
            self._finish_writes(at_least=1)
            return True
        if self.dead:  # a backward that was stopped: what it had begun to read is still on its way
            for index in range(len(self.dead)):  # by index: it may grow while we wait
                job = self.dead[index].job
                if job is not None:
                    wait_for_threads(job)
            return True
        while self._reads:
            stash = self._reads.popleft()()
            if (
                stash is not None
                and stash.state is StashState.OFFLOADED
                and stash.job is not None
                and stash.left is None
            ):
                with contextlib.suppress(GroupFileError):  # whoever needs it reads it again
                    self._end_read(stash)
                    assert stash.block is not None
                    self._slab.give(stash.block)
                    stash.block = None
                return True
        return False

    def _write_oldest(self) -> bool:
        """Start to write the stash that has been in RAM longest. False if there is none."""
        assert self._file is not None
        self._depart()
        while self._oldest:
            reference = self._oldest.popleft()
            stash = reference()
            if stash is None or stash.block is None or stash.job is not None or stash.spot is not None:
                continue
            assert stash.left is not None
            stash.spot = self._file.take(stash.num_bytes)
            stash.job = self._file.write(stash.block.memory, stash.spot, stash.left, stash.name)
            self._writes.append((reference, stash.job, stash.block.range.num_bytes))
            self._writing_bytes += stash.block.range.num_bytes
            self._counters.written_bytes += stash.num_bytes
            return True
        return False

    def _finish_writes(self, at_least: int = 0) -> None:
        """Give the RAM of stashes back that are in the file now.

        Raises:
            GroupFileError: one could not be written. It stays in RAM.
        """
        while self._writes and (at_least > 0 or self._writes[0][1].is_done):
            reference, job, num_bytes = self._writes.popleft()
            at_least -= 1
            self._writing_bytes -= num_bytes
            stash = reference()
            if stash is not None:  # the block of a dead one comes back through `settle`
                self._finish_write(stash, job)
            elif at_least >= 0:
                wait_for_threads(job)

    def _finish_write(self, stash: Stash, job: SpillJob) -> None:
        assert self._file is not None and stash.block is not None and stash.spot is not None
        stash.job = None
        try:
            job.wait()
        except GroupFileError:
            self._file.give(stash.spot)
            stash.spot = None
            raise
        if stash.state is StashState.OFFLOADING:
            self._drop(stash, is_done=True)
        self._slab.give(stash.block, stash.arrived)
        stash.block = stash.left = None


def wait_for_threads(job: SpillJob) -> None:
    with contextlib.suppress(GroupFileError):  # of what nobody needs any more
        job.wait()
