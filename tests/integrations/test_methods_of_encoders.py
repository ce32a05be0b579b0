"""Encoders of transformers that pipelines call by a method, and not by their forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CLIPConfig, CLIPModel, SiglipConfig, SiglipModel

from group_offload import apply_group_offloading

from ..support import tiny_models as tiny
from ..support.rigs import LEVELS, OnloadedOnly
from ..support.simulated import SimulatedDevice, use_simulated_device

COMMON = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {
    **COMMON,
    "vocab_size": 32,
    "max_position_embeddings": 8,
    "eos_token_id": 31,
    "bos_token_id": 30,
    "pad_token_id": 1,
}
VISION = {**COMMON, "image_size": 16, "patch_size": 8}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "CLIP": lambda: CLIPModel(CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=8)),
    "SigLIP": lambda: SiglipModel(SiglipConfig(text_config=TEXT, vision_config=VISION)),
}
CALLS: dict[str, Callable[[Any, Callable[[torch.Tensor], torch.Tensor]], Any]] = {
    "text": lambda model, put: model.get_text_features(input_ids=put(torch.tensor([[30, 2, 3, 31]]))),
    "image": lambda model, put: model.get_image_features(pixel_values=put(torch.ones(1, 3, 16, 16))),
    "positions": lambda model, put: model.get_image_features(
        pixel_values=put(torch.ones(1, 3, 24, 24)), interpolate_pos_encoding=True
    ),
    "both": lambda model, put: model(
        input_ids=put(torch.tensor([[30, 2, 3, 31]])), pixel_values=put(torch.ones(1, 3, 16, 16))
    ),
}


def outputs_of(model: Any, name: str, put: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> Any:
    with torch.no_grad():
        found = CALLS[name](model, put)
    return found if isinstance(found, torch.Tensor) else (found[1] if name != "both" else found.logits_per_image)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", MODELS)
def test_bits(kind: str, level: str) -> None:
    """In lazy order nothing is read too early, and nothing where it rests, which is no memory of the device."""
    reference = tiny.seeded(0, MODELS[kind]).eval()
    model, device = copy.deepcopy(reference), SimulatedDevice(0, "lazy")
    with use_simulated_device(device):
        handle = apply_group_offloading(model, "cpu", offload_type=level)
        for name in (*CALLS, *CALLS):
            with device.running(), OnloadedOnly(model):
                output = outputs_of(model, name, device.put)
            assert torch.equal(device.get(output), outputs_of(reference, name)), name
        device.synchronize()
        del output
        handle.remove()
