"""The groups of a checkpoint's models: each class is built on the meta device and cut by `partition`. No weight is read.

[Note: Addresses without memory]
`partition` and `lay_out` tell by addresses which tensors share memory, and tensors on the meta device have none. So each
weight becomes a view of one reserved range of addresses. No page of that range is ever touched, so it takes no RAM.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..base.compiled import is_compiled
from ..base.layout import ALIGNMENT, TensorSpec, lay_out, span_of
from ..base.mapping import flat_view, reserve
from ..base.system import open_to_read
from ..config import ModelOptions, OffloadConfig
from ..errors import ConfigError, GroupFileError
from ..partition import partition
from .arguments import check_dtype

_FILE_NAMES = ("diffusion_pytorch_model", "model", "diffusion_pytorch_model.fp16", "model.fp16")
"""Names of weights in a folder, the one to take first; the libraries' loaders take the first two."""
_SHARD = re.compile(r"(.+?)(?:-([0-9]{5})-of-([0-9]{5}))?(\.[a-z0-9_]+)?\.safetensors")
_FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
"""The dtypes that a cast changes, by the format's names."""
_USUAL_NAMES = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}
"""The names of weights that the libraries' loaders look for."""
_LIBRARIES = (*_USUAL_NAMES,)
_MAX_CONFIG_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor, as the header of a safetensors file describes it."""

    dtype: str
    num_elements: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class OutlinedGroup:
    """Weights that will move together."""

    name: str
    num_bytes: int
    """The size of the group's blob, in RAM or in a group file."""
    bf16_bytes: int
    """What bfloat16 weights take of it, which can be packed."""
    is_outer: bool
    """Whether the group is needed around other groups, so that it is on the device during the whole pass."""


@dataclass(frozen=True, slots=True)
class Outline:
    """The groups of one model, in the order of registration."""

    model_class: str
    groups: tuple[OutlinedGroup, ...]
    num_cast: int
    """How many weights have another dtype in the file."""

    @property
    def num_bytes(self) -> int:
        return sum(group.num_bytes for group in self.groups)


def outline(path: Path, dtype: torch.dtype | None = None) -> dict[str, Outline]:
    """The models of a checkpoint, by their names in the pipeline. A model by itself has the name "".

    Args:
        path: the folder of a model, as `save_pretrained` writes it, with one safetensors file or several; one of the files
            in such a folder; or the folder of a pipeline.
        dtype: the dtype that floating point weights are cast to while they are loaded. None: they keep that of the file.

    Raises:
        GroupFileError: a file cannot be read or has no weights, or no config.json names a class of diffusers or
            transformers. The message names the file.
        ConfigError: `dtype` is not a floating point dtype, or diffusers or transformers is not installed.
    """
    check_dtype(dtype)
    return {name: _outline_of(*found[:2], dtype, *found[2:]) for name, found in _models_in(path).items()}


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model of a checkpoint."""

    folder: Path
    model_class: Any
    dtype: torch.dtype
    """The floating point dtype that most bytes of the files have."""
    variant: str | None
    """The variant that `from_pretrained` has to be told of, so that it takes the files."""


def models_in(path: Path) -> dict[str, FoundModel]:
    """The models of a checkpoint, by their names in the pipeline: see `outline`.

    Raises:
        GroupFileError, ConfigError: as `outline`; or `from_pretrained` would take other files.
    """
    found = {}
    for name, (folder, files, library, class_name) in _models_in(path).items():
        entries = _entries_of(files)
        if not class_name:
            library, class_name = _class_in(_config_of(folder))
        model_class = _find_class(library, class_name, folder / "config.json")
        variant = _variant_of(files, _USUAL_NAMES.get(library.partition(".")[0]))
        found[name] = FoundModel(folder, model_class, _usual_dtype(entries), variant)
    return found


def _variant_of(files: Sequence[Path], usual: str | None) -> str | None:
    """The variant that weights have in their files' name; None for those that loaders take by default.

    Args:
        usual: The name that the library's loader knows; None if nobody knows it.

    Raises:
        GroupFileError: the loader would not take these files.
    """
    found = _SHARD.fullmatch(files[0].name)
    name, num_files = files[0].stem, 1
    if found is not None:
        name, num_files = found[1] + (found[4] or ""), int(found[3] or 1)
    if num_files > len(files):
        raise GroupFileError(f"{files[0]} is one of {num_files} files with a model's weights. Give their folder.")
    if usual is None or name == usual:
        return None
    if name.startswith(f"{usual}."):
        return name.removeprefix(f"{usual}.")
    raise GroupFileError(
        f"from_pretrained does not load {files[0]}: it looks for {usual}.safetensors, or {usual}.VARIANT.safetensors. Give the "
        f"weights that name, in a folder with their config.json."
    )


def _models_in(path: Path) -> dict[str, tuple[Path, list[Path], str, str]]:
    """For each model: its folder, its files, and the library and the class that a pipeline's index names."""
    if path.is_file():
        return {"": (path.parent, [path], "", "")}
    index = path / "model_index.json"
    if not index.exists():
        files = _files_of(path)
        if not files:
            raise GroupFileError(
                f"{path} has no safetensors files, nor a model_index.json. Give the folder of one model or of a pipeline, as "
                f"save_pretrained writes them."
            )
        return {"": (path, files, "", "")}
    models = {}
    for name, (library, class_name) in _parts_in(index).items():
        if files := _files_of(path / name):
            models[name] = (path / name, files, library, class_name)
    if not models:
        raise GroupFileError(f"{path} is a pipeline without safetensors files.")
    return models


