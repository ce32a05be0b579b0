"""Compressed weights on a real accelerator: the kernel, its stream, and what stays on the device compressed."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from group_offload import api, apply_group_offloading
from group_offload.config import ModelOptions, OffloadConfig

from ..support.inside import engine_of
from ..support.rigs import run
from ..support.tuning import tune

pytestmark = pytest.mark.gpu

WIDTH = 1024


@pytest.fixture
def x(device: torch.device) -> torch.Tensor:
    return torch.randn(256, WIDTH, dtype=torch.bfloat16, device=device)


def check(model: nn.Module, x: torch.Tensor, expected: torch.Tensor, passes: int = 4) -> None:
    for _ in range(passes):
        assert torch.equal(run(model, x), expected)


@pytest.mark.parametrize("source", ["ram", "checkpoint", "folder"])
def test_bits_and_bytes(
    source: str,
    model: nn.Module,
    x: torch.Tensor,
    device: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tune(monkeypatch, pinned_share=0.5)  # as users have it
    expected = run(copy.deepcopy(model).to(device), x)
    options: dict[str, Any] = {"offload_to_disk_path": tmp_path / "groups"} if source == "folder" else {}
    if source == "checkpoint":
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        model.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
    for _ in range(2):  # a folder has the compressed files by the second time
        handle = apply_group_offloading(model, device, compress=True, **options)
        check(model, x, expected)
        before = handle.stats()
        check(model, x, expected, 1)
        stats = handle.stats()
        size = sum(group.num_bytes for group in handle.groups)
        assert stats.bytes_onloaded["ram"] - before.bytes_onloaded["ram"] < 0.75 * size
        assert stats.stalls == before.stalls and 0 < stats.compressed_bytes < 0.75 * size
        images = [image for group in engine_of(handle).groups for image in group.images]
        are_in_place = source == "folder" and engine_of(handle)._compressor._may_pin  # where the driver locks files
        assert images and all((image.file is not None) == are_in_place for image in images)
        handle.remove()


def test_weights_in_fp8(model: nn.Module, x: torch.Tensor, device: torch.device) -> None:
    from diffusers.hooks import apply_layerwise_casting

    resident = copy.deepcopy(model)
    for each in (model, resident):
        apply_layerwise_casting(each, torch.float8_e4m3fn, torch.bfloat16, skip_modules_pattern=())
    expected = run(resident.to(device), x)
    handle = apply_group_offloading(model, device, compress=True)
    check(model, x, expected)
    stats, size = handle.stats(), sum(group.num_bytes for group in handle.groups)
    assert stats.bytes_decompressed and 0 < stats.compressed_bytes < 0.9 * size
    handle.remove()


@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.parametrize("options", [{}, {"record_stream": True}, {"offload_type": "leaf_level"}], ids=str)
def test_compressed_files_are_read(
    options: dict[str, Any], share: float, model: nn.Module, x: torch.Tensor, device: torch.device, tmp_path: Path
) -> None:
    """What a budget of RAM leaves on the disk is read in fewer bytes than plain weights, and has the same bits."""
    expected = run(copy.deepcopy(model).to(device), x)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    size = sum(parameter.nbytes for parameter in model.parameters())
    budgets = {"ram_budget": "auto", "offload_to_disk_path": tmp_path / "groups", "onload_device": device, **options}
    read: dict[bool, float] = {}
    for compress in (False, True, True):  # the second time the compressed files are there
        model.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
        handle = api.offload(
            model,
            replace(
                OffloadConfig.from_options(ModelOptions(compress=compress, **budgets), model),
                ram_quota_bytes=int(share * size),
            ),
        )
        check(model, x, expected, 4)
        engine_of(handle).transfer.reader.wait_until_enqueued()
        before = sum(handle.stats().bytes_read.values())
        check(model, x, expected, 4)
        engine_of(handle).transfer.reader.wait_until_enqueued()
        read[compress] = (sum(handle.stats().bytes_read.values()) - before) / 4
        stats = handle.stats()
        assert not compress or (stats.bytes_decompressed and stats.compressed_bytes <= share * size)
        handle.remove()
    assert 0 < read[True] < 0.75 * read[False]


def test_groups_stay_on_the_device_compressed(model: nn.Module, x: torch.Tensor, device: torch.device) -> None:
    expected = run(copy.deepcopy(model).to(device), x)
    size = sum(parameter.nbytes for parameter in model.parameters())
    handle = apply_group_offloading(model, device, compress=True, vram_budget=None)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    check(model, x, expected, 2)
    handle.remove()
    budget = torch.cuda.max_memory_reserved() + size // 2  # what other tests left is in it
    handle = apply_group_offloading(model, device, compress=True, vram_budget=budget)
    check(model, x, expected, 8)
    before = handle.stats()
    check(model, x, expected, 2)
    after = handle.stats()
    print(handle.plan)
    assert after.resident_bytes and after.bytes_decompressed > before.bytes_decompressed
    assert sum(after.bytes_onloaded.values()) - sum(before.bytes_onloaded.values()) < 1.8 * after.compressed_bytes
    handle.remove()
