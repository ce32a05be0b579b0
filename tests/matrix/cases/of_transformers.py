"""The encoders and language models of transformers that pipelines use. Those for text and images get text, some images too."""

# fmt: off
from __future__ import annotations

import functools

import torch

from ..case import Case, ints, randn

Of = functools.partial(Case, library="transformers")

BERT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 64}
CLIP_TEXT = {**BERT, "projection_dim": 12, "max_position_embeddings": 16, "eos_token_id": 2}
VISION = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
          "image_size": 16, "patch_size": 8}
LLM = {**BERT, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
       "bos_token_id": 1, "eos_token_id": 2}
T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
CLAP = {"text_config": {**BERT, "projection_dim": 16},
        "audio_config": {"spec_size": 64, "num_mel_bins": 16, "patch_embeds_hidden_size": 8, "depths": [1, 1],
                         "num_attention_heads": [2, 2], "hidden_size": 16, "window_size": 4, "projection_dim": 16,
                         "num_hidden_layers": 2},
        "projection_dim": 16, "hidden_size": 16}
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}}
QWEN_VISION = {"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 16,
               "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN_IDS = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
GEMMA = {**LLM, "sliding_window": 8}
MISTRAL3 = {"text_config": {"model_type": "ministral3", **LLM}, "image_token_index": 60,
            "vision_config": {"model_type": "pixtral", **VISION, "head_dim": 8}}


def text() -> dict[str, torch.Tensor]:
    return {"input_ids": 3 + ints(50, 1, 8), "attention_mask": torch.ones(1, 8, dtype=torch.long)}


def pixels(size: int = 16) -> dict[str, torch.Tensor]:
    return {"pixel_values": randn(1, 3, size, size)}


def text_and_image() -> dict[str, torch.Tensor]:
    """4 x 4 patches, which the encoder merges to 4 tokens."""
    ids = torch.cat([3 + ints(50, 1, 4), torch.tensor([[62, 60, 60, 60, 60, 63]])], dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": randn(16, 3 * 2 * 4 * 4),
            "image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": (ids == 60).long()}


CASES = [
    Of("BertModel", BERT, text),
    Of("BlipForConditionalGeneration", dict(text_config={**BERT, "encoder_hidden_size": 16}, vision_config=VISION,
       projection_dim=16), lambda: {**text(), **pixels()}),
    Of("CLIPTextModel", CLIP_TEXT, text),
    Of("CLIPTextModelWithProjection", CLIP_TEXT, text),
    Of("CLIPVisionModel", VISION, pixels),
    Of("CLIPVisionModelWithProjection", dict(VISION, projection_dim=12), pixels),
    Of("ClapModel", CLAP, text, call=lambda module, **inputs: module.get_text_features(**inputs)),
    Of("ClapTextModelWithProjection", dict(BERT, projection_dim=16), text),
    Of("DPTForDepthEstimation", dict(VISION, is_hybrid=False, backbone_out_indices=[0, 1, 2, 3],
       neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8, num_hidden_layers=4, reassemble_factors=[4, 2, 1, 0.5],
       patch_size=4), pixels),
    Of("GPT2LMHeadModel", dict(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2), text),
    Of("Gemma3ForConditionalGeneration", dict(text_config=GEMMA, vision_config=VISION, mm_tokens_per_image=4,
       image_token_index=60, boi_token_index=61, eoi_token_index=62), text),
    Of("Gemma4ForConditionalGeneration", dict(text_config={**GEMMA, "vocab_size_per_layer_input": 64,
       "hidden_size_per_layer_input": 4, "global_head_dim": 8, "num_kv_shared_layers": 0,
       "layer_types": ["sliding_attention", "full_attention"]},
       vision_config={**VISION, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
       audio_config=None, image_token_id=60, boi_token_id=61, eoi_token_id=62), text),
    Of("Gemma4UnifiedForConditionalGeneration", dict(text_config={**GEMMA, "global_head_dim": 8,
       "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]},
       vision_config={"patch_size": 4, "mm_embed_dim": 16, "mm_posemb_size": 16, "output_proj_dims": 16},
       audio_config=None, image_token_id=60, boi_token_id=61, eoi_token_id=62), text),
    Of("GlmImageForConditionalGeneration", dict(text_config={**LLM, "vision_vocab_size": 64,
       "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0,
       "partial_rotary_factor": 1.0}}, vision_config={"depth": 2, "hidden_size": 16, "num_heads": 2, "image_size": 16,
       "patch_size": 4, "intermediate_size": 32},
       vq_config={"embed_dim": 16, "latent_channels": 16, "num_embeddings": 32}), text),
    Of("GlmModel", LLM, text),
    Of("LlamaForCausalLM", LLM, text),
    Of("LlamaModel", LLM, text),
    Of("LlavaForConditionalGeneration", dict(text_config={"model_type": "llama", **LLM},
       vision_config={"model_type": "clip_vision_model", **VISION}, image_token_index=60), text),
    Of("Ministral3ForCausalLM", LLM, text),
    Of("Mistral3ForConditionalGeneration", MISTRAL3, text),
    Of("Mistral3Model", MISTRAL3, text),
    Of("Qwen2VLForConditionalGeneration", {"text_config": {**LLM, **MROPE}, "vision_config": {**QWEN_VISION,
       "embed_dim": 16, "mlp_ratio": 2}, **QWEN_IDS}, text_and_image),
    Of("Qwen2_5_VLForConditionalGeneration", {"text_config": {**LLM, **MROPE}, "vision_config": {**QWEN_VISION,
       "fullatt_block_indexes": [1], "window_size": 16}, **QWEN_IDS}, text_and_image),
    Of("Qwen2_5_VLTextModel", {**LLM, **MROPE}, text),
    Of("Qwen3ForCausalLM", LLM, text),
    Of("Qwen3Model", LLM, text),
    Of("Qwen3VLForConditionalGeneration", {"text_config": {**LLM, **MROPE}, "vision_config": {**QWEN_VISION,
       "deepstack_visual_indexes": [0], "num_position_embeddings": 16}, **QWEN_IDS}, text_and_image),
    Of("Qwen3VLModel", {"text_config": {**LLM, **MROPE}, "vision_config": {**QWEN_VISION,
       "deepstack_visual_indexes": [0], "num_position_embeddings": 16}, **QWEN_IDS}, text_and_image),
    Of("Qwen3_5ForConditionalGeneration", {"text_config": {**LLM, "layer_types": ["linear_attention",
       "full_attention"], "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 1,
       "linear_num_value_heads": 2, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2],
       "rope_theta": 10000.0, "partial_rotary_factor": 1.0}}, "vision_config": {**QWEN_VISION,
       "num_position_embeddings": 16}, **QWEN_IDS}, text),
    Of("Siglip2VisionModel", dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
       num_patches=4, patch_size=8),
       lambda: dict(pixel_values=randn(1, 4, 8 * 8 * 3), pixel_attention_mask=torch.ones(1, 4, dtype=torch.long),
       spatial_shapes=torch.tensor([[2, 2]]))),
    Of("SiglipModel", dict(text_config={**BERT, "max_position_embeddings": 16, "projection_size": 16},
       vision_config=VISION), lambda: {"input_ids": ints(64, 1, 8), **pixels()}),
    Of("SiglipVisionModel", VISION, pixels),
    Of("SpeechT5HifiGan", dict(model_in_dim=8, upsample_initial_channel=16, upsample_rates=[2, 2],
       upsample_kernel_sizes=[4, 4], resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1, 3]]),
       lambda: dict(spectrogram=randn(6, 8))),
    Of("T5EncoderModel", T5, text),
    Of("T5Gemma2Encoder", dict(text_config={**GEMMA, "dropout_rate": 0.0},
       vision_config={"model_type": "siglip_vision_model", **VISION}, mm_tokens_per_image=4, image_token_index=60,
       boi_token_index=61, eoi_token_index=62), text),
    Of("T5GemmaEncoderModel", dict(encoder=GEMMA, decoder=GEMMA, is_encoder_decoder=False), text),
    Of("UMT5EncoderModel", T5, text),
    Of("VitsModel", dict(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32,
       flow_size=16, spectrogram_bins=9, upsample_initial_channel=16, upsample_rates=[2, 2],
       upsample_kernel_sizes=[4, 4], resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1, 3]],
       prior_encoder_num_flows=2, posterior_encoder_num_wavenet_layers=2, prior_encoder_num_wavenet_layers=2,
       duration_predictor_filter_channels=16, depth_separable_num_layers=2, duration_predictor_num_flows=2), text),
    Of("XLMRobertaModel", BERT, text),
]
