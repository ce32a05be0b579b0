"""Checkpoints for `--tiny`: real classes of diffusers and transformers with tiny configs and random weights, saved to a folder.

Each function saves a pipeline and returns its folder, which takes the place of a name on the hub. Nothing is downloaded.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

ON_CPU: dict[str, Any] = {"onload_device": "cpu"}
"""Options of offloading for a tiny checkpoint. The CPU has no memory of its own, and so no `vram_budget`."""

_KL = {
    "block_out_channels": (8, 8, 8, 8),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "latent_channels": 4,
    "norm_num_groups": 2,
    "scaling_factor": 0.36,
    "shift_factor": 0.12,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
_FLUX = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 4,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "guidance_embeds": True,
    "axes_dims_rope": (4, 4, 8),
}
_WAN = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "text_dim": 32,
    "ffn_dim": 32,
    "num_layers": 3,
    "rope_max_seq_len": 64,
}
_T5 = {"vocab_size": 64, "d_model": 32, "d_ff": 32, "d_kv": 16, "num_heads": 2, "num_layers": 2}
_LANGUAGE_MODEL = {
    "vocab_size": 64,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
}
_VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 16}


def flux(folder: str = "tiny-flux") -> str:
    pipeline = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=diffusers.AutoencoderKL(**_KL),
        text_encoder=_clip(),
        tokenizer=_tokenizer(),
        text_encoder_2=transformers.T5EncoderModel(transformers.T5Config(**_T5)),
        tokenizer_2=_tokenizer(),
        transformer=diffusers.FluxTransformer2DModel(**_FLUX),
    )
    return _save(pipeline, folder)


def flux_controlnet(folder: str = "tiny-controlnet") -> str:
    controlnet = diffusers.FluxControlNetModel(**{**_FLUX, "num_layers": 1, "num_single_layers": 2})
    for parameter in controlnet.parameters():  # its last layers begin as zeros, which control nothing
        torch.nn.init.normal_(parameter, std=0.1)
    return _save(controlnet, folder)


def wan(folder: str = "tiny-wan") -> str:
    """With two experts, in float32: `transformer` is for the first steps, and `transformer_2` for the others."""
    pipeline = diffusers.WanPipeline(
        tokenizer=_tokenizer(),
        text_encoder=transformers.UMT5EncoderModel(transformers.UMT5Config(**_T5)),
        vae=diffusers.AutoencoderKLWan(base_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        transformer=diffusers.WanTransformer3DModel(**_WAN),
        transformer_2=diffusers.WanTransformer3DModel(**_WAN),
        boundary_ratio=0.875,
    )
    return _save(pipeline, folder, torch.float32)


def qwen_image(folder: str = "tiny-qwen-image") -> str:
    config = transformers.Qwen2_5_VLConfig(text_config=_LANGUAGE_MODEL, vision_config=_VISION)
    pipeline = diffusers.QwenImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=diffusers.AutoencoderKLQwenImage(base_dim=8, dim_mult=[1, 1, 1, 1], num_res_blocks=1),
        text_encoder=transformers.Qwen2_5_VLForConditionalGeneration(config),
        tokenizer=_tokenizer(),
        transformer=diffusers.QwenImageTransformer2DModel(
            num_layers=3, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=16, axes_dims_rope=(4, 4, 8)
        ),
    )
    return _save(pipeline, folder)


def pictures(folder: str = "tiny-pictures") -> str:
    """A folder of small pictures to train with."""
    Path(folder).mkdir(exist_ok=True)
    for number, color in enumerate(("red", "green", "blue")):
        Image.new("RGB", (48, 64), color).save(Path(folder) / f"{number}.png")
    return folder


def _clip() -> Any:
    return transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            bos_token_id=0,
            eos_token_id=2,
            pad_token_id=1,
            hidden_size=32,
            intermediate_size=32,
            num_attention_heads=2,
            num_hidden_layers=2,
            vocab_size=64,
        )
    )


def _tokenizer(words: Iterable[str] = ("a", "lighthouse", "in", "the", "fog")) -> Any:
    """A tokenizer that knows some words, and takes all others for one."""
    vocabulary = {word: number for number, word in enumerate(("<s>", "<pad>", "</s>", "<unk>", *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=77,
    )


def _save(made: Any, folder: str, dtype: torch.dtype = torch.bfloat16) -> str:
    """Save a pipeline or a model, with its weights in the dtype that they have on the hub."""
    for model in getattr(made, "components", {"": made}).values():
        if isinstance(model, torch.nn.Module):
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.data = tensor.data.to(dtype) if tensor.is_floating_point() else tensor.data
    made.save_pretrained(folder)
    return folder
