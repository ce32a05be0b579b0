"""What diffusers changes in a model while it is offloaded: adapters, fused projections, casts, caches, processors.

Each test takes an offloaded pipeline and a resident one through the same steps and compares their output, bit by bit,
after every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers.hooks.group_offloading as stock
import pytest
import torch
from diffusers import FirstBlockCacheConfig
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from peft import LoraConfig
from safetensors.torch import save_file
from torch import nn

from group_offload import (
    apply_group_offloading,
    enable_group_offload,
    patch_diffusers,
    remove_group_offloading,
    unpatch_diffusers,
)

from ..support import tiny_models as tiny

# peft, when a second adapter is loaded.
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")

TARGETS = ("attn.to_q", "attn.to_k", "attn.to_out.0", "proj_mlp")

any_tier = pytest.mark.parametrize("tier", ["ram", "disk"])
any_level = pytest.mark.parametrize("level", ["block_level", "leaf_level"])
before_or_after = pytest.mark.parametrize("order", ["before", "after"])

Step = Callable[[Any], Any]


@pytest.fixture(params=["function", "patched"])
def offload(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Offload a pipeline's transformer with this package alone, or the pipeline through its own patched call."""
    if request.param == "function":
        yield lambda pipe, *args, **options: apply_group_offloading(pipe.transformer, *args, **options)
        return
    patch_diffusers()
    try:
        yield lambda pipe, *args, **options: pipe.enable_group_offload(*args, **options)["transformer"]
    finally:
        unpatch_diffusers()


def tier_options(tier: str, folder: Path) -> dict[str, Any]:
    return {} if tier == "ram" else {"offload_to_disk_path": folder}


