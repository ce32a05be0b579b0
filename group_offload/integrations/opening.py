"""Opening a checkpoint without loading it: `from_pretrained`, for models and pipelines."""

from __future__ import annotations

import difflib
import inspect
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import nn

from ..api import handle_of, offload, remove_group_offloading
from ..config import OffloadConfig
from ..errors import ConfigError
from ..stores.checkpoint import FileMap
from .casts import PostponedCasts, cast_now
from .diffusers import bring_back, plan_pipeline, refuse_unsupported, undone_on_error

logger = logging.getLogger("group_offload")

_PLACEMENT = ("device_map", "max_memory", "offload_folder", "offload_state_dict", "offload_buffers")
"""Arguments of the libraries' loaders that place weights by accelerate."""
_LOADER_OPTIONS = (
    "attn_implementation",
    "cache_dir",
    "config",
    "custom_pipeline",
    "custom_revision",
    "disable_mmap",
    "dtype",
    "force_download",
    "local_files_only",
    "output_loading_info",
    "proxies",
    "quantization_config",
    "revision",
    "subfolder",
    "token",
    "torch_dtype",
    "trust_remote_code",
    "use_safetensors",
    "variant",
    *_PLACEMENT,
)
"""Usual arguments of the libraries' loaders. There are more: this serves to tell a misspelt one from those."""
_SIMILAR = 0.8


def from_pretrained(
    model_class: Any,
    pretrained_model_name_or_path: str | os.PathLike[str],
    *,
    onload_device: str | int | torch.device | None = None,
    offload_device: str | torch.device = "cpu",
    offload_type: str | Enum = "block_level",
    num_blocks_per_group: int | None = None,
    non_blocking: bool = False,
    use_stream: bool | None = None,
    record_stream: bool = False,
    low_cpu_mem_usage: bool = False,
    offload_to_disk_path: str | os.PathLike[str] | None = None,
    block_modules: list[str] | None = None,
    exclude_kwargs: list[str] | None = None,
    verify_files: bool = False,
    vram_budget: int | str | None = None,
    ram_budget: int | str | None = None,
    exclude_modules: str | Sequence[str] | None = None,
    model_options: Mapping[str, Mapping[str, Any]] | None = None,
    **loader_options: Any,
) -> Any:
    """`model_class.from_pretrained(...)`, group-offloaded from the start: the weights never are in RAM as a whole.

    The library's own loader does the loading, so what it takes and finds, and every weight's value and dtype, is its own.
    Only its casts are postponed: a weight stays in its file, in the file's dtype, until it is cast together with the
    others of its group, and placed. With `offload_to_disk_path` the cast weights are written there, and found again the
    next time; what needs no cast stays in the checkpoint. So at most one group is in RAM. (Without a folder cast weights
    rest in RAM, and at most 256 MiB are there in addition.)

    Args:
        model_class: a model class of diffusers or transformers, or a pipeline class of diffusers (`DiffusionPipeline` and
            `AutoPipelineForText2Image` too).
        pretrained_model_name_or_path: a folder, or a name on the Hugging Face hub.
        onload_device, offload_device, offload_type, num_blocks_per_group, non_blocking, use_stream, record_stream,
            low_cpu_mem_usage, offload_to_disk_path, verify_files, vram_budget, ram_budget: as in `apply_group_offloading`, and
            for a pipeline as in `enable_group_offload`. The libraries' own option `low_cpu_mem_usage` cannot be given:
            loading always takes little memory.
        block_modules, exclude_kwargs: as in `apply_group_offloading`; models only.
        exclude_modules, model_options: as in `enable_group_offload`; pipelines only.
        loader_options: all others, for the library's loader: `dtype` (or `torch_dtype`; for pipelines a dict too),
            `revision`, `cache_dir`, `variant`, `subfolder`, `token`, ..., and components of a pipeline. Those keep their
            weights as they are; the ones that are group-offloaded already stay so as they are.

    Returns:
        What `model_class.from_pretrained` returns: the model, or the pipeline with all its models offloaded.

    Raises:
        ConfigError: an option is not understood, or contradicts another one, or `model_class` loads nothing.
        ModuleError, DeviceError, GroupFileError: as in `apply_group_offloading`.
        OSError and others: the library's own, where there is no such checkpoint.

    Example:
        >>> pipe = from_pretrained(FluxPipeline, "black-forest-labs/FLUX.1-dev", dtype=torch.bfloat16,
        ...                        offload_to_disk_path="/nvme/offload")
        >>> image = pipe("a lighthouse in the fog").images[0]
    """
    common: dict[str, Any] = {
        "onload_device": onload_device,
        "offload_device": offload_device,
        "offload_type": offload_type,
        "num_blocks_per_group": num_blocks_per_group,
        "non_blocking": non_blocking,
        "use_stream": use_stream,
        "record_stream": record_stream,
        "low_cpu_mem_usage": low_cpu_mem_usage,
        "offload_to_disk_path": offload_to_disk_path,
        "verify_files": verify_files,
        "vram_budget": vram_budget,
        "ram_budget": ram_budget,
    }
    for_models: dict[str, Any] = {"block_modules": block_modules, "exclude_kwargs": exclude_kwargs}
    for_pipelines: dict[str, Any] = {"exclude_modules": exclude_modules, "model_options": model_options}
    _check_class(model_class)
    _check_loader_options(loader_options)
    OffloadConfig.from_options(**common, **for_models)  # before anything is downloaded
    if issubclass(model_class, nn.Module):
        _refuse(for_pipelines, model_class, "is a model: options for the parts of a pipeline mean nothing to it")
    loaded, casts = _open(model_class, pretrained_model_name_or_path, loader_options)
    # With output_loading_info=True there is a dict beside the model.
    found = loaded[0] if isinstance(loaded, tuple) else loaded
    if isinstance(found, nn.Module):
        _refuse(for_pipelines, model_class, "is a model: options for the parts of a pipeline mean nothing to it")
        refuse_unsupported(found)
        offload(found, casts=casts.casts_of(found), **common, **for_models)
    elif isinstance(getattr(found, "components", None), Mapping):
        _refuse(for_models, model_class, "is a pipeline: give options of one model in model_options")
        _offload_pipeline(found, casts, common, for_pipelines, _models_in(loader_options))
    else:
        raise ConfigError(
            f"{model_class.__name__}.from_pretrained made a {type(found).__name__}, which has no weights to offload. Call "
            f"that itself."
        )
    return loaded


