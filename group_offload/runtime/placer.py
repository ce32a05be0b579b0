"""Carries plans out: which groups stay on the device, which files are pinned, and how many bytes may be on their way.

The account of device memory has five owners: the `Arena` takes it, `DeviceMemory` has what one module holds, `Needs` measures
what passes need besides weights, the `MemoryBudget` plans for the rest, and the `Placer` decides in each pass who has what.

[Note: Slots in rings, and just in time]
Groups that are needed one after another share a ring of fixed memory, filled as far ahead as it reaches. At leaf level,
and with `record_stream`, memory for groups comes from torch's caching allocator instead, just in time: when compute comes
to a group, the next groups get memory, as far as `Placer._window` reaches. The host decides that before the activations of
the current call are allocated, so weights that wait for their turn do not add to the peak of these.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ..base.text import describe_seconds
from ..base.tuning import tuning
from ..config import OffloadConfig
from ..errors import ConfigError
from ..plan.budgets import Budget, describe_bytes
from ..plan.placement import NUM_COMPRESSED_BUFFERS, Placement, smallest_device_bytes
from ..plan.planner import Plan
from ..plan.ram_split import promised, ram_for_weights
from ..stores.files import FileBlob
from ..stores.moves import Tier
from .budget.memory_budget import MemoryBudget
from .budget.need import InputSignature, Needs
from .compressor import Compressor
from .groups.group import Group
from .measure.recorder import Recorder
from .prefetch.prefetcher import Prefetcher
from .prefetch.schedule import first_guess

logger = logging.getLogger("group_offload")

_DEEP_WINDOW = 4
"""The window at leaf level with `record_stream`, in smallest windows: one more than without. It helps if compute is slow."""
HOST_ACTIVATIONS_SHARE = 0.2
"""Share of a RAM budget that is reserved for activations when the CPU computes; they cannot be measured there."""
_MOST_TOGETHER = 16
"""The most forwards that share a pass."""


class Placer:
    """Keeps one module within its budgets. Owned by an engine, and used under its lock.

    Order of calls: `place` whenever the module was partitioned; in each forward `replan` and `make_room`, then, once there are
    slots, `begin_pass`, any number of `needs.look`, and `end_pass`.
    """

    def __init__(
        self, config: OffloadConfig, prefetcher: Prefetcher, recorder: Recorder, compressor: Compressor
    ) -> None:
        self._name = prefetcher.memory.name
        self._config, self._backend = config, config.backend
        self._prefetcher = prefetcher  # which has the same device memory, transfer and files
        self._memory, self._transfer, self._files = prefetcher.memory, prefetcher.transfer, prefetcher.files
        self._recorder, self._compressor = recorder, compressor
        self._budget = MemoryBudget(config, self._files, self._transfer, compressor)
        self.needs = Needs(self._backend, self._memory)
        self._vram: Budget | None = None
        """Device memory for weights and activations: of the whole process, or what the device has for it ("auto")."""
        self._groups: tuple[Group, ...] = ()
        self._ram: int | None = None
        """RAM for weights in bytes, as found when the module was offloaded; None for no limit."""
        self._total_bytes = 0

    # ---------------------------------------------------------------- set-up

    def place(self, groups: Sequence[Group]) -> None:
        """Decide where these groups are stored, and compress, pin and size memory for that, before any pass was measured.

        Raises:
            ConfigError: a budget is too small.
        """
        is_first, self._groups = not self._groups, tuple(groups)
        self._compressor.begin(groups)
        if not self._config.has_budgets:
            self._budget.clear()
            self._compressor.compress(self._compressor.lacking())
        self._memory.reside(frozenset(), groups, NUM_COMPRESSED_BUFFERS)
        self._total_bytes = sum(group.num_bytes for group in groups)
        self._memory.wanted_bytes = self._total_bytes if self._config.vram_budget is not None else 0
        self.needs.clear()
        parts = [part for group in groups for part in group.parts]
        in_files = [part.blob for part in parts if isinstance(part.blob, FileBlob) and part.blob.tier is Tier.FILE]
        for blob in in_files:
            blob.is_verified = self._config.verify_checksums
        self._files.begin(in_files)
        if self._config.has_budgets:
            self._plan_first(is_first=is_first)
            self._carry_out()  # compressed buffers are for what was compressed
        if not self._config.has_budgets or not self._backend.has_streams:
            self._files.choose_ways()
        self._files.lock_what_is_there(was_read=False)
        self._prefetcher.note_tiers(groups)
        read_bytes = sum(part.blob.layout.num_bytes for part in parts if part.is_read)
        is_scarce = self._config.low_cpu_mem_usage or any(
            blob.is_direct or (blob.compressed is not None and blob.compressed.is_read) for blob in in_files
        )
        is_of_leaves = self._config.is_leaf_level and not in_files
        self._transfer.reader.prepare_for(read_bytes, *tuning().ring(is_scarce=is_scarce, is_of_leaves=is_of_leaves))
        self._compressor.is_set_up = True

    def clear(self) -> None:
        """Forget the groups and the plan."""
        self._groups = ()
        self._memory.wanted_bytes = 0
        self._compressor.begin(())
        self._budget.clear()
        promised.add(self, 0)
        self._files.begin(())

    @property
    def slot_bytes(self) -> int:
        """The most device memory that a pass takes for slots and compressed buffers. `DeviceMemory.slot_bytes` is held now."""
        if not self._memory.is_just_in_time:
            return self._memory.fixed_bytes
        memory = self._memory
        return memory.largest.get(0, 0) + self._window() + memory.outer_bytes + memory.compressed_buffer_bytes

    @property
    def missing_bytes(self) -> int:
        """The device memory that the next pass takes for weights, beside what the module has by now."""
        return max(0, self.slot_bytes + self._budget.resident_bytes - self._memory.num_bytes)

    @property
    def has_budget(self) -> bool:
        """Whether there is a budget of device memory."""
        return self._vram is not None

    @property
    def vram_budget(self) -> int | None:
        """The device memory that this process may use now, for weights and everything else; None without a budget."""
        vram = self._vram
        if vram is None or (isinstance(vram, int) and not self._backend.has_streams):
            return vram  # without streams the device is RAM
        there = self._backend.free_bytes() + self._backend.reserved_bytes()
        return min(vram, there) if isinstance(vram, int) else there

    def current_plan(self) -> Plan | None:
        """The plan with times known by now; without budgets, one of the present state. None if no weights are streamed."""
        self._learn()
        return self._budget.current_plan()

    def _learn(self, *, describes: bool = True) -> None:
        """Note the times that passes have measured. Without budgets, also make the plan of the present state."""
        for measured in self._recorder.measured({group.group_id for group in self._groups if not group.nesting}):
            self._budget.note_times(*measured)
        if describes and not self._config.has_budgets:
            self._budget.describe(self._groups, self._prefetcher.schedule.order)

    def _plan_first(self, *, is_first: bool) -> None:
        """Settle the budgets for weights alone, and share files out between RAM and the disk: see `place`."""
        config, is_apart = self._config, self._backend.has_streams
        blobs = [part.blob for group in self._groups for part in group.parts]
        in_ram = sum(blob.layout.num_bytes for blob in blobs if not isinstance(blob, FileBlob))
        self._vram = config.vram_budget
        if is_first or self._ram is None:  # there is no limit as long as no weight was in files
            self._ram = self._ram_for_weights(in_ram, is_first=is_first)
        promised.add(self, 0)
        ram = None if self._ram is None else self._plan_ram(self._ram, in_ram)
        device_bytes = self._space(0) if self.has_budget else None
        self._budget.begin(self._groups, first_guess(self._groups), ram, device_bytes)
        least = self._budget.least_bytes + self._memory.outer_bytes
        if isinstance(self._vram, int) and self._groups and self._vram < least:
            if is_apart or (is_first and isinstance(config.ram_budget, int)):
                raise self._too_small(least, self._vram)
            self._vram = least  # they take those bytes anyway
        if is_apart and self._budget.plan is not None:
            self._share_out_files()
        elif isinstance(self._vram, int):  # activations in RAM cannot be measured: see `_plan_ram`
            self._budget.before_pass((), self._space(0))

    def _plan_ram(self, limit: int, in_ram: int) -> int:
        """The part of `limit`, in RAM, that the plan has for groups inside of whose modules no other one is needed.

        Where the device is RAM, weights that are stored there take their part, and weights from files stream through the rest.
        """
        config, files, total = self._config, self._files.blobs, max(limit, in_ram)
        if self._backend.has_streams:
            if (config.ram_budget, config.ram_quota_bytes) != (None, None):
                promised.add(self, min(total - in_ram, sum(blob.layout.num_bytes for blob in files)))
        elif files:
            self._vram, total = int((total - in_ram) * (1 - HOST_ACTIVATIONS_SHARE)), in_ram
        # Outer groups are stored in RAM, whatever the plan says; so are groups that are in no file.
        outer = sum(group.num_bytes for group in self._groups if group.nesting)
        in_no_file = [group for group in self._groups if not group.is_in_file]
        least = sum(group.num_bytes for group in in_no_file if not group.nesting)
        if config.compress:  # the memory to read files into, which is counted, is not there yet
            outer += max(0, max((blob.layout.num_bytes for blob in files), default=0) - tuning().reading_bytes)
        least += self._compressor.limit((group for group in in_no_file if not group.nesting), total - outer - least)
        outer += self._compressor.limit((group for group in in_no_file if group.nesting), total - outer - least)
        return max(least, total - outer)

    def _ram_for_weights(self, in_ram: int, *, is_first: bool) -> int | None:
        """Bytes of RAM for weights, which take `in_ram` of them already; None for no limit."""
        config, files = self._config, self._files.blobs
        if config.ram_quota_bytes is not None:
            return in_ram + config.ram_quota_bytes
        if not files and config.ram_budget is None:
            return None
        turns = 0
        if is_first and files and not self._backend.has_streams:
            turns = int(self._memory.fixed_bytes / (1 - HOST_ACTIVATIONS_SHARE)) + 1
        return ram_for_weights(config.ram_budget, in_ram, tuning().reading_bytes if files else 0, turn_bytes=turns)

    def _too_small(self, least: int, vram: int) -> ConfigError:
        name, given, remedy = "vram_budget", vram, ", plus activations. Raise it"
        if not self._backend.has_streams:
            assert isinstance(self._config.ram_budget, int)
            name, given = "ram_budget", self._config.ram_budget
            enough = given + int((least - vram) / (1 - HOST_ACTIVATIONS_SHARE)) + 1
            remedy = f". Pass at least {describe_bytes(enough, round_up=True)}"
        smaller = "" if self._config.is_leaf_level else ", or pass offload_type='leaf_level'"
        return ConfigError(
            f"{name}={describe_bytes(given)} is too small for {self._name}: its device buffers alone need "
            f"{describe_bytes(least, round_up=True)}{remedy}{smaller}."
        )

    # ---------------------------------------------------------------- a pass

    def replan(self, kind: InputSignature) -> None:
        """Make the plan again before a forward of this kind, if more is known by now, and carry it out.

        Raises:
            StorageError: another program changed a compressed file that is pinned; before a backward, any such file.
        """
        self._compressor.check()
        if kind.is_backward:  # which looks for no edits, and keeps the plan
            blobs = [part.blob for group in self._groups for part in group.parts]
            for source in {blob.source: None for blob in blobs if isinstance(blob, FileBlob) and blob.is_pinned}:
                source.check()
            return
        if self._compressor.lacking():  # blobs were edited
            try:
                if self._compress():
                    self._share_out_files()
            finally:
                self.reside()  # compressed buffers may need another size
            self._files.look()
        if not self._config.has_budgets:
            return
        sharing = self._transfer.sharing
        if sharing is not None and sharing.has_news:
            self._share_out_files()
            self.reside()
        need = self.needs.of(kind) if self.has_budget else None
        if need is None:
            return  # the first pass measures
        if self._budget.before_pass(*self._order_and_space(kind, need)):
            self._carry_out()
        self._memory.wanted_bytes = self._budget.resident_bytes

    def plan_ahead(self, kind: InputSignature) -> None:
        """Make the plan of the next forward of this kind, after one and while the device still computes."""
        self._learn(describes=False)
        need = self.needs.of(kind) if self.has_budget else None
        if need is not None:
            self._budget.after_pass(*self._order_and_space(kind, need))

    def _order_and_space(self, kind: InputSignature, need: int) -> tuple[Sequence[Group], int]:
        return self._prefetcher.schedule.order_of(kind.top), self._own_space(need)

    def _carry_out(self) -> None:
        """Carry the plan out, and log it."""
        self.reside()
        plan = self._budget.plan
        if plan is None or not self._backend.has_streams:
            return
        logger.info(
            "Plan for %s: %s resident on %s; each forward transfers %s and takes %s%s.",
            self._name,
            describe_bytes(self._budget.resident_bytes),
            self._backend.device,
            describe_bytes(plan.prediction.h2d_bytes),
            describe_seconds(plan.prediction.step_seconds),
            "" if plan.prediction.compute_seconds else " (without compute, which isn't measured yet)",
        )

    def _compress(self) -> bool:
        """Compress what has no compressed bytes, or out-of-date ones. Returns whether the plan puts groups elsewhere then."""
        if lacking := self._compressor.lacking():
            self._memory.arena.release(self._memory)  # compression takes device memory too
            self._compressor.compress(lacking)
        # Ranks that share groups would come to plans of their own.
        follows = self._config.compress and not self._has_ranks
        return follows and self._budget.count_compressed(self._compressor.take_missing())

    def make_room(self, kind: InputSignature, *, begins_phase: bool) -> None:
        """Evict what leaves the pass too little memory, before it leases slots, and set how much may stay in it.

        Without a budget that is everything, and so it is in the first pass of a kind that nothing known is like: the pass
        shows what it needs.

        Args:
            begins_phase: Whether another model ran before.
        """
        memory, arena, plan = self._memory, self._memory.arena, self._budget.plan
        if begins_phase:
            self.needs.begin_phase()
        need = self.needs.of(kind) if self.has_budget else None
        measures = self.has_budget and need is None
        if measures and self._backend.joins_fragments:  # those between residents would count as needed
            need = self.needs.at_most(kind)
        space = 0 if need is None else self._space(need)
        slots = least = memory.fixed_bytes - memory.outer_bytes
        if plan is not None:
            arena.displace(memory, max(0, space - max(slots, plan.device_bytes)), memory.protected)
            # Even protected models leave it that much: a plan without slots needs space for its groups, or for slots.
            least = max(slots, min(plan.device_bytes, smallest_device_bytes(plan.problem)))
        arena.displace(memory, max(0, space - least))
        to_stay = max(0, space - slots - arena.others_resident_bytes(memory))
        memory.evict_residents(memory.resident_bytes - to_stay)
        memory.resident_limit = 0 if measures else to_stay
        if measures:  # what comes to stay would count as needed, and so would fragments
            self._backend.release_unused()
        elif need is not None and begins_phase:
            self._clear_fragments(need)

    def _clear_fragments(self, need: int) -> None:
        """Give cached memory back where fragments may stand in the way of `need`, or would add to a budget."""
        memory, backend = self._memory, self._backend
        more = need + max(0, memory.fixed_bytes - memory.num_bytes)
        if isinstance(self._vram, int):  # the device does not refuse what goes beyond it
            cached = backend.reserved_bytes() - backend.bytes_in_use()
            grown = backend.reserved_bytes() + more + memory.resident_limit
            if cached > tuning().device_margin_bytes and grown > self._vram:
                backend.release_unused()
        if backend.joins_fragments:
            return
        # A segment that a resident is cut from does not return to the device. An operator that finds no memory may silently
        # choose another algorithm, so the device has to have what is needed before.
        while backend.free_bytes() < more:
            backend.release_unused()
            missing = more - backend.free_bytes()
            if missing <= 0 or not memory.arena.give_way(missing, memory):
                return

    def _space(self, need: int) -> int:
        """Device memory for the weights of all models, but this one's outer groups, in a pass that needs `need` besides."""
        memory, available = self._memory, self.vram_budget
        assert available is not None
        others = max(0, self._backend.bytes_in_use() - memory.num_bytes - memory.arena.others_bytes(memory))
        margin = tuning().device_margin_bytes if self._backend.has_streams else 0
        return available - others - need - margin - memory.outer_bytes

    def _own_space(self, need: int) -> int:
        """The part of `_space` that protected models leave."""
        kept = sum(max(each.resident_bytes, wanted) for each, wanted in self._memory.protected.items())
        return max(0, self._space(need) - kept)

    def begin_pass(self, kind: InputSignature) -> bool:
        """The slots are there, and compute begins: decide how far ahead to send just in time.

        Returns:
            Whether its compute is to be measured: not that of a backward.
        """
        memory = self._memory
        memory.num_passes += 1
        memory.window_bytes = self._window(self.needs.of(kind) or self.needs.kept_bytes)
        sizes_window = memory.is_just_in_time and not (self._config.record_stream or kind.is_backward)
        if self.has_budget or sizes_window:
            self.needs.begin(kind, has_budget=self.has_budget)
        return not kind.is_backward and self._budget.count_pass(kind)

    def forwards_that_fit(self, kind: InputSignature) -> int:
        """How many forwards of this kind fit on the device together, if all of them compute with the same weights.

        One where nothing is sent: more would only evict residents.
        """
        if not self.has_budget:
            return _MOST_TOGETHER
        need = self.needs.measured(kind) if self._backend.has_streams else None
        if need is None or self.sends_nothing:
            return 1
        return min(_MOST_TOGETHER, (self._space(0) - self._budget.least_bytes) // max(1, need))

    def gain_from_interleaving(self, kinds: Sequence[InputSignature]) -> float | None:
        """The share of time that forwards of these kinds save in one pass, by the plan; None if that isn't known yet."""
        self._learn(describes=self._budget.plan is None)
        if not self.has_budget:
            return self._budget.gain_from_interleaving(kinds, None, None)
        needs, both = [self.needs.measured(kind) or 0 for kind in kinds], InputSignature.of_all(kinds)
        of_all = self.needs.measured(both) or self.needs.at_most(both) or sum(needs)
        return self._budget.gain_from_interleaving(kinds, self._own_space(max(needs)), self._own_space(of_all))

    @property
    def sends_nothing(self) -> bool:
        """Whether all groups stay on the device by the plan."""
        plan = self._budget.plan
        return self.has_budget and (plan is None or not plan.prediction.h2d_bytes)

    def end_pass(self, *, completed: bool) -> None:
        """Learn from a pass that completed. The measurements of one that failed are dropped."""
        measured = self.needs.end(completed=completed)
        if measured is not None and isinstance(self._vram, int) and measured[1] > self._vram:
            need, peak, budget = (describe_bytes(num_bytes, digits=4) for num_bytes in (*measured, self._vram))
            fits = self._space(measured[0]) >= self._budget.least_bytes
            remedy = " Evicting weights to fit inputs of this size from now on." if fits else ""
            logger.warning(
                "%s: peak VRAM was %s, over vram_budget=%s (activations: %s).%s", self._name, peak, budget, need, remedy
            )

    def reside(self) -> None:
        """Let those groups stay on the device that the plan puts there: see `DeviceMemory.reside`."""
        staying = self._agreed("device", self._budget.at(Placement.DEVICE))
        compressed = self._agreed("compressed", self._budget.at(Placement.COMPRESSED)) - staying
        to_stay = staying | {group.compressed for group in compressed}
        num_buffers = self._budget.plan.problem.num_compressed_buffers if self._budget.plan else NUM_COMPRESSED_BUFFERS
        self._memory.reside(to_stay, self._groups, num_buffers)

    def _agreed(self, what: str, groups: frozenset[Group]) -> frozenset[Group]:
        """The groups that all ranks put there: those of the first one. Without other ranks, `groups`."""
        sharing = self._transfer.sharing
        if sharing is None or not self._has_ranks:
            return groups
        names = set(sharing.agree(what, [group.group_id for group in self._groups if group in groups]))
        return frozenset(group for group in self._groups if group.group_id in names)

    def _share_out_files(self) -> None:
        """Pin, or compress, in RAM the groups that the plan puts there, and those that are needed around others."""
        for _ in range(len(self._groups) + 2):
            in_ram = self._agreed("ram", self._budget.at(Placement.RAM))
            if self._config.compress and self._budget.ram_bytes is not None:
                self._compressor.choose(self._groups, in_ram)  # the compressed bytes of others stay in their files
            # Compressed bytes are known exactly once there are some. Then a plan may have to take groups out of RAM, and never
            # puts others there.
            if not self._compress():
                break
        self._prefetcher.note_tiers(self._groups)
        stored = [group for group in self._groups if group.num_bytes and (group in in_ram or group.nesting)]
        blobs = [part.blob for group in stored for part in group.parts]
        self._files.share_out(blob for blob in blobs if isinstance(blob, FileBlob) and blob.compressed is None)

    @property
    def _has_ranks(self) -> bool:
        sharing = self._transfer.sharing
        return sharing is not None and sharing.host_group is not None

    # ---------------------------------------------------------------- too little memory

    def give_way(self, factor: int, num_bytes: int) -> bool:
        """Memory of `num_bytes` was refused in a pass: evict residents for `factor` times as much. False if there are none."""
        gave = self._memory.arena.give_way(factor * max(num_bytes, tuning().give_way_bytes), self._memory)
        if gave and self.has_budget:
            self.needs.add(num_bytes)
        return gave

    def too_little(self, error: torch.OutOfMemoryError) -> torch.OutOfMemoryError:
        """A forward with a budget ran out of device memory: evict all residents. Returns the error with advice added."""
        arena, name = self._memory.arena, self._name
        arena.answer()
        before = arena.resident_bytes
        arena.give_way(before, self._memory)
        evicted = before - arena.resident_bytes
        self._backend.release_unused()
        self.needs.add(evicted)
        advice = (
            f"Evicted {describe_bytes(evicted)} of resident weights: call {name} again. (It wasn't retried: gradients are "
            f"recorded, or it may have changed something before it failed.)"
            if evicted
            else f"No resident weights of {name} left to evict. Use smaller inputs, attention slicing, or "
            f"offload_type='leaf_level'."
        )
        return torch.OutOfMemoryError(f"{error} {advice}")

    # ---------------------------------------------------------------- how far ahead

    def _window(self, activations: int = 0) -> int:
        """The bytes that may be on their way just in time, in passes that take so many for activations.

        Mostly the largest group: a budget's plan counts on no more. At leaf level that does not hide the copy of a large layer
        behind a small one's compute, so it may be a third of the activations, if that is more.
        """
        least = max(self._memory.largest.get(0, 0), min(tuning().min_window_bytes, self._total_bytes // 8))
        if not self._config.is_leaf_level or self.has_budget:
            return least
        if self._config.record_stream:
            return _DEEP_WINDOW * least
        return max(least, min((_DEEP_WINDOW - 1) * least, activations // 3))
