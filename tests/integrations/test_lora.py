"""What diffusers changes in a model while it is offloaded: fused projections, casts, added modules.

Each test takes an offloaded pipeline and a resident one through the same steps and compares their output, bit by bit,
after every step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from group_offload import apply_group_offloading

from ..support import tiny_models as tiny
from ..support.pipelines import any_case, tier_options

before_or_after = pytest.mark.parametrize(
    ("tier", "level", "order"),
    [
        ("ram", "block_level", "before"),
        ("ram", "leaf_level", "after"),
        ("disk", "block_level", "after"),
        ("disk", "leaf_level", "before"),
    ],
)


def forward(pipe: Any) -> torch.Tensor:
    place, dtype = pipe.transformer.device, pipe.transformer.dtype
    inputs = {
        key: value.to(place, dtype if value.is_floating_point() else None) if isinstance(value, torch.Tensor) else value
        for key, value in tiny.flux_inputs().items()
    }
    return tiny.call(pipe.transformer, inputs)


class Pair:
    """A resident and an offloaded pipeline that go through the same steps."""

    def __init__(self, tier: str, level: str, device: torch.device, folder: Path) -> None:
        self.options = {"offload_type": level, **tier_options(tier, folder)}
        self.device = device
        self.resident = tiny.flux_pipeline().to(device)
        self.offloaded = tiny.flux_pipeline()
        self.outputs = [forward(self.resident)]

    def offload(self) -> Any:
        handle = apply_group_offloading(self.offloaded.transformer, self.device, **self.options)
        self.check(changes=False)
        return handle

    def do(self, step: Callable[[Any], Any]) -> None:
        step(self.resident)
        step(self.offloaded)
        self.check(changes=True)

    def check(self, *, changes: bool) -> None:
        expected = forward(self.resident)
        assert torch.equal(expected, self.outputs[-1]) != changes, "the step itself"
        for _ in range(2):
            assert torch.equal(forward(self.offloaded), expected)
        self.outputs.append(expected)


@pytest.fixture
def pair(tier: str, level: str, device: torch.device, tmp_path: Path) -> Pair:
    return Pair(tier, level, device, tmp_path / "groups")


@before_or_after
def test_fuse_qkv_projections(order: str, pair: Pair) -> None:
    """Hazard: `fuse_qkv_projections` after offloading isn't noticed."""

    def fuse(pipe: Any) -> None:
        pipe.transformer.fuse_qkv_projections()
        with torch.no_grad():  # a fused product may round as the three did: make the difference visible
            for block in pipe.transformer.transformer_blocks:
                block.attn.to_qkv.weight.mul_(1.25)

    if order == "after":
        pair.offload()
    pair.do(fuse)
    if order == "before":
        pair.offload()
    pair.do(lambda pipe: pipe.transformer.unfuse_qkv_projections())


@any_case
def test_resized_embedding(tier: str, level: str, device: torch.device, tmp_path: Path) -> None:
    """Hazard: `load_textual_inversion` resizes an embedding, which isn't noticed."""
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


@any_case
def test_added_modules(pair: Pair, device: torch.device) -> None:
    """As IP adapters do: a module is hung in and its forward is called from a hook. Hazard: `add_adapter` and
    `load_ip_adapter` after offloading aren't noticed."""

    def add(pipe: Any) -> None:
        extra = tiny.seeded(9, lambda: nn.Linear(4, 4))
        block = pipe.transformer.proj_out
        if pipe is pair.resident:
            extra.to(device)
        block.extra = extra
        pipe.transformer.register_module("ip", tiny.seeded(10, lambda: nn.Linear(4, 4)).to(extra.weight.device))
        old = type(block).forward
        block.forward = lambda x: pipe.transformer.ip(old(block, x)) + extra(old(block, x))

    pair.offload()
    pair.do(add)


# ------------------------------------------------------------------------------------------------ casts


@before_or_after
@pytest.mark.parametrize("storage", [torch.float8_e4m3fn, torch.float16], ids=str)
def test_layerwise_casting(storage: torch.dtype, order: str, pair: Pair) -> None:
    """Hazard: `enable_layerwise_casting` after offloading, to files too, isn't noticed."""
    model = pair.offloaded.transformer
    if order == "after":
        pair.offload()
    pair.do(lambda pipe: pipe.transformer.enable_layerwise_casting(storage, torch.float32))
    if order == "before":
        pair.offload()
    for (name, tensor), expected in zip(model.named_parameters(), pair.resident.transformer.parameters(), strict=True):
        assert tensor.dtype == expected.dtype, name
        assert torch.equal(tensor.detach().float().cpu(), expected.detach().float().cpu()), name
    brought_back = model._group_offload_handle.stats().tensors_brought_back
    assert torch.equal(forward(pair.offloaded), pair.outputs[-1])
    assert model._group_offload_handle.stats().tensors_brought_back == brought_back, "eviction is free"


@any_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype_after_applying(dtype: torch.dtype, pair: Pair) -> None:
    """Hazard: `.to(dtype)` after offloading isn't noticed."""
    pair.offload()
    pair.do(lambda pipe: pipe.transformer.to(dtype=dtype))
    assert {parameter.dtype for parameter in pair.offloaded.transformer.parameters()} == {dtype}
