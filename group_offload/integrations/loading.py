"""Opening a checkpoint without loading it: `from_pretrained`, for models and pipelines."""

from __future__ import annotations

import difflib
import inspect
import logging
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..api import handle_of, offload
from ..base.system import forked_free
from ..base.text import short
from ..config import ModelOptions, OffloadConfig
from ..errors import ConfigError, GroupOffloadError, StorageError
from .casts import PostponedCasts
from .diffusers import FILL, PipelineOptions, models_of, offload_pipeline, refuse_unsupported
from .quantizing import Quantizing, take_off_meta

logger = logging.getLogger("group_offload")

_PLACEMENT = ("device_map", "max_memory", "offload_folder", "offload_state_dict", "offload_buffers")
"""Arguments of the libraries' loaders with which accelerate places weights."""
_SIMILAR = 0.8
_TAKES_DTYPE = (0, 40)
"""The first version of diffusers whose loaders take `dtype`."""

_OF_MODELS, _OF_PIPELINES = ({field.name for field in fields(kind)} for kind in (ModelOptions, PipelineOptions))


def from_pretrained(model_class: Any, pretrained_model_name_or_path: str | os.PathLike[str], **options: Any) -> Any:
    """`model_class.from_pretrained(...)`, group-offloaded from the start: the weights are never all in RAM.

    The library's own loader does the loading, so it decides which files and options count, and the value and dtype of every
    weight. Only its casts are postponed: a weight stays in its file, in the file's dtype, until it is cast together with the
    others of its group, and placed. With `offload_to_disk_path` the cast weights are written to that folder and found there
    the next time; weights that need no cast stay in the checkpoint. So at most one group is in RAM. (Without a folder, cast
    weights stay in RAM, and at most 256 MiB are there in addition.)

    With a `quantization_config` the library's own quantizer makes one weight after another, each time: save the result with
    `save_pretrained` to open it without quantizing.

    On an accelerator `vram_budget` and `interleave_forwards` are "auto" by default, as those of `enable_group_offload` are.

    Args:
        model_class: A model class of diffusers or transformers, or a pipeline class of diffusers (`DiffusionPipeline` and
            `AutoPipelineForText2Image` too).
        pretrained_model_name_or_path: A folder, or a name on the Hugging Face hub.
        options: Every option of `apply_group_offloading`, or for a pipeline of `enable_group_offload`, by name. All others
            are for the library's loader: `dtype` (or `torch_dtype`; for pipelines a dict too), `revision`, `cache_dir`,
            `variant`, `subfolder`, `token`, ..., and components of a pipeline. Components keep their weights as they are;
            components that are group-offloaded already are shared, as by `enable_group_offload`. `low_cpu_mem_usage` is the
            option of offloading; the libraries' own option of that name cannot be given, as loading always takes little
            memory.

    Returns:
        The result of `model_class.from_pretrained`: the model, or the pipeline with all its models offloaded.

    Raises:
        ConfigError: an option is not understood, or contradicts another one, or `model_class` loads nothing.
        ModuleError, DeviceError, StorageError: as raised by `apply_group_offloading`.
        StateError: a component of the pipeline is offloaded with other options already.
        OSError and others: errors of the library, if there is no such checkpoint for example.

    Example:
        >>> pipe = from_pretrained(FluxPipeline, "black-forest-labs/FLUX.1-dev", dtype=torch.bfloat16,
        ...                        offload_to_disk_path="/nvme/offload")
        >>> image = pipe("a lighthouse in the fog").images[0]
    """
    given = {name: options.pop(name) for name in (_OF_MODELS | _OF_PIPELINES) & options.keys()}
    _check(model_class, options)
    _name_dtype(model_class, options)
    ours = {"vram_budget": FILL, "interleave_forwards": "auto", **given}
    for_model = ModelOptions(**{name: value for name, value in ours.items() if name in _OF_MODELS})
    for_pipeline = PipelineOptions(**{name: value for name, value in ours.items() if name in _OF_PIPELINES})
    device = OffloadConfig.from_options(for_model).onload_device  # before anything is downloaded
    if issubclass(model_class, nn.Module):
        _refuse(given, _OF_PIPELINES - _OF_MODELS, model_class)
    loaded, casts = _open(model_class, pretrained_model_name_or_path, options, device)
    # With output_loading_info=True there is a dict beside the model.
    found = loaded[0] if isinstance(loaded, tuple) else loaded
    if isinstance(found, nn.Module):
        _refuse(given, _OF_PIPELINES - _OF_MODELS, model_class)
        refuse_unsupported(found)
        _refuse_missing(found, pretrained_model_name_or_path)
        offload(found, OffloadConfig.from_options(for_model, found), casts.casts_of(found))
    elif isinstance(getattr(found, "components", None), Mapping):
        _refuse(given, _OF_MODELS - _OF_PIPELINES, model_class)
        models = {*models_of(found).values()}
        loaded_here = models.difference(each for each in options.values() if isinstance(each, nn.Module))
        for model in loaded_here:
            _refuse_missing(model, pretrained_model_name_or_path)
        # Weights are known by their addresses, so ask for all casts before the first weight is placed.
        casts_of = {model: casts.casts_of(model) for model in models}
        offload_pipeline(found, for_pipeline, given.keys(), casts_of, loaded_here)
    else:
        raise ConfigError(
            f"{model_class.__name__}.from_pretrained made a {type(found).__name__}, which has no weights to offload. Call "
            f"that method itself."
        )
    return loaded


