"""UNets."""

# fmt: off
from __future__ import annotations

from typing import Any

import torch

from ..case import Case, ints


def first_motion_module(adapter: Any, **inputs: Any) -> Any:
    """`UNetMotionModel` takes the modules over: the adapter has no forward."""
    return adapter.down_blocks[0].motion_modules[0](**inputs)


SD = dict(block_out_channels=(4, 8), norm_num_groups=4, layers_per_block=1, sample_size=16, cross_attention_dim=8,
          attention_head_dim=2, down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"), up_block_types=("UpBlock3D",
          "CrossAttnUpBlock3D"))

CASES = [
    Case("UNet1DModel", dict(block_out_channels=(8, 8, 16, 16), in_channels=14, out_channels=14,
         time_embedding_type="positional", use_timestep_embedding=True, flip_sin_to_cos=False, freq_shift=1.0,
         out_block_type="OutConv1DBlock", mid_block_type="MidResTemporalBlock1D", down_block_types=("DownResnetBlock1D",
         "DownResnetBlock1D", "DownResnetBlock1D", "DownResnetBlock1D"), up_block_types=("UpResnetBlock1D",
         "UpResnetBlock1D", "UpResnetBlock1D"), act_fn="swish"), dict(sample=(4, 14, 16), timestep=[10, 10, 10, 10])),
    Case("UNet2DModel", dict(block_out_channels=(4, 8), norm_num_groups=2, down_block_types=("DownBlock2D",
         "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=3, sample_size=32),
         dict(sample=(4, 3, 32, 32), timestep=[10])),
    Case("UNet3DConditionModel", SD, dict(sample=(4, 4, 4, 16, 16), timestep=[10], encoder_hidden_states=(4, 4, 8))),
    Case("UNetControlNetXSModel", dict(sample_size=16, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
         up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), block_out_channels=(4, 8), cross_attention_dim=8,
         num_attention_heads=2, norm_num_groups=4, upcast_attention=False, ctrl_block_out_channels=[2, 4],
         ctrl_max_norm_num_groups=2, ctrl_conditioning_embedding_out_channels=(2, 2)),
         dict(sample=(4, 4, 16, 16), timestep=[10], encoder_hidden_states=(4, 4, 8), controlnet_cond=(4, 3, 32, 32),
         conditioning_scale=1)),
    Case("UNetMotionModel", dict(block_out_channels=(16, 32), norm_num_groups=16,
         down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"), up_block_types=("UpBlockMotion",
         "CrossAttnUpBlockMotion"), cross_attention_dim=16, num_attention_heads=2, layers_per_block=1, sample_size=16),
         dict(sample=(4, 4, 4, 16, 16), timestep=[10], encoder_hidden_states=(16, 4, 16))),
    Case("UNetSpatioTemporalConditionModel", dict(block_out_channels=(32, 64),
         down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
         up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"), cross_attention_dim=32,
         num_attention_heads=8, in_channels=4, sample_size=32, projection_class_embeddings_input_dim=96,
         addition_time_embed_dim=32),
         dict(sample=(2, 2, 4, 32, 32), timestep=[10], encoder_hidden_states=(2, 1, 32), added_time_ids=(2, 3))),
    Case("AudioLDM2UNet2DConditionModel", dict(SD, block_out_channels=(8, 16), norm_num_groups=8,
         down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
         sample_size=8, cross_attention_dim=((None, 8, 16), (None, 8, 16)), attention_head_dim=4),
         dict(sample=(1, 4, 8, 8), timestep=torch.tensor(7), encoder_hidden_states=(1, 4, 8),
         encoder_hidden_states_1=(1, 6, 16))),
    Case("DreamLiteUNetModel", dict(sample_size=8, block_out_channels=(16, 32, 32), layers_per_block=1,
         norm_num_groups=4, cross_attention_dim=16, attention_head_dim=8, ff_mult=2),
         dict(sample=(1, 4, 8, 8), timestep=[7], encoder_hidden_states=(1, 4, 16))),
    Case("I2VGenXLUNet", dict(SD, block_out_channels=(8, 16), sample_size=8),
         dict(sample=(1, 4, 2, 8, 8), timestep=torch.tensor(7), fps=[8], image_latents=(1, 4, 2, 8, 8),
         image_embeddings=(1, 8), encoder_hidden_states=(1, 4, 8))),
    Case("Kandinsky3UNet", dict(time_embedding_dim=16, groups=4, attention_head_dim=4, layers_per_block=3,
         block_out_channels=(8, 8, 16, 16), cross_attention_dim=8, encoder_hid_dim=12),
         dict(sample=(1, 4, 8, 8), timestep=torch.tensor(7), encoder_hidden_states=(1, 4, 12),
         encoder_attention_mask=torch.ones(1, 4))),
    Case("MotionAdapter", dict(block_out_channels=(8, 16), motion_layers_per_block=1, motion_norm_num_groups=4,
         motion_num_attention_heads=2), dict(hidden_states=(2, 8, 4, 4), num_frames=2), call=first_motion_module),
    Case("StableCascadeUNet", dict(timestep_ratio_embedding_dim=8, conditioning_dim=16, block_out_channels=(16, 32),
         num_attention_heads=(2, 4), down_num_layers_per_block=(1, 2), up_num_layers_per_block=(2, 1),
         clip_text_in_channels=12, clip_text_pooled_in_channels=12, clip_image_in_channels=12, clip_seq=2,
         switch_level=(False,)),
         dict(sample=(1, 16, 8, 8), timestep_ratio=[0.5], clip_text_pooled=(1, 1, 12), clip_text=(1, 4, 12),
         clip_img=(1, 1, 12))),
    Case("UNet2DConditionModel", dict(SD, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
         up_block_types=("UpBlock2D", "CrossAttnUpBlock2D")),
         dict(sample=(2, 4, 16, 16), timestep=[10], encoder_hidden_states=(2, 4, 8))),
    Case("UVit2DModel", dict(hidden_size=16, cond_embed_dim=16, micro_cond_encode_dim=2, micro_cond_embed_dim=10,
         encoder_hidden_size=16, vocab_size=32, codebook_size=32, in_channels=16, block_out_channels=16,
         num_res_blocks=1, downsample=True, upsample=True, block_num_heads=1, num_hidden_layers=1,
         num_attention_heads=1, intermediate_size=16),
         dict(input_ids=lambda: ints(32, 1, 8, 8), encoder_hidden_states=(1, 4, 16), pooled_text_emb=(1, 16),
         micro_conds=(1, 5))),
    Case("UniDiffuserModel", dict(text_dim=16, clip_img_dim=16, num_text_tokens=6, num_attention_heads=2,
         attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2, sample_size=8, patch_size=2,
         activation_fn="gelu", num_embeds_ada_norm=100, norm_type="layer_norm", pre_layer_norm=False,
         use_timestep_embedding=False, norm_elementwise_affine=True, use_patch_pos_embed=False, ff_final_dropout=True,
         use_data_type_embedding=True, attention_bias=False),
         dict(latent_image_embeds=(1, 4, 8, 8), image_embeds=(1, 1, 16), prompt_embeds=(1, 6, 16), timestep_img=[3],
         timestep_text=[3])),
]
