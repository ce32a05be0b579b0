"""Real diffusers and transformers models and pipelines, with configurations that make them tiny and random weights.

Nothing is downloaded. A module that is built twice has the same weights, and the dropout of none is active.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    StableDiffusionPipeline,
    UNet2DConditionModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

PROMPT = "a cat that holds a sign"


def device() -> torch.device:
    """Where to compute: the accelerator of this machine, else its CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None else torch.device(found.type, torch.accelerator.current_device_index())


def seeded(seed: int, make: Callable[[], Any]) -> Any:
    """`make()` with weights of its own that depend on `seed` alone; norms and biases too are random."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make().eval()
        for tensor in model.parameters():
            if tensor.ndim < 2:
                nn.init.normal_(tensor, mean=0.5, std=0.2)
    return model


def flux_transformer(seed: int = 0, num_layers: int = 2, num_single_layers: int = 3) -> FluxTransformer2DModel:
    layers = {"patch_size": 1, "in_channels": 4, "num_layers": num_layers, "num_single_layers": num_single_layers}
    heads = {"attention_head_dim": 16, "num_attention_heads": 2, "axes_dims_rope": [4, 4, 8]}
    others = {"joint_attention_dim": 32, "pooled_projection_dim": 32, "guidance_embeds": True}
    return seeded(seed, lambda: FluxTransformer2DModel(**layers, **heads, **others))


def flux_inputs(seed: int = 0) -> dict[str, Any]:
    return {
        "hidden_states": randn(1, 16, 4, seed=seed),
        "encoder_hidden_states": randn(1, 12, 32, seed=seed + 1),
        "pooled_projections": randn(1, 32, seed=seed + 2),
        "timestep": torch.tensor([0.7]).to(device()),
        "guidance": torch.tensor([3.5]).to(device()),
        "img_ids": torch.arange(48.0).reshape(16, 3).to(device()),
        "txt_ids": torch.zeros(12, 3).to(device()),
        "return_dict": False,
    }


def kl(seed: int = 0, **config: Any) -> AutoencoderKL:
    """The autoencoder of FLUX: no quant_conv."""
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    blocks |= {"block_out_channels": (4, 8), "in_channels": 3, "out_channels": 3, "latent_channels": 1}
    blocks |= {"norm_num_groups": 2, "sample_size": 16, "shift_factor": 0.06, "scaling_factor": 1.5}
    blocks |= {"use_quant_conv": False, "use_post_quant_conv": False, **config}
    return seeded(seed, lambda: AutoencoderKL(**blocks))


def sd_kl(seed: int = 0) -> AutoencoderKL:
    """The autoencoder of Stable Diffusion: with quant_conv and post_quant_conv."""
    return kl(seed, latent_channels=4, use_quant_conv=True, use_post_quant_conv=True, shift_factor=None)


def kl_inputs(seed: int = 0) -> dict[str, Any]:
    return {"sample": randn(2, 3, 16, 16, seed=seed), "return_dict": False}


def wan_kl(seed: int = 0) -> AutoencoderKLWan:
    return seeded(
        seed,
        lambda: AutoencoderKLWan(
            base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
        ),
    )


def unet(seed: int = 0) -> UNet2DConditionModel:
    down, up = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    blocks = {"block_out_channels": (4, 8), "layers_per_block": 1, "down_block_types": down, "up_block_types": up}
    sizes = {"sample_size": 16, "in_channels": 4, "out_channels": 4, "norm_num_groups": 2}
    heads = {"cross_attention_dim": 32, "attention_head_dim": 2}
    return seeded(seed, lambda: UNet2DConditionModel(**blocks, **sizes, **heads))


def unet_inputs(seed: int = 0) -> dict[str, Any]:
    return {
        "sample": randn(2, 4, 16, 16, seed=seed),
        "timestep": torch.tensor(5).to(device()),
        "encoder_hidden_states": randn(2, 6, 32, seed=seed + 1),
        "return_dict": False,
    }


def wan_transformer(seed: int = 0) -> WanTransformer3DModel:
    sizes = {"patch_size": (1, 2, 2), "in_channels": 16, "out_channels": 16, "num_layers": 2, "rope_max_seq_len": 32}
    sizes |= {"num_attention_heads": 2, "attention_head_dim": 12, "text_dim": 32, "freq_dim": 256, "ffn_dim": 32}
    norms = {"cross_attn_norm": True, "qk_norm": "rms_norm_across_heads"}
    return seeded(seed, lambda: WanTransformer3DModel(**sizes, **norms))


def wan_inputs(seed: int = 0) -> dict[str, Any]:
    return {
        "hidden_states": randn(1, 16, 2, 8, 8, seed=seed),
        "encoder_hidden_states": randn(1, 12, 32, seed=seed + 1),
        "timestep": torch.tensor([300]).to(device()),
        "return_dict": False,
    }


def clip(seed: int = 0, num_hidden_layers: int = 3) -> CLIPTextModel:
    ids = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "vocab_size": 100}
    sizes = {"hidden_size": 32, "intermediate_size": 37, "num_attention_heads": 4, "projection_dim": 32}
    config = CLIPTextConfig(num_hidden_layers=num_hidden_layers, **ids, **sizes)
    return seeded(seed, lambda: CLIPTextModel(config))


def t5(seed: int = 0, num_layers: int = 4) -> T5EncoderModel:
    ids = {"vocab_size": 100, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
    config = T5Config(d_model=32, d_ff=64, d_kv=8, num_heads=4, num_layers=num_layers, **ids)
    return seeded(seed, lambda: T5EncoderModel(config))


def tokens(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(3, 100, (2, 9), generator=generator).to(device()), "return_dict": False}


def tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Words of the prompts used here, by position."""
    vocab = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    for word in f"{PROMPT} no dog".split():
        vocab.setdefault(word, len(vocab))
    found = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=found, model_max_length=max_length, **ends)


