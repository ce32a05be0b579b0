"""Packed group files that are read in forwards, because RAM has no room for their bytes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from group_offload import GroupFileError, OffloadHandle, api
from group_offload.config import ModelOptions, OffloadConfig
from group_offload.plan.placement import Placement
from group_offload.runtime import packer
from group_offload.stores import packed_files
from group_offload.stores.folder import Folder

from ..support.folders import headers_in
from ..support.inside import engine_of
from ..support.on_device import from_file, offload, packing
from ..support.packed_files import DAMAGES, flip, packed_names
from ..support.packed_models import (
    check,
    end,
    gained,
    groups_of,
    offloaded,
    routed,
    scale,
    settled,
)
from ..support.reads import many_frames, watch_file_reads
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.speeds import use_speeds
from ..support.tuning import tune


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    device = SimulatedDevice(0, "lazy")
    with packing(locked_share=0.0), many_frames(), use_simulated_device(device), watch_file_reads(device):
        yield device


@pytest.mark.parametrize(
    "options", [{}, {"record_stream": True}, {"offload_type": "leaf_level"}, {"use_stream": False}]
)
@pytest.mark.parametrize("source", ["checkpoint", "folder"])
def test_packed_bytes_come_from_the_drive(
    source: str, options: dict[str, Any], device: SimulatedDevice, tmp_path: Path
) -> None:
    resident = routed([2400] * 5)
    model, handle = offloaded(source, resident, tmp_path, **options)
    check(device, model, resident, 3)
    before = settled(handle)
    check(device, model, resident)
    plain = sum(group.num_bytes for group in handle.groups if not group.packed_bytes)
    packed = sum(group.packed_bytes for group in handle.groups)
    size = sum(group.num_bytes for group in handle.groups)
    assert 0 < packed < 0.9 * (size - plain) and plain < size / 10
    assert packed <= gained(handle, before, "bytes_read") <= packed + plain
    assert gained(handle, before, "bytes_unpacked") == size - plain
    assert gained(handle, before, "bytes_onloaded") <= packed + plain
    assert not handle.stats().packed_bytes  # of RAM
    blocks = [group for group in handle.groups if group.packed_bytes]
    assert all(group.tier == "file" and "in files" in group.where for group in blocks)
    if options.get("use_stream") is not False:
        assert gained(handle, before, "stalls") == 0
    end(device, model, resident, handle)


def from_a_slow_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, int]:
    """A resident model, the same one from a file, and its bytes."""
    tune(monkeypatch, device_margin_bytes=0)
    use_speeds(monkeypatch, h2d=2, drive=1)
    resident = routed([2400] * 8)
    model = from_file(resident, tmp_path / "model.safetensors")
    return resident, model, sum(parameter.nbytes for parameter in model.parameters())


def offloaded_with(model: Any, share: float, size: int, folder: Path | None, **options: Any) -> OffloadHandle:
    """The model, packed, with that share of its bytes as a budget of RAM."""
    given = {"pack": True, "ram_budget": "auto", "onload_device": "cpu", **options}
    given |= {} if folder is None else {"offload_to_disk_path": folder / "groups"}
    config = replace(OffloadConfig.from_options(ModelOptions(**given), model), ram_share=int(share * size))
    return api.offload(model, config)


def planned_bytes(handle: OffloadHandle) -> int:
    """The packed bytes that the plan has in RAM."""
    plan = handle.plan.details
    assert plan is not None and plan.problem.budgets.ram_bytes is not None
    assert plan.ram_bytes <= plan.problem.budgets.ram_bytes
    pairs = zip(plan.problem.groups, plan.rests, strict=True)
    return sum(group.packed_bytes for group, rest in pairs if rest is Placement.RAM)


@pytest.mark.parametrize(
    ("has_folder", "vram", "share"),
    [(False, None, 0.5), (True, None, 0.5), (False, 0.9, 0.5), (True, 0.9, 0.5), (True, 0.8, 0.2)],
)
def test_what_a_budget_of_ram_plans_is_packed(
    has_folder: bool,
    vram: float | None,
    share: float,
    device: SimulatedDevice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No reserve is kept besides, and edits change nothing of that. With a folder the rest is read packed."""
    resident, model, size = from_a_slow_drive(tmp_path, monkeypatch)
    monkeypatch.setattr(packer, "available_ram", lambda: size)
    monkeypatch.setattr(packer, "fits", lambda num_bytes: False)
    options = {"vram_budget": int(vram * size)} if vram else {}
    handle = offloaded_with(model, share, size, tmp_path if has_folder else None, **options)
    least = 0 if vram else 0.25 * size  # berths may find no room in the half of the budget that weights have at first
    assert least <= handle.stats().packed_bytes == planned_bytes(handle) <= share * size
    for number in range(5):
        check(device, model, resident)
        assert handle.stats().packed_bytes == planned_bytes(handle) <= share * size, number
    before = settled(handle)
    check(device, model, resident)
    plan = handle.plan.details
    assert plan is not None
    if share == 0.2:
        assert device.peak_bytes_in_use() <= options["vram_budget"]
        assert Placement.FILE in plan.placements and "disk, packed" in str(handle.plan)
        read = [g for g, at in zip(plan.problem.groups, plan.placements, strict=True) if at is Placement.FILE]
        assert plan.prediction.drive_bytes == sum(group.packed_bytes or group.num_bytes for group in read)
        assert gained(handle, before, "bytes_read") == plan.prediction.drive_bytes
    scale(2, model, resident)
    for _ in range(3):
        check(device, model, resident)
    # Of the group that was edited a part is plain, and counts as it is sent.
    assert 0 < handle.stats().packed_bytes <= planned_bytes(handle) <= share * size
    end(device, model, resident, handle)


