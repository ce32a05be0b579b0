"""What the hooks of one group cost: a model of many tiny layers, plain, under diffusers, under this package.

The layers compute next to nothing, so the time beyond the plain model is the engine's own. On the CPU as onload device
neither this package nor diffusers moves any bytes: weights in RAM are used where they are.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import report as reports
from .arms import apply_function
from .machine import measure_machine, synchronize
from .options import add
from .report import machine_facts

NUM_BLOCKS = 100
LEAVES_PER_BLOCK = 4
FEATURES = 16
CUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "a block": (NUM_BLOCKS, {"offload_type": "block_level", "num_blocks_per_group": 1}),
    "a leaf": (NUM_BLOCKS * LEAVES_PER_BLOCK, {"offload_type": "leaf_level"}),
}


class Block(nn.Sequential):
    def __init__(self) -> None:
        ends = (nn.Linear(FEATURES, FEATURES) for _ in range(LEAVES_PER_BLOCK - 1))
        super().__init__(next(ends), nn.LayerNorm(FEATURES), *ends)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@torch.no_grad()
def seconds_per_pass(engine: str, device: torch.device, options: dict[str, Any], repeats: int) -> float:
    """The fastest of `repeats` forwards, after two that learn the order: whatever else runs here only adds to it."""
    torch.manual_seed(0)
    model = Model().eval()
    apply_function(engine)(model, device, options)
    x = torch.randn(1, FEATURES, device=device)
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        model(x)
        synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[2:])


def run(options: argparse.Namespace) -> Path | None:
    """Measure each engine at each level. Returns the file with the results."""
    device = torch.device(options.device)
    torch.set_num_threads(1)
    plain = seconds_per_pass("resident", device, {}, options.repeats)
    what = f"{NUM_BLOCKS} blocks of {LEAVES_PER_BLOCK} leaves"
    report = reports.new("hooks", options, model={"name": "tiny-layers", "what": what}, plain_s=plain)
    report["machine"] = measure_machine(device)
    for name, (num_groups, choice) in CUTS.items():
        choice = {**choice, "use_stream": device.type != "cpu"}
        report["arms"][name] = {
            engine: (seconds_per_pass(engine, device, choice, options.repeats) - plain) / num_groups
            for engine in ("diffusers", "ours")
        }
    return reports.write(report, options.output)


def render(report: Mapping[str, Any]) -> str:
    """A report of this benchmark as Markdown: a row for each kind of group."""
    plain = f"plain: {report['plain_s'] * 1e3:.2f} ms a forward"
    facts = f"{report['model']['what']}, {plain}; {machine_facts(report, 'diffusers')}."
    rows = {
        name: {f"{engine}, µs a group": f"{took * 1e6:.1f}" for engine, took in arm.items()}
        for name, arm in report["arms"].items()
    }
    columns = ("diffusers, µs a group", "ours, µs a group")
    return "\n".join([facts, "", reports.table(rows, columns, columns[1], head="one group is")])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=100, help="forwards, of which the fastest counts (default 100)")
    add(parser, device="cpu")
