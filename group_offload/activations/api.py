"""Offload what a model saves for backward: `apply_activation_offloading`, its handle, and the `with` form."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..base import timeline
from ..errors import ModuleError, StateError
from .config import ActivationConfig, Skip
from .gates import GROUP, RootGate
from .groups import find_groups
from .session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationStats:
    """What has happened since activation offloading was applied. Bytes are bytes, everything else is a count."""

    passes: int
    """Forwards with gradients."""
    saved_tensors: int
    """Tensors that autograd saved in groups and that were large enough."""
    shared_tensors: int
    """Those of `saved_tensors` whose bytes were saved before in the same forward, and moved with that."""
    offloads: int
    """Copies to RAM that were started."""
    offloaded_bytes: int
    kept_bytes: int
    """What was saved by groups that are the last of their forward."""
    refused_bytes: int
    """What stayed on the device because there was no room in RAM."""
    reloads: int
    """Copies back to the device that were started."""
    reloaded_bytes: int
    stalls: int
    """Tensors that were on their way back only when backward needed their group: nobody foresaw it."""
    written_bytes: int
    """What was written to the file."""
    read_bytes: int
    """What was read from the file."""
    inflight_bytes: int
    """Device memory that is held by copies to RAM now."""
    peak_inflight_bytes: int
    host_bytes: int
    """RAM that was taken."""
    pinned_bytes: int
    """The part of `host_bytes` that is page-locked."""
    used_host_bytes: int
    """The part of `host_bytes` that holds activations now."""
    peak_used_host_bytes: int
    file_bytes: int
    """What the file holds now."""


class ActivationOffloadHandle:
    """A module whose activations are offloaded: what its groups are, what they have done, and the way back."""

    def __init__(self, module: nn.Module, config: ActivationConfig, groups: dict[str, nn.Module]) -> None:
        self.module = module
        self.config = config
        self.groups = tuple(groups)
        """The FQNs of the groups, in registration order."""
        session = Session(config, len(groups))
        self._gate: RootGate | None = RootGate(module, groups, session)
        self._last_stats = _stats_of(session)
        module.__dict__[HANDLE] = self

    @property
    def is_active(self) -> bool:
        """Whether activations are offloaded: true until `remove()`."""
        return self._gate is not None

    def stats(self) -> ActivationStats:
        """Counts and bytes since activation offloading was applied; after `remove()` as they were then."""
        if self._gate is not None:
            self._last_stats = _stats_of(self._gate.session)
        return self._last_stats

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Write a timeline of what happens inside the `with` block, for https://ui.perfetto.dev or chrome://tracing.

        Each device has lanes for the file, copies out and back, compute (groups, forward and backward), and stalls (compute
        waiting for a copy). Recording takes some time of its own.

        Raises:
            StateError: a trace is being recorded already, or offloading was removed.
            OSError: the file cannot be written.

        Example:
            >>> with handle.trace("step.json"):
            ...     transformer(x).mean().backward()
        """
        if self._gate is None:
            raise StateError(f"Activation offloading of {type(self.module).__name__} was removed.")
        session = self._gate.session
        session.begin_trace(type(self.module).__name__)
        try:
            yield
        finally:
            tracers = session.end_trace()
        timeline.write(Path(path), *tracers)

    def remove(self) -> None:
        """Take the hooks off the module. Calling it again does nothing.

        Graphs that exist can still be run backward; RAM and file are given back with the last of them. A forward that is in
        progress, or was interrupted, goes on without.
        """
        if self._gate is None:
            return
        self._gate.remove()
        self._gate.session.close()
        self.stats()
        self._gate = None  # and with it the session, unless a graph holds it
        self.module.__dict__.pop(HANDLE, None)

    def __repr__(self) -> str:
        state = f"{len(self.groups)} groups" if self.is_active else "removed"
        return f"<ActivationOffloadHandle of {type(self.module).__name__}: {state}>"

    # A copy of the module, or the module read back from a pickle, is not offloaded.
    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


HANDLE = "_group_offload_activation_handle"
"""The attribute of a root module that leads to its handle."""


