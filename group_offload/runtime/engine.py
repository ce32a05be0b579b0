"""Runs one offloaded module: notices what changed, onloads what a call needs, starts what the next one will need.

[Note: A pass]
A pass is one call of a module with a gate that is not inside another one: mostly the root's forward, sometimes a part
of it (`vae.decode` calls the decoder). It holds the engine's lock, so that two threads take turns. In order:

1. `_begin`: what changed since the last pass (weights edited, replaced or added, modules compiled) is taken up, slots are
   leased, the first images are started.
2. For each gated call inside: `enter` makes compute wait for the images it needs and binds the weights to their slots;
   `leave` records the last use, binds the weights to their place at rest, and starts the next image into the free slot.
3. `_end`: everything is bound to its place at rest, and the host waits for the last copy. At rest nothing moves.

An exception anywhere unwinds through the gates and ends the pass the same way.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..config import OffloadConfig
from ..device import Event
from ..errors import StateError
from ..layout import overlapping
from ..partition import NEVER_CALLED
from ..stores.disk import Folder
from .build import build_groups, first_guess, materialise, size_rings
from .group import Group, Residence
from .hooks import Gate, moved
from .schedule import Schedule
from .slots import Lease, Slot, arena_for
from .transfer import Transfer

_offloaded: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def is_offloaded(module: nn.Module) -> bool:
    """Whether the module is, or is a part of, an offloaded module."""
    return module in _offloaded


@dataclass(slots=True)
class Counters:
    """What an engine has done so far."""

    passes: int = 0
    onloads: int = 0
    stalls: int = 0
    brought_back: int = 0
    rebuilds: int = 0
    device_bytes: int = 0
    peak_device_bytes: int = 0


class Engine:
    """The runtime of one offloaded module. Thread-safe: passes of several threads take turns."""

    def __init__(self, root: nn.Module, config: OffloadConfig) -> None:
        self.root = root
        self.config = config
        self.counters = Counters()
        self.groups: tuple[Group, ...] = ()
        self.lock = threading.RLock()
        """Held for the length of a pass."""
        self._backend = config.backend
        self._arena = arena_for(self._backend)
        self._folder = None if config.offload_to_disk_path is None else Folder(config.offload_to_disk_path)
        self.transfer = Transfer(
            self._backend,
            use_stream=config.use_stream,
            # Without a stream a copy is as asynchronous as it was asked to be.
            blocking=not config.use_stream and not config.non_blocking,
        )
        self._skip_inputs = frozenset(config.exclude_kwargs)
        self._calls: list[list[Group]] = []
        """The gated calls in progress, outermost first: the groups that each of them holds."""
        self._has_failed = False
        self._lease: Lease | None = None
        """The slots of this engine: kept between passes, unless another module's pass takes the memory."""
        self._has_lease = False
        """In a pass, and the slots are fixed ones."""
        self._allocated: dict[int, list[Slot]] = {}
        """With `record_stream`: for each height, the slots in use."""
        self._retired: dict[int, deque[Event]] = {}
        """With `record_stream`: for each height, the last uses of memory that was given back, oldest first."""
        self._gates: dict[nn.Module, Gate] = {}
        self._seen: dict[nn.Module, tuple[int, ...]] = {}
        """What each module consisted of when it was last looked at."""
        self._ring_sizes: dict[int, tuple[int, ...]] = {}
        """For each height of groups: how large the slots are that they take turns in."""
        self._schedule = Schedule(())
        self._build()

    @property
    def root_gate(self) -> Gate:
        return self._gates[self.root]

    @property
    def gated_modules(self) -> tuple[nn.Module, ...]:
        return tuple(self._gates)

    @property
    def slot_bytes(self) -> int:
        """Device memory that a pass takes for slots."""
        return sum(map(sum, self._ring_sizes.values()))

    @property
    def is_running(self) -> bool:
        return bool(self._calls)

    def refresh(self) -> None:
        """Take up what was changed since the last pass now, not at the next one."""
        with self.lock:
            if not self.is_running and self._notice_changes(self.root) is None:
                self._rebuild()

    def remove(self) -> None:
        """Give every tensor memory of its own again, where it was before, and take the gates away."""
        with self.lock:
            if self.is_running:
                raise StateError(
                    "remove() was called in the middle of a forward of the module. Call it after the forward."
                )
            for group in self.groups:
                for part in group.parts:
                    materialise(part)
            for gate in self._gates.values():
                gate.uninstall()
            for group in self.groups:
                for part in group.parts:
                    part.image.close(forget=False)
            for module in self._seen:
                _offloaded.discard(module)
            self._gates, self._seen, self.groups = {}, {}, ()
            self.transfer.close()
            self._release_slots()

    # ---------------------------------------------------------------- calls

    def enter(self, gate: Gate) -> None:
        """Make the weights that `gate`'s call needs ready. The lock is held; `leave` follows, whatever happens."""
        self._calls.append([])
        if len(self._calls) == 1:
            self._begin(gate)
        now = self._gates.get(gate.module)  # another one, if the module was just cut into groups again
        for group in () if now is None else now.groups:
            self._hold(group)
        self._prefetch()

    def fail(self) -> None:
        """The call in progress raised: the pass teaches no order."""
        self._has_failed = True

    def leave(self) -> None:
        """End what `enter` began."""
        held = self._calls.pop()
        while held:
            self._let_go(held.pop())
        if self._calls:
            self._prefetch()
        else:
            self._end()

    def move_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The inputs of a call, on the onload device, except those that the options exclude."""
        device, non_blocking = self._backend.device, self.config.non_blocking or self.config.use_stream
        args = tuple(moved(value, device, non_blocking) for value in args)
        kwargs = {
            name: value if name in self._skip_inputs else moved(value, device, non_blocking)
            for name, value in kwargs.items()
        }
        return args, kwargs

    # ---------------------------------------------------------------- a pass

    def _begin(self, gate: Gate) -> None:
        self.counters.passes += 1
        self._has_failed = False
        self._recover()
        scope = self._notice_changes(gate.module)
        if scope is None:
            self._rebuild()
            scope = self._notice_changes(gate.module)
            if scope is None:
                raise StateError(f"{type(self.root).__name__} was changed by another thread while a forward began.")
        if not self.config.record_stream:
            self._take_lease()
        self._schedule.begin(gate.module, scope)
        self._prefetch()

    def _end(self) -> None:
        self.transfer.finish()
        for group in self.groups:
            if group.slot is not None:
                self._offload(group)
        self._schedule.end(completed=not self._has_failed)
        self._give_lease_back()

    def _recover(self) -> None:
        """Put right what an interrupt in the middle of the engine's own code may have left."""
        for group in self.groups:
            if group.slot is not None or group.residence is Residence.ONLOADED:
                group.holds = 0
                group.slot = None
                group.rest()
        for ring in self._lease.rings.values() if self._lease is not None else ():
            for slot in ring:
                slot.group = None
        self._allocated = {}
        self._give_lease_back()

    def _hold(self, group: Group) -> None:
        if not group.num_bytes:
            return
        if not group.holds:
            self._schedule.observe(group)
        if group.slot is None:
            self.counters.stalls += 1
            self._onload(group, self._free_slot(group, set()) or self._new_slot(group))
        slot = group.slot
        assert slot is not None
        # Also if it is bound already: this call may compute on another stream than the last one.
        self._backend.current_stream().wait_event(slot.ready)
        if group.residence is Residence.AT_REST:
            group.onload_to(slot)
        group.holds += 1
        self._calls[-1].append(group)

    def _let_go(self, group: Group) -> None:
        group.holds -= 1
        slot = group.slot
        assert slot is not None
        stream = self._backend.current_stream()
        stream.wait_event(slot.last_use)  # which may have been on another stream: this end includes that one
        slot.last_use.record(stream)
        if not slot.is_fixed:
            self._backend.record_stream(slot.memory, stream)
        if not group.holds and not self._schedule.expects(group):
            self._offload(group)

    def _prefetch(self) -> None:
        """Start the images that come next, as far as slots are free or hold what is needed later."""
        if not self.config.use_stream:
            return
        full: set[int] = set()
        soon: set[Group] = set()
        # Looking further ahead than the slots reach finds nothing to do.
        horizon = 2 * sum(map(len, self._ring_sizes.values()))
        for group in self._schedule.upcoming():
            if group in soon:
                continue
            if len(soon) == horizon:
                return
            soon.add(group)
            if group.slot is None and group.height not in full:
                slot = self._free_slot(group, soon)
                if slot is None:
                    full.add(group.height)
                else:
                    self._onload(group, slot)

    def _onload(self, group: Group, slot: Slot) -> None:
        self.counters.onloads += 1
        group.send_to(slot, self.transfer)

    def _offload(self, group: Group) -> None:
        slot = group.slot
        assert slot is not None
        if group.residence is Residence.ONLOADED:
            self.counters.brought_back += group.offload(self.transfer)
        group.slot = slot.group = None
        if not slot.is_fixed:
            self._retire(slot, group.height)

    # ---------------------------------------------------------------- slots

    def _take_lease(self) -> None:
        stream = self._backend.current_stream()
        lease = self._lease = self._arena.lease(self._lease, self.slot_bytes, stream)
        self._has_lease = True
        assert lease.memory is not None
        if not lease.rings:
            lease.rings = self._cut(lease.memory)
        for ring in lease.rings.values():
            for slot in ring:
                slot.last_use.record(stream)  # the memory's earlier life ends here, whoever had it
        self._count_device_bytes(self.slot_bytes)

    def _cut(self, memory: torch.Tensor) -> dict[int, list[Slot]]:
        rings: dict[int, list[Slot]] = {}
        start = 0
        for height, sizes in self._ring_sizes.items():
            rings[height] = []
            for num_bytes in sizes:
                rings[height].append(Slot(memory[start : start + num_bytes], self._backend, is_fixed=True))
                start += num_bytes
        return rings

    def _give_lease_back(self) -> None:
        if self._has_lease:
            assert self._lease is not None
            self._arena.give_back(self._lease, self._backend.current_stream())
            self._has_lease = False
            self.counters.device_bytes = 0

    def _release_slots(self) -> None:
        if self._lease is not None:
            self._arena.release(self._lease)
            self._lease = None

    def _free_slot(self, group: Group, soon: set[Group]) -> Slot | None:
        """A slot for `group` that is empty, or whose group is neither in use nor in `soon`."""
        if self._has_lease:
            assert self._lease is not None
            ring = self._lease.rings[group.height]
            for slot in reversed(ring):  # smallest first: the largest is left for those that need it
                if slot.group is None and slot.memory.numel() >= group.num_bytes:
                    return slot
        else:
            ring = self._allocated.get(group.height, [])
            if len(ring) < len(self._ring_sizes[group.height]):
                return self._new_slot(group)
        for slot in reversed(ring):
            if slot.group is None or slot.group.holds or slot.group in soon:
                continue
            if not slot.is_fixed or slot.memory.numel() >= group.num_bytes:
                self._offload(slot.group)
                return slot if slot.is_fixed else self._new_slot(group)
        return None

    def _new_slot(self, group: Group) -> Slot:
        """Memory from the device's own allocator, for one image."""
        retired = self._retired.setdefault(group.height, deque())
        while len(retired) >= len(self._ring_sizes[group.height]):
            # The host runs ahead of the device. Memory that was given back is free only once its last use is done, and
            # asking for more before that would take a new block for every group.
            last_use = retired.popleft()
            last_use.synchronize()
        stream = self.transfer.stream
        slot = Slot(self._backend.empty(group.num_bytes, stream), self._backend, is_fixed=False)
        self._allocated.setdefault(group.height, []).append(slot)
        self._count_device_bytes(group.num_bytes)
        return slot

    def _retire(self, slot: Slot, height: int) -> None:
        self._allocated[height].remove(slot)
        self._retired[height].append(slot.last_use)
        self._backend.free(slot.memory)
        self._count_device_bytes(-slot.memory.numel())

    def _count_device_bytes(self, num_bytes: int) -> None:
        self.counters.device_bytes += num_bytes
        self.counters.peak_device_bytes = max(self.counters.peak_device_bytes, self.counters.device_bytes)

    # ---------------------------------------------------------------- changes

    def _notice_changes(self, top: nn.Module) -> set[Group] | None:
        """Take up what happened to the weights under `top` since they were left at rest.

        Returns:
            The groups that calls under `top` can need; None if the module has to be cut into groups again.
        """
        scope: dict[Group, None] = {}
        pending = [top]
        while pending:
            module = pending.pop()
            if self._seen.get(module) != _parts_of(module):
                return None
            gate = self._gates.get(module)
            if gate is not None:
                scope.update(dict.fromkeys(gate.groups))
            pending.extend(child for child in module._modules.values() if child is not None)
        if not self._absorb_replaced([group for group in scope if not group.is_as_left()]):
            return None
        for group in scope:
            group.keep_edits()
        return set(scope)

    def _absorb_replaced(self, groups: list[Group]) -> bool:
        """Take up values that were put in place of views at rest. False if groups have to be laid out again for that."""
        replaced: list[torch.Tensor] = []
        for group in groups:
            group.check()
            found = group.replaced()
            if found is None:
                return False
            replaced += found
        if replaced:
            # What was tied, or swapped, shares memory with a place at rest: writing there would change another weight.
            at_rest = [view for group in self.groups for part in group.parts for view in part.image.rest]
            clusters = overlapping([tensor.detach() for tensor in replaced] + at_rest)
            if any(cluster[0] < len(replaced) and len(cluster) > 1 for cluster in clusters):
                return False
            for group in groups:
                group.absorb_replaced()
        return True

    def _rebuild(self) -> None:
        self.counters.rebuilds += 1
        self._build()

    def _build(self) -> None:
        """Cut the module into groups, for the first time or because it has changed."""
        before = self.groups
        self.groups = build_groups(self.root, self.config, self._folder, before, _is_compiled)
        self._ring_sizes = size_rings(self.groups, self.config)
        self._schedule = Schedule(first_guess(self.groups))
        images = [part.image.layout.num_bytes for group in self.groups for part in group.parts]
        self.transfer.prepare_for(max(images, default=0))
        self._release_slots()  # they have other sizes now
        self._install_gates()
        in_use = {part for group in self.groups for part in group.parts}
        for group in before:
            for part in group.parts:
                if part not in in_use:
                    part.image.close(forget=True)

    def _install_gates(self) -> None:
        for gate in self._gates.values():
            gate.uninstall()
        needs: dict[nn.Module, list[Group]] = {self.root: []}
        for group in self.groups:
            for module in group.modules:
                needs.setdefault(module, []).append(group)
        for child in self.root.children():
            if not isinstance(child, NEVER_CALLED):
                needs.setdefault(child, [])  # calls of a part of the model (`vae.decode`) are passes too
        self._gates = {}
        for module, groups in needs.items():
            gate = self._gates[module] = Gate(self, module, is_root=module is self.root)
            gate.groups = tuple(sorted(groups, key=lambda group: -group.height))
            gate.install()
        for module in self._seen:
            _offloaded.discard(module)
        self._seen = {module: _parts_of(module) for module in self.root.modules()}
        _offloaded.update(self._seen)


def _parts_of(module: nn.Module) -> tuple[int, ...]:
    return (
        id(module.__dict__.get("_compiled_call_impl")),
        *map(id, module._modules.values()),
        *map(id, module._parameters.values()),
        *map(id, module._buffers.values()),
    )


def _is_compiled(module: nn.Module) -> bool:
    call = module.__dict__.get("_compiled_call_impl")
    return (call.compiled if isinstance(call, Gate) else call) is not None
