"""Whether a forward that broke off may be run again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


class Attempt:
    """What a forward was given, remembered before it begins."""

    def __init__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._module = module
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self._inputs = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]

    def why_not_again(self) -> str | None:
        """What would make a second run compute something else than the first; None if nothing is known that would."""
        if self._module.training:
            return "the module is in training mode, where dropout and statistics depend on how often it ran"
        if any(tensor._version != version for tensor, version in self._inputs):
            return "it has changed an input in place"
        for name, part in self._module.named_modules():
            registry = part.__dict__.get("_diffusers_hook")
            hooks = getattr(registry, "hooks", {}) if registry is not None else {}
            if any(getattr(hook, "_is_stateful", False) for hook in hooks.values()):
                return f"a hook of diffusers on {name or 'the module'!r} remembers earlier calls"
        return None
