"""What users hold of an offloaded module: its handle, with groups, statistics, plan, and the way back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from .base.compiled import HANDLE
from .base.text import Shown, Table
from .base.weak import NotCopied, Weak, gone, weakly
from .config import OffloadConfig
from .errors import StateError
from .plan.budgets import describe_bytes
from .plan.report import OffloadPlan
from .runtime.engine import Engine
from .runtime.groups.group import Group
from .stores.files import FileBlob
from .stores.moves import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadStats(Shown):
    """Counts, bytes and seconds since a module was offloaded. `print` and notebooks show them as a table."""

    forward_passes: int
    """Forwards of the module, or of a part of it that was called by itself."""
    backward_passes: int
    """Runs of autograd that needed weights, or that called modules again for a gradient checkpoint."""
    forwards_interleaved: int
    """Forwards that ran block by block together with others. See `interleave_forwards`."""
    forwards_speculated: int
    """Forwards that ran together with the first call of a step, before they were called."""
    forwards_discarded: int
    """Those of them whose results were discarded, because something else was called."""
    onloads: int
    """Flat buffers of weights loaded to the device."""
    stalls: int
    """Onloads that weren't prefetched, for lack of a prediction or of memory: they started when the weights were needed. (A
    prefetch may still arrive late, as a profile shows.)"""
    copies: int
    """Copy commands issued, in both directions."""
    bytes_onloaded: dict[str, int]
    """Bytes loaded to the device, by tier: "ram", "pageable", "disk". Compressed weights count with their compressed bytes."""
    bytes_decompressed: int
    """Bytes of weights that the device has decompressed."""
    bytes_read: dict[str, int]
    """Bytes from files, by how they were read: "pinned" (pinned in the page cache and copied from there), "page cache" (read
    through it), "direct" (read from disk). See `GroupInfo.read_mode`."""
    bytes_from_peers: int
    """Bytes of weights that other GPUs of the host have sent. See `process_group`."""
    peer_transfers_missed: int
    """Groups that this process sent its shard of and then loaded alone, because the others didn't need them then."""
    tensors_copied_back: int
    """Tensors that a forward changed, and that were copied back from the device."""
    rebuilds: int
    """Times that the groups were rebuilt because modules, or the form of weights, changed."""
    peak_device_bytes: int
    """Peak device memory for weights, without activations."""
    resident_bytes: int
    """Device memory of the groups that are resident now. See `vram_budget`."""
    trainable_bytes: int
    """Device memory of the parameters that are trained. They are in no group."""
    host_bytes: int
    """RAM of offloaded weights, pinned or not, and of compressed copies. A file takes none unless it is pinned."""
    compressed_bytes: int
    """The part of `host_bytes` that is compressed."""
    pinned_bytes: int
    """The part of `host_bytes` that is pinned."""
    staging_bytes: int
    """RAM of the buffers between the device and files or pageable RAM."""
    file_bytes: int
    """Bytes of weights that are stored in files."""

    def _shown(self) -> tuple[Sequence[Table], Sequence[str]]:
        rows = [(name, _value_text(name, value)) for name, value in asdict(self).items()]
        return [[("statistic", "value"), *rows]], []


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInfo:
    """One group of an offloaded module."""

    group_id: str
    """The name of the group, made of the names of its modules."""
    tier: str
    """Where the group is stored: "ram", "pageable" or "disk"."""
    location: str
    """The name of the group's file, or the kind of RAM."""
    read_mode: str
    """How the file is read: "pinned" (pinned in the page cache), "page cache" (read through it), or "direct" (from disk, where
    RAM is scarce; pages that are in the page cache are still read from there). Empty for RAM."""
    num_tensors: int
    """Parameters and buffers of the group."""
    num_bytes: int
    """Bytes of the group, alignment of its tensors included."""
    compressed_bytes: int
    """Bytes of the group's compressed copy: in pinned RAM, or in a file that is read (`tier` is "disk"); 0 if there is none."""


