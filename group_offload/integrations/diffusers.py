"""diffusers: whole pipelines offloaded, and diffusers' own calls running on this engine.

[Note: What diffusers looks at]
diffusers takes a model for group-offloaded if one function finds a hook for it: `_get_top_level_group_offload_hook` of
`diffusers.hooks.group_offloading`. `.device`, `pipe._execution_device`, `pipe.to` and the guards of the other offload modes ask
it. That function is replaced, once, by one that gives a *marker* for a module that is offloaded here. No hook is registered.

After it has loaded or removed a LoRA, diffusers takes the hooks off and applies them again, through
`_apply_group_offloading` of the same module. That function is replaced by one that sends a marker to the engine it belongs to
and everything else where it went before.
"""

from __future__ import annotations

import copyreg
import importlib
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from functools import cache, wraps
from heapq import nlargest
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn

from ..api import apply_group_offloading, handle_of, offload, remove_group_offloading
from ..base.arena import moved
from ..base.compiled import HANDLE
from ..base.layout import span_bytes
from ..base.patching import around_once, swap
from ..base.text import did_you_mean, short
from ..base.weak import NotCopied, Weak
from ..config import ModelOptions, OffloadConfig, OffloadOptions, OffloadType, takes_options
from ..errors import ConfigError, DeviceError, GroupOffloadError, ModuleError, StateError
from ..handle import Listener, OffloadHandle, listeners
from ..owners import add_owner, how_to_undo, owners_of, release, shared_handle
from ..partition import partition, tables_of
from ..plan.budgets import Default, describe_bytes
from ..runtime.gates import root_of
from .casts import cast_now
from .modular import hear_guiders, hear_managers, make_room
from .ram_split import put_in_order, shares_of

logger = logging.getLogger("group_offload")

HOOK_NAME = "group_offloading"
_TEXT_KV_CACHE = "text_kv_cache_transformer"
FILL = Default("auto")
"""What a pipeline takes of the device by itself."""
_ASKED = "_group_offload_asked"
"""The attribute of a pipeline that says how it was offloaded: its `PipelineOptions`."""


# ------------------------------------------------------------------------------------------------ pipelines


