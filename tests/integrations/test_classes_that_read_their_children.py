"""Models that diffusers says cannot be group-offloaded, Mamba, and others: modules that read or call parts of others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderSAME,
    ConsistencyDecoderVAE,
    DiTTransformer2DModel,
    HunyuanDiT2DModel,
    MMAudioVAE,
    ModelMixin,
    VQModel,
)
from torch import nn
from transformers import MambaConfig, MambaModel

from group_offload import ModuleError, apply_group_offloading

from ..support import tiny_models as tiny
from ..support.asserts import assert_same
from ..support.rigs import LEVELS, TIERS, OnloadedOnly, check, pair, run, run_onloaded


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


AUTOENCODERS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "AutoencoderSAME": (
        lambda: AutoencoderSAME(
            patch_size=4,
            encoder_channels=16,
            encoder_c_mults=[1, 2],
            encoder_strides=[2, 2],
            encoder_transformer_depths=[1, 1],
            latent_dim=8,
            dim_heads=8,
            ff_mult=2,
        ),
        (1, 2, 64),
    ),
    "ConsistencyDecoderVAE": (
        lambda: ConsistencyDecoderVAE(
            encoder_block_out_channels=(2, 4),
            encoder_down_block_types=("DownEncoderBlock2D",) * 2,
            decoder_block_out_channels=(2, 4),
            decoder_down_block_types=("ResnetDownsampleBlock2D",) * 2,
            decoder_up_block_types=("ResnetUpsampleBlock2D",) * 2,
            decoder_layers_per_block=1,
            decoder_norm_num_groups=2,
            encoder_norm_num_groups=2,
        ),
        (1, 3, 16, 16),
    ),
    "MMAudioVAE": (
        lambda: MMAudioVAE(
            mel_bins=16,
            latent_channels=4,
            hidden_channels=16,
            channel_multipliers=(1, 2),
            layers_per_block=1,
            n_fft=64,
            hop_length=16,
        ),
        (1, 512),
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", AUTOENCODERS)
def test_methods_that_compute_with_weights_of_modules_that_nobody_calls(
    name: str, level: str, tier: str, tmp_path: Path, patched: None
) -> None:
    make, shape = AUTOENCODERS[name]
    reference = tiny.seeded(0, make).eval()
    run(reference, tiny.randn(*shape))  # torch's weight_norm cannot be copied before
    model = copy.deepcopy(reference)
    handle = model.enable_group_offload(
        "cpu", offload_type=level, offload_to_disk_path=tmp_path if tier == "file" else None
    )
    for _ in range(2):
        found = []
        for vae in (model, reference):
            torch.manual_seed(1)
            with torch.no_grad(), OnloadedOnly(model):
                encoded = vae.encode(tiny.randn(*shape))
                latents = encoded.latents if name == "AutoencoderSAME" else encoded.latent_dist.mode()
                found.append((latents, vae.decode(latents).sample, vae(tiny.randn(*shape)).sample))
        assert_same(*found)
    handle.remove()


def test_other_classes_that_say_no_are_refused(patched: None) -> None:
    with pytest.raises(ModuleError, match=r"Pass its component name in exclude_modules"):
        ModelMixin.enable_group_offload(type("Other", (nn.Linear,), {"_supports_group_offloading": False})(2, 2))
