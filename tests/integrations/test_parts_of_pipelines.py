"""Parts of a pipeline that are called without its forward, text encoders, and weights that others read."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

from group_offload import apply_group_offloading

from ..support import tiny_models as tiny
from ..support.pipelines import any_case, any_tier, tier_options

# ---------------------------------------------------------------- parts of a model


def tiled(vae: Any) -> None:
    if isinstance(vae, diffusers.AutoencoderKLWan):
        vae.enable_tiling(16, 16, 8, 8)
    else:
        vae.enable_tiling()
        vae.tile_sample_min_size, vae.tile_latent_min_size = 8, 4


VAES = {"kl": tiny.kl, "sd_kl": tiny.sd_kl, "wan_kl": tiny.wan_kl}


@pytest.mark.parametrize("name", VAES)
@any_case
def test_vae_without_its_forward(name: str, tier: str, level: str, device: torch.device, tmp_path: Path) -> None:
    """Tiles and slices come and go. Hazard: `vae.encode` and `vae.decode` never pass the root's `forward` (diffusers
    #12319)."""
    sample = tiny.randn(1, 3, 5, 32, 24) if name == "wan_kl" else tiny.kl_inputs()["sample"]
    reference, model = VAES[name]().to(device), VAES[name]()
    handle = apply_group_offloading(model, device, offload_type=level, **tier_options(tier, tmp_path))
    with torch.no_grad():
        for mode in ("plain", "sliced", "tiled", "plain"):
            for vae in (reference, model):
                vae.enable_slicing() if mode == "sliced" else vae.disable_slicing()
                tiled(vae) if mode == "tiled" else vae.disable_tiling()
            expected = reference.encode(sample).latent_dist.mean
            found = model.encode(sample).latent_dist.mean
            assert torch.equal(found, expected)
            before = sum(handle.stats().bytes_onloaded.values())
            assert torch.equal(model.decode(found).sample, reference.decode(expected).sample)
            decoded = sum(handle.stats().bytes_onloaded.values()) - before
    assert {tensor.device.type for tensor in model.parameters()} == {"cpu"}
    if tier == "disk" and name != "wan_kl":  # which decodes each frame: the encoder stays where it is
        assert 0 < decoded < sum(tensor.nbytes for tensor in model.parameters())


# ---------------------------------------------------------------- text encoders


@pytest.mark.parametrize("make", [lambda: tiny.clip(num_hidden_layers=16), lambda: tiny.t5(num_layers=16)])
@any_tier
def test_text_encoders_are_cut_into_blocks(
    make: Callable[[], nn.Module], tier: str, device: torch.device, tmp_path: Path
) -> None:
    """Hazard: T5-like text encoders land in one group at block level, and nothing is saved: a text encoder takes its whole
    size on the device, also after encoding (diffusers #10078)."""
    model, expected = make(), tiny.call(make().to(device), tiny.tokens())
    handle = apply_group_offloading(model, device, **tier_options(tier, tmp_path))
    for _ in range(2):
        assert torch.equal(tiny.call(model, tiny.tokens()), expected)
    num_bytes = sum(group.num_bytes for group in handle.groups)
    assert handle.stats().peak_device_bytes < num_bytes / 4
    assert max(group.num_bytes for group in handle.groups) < num_bytes / 4


# ---------------------------------------------------------------- weights that others read


@any_tier
def test_statistics_that_a_pipeline_reads(tier: str, device: torch.device, tmp_path: Path) -> None:
    """As Flux.2's pipeline does with its VAE: `vae.bn.running_mean`, which no call of a module brings along. Hazard: a
    pipeline reads weights outside of any `forward` (diffusers #13666, #14695)."""

    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            self.bn = nn.BatchNorm1d(8, affine=False)

        def decode(self, x: torch.Tensor) -> torch.Tensor:
            return self.decoder(x + self.bn.running_mean.to(x.device))

    model, x = tiny.seeded(0, Vae), tiny.randn(4, 8)
    model.bn.running_mean.normal_()
    reference = copy.deepcopy(model).to(device)
    apply_group_offloading(model, device, **tier_options(tier, tmp_path))
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model.decode(x), reference.decode(x))
            assert torch.equal(model.bn.running_mean, reference.bn.running_mean.cpu())
