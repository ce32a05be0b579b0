"""What people see of time: ranges in a profile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ..support.models import RoutedModel
from ..support.on_device import Twins, options_for
from ..support.simulated import SimulatedDevice, use_simulated_device


@pytest.mark.parametrize(
    "options", [{}, {"in_files": True}, {"offload_type": "leaf_level"}, {"use_stream": False}], ids=str
)
def test_a_profile_names_the_groups(options: dict[str, Any]) -> None:
    """Hazard: nobody can tell which block compute waits for (diffusers #14702)."""
    with (
        use_simulated_device(SimulatedDevice(0, "lazy")) as device,
        options_for(options) as options,
        Twins(device, RoutedModel([16, 24, 16, 16]), **options) as twins,
    ):
        twins.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
            twins.step()
            twins.step()  # the first one began to load what it needs first before
        # What is in no block is small here, and stays on the device.
        groups = {group.group_id for group in twins.handle.groups if group.num_bytes}
        found = [event.name for event in profile.events() or () if event.name.startswith("group_offload.")]
        ranges = [name.removeprefix("group_offload.").split(" ") for name in found]
        for what in ("onload", "wait", "compute"):
            names = {name for kind, *names in ranges if kind == what for name in names}
            stays = {name for name in groups if "unmatched" in name and what != "compute"}
            assert groups - stays <= names <= groups, what