def _offload_pipeline(
    pipeline: Any,
    casts: PostponedCasts,
    common: dict[str, Any],
    options: dict[str, Any],
    passed: Sequence[nn.Module],
) -> None:
    plan = plan_pipeline(pipeline, **options, **common)
    offloaded = [(model, casts.casts_of(model), options) for model, options in plan.offloaded.values()]
    excluded = [(model, casts.casts_of(model)) for model in plan.excluded]
    done: set[int] = set()
    with undone_on_error() as undo:
        for model, casts_of_model, model_options in offloaded:
            if id(model) in done:  # it has two names
                continue
            done.add(id(model))
            if handle_of(model) is not None:  # it came offloaded; the pipeline may have cast it
                cast_now(model, casts_of_model)
                continue
            if any(
                model is each for each in passed
            ):  # what was opened here goes, and must not be brought to RAM for that
                undo.callback(remove_group_offloading, model)
            offload(model, casts=casts_of_model, **model_options)
        for model, casts_of_model in excluded:
            if any(model is each for each in passed):
                undo.callback(bring_back, {tensor: tensor.device for tensor in (*model.parameters(), *model.buffers())})
            cast_now(model, casts_of_model, plan.device)


# ------------------------------------------------------------------------------------------------ loading


def _open(model_class: Any, name: str | os.PathLike[str], options: dict[str, Any]) -> tuple[Any, PostponedCasts]:
    """What the library's loader returns, and the casts that it made without making them."""
    casts = PostponedCasts()
    refusal = "it is quantised while it is loaded" if options.get("quantization_config") is not None else None
    if refusal is None:
        with _one_thread(), casts:
            loaded = model_class.from_pretrained(name, **options)
        refusal = casts.refusal
        if refusal is None:
            _report(loaded)
            return loaded, casts
        del loaded
    logger.warning("%s is loaded as a whole before it is offloaded: %s.", name, refusal)
    return model_class.from_pretrained(name, **options), PostponedCasts()


