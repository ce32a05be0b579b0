"""Beside the caches of diffusers, which skip parts of a model: the bits of the resident model with the same cache.

A cache is switched on before offloading, with steps behind it, or after it; a LoRA comes and goes in between; the cache is
switched off again. Several contexts take turns, as with guidance.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.hooks import LayerSkipConfig, apply_layer_skip
from torch import nn
from torch.utils._pytree import tree_leaves

from group_offload import StateError, apply_group_offloading, enable_group_offload

from ..matrix.case import mapped
from ..matrix.cases import CASES
from ..support import tiny_models as tiny
from ..support.asserts import assert_same
from ..support.pipelines import any_case, tier_options
from ..support.rigs import run, run_onloaded
from ..support.simulated import SimulatedDevice, use_simulated_device

pytestmark = pytest.mark.filterwarnings("ignore:torch.meshgrid:UserWarning")  # FasterCache

NUM_STEPS = 4


_NUCLEUS = CASES["NucleusMoEImageTransformer2DModel"]
_prompt = cache(partial(tiny.randn, 1, 6, 32, seed=77))  # the same tensor for all steps


def nucleus_inputs(step: int) -> dict[str, Any]:
    given = mapped(_NUCLEUS.inputs(), lambda tensor: tensor.to(tiny.device()))
    given["timestep"] = torch.tensor([1.0 - step / NUM_STEPS]).to(tiny.device())
    latents = tiny.randn(1, 16, 4, seed=step)
    return {**given, "hidden_states": latents, "encoder_hidden_states": _prompt(), "return_dict": False}


def slow_noise(*shape: int, step: int) -> torch.Tensor:
    """Latents that change little from step to step, as they do in a denoising loop."""
    return tiny.randn(*shape, seed=1) + 0.01 * step * tiny.randn(*shape, seed=2)


def flux() -> nn.Module:
    return tiny.flux_transformer(num_layers=1, num_single_layers=2)


def flux_inputs(step: int) -> dict[str, Any]:
    return {**tiny.flux_inputs(), "hidden_states": slow_noise(1, 16, 4, step=step)}


def wan_inputs(step: int) -> dict[str, Any]:
    return {**tiny.wan_inputs(), "hidden_states": slow_noise(1, 16, 2, 8, 8, step=step)}


def guided_wan_inputs(step: int) -> dict[str, Any]:
    """What guidance leaves out and what it puts in, as one batch."""
    return {
        "hidden_states": slow_noise(2, 16, 2, 8, 8, step=step),
        "encoder_hidden_states": tiny.randn(2, 12, 32, seed=5),
        "timestep": torch.tensor([300, 300]).to(tiny.device()),
        "return_dict": False,
    }


class Clock:
    """The step of a denoising loop, as the caches ask for it."""

    def __init__(self) -> None:
        self.step = 0

    def timestep(self) -> int:
        return 700 - 100 * self.step


@dataclass(frozen=True, slots=True)
class CacheCase:
    """A cache and a model for it."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Any]]
    config: Callable[[Clock], Any]
    skipped: str
    """A module that steps leave out."""
    contexts: tuple[str, ...] = ("only",)
    needs: str = ""
    """A name that older versions of diffusers lack, if any."""
    tells_steps: bool = False
    """Whether contexts say where the loop is."""

    def denoise(self, model: nn.Module, clock: Clock, call: Callable[..., Any], steps: range) -> Iterator[Any]:
        """Outputs of a part of a denoising loop. Each context has other latents."""
        for clock.step in steps:
            for number, name in enumerate(self.contexts):
                where = {"step_index": clock.step, "sigma": 0.9 - clock.step / 10, "num_inference_steps": NUM_STEPS}
                with model.cache_context(name, **(where if self.tells_steps else {})):
                    yield call(model, **self.inputs(clock.step + 10 * number))


def pyramid(clock: Clock) -> Any:
    return diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, current_timestep_callback=clock.timestep
    )


def faster(clock: Clock, **options: Any) -> Any:
    return diffusers.FasterCacheConfig(
        attention_weight_callback=lambda _: 0.5, current_timestep_callback=clock.timestep, **options
    )