class OffloadHandle(Shown, NotCopied):
    """An offloaded module: its groups, its statistics, and the way back.

    `print(handle)` shows the groups as a table.
    """

    module = Weak[nn.Module]()
    """The offloaded module. The handle keeps neither the module nor its memory alive."""

    def __init__(self, module: nn.Module, engine: Engine) -> None:
        self.module = module
        self._end = weakref.ref(module, weakly(self._forget))
        self._name = type(module).__name__
        self.config: OffloadConfig = engine.config
        """The options, with every default filled in."""
        self._engine: Engine | None = engine
        self.owners: list[Callable[[], Any]] = []
        """Leads to those who asked for the handle. See [Note: Owners]."""
        engine.tell_before_forward(_before_forward)

    @property
    def is_active(self) -> bool:
        """True until `remove()`, or until the module is gone."""
        return self._engine is not None

    @property
    def groups(self) -> tuple[GroupInfo, ...]:
        """The groups, in registration order."""
        return tuple(_describe(group) for group in self._live.groups)

    def stats(self) -> OffloadStats:
        """Counts and bytes since the module was offloaded."""
        engine = self._live
        counters, transfer = engine.counters, engine.transfer
        blobs = [part.blob for group in engine.groups for part in group.parts]
        in_files = sum(blob.layout.num_bytes for blob in blobs if blob.tier is Tier.FILE)
        compressed = sum(group.compressed_ram_bytes for group in engine.groups)
        return OffloadStats(
            forward_passes=counters.passes,
            backward_passes=counters.backward_passes,
            forwards_interleaved=counters.shared,
            forwards_speculated=counters.predicted,
            forwards_discarded=counters.discarded,
            onloads=counters.onloads,
            stalls=counters.stalls,
            copies=transfer.num_copies,
            bytes_onloaded={tier.value: num_bytes for tier, num_bytes in transfer.bytes_sent.items()},
            bytes_decompressed=transfer.bytes_decompressed,
            bytes_read=transfer.bytes_read,
            bytes_from_peers=0 if engine.sharing is None else engine.sharing.bytes_from_peers,
            peer_transfers_missed=0 if engine.sharing is None else engine.sharing.num_alone,
            tensors_copied_back=counters.brought_back,
            rebuilds=counters.rebuilds,
            peak_device_bytes=counters.peak_device_bytes,
            resident_bytes=engine.memory.resident_bytes,
            trainable_bytes=engine.trained.num_bytes,
            host_bytes=compressed
            + sum(blob.pinned_bytes if blob.tier is Tier.FILE else blob.layout.num_bytes for blob in blobs),
            compressed_bytes=compressed,
            pinned_bytes=compressed + sum(blob.pinned_bytes for blob in blobs),
            staging_bytes=transfer.reader.staging_bytes,
            file_bytes=in_files,
        )

    @property
    def plan(self) -> OffloadPlan:
        """Where each group is stored and why, how long a forward is predicted to take, and what more memory would gain.

        With a budget, this is the plan that is carried out; without one, a prediction for the groups as they are. The compute
        times of groups are known after the first forwards. The first call on a machine measures its speeds, which takes a
        second or two.

        Example:
            >>> print(handle.plan)
        """
        engine = self._live
        with engine.lock:
            counters = engine.counters
            notes = [] if engine.sharing is None else [engine.sharing.describe()]
            if counters.shared or engine.config.interleave_forwards is True:
                notes.append(
                    f"interleave_forwards: {counters.shared} of {counters.passes} forwards ran together with others."
                )
            return OffloadPlan(
                self._name,
                engine.placer.current_plan(),
                device_has_memory=engine.config.backend.has_streams,
                notes=notes,
                memory=engine.device_memory,
            )

    def refresh(self) -> None:
        """Apply changed, added or removed weights now instead of in the next forward."""
        self._live.refresh()

    def remove(self) -> None:
        """Restore the module: values (with all edits), devices, hooks, `forward`, class.

        Each weight gets separate memory again, on the device where it was, so all of them need space there. All memory that
        offloading took is free on return. Group files stay for the next time. Repeated calls do nothing, and of a module
        that is gone nothing is left to restore.

        Raises:
            StateError: a forward or backward of the module is in progress.
            StorageError: a file with weights cannot be read any more. The module stays offloaded.
        """
        if self._engine is None:
            return
        module = self.module
        self._engine.remove()
        self._engine = None
        module.__dict__.pop(HANDLE, None)
        for listener in listeners:
            listener.removed(self)

    def _forget(self, module: object) -> None:
        """The module is gone, and its memory goes with it. Parts of it that are still there keep their weights."""
        self._engine = None

    @property
    def _live(self) -> Engine:
        if self._engine is None:
            if OffloadHandle.module.of(self) is None:
                raise gone()
            raise StateError("This module is no longer offloaded: remove() was called. Apply group offloading again.")
        return self._engine

    def __repr__(self) -> str:
        if self._engine is None:
            is_gone = OffloadHandle.module.of(self) is None
            return f"<OffloadHandle of {self._name}: {'its model is gone' if is_gone else 'removed'}>"
        return f"<OffloadHandle of {self._name}: {len(self._engine.groups)} groups>"

    def _shown(self) -> tuple[Sequence[Table], Sequence[str]]:
        if self._engine is None:
            return [], [repr(self)]
        rows = [("group", "tensors", "size", "stored in")]
        rows += [(g.group_id, str(g.num_tensors), describe_bytes(g.num_bytes), g.location) for g in self.groups]
        total, buffers = describe_bytes(sum(group.num_bytes for group in self.groups)), self._live.placer.slot_bytes
        through = f" through {describe_bytes(buffers)} of buffers" if buffers else ""
        summary = f"{self._name}: {total} in {len(rows) - 1} groups, computed on {self.config.onload_device}{through}."
        return [rows], [summary]


