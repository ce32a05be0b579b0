"""Quantized weights of every kind on an accelerator: the bits of the resident quantized model, on every tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from group_offload import apply_group_offloading, weights

from ..support.asserts import assert_same, plain_tensors
from ..support.quantized import KINDS, ON_ACCELERATORS, inputs, is_there, quantized
from ..support.rigs import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # what the packages say about each other
]

ARMS: dict[str, dict[str, Any]] = {
    "RAM": {},
    "leaf level": {"offload_type": "leaf_level"},
    "record_stream": {"record_stream": True},
    "files": {"offload_to_disk_path": "files"},
    "budget": {"vram_budget": "2GiB", "ram_budget": "80%"},
}


def needs(kind: str) -> torch.device:
    package = {**KINDS, **ON_ACCELERATORS}[kind][0]
    if not is_there(package):
        pytest.skip(f"needs {package}")
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return device


def moved(model: nn.Module, device: torch.device) -> nn.Module:
    """`model.to(device)`, in which quanto would pack fp8 for a kernel that adds no bias."""

    def make(weight: torch.Tensor) -> nn.Parameter | None:
        inside = {path: tensor.to(device) for path, tensor in weights.plain_tensors("", weight)}
        is_plain = type(weight).__name__ == "WeightQBytesTensor"
        return nn.Parameter(weights.rewrap(weight, inside), requires_grad=False) if is_plain else None

    weights.remake(model, make)
    return model.to(device)


@pytest.mark.parametrize("level", ["block_level", "leaf_level"])
@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("kind", [*KINDS, *ON_ACCELERATORS])
def test_gradients(kind: str, is_checkpointed: bool, level: str) -> None:
    """Of inputs, as a LoRA gets them. Some libraries keep scales where autograd does not see them."""
    device = needs(kind)

    def gradients(model: Any) -> list[torch.Tensor]:
        model.is_checkpointed = is_checkpointed
        found = []
        for seed in range(3):
            x = inputs(seed).to(device).requires_grad_()
            model(x).float().square().sum().backward()
            assert x.grad is not None
            found.append(x.grad)
        return found

    try:
        reference, model = (quantized(kind, device=device) for _ in range(2))
        expected = gradients(reference)
    except (AssertionError, ImportError, NotImplementedError, RuntimeError, ValueError) as error:
        pytest.skip(f"the library does not train over it here: {error!s:.80}")
    handle = apply_group_offloading(model, offload_type=level)
    assert_same(gradients(model), expected)
    handle.remove()


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("starts", ["in RAM", "on the device"])
@pytest.mark.parametrize("kind", [*KINDS, *ON_ACCELERATORS])
def test_on_every_tier(kind: str, starts: str, arm: str, tmp_path: Path) -> None:
    device = needs(kind)
    home = device if starts == "on the device" or kind in ON_ACCELERATORS else torch.device("cpu")
    options = dict(ARMS[arm])
    if "offload_to_disk_path" in options:
        options["offload_to_disk_path"] = tmp_path
    try:
        reference, model = moved(quantized(kind, device=home), device), quantized(kind, device=home)
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
    assert_same(run(moved(model, device), inputs(0).to(device)), expected[0])
