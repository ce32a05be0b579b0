"""The ways to run a model or a pipeline: resident, under diffusers, accelerate, cache-dit, this package."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from group_offload.plan.budgets import parse_bytes

ENGINES = ("resident", "ours", "diffusers", "accelerate", "cache-dit", "fsdp2", "model", "sequential")
"""The last two are diffusers' model offloading of pipelines, and accelerate's of single layers. FSDP2 trains."""
WORDS: dict[str, dict[str, Any]] = {
    "block": {"offload_type": "block_level", "num_blocks_per_group": 1},
    "leaf": {"offload_type": "leaf_level"},
    "compressed": {"compress": True},
    "compress": {"compress": True},
    "auto": {"vram_budget": "auto"},
    "interleave": {"interleave_forwards": True},
    "auto interleave": {"interleave_forwards": "auto"},
    "stream": {"use_stream": True},
    "record_stream": {"use_stream": True, "record_stream": True},
    "no stream": {"use_stream": False},
    "low_cpu_mem_usage": {"low_cpu_mem_usage": True},
    "not locked": {"low_cpu_mem_usage": True},
    "checkpoint": {"offload_device": "disk"},
    "tables move": {"embeddings_on_cpu": False},
    "layers, ahead": {"async_transfer": True},
    "layers, 1536MiB ahead": {
        "async_transfer": True,
        "transfer_buckets": 4,
        "max_inflight_prefetch_bytes": "1536MiB",
    },
    **{word: {} for word in ("cpu_offload", "disk", "files", "again", "512 MiB locked", "no PAGEMAP_SCAN")},
    **{word: {} for word in ("warm", "cold", "expand", "noexpand")},
}
"""What the parts of a name stand for. This package copies ahead by itself where there are streams; diffusers has to be told."""
_OURS = {"compress", "vram_budget", "ram_budget", "interleave_forwards", "embeddings_on_cpu", "offload_device"}
_WORD = re.compile(
    "|".join(re.escape(word) for word in sorted(WORDS, key=len, reverse=True))
    + r"|(?:vram|budget|ram)=[^\s+,]+|@[^\s+,]+|\d+ steps"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to run a model or a pipeline."""

    name: str
    engine: str
    options: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of its process."""
    on_disk: bool = False
    """It gets a folder for files of its own."""
    is_from_checkpoint: bool = False
    """The model comes from `from_pretrained`: its weights are views of mapped files."""
    is_again: bool = False
    """It was set up once before, in the same folder, which has kept what was compressed."""
    is_cold: bool = False
    """Nothing of the files is in the page cache."""
    locked_bytes: int | None = None
    """The system lets so much memory be pinned."""
    lacks_scan: bool = False
    """The kernel is older than Linux 6.7, which finds edits quickly."""
    ram_limit_bytes: int | None = None
    """The process gets so much RAM, what it has in the page cache included, and finds nothing there."""
    num_steps: int | None = None
    """Of an image."""

    @property
    def needs_accelerator(self) -> bool:
        if self.engine == "diffusers":  # of pipelines, it has streams if nothing is said
            return bool(self.options.get("use_stream", True))
        is_special = self.engine in ("cache-dit", "model", "sequential")
        return is_special or bool(self.options.keys() & {"compress", "vram_budget"})


def arm_of(name: str) -> Arm:
    """The arm that a name says: an engine, then words of `WORDS` behind spaces, commas or "+".

    Also "vram=25%" or "budget=7GiB" (the `vram_budget`), "ram=auto", "4 steps", and "@12GiB", so much RAM for the process.

    Raises:
        ValueError: there is none.
    """
    engine, rest = re.fullmatch(r"([\w-]*)(.*)", name).groups()  # type: ignore[union-attr]
    words = _WORD.findall(rest)
    if engine not in ENGINES or _WORD.sub("", rest).strip(" ,+"):
        raise ValueError(f"No arm {name!r}: it's an engine ({', '.join(ENGINES)}) and some of {', '.join(WORDS)}")
    options: dict[str, Any] = {}
    values = dict(word.split("=") for word in words if "=" in word)
    limit = next((parse_bytes(word[1:], "@") for word in words if word.startswith("@")), None)
    for word in words:
        options |= WORDS.get(word, {})
    options |= {"ram_budget" if key == "ram" else "vram_budget": value for key, value in values.items()}
    if engine != "ours" and options.keys() & _OURS:
        raise ValueError(f"{name!r}: only this package takes {', '.join(options.keys() & _OURS)}")
    environment = {}
    if "expand" in words or "noexpand" in words:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = f"expandable_segments:{'expand' in words}"
    return Arm(
        name=name,
        engine=engine,
        options=options,
        environment=environment,
        on_disk=bool({"disk", "files", "again"} & {*words}),
        is_again="again" in words,
        # Made in RAM, a model would not fit where RAM is limited.
        is_from_checkpoint="checkpoint" in words or limit is not None,
        is_cold="cold" in words or limit is not None,
        locked_bytes=512 << 20 if "512 MiB locked" in words else None,
        lacks_scan="no PAGEMAP_SCAN" in words,
        ram_limit_bytes=limit,
        num_steps=next((int(word.split()[0]) for word in words if word.endswith(" steps")), None),
    )


def choose(names: Sequence[str], device: str) -> list[Arm]:
    """The arms with these names that can run on the device, in the order given. The program ends if there is none."""
    arms = []
    for name in dict.fromkeys(names):
        try:
            arms.append(arm_of(name))
        except ValueError as error:
            raise SystemExit(f"{name!r}: {error}") from None
    return [arm for arm in arms if device != "cpu" or not arm.needs_accelerator]


# Of one model. The most telling ones first: a run that is cut short has them.
CUTS = ("block", "leaf")
BASIC = (
    "resident",
    *(f"diffusers {cut}+stream{recorded}" for cut in CUTS for recorded in ("", "+record_stream")),
    *(f"ours {cut}{recorded}" for cut in CUTS for recorded in ("", "+record_stream")),
)
ARMS = (
    *BASIC,
    *(f"ours {cut} compressed" for cut in CUTS),
    *(f"ours block compressed, {source}" for source in ("checkpoint", "checkpoint, again", "disk")),
    *(f"ours {cut}, checkpoint" for cut in CUTS),
    *(f"ours {cut}, checkpoint, not locked" for cut in CUTS),
    *(f"{engine}, disk" for engine in ("diffusers block+stream", "diffusers leaf+stream", "ours block", "ours leaf")),
    *(f"ours {cut}, {how}" for how in ("tables move", "512 MiB locked", "no PAGEMAP_SCAN") for cut in CUTS),
    *(f"diffusers {cut}+stream, low_cpu_mem_usage" for cut in CUTS),
    *(f"{engine} {cut}, no stream" for engine in ("ours", "diffusers") for cut in CUTS),
    *("accelerate cpu_offload", "cache-dit layers, ahead", "cache-dit layers, 1536MiB ahead"),
)


def apply(engine: str, model: nn.Module, device: torch.device, options: Mapping[str, Any]) -> Any:
    """Set an engine up. Returns this package's handle, or None."""
    if engine == "ours":
        from group_offload import apply_group_offloading

        return apply_group_offloading(model, device, **options)
    if engine == "diffusers":
        from diffusers.hooks import apply_group_offloading as diffusers_offloading

        diffusers_offloading(model, onload_device=device, **options)
    elif engine == "accelerate":
        from accelerate import cpu_offload

        cpu_offload(model, execution_device=device, **options)
    elif engine == "cache-dit":
        from cache_dit import layerwise_offload

        layerwise_offload(model, onload_device=device, **options)
    else:
        model.to(device)
    return None


def apply_to_pipeline(engine: str, pipe: Any, device: torch.device, options: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a pipeline. Returns this package's handles, by the names of models."""
    if engine == "resident":
        pipe.to(device)
    elif engine == "model":
        pipe.enable_model_cpu_offload(device=device)
    elif engine == "sequential":
        pipe.enable_sequential_cpu_offload(device=device)
    elif engine == "diffusers":
        leaves = {**WORDS["leaf"], **WORDS["record_stream"]}
        pipe.enable_group_offload(onload_device=device, **{**leaves, **options})
    else:
        from group_offload import enable_group_offload

        least = {"vram_budget": None, "interleave_forwards": False}
        return dict(enable_group_offload(pipe, onload_device=device, **{**least, **options}))
    return {}
