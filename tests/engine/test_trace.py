"""What people see of time: the timeline of passes, ranges in a profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from group_offload import GroupFileError, StateError, apply_group_offloading

from ..support.models import RoutedModel, Stop, inputs, make
from ..support.on_device import Twins, options_for
from ..support.rigs import run
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.traces import assert_no_overlap, lanes_of

OPTIONS: list[dict[str, Any]] = [
    {},
    {"record_stream": True},
    {"offload_type": "leaf_level"},
    {"in_files": True},
    {"low_cpu_mem_usage": True, "offload_type": "leaf_level"},
    {"use_stream": False},
]
LANES = ["file reads", "H2D", "compute", "stalls"]


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with use_simulated_device(SimulatedDevice(0, "lazy")) as device:
        yield device


def group_of(name: str) -> tuple[str, int]:
    """The first group that a slice names, and how many there are."""
    first, _, others = name.partition(" and ")
    return first, 1 + int(others.removesuffix(" more") or 0)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_timeline(options: dict[str, Any], tmp_path: Path, device: SimulatedDevice) -> None:
    with options_for(options) as options, Twins(device, RoutedModel([16, 24, 16, 16]), **options) as twins:
        twins.step()
        handle = twins.handle
        before = handle.stats()
        with handle.trace(tmp_path / "trace.json"):
            twins.step()
            twins.step()
        after = handle.stats()
        lanes = lanes_of(tmp_path / "trace.json")
        assert list(lanes) == LANES
        sizes = {group.group_id: group.num_bytes for group in handle.groups}
        for name, slices in lanes.items():
            assert {group_of(each["name"])[0] for each in slices} <= sizes.keys(), name
        # Each copy of the two passes is there, and all compute.
        assert sum(group_of(each["name"])[1] for each in lanes["H2D"]) == after.onloads - before.onloads
        sent = sum(after.bytes_onloaded.values()) - sum(before.bytes_onloaded.values())
        assert sum(each["args"]["bytes"] for each in lanes["H2D"]) == sent
        computed = Counter(each["name"] for each in lanes["compute"])
        assert computed.keys() == {name for name, size in sizes.items() if size} and min(computed.values()) >= 2
        assert all(each["args"]["bytes"] == sizes[each["name"]] for each in lanes["compute"])
        assert_no_overlap(lanes["H2D"])
        read = sum(each["args"]["bytes"] for each in lanes["file reads"])  # ahead of slots, too
        assert sent <= read <= sent + after.staging_bytes if handle.config.rests_in_files else read == 0
        if "use_stream" not in options:
            assert lanes["stalls"]  # on this device copies are as late as they can be
        # The module goes on, untraced.
        written = (tmp_path / "trace.json").read_bytes()
        twins.step()
        assert (tmp_path / "trace.json").read_bytes() == written


def test_trace_of_a_forward_that_raises(tmp_path: Path, device: SimulatedDevice) -> None:
    """The error comes through, the file is there, and the next trace works: one at a time. A bad path is found before the
    forward."""
    with Twins(device, RoutedModel([16] * 3)) as twins:
        twins.model.stop_at = 1
        with pytest.raises(Stop), twins.handle.trace(tmp_path / "one.json"):
            twins.step()
        assert lanes_of(tmp_path / "one.json")["compute"]
        with twins.handle.trace(tmp_path / "two.json"):
            pass
        assert not any(lanes_of(tmp_path / "two.json").values())
        twins.model.stop_at = -1
        with twins.handle.trace(tmp_path / "two.json"):
            with pytest.raises(StateError, match="already"), twins.handle.trace(tmp_path / "three.json"):
                pytest.fail("the block ran")
            twins.step()
        twins.check()
        assert len(lanes_of(tmp_path / "two.json")["compute"]) == 4 and not (tmp_path / "three.json").exists()
        for bad, said in (
            ("nowhere/trace.json", "nowhere is not a folder"),
            (".", "is a folder"),
            ("a\0b", "character"),
        ):
            with pytest.raises(GroupFileError, match=said), twins.handle.trace(tmp_path / bad):
                pytest.fail("the block ran")
        twins.step()
    with pytest.raises(StateError, match="no longer offloaded"), twins.handle.trace(tmp_path / "three.json"):
        pytest.fail("the block ran")


def test_a_profile_names_the_groups(tmp_path: Path) -> None:
    model = make()
    handle = apply_group_offloading(model, "cpu", offload_to_disk_path=tmp_path)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        run(model, inputs())
    names = {event.name for event in profile.events() if event.name.startswith("group_offload.")}
    groups = [group.group_id for group in handle.groups]
    assert names == {f"group_offload.{what} {group}" for group in groups for what in ("onload", "compute")}
