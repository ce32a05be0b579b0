"""The ways to run a model: resident, under diffusers' group offloading, accelerate, cache-dit, this package."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
    def has_budget(self) -> bool:
        return bool(self.vram or self.ram)

    def budgets(self, weight_bytes: int) -> dict[str, Any]:
        """What this package is called with."""
        vram: Any = self.vram
        if vram.endswith("%"):
            vram = int(weight_bytes * float(vram.removesuffix("%")) / 100)
        return {**({"vram_budget": vram} if vram else {}), **({"ram_budget": self.ram} if self.ram else {})}

    @property
    def is_basic(self) -> bool:
        """Worth the time for every model. The others show something only where the model is large."""
        is_in_files = self.on_disk or self.is_from_checkpoint or self.options.get("offload_device") == "disk"
        is_special = self.starts_on_device or bool(self.restriction) or self.copies_beside or self.is_slow
        return not (
            is_in_files or is_special or self.options.keys() & {"low_cpu_mem_usage", "embeddings_on_cpu", "pack"}
        )

    def missing(self) -> str | None:
        """The package that this arm needs and that is not here."""
        needed = [self.engine.replace("-", "_")] if self.engine not in ("resident", "ours") else []
        # Without accelerate, from_pretrained copies the weights into a model that it has made before.
        needed += ["diffusers", "accelerate"] if self.is_from_checkpoint else []
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
    " 1536MiB ahead": {"async_transfer": True, "transfer_buckets": 4, "max_inflight_prefetch_bytes": "1536MiB"},
}
"""What the parts of a name stand for. This package copies ahead by itself where there are streams; diffusers has to be told."""
_SLOW = ("no stream", "diffusers block+stream, low", "diffusers leaf+stream, low", "resident, from", "accelerate")


def arm_of(name: str) -> Arm:
    """The arm that a name says: its engine comes first, and behind it may stand " @12GiB", " vram=25%" and " ram=auto".

    Raises:
        ValueError: what stands behind it is no size, or is for other engines.
    """
    named, *budgets = re.split(r" (?=v?ram=)", name)
    base, _, limit = named.partition(" @")
    engine = re.split(r"[ ,]", base)[0]
    if budgets and engine != "ours":
        raise ValueError(f"{name!r}: only this package's arms have budgets.")
    return Arm(
        name=name,
        engine=engine,
        options={key: value for part, options in _OPTIONS.items() if part in base for key, value in options.items()},
        on_disk=base.endswith((", disk", ", again")),
        is_again=base.endswith(", again"),
        # Made in RAM, a model would not fit where RAM is limited.
        is_from_checkpoint=", checkpoint" in base or base.endswith(", from_pretrained") or bool(limit),
        starts_on_device="from the device" in base,
        restriction=next((each for each in RESTRICTIONS if each in base), ""),
        copies_beside="copies beside" in base,
        is_slow=bool(limit) or any(part in base for part in _SLOW),
        ram_limit_bytes=parse_size(limit) if limit else None,
        **dict(budget.split("=", 1) for budget in budgets),  # type: ignore[arg-type]
    )


# The most telling ones first: a run that is cut short has them. With copies beside it the resident model shows the best that
# streaming can come to where compute sets the time: copies take device memory's bandwidth, and power. From a checkpoint it is
# resident without being made: on the CPU it needs no RAM but the page cache's.
ARMS = (
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
    *(f"cache-dit layers, {far}" for far in ("ahead", "1536MiB ahead")),
)


def choose(names: Sequence[str], arms: Sequence[str] = ARMS, ram: str | None = None) -> list[Arm]:
    """The arms with these names, or those of an engine, in the order given: a run that is cut short has the first ones.

    Args:
        names: see `arm_of`.
        ram: the limit of all arms whose names have none.
    """
    chosen: dict[str, Arm] = {}
    for whole in names:
        base, behind = re.fullmatch(r"(.*?)((?: @\S+)?(?: v?ram=\S+)*)", whole).groups()  # type: ignore[union-attr]
        # The name of an engine that is an arm's too ("resident") is the arm's.
        found = [base] if base in arms else [name for name in arms if name.startswith((f"{base} ", f"{base},"))]
        if not found:
            raise SystemExit(f"No arm {base!r}. Arms: {', '.join(map(repr, arms))}.")
        for name in found:
            is_limited = ram is not None and "@" not in behind and not name.startswith("resident")
            try:
                arm = arm_of(f"{name} @{ram}{behind}" if is_limited else name + behind)
            except ValueError as error:
                raise SystemExit(f"{whole!r}: {error}. A size is 12GiB, say.") from None
            chosen.setdefault(arm.name, arm)
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
    """What sets an arm up: returns this package's handle, or None. Whatever takes long to import is imported now."""
    where = "onload_device"
    apply: Any = None
    if engine == "diffusers":
        from diffusers.hooks import apply_group_offloading as apply
    elif engine == "accelerate":
        from accelerate import cpu_offload as apply

        where = "execution_device"
    elif engine == "cache-dit":
        from cache_dit import layerwise_offload as apply
    elif engine == "ours":
        from group_offload import apply_group_offloading as apply

    def set_up(model: nn.Module, device: torch.device, options: dict[str, Any]) -> Any:
        if apply is None:
            model.to(device)  # where it is, but for one that comes from a checkpoint
            return None
        handle = apply(model, **{where: device}, **options)
        return handle if engine == "ours" else None

    return set_up


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
