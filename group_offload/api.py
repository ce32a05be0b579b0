"""Offload one module: `apply_group_offloading`, the handle it returns, and `remove_group_offloading`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .base import timeline
from .base.text import table
from .config import OffloadConfig
from .errors import ConfigError, ModuleError, StateError
from .plan.budgets import describe_bytes
from .plan.report import OffloadPlan
from .runtime.engine import Engine
from .runtime.gates import HANDLE, Gate, is_offloaded
from .runtime.groups.group import Group
from .runtime.measure.trace import WeightTrace
from .runtime.slots.arena import arenas
from .stores.base import Tier
from .stores.files import FileImage


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadStats:
    """What has happened since a module was offloaded. Bytes are bytes, everything else is a count."""

    passes: int
    """Forwards of the module, or of a part of it that was called by itself."""
    backward_passes: int
    """Runs of autograd that needed weights, or called modules again for a checkpoint."""
    onloads: int
    """Images brought to the device."""
    stalls: int
    """Onloads that were started only when the weights were needed: nobody foresaw them, or no room was free. (One that
    was started in time may still arrive late: see `stalled_seconds`.)"""
    stalled_seconds: float
    """How long compute waited for weights, as the device's own clock has it. What the device has not come to is missing."""
    worst_stall: tuple[str, float] | None
    """The group that compute waited for longest, in all passes together, and how long. None if it waited for none."""
    copies: int
    """Copy commands issued, in both directions."""
    bytes_onloaded: dict[str, int]
    """By tier: "ram", "pageable ram", "file"."""
    bytes_read: dict[str, int]
    """What came from files, by how: "locked" in the page cache and copied from there, read through the "page cache", read
    "direct" from the drive. See `GroupInfo.way`."""
    tensors_brought_back: int
    """Tensors that a forward changed, copied from the device to where they rest."""
    rebuilds: int
    """Times that the module was cut into groups again, because its modules or the form of its weights changed."""
    peak_device_bytes: int
    """Most device memory taken for weights at once. Activations are not in it."""
    resident_bytes: int
    """Device memory of groups that stay there between passes, now. See `vram_budget`."""
    trainable_bytes: int
    """Device memory of parameters that are trained, which are in no group."""
    host_bytes: int
    """RAM that the images at rest take, page-locked or not. A file takes none, unless it is locked in the page cache."""
    pinned_bytes: int
    """The part of `host_bytes` that is page-locked."""
    staging_bytes: int
    """RAM for buffers between files, or pageable RAM, and the device."""
    file_bytes: int
    """Bytes of weights that rest in files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInfo:
    """One group of an offloaded module."""

    group_id: str
    tier: str
    """Where it rests: "ram", "pageable ram" or "file"."""
    where: str
    """The file's name, or the kind of RAM."""
    way: str
    """How a file is read: "locked" in the page cache, through the "page cache", or "direct" where RAM is scarce (what is
    in the page cache is read from there all the same). Empty for RAM."""
    num_tensors: int
    num_bytes: int


