"""The options of activation offloading, checked once and frozen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..base.device import backend_for, default_device
from ..errors import ConfigError, DeviceError

Skip = Callable[[torch.Tensor, str], bool]
Group = str | type[nn.Module]
"""The FQN of a module, or a class of modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationConfig:
    """The options of `apply_activation_offloading`, which documents them.

    Raises:
        ConfigError: an option has a value that isn't understood.
    """

    groups: tuple[Group, ...] | None
    """None: the elements of the ModuleLists."""
    keep_last: int
    prefetch: int
    min_bytes: int
    skip: Skip | None
    device: torch.device | None
    """None: the accelerator that the model runs on."""

    def __post_init__(self) -> None:
        for name in ("keep_last", "prefetch", "min_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"{name}={value!r}: expected an integer of at least 0.")
        if self.skip is not None and not callable(self.skip):
            raise ConfigError(f"skip={self.skip!r}: expected a function of a tensor and its group's FQN.")

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
        DeviceError: it doesn't exist here; or it is None, and there is no accelerator.
    """
    if device is not None:
        try:
            return backend_for(torch.device(device), option="device=").device
        except RuntimeError as error:
            raise DeviceError(f"device={device!r} is not a device: {error}") from error
    if default_device().type == "cpu":
        raise DeviceError(
            f"Activation offloading needs an accelerator, and torch {torch.__version__} sees no accelerator here. Install a "
            f"torch build that supports yours, or pass device='cpu' to try it out (which saves no memory)."
        )
    return None
