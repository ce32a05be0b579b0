"""The options of activation offloading, checked once and frozen, and the groups of a model that they name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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


def find_groups(root: nn.Module, config: ActivationConfig) -> dict[str, nn.Module]:
    """The groups of `root` by FQN, in registration order.

    Raises:
        ConfigError: an FQN or class in `groups` that `root` does not have.
        ModuleError: `groups` is not given, and `root` has no ModuleList.
    """
    if config.groups is None:
        found = dict(_elements(root, "") if isinstance(root, (*_LISTS, nn.Sequential)) else _in_lists(root, ""))
        if not found:
            raise ModuleError(
                f"{type(root).__name__} has no ModuleList, so its groups are not known. Name them: "
                f"groups=['encoder', 'head'], or groups=[BlockClass]."
            )
        return found
    modules = dict(root.named_modules())
    named: dict[str, nn.Module] = {}
    for item in config.groups:
        named.update(_by_name(modules, item, root) if isinstance(item, str) else _by_class(modules, item, root))
    return {fqn: named[fqn] for fqn in modules if fqn in named}


def _in_lists(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        fqn = f"{path}.{name}" if path else name
        yield from _elements(child, fqn) if isinstance(child, _LISTS) else _in_lists(child, fqn)


def _elements(blocks: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The elements of a list. One that is itself a list is never called, so its own elements are groups."""
    for name, child in blocks.named_children():
        fqn = f"{path}.{name}" if path else name
        if isinstance(child, _LISTS):
            yield from _elements(child, fqn)
        else:
            yield fqn, child


def _by_name(modules: dict[str, nn.Module], fqn: str, root: nn.Module) -> dict[str, nn.Module]:
    found = modules.get(fqn)
    if found is None:
        hint = did_you_mean(fqn, modules) or f" It has {[name for name, _ in root.named_children()]}."
        raise ConfigError(f"groups names {fqn!r}, which {type(root).__name__} does not have.{hint}")
    return dict(_elements(found, fqn)) if isinstance(found, _LISTS) else {fqn: found}


def _by_class(modules: dict[str, nn.Module], kind: type[nn.Module], root: nn.Module) -> dict[str, nn.Module]:
    found = {fqn: module for fqn, module in modules.items() if isinstance(module, kind)}
    if not found:
        raise ConfigError(f"groups names {kind.__name__}, and {type(root).__name__} has no module of that class.")
    return found
