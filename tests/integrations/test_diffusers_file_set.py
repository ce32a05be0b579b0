"""The files that diffusers' models are written to are those of diffusers' own engine, by name and by content."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.hooks import apply_group_offloading as stock_group_offloading
from safetensors import safe_open
from torch import nn

from group_offload import apply_group_offloading

from ..support import tiny_models as tiny

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # it is deprecated, and the only place that says what is expected
    from diffusers.utils.testing_utils import _get_expected_safetensors_files

DIFFUSERS_MODELS = [name for name in tiny.MODELS if name not in ("clip", "t5")]

any_model = pytest.mark.parametrize("name", DIFFUSERS_MODELS)
any_level = pytest.mark.parametrize("level", ["block_level", "leaf_level"])


def file_name(group_id: str) -> str:
    return f"group_{hashlib.sha256(group_id.encode()).hexdigest()[:16]}.safetensors"


def files_in(folder: Path) -> set[str]:
    return {file.name for file in folder.glob("*.safetensors")}


def tensors_in(file: Path) -> dict[str, torch.Tensor]:
    """The tensors in a group file, without the bytes that align them."""
    with safe_open(file, "pt") as opened:
        return {key: opened.get_tensor(key) for key in opened.keys() if not key.startswith("__padding")}  # noqa: SIM118


def contents_of(file: Path) -> list[str]:
    """Digests of the tensors in a file, whatever their keys."""
    return sorted(
        hashlib.sha256(repr(tuple(t.shape)).encode() + t.contiguous().numpy().tobytes()).hexdigest()
        for t in tensors_in(file).values()
    )


def write_both(name: str, folder: Path, device: torch.device, **options: Any) -> tuple[nn.Module, Path, Path]:
    make, _ = tiny.MODELS[name]
    model = make()
    apply_group_offloading(model, device, offload_to_disk_path=folder / "ours", **options)
    if options["offload_type"] == "leaf_level":
        options.pop("num_blocks_per_group", None)
    stock_group_offloading(make(), torch.device("cpu"), offload_to_disk_path=str(folder / "stock"), **options)
    return model, folder / "ours", folder / "stock"


@any_model
@pytest.mark.parametrize("count", [1, 2])
def test_block_level_files_are_those_of_diffusers(name: str, count: int, device: torch.device, tmp_path: Path) -> None:
    model, ours, stock = write_both(name, tmp_path, device, offload_type="block_level", num_blocks_per_group=count)
    assert files_in(ours) == files_in(stock)
    for file in files_in(ours):
        assert contents_of(ours / file) == contents_of(stock / file), file
    if not getattr(model, "_group_offload_block_modules", None):
        expected = _get_expected_safetensors_files(model, str(ours), "block_level", count)
        assert {Path(path).name for path in expected} == files_in(ours)


@any_model
def test_leaf_level_files_are_those_of_diffusers(name: str, device: torch.device, tmp_path: Path) -> None:
    model, ours, stock = write_both(name, tmp_path, device, offload_type="leaf_level")
    ids = {file_name(path): path for path, _ in model.named_modules()}
    extra = sorted(ids.get(file, file) for file in files_in(ours) - files_in(stock))
    missing = sorted(ids.get(file, file) for file in files_in(stock) - files_in(ours))
    assert (extra, missing) == ([], [])
    for file in files_in(ours):
        assert contents_of(ours / file) == contents_of(stock / file), ids.get(file, file)


@any_model
@any_level
def test_everything_is_written_exactly_once(name: str, level: str, device: torch.device, tmp_path: Path) -> None:
    make, _ = tiny.MODELS[name]
    expected = {**dict(make().named_parameters()), **dict(make().named_buffers())}
    model = make()
    apply_group_offloading(model, device, offload_type=level, offload_to_disk_path=tmp_path)
    found: dict[str, torch.Tensor] = {}
    for file in tmp_path.glob("*.safetensors"):
        tensors = tensors_in(file)
        assert not tensors.keys() & found.keys()
        found.update(tensors)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@any_level
def test_equal_weights_in_new_parameters_keep_their_file(level: str, device: torch.device, tmp_path: Path) -> None:
    """The group is cut anew and finds its file again: what is outdated must not take that file along."""
    model = tiny.flux_transformer()
    handle = apply_group_offloading(model, device, offload_type=level, offload_to_disk_path=tmp_path)
    expected = tiny.call(model, tiny.flux_inputs())
    before = files_in(tmp_path)
    for name, part in model.transformer_blocks[0].named_modules():
        for key, parameter in part.named_parameters(recurse=False):
            setattr(part, key, nn.Parameter(parameter.detach().clone()))
            assert parameter is not getattr(part, key), name
    assert torch.equal(tiny.call(model, tiny.flux_inputs()), expected)
    assert all((tmp_path / name).exists() for group in handle.groups for name in group.where.split(", "))
    assert files_in(tmp_path) == before
