"""Modular diffusers: components that a manager moves make room, and guiders tell which calls of a step are to come.

[Note: Who makes room]
`ComponentsManager.enable_auto_cpu_offload` puts a hook on each component. Before the component's forward, the hook asks a
strategy which others leave the device. It asks only if the component seems to be elsewhere. An offloaded model of diffusers
seems to be on the device, so nobody would make room for it. A text encoder of transformers seems to be in RAM, and room would
be made for all of its weights. So the strategy is asked here instead, before a forward takes device memory, for the bytes that
it takes.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ..api import handle_of
from ..base.arena import arenas
from ..base.patching import around_once
from ..errors import ConfigError
from ..handle import OffloadHandle
from ..runtime.convoy.steps import announce, begin_step

_MANAGER = "diffusers.modular_pipelines.components_manager"
_GUIDERS = "diffusers.guiders.guider_utils"


def _wanted(num_bytes: int) -> Any:
    """What diffusers' own strategy asks of a model: how much room it needs."""
    return SimpleNamespace(get_memory_footprint=lambda: num_bytes)


class GroupOffloadStrategy:
    """A strategy for a `ComponentsManager` of Modular Diffusers, some of whose models are group-offloaded.

    Before the manager moves a whole model to the device, it evicts weights that offloaded models keep there, and only then
    other whole models. (Evicting weights copies nothing: they are in RAM or in a file too.) An offloaded model gets
    space for the weights that its forward takes, not for all of its weights.

    Args:
        memory_reserve_margin: Device memory to leave free for activations: bytes, or a size such as "3GB", as diffusers'
            `AutoOffloadStrategy` takes it.

    Raises:
        ConfigError: diffusers isn't installed.

    Example:
        >>> enable_group_offload(pipe, exclude_modules=["vae"])
        >>> manager.enable_auto_cpu_offload("cuda", offload_strategy=GroupOffloadStrategy())
    """

    def __init__(self, memory_reserve_margin: int | str = "3GB") -> None:
        try:
            manager = importlib.import_module(_MANAGER)
        except ImportError as error:
            raise ConfigError(
                "GroupOffloadStrategy is for a ComponentsManager of diffusers, which isn't installed: pip install "
                "'group-offload[diffusers]'"
            ) from error
        self._strategy = manager.AutoOffloadStrategy(memory_reserve_margin)

    def __call__(self, hooks: list[Any], model_id: str, model: nn.Module, execution_device: torch.device) -> list[Any]:
        """The hooks of the models that leave the device before `model` comes."""
        handle = handle_of(model)
        if handle is not None:
            needed = handle.missing_bytes
        else:
            needed = sum(each.nbytes for each in chain(model.parameters(), model.buffers()))
            for arena in arenas():
                backend = arena.backend
                short = needed + self._strategy.memory_reserve_margin - backend.free_bytes()
                if backend.device == execution_device and short > 0:
                    arena.give_way(short)
                    backend.release_unused()
        leaving: list[Any] = self._strategy(hooks, model_id, _wanted(needed), execution_device)
        return leaving


def make_room(module: nn.Module) -> None:
    """A forward of an offloaded module begins: see [Note: Who makes room]."""
    hook, handle = _hook_of(module), handle_of(module)
    if hook is None or handle is None:
        return
    # The hook's own step has nothing to do: the module's gate has moved the inputs, and room is made here.
    hook.pre_forward = lambda module, *args, **kwargs: (args, kwargs)
    others = [
        other
        for other in hook.other_hooks or ()
        if other.model.device == hook.execution_device and handle_of(other.model) is None
    ]
    strategy = hook.offload_strategy
    if others and strategy is not None:
        is_own = isinstance(strategy, sys.modules[_MANAGER].AutoOffloadStrategy)
        others = strategy(
            hooks=others,
            model_id=hook.model_id,
            model=_wanted(handle.missing_bytes) if is_own else module,
            execution_device=hook.execution_device,
        )
    for other in others:
        other.offload()
    if others:
        handle.config.backend.release_unused()


def leave_room_to_hooks(module: nn.Module) -> None:
    """Undo what `make_room` did to the module's hook."""
    hook = _hook_of(module)
    if hook is not None:
        hook.__dict__.pop("pre_forward", None)


def _hook_of(module: nn.Module) -> Any:
    """The hook that a manager put on a component; None if there is none."""
    hook, manager = module.__dict__.get("_hf_hook"), sys.modules.get(_MANAGER)
    return hook if manager is not None and isinstance(hook, manager.CustomOffloadHook) else None


def hear_guiders(handle: OffloadHandle) -> None:
    """Note the branches that guiders prepare for a step, from the first model on that is offloaded and shares passes.

    Guiders make each branch by one of two methods, and none has methods of these names for itself.
    """
    if handle._live._gates.sharing is None:
        return
    guidance = importlib.import_module(_GUIDERS).BaseGuidance
    around_once(guidance, "set_state", _begin)
    for name in ("_prepare_batch", "_prepare_batch_from_block_state"):
        if hasattr(guidance, name):  # the version of diffusers says which
            around_once(guidance, name, _prepare)


def _begin(set_state: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    begin_step()
    return set_state(*args, **kwargs)


def _prepare(prepare: Callable[..., Any], guider: Any, *args: Any, **kwargs: Any) -> Any:
    branch = prepare(guider, *args, **kwargs)
    announce(branch, getattr(branch, guider._identifier_key, None))
    return branch
