"""Packed weights: what is sent, what they take, and that edits are seen. The order of their streams: test_streams.py."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from group_offload import (
    ConfigError,
    DeviceError,
    api,
    from_pretrained,
)
from group_offload.base.tuning import tuning
from group_offload.runtime import packer

from ..support import tiny_models as tiny
from ..support.inside import engine_of, wait_until_enqueued
from ..support.on_device import forward, from_file, offload, packing
from ..support.packed_models import (
    check,
    check_edits,
    end,
    gained,
    inputs,
    routed,
    twin_of,
)
from ..support.reads import watch_file_reads
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.tuning import tune


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with packing(), use_simulated_device(SimulatedDevice(0, "lazy")) as device:
        yield device


@pytest.mark.parametrize("options", [{}, {"record_stream": True}, {"offload_type": "leaf_level"}], ids=str)
def test_packed_bytes_cross_the_link(options: dict[str, Any], device: SimulatedDevice) -> None:
    model = routed([2400] * 6)
    resident = copy.deepcopy(model)
    handle = offload(model, pack=True, **options)
    check(device, model, resident, 3)
    device.synchronize()
    waits, before = device.num_host_waits, handle.stats()
    forward(device, model, inputs())
    assert device.num_host_waits == waits
    plain = sum(group.num_bytes for group in handle.groups if not group.packed_bytes)
    packed = sum(group.packed_bytes for group in handle.groups)
    size = sum(group.num_bytes for group in handle.groups)
    parts = [part.blob.packed for group in engine_of(handle).groups for part in group.parts]
    assert gained(handle, before, "copies") <= sum(1 if each is None else len(each.layout.strips) for each in parts)
    assert 0 < packed < 0.9 * (size - plain)
    assert gained(handle, before, "bytes_onloaded") <= packed + plain
    assert gained(handle, before, "bytes_unpacked") == size - plain
    assert gained(handle, before, "stalls") == 0
    assert handle.stats().packed_bytes == packed
    assert all(("packed to" in group.where) == (group.packed_bytes > 0) for group in handle.groups)
    end(device, model, resident, handle)


def test_a_checkpoint_takes_no_ram_but_what_is_packed(device: SimulatedDevice, tmp_path: Path) -> None:
    """The weights at rest stay views of the file. The page cache is not page-locked for blobs that are packed."""
    resident = routed([600] * 4)
    model: Any = from_file(resident, tmp_path / "model.safetensors")
    places = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    handle = offload(model, pack=True)
    stats = handle.stats()
    blocks = [group for group in handle.groups if group.packed_bytes]
    assert len(blocks) == 4 and all("model.safetensors" in group.where for group in blocks)
    assert stats.packed_bytes == sum(group.packed_bytes for group in blocks)
    check(device, model, resident, 2)
    stats = handle.stats()
    assert stats.host_bytes - stats.packed_bytes <= sum(g.num_bytes for g in handle.groups if not g.packed_bytes)
    assert stats.bytes_read["direct"] + stats.bytes_read["page cache"] <= 4 * sum(g.num_bytes for g in handle.groups)
    assert {name: tensor.data_ptr() for name, tensor in model.named_parameters()} == places
    model.alive.clear()
    handle.remove()


@pytest.mark.parametrize("source", ["checkpoint", "ram"])
def test_what_was_edited_is_packed_again(source: str, device: SimulatedDevice, tmp_path: Path) -> None:
    """Else the packed bytes of weights are sent that were edited since."""
    resident = routed([2400] * 4)  # an edited tensor of a checkpoint is packed apart from the others
    model = twin_of(resident, source, tmp_path)
    handle = offload(model, pack=True)
    check(device, model, resident, 2)
    check_edits(device, model, resident, handle)
    end(device, model, resident, handle)


def test_what_forwards_change_stays_plain(device: SimulatedDevice) -> None:
    """Else packed bytes are sent for what a forward has changed."""
    model = routed([600] * 3, counts=True)
    resident = copy.deepcopy(model)
    handle = offload(model, pack=True)
    check(device, model, resident)
    assert not any(group.packed_bytes for group in handle.groups)
    check(device, model, resident, 3)
    assert handle.stats().bytes_unpacked == sum(g.num_bytes for g in handle.groups if g.group_id.startswith("blocks"))
    model.alive.clear()
    handle.remove()


@pytest.mark.parametrize(
    ("options", "is_read"), [({}, False), ({}, True), ({"record_stream": True}, True), ({"use_stream": False}, False)]
)
def test_device_memory_is_the_formula(
    options: dict[str, Any], is_read: bool, device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What plain weights take, and three times the largest strip of a packed blob; once, if it is read in each forward."""
    model = routed([600, 600, 900, 600, 600])
    if is_read:
        tune(monkeypatch, locked_share=0.0, chunk_bytes=4096)
        options = {**options, "offload_to_disk_path": tmp_path}
    handle = offload(model, pack=True, **options)
    sizes = sorted((g.num_bytes for g in handle.groups if g.packed_bytes), reverse=True)
    rest = sum(g.num_bytes for g in handle.groups) - sum(sizes)
    strip = max(group.largest_strip(is_read=is_read) for group in engine_of(handle).groups)
    assert strip <= tuning().strip_bytes < max(sizes)
    with watch_file_reads(device):
        for _ in range(3):
            forward(device, model, inputs())
            wait_until_enqueued(handle)
    limit = rest + sum(sizes[: 1 if options.get("use_stream") is False else 2]) + (1 if is_read else 3) * strip
    assert device.peak_bytes <= limit
    assert handle.stats().peak_device_bytes == device.peak_bytes
    model.alive.clear()
    handle.remove()


