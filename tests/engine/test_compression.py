"""Compressed weights: what is sent, what they take, that edits are seen, and files of them that are pinned in the page cache.

The order of their streams: test_streams.py.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from group_offload import DeviceError, OffloadHandle, StorageError, api, from_pretrained
from group_offload.base import ram
from group_offload.base.release import wait_for_releases
from group_offload.base.tuning import tuning
from group_offload.runtime import compressor
from group_offload.stores.compressed import CompressedImage, PinnedMemory

from ..support import tiny_models as tiny
from ..support.compressed_files import (
    DAMAGES,
    compressed_names,
    compressed_twins,
    gained,
    groups_of,
    routed,
    scale,
    settled,
)
from ..support.inside import engine_of, wait_until_enqueued
from ..support.models import DIM
from ..support.on_device import Twins, compression, from_file, offload, twin_on
from ..support.reads import watch_file_reads
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.tuning import tune


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with compression(), use_simulated_device(SimulatedDevice(0, "lazy")) as device:
        yield device


@pytest.mark.parametrize("options", [{}, {"record_stream": True}, {"offload_type": "leaf_level"}], ids=str)
def test_compressed_bytes_cross_the_link(options: dict[str, Any], device: SimulatedDevice) -> None:
    with Twins(device, routed([2400] * 6), compress=True, **options) as twins:
        twins.run(3)
        device.synchronize()
        waits, before = device.num_host_waits, twins.handle.stats()
        twins.step()
        assert device.num_host_waits == waits
        plain = sum(group.num_bytes for group in twins.handle.groups if not group.compressed_bytes)
        compressed = sum(group.compressed_bytes for group in twins.handle.groups)
        size = sum(group.num_bytes for group in twins.handle.groups)
        parts = [part.blob.compressed for group in engine_of(twins.handle).groups for part in group.parts]
        assert gained(twins.handle, before, "copies") <= sum(
            1 if each is None else len(each.layout.strips) for each in parts
        )
        assert 0 < compressed < 0.9 * (size - plain)
        assert gained(twins.handle, before, "bytes_onloaded") <= compressed + plain
        assert gained(twins.handle, before, "bytes_decompressed") == size - plain
        assert gained(twins.handle, before, "stalls") == 0
        assert twins.handle.stats().compressed_bytes == compressed
        assert all(("compressed to" in group.location) == (group.compressed_bytes > 0) for group in twins.handle.groups)


def test_a_checkpoint_takes_no_ram_but_what_is_compressed(device: SimulatedDevice, tmp_path: Path) -> None:
    """The offloaded weights stay views of the file. The page cache is not pinned for blobs that are compressed."""
    model = from_file(routed([600] * 4), tmp_path / "model.safetensors")
    places = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    with Twins(device, model, compress=True) as twins:
        stats = twins.handle.stats()
        blocks = [group for group in twins.handle.groups if group.compressed_bytes]
        assert len(blocks) == 4 and all("model.safetensors" in group.location for group in blocks)
        assert stats.compressed_bytes == sum(group.compressed_bytes for group in blocks)
        twins.run(2)
        stats = twins.handle.stats()
        plain = sum(group.num_bytes for group in twins.handle.groups if not group.compressed_bytes)
        size = sum(group.num_bytes for group in twins.handle.groups)
        assert stats.host_bytes - stats.compressed_bytes <= plain
        assert stats.bytes_read["direct"] + stats.bytes_read["page cache"] <= 4 * size
        assert {name: tensor.data_ptr() for name, tensor in twins.model.named_parameters()} == places


def test_weights_in_fp8_are_compressed(device: SimulatedDevice) -> None:
    from diffusers.hooks import apply_layerwise_casting

    models = routed([9600] * 3), routed([9600] * 3)
    for model in models:
        apply_layerwise_casting(model, torch.float8_e4m3fn, torch.bfloat16, skip_modules_pattern=())
    with Twins(device, *models, compress=True) as twins:
        twins.run(2, torch.randn(3, DIM).bfloat16())
        before = settled(twins.handle)
        twins.run(1, torch.randn(3, DIM).bfloat16())
        compressed, size = groups_of(twins.handle), sum(group.num_bytes for group in twins.handle.groups)
        assert len(compressed) == 3 and sum(group.compressed_bytes for group in compressed) < 0.9 * size
        assert gained(twins.handle, before, "bytes_decompressed") == sum(group.num_bytes for group in compressed)


@pytest.mark.parametrize("source", ["checkpoint", "ram"])
def test_what_was_edited_is_compressed_again(source: str, device: SimulatedDevice, tmp_path: Path) -> None:
    """Else the compressed bytes of weights are sent that were edited since."""

    def change(model: Any, number: int) -> None:
        with torch.no_grad():
            if number == 1:
                model.blocks[number].up.weight.data = model.blocks[number].up.weight * 3
            else:
                model.blocks[number].up.weight.mul_(1.5)

    resident = routed([2400] * 4)  # an edited tensor of a checkpoint is compressed apart from the others
    with Twins(device, twin_on(source, resident, tmp_path)[0], resident, compress=True) as twins:
        twins.run(2)
        for number in range(3):  # they are sent as they are at first, and compressed later
            twins.edit(change, number)
            twins.run(2)
            before = settled(twins.handle)
            twins.run()
            blocks = [group for group in twins.handle.groups if group.group_id.startswith("blocks")]
            assert all(group.compressed_bytes for group in blocks)
            assert gained(twins.handle, before, "bytes_decompressed") > 0.95 * sum(group.num_bytes for group in blocks)


def test_what_forwards_change_stays_plain(device: SimulatedDevice) -> None:
    """Else compressed bytes are sent for what a forward has changed."""
    with Twins(device, routed([600] * 3, counts=True), compress=True) as twins:
        twins.run()
        assert not any(group.compressed_bytes for group in twins.handle.groups)
        twins.run(3)
        assert twins.handle.stats().bytes_decompressed == sum(
            g.num_bytes for g in twins.handle.groups if g.group_id.startswith("blocks")
        )


@pytest.mark.parametrize(
    ("options", "is_read"), [({}, False), ({}, True), ({"record_stream": True}, True), ({"use_stream": False}, False)]
)
def test_device_memory_is_the_formula(
    options: dict[str, Any], is_read: bool, device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What plain weights take, and three times the largest strip of a compressed blob; once, if it is read in each forward."""
    if is_read:
        tune(monkeypatch, pinned_share=0.0, chunk_bytes=4096)
        options = {**options, "offload_to_disk_path": tmp_path}
    with Twins(device, routed([600, 600, 900, 600, 600]), compress=True, **options) as twins:
        sizes = sorted((g.num_bytes for g in twins.handle.groups if g.compressed_bytes), reverse=True)
        rest = sum(g.num_bytes for g in twins.handle.groups) - sum(sizes)
        strip = max(group.largest_strip(is_read=is_read) for group in engine_of(twins.handle).groups)
        assert strip <= tuning().strip_bytes < max(sizes)
        with watch_file_reads(device):
            for _ in range(3):
                twins.step()
                wait_until_enqueued(twins.handle)
        limit = rest + sum(sizes[: 1 if options.get("use_stream") is False else 2]) + (1 if is_read else 3) * strip
        assert device.peak_bytes <= limit
        assert twins.handle.stats().peak_device_bytes == device.peak_bytes


