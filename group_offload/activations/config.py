"""The options of activation offloading, checked once and frozen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..base.device import backend_for, default_device
from ..errors import ConfigError, DeviceError

Skip = Callable[[torch.Tensor, str], bool]
Group = str | type[nn.Module]
"""The FQN of a module, or a class of modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationConfig:
    """What `apply_activation_offloading` was asked for, which documents the options.

    Raises:
        ConfigError: a value that is not understood, or two options that contradict each other.
    """

    groups: tuple[Group, ...] | None
    """None: the elements of the ModuleLists."""
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

    def __post_init__(self) -> None:
        counts = {"keep_last": self.keep_last, "prefetch": self.prefetch, "min_bytes": self.min_bytes}
        limits = {"max_inflight_bytes": self.max_inflight_bytes, "host_budget_bytes": self.host_budget_bytes}
        for name, value in (counts | {name: value for name, value in limits.items() if value is not None}).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"{name}={value!r}: expected a whole number that is not negative.")
        if self.disk_path is not None and self.host_budget_bytes is None:
            raise ConfigError(
                "disk_path is for activations past host_budget_bytes, and there is no such budget. Pass one, or drop disk_path."
            )
        if self.skip is not None and not callable(self.skip):
            raise ConfigError(f"skip={self.skip!r}: expected a function of a tensor and the group's FQN.")

    def offloads(self, device: torch.device) -> bool:
        """Whether tensors on `device` are offloaded."""
        return device.type not in ("cpu", "meta") if self.device is None else device == self.device


def as_groups(groups: Group | Sequence[Group] | None) -> tuple[Group, ...] | None:
    """
    Raises:
        ConfigError: there are none, or one is neither an FQN nor a class of modules.
    """
    if groups is None:
        return None
    items = (groups,) if isinstance(groups, (str, type)) else tuple(groups)
    for item in items:
        if not isinstance(item, str) and not (isinstance(item, type) and issubclass(item, nn.Module)):
            raise ConfigError(f"groups names {item!r}: expected FQNs of modules, or subclasses of torch.nn.Module.")
    if not items:
        raise ConfigError("groups is empty: nothing would be offloaded. Drop it, or name modules.")
    return items


def as_device(device: str | int | torch.device | None) -> torch.device | None:
    """
    Raises:
        DeviceError: it does not exist here; or it is None, and there is no accelerator.
    """
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
