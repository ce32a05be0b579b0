"""ControlNets and adapters."""

# fmt: off
from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
import torch.nn.functional as F

from ..case import Case, randn

SD = {"block_out_channels": (4, 8), "norm_num_groups": 4, "layers_per_block": 1, "cross_attention_dim": 8,
      "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "attention_head_dim": 2,
      "conditioning_embedding_out_channels": (4, 4, 4, 4)}
FLUX = {"in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2,
        "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8]}
HUNYUAN = {"conditioning_channels": 4, "sample_size": 16, "transformer_num_layers": 4, "patch_size": 2,
           "attention_head_dim": 8, "num_attention_heads": 3, "in_channels": 4, "cross_attention_dim": 8,
           "cross_attention_dim_t5": 8, "pooled_projection_dim": 4, "hidden_size": 24, "text_len": 4, "text_len_t5": 4}
QWEN = {"in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2,
        "joint_attention_dim": 16, "axes_dims_rope": (8, 4, 4)}
SD3 = {"sample_size": 16, "patch_size": 1, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8,
       "num_attention_heads": 4, "joint_attention_dim": 32, "caption_projection_dim": 32, "pooled_projection_dim": 64,
       "out_channels": 4}
COSMOS = {"n_controlnet_blocks": 2, "in_channels": 18, "model_channels": 32, "num_attention_heads": 2,
         "attention_head_dim": 16, "mlp_ratio": 2, "text_embed_dim": 32, "adaln_lora_dim": 4,
         "max_size": (4, 32, 32), "img_context_dim_in": 32, "img_context_dim_out": 32}
T2I = {"channels": [8, 16], "num_res_blocks": 1, "downscale_factor": 4}


SD_INPUTS = {"sample": (1, 4, 8, 8), "timestep": torch.tensor(7), "encoder_hidden_states": (1, 4, 8)}
FLUX_INPUTS = {"hidden_states": (1, 16, 4), "encoder_hidden_states": (1, 6, 32), "pooled_projections": (1, 32),
               "timestep": [0.7], "img_ids": (16, 3), "txt_ids": (6, 3)}
HUNYUAN_INPUTS = {"hidden_states": (1, 4, 16, 16), "timestep": [7.0], "image_meta_size": (1, 6), "style": [0],
                  "encoder_hidden_states": (1, 4, 8), "text_embedding_mask": torch.ones(1, 4, dtype=torch.long),
                  "encoder_hidden_states_t5": (1, 4, 8), "text_embedding_mask_t5": torch.ones(1, 4, dtype=torch.long)}
QWEN_INPUTS = {"hidden_states": (1, 16, 16), "encoder_hidden_states": (1, 8, 16), "timestep": [0.7],
               "encoder_hidden_states_mask": torch.ones(1, 8, dtype=torch.long), "img_shapes": [(1, 4, 4)]}
SD3_INPUTS = {"hidden_states": (1, 4, 16, 16), "encoder_hidden_states": (1, 6, 32), "pooled_projections": (1, 64),
              "timestep": [300]}


def several(name: str, part: str, config: dict[str, Any], num: int = 2, **others: Any) -> Any:
    """What holds several of one class."""
    return lambda: getattr(diffusers, name)([getattr(diffusers, part)(**config, **others) for _ in range(num)])


def hint_embedding(adapter: Any, conditioning: torch.Tensor) -> Any:
    """`UNetControlNetXSModel` takes the parts over: the adapter has no forward."""
    return adapter.controlnet_cond_embedding(conditioning)


def cosmos_controlnet() -> Any:
    """It needs torchvision for the resizing of a mask."""
    module = sys.modules[diffusers.CosmosControlNetModel.__module__]
    if not hasattr(module, "transforms"):
        module.transforms = SimpleNamespace(
            functional=SimpleNamespace(resize=lambda mask, size, interpolation: F.interpolate(mask, size)),
            InterpolationMode=SimpleNamespace(NEAREST=None))
    return diffusers.CosmosControlNetModel(**COSMOS)


def z_image_controlnet() -> Any:
    """It takes over the embedders and refiners of a transformer."""
    small = {"dim": 16, "n_refiner_layers": 1, "n_heads": 1, "n_kv_heads": 1, "qk_norm": True}
    transformer = diffusers.ZImageTransformer2DModel(
        **small, in_channels=16, n_layers=2, cap_feat_dim=16, axes_dims=[8, 4, 4], axes_lens=[256, 32, 32])
    controlnet = diffusers.ZImageControlNetModel(
        control_layers_places=[0, 1], control_refiner_layers_places=[0], control_in_dim=16,
        add_control_noise_refiner="control_noise_refiner", **small)
    return diffusers.ZImageControlNetModel.from_transformer(controlnet, transformer)


CASES = [
    Case("CosmosControlNetModel", {},
         dict(controls_latents=(1, 16, 1, 16, 16), latents=(1, 16, 1, 16, 16), timestep=[0.5],
         encoder_hidden_states=lambda: (randn(1, 12, 32), randn(1, 4, 32)), condition_mask=torch.ones(1, 1, 1, 16, 16),
         conditioning_scale=1.0, padding_mask=torch.zeros(1, 1, 16, 16)), build=cosmos_controlnet),
    Case("ControlNetModel", SD, dict(SD_INPUTS, controlnet_cond=(1, 3, 64, 64))),
    Case("ControlNetUnionModel", dict(SD, num_trans_channel=4, num_trans_head=2, num_proj_channel=4,
         conditioning_embedding_out_channels=(4, 4), addition_embed_type="text_time", addition_time_embed_dim=4,
         projection_class_embeddings_input_dim=32),
         dict(SD_INPUTS, controlnet_cond=lambda: [randn(1, 3, 16, 16)], control_type=torch.eye(6)[:1],
         control_type_idx=lambda: [0], added_cond_kwargs=lambda: {"text_embeds": randn(1, 8),
         "time_ids": randn(1, 6)})),
    Case("ControlNetXSAdapter", dict(conditioning_embedding_out_channels=(2, 2), num_attention_heads=4,
         block_out_channels=(4, 8), base_block_out_channels=(4, 8), cross_attention_dim=8,
         down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), max_norm_num_groups=2, sample_size=8),
         dict(conditioning=(1, 3, 16, 16)), call=hint_embedding),
    Case("FluxControlNetModel", FLUX, dict(FLUX_INPUTS, controlnet_cond=(1, 16, 4))),
    Case("FluxMultiControlNetModel", {},
         dict(FLUX_INPUTS, controlnet_cond=lambda: [randn(1, 16, 4)] * 2, conditioning_scale=lambda: [1.0, 0.5],
         controlnet_mode=[torch.tensor([0]), torch.tensor([1])], return_dict=False),
         build=several("FluxMultiControlNetModel", "FluxControlNetModel", FLUX, num_mode=2)),
    Case("HunyuanDiT2DControlNetModel", HUNYUAN, dict(HUNYUAN_INPUTS, controlnet_cond=(1, 4, 16, 16))),
    Case("HunyuanDiT2DMultiControlNetModel", {},
         dict(HUNYUAN_INPUTS, controlnet_cond=lambda: [randn(1, 4, 16, 16)] * 2, conditioning_scale=lambda: [1.0, 0.5]),
         build=several("HunyuanDiT2DMultiControlNetModel", "HunyuanDiT2DControlNetModel", HUNYUAN)),
    Case("MultiControlNetModel", {},
         dict(SD_INPUTS, controlnet_cond=lambda: [randn(1, 3, 64, 64)] * 2, conditioning_scale=lambda: [1.0, 0.5],
         return_dict=False),
         build=several("MultiControlNetModel", "ControlNetModel", SD)),
    Case("QwenImageControlNetModel", QWEN, dict(QWEN_INPUTS, controlnet_cond=(1, 16, 16))),
    Case("QwenImageMultiControlNetModel", {},
         dict(QWEN_INPUTS, controlnet_cond=lambda: [randn(1, 16, 16)], conditioning_scale=lambda: [0.5]),
         build=several("QwenImageMultiControlNetModel", "QwenImageControlNetModel", QWEN, num=1)),
    Case("SD3ControlNetModel", SD3, dict(SD3_INPUTS, controlnet_cond=(1, 4, 16, 16))),
    Case("SD3MultiControlNetModel", {},
         dict(SD3_INPUTS, controlnet_cond=lambda: [randn(1, 4, 16, 16)] * 2, conditioning_scale=lambda: [1.0, 0.5]),
         build=several("SD3MultiControlNetModel", "SD3ControlNetModel", SD3)),
    Case("SanaControlNetModel", dict(in_channels=4, out_channels=4, num_layers=2, attention_head_dim=4,
         num_attention_heads=2, num_cross_attention_heads=2, cross_attention_head_dim=4, cross_attention_dim=8,
         caption_channels=8, sample_size=8),
         dict(hidden_states=(1, 4, 8, 8), encoder_hidden_states=(1, 6, 8), timestep=[44],
         controlnet_cond=(1, 4, 8, 8))),
    Case("SparseControlNetModel", dict(block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1,
         cross_attention_dim=8, down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"), attention_head_dim=4,
         motion_num_attention_heads=2),
         dict(sample=(1, 4, 2, 8, 8), timestep=torch.tensor(7), encoder_hidden_states=(2, 4, 8),
         controlnet_cond=(1, 4, 2, 8, 8), conditioning_mask=torch.ones(1, 1, 2, 8, 8))),
    Case("T2IAdapter", T2I, dict(x=(1, 3, 32, 32))),
    Case("MultiAdapter", {},
         dict(xs=(2, 1, 3, 32, 32), adapter_weights=lambda: [1.0, 0.5]),
         build=several("MultiAdapter", "T2IAdapter", T2I)),
    Case("ZImageControlNetModel", {},
         dict(x=lambda: [randn(16, 1, 16, 16)], t=[0.5], cap_feats=lambda: [randn(16, 16)],
         control_context=lambda: [randn(16, 1, 16, 16)]), build=lambda: z_image_controlnet()),
]