def _refuse_missing(model: nn.Module, name: str | os.PathLike[str]) -> None:
    """Refuse a model whose weights were not all in `name`, from which it was loaded."""
    missing = [fqn for fqn, weight in model.named_parameters() if weight.device.type == "meta"]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise StorageError(
            f"{name} lacks weights of {type(model).__name__}: {missing[0]}{more}. Its files and its config.json do not belong "
            f"together: download it again, or open it with the class that it was saved from."
        )


# ------------------------------------------------------------------------------------------------ loading


def open_in_place(
    model_class: Any, path: Path, *, dtype: torch.dtype | None, variant: str | None
) -> tuple[nn.Module, dict[str, torch.dtype]]:
    """A model to look at, whose weights are views of its files, and the casts that are left to make, by the names of weights.

    Raises:
        StorageError: the library cannot load it.
    """
    options = {"variant": variant, "dtype": dtype, "local_files_only": True}
    options = {name: value for name, value in options.items() if value is not None}
    _name_dtype(model_class, options)
    casts = PostponedCasts(of_files_only=False)  # nobody asks for values, so none need be cast
    with errors_of_loading(model_class, path):
        loaded = _load(model_class, path, options, torch.device("cpu"), casts)
        _refuse_missing(loaded, path)
    return loaded, casts.casts_of(loaded)


@contextmanager
def errors_of_loading(model_class: type, path: Path) -> Iterator[None]:
    """Whatever a library raises over files that it does not understand becomes a `StorageError` that names them."""
    try:
        yield
    except GroupOffloadError:
        raise
    except Exception as error:
        remedy = "Save the model there again (save_pretrained), or download it again."
        if isinstance(error, ImportError):
            remedy = "Install the package that is missing."
        raise StorageError(
            f"{model_class.__name__}.from_pretrained cannot load {path}: {type(error).__name__}: {str(error).rstrip('. ')}. "
            f"{remedy}"
        ) from error


def _open(
    model_class: Any, name: str | os.PathLike[str], options: Mapping[str, Any], device: torch.device
) -> tuple[Any, PostponedCasts]:
    """The result of the library's loader, and the casts that were postponed in it."""
    casts = PostponedCasts()
    loaded = _load(model_class, name, options, device, casts)
    if casts.refusal is not None:
        del loaded
        logger.warning("%s is loaded as a whole before it is offloaded: %s.", name, casts.refusal)
        casts = PostponedCasts()
        with casts.paused():
            loaded = _load(model_class, name, options, device, casts)
    return loaded, casts


