"""Sends or reads blobs ahead of the calls that need them, as far as there is memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from ...base.torch_internals import in_profile
from ...base.tuning import tuning
from ...config import OffloadConfig
from ...errors import EXPECTED, StorageError
from ...stores.base import PlacedBlob
from ...stores.moves import Tier
from ..groups.group import Group
from ..memory import DeviceMemory
from ..slots.slot import Slot
from ..transfers.jobs import ReadJob
from ..transfers.page_cache_pins import PageCachePins
from ..transfers.write_order import Landing
from .schedule import Schedule, first_guess

_LOOK_BEYOND = 16
"""The number of further groups looked at once there is no room for a group whose modules contain no other group."""


class Prefetcher:
    """Decides which groups are started when, and in which slot. An engine owns it, and uses it under the engine's lock.

    Order of calls: `reset` once groups are known; `begin` in each pass, then everything else.
    """

    def __init__(
        self,
        config: OffloadConfig,
        memory: DeviceMemory,
        files: PageCachePins,
        before_send: Callable[[Sequence[Group]], None],
    ) -> None:
        self.memory = memory
        self.transfer, self.counters = memory.transfer, memory.counters
        self.files = files
        self._before_send = before_send
        """Called with groups whose blobs are about to be sent, or read."""
        self._use_stream = config.use_stream
        """Whether there is a stream for copies. Without one no group is started before it is needed."""
        self.schedule = memory.schedule
        self.wraps = False
        """Whether groups that the next pass needs first may be started in this one."""
        self._is_last = False
        """Whether another model's pass should come after this one: then nothing is started for the next one."""
        self._reads_ram = False
        """Whether threads read pageable RAM."""
        self._reads_ram_ahead = False
        """Whether they may do so before there is a slot: see `Transfer.reads_of`."""
        self._outer: list[Group] = []
        """Groups inside of whose modules others are needed."""
        self._ahead: dict[Group, _EarlyRead] = {}
        """The groups that are read before there is a slot for them."""
        self._looks_again = False
        """Whether groups may be started that could not be at the last look."""
        self._lacking_bytes = 0
        """The size of the run just in time that had no space at the last look; 0 if all had."""
        self._blockers: dict[Group, set[Group]] = {}
        """The groups in whose slots the next run has to wait, each with those of its slot that are still needed."""

    def reset(self, groups: Sequence[Group], *, wraps: bool) -> None:
        """The module was partitioned."""
        self.schedule = self.memory.schedule = Schedule(first_guess(groups))
        self._outer = [group for group in groups if group.nesting and group.num_bytes]
        self._blockers = {}
        self.wraps = wraps
        self._is_last = False

    def note_tiers(self, groups: Sequence[Group]) -> None:
        """Find out how blobs are sent."""
        parts = [part for group in groups for part in group.parts if part.blob.tier is Tier.PAGEABLE and part.is_read]
        self._reads_ram, self._reads_ram_ahead = bool(parts), any(part.blob.detects_edits for part in parts)

    def recover(self, groups: Sequence[Group], *, is_whole: bool) -> None:
        """A pass failed. The learned order goes too, unless it `is_whole`."""
        self._ahead.clear()
        self._blockers, self._lacking_bytes = {}, 0
        if is_whole:
            self.schedule.end(completed=False)
        else:
            self.reset(groups, wraps=self.wraps)

    def begin(
        self, key: Hashable, scope: set[Group], guess: Sequence[Group] | None = None, *, is_last: bool = False
    ) -> None:
        """A pass begins: see `Schedule.begin`."""
        self.schedule.begin(key, scope, guess)
        if self.transfer.sharing is not None:
            self.transfer.sharing.begin_pass(sum(group.num_bytes for group in scope if group.slot is None))
        self._is_last = is_last
        self._look()

    def prepare(self) -> None:
        """Start the blobs that the next pass needs first. No pass is in progress."""
        self._is_last = False
        self._look()

    def before_call(self) -> None:
        """A call's groups are ready: start the groups that come next, if any can be started."""
        if self._looks_again or (self.memory.is_just_in_time and self._has_space_again()):
            self._look()

    def after_call(self) -> None:
        if self._looks_again:
            self._look()

    def was_released(self, group: Group) -> None:
        """The last call that held the group let it go."""
        needed = self._blockers.pop(group, None)
        if needed is not None:
            needed.discard(group)
            self._looks_again |= not needed

    def onload_now(self, group: Group) -> Slot[Group]:
        """Start the blobs of a group that is needed and was not predicted. Returns the slot."""
        alone = self._looks_again = self._use_stream
        slot, evicted = self.memory.slot_now(group, is_first=not self._use_stream)
        self._send([group], slot, evicted, alone=alone)
        return slot

    def wait_for_read(self, group: Group, slot: Slot[Group]) -> Slot[Group]:
        """Let the host wait for the disk, not for the device. A read that failed is tried once more. Returns the slot."""
        assert slot.job is not None
        try:
            slot.job.wait()
        except StorageError:
            self.memory.free(slot)
            slot = self.onload_now(group)
            if slot.job is not None:
                slot.job.wait()
        slot.job = None
        return slot

    def abandon(self) -> None:
        """Cancel all reads ahead: no call waits for them."""
        self._ahead.clear()
        self.transfer.reader.cancel_pending()

    def _look(self) -> None:
        """Start the blobs that come next, as far as memory is free, or holds only groups that are needed later.

        Small groups in a row are sent together, as a *run*. Groups in files, and in pageable RAM, are read further ahead, as
        far as the staging memory reaches.
        """
        if not self._use_stream:
            return
        memory = self.memory
        memory.was_freed, self._looks_again, self._lacking_bytes, self._blockers = False, False, 0, {}
        walk, has_residents = _Walk(), memory.resident_limit > 0
        run: list[Group] = []
        run_space, num_beyond = 0, 0
        for group, _ in groupby(self.schedule.upcoming(wraps=self.wraps and not self._is_last)):
            if group in walk.soon:
                continue
            if group.slot is None:
                if has_residents:
                    self._bring_compressed(group)
                resides = has_residents and memory.may_reside(group)
                early = self._ahead.get(group)
                joins = run and group.nesting == run[0].nesting and group.num_bytes <= run_space
                if run and (early is not None or resides or not joins):
                    self._start_run(run, walk)
                    run = []
                resident = memory.resident_slot(group) if resides else None
                if resident is not None:
                    self._send([group], resident, [])
                    continue
                if early is not None and early.run[0] is group and early.is_good_for(memory.blobs_of(early.run)):
                    self._start_run(early.run, walk)
                    walk.soon.update(early.run)
                    continue
                run_space = (run_space if run else self._run_limit(group)) - group.num_bytes
                run.append(group)
                if run_space <= 0:  # nothing else fits in
                    self._start_run(run, walk)
                    run = []
            elif run and not memory.is_just_in_time:  # before `group` counts as needed sooner
                self._start_run(run, walk)
                run = []
            walk.soon.add(group)
            if 0 in walk.full and not self._may_read_ahead():
                num_beyond += 1
                # Residents, and groups around others, have memory of their own.
                misses_residents = has_residents and memory.misses_residents
                misses_others = misses_residents or any(group.slot is None for group in self._outer)
                if num_beyond == _LOOK_BEYOND or not misses_others:
                    break
        if run:
            self._start_run(run, walk)

    def _has_space_again(self) -> bool:
        """Whether what had no space just in time may have some now, or more may be read ahead."""
        may_have = self._lacking_bytes > 0 or self.memory.was_freed
        return (may_have and self.memory.has_space_for(self._lacking_bytes)) or self._may_read_ahead()

    def _may_read_ahead(self) -> bool:
        return self._reads_ahead and self.transfer.reader.has_room_ahead

    def _start_run(self, run: list[Group], walk: _Walk) -> None:
        """Start to onload `run`; where no slot is free, start to read it."""
        nesting = run[0].nesting
        if nesting not in walk.full:
            if self._onload_ahead(run, walk.soon):
                return
            walk.full.add(nesting)
        if self._reads_ahead:
            self._read_ahead(run, walk)

    @property
    def _reads_ahead(self) -> bool:
        return self._reads_ram_ahead or self.files.are_read

    def _read_ahead(self, run: list[Group], walk: _Walk) -> None:
        early = self._ahead.get(run[0])
        if early is None or early.run != run or not early.is_good_for(self.memory.blobs_of(run)):
            self._before_send(run)
            blobs = self.memory.blobs_of(run)
            self._take_ahead(run, None)
            reads = self.transfer.reads_of(blobs)
            if not reads:
                return
            while not self.transfer.reader.has_room_ahead:
                stale = next((each for each in reversed(self._ahead.values()) if each not in walk.met), None)
                if stale is None:
                    return
                self._take_ahead(stale.run, None)  # the walk does not expect this run so soon any more
            early = _EarlyRead(run, self.transfer.read_ahead(reads), _states_of(blobs))
            self._ahead.update(dict.fromkeys(run, early))
        walk.met.add(early)

    def _take_ahead(self, run: list[Group], blobs: list[PlacedBlob] | None) -> ReadJob | None:
        """The job that reads exactly these groups ahead, for these blobs, if it is good. Other jobs for them are canceled."""
        job = None
        for early in {self._ahead[group] for group in run if group in self._ahead}:
            for group in early.run:
                del self._ahead[group]
            if blobs is not None and early.run == run and early.is_good_for(blobs):
                job = early.job
            else:
                early.job.cancel()
        return job

    def _run_limit(self, group: Group) -> int:
        is_pooled = self.memory.is_just_in_time and not group.nesting
        space = 2 * self.memory.window_bytes if is_pooled else self.memory.ring_sizes.get(group.nesting, 0)
        if self._reads_ram or self.files.are_read:
            return min(tuning().max_read_run_bytes, space // 4)
        return min(tuning().max_run_bytes, space // 8)

    def _onload_ahead(self, run: list[Group], soon: set[Group]) -> bool:
        """Start the blobs of `run` in one slot. False if all memory holds groups that are needed sooner."""
        num_bytes = sum(group.num_bytes for group in run)

        def may_evict(slot: Slot[Group]) -> bool:
            needed = {group for group in slot.groups if group.holds or group in soon}
            if needed:
                self._blockers.update(dict.fromkeys(needed, needed))
                return False
            if not self.memory.try_unbind(slot):  # frames of a call that raised keep it for a moment only
                self._looks_again = True
                return False
            return True

        ring = self.memory.rings.get(run[0].nesting)
        found: tuple[Slot[Group], list[Slot[Group]]] | None
        if ring is None:
            slot = self.memory.slot_just_in_time(num_bytes, may_evict)
            found = None if slot is None else (slot, [])
            self._lacking_bytes = num_bytes if slot is None else 0
        else:
            found = ring.place(num_bytes, may_evict, is_first=self._is_first(run[0]))
        if found is not None:
            self._send(run, *found)
        return found is not None

    def _is_first(self, group: Group) -> bool:
        """Whether `group` is the first group that passes like this one need of those that take turns with it."""
        for each in self.schedule.order:
            if each.nesting == group.nesting and (each.slot is None or not each.slot.is_resident):
                return each is group
        return False

    def _send(self, run: list[Group], slot: Slot[Group], evicted: list[Slot[Group]], *, alone: bool = False) -> None:
        self._before_send(run)
        if self.memory.resident_limit:
            for group in run:
                self._bring_compressed(group)
        compressed_buffers = self.memory.compressed_buffers
        copies = run[0].copies() if len(run) == 1 and self.transfer.sharing is None else []
        blobs = [] if copies else self.memory.blobs_of(run, has_compressed_buffers=compressed_buffers is not None)
        after = self.memory.occupy(slot, run, evicted)
        after += [group.compressed.slot.ready for group in run if group.compressed.slot is not None]
        self.counters.onloads += len(run)
        try:
            job = self._take_ahead(run, blobs) if self._ahead else None
            landing = Landing(slot.memory, after, slot.ready, compressed_buffers)
            with in_profile("onload", *[group.group_id for group in run]):
                slot.job = self.transfer.send(blobs, landing, copies, job=job, alone=alone)
        except EXPECTED:  # the forward may catch the error, and call again
            self.memory.free(slot)
            raise

    def _bring_compressed(self, group: Group) -> None:
        """Send compressed bytes that are to stay on the device, if they are not there."""
        compressed = group.compressed
        if compressed.slot is not None or not self.memory.may_reside(compressed):
            return
        self._before_send([group])
        slot = self.memory.resident_slot(compressed)
        if slot is None:
            return
        after = self.memory.occupy(slot, [compressed], [])
        try:
            with in_profile("onload", group.group_id):
                self.transfer.send(compressed.blobs_at(0), Landing(slot.memory, after, slot.ready))
        except EXPECTED:
            self.memory.free(slot)
            raise
        slot.waited_on = self.transfer.writers[-1]  # it alone reads the slot, and waits for it each time


@dataclass(frozen=True, slots=True, eq=False)
class _Walk:
    """The findings so far of a walk through the groups that come next."""

    full: set[int] = field(default_factory=set)
    """The nesting levels of groups that have no space left."""
    soon: set[Group] = field(default_factory=set)
    """The groups that come next, up to this point of the walk."""
    met: set[_EarlyRead] = field(default_factory=set)
    """The reads ahead that the walk has met, and that stay."""


@dataclass(frozen=True, slots=True, eq=False)
class _EarlyRead:
    """A run of groups that is read from files, or from RAM, before there is a slot for it."""

    run: list[Group]
    job: ReadJob
    states: list[tuple[object, ...]]

    def is_good_for(self, blobs: Iterable[PlacedBlob]) -> bool:
        """Whether the same bytes would be read now, for these blobs of its run, and the job has them, or will."""
        # In a forked child all jobs are over: it has no threads that would go on.
        return not self.job.is_over and self.states == _states_of(blobs)


def _states_of(blobs: Iterable[PlacedBlob]) -> list[tuple[object, ...]]:
    """The states of blobs that decide how they are read: a pinned blob is copied from its place, not read."""
    return [(blob.generation, blob.is_outdated, blob.pinned_bytes, compressed) for _, _, blob, compressed, _ in blobs]