def mag(_: Clock) -> Any:
    skips = {"threshold": 0.5, "max_skip_steps": 2, "retention_ratio": 0.0}
    return diffusers.MagCacheConfig(num_inference_steps=NUM_STEPS, mag_ratios=[1.0, 1.1, 0.9, 1.05], **skips)


def taylor(_: Clock, **options: Any) -> Any:
    return diffusers.TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=1, **options)


def sea(_: Clock) -> Any:
    return diffusers.SeaCacheConfig(threshold=10.0, cache_end_steps=0)


FLUX, WAN, TWO = (flux, flux_inputs), (tiny.wan_transformer, wan_inputs), ("cond", "uncond")
NUCLEUS = (_NUCLEUS.make, nucleus_inputs)
LAST, TAYLOR, KV = "single_transformer_blocks.1.norm", "TaylorSeerCacheConfig", "TextKVCacheConfig"
_ALL = {
    "first-block-flux": CacheCase(*FLUX, lambda _: diffusers.FirstBlockCacheConfig(threshold=0.2), LAST, TWO),
    "mag-flux": CacheCase(*FLUX, mag, LAST, needs="MagCacheConfig"),
    "mag-wan": CacheCase(*WAN, mag, "blocks.0.norm1", TWO, needs="MagCacheConfig"),
    "pyramid-flux": CacheCase(*FLUX, pyramid, "transformer_blocks.0.attn.to_q"),
    "faster-wan": CacheCase(tiny.wan_transformer, guided_wan_inputs, faster, "blocks.0.attn1.to_q"),
    "taylor-flux": CacheCase(*FLUX, taylor, "transformer_blocks.0.attn.to_q", needs=TAYLOR),
    "taylor-lite-flux": CacheCase(
        *FLUX, lambda clock: taylor(clock, use_lite_mode=True), "transformer_blocks.0.norm1", needs=TAYLOR
    ),
    "sea-wan": CacheCase(*WAN, sea, "blocks.0.norm1", TWO, needs="SeaCacheConfig", tells_steps=True),
    "text-kv-nucleus": CacheCase(
        *NUCLEUS, lambda _: getattr(diffusers, KV)(), "transformer_blocks.0.encoder_proj", TWO, needs=KV
    ),
}
CACHES = {name: case for name, case in _ALL.items() if not case.needs or hasattr(diffusers, case.needs)}


# ---------------------------------------------------------------- tests


TARGETS = ("to_q", "proj_out")


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(name not in CACHES, reason="this version of diffusers has no such cache")


ORDERS = [("ram", "block_level", "before"), ("file", "leaf_level", "after"), ("ram", "leaf_level", "after")]


class Counted:
    """A model of a case, with a count of the calls of a module that the cache skips."""

    def __init__(self, case: CacheCase) -> None:
        self.case, self.clock, self.calls = case, Clock(), 0
        self.model = case.make().to(tiny.device())
        self.model.get_submodule(case.skipped).register_forward_hook(self._count)
        self.call: Callable[..., Any] = run

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def steps(self, start: int = 0, end: int = NUM_STEPS) -> list[Any]:
        before = self.calls
        outputs = list(self.case.denoise(self.model, self.clock, self.call, range(start, end)))
        return [outputs, self.calls - before]

    def enable(self) -> None:
        self.model.enable_cache(self.case.config(self.clock))


def life(counted: Counted, offload: Callable[[str], None]) -> Iterator[tuple[str, Any]]:
    """What a user does with a cache and a LoRA; `offload` is told how far things are."""
    model = counted.model
    offload("before the cache")
    yield "plain", counted.steps(0, 1)
    counted.enable()
    yield "first steps", counted.steps(0, 2)
    offload("with warm caches")
    yield "later steps", counted.steps(2)
    model._reset_stateful_cache()
    yield "another image", counted.steps(0, 2)
    model.load_lora_adapter(tiny.lora_of(model, TARGETS), prefix=None, adapter_name="one")
    yield "a LoRA between two steps", counted.steps(2)
    model._reset_stateful_cache()
    model.delete_adapters("one")
    yield "the LoRA is gone", counted.steps(0, 2)
    model.disable_cache()
    yield "without the cache", counted.steps(0, 1)
    counted.enable()
    yield "with a new cache", counted.steps()