class OffloadHandle:
    """An offloaded module: what its groups are, what they have done, and the way back.

    `print(handle)` shows the groups as a table.
    """

    def __init__(self, module: nn.Module, engine: Engine) -> None:
        self.module = module
        self._engine: Engine | None = engine

    @property
    def config(self) -> OffloadConfig:
        """The options, every default filled in."""
        return self._live.config

    @property
    def is_active(self) -> bool:
        """Whether the module is offloaded: true until `remove()`."""
        return self._engine is not None

    @property
    def groups(self) -> tuple[GroupInfo, ...]:
        """The groups, in registration order."""
        return tuple(_describe(group) for group in self._live.groups)

    @property
    def root_gate(self) -> Gate:
        return self._live.root_gate

    @property
    def gated_modules(self) -> tuple[nn.Module, ...]:
        """The modules whose calls onload weights, the root among them."""
        return self._live.gated_modules

    def stats(self) -> OffloadStats:
        """Counts and bytes since the module was offloaded."""
        engine = self._live
        counters, transfer = engine.counters, engine.transfer
        images = [part.image for group in engine.groups for part in group.parts]
        waits = engine.seconds_stalled
        in_files = sum(image.layout.num_bytes for image in images if image.tier is Tier.FILE)
        return OffloadStats(
            passes=counters.passes,
            backward_passes=counters.backward_passes,
            onloads=counters.onloads,
            stalls=counters.stalls,
            stalled_seconds=sum(waits.values()),
            worst_stall=max(waits.items(), key=lambda item: item[1], default=None),
            copies=transfer.num_copies,
            bytes_onloaded={tier.value: num_bytes for tier, num_bytes in transfer.bytes_sent.items()},
            bytes_read=transfer.bytes_read,
            tensors_brought_back=counters.brought_back,
            rebuilds=counters.rebuilds,
            peak_device_bytes=counters.peak_device_bytes,
            resident_bytes=counters.resident_bytes,
            trainable_bytes=engine.trainable_bytes,
            host_bytes=sum(
                image.pinned_bytes if image.tier is Tier.FILE else image.layout.num_bytes for image in images
            ),
            pinned_bytes=sum(image.pinned_bytes for image in images),
            staging_bytes=transfer.staging_bytes,
            file_bytes=in_files,
        )

    @property
    def plan(self) -> OffloadPlan:
        """Where each group rests and why, what a forward is predicted to take, and what more memory would bring.

        With a budget it is what is carried out; without one, a prediction of how things are. How long groups compute is
        known after the first forwards. The first time on a machine its speeds are measured, which takes a second or two.

        Example:
            >>> print(handle.plan)
        """
        engine = self._live
        with engine.lock:
            has_memory = engine.config.backend.has_streams
            return OffloadPlan(type(self.module).__name__, engine.current_plan(), device_has_memory=has_memory)

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Write a timeline of what happens inside the `with` block, for https://ui.perfetto.dev or chrome://tracing.

        It has lanes for file reads, copies to the device, compute, and stalls (compute waiting for a copy), each slice
        named by its group. Recording takes some time of its own, so a traced pass is a little slower.

        Raises:
            StateError: a trace is being recorded already.
            OSError: the file cannot be written.

        Example:
            >>> with handle.trace("step.json"):
            ...     model(x)
        """
        engine = self._live
        with engine.lock:
            if engine.tracer is not None:
                raise StateError("A trace of this module is being recorded already. End that one first.")
            tracer = engine.tracer = WeightTrace(engine.config.backend, type(self.module).__name__)
        try:
            yield
        finally:
            with engine.lock:
                engine.transfer.wait_until_enqueued()
                engine.tracer = None
        timeline.write(Path(path), tracer)

    def refresh(self) -> None:
        """Take up changed, added or removed weights now. Without it the next forward does so."""
        self._live.refresh()

    def remove(self) -> None:
        """Give the module back as it was: values (with all edits), devices, hooks, `forward`, class.

        Each weight gets memory of its own again, on the device where it was, so there has to be room for all of them.
        Group files stay for the next time. Calling it again does nothing.

        Raises:
            StateError: a forward or backward of the module is in progress.
        """
        if self._engine is None:
            return
        self._engine.remove()
        self._engine = None
        self.module.__dict__.pop(HANDLE, None)
        for listener in _listeners:
            listener.removed(self)

    @property
    def _live(self) -> Engine:
        if self._engine is None:
            raise StateError("This module is no longer offloaded: remove() was called. Apply group offloading again.")
        return self._engine

    def __repr__(self) -> str:
        name = type(self.module).__name__
        if self._engine is None:
            return f"<OffloadHandle of {name}: removed>"
        return f"<OffloadHandle of {name}: {len(self._engine.groups)} groups>"

    def __str__(self) -> str:
        if self._engine is None:
            return repr(self)
        rows = [("group", "tensors", "size", "rests in")]
        rows += [(g.group_id, str(g.num_tensors), describe_bytes(g.num_bytes), g.where) for g in self.groups]
        total = describe_bytes(sum(group.num_bytes for group in self.groups))
        summary = (
            f"{type(self.module).__name__}: {total} in {len(rows) - 1} groups, onloaded to {self.config.onload_device} "
            f"through slots of {describe_bytes(self._engine.slot_bytes)} in all."
        )
        return "\n".join([*table(rows), summary])

    # A copy of the module, or the module read back from a pickle, is not offloaded: its weights are its own.
    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


class Listener:
    """Is told when a module is offloaded and when it no longer is (so that pipelines see it)."""

    def applying(self, module: nn.Module) -> None:
        """Before anything is touched. May raise."""

    def applied(self, handle: OffloadHandle) -> None: ...

    def removed(self, handle: OffloadHandle) -> None: ...


_listeners: list[Listener] = []


def add_listener(listener: Listener) -> None:
    _listeners.append(listener)


def apply_group_offloading(
    module: nn.Module,
    onload_device: str | int | torch.device | None = None,
    offload_device: str | torch.device = "cpu",
    offload_type: str | Enum = "block_level",
    num_blocks_per_group: int | None = None,
    non_blocking: bool = False,
    use_stream: bool | None = None,
    record_stream: bool = False,
    low_cpu_mem_usage: bool = False,
    offload_to_disk_path: str | os.PathLike[str] | None = None,
    block_modules: list[str] | None = None,
    exclude_kwargs: list[str] | None = None,
    *,
    verify_files: bool = False,
    vram_budget: int | str | None = None,
    ram_budget: int | str | None = None,
) -> OffloadHandle:
    """Keep the weights of `module` in RAM or in files, and onload them group by group while it runs.

    Names, order and meaning of the arguments are those of `diffusers.hooks.apply_group_offloading` (0.42.1). Outputs are
    bit-identical to those of the module on the device. Between forwards every weight is a CPU tensor that reads its true
    value, and may be edited, replaced, saved or loaded; the next forward computes with what is there then.

    Backward brings weights again as it needs them. Parameters that require gradients stay on the device while the module is
    trained, if they are less than half of its bytes (a LoRA); else `backward()` raises StateError.

    Args:
        module: any torch module; one that was passed through `torch.compile` is offloaded underneath.
        onload_device: where to compute. Default: the current accelerator, else the CPU.
        offload_device: "cpu": weights rest in RAM. "disk": they stay in the files that they are views of, as
            `from_pretrained` leaves them; buffers that are in none rest in RAM.
        offload_type: "block_level" moves whole blocks (the elements of ModuleLists and Sequentials), "leaf_level" single
            layers, which takes the least device memory.
        num_blocks_per_group: blocks that move together. Default 1. Block level only.
        non_blocking: without a stream, let the host run ahead of the copies of weights. With a stream it always does. Also copy
            page-locked inputs from where they are: they may be changed only once the device has come to that.
        use_stream: copy on a stream of its own, ahead of the compute that needs the weights. Default: if the device has
            streams.
        record_stream: take memory for onloaded weights from torch's caching allocator and give it back between groups,
            instead of keeping fixed slots. Needs `use_stream`.
        low_cpu_mem_usage: do not page-lock the weights' RAM: it can then be swapped out, but every copy goes through a
            page-locked buffer of 64 MiB at most, at the speed of one memory copy. Files are not page-locked in the page
            cache either, but read.
        offload_to_disk_path: weights rest in files. Those that are views of a file stay there. For all others this is a
            folder for one safetensors file for each group: files whose content is exactly that of the weights are used
            again; no other file is touched. RAM then holds no weights at rest.
        block_modules: names of children that are cut into blocks of their own. Default: the module class's
            `_group_offload_block_modules`. Block level only.
        exclude_kwargs: keyword arguments of forwards that are not moved to the device. Default: the module class's
            `_skip_keys`.
        verify_files: compare the hash of what is read from a file, each time, with that of what was written, or was read
            the first time. It takes a core's time, and files are not page-locked in the page cache then.

        vram_budget: device memory for the whole process: bytes, "8GiB", "80%" of what the device has, or "auto", which is what
            is free. Groups stay on the device as far as slots and activations leave room, which the first forward
            measures; if memory runs out all the same, they are given up and the error says so: call it again.
        ram_budget: RAM for the whole process, in the same forms. Weights that rest in files are page-locked in the page
            cache up to that, the others are read from the drive each time they are needed. What is in no file is in RAM
            anyway: for that, give offload_to_disk_path. If the device is the CPU: for all it takes.

    Returns:
        The handle: what the groups are, statistics, and `remove()`.

    Raises:
        ConfigError: an option is not understood, or contradicts another one; with `offload_device="disk"` and no folder, a
            parameter is in no file.
        DeviceError: the device does not exist, or has no streams.
        ModuleError: the module has no weights, meta weights, or is offloaded by accelerate.
        StateError: the module, or a part of it, is group-offloaded already.
        GroupFileError: the folder cannot be written, or is too small. The module is left as it was.

    Example:
        >>> handle = apply_group_offloading(pipe.transformer, offload_to_disk_path="/nvme/offload")
        >>> image = pipe("a beautiful sunset").images[0]
        >>> print(handle)
    """
    return offload(
        module,
        onload_device=onload_device,
        offload_device=offload_device,
        offload_type=offload_type,
        num_blocks_per_group=num_blocks_per_group,
        non_blocking=non_blocking,
        use_stream=use_stream,
        record_stream=record_stream,
        low_cpu_mem_usage=low_cpu_mem_usage,
        offload_to_disk_path=offload_to_disk_path,
        block_modules=block_modules,
        exclude_kwargs=exclude_kwargs,
        verify_files=verify_files,
        vram_budget=vram_budget,
        ram_budget=ram_budget,
    )


def offload(
    module: nn.Module, *, casts: Mapping[str, torch.dtype] | None = None, exclude_kwargs: Any = None, **options: Any
) -> OffloadHandle:
    """`apply_group_offloading` with an `identity`: what sets the module's group files apart in a shared folder.

    Args:
        casts: parameters and buffers, by name, that get another dtype while they are offloaded, one group after another.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"Expected a torch.nn.Module, got {type(module).__name__}. For a pipeline: enable_group_offload."
        )
    module = getattr(module, "_orig_mod", module)
    if exclude_kwargs is None:
        exclude_kwargs = getattr(module, "_skip_keys", None)
    config = OffloadConfig.from_options(exclude_kwargs=exclude_kwargs, **options)
    _refuse_offloaded(module)
    for listener in _listeners:
        listener.applying(module)
    tensors = dict([*module.named_parameters(), *module.named_buffers()]) if casts else {}
    by_id = {id(tensors[name]): dtype for name, dtype in (casts or {}).items() if tensors[name].dtype != dtype}
    engine = Engine(module, config)
    handle = OffloadHandle(module, engine)
    try:
        engine.start(by_id)
        module.__dict__[HANDLE] = handle
        for listener in _listeners:
            listener.applied(handle)
        return handle
    except BaseException:
        handle.remove()
        raise


