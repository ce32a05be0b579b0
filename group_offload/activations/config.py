"""The options of activation offloading, checked once and frozen."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..base.device import backend_for, default_device
from ..errors import ConfigError, DeviceError

Skip = Callable[[torch.Tensor, str], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationConfig:
    """What `apply_activation_offloading` was asked for.

    Raises:
        ConfigError: a value that is not understood, or two options that contradict each other.
        DeviceError: there is no accelerator to offload from.
    """

    groups: tuple[str | type[nn.Module], ...] | None
    """FQNs and classes; None: the elements of the ModuleLists."""
    keep_last: int
    prefetch: int
    min_bytes: int
    max_inflight_bytes: int | None
    """None: what two groups save."""
    host_budget_bytes: int | None
    skip: Skip | None
    disk_path: Path | None
    device: torch.device | None
    """The only device whose tensors are offloaded; None: every accelerator."""

    @classmethod
    def from_options(
        cls,
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
    ) -> ActivationConfig:
        counts = {"keep_last": keep_last, "prefetch": prefetch, "min_bytes": min_bytes}
        limits = {"max_inflight_bytes": max_inflight_bytes, "host_budget_bytes": host_budget_bytes}
        for name, value in {**counts, **{name: value for name, value in limits.items() if value is not None}}.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"{name}={value!r}: expected a whole number that is not negative.")
        if disk_path is not None and host_budget_bytes is None:
            raise ConfigError(
                "disk_path is for activations past host_budget_bytes, and there is no such budget. Pass one, or drop disk_path."
            )
        if skip is not None and not callable(skip):
            raise ConfigError(f"skip={skip!r}: expected a function of a tensor and the group's FQN.")
        return cls(
            groups=_as_groups(groups),
            keep_last=keep_last,
            prefetch=prefetch,
            min_bytes=min_bytes,
            max_inflight_bytes=max_inflight_bytes,
            host_budget_bytes=host_budget_bytes,
            skip=skip,
            disk_path=None if disk_path is None else Path(disk_path),
            device=_as_device(device),
        )

    def offloads(self, device: torch.device) -> bool:
        """Whether tensors on `device` are offloaded."""
        return device.type not in ("cpu", "meta") if self.device is None else device == self.device


def _as_groups(
    groups: str | type[nn.Module] | Sequence[str | type[nn.Module]] | None,
) -> tuple[str | type[nn.Module], ...] | None:
    if groups is None:
        return None
    items = (groups,) if isinstance(groups, (str, type)) else tuple(groups)
    for item in items:
        if not isinstance(item, str) and not (isinstance(item, type) and issubclass(item, nn.Module)):
            raise ConfigError(f"groups names {item!r}: expected FQNs of modules, or subclasses of torch.nn.Module.")
    if not items:
        raise ConfigError("groups is empty: nothing would be offloaded. Drop it, or name modules.")
    return items


def _as_device(device: str | int | torch.device | None) -> torch.device | None:
    if device is not None:
        try:
            return backend_for(torch.device(device)).device
        except RuntimeError as error:
            raise DeviceError(f"device={device!r} is not a device: {error}") from error
    if default_device().type == "cpu":
        raise DeviceError(
            f"Activation offloading moves activations from an accelerator to RAM, and torch {torch.__version__} sees no "
            f"accelerator here. Train without it, install a torch build that supports the device, or pass device='cpu' to try "
            f"it out (which saves no memory)."
        )
    return None