@dataclass(frozen=True, slots=True)
class PipelineOptions(NotCopied, OffloadOptions):
    """The options of `enable_group_offload`. A pipeline has them; its copies, which are not offloaded, have None.

    Raises:
        ConfigError: `exclude_modules` are no names, or `model_options` no options by the names of models.
    """

    vram_budget: int | str | None = field(default=FILL, kw_only=True)
    interleave_forwards: bool | str = field(default="auto", kw_only=True)
    exclude_modules: str | Iterable[str] | None = None
    model_options: Mapping[str, Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        names, special = self.exclude_modules, {} if self.model_options is None else self.model_options
        if names is None or isinstance(names, str):
            names = () if names is None else (names,)
        names = tuple(names) if isinstance(names, Iterable) else (None,)  # an iterator gives its names once
        if not all(isinstance(name, str) for name in names):
            raise ConfigError(
                f"exclude_modules={short(self.exclude_modules)}: expected names of models, such as ['vae']."
            )
        if not isinstance(special, Mapping) or not all(isinstance(options, Mapping) for options in special.values()):
            raise ConfigError(
                f"model_options={short(special)}: expected options by the names of models, such as "
                f"{{'vae': {{'offload_type': 'leaf_level'}}}}."
            )
        object.__setattr__(self, "exclude_modules", names)
        object.__setattr__(self, "model_options", {name: dict(options) for name, options in special.items()})


@dataclass(frozen=True, slots=True)
class LeastOptions(PipelineOptions):
    """Those of diffusers' own call, which takes the least memory by itself."""

    vram_budget: int | str | None = field(default=None, kw_only=True)
    interleave_forwards: bool | str = field(default=False, kw_only=True)


@takes_options(PipelineOptions)
def enable_group_offload(pipeline: Any, options: PipelineOptions, given: frozenset[str]) -> dict[str, OffloadHandle]:
    """Offload all models of a diffusers pipeline.

    Arguments are those of `pipe.enable_group_offload` (diffusers 0.42.1), with the defaults of `apply_group_offloading`,
    which explains the arguments that are not listed here.

    Args:
        pipeline: Any object with `components`, a dict from names to models and other parts. Models that are offloaded already
            are shared: call this again after a component was added, or for another pipeline with the same components. An
            option that is not given again stays as it was for this pipeline.
        exclude_modules: Names of models to move to the device as a whole instead.
        model_options: Other options for single models: `{"vae": {"offload_type": "leaf_level"}}`. Takes all options of
            `apply_group_offloading`.
        vram_budget: Device memory for the whole process. Models run one after another, so each may fill it. By default
            "auto" on an accelerator, unless `low_cpu_mem_usage` or `process_group` is given; None takes the least memory.
            Of a model whose two largest blocks take more than half of it, single layers are streamed, unless `offload_type`,
            `num_blocks_per_group` or `block_modules` is given.
        interleave_forwards: `"auto"` by default.
        ram_budget: RAM for the whole process. Models that run more often for an image get it first.

    Returns:
        The handle of each offloaded model, by its name in the pipeline.

    Raises:
        ConfigError: a name is no model of the pipeline, or an option is refused as by `apply_group_offloading`.
        ModuleError: a model says that it does not support group offloading, or is offloaded by accelerate.
        StateError: a model is offloaded with other options already, or a part of it is offloaded. Models that were
            offloaded by this call are restored.

    Example:
        >>> handles = enable_group_offload(pipe, offload_to_disk_path="/nvme/offload", exclude_modules="vae")
    """
    return offload_pipeline(pipeline, options, given)


def offload_pipeline(
    pipeline: Any,
    options: PipelineOptions,
    given: Collection[str],
    casts_of: Mapping[nn.Module, Mapping[str, torch.dtype]] = MappingProxyType({}),
    dropped: Collection[nn.Module] = (),
) -> dict[str, OffloadHandle]:
    """`enable_group_offload`, also for a pipeline that was just opened. If it fails, all models are what they were.

    Args:
        given: The names of the options that the caller gave.
        casts_of: Casts that are left to make, by model.
        dropped: Models that nobody else has. If this fails, they are not brought to RAM, but go with the pipeline.

    Returns:
        The handles of the models that are offloaded, by their names in the pipeline.
    """
    asked: PipelineOptions | None = getattr(pipeline, "__dict__", {}).get(_ASKED)
    if asked is not None:
        options = replace(asked, **{name: getattr(options, name) for name in given})
    offloaded, excluded, device = _plan(pipeline, options, given)
    with ExitStack() as undo:
        for planned in offloaded:
            model, casts = planned.model, casts_of.get(planned.model, {})
            if planned.shared is not None:  # it came offloaded; the pipeline may have cast it
                cast_now(model, casts)
                continue
            if model not in dropped:
                undo.callback(remove_group_offloading, model)
            offload(model, planned.config, casts, pipeline=pipeline)
        for model in excluded:
            if model not in dropped:
                undo.callback(_move_back, {each: each.device for each in (*model.parameters(), *model.buffers())})
            cast_now(model, casts_of.get(model, {}), device)
        models, mine = models_of(pipeline), {planned.model for planned in offloaded}
        put_in_order(pipeline, models)
        handles = {name: handle for name, handle in handles_of(pipeline).items() if models[name] in mine}
        for handle in handles.values():
            add_owner(handle, pipeline)
        undo.pop_all()
    if hasattr(pipeline, "__dict__"):
        vars(pipeline)[_ASKED] = options
    return handles


def _move_back(devices: Mapping[torch.Tensor, torch.device]) -> None:
    for tensor, device in devices.items():
        if tensor.device != device:
            tensor.data = moved(tensor.data, device)


@dataclass(frozen=True, slots=True)
class _Planned:
    """A model of a pipeline that is offloaded, or is to be."""

    names: list[str]
    model: nn.Module
    own: Mapping[str, Any]
    """The options that `model_options` give for it."""
    config: OffloadConfig
    shared: OffloadHandle | None
    """Its handle, if it is offloaded already."""

    def bytes_in_turn(self) -> int:
        """Bytes of device memory, about, that the model's weights take turns in."""
        try:
            groups = partition(self.model, self.config)
        except GroupOffloadError:
            return sys.maxsize  # offloaded first, the model raises this error first
        sizes = [sum(span_bytes(ref.tensor) for ref in group.tensors) for group in groups if not group.is_table]
        return sum(nlargest(self.config.num_slots, sizes))


_MOST_IN_TURN = 0.5
"""Blocks take turns in at most this share of the VRAM that weights may have. Single layers take less."""


def _plan(
    pipeline: Any, options: PipelineOptions, given: Collection[str]
) -> tuple[list[_Planned], list[nn.Module], torch.device]:
    """Decide what to do with each model of a pipeline. Nothing is touched.

    Returns:
        The models to offload, each once, in this order; those that go to the device as a whole; and that device.
    """
    excluded, special = cast(tuple[str, ...], options.exclude_modules), options.model_options or {}
    names: dict[nn.Module, list[str]] = {}
    for name, model in models_of(pipeline).items():
        names.setdefault(model, []).append(name)
    # Options of the last call may be for a model that is gone by now.
    special_now = special if "model_options" in given else {}
    _check_names(pipeline, names, excluded, special_now)
    named = {*special_now, *(excluded if "exclude_modules" in given else ())}
    parts = {part for model in names for part in model.modules() if part is not model}
    offloaded, whole = [], []
    for model, mine in names.items():
        if model in parts and not named.isdisjoint(mine):
            raise ConfigError(
                f"Give no options for {mine[0]}: it is part of another component, and goes where that goes."
            )
        if model in parts or _is_given_up(model):
            continue
        handle, own = handle_of(model), _own_options(mine, special)
        away = [name for name in mine if name in excluded]
        # Options of the last call are for models that are not offloaded yet.
        is_excluded = bool(away) and (handle is None or "exclude_modules" in given)
        config = _config_of(model, mine[0], options, {} if is_excluded else own)
        shared = shared_handle(
            handle,
            config,
            own.keys() if "model_options" in given else (),
            given_for_all=set(given) - {"exclude_modules", "model_options"},
            owner=pipeline,
            name=(away if is_excluded else mine)[0],
            is_excluded=is_excluded,
        )
        if not is_excluded:
            refuse_unsupported(model)
            offloaded.append(_Planned(mine, model, own, config, shared))
        elif shared is None:
            whole.append(model)
    names_of_common = ("onload_device", "vram_budget", "ram_budget", "offload_to_disk_path")
    common = OffloadConfig.from_options(ModelOptions(**{name: getattr(options, name) for name in names_of_common}))
    if common.ram_budget is not None:
        sharing = {each.names[0]: each.model for each in offloaded if "ram_budget" not in each.own}
        tables = set[int]().union(*(tables_of(each.model, each.config) for each in offloaded))
        shares = shares_of(sharing, common, tables)
        offloaded = [
            replace(each, config=replace(each.config, ram_quota_bytes=shares.get(each.names[0]))) for each in offloaded
        ]
    if common.vram_budget is not None:
        offloaded = _within(_room(common, whole), offloaded, given)
    return offloaded, whole, common.onload_device


def _within(room: int, offloaded: Iterable[_Planned], given: Collection[str]) -> list[_Planned]:
    """The same models. One takes turns in single layers where its blocks would leave activations too little of `room`."""
    found = []
    for planned in offloaded:
        in_turn = planned.bytes_in_turn()
        asked = {"offload_type", "num_blocks_per_group", "block_modules"} & {*given, *planned.own}
        if in_turn > room * _MOST_IN_TURN and planned.shared is None and not asked:
            logger.info(
                "%s: streaming single layers (offload_type='leaf_level'), since two blocks take %s of %s of VRAM.",
                planned.names[0],
                describe_bytes(in_turn),
                describe_bytes(room),
            )
            planned = replace(planned, config=replace(planned.config, offload_type=OffloadType.LEAF_LEVEL))
            in_turn = planned.bytes_in_turn()
        found.append((in_turn, planned))
    # If the budget is too small, the error is about the model that needs most of it, and names enough for all models.
    return [planned for _, planned in sorted(found, key=lambda each: each[0], reverse=True)]


def _room(config: OffloadConfig, whole: Iterable[nn.Module]) -> int:
    """The VRAM that weights may have, beside the models that go to the device as a whole."""
    backend, budget = config.backend, config.vram_budget
    if not backend.has_streams:
        return sys.maxsize  # the device is RAM, and weights there are used in place
    room = backend.free_bytes() + backend.reserved_bytes()
    tensors = [tensor for model in whole for tensor in (*model.parameters(), *model.buffers())]
    coming = sum(tensor.nbytes for tensor in tensors if tensor.device != config.onload_device)
    return max(0, (min(room, budget) if isinstance(budget, int) else room) - coming)


def _is_given_up(model: nn.Module) -> bool:
    """Whether a model has no weights any more (`to("meta")`), or never had any. accelerate keeps those that it takes."""
    is_meta = all(tensor.device.type == "meta" for tensor in (*model.parameters(), *model.buffers()))
    return is_meta and not any("_hf_hook" in vars(part) for part in model.modules())


def disable_group_offload(pipeline: Any) -> None:
    """Undo `enable_group_offload` for every model of a pipeline: its weights get separate memory again, where they were.

    Models that were put into another one since (a ControlNet into a `MultiControlNetModel`) are among them. A model that
    another pipeline offloads too, or that was offloaded by a call of its own, stays offloaded, and the log says so. In
    a forward of one of them none is restored: StateError.
    """
    parts = [(name, part) for name, model in models_of(pipeline).items() for part in model.modules()]
    offloaded = [(name, part, handle) for name, part in parts if (handle := handle_of(part)) is not None]
    for *_, handle in offloaded:
        if all(owner is pipeline for owner in owners_of(handle)):
            handle._live.check_idle()
    for name, part, handle in offloaded:
        left = release(handle, pipeline)
        if left:
            undo = how_to_undo(left, pipeline, part, name)
            logger.warning("%s (%s) stays offloaded. To restore it, call %s.", name, type(part).__name__, undo)
    getattr(pipeline, "__dict__", {}).pop(_ASKED, None)


def handles_of(pipeline: Any) -> dict[str, OffloadHandle]:
    """The handles of a pipeline's offloaded models, by their names in the pipeline.

    These are the ones that `enable_group_offload` returned; `from_pretrained` returns the pipeline instead.

    Raises:
        ConfigError: `pipeline` has no components. `handle_of` is for a single model.

    Example:
        >>> pipe = from_pretrained(FluxPipeline, "black-forest-labs/FLUX.1-dev", dtype=torch.bfloat16)
        >>> print(handles_of(pipe)["transformer"].stats())
    """
    return {name: handle for name, model in models_of(pipeline).items() if (handle := handle_of(model)) is not None}


def models_of(pipeline: Any) -> dict[str, nn.Module]:
    components = getattr(pipeline, "components", None)
    if not isinstance(components, Mapping):
        hint = "For a single model, use apply_group_offloading(), remove_group_offloading() or handle_of()."
        if isinstance(pipeline, (type, str, os.PathLike)):
            hint = "Load it first: from_pretrained(CLASS, NAME) of group_offload opens a pipeline offloaded."
        raise ConfigError(f"Expected a diffusers pipeline, got {short(pipeline)}. {hint}")
    return {name: part for name, part in components.items() if isinstance(part, nn.Module)}


def _check_names(
    pipeline: Any, names: Mapping[nn.Module, Sequence[str]], excluded: Sequence[str], special: Mapping[str, Any]
) -> None:
    """Refuse names and options that there are not. `names` are those of each model."""
    known_names = [name for mine in names.values() for name in mine]
    for name in excluded:
        if name not in pipeline.components:  # diffusers lets it pass: one list may serve several pipelines
            hint = did_you_mean(name, known_names)
            logger.warning("Ignoring %r in exclude_modules: the pipeline has no such component.%s", name, hint)
    known = {field.name for field in fields(ModelOptions)}
    for name, options in special.items():
        if name not in known_names:
            raise ConfigError(
                f"model_options: the pipeline has no model {name!r}.{did_you_mean(name, known_names)} Models: "
                f"{', '.join(sorted(known_names))}."
            )
        for unknown in sorted(set(options) - known, key=str):
            raise ConfigError(
                f"model_options[{name!r}]: no such option: {unknown!r}.{did_you_mean(unknown, known)} Options: "
                f"{', '.join(sorted(known))}."
            )
    both = sorted(name for mine in names.values() if {*mine} & {*excluded} and {*mine} & {*special} for name in mine)
    if both:
        raise ConfigError(f"{both} are in exclude_modules and in model_options. Leave them in one of the two.")


def _own_options(names: Sequence[str], special: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """What `model_options` say of one model, by any of its names."""
    own, *others = [special[name] for name in names if name in special] or [{}]
    for other in others:
        if other != own:
            raise ConfigError(
                f"model_options: {' and '.join(names)} are names of one model, which can't have both {short(own)} and "
                f"{short(other)}. Give options for one of its names."
            )
    return own


def _config_of(model: nn.Module, name: str, common: PipelineOptions, own: Mapping[str, Any]) -> OffloadConfig:
    """The checked options of one model. An error names it if it is about one of its `own`."""
    options = {field.name: getattr(common, field.name) for field in fields(OffloadOptions)}
    if own.get("offload_type") in ("leaf_level", OffloadType.LEAF_LEVEL):
        options["num_blocks_per_group"] = None  # a count of blocks for all models has no meaning for single layers
    try:
        # The name is in the prefix, so two models of one class have different files in one folder.
        return OffloadConfig.from_options(ModelOptions(**{**options, **own}), model, group_prefix=f"{name}.")
    except (ConfigError, DeviceError) as error:
        if not any(option in str(error) for option in own):
            raise
        raise type(error)(f"model_options[{name!r}]: {error}") from error


def refuse_unsupported(model: nn.Module) -> None:
    """Refuse a class that says so, unless it is diffusers' own: those run bit-equal, as docs/compatibility.md shows."""
    kind = type(model)
    is_of_diffusers = kind.__module__.startswith("diffusers.")
    if getattr(model, "_supports_group_offloading", True) is False and not is_of_diffusers:
        raise ModuleError(
            f"{kind.__name__} doesn't support group offloading (_supports_group_offloading is False). Pass its component "
            f"name in exclude_modules."
        )


# ------------------------------------------------------------------------------------------------ what diffusers sees


class _Diffusers(Listener):
    """Lets diffusers see which modules are offloaded, if it is imported, and serves its modular pipelines.

    See [Note: What diffusers looks at].
    """

    def applying(self, module: nn.Module) -> None:
        for name, part in module.named_modules():
            registry = part.__dict__.get("_diffusers_hook")
            if registry is not None and registry.get_hook(HOOK_NAME) is not None:
                raise StateError(
                    f"{name and f'{name} of '}{type(module).__name__} already uses diffusers' group offloading, which can't be "
                    f"removed. Reload the model, then call enable_group_offload() or patch_diffusers()."
                )

    def applied(self, handle: OffloadHandle) -> None:
        if "diffusers" in sys.modules:
            _install_seams()
            hear_managers()
            registry = vars(handle.module).get("_diffusers_hook")
            if registry is None or not registry.hooks:
                vars(handle.module)["_diffusers_hook"] = _weak_registry_class()(handle.module)
            hear_guiders(handle)

    def removed(self, handle: OffloadHandle) -> None:
        registry = vars(handle.module).get("_diffusers_hook")
        if registry is not None and not registry.hooks:
            del vars(handle.module)["_diffusers_hook"]

    def before_forward(self, module: nn.Module, inputs: Mapping[str, Any]) -> None:
        make_room(module)
        registry, prompt = module.__dict__.get("_diffusers_hook"), inputs.get("encoder_hidden_states")
        if registry is None or prompt is None or _TEXT_KV_CACHE not in registry.hooks:
            return
        handle = handle_of(module)
        if handle is not None and prompt.device != handle.config.onload_device:
            raise StateError(
                f"{type(module).__name__} has a text K/V cache, which tells prompts apart by their addresses, and "
                f"encoder_hidden_states is on {prompt.device}: another prompt could get the address of this one. Pass "
                f"encoder_hidden_states on {handle.config.onload_device}, or call disable_cache()."
            )


@dataclass(frozen=True)
class OffloadMarker:
    """What diffusers gets as the hook of an offloaded module, and as the config of that hook: it reads the device."""

    onload_device: torch.device
    handle: OffloadHandle

    @property
    def config(self) -> OffloadMarker:
        return self


def _marker_of(module: nn.Module) -> OffloadMarker | None:
    """The marker of an offloaded module, of a part of one, or of a module that has one inside."""
    root = root_of(module)
    if root is None:
        root = next((part for part in module.modules() if part.__dict__.get(HANDLE) is not None), None)
    handle = None if root is None else handle_of(root)
    return None if handle is None or not handle.is_active else OffloadMarker(handle.config.onload_device, handle)


@cache
def _weak_registry_class() -> type:
    base = importlib.import_module("diffusers.hooks.hooks").HookRegistry

    class WeakHookRegistry(base):  # type: ignore[misc, valid-type]
        """A hook registry that does not keep its module alive.

        diffusers gives an empty registry to each model that a pipeline calls, or loads a LoRA for. Such a model would keep its
        weights until garbage is collected.
        """

        _module_ref = Weak[nn.Module]()

        def __reduce_ex__(self, protocol: Any) -> Any:
            state = {name: value for name, value in self.__dict__.items() if name != "_weak__module_ref"}
            return copyreg._reconstructor, (base, object, None), {**state, "_module_ref": self._module_ref}  # type: ignore[attr-defined]

    return WeakHookRegistry


# ------------------------------------------------------------------------------------------------ diffusers' own calls


def patch_diffusers() -> None:
    """Let diffusers' own group offloading run on this engine from now on, wherever it was imported.

    `pipe.enable_group_offload(...)`, `model.enable_group_offload(...)` and `diffusers.hooks.apply_group_offloading(...)`
    then take the arguments of this package (all can be left out) and return handles; without a `vram_budget` they take the
    least device memory. `disable_group_offload()` is added. Repeated calls do nothing. `unpatch_diffusers` undoes this.

    Raises:
        ImportError: diffusers is not installed.
    """
    global _patches
    if _patches is not None:
        return
    try:
        import diffusers
    except ImportError as error:
        raise ImportError("patch_diffusers() needs diffusers: pip install 'group-offload[diffusers]'") from error
    from diffusers.models.modeling_utils import ModelMixin

    _install_seams()
    _patches = ExitStack()
    _swap_code(_patches, diffusers.hooks.apply_group_offloading, _apply_trampoline, apply_group_offloading)
    swap(_patches, ModelMixin, "enable_group_offload", _enable_on_model)
    swap(_patches, ModelMixin, "disable_group_offload", remove_group_offloading)
    swap(_patches, diffusers.DiffusionPipeline, "enable_group_offload", _enable_on_pipeline)
    swap(_patches, diffusers.DiffusionPipeline, "disable_group_offload", disable_group_offload)


def unpatch_diffusers() -> None:
    """Undo `patch_diffusers`. Offloaded modules stay offloaded. Does nothing if diffusers is not patched."""
    global _patches
    if _patches is not None:
        _patches.close()
    _patches = None


_patches: ExitStack | None = None


def _apply_trampoline(*args, **kwargs):  # type: ignore[no-untyped-def]
    """The code for `diffusers.hooks.apply_group_offloading`. It runs with diffusers' globals."""
    from group_offload.api import apply_group_offloading

    return apply_group_offloading(*args, **kwargs)


@takes_options(LeastOptions)
def _enable_on_pipeline(pipeline: Any, options: PipelineOptions, given: frozenset[str]) -> dict[str, OffloadHandle]:
    return offload_pipeline(pipeline, options, given)


@wraps(apply_group_offloading)
def _enable_on_model(model: nn.Module, *args: Any, **kwargs: Any) -> OffloadHandle:
    refuse_unsupported(model)
    return apply_group_offloading(model, *args, **kwargs)


def _install_seams() -> None:
    """Replace what [Note: What diffusers looks at] says, and `to` of pipelines and models, once for the process."""
    for module_name, class_name in _WITH_TO:
        kind = getattr(sys.modules.get(module_name), class_name, None)
        if kind is not None:
            around_once(kind, "to", _move)
    offloading: Any = importlib.import_module("diffusers.hooks.group_offloading")
    name = "_get_top_level_group_offload_hook"
    around_once(offloading, name, lambda find, module: _marker_of(module) or find(module))
    around_once(offloading, "_apply_group_offloading", _apply)


def _apply(apply: Callable[..., Any], module: nn.Module, config: Any) -> None:
    if isinstance(config, OffloadMarker):
        try:
            config.handle.refresh()
        except ModuleError as error:
            # The rest of diffusers' own call is what the user asked for. (A LoRA that lacks some weights loads.)
            logger.warning("%s cannot run like this: %s The next forward raises this.", type(module).__name__, error)
    elif any(root_of(part) is not None for part in module.modules()):
        raise StateError(
            f"{type(module).__name__}, or a part of it, is already offloaded by group_offload. Call "
            f"remove_group_offloading() on the module that you offloaded first."
        )
    else:
        apply(module, config)


_WITH_TO = (
    ("diffusers.pipelines.pipeline_utils", "DiffusionPipeline"),
    ("diffusers.modular_pipelines.modular_pipeline", "ModularPipeline"),
    ("diffusers.models.modeling_utils", "ModelMixin"),
)
"""Classes of diffusers whose `to` leaves what is offloaded where it is."""


def _move(to: Callable[..., Any], target: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of `to`: on the meta device offloaded models are given up, others are cast, and a cast of a pipeline says which
    it left."""
    given = (*args, *kwargs.values())
    is_model = isinstance(target, nn.Module)
    handles = {"": handle_of(target)} if is_model else handles_of(target)
    models = {name: handle.module for name, handle in handles.items() if handle is not None}
    if any(str(each).startswith("meta") for each in given if isinstance(each, (str, torch.device))):
        for model in models.values():
            nn.Module.to(model, "meta")
        if is_model and models:
            return target  # diffusers' own `to` would say that it can't move it
    result = to(target, *args, **kwargs)
    dtype = next((each for each in given if isinstance(each, torch.dtype)), None)
    if is_model and dtype is not None and _marker_of(target) is not None:
        return nn.Module.to(target, dtype)  # with a device, diffusers leaves out the cast too
    kept = [name for name, model in models.items() if getattr(model, "dtype", dtype) != dtype]
    if kept and dtype is not None and not is_model:
        logger.warning(
            "to(), which from_pipe() calls with torch.float32 by default, casts no offloaded model: the dtype of %s "
            "stays. To cast one, call pipe.%s.to(%s).",
            *(", ".join(kept), kept[0], dtype),
        )
    return result


def _swap_code(undo: ExitStack, function: Any, replacement: Any, signature_of: Any) -> None:
    """Give a function the code of `replacement` until `undo` is closed.

    Setting the attribute of diffusers' module would not do: `from diffusers.hooks import apply_group_offloading` in another
    module, at any time before, made a name there that still leads to the old function. All these names lead to one function
    object, and a function object runs its `__code__` with its `__defaults__` and `__kwdefaults__`. So these three are
    exchanged, and every name runs the new code, in the globals of diffusers' module: `replacement` has to import what it
    uses. The function object stays the same, so comparisons with `is` and pickles of its name hold.
    """
    for name in ("__code__", "__defaults__", "__kwdefaults__"):
        undo.callback(setattr, function, name, getattr(function, name))
        setattr(function, name, getattr(replacement, name))
    undo.callback(delattr, function, "__wrapped__")
    function.__wrapped__ = signature_of


listeners.append(_Diffusers())
