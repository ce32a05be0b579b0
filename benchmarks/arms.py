"""The ways to run a model: resident, under diffusers' group offloading, accelerate, cache-dit, this package."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from .restrictions import RESTRICTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to run the model."""

    name: str
    engine: str
    """"resident", "diffusers", "accelerate", "cache-dit" or "ours"."""
    options: Mapping[str, Any] = field(default_factory=dict)
    on_disk: bool = False
    is_from_checkpoint: bool = False
    """The model comes from `from_pretrained`: its weights are views of mapped files."""
    is_again: bool = False
    """It was set up once before, in the same folder, which has kept what was packed."""
    starts_on_device: bool = False
    """The weights are on the device before, and `remove()` brings them back there."""
    restriction: str = ""
    """What the system refuses: one of `restrictions.RESTRICTIONS`."""
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
        return bool(self.options.get("use_stream") or self.options.get("pack")) or self.engine == "cache-dit"

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
        is_special = self.starts_on_device or bool(self.restriction) or self.copies_beside
        is_special |= "embeddings_on_cpu" in self.options or "pack" in self.options
        return not (self.reads_files or self.is_from_checkpoint or self.is_slow or is_pageable or is_special)

    def missing(self) -> str | None:
        """The package that this arm needs and that is not here."""
        peers = {"diffusers": ("diffusers",), "accelerate": ("accelerate",), "cache-dit": ("cache_dit",)}
        needed = peers.get(self.engine, ())
        # Without accelerate, from_pretrained copies the weights into a model that it has made before.
        needed += ("diffusers", "accelerate") if self.is_from_checkpoint else ()
        return next((name for name in needed if importlib.util.find_spec(name) is None), None)


CUTS = ("block", "leaf")
_OPTIONS: dict[str, dict[str, Any]] = {
    " block": {"offload_type": "block_level", "num_blocks_per_group": 1},
    " leaf": {"offload_type": "leaf_level"},
    " packed": {"pack": True},
    "+stream": {"use_stream": True},
    "+record_stream": {"use_stream": True, "record_stream": True},
    ", no stream": {"use_stream": False},
    ", low_cpu_mem_usage": {"low_cpu_mem_usage": True},
    ", not locked": {"low_cpu_mem_usage": True},
    ", checkpoint": {"offload_device": "disk"},
    ", tables move": {"embeddings_on_cpu": False},
    " layers, ahead": {"async_transfer": True},
    " 4 ahead": {"async_transfer": True, "transfer_buckets": 4},
    " 1536MiB ahead": {"async_transfer": True, "transfer_buckets": 4, "max_inflight_prefetch_bytes": "1536MiB"},
}
"""What the parts of a name stand for. This package copies ahead by itself where there are streams; diffusers has to be told."""
_SLOW = (
    "no stream",
    "diffusers block+stream, low",
    "diffusers leaf+stream, low",
    "resident, from",
    "accelerate",
    "one by one",
)


def arm_of(name: str) -> Arm:
    """The arm that a name says: its engine comes first."""
    return Arm(
        name=name,
        engine=re.split(r"[ ,]", name)[0],
        options={key: value for part, options in _OPTIONS.items() if part in name for key, value in options.items()},
        on_disk=name.endswith((", disk", ", again")),
        is_again=name.endswith(", again"),
        is_from_checkpoint=", checkpoint" in name or name.endswith(", from_pretrained"),
        starts_on_device="from the device" in name,
        restriction=next((each for each in RESTRICTIONS if each in name), ""),
        copies_beside="copies beside" in name,
        is_slow=any(part in name for part in _SLOW),
    )