_lock = threading.RLock()
_num_loading = 0
_before: str | None = None
_ASYNC = "HF_DEACTIVATE_ASYNC_LOAD"


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let transformers load in the thread that calls it: only there casts can be postponed."""
    global _num_loading, _before
    with _lock:
        if not _num_loading:
            _before = os.environ.get(_ASYNC)
            os.environ[_ASYNC] = "1"
        _num_loading += 1
    try:
        yield
    finally:
        with _lock:
            _num_loading -= 1
            if not _num_loading and _before is None:
                del os.environ[_ASYNC]
            elif not _num_loading:
                os.environ[_ASYNC] = _before or ""


def _report(loaded: Any) -> None:
    """Log what was not left in files: weights that were converted while they were loaded, or came from pickles."""
    file_map = FileMap()
    found = loaded[0] if isinstance(loaded, tuple) else loaded
    parts = {"": found} if isinstance(found, nn.Module) else getattr(found, "components", {})
    for part in parts.values():
        if not isinstance(part, nn.Module) or handle_of(part) is not None:
            continue
        sizes = [
            weight.nbytes
            for weight in part.parameters()
            if weight.device.type == "cpu" and file_map.find(weight.detach()) is None
        ]
        if sum(sizes):
            logger.info(
                "%d parameters of %s (%d bytes) are not in files as they are needed: they are in RAM until they are offloaded.",
                len(sizes),
                type(part).__name__,
                sum(sizes),
            )


def _models_in(options: Mapping[str, Any]) -> list[nn.Module]:
    return [value for value in options.values() if isinstance(value, nn.Module)]


# ------------------------------------------------------------------------------------------------ what was asked for


def _check_class(model_class: Any) -> None:
    if not isinstance(model_class, type):
        hint = " Pass its class, or call apply_group_offloading." if isinstance(model_class, nn.Module) else ""
        raise ConfigError(f"Expected a class with from_pretrained, got {model_class!r:.80}.{hint}")
    if not callable(getattr(model_class, "from_pretrained", None)):
        raise ConfigError(
            f"{model_class.__name__} has no from_pretrained. Pass a model or pipeline class of diffusers or transformers; for "
            f"another module call apply_group_offloading."
        )


def _check_loader_options(options: Mapping[str, Any]) -> None:
    for name in _PLACEMENT:
        if options.get(name) is not None:
            raise ConfigError(
                f"{name}={options[name]!r} places weights by accelerate, and here group offloading places them. Drop it; "
                f"onload_device is where to compute, offload_to_disk_path the folder for files."
            )
    if options.get("dtype") is not None and options.get("torch_dtype") not in (None, options["dtype"]):
        raise ConfigError(
            f"dtype={options['dtype']} contradicts torch_dtype={options['torch_dtype']}: they are two names of one option. "
            f"Pass one of them."
        )
    ours = [
        name
        for name, parameter in inspect.signature(from_pretrained).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    for name in options:
        close = difflib.get_close_matches(name, [*ours, *_LOADER_OPTIONS], n=1, cutoff=_SIMILAR)
        if close and name not in _LOADER_OPTIONS:
            raise ConfigError(f"{name} is no option of from_pretrained. Did you mean {close[0]}?")


def _refuse(options: Mapping[str, Any], model_class: type, why: str) -> None:
    given = sorted(name for name, value in options.items() if value is not None)
    if given:
        raise ConfigError(f"{', '.join(given)}: {model_class.__name__} {why}.")
