"""Offload what a model saves for backward: `apply_activation_offloading`, its handle, and the `with` form."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..base import timeline
from ..base.publish import check_path
from ..errors import ModuleError, StateError
from .config import ActivationConfig, Group, Skip, as_device, as_groups
from .gates import GROUP, RootGate
from .groups import find_groups
from .session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationStats:
    """Counts and bytes since activation offloading was applied."""

    passes: int
    """Forwards with gradients."""
    saved_tensors: int
    """Tensors that autograd saved in groups and that were large enough."""
    shared_tensors: int
    """Those of `saved_tensors` whose bytes the same forward had saved before: they move once."""
    offloads: int
    """Copies to RAM that were started."""
    offloaded_bytes: int
    """Bytes that these copies moved."""
    kept_bytes: int
    """Bytes that stayed on the device because one of the last groups of a forward saved them."""
    refused_bytes: int
    """Bytes that stayed on the device because there was no room in RAM."""
    reloads: int
    """Copies back to the device that were started."""
    reloaded_bytes: int
    """Bytes that these copies moved."""
    stalls: int
    """Tensors whose copy back was started only when backward had come to their group, not ahead of it."""
    written_bytes: int
    """Bytes written to the file."""
    read_bytes: int
    """Bytes read from the file."""
    inflight_bytes: int
    """Device memory that copies to RAM hold now."""
    peak_inflight_bytes: int
    """The most that `inflight_bytes` has been."""
    host_bytes: int
    """RAM that was taken."""
    pinned_bytes: int
    """The part of `host_bytes` that is page-locked."""
    used_host_bytes: int
    """The part of `host_bytes` that holds activations now."""
    peak_used_host_bytes: int
    """The most that `used_host_bytes` has been."""
    file_bytes: int
    """Bytes that the file holds now."""


class ActivationOffloadHandle:
    """A module whose activations are offloaded: its groups, its statistics, and `remove()`."""

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
        """Write a timeline of the work inside the `with` block, for https://ui.perfetto.dev or chrome://tracing.

        Each device has rows for the file, copies out and back, compute (groups, forward and backward), and stalls (compute
        waiting for a copy). Recording makes the work a little slower.

        Raises:
            StateError: a trace is being recorded already, or offloading was removed.
            GroupFileError: the file cannot be written. It is looked at before the block runs.

        Example:
            >>> with handle.trace("step.json"):
            ...     transformer(x).mean().backward()
        """
        if self._gate is None:
            raise StateError(f"Activation offloading of {type(self.module).__name__} was removed.")
        session, path = self._gate.session, Path(path)
        check_path(path)
        session.begin_trace(type(self.module).__name__)
        try:
            yield
        finally:
            traces = session.end_trace()
            timeline.write(path, *traces)  # also if the block raised: then it is most wanted

    def remove(self) -> None:
        """Take the hooks off the module. Calling it again does nothing.

        Graphs that exist can still be run backward; RAM and file are given back with the last of them. A forward that is in
        progress goes on without offloading.
        """
        if self._gate is None:
            return
        self._gate.remove()
        self._gate.session.close()
        self.stats()
        self._gate = None  # the session goes with it, unless a graph holds it
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
    groups: Group | Sequence[Group] | None = None,
    keep_last: int = 1,
    prefetch: int = 1,
    min_bytes: int = 1 << 20,
    max_inflight_bytes: int | None = None,
    host_budget_bytes: int | None = None,
    skip: Skip | None = None,
    disk_path: str | os.PathLike[str] | None = None,
    device: str | int | torch.device | None = None,
) -> ActivationOffloadHandle:
    """Move the tensors that groups of `model` save for backward to RAM during forward, and back, in time, during backward.

    Losses and gradients keep every bit. Parameters are never moved, `forward` is not replaced, and `state_dict()` does not
    change. It works with gradient checkpointing (then the checkpoints' inputs move), autocast, DDP, FSDP and FSDP2.

    Args:
        model: the module whose forward is followed by backward; with DDP or FSDP the wrapped one.
        groups: FQNs of modules, or classes, whose activations move together. Default: the elements of the ModuleLists.
        keep_last: groups at the end of forward whose activations stay on the device: backward needs them first.
        prefetch: groups that are brought back ahead of backward.
        min_bytes: smaller tensors stay on the device.
        max_inflight_bytes: device memory that copies to RAM may hold before compute waits for them. Default: as much as two
            groups save.
        host_budget_bytes: page-locked RAM for each device. Activations beyond it go to `disk_path`, or stay on the device
            with one warning. Default: no limit.
        skip: a function of a tensor and the FQN of its group. The tensor stays on the device if it returns True.
        disk_path: a folder for one temporary file.
        device: the only device to offload from, which may be "cpu" to try it out. Default: every accelerator.

    Returns:
        The handle. A second call with the same options returns the same handle.

    Raises:
        ConfigError: an option is not understood, or contradicts another one.
        DeviceError: there is no accelerator, or not the one that was asked for.
        ModuleError: the model's groups are not known, or belong to another model that is offloaded.
        StateError: activation offloading was applied with other options before.

    Example:
        >>> handle = apply_activation_offloading(transformer)
        >>> loss = transformer(x).mean()
        >>> loss.backward()
        >>> handle.remove()
    """
    config = ActivationConfig(
        groups=as_groups(groups),
        keep_last=keep_last,
        prefetch=prefetch,
        min_bytes=min_bytes,
        max_inflight_bytes=max_inflight_bytes,
        host_budget_bytes=host_budget_bytes,
        skip=skip,
        disk_path=None if disk_path is None else Path(disk_path),
        device=as_device(device),
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
    offloaders = session.settle()
    pools = [offloader.host.pool for offloader in offloaders]
    return ActivationStats(
        **asdict(session.counters),
        inflight_bytes=sum(offloader.inflight_bytes for offloader in offloaders),
        host_bytes=sum(pool.num_bytes for pool in pools),
        pinned_bytes=sum(pool.pinned_bytes for pool in pools),
        used_host_bytes=sum(pool.used_bytes for pool in pools),
        peak_used_host_bytes=sum(pool.peak_used_bytes for pool in pools),
        file_bytes=sum(offloader.host.file_bytes for offloader in offloaders),
    )
