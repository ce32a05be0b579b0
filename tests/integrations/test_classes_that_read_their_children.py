"""Models that diffusers says cannot be group-offloaded, and Mamba: modules that read or call parts of others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import DiTTransformer2DModel, HunyuanDiT2DModel, ModelMixin, VQModel
from torch import nn
from transformers import MambaConfig, MambaModel

from group_offload import ModuleError, apply_group_offloading

from ..support import tiny_models as tiny
from ..support.asserts import assert_same
from ..support.rigs import LEVELS, check, pair, run, run_onloaded


def vq() -> nn.Module:
    return VQModel(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        num_vq_embeddings=32,
    )


def mamba() -> nn.Module:
    return MambaModel(MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=32, state_size=4))


def dit() -> nn.Module:
    return DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=3,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=8,
    )


def hunyuan() -> nn.Module:
    return HunyuanDiT2DModel(
        sample_size=16,
        num_layers=4,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=3,
        cross_attention_dim=8,
        cross_attention_dim_t5=8,
        pooled_projection_dim=4,
        hidden_size=24,
        text_len=4,
        text_len_t5=4,
        activation_fn="gelu-approximate",
        in_channels=4,
    )


Made = tuple[Callable[[], nn.Module], dict[str, Any]]

CLASSES: dict[str, Made] = {
    "VQModel": (vq, {"sample": tiny.randn(1, 3, 16, 16)}),
    "MambaModel": (mamba, {"input_ids": torch.arange(6)[None]}),
    "DiTTransformer2DModel": (
        dit,
        {
            "hidden_states": tiny.randn(2, 4, 8, 8),
            "timestep": torch.tensor([1, 2]),
            "class_labels": torch.tensor([0, 1]),
        },
    ),
    "HunyuanDiT2DModel": (
        hunyuan,
        {
            "hidden_states": tiny.randn(2, 4, 16, 16),
            "timestep": torch.tensor([1.0, 2.0]),
            "encoder_hidden_states": tiny.randn(2, 4, 8),
            "text_embedding_mask": torch.ones(2, 4, dtype=torch.long),
            "encoder_hidden_states_t5": tiny.randn(2, 4, 8),
            "text_embedding_mask_t5": torch.ones(2, 4, dtype=torch.long),
            "image_meta_size": tiny.randn(2, 6),
            "style": torch.zeros(2, dtype=torch.long),
        },
    ),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", CLASSES)
def test_bits(name: str, level: str) -> None:
    """Nothing is read where it rests: a device could not read it there."""
    make, inputs = CLASSES[name]
    reference = tiny.seeded(0, make).eval()
    model = copy.deepcopy(reference)
    handle = apply_group_offloading(model, "cpu", offload_type=level)
    for _ in range(3):
        assert_same(run_onloaded(model, **inputs)[0], run(reference, **inputs)[0])
    handle.remove()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", [name for name in CLASSES if name != "MambaModel"])
def test_patched_calls(name: str, level: str, patched: None) -> None:
    """The class says that diffusers does not support it."""
    model = CLASSES[name][0]().eval()
    handle = model.enable_group_offload("cpu", offload_type=level)
    assert handle.is_active
    handle.remove()


class Holder(nn.Module):
    """A block without a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())


class OfHolders(nn.Module):
    """Calls parts of its blocks, and of one block in the middle of others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Holder() for _ in range(3))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block, layer in zip(self.blocks, self.layers, strict=True):
            x = layer[1](block.mlp(block.attn(x)))
        return self.layers[0](x)


@pytest.mark.parametrize("level", LEVELS)
def test_parts_of_blocks_that_are_called_from_outside(level: str) -> None:
    model, reference = pair(OfHolders)
    handle = apply_group_offloading(model, "cpu", offload_type=level)
    check(model, reference, torch.randn(2, 4))
    run_onloaded(model, torch.randn(2, 4), call=model.blocks[1].mlp)
    handle.remove()


@pytest.mark.parametrize("name", ["AutoencoderSAME", "ConsistencyDecoderVAE", "MMAudioVAE"])
def test_classes_whose_methods_compute_with_weights_that_no_call_onloads(name: str, patched: None) -> None:
    with pytest.raises(ModuleError, match=r"Leave it out with exclude_modules"):
        ModelMixin.enable_group_offload(
            type(name, (nn.Linear,), {"_supports_group_offloading": name == "MMAudioVAE"})(2, 2)
        )
