"""The command `compress`: a model's weights in compressed group files, found again, compressed again once they changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import FluxTransformer2DModel
from safetensors import safe_open

from group_offload.compression.codec import decompress
from group_offload.plan.budgets import describe_bytes

from ..support.folders import headers_in
from ..support.terminal import Terminal
from ..support.tuning import tune


def save(path: Path, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> FluxTransformer2DModel:
    torch.manual_seed(seed)
    sizes = {"num_layers": 1, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 8}
    sizes |= {"in_channels": 4, "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)}
    model = FluxTransformer2DModel(**sizes)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.save_pretrained(path, max_shard_size="1MB")
    return model


@pytest.fixture(autouse=True)
def _small_groups_are_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    tune(monkeypatch, min_compressed_bytes=1024)


def compressed_files(folder: Path) -> dict[str, int]:
    names = [name for name, header in headers_in(folder).items() if header.compressed is not None]
    return {name: (folder / name).stat().st_mtime_ns for name in names}


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """The weights that the compressed files of a folder decompress to."""
    weights = {}
    for name, header in headers_in(folder).items():
        if header.compressed is not None:
            with safe_open(folder / name, "pt") as file:
                data = file.get_tensor("compressed")
            out = torch.empty(header.compressed.plain_bytes, dtype=torch.uint8)
            decompress(data.clone(), header.compressed, out)
            weights |= {spec.fqn: spec.view(out, 0) for spec in header.tensors}
    return weights


def test_compress(run: Terminal, tmp_path: Path) -> None:
    """Once, and once more when the model has changed. Hazard: a compressed file of a checkpoint that changed since is
    used."""
    checkpoint, folder = tmp_path / "model", tmp_path / "groups"
    original = save(checkpoint).state_dict()
    run("compress", checkpoint, folder)
    before = compressed_files(folder)
    found = weights_in(folder)
    assert found.keys() == original.keys()
    assert all(torch.equal(found[name], value) for name, value in original.items())
    text = run("compress", checkpoint, folder)
    assert f"FluxTransformer2DModel, {len(before)} groups" in text and "0.7" in text
    assert f"less than {describe_bytes(sum(each.nbytes for each in original.values()))} in {folder}" in text
    assert compressed_files(folder) == before
    save(checkpoint, seed=1)
    run("compress", checkpoint, folder)
    after = compressed_files(folder)
    assert len(after) == 2 * len(before) and before.items() < after.items()
    run("compress", checkpoint, folder)
    assert compressed_files(folder) == after


def test_a_pipeline_whose_weights_are_cast(run: Terminal, tmp_path: Path) -> None:
    """Hazard: `compress` leaves out parts of a pipeline that wasn't downloaded completely, and doesn't say so."""
    path, folder = tmp_path / "pipe", tmp_path / "groups"
    save(path / "transformer", dtype=torch.float32)
    index = {"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"]}
    index |= {"vae": ["diffusers", "AutoencoderKL"]}  # which is not there
    (path / "model_index.json").write_text(json.dumps(index))
    said = run("compress", path, folder, "--dtype", "bfloat16", "--device", "cpu")
    assert "transformer" in said and "Not compressed: vae. It is not there" in said
    assert compressed_files(folder)
    assert {each.dtype for each in weights_in(folder).values()} == {torch.bfloat16}
    cast = [(folder / name).read_bytes() for name, header in headers_in(folder).items() if header.compressed is None]
    cast_bytes = sum(len(data) - 8 - int.from_bytes(data[:8], "little") for data in cast)
    assert f"cast are written there first, and take {describe_bytes(cast_bytes)} more" in said


def test_a_disk_with_room_for_one_of_two_models(run: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard: `compress` finds out after hours that the disk is too small."""
    path, folder = tmp_path / "pipe", tmp_path / "groups"
    index = {name: ["diffusers", "FluxTransformer2DModel"] for name in ("transformer", "transformer_2")}
    sizes = [sum(each.nbytes for each in save(path / name).parameters()) for name in index]
    (path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline", **index}))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=sizes[0] * 3 // 2))
    said = run("compress", path, folder, status=2)
    assert f"Not enough disk space in {folder}: {describe_bytes(sizes[0] * 3 // 2)} free, " in said
    assert "needed. Free some" in said
    assert not compressed_files(folder)
