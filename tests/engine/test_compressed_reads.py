"""Compressed group files that are read in forwards, because RAM has no room for their bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from group_offload import OffloadHandle, StorageError
from group_offload.plan.placement import Placement
from group_offload.runtime import compressor
from group_offload.stores import compressed_files
from group_offload.stores.folder import Folder

from ..support.compressed_files import (
    DAMAGES,
    compressed_names,
    compressed_twins,
    flip,
    gained,
    groups_of,
    routed,
    scale,
    settled,
)
from ..support.folders import headers_in
from ..support.inside import engine_of
from ..support.on_device import Twins, compression, from_file
from ..support.reads import many_frames, watch_file_reads
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.speeds import use_speeds
from ..support.tuning import tune


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    device = SimulatedDevice(0, "lazy")
    with compression(pinned_share=0.0), many_frames(), use_simulated_device(device), watch_file_reads(device):
        yield device


@pytest.mark.parametrize(
    "options", [{}, {"record_stream": True}, {"offload_type": "leaf_level"}, {"use_stream": False}]
)
@pytest.mark.parametrize("source", ["checkpoint", "folder"])
def test_compressed_bytes_come_from_the_drive(
    source: str, options: dict[str, Any], device: SimulatedDevice, tmp_path: Path
) -> None:
    resident = routed([2400] * 5)
    with compressed_twins(device, source, resident, tmp_path, **options) as twins:
        twins.run(3)
        before = settled(twins.handle)
        twins.run()
        plain = sum(group.num_bytes for group in twins.handle.groups if not group.compressed_bytes)
        compressed = sum(group.compressed_bytes for group in twins.handle.groups)
        size = sum(group.num_bytes for group in twins.handle.groups)
        assert 0 < compressed < 0.9 * (size - plain) and plain < size / 10
        assert compressed <= gained(twins.handle, before, "bytes_read") <= compressed + plain
        assert gained(twins.handle, before, "bytes_decompressed") == size - plain
        assert gained(twins.handle, before, "bytes_onloaded") <= compressed + plain
        assert not twins.handle.stats().compressed_bytes  # of RAM
        blocks = [group for group in twins.handle.groups if group.compressed_bytes]
        assert all(group.tier == "disk" and "in files" in group.location for group in blocks)
        if options.get("use_stream") is not False:
            assert gained(twins.handle, before, "stalls") == 0


SLOW_WIDTHS = [2400] * 8
SLOW_BYTES = sum(parameter.nbytes for parameter in routed(SLOW_WIDTHS).parameters())


def from_a_slow_disk(share: float, device: SimulatedDevice, folder: Path, *, has_folder: bool, **options: Any) -> Twins:
    """A model from a file, compressed, with that share of its bytes as a budget of RAM."""
    resident = routed(SLOW_WIDTHS)
    model = from_file(resident, folder / "model.safetensors")
    options |= {"offload_to_disk_path": folder / "groups"} if has_folder else {}
    return Twins(
        device, model, resident, compress=True, ram_budget="auto", ram_quota_bytes=int(share * SLOW_BYTES), **options
    )


def planned_bytes(handle: OffloadHandle) -> int:
    """The compressed bytes that the plan has in RAM."""
    plan = handle.plan.details
    assert plan is not None and plan.problem.ram_budget is not None
    assert plan.ram_bytes <= plan.problem.ram_budget
    pairs = zip(plan.problem.groups, plan.rests, strict=True)
    return sum(group.compressed_bytes for group, rest in pairs if rest is Placement.RAM)


@pytest.mark.parametrize(
    ("has_folder", "vram", "share"),
    [(False, None, 0.5), (True, None, 0.5), (False, 0.9, 0.5), (True, 0.9, 0.5), (True, 0.8, 0.2)],
)
def test_what_a_budget_of_ram_plans_is_compressed(
    has_folder: bool,
    vram: float | None,
    share: float,
    device: SimulatedDevice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No reserve is kept besides, and edits change nothing of that. With a folder the rest is read compressed."""
    tune(monkeypatch, device_margin_bytes=0)
    use_speeds(monkeypatch, h2d=2, disk=1)
    size = SLOW_BYTES
    monkeypatch.setattr(compressor, "available_ram", lambda: size)
    monkeypatch.setattr(compressor, "fits", lambda num_bytes: False)
    options = {"vram_budget": int(vram * size)} if vram else {}
    with from_a_slow_disk(share, device, tmp_path, has_folder=has_folder, **options) as twins:
        # Compressed buffers may find no room in the half of the budget that weights have at first.
        least = 0 if vram else 0.25 * size
        assert least <= twins.handle.stats().compressed_bytes == planned_bytes(twins.handle) <= share * size
        for number in range(5):
            twins.run()
            assert twins.handle.stats().compressed_bytes == planned_bytes(twins.handle) <= share * size, number
        before = settled(twins.handle)
        twins.run()
        plan = twins.handle.plan.details
        assert plan is not None
        if share == 0.2:
            assert device.peak_bytes_in_use() <= options["vram_budget"]
            assert Placement.FILE in plan.placements and "disk, compressed" in str(twins.handle.plan)
            read = [g for g, at in zip(plan.problem.groups, plan.placements, strict=True) if at is Placement.FILE]
            assert plan.prediction.disk_bytes == sum(group.compressed_bytes or group.num_bytes for group in read)
            assert gained(twins.handle, before, "bytes_read") == plan.prediction.disk_bytes
        twins.edit(scale, 2)
        twins.run(3)
        # Of the group that was edited a part is plain, and counts as it is sent.
        assert 0 < twins.handle.stats().compressed_bytes <= planned_bytes(twins.handle) <= share * size


