"""The groups of a checkpoint's models: each is opened by its library, weights left in their files, and cut by `partition`."""

from __future__ import annotations

import importlib
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..base.layout import lay_out
from ..base.mapping import flat_view, reserve
from ..config import ModelOptions, OffloadConfig
from ..errors import ConfigError, StorageError
from ..integrations.loading import open_in_place
from ..partition import partition
from ..plan.placement import PlannedGroup
from ..stores.compressed import is_compressible

_FILE = re.compile(r"(?:diffusion_pytorch_model|model)(\.\w+?)?(?:-\d{5}-of-\d{5})?(\.\w+)?\.safetensors")
"""The files that the libraries' loaders take: a variant stands before or behind the number."""
_SAVE_IT = "Pass the folder of a model or a pipeline, as save_pretrained writes it."
_COMPRESSED_RATIOS = {torch.bfloat16: 0.72, torch.float8_e4m3fn: 0.9}
"""What is left of weights: 0.70 to 0.73 of bf16 (docs/benchmarks.md); of fp8 0.72 if they were cast, 0.9 if scaled."""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model of a checkpoint."""

    folder: Path
    variant: str | None
    """The variant that `from_pretrained` has to be told of."""
    model_class: Any


@dataclass(frozen=True, slots=True)
class MetaModel:
    """The groups of one model, in the order of registration."""

    model_class: str
    groups: tuple[PlannedGroup, ...]
    outer: frozenset[str]
    """The groups that are needed around others, so that they are on the device during the whole pass."""
    num_cast: int
    """How many weights have another dtype in the file."""
    cast_bytes: int
    """What these weights take where they are written to `offload_to_disk_path`."""
    variant: str | None
    """The variant that `from_pretrained` has to be told of."""
    usual_dtype: torch.dtype
    """The floating point dtype that most bytes of the weights have, before any cast."""

    @property
    def num_bytes(self) -> int:
        return sum(group.num_bytes for group in self.groups)

    @property
    def outer_bytes(self) -> int:
        return sum(group.num_bytes for group in self.groups if group.name in self.outer)


def find_models(path: Path) -> tuple[dict[str, FoundModel], dict[str, str]]:
    """The models of a checkpoint, by their names in the pipeline, and why others of its parts are left out.

    A model by itself has the name "".

    Args:
        path: the folder of a model or of a pipeline, as `save_pretrained` writes it.

    Raises:
        StorageError: `from_pretrained` would find no file, or config.json names no class of diffusers or transformers. (Of
            a pipeline: all of its parts are like this.)
        ConfigError: diffusers or transformers is not installed.
    """
    if path.is_file():
        raise StorageError(
            f"{path} is a file. Pass the folder that it is in: a variant is read from a folder of its own."
        )
    if not (path / "model_index.json").exists():
        return {"": _find(path, _variant_in(path))}, {}
    models, left_out, unknown = dict[str, FoundModel](), dict[str, str](), list[StorageError]()
    for name, part in _parts_in(path).items():
        if not (path / name).is_dir():
            left_out[name] = "It is not there: the download may be incomplete."
        elif any((path / name).glob("*.safetensors")):
            try:
                models[name] = _find(path / name, _variant_in(path / name), *part)
            except StorageError as error:
                unknown.append(error)
                left_out[name] = str(error)
    if not models:
        raise next(iter(unknown), StorageError(f"{path} is a pipeline without safetensors files."))
    return models, left_out


def meta_model_of(model: FoundModel, dtype: torch.dtype | None = None, *, compresses: bool = False) -> MetaModel:
    """The groups that a model is cut into.

    Args:
        dtype: the dtype that floating point weights are cast to while they are loaded. None: they keep that of the file.
        compresses: whether weights are compressed, to an assumed share of their bytes.

    Raises:
        StorageError: the library cannot load it.
    """
    opened, casts = open_in_place(model.model_class, model.folder, dtype=dtype, variant=model.variant)
    sizes = Counter({torch.float32: 0})
    for weight in opened.parameters():
        sizes[weight.dtype] += weight.nbytes if weight.is_floating_point() else 0
    tensors = dict([*opened.named_parameters(), *opened.named_buffers()])
    casts = {} if dtype is None else casts  # then they are to the library's own default
    for name, after in casts.items():
        # What a cast will take has addresses, by which weights that share memory are told, and no memory.
        num_bytes = tensors[name].numel() * after.itemsize
        tensors[name].data = flat_view(reserve(num_bytes), 0, num_bytes).view(after).view(tensors[name].shape)
    cast_ids, cast_bytes = {id(tensors[name]) for name in casts}, 0
    specs = partition(opened, OffloadConfig.from_options(ModelOptions(onload_device="cpu")))
    groups, outer = [], set()
    for group in specs:
        plain = [ref.tensor.detach() for ref in group.tensors]
        layout = lay_out([ref.fqn for ref in group.tensors], plain)
        num_bytes = layout.num_bytes
        cast = [each for each, ref in zip(plain, group.tensors, strict=True) if id(ref.tensor) in cast_ids]
        cast_bytes += lay_out([""] * len(cast), cast).num_bytes
        if not num_bytes or group.is_table:
            continue
        saved = int(sum((1 - _COMPRESSED_RATIOS.get(each.dtype, 1)) * each.nbytes for each in plain))
        compressed_bytes = num_bytes - saved if compresses and is_compressible(layout) else 0
        groups.append(
            PlannedGroup(
                name=group.group_id,
                num_bytes=num_bytes,
                compute_seconds=0.0,
                is_in_file=True,
                compressed_bytes=compressed_bytes,
                reads_compressed=compresses,
            )
        )
        outer |= {group.group_id} if group.nesting else set()
    if not groups:
        raise StorageError(f"There are no weights in {model.folder}.")
    usual_dtype = sizes.most_common(1)[0][0]
    name = model.model_class.__name__
    return MetaModel(name, tuple(groups), frozenset(outer), len(casts), cast_bytes, model.variant, usual_dtype)


def _variant_in(folder: Path) -> str | None:
    """The variant that the files of a folder have; None if some have none, as loaders take these."""
    found = [_FILE.fullmatch(path.name) for path in folder.glob("*.safetensors")]
    return min((each[1] or each[2] or "" for each in found if each), default="").removeprefix(".") or None


def _parts_in(folder: Path) -> dict[str, tuple[str, str]]:
    """The parts of a pipeline, each with its library and its class, as the index names them."""
    entries = [each for each in read_json(folder / "model_index.json").items() if isinstance(each[1], list)]
    return {name: (e[0], e[1]) for name, e in entries if name.isidentifier() and [*map(type, e)] == [str, str]}


def _find(folder: Path, variant: str | None, library: str = "", class_name: str = "") -> FoundModel:
    """
    Args:
        library, class_name: What a pipeline's index names: diffusers, transformers, or a module of a pipeline. Without them
            config.json names the class.
    """
    path = folder / "config.json"
    if not class_name:
        config = read_json(path)
        names = config.get("architectures")
        is_transformers = "_class_name" not in config and isinstance(names, list) and bool(names)
        library = "transformers" if is_transformers else "diffusers"
        class_name = str(names[0] if isinstance(names, list) and is_transformers else config.get("_class_name", ""))
    is_library = library in ("diffusers", "transformers")
    try:
        module: Any = importlib.import_module(library if is_library else "diffusers.pipelines")
    except ImportError as error:
        raise ConfigError(
            f"The model's class needs {error.name}, which is not installed: pip install 'group-offload[diffusers]'"
        ) from error
    try:
        model_class = getattr(module if is_library else getattr(module, library, None), class_name, None)
    except (ImportError, RuntimeError) as error:  # the libraries import their classes when they are asked for them
        raise StorageError(f"{path} names {class_name!r:.80}, which cannot be imported: {error}") from error
    if not isinstance(model_class, type) or not issubclass(model_class, nn.Module):
        reason = f"the installed {library!r:.80} has no such model. Install a version that has it."
        if not is_library and not hasattr(module, library):
            reason = f"{library!r:.80} is neither diffusers nor transformers."
        raise StorageError(f"{path} names {class_name!r:.80}, and {reason}")
    return FoundModel(folder, variant, model_class)


def read_json(path: Path) -> dict[str, Any]:
    """
    Raises:
        StorageError: it cannot be read, or is no JSON object.
    """
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise StorageError(f"Cannot read {path}: {error.strerror or error}. {_SAVE_IT}") from error
    except (ValueError, RecursionError) as error:
        raise StorageError(f"Cannot read {path}: it is not valid JSON: {error!s:.200}.") from error
    if not isinstance(found, dict):
        raise StorageError(f"Cannot read {path}: it is not a JSON object.")
    return found