@cache
def expected(name: str) -> list[tuple[str, Any]]:
    found = list(life(Counted(CACHES[name]), lambda when: None))
    of = dict(found)  # the tests show something only if the cache skips
    assert 0 < of["with a new cache"][1] < NUM_STEPS * len(CACHES[name].contexts)
    assert of["without the cache"][1] == len(CACHES[name].contexts)
    with_lora, without = of["a LoRA between two steps"][0], of["later steps"][0]
    assert not torch.equal(tree_leaves(with_lora)[0], tree_leaves(without)[0])
    return found


@pytest.mark.parametrize(("tier", "level", "order"), ORDERS)
@pytest.mark.parametrize("name", CACHES)
def test_bits(name: str, tier: str, level: str, order: str, tmp_path: Path) -> None:
    """Hazard: caches skip other blocks in each step and mix up contexts (diffusers #12744); removing a hook restores a
    stale `forward`."""
    counted = Counted(CACHES[name])
    options = {"offload_to_disk_path": tmp_path} if tier == "file" else {}

    def offload(when: str) -> None:
        if (when == "before the cache") == (order == "after"):
            apply_group_offloading(counted.model, tiny.device(), offload_type=level, **options)
            counted.call = run_onloaded if (tier, order) == ("ram", "after") else run

    for (_, actual), (_, wanted) in zip(life(counted, offload), expected(name), strict=True):
        assert_same(actual, wanted)


