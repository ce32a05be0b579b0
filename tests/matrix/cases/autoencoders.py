"""Autoencoders."""

# fmt: off
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..case import Case, encode_and_decode, ints


def forward_and_parts(vae: Any, **inputs: Any) -> Any:
    """What pipelines call of an autoencoder is not its forward."""
    whole = vae(**inputs)
    return (whole, encode_and_decode(vae, inputs["sample"])) if hasattr(vae, "encode") and "sample" in inputs else whole


def frames(vae: Any, sample: torch.Tensor, num_frames: int) -> Any:
    encoded = vae.encode(sample)
    return encoded, vae.decode(encoded.latent_dist.mode(), num_frames)


def tiled(vae: Any, sample: torch.Tensor) -> Any:
    """It works on tiles only."""
    vae.enable_tiling()
    vae.kernel, vae.stride = (8, 16, 16), (8, 16, 16)
    vae.tile_overlap_t = vae.tile_overlap_h = vae.tile_overlap_w = 0
    return encode_and_decode(vae, sample)


def protein(vae: Any, coords_nm: torch.Tensor, padding_mask: torch.Tensor, **given: Any) -> Any:
    encoded = vae.encode(coords_nm, padding_mask, **given)
    return encoded, vae.decode(encoded.latent, coords_nm[:, :, 1], padding_mask, **given)


KL = dict(down_block_types=["DownEncoderBlock2D", "DownEncoderBlock2D"], up_block_types=["UpDecoderBlock2D",
          "UpDecoderBlock2D"])

