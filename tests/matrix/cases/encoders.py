"""What turns prompts, images and sounds into conditions: diffusers' own, and those of transformers."""

# fmt: off
from __future__ import annotations

import torch

from ..case import Case, ints

CASES = [
    Case("AceStepAudioTokenDetokenizer", given=dict(hidden_states=(1, 4, 32))),
    Case("AceStepAudioTokenizer", dict(audio_acoustic_hidden_dim=8), dict(hidden_states=(1, 10, 8)),
         call=lambda module, hidden_states: module.tokenize(hidden_states)),
    Case("AceStepConditionEncoder", dict(text_hidden_dim=16, timbre_hidden_dim=8), dict(text_hidden_states=(1, 6, 16),
         text_attention_mask=torch.ones(1, 6), lyric_hidden_states=(1, 5, 16), lyric_attention_mask=torch.ones(1, 5),
         refer_audio_acoustic_hidden_states_packed=(1, 4, 8), refer_audio_order_mask=torch.zeros(1, dtype=torch.long))),
    Case("AnimaTextConditioner", dict(source_dim=16), dict(source_hidden_states=(1, 6, 16),
         target_input_ids=lambda: ints(64, 1, 8))),
    Case("AudioLDM2ProjectionModel", dict(text_encoder_dim=8, text_encoder_1_dim=12), dict(hidden_states=(1, 1, 8),
         hidden_states_1=(1, 4, 12))),
    Case("CLIPImageProjection", dict(hidden_size=16), dict(x=(2, 16))),
    Case("Ideogram4PromptEnhancerHead", dict(hidden_size=16), dict(hidden_states=(1, 4, 16))),
    Case("Kandinsky6SRLatentUpscalerBank", dict(in_channels=4, stage_channels=(32, 32, 32), num_pre_blocks=1,
         num_mid_blocks=1, num_post_blocks=1, num_x2_adapter_blocks=1), dict(latents=(1, 4, 1, 8, 8), scale=2)),
    Case("MiniMaxMusic3ConditionEncoder", dict(condition_hidden_dim=16), dict(hidden_states=(1, 8, 32))),
    Case("MiniMaxMusic3RVQDepthDecoder", dict(hidden_size=16), dict(inputs_embeds=(1, 3, 16))),
    Case("ReduxImageEncoder", dict(redux_dim=16, txt_in_features=12), dict(x=(1, 4, 16))),
    Case("StableAudio3DurationEmbedder", given=dict(seconds=[30.0])),
    Case("StableAudioProjectionModel", dict(text_encoder_dim=12, min_value=0, max_value=512),
         dict(text_hidden_states=(1, 4, 12), start_seconds=[0.0], end_seconds=[30.0])),
    Case("UniDiffuserTextDecoder", dict(prefix_length=4, prefix_inner_dim=16, prefix_hidden_dim=16, vocab_size=64,
         n_positions=32, n_embd=16, n_layer=2, n_head=2), dict(input_ids=lambda: ints(64, 1, 5),
         prefix_embeds=(1, 4, 16))),
]