def _parts_in(index: Path) -> dict[str, tuple[str, str]]:
    """The parts of a pipeline, each with its library and its class, as the index names them."""
    return {
        name: (entry[0], entry[1])
        for name, entry in _read_json(index).items()
        if name.isidentifier()
        and isinstance(entry, list)
        and len(entry) == 2
        and all(isinstance(part, str) for part in entry)
    }


def absent_parts(path: Path) -> list[str]:
    """The parts that the index of a pipeline names, and that are not there: what was downloaded may not be all of it."""
    index = path / "model_index.json"
    return [name for name in _parts_in(index) if not (path / name).is_dir()] if index.exists() else []


# ------------------------------------------------------------------------------------------------ files


def _files_of(folder: Path) -> list[Path]:
    """The files that one set of weights is in.

    Raises:
        GroupFileError: one of them is missing, or it cannot be told which set is meant.
    """
    sets: dict[str, list[tuple[int, int, Path]]] = {}
    try:
        names = sorted(os.listdir(folder)) if folder.is_dir() else []
    except OSError as error:
        raise GroupFileError(f"Cannot read {folder}: {error.strerror}.") from error
    for name in names:
        found = _SHARD.fullmatch(name)
        if found is not None:
            base, number, total, variant = found.groups()
            sets.setdefault(base + (variant or ""), []).append((int(number or 1), int(total or 1), folder / name))
    if not sets:
        return []
    chosen = next((name for name in _FILE_NAMES if name in sets), None)
    if chosen is None and len(sets) > 1:
        raise GroupFileError(f"{folder} has several sets of weights: {', '.join(sorted(sets))}. Give one of the files.")
    shards = sets[chosen] if chosen is not None else next(iter(sets.values()))
    total = max(total for _, total, _ in shards)
    missing = set(range(1, total + 1)) - {number for number, count, _ in shards if count == total}
    if missing:
        raise GroupFileError(
            f"{folder} has {total - len(missing)} of {total} files: number {min(missing)} is not there."
        )
    return [path for _, count, path in shards if count == total]


def _entries_of(files: Sequence[Path]) -> dict[str, Entry]:
    """The weights that the files hold, by name.

    Raises:
        GroupFileError: `safetensors` would refuse a header, a weight is there twice, or there is none.
    """
    found: dict[str, Entry] = {}
    for path in files:
        try:
            entries = _entries_in(path)
            if twice := found.keys() & entries.keys():
                raise GroupFileError(f"{min(twice)!r:.80} is in another file too")
        except GroupFileError as error:
            raise GroupFileError(f"{path} is no checkpoint that can be read: {error}.") from error
        except OSError as error:
            raise GroupFileError(f"Cannot read {path}: {error.strerror or error}.") from error
        found.update(entries)
    if not any(entry.num_bytes for entry in found.values()):
        raise GroupFileError(f"There are no weights in {', '.join(str(path) for path in files)}.")
    return found