@pytest.mark.parametrize("source", ["ram", "checkpoint"])
def test_what_does_not_fit_into_ram_stays_plain(
    source: str,
    device: SimulatedDevice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """There is no folder that packed bytes could be read from: test_packed_reads.py."""
    options = {}
    if source == "ram":
        monkeypatch.setattr(packer, "fits", lambda num_bytes: False)
    else:
        options["offload_device"] = "disk"
        tune(monkeypatch, locked_share=0.0)
    resident = routed([600] * 3)
    model = twin_of(resident, source, tmp_path)
    with caplog.at_level(logging.WARNING, "group_offload"), watch_file_reads(device):
        handle = offload(model, pack=True, **options)
        assert "Raise ram_budget" in caplog.text and "offload_to_disk_path" in caplog.text
        check(device, model, resident, 2)
        assert not handle.stats().bytes_unpacked
        end(device, model, resident, handle)


def test_a_transformer_that_is_opened_packed(device: SimulatedDevice, tmp_path: Path) -> None:
    resident = tiny.flux_transformer().bfloat16()
    resident.save_pretrained(tmp_path)
    given = {
        name: value.bfloat16() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in tiny.flux_inputs().items()
    }
    expected = tiny.call(resident, given)
    model = from_pretrained(type(resident), tmp_path, torch_dtype=torch.bfloat16, onload_device="cpu", pack=True)
    with torch.no_grad(), device.running():
        there = {name: device.put(value) if torch.is_tensor(value) else value for name, value in given.items()}
        assert torch.equal(device.get(model(**there)[0]), expected)
    handle = api.handle_of(model)
    assert handle is not None and handle.stats().bytes_unpacked
    handle.remove()


@pytest.mark.parametrize("where", ["simulated", "without triton", "cpu"])
def test_options(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other values, and devices that cannot unpack, are refused."""
    if where == "without triton":
        monkeypatch.setattr("group_offload.config.can_unpack", lambda device: False)
    with use_simulated_device(SimulatedDevice()) if where != "cpu" else nullcontext():
        if where == "simulated":
            with pytest.raises(ConfigError, match=r"pack='auto': expected True or False"):
                offload(nn.Linear(2, 2), pack="auto")
            with pytest.raises(ConfigError, match="pack=True contradicts low_cpu_mem_usage=True"):
                offload(nn.Linear(2, 2), pack=True, low_cpu_mem_usage=True)
            return
        why = (
            "pip install triton" if where == "without triton" else r"pack=True needs a GPU, but onload_device is 'cpu'"
        )
        with pytest.raises((ConfigError, DeviceError), match=why):
            offload(nn.Linear(2, 2), pack=True)
