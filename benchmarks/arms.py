"""The ways to run a model: resident, under diffusers' group offloading, under accelerate, under this package."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to run the model."""

    name: str
    engine: str
    """"resident", "diffusers", "accelerate" or "ours"; of a pipeline, "model_cpu_offload", too."""
    options: Mapping[str, Any] = field(default_factory=dict)
    on_disk: bool = False
    is_from_checkpoint: bool = False
    """The model comes from `from_pretrained`: its weights are views of mapped files."""
    copies_beside: bool = False
    """While it computes, as many bytes as the weights have are copied to the device, for nothing."""
    is_slow: bool = False
    """Few steps are enough: each takes seconds."""
    ram_limit_bytes: int | None = None
    """The process gets so much RAM, what it has in the page cache included, and finds nothing there."""
    vram: str = ""
    """`vram_budget`; with "%", a share of the weights."""
    ram: str = ""
    """`ram_budget`."""

    @property
    def needs_streams(self) -> bool:
        return bool(self.options.get("use_stream"))

    @property
    def reads_files(self) -> bool:
        """Weights rest in files."""
        return self.on_disk or self.options.get("offload_device") == "disk"

    def limited(self, ram: str) -> Arm:
        """The same with so much RAM. The model comes from a checkpoint then: made in RAM it would not fit.

        Raises:
            ValueError: `ram` is no size.
        """
        return replace(
            self,
            name=f"{self.name} @{ram}",
            ram_limit_bytes=parse_size(ram),
            is_from_checkpoint=True,
            is_slow=True,
        )

    @property
    def has_budget(self) -> bool:
        return bool(self.vram or self.ram)

    def budgeted(self, budgets: Sequence[str]) -> Arm:
        """The same with budgets: "vram=25%", "ram=auto".

        Raises:
            ValueError: none of these.
        """
        found = dict(budget.split("=", 1) for budget in budgets)
        if unknown := set(found) - {"vram", "ram"}:
            raise ValueError(f"{sorted(unknown)}")
        return replace(self, name=" ".join([self.name, *budgets]), **found)

    def budgets(self, weight_bytes: int) -> dict[str, Any]:
        """What this package is called with."""
        vram: Any = self.vram
        if vram.endswith("%"):
            vram = int(weight_bytes * float(vram.removesuffix("%")) / 100)
        return {**({"vram_budget": vram} if vram else {}), **({"ram_budget": self.ram} if self.ram else {})}

    @property
    def is_basic(self) -> bool:
        """Worth the time for every model. The others show something only where the model is large."""
        is_pageable = bool(self.options.get("low_cpu_mem_usage"))
        return not (self.reads_files or self.is_from_checkpoint or self.is_slow or is_pageable or self.copies_beside)

    def missing(self) -> str | None:
        """The package that this arm needs and that is not here."""
        needed = {"diffusers": ("diffusers",), "accelerate": ("accelerate",)}.get(self.engine, ())
        # Without accelerate, from_pretrained copies the weights into a model that it has made before.
        needed += ("diffusers", "accelerate") if self.is_from_checkpoint else ()
        return next((name for name in needed if importlib.util.find_spec(name) is None), None)