def _entries_in(path: Path) -> dict[str, Entry]:
    """The weights of one file, by name."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'group-offload[diffusers]'") from error
    os.close(open_to_read(path, follows_links=True))  # it is a file: a FIFO would be waited for
    found = {}
    try:
        with safe_open(path, "np") as file:  # torch would reserve memory for all of it
            for name in file.keys():  # noqa: SIM118
                entry = file.get_slice(name)
                dtype, num_elements = entry.get_dtype(), math.prod(entry.get_shape())
                num_bits = int((re.findall("[0-9]+", dtype) or "8")[0])  # BOOL has no number
                found[name] = Entry(dtype, num_elements, num_elements * num_bits // 8)
    except SafetensorError as error:
        raise GroupFileError(f"{str(error)!r:.200}") from error
    except UnicodeError as error:
        raise GroupFileError("its path is not in UTF-8, and safetensors opens no such path: rename it") from error
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with open(open_to_read(path, follows_links=True), "rb") as file:
            found = json.loads(file.read(_MAX_CONFIG_BYTES))
    except OSError as error:
        raise GroupFileError(f"Cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise GroupFileError(f"{path} is no JSON that can be read: {error!s:.200}.") from error
    if not isinstance(found, dict):
        raise GroupFileError(f"{path} is not an object.")
    return found


# ------------------------------------------------------------------------------------------------ the class


def _outline_of(
    folder: Path, files: Sequence[Path], dtype: torch.dtype | None, library: str = "", name: str = ""
) -> Outline:
    """
    Args:
        library, name: the library and the class that a pipeline's index names. Without them config.json names the class.
    """
    path = folder / "config.json"
    entries = _entries_of(files)
    config = _config_of(folder)
    if not name:
        library, name = _class_in(config)
    model = _build(_find_class(library, name, path), path, config, dtype)
    num_cast = _place(model, entries, dtype, path, is_quantised="quantization_config" in config)
    cut = partition(model, OffloadConfig.from_options(ModelOptions(onload_device="cpu")), is_compiled)
    groups = []
    for group, height in zip(cut.groups, cut.heights, strict=True):
        num_bytes = lay_out(
            [ref.fqn for ref in group.tensors], [ref.tensor.detach() for ref in group.tensors]
        ).num_bytes
        if num_bytes and not group.is_table:
            bf16_bytes = sum(ref.tensor.nbytes for ref in group.tensors if ref.tensor.dtype == torch.bfloat16)
            groups.append(OutlinedGroup(group.group_id, num_bytes, min(bf16_bytes, num_bytes), is_outer=height > 0))
    return Outline(name, tuple(groups), num_cast)


def _config_of(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.exists():
        raise GroupFileError(
            f"There is no {path}: groups are those of a model's class, which that file names. Give the folder of a model or of "
            f"a pipeline, as save_pretrained writes them."
        )
    return _read_json(path)


def _class_in(config: Mapping[str, Any]) -> tuple[str, str]:
    """The library and the name of the class, "" if a config does not say."""
    names = config.get("architectures")
    if "_class_name" in config or not isinstance(names, list) or not names:
        return "diffusers", str(config.get("_class_name", ""))
    return "transformers", str(names[0])


def _find_class(library: str, name: str, path: Path) -> Any:
    """
    Args:
        library: "diffusers", "transformers", or the name of a pipeline's module, as a pipeline's index has it.
        path: the config.json that errors name.
    """
    try:
        if library in _LIBRARIES:
            module: Any = importlib.import_module(library)
        else:
            module = getattr(importlib.import_module("diffusers.pipelines"), library, None)
    except ImportError as error:
        raise ConfigError(
            f"A plan needs the model's class, and {error.name} is not installed: pip install 'group-offload[diffusers]'"
        ) from error
    found = getattr(module, name, None) if name.isidentifier() else None
    if not isinstance(found, type) or not issubclass(found, nn.Module):
        raise GroupFileError(
            f"{path} is that of a {name!r:.80}, and the {library!r:.80} that is installed has no such model. A plan needs the "
            f"class: install a version that has it."
        )
    return found


def _build(model_class: Any, path: Path, config: dict[str, Any], dtype: torch.dtype | None) -> nn.Module:
    """The model without values, as its library builds it before it loads weights."""
    before = torch.get_default_dtype()
    try:
        if dtype is not None and dtype.itemsize > 1:
            torch.set_default_dtype(dtype)
        if hasattr(model_class, "from_config"):  # diffusers
            with torch.device("meta"):
                model: nn.Module = model_class.from_config(config)
        else:
            options = model_class.config_class.from_pretrained(path.parent, local_files_only=True)
            with torch.device("meta"):
                model = model_class(options)
    except Exception as error:  # of whatever class is named, with whatever values
        raise GroupFileError(f"{model_class.__name__} cannot be built from {path}: {error!s:.200}") from error
    finally:
        torch.set_default_dtype(before)
    return model


def _place(
    model: nn.Module, entries: Mapping[str, Entry], dtype: torch.dtype | None, path: Path, *, is_quantised: bool
) -> int:
    """Give each tensor the dtype and the size that it is loaded with. See [Note: Addresses without memory].

    Args:
        path: the config.json that errors name.

    Returns:
        How many weights have another dtype in their file.

    Raises:
        GroupFileError: the files are those of another model.
    """
    weights = _weights_of(model, entries)
    if not is_quantised:
        _check_sizes(weights, path)
    else:  # its layers hold more tensors than those of the class: scales, for example
        known = {fqn for weight in weights for fqn in weight.fqns}
        weights += [_weight_beside(model, fqn, entry) for fqn, entry in entries.items() if fqn not in known]
    kept = _kept_in_float32(model, dtype)
    usual = _usual_dtype(entries)
    specs, end, num_cast = [], 0, 0
    for weight in weights:
        before = weight.dtype_in_file(usual)
        after = before
        if dtype is not None and before.is_floating_point and weight.is_saved:
            after = torch.float32 if weight.is_in(kept) else dtype
        num_cast += after != before
        specs.append(weight.spec(after, end))
        end += -(-span_of(specs[-1].shape, specs[-1].stride, after.itemsize) // ALIGNMENT) * ALIGNMENT
    memory = flat_view(reserve(max(end, 1)), 0, end)
    for weight, spec in zip(weights, specs, strict=True):
        for table, name in weight.places:
            table[name] = spec.view(memory)
    return num_cast


@dataclass(slots=True)
class _Weight:
    """A parameter or a buffer of the model, and what the files say of it."""

    tensor: torch.Tensor
    is_saved: bool
    """Whether checkpoints have it: a non-persistent buffer is made with the model."""
    entry: Entry | None = None
    fqns: list[str] = field(default_factory=list)
    places: list[tuple[dict[str, Any], str]] = field(default_factory=list)

    def dtype_in_file(self, usual: torch.dtype) -> torch.dtype:
        """
        Args:
            usual: the dtype of a floating point weight that no file has under a name of the model.
        """
        if self.entry is not None:
            return _FLOATS.get(self.entry.dtype, torch.uint8)
        return usual if self.is_saved and self.tensor.is_floating_point() else self.tensor.dtype

    def is_in(self, names: Collection[str]) -> bool:
        return any(part in names for fqn in self.fqns for part in fqn.split("."))

    def spec(self, dtype: torch.dtype, offset: int) -> TensorSpec:
        shape, stride = tuple(self.tensor.shape), tuple(self.tensor.stride())
        if self.entry is not None and self.entry.dtype not in _FLOATS:
            shape, stride = (self.entry.num_bytes,), (1,)
        elif self.entry is not None and self.entry.num_elements != self.tensor.numel():
            shape, stride = (self.entry.num_elements,), (1,)
        return TensorSpec(self.fqns[0], dtype, shape, stride, offset)


def _weights_of(model: nn.Module, entries: Mapping[str, Entry]) -> list[_Weight]:
    found: dict[int, _Weight] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                fqn = f"{path}.{name}" if path else name
                is_saved = name not in module._non_persistent_buffers_set
                weight = found.setdefault(id(tensor), _Weight(tensor, is_saved))
                weight.entry = weight.entry or entries.get(fqn)  # files have one name of a tied weight
                weight.fqns.append(fqn)
                weight.places.append((table, name))
    return list(found.values())


def _check_sizes(weights: Sequence[_Weight], path: Path) -> None:
    """
    Raises:
        GroupFileError: a weight has another size in its file, so the files are those of another model.
    """
    for weight in weights:
        entry = weight.entry
        if entry is not None and entry.dtype in _FLOATS and entry.num_elements != weight.tensor.numel():
            raise GroupFileError(
                f"{path} is that of another model than the files: {weight.fqns[0]} has {entry.num_elements} numbers there, and "
                f"{weight.tensor.numel()} in the model. Save the model there again (save_pretrained), or download it again."
            )


def _weight_beside(model: nn.Module, fqn: str, entry: Entry) -> _Weight:
    """A weight that the class does not have, with the module that its name leads to."""
    module, parts = model, fqn.split(".")
    while len(parts) > 1 and (child := module._modules.get(parts[0])) is not None:
        module = child
        del parts[0]
    return _Weight(torch.empty(0), True, entry, [fqn], [(module._buffers, ".".join(parts))])


def _usual_dtype(entries: Mapping[str, Entry]) -> torch.dtype:
    """The floating point dtype that most bytes of the files have."""
    num_bytes = Counter({"F32": 0})
    for entry in entries.values():
        if entry.dtype in _FLOATS:
            num_bytes[entry.dtype] += entry.num_bytes
    return _FLOATS[num_bytes.most_common(1)[0][0]]


def _kept_in_float32(model: nn.Module, dtype: torch.dtype | None) -> frozenset[str]:
    """Names of modules and weights that the libraries' loaders never cast to `dtype`."""
    usually = getattr(model, "_keep_in_fp32_modules", None) or ()
    always = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    is_diffusers = hasattr(model, "from_config")
    return frozenset(always) | frozenset(usually if is_diffusers or dtype is torch.float16 else ())
