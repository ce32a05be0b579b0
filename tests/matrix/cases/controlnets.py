"""ControlNets and adapters."""

# fmt: off
from __future__ import annotations

import torch

from ..case import Case, ints, randn

CASES = [
    Case("CosmosControlNetModel",
         {"n_controlnet_blocks": 2, "in_channels": 18, "model_channels": 32, "num_attention_heads": 2,
         "attention_head_dim": 16, "mlp_ratio": 2, "text_embed_dim": 32, "adaln_lora_dim": 4,
         "max_size": (4, 32, 32), "img_context_dim_in": 32, "img_context_dim_out": 32},
         lambda: {"controls_latents": randn(1, 16, 1, 16, 16), "latents": randn(1, 16, 1, 16, 16),
         "timestep": torch.tensor([0.5]), "encoder_hidden_states": (randn(1, 12, 32), randn(1, 4, 32)),
         "condition_mask": torch.ones(1, 1, 1, 16, 16), "conditioning_scale": 1.0,
         "padding_mask": torch.zeros(1, 1, 16, 16)}),
]
