"""UNets."""

# fmt: off
from __future__ import annotations

from typing import Any

from ..case import Case, ints


def first_motion_module(adapter: Any, **inputs: Any) -> Any:
    """`UNetMotionModel` takes the modules over: the adapter has no forward."""
    return adapter.down_blocks[0].motion_modules[0](**inputs)


CASES = [
    Case("UNet1DModel", dict(block_out_channels=(8, 8, 16, 16), in_channels=14, use_timestep_embedding=True,
         out_block_type="OutConv1DBlock", mid_block_type="MidResTemporalBlock1D", down_block_types=("DownResnetBlock1D",
         "DownResnetBlock1D", "DownResnetBlock1D", "DownResnetBlock1D"),
         up_block_types=("UpResnetBlock1D", "UpResnetBlock1D", "UpResnetBlock1D"), act_fn="swish"),
         dict(sample=(4, 14, 16))),
    Case("UNet2DModel", dict(down_block_types=("DownBlock2D", "AttnDownBlock2D"),
         up_block_types=("AttnUpBlock2D", "UpBlock2D")), dict(sample=(4, 3, 32, 32))),
    Case("UNet3DConditionModel", dict(cross_attention_dim=8, attention_head_dim=2,
         down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"), up_block_types=("UpBlock3D", "CrossAttnUpBlock3D")),
         dict(sample=(4, 4, 4, 16, 16), encoder_hidden_states=(4, 4, 8))),
    Case("UNetControlNetXSModel", dict(down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
         up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=8, ctrl_block_out_channels=[2, 4],
         ctrl_conditioning_embedding_out_channels=(2, 2)), dict(sample=(4, 4, 16, 16), encoder_hidden_states=(4, 4, 8),
         controlnet_cond=(4, 3, 32, 32))),
    Case("UNetMotionModel", dict(down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
         up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion")), dict(sample=(1, 4, 2, 8, 8),
         encoder_hidden_states=(2, 6, 32))),
    Case("UNetSpatioTemporalConditionModel", dict(block_out_channels=(32, 64),
         down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
         up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
         projection_class_embeddings_input_dim=96, addition_time_embed_dim=32), dict(sample=(2, 2, 4, 32, 32),
         encoder_hidden_states=(2, 1, 32), added_time_ids=(2, 3))),
    Case("AudioLDM2UNet2DConditionModel", dict(down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
         up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"))),
    Case("DreamLiteUNetModel", dict(block_out_channels=(16, 32, 32))),
    Case("I2VGenXLUNet", dict(cross_attention_dim=8, attention_head_dim=2,
         down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"), up_block_types=("UpBlock3D", "CrossAttnUpBlock3D")),
         dict(sample=(1, 4, 2, 8, 8), fps=[8], image_latents=(1, 4, 2, 8, 8), image_embeddings=(1, 8),
         encoder_hidden_states=(1, 4, 8))),
    Case("Kandinsky3UNet", dict(groups=4, block_out_channels=(8, 8, 16, 16), encoder_hid_dim=32, layers_per_block=3,
         attention_head_dim=4)),
    Case("MotionAdapter", dict(motion_norm_num_groups=4), dict(hidden_states=(2, 8, 4, 4)), call=first_motion_module),
    Case("StableCascadeUNet", dict(timestep_ratio_embedding_dim=8, num_attention_heads=(2, 4),
         up_num_layers_per_block=(2, 1), clip_text_in_channels=12, clip_text_pooled_in_channels=12,
         clip_image_in_channels=12, switch_level=(False,), in_channels=16, out_channels=16), dict(sample=(1, 16, 8, 8),
         timestep_ratio=[0.5], clip_text_pooled=(1, 1, 12), clip_text=(1, 4, 12), clip_img=(1, 1, 12))),
    Case("UNet2DConditionModel", dict(attention_head_dim=2, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
         up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"))),
    Case("UVit2DModel", dict(cond_embed_dim=16, micro_cond_encode_dim=2, micro_cond_embed_dim=10,
         encoder_hidden_size=16, block_out_channels=16, downsample=True, upsample=True),
         dict(input_ids=lambda: ints(32, 1, 8, 8), encoder_hidden_states=(1, 4, 16), pooled_text_emb=(1, 16),
         micro_conds=(1, 5))),
    Case("UniDiffuserModel", dict(clip_img_dim=32, patch_size=2, num_text_tokens=6, in_channels=4, out_channels=4,
         sample_size=8, norm_type="layer_norm", use_data_type_embedding=True), dict(latent_image_embeds=(1, 4, 8, 8),
         image_embeds=(1, 1, 32), prompt_embeds=(1, 6, 32), timestep_img=[3], timestep_text=[3])),
]