@pytest.mark.parametrize("source", ["ram", "checkpoint"])
def test_what_does_not_fit_into_ram_stays_plain(
    source: str,
    device: SimulatedDevice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """There is no folder that compressed bytes could be read from: test_compressed_reads.py."""
    options = {}
    if source == "ram":
        monkeypatch.setattr(compressor, "fits", lambda num_bytes: False)
    else:
        options["offload_device"] = "disk"
        tune(monkeypatch, pinned_share=0.0)
    resident = routed([600] * 3)
    model = twin_on(source, resident, tmp_path)[0]
    with (
        caplog.at_level(logging.WARNING, "group_offload"),
        watch_file_reads(device),
        Twins(device, model, resident, compress=True, **options) as twins,
    ):
        assert "Raise ram_budget" in caplog.text and "offload_to_disk_path" in caplog.text
        twins.run(2)
        assert not twins.handle.stats().bytes_decompressed


def test_a_transformer_that_is_opened_compressed(device: SimulatedDevice, tmp_path: Path) -> None:
    resident = tiny.flux_transformer().bfloat16()
    resident.save_pretrained(tmp_path)
    given = {
        name: value.bfloat16() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in tiny.flux_inputs().items()
    }
    expected = tiny.call(resident, given)
    model = from_pretrained(type(resident), tmp_path, torch_dtype=torch.bfloat16, onload_device="cpu", compress=True)
    with torch.no_grad(), device.running():
        there = {name: device.put(value) if torch.is_tensor(value) else value for name, value in given.items()}
        assert torch.equal(device.get(model(**there)[0]), expected)
    handle = api.handle_of(model)
    assert handle is not None and handle.stats().bytes_decompressed
    handle.remove()


def test_a_device_that_cannot_decompress(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("group_offload.config.can_decompress", lambda device: False)
    with pytest.raises(DeviceError, match=r"compress=True needs Triton on .* Run `pip install triton`"):
        offload(nn.Linear(2, 2), compress=True)


# ---------------------------------------------------------------- files that are pinned in the page cache


def images_of(handle: OffloadHandle) -> list[CompressedImage]:
    found = [image for group in engine_of(handle).groups for image in group.images]
    assert not any(image.is_read for image in found)
    return found


@pytest.mark.parametrize("source", ["checkpoint", "folder"])
@pytest.mark.parametrize("options", [{}, {"offload_type": "leaf_level"}, {"record_stream": True}], ids=str)
def test_compressed_files_take_no_ram_of_the_process(
    options: dict[str, Any], source: str, device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are compressed, and as they are found the next time: nothing is read into memory, and nothing else is pinned."""
    monkeypatch.setattr(PinnedMemory, "begin", None)
    resident = routed([2400] * 4)
    for _ in range(2):
        gc.collect()  # of other tests
        before = ram.pinned.num_bytes
        with compressed_twins(device, source, resident, tmp_path, **options) as twins:
            twins.run(2)
            images = images_of(twins.handle)
            assert images and all(image.file is not None and image.file.is_proven for image in images)
            compressed = sum(image.num_bytes for image in images)
            assert twins.handle.stats().compressed_bytes == compressed
            assert compressed <= ram.pinned.num_bytes - before <= compressed + 4096 * 2 * len(images)


@pytest.mark.parametrize("why", ["verify_checksums", "the device refuses", "no memory to map"])
def test_compressed_files_are_read_where_they_cannot_be_locked(
    why: str, device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    pin = device.pin

    def refuse(memory: torch.Tensor, undo: Any, *, read_only: bool = False) -> bool:
        asked.append(memory.numel()) if read_only else None
        return not read_only and pin(memory, undo)

    options = {why: True} if why == "verify_checksums" else {}
    if why == "the device refuses":
        monkeypatch.setattr(device, "pin", refuse)
    elif why == "no memory to map":
        monkeypatch.setattr(
            "group_offload.stores.source.page_cache_of", lambda fd, size: torch.empty(size, device="meta")
        )
    resident = routed([2400] * 4)
    with compressed_twins(device, "folder", resident, tmp_path, **options) as twins:
        twins.run(2)
        images = images_of(twins.handle)
        assert len(images) == 4 and all(image.file is None for image in images)
        assert device.pinned_bytes >= twins.handle.stats().compressed_bytes == sum(image.num_bytes for image in images)
        # After the first refusal the device is asked no more.
        assert sum(size > 4096 for size in asked) == (why == "the device refuses")


@pytest.mark.parametrize("source", ["checkpoint", "folder"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_locked_file_that_another_program_changes(
    damage: str, source: str, device: SimulatedDevice, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next forward raises: the one before may have used the new bytes, and what was sent ahead may have them.

    Later ones send the weights as they are. Nothing is lost, and what is changed is compressed again the next time.
    """
    resident = routed([2400] * 4)
    with compressed_twins(device, source, resident, tmp_path) as twins:
        twins.run(2)
        paths = [image.file.source.path for image in images_of(twins.handle)[1:3] if image.file is not None]
        device.synchronize()
        for path in paths:
            DAMAGES[damage][0](path)
        with caplog.at_level(logging.WARNING, "group_offload"):
            with pytest.raises(StorageError, match=f"{paths[0].name}.*{DAMAGES[damage][1]}.*No weight is lost"):
                twins.run(2)
            twins.run(3)
        assert any("are lost; the original ones are used" in record.message for record in caplog.records)
        assert len(images_of(twins.handle)) == 2
    for path in paths:
        path.unlink()
    with compressed_twins(device, source, resident, tmp_path) as twins:
        twins.run(2)
        assert len(images_of(twins.handle)) == 4


@pytest.mark.parametrize("kind", ["compressed", "plain"])
def test_a_backward_looks_at_locked_files_too(kind: str, device: SimulatedDevice, tmp_path: Path) -> None:
    """A file that is pinned may be changed between a forward and its backward."""
    resident = routed([2400] * 4).requires_grad_(requires_grad=False)
    models: list[Any] = [from_file(resident, tmp_path / "model.safetensors").requires_grad_(requires_grad=False)]
    folder = {"compress": True, "offload_to_disk_path": tmp_path / "groups"} if kind == "compressed" else {}
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
    damaged = compressed_names(tmp_path)[1] if kind == "compressed" else tmp_path / "model.safetensors"
    with pytest.raises(StorageError, match=f"{damaged.name}.*another program changed it"):
        gradient(lambda: DAMAGES["written to"][0](damaged))
    if kind == "compressed":
        assert torch.equal(gradient(lambda: None), expected)
        models[0].alive.clear()
        handle.remove()
    models.clear()  # a plain model has lost its weights


def test_damage_from_before_is_named_by_the_set_up(device: SimulatedDevice, tmp_path: Path) -> None:
    """Facts of a file say nothing of what a disk returns. Nothing is sent before it was compared with its hash."""
    resident = routed([2400] * 4)
    with compressed_twins(device, "checkpoint", resident, tmp_path):
        pass
    damaged = compressed_names(tmp_path)[1]
    DAMAGES["a byte, quietly"][0](damaged)
    with pytest.raises(StorageError, match=f"{damaged.name} cannot be used.*Delete it"):
        compressed_twins(device, "checkpoint", resident, tmp_path)
    wait_for_releases()
    assert not device.pinned_bytes
    damaged.unlink()
    with compressed_twins(device, "checkpoint", resident, tmp_path) as twins:
        twins.run(2)


def test_what_is_compressed_beside_runs_stays_plain_if_its_file_is_damaged(
    device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an edit left of a group is compressed into another file, which a failing disk returns with other bytes."""
    resident = routed([2400] * 4)
    with compressed_twins(device, "folder", resident, tmp_path) as twins:
        twins.run(2)

        monkeypatch.setattr("group_offload.stores.compressed._prove", lambda contents: "The file cannot be used")
        twins.edit(scale, 2)
        twins.run(3)
        assert sum(image.file is not None for image in images_of(twins.handle)) == 3
