"""diffusers: whole pipelines offloaded, and diffusers' own calls running on this engine.

[Note: What diffusers looks at]
diffusers takes a model for group-offloaded if a hook named "group_offloading" is in the hook registries of its modules;
`.device`, `pipe._execution_device`, `pipe.to` and the guards of the other offload modes ask this. So every offloaded module
with a gate carries a *marker* of that name, with diffusers' own config in it. A marker wraps no `forward` and is not in the
registry's chain of hooks, so registering or removing other hooks cannot undo it.

After it has loaded or removed a LoRA, diffusers takes the hooks off and applies them again, through
`diffusers.hooks.group_offloading._apply_group_offloading`. That function is replaced, once, by one that sends a marker's
config to the engine it belongs to and everything else where it went before.
"""

from __future__ import annotations

import importlib
import logging
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial, wraps
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..api import apply_group_offloading, handle_of, offload, remove_group_offloading
from ..base.arena import moved, retried
from ..base.compiled import is_compiled
from ..base.text import did_you_mean
from ..base.weak import Weak
from ..config import ModelOptions, OffloadConfig, OffloadOptions, OffloadType, takes_options
from ..errors import ConfigError, GroupOffloadError, ModuleError, StateError
from ..handle import Listener, OffloadHandle, add_listener
from ..owners import add_owner, how_to_undo, release, shared_handle
from ..partition import tables_of
from ..plan.budgets import Default
from ..runtime.gates import is_offloaded
from ..runtime.memory import bytes_in_turn
from .modular import LISTENERS
from .sharing import put_in_order, shares_of

logger = logging.getLogger("group_offload")

HOOK_NAME = "group_offloading"
_TEXT_KV_CACHE = "text_kv_cache_transformer"
_SEAM = "_apply_group_offloading"
_PIPELINE_CLASSES = {
    "diffusers.pipelines.pipeline_utils": "DiffusionPipeline",
    "diffusers.modular_pipelines.modular_pipeline": "ModularPipeline",
}
FILL = Default("auto")
"""What a pipeline takes of the device by itself."""
_ASKED = "_group_offload_asked"
"""The attribute of a pipeline that says how it was offloaded: an `_Asked`."""


# ------------------------------------------------------------------------------------------------ pipelines


