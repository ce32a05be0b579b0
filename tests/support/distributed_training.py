"""Processes that train under DDP, FSDP and FSDP2, with activations offloaded and without: bits are the same."""

from __future__ import annotations

import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

from group_offload.activations import apply_activation_offloading

from . import several
from .asserts import same_bits
from .several import local
from .training import DIM, TrainingBlock, TrainingModel

KINDS = ("ddp", "fsdp", "fsdp2", "fsdp2-bf16", "ddp+c", "fsdp+c", "fsdp2+c")
BATCHES = {"cpu": (3, 7), "cuda": (48, 112)}
"""Samples and tokens. On a device enough of them that copies take their time."""


def build(kind: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = TrainingModel(3).to(device)
    kind, _, checkpointing = kind.partition("+")
    if checkpointing:
        model.run_block = lambda block, *args: checkpoint(block, *args, use_reentrant=False)
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp":
        return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({TrainingBlock}), device_id=device, use_orig_params=True)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if kind == "fsdp2-bf16" else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def train(model: nn.Module, device: torch.device) -> list[torch.Tensor]:
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    bits = []
    for _ in range(3):
        x = torch.randn(*BATCHES[device.type], DIM, device=device)
        loss = model(x).float().square().mean()
        loss.backward()
        bits.append(local(loss))
        bits += [local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return bits + [local(parameter) for parameter in model.parameters()]


def compare(kind: str, device: torch.device) -> None:
    expected = train(build(kind, device), device)
    model = build(kind, device)
    seen: set[int] = set()
    handle = apply_activation_offloading(
        model, device=device, min_bytes=0, skip=lambda tensor, _: seen.add(tensor.shape[0]) is not None
    )
    actual = train(model, device)
    assert len(actual) == len(expected)
    assert all(same_bits(one, other) for one, other in zip(actual, expected, strict=True)), kind
    stats = handle.stats()
    assert stats.offloads > 0 and stats.passes == 3 and stats.used_host_bytes == 0, (kind, stats)
    num_samples, num_tokens = BATCHES[device.type]
    assert seen <= {num_samples, num_samples * num_tokens}, (kind, seen)  # of batches and tokens: no weights
    handle.remove()


def trains(rank: int) -> None:
    """What each rank does: see `several.run`."""
    warnings.simplefilter("ignore")
    if several.DEVICE.type != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    for kind in KINDS:
        compare(kind, several.DEVICE)
