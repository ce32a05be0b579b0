"""UNets."""

# fmt: off
from __future__ import annotations

import torch

from ..case import Case, ints, randn

CASES = [
    Case("UNet1DModel",
         {"block_out_channels": (8, 8, 16, 16), "in_channels": 14, "out_channels": 14,
         "time_embedding_type": "positional", "use_timestep_embedding": True, "flip_sin_to_cos": False,
         "freq_shift": 1.0, "out_block_type": "OutConv1DBlock", "mid_block_type": "MidResTemporalBlock1D",
         "down_block_types": ("DownResnetBlock1D", "DownResnetBlock1D", "DownResnetBlock1D", "DownResnetBlock1D"),
         "up_block_types": ("UpResnetBlock1D", "UpResnetBlock1D", "UpResnetBlock1D"), "act_fn": "swish"},
         lambda: {"sample": randn(4, 14, 16), "timestep": torch.tensor([10, 10, 10, 10])}),
    Case("UNet2DModel",
         {"block_out_channels": (4, 8), "norm_num_groups": 2,
         "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
         "attention_head_dim": 3, "sample_size": 32},
         lambda: {"sample": randn(4, 3, 32, 32), "timestep": torch.tensor([10])}),
    Case("UNet3DConditionModel",
         {"block_out_channels": (4, 8), "norm_num_groups": 4,
         "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
         "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"), "cross_attention_dim": 8, "attention_head_dim": 2,
         "layers_per_block": 1, "sample_size": 16},
         lambda: {"sample": randn(4, 4, 4, 16, 16), "timestep": torch.tensor([10]),
         "encoder_hidden_states": randn(4, 4, 8)}),
    Case("UNetControlNetXSModel",
         {"sample_size": 16, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
         "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "block_out_channels": (4, 8),
         "cross_attention_dim": 8, "num_attention_heads": 2, "norm_num_groups": 4, "upcast_attention": False,
         "ctrl_block_out_channels": [2, 4], "ctrl_max_norm_num_groups": 2,
         "ctrl_conditioning_embedding_out_channels": (2, 2)},
         lambda: {"sample": randn(4, 4, 16, 16), "timestep": torch.tensor([10]),
         "encoder_hidden_states": randn(4, 4, 8), "controlnet_cond": randn(4, 3, 32, 32), "conditioning_scale": 1}),
    Case("UNetMotionModel",
         {"block_out_channels": (16, 32), "norm_num_groups": 16,
         "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
         "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"), "cross_attention_dim": 16,
         "num_attention_heads": 2, "layers_per_block": 1, "sample_size": 16},
         lambda: {"sample": randn(4, 4, 4, 16, 16), "timestep": torch.tensor([10]),
         "encoder_hidden_states": randn(16, 4, 16)}),
    Case("UNetSpatioTemporalConditionModel",
         {"block_out_channels": (32, 64),
         "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
         "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"), "cross_attention_dim": 32,
         "num_attention_heads": 8, "in_channels": 4, "sample_size": 32, "projection_class_embeddings_input_dim": 96,
         "addition_time_embed_dim": 32},
         lambda: {"sample": randn(2, 2, 4, 32, 32), "timestep": torch.tensor([10]),
         "encoder_hidden_states": randn(2, 1, 32), "added_time_ids": randn(2, 3)}),
]
