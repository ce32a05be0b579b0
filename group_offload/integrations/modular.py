"""Modular diffusers: components that a manager moves make room, and guiders tell which calls of a step are to come.

[Note: Who makes room]
`ComponentsManager.enable_auto_cpu_offload` puts a hook on each component. Before the component's forward, the hook asks a
strategy which others leave the device. It asks only if the component seems to be elsewhere. An offloaded model of diffusers
seems to be on the device, so nobody would make room for it. A text encoder of transformers seems to be in RAM, and room would
be made for all of its weights. So the strategy is asked here instead, before a forward takes device memory. diffusers' own
strategy is told how much that is (`_choose_leaving`).
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
from ..runtime.interleave.guidance_steps import announce, begin_step

_MANAGER = "diffusers.modular_pipelines.components_manager"
_GUIDERS = "diffusers.guiders.guider_utils"


def hear_managers() -> None:
    """Let managers ask what [Note: Who makes room] says. (Nothing is imported for that: diffusers 0.36 warns as it is.)"""
    manager: Any = sys.modules.get(_MANAGER)
    if manager is not None:
        around_once(manager.AutoOffloadStrategy, "__call__", _choose_leaving)
        around_once(manager.CustomOffloadHook, "pre_forward", _pre_forward)


class GroupOffloadStrategy:
    """A strategy for a `ComponentsManager` of Modular Diffusers, some of whose models are group-offloaded.

    Before the manager moves a whole model to the device, it evicts weights that offloaded models keep there, and only then
    other whole models. An offloaded model gets space for the weights that its forward takes, not for all of its weights.
    (Once a pipeline is offloaded, diffusers' own `AutoOffloadStrategy` does so too.)

    Args:
        memory_reserve_margin: Device memory to leave free for activations: bytes, or a size such as "3GB".

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
        hear_managers()
        self._strategy: Any = manager.AutoOffloadStrategy(memory_reserve_margin)

    def __call__(self, hooks: list[Any], model_id: str, model: nn.Module, execution_device: torch.device) -> list[Any]:
        """The hooks of the models that leave the device before `model` comes."""
        leaving: list[Any] = self._strategy(hooks, model_id, model, execution_device)
        return leaving


def _choose_leaving(
    ask: Callable[..., Any], strategy: Any, hooks: Any, model_id: Any, model: nn.Module, execution_device: Any
) -> Any:
    """In place of the call of diffusers' `AutoOffloadStrategy`, which says what leaves the device before `model` comes.

    An offloaded model takes what its forward takes for weights. Before a whole model comes, weights that offloaded models keep
    on the device are evicted, and only then other whole models leave: evicting copies nothing.
    """
    handle = handle_of(model)
    if handle is not None:
        size = handle._live.placer.missing_bytes
    else:
        size = sum(each.nbytes for each in chain(model.parameters(), model.buffers()))
        # Later releases of diffusers have another name for it.
        margin = getattr(strategy, "memory_reserve_margin", 0) or getattr(strategy, "memory_reserve", 0)
        for arena in arenas():
            short = margin + size - arena.backend.free_bytes()
            if arena.backend.device == execution_device and short > 0:
                arena.give_way(short)
                arena.backend.release_unused()
    return ask(strategy, hooks, model_id, SimpleNamespace(get_memory_footprint=lambda: size), execution_device)


def _pre_forward(call: Callable[..., Any], hook: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """In place of the hook's own step before a forward: that of an offloaded model has made room and moved its inputs."""
    return call(hook, module, *args, **kwargs) if handle_of(module) is None else (args, kwargs)


def make_room(module: nn.Module) -> None:
    """A forward of an offloaded module begins: see [Note: Who makes room]."""
    hook, handle, manager = module.__dict__.get("_hf_hook"), handle_of(module), sys.modules.get(_MANAGER)
    if manager is None or handle is None or not isinstance(hook, manager.CustomOffloadHook):
        return
    hear_managers()
    others = [
        other
        for other in hook.other_hooks or ()
        if other.model.device == hook.execution_device and handle_of(other.model) is None
    ]
    strategy = hook.offload_strategy
    if others and strategy is not None:
        others = strategy(hooks=others, model_id=hook.model_id, model=module, execution_device=hook.execution_device)
    for other in others:
        other.offload()
    if others:
        handle.config.backend.release_unused()


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
