"""Processes that run one model together, with its weights offloaded in each and without: bits are the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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

CASES = (
    ("ulysses", "before", "block_level", "ram"),
    ("ulysses", "after", "leaf_level", "file"),
    ("ring", "before", "leaf_level", "file"),
    ("ring", "after", "block_level", "ram"),
    ("tensor", "before", "block_level", "ram"),  # diffusers refuses the other order
    ("tensor", "before", "leaf_level", "file"),
)
"""Parallel before offloading, or after it."""


def attend(_: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Attention on the CPU with the sums that a ring needs of it: diffusers has none there."""
    return_lse = args[5] if len(args) > 5 else kwargs.get("return_lse", False)
    query, key, value = (tensor.permute(0, 2, 1, 3) for tensor in (query, key, value))
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
    out = out.permute(0, 2, 1, 3)
    return (out, sums.permute(0, 2, 1)) if return_lse else out


def outputs(model: nn.Module, call: Callable[..., Any] = run) -> list[Any]:
    return [call(model, **tiny.flux_inputs(seed)) for seed in range(2)]


def gradients(model: nn.Module) -> Any:
    """The gradient of an input of a frozen model."""
    inputs = tiny.flux_inputs()
    inputs["hidden_states"].requires_grad_()
    model.requires_grad_(False)(**inputs)[0].square().sum().backward()
    return inputs["hidden_states"].grad


def turn_on(model: Any, kind: str) -> None:
    is_tensor = kind == "tensor"
    config = TensorParallelConfig(tp_degree=2) if is_tensor else ContextParallelConfig(**{f"{kind}_degree": 2})
    model.enable_parallelism(config=config)


def compare(kind: str, order: str, **options: Any) -> None:
    """On, with a LoRA, and off again. With tensor parallelism each process has its share of the weights, and offloads that."""
    expected, model = (tiny.flux_transformer(num_layers=1, num_single_layers=2).to(tiny.device()) for _ in range(2))
    plain = outputs(expected)
    if order == "before":
        turn_on(model, kind)
    handle = apply_group_offloading(model, tiny.device(), **options)
    if order == "after":
        assert_same(outputs(model), plain)
        turn_on(model, kind)
    turn_on(expected, kind)
    in_files = options.get("offload_to_disk_path") is not None
    call = run if in_files or "shard_transfers" in options else run_onloaded
    together = outputs(expected)
    assert_same(outputs(model, call), together)
    if "shard_transfers" in options:
        assert handle.stats().bytes_from_peers > 0
    elif kind == "tensor":
        if tiny.device().type == "cpu":
            assert_at_rest(model, expected)
        assert_same(gradients(model), gradients(expected))
        # Weights in RAM are used in place on the CPU: backward needs nothing then.
        assert handle.stats().backward_passes == int(in_files or tiny.device().type != "cpu")
    else:
        for each in (expected, model):
            each.load_lora_adapter(tiny.lora_of(each, ("to_q",)), prefix=None, adapter_name="one")
        assert_same(outputs(model, call), with_lora := outputs(expected))
        assert not torch.equal(with_lora[0][0], together[0][0])
        for each in (expected, model):
            each.delete_adapters("one")
            remove_context_parallel(each, each._cp_plan)
            for processor in each.attn_processors.values():
                processor._parallel_config = None
        assert_same(outputs(model, call), plain)
    handle.remove()
    assert_same(outputs(model.to(tiny.device())), outputs(expected))


def is_parallel(rank: int, folder: str) -> None:
    """What each rank does: see `several.run`."""
    warnings.simplefilter("ignore")  # diffusers calls what torch has renamed
    logging.set_verbosity_error()  # diffusers warns at each call, and what went wrong would not be seen
    if tiny.device().type == "cpu":  # diffusers itself is parallel on accelerators only
        torch.accelerator.device_count = lambda: 2
        tensor_parallel._SUPPORTED_TP_DEVICES = ("cpu",)
        attention_dispatch._native_attention_forward_op = attend
    for kind, order, level, tier in CASES:
        # A ring needs an attention with sums, which on GPUs are those for half precision.
        if kind != "ring" or tiny.device().type == "cpu":
            place = Path(folder, kind) if tier == "file" else None
            compare(kind, order, offload_type=level, offload_to_disk_path=place)
    for order in ("before", "after"):
        compare("ulysses", order, process_group=dist.group.WORLD, shard_transfers=True)
