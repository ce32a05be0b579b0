"""How much RAM there is to take, and how files are read for that."""

from __future__ import annotations

import copy
import errno
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from group_offload import StateError, apply_group_offloading
from group_offload.base import mapping, ram, system
from group_offload.base.ram import available_ram
from group_offload.runtime.copies import cached

from ..support.control_groups import GIB, Cgroups, stat
from ..support.files import failing
from ..support.models import RoutedModel
from ..support.on_device import offload
from ..support.reading import Rig, num_mappings
from ..support.rigs import run
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.tuning import tune


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cgroups:
    return Cgroups(tmp_path, monkeypatch)


def test_no_limit(cgroups: Cgroups) -> None:
    """No control groups, the root alone, a list that nobody understands, and groups that say so."""
    assert available_ram() == 100 * GIB  # no /proc/self/cgroup
    for line in ("0::/", "", "nonsense"):
        cgroups.say(line)
        assert available_ram() == 100 * GIB
    cgroups.say("5:memory:/a", "0::/a")
    cgroups.write("a", memory__max="max", memory__current=GIB, memory__stat=stat(0, 0))
    unlimited = 0x7FFFFFFFFFFFF000  # what version 1 says then
    cgroups.write("a", 1, memory__limit_in_bytes=unlimited, memory__usage_in_bytes=GIB, memory__stat=stat(0, 0))
    assert available_ram() == 100 * GIB


