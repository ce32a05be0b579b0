"""Which modules are groups: what each of them saves for backward moves together."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ..base.text import did_you_mean
from ..errors import ConfigError, ModuleError
from .config import ActivationConfig

_LISTS = (nn.ModuleList, nn.ModuleDict)


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