@needs("text-kv-nucleus")
def test_prompts_that_are_told_apart_by_their_addresses() -> None:
    """A prompt that each call brings to the device has another one's address there sooner or later. Hazard: a cache
    tells prompts apart by their addresses."""
    counted = Counted(CACHES["text-kv-nucleus"])
    counted.enable()
    apply_group_offloading(counted.model, tiny.device())
    elsewhere = counted.case.inputs(0)["encoder_hidden_states"].to("meta")
    inputs = {**counted.case.inputs(0), "encoder_hidden_states": elsewhere}
    with counted.model.cache_context("cond"), pytest.raises(StateError, match="encoder_hidden_states is on meta"):
        run(counted.model, **inputs)
    assert_same(counted.steps(), dict(expected("text-kv-nucleus"))["with a new cache"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("order", ["before", "after"])
@any_case
def test_bits_beside_cache_dit(tier: str, level: str, order: str, tmp_path: Path) -> None:
    """Its cache is enabled before the models are offloaded, or after."""
    cache_dit = pytest.importorskip("cache_dit")

    def cached(pipe: Any) -> None:
        sizes = {"Fn_compute_blocks": 1, "Bn_compute_blocks": 0, "max_warmup_steps": 2, "residual_diff_threshold": 0.9}
        cache_dit.enable_cache(pipe, cache_config=cache_dit.DBCacheConfig(**sizes))

    resident, pipe = tiny.flux_pipeline(), tiny.flux_pipeline()
    plain = tiny.run(resident, num_inference_steps=6)
    cached(resident)
    expected = tiny.run(resident, num_inference_steps=6)
    assert not torch.equal(expected, plain)
    if order == "before":
        cached(pipe)
    handles = enable_group_offload(pipe, offload_type=level, **tier_options(tier, tmp_path))
    if order == "after":
        cached(pipe)
    for _ in range(2):
        assert torch.equal(tiny.run(pipe, num_inference_steps=6), expected)
    assert handles["transformer"].stats().onloads


def _sent_by_steps(
    model: Any, level: str, num_steps: int, hook: Callable[..., None] | None = None
) -> tuple[list[float], int]:
    """The share of all bytes that each forward of a model of FLUX onloads, and the stalls after the first forwards."""
    with use_simulated_device(SimulatedDevice(0, "lazy")) as device:
        handle = apply_group_offloading(model, "cpu", offload_type=level)
        if hook is not None:
            model.single_transformer_blocks[3].register_forward_pre_hook(hook)
        num_bytes = sum(group.num_bytes for group in handle.groups)
        sent, stalls = [0], [0]
        for step in range(num_steps):
            inputs = mapped(flux_inputs(step % 4), device.put)
            with model.cache_context("only"), torch.no_grad(), device.running():
                device.get(model(**inputs)[0])
            stats = handle.stats()
            sent.append(sum(stats.bytes_onloaded.values()))
            stalls.append(stats.stalls)
        handle.remove()
    return [(b - a) / num_bytes for a, b in itertools.pairwise(sent)], stalls[-1] - stalls[4]


def _mag_cache() -> Any:
    """Every fourth step is a whole one."""
    return diffusers.MagCacheConfig(threshold=1e9, retention_ratio=0.0, num_inference_steps=4, mag_ratios=[1.0] * 4)


@needs("mag-flux")
@pytest.mark.parametrize(("level", "most"), [("block_level", 0.01), ("leaf_level", 0.3)])
def test_a_cached_step_sends_what_it_calls(level: str, most: float) -> None:
    """A full step after cached ones predicts all but the first block that was skipped. Hazard: the last step's order is
    taken for the next one's: a whole step after cached ones stalls; a cache skips a block whose weights were sent before the
    cache was asked."""
    model = tiny.flux_transformer(num_single_layers=8)
    model.enable_cache(_mag_cache())
    of_steps, stalls = _sent_by_steps(model, level, 12)
    assert all(of_steps[step] > 0.8 for step in (4, 8)), of_steps
    assert all(of_steps[step] < most for step in (6, 7, 10, 11)), of_steps
    assert stalls <= 4, stalls


def test_a_skipped_layer_is_not_sent() -> None:
    """With the hook that guiders register for one forward. Hazard: a hook skips a layer whose weights were sent before
    the hook was asked."""
    model = tiny.flux_transformer(num_single_layers=8)
    skips = LayerSkipConfig(indices=[*range(1, 8)], fqn="single_transformer_blocks", dropout=1.0)
    apply_layer_skip(model, skips)
    of_steps, _ = _sent_by_steps(model, "block_level", 6)
    assert all(share < 0.6 for share in of_steps[2:]), of_steps


@needs("mag-flux")
def test_a_hook_of_a_user_gets_the_weights_of_a_skipped_block() -> None:
    """Hazard: what steps in for a skipped block keeps its weights from a user's hook."""
    model = tiny.flux_transformer(num_single_layers=8)
    model.enable_cache(_mag_cache())
    weight = model.single_transformer_blocks[3].proj_out.weight
    at_rest, seen = weight.detach().clone(), []
    of_steps, _ = _sent_by_steps(model, "block_level", 6, lambda *_: seen.append(weight.detach() + 0))
    assert of_steps[2] > 0.05, of_steps
    assert len(seen) == 6 and all(torch.equal(each, at_rest) for each in seen)


@needs("mag-flux")
def test_a_block_that_raises_beside_a_cache() -> None:
    """What stepped in between the hook and the forward is gone, and the next forward is right. Hazard: what steps in
    between a cache's hook and the block stays after an error."""
    counted, reference = Counted(CACHES["mag-flux"]), Counted(CACHES["mag-flux"])
    handle = apply_group_offloading(counted.model, tiny.device())
    for each in (counted, reference):
        each.enable()
    block = counted.model.single_transformer_blocks[1]
    kept = [vars(reference) for reference in block._diffusers_hook._fn_refs]
    before = [dict(each) for each in kept]
    raises = block.proj_out.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(ValueError("in the block")))
    with pytest.raises(ValueError, match="in the block"):
        counted.steps(0, 1)
    raises.remove()
    assert [dict(each) for each in kept] == before
    counted.model._reset_stateful_cache()
    assert_same(counted.steps()[0], reference.steps()[0])
    handle.remove()