@pytest.mark.parametrize(("fault", "has_folder"), [("memory", False), ("memory", True), ("page-locking", True)])
def test_a_plan_learns_what_ram_could_not_be_had(
    has_folder: bool, fault: str, device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no RAM for more compressed bytes, or the system refuses to pin more while weights are compressed."""
    if fault == "memory":
        monkeypatch.setattr(compressor, "available_ram", lambda: int(0.35 * SLOW_BYTES))
    else:
        pin, most = device.pin, int(0.3 * SLOW_BYTES)

        def refusing(memory: torch.Tensor, *args: Any, **options: Any) -> bool:
            return device.pinned_bytes + memory.numel() <= most and pin(memory, *args, **options)

        monkeypatch.setattr(device, "pin", refusing)
    with from_a_slow_disk(0.6, device, tmp_path, has_folder=has_folder) as twins:
        twins.run(3)
        assert 0 < twins.handle.stats().compressed_bytes == planned_bytes(twins.handle) < 0.35 * SLOW_BYTES
        assert twins.handle.plan.details.prediction.disk_bytes


def test_the_next_set_up_reads_and_compresses_nothing(
    device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the facts of a file prove is not read, as with weights that are views of a checkpoint."""
    resident = routed([2400] * 4)
    with compressed_twins(device, "checkpoint", resident, tmp_path) as twins:
        twins.run(2)
    calls: list[str] = []
    for name in ("compress", "content_of", "content_of_file"):
        monkeypatch.setattr(compressed_files, name, lambda *args, name=name: calls.append(name))
    monkeypatch.setattr(compressed_files.CompressedFile, "read", lambda *args: calls.append("read"))
    with compressed_twins(device, "checkpoint", resident, tmp_path) as twins:
        assert not calls and len(groups_of(twins.handle)) == 4
        twins.run(2)


@pytest.mark.parametrize("fault", ["no room", "no room for the second"])
def test_a_folder_that_takes_no_compressed_files_any_more(
    fault: str,
    device: SimulatedDevice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Weights that run are not lost for it: they are used as they are."""
    resident = routed([2400] * 3)
    with compressed_twins(device, "folder", resident, tmp_path) as twins:
        twins.run(2)
        taken: list[Any] = []
        write = compressed_files._write

        def refuse(*args: Any, **kwargs: Any) -> Any:
            if fault == "no room" or taken:
                raise StorageError("The folder is full. Free some room.")
            taken.append(write(*args, **kwargs))
            return taken[0]

        monkeypatch.setattr(compressed_files, "_write", refuse)
        if fault == "no room":
            monkeypatch.setattr(Folder, "hold", refuse)
        # The rest of each group stays in its file.
        twins.edit(lambda model: [block.down.bias.data.mul_(2) for block in model.blocks])
        caplog.clear()
        twins.run(3)
        assert caplog.text.count("not compressed: The folder is full.") == 1
        assert len(taken) == (fault != "no room")


@pytest.mark.parametrize("event", ["deleted", "replaced"])
def test_a_checkpoint_that_lost_its_name_is_compressed(event: str, device: SimulatedDevice, tmp_path: Path) -> None:
    """Its weights are still there. What has its name now is not what was compressed."""
    resident, other = routed([2400] * 3), routed([2400] * 3)
    scale(other, 2)
    checkpoint = tmp_path / "model.safetensors"
    model = from_file(resident, checkpoint)
    if event == "deleted":
        checkpoint.unlink()
    else:
        from_file(other, tmp_path / "other.safetensors")
        (tmp_path / "other.safetensors").replace(checkpoint)
    with Twins(device, model, resident, compress=True, offload_to_disk_path=tmp_path / "groups") as twins:
        twins.run(2)
        assert len(groups_of(twins.handle)) == 3
    with compressed_twins(device, "checkpoint", other, tmp_path) as twins:
        twins.run(2)


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("source", ["checkpoint", "folder"])
def test_edits_do_not_fill_the_folder(
    source: str, share: float, device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was edited is compressed in RAM. What is left of its group in the file is compressed into one more file, once."""
    tune(monkeypatch, pinned_share=share)
    resident = routed([2400] * 2)
    with compressed_twins(device, source, resident, tmp_path) as twins:
        first, counts = compressed_names(tmp_path), []
        for _ in range(3):
            twins.edit(scale, 1.5)
            twins.run(2)
            counts.append(len(compressed_names(tmp_path)))
        assert len({*counts}) == 1 and counts[0] <= len(first) + 1
    headers_in(tmp_path / "groups")


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_damaged_while_it_is_used(damage: str, device: SimulatedDevice, tmp_path: Path) -> None:
    """The forward raises an error that names the file; the next one reads the weights as they are. Nothing is lost."""
    resident = routed([2400] * 4)
    with compressed_twins(device, "folder", resident, tmp_path) as twins:
        twins.run(2)
        group = groups_of(twins.handle)[2]
        image = group.parts[0].blob.compressed
        assert image.is_read
        do, message = DAMAGES[damage]
        engine_of(twins.handle)._prefetcher.abandon()  # else the group may be read already
        do(image.file.source.path)
        with pytest.raises(StorageError, match=message) as caught:
            twins.run()
        assert image.file.source.path.name in str(caught.value) and "No weight is lost" in str(caught.value)
        assert group.group_id in str(caught.value)
        twins.run(3)
        named = {info.group_id: info for info in twins.handle.groups}
        assert not named[group.group_id].compressed_bytes and named[group.group_id].tier == "disk"
        assert sum(info.compressed_bytes > 0 for info in twins.handle.groups) == 3
    image.file.source.path.unlink()
    with compressed_twins(device, "folder", resident, tmp_path) as twins:
        twins.run(2)
        assert len(groups_of(twins.handle)) == 4


def test_damage_from_before_the_set_up_is_found_by_the_first_read(device: SimulatedDevice, tmp_path: Path) -> None:
    """The file has the size and the time of change that it had."""
    resident = routed([2400] * 3)
    with compressed_twins(device, "checkpoint", resident, tmp_path):
        pass
    flip(compressed_names(tmp_path)[1])
    with compressed_twins(device, "checkpoint", resident, tmp_path) as twins:
        assert len(groups_of(twins.handle)) == 3
        with pytest.raises(StorageError, match=r"is wrong \(XXH3"):
            twins.run()
        twins.run(3)
