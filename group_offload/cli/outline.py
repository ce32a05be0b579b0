"""The groups of a model, from the headers of its checkpoint: nothing is loaded, and no class of a model is needed.

What `partition` learns from modules is told from names here: a number in a name is the place of a block in a list. So the
groups are those of block level, as long as the checkpoint names weights as the model does.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..base.layout import ALIGNMENT
from ..base.publish import open_to_read
from ..errors import ConfigError, GroupFileError
from ..stores.safetensors_file import check_tensor_entries, read_header

_BLOCK_MODULES = {
    "AutoencoderKL": ("quant_conv", "post_quant_conv", "encoder", "decoder"),
    "AutoencoderKLQwenImage21": ("quant_conv", "post_quant_conv", "encoder", "decoder"),
    "AutoencoderKLWan": ("quant_conv", "post_quant_conv", "encoder", "decoder"),
    "RFD4ProteinaAutoencoder": ("encoder", "decoder"),
}
"""`_group_offload_block_modules` of diffusers' classes: children that have blocks of their own."""
_LATER = ("mid", "single", "up", "decoder")
"""How names of children begin that are used after the others: checkpoints list weights by the alphabet."""
_FILE_NAMES = ("diffusion_pytorch_model", "model", "diffusion_pytorch_model.fp16", "model.fp16")
"""Of weights in a folder, the one to take first; the libraries' loaders take the first two."""
_SHARD = re.compile(r"(.+?)(?:-([0-9]{5})-of-([0-9]{5}))?(\.[a-z0-9_]+)?\.safetensors")
_FLOATS = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
"""What a cast changes, by the format's names."""
_MAX_CONFIG_BYTES = 16 << 20
_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class OutlinedGroup:
    """Weights that will move together."""

    name: str
    num_bytes: int
    """Of its image, in RAM or a group file."""
    is_outer: bool
    """It is needed around other groups, so it is on the device during the whole pass."""


@dataclass(frozen=True, slots=True)
class Outline:
    """The groups of one model, about in the order in which they are used."""

    model_class: str
    """Empty if the checkpoint does not say."""
    groups: tuple[OutlinedGroup, ...]
    num_cast: int
    """Weights whose dtype in the file is another one."""

    @property
    def num_bytes(self) -> int:
        return sum(group.num_bytes for group in self.groups)


@dataclass(slots=True)
class _Node:
    """A module, as far as names tell."""

    children: dict[str, _Node] = field(default_factory=dict)
    tensors: list[int] = field(default_factory=list)
    """Bytes in the image of those that it holds itself."""

    @property
    def is_list(self) -> bool:
        return bool(self.children) and not self.tensors and all(map(_is_number, self.children))

    @property
    def holds_lists(self) -> bool:
        return any(node.is_list for node in self.all())

    def all(self) -> Iterator[_Node]:
        yield self
        for child in self.children.values():
            yield from child.all()

    @property
    def num_bytes(self) -> int:
        return sum(size for node in self.all() for size in node.tensors)


def find_checkpoint(name: str) -> Path:
    """A file or folder; or what `huggingface_hub` has downloaded before as `name` (owner/model, or a folder in it).

    Raises:
        GroupFileError: there is neither.
    """
    path = Path(os.path.expanduser(name))  # Path's own methods raise if there is no such user,
    has_home = not str(path).startswith("~/")  # nothing in the current folder is meant by that
    if has_home and os.path.exists(path):  # or the name is too long
        return path
    found = _downloaded(name)
    if found is None:
        raise GroupFileError(
            f"There is no {name}: neither a file or folder, nor a model in the local cache of the hub."
        )
    return found


def outline(path: Path, dtype: torch.dtype | None = None) -> dict[str, Outline]:
    """The models of a checkpoint, by their names in the pipeline. A model by itself has the name "".

    Args:
        path: a safetensors file; a model's folder, as `save_pretrained` writes it, with one file or several; or a
            pipeline's folder.
        dtype: what floating point weights are cast to while they are loaded.

    Raises:
        GroupFileError: a file that cannot be read, or has no weights. The message names it.
        ConfigError: `dtype` is not one for weights.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"dtype={dtype}: weights are cast to a floating point dtype, such as torch.bfloat16.")
    if path.is_file():
        return {"": _outline_of([path], "", dtype)}
    index = path / "model_index.json"
    if not index.exists():
        return {"": _outline_of_folder(path, dtype)}
    models = {}
    for name, entry in _read_json(index).items():
        is_part = isinstance(entry, list) and len(entry) == 2 and all(isinstance(part, str) for part in entry)
        if is_part and name.isidentifier() and _files_of(path / name):
            models[name] = _outline_of_folder(path / name, dtype)
    if not models:
        raise GroupFileError(f"{path} is a pipeline without safetensors files.")
    return models


# ------------------------------------------------------------------------------------------------ files


def _outline_of_folder(folder: Path, dtype: torch.dtype | None) -> Outline:
    files = _files_of(folder)
    if not files:
        raise GroupFileError(
            f"{folder} has no safetensors files, nor a model_index.json. Give the folder of one model or of a pipeline, as "
            f"save_pretrained writes them."
        )
    config = folder / "config.json"
    said = _read_json(config) if config.exists() else {}
    names = said.get("architectures")
    name = said.get("_class_name") or (names[0] if isinstance(names, list) and names else "")
    return _outline_of(files, name if isinstance(name, str) else "", dtype, is_diffusers="_class_name" in said)


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


def _downloaded(name: str) -> Path | None:
    """Where the hub's cache has a model, or a folder in it."""
    parts = name.split("/")
    if len(parts) < 2 or not all(re.fullmatch(r"\w[\w.-]*", part) for part in parts):
        return None
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        folder = Path(snapshot_download("/".join(parts[:2]), local_files_only=True), *parts[2:])
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError):
        return None
    return folder if folder.exists() else None


