"""Encoders of transformers that pipelines call by a method, and not by their forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from group_offload import apply_group_offloading

from ..matrix.case import tensors_of
from ..matrix.cases import CASES
from ..support.rigs import LEVELS, OnloadedOnly
from ..support.simulated import SimulatedDevice, use_simulated_device

Put = Callable[[torch.Tensor], torch.Tensor]
CALLS: dict[str, Callable[[Any, Put], Any]] = {
    "text": lambda model, put: model.get_text_features(input_ids=put(torch.arange(8)[None])),
    "image": lambda model, put: model.get_image_features(pixel_values=put(torch.ones(1, 3, 16, 16))),
    "positions": lambda model, put: model.get_image_features(
        pixel_values=put(torch.ones(1, 3, 24, 24)), interpolate_pos_encoding=True
    ),
    "both": lambda model, put: (
        model(input_ids=put(torch.arange(8)[None]), pixel_values=put(torch.ones(1, 3, 16, 16))).logits_per_image
    ),
}


def outputs_of(model: Any, name: str, put: Put = torch.clone) -> list[torch.Tensor]:
    with torch.no_grad():
        return [*tensors_of(CALLS[name](model, put))]


@pytest.mark.parametrize("level", LEVELS)
def test_bits(level: str) -> None:
    """In lazy order nothing is read too early, and nothing where it rests, which is no memory of the device."""
    reference, model, device = CASES["SiglipModel"].make(), CASES["SiglipModel"].make(), SimulatedDevice(0, "lazy")
    with use_simulated_device(device):
        handle = apply_group_offloading(model, "cpu", offload_type=level)
        for name in (*CALLS, *CALLS):
            with device.running(), OnloadedOnly(model):
                outputs = outputs_of(model, name, device.put)
            for found, expected in zip(outputs, outputs_of(reference, name), strict=True):
                assert torch.equal(device.get(found), expected), name
        device.synchronize()
        del outputs, found
        handle.remove()
