"""The device memory of a module's groups: rings that they take turns in, slots just in time, and slots that stay."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import torch

from ..base.arena import Holding, arena_for
from ..base.device import Event
from ..base.tuning import tuning
from ..config import OffloadConfig
from ..stores.base import PlacedBlob
from .groups.compressed import CompressedGroup
from .groups.group import Group
from .measure.counters import Counters
from .prefetch.schedule import Schedule
from .slots.compressed_buffers import CompressedBuffers
from .slots.ring import Ring
from .slots.slot import Slot
from .transfers.transfer import Transfer

logger = logging.getLogger("group_offload")

_SHARED_SLOTS = 4
"""Slots where several GPUs share groups: each group waits for the slowest rank there, and the links go on meanwhile."""


class DeviceMemory(Holding):
    """The slots of one module, and the groups in them. An engine owns it, and uses it under the engine's lock.

    Order of calls: `reside` once groups are known; `claim`, `take`, then everything else, then `give_back` in each pass.
    """

    def __init__(self, config: OffloadConfig, transfer: Transfer, counters: Counters, name: str) -> None:
        super().__init__()
        self.name = name
        """The model's name, for messages."""
        self._config, self._backend = config, config.backend
        self.transfer, self.counters = transfer, counters
        # Leaf level is for least memory, and torch's allocator finds room for its small layers anywhere.
        self.is_just_in_time = config.record_stream or (config.is_leaf_level and config.use_stream)
        """Whether groups inside of whose modules no other one is needed have slots outside of rings."""
        self.arena = arena_for(self._backend)
        self.rings: dict[int, Ring[Group]] = {}
        """For each nesting level of groups, the memory that these groups take turns in."""
        self.compressed_buffers: CompressedBuffers | None = None
        """The part of the memory that compressed bytes land in."""
        self.pooled: list[Slot[Group]] = []
        """Slots in no ring, each allocated for one run of groups that takes turns."""
        self.residents: list[Slot[Any]] = []
        """The slots of groups that stay between passes, unless they give way."""
        self.wanted_bytes = 0
        """What would stay if the module had the device to itself. `Placer` sets it, and the limits of each pass below."""
        self.resident_limit = 0
        """The bytes that residents may take in this pass. It falls as residents are evicted: these stream then."""
        self.window_bytes = 0
        """The bytes that may be on their way just in time."""
        self.schedule = Schedule(())
        """Tells which groups are needed last. `Prefetcher` sets it."""
        self._to_stay: frozenset[Group | CompressedGroup] = frozenset()
        """Groups, and compressed groups, that are to stay on the device between passes."""
        self.ring_sizes: dict[int, int] = {}
        """For each nesting level, the bytes that its groups take turns in."""
        self.compressed_buffer_bytes = 0
        """The bytes that compressed bytes land in: see [Note: The life of a compressed buffer]."""
        self._reading_bytes = self._strip_bytes = 0
        """The part of them for compressed bytes that are read from files, and the size of each of the others."""
        self.largest: dict[int, int] = {}
        """For each nesting level, the size of the largest group that takes turns."""
        self.bound: dict[Group, None] = {}
        """The groups whose tensors are views of slots."""
        self._spare_events: list[Event] = []
        """The events of freed slots: making an event takes longer than recording it."""
        self.was_freed = True
        """Whether memory was freed since `Prefetcher` walked through the groups that come next."""
        self._has_warned_of_alias = False

    # ---------------------------------------------------------------- between passes

    def reside(self, to_stay: frozenset[Group | CompressedGroup], groups: Sequence[Group], num_buffers: int) -> None:
        """Note which groups stay on the device, as they are or compressed, and size the rings for all others.

        Residents that are to stay no more are evicted. None is brought.
        """
        self._to_stay = to_stay
        streamed = [group for group in groups if group not in to_stay and not group.is_in_place]
        by_nesting: dict[int, list[int]] = {}
        for group in streamed:
            if group.num_bytes:
                by_nesting.setdefault(group.nesting, []).append(group.num_bytes)
        self.largest = {nesting: max(found) for nesting, found in by_nesting.items()}
        sizes = {nesting: self._ring_bytes(nesting, found) for nesting, found in sorted(by_nesting.items())}
        for slot in [*self.residents]:
            if not to_stay.issuperset(slot.groups):
                self.free(slot)
        sent = [group for group in streamed if group.compressed not in to_stay]
        reading_bytes = max((group.largest_strip(is_read=True) for group in streamed), default=0)
        largest = max((group.largest_strip(is_read=False) for group in sent), default=0)
        now = sizes, reading_bytes + num_buffers * largest, reading_bytes, largest
        if now != (self.ring_sizes, self.compressed_buffer_bytes, self._reading_bytes, self._strip_bytes):
            self.arena.release(self)
        self.ring_sizes, self.compressed_buffer_bytes, self._reading_bytes, self._strip_bytes = now

    def _ring_bytes(self, nesting: int, sizes: list[int]) -> int:
        """The size of a ring for groups of these sizes: as many of the largest as there are slots, or one without a stream.

        Groups that are needed around others all stay on the device, if their sum is small.
        """
        config, sharing = self._config, self.transfer.sharing
        is_shared = sharing is not None and sharing.host_group is not None
        # With a budget, the plan gives that memory to groups that stay.
        has_more = is_shared and config.use_stream and not config.has_budgets
        num_slots = min(_SHARED_SLOTS if has_more else config.num_slots, max(config.num_slots, len(sizes) - 1))
        if len(sizes) <= config.num_slots:
            num_slots = 1  # room for all groups would save no memory, and overlap is not worth that
        in_turn = sum(sorted(sizes)[-num_slots:])
        return max(in_turn, min(sum(sizes), tuning().resident_bytes)) if nesting and config.use_stream else in_turn

    @property
    def fixed_bytes(self) -> int:
        """The bytes of all rings, and of the compressed buffers, which a module leases as a whole."""
        return sum(self.ring_sizes.values()) + self.compressed_buffer_bytes

    @property
    def outer_bytes(self) -> int:
        """The bytes of the rings of groups that are needed around others."""
        return sum(size for nesting, size in self.ring_sizes.items() if nesting)

    @property
    def slots(self) -> list[Slot[Group]]:
        return [*self.residents, *self.pooled, *(slot for ring in self.rings.values() for slot in ring.slots)]

    def take_back(self) -> tuple[torch.Tensor | None, list[Event]]:
        memory, unread = self.memory, [] if self.compressed_buffers is None else [*self.compressed_buffers.last_uses]
        # Asked before the slots are forgotten, which know of the views.
        is_aliased = any(slot.is_aliased for ring in self.rings.values() for slot in ring.slots)
        for slot in (*self.pooled, *(slot for ring in self.rings.values() for slot in ring.slots)):
            slot.evict()
            if slot.waited_on is None:
                unread.append(slot.ready)
        # At once and at the end: an interrupt finds all of it, or nothing.
        self.memory, self.rings, self.pooled, self.pooled_bytes, self.compressed_buffers = None, {}, [], 0, None
        return None if is_aliased else memory, unread

    def blobs_of(self, run: Sequence[Group], *, has_compressed_buffers: bool = True) -> list[PlacedBlob]:
        """The blobs of `run`, one after another in one slot. Those whose compressed bytes fit into no compressed buffer are
        sent decompressed.

        Args:
            has_compressed_buffers: Whether there are compressed buffers by now, or will be.
        """

        def fitting(placed: PlacedBlob) -> PlacedBlob:
            compressed = placed.compressed
            if compressed is None or placed.on_device is not None:
                return placed
            space = self._reading_bytes if compressed.is_read else self._strip_bytes
            fits = has_compressed_buffers and compressed.layout.largest_strip <= space
            return placed if fits else placed._replace(compressed=None)

        starts = accumulate((group.num_bytes for group in run), initial=0)
        return [fitting(each) for group, start in zip(run, starts, strict=False) for each in group.blobs_at(start)]

    def evict_residents(self, num_bytes: int) -> None:
        if num_bytes <= 0:
            return
        slots = self.residents[::-1]  # another module's pass takes what came last, whatever this module needs next
        if self.thread:
            next_use: dict[Group | CompressedGroup, int] = {}
            for number, group in enumerate(self.schedule.upcoming(wraps=True)):
                next_use.setdefault(group, number)
                next_use.setdefault(group.compressed, number)
            never = len(next_use)
            slots.sort(key=lambda slot: -min((next_use.get(group, never) for group in slot.groups), default=never))
        for slot in slots:
            if num_bytes > 0 and not slot.is_held:
                num_bytes -= slot.memory.numel()
                self.free(slot)
        self.resident_limit = min(self.resident_limit, self.resident_bytes)

    def release(self) -> None:
        """Free all memory."""
        for slot in [*self.residents]:
            self.free(slot)
        self.arena.release(self)

    # ---------------------------------------------------------------- a pass

    def claim(self) -> None:
        """Keep other modules' passes from taking anything until `give_back`. It begins a pass."""
        self.arena.claim(self)
        # Another module's pass may have been interrupted as it took a slot's memory.
        self.residents = [slot for slot in self.residents if slot.groups]
        self.resident_bytes = sum(slot.memory.numel() for slot in self.residents)

    def take(self) -> None:
        """Lease the memory of slots, and cut it. Groups in them that are out of date are dropped.

        Raises:
            torch.OutOfMemoryError: the device has too little memory for the slots, with no resident left.
        """
        sizes = {nesting: size for nesting, size in self.ring_sizes.items() if nesting or not self.is_just_in_time}
        if self.arena.lease(self, sum(sizes.values()) + self.compressed_buffer_bytes, self.transfer.writers):
            assert self.memory is not None
            start = 0
            for nesting, size in sizes.items():
                memory = self.memory[start : start + size]
                self.rings[nesting] = Ring(memory, self._backend, self.largest.get(nesting, 0))
                start += size
            if self.compressed_buffer_bytes:
                rest = self.memory[start:]
                self.compressed_buffers = CompressedBuffers(rest, self._backend, self._strip_bytes, self._reading_bytes)
        self.counters.peak_device_bytes = max(self.counters.peak_device_bytes, self.num_bytes)
        for slot in self.slots:
            for group in [*slot.groups]:
                if not group.is_current:
                    self.drop(group)

    def give_back(self) -> None:
        """The pass is over, or there was none after all."""
        for slot in self.slots:
            # The memory of slots that no call has used has to outlast their copies: another module's pass may drop it.
            if slot.owner is not None and slot.waited_on is None:
                for writer in self.transfer.writers:
                    self._backend.record_stream(slot.memory, writer)
        self.arena.give_back(self, self._backend.current_stream())

    def recover(self) -> None:
        """Free all memory, in any state: a pass failed, or was interrupted. No copy is on its way."""
        self.bound.clear()
        self.was_freed = True
        slots = [*self.residents, *self.pooled]
        for slot in slots:
            slot.evict()
        self.residents, self.pooled, self.resident_bytes, self.pooled_bytes = [], [], 0, 0
        self.arena.release(self)
        self.thread = 0
        for slot in slots:
            if not slot.is_aliased:
                self._backend.free(slot.memory)
        self._spare_events.clear()  # an interrupt may have left them with the slots that were freed

    def __del__(self) -> None:
        """Part groups from slots, which know each other: with the model all of its memory goes, and not with a collection."""
        if not hasattr(self, "was_freed"):
            return  # an interrupt came in the middle of the constructor
        for slot in self.slots:
            for group in slot.groups:
                group.slot = None

    def may_reside(self, group: Group | CompressedGroup) -> bool:
        """Whether a group that is not on the device is to stay there, and has space."""
        return group in self._to_stay and self.resident_bytes + group.num_bytes <= self.resident_limit

    @property
    def misses_residents(self) -> bool:
        """Whether a group is yet to come that stays then."""
        return any(group.slot is None and self.may_reside(group) for group in self._to_stay)

    def resident_slot(self, group: Group | CompressedGroup) -> Slot[Any] | None:
        """Memory for a group that is to stay; None if it may not, or if there is none: then the group streams."""
        if not self.may_reside(group):
            return None
        memory = self.arena.take_spare(group.num_bytes, self._backend.current_stream())
        if memory is None:
            self.resident_limit = self.resident_bytes  # and no other one is tried in this pass
            return None
        slot = self._new_slot(memory, is_resident=True)
        if isinstance(group, CompressedGroup):
            for writer in self.transfer.writers:
                self._backend.record_stream(slot.memory, writer)  # no stream that computes waits for what reads it
        return slot

    def slot_now(self, group: Group, *, is_first: bool) -> tuple[Slot[Group], list[Slot[Group]]]:
        """Memory for a group that is needed now, and the slots of a ring that it takes the place of: see `Ring.place`."""
        resident, ring = self.resident_slot(group), self.rings.get(group.nesting)
        if resident is None and ring is not None:
            found = ring.place(group.num_bytes, self._is_free, is_first=is_first)
            if found is not None:
                return found
            self._warn_of_aliases(ring.slots)
        if resident is None:
            with suppress(torch.OutOfMemoryError):
                return self.pooled_slot(group.num_bytes), []
            for slot in filter(self._is_free, [*self.pooled]):  # what was sent ahead can be sent again
                self.free(slot)
        return resident or self.pooled_slot(group.num_bytes), []

    def pooled_slot(self, num_bytes: int) -> Slot[Group]:
        """Memory from the device's own allocator, for one run of groups.

        It belongs to the stream that computes. So it is free again, for activations too, once compute has come to the point
        where it is freed: the host does not wait.
        """
        return self._new_slot(self.arena.take(num_bytes, self._backend.current_stream(), self), is_resident=False)

    def slot_just_in_time(self, num_bytes: int, may_evict: Callable[[Slot[Group]], bool]) -> Slot[Group] | None:
        """Memory for the run that comes next, if `num_bytes` more may be on their way."""
        if not self.has_space_for(num_bytes):
            idle = [slot for slot in self.pooled if slot.unused and may_evict(slot)]
            for slot in idle:
                self.free(slot)
            if not idle or not self.has_space_for(num_bytes):
                return None
        with suppress(torch.OutOfMemoryError):  # the run can wait: the call that needs it says if there is none then
            return self.pooled_slot(num_bytes)
        return None

    def has_space_for(self, num_bytes: int) -> bool:
        """Whether `num_bytes` more may be on their way just in time. Without a budget one run may always be."""
        pooled_bytes = self.pooled_bytes + num_bytes
        # A budget's plan counts on as much as a ring would take.
        if self._config.vram_budget is not None and pooled_bytes > self.ring_sizes.get(0, pooled_bytes):
            return False
        bytes_ahead = sum([slot.memory.numel() for slot in self.pooled if slot.unused])
        if not bytes_ahead:
            return True
        if bytes_ahead + num_bytes > self.window_bytes:
            return False
        # At leaf level memory counts most, and slots in use count too.
        return self._config.record_stream or pooled_bytes <= self.window_bytes * 3 // 2

    def _new_slot(self, memory: torch.Tensor, *, is_resident: bool) -> Slot[Group]:
        stream = self._backend.current_stream()
        last_use = self._new_event()
        last_use.record(stream)  # of that memory's contents before
        slot: Slot[Group] = Slot(memory, self._new_event(), last_use, owner=stream, is_resident=is_resident)
        if is_resident:
            self.residents.append(slot)
            self.resident_bytes += memory.numel()
        else:
            self.pooled.append(slot)
            self.pooled_bytes += memory.numel()
        self.counters.peak_device_bytes = max(self.counters.peak_device_bytes, self.num_bytes)
        return slot

    def _new_event(self) -> Event:
        return self._spare_events.pop() if self._spare_events else self._backend.new_event()

    def occupy(
        self, slot: Slot[Any], run: Sequence[Group | CompressedGroup], evicted: Sequence[Slot[Group]]
    ) -> list[Event]:
        """Put groups into a slot, one after another, in place of the groups that its memory held.

        Args:
            evicted: Slots that had the same bytes of a ring.

        Returns:
            The events that copies into the slot have to wait for: the last uses of its memory.
        """
        after = [old.last_use() for old in evicted] if slot.owner is None else [slot.last_use()]
        # What no call has waited for may still be on its way, on another stream than what takes its place.
        after += [old.ready for old in evicted if old.waited_on is None]
        for old in evicted:
            self.evict(old)
        offset = 0
        for group in run:
            group.was_sent(slot, offset)
            offset += group.num_bytes
        slot.groups = [*run]
        slot.unused = set(run)
        slot.waited_on = slot.last_stream = None
        return after

    # ---------------------------------------------------------------- groups leave their slots

    def unbind(self, group: Group) -> None:
        """Bind a group to its blobs again, with the forward's changes."""
        self.bound.pop(group, None)
        num_changed = group.offload(self.transfer)
        self.counters.changed += num_changed
        self.counters.brought_back += num_changed
        if not group.is_current:
            self.drop(group)

    def drop(self, group: Group) -> None:
        """Take the group out of its slot, whose content is out of date."""
        slot = group.slot
        assert slot is not None
        slot.groups.remove(group)
        slot.unused.discard(group)
        group.slot = None
        if slot.owner is not None and not slot.groups:
            self.free(slot)

    def evict(self, slot: Slot[Group]) -> None:
        """Take all groups out of a slot."""
        for group in [*slot.groups]:
            if group in self.bound:  # the group was expected to be needed again at once
                self.unbind(group)
        slot.unused.clear()
        slot.evict()

    def try_unbind(self, slot: Slot[Group]) -> bool:
        """Unbind the groups in a slot that no call holds. False if other code keeps views of it."""
        for group in [*slot.groups]:
            if group in self.bound:
                self.unbind(group)
        return not slot.is_aliased

    def _is_free(self, slot: Slot[Group]) -> bool:
        return not slot.is_held and self.try_unbind(slot)

    def _warn_of_aliases(self, slots: Sequence[Slot[Group]]) -> None:
        aliased = [slot for slot in slots if not (slot.is_held or self._is_free(slot))]
        if aliased and not self._has_warned_of_alias:
            self._has_warned_of_alias = True
            logger.warning(
                "Weights of %s in %s are still referenced after their call, so their device memory can't be reused. Check "
                "hooks and autograd functions (use save_for_backward).",
                " and ".join(group.group_id for slot in aliased for group in slot.groups),
                self.name,
            )

    def free(self, slot: Slot[Group]) -> None:
        """Take all groups out of a slot. If it is in no ring its memory is freed."""
        self.evict(slot)
        among = self.residents if slot.is_resident else self.pooled
        if slot not in among:  # it is in a ring, or was freed as `evict` dropped its last group
            return
        assert slot.owner is not None
        if slot.waited_on is None:  # no call used the slot: its copy may still be on its way
            slot.owner.wait_event(slot.ready)
        self.was_freed = True
        among.remove(slot)
        if slot.is_resident:
            self.resident_bytes -= slot.memory.numel()
        else:
            self.pooled_bytes -= slot.memory.numel()
        # Once it is in no list: an interrupt before must not have its events spared twice.
        self._spare_events += slot.ready, slot._last_use
        if not slot.is_aliased:  # else the memory goes with the last view of it
            self._backend.free(slot.memory)
        slot.views, slot.handed = {}, {}
        del slot.memory  # whoever still has the slot keeps none of it