# ------------------------------------------------------------------------------------------------ names to groups


def _outline_of(
    files: Iterable[Path], model_class: str, dtype: torch.dtype | None, *, is_diffusers: bool = False
) -> Outline:
    root = _Node()
    seen: set[str] = set()
    num_cast = 0
    for path in files:
        try:
            for fqn, num_bytes, is_cast in _weights_in(path, dtype):
                if fqn in seen:
                    raise GroupFileError(f"{fqn!r:.80} is in another file too")
                seen.add(fqn)
                num_cast += is_cast
                _add(root, fqn, num_bytes)
        except GroupFileError as error:
            raise GroupFileError(f"{path} is no checkpoint that can be read: {error}.") from error
        except OSError as error:
            raise GroupFileError(f"Cannot read {path}: {error.strerror or error}.") from error
    if not seen:
        raise GroupFileError(f"There are no weights in {', '.join(str(path) for path in files)}.")
    blocks = frozenset(_BLOCK_MODULES.get(model_class, ()))
    groups = tuple(_cut(root, "", blocks, may_descend=not is_diffusers))
    if not groups:
        raise GroupFileError(
            f"There are no weights in {', '.join(str(path) for path in files)}: all tensors are empty."
        )
    return Outline(model_class, groups, num_cast)


def _weights_in(path: Path, dtype: torch.dtype | None) -> Iterator[tuple[str, int, bool]]:
    """Each weight, its bytes in an image, and whether it is cast.

    What is refused is what `safetensors` refuses, and besides what no writer writes: a name that is there twice, fractions in
    fields that nobody reads, an entry that is a list.
    """
    fd = open_to_read(path, follows_links=True)  # the hub's cache is full of links
    try:
        header = read_header(fd)
        data_bytes = os.fstat(fd).st_size - len(header.raw)
    finally:
        os.close(fd)
    for fqn, entry in check_tensor_entries(header.entries, data_bytes).items():
        is_cast = dtype is not None and entry.dtype in _FLOATS and entry.dtype != _name_of(dtype)
        size = entry.num_elements * dtype.itemsize if dtype is not None and is_cast else entry.num_bytes
        yield fqn, -(-size // ALIGNMENT) * ALIGNMENT, is_cast


def _name_of(dtype: torch.dtype) -> str:
    names = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    name = str(dtype).removeprefix("torch.")
    return names.get(name, name.upper().replace("FLOAT", "F").removesuffix("FN"))


def _add(root: _Node, fqn: str, num_bytes: int) -> None:
    *parts, _ = fqn.split(".", _MAX_DEPTH + 1)
    if len(parts) > _MAX_DEPTH:
        raise GroupFileError(f"{fqn!r:.80} is not the name of a weight")
    node = root
    for part in parts:
        node = node.children.setdefault(part, _Node())
    node.tensors.append(num_bytes)


def _cut(module: _Node, path: str, blocks: frozenset[str], *, may_descend: bool) -> Iterator[OutlinedGroup]:
    """As `partition` cuts: a list's elements are blocks, and all else of the module around it is one group.

    Args:
        may_descend: blocks may lie below children, as in text encoders. A diffusers model says itself where (`blocks`).
    """
    rest = sum(module.tensors)
    descend = may_descend and not blocks and not any(child.is_list for child in module.children.values())
    inner: list[OutlinedGroup] = []
    for name in sorted(module.children, key=_order):
        child = module.children[name]
        if name in blocks or (descend and child.holds_lists):
            inner.extend(_cut(child, f"{path}{name}.", blocks, may_descend=may_descend))
        elif child.is_list:
            elements = sorted(child.children.items(), key=lambda item: _order(item[0]))
            inner.extend(OutlinedGroup(f"{path}{name}.{key}", block.num_bytes, False) for key, block in elements)
        else:
            rest += child.num_bytes
    if rest:
        yield OutlinedGroup(f"{path}rest", rest, bool(inner))
    yield from inner


def _order(name: str) -> tuple[int, float, str]:
    rank = next((number for number, start in enumerate(_LATER, 1) if name.startswith(start)), 0)
    return rank, int(name) if _is_number(name) else math.inf, name


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) < 10
