"""ControlNets and adapters."""

# fmt: off
from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
import torch.nn.functional as F

from ..by_name import config_of
from ..case import Case, randn

SD = dict(down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), conditioning_embedding_out_channels=(4, 4, 4, 4))
HUNYUAN = dict(patch_size=2, conditioning_channels=4, in_channels=4, transformer_num_layers=4)
COSMOS = dict(n_controlnet_blocks=2, in_channels=18, model_channels=32, num_attention_heads=2, attention_head_dim=16,
              mlp_ratio=2, text_embed_dim=32, adaln_lora_dim=4, max_size=(4, 32, 32), img_context_dim_in=32,
              img_context_dim_out=32)
T2I = dict(channels=[8, 16])


def built(name: str, config: dict[str, Any]) -> Any:
    cls = getattr(diffusers, name)
    return cls(**{**config_of(cls), **config})


def several(name: str, part: str, num: int = 2, **config: Any) -> Any:
    """What holds several of one class."""
    return lambda: getattr(diffusers, name)([built(part, config) for _ in range(num)])


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
    transformer = built("ZImageTransformer2DModel", {"qk_norm": True})
    controlnet = built("ZImageControlNetModel", dict(
        control_layers_places=[0, 1], control_refiner_layers_places=[0], control_in_dim=4,
        add_control_noise_refiner="control_noise_refiner", qk_norm=True))
    return diffusers.ZImageControlNetModel.from_transformer(controlnet, transformer)


CASES = [
    Case("CosmosControlNetModel", given=dict(controls_latents=(1, 16, 1, 16, 16), latents=(1, 16, 1, 16, 16),
         encoder_hidden_states=lambda: (randn(1, 12, 32), randn(1, 4, 32)), condition_mask=torch.ones(1, 1, 1, 16, 16),
         padding_mask=torch.zeros(1, 1, 16, 16)), build=cosmos_controlnet),
    Case("ControlNetModel", SD),
    Case("ControlNetUnionModel", dict(SD, num_trans_channel=8, num_trans_head=2, num_proj_channel=8,
         conditioning_embedding_out_channels=(4, 4), addition_embed_type="text_time", addition_time_embed_dim=4,
         projection_class_embeddings_input_dim=32),
         dict(controlnet_cond=lambda: [randn(1, 3, 16, 16)], control_type=torch.eye(6)[:1],
         control_type_idx=lambda: [0], added_cond_kwargs=lambda: {"text_embeds": randn(1, 8),
         "time_ids": randn(1, 6)})),
    Case("ControlNetXSAdapter", dict(conditioning_embedding_out_channels=(2, 2), base_block_out_channels=(4, 8),
         down_block_types=("DownBlock2D", "CrossAttnDownBlock2D")),
         dict(conditioning=(1, 3, 16, 16)), call=hint_embedding),
    Case("FluxControlNetModel", given=dict(controlnet_cond=(1, 16, 4))),
    Case("FluxMultiControlNetModel", given=dict(controlnet_cond=lambda: [randn(1, 16, 4)] * 2,
         conditioning_scale=lambda: [1.0, 0.5], controlnet_mode=[torch.tensor([0]), torch.tensor([1])],
         return_dict=False), build=several("FluxMultiControlNetModel", "FluxControlNetModel", num_mode=2)),
    Case("HunyuanDiT2DControlNetModel", HUNYUAN, dict(controlnet_cond=(1, 4, 8, 8))),
    Case("HunyuanDiT2DMultiControlNetModel", given=dict(controlnet_cond=lambda: [randn(1, 4, 8, 8)] * 2,
         conditioning_scale=lambda: [1.0, 0.5]),
         build=several("HunyuanDiT2DMultiControlNetModel", "HunyuanDiT2DControlNetModel", **HUNYUAN)),
    Case("MultiControlNetModel", given=dict(controlnet_cond=lambda: [randn(1, 3, 64, 64)] * 2,
         conditioning_scale=lambda: [1.0, 0.5], return_dict=False),
         build=several("MultiControlNetModel", "ControlNetModel", **SD)),
    Case("QwenImageControlNetModel", given=dict(controlnet_cond=(1, 16, 4))),
    Case("QwenImageMultiControlNetModel", given=dict(controlnet_cond=lambda: [randn(1, 16, 4)],
         conditioning_scale=lambda: [0.5]),
         build=several("QwenImageMultiControlNetModel", "QwenImageControlNetModel", num=1)),
    Case("SD3ControlNetModel", given=dict(controlnet_cond=(1, 4, 8, 8))),
    Case("SD3MultiControlNetModel", given=dict(controlnet_cond=lambda: [randn(1, 4, 8, 8)] * 2,
         conditioning_scale=lambda: [1.0, 0.5]), build=several("SD3MultiControlNetModel", "SD3ControlNetModel")),
    Case("SanaControlNetModel", given=dict(controlnet_cond=(1, 4, 8, 8))),
    Case("SparseControlNetModel", dict(down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
         attention_head_dim=4, conditioning_channels=4), dict(sample=(1, 4, 2, 8, 8), encoder_hidden_states=(2, 6, 32),
         controlnet_cond=(1, 4, 2, 8, 8), conditioning_mask=torch.ones(1, 1, 2, 8, 8))),
    Case("T2IAdapter", T2I, dict(x=(1, 3, 32, 32))),
    Case("MultiAdapter", given=dict(xs=(2, 1, 3, 32, 32), adapter_weights=lambda: [1.0, 0.5]),
         build=several("MultiAdapter", "T2IAdapter", **T2I)),
    Case("ZImageControlNetModel", given=dict(x=lambda: [randn(4, 1, 16, 16)], t=[0.5],
         cap_feats=lambda: [randn(16, 32)], control_context=lambda: [randn(4, 1, 16, 16)]),
         build=lambda: z_image_controlnet()),
]
