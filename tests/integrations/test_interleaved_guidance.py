"""Real pipelines with guidance, whose calls of a step share a pass: the bits of the resident pipeline."""

from __future__ import annotations

import logging
from functools import cache, wraps
from itertools import chain
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig, QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0

from group_offload import apply_group_offloading, enable_group_offload, handle_of
from group_offload.runtime.interleave.contract import LISTED

from ..matrix.case import Case, mapped, tensors_of
from ..matrix.cases import CASES
from ..support import tiny_models as tiny
from ..support.asserts import assert_same
from ..support.on_device import offload
from ..support.portable import IS_PORTABLE
from ..support.simulated import SimulatedDevice, use_simulated_device

STEPS = 6


def run_wan(pipe: Any, **options: Any) -> torch.Tensor:
    return tiny.run(pipe, **{"num_inference_steps": STEPS, "guidance_scale": 3.0, **options})


@cache
def expected() -> torch.Tensor:
    return run_wan(tiny.wan_pipeline().to(tiny.device()))


def offloaded(**options: Any) -> tuple[Any, Any]:
    """A pipeline, and the handle of the transformer of its later steps."""
    pipe = tiny.wan_pipeline()
    enable_group_offload(pipe, tiny.device(), interleave_forwards=True, **options)
    return pipe, handle_of(pipe.transformer_2)


LATENTS = ("hidden_states", "sample", "x")


def loop(case: Case, model: torch.nn.Module) -> list[torch.Tensor]:
    """Two calls a step with other embeddings, as pipelines make them."""
    torch.manual_seed(1)
    given = mapped(case.inputs(), torch.clone)
    latents = next(name for name in LATENTS if name in given)
    prompt = next((each for each in given if each.startswith(("encoder_hidden_states", "cap_feats", "text_bth"))), None)
    halved = {} if prompt is None else {prompt: mapped(given[prompt], lambda tensor: tensor / 2)}
    found: list[torch.Tensor] = []
    with torch.no_grad():
        for _ in range(3):
            given[latents] = mapped(given[latents], lambda tensor: tensor + 0.01)
            for others in ({}, halved):
                # Pipelines make the time anew for each call.
                time = {"timestep": given["timestep"] / 2} if isinstance(given.get("timestep"), torch.Tensor) else {}
                found += tensors_of(model(**{**given, **time, **others}))
    return found


@pytest.mark.filterwarnings("ignore")  # of diffusers
@pytest.mark.parametrize("name", sorted(LISTED))
def test_a_class_that_is_listed(name: str) -> None:
    """The calls of the second step are tried, and those of the third share a pass. Hazard: a forward makes an equal
    list of its own anew (Qwen-Image), which is taken for a change."""
    case = CASES[name.removeprefix("diffusers.")]
    wanted, model = loop(case, case.make()), case.make()
    handle = apply_group_offloading(model, "cpu", interleave_forwards=True)
    for found, expected in zip(loop(case, model), wanted, strict=True):
        assert_same(found, expected)
    stats = handle.stats()
    assert (stats.forwards_speculated, stats.forwards_interleaved, stats.forwards_discarded) == (2, 4, 0)
    handle.remove()


class Tuned(QwenImageTransformer2DModel):
    """A subclass may do anything."""


class Processor(QwenDoubleStreamAttnProcessor2_0):
    """One of somebody else."""


@pytest.mark.parametrize("kind", ["a listed class", "a subclass", "another processor", "another forward", "by itself"])
def test_what_auto_shares(kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard: a class whose forwards nobody has tried shares passes unasked."""
    caplog.set_level(logging.INFO, "group_offload")
    case = CASES["QwenImageTransformer2DModel"]
    model, wanted = case.make(), loop(case, case.make())
    if kind == "a subclass":
        model.__class__ = Tuned
    elif kind == "another processor":
        model.transformer_blocks[0].attn.processor = Processor()
    elif kind == "another forward":
        plain = QwenImageTransformer2DModel.forward
        other = wraps(plain)(lambda *args, **kwargs: plain(*args, **kwargs))
        monkeypatch.setattr(QwenImageTransformer2DModel, "forward", other)
    options = {} if kind == "by itself" else {"interleave_forwards": "auto"}
    # Compute takes no time, so transfers bound.
    monkeypatch.setattr(SimulatedDevice, "seconds_between", lambda *events: 0.0)
    with use_simulated_device(SimulatedDevice(0, "eager")) as device:
        handle = offload(model, offload_type="leaf_level", **options)  # two blocks would stay in the buffers
        for _ in range(2):
            with device.running():
                found = [device.get(each) for each in loop(case, model)]
            for one, other in zip(found, wanted, strict=True):
                assert torch.equal(one, other)
        assert bool(handle.stats().forwards_speculated) == (kind == "a listed class" and not IS_PORTABLE)
        handle.remove()
    told = [record for record in caplog.records if "interleave_forwards=True" in record.getMessage()]
    assert len(told) == (kind not in ("a listed class", "by itself"))


def test_a_cache_with_named_contexts_goes_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "group_offload")
    pipe, handle = offloaded()
    twin = tiny.wan_pipeline().to(tiny.device())
    for each in (pipe, twin):
        each.transformer_2.enable_cache(FirstBlockCacheConfig(threshold=0.5))
    assert_same(run_wan(pipe), run_wan(twin))
    assert handle.stats().forwards_interleaved == 0
    assert any("of diffusers, which keeps state" in record.getMessage() for record in caplog.records)
    pipe.transformer_2.disable_cache()
    assert_same(run_wan(pipe), expected())
    assert handle.stats().forwards_interleaved


def test_a_lora_whose_weight_was_zero() -> None:
    """A scale for each call changed nothing then: what was found with these weights says nothing of others. Hazard:
    forwards shared a pass rightly while a LoRA's weight was 0, and go on when it's 1."""
    pipe, twin = tiny.wan_pipeline(), tiny.wan_pipeline().to(tiny.device())
    enable_group_offload(pipe, tiny.device(), interleave_forwards=True)
    options = {"attention_kwargs": {"scale": 0.3}}
    models = [(each.transformer, each.transformer_2) for each in (pipe, twin)]
    for model in chain.from_iterable(models):
        model.load_lora_adapter(tiny.lora_of(model, ("to_q", "proj_out")), prefix=None, adapter_name="one")
    for weight in (0.0, 1.0):
        for model in chain.from_iterable(models):
            model.set_adapters(["one"], [weight])
        assert_same(run_wan(pipe, **options), run_wan(twin, **options))