def _value_text(name: str, value: Any) -> str:
    """A statistic for people: its unit follows from its name."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_value_text(name, each)}" for key, each in value.items()) or "none"
    if "bytes" not in name:
        return str(value)
    return f"{describe_bytes(value)} ({value} B)" if value >= 1024 else f"{value} B"


def _describe(group: Group) -> GroupInfo:
    blobs = [part.blob for part in group.parts]
    compressed_bytes, in_ram = group.compressed_bytes, group.compressed_ram_bytes
    tier = blobs[0].tier.value if blobs and not in_ram else Tier.RAM.value
    return GroupInfo(
        group_id=group.group_id,
        tier=Tier.FILE.value if compressed_bytes > in_ram else tier,
        location=_location_of(group),
        read_mode=", ".join(dict.fromkeys(blob.read_mode for blob in blobs if isinstance(blob, FileBlob))),
        num_tensors=sum(len(part.refs) for part in group.parts),
        num_bytes=sum(blob.layout.num_bytes for blob in blobs),
        compressed_bytes=compressed_bytes,
    )


def _location_of(group: Group) -> str:
    """The names of the files or of the RAM that the weights are stored in, and what of them is compressed."""
    in_ram, from_files = group.compressed_ram_bytes, group.compressed_bytes - group.compressed_ram_bytes
    return (
        (", ".join(dict.fromkeys(part.blob.location for part in group.parts)) or "no weights")
        + (", rows are looked up there" if group.is_table else "")
        + (f", compressed to {describe_bytes(in_ram)} in RAM" if in_ram else "")
        + (f", compressed to {describe_bytes(from_files)} in files" if from_files else "")
    )


class Listener:
    """Hears of each module that is offloaded or restored, so that integrations can show it to their libraries.

    Order of calls: applying, applied, before_forward for each forward, removed; removed also comes after an `applied` that
    raised.
    """

    def applying(self, module: nn.Module) -> None:
        """The module is about to be offloaded, and is untouched yet. May raise."""

    def applied(self, handle: OffloadHandle) -> None:
        """The module is offloaded. If this raises, offloading is undone."""

    def before_forward(self, module: nn.Module, inputs: Mapping[str, Any]) -> None:
        """A forward begins, and has taken no device memory yet. May raise.

        Args:
            inputs: Inputs of the module that were given by name. None if only a part of it is called.
        """

    def removed(self, handle: OffloadHandle) -> None:
        """The module is restored."""


listeners: list[Listener] = []


def _before_forward(module: nn.Module, inputs: Mapping[str, Any]) -> None:
    for listener in listeners:
        listener.before_forward(module, inputs)
