"""Who asked for a module to be offloaded, and what the next call for it does.

[Note: Owners]
A module is offloaded once, and each call that asks for it becomes an owner of its handle: a pipeline (`enable_group_offload`,
`from_pretrained`), or the module itself (`apply_group_offloading`). `shared_handle` decides what such a call does:

- The module is not offloaded: the call offloads it.
- It is offloaded, and the call gave no option, or the same ones: the call shares the handle.
- The call gave other options: `StateError`, before anything is touched.
- The module was offloaded by a call of its own: options that a pipeline gives for all of its models do not count.

`release` takes an owner away, and the last one restores the module. `handle.remove()` restores it at once. Pipelines are held
weakly, and one that has dropped the module, or is gone, is no owner any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

from torch import nn

from .config import OffloadConfig
from .errors import StateError
from .handle import OffloadHandle
from .plan.budgets import describe_bytes


def add_owner(handle: OffloadHandle, owner: Any) -> None:
    """Note that a pipeline, or the module itself, asked for this handle. Repeated calls do nothing."""
    handle.owners = [ref for ref in handle.owners if ref() is not None]
    if any(ref() is owner for ref in handle.owners):
        return
    try:
        handle.owners.append(weakref.ref(owner))
    except TypeError:  # any object with `components` may be a pipeline
        handle.owners.append(lambda: owner)


def owners_of(handle: OffloadHandle) -> list[Any]:
    """The pipelines that have the module, and the module itself if it was offloaded by a call of its own."""
    found = [owner for ref in handle.owners if (owner := ref()) is not None]
    return [owner for owner in found if owner is handle.module or _has(owner, handle.module)]


def release(handle: OffloadHandle, owner: Any) -> list[Any]:
    """Take an owner away, and restore the module if it was the last one.

    Returns:
        The owners that are left.
    """
    left = [each for each in owners_of(handle) if each is not owner]
    if not left:
        handle.remove()
    handle.owners = [ref for ref in handle.owners if ref() is not owner]
    return left


def shared_handle(
    handle: OffloadHandle | None,
    wanted: OffloadConfig,
    given: Collection[str],
    *,
    given_for_all: Collection[str] = (),
    owner: Any,
    name: str = "",
    is_excluded: bool = False,
) -> OffloadHandle | None:
    """The handle that a call shares; None if it has to offload the module itself. See [Note: Owners].

    Args:
        given: The names of the `wanted` options that the call gave for this module.
        given_for_all: Those that it gave for all models of a pipeline.
        owner: The pipeline or module that the call is for; `name` is that of the module in the pipeline.
        is_excluded: Whether the call asks for the module as a whole on the device.
    """
    if handle is None:
        return None
    owners = owners_of(handle)
    if owner is not handle.module and any(each is handle.module for each in owners):
        given_for_all, is_excluded = (), False
    config = handle.config
    other = [each for each in sorted({*given, *given_for_all}) if getattr(wanted, each) != getattr(config, each)]
    if not other and not is_excluded:
        return handle
    what = f"{name} ({type(handle.module).__name__})" if name else type(handle.module).__name__
    now, leave = "", "it out of exclude_modules"
    if not is_excluded:
        now = f", with {', '.join(f'{each}={_shown(config, each)}' for each in other)}"
        leave = f"{', '.join(other)} out"
    raise StateError(
        f"{what} is already offloaded{now}. To keep it that way, leave {leave}. To change it, call "
        f"{how_to_undo(owners, owner, handle.module, name)} first."
    )


def how_to_undo(owners: Collection[Any], owner: Any, module: nn.Module, name: str) -> str:
    """The calls that restore a module, for a message."""
    alone = f"remove_group_offloading({f'pipe.{name}' if name else 'model'})"
    calls: dict[str, None] = {}
    for each in owners:
        title = f"{'other ' if type(owner) is type(each) else ''}{type(each).__name__}"
        of_pipeline = "disable_group_offload(" + ("pipe)" if each is owner else f") on the {title}")
        calls[alone if each is module else of_pipeline] = None
    # Without owners (their pipelines are gone) any pipeline that has the module may restore it.
    return " and ".join(calls) or ("disable_group_offload(pipe)" if name else alone)


def _shown(config: OffloadConfig, option: str) -> str:
    value = getattr(config, option)
    if option in ("vram_budget", "ram_budget") and value is not None:
        value = describe_bytes(value)
    return repr(value if value is None or isinstance(value, int) else str(value))


def _has(pipeline: Any, module: nn.Module) -> bool:
    try:
        components = pipeline.components.values()
    except Exception:  # of another pipeline, a part of which was deleted: it cannot run any more
        return False
    return any(module in each.modules() for each in components if isinstance(each, nn.Module))