@pytest.mark.parametrize("error", [FileNotFoundError(2, "no /proc"), OSError(24, "no descriptor left")])
def test_where_the_system_shows_no_figures(error: OSError, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A sandbox has no /proc, or the process has no descriptor left: models are offloaded all the same."""
    known = psutil.virtual_memory()

    def fails(*args: object) -> None:
        raise error

    monkeypatch.setattr(psutil, "virtual_memory", fails)
    monkeypatch.setattr(psutil, "Process", fails)
    monkeypatch.setattr(ram, "kernel_says", fails)
    assert ram.ram_in_use() == 0
    assert system.ram_of_machine("total") == known.total
    assert 0 < system.ram_of_machine("available") <= known.total
    model = nn.Linear(4, 4)
    x, expected = torch.ones(1, 4), copy.deepcopy(model)
    handle = apply_group_offloading(model, "cpu", offload_to_disk_path=tmp_path, ram_budget="1GiB")
    assert torch.equal(run(model, x), run(expected, x))
    handle.remove()


def test_what_the_page_cache_can_give_up_counts(cgroups: Cgroups) -> None:
    for name in ("/", "/user/app"):
        cgroups.say(f"0::{name}")
        cgroups.write(name, memory__max=10 * GIB, memory__current=7 * GIB, memory__stat=stat(2 * GIB, GIB))
        assert available_ram() == 6 * GIB
    cgroups.say("12:cpu,cpuacct:/a", "5:memory:/docker/abc", "1:name=systemd:/x", "0::/y")
    limits = {"memory__limit_in_bytes": 8 * GIB, "memory__usage_in_bytes": 5 * GIB}
    cgroups.write("docker/abc", 1, **limits, memory__stat=stat(GIB, 0))
    assert available_ram() == 4 * GIB


def test_version_1_counts_the_page_cache_of_groups_inside(cgroups: Cgroups) -> None:
    """As a batch system makes them: the job has the limit, and a task inside of it the page cache. Else RAM looks scarce once
    files were read.
    """
    cgroups.say("5:memory:/job/step")
    for name, own in (("job", 0), ("job/step", 30)):
        cgroups.write(
            name,
            1,
            memory__limit_in_bytes=(32 if name == "job" else 1 << 30) * GIB,
            memory__usage_in_bytes=31 * GIB,
            memory__stat=f"{stat(0, own * GIB)}\ntotal_inactive_file {10 * GIB}\ntotal_active_file {20 * GIB}",
        )
    assert available_ram() == 31 * GIB


def test_the_nearest_limit_counts(cgroups: Cgroups) -> None:
    """Of all groups around the process's own."""
    cgroups.say("0::/a/b/c")
    cgroups.write("a/b/c", memory__max="max", memory__current=GIB, memory__stat=stat(0, 0))
    cgroups.write("a/b", memory__max=20 * GIB, memory__current=GIB, memory__stat=stat(0, 0))
    cgroups.write("a", memory__max=10 * GIB, memory__current=8 * GIB, memory__stat=stat(GIB, 0))
    assert available_ram() == 3 * GIB
    cgroups.write("a", memory__max=1000 * GIB)
    assert available_ram() == 19 * GIB
    assert ram.fits(17 * GIB) and not ram.fits(19 * GIB)  # some is left for others
    cgroups.write("a/b", memory__max=1000 * GIB)
    assert available_ram() == 100 * GIB
    cgroups.write("a", memory__max=GIB, memory__current=3 * GIB)  # over its limit
    assert available_ram() == 0


@pytest.mark.parametrize("file", ["memory__max", "memory__current", "memory__stat"])
def test_files_that_nobody_understands(file: str, cgroups: Cgroups) -> None:
    cgroups.say("0::/a")
    for broken in ("", "nonsense", "3 4", "-", "anon 5\nodd\n\nfile x\n"):
        cgroups.write("a", memory__max=GIB, memory__current=0, memory__stat=stat(0, 0))
        cgroups.write("a", **{file: broken})
        assert available_ram() == (GIB if file == "memory__stat" else 100 * GIB)
    (cgroups.root / "a" / file.replace("__", ".")).unlink()
    assert available_ram() == (GIB if file == "memory__stat" else 100 * GIB)


def test_a_group_outside_of_what_is_mounted(cgroups: Cgroups) -> None:
    """In a container the name may be that of the host: then the limit of the root that is mounted counts."""
    cgroups.say("0::/../../other")
    cgroups.write("/", memory__max=2 * GIB, memory__current=GIB, memory__stat=stat(0, 0))
    assert available_ram() == GIB
    cgroups.say("0::/kubepods/pod1/not-here")
    assert available_ram() == GIB


# ---------------------------------------------------------------- how files are read


@pytest.fixture
def _may_lock_half(monkeypatch: pytest.MonkeyPatch) -> None:
    tune(monkeypatch, locked_share=0.5)


def set_ram(patch: pytest.MonkeyPatch, num_bytes: int) -> None:
    patch.setattr(cached, "available_ram", lambda: num_bytes)


def ways_of(rig: Rig) -> list[str]:
    return [group.way for group in rig.handle.groups if group.num_bytes]


def test_ways_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes = sum(parameter.nbytes for parameter in RoutedModel([64] * 8).parameters())
    for available, expected in ((0, {"direct"}), (num_bytes, {"direct", "page cache"}), (GIB, {"page cache"})):
        set_ram(monkeypatch, available)
        (folder := tmp_path / str(available)).mkdir()
        with Rig("simulated", "checkpoint", folder, [64] * 8, low_cpu_mem_usage=True) as rig:
            ways = ways_of(rig)
            assert set(ways) == expected
            if len(expected) == 2:
                assert 3 <= ways.count("direct") <= 6
                blocks = [group.way for group in rig.handle.groups if group.group_id.startswith("blocks")]
                assert all(left != right for left, right in zip(blocks[1:-1:2], blocks[2:-1:2], strict=True))
            rig.check(2)


# ---------------------------------------------------------------- locked in the page cache


@pytest.mark.usefixtures("_may_lock_half")
@pytest.mark.parametrize(
    ("tier", "options"),
    [("checkpoint", {}), ("folder", {"offload_type": "leaf_level"}), ("checkpoint", {"record_stream": True})],
)
def test_files_are_locked_once_they_are_cached(
    options: dict[str, Any], tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read first, locked as a pass begins once all of it was read; then copied from there."""
    monkeypatch.setattr(
        "group_offload.stores.source.SourceFile.seems_cached", lambda source, pieces: source.bytes_cached > 0
    )
    with Rig("simulated", tier, tmp_path, **options) as rig:
        assert rig.device is not None and rig.device.pinned_bytes == 0 and "locked" not in ways_of(rig)
        rig.check(4)
        assert set(ways_of(rig)) == {"locked"} and {group.tier for group in rig.handle.groups} == {"file"}
        stats = rig.handle.stats()
        assert stats.pinned_bytes == stats.host_bytes == sum(group.num_bytes for group in rig.handle.groups)
        # The files' pages, and the staging memory of before.
        assert rig.device.pinned_bytes >= sum(parameter.nbytes for parameter in rig.model.parameters())
        before = stats.bytes_read
        rig.check(3)
        after = rig.handle.stats().bytes_read
        assert after["page cache"] == before["page cache"] and after["direct"] == 0
        assert after["locked"] > before["locked"]
        for twin in (rig.model, rig.resident):
            with torch.no_grad():
                twin.blocks[1].up.weight.data.mul_(2)
                twin.shift[2:] += 1
        rig.check(4)
    rig.check_at_rest()


@pytest.mark.usefixtures("_may_lock_half")
@pytest.mark.parametrize("tier", ["checkpoint", "folder"])
def test_files_that_are_cached_already_are_locked_at_once(tier: str, tmp_path: Path) -> None:
    rig = Rig("simulated", tier, tmp_path)
    if tier == "checkpoint":
        (tmp_path / "model.safetensors").read_bytes()
    with rig:
        assert set(ways_of(rig)) == {"locked"}
        rig.check()
        assert rig.handle.stats().bytes_read["page cache"] == 0 and rig.handle.stats().staging_bytes == 0
        assert rig.device is not None and rig.device.pinned_bytes > 0
        if tier == "checkpoint":
            rig.drop()
            assert not num_mappings(tmp_path)


@pytest.mark.usefixtures("_may_lock_half")
@pytest.mark.parametrize(("tier", "case"), [("folder", "low memory"), ("folder", "scarce"), ("checkpoint", "refused")])
def test_never_locked(tier: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with low_cpu_mem_usage, nor where RAM is scarce, nor by a device that refuses."""
    rig = Rig("simulated", tier, tmp_path, low_cpu_mem_usage=case == "low memory")
    device = rig.device
    assert device is not None
    pin = device.pin
    if case == "scarce":
        set_ram(monkeypatch, 100)
    if case == "refused":
        monkeypatch.setattr(device, "pin", lambda memory, undo, *, read_only=False: not read_only and pin(memory, undo))
    with rig:
        rig.check(4)
        stats = rig.handle.stats()
        assert "locked" not in ways_of(rig) and stats.pinned_bytes == stats.bytes_read["locked"] == 0
        assert device.pinned_bytes == stats.staging_bytes


def test_a_process_without_descriptors_is_told_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4)
    before = model.weight.clone()
    monkeypatch.setattr(mapping, "new_shared_file", failing(errno.EMFILE))
    with use_simulated_device(SimulatedDevice(0, "lazy")), pytest.raises(StateError, match="ulimit -n"):
        offload(model)
    assert torch.equal(model.weight, before)