def _arms() -> Iterator[Arm]:
    """The most telling ones first: a run that is cut short has them."""
    block: dict[str, Any] = {"offload_type": "block_level", "num_blocks_per_group": 1}
    leaf: dict[str, Any] = {"offload_type": "leaf_level"}
    stream = {"use_stream": True}
    recorded = {"use_stream": True, "record_stream": True}
    # This package copies ahead by itself where the device has streams; diffusers has to be told.
    engines: tuple[tuple[str, str, dict[str, Any]], ...] = (("diffusers", "+stream", stream), ("ours", "", {}))
    cuts = (("block", block), ("leaf", leaf))
    yield Arm(name="resident", engine="resident")
    # The best that streaming can come to where compute sets the time: copies take device memory's bandwidth, and power.
    yield Arm(name="resident, copies beside it", engine="resident", copies_beside=True)
    for engine, suffix, ahead in engines:
        for kind, options in cuts:
            yield Arm(name=f"{engine} {kind}{suffix}", engine=engine, options={**options, **ahead})
            yield Arm(name=f"{engine} {kind}{suffix}+record_stream", engine=engine, options={**options, **recorded})
    for engine, kind, suffix, options in (
        ("ours", "block", "", block),
        ("ours", "leaf", "", leaf),
        ("diffusers", "block", "+stream", {**block, **stream}),
    ):
        yield Arm(
            name=f"{engine} {kind}{suffix}, from_pretrained", engine=engine, options=options, is_from_checkpoint=True
        )
    in_files = {"offload_device": "disk"}
    for kind, options in cuts:
        options = {**options, **in_files}
        yield Arm(name=f"ours {kind}, checkpoint", engine="ours", options=options, is_from_checkpoint=True)
    for kind, options in cuts:
        yield Arm(
            name=f"ours {kind}, checkpoint, not locked",
            engine="ours",
            options={**options, **in_files, "low_cpu_mem_usage": True},
            is_from_checkpoint=True,
        )
    for engine, suffix, ahead in engines:
        for kind, options in cuts:
            yield Arm(name=f"{engine} {kind}{suffix}, disk", engine=engine, options={**options, **ahead}, on_disk=True)
    pageable = {"low_cpu_mem_usage": True}
    yield Arm(name="ours block, low_cpu_mem_usage", engine="ours", options={**block, **pageable})
    for kind, options in cuts:
        yield Arm(
            name=f"diffusers {kind}+stream, low_cpu_mem_usage",
            engine="diffusers",
            options={**options, **stream, **pageable},
            is_slow=True,
        )
    for engine in ("ours", "diffusers"):
        for kind, options in cuts:
            without = {**options, "use_stream": False}
            yield Arm(name=f"{engine} {kind}, no stream", engine=engine, options=without, is_slow=True)
    # Resident without being made: on the CPU it needs no RAM but the page cache's.
    yield Arm(name="resident, from_pretrained", engine="resident", is_from_checkpoint=True, is_slow=True)
    yield Arm(name="accelerate cpu_offload", engine="accelerate", is_slow=True)


ARMS = {arm.name: arm for arm in _arms()}


def split_budgets(name: str) -> tuple[str, list[str]]:
    """The name of an arm, and what `Arm.budgeted` takes: "ours block vram=25%" is "ours block" and ["vram=25%"]."""
    name, *budgets = re.split(r" (?=v?ram=)", name)
    return name, budgets


def parse_size(text: str) -> int:
    """ "12GiB", "500MiB" or "4096" in bytes.

    Raises:
        ValueError: it is none of these.
    """
    for number, unit in enumerate(("KiB", "MiB", "GiB"), 1):
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * (1 << 10 * number))
    return int(text)


def apply_function(engine: str) -> Callable[[nn.Module, torch.device, dict[str, Any]], Any]:
    """What sets an arm up: returns a handle, or None."""
    if engine == "resident":

        def move(model: nn.Module, device: torch.device, options: dict[str, Any]) -> None:
            model.to(device)  # where it is, but for one that comes from a checkpoint

        return move
    if engine == "diffusers":
        from diffusers.hooks import apply_group_offloading as theirs

        return lambda model, device, options: theirs(model, onload_device=device, **options)
    if engine == "accelerate":
        from accelerate import cpu_offload

        def offload(model: nn.Module, device: torch.device, options: dict[str, Any]) -> None:
            cpu_offload(model, execution_device=device, **options)

        return offload
    sys.path.insert(0, str(ROOT))
    from group_offload import apply_group_offloading as ours

    return lambda model, device, options: ours(model, onload_device=device, **options)