IMAGES = [
    Case("AutoencoderDC", dict(attention_head_dim=2, encoder_block_types=("ResBlock", "EfficientViTBlock"),
         decoder_block_types=("ResBlock", "EfficientViTBlock"), encoder_block_out_channels=(8, 8),
         decoder_block_out_channels=(8, 8), encoder_qkv_multiscales=((), (5,)), decoder_qkv_multiscales=((), (5,)))),
    Case("AutoencoderKL", KL),
    Case("AutoencoderKLKVAE", dict(channels=32, ch_mult=(1, 2))),
    Case("AutoencoderTiny", dict(encoder_block_out_channels=[32, 32], decoder_block_out_channels=[32, 32],
         num_encoder_blocks=[1, 1], num_decoder_blocks=[1, 1])),
    Case("ConsistencyDecoderVAE", dict(encoder_block_out_channels=[2, 4],
         encoder_down_block_types=["DownEncoderBlock2D", "DownEncoderBlock2D"], decoder_block_out_channels=[2, 4],
         decoder_down_block_types=["ResnetDownsampleBlock2D", "ResnetDownsampleBlock2D"], decoder_norm_num_groups=2,
         encoder_norm_num_groups=2, decoder_up_block_types=["ResnetUpsampleBlock2D", "ResnetUpsampleBlock2D"])),
    Case("VQModel", KL),
    Case("AutoencoderKLFlux2", KL),
    Case("AutoencoderKLHunyuanImage", dict(block_out_channels=(32, 32), in_channels=3, spatial_compression_ratio=2)),
    Case("AutoencoderRAE", dict(encoder_hidden_size=64)),
]
VIDEOS = [
    Case("AutoencoderKLCosmos", dict(encoder_block_out_channels=(8, 8, 8, 8), decode_block_out_channels=(8, 8, 8, 8),
         attention_resolutions=(8,), resolution=64)),
    Case("AutoencoderKLHunyuanVideo", dict(block_out_channels=(8, 8, 8, 8))),
    Case("AutoencoderKLCogVideoX", dict(block_out_channels=(8, 8, 8, 8))),
    Case("AutoencoderKLKVAEVideo", dict(ch=32, ch_mult=(1, 2))),
    Case("AutoencoderKLMiniMaxH3", dict(decoder_attention_head_dim=8)),
    Case("AutoencoderKLLTX2Video", dict(layers_per_block=(1, 1, 1, 1, 1), decoder_block_out_channels=(16, 32, 64),
         decoder_layers_per_block=(1, 1, 1, 1))),
    Case("AutoencoderKLLTXVideo", dict(layers_per_block=(1, 1, 1, 1, 1), decoder_block_out_channels=(8, 8, 8, 8),
         decoder_spatio_temporal_scaling=(True, True, False, False))),
    Case("AutoencoderKLMagvit", dict(block_out_channels=[8, 8, 8, 8])),
    Case("AutoencoderKLMochi", dict(encoder_block_out_channels=(32, 32, 32, 32),
         decoder_block_out_channels=(32, 32, 32, 32), layers_per_block=(1, 1, 1, 1, 1), in_channels=15)),
    Case("AutoencoderVidTok", dict(ch=32, ch_mult=[1, 1, 1, 1])),
    Case("AutoencoderKLWan", dict(base_dim=3)),
    Case("AutoencoderKLAllegro", dict(block_out_channels=(8, 8, 8, 8)), call=tiled),
    Case("AutoencoderKLHunyuanVideo15", dict(block_out_channels=(32, 32, 32), spatial_compression_ratio=4)),
    Case("Kandinsky6SRVAE", dict(encoder_block_out_channels=(32, 32, 32, 32),
         decoder_block_out_channels=(32, 32, 32, 32))),
]
OTHERS = [
    Case("AsymmetricAutoencoderKL", dict(KL, norm_num_groups=2, down_block_out_channels=[2, 4],
         up_block_out_channels=[2, 4]), dict(sample=(4, 3, 32, 32), mask=torch.ones(4, 1, 32, 32))),
    Case("Cosmos3AVAEAudioTokenizer", dict(enc_dim=4, enc_hop_length=2, enc_latent_dim=8, enc_c_mults=(1,),
         enc_strides=(2,), vocoder_input_dim=4, dec_dim=4, dec_c_mults=(1, 2), dec_strides=(2, 2)),
         dict(sample=(2, 2, 16))),
    Case("AutoencoderKLLTX2Audio", dict(base_channels=16, in_channels=2), dict(sample=(2, 2, 8, 16))),
    Case("AutoencoderKLMiniMaxH3Audio", dict(encoder_dim=4, encoder_rates=(2, 2), decoder_dim=16, decoder_rates=(2, 2)),
         dict(sample=(2, 1, 32))),
    Case("AutoencoderKLTemporalDecoder", dict(block_out_channels=[32, 64],
         down_block_types=["DownEncoderBlock2D", "DownEncoderBlock2D"], layers_per_block=2), dict(sample=(3, 3, 32, 32),
         num_frames=3), call=frames),
    Case("AutoencoderOobleck", dict(encoder_hidden_size=12, decoder_channels=12, decoder_input_channels=6,
         downsampling_ratios=[2, 4], channel_multiples=[1, 2]), dict(sample=(4, 2, 24))),
    Case("AutoencoderSAME", dict(encoder_channels=16, encoder_c_mults=[1, 2], encoder_strides=[2, 2],
         encoder_transformer_depths=[1, 1]), dict(sample=(2, 2, 128))),
    Case("LTX2VideoDiffusionDecoderModel", dict(latent_channels=8, decoder_head_dim=16,
         decoder_stage_channels=(64, 32, 16, 16, 16), decoder_stage_depths=(1, 1, 1, 1, 1),
         decoder_stage_kernels=((1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
         decoder_upsample_channel_reductions=(2, 2, 1, 1), decoder_stage5_kernel=(1, 1, 1), decoder_t_emb_dim=32),
         dict(z=(1, 8, 1, 1, 1))),
    Case("AutoencoderKLHunyuanImageRefiner", dict(block_out_channels=(32, 32, 32), spatial_compression_ratio=4),
         dict(sample=(1, 3, 5, 16, 16))),
    Case("AutoencoderKLKVAEAudio", dict(encoder_dim=4, encoder_rates=[2, 2], decoder_dim=16, decoder_rates=[2, 2]),
         dict(sample=(1, 1, 64))),
    Case("AutoencoderKLQwenImage", dict(base_dim=8, dim_mult=[1, 1, 1, 1]), dict(sample=(1, 3, 1, 16, 16))),
    Case("AutoencoderKLQwenImage21", dict(base_dim=8, decoder_base_dim=8, dim_mult=[1, 1, 1, 1, 1]),
         dict(sample=(1, 4, 1, 32, 32))),
    Case("LongCatAudioDiTVae", dict(channels=4, encoder_latent_dim=8, in_channels=1), dict(sample=(1, 1, 64))),
    Case("MMAudioVAE", dict(mel_bins=16, hidden_channels=16, n_fft=64, hop_length=16), dict(sample=(1, 512))),
    Case("MMAudioVocoder", dict(num_mels=8, upsample_initial_channel=16, upsample_rates=(2, 2),
         upsample_kernel_sizes=(4, 4)), dict(mel=(1, 8, 12))),
    Case("MiniMaxMusic3Vocoder", dict(decoder_hidden_dim=16), dict(latents=(1, 4, 8))),
    Case("RFD4ProteinaAutoencoder", dict(atom37_mask=[[True] * 37] * 147, allowed_residue_types=[[True] * 147] * 7,
         latent_dim=4, nlayers=2, token_dim=16, nheads=2, dim_cond=8, pair_repr_dim=8, token_type_emb_dim=4),
         dict(coords_nm=(1, 6, 37, 3), padding_mask=torch.ones(1, 6, dtype=torch.bool),
         token_type=lambda: ints(7, 1, 6), atom37_mask=torch.ones(1, 6, 37, dtype=torch.bool),
         conditioning=lambda: {"is_in_context_conditioning": torch.zeros(1, 6, dtype=torch.bool),
         "supports_local_latent": torch.ones(1, 6, dtype=torch.bool), "chain_iid": torch.zeros(1, 6, dtype=torch.long),
         "incident_bond_type_counts": torch.ones(1, 6, 37, 10), "ground_truth_element": ints(100, 1, 6, 37),
         "charge": torch.zeros(1, 6, 37, dtype=torch.long)}), call=protein),
]

CASES = [
    replace(case, given={**given, **case.given}, call=case.call or forward_and_parts)
    for cases, given in ((IMAGES, {"sample": (1, 3, 32, 32)}), (VIDEOS, {"sample": (1, 3, 9, 16, 16)}), (OTHERS, {}))
    for case in cases
]