# The most telling ones first: a run that is cut short has them. With copies beside it the resident model shows the best that
# streaming can come to where compute sets the time: copies take device memory's bandwidth, and power. From a checkpoint it is
# resident without being made: on the CPU it needs no RAM but the page cache's.
ARMS = {
    name: arm_of(name)
    for name in (
        "resident",
        "resident, copies beside it",
        *(f"diffusers {cut}+stream{recorded}" for cut in CUTS for recorded in ("", "+record_stream")),
        *(f"ours {cut}{recorded}" for cut in CUTS for recorded in ("", "+record_stream")),
        *(f"ours {cut} packed" for cut in CUTS),
        *(f"ours block packed, {source}" for source in ("from_pretrained", "checkpoint", "checkpoint, again", "disk")),
        *(f"{engine}, from_pretrained" for engine in ("ours block", "ours leaf", "diffusers block+stream")),
        *(f"ours {cut}, checkpoint" for cut in CUTS),
        *(f"ours {cut}, checkpoint, not locked" for cut in CUTS),
        *(f"diffusers {cut}+stream, disk" for cut in CUTS),
        *(f"ours {cut}, disk" for cut in CUTS),
        "ours block, low_cpu_mem_usage",
        "ours block, from the device",
        *(f"ours {cut}, tables move" for cut in CUTS),
        *(f"ours {cut}, {restriction}" for cut in CUTS for restriction in RESTRICTIONS),
        *(f"diffusers {cut}+stream, low_cpu_mem_usage" for cut in CUTS),
        *(f"{engine} {cut}, no stream" for engine in ("ours", "diffusers") for cut in CUTS),
        "resident, from_pretrained",
        "accelerate cpu_offload",
        *(f"cache-dit layers, {far}" for far in ("ahead", "4 ahead", "1536MiB ahead", "one by one")),
    )
}


def choose(names: Sequence[str], arms: Mapping[str, Arm] = ARMS, ram: str | None = None) -> list[Arm]:
    """The arms with these names, or those of an engine, in the order given: a run that is cut short has the first ones.

    Args:
        names: " @12GiB" behind a name limits that arm's RAM; behind that, " vram=25%" and " ram=auto" are budgets.
        ram: the limit of all others.
    """
    chosen: dict[str, Arm] = {}
    for whole in names:
        named, *budgets = re.split(r" (?=v?ram=)", whole)
        name, _, limit = named.partition(" @")
        # The name of an engine that is an arm's too ("resident") is the arm's.
        found = [arms[name]] if name in arms else [arm for arm in arms.values() if arm.engine == name]
        if not found:
            raise SystemExit(f"No arm {name!r}. Arms: {', '.join(map(repr, arms))}.")
        if budgets and any(arm.engine != "ours" for arm in found):
            raise SystemExit(f"{whole!r}: only this package's arms have budgets.")
        size = limit or ram
        try:
            found = [arm.limited(size) if size and arm.engine != "resident" else arm for arm in found]
            found = [arm.budgeted(budgets) if budgets else arm for arm in found]
        except ValueError:
            raise SystemExit(f"{whole!r}: {size!r} is no size like 12GiB.") from None
        chosen |= {arm.name: arm for arm in found if arm.name not in chosen}
    return list(chosen.values())


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
    if engine == "cache-dit":
        from cache_dit import layerwise_offload

        def offload_layers(model: nn.Module, device: torch.device, options: dict[str, Any]) -> None:
            layerwise_offload(model, onload_device=device, **options)

        return offload_layers
    from group_offload import apply_group_offloading as ours

    return lambda model, device, options: ours(model, onload_device=device, **options)


def plan_facts(plan: Any) -> dict[str, Any]:
    """What the plan of this package says of one forward. Times are seconds, sizes are bytes."""
    prediction = plan.details.prediction
    return {
        "plan_s": plan.step_seconds,
        "predicted_s": prediction.step_seconds,
        "plan": str(plan),
        "speeds": asdict(plan.details.problem.speeds),
        "h2d_bytes": prediction.h2d_bytes,
        "drive_bytes": prediction.drive_bytes,
        "compute_s": prediction.compute_seconds,
        "unpack_s": prediction.unpack_seconds,
    }
