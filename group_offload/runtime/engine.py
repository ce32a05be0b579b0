"""Offloads one module: assembles the parts that run it, rebuilds the groups when it changes, and gives it back.

The steps of a forward are in passes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ..base.compiled import HANDLE
from ..base.patching import around_once
from ..base.release import wait_for_releases
from ..base.saved import first_of_two_runs
from ..base.tuning import tuning
from ..base.weak import Weak, weakly
from ..config import OffloadConfig
from ..errors import ModuleError, StateError
from ..partition import PlacesOfFsdp, left_to_fsdp, partition
from ..stores.folder import Folder
from ..weights import TensorRef, unpack_weights
from . import shared_lock
from .backward import Backward
from .budget.need import InputSignature
from .changes import Changes
from .compressor import Compressor
from .gates import Gates, root_of
from .groups.build import Builder, materialize
from .groups.group import Group
from .groups.part import Part
from .groups.trained import Trained
from .interleave.contract import is_function
from .interleave.passes import InterleavedPasses
from .measure.counters import Counters
from .measure.recorder import Recorder
from .memory import DeviceMemory
from .multi_gpu.sharded_transfers import ShardedTransfers
from .passes import Passes
from .placer import Placer
from .prefetch.prefetcher import Prefetcher
from .transfers.page_cache_pins import PageCachePins
from .transfers.transfer import Transfer

_MOST_REBUILDS = 3
"""Most rebuilds before a pass. More can be needed only if another thread goes on changing the module."""

_MOST_JOINS = 4
"""How often layers are joined, or parted. Where forwards call layers in an order that depends on data, they end up apart."""


class Engine:
    """The runtime of one offloaded module. Thread-safe: passes of several threads take turns."""

    root = Weak[nn.Module]()

    def __init__(self, root: nn.Module, config: OffloadConfig) -> None:
        """Assemble the parts. Only `start` touches the module itself.

        Raises:
            StateError: Models that share weights with `root` cannot take turns with it.
        """
        self.root = root
        self.config = config
        self.groups: tuple[Group, ...] = ()
        self._to_close: dict[Part, None] = {}
        """The parts of earlier groups whose blobs are to be closed. An interrupt may leave some for the next `_build`."""
        self.counters = Counters()
        self._refs: tuple[TensorRef, ...] = ()
        """The tensors in groups."""
        self._names: frozenset[str] = frozenset()
        """Their names, also once they were moved to the meta device and are in groups no more."""
        backend = config.backend
        backend.avoid_fragments(is_shared=config.process_group is not None and config.shard_transfers is not False)
        path = config.offload_to_disk_path
        self._folder = None if path is None else Folder(path, type(root).__name__)
        self.trained = Trained(backend)
        self._followers: Mapping[str, str] = {}
        """The layers that are joined, because they follow one another."""
        self._joins_left = _MOST_JOINS
        self._of_fsdp: PlacesOfFsdp = {}
        """The places of parameters that are left to FSDP2."""
        self.recorder = Recorder(backend)
        self.transfer = Transfer(config)
        if config.process_group is not None:
            self.transfer.sharing = ShardedTransfers(config, type(root).__name__)
        self._compressor = Compressor(config, self.transfer, self._folder)
        self.memory = DeviceMemory(config, self.transfer, self.counters, type(root).__name__)
        self._changes = Changes(self.transfer)
        transfer, changes, recorder = self.transfer, self._changes, self.recorder
        files = PageCachePins(config, transfer.last_copies.synchronize)
        self._prefetcher = prefetcher = Prefetcher(config, self.memory, files, changes.commit_late)
        self.placer = Placer(config, prefetcher, recorder, self._compressor)
        kind = InterleavedPasses if config.interleave_forwards and is_function(config, root) else Passes
        self._passes = kind(root, config, self.placer, prefetcher, changes, recorder, weakly(self._prepare))
        shared_lock.join(self._passes)
        self._backward = Backward(self._passes, backend)
        self._gates = Gates(config, self._passes, self._backward)
        around_once(nn.Module, "_apply", _apply_and_look)
        self.lock = self._passes.lock
        """The lock that a pass holds for its length."""

    def start(self, casts: Mapping[int, torch.dtype]) -> None:
        """Offload the module. Callers call `remove` if this raises anything: a part may be done.

        Args:
            casts: New dtypes of parameters and buffers, by `id` of the tensor.
        """
        sharing = self.sharing
        with self.lock:
            if sharing is None:
                self._build(casts)
                return
            try:
                sharing.join(self)
                self._build(casts)
                sharing.check({group.group_id: group.blobs_at(0) for group in self.groups if group.num_bytes})
            except BaseException as error:
                sharing.fail(error)
                raise

    @property
    def sharing(self) -> ShardedTransfers | None:
        """The other processes that offload the same module; None if there are none."""
        return self.transfer.sharing

    def refresh(self) -> None:
        """Commit changes since the last pass now, and not at the next pass."""
        with self.lock:
            if self._wait_for_backward():
                return
            self._passes.begin_work()
            try:
                self._changes.recover(self.root)  # it looks at more than the beginning of a pass
                self._notice(self.root, all_edits=True)
            except BaseException:
                self._passes.recover()  # now, because later edits must go to memory in which edits are detected
                raise
            self._passes.end_work()

    def _wait_for_backward(self) -> bool:
        """Wait for another thread's backward, and end what broke off. Returns whether this thread is in a pass."""
        self._backward.wait_for_others()
        self._passes.forget_interrupted_calls()
        return self._passes.is_running

    def check_idle(self) -> None:
        """Raise StateError in a forward or backward of the module. One of another thread is waited for."""
        with self.lock:
            if self._wait_for_backward():
                raise StateError(
                    f"{self._passes.name} is in the middle of a forward or backward. Call remove() or "
                    f"disable_group_offload() afterwards."
                )

    def remove(self) -> None:
        """Move every tensor back into separate memory on the device where it was before, and take the gates away.

        The method raises midway if memory runs out, and no weight is lost: tensors moved so far stay as they are, the
        next forward offloads them again, and another `remove()` goes on with the rest.
        """
        with self.lock:
            self.check_idle()
            self._passes.begin_work()
            self._release()
            self._changes.invalidate()  # the next forward then offloads weights again that were moved out
            for group in self.groups:
                group.check()
                group.expect_single_pages(expected=False)  # whole tables are read now
            for group in self.groups:  # in RAM, each group's blobs are freed before the next group
                for part in group.parts:
                    materialize(part)
                group.give_up()
                wait_for_releases()
            self.trained.give_back()
            self._gates.remove()
            self._forget_groups()
            unpack_weights(self.root)
            self._backward.close()
            if self.sharing is not None:
                self.sharing.close()
            self._passes.end_work()

    # ---------------------------------------------------------------- for the handle

    @property
    def device_memory(self) -> tuple[tuple[str, int], ...]:
        """Who holds device memory now, or has it kept free, and the bytes. Empty for a device without memory of its own."""
        if not self.config.backend.has_streams:
            return ()
        memory, placer = self.memory, self.placer
        return (
            ("buffers for streamed weights", memory.slot_bytes),
            ("resident weights", memory.resident_bytes),
            ("trained parameters", self.trained.num_bytes),
            ("reserved for activations", placer.needs.kept_bytes if placer.has_budget else 0),
            ("safety margin", tuning().device_margin_bytes if placer.has_budget else 0),
            ("weights of other models", memory.arena.others_bytes(memory)),
        )

    def tell_before_forward(self, listener: Callable[[nn.Module, Any], None]) -> None:
        """Call `listener` with the module and its inputs by name before each forward takes device memory."""
        self._passes.before_forward = listener

    # ---------------------------------------------------------------- before a forward

    def _prepare(self, top: nn.Module, kind: InputSignature) -> set[Group]:
        """Commit changes of the module, and make it ready for gradients if a graph of this forward is recorded, now or later.

        Returns:
            The groups that calls under `top` can need.
        """
        scope = self._notice(top)
        if self._changes.undo_merges():
            scope = self._notice(top)
        if not kind.with_grad and first_of_two_runs() is None:
            return self._joined(top, scope)
        is_first, self._gates.records_graphs = not self._gates.records_graphs, True
        joined, self._followers = self._followers, {}
        if self.trained.take_up(self._refs):
            self._changes.invalidate()
        elif not is_first:
            return scope
        elif joined:
            self._build()
        else:
            self._install_gates()
        return self._notice(top)

    def _joined(self, top: nn.Module, scope: set[Group]) -> set[Group]:
        """Join the layers that follow one another in all passes so far, and part those that do not. Returns the new `scope`."""
        schedule, config = self._prefetcher.schedule, self.config
        # A plan, other ranks and graphs of earlier forwards know the groups. There each layer stays one.
        is_known = config.has_budgets or self.sharing is not None or self._gates.records_graphs
        if not (config.is_leaf_level and schedule.has_news) or is_known:
            return scope
        before, self._followers = self._followers, schedule.followers() if self._joins_left > 0 else {}
        if self._followers == before:
            return scope
        self._joins_left -= 1
        self._build()
        self._prefetcher.schedule.take_over(schedule, self.groups)
        return self._notice(top)

    def _notice(self, top: nn.Module, *, all_edits: bool = False) -> set[Group]:
        """Commit changes under `top`, rebuild the groups if these need it, and return those that calls under `top` can need."""
        scope = self._changes.notice(self.root, top, all_edits=all_edits)
        # Blobs that the first rebuild keeps may turn out to be edited: the second rebuild then makes them again.
        for _ in range(_MOST_REBUILDS):
            if scope is not None:
                return scope
            self._check_and_rebuild()
            scope = self._changes.notice(self.root, top, all_edits=True)
        if scope is None:
            raise StateError(f"{self._passes.name} was changed by another thread while a forward began.")
        return scope

    # ---------------------------------------------------------------- groups

    def _check_and_rebuild(self) -> None:
        for name, module in self.root.named_modules():
            if root_of(module) not in (None, self.root):
                raise StateError(
                    f"{name} of {self._passes.name} is group-offloaded as a part of another module. Call "
                    f"remove_group_offloading() on that one before its parts are used here, or put a copy there."
                )
        self._refuse_meta()
        shared_lock.check(self._passes)
        self.counters.rebuilds += 1
        self._build()

    def _refuse_meta(self) -> None:
        """Name a weight that was moved to the meta device since it was offloaded. If all were, their memory is freed."""
        lost, are_all = self._lost()
        if are_all:
            self._free_all()
        if lost:
            raise ModuleError(
                f"{lost[0]} of {self._passes.name} was moved to the meta device after the model was offloaded, which gave its "
                f"values up. To use the model, load the model again. If accelerate has taken the weights (cpu_offload), take "
                f"its hooks off: accelerate.hooks.remove_hook_from_module(model, recurse=True)."
            )

    def _look_for_meta(self) -> None:
        """Free the memory of a model whose weights all went to the meta device just now; in a pass, the next one does it."""

        def free() -> None:
            self._passes.begin_work()
            self._free_all()
            self._passes.end_work()

        if self.groups and self._lost()[1]:
            self._passes.if_at_rest(free)

    def _lost(self) -> tuple[list[str], bool]:
        """The names of offloaded weights that are on the meta device by now, and whether all weights are."""
        now = dict([*self.root.named_parameters(), *self.root.named_buffers()])
        lost = [name for name, tensor in now.items() if tensor.is_meta and name in self._names]
        return lost, bool(lost) and all(tensor.is_meta for tensor in now.values())

    def _free_all(self) -> None:
        """Free all memory, of weights that are not needed any more."""
        self._release()
        for group in self.groups:
            group.give_up()
        self.trained.forget_others(())
        self.trained.guard(())
        self._forget_groups()
        self._gates.install(())
        wait_for_releases()

    def _release(self) -> None:
        """Free all device memory, before blobs are closed. What is on its way arrives before."""
        self._prefetcher.abandon()
        self.memory.release()
        for group in self.groups:
            group.forget_copies()

    def _forget_groups(self) -> None:
        """Mapped files are dropped now, and not by Python's collector later: until then they count as RAM in use."""
        self._close_replaced({part for group in self.groups for part in group.parts})
        if self._gates.sharing is not None:
            self._gates.sharing.close()
        self.transfer.reader.close()
        self._changes.clear()
        self.recorder.forget_measured()
        self.groups, self._refs, self._of_fsdp = (), (), {}
        self._passes.set_groups(())
        self._prefetcher.reset((), wraps=False)
        self.placer.clear()

    def _build(self, casts: Mapping[int, torch.dtype] = MappingProxyType({})) -> None:
        """Partition the module into groups, for the first time or because it has changed."""
        self._changes.invalidate()
        self._of_fsdp = left_to_fsdp(self.root, self._of_fsdp)
        self.trained.forget_others(self.root.parameters())
        of_fsdp = {id(owner._parameters[name]) for owner, names in self._of_fsdp.items() for name in names}
        before = self.groups
        if before:  # blobs are about to go, and slots will have other sizes
            self.recorder.forget_measured()
            self._release()
        self.groups = Builder(
            root=self.root,
            specs=partition(self.root, self.config, self.trained.ids | of_fsdp, self._followers),
            config=self.config,
            folder=self._folder,
            before=before,
            wait=self.transfer.last_copies.synchronize,
            casts=casts,
            host=None if before or self.sharing is None else self.sharing.shared_host_memory,
        ).build()
        self._to_close |= dict.fromkeys(part for group in before for part in group.parts)
        moving = tuple(group for group in self.groups if not group.is_table)
        self._passes.set_groups(moving)
        parts = [part for group in self.groups for part in group.parts]
        self._refs = tuple(ref for part in parts for ref in part.refs)
        self._names = frozenset(ref.fqn for ref in self._refs)
        # The end of a pass starts the first groups of the next one, if edits in between are detected.
        wraps = all(group.detects_edits for group in moving)
        self._prefetcher.reset(moving, wraps=wraps and self.config.use_stream)
        self.placer.place(moving)
        self._close_replaced({*parts})
        self.trained.guard(self._refs)
        for group in self.groups:
            group.expect_single_pages(expected=True)
        self._install_gates()

    def _close_replaced(self, in_use: Collection[Part]) -> None:
        for part in self._to_close:
            if part not in in_use and not part.is_given_up:
                part.blob.close()
        self._to_close = {}

    def _install_gates(self) -> None:
        self._changes.invalidate()
        self._gates.install(self.groups)
        gates, checks_all = self._gates, self._gates.records_graphs or self.config.is_leaf_level
        self._changes.expect(self.root, self.groups, gates.groups_of, self._of_fsdp, checks_all_calls=checks_all)


def _apply_and_look(apply: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """In place of `nn.Module._apply`, by which `to`, `cuda` and others change all weights of a module."""
    try:
        return apply(module, *args, **kwargs)
    finally:
        engine: Engine | None = getattr(module.__dict__.get(HANDLE), "_engine", None)
        if engine is not None:
            engine._look_for_meta()
