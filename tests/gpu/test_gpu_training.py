"""Training on a real accelerator: autograd's own threads, real streams, real peaks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from group_offload import apply_activation_offloading, apply_group_offloading

from ..support.asserts import assert_same
from ..support.backward import Lora
from ..support.inside import slow_down
from ..support.training import CHECKPOINTS

pytestmark = pytest.mark.gpu

DIM = 1024
NUM_BLOCKS = 6
MIB = 1 << 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM).requires_grad_(False)
        self.up = Lora(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM).requires_grad_(False)
        self.gate = nn.Parameter(torch.randn(DIM), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training) * self.gate


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(DIM, DIM).requires_grad_(False)
        self.run_block: Callable[..., torch.Tensor] = lambda block, *args: block(*args)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        if torch.is_grad_enabled() and not x.requires_grad:
            x.requires_grad_()
        for block in self.blocks:
            x = self.run_block(block, x)
        result: torch.Tensor = self.head(x)
        return result


def make(run_block: Any = None) -> Model:
    torch.manual_seed(0)
    model = Model().to(torch.bfloat16).train()
    if run_block is not None:
        model.run_block = run_block
    return model


def train(model: nn.Module, device: torch.device, num_steps: int, num_tokens: int = 512) -> list[torch.Tensor]:
    """Losses and gradients of each step, and the trained parameters after them, on the CPU."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, foreach=True)
    x = torch.randn(num_tokens, DIM, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    torch.manual_seed(2)
    bits = []
    for _ in range(num_steps):
        loss = model(x).float().square().mean()
        loss.backward()
        bits += [loss.detach().cpu(), *(parameter.grad.cpu() for parameter in trained if parameter.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return bits + [parameter.detach().cpu() for parameter in trained]


MODES: dict[str, dict[str, Any]] = {
    "block": {},
    "leaf": {"offload_type": "leaf_level"},
    "record_stream": {"record_stream": True},
    "no stream": {"use_stream": False},
    "low_cpu_mem_usage": {"low_cpu_mem_usage": True},
    "files": {"in_files": True},
    "budget": {"vram_budget": "1GiB"},
    "compressed": {"compress": True},
}


@pytest.mark.parametrize("run_block", [None, *CHECKPOINTS[:2]])
@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_lora_over_offloaded_weights(
    options: dict[str, Any], run_block: Any, device: torch.device, tmp_path: Path
) -> None:
    """Hazard: a LoRA can't be trained over offloaded weights (finetrainers #376; SimpleTuner #1984, #3150)."""
    expected = train(make(run_block).to(device), device, 4)
    model = make(run_block)
    options = dict(options)
    if options.pop("in_files", False):
        options["offload_to_disk_path"] = tmp_path
    handle = apply_group_offloading(model, device, **options)
    assert_same(train(model, device, 4), expected)
    assert handle.stats().backward_passes == 4
    handle.remove()


def test_twenty_steps(device: torch.device) -> None:
    expected = train(make().to(device), device, 20)
    assert_same(train(make().to(device), device, 20), expected)  # it repeats itself
    model = make()
    handle = apply_group_offloading(model, device)
    assert_same(train(model, device, 20), expected)
    assert handle.stats().stalls <= 2
    handle.remove()
    model = make().to(device)
    activations = apply_activation_offloading(model, min_bytes=1 << 16)
    assert_same(train(model, device, 20), expected)
    assert activations.stats().offloads > 0
    activations.remove()


def test_weights_and_activations_together(device: torch.device) -> None:
    for run_block in (None, CHECKPOINTS[1]):
        expected = train(make(run_block).to(device), device, 4)
        model = make(run_block)
        handle = apply_group_offloading(model, device)
        activations = apply_activation_offloading(model, min_bytes=1 << 16)
        slow_down(handle, 10_000_000)
        assert_same(train(model, device, 4), expected)
        assert activations.stats().offloads > 0
        activations.remove()
        handle.remove()


def test_the_peak_is_slots_and_what_is_trained(device: torch.device) -> None:
    """Of the frozen weights the device holds the slots, in backward too, and nothing when all is over."""

    def peak(model: nn.Module) -> int:
        train(model, device, 2)
        gc.collect()
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)
        train(model, device, 2)
        return int(torch.accelerator.max_memory_allocated(device))

    resident = make(CHECKPOINTS[1]).to(device)
    frozen = sum(parameter.nbytes for parameter in resident.parameters() if not parameter.requires_grad)
    with_all = peak(resident)
    del resident
    gc.collect()
    before = int(torch.accelerator.memory_allocated(device))  # with the workspaces of libraries, which stay
    model = make(CHECKPOINTS[1])
    handle = apply_group_offloading(model, device)
    with_slots = peak(model)
    slots = handle.stats().peak_device_bytes
    assert slots < frozen // 2
    assert with_slots <= with_all - frozen + slots + 8 * MIB
    handle.remove()
    model.cpu()
    model.zero_grad()
    del model, handle
    gc.collect()
    assert torch.accelerator.memory_allocated(device) <= before + 8 * MIB


def test_everything_requires_gradients(device: torch.device) -> None:
    """Hazard: on a GPU, a parameter that is moved gets another node for its gradient each time."""
    model = make().requires_grad_(True)
    handle = apply_group_offloading(model, device)
    with pytest.raises(RuntimeError, match="reached the offloaded weight"):
        train(model, device, 1)
    with torch.no_grad():
        model(torch.randn(4, DIM, device=device, dtype=torch.bfloat16))
    handle.remove()