def lora_of(seed: int, rank: int = 4) -> dict[str, torch.Tensor]:
    """A LoRA for some layers of the transformer, as a state dict for `load_lora_weights`."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, layer in tiny.flux_transformer().named_modules():
        if isinstance(layer, nn.Linear) and name.endswith(TARGETS):
            state[f"transformer.{name}.lora_A.weight"] = torch.randn(rank, layer.in_features, generator=generator)
            state[f"transformer.{name}.lora_B.weight"] = torch.randn(layer.out_features, rank, generator=generator)
    return {key: value * 0.2 for key, value in state.items()}


def inodes_of(folder: Path) -> dict[str, tuple[int, int]]:
    return {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in folder.glob("*.safetensors")}


def forward(pipe: Any, seed: int = 0) -> torch.Tensor:
    inputs = tiny.flux_inputs(seed)
    place = pipe.transformer.device
    return tiny.call(
        pipe.transformer, {k: v.to(place) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    )


class Pair:
    """A resident and an offloaded pipeline that go through the same steps."""

    def __init__(self, device: torch.device) -> None:
        self.resident = tiny.flux_pipeline().to(device)
        self.offloaded = tiny.flux_pipeline()
        self.outputs = [forward(self.resident)]

    def do(self, step: Step, *, changes: bool | None = True) -> None:
        """Take a step; `changes` says what it does to the output of the resident pipeline, if that is known."""
        step(self.resident)
        step(self.offloaded)
        self.check(changes=changes)

    def check(self, *, changes: bool | None) -> None:
        expected = forward(self.resident)
        assert changes is None or torch.equal(expected, self.outputs[-1]) != changes, "the step itself"
        for _ in range(2):
            assert torch.equal(forward(self.offloaded), expected)
        self.outputs.append(expected)


def load(seed: int, name: str) -> Step:
    return lambda pipe: pipe.load_lora_weights(lora_of(seed), adapter_name=name)


@pytest.fixture
def pair(device: torch.device) -> Pair:
    return Pair(device)


# ------------------------------------------------------------------------------------------------ LoRA


@any_tier
@any_level
@before_or_after
def test_life_of_two_loras(
    tier: str,
    level: str,
    order: str,
    pair: Pair,
    offload: Callable[..., Any],
    device: torch.device,
    tmp_path: Path,
) -> None:
    apply = lambda: offload(pair.offloaded, device, offload_type=level, **tier_options(tier, tmp_path))  # noqa: E731
    if order == "after":
        apply()
        pair.check(changes=False)
    pair.do(load(1, "one"))
    if order == "before":
        apply()
        pair.check(changes=False)
    pair.do(load(2, "two"), changes=None)
    pair.do(lambda pipe: pipe.set_adapters(["one", "two"], [0.5, 0.8]))
    pair.do(lambda pipe: pipe.set_adapters("two", 0.3))
    pair.do(lambda pipe: pipe.disable_lora())
    pair.do(lambda pipe: pipe.enable_lora())
    pair.do(lambda pipe: pipe.set_adapters(["one", "two"]))
    pair.do(lambda pipe: pipe.delete_adapters("one"))
    pair.do(lambda pipe: pipe.unload_lora_weights())
    assert torch.equal(pair.outputs[0], pair.outputs[-1])
    assert stock._is_group_offload_enabled(pair.offloaded.transformer)
    assert {t.device.type for t in pair.offloaded.transformer.parameters()} == {"cpu"}


@any_tier
@any_level
@before_or_after
def test_fusing(
    tier: str,
    level: str,
    order: str,
    pair: Pair,
    offload: Callable[..., Any],
    device: torch.device,
    tmp_path: Path,
) -> None:
    if device.type != "cpu":
        # Fusing is a matrix product: it happens where the weights are, and devices round it differently.
        pair.resident.to("cpu")
        pair.outputs = [forward(pair.resident)]
    apply = lambda: offload(pair.offloaded, "cpu", offload_type=level, **tier_options(tier, tmp_path))  # noqa: E731
    if order == "after":
        apply()
    pair.do(load(1, "one"))
    pair.do(lambda pipe: pipe.fuse_lora(lora_scale=0.7))
    if order == "before":
        apply()
        pair.check(changes=False)
    pair.do(lambda pipe: pipe.unfuse_lora())
    pair.do(load(2, "two"), changes=None)
    pair.do(lambda pipe: pipe.set_adapters(["one", "two"], [0.5, 0.8]))
    pair.do(lambda pipe: pipe.fuse_lora(adapter_names=["one", "two"]))
    pair.do(lambda pipe: pipe.unload_lora_weights(), changes=False)  # the fused weights stay


@any_tier
@any_level
def test_fused_weights_are_saved(tier: str, level: str, device: torch.device, tmp_path: Path) -> None:
    reference, pipe = tiny.flux_pipeline(), tiny.flux_pipeline()
    apply_group_offloading(pipe.transformer, device, offload_type=level, **tier_options(tier, tmp_path))
    for each in (reference, pipe):
        each.load_lora_weights(lora_of(1), adapter_name="one")
        forward(each) if each is pipe else None
        each.fuse_lora()
        each.unload_lora_weights()
    expected = reference.transformer.state_dict()
    for attempt in ("at once", "after a forward", "after remove"):
        if attempt == "after a forward":
            forward(pipe)
        if attempt == "after remove":
            remove_group_offloading(pipe.transformer)
        found = pipe.transformer.state_dict()
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(found[key], value), (attempt, key)


@any_level
@pytest.mark.parametrize("way", ["weights", "adapter", "add_adapter"])
def test_loading_rewrites_no_group_file(level: str, way: str, device: torch.device, tmp_path: Path) -> None:
    pipe = tiny.flux_pipeline()
    handle = apply_group_offloading(
        pipe.transformer, device, offload_type=level, offload_to_disk_path=tmp_path / "groups"
    )
    forward(pipe)
    before = inodes_of(tmp_path / "groups")
    if way == "weights":
        save_file(lora_of(1), tmp_path / "lora.safetensors")
        pipe.load_lora_weights(tmp_path, weight_name="lora.safetensors", adapter_name="one")
    elif way == "adapter":
        pipe.transformer.load_lora_adapter(lora_of(1), adapter_name="one")
    else:
        pipe.transformer.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k"], init_lora_weights=False))
    forward(pipe)
    after = inodes_of(tmp_path / "groups")
    assert {name: after.get(name) for name in before} == before
    assert handle.stats().file_bytes > 0
    if way == "add_adapter":
        pipe.transformer.delete_adapters("default")
        pipe.transformer.unload_lora()
    else:
        pipe.unload_lora_weights()
    forward(pipe)
    assert {name: inodes_of(tmp_path / "groups").get(name) for name in before} == before


@any_tier
@any_level
def test_adapters_that_diffusers_does_not_announce(
    tier: str, level: str, pair: Pair, device: torch.device, tmp_path: Path
) -> None:
    def add(pipe: Any) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            config = LoraConfig(r=4, target_modules=["to_q", "to_k", "proj_out"], init_lora_weights=False)
            pipe.transformer.add_adapter(config, "mine")

    apply_group_offloading(pair.offloaded.transformer, device, offload_type=level, **tier_options(tier, tmp_path))
    pair.check(changes=False)
    if device.type != "cpu":
        pytest.skip("random numbers of two devices")
    pair.do(add)
    pair.do(lambda pipe: pipe.transformer.disable_adapters())
    assert torch.equal(pair.outputs[0], pair.outputs[-1])
    pair.do(lambda pipe: pipe.transformer.enable_adapters())
    pair.do(lambda pipe: pipe.transformer.delete_adapters("mine"))


@any_tier
@any_level
def test_dora(tier: str, level: str, pair: Pair, device: torch.device, tmp_path: Path) -> None:
    """Its layers read the weight that they wrap without calling it."""
    if device.type != "cpu":
        pytest.skip("random numbers of two devices")

    def add(pipe: Any) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            config = LoraConfig(r=4, target_modules=["to_q", "proj_out"], init_lora_weights=False, use_dora=True)
            pipe.transformer.add_adapter(config, "mine")

    apply_group_offloading(pair.offloaded.transformer, device, offload_type=level, **tier_options(tier, tmp_path))
    pair.do(add)


@any_tier
@any_level
def test_hotswap(tier: str, level: str, pair: Pair, device: torch.device, tmp_path: Path) -> None:
    apply_group_offloading(pair.offloaded.transformer, device, offload_type=level, **tier_options(tier, tmp_path))
    pair.do(load(1, "one"))
    pair.do(lambda pipe: pipe.load_lora_weights(lora_of(2), adapter_name="one", hotswap=True))


@any_tier
@any_level
def test_loading_by_metadata_device(tier: str, level: str, pair: Pair, device: torch.device, tmp_path: Path) -> None:
    """`low_cpu_mem_usage=True` makes the adapter on the meta device first."""
    apply_group_offloading(pair.offloaded.transformer, device, offload_type=level, **tier_options(tier, tmp_path))
    pair.do(lambda pipe: pipe.load_lora_weights(lora_of(1), adapter_name="one", low_cpu_mem_usage=True))


@any_tier
def test_text_encoder_lora(tier: str, device: torch.device, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    state = {}
    for name, layer in tiny.clip().named_modules():
        if isinstance(layer, nn.Linear) and name.endswith(("q_proj", "v_proj", "out_proj")):
            state[f"text_encoder.{name}.lora_A.weight"] = torch.randn(4, layer.in_features, generator=generator)
            state[f"text_encoder.{name}.lora_B.weight"] = torch.randn(layer.out_features, 4, generator=generator)
    reference, pipe = tiny.sd_pipeline().to(device), tiny.sd_pipeline()
    plain = tiny.run(reference)
    enable_group_offload(pipe, onload_device=device, **tier_options(tier, tmp_path))
    assert torch.equal(tiny.run(pipe), plain)
    for each in (reference, pipe):
        each.load_lora_weights(dict(state), adapter_name="words")
    expected = tiny.run(reference)
    assert not torch.equal(expected, plain)
    assert torch.equal(tiny.run(pipe), expected)
    for each in (reference, pipe):
        each.unload_lora_weights()
    assert torch.equal(tiny.run(reference), plain)
    assert torch.equal(tiny.run(pipe), plain)


@any_tier
@any_level
def test_removing_after_lora(tier: str, level: str, pair: Pair, device: torch.device, tmp_path: Path) -> None:
    handle = apply_group_offloading(
        pair.offloaded.transformer, device, offload_type=level, **tier_options(tier, tmp_path)
    )
    pair.do(load(1, "one"))
    handle.remove()
    assert not stock._is_group_offload_enabled(pair.offloaded.transformer)
    pair.offloaded.to(device)
    pair.check(changes=False)
    for each in (pair.resident, pair.offloaded):
        each.unload_lora_weights()
    assert torch.equal(forward(pair.offloaded), pair.outputs[0])
    assert not any(hasattr(part, "_diffusers_hook") for part in pair.offloaded.transformer.modules())


# ------------------------------------------------------------------------------------------------ other changes


@any_tier
@any_level
@before_or_after
def test_fuse_qkv_projections(
    tier: str, level: str, order: str, pair: Pair, device: torch.device, tmp_path: Path
) -> None:
    model = pair.offloaded.transformer
    options = tier_options(tier, tmp_path)

    def fuse(pipe: Any) -> None:
        pipe.transformer.fuse_qkv_projections()
        with torch.no_grad():  # a fused product may round as the three did: make the difference visible
            for block in pipe.transformer.transformer_blocks:
                block.attn.to_qkv.weight.mul_(1.25)

    if order == "after":
        apply_group_offloading(model, device, offload_type=level, **options)
        pair.check(changes=False)
    pair.do(fuse)
    if order == "before":
        apply_group_offloading(model, device, offload_type=level, **options)
        pair.check(changes=False)
    pair.do(lambda pipe: pipe.transformer.unfuse_qkv_projections())


@any_tier
@any_level
def test_resized_embedding(tier: str, level: str, device: torch.device, tmp_path: Path) -> None:
    """As `load_textual_inversion` does."""
    reference, model = tiny.clip().to(device), tiny.clip()
    apply_group_offloading(model, device, offload_type=level, **tier_options(tier, tmp_path))
    assert torch.equal(tiny.call(model, tiny.tokens()), tiny.call(reference, tiny.tokens()))
    for each in (reference, model):
        each.resize_token_embeddings(103, mean_resizing=False)
        with torch.no_grad():
            each.get_input_embeddings().weight[100:] = 0.5
    inputs = {"input_ids": torch.tensor([[0, 100, 5, 102, 2]], device=device), "return_dict": False}
    expected = tiny.call(reference, inputs)
    for _ in range(2):
        assert torch.equal(tiny.call(model, inputs), expected)
    assert model.state_dict().keys() == reference.state_dict().keys()


@any_tier
@any_level
def test_added_modules(tier: str, level: str, pair: Pair, device: torch.device, tmp_path: Path) -> None:
    """As IP adapters do: a module is hung in and its forward is called from a hook."""

    def add(pipe: Any) -> None:
        extra = tiny.seeded(9, lambda: nn.Linear(4, 4))
        block = pipe.transformer.proj_out
        if pipe is pair.resident:
            extra.to(device)
        block.extra = extra
        pipe.transformer.register_module("ip", tiny.seeded(10, lambda: nn.Linear(4, 4)).to(extra.weight.device))
        old = type(block).forward
        block.forward = lambda x: pipe.transformer.ip(old(block, x)) + extra(old(block, x))

    apply_group_offloading(pair.offloaded.transformer, device, offload_type=level, **tier_options(tier, tmp_path))
    pair.check(changes=False)
    pair.do(add)


@any_tier
@any_level
def test_replaced_block(tier: str, level: str, pair: Pair, device: torch.device, tmp_path: Path) -> None:
    def replace(pipe: Any) -> None:
        other = tiny.flux_transformer(seed=11).transformer_blocks[0]
        pipe.transformer.transformer_blocks[1] = other.to(next(pipe.transformer.parameters()).device)

    apply_group_offloading(pair.offloaded.transformer, device, offload_type=level, **tier_options(tier, tmp_path))
    pair.check(changes=False)
    pair.do(replace)
    pair.do(lambda pipe: pipe.transformer.single_transformer_blocks.pop(1))


class LoudAttention(FluxAttnProcessor):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = super().__call__(*args, **kwargs)
        return tuple(part * 1.5 for part in found) if isinstance(found, tuple) else found * 1.5


@any_tier
@any_level
def test_attention_processors(tier: str, level: str, pair: Pair, device: torch.device, tmp_path: Path) -> None:
    apply_group_offloading(pair.offloaded.transformer, device, offload_type=level, **tier_options(tier, tmp_path))
    pair.check(changes=False)
    pair.do(lambda pipe: [block.attn.set_processor(LoudAttention()) for block in pipe.transformer.transformer_blocks])


# ------------------------------------------------------------------------------------------------ casts


@any_tier
@any_level
@before_or_after
@pytest.mark.parametrize("storage", [torch.float8_e4m3fn, torch.float16], ids=str)
def test_layerwise_casting(
    storage: torch.dtype, order: str, level: str, tier: str, pair: Pair, device: torch.device, tmp_path: Path
) -> None:
    model = pair.offloaded.transformer
    cast = lambda pipe: pipe.transformer.enable_layerwise_casting(storage, torch.float32)  # noqa: E731
    options = tier_options(tier, tmp_path)
    if order == "after":
        apply_group_offloading(model, device, offload_type=level, **options)
        pair.check(changes=False)
    pair.do(cast)
    if order == "before":
        apply_group_offloading(model, device, offload_type=level, **options)
        pair.check(changes=False)
    for (name, tensor), expected in zip(model.named_parameters(), pair.resident.transformer.parameters(), strict=True):
        assert tensor.dtype == expected.dtype, name
        assert torch.equal(tensor.detach().float().cpu(), expected.detach().float().cpu()), name
    assert model.proj_out.weight.dtype == torch.float32 or model.proj_out.weight.dtype == storage
    brought_back = model._group_offload_handle.stats().tensors_brought_back
    assert torch.equal(forward(pair.offloaded), pair.outputs[-1])
    assert model._group_offload_handle.stats().tensors_brought_back == brought_back, "eviction is free"


@any_tier
@any_level
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype_after_applying(dtype: torch.dtype, level: str, tier: str, device: torch.device, tmp_path: Path) -> None:
    def inputs() -> dict[str, Any]:
        return {
            key: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for key, value in tiny.flux_inputs().items()
        }

    reference, model = tiny.flux_transformer().to(device), tiny.flux_transformer()
    apply_group_offloading(model, device, offload_type=level, **tier_options(tier, tmp_path))
    tiny.call(model, tiny.flux_inputs())
    reference.to(dtype=dtype)
    model.to(dtype=dtype)
    expected = tiny.call(reference, inputs())
    for _ in range(2):
        assert torch.equal(tiny.call(model, inputs()), expected)
    assert {t.dtype for t in model.parameters()} == {dtype}


# ------------------------------------------------------------------------------------------------ caches


@any_tier
@any_level
@before_or_after
def test_first_block_cache(tier: str, level: str, order: str, device: torch.device, tmp_path: Path) -> None:
    reference, model = tiny.flux_pipeline().to(device), tiny.flux_pipeline()
    config = FirstBlockCacheConfig(threshold=10.0)
    counts = {"resident": 0, "offloaded": 0}

    def count(key: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            counts[key] += 1

        return hook

    def run(pipe: Any) -> torch.Tensor:
        with pipe.transformer.cache_context("cond"):
            outputs = [forward(pipe, seed) for seed in range(3)]
        pipe.transformer._reset_stateful_cache()
        return torch.cat(outputs)

    apply = lambda: apply_group_offloading(  # noqa: E731
        model.transformer, device, offload_type=level, **tier_options(tier, tmp_path)
    )
    for pipe in (reference, model):
        if pipe is model and order == "after":
            apply()
        pipe.transformer.enable_cache(config)
        if pipe is model and order == "before":
            apply()
    for key, pipe in (("resident", reference), ("offloaded", model)):
        last = pipe.transformer.single_transformer_blocks[-1]
        last.norm.register_forward_hook(count(key))

    expected = run(reference)
    assert 0 < counts["resident"] < 3, "the cache skips blocks"
    assert torch.equal(run(model), expected)
    assert counts["offloaded"] == counts["resident"]
    for pipe in (reference, model):
        pipe.load_lora_weights(lora_of(1), adapter_name="one")
    with_lora = run(reference)
    assert not torch.equal(with_lora, expected)
    assert torch.equal(run(model), with_lora)
    assert counts["offloaded"] == counts["resident"] < 6, "the cache still skips blocks"
    for pipe in (reference, model):
        pipe.unload_lora_weights()
        pipe.transformer.disable_cache()
    assert torch.equal(run_plain(model), run_plain(reference))
    remove_group_offloading(model.transformer)
    model.to(device)
    assert torch.equal(run_plain(model), run_plain(reference))


def run_plain(pipe: Any) -> torch.Tensor:
    return torch.cat([forward(pipe, seed) for seed in range(3)])


@before_or_after
def test_cache_survives_removal_of_offloading(order: str, device: torch.device) -> None:
    model = tiny.flux_transformer()
    config = FirstBlockCacheConfig(threshold=10.0)
    if order == "after":
        handle = apply_group_offloading(model, device)
        model.enable_cache(config)
    else:
        model.enable_cache(config)
        handle = apply_group_offloading(model, device)
    hooks = {name: list(part._diffusers_hook.hooks) for name, part in model.named_modules() if has_registry(part)}
    handle.remove()
    left = {name: list(part._diffusers_hook.hooks) for name, part in model.named_modules() if has_registry(part)}
    assert {name: [hook for hook in found if hook != "group_offloading"] for name, found in hooks.items() if found} == {
        **{name: [] for name in hooks if name not in left},
        **left,
    }
    assert any(left.values())
    model.to(device)
    model.disable_cache()
    expected = tiny.call(tiny.flux_transformer().to(device), tiny.flux_inputs())
    assert torch.equal(tiny.call(model, tiny.flux_inputs()), expected)


def has_registry(module: nn.Module) -> bool:
    return hasattr(module, "_diffusers_hook")
