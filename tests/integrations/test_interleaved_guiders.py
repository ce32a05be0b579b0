"""Guiders of Modular Diffusers tell all calls of a step before the first: they share passes at once. The bits are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import AutoGuidance, LayerSkipConfig, SkipLayerGuidance

from group_offload import disable_group_offload, enable_group_offload, handle_of

from ..support import tiny_models as tiny
from ..support.asserts import assert_same

STEPS = 8


@pytest.fixture(autouse=True)
def without_ftfy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusers.modular_pipelines.wan.encoders.prompt_clean", str)


def pipeline(dtype: torch.dtype = torch.float32, guider: Any = None) -> Any:
    blocks = pytest.importorskip("diffusers.modular_pipelines.wan.modular_blocks_wan22")
    pipe = blocks.Wan22Blocks().init_pipeline()
    found = tiny.wan_pipeline().components
    for name in ("transformer", "transformer_2", "text_encoder"):
        found[name].to(dtype)
    pipe.update_components(**{name: part for name, part in found.items() if name in pipe._component_specs})
    if guider is not None:
        pipe.update_components(guider=guider(), guider_2=guider())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def run(pipe: Any, prompt: str = tiny.PROMPT) -> torch.Tensor:
    torch.manual_seed(0)  # some guiders draw
    sizes = {"num_inference_steps": STEPS, "height": 16, "width": 16, "num_frames": 5, "max_sequence_length": 16}
    sizes |= {"generator": torch.Generator().manual_seed(0), "output_type": "pt", "output": "videos"}
    return torch.as_tensor(pipe(prompt=prompt, negative_prompt="blurry", **sizes)).cpu()


def offloaded(pipe: Any, **options: Any) -> list[Any]:
    enable_group_offload(pipe, onload_device=tiny.device(), interleave_forwards=True, **options)
    return [handle_of(pipe.transformer), handle_of(pipe.transformer_2)]


@pytest.mark.parametrize(("dtype", "level"), [(torch.float32, "leaf_level"), (torch.bfloat16, "block_level")], ids=str)
def test_all_steps_but_the_first_share_passes(dtype: torch.dtype, level: str) -> None:
    """The first step is made as always, and once more together. With bfloat16 the latents are cast anew for each call."""
    pipe = pipeline(dtype)
    wanted = [run(pipe.to(tiny.device()), prompt) for prompt in ("a lighthouse", "a crab")]
    handles = offloaded(pipe, offload_type=level)
    assert_same(run(pipe, "a lighthouse"), wanted[0])
    stats = [handle.stats() for handle in handles]
    assert sum(each.forwards_speculated for each in stats) == STEPS - 2, "each expert has a first step"
    assert_same(run(pipe, "a crab"), wanted[1])
    stats = [handle.stats() for handle in handles]
    assert sum(each.forwards_speculated for each in stats) == 2 * STEPS - 2, "another prompt is no other pattern"
    assert not any(each.forwards_discarded for each in stats)
    disable_group_offload(pipe)


def skipped_at_first() -> SkipLayerGuidance:
    """As the defaults: three branches in early steps, two later."""
    config = LayerSkipConfig(indices=[0], fqn="blocks")
    return SkipLayerGuidance(skip_layer_guidance_start=0.0, skip_layer_guidance_stop=0.6, skip_layer_config=config)


def worse_model() -> AutoGuidance:
    return AutoGuidance(
        auto_guidance_config=LayerSkipConfig(indices=[0], fqn="blocks", skip_attention=False, dropout=0.5)
    )


@pytest.mark.parametrize("guider", [skipped_at_first, worse_model])
def test_branches_that_change_hooks_go_alone(guider: Callable[[], Any]) -> None:
    """The others of the step share a pass nevertheless. Hazard: guidance registers hooks for one forward of a step (skipped
    layers); a guider announces all calls of a step, and one of them changes hooks of the model."""
    pipe = pipeline(guider=guider)
    wanted = run(pipe.to(tiny.device()))
    handles = offloaded(pipe)
    for _ in range(3):
        assert_same(run(pipe), wanted)
    stats = [handle.stats() for handle in handles]
    assert (sum(each.forwards_speculated for each in stats) > STEPS) == (guider is not worse_model)
    assert all(each.forwards_discarded <= 2 for each in stats), "two misses in a row end it"
