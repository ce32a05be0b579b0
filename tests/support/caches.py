"""The caches of diffusers that skip parts of a model, each on a tiny model of a class that it is for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import nn

from . import tiny_models as tiny

NUM_STEPS = 4


def nucleus() -> nn.Module:
    sizes = {"patch_size": 1, "in_channels": 8, "out_channels": 8, "num_layers": 2, "axes_dims_rope": (4, 6, 6)}
    heads = {"attention_head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "joint_attention_dim": 16}
    experts = {"dense_moe_strategy": "leave_first_block_dense", "num_experts": 2, "moe_intermediate_dim": 16}
    experts |= {"mlp_ratio": 6.0, "capacity_factors": 1.0}
    model = tiny.seeded(0, lambda: diffusers.NucleusMoEImageTransformer2DModel(**sizes, **heads, **experts))
    for number, weight in enumerate(model.parameters()):
        if weight.ndim == 3:  # the experts', which the class leaves uninitialised
            weight.data = tiny.randn(*weight.shape, seed=number).cpu() / 4
    return model


_PROMPT = tiny.randn(1, 5, 16, seed=77)


def nucleus_inputs(step: int) -> dict[str, Any]:
    return {
        "hidden_states": tiny.randn(1, 16, 8, seed=step),
        "img_shapes": [(1, 4, 4)],
        "encoder_hidden_states": _PROMPT,
        "timestep": torch.tensor([1.0 - step / NUM_STEPS]).to(tiny.device()),
        "return_dict": False,
    }


def slow_noise(*shape: int, step: int) -> torch.Tensor:
    """Latents that change little from step to step, as they do in a denoising loop."""
    return tiny.randn(*shape, seed=1) + 0.01 * step * tiny.randn(*shape, seed=2)


def flux() -> nn.Module:
    return tiny.flux_transformer(num_layers=1, num_single_layers=2)


def flux_inputs(step: int) -> dict[str, Any]:
    return {**tiny.flux_inputs(), "hidden_states": slow_noise(1, 16, 4, step=step)}


def wan_inputs(step: int) -> dict[str, Any]:
    return {**tiny.wan_inputs(), "hidden_states": slow_noise(1, 16, 2, 8, 8, step=step)}


def guided_wan_inputs(step: int) -> dict[str, Any]:
    """What guidance leaves out and what it puts in, as one batch."""
    return {
        "hidden_states": slow_noise(2, 16, 2, 8, 8, step=step),
        "encoder_hidden_states": tiny.randn(2, 12, 32, seed=5),
        "timestep": torch.tensor([300, 300]).to(tiny.device()),
        "return_dict": False,
    }


class Clock:
    """The step of a denoising loop, as the caches ask for it."""

    def __init__(self) -> None:
        self.step = 0

    def timestep(self) -> int:
        return 700 - 100 * self.step


@dataclass(frozen=True, slots=True)
class CacheCase:
    """A cache and a model for it."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Any]]
    config: Callable[[Clock], Any]
    skipped: str
    """A module that steps leave out."""
    contexts: tuple[str, ...] = ("only",)
    needs: str = ""
    """A name that older versions of diffusers lack, if any."""
    tells_steps: bool = False
    """Whether contexts say where the loop is."""

    def denoise(self, model: nn.Module, clock: Clock, call: Callable[..., Any], steps: range) -> Iterator[Any]:
        """Outputs of a part of a denoising loop. Each context has other latents."""
        for clock.step in steps:
            for number, name in enumerate(self.contexts):
                where = {"step_index": clock.step, "sigma": 0.9 - clock.step / 10, "num_inference_steps": NUM_STEPS}
                with model.cache_context(name, **(where if self.tells_steps else {})):
                    yield call(model, **self.inputs(clock.step + 10 * number))


def pyramid(clock: Clock) -> Any:
    return diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, current_timestep_callback=clock.timestep
    )


def faster(clock: Clock, **options: Any) -> Any:
    return diffusers.FasterCacheConfig(
        attention_weight_callback=lambda _: 0.5, current_timestep_callback=clock.timestep, **options
    )


def mag(_: Clock) -> Any:
    skips = {"threshold": 0.5, "max_skip_steps": 2, "retention_ratio": 0.0}
    return diffusers.MagCacheConfig(num_inference_steps=NUM_STEPS, mag_ratios=[1.0, 1.1, 0.9, 1.05], **skips)


def taylor(_: Clock, **options: Any) -> Any:
    return diffusers.TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=1, **options)


def sea(_: Clock) -> Any:
    return diffusers.SeaCacheConfig(threshold=10.0, cache_end_steps=0)


FLUX, WAN, TWO = (flux, flux_inputs), (tiny.wan_transformer, wan_inputs), ("cond", "uncond")
LAST, TAYLOR, KV = "single_transformer_blocks.1.norm", "TaylorSeerCacheConfig", "TextKVCacheConfig"
_ALL = {
    "first-block-flux": CacheCase(*FLUX, lambda _: diffusers.FirstBlockCacheConfig(threshold=0.2), LAST, TWO),
    "mag-flux": CacheCase(*FLUX, mag, LAST, needs="MagCacheConfig"),
    "mag-wan": CacheCase(*WAN, mag, "blocks.0.norm1", TWO, needs="MagCacheConfig"),
    "pyramid-flux": CacheCase(*FLUX, pyramid, "transformer_blocks.0.attn.to_q"),
    "faster-wan": CacheCase(tiny.wan_transformer, guided_wan_inputs, faster, "blocks.0.attn1.to_q"),
    "taylor-flux": CacheCase(*FLUX, taylor, "transformer_blocks.0.attn.to_q", needs=TAYLOR),
    "taylor-lite-flux": CacheCase(
        *FLUX, lambda clock: taylor(clock, use_lite_mode=True), "transformer_blocks.0.norm1", needs=TAYLOR
    ),
    "sea-wan": CacheCase(*WAN, sea, "blocks.0.norm1", TWO, needs="SeaCacheConfig", tells_steps=True),
    "text-kv-nucleus": CacheCase(
        nucleus, nucleus_inputs, lambda _: getattr(diffusers, KV)(), "transformer_blocks.0.encoder_proj", TWO, needs=KV
    ),
}
CACHES = {name: case for name, case in _ALL.items() if not case.needs or hasattr(diffusers, case.needs)}
