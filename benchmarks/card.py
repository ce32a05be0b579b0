"""Whole pipelines on a card that is full: another process holds the device's memory, but for some GiB.

An arm is an engine and what it is told, joined by "+":

    resident                           all weights on the device, with nothing held: the bits of all others are compared with it
    ours                               this package with the least memory
    ours+auto, ours+budget=7GiB        with a `vram_budget`, and with ram=12GiB a `ram_budget`
    ours+auto+compress, ours+leaf          compressed weights, leaf level
    ours+checkpoint                    weights stay in the files
    ours+interleave                         the calls of a step of guidance share passes
    diffusers, diffusers+block         diffusers' group offloading with streams: leaf level, or block level
    model, sequential                  diffusers' model offloading, and accelerate's of single layers

"+expand" and "+noexpand" switch expandable segments of torch's allocator on or off, by the environment.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import disk, pipeline, processes
from . import report as reports
from .arms import choose
from .machine import GIB, start_device
from .options import add
from .pipeline import render  # noqa: F401
from .pipelines import PIPELINES, Pipeline

CHUNK_BYTES, GRAIN_BYTES = 512 << 20, 32 << 20
"""What is held consists of such pieces. The last one is a multiple of the grain: torch's allocator rounds none of them up."""
DEFAULTS = ("resident", "ours", "ours+auto", "ours+auto+compress", "diffusers")


# ------------------------------------------------------------------------------------------------ the ballast


class Ballast:
    """The process that holds the device's memory. It ends with this one: it reads what it is to hold from a pipe."""

    def __init__(self, device: str) -> None:
        self._child = processes.Child("card")
        self._child.send({"is_ballast": True, "device": device})

    def hold(self, num_bytes: int) -> dict[str, int]:
        """Let it hold so much, or what it can get. Returns what it holds, and what is free for all others together."""
        self._child.send(num_bytes)
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


def work(job: dict[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """What a child process does with its job."""
    device = torch.device(job["device"])
    if job.get("is_ballast"):
        _hold(device)
        return {}
    # As users have it: which algorithms cuDNN takes where memory is short is part of what is measured.
    torch.backends.cudnn.deterministic = False
    result = pipeline.make_images(job, begin, pipeline.Card(device, is_full=device.type == "cuda"))
    return {**result, "device_taken_bytes": max(image["taken_bytes"] for image in result["images"])}


# ------------------------------------------------------------------------------------------------ the parent


def run(options: argparse.Namespace) -> Path | None:
    """For each pipeline its resident arm, then all others for each size that is left. Returns the file with the results."""
    started = time.monotonic()
    arms = choose(options.arms or DEFAULTS, options.device)
    if unknown := set(options.pipeline) - set(PIPELINES):
        raise SystemExit(f"No pipeline {sorted(unknown)}. Pipelines: {', '.join(PIPELINES)}.")
    scenario = {
        "small": options.small,
        "layers": options.layers,
        "sizes": options.sizes or ([options.size] if options.size else []),
        "num_steps": options.steps,
        "num_images": options.images,
        "lora_after": options.lora_after,
    }
    models = {name: Pipeline(name, small=options.small, layers=options.layers).models for name in options.pipeline}
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
    jobs: dict[str, processes.Job] = {}
    for name, parts in models.items():
        folder = None if options.in_ram else _checkpoint(name, parts, options)
        files = [file for part in parts for file in disk.files_in(folder / part)] if folder else []
        for free in (None, *frees):
            for arm in arms:
                # The resident one once, with nothing held.
                title = f"{name} {arm.name}" if free is None else f"{name}, {free / GIB:g} GiB, {arm.name}"
                is_its_turn = (arm.engine == "resident") == (free is None) or frees == [None]
                if is_its_turn and title not in report["arms"] and title not in jobs:
                    breathes = round(GIB * options.breathe) if free else 0
                    facts = {"pipeline": name, "free_bytes": free, "arm": arm.name, "breathes_bytes": breathes}
                    task = {**scenario, **facts, "folder": folder and str(folder), "is_warmed_up": False}
                    task |= {
                        "engine": arm.engine,
                        "options": arm.options,
                        "is_traced": options.trace and free is not None,
                    }
                    jobs[title] = processes.Job(name=title, task=task, facts=facts, environment=arm.environment)
                    jobs[title].before = partial(disk.read_all, files, direct=False)
    options.budget -= time.monotonic() - started
    ballast = Ballast(options.device) if options.device == "cuda" else None
    if ballast is not None:
        for job in jobs.values():
            job.answer = ballast.hold
    relay = processes.Relay(report, options, [*jobs.values()])
    for job, done in relay:
        pipeline.compare(done, report["arms"].get(f"{done['pipeline']} resident", {}))
        row = {"errors": done.get("error"), **pipeline.row_of(done)}
        cells = [reports.shown(key, row.get(key)) for key in pipeline.COLUMNS]
        print(" | ".join([job.name, *filter(None, cells)]), flush=True)
    if ballast is not None:
        ballast.end()
    return relay.path


def _commit() -> str | None:
    """That of the code, if it is in a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    with suppress(OSError):  # no git
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    return None


def _checkpoint(name: str, models: Mapping[str, Any], options: argparse.Namespace) -> Path:
    """The folder of the pipeline's models, which are written if they are not there."""
    parts = (name, *(["small"] if options.small else []), *([f"{options.layers:g}"] if options.layers != 1 else []))
    folder: Path = options.root / "-".join(parts)
    disk.make_checkpoints({folder / part: model for part, model in models.items()}, options.device)
    return folder


def add_options(parser: argparse.ArgumentParser) -> None:
    def several(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
        return lambda text: [kind(part) for part in text.split(",")]

    option = parser.add_argument
    option("--pipeline", type=several(str), default=["flux"], help=f"of {','.join(PIPELINES)} (default flux)")
    option("--free", type=several(float), default=[8.0], help="GiB that are left: 4,8,12 (default 8)")
    option("--images", type=int, default=5, help="default 5")
    option("--size", type=int, help="pixels of an image's sides, or a video's shorter one (default: its own)")
    option("--sizes", type=several(int), metavar="SIZES", help="one for each image, in turn: 512,1024")
    option("--layers", type=float, default=1.0, help="how much of the blocks there is (default 1)")
    option("--lora-after", type=int, metavar="IMAGES", help="load a LoRA after so many images")
    option("--breathe", type=float, default=0, metavar="GIB", help="more is left after image 2, and held again after 4")
    option("--trace", action="store_true", help="tell what compute waits for in the first steps of images 1 and 2")
    root = Path(tempfile.gettempdir()) / "group-offload-card"
    option("--root", type=Path, default=root, help="folder of the checkpoints, which stay (default %(default)s)")
    option("--in-ram", action="store_true", help="no checkpoints: each process makes the weights in RAM")
    option("--reference", type=Path, metavar="FILE.json", help="a result whose resident arms are taken")
    option("--commit", help="goes into the result (default: git's)")
    option("--budget-seconds", dest="budget", type=float, default=540, help="after which no arm begins (default 540)")
    add(parser, "device", "arms", "small", steps=8, timeout=240)
