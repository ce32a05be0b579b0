"""What the hooks of one group cost: a model of many tiny layers, plain, under diffusers, under this package.

    python benchmarks/hooks.py                    on the CPU, without streams
    python benchmarks/hooks.py --device cuda      with streams: the host's work for each group

The layers compute next to nothing, so the time beyond the plain model is the engine's own. On the CPU as onload device
diffusers moves no bytes (its `.to("cpu")` returns the same tensor), this package copies them into a slot.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

NUM_BLOCKS = 100
LEAVES_PER_BLOCK = 4
FEATURES = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj_in = nn.Linear(FEATURES, FEATURES)
        self.norm = nn.LayerNorm(FEATURES)
        self.proj = nn.Linear(FEATURES, FEATURES)
        self.proj_out = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj_out(self.proj(self.norm(self.proj_in(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _plain(model: nn.Module, device: torch.device, options: dict[str, Any]) -> None:
    model.to(device)


def _diffusers(model: nn.Module, device: torch.device, options: dict[str, Any]) -> None:
    from diffusers.hooks import apply_group_offloading

    apply_group_offloading(model, onload_device=device, **options)


def _ours(model: nn.Module, device: torch.device, options: dict[str, Any]) -> None:
    from group_offload import apply_group_offloading

    apply_group_offloading(model, onload_device=device, **options)


def seconds_per_pass(apply: Callable[..., None], device: torch.device, options: dict[str, Any], repeats: int) -> float:
    """The fastest of `repeats` forwards, after two that learn the order: whatever else runs here only adds to it."""
    torch.manual_seed(0)
    model = Model().eval()
    apply(model, device, options)
    x = torch.randn(1, FEATURES, device=device)
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        model(x)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=100)
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(1)
    stream = {"use_stream": device.type != "cpu"}
    cuts: dict[str, tuple[int, dict[str, Any]]] = {
        "block": (NUM_BLOCKS, {"offload_type": "block_level", "num_blocks_per_group": 1, **stream}),
        "leaf": (NUM_BLOCKS * LEAVES_PER_BLOCK, {"offload_type": "leaf_level", **stream}),
    }
    with torch.no_grad():
        plain = seconds_per_pass(_plain, device, {}, options.repeats)
        print(f"{NUM_BLOCKS} blocks of {LEAVES_PER_BLOCK} leaves on {device}, plain: {plain * 1e3:.2f} ms a forward.\n")
        print("| one group is | diffusers, µs a group | group_offload, µs a group |")
        print("|--------------|-----------------------|---------------------------|")
        for name, (num_groups, arguments) in cuts.items():
            costs = [
                (seconds_per_pass(apply, device, arguments, options.repeats) - plain) / num_groups * 1e6
                for apply in (_diffusers, _ours)
            ]
            print(f"| a {name:<10} | {costs[0]:<21.1f} | {costs[1]:<25.1f} |")


if __name__ == "__main__":
    main()
