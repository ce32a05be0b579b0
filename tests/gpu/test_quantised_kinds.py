"""Quantised weights of every kind on an accelerator: the bits of the resident quantised model, on every tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from group_offload import apply_group_offloading

from ..support.asserts import assert_same, plain_tensors
from ..support.quantised import KINDS, ON_ACCELERATORS, inputs, is_there, quantised
from ..support.rigs import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
    pytest.mark.filterwarnings("ignore"),  # what the packages say about each other
]

ARMS: dict[str, dict[str, Any]] = {
    "RAM": {},
    "leaf level": {"offload_type": "leaf_level"},
    "record_stream": {"record_stream": True},
    "files": {"offload_to_disk_path": "files"},
    "budget": {"vram_budget": "2GiB", "ram_budget": "80%"},
}


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("starts", ["in RAM", "on the device"])
@pytest.mark.parametrize("kind", [*KINDS, *ON_ACCELERATORS])
def test_on_every_tier(kind: str, starts: str, arm: str, tmp_path: Path) -> None:
    package = {**KINDS, **ON_ACCELERATORS}[kind][0]
    if not is_there(package):
        pytest.skip(f"needs {package}")
    device = torch.accelerator.current_accelerator()
    home = device if starts == "on the device" or kind in ON_ACCELERATORS else torch.device("cpu")
    options = dict(ARMS[arm])
    if "offload_to_disk_path" in options:
        options["offload_to_disk_path"] = tmp_path
    try:
        reference, model = quantised(kind, device=home).to(device), quantised(kind, device=home)
        expected = [run(reference, inputs(seed).to(device)) for seed in range(3)]
    except (AssertionError, ImportError, NotImplementedError, RuntimeError, ValueError) as error:
        pytest.skip(f"the library does not run it here: {error!s:.80}")
    handle = apply_group_offloading(model, **options)
    for _ in range(2):
        for seed in range(3):
            assert_same(run(model, inputs(seed).to(device)), expected[seed])
    # (A wrapper that was made on the device goes on to name it.)
    assert all(part.device.type == "cpu" for _, part in plain_tensors(model))
    handle.remove()
    assert_same(run(model.to(device), inputs(0).to(device)), expected[0])