def _load(
    model_class: Any,
    name: str | os.PathLike[str],
    options: Mapping[str, Any],
    device: torch.device,
    casts: PostponedCasts,
) -> Any:
    with _loading, _one_thread(), Quantizing(casts, device), casts:
        loaded = model_class.from_pretrained(name, **options)
    found = loaded[0] if isinstance(loaded, tuple) else loaded
    parts = {"": found} if isinstance(found, nn.Module) else getattr(found, "components", {})
    for part in parts.values():
        if isinstance(part, nn.Module) and handle_of(part) is None:
            take_off_meta(part)
    return loaded


_loading = forked_free(threading.RLock())
"""Held while the methods of the libraries are watched, and the environment is changed."""
_ASYNC = "HF_DEACTIVATE_ASYNC_LOAD"


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let transformers load in the calling thread: only there can casts be postponed."""
    before = os.environ.get(_ASYNC)
    os.environ[_ASYNC] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ASYNC]
        else:
            os.environ[_ASYNC] = before


# ------------------------------------------------------------------------------------------------ checks of options


def _check(model_class: Any, options: Mapping[str, Any]) -> None:
    """Refuse a class that loads nothing, and options that its loader must not get."""
    if not isinstance(model_class, type):
        hint = " Pass its class, or call apply_group_offloading." if isinstance(model_class, nn.Module) else ""
        raise ConfigError(f"Expected a class with from_pretrained, got {short(model_class)}.{hint}")
    if not callable(getattr(model_class, "from_pretrained", None)):
        raise ConfigError(
            f"{model_class.__name__} has no from_pretrained. Pass a model or pipeline class of diffusers or transformers; for "
            f"another module call apply_group_offloading."
        )
    if options.get("dtype") is not None and options.get("torch_dtype") not in (None, options["dtype"]):
        raise ConfigError(
            f"dtype={options['dtype']} contradicts torch_dtype={options['torch_dtype']}: they are two names of one option. "
            f"Pass one of them."
        )
    for name, value in options.items():
        if name in _PLACEMENT and value is not None:
            raise ConfigError(
                f"{name}={value!r} places weights by accelerate, and here group offloading places them. Drop it; "
                f"onload_device is the device that computes, offload_to_disk_path the folder for files."
            )
        close = difflib.get_close_matches(name, _OF_MODELS | _OF_PIPELINES, n=1, cutoff=_SIMILAR)
        if close and name not in _PLACEMENT:
            raise ConfigError(f"{name} is no option of from_pretrained. Did you mean {close[0]}?")
    loads: Any = model_class
    if getattr(loads.from_pretrained, "__qualname__", "") == "ModelMixin.from_pretrained":
        # It drops what it does not know, without a word. Values of the config are arguments of the class.
        with suppress(OSError, TypeError):  # a program that was installed without its source
            code = inspect.getsource(loads.from_pretrained) + inspect.getsource(loads.load_config)
            known = {"dtype", *re.findall(r'kwargs\.pop\(\s*"(\w+)"', code), *inspect.signature(model_class).parameters}
            if unknown := sorted(options.keys() - known):
                raise ConfigError(
                    f"{', '.join(unknown)}: neither from_pretrained nor {model_class.__name__} has such an option."
                )


def _name_dtype(model_class: type, options: dict[str, Any]) -> None:
    """Call `dtype` what the library's loader calls it: diffusers before 0.40 knows `torch_dtype` alone."""
    is_of_diffusers = any(each.__module__.partition(".")[0] == "diffusers" for each in model_class.__mro__)
    if "dtype" not in options or not is_of_diffusers:
        return
    if tuple(map(int, version("diffusers").split(".")[:2])) < _TAKES_DTYPE:
        options["torch_dtype"] = options.pop("dtype")


def _refuse(given: Mapping[str, Any], names: Iterable[str], model_class: type) -> None:
    """Refuse the options of pipelines for a model, and those of models for a pipeline."""
    wrong = sorted(name for name in names if given.get(name) is not None)
    why = "is a model: options for the parts of a pipeline have no meaning for it"
    if "block_modules" in names:
        why = "is a pipeline: give options of one model in model_options"
    if wrong:
        raise ConfigError(f"{', '.join(wrong)}: {model_class.__name__} {why}.")