@dataclass(frozen=True, slots=True)
class PipelineOptions(OffloadOptions):
    """The options of `enable_group_offload`."""

    vram_budget: int | str | None = field(default=FILL, kw_only=True)
    exclude_modules: str | Iterable[str] | None = None
    model_options: Mapping[str, Mapping[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class LeastOptions(PipelineOptions):
    """Those of diffusers' own call, which takes the least memory by itself."""

    vram_budget: int | str | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What was asked for a pipeline."""

    options: PipelineOptions
    models: weakref.WeakSet[nn.Module]
    """The models that the pipeline had then, and those that were reported since."""

    # A copy of the pipeline, or the pipeline read back from a pickle, is not offloaded.
    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


@takes_options(PipelineOptions)
def enable_group_offload(pipeline: Any, options: PipelineOptions, given: frozenset[str]) -> dict[str, OffloadHandle]:
    """Offload all models of a diffusers pipeline.

    Arguments are those of `pipe.enable_group_offload` (diffusers 0.42.1), with the defaults of `apply_group_offloading`,
    which explains the arguments that are not listed here.

    Args:
        pipeline: Any object with `components`, a dict from names to models and other parts. Models that are offloaded already
            are shared: call this again after a component was added, or for another pipeline with the same components. An
            option that is not given again stays as it was for this pipeline.
        exclude_modules: Names of models that are moved to the device as a whole instead.
        model_options: Options of single models that differ: `{"vae": {"offload_type": "leaf_level"}}`. All options of
            `apply_group_offloading` are possible.
        vram_budget: Device memory for the whole process. Models run one after another, so each may fill it. By default
            "auto" on an accelerator, unless `low_cpu_mem_usage` or `process_group` is given; None takes the least memory.
        ram_budget: RAM for the whole process. It is shared out by how often a model runs for an image.

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
    return _enable(pipeline, options, given)


def _enable(pipeline: Any, options: PipelineOptions, given: frozenset[str]) -> dict[str, OffloadHandle]:
    asked: _Asked | None = getattr(pipeline, "__dict__", {}).get(_ASKED)
    if asked is not None:
        options = replace(asked.options, **{name: getattr(options, name) for name in given})
    options = replace(options, exclude_modules=as_excluded(options.exclude_modules))  # an iterator gives its names once
    plan = plan_pipeline(pipeline, options, given)
    with undone_on_error() as undo:
        for planned in plan.offloaded:
            if planned.shared is None:
                undo.callback(remove_group_offloading, planned.model)
                planned.offload()
        for model in plan.excluded:
            undo.callback(move_back, devices_of(model))
            retried(plan.device, partial(model.to, plan.device), sum(each.nbytes for each in devices_of(model)))
        return own_models(pipeline, plan)


def own_models(pipeline: Any, plan: PipelinePlan) -> dict[str, OffloadHandle]:
    """Make a pipeline an owner of its offloaded models, once all of them are offloaded, and return their handles by name."""
    models = models_of(pipeline)
    put_in_order(pipeline, models)
    for planned in plan.offloaded:
        handle = handle_of(planned.model)
        assert handle is not None
        add_owner(handle, pipeline)
    if hasattr(pipeline, "__dict__"):
        vars(pipeline)[_ASKED] = _Asked(plan.options, weakref.WeakSet(models.values()))
    planned_ids = {id(planned.model) for planned in plan.offloaded}
    return {name: handle for name, handle in handles_of(pipeline).items() if id(models[name]) in planned_ids}


@contextmanager
def undone_on_error() -> Iterator[ExitStack]:
    """A stack whose callbacks run only if the block raises."""
    with ExitStack() as undo:
        yield undo
        undo.pop_all()


def devices_of(model: nn.Module) -> dict[torch.Tensor, torch.device]:
    """The parameters and buffers of a model, each with its device: an argument for `move_back`."""
    return {tensor: tensor.device for tensor in (*model.parameters(), *model.buffers())}


def move_back(devices: Mapping[torch.Tensor, torch.device]) -> None:
    for tensor, device in devices.items():
        if tensor.device != device:
            tensor.data = moved(tensor.data, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """A model of a pipeline and its arguments of `offload`."""

    model: nn.Module
    options: ModelOptions
    group_prefix: str
    ram_share: int | None = None
    shared: OffloadHandle | None = None
    """Its handle, if it is offloaded already."""

    def offload(self, casts: Mapping[str, torch.dtype] | None = None) -> OffloadHandle:
        return offload(self.model, self.options, group_prefix=self.group_prefix, ram_share=self.ram_share, casts=casts)

    @property
    def tables(self) -> set[int]:
        """The ids of embedding tables that will stay where they rest."""
        try:
            return tables_of(self.model, OffloadConfig.from_options(self.options), is_compiled)
        except GroupOffloadError:
            return set()  # offloaded, the model raises this error

    @property
    def bytes_in_turn(self) -> int:
        """Bytes of device memory, about, that the model's weights take turns in."""
        try:
            return bytes_in_turn(self.model, OffloadConfig.from_options(self.options, group_prefix=self.group_prefix))
        except GroupOffloadError:
            return sys.maxsize  # offloaded first, the model raises this error first


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """The decision for each model of a pipeline."""

    options: PipelineOptions
    offloaded: tuple[PlannedModel, ...]
    """The models to offload, each once, in this order."""
    excluded: tuple[nn.Module, ...]
    """The models that go to `device` as a whole, as nobody has offloaded them."""
    device: torch.device


def plan_pipeline(pipeline: Any, options: PipelineOptions, given: Collection[str]) -> PipelinePlan:
    """Decide what `enable_group_offload` does. Nothing is touched.

    Args:
        given: The names of the options that the caller gave.
    """
    models = models_of(pipeline)
    excluded = as_excluded(options.exclude_modules)
    special = as_options_by_model(options.model_options)
    # Options of the last call may be for a model that is gone by now.
    _check_names(pipeline, models, excluded, special if "model_options" in given else {})
    offloaded, whole = {}, []
    away = {id(models[name]) for name in excluded if name in models}
    for name, model in models.items():
        handle, model_options = handle_of(model), _options_for(options, special.get(name, {}))
        # Options of the last call are for models that are not offloaded yet.
        is_excluded = id(model) in away and (handle is None or "exclude_modules" in given)
        if _is_given_up(model) or (is_excluded and name not in excluded):  # it has another name
            continue
        shared = shared_handle(
            handle,
            model_options,
            special.get(name, {}).keys() if "model_options" in given else (),
            given_for_all=set(given) - {"exclude_modules", "model_options"},
            owner=pipeline,
            name=name,
            is_excluded=is_excluded,
        )
        if is_excluded:
            whole += [model] if shared is None else []
            continue
        refuse_unsupported(model)
        # The name is in the prefix, so two models of one class have different files in one folder.
        offloaded[name] = PlannedModel(model=model, options=model_options, group_prefix=f"{name}.", shared=shared)
    common = OffloadConfig.from_options(
        ModelOptions(onload_device=options.onload_device, vram_budget=options.vram_budget)
    )
    if options.ram_budget is not None:
        shares = shares_of(
            {name: planned.model for name, planned in offloaded.items() if "ram_budget" not in special.get(name, {})},
            options.ram_budget,
            options.vram_budget,
            has_folder=options.offload_to_disk_path is not None,
            has_device=common.backend.has_streams,
            tables=set[int]().union(*(planned.tables for planned in offloaded.values())),
        )
        offloaded |= {name: replace(offloaded[name], ram_share=share) for name, share in shares.items()}
    distinct: dict[int, PlannedModel] = {}
    for planned in offloaded.values():
        distinct.setdefault(id(planned.model), planned)  # a model may have two names
    order = list(distinct.values())
    if common.vram_budget is not None:
        # If the budget is too small, the error is about the model that needs most of it, and names enough for all models.
        order.sort(key=lambda planned: planned.bytes_in_turn, reverse=True)
    return PipelinePlan(
        options=options,
        offloaded=tuple(order),
        excluded=tuple(whole),
        device=common.onload_device,
    )


def _is_given_up(model: nn.Module) -> bool:
    """Whether a model has no weights any more (`to("meta")`), or never had any. accelerate keeps those that it takes."""
    tensors = (*model.parameters(), *model.buffers())
    is_meta = all(tensor.device.type == "meta" for tensor in tensors)
    return is_meta and not any("_hf_hook" in vars(part) for part in model.modules())


def disable_group_offload(pipeline: Any) -> None:
    """Undo `enable_group_offload` for every model of a pipeline: its weights get separate memory again, where they were.

    Models that were put into another one since (a ControlNet into a `MultiControlNetModel`) are among them. A model that
    another pipeline offloads too, or that was offloaded by a call of its own, stays offloaded, and the log says so.
    """
    for name, model in models_of(pipeline).items():
        for part in [*model.modules()]:
            handle = handle_of(part)
            left = [] if handle is None else release(handle, pipeline)
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
        raise ConfigError(
            f"Expected a diffusers pipeline, got {type(pipeline).__name__}. For a single model, use apply_group_offloading(), "
            f"remove_group_offloading() or handle_of()."
        )
    return {name: part for name, part in components.items() if isinstance(part, nn.Module)}


def as_excluded(value: Any) -> tuple[str, ...]:
    """The names in `exclude_modules`.

    Raises:
        ConfigError: it is something else.
    """
    if value is None:
        return ()
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (None,)
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"exclude_modules={value!r:.80}: expected names of models, such as ['vae'].")
    return names


def as_options_by_model(value: Any) -> dict[str, dict[str, Any]]:
    """The options in `model_options`, by the names of models.

    Raises:
        ConfigError: it is something else.
    """
    given = {} if value is None else value
    if not isinstance(given, Mapping) or not all(isinstance(options, Mapping) for options in given.values()):
        raise ConfigError(
            f"model_options={value!r:.80}: expected options by the names of models, such as "
            f"{{'vae': {{'offload_type': 'leaf_level'}}}}."
        )
    return {name: dict(options) for name, options in given.items()}


def _check_names(
    pipeline: Any, models: Mapping[str, nn.Module], excluded: Sequence[str], special: Mapping[str, Any]
) -> None:
    for name in excluded:
        if name not in pipeline.components:  # diffusers lets it pass: one list may serve several pipelines
            hint = did_you_mean(name, models)
            logger.warning("Ignoring %r in exclude_modules: the pipeline has no such component.%s", name, hint)
    known = {field.name for field in fields(ModelOptions)}
    for name, options in special.items():
        if name not in models:
            raise ConfigError(
                f"model_options: the pipeline has no model {name!r}.{did_you_mean(name, models)} Models: "
                f"{', '.join(sorted(models))}."
            )
        unknown = sorted(set(options) - known, key=str)
        if unknown:
            raise ConfigError(
                f"model_options[{name!r}]: no such option: {unknown[0]!r}.{did_you_mean(unknown[0], known)} Options: "
                f"{', '.join(sorted(known))}."
            )
    names = {id(model): {each for each in models if models[each] is model} for model in models.values()}
    both = sorted(name for each in names.values() if each & set(excluded) and each & set(special) for name in each)
    if both:
        raise ConfigError(f"{both} are in exclude_modules and in model_options. Leave them in one of the two.")


def _options_for(common: PipelineOptions, special: Mapping[str, Any]) -> ModelOptions:
    """The options of one model. A count of blocks for all models has no meaning for a model that is cut into layers."""
    options = {field.name: getattr(common, field.name) for field in fields(OffloadOptions)}
    if special.get("offload_type") in ("leaf_level", OffloadType.LEAF_LEVEL):
        options["num_blocks_per_group"] = None
    return ModelOptions(**{**options, **special})


_RUN_HERE = frozenset(
    [
        "AutoencoderKLKVAEAudio",
        "AutoencoderKLMiniMaxH3Audio",
        "AutoencoderOobleck",
        "AutoencoderSAME",
        "ConsistencyDecoderVAE",
        "Cosmos3AVAEAudioTokenizer",
        "DiTTransformer2DModel",
        "HunyuanDiT2DModel",
        "LongCatAudioDiTVae",
        "VQModel",
    ]
)
"""Classes that say they do not support group offloading, and run bit-equal at both levels: docs/support-matrix.md."""


def refuse_unsupported(model: nn.Module) -> None:
    name = type(model).__name__
    if getattr(model, "_supports_group_offloading", True) is False and name not in _RUN_HERE:
        raise ModuleError(
            f"{name} doesn't support group offloading (_supports_group_offloading is False). Pass its component name in "
            f"exclude_modules."
        )


# ------------------------------------------------------------------------------------------------ markers


class _Markers(Listener):
    """Marks offloaded modules for diffusers, if diffusers is imported. See [Note: What diffusers looks at]."""

    def applying(self, module: nn.Module) -> None:
        for name, part in module.named_modules():
            registry = part.__dict__.get("_diffusers_hook")
            if registry is not None and type(registry) is _marked_registry_class() and not is_offloaded(part):
                _unmark(registry)  # the model that it was a part of is gone
            elif registry is not None and registry.get_hook(HOOK_NAME) is not None:
                raise StateError(
                    f"{name and f'{name} of '}{type(module).__name__} already uses diffusers' group offloading, which can't be "
                    f"removed. Reload the model, then call enable_group_offload() or patch_diffusers()."
                )

    def applied(self, handle: OffloadHandle) -> None:
        if "diffusers" in sys.modules:
            _install_seam()
            _mark(handle)

    def before_forward(self, module: nn.Module, inputs: Mapping[str, Any]) -> None:
        _warn_of_added(module)
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

    def removed(self, handle: OffloadHandle) -> None:
        if "diffusers" in sys.modules:
            _unmark_all(handle.module)


def _warn_of_added(module: nn.Module) -> None:
    """Say once which models were added to the pipelines of an offloaded model, and are still on the CPU."""
    handle = handle_of(module)
    if handle is None or handle.config.onload_device.type == "cpu":
        return
    for ref in handle.owners:
        pipeline = ref()
        attributes = getattr(pipeline, "__dict__", {})
        asked: _Asked | None = attributes.get(_ASKED)
        if asked is None:
            continue
        for name, part in [*attributes.items()]:
            if not isinstance(part, nn.Module) or part in asked.models:
                continue
            asked.models.add(part)
            weight = next(part.parameters(), None)
            if weight is not None and weight.device.type == "cpu" and not is_offloaded(part):
                logger.warning(
                    "%s (%s) was added to the %s after it was offloaded, and is on the CPU. To offload it too, call "
                    "enable_group_offload(pipe) again.",
                    *(name, type(part).__name__, type(pipeline).__name__),
                )


def _mark(handle: OffloadHandle) -> None:
    config = _as_diffusers_config(handle)
    for module in handle.gated_modules:
        registry: Any = module.__dict__.get("_diffusers_hook")
        if registry is None:
            registry = _marked_registry_class()(module)
            registry.was_made_for_marker = True
            module.__dict__["_diffusers_hook"] = registry
        if not isinstance(registry, _marked_registry_class()):
            registry.__class__ = _marked_registry_class()
            registry._module_ref = registry.__dict__.pop("_module_ref")
        registry.hooks[HOOK_NAME] = _marker_class()(config)
        _forget_children(registry)


def _new_registry() -> Any:
    base = _hooks_module().HookRegistry
    return base.__new__(base)


def _forget_children(registry: Any) -> None:
    """A registry keeps a list of those below it, which are other ones from now on: contexts of caches go by the list."""
    registry._child_registries_cache = None


def _unmark_all(model: nn.Module) -> None:
    for module in model.modules():
        registry = module.__dict__.get("_diffusers_hook")
        if type(registry) is _marked_registry_class():
            _unmark(registry)


def _unmark(registry: Any) -> None:
    registry.hooks.pop(HOOK_NAME, None)
    _forget_children(registry)
    module = registry._module_ref
    registry.__class__ = _hooks_module().HookRegistry
    registry.__dict__.pop("_weak__module_ref")
    registry._module_ref = module
    if registry.__dict__.pop("was_made_for_marker", False) and not registry.hooks:
        del module.__dict__["_diffusers_hook"]


def _as_diffusers_config(handle: OffloadHandle) -> Any:
    config = handle.config
    found = _offloading_module().GroupOffloadingConfig(
        onload_device=config.onload_device,
        offload_device=torch.device("cpu"),
        offload_type=_offloading_module().GroupOffloadingType(config.offload_type.value),
        non_blocking=config.non_blocking,
        record_stream=config.record_stream,
        low_cpu_mem_usage=config.low_cpu_mem_usage,
        num_blocks_per_group=config.num_blocks_per_group,
        offload_to_disk_path=None if config.offload_to_disk_path is None else str(config.offload_to_disk_path),
        block_modules=None if config.block_modules is None else list(config.block_modules),
        exclude_kwargs=list(config.exclude_kwargs),
    )
    found.group_offload_handle = weakref.ref(handle)
    return found


@cache
def _marker_class() -> type:
    base = _hooks_module().ModelHook

    class GroupOffloadMarker(base):  # type: ignore[misc, valid-type]
        """Tells diffusers that a module is group-offloaded, and to which device. Does nothing else."""

        def __init__(self, config: Any) -> None:
            super().__init__()
            self.config = config

    return GroupOffloadMarker


@cache
def _marked_registry_class() -> type:
    base = _hooks_module().HookRegistry

    class MarkedHookRegistry(base):  # type: ignore[misc, valid-type]
        """A hook registry with a marker beside its chain of hooks."""

        was_made_for_marker = False
        _module_ref = Weak[nn.Module]()  # the module has the registry

        def remove_hook(self, name: str, recurse: bool = True) -> None:
            if name in self.hooks and name == HOOK_NAME:
                del self.hooks[name]  # the marker is in no chain, so no chain has to be closed
            super().remove_hook(name, recurse)

        def __reduce_ex__(self, protocol: Any) -> Any:
            # A copy of an offloaded module, or a module that is read back from a pickle, is not offloaded.
            own = ("was_made_for_marker", "_weak__module_ref")
            state = {name: value for name, value in self.__dict__.items() if name not in own}
            state["_module_ref"] = self._module_ref
            state["hooks"] = {name: hook for name, hook in self.hooks.items() if name != HOOK_NAME}
            return _new_registry, (), state

    return MarkedHookRegistry


# ------------------------------------------------------------------------------------------------ diffusers' own calls


def patch_diffusers() -> None:
    """Let diffusers' own group offloading run on this engine from now on, wherever it was imported.

    `pipe.enable_group_offload(...)`, `model.enable_group_offload(...)` and `diffusers.hooks.apply_group_offloading(...)`
    then take the arguments of this package (all can be left out) and return handles; without a `vram_budget` they take the
    least device memory. `disable_group_offload()` is added. Modular pipelines get both calls; components that they load later
    are offloaded as the others were. Repeated calls do nothing. `unpatch_diffusers` undoes this.

    Raises:
        ImportError: diffusers is not installed.
    """
    global _restore
    if _restore is not None:
        return
    try:
        import diffusers
    except ImportError as error:
        raise ImportError("patch_diffusers() needs diffusers: pip install 'group-offload[diffusers]'") from error
    from diffusers.models.modeling_utils import ModelMixin

    _install_seam()
    undo = [
        _swap_code(_offloading_module().apply_group_offloading, _apply_trampoline, apply_group_offloading),
        _swap_attribute(ModelMixin, "enable_group_offload", _enable_on_model),
        _swap_attribute(ModelMixin, "disable_group_offload", remove_group_offloading),
        _swap_attribute(diffusers.DiffusionPipeline, "enable_group_offload", _enable_on_pipeline),
        _swap_attribute(diffusers.DiffusionPipeline, "disable_group_offload", disable_group_offload),
        *_patch_modular(getattr(diffusers, "ModularPipeline", None)),
    ]
    _restore = undo


def _patch_modular(pipelines: type | None) -> Iterator[Callable[[], None]]:
    """Give modular pipelines the same calls. Components that come later are offloaded as the others were.

    Yields:
        What undoes each step.
    """
    if pipelines is None:
        return

    def also_offloads(load: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(load)
        def loads(pipeline: Any, *args: Any, **kwargs: Any) -> Any:
            result = load(pipeline, *args, **kwargs)
            if pipeline.__dict__.get(_ASKED) is not None:
                enable_group_offload(pipeline)
            return result

        return loads

    yield _swap_attribute(pipelines, "enable_group_offload", _enable_on_pipeline)
    yield _swap_attribute(pipelines, "disable_group_offload", disable_group_offload)
    for name in ("load_components", "update_components"):
        yield _swap_attribute(pipelines, name, also_offloads(getattr(pipelines, name)))


def unpatch_diffusers() -> None:
    """Undo `patch_diffusers`. Offloaded modules stay offloaded. Does nothing if diffusers is not patched."""
    global _restore
    for undo in _restore or ():
        undo()
    _restore = None


_restore: list[Callable[[], None]] | None = None


def _apply_trampoline(*args, **kwargs):  # type: ignore[no-untyped-def]
    """The code for `diffusers.hooks.apply_group_offloading`. It runs with diffusers' globals."""
    import group_offload

    return group_offload.apply_group_offloading(*args, **kwargs)


@takes_options(LeastOptions)
def _enable_on_pipeline(pipeline: Any, options: PipelineOptions, given: frozenset[str]) -> dict[str, OffloadHandle]:
    return _enable(pipeline, options, given)


@wraps(apply_group_offloading)
def _enable_on_model(model: nn.Module, *args: Any, **kwargs: Any) -> OffloadHandle:
    refuse_unsupported(model)
    return apply_group_offloading(model, *args, **kwargs)


def _install_seam() -> None:
    """Let `_apply_group_offloading` of a marker's config reach that marker's engine, and all other calls diffusers.

    `pipe.to(dtype)`, which leaves offloaded models as they are without a word, says so, and `pipe.to("meta")` gives them up.
    """
    for module_name, class_name in _PIPELINE_CLASSES.items():
        pipelines = getattr(sys.modules.get(module_name), class_name, None)
        if pipelines is not None and not hasattr(pipelines.to, "group_offload_before"):
            pipelines.to = _moves_and_tells(pipelines.to)
    offloading = _offloading_module()
    before = getattr(offloading, _SEAM)
    if hasattr(before, "group_offload_before"):
        return

    def apply(module: nn.Module, config: Any) -> None:
        handle: OffloadHandle | None = getattr(config, "group_offload_handle", lambda: None)()
        if handle is not None and handle.is_active:
            _mark(handle)  # first: diffusers has taken the markers away, and `refresh` may raise (a disk is full)
            try:
                handle.refresh()
            except ModuleError as error:
                # The rest of diffusers' own call is what the user asked for. (A LoRA that lacks some weights loads.)
                logger.warning(
                    "%s cannot run like this: %s The next forward raises this.", type(module).__name__, error
                )
        elif any(map(is_offloaded, module.modules())):
            raise StateError(
                f"{type(module).__name__}, or a part of it, is group-offloaded by group_offload already. Call "
                f"remove_group_offloading() on the module that it was applied to first."
            )
        elif _restore is not None:
            _enable_on_model(module, **_options_of(config))
        else:
            before(module, config)

    apply.group_offload_before = before  # type: ignore[attr-defined]
    setattr(offloading, _SEAM, apply)


def _moves_and_tells(to: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(to)
    def tells(pipeline: Any, *args: Any, **kwargs: Any) -> Any:
        gives_up = any(str(each).startswith("meta") for each in (*args, *kwargs.values()))
        handles = [*handles_of(pipeline).values()] if gives_up else []
        for handle in handles:
            _unmark_all(handle.module)  # diffusers leaves marked models where they are
        try:
            result = to(pipeline, *args, **kwargs)
        finally:
            for handle in handles:
                _mark(handle)
        dtype = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.dtype)), None)
        models = {name: handle.module for name, handle in handles_of(pipeline).items() if dtype is not None}
        kept = [name for name, model in models.items() if _dtype_of(model) not in (None, dtype)]
        if kept:
            logger.warning(
                "%s of the %s kept %s: to(), which from_pipe() calls with torch.float32 by default, casts no offloaded "
                "model. To cast one, call pipe.%s.to(%s).",
                *(", ".join(kept), type(pipeline).__name__, "their dtype" if len(kept) > 1 else "its dtype"),
                *(kept[0], dtype),
            )
        return result

    tells.group_offload_before = to  # type: ignore[attr-defined]
    return tells


def _dtype_of(model: nn.Module) -> torch.dtype | None:
    if getattr(model, "is_quantized", False):
        return None  # it cannot be cast
    return next((weight.dtype for weight in model.parameters() if weight.is_floating_point()), None)


def _options_of(config: Any) -> dict[str, Any]:
    """The arguments that diffusers' config was made from."""
    is_block_level = config.offload_type.value == "block_level"
    return {
        "onload_device": config.onload_device,
        "offload_device": config.offload_device,
        "offload_type": config.offload_type,
        "num_blocks_per_group": config.num_blocks_per_group if is_block_level else None,
        "non_blocking": config.non_blocking,
        "use_stream": config.stream is not None,
        "record_stream": config.record_stream,
        "low_cpu_mem_usage": config.low_cpu_mem_usage,
        "offload_to_disk_path": config.offload_to_disk_path,
        "block_modules": config.block_modules if is_block_level else None,
        "exclude_kwargs": config.exclude_kwargs,
    }


def _swap_code(function: Any, replacement: Any, signature_of: Any) -> Callable[[], None]:
    """Give a function the code of `replacement`, and return the undoing.

    Setting the attribute of diffusers' module would not do: `from diffusers.hooks import apply_group_offloading` in another
    module, at any time before, made a name there that still leads to the old function. All these names lead to one function
    object, and a function object runs its `__code__` with its `__defaults__` and `__kwdefaults__`. So these three are
    exchanged, and every name runs the new code, in the globals of diffusers' module: `replacement` has to import what it
    uses. The function object stays the same, so comparisons with `is` and pickles of its name hold.
    """
    names = ("__code__", "__defaults__", "__kwdefaults__")
    before = [getattr(function, name) for name in names]
    for name in names:
        setattr(function, name, getattr(replacement, name))
    function.__wrapped__ = signature_of

    def undo() -> None:
        del function.__wrapped__
        for name, value in zip(names, before, strict=True):
            setattr(function, name, value)

    return undo


def _swap_attribute(owner: type, name: str, value: Any) -> Callable[[], None]:
    before = owner.__dict__.get(name)
    setattr(owner, name, value)
    return lambda: delattr(owner, name) if before is None else setattr(owner, name, before)


def _hooks_module() -> ModuleType:
    return importlib.import_module("diffusers.hooks.hooks")


def _offloading_module() -> ModuleType:
    return importlib.import_module("diffusers.hooks.group_offloading")


for each in (*LISTENERS, _Markers()):
    add_listener(each)
