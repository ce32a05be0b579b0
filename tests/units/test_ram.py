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
from group_offload.base import ram, system
from group_offload.base.ram import available_ram
from group_offload.runtime.transfers import page_cache_pins
from group_offload.stores.source import SourceFile

from ..support.control_groups import GIB, Cgroups, stat
from ..support.files import failing
from ..support.on_device import offload
from ..support.reading import Rig, num_mappings
from ..support.rigs import run
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.tuning import tune


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cgroups:
    return Cgroups(tmp_path, monkeypatch)


def test_where_the_system_shows_no_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A sandbox has no /proc, or the process has no descriptor left: models are offloaded all the same."""
    known, fails = psutil.virtual_memory(), failing(errno.EMFILE)
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


LIMITED = {"memory__max": 10 * GIB, "memory__current": 7 * GIB, "memory__stat": stat(2 * GIB, GIB)}
OLD = {"memory__limit_in_bytes": 8 * GIB, "memory__usage_in_bytes": 5 * GIB, "memory__stat": stat(GIB, 0)}
TOTALS = f"{stat(0, 0)}\ntotal_inactive_file {GIB}\ntotal_active_file {2 * GIB}"
UNLIMITED = {"memory__max": "max", "memory__current": GIB, "memory__stat": stat(0, 0)}


@pytest.mark.parametrize(
    ("said", "groups", "expected"),
    [
        ((), {}, 100),
        (("nonsense",), {}, 100),
        (("0::/a",), {"a": UNLIMITED}, 100),
        (("5:memory:/a",), {"1 a": {**OLD, "memory__limit_in_bytes": 0x7FFFFFFFFFFFF000}}, 100),  # it has none
        # What the page cache can give up counts. Version 1 counts it in groups inside apart, as a batch system makes them.
        (("0::/user/app",), {"user/app": LIMITED}, 6),
        (("12:cpu,cpuacct:/a", "5:memory:/docker/abc", "1:name=systemd:/x", "0::/y"), {"1 docker/abc": OLD}, 4),
        (("5:memory:/job/step",), {"1 job": {**OLD, "memory__stat": TOTALS}}, 6),
        # Of all groups around the process's own, the nearest limit.
        (("0::/a/b/c",), {"a/b/c": UNLIMITED, "a/b": {**LIMITED, "memory__max": 20 * GIB}, "a": LIMITED}, 6),
        (
            ("0::/a/b/c",),
            {"a/b": {**LIMITED, "memory__max": 20 * GIB}, "a": {**LIMITED, "memory__max": 1000 * GIB}},
            16,
        ),
        (("0::/a",), {"a": {"memory__max": GIB, "memory__current": 3 * GIB}}, 0),
        # Files that nobody understands.
        (("0::/a",), {"a": {**LIMITED, "memory__max": "nonsense"}}, 100),
        (("0::/a",), {"a": {**LIMITED, "memory__current": ""}}, 100),
        (("0::/a",), {"a": {**LIMITED, "memory__stat": "anon 5\nodd\n\nfile x\n"}}, 3),
        # In a container the name may be that of the host: then the limit of the root that is mounted counts.
        (("0::/../../other",), {"/": LIMITED}, 6),
        (("0::/kubepods/pod1/not-here",), {"/": LIMITED}, 6),
    ],
)
def test_control_groups(
    said: tuple[str, ...], groups: dict[str, dict[str, Any]], expected: int, cgroups: Cgroups
) -> None:
    cgroups.say(*said)
    for name, files in groups.items():
        cgroups.write(name.removeprefix("1 "), 1 if name.startswith("1 ") else 2, **files)
    assert available_ram() == expected * GIB
    assert ram.fits(max(0, expected - 2) * GIB) == (expected > 0) and not ram.fits(
        expected * GIB
    )  # some is left for others


# ---------------------------------------------------------------- how files are read


@pytest.fixture(autouse=True)
def _may_pin_half(monkeypatch: pytest.MonkeyPatch) -> None:
    tune(monkeypatch, pinned_share=0.5)


def ways_of(rig: Rig) -> list[str]:
    return [group.read_mode for group in rig.handle.groups if group.num_bytes]


@pytest.mark.parametrize(("tier", "options"), [("checkpoint", {}), ("folder", {"offload_type": "leaf_level"})])
def test_files_are_locked_once_they_are_cached(
    options: dict[str, Any], tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read first, pinned as a pass begins once all of it was read; then copied from there."""
    monkeypatch.setattr(SourceFile, "is_cached", lambda source, *_: source.bytes_cached > 0)
    with Rig("simulated", tier, tmp_path, **options) as rig:
        assert rig.device is not None and rig.device.pinned_bytes == 0 and "pinned" not in ways_of(rig)
        rig.check(4)
        assert set(ways_of(rig)) == {"pinned"} and {group.tier for group in rig.handle.groups} == {"disk"}
        stats = rig.handle.stats()
        assert stats.pinned_bytes == stats.host_bytes == sum(group.num_bytes for group in rig.handle.groups)
        # The files' pages, and the staging memory of before.
        assert rig.device.pinned_bytes >= sum(parameter.nbytes for parameter in rig.model.parameters())
        before = stats.bytes_read
        rig.check(3)
        after = rig.handle.stats().bytes_read
        assert after["page cache"] == before["page cache"] and after["direct"] == 0
        assert after["pinned"] > before["pinned"]
        for twin in (rig.model, rig.resident):
            with torch.no_grad():
                twin.blocks[1].up.weight.data.mul_(2)
                twin.shift[2:] += 1
        rig.check(4)
    rig.check_at_rest()


@pytest.mark.parametrize("tier", ["checkpoint", "folder"])
def test_files_that_are_cached_already_are_locked_at_once(tier: str, tmp_path: Path) -> None:
    rig = Rig("simulated", tier, tmp_path)
    if tier == "checkpoint":
        (tmp_path / "model.safetensors").read_bytes()
    with rig:
        assert set(ways_of(rig)) == {"pinned"}
        rig.check()
        assert rig.handle.stats().bytes_read["page cache"] == 0 and rig.handle.stats().staging_bytes == 0
        assert rig.device is not None and rig.device.pinned_bytes > 0
        if tier == "checkpoint":
            rig.drop()
            assert not num_mappings(tmp_path)


@pytest.mark.parametrize(("tier", "case"), [("folder", "low memory"), ("folder", "scarce"), ("checkpoint", "refused")])
def test_never_locked(tier: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with low_cpu_mem_usage, nor where RAM is scarce, nor by a device that refuses."""
    rig = Rig("simulated", tier, tmp_path, low_cpu_mem_usage=case == "low memory")
    device = rig.device
    assert device is not None
    pin = device.pin
    if case == "scarce":
        monkeypatch.setattr(page_cache_pins, "available_ram", lambda: 100)
    if case == "refused":
        monkeypatch.setattr(device, "pin", lambda memory, undo, *, read_only=False: not read_only and pin(memory, undo))
    with rig:
        rig.check(4)
        stats = rig.handle.stats()
        assert "pinned" not in ways_of(rig) and stats.pinned_bytes == stats.bytes_read["pinned"] == 0
        assert device.pinned_bytes == stats.staging_bytes


def test_a_process_without_descriptors_is_told_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4)
    before = model.weight.clone()
    monkeypatch.setattr(system, "new_shared_file", failing(errno.EMFILE))
    with use_simulated_device(SimulatedDevice(0, "lazy")), pytest.raises(StateError, match="ulimit -n"):
        offload(model)
    assert torch.equal(model.weight, before)