def apply_activation_offloading(
    model: nn.Module,
    *,
    groups: str | type[nn.Module] | Sequence[str | type[nn.Module]] | None = None,
    keep_last: int = 1,
    prefetch: int = 1,
    min_bytes: int = 1 << 20,
    max_inflight_bytes: int | None = None,
    host_budget_bytes: int | None = None,
    skip: Skip | None = None,
    disk_path: str | os.PathLike[str] | None = None,
    device: str | int | torch.device | None = None,
) -> ActivationOffloadHandle:
    """Move what the groups of `model` save for backward to RAM during forward, and back, in time, during backward.

    Losses and gradients keep every bit. Parameters are never moved, `forward` is not replaced, and `state_dict()` does not
    change. It goes with gradient checkpointing (then the checkpoints' inputs move), autocast, DDP, FSDP and FSDP2.

    Args:
        model: the module whose forward is followed by backward; with DDP or FSDP the wrapped one.
        groups: FQNs of modules, or classes, whose activations move together. Default: the elements of the ModuleLists.
        keep_last: groups at the end of forward whose activations stay on the device: backward needs them first.
        prefetch: groups that are brought back ahead of backward.
        min_bytes: smaller tensors stay on the device.
        max_inflight_bytes: device memory that copies to RAM may hold before compute waits for them. Default: what two
            groups save.
        host_budget_bytes: page-locked RAM for each device. What is beyond goes to `disk_path`, or stays on the device with
            one warning. Default: no limit.
        skip: is given a tensor and the FQN of its group; the tensor stays on the device if it returns True.
        disk_path: a folder for one temporary file.
        device: offload from this device alone, which may be "cpu" to try it out. Default: every accelerator.

    Returns:
        The handle. If the same options are applied already: the handle that there is.

    Raises:
        ConfigError: an option that is not understood, or contradicts another one.
        DeviceError: there is no accelerator, or not the one that was asked for.
        ModuleError: the model's groups are not known, or belong to another model that is offloaded.
        StateError: other options are applied already.

    Example:
        >>> handle = apply_activation_offloading(transformer)
        >>> loss = transformer(x).mean()
        >>> loss.backward()
        >>> handle.remove()
    """
    config = ActivationConfig.from_options(
        groups=groups,
        keep_last=keep_last,
        prefetch=prefetch,
        min_bytes=min_bytes,
        max_inflight_bytes=max_inflight_bytes,
        host_budget_bytes=host_budget_bytes,
        skip=skip,
        disk_path=disk_path,
        device=device,
    )
    handle: ActivationOffloadHandle | None = model.__dict__.get(HANDLE)
    if handle is not None:
        if handle.config != config:
            raise StateError(
                f"Activation offloading is applied to this {type(model).__name__} with other options: {handle.config}. Call "
                f"remove() of that handle first."
            )
        return handle
    found = find_groups(model, config)
    for name, module in found.items():
        if module.__dict__.get(GROUP) is not None:
            raise ModuleError(
                f"{name!r} of {type(model).__name__} is a group of another module that activation offloading is applied to, as "
                f"{module.__dict__[GROUP].name!r}. Remove that first, or pass groups without it."
            )
    return ActivationOffloadHandle(model, config, found)


@contextmanager
def activation_offloading(model: nn.Module, **options: Any) -> Iterator[ActivationOffloadHandle]:
    """Apply activation offloading to the forwards inside the `with` block. Backward may come after it.

    Args and errors are those of `apply_activation_offloading`.

    Example:
        >>> with activation_offloading(transformer):
        ...     loss = transformer(x).mean()
        >>> loss.backward()
    """
    was_applied = model.__dict__.get(HANDLE) is not None
    handle = apply_activation_offloading(model, **options)
    try:
        yield handle
    finally:
        if not was_applied:
            handle.remove()


def _stats_of(session: Session) -> ActivationStats:
    counters, lanes = session.counters, session.settle()
    return ActivationStats(
        passes=counters.passes,
        saved_tensors=counters.saved_tensors,
        shared_tensors=counters.shared_tensors,
        offloads=counters.offloads,
        offloaded_bytes=counters.offloaded_bytes,
        kept_bytes=counters.kept_bytes,
        refused_bytes=counters.refused_bytes,
        reloads=counters.reloads,
        reloaded_bytes=counters.reloaded_bytes,
        stalls=counters.stalls,
        written_bytes=counters.written_bytes,
        read_bytes=counters.read_bytes,
        inflight_bytes=sum(lane.inflight_bytes for lane in lanes),
        peak_inflight_bytes=counters.peak_inflight_bytes,
        host_bytes=sum(lane.slab.num_bytes for lane in lanes),
        pinned_bytes=sum(lane.slab.pinned_bytes for lane in lanes),
        used_host_bytes=sum(lane.slab.used_bytes for lane in lanes),
        peak_used_host_bytes=sum(lane.slab.peak_used_bytes for lane in lanes),
        file_bytes=sum(lane.file_bytes for lane in lanes),
    )
