"""Offload what a model saves for backward: `apply_activation_offloading`, and its handle."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..base.weak import NotCopied
from ..errors import ModuleError, StateError
from .config import ActivationConfig, Group, Skip, as_device, find_groups
from .gates import GROUP, GroupGate, tell
from .session import Session
from .stats import ActivationStats

HANDLE = "_group_offload_activation_handle"
"""The attribute of a root module that leads to its handle."""


class ActivationOffloadHandle(NotCopied):
    """A module whose activations are offloaded: its groups, its statistics, and `remove()`.

    The end of a `with` block removes it too, even if it was applied before.
    """

    def __init__(self, module: nn.Module, config: ActivationConfig, groups: dict[str, nn.Module]) -> None:
        self.module = module
        self.config = config
        self.groups = tuple(groups)
        """The FQNs of the groups, in registration order."""
        self._session: Session | None = Session(config, type(module).__name__)
        self._last_stats = ActivationStats()
        self._gates = [GroupGate(self._session, name, group) for name, group in groups.items()]
        self._hooks: list[RemovableHandle] = []
        try:
            self._hooks.append(module.register_forward_pre_hook(partial(tell, HANDLE, "_enter")))
            self._hooks.append(module.register_forward_hook(partial(tell, HANDLE, "_leave"), always_call=True))
            module.__dict__[HANDLE] = self
            for gate, group in zip(self._gates, groups.values(), strict=True):
                group.__dict__[GROUP] = gate
                gate.place()
        except BaseException:
            self.remove()
            raise

    @property
    def is_active(self) -> bool:
        """True until `remove()`."""
        return self._session is not None

    def stats(self) -> ActivationStats:
        """Counts and bytes since activation offloading was applied; after `remove()` as they were then."""
        if self._session is not None:
            self._last_stats = self._session.stats()
        return self._last_stats

    def remove(self) -> None:
        """Take the hooks off the module. Calling it again does nothing.

        You can still run backward through graphs that exist; the last of them frees the host memory. A forward that is in
        progress continues without offloading.
        """
        if self._session is None:
            return
        for gate in self._gates:
            gate.remove()
        for hook in self._hooks:
            hook.remove()
        self._session.close()
        self.stats()
        self._gates, self._session = [], None  # a graph may still hold the session
        self.module.__dict__.pop(HANDLE, None)

    def __enter__(self) -> ActivationOffloadHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def _enter(self) -> None:
        for gate in self._gates:
            gate.place()
        if self._session is not None:
            self._session.begin(self.module)

    def _leave(self) -> None:
        if self._session is not None:
            self._session.end()

    def __repr__(self) -> str:
        state = f"{len(self.groups)} groups" if self.is_active else "removed"
        return f"<ActivationOffloadHandle of {type(self.module).__name__}: {state}>"


def apply_activation_offloading(
    model: nn.Module,
    *,
    groups: Group | Sequence[Group] | None = None,
    keep_last: int = 1,
    prefetch: int = 1,
    min_bytes: int = 1 << 20,
    skip: Skip | None = None,
    device: str | int | torch.device | None = None,
) -> ActivationOffloadHandle:
    """Move the tensors that groups of `model` save for backward to pinned host memory, and back before backward needs them.

    Losses and gradients are bitwise identical. Parameters never move, `forward` isn't replaced, and `state_dict()` doesn't
    change. It works with gradient checkpointing (then the checkpoints' inputs move), autocast, DDP, FSDP and FSDP2.

    Args:
        model: The module whose forward is followed by backward; with DDP or FSDP the wrapped one.
        groups: FQNs of modules, or classes, whose activations move together. Default: the elements of the ModuleLists.
        keep_last: Groups at the end of forward whose activations stay on the device: backward needs them first.
        prefetch: Groups to fetch ahead of backward.
        min_bytes: Smaller tensors stay on the device.
        skip: A function of a tensor and the FQN of its group. The tensor stays on the device if it returns True.
        device: The device to offload from; tensors on others stay. "cpu" is for trying it out. Default: the accelerator that
            the model runs on.

    Returns:
        The handle. A second call with the same options returns the same handle.

    Raises:
        ConfigError: an option isn't understood.
        DeviceError: there is no accelerator, or not the one that you asked for.
        ModuleError: the model's groups aren't known, or belong to another model that is offloaded. The forward raises it if
            the model runs on several accelerators and `device` doesn't choose one.
        StateError: activation offloading was applied with other options before.

    Example:
        >>> handle = apply_activation_offloading(transformer)
        >>> loss = transformer(x).mean()
        >>> loss.backward()
        >>> handle.remove()

        >>> with apply_activation_offloading(transformer):  # or for a while; backward may come after it
        ...     loss = transformer(x).mean()
        >>> loss.backward()
    """
    config = ActivationConfig(
        groups=None if groups is None else tuple([groups] if isinstance(groups, (str, type)) else groups),
        keep_last=keep_last,
        prefetch=prefetch,
        min_bytes=min_bytes,
        skip=skip,
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
