"""Packed group files that are page-locked where they lie in the page cache."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from group_offload import GroupFileError, OffloadHandle
from group_offload.base import ram
from group_offload.base.release import wait_for_releases
from group_offload.stores.packed import PackedImage

from ..support.inside import engine_of
from ..support.models import DIM
from ..support.on_device import from_file, offload, packing
from ..support.packed_files import DAMAGES, packed_names, packed_twins, routed, scale
from ..support.simulated import SimulatedDevice, use_simulated_device

SOURCES = ["checkpoint", "folder"]


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with packing(), use_simulated_device(SimulatedDevice(0, "lazy")) as device:
        yield device


def images_of(handle: OffloadHandle) -> list[PackedImage]:
    found = [image for group in engine_of(handle).groups for image in group.images]
    assert not any(image.is_read for image in found)
    return found


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("options", [{}, {"offload_type": "leaf_level"}, {"record_stream": True}], ids=str)
def test_packed_files_take_no_ram_of_the_process(
    options: dict[str, Any], source: str, device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are packed, and as they are found the next time: nothing is read into memory, and nothing else is locked."""
    monkeypatch.setattr("group_offload.stores.packed.read_image", None)
    resident = routed([2400] * 4)
    for _ in range(2):
        gc.collect()  # of other tests
        before = ram.locked.num_bytes
        with packed_twins(device, source, resident, tmp_path, **options) as twins:
            twins.run(2)
            images = images_of(twins.handle)
            assert images and all(image.file is not None and image.file.is_proven for image in images)
            packed = sum(image.num_bytes for image in images)
            assert twins.handle.stats().packed_bytes == packed
            assert packed <= ram.locked.num_bytes - before <= packed + 4096 * 2 * len(images)


@pytest.mark.parametrize("why", ["verify_files", "the device refuses", "no memory to map"])
def test_packed_files_are_read_where_they_cannot_be_locked(
    why: str, device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    pin = device.pin

    def refuse(memory: torch.Tensor, undo: Any, *, read_only: bool = False) -> bool:
        asked.append(memory.numel()) if read_only else None
        return not read_only and pin(memory, undo)

    options = {why: True} if why == "verify_files" else {}
    if why == "the device refuses":
        monkeypatch.setattr(device, "pin", refuse)
    elif why == "no memory to map":
        monkeypatch.setattr(
            "group_offload.stores.source.page_cache_of", lambda fd, at, size: torch.empty(size, device="meta")
        )
    resident = routed([2400] * 4)
    with packed_twins(device, "folder", resident, tmp_path, **options) as twins:
        twins.run(2)
        images = images_of(twins.handle)
        assert len(images) == 4 and all(image.file is None for image in images)
        assert device.pinned_bytes >= twins.handle.stats().packed_bytes == sum(image.num_bytes for image in images)
        assert sum(size > 4096 for size in asked) == (
            why == "the device refuses"
        )  # after the first refusal the device is asked no more


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_locked_file_that_another_program_changes(
    damage: str, source: str, device: SimulatedDevice, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next forward raises: the one before may have used the new bytes, and what was sent ahead may have them.

    Later ones send the weights as they are. Nothing is lost, and what is changed is packed again the next time.
    """
    resident = routed([2400] * 4)
    with packed_twins(device, source, resident, tmp_path) as twins:
        twins.run(2)
        paths = [image.file.source.path for image in images_of(twins.handle)[1:3] if image.file is not None]
        device.synchronize()
        for path in paths:
            DAMAGES[damage][0](path)
        with caplog.at_level(logging.WARNING, "group_offload"):
            with pytest.raises(GroupFileError, match=f"{paths[0].name}.*{DAMAGES[damage][1]}.*No weight is lost"):
                twins.run(2)
            twins.run(3)
        assert any("are lost; the original ones are used" in record.message for record in caplog.records)
        assert len(images_of(twins.handle)) == 2
    for path in paths:
        path.unlink()
    with packed_twins(device, source, resident, tmp_path) as twins:
        twins.run(2)
        assert len(images_of(twins.handle)) == 4


@pytest.mark.parametrize("kind", ["packed", "plain"])
def test_a_backward_looks_at_locked_files_too(kind: str, device: SimulatedDevice, tmp_path: Path) -> None:
    """A file that is page-locked may be changed between a forward and its backward."""
    resident = routed([2400] * 4).requires_grad_(requires_grad=False)
    models: list[Any] = [from_file(resident, tmp_path / "model.safetensors").requires_grad_(requires_grad=False)]
    folder = {"pack": True, "offload_to_disk_path": tmp_path / "groups"} if kind == "packed" else {}
    handle = offload(models[0], **folder)

    def gradient(do: Callable[[], object]) -> torch.Tensor:
        with device.running():
            x = device.put(torch.ones(2, DIM).bfloat16()).requires_grad_()
            y = models[0](x)
            device.synchronize()
            do()
            y.float().sum().backward()
        assert x.grad is not None
        return device.get(x.grad)

    expected = gradient(lambda: None)
    damaged = packed_names(tmp_path)[1] if kind == "packed" else tmp_path / "model.safetensors"
    with pytest.raises(GroupFileError, match=f"{damaged.name}.*another program changed it"):
        gradient(lambda: DAMAGES["written to"][0](damaged))
    if kind == "packed":
        assert torch.equal(gradient(lambda: None), expected)
        models[0].alive.clear()
        handle.remove()
    models.clear()  # a plain model has lost its weights


@pytest.mark.parametrize("do", ["delete", "touch", "rename"])
def test_a_locked_file_with_the_same_bytes_is_used_on(do: str, device: SimulatedDevice, tmp_path: Path) -> None:
    resident = routed([2400] * 4)
    with packed_twins(device, "folder", resident, tmp_path) as twins:
        for file in packed_names(tmp_path):
            if do == "delete":
                file.unlink()
            elif do == "rename":
                file.rename(file.with_suffix(".other"))
            else:
                os.chmod(file, 0o600)
        twins.run(2)
        assert len(images_of(twins.handle)) == 4


def test_damage_from_before_is_named_by_the_set_up(device: SimulatedDevice, tmp_path: Path) -> None:
    """Facts of a file say nothing of what a drive returns. Nothing is sent before it was compared with its hash."""
    resident = routed([2400] * 4)
    with packed_twins(device, "checkpoint", resident, tmp_path):
        pass
    damaged = packed_names(tmp_path)[1]
    DAMAGES["a byte, quietly"][0](damaged)
    with pytest.raises(GroupFileError, match=f"{damaged.name} cannot be used.*Delete it"):
        packed_twins(device, "checkpoint", resident, tmp_path)
    wait_for_releases()
    assert not device.pinned_bytes
    damaged.unlink()
    with packed_twins(device, "checkpoint", resident, tmp_path) as twins:
        twins.run(2)


def test_what_is_packed_beside_runs_stays_plain_if_its_file_is_damaged(
    device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an edit left of a group in its file is packed into another file, which a failing drive returns with other bytes."""
    resident = routed([2400] * 4)
    with packed_twins(device, "folder", resident, tmp_path) as twins:
        twins.run(2)

        monkeypatch.setattr("group_offload.stores.packed._prove", lambda contents: "The file cannot be used")
        twins.edit(scale, 2)
        twins.run(3)
        assert sum(image.file is not None for image in images_of(twins.handle)) == 3
