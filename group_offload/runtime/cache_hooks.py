"""Hooks of diffusers that may answer for a block in place of its forward: caches and guiders that skip whole blocks.

A gate encloses the hooks of its module. Were the block's groups onloaded before the hooks run, a skipped block would take
its share of the link all the same. So where every hook is one of those below, the groups are onloaded when the block's own
forward is called. The hooks below compute with inputs and outputs of the block, and with nothing of the block itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

_HOOKS = "diffusers.hooks."
_SKIP = frozenset(
    {
        "FBCBlockHook",
        "FBCHeadBlockHook",
        "MagCacheBlockHook",
        "MagCacheHeadHook",
        "SeaCacheBlockHook",
        "SeaCacheLeaderBlockHook",
        "TransformerBlockSkipHook",
    }
)
"""The names of the hooks' classes."""


def own_forward(module: nn.Module) -> Any:
    """What leads diffusers' hooks of a module to the forward that they enclose, if they may skip it.

    None if the module has other hooks, or none.
    """
    forward, registry = module.__dict__.get("forward"), module.__dict__.get("_diffusers_hook")
    if registry is None or not isinstance(forward, partial) or not _is_of_diffusers(forward.func):
        return None
    references = getattr(registry, "_fn_refs", ())
    kinds = [type(hook) for name, hook in registry.hooks.items() if name in registry._hook_order]
    if not references or len(references) != len(kinds):
        return None
    return references[0] if all(_is_of_diffusers(kind) and kind.__name__ in _SKIP for kind in kinds) else None


@contextmanager
def preceded(reference: Any, step: Callable[[], None]) -> Iterator[None]:
    """Let `step` run before each call of the forward that `reference` leads to, for as long as the context lasts."""
    name = "forward" if reference.original_forward is None else "original_forward"
    own = getattr(reference, name)

    def forward(*args: Any, **kwargs: Any) -> Any:
        step()
        return own(*args, **kwargs)

    setattr(reference, name, forward)
    try:
        yield
    finally:
        setattr(reference, name, own)


def _is_of_diffusers(code: Any) -> bool:
    return str(getattr(code, "__module__", "")).startswith(_HOOKS)
