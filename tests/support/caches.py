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
    model = tiny.seeded(
        0,
        lambda: diffusers.NucleusMoEImageTransformer2DModel(
            patch_size=1,
            in_channels=8,
            out_channels=8,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            num_key_value_heads=1,
            joint_attention_dim=16,
            axes_dims_rope=(4, 6, 6),
            mlp_ratio=6.0,
            dense_moe_strategy="leave_first_block_dense",
            num_experts=2,
            moe_intermediate_dim=16,
            capacity_factors=1.0,
        ),
    )
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCase:
    """A cache and a model for it."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Any]]
    config: Callable[[Clock], Any]
    skipped: str
    """A module that steps leave out."""
    contexts: tuple[str, ...] = ("only",)
    needs: tuple[str, ...] = ()
    """Names that older versions of diffusers lack."""
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
    return diffusers.MagCacheConfig(
        threshold=0.5,
        max_skip_steps=2,
        retention_ratio=0.0,
        num_inference_steps=NUM_STEPS,
        mag_ratios=[1.0, 1.1, 0.9, 1.05],
    )


def taylor(_: Clock, **options: Any) -> Any:
    return diffusers.TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=1, **options)


_ALL = {
    "first-block-flux": CacheCase(
        make=flux,
        inputs=flux_inputs,
        config=lambda _: diffusers.FirstBlockCacheConfig(threshold=0.2),
        skipped="single_transformer_blocks.1.norm",
        contexts=("cond", "uncond"),
    ),
    "mag-flux": CacheCase(
        needs=("MagCacheConfig",), make=flux, inputs=flux_inputs, config=mag, skipped="single_transformer_blocks.1.norm"
    ),
    "mag-wan": CacheCase(
        needs=("MagCacheConfig",),
        make=tiny.wan_transformer,
        inputs=wan_inputs,
        config=mag,
        skipped="blocks.0.norm1",
        contexts=("cond", "uncond"),
    ),
    "pyramid-flux": CacheCase(
        make=flux,
        inputs=flux_inputs,
        config=pyramid,
        skipped="transformer_blocks.0.attn.to_q",
    ),
    "faster-wan": CacheCase(
        make=tiny.wan_transformer,
        inputs=guided_wan_inputs,
        config=faster,
        skipped="blocks.0.attn1.to_q",
    ),
    "taylor-flux": CacheCase(
        needs=("TaylorSeerCacheConfig",),
        make=flux,
        inputs=flux_inputs,
        config=taylor,
        skipped="transformer_blocks.0.attn.to_q",
    ),
    "taylor-lite-flux": CacheCase(
        needs=("TaylorSeerCacheConfig",),
        make=flux,
        inputs=flux_inputs,
        config=lambda clock: taylor(clock, use_lite_mode=True),
        skipped="transformer_blocks.0.norm1",
    ),
    "sea-wan": CacheCase(
        needs=("SeaCacheConfig",),
        tells_steps=True,
        make=tiny.wan_transformer,
        inputs=wan_inputs,
        config=lambda _: diffusers.SeaCacheConfig(threshold=10.0, cache_end_steps=0),
        skipped="blocks.0.norm1",
        contexts=("cond", "uncond"),
    ),
    "text-kv-nucleus": CacheCase(
        needs=("TextKVCacheConfig",),
        make=nucleus,
        inputs=nucleus_inputs,
        config=lambda _: diffusers.TextKVCacheConfig(),
        skipped="transformer_blocks.0.encoder_proj",
        contexts=("cond", "uncond"),
    ),
}
CACHES = {name: case for name, case in _ALL.items() if all(hasattr(diffusers, need) for need in case.needs)}