@pytest.mark.parametrize(("fault", "has_folder"), [("memory", False), ("memory", True), ("page-locking", True)])
def test_a_plan_learns_what_ram_could_not_be_had(
    has_folder: bool, fault: str, device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no RAM for more packed bytes, or the system refuses to page-lock more while weights are packed."""
    resident = routed([2400] * 8)
    model: Any = from_file(resident, tmp_path / "model.safetensors")
    size = sum(parameter.nbytes for parameter in model.parameters())
    if fault == "memory":
        monkeypatch.setattr(packer, "available_ram", lambda: int(0.35 * size))
    else:
        pin, most = device.pin, int(0.3 * size)

        def refusing(memory: torch.Tensor, *args: Any, **options: Any) -> bool:
            return device.pinned_bytes + memory.numel() <= most and pin(memory, *args, **options)

        monkeypatch.setattr(device, "pin", refusing)
    handle = offloaded_with(model, 0.6, size, tmp_path if has_folder else None)
    for _ in range(3):
        check(device, model, resident)
    assert 0 < handle.stats().packed_bytes == planned_bytes(handle) < 0.35 * size
    assert handle.plan.details.prediction.drive_bytes
    end(device, model, resident, handle)


def test_the_next_set_up_reads_and_packs_nothing(
    device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the facts of a file prove is not read, as with weights that are views of a checkpoint."""
    resident = routed([2400] * 4)
    model, handle = offloaded("checkpoint", resident, tmp_path)
    check(device, model, resident, 2)
    before = settled(handle)
    check(device, model, resident)
    assert gained(handle, before, "bytes_read") < 0.9 * sum(group.num_bytes for group in handle.groups)
    assert handle.stats().bytes_unpacked and not handle.stats().packed_bytes
    end(device, model, resident, handle)
    calls: list[str] = []
    for owner, name in ((packed_files, "pack"), (packed_files, "content_of"), (packed_files, "content_of_file")):
        monkeypatch.setattr(owner, name, lambda *args, name=name: calls.append(name))
    monkeypatch.setattr(packed_files.PackedFile, "read", lambda *args: calls.append("read"))
    model, handle = offloaded("checkpoint", resident, tmp_path)
    assert not calls and len(groups_of(handle)) == 4
    check(device, model, resident, 2)
    end(device, model, resident, handle)


@pytest.mark.parametrize("fault", ["no room", "no room for the second"])
def test_a_folder_that_takes_no_packed_files_any_more(
    fault: str,
    device: SimulatedDevice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Weights that run are not lost for it: they are used as they are."""
    resident = routed([2400] * 3)
    model: Any = copy.deepcopy(resident)
    handle = offload(model, pack=True, offload_to_disk_path=tmp_path / "groups")
    check(device, model, resident, 2)
    taken: list[Any] = []
    write = packed_files._write

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if fault == "no room" or taken:
            raise GroupFileError("The folder is full. Free some room.")
        taken.append(write(*args, **kwargs))
        return taken[0]

    monkeypatch.setattr(packed_files, "_write", refuse)
    if fault == "no room":
        monkeypatch.setattr(Folder, "locked", refuse)
    for each in (model, resident):
        with torch.no_grad():
            for block in each.blocks:
                block.down.bias.mul_(2)  # the rest of the group stays in its file
    caplog.clear()
    check(device, model, resident, 3)
    assert caplog.text.count("not packed: The folder is full.") == 1
    assert len(taken) == (fault != "no room")
    end(device, model, resident, handle)


@pytest.mark.parametrize("event", ["deleted", "replaced"])
def test_a_checkpoint_that_lost_its_name_is_packed(event: str, device: SimulatedDevice, tmp_path: Path) -> None:
    """Its weights are still there. What has its name now is not what was packed."""
    resident, other = routed([2400] * 3), routed([2400] * 3)
    scale(2, other)
    checkpoint = tmp_path / "model.safetensors"
    model: Any = from_file(resident, checkpoint)
    if event == "deleted":
        checkpoint.unlink()
    else:
        from_file(other, tmp_path / "other.safetensors")
        (tmp_path / "other.safetensors").replace(checkpoint)
    handle = offload(model, pack=True, offload_to_disk_path=tmp_path / "groups")
    check(device, model, resident, 2)
    assert len(groups_of(handle)) == 3
    end(device, model, resident, handle)
    model, handle = offloaded("checkpoint", other, tmp_path)
    check(device, model, other, 2)
    end(device, model, other, handle)


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("source", ["checkpoint", "folder"])
def test_edits_do_not_fill_the_folder(
    source: str, share: float, device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was edited is packed in RAM. What is left of its group in the file is packed into one more file, once."""
    tune(monkeypatch, locked_share=share)
    resident = routed([2400] * 2)
    model, handle = offloaded(source, resident, tmp_path)
    first, counts = packed_names(tmp_path), []
    for _ in range(3):
        scale(1.5, model, resident)
        check(device, model, resident, 2)
        counts.append(len(packed_names(tmp_path)))
    assert len({*counts}) == 1 and counts[0] <= len(first) + 1
    end(device, model, resident, handle)
    headers_in(tmp_path / "groups")


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_damaged_while_it_is_used(damage: str, device: SimulatedDevice, tmp_path: Path) -> None:
    """The forward raises an error that names the file; the next one reads the weights as they are. Nothing is lost."""
    resident = routed([2400] * 4)
    model, handle = offloaded("folder", resident, tmp_path)
    check(device, model, resident, 2)
    group = groups_of(handle)[2]
    image = group.parts[0].blob.packed
    assert image.is_read
    do, message = DAMAGES[damage]
    engine_of(handle)._lookahead.abandon()  # else the group may be read already
    do(image.file.source.path)
    with pytest.raises(GroupFileError, match=message) as caught:
        check(device, model, resident)
    assert image.file.source.path.name in str(caught.value) and "No weight is lost" in str(caught.value)
    assert group.group_id in str(caught.value)
    check(device, model, resident, 3)
    named = {info.group_id: info for info in handle.groups}
    assert not named[group.group_id].packed_bytes and named[group.group_id].tier == "file"
    assert sum(info.packed_bytes > 0 for info in handle.groups) == 3
    end(device, model, resident, handle)
    image.file.source.path.unlink()
    model, handle = offloaded("folder", resident, tmp_path)
    check(device, model, resident, 2)
    assert len(groups_of(handle)) == 4
    end(device, model, resident, handle)


def test_damage_from_before_the_set_up_is_found_by_the_first_read(device: SimulatedDevice, tmp_path: Path) -> None:
    """The file has the size and the time of change that it had."""
    resident = routed([2400] * 3)
    model, handle = offloaded("checkpoint", resident, tmp_path)
    end(device, model, resident, handle)
    flip(packed_names(tmp_path)[1])
    model, handle = offloaded("checkpoint", resident, tmp_path)
    assert len(groups_of(handle)) == 3
    with pytest.raises(GroupFileError, match=r"is wrong \(XXH3"):
        check(device, model, resident)
    check(device, model, resident, 3)
    end(device, model, resident, handle)
