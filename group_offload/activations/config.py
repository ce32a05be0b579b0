"""The options of activation offloading, checked once and frozen, and the groups of a model that they name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ..base.device import backend_for, default_device
from ..base.text import did_you_mean
from ..errors import ConfigError, DeviceError, ModuleError

Skip = Callable[[torch.Tensor, str], bool]
Group = str | type[nn.Module]
"""The FQN of a module, or a class of modules."""
_LISTS = (nn.ModuleList, nn.ModuleDict)


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


def as_device(device: str | int | torch.device | None) -> torch.device | None:
    """
    Raises:
        DeviceError: it doesn't exist here; or it is None, and there is no accelerator.
    """
    if device is not None:
        return backend_for(device, option="device=").device
    if default_device().type == "cpu":
        raise DeviceError(
            f"Activation offloading needs an accelerator, and torch {torch.__version__} sees no accelerator here. Install a "
            f"torch build that supports yours, or pass device='cpu' to try it out (which saves no memory)."
        )
    return None


def find_groups(root: nn.Module, config: ActivationConfig) -> dict[str, nn.Module]:
    """The groups of `root` by FQN, in registration order.

    Raises:
        ConfigError: `groups` is empty, or names what is neither an FQN nor a class of modules, or what `root` does not have.
        ModuleError: `groups` is not given, and `root` has no ModuleList.
    """
    if config.groups is None:
        found = dict(_elements(root, "", is_list=isinstance(root, (*_LISTS, nn.Sequential))))
        if not found:
            raise ModuleError(
                f"{type(root).__name__} has no ModuleList, so its groups are not known. Name them: "
                f"groups=['encoder', 'head'], or groups=[BlockClass]."
            )
        return found
    modules = dict(root.named_modules())
    named: dict[str, nn.Module] = {}
    for item in config.groups:
        if isinstance(item, str):
            found = {item: modules[item]} if item in modules else {}
        elif isinstance(item, type) and issubclass(item, nn.Module):
            found = {fqn: module for fqn, module in modules.items() if isinstance(module, item)}
        else:
            raise ConfigError(f"groups names {item!r}: expected FQNs of modules, or subclasses of torch.nn.Module.")
        if not found:
            name = item if isinstance(item, str) else item.__name__
            hint = did_you_mean(name, modules) or f" It has {[name for name, _ in root.named_children()]}."
            raise ConfigError(f"groups names {name!r}, which {type(root).__name__} does not have.{hint}")
        for fqn, module in found.items():
            named.update(_elements(module, fqn, is_list=True) if isinstance(module, _LISTS) else [(fqn, module)])
    if not named:
        raise ConfigError(
            "groups is empty, or names empty lists: nothing would be offloaded. Drop it, or name modules."
        )
    return {fqn: named[fqn] for fqn in modules if fqn in named}


def _elements(module: nn.Module, path: str, *, is_list: bool) -> Iterator[tuple[str, nn.Module]]:
    """The elements of a list, or of the lists below a module. Lists are never called, so one in another has groups too."""
    for name, child in module.named_children():
        fqn = f"{path}.{name}" if path else name
        if is_list and not isinstance(child, _LISTS):
            yield fqn, child
        else:
            yield from _elements(child, fqn, is_list=isinstance(child, _LISTS))
