"""Blocks of Modular Diffusers that call a model for each branch of a guider: these calls share passes, with the same bits."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import ClassifierFreeGuidance, FlowMatchEulerDiscreteScheduler
from diffusers.modular_pipelines.modular_pipeline import BlockState

from group_offload import apply_group_offloading

from ..matrix.case import mapped, tensors_of
from ..matrix.cases import FAMILIES
from ..support.asserts import assert_same

STEPS = 4
LATENTS = ("hidden_states", "x", "sample")
"""How models name their latents."""
BLOCKS: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    # class of the model: the block, its names for inputs of the model, and other fields
    "QwenImageTransformer2DModel": (
        "qwenimage.denoise.QwenImageLoopDenoiser",
        {"prompt_embeds": "encoder_hidden_states", "prompt_embeds_mask": "encoder_hidden_states_mask"},
        {"additional_cond_kwargs": {}, "img_shapes": [[(1, 4, 4)]]},
    ),
    "ZImageTransformer2DModel": ("z_image.denoise.ZImageLoopDenoiser", {"prompt_embeds": "cap_feats"}, {}),
    "SD3Transformer2DModel": (
        "stable_diffusion_3.denoise.StableDiffusion3LoopDenoiser",
        {"prompt_embeds": "encoder_hidden_states", "pooled_prompt_embeds": "pooled_projections"},
        {},
    ),
    "LTXVideoTransformer3DModel": (
        "ltx.denoise.LTXLoopDenoiser",
        {"prompt_embeds": "encoder_hidden_states", "prompt_attention_mask": "encoder_attention_mask"},
        {"num_frames": 9, "height": 512, "width": 512},
    ),
    "Krea2Transformer2DModel": (
        "krea2.denoise.Krea2LoopDenoiser",
        {"prompt_embeds": "encoder_hidden_states", "prompt_embeds_mask": "encoder_attention_mask"},
        {},
    ),
    "ErnieImageTransformer2DModel": (
        "ernie_image.denoise.ErnieImageLoopDenoiser",
        {"text_bth": "text_bth", "text_lens": "text_lens"},
        {},
    ),
    "UNet2DConditionModel": (  # inputs by position, and in a dict that is made anew for each call
        "stable_diffusion_xl.denoise.StableDiffusionXLLoopDenoiser",
        {"prompt_embeds": "encoder_hidden_states"},
        {
            "add_time_ids": torch.ones(2, 6),
            "negative_add_time_ids": torch.zeros(2, 6),
            "pooled_prompt_embeds": torch.ones(2, 4),
            "negative_pooled_prompt_embeds": torch.zeros(2, 4),
        },
    ),
}


class State(BlockState):
    """What nobody has set is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def other(value: Any) -> Any:
    return mapped(value, lambda tensor: tensor / 2 if tensor.is_floating_point() else tensor.clone())


def loop(name: str, inputs: dict[str, Any], model: torch.nn.Module) -> list[torch.Tensor]:
    path, names, fields = BLOCKS[name]
    module, _, block_name = path.rpartition(".")
    block = getattr(importlib.import_module(f"diffusers.modular_pipelines.{module}"), block_name)()
    ratios = {"vae_temporal_compression_ratio": 8, "vae_spatial_compression_ratio": 32}
    components = SimpleNamespace(guider=ClassifierFreeGuidance(), transformer=model, unet=model, **ratios)
    given = {mine: inputs[theirs] for mine, theirs in names.items()}
    given |= {f"negative_{mine}": other(value) for mine, value in given.items()}
    latents, found = next(inputs[each] for each in LATENTS if each in inputs), []
    for step in range(STEPS):
        latents = mapped(latents, lambda tensor: tensor + 0.01)
        time = inputs.get("timestep", inputs.get("t")) - step / 8
        same = {"latents": latents, "latent_model_input": latents, "scaled_latents": latents, "timestep": time}
        shared = {"dtype": torch.float32, "num_inference_steps": STEPS, "denoiser_input_fields": fields}
        state = State(**same, **shared, position_ids=inputs.get("position_ids"), **given, **fields)
        block(components, state, step, torch.tensor(500.0 - step))
        found += tensors_of(state.noise_pred)
    return found


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block(name: str) -> None:
    case = next(case for cases in FAMILIES.values() for case in cases if case.name == name)
    torch.manual_seed(1)
    inputs, model = case.inputs(), case.make()
    try:
        wanted = loop(name, inputs, model)
    except (ImportError, AttributeError) as error:
        pytest.skip(f"another version of diffusers: {error}")
    handle = apply_group_offloading(model, "cpu", share_passes=True)
    for run in range(2):
        for found, expected in zip(loop(name, inputs, model), wanted, strict=True):
            assert_same(found, expected)
        assert handle.stats().passes_predicted == STEPS - 1 + run * STEPS
    assert not handle.stats().passes_discarded
    handle.remove()


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_branches_of_two_guiders() -> None:
    """LTX-2 guides video and audio: four branches, which differ in embeddings, or in plain options of the model."""
    denoise = pytest.importorskip("diffusers.modular_pipelines.ltx2.denoise")
    guidance = pytest.importorskip("diffusers.guiders.ltx2_guidance").LTX2Guidance
    case = next(case for cases in FAMILIES.values() for case in cases if case.name == "LTX2VideoTransformer3DModel")
    torch.manual_seed(1)
    inputs, model, block = case.inputs(), case.make(), denoise.LTX2LoopDenoiser()
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(STEPS)
    scales = {"stg_scale": 1.0, "modality_scale": 3.0, "guidance_rescale": 0.7}
    given: dict[str, Any] = {}
    for argument, (positive, negative, *_) in block._guider_input_fields.items():
        given[positive] = inputs.get(argument, inputs["encoder_attention_mask"])
        given[negative] = other(given[positive])

    def loop(model: torch.nn.Module) -> list[torch.Tensor]:
        components = SimpleNamespace(
            guider=guidance(guidance_scale=3.0, spatio_temporal_guidance_blocks=[0], **scales),
            audio_guider=guidance(guidance_scale=7.0, **scales),
            transformer=model,
            scheduler=scheduler,
            vae_temporal_compression_ratio=8,
            vae_spatial_compression_ratio=32,
        )
        found = []
        for step in range(STEPS):
            video, audio = inputs["hidden_states"] + step / 8, inputs["audio_hidden_states"] + step / 8
            time = inputs["timestep"] - step
            state = State(
                latents=video,
                latent_model_input=video,
                video_timestep=time,
                audio_latents=audio,
                audio_latent_model_input=audio,
                audio_timestep=time,
                num_frames=9,
                height=512,
                width=512,
                frame_rate=24.0,
                motion_speed=1.0,
                audio_scheduler=scheduler,
                denoiser_input_fields={"audio_num_frames": 9},
                num_inference_steps=STEPS,
                **given,
            )
            block(components, state, step, torch.tensor(500.0 - step))
            found += [state.noise_pred_video, state.noise_pred_audio]
        return found

    wanted = loop(model)
    handle = apply_group_offloading(model, "cpu", share_passes=True)
    for found, expected in zip(loop(model), wanted, strict=True):
        assert_same(found, expected)
    assert handle.stats().passes_predicted == 3 * (STEPS - 1)
    assert not handle.stats().passes_discarded
    handle.remove()