def flux_pipeline() -> FluxPipeline:
    words = {"text_encoder": clip(2), "tokenizer": tokenizer(16), "text_encoder_2": t5(3), "tokenizer_2": tokenizer(16)}
    parts = {"scheduler": FlowMatchEulerDiscreteScheduler(), "vae": kl(1), "transformer": flux_transformer(4)}
    return _quiet(FluxPipeline(**words, **parts))


def wan_pipeline() -> WanPipeline:
    """With two transformers of one class, which take turns."""
    return _quiet(
        WanPipeline(
            tokenizer=tokenizer(16),
            text_encoder=t5(1),
            vae=wan_kl(2),
            scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
            transformer=wan_transformer(3),
            transformer_2=wan_transformer(4),
            boundary_ratio=0.875,
        )
    )


def sd_pipeline() -> StableDiffusionPipeline:
    betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    scheduler = DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1, **betas)
    parts = {"vae": sd_kl(1), "text_encoder": clip(2), "tokenizer": tokenizer(16), "unet": unet(3)}
    unsafe = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    return _quiet(StableDiffusionPipeline(scheduler=scheduler, **parts, **unsafe))


def run(pipe: Any, **options: Any) -> torch.Tensor:
    """What a pipeline makes of the prompt: images or videos, as one tensor on the CPU."""
    arguments: dict[str, Any] = {"prompt": PROMPT, "generator": torch.Generator().manual_seed(0), "return_dict": False}
    arguments |= {"num_inference_steps": 2, "height": 16, "width": 16, "output_type": "pt"}
    if isinstance(pipe, FluxPipeline):
        arguments["max_sequence_length"] = 16
    elif isinstance(pipe, WanPipeline):
        arguments |= {"max_sequence_length": 16, "num_frames": 5, "negative_prompt": "no dog"}
    else:
        arguments |= {"negative_prompt": "no dog"}
    (result,) = pipe(**{**arguments, **options})[:1]
    return result.cpu()


def _quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def lora_of(model: nn.Module, targets: tuple[str, ...], rank: int = 2, seed: int = 8) -> dict[str, torch.Tensor]:
    """A LoRA for layers whose names end so, as a state dict for `load_lora_adapter`."""
    state = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name.endswith(targets):
            state[f"{name}.lora_A.weight"] = randn(rank, layer.in_features, seed=100 * seed + len(state)) * 0.2
            state[f"{name}.lora_B.weight"] = randn(layer.out_features, rank, seed=100 * seed + len(state)) * 0.2
    return state


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device())


@torch.no_grad()
def call(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """The first output of a model, on the CPU."""
    return model(**inputs)[0].cpu()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "flux": (flux_transformer, flux_inputs),
    "wan": (wan_transformer, wan_inputs),
    "unet": (unet, unet_inputs),
    "kl": (kl, kl_inputs),
    "sd_kl": (sd_kl, kl_inputs),
    "wan_kl": (wan_kl, lambda seed=0: {"sample": randn(1, 3, 5, 16, 16, seed=seed), "return_dict": False}),
    "clip": (clip, tokens),
    "t5": (t5, tokens),
}
