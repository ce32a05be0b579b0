"""Whole pipelines on a card that is full: another process holds the device's memory, but for some GiB.

An arm is an engine and what it is told, joined by "+":

    resident                           all weights on the device, with nothing held: the bits of all others are compared with it
    ours                               this package with the least memory
    ours+auto, ours+budget=7GiB        with a `vram_budget`, and with ram=12GiB a `ram_budget`
    ours+auto+pack, ours+leaf          packed weights, leaf level
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
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import checkpoints, pipeline, processes
from . import report as reports
from .disk import cached_bytes, files_in, read_all, size_of
from .first_image import NUM_THREADS, SHARD_BYTES, Stages, open_pipeline
from .machine import GIB, PeakWatch, forget_device_peak, process_memory, sha256, start_device, synchronize
from .options import add
from .pipelines import WHOLE, Pipeline
from .processes import ask, say, tell, tell_so_far
from .report import gib, machine_facts, seconds, verdict

CHUNK_BYTES, GRAIN_BYTES = 512 << 20, 32 << 20
"""What is held consists of such pieces. The last one is a multiple of the grain: torch's allocator rounds none of them up."""
LORA_RANK = 16
DEFAULTS = ("resident", "ours", "ours+auto", "ours+auto+pack", "diffusers")
_THEIRS = {"offload_type": "leaf_level", "use_stream": True, "record_stream": True}
_PARTS: dict[str, dict[str, Any]] = {
    "auto": {"vram_budget": "auto"},
    "pack": {"pack": True},
    "leaf": {"offload_type": "leaf_level"},
    "block": {"offload_type": "block_level", "num_blocks_per_group": 1},
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
        self._child.send(json.dumps({"is_ballast": True, "device": device, "measures_machine": False}))

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
        tell("held", {"held_bytes": held, "free_bytes": torch.cuda.mem_get_info(device)[0]})


# ------------------------------------------------------------------------------------------------ one arm: the child


class Card:
    """The device, as far as the ballast leaves it to this process. It is made before this process uses the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free = ask(0)["free_bytes"] if device.type == "cuda" else 0
        self.left_bytes = self._free

    def leave(self, num_bytes: int | None) -> None:
        """Let the ballast leave so much, the context of this process included. None: all."""
        if self._device.type == "cuda":
            held = ask(0 if num_bytes is None else max(0, self._free - num_bytes))["held_bytes"]
            self.left_bytes = self._free - held

    def taken_bytes(self) -> int:
        """What this process has of the device, as the driver sees it."""
        return self.left_bytes - torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else 0


class Watched(Stages):
    """The stages of an image, with the bytes that each step sends and what this process takes of the device."""

    def __init__(self, pipe: Any, device: torch.device, card: Card, handles: Mapping[str, Any]) -> None:
        super().__init__(pipe, device)
        self._card, self._handles = card, handles
        self.begin_image()

    def begin_image(self) -> None:
        self.seconds, self.taken_bytes, self._sent = {}, 0, self._sent_so_far()
        self.sent_bytes: list[int] = []
        self.outputs: dict[str, torch.Tensor] = {}

    def _timed(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = super()._timed(name, call, *args, **kwargs)
        if name == "decode":
            self.outputs["image"] = result[0]  # what comes of it has few bits: random weights make a grey image
        return result

    def end_step(self, pipe: Any, number: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        super().end_step(pipe, number, timestep, tensors)
        self.outputs["latents"] = tensors["latents"]
        self.look()
        self._last = self._now()
        return tensors

    def look(self) -> None:
        """Note what was sent since the last time. The first step's is that of the text encoders, too."""
        before, self._sent = self._sent, self._sent_so_far()
        self.sent_bytes.append(self._sent - before)
        self.taken_bytes = max(self.taken_bytes, self._card.taken_bytes())

    def _sent_so_far(self) -> int:
        return sum(sum(handle.stats().bytes_onloaded.values()) for handle in self._handles.values())


def run_arm(job: Mapping[str, Any], whole: Pipeline, device: torch.device, begin: Callable[[], None]) -> dict[str, Any]:
    """Times are seconds, sizes are bytes."""
    # As users have it: which algorithms cuDNN takes where memory is short is part of what is measured.
    torch.backends.cudnn.deterministic = False
    arm, card = arm_of(job["arm"]), Card(device)
    start_device(device)
    start = time.perf_counter()
    pipe = whole.make(device) if job["folder"] is None else open_pipeline(whole, Path(job["folder"]))
    loaded = time.perf_counter() - start
    forget_device_peak(device)
    begin()
    card.leave(job["free_bytes"])
    result: dict[str, Any] = {"load_s": loaded, "left_bytes": card.left_bytes, "images": []}
    with PeakWatch(device) as peaks:
        start = time.perf_counter()
        handles = pipeline.place(pipe, arm.engine, arm.options, device)
        synchronize(device)
        result["setup_s"] = time.perf_counter() - start
        say(f"opened in {loaded:.1f} s, set up in {result['setup_s']:.1f} s")
        stages = Watched(pipe, device, card, handles)
        for number in range(job["num_images"]):
            if job["breathes_bytes"] and number in (2, 4):
                card.leave(job["free_bytes"] + (job["breathes_bytes"] if number == 2 else 0))
            if job["sizes"]:
                whole.ask_for(job["sizes"][number % len(job["sizes"])])
            image = _make_image(pipe, whole, stages, job["num_steps"], has_new_lora=number == job["lora_after"])
            image |= {"left_bytes": card.left_bytes, "taken_bytes": stages.taken_bytes, **_allocator(device)}
            image["resident_bytes"] = {name: handle.stats().resident_bytes for name, handle in handles.items()}
            result["images"].append(image)
            say(f"{image['s']:.2f} s{' ' * ('error' in image)}{image.get('error', {}).get('message', '')}")
            tell_so_far({**result, **process_memory()})
    result |= {"device_peak_bytes": peaks.allocated, "device_reserved_bytes": peaks.reserved, **process_memory()}
    result["device_taken_bytes"] = max(image["taken_bytes"] for image in result["images"])
    if job["measures_machine"]:
        card.leave(None)  # the link's speed is measured with buffers
    return result


def _make_image(pipe: Any, whole: Pipeline, stages: Watched, num_steps: int, *, has_new_lora: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    stages.begin_image()
    start = time.perf_counter()
    try:
        if has_new_lora:
            pipe.load_lora_weights(_make_lora(pipe, whole.denoisers[0]), adapter_name="one")
            found["lora_s"] = time.perf_counter() - start
            start = time.perf_counter()
        whole.call(pipe, num_steps, stages.end_step)
        synchronize(stages.device)
        found["s"] = time.perf_counter() - start
        stages.look()
        outputs = {name: output.cpu() for name, output in stages.outputs.items()}
        stages.outputs.clear()
        found |= {f"{name}_sha256": sha256(output) for name, output in outputs.items()}
        found |= {"is_finite": bool(outputs["image"].isfinite().all()), "shape": list(outputs["image"].shape)}
    except Exception as error:  # the next image may come out all the same
        found |= {"s": time.perf_counter() - start, "error": _describe(error, stages.device)}
    return {**found, **stages.seconds, "sent_bytes": stages.sent_bytes}


def _describe(error: Exception, device: torch.device) -> dict[str, Any]:
    """What was wrong, where, and what torch's allocator had then."""
    frames = traceback.extract_tb(error.__traceback__)[-14:]
    names = ("allocated_bytes", "reserved_bytes", "inactive_split_bytes")
    return {
        "type": type(error).__name__,
        "message": " ".join(str(error).split())[:400],
        "notes": [note[:400] for note in getattr(error, "__notes__", ())],
        "where": [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames],
        **_allocator(device, *(f"{name}.all.current" for name in names)),
    }


def _allocator(device: torch.device, *names: str) -> dict[str, int]:
    """Numbers of torch's allocator. How often an allocation failed counts those that somebody caught, as cuDNN does."""
    stats = {} if device.type == "cpu" else getattr(torch, device.type).memory_stats(device)
    return {name.partition(".")[0]: stats.get(name, 0) for name in names or ("num_ooms", "num_alloc_retries")}


def _make_lora(pipe: Any, denoiser: str) -> dict[str, torch.Tensor]:
    """A random LoRA of the attention's projections, as `load_lora_weights` takes it."""
    generator = torch.Generator().manual_seed(1)
    lora: dict[str, torch.Tensor] = {}
    for name, layer in getattr(pipe, denoiser).named_modules():
        if name.endswith(("to_q", "to_k", "to_v")):
            for side, shape in (("A", (LORA_RANK, layer.in_features)), ("B", (layer.out_features, LORA_RANK))):
                values = torch.randn(shape, generator=generator) / 20
                lora[f"{denoiser}.{name}.lora_{side}.weight"] = values.to(torch.bfloat16)
    return lora


def work(job: dict[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """What a child process does with its job."""
    device = torch.device(job["device"])
    if job.get("is_ballast"):
        _hold(device)
        return {}
    whole = _pipeline(job["pipeline"], job)
    if job["arm"] is not None:
        return run_arm(job, whole, device, begin)
    for name, model in whole.models.items():
        checkpoints.save(model, device, Path(job["folder"]) / name, SHARD_BYTES)
    return {}


def preload() -> None:
    from diffusers import QwenImagePipeline, StableDiffusionXLPipeline  # noqa: F401

    pipeline.preload()


# ------------------------------------------------------------------------------------------------ all arms: the parent


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
    report = reports.new(
        "card",
        options,
        model={"name": "-".join([*(["small"] if options.small else []), *options.pipeline])},
        models={
            name: {each: model.facts() for each, model in _pipeline(name, scenario).models.items()}
            for name in options.pipeline
        },
        scenario=scenario,
        is_in_ram=options.in_ram,
        commit=options.commit or _commit(),
    )
    if options.reference is not None:
        _refer(report, json.loads(options.reference.read_text()))
    frees = [round(GIB * float(free)) for free in options.free] if options.device == "cuda" else [None]
    cases = [
        (name, free, spec)
        for name in options.pipeline
        for free in (None, *frees)
        for spec, arm in arms.items()
        # The resident one once, with nothing held.
        if ((arm.engine == "resident") == (free is None) or frees == [None])
    ]
    cases = [case for case in dict.fromkeys(cases) if _name(*case) not in report["arms"]]
    folders = {name: None if options.in_ram else _checkpoint(name, options, scenario) for name in options.pipeline}
    options.budget -= time.monotonic() - started
    ballast = Ballast(options.device) if options.device == "cuda" else None
    relay = processes.Relay(
        report,
        options,
        len(cases),
        environments=[arms[spec].environment for _, _, spec in cases],
        answer=None if ballast is None else ballast.hold,
    )
    for name, free, spec in cases:
        folder, breathes = folders[name], round(GIB * options.breathe) if free else 0
        facts = {"pipeline": name, "free_bytes": free, "arm": spec, "breathes_bytes": breathes}
        job = {**scenario, **facts, "folder": None if folder is None else str(folder)}
        relay.run(_name(name, free, spec), job, facts=facts, before=partial(_warm, folder))
        done = report["arms"][_name(name, free, spec)]
        _compare(done, report["arms"].get(_name(name, None, "resident")))
        relay.write()
        cells = [column(done) for column in COLUMNS.values()] if "images" in done else [done["error"]]
        print(" | ".join([_name(name, free, spec), *filter(None, cells)]), flush=True)
    if ballast is not None:
        ballast.end()
    return relay.end()


def _pipeline(name: str, scenario: Mapping[str, Any]) -> Pipeline:
    whole = WHOLE[name](small=scenario["small"])
    whole.thin_out(scenario["layers"])
    return whole


def _name(name: str, free: int | None, spec: str) -> str:
    return f"{name} {spec}" if free is None else f"{name}, {free / GIB:g} GiB, {spec}"


def _commit() -> str | None:
    """That of the code, if it is in a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _refer(report: dict[str, Any], earlier: Mapping[str, Any]) -> None:
    """Take the resident arms of an earlier result in place of running them."""
    if earlier["scenario"] != report["scenario"]:
        raise SystemExit(f"--reference: it was measured with {earlier['scenario']}, not {report['scenario']}.")
    report["arms"] |= {name: arm for name, arm in earlier["arms"].items() if arm["arm"] == "resident"}


def _checkpoint(name: str, options: argparse.Namespace, scenario: Mapping[str, Any]) -> Path:
    """The folder of the pipeline's models, which are written if they are not there."""
    parts = (name, *(["small"] if options.small else []), *([f"{options.layers:g}"] if options.layers != 1 else []))
    folder: Path = options.root / "-".join(parts)
    if not (folder / "done").exists():
        job = {**scenario, "pipeline": name, "arm": None, "folder": str(folder)}
        job |= {"device": options.device, "measures_machine": False}
        failed = processes.Child("card").run(job, options.timeout).get("error")
        if failed is not None:
            raise SystemExit(f"The checkpoints of {name} could not be saved, see --in-ram: {failed}")
        (folder / "done").touch()
    return folder


def _warm(folder: Path | None) -> None:
    """Bring the files into the page cache."""
    files = [file for each in folder.iterdir() if each.is_dir() for file in files_in(each)] if folder else []
    if files and (cached_bytes(files) or 0) < size_of(files):  # or the kernel does not tell
        read_all(files, NUM_THREADS, direct=False)


def _compare(arm: dict[str, Any], resident: Mapping[str, Any] | None) -> None:
    """Say of each image, and of the latents that it was decoded from, whether it has the resident one's bits."""
    for image, reference in zip(arm.get("images", ()), (resident or {}).get("images", ()), strict=False):
        for what in ("latents", "image"):
            if f"{what}_sha256" in image and f"{what}_sha256" in reference:
                image[f"is_{what}_equal"] = image[f"{what}_sha256"] == reference[f"{what}_sha256"]


# ------------------------------------------------------------------------------------------------ the table


def render(report: Mapping[str, Any]) -> str:
    """A report as Markdown: one row for each arm."""
    scenario = report["scenario"]
    facts = f"{scenario['num_steps']} steps an image; {machine_facts(report, 'diffusers', 'transformers')}."
    return f"{facts}\n\n{reports.table(report['arms'], COLUMNS, 'images')}"


def _bits(arm: Mapping[str, Any]) -> str:
    """Which images differ, and whether their latents do."""
    images = [image for image in arm["images"] if "is_image_equal" in image]
    if not images:
        return verdict(None)
    differ = {
        str(at): "image" if image["is_latents_equal"] else "latents"
        for at, image in enumerate(arm["images"], 1)
        if not image.get("is_image_equal", True)
    }
    return ", ".join(f"**{what} {at}**" for at, what in differ.items()) or verdict(True)


def _errors(arm: Mapping[str, Any]) -> str:
    found = [image["error"] for image in arm["images"] if "error" in image]
    texts = [f"{error['message'][:80]} ({error['where'][-1]})" for error in found[:1]]
    return "; ".join([*([str(len(found))] if found else []), *texts, *([arm["error"]] if "error" in arm else [])])


def _last(arm: Mapping[str, Any]) -> Mapping[str, Any]:
    """The last image that was made."""
    return next((image for image in reversed(arm["images"]) if "error" not in image), {})


def _median(values: list[Any]) -> float | None:
    return statistics.median(values) if values else None


def _first_step(image: Mapping[str, Any]) -> str:
    return seconds(image["encode_prompt"] + image["steps"][0]) if image.get("steps") else ""


def _sent(image: Mapping[str, Any]) -> str:
    """In a later step. The last number is that of the decoding."""
    sent = _median(image.get("sent_bytes", [])[1:-1])
    return gib(round(sent)) if sent else ""


COLUMNS: reports.Columns = {
    "set-up": lambda arm: f"{arm['setup_s']:.1f} s" if "setup_s" in arm else "",
    "images, s": lambda arm: " ".join(
        f"{image['s']:.2f}" if "error" not in image else image["error"]["type"] for image in arm["images"]
    ),
    "prompt and first step": lambda arm: _first_step(_last(arm)),
    "later": lambda arm: seconds(_median(_last(arm).get("steps", [])[1:])),
    "decoding": lambda arm: seconds(_last(arm).get("decode")),
    "bits": _bits,
    "errors": _errors,
    "OOMs, retries": lambda arm: (
        "{num_ooms}, {num_alloc_retries}".format_map(arm["images"][-1]) if arm.get("device_peak_bytes") else ""
    ),
    "peak": lambda arm: gib(arm.get("device_peak_bytes")),
    "reserved": lambda arm: gib(arm.get("device_reserved_bytes")),
    "taken": lambda arm: gib(arm.get("device_taken_bytes") or None),
    "stays": lambda arm: gib(sum(arm["images"][-1]["resident_bytes"].values()) or None) if arm["images"] else "",
    "sent a step": lambda arm: _sent(_last(arm)),
    "RSS peak": lambda arm: gib(arm.get("rss_peak_bytes")),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter

    def several(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
        return lambda text: [kind(part) for part in text.split(",")]

    pipelines = ",".join(WHOLE)
    parser.add_argument("--pipeline", type=several(str), default=["flux"], help=f"of {pipelines} (default flux)")
    parser.add_argument("--free", type=several(float), default=[8.0], help="GiB that are left: 4,8,12 (default 8)")
    parser.add_argument("--images", type=int, default=5, help="default 5")
    parser.add_argument(
        "--size", type=int, help="pixels of an image's sides, or a video's shorter one (default: its own)"
    )
    parser.add_argument("--sizes", type=several(int), metavar="SIZES", help="one for each image, in turn: 512,1024")
    parser.add_argument("--layers", type=float, default=1.0, help="how much of the blocks there is (default 1)")
    parser.add_argument("--lora-after", type=int, metavar="IMAGES", help="load a LoRA after so many images")
    parser.add_argument(
        "--breathe", type=float, default=0, metavar="GIB", help="more is left after image 2, and held again after 4"
    )
    parser.add_argument(
        "--root",
        type=Path,
        default=Path(tempfile.gettempdir()) / "group-offload-card",
        help="folder of the checkpoints, which stay (default: one in the temporary folder)",
    )
    parser.add_argument("--in-ram", action="store_true", help="no checkpoints: each process makes the weights in RAM")
    parser.add_argument("--reference", type=Path, metavar="FILE.json", help="a result whose resident arms are taken")
    parser.add_argument("--commit", help="goes into the result (default: git's)")
    parser.add_argument("--budget-seconds", dest="budget", type=float, default=540, help="after which no arm begins")
    add(parser, "device", "arms", "small", steps=8, timeout=240)