def remove_group_offloading(module: nn.Module) -> None:
    """Undo `apply_group_offloading(module, ...)`: see `OffloadHandle.remove`. Does nothing to any other module."""
    handle = handle_of(module)
    if handle is not None:
        handle.remove()


def free_slots() -> None:
    """Give the device memory that offloaded modules keep for their next forward back to the device's allocator.

    It goes by itself with the last of them. Modules that are running keep theirs; the others take memory again when they
    run. Call `torch.cuda.empty_cache()` afterwards to make it free for other processes.
    """
    for arena in arenas():
        arena.release_idle()


def handle_of(module: nn.Module) -> OffloadHandle | None:
    """The handle of a module that group offloading was applied to."""
    handle: OffloadHandle | None = getattr(module, "_orig_mod", module).__dict__.get(HANDLE)
    return handle


def _refuse_offloaded(module: nn.Module) -> None:
    hooks = sys.modules.get("accelerate.hooks")
    for name, part in module.named_modules():
        if is_offloaded(part):
            where = f"its submodule {name!r}" if name else "it"
            raise StateError(
                f"Cannot apply group offloading to {type(module).__name__}: {where} is group-offloaded already. Call "
                f"remove_group_offloading() on what it was applied to first."
            )
        if getattr(part.__dict__.get("forward"), "__module__", "") == "torch.cuda.graphs":
            raise ModuleError(
                f"Cannot apply group offloading to {type(module).__name__}: the forward of {name or 'the module itself'} is a "
                f"CUDA graph (torch.cuda.make_graphed_callables), which would go on reading device memory that its weights "
                f"have left. Offload a module that no graph was made of."
            )
        if hooks is not None and _accelerate_offloads(part, hooks):
            raise ModuleError(
                f"Cannot apply group offloading to a module that is already offloaded by accelerate: "
                f"{name or 'the module itself'} ({type(part).__name__}) has an accelerate hook. Switch that offloading off "
                f"first (pipe.remove_all_hooks(), accelerate.hooks.remove_hook_from_module)."
            )


def _accelerate_offloads(module: nn.Module, hooks: Any) -> bool:
    hook = module.__dict__.get("_hf_hook")
    chain = (hook, *getattr(hook, "hooks", ()))
    return any(isinstance(each, (hooks.AlignDevicesHook, hooks.CpuOffload)) for each in chain)


def _describe(group: Group) -> GroupInfo:
    images = [part.image for part in group.parts]
    return GroupInfo(
        group_id=group.group_id,
        tier=images[0].tier.value if images else Tier.RAM.value,
        where=", ".join(dict.fromkeys(image.where for image in images)) or "nothing to move",
        way=", ".join(dict.fromkeys(image.way for image in images if isinstance(image, FileImage))),
        num_tensors=sum(len(part.refs) for part in group.parts),
        num_bytes=sum(image.layout.num_bytes for image in images),
    )
