"""Whole pipelines on a card that is full: another process holds the device's memory, but for some GiB.

An arm is an engine and what it is told, joined by "+":

    resident                           all weights on the device, with nothing held: the bits of all others are compared with it
    ours                               this package with the least memory
    ours+auto, ours+budget=7GiB        with a `vram_budget`, and with ram=12GiB a `ram_budget`
    ours+auto+pack, ours+leaf          packed weights, leaf level; with +share, the calls of guidance share their copies
    diffusers, diffusers+block         diffusers' group offloading with streams: leaf level, or block level
    model, sequential                  diffusers' model offloading, and accelerate's of single layers

"+expand" and "+noexpand" switch expandable segments of torch's allocator on or off, by the environment.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import checkpoints, images, pipeline, processes
from . import report as reports
from .disk import files_in, warm
from .machine import GIB, start_device
from .options import add
from .pipelines import WHOLE
from .report import machine_facts, verdict

CHUNK_BYTES, GRAIN_BYTES = 512 << 20, 32 << 20
"""What is held consists of such pieces. The last one is a multiple of the grain: torch's allocator rounds none of them up."""
DEFAULTS = ("resident", "ours", "ours+auto", "ours+auto+pack", "diffusers")
_THEIRS = {"offload_type": "leaf_level", "use_stream": True, "record_stream": True}
_PARTS: dict[str, dict[str, Any]] = {
    "auto": {"vram_budget": "auto"},
    "pack": {"pack": True},
    "leaf": {"offload_type": "leaf_level"},
    "block": {"offload_type": "block_level", "num_blocks_per_group": 1},
    "share": {"share_passes": "auto"},
}
_BUDGETS = {"budget": "vram_budget", "ram": "ram_budget"}
_SEGMENTS = {"expand": "True", "noexpand": "False"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to run a pipeline."""

    engine: str
    options: Mapping[str, Any]
    environment: Mapping[str, str]

    @property
    def needs_accelerator(self) -> bool:
        return self.engine not in ("resident", "ours") or bool({"vram_budget", "pack"} & self.options.keys())


def arm_of(spec: str) -> Arm:
    """The arm that is written so: "ours+auto+pack".

    Raises:
        ValueError: there is none.
    """
    engine, *parts = spec.split("+")
    options: dict[str, Any] = dict(_THEIRS) if engine == "diffusers" else {}
    environment: dict[str, str] = {}
    for part in parts:
        key, _, value = part.partition("=")
        if part in _SEGMENTS:
            environment["PYTORCH_CUDA_ALLOC_CONF"] = f"expandable_segments:{_SEGMENTS[part]}"
        elif engine == "ours" and value and key in _BUDGETS:
            options[_BUDGETS[key]] = value
        elif part in _PARTS and (engine == "ours" or (engine == "diffusers" and part in ("leaf", "block"))):
            options |= _PARTS[part]
        else:
            raise ValueError(f"{spec!r}: {engine!r} takes no {part!r}.")
    if engine not in ("resident", "ours", "diffusers", "model", "sequential"):
        raise ValueError(f"No engine {engine!r}.")
    return Arm(engine=engine, options=options, environment=environment)


# ------------------------------------------------------------------------------------------------ the ballast


class Ballast:
    """The process that holds the device's memory. It ends with this one: it reads what it is to hold from a pipe."""

    def __init__(self, device: str) -> None:
        self._child = processes.Child("card")
        self._child.send(json.dumps({"is_ballast": True, "device": device}))

    def hold(self, num_bytes: int) -> dict[str, int]:
        """Let it hold so much, or what it can get. Returns what it holds, and what is free for all others together."""
        self._child.send(str(num_bytes))
        facts: dict[str, int] = self._child.wait_for("held")["facts"]
        return facts

    def end(self) -> None:
        self._child.end()


def _hold(device: torch.device) -> None:
    """What the ballast does: each line that it reads is the number of bytes that it holds from then on."""
    start_device(device)  # with a context of its own, before anything is measured
    chunks: list[torch.Tensor] = []
    held = 0
    for line in sys.stdin:
        wanted = int(line) // GRAIN_BYTES * GRAIN_BYTES
        while held > wanted:
            held -= chunks.pop().numel()
        torch.cuda.empty_cache()
        while held < wanted:
            try:
                chunks.append(torch.empty(min(CHUNK_BYTES, wanted - held), dtype=torch.uint8, device=device))
            except torch.OutOfMemoryError:
                break
            held += chunks[-1].numel()
        processes.tell("held", {"held_bytes": held, "free_bytes": torch.cuda.mem_get_info(device)[0]})


class Card(images.Card):
    """The device, as far as the ballast leaves it to this process. It is made before this process uses the device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._taken = device, 0
        self._free = self._left = processes.ask(0)["free_bytes"] if device.type == "cuda" else 0

    def leave(self, num_bytes: int | None) -> None:
        """The context of this process is included."""
        if self._device.type == "cuda":
            self._left = (
                self._free - processes.ask(0 if num_bytes is None else max(0, self._free - num_bytes))["held_bytes"]
            )

    def look(self) -> None:
        """As the driver sees it."""
        if self._device.type == "cuda":
            self._taken = max(self._taken, self._left - torch.cuda.mem_get_info(self._device)[0])

    def facts(self) -> dict[str, Any]:
        taken, self._taken = self._taken, 0
        return {"left_bytes": self._left, "taken_bytes": taken}


def work(job: dict[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """What a child process does with its job."""
    device = torch.device(job["device"])
    if job.get("is_ballast"):
        _hold(device)
        return {}
    # As users have it: which algorithms cuDNN takes where memory is short is part of what is measured.
    torch.backends.cudnn.deterministic = False
    result = images.make_images(job, begin, Card(device))
    peaks = [result[key] for key in ("device_peak_setup_bytes", "device_peak_bytes") if result[key] is not None]
    result["device_peak_bytes"] = max(peaks, default=None)
    return {**result, "device_taken_bytes": max(image["taken_bytes"] for image in result["images"])}


def preload() -> None:
    from diffusers import QwenImagePipeline, StableDiffusionXLPipeline  # noqa: F401

    pipeline.preload()


# ------------------------------------------------------------------------------------------------ the parent


def run(options: argparse.Namespace) -> Path | None:
    """For each pipeline its resident arm, then all others for each size that is left. Returns the file with the results."""
    started = time.monotonic()
    try:
        arms = {spec: arm_of(spec) for spec in options.arms or DEFAULTS}
    except ValueError as error:
        raise SystemExit(f"{error} {__doc__}") from None
    if unknown := set(options.pipeline) - set(WHOLE):
        raise SystemExit(f"No pipeline {sorted(unknown)}. Pipelines: {', '.join(WHOLE)}.")
    if options.device == "cpu":
        arms = {spec: arm for spec, arm in arms.items() if not arm.needs_accelerator}
    scenario = {
        "small": options.small,
        "layers": options.layers,
        "sizes": options.sizes or ([options.size] if options.size else []),
        "num_steps": options.steps,
        "num_images": options.images,
        "lora_after": options.lora_after,
    }
    models = {name: images.pipeline_of({**scenario, "pipeline": WHOLE[name]}).models for name in options.pipeline}
    report = reports.new(
        "card",
        options,
        model={"name": "-".join([*(["small"] if options.small else []), *options.pipeline])},
        models={name: {part: model.facts() for part, model in parts.items()} for name, parts in models.items()},
        scenario=scenario,
        is_in_ram=options.in_ram,
        commit=options.commit or _commit(),
    )
    if options.reference is not None:
        earlier = json.loads(options.reference.read_text())
        if earlier["scenario"] != scenario:
            raise SystemExit(f"--reference: it was measured with {earlier['scenario']}, not {scenario}.")
        report["arms"] |= {name: arm for name, arm in earlier["arms"].items() if arm["arm"] == "resident"}
    frees = [round(GIB * free) for free in options.free] if options.device == "cuda" else [None]
    jobs = []
    for name, parts in models.items():
        folder = None if options.in_ram else _checkpoint(name, parts, options)
        files = [file for part in parts for file in files_in(folder / part)] if folder else []
        for free in (None, *frees):
            for spec, arm in arms.items():
                # The resident one once, with nothing held.
                title = name_of(name, free, spec)
                is_its_turn = (arm.engine == "resident") == (free is None) or frees == [None]
                if is_its_turn and title not in {*report["arms"], *(job.name for job in jobs)}:
                    breathes = round(GIB * options.breathe) if free else 0
                    facts = {"pipeline": name, "free_bytes": free, "arm": spec, "breathes_bytes": breathes}
                    job = {**scenario, **facts, "pipeline": WHOLE[name], "folder": folder and str(folder)}
                    job |= {"engine": arm.engine, "options": arm.options, "is_warmed_up": False}
                    each = processes.Job(name=title, task=job, facts=facts, environment=arm.environment)
                    each.before = partial(warm, files)
                    jobs.append(each)
    options.budget -= time.monotonic() - started
    ballast = Ballast(options.device) if options.device == "cuda" else None
    relay = processes.Relay(report, options, jobs, answer=None if ballast is None else ballast.hold)
    for job, done in relay:
        _compare(done, report["arms"].get(name_of(done["pipeline"], None, "resident")))
        row = row_of(done) if "images" in done else {"errors": done["error"]}
        cells = [reports.shown(key, row.get(key)) for key in COLUMNS]
        print(" | ".join([job.name, *filter(None, cells)]), flush=True)
    if ballast is not None:
        ballast.end()
    return relay.path


def name_of(name: str, free: int | None, spec: str) -> str:
    return f"{name} {spec}" if free is None else f"{name}, {free / GIB:g} GiB, {spec}"


def _commit() -> str | None:
    """That of the code, if it is in a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _checkpoint(name: str, models: Mapping[str, Any], options: argparse.Namespace) -> Path:
    """The folder of the pipeline's models, which are written if they are not there."""
    parts = (name, *(["small"] if options.small else []), *([f"{options.layers:g}"] if options.layers != 1 else []))
    folder: Path = options.root / "-".join(parts)
    checkpoints.make_sure(
        {folder / part: model for part, model in models.items()}, options.device, pipeline.SHARD_BYTES
    )
    return folder


def _compare(arm: dict[str, Any], resident: Mapping[str, Any] | None) -> None:
    """Say of each image, and of the latents that it was decoded from, whether it has the resident one's bits."""
    for image, reference in zip(arm.get("images", ()), (resident or {}).get("images", ()), strict=False):
        for what in ("latents", "image"):
            if f"{what}_sha256" in image and f"{what}_sha256" in reference:
                image[f"is_{what}_equal"] = image[f"{what}_sha256"] == reference[f"{what}_sha256"]


# ------------------------------------------------------------------------------------------------ the table


COLUMNS = (
    "setup_s",
    "images, s",
    "prompt_and_first_step_s",
    "later_s",
    "decoding_s",
    "bits",
    "errors",
    "OOMs, retries",
)
COLUMNS += (
    "device_peak_bytes",
    "device_reserved_bytes",
    "taken_bytes",
    "stays_bytes",
    "sent_a_step_bytes",
    "rss_peak_bytes",
)


def render(report: Mapping[str, Any]) -> str:
    """A report as Markdown: one row for each arm."""
    scenario = report["scenario"]
    facts = f"{scenario['num_steps']} steps an image; {machine_facts(report, 'diffusers', 'transformers')}."
    rows = {name: row_of(arm) if "images" in arm else arm for name, arm in report["arms"].items()}
    return f"{facts}\n\n{reports.table(rows, COLUMNS, 'images')}"


def row_of(arm: reports.Arm) -> dict[str, Any]:
    """An arm that made images; its times are those of the last one that was made."""
    made = [image for image in arm["images"] if "error" not in image]
    last, failed = made[-1] if made else {}, [image["error"] for image in arm["images"] if "error" in image]
    texts = [f"{error['message'][:80]} ({error['where'][-1]})" for error in failed[:1]]
    row = {
        **arm,
        "images, s": " ".join(
            f"{image['s']:.2f}" if "error" not in image else image["error"]["type"] for image in arm["images"]
        ),
        "decoding_s": last.get("decode"),
        "bits": _bits(arm),
        "errors": "; ".join([*([str(len(failed))] if failed else []), *texts, *filter(None, [arm.get("error")])]),
        "taken_bytes": arm.get("device_taken_bytes") or None,
    }
    if last.get("steps"):
        first, *later = last["steps"]
        row["prompt_and_first_step_s"] = last["encode_prompt"] + first
        row["later_s"] = statistics.median(later) if later else None
        # By a later step. The last number is that of the decoding.
        sent = last.get("sent_bytes", [])[1:-1]
        row["sent_a_step_bytes"] = round(statistics.median(sent)) or None if sent else None
    if arm["images"]:
        row["stays_bytes"] = sum(arm["images"][-1]["resident_bytes"].values()) or None
        if arm.get("device_peak_bytes"):
            row["OOMs, retries"] = "{num_ooms}, {num_alloc_retries}".format_map(arm["images"][-1])
    return row


def _bits(arm: reports.Arm) -> str:
    """Which images differ, and whether their latents do."""
    if not any("is_image_equal" in image for image in arm["images"]):
        return verdict(None)
    differ = [
        f"**{'image' if image['is_latents_equal'] else 'latents'} {at}**"
        for at, image in enumerate(arm["images"], 1)
        if not image.get("is_image_equal", True)
    ]
    return ", ".join(differ) or verdict(True)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter

    def several(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
        return lambda text: [kind(part) for part in text.split(",")]

    option = parser.add_argument
    option("--pipeline", type=several(str), default=["flux"], help=f"of {','.join(WHOLE)} (default flux)")
    option("--free", type=several(float), default=[8.0], help="GiB that are left: 4,8,12 (default 8)")
    option("--images", type=int, default=5, help="default 5")
    option("--size", type=int, help="pixels of an image's sides, or a video's shorter one (default: its own)")
    option("--sizes", type=several(int), metavar="SIZES", help="one for each image, in turn: 512,1024")
    option("--layers", type=float, default=1.0, help="how much of the blocks there is (default 1)")
    option("--lora-after", type=int, metavar="IMAGES", help="load a LoRA after so many images")
    option("--breathe", type=float, default=0, metavar="GIB", help="more is left after image 2, and held again after 4")
    option(
        "--root",
        type=Path,
        default=Path(tempfile.gettempdir()) / "group-offload-card",
        help="folder of the checkpoints, which stay (default: one in the temporary folder)",
    )
    option("--in-ram", action="store_true", help="no checkpoints: each process makes the weights in RAM")
    option("--reference", type=Path, metavar="FILE.json", help="a result whose resident arms are taken")
    option("--commit", help="goes into the result (default: git's)")
    option("--budget-seconds", dest="budget", type=float, default=540, help="after which no arm begins (default 540)")
    add(parser, "device", "arms", "small", steps=8, timeout=240)
