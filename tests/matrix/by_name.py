"""What most classes are built from and called with, tiny, by the names of parameters: a case says only what is different."""

from __future__ import annotations

import inspect
from typing import Any

import torch

_SIZES: dict[Any, str] = {
    32: """
        hidden_size dim model_dim embed_dim intermediate_size ffn_dim ff_dim ff_inner_dim ffn_hidden_size
        token_dim dit_dim d_model d_ff n_embd text_dim text_embed_dim text_embed_2_dim text_in_dim in_text_dim
        in_text_dim2 text_hidden_dim text_intermediate_size text_encoder_dim text_encoder_1_dim dit_text_dim
        caption_channels caption_projection_dim context_in_dim cap_feat_dim condition_dim joint_attention_dim
        cross_attention_dim cross_attention_dim_t5 cross_attention_input_dim cond_token_dim
        pooled_projection_dim llm_features_dim audio_cross_attention_dim image_embed_dim image_proj_dim
        image_dim global_cond_dim global_states_input_dim embedding_dim redux_dim txt_in_features output_dim
        source_dim target_dim langauge_model_dim conditioning_dim motion_encoder_dim face_encoder_hidden_dim
        approximator_hidden_dim time_embed_hidden_dim fsq_dim condition_hidden_dim out_dim prefix_inner_dim
        encoder_hidden_size decoder_hidden_size decoder_intermediate_size
    """,
    16: """
        attention_head_dim head_dim cross_attention_head_dim audio_attention_head_dim d_kv freq_dim time_dim
        time_embed_dim timestep_embed_dim timestep_channels adaln_dim time_proj_dim timestep_features_dim
        fourier_dim linear_head_dim dim_cond pair_repr_dim t_emb_dim tri_mult_c token_type_emb_dim
        addition_time_embed_dim time_embedding_dim motion_style_dim fourier_embedding_dim
    """,
    2: """
        num_attention_heads num_heads n_heads n_head nheads dit_heads num_key_value_heads n_kv_heads
        num_kv_heads num_cross_attention_heads audio_num_attention_heads text_num_attention_heads
        text_num_key_value_heads face_encoder_num_heads decoder_num_attention_heads attn_num_heads num_layers
        num_single_layers num_hidden_layers n_layers n_layer nlayers depth dit_depth num_visual_blocks
        mmdit_layers decoder_num_layers encoder_num_hidden_layers decoder_num_hidden_layers num_condition_layers
        transformer_num_layers
    """,
    1: """
        num_refiner_layers n_refiner_layers num_mmdit_layers num_single_dit_layers num_text_blocks
        layers_per_block num_res_blocks num_layerwise_text_blocks num_refiner_text_blocks perceiver_num_layers
    """,
    4: """
        in_channels out_channels latent_channels in_visual_dim out_visual_dim latent_dim norm_num_groups
        adaln_lora_dim audio_in_channels audio_out_channels io_channels rotary_dim in_audio_dim out_audio_dim
        approximator_num_channels audio_acoustic_hidden_dim timbre_hidden_dim
    """,
    (4, 4, 8): "axes_dims_rope axes_dim_rope rope_axes_dim axes_dims rope_dim_list rope_dim",
    8: "sample_size sample_width sample_height sample_frames pos_embed_max_size num_embeds_ada_norm",
    6: "text_len text_len_t5 num_embeddings max_text_seq_length num_text_tokens",
    64: "vocab_size target_vocab_size audio_vocab_size rope_max_seq_len n_positions",
    (64, 32, 32): "axes_lens",
    (8, 16): "block_out_channels",
}
"""Parameters of classes by what is given for them. Widths go together: two heads of 16 are a width of 32."""

_CONFIG = {name: size for size, names in _SIZES.items() for name in names.split()}

_MASK = torch.ones(1, 6, dtype=torch.long)
_INPUTS: dict[str, Any] = {
    "encoder_hidden_states": (1, 6, 32),
    "encoder_hidden_states_2": (1, 4, 32),
    "encoder_hidden_states_t5": (1, 6, 32),
    "encoder_attention_mask": torch.ones(1, 6),
    "encoder_attention_mask_2": torch.ones(1, 4),
    "encoder_hidden_states_mask": _MASK,
    "text_embedding_mask": _MASK,
    "text_embedding_mask_t5": _MASK,
    "pooled_projections": (1, 32),
    "global_hidden_states": (1, 32),
    "audio_hidden_states": (1, 9, 4),
    "audio_encoder_hidden_states": (1, 6, 32),
    "audio_num_frames": 9,
    "timestep": [7.0],
    "img_ids": (16, 3),
    "txt_ids": (6, 3),
    "img_shapes": [(1, 4, 4)],
    "original_size": torch.tensor([[64, 64]]),
    "target_size": torch.tensor([[64, 64]]),
    "crop_coords": torch.tensor([[0, 0]]),
    "image_meta_size": (1, 6),
    "style": [0],
    "controlnet_cond": (1, 3, 64, 64),
    "conditioning_scale": 1.0,
}
"""Arguments of forwards, as cases give them."""


def config_of(cls: Any) -> dict[str, Any]:
    """What a class is built from. What is None by default stays so, and so do the 3 channels of images."""
    usual = {name: each.default for name, each in inspect.signature(cls.__init__).parameters.items()}
    colors = {name for name in ("in_channels", "out_channels") if usual.get(name) == 3}
    return {name: size for name, size in _CONFIG.items() if usual.get(name) is not None and name not in colors}


def inputs_of(cls: Any) -> dict[str, Any]:
    """What its forward gets. Latents are an image, a video if the class's name says so, or patches if those have ids."""
    taken = inspect.signature(cls.forward).parameters
    latents = (1, 4, 2, 8, 8) if "3D" in cls.__name__ or "Video" in cls.__name__ else (1, 4, 8, 8)
    patches = (1, 16, 4) if {"img_ids", "img_shapes"} & taken.keys() else latents
    inputs = {"hidden_states": patches, "sample": latents, **_INPUTS}
    return {name: value for name, value in inputs.items() if name in taken}
