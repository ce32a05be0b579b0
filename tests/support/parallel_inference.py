"""Processes that run one model together, with its weights offloaded in each and without: bits are the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ContextParallelConfig
from diffusers.hooks import tensor_parallel
from diffusers.hooks.context_parallel import remove_context_parallel
from diffusers.models import attention_dispatch
from diffusers.models._modeling_parallel import TensorParallelConfig
from diffusers.utils import logging
from torch import nn

from group_offload import apply_group_offloading

from . import tiny_models as tiny
from .asserts import assert_at_rest, assert_same
from .rigs import run, run_onloaded

CONTEXT_KINDS: dict[str, Callable[[], Any]] = {
    "ulysses": lambda: ContextParallelConfig(ulysses_degree=2),
    "ring": lambda: ContextParallelConfig(ring_degree=2),
}
CROSS = (
    ("before", "block_level", "ram"),
    ("before", "leaf_level", "file"),
    ("after", "block_level", "file"),
    ("after", "leaf_level", "ram"),
)
"""Parallel before offloading, or after it. Each two of the three meet."""


def attend(_: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Attention on the CPU with the sums that a ring needs of it: diffusers has none there."""
    return_lse = args[5] if len(args) > 5 else kwargs.get("return_lse", False)
    query, key, value = (tensor.permute(0, 2, 1, 3) for tensor in (query, key, value))
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
    out = out.permute(0, 2, 1, 3)
    return (out, sums.permute(0, 2, 1)) if return_lse else out


def make() -> Any:
    return tiny.flux_transformer(num_layers=1, num_single_layers=2).to(tiny.device())


def outputs(model: nn.Module, call: Callable[..., Any] = run) -> list[Any]:
    return [call(model, **tiny.flux_inputs(seed)) for seed in range(2)]


def gradients(model: nn.Module) -> Any:
    """The gradient of an input of a frozen model."""
    inputs = tiny.flux_inputs()
    inputs["hidden_states"].requires_grad_()
    model(**inputs)[0].square().sum().backward()
    return inputs["hidden_states"].grad


def context_parallel(kind: str, order: str, level: str, folder: Path | None) -> None:
    """On, with a LoRA, and off again."""
    expected, model = make(), make()
    plain = outputs(expected)
    if order == "after":
        handle = apply_group_offloading(model, tiny.device(), offload_type=level, offload_to_disk_path=folder)
        assert_same(outputs(model), plain)
    for each in (expected, model):
        each.enable_parallelism(config=CONTEXT_KINDS[kind]())
    if order == "before":
        handle = apply_group_offloading(model, tiny.device(), offload_type=level, offload_to_disk_path=folder)
    call = run_onloaded if folder is None else run
    together = outputs(expected)
    assert_same(outputs(model, call), together)
    for each in (expected, model):
        each.load_lora_adapter(tiny.lora_of(each, ("to_q",)), prefix=None, adapter_name="one")
    assert_same(outputs(model, call), with_lora := outputs(expected))
    assert not torch.equal(with_lora[0][0], together[0][0])
    for each in (expected, model):
        each.delete_adapters("one")
        remove_context_parallel(each, each._cp_plan)
        for processor in each.attn_processors.values():
            processor._parallel_config = None
    assert_same(outputs(model, call), outputs(expected))
    handle.remove()
    assert_same(outputs(model.to(tiny.device())), plain)


def tensors_parallel(order: str, level: str, folder: Path | None) -> None:
    """Each process has its share of the weights, and offloads that. Both write to one folder."""
    expected, model = make(), make()
    expected.enable_parallelism(config=TensorParallelConfig(tp_degree=2))
    if order == "after":  # not through diffusers' call, which refuses this order
        handle = apply_group_offloading(model, tiny.device(), offload_type=level, offload_to_disk_path=folder)
        outputs(model)
        with pytest.raises(ValueError, match="has group offloading enabled"):
            model.enable_parallelism(config=TensorParallelConfig(tp_degree=2))
        config = expected._parallel_config.tensor_parallel_config
        tensor_parallel.apply_tensor_parallel(model, config, model._tp_plan)
    else:
        model.enable_parallelism(config=TensorParallelConfig(tp_degree=2))
        handle = apply_group_offloading(model, tiny.device(), offload_type=level, offload_to_disk_path=folder)
    wanted = outputs(expected)
    assert_same(outputs(model, run_onloaded if folder is None else run), wanted)
    if tiny.device().type == "cpu":
        assert_at_rest(model, expected)
    for each in (expected, model):
        each.requires_grad_(False)
    assert_same(gradients(model), gradients(expected))
    # Weights in RAM are used in place on the CPU: backward needs nothing then.
    assert handle.stats().backward_passes == int(folder is not None or tiny.device().type != "cpu")
    handle.remove()
    assert_same(outputs(model.to(tiny.device())), wanted)


def use_the_cpu() -> None:
    """Let models run in parallel on the CPU: diffusers itself does that on accelerators only."""
    torch.accelerator.device_count = lambda: 2
    tensor_parallel._SUPPORTED_TP_DEVICES = ("cpu",)
    attention_dispatch._native_attention_forward_op = attend


def is_parallel(rank: int, folder: str) -> None:
    """What each rank does: see `several.run`."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()  # diffusers warns at each call, and what went wrong would not be seen
    if tiny.device().type == "cpu":
        use_the_cpu()
    # A ring needs an attention with sums, which on GPUs are those for half precision.
    contexts = CONTEXT_KINDS if tiny.device().type == "cpu" else ("ulysses",)
    for order, level, tier in CROSS:
        for kind in contexts:
            context_parallel(kind, order, level, Path(folder, kind) if tier == "file" else None)
        tensors_parallel(order, level, Path(folder, "tensor") if tier == "file" else None)
