"""A whole pipeline: how long each part of each image takes, what moves for it, its bits, and the device's peak.

With `--from-files` weights are files, and behind an arm may stand ", cold" (nothing of the files is in the page cache),
", 4 steps", and " @12GiB", so much RAM for the process, what it has in the page cache included:
"ours+checkpoint, cold, 4 steps @12GiB". An arm that is warm makes two images.
"""

from __future__ import annotations

import argparse
import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import disk, gaps, machine
from . import report as reports
from .arms import apply_to_pipeline, choose
from .options import add
from .pipelines import PIPELINES, Pipeline
from .processes import Job, Relay, ask, tell

LORA_RANK = 16
# The most telling ones first: a run that is cut short has them.
ARMS = ("resident", "ours", "ours+leaf", "ours+auto", "diffusers", "diffusers+block", "model")
CASES = (
    # The files are in the page cache once they are written, so those come first that find them there.
    *(f"{arm}, 4 steps" for arm in ("resident", "ours+checkpoint", "model", "diffusers+block")),
    *(f"ours+checkpoint, {how}" for how in ("cold, 4 steps", "cold, 4 steps @12GiB", "28 steps", "cold, 28 steps")),
    *("resident, 28 steps", "model, cold, 4 steps", "diffusers+block, cold, 4 steps"),
)


# ------------------------------------------------------------------------------------------------ the child


class Card:
    """The device. If it `is_full`, another process leaves some of its memory; then it is made before the device is used."""

    def __init__(self, device: torch.device, *, is_full: bool = False) -> None:
        self._device, self._is_full, self._taken = device, is_full, 0
        self._free = self._left = ask(0)["free_bytes"] if is_full else 0

    def leave(self, num_bytes: int | None) -> None:
        """Let this process have so much of it, its context included. None: all."""
        if self._is_full:
            self._left = self._free - ask(0 if num_bytes is None else max(0, self._free - num_bytes))["held_bytes"]

    def look(self) -> None:
        """Note what this process has taken of it, as the driver sees it. Called after each step."""
        if self._is_full:
            self._taken = max(self._taken, self._left - torch.cuda.mem_get_info(self._device)[0])

    def facts(self) -> dict[str, Any]:
        """What is left of it for this process, and the most that was taken since the last time."""
        taken, self._taken = self._taken, 0
        return {"left_bytes": self._left, "taken_bytes": taken}


class Stages:
    """How long each part of an image takes, waits for its weights included: the prompt, each step, the decoding."""

    def __init__(self, pipe: Any, device: torch.device, handles: Mapping[str, Any], card: Card) -> None:
        self._device, self._handles, self._card = device, handles, card
        for owner, name in ((pipe, "encode_prompt"), (pipe.vae, "decode")):
            setattr(owner, name, partial(self._timed, name, getattr(owner, name)))
        # Hooks of a model run when its first weights are on their way already. The loop begins with its progress bar.
        self._progress_bar, pipe.progress_bar = pipe.progress_bar, self._begin_steps
        self.trace: gaps.Trace | None = None
        self.begin()

    def begin(self) -> None:
        """Of an image."""
        self._seconds: dict[str, float] = {}
        self._steps: list[float] = []
        self._sent_bytes: list[int] = []
        self.outputs: dict[str, torch.Tensor] = {}
        self._start = 0.0
        self._sent, self._drive = self._sent_so_far(), disk.transferred().get("read_bytes", 0)

    def end(self) -> dict[str, Any]:
        """ "sent_bytes" go to the device: by each step and, last, by the decoding. The first step's are the encoders', too."""
        self._look()
        disk_bytes = disk.transferred().get("read_bytes", 0) - self._drive
        found = {**self._seconds, "steps": self._steps, "sent_bytes": self._sent_bytes, "disk_bytes": disk_bytes}
        return found if self.trace is None else {**found, "trace": self.trace.facts}

    def end_step(self, pipe: Any, number: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        """The pipeline's `callback_on_step_end`."""
        self._steps.append(self._now() - self._start)
        if self.trace is not None:
            self.trace.end_step()
        self.outputs["latents"] = tensors["latents"]
        self._look()
        self._start = self._now()
        return tensors

    def _begin_steps(self, *args: Any, **kwargs: Any) -> Any:
        bar = self._progress_bar(*args, **kwargs)
        self._start = self._now()
        return bar

    def _timed(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = self._now()
        result = call(*args, **kwargs)
        self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - start
        if name == "decode":
            self.outputs["image"] = result[0]  # what comes of it has few bits: random weights make a grey image
        return result

    def _now(self) -> float:
        machine.wait_for_output(self._device)
        return time.perf_counter()

    def _look(self) -> None:
        before, self._sent = self._sent, self._sent_so_far()
        self._sent_bytes.append(self._sent - before)
        self._card.look()

    def _sent_so_far(self) -> int:
        return sum(sum(handle.stats().bytes_onloaded.values()) for handle in self._handles.values())


def make_images(job: Mapping[str, Any], begin: Callable[[], None], card: Card) -> dict[str, Any]:
    """Times are seconds, sizes are bytes. What fails is in the image's "error": the next one may come out all the same.

    Args:
        job: "pipeline", "small", "layers": the pipeline; "folder": that of its models, or None; "engine", "options": how it
            is placed; "num_steps", "num_images"; "sizes", "lora_after", "free_bytes", "breathes_bytes": what changes between
            images, if anything does; "is_warmed_up": whether kernels are loaded before; "is_traced": whether to trace the
            first steps of the first two images.
    """
    nothing: dict[str, Any] = {"sizes": [], "lora_after": None, "free_bytes": None, "breathes_bytes": 0, "layers": 1.0}
    job = {**nothing, "is_traced": False, **job}
    device, whole = torch.device(job["device"]), Pipeline(job["pipeline"], small=job["small"], layers=job["layers"])
    machine.start_device(device)
    if job["is_warmed_up"]:
        # One block of each kind runs the same kernels, which are loaded when they are first used.
        thin = Pipeline(job["pipeline"], small=job["small"], layers=0)
        thin.call(thin.make(device, None).to(device), 1, lambda pipe, number, timestep, tensors: tensors)
        machine.forget_device_peak(device)
    folder = None if job["folder"] is None else Path(job["folder"])
    pipe = whole.make(device, None) if folder is None else None
    machine.forget_device_peak(device)
    begin()
    card.leave(job["free_bytes"])
    with machine.PeakWatch(device) as setting_up:
        start = time.perf_counter()
        pipe = pipe or whole.make(device, folder)
        handles = apply_to_pipeline(job["engine"], pipe, device, job["options"])
        machine.synchronize(device)
        result: dict[str, Any] = {"setup_s": time.perf_counter() - start, **card.facts(), "images": []}
    machine.say(f"set up in {result['setup_s']:.1f} s")
    stages = Stages(pipe, device, handles, card)
    if job["is_warmed_up"] and folder is None:
        # From files, and on a full card, nothing comes between the set-up and a user's first image.
        machine.forget_device_peak(device)
    with machine.PeakWatch(device) as running:
        for number in range(job["num_images"]):
            if job["breathes_bytes"] and number in (2, 4):
                card.leave(job["free_bytes"] + (job["breathes_bytes"] if number == 2 else 0))
            if job["sizes"]:
                whole.ask_for(job["sizes"][number % len(job["sizes"])])
            stages.trace = gaps.Trace() if job["is_traced"] and number < 2 else None
            image = _make_image(pipe, whole, stages, job["num_steps"], number == job["lora_after"], device)
            # How often an allocation failed counts those that somebody caught, as cuDNN does.
            counts = {name: machine.allocator(device, name) or 0 for name in ("num_ooms", "num_alloc_retries")}
            image |= {**card.facts(), **counts}
            image["resident_bytes"] = {name: handle.stats().resident_bytes for name, handle in handles.items()}
            result["images"].append(image)
            machine.say(f"{image['s']:.2f} s{' ' * ('error' in image)}{image.get('error', {}).get('message', '')}")
            tell("so far", {**result, **machine.process_memory()})
    peaks = [peak for peak in (setting_up.allocated, running.allocated) if peak is not None]
    card.leave(None)  # whoever measures the machine then needs buffers
    return {
        **result,
        "device_peak_bytes": max(peaks, default=None),
        "device_reserved_bytes": running.reserved,
        **machine.process_memory(),
    }


def _make_image(
    pipe: Any, whole: Pipeline, stages: Stages, num_steps: int, has_new_lora: bool, device: torch.device
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    stages.begin()
    start = time.perf_counter()
    try:
        if has_new_lora:
            pipe.load_lora_weights(_make_lora(pipe, whole.denoiser), adapter_name="one")
            found["lora_s"] = time.perf_counter() - start
            start = time.perf_counter()
        whole.call(pipe, num_steps, stages.end_step)
        machine.synchronize(device)
        found["s"] = time.perf_counter() - start
        found |= stages.end()
        outputs = {name: output.cpu() for name, output in stages.outputs.items()}
        found |= {f"{name}_sha256": machine.sha256(output) for name, output in outputs.items()}
        found |= {"is_finite": bool(outputs["image"].isfinite().all()), "shape": list(outputs["image"].shape)}
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[-14:]
        found["error"] = {
            "type": type(error).__name__,
            "message": " ".join(str(error).split())[:400],
            "where": [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames],
            **{
                f"{name}_bytes": machine.allocator(device, f"{name}_bytes.all.current") or 0
                for name in ("allocated", "reserved", "inactive_split")
            },
        }
        found = {"s": time.perf_counter() - start, **found, **stages.end()}
    stages.outputs.clear()
    return found


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


# ------------------------------------------------------------------------------------------------ the parent


def work(job: dict[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """What a child process does with its job."""
    return make_images(job, begin, Card(torch.device(job["device"])))


def run(options: argparse.Namespace) -> Path | None:
    """Run the arms. Returns the file with the results, if there are any."""
    arms = choose(options.arms or (CASES if options.from_files else ARMS), options.device)
    models = Pipeline(options.pipeline, small=options.small).models
    parts = ("small" * options.small, options.pipeline, "first-image" * options.from_files)
    facts = {name: model.facts() for name, model in models.items()}
    report = reports.new("pipeline", options, model={"name": "-".join(filter(None, parts))}, models=facts, drive=[])
    task = {"pipeline": options.pipeline, "small": options.small, "folder": None, "is_warmed_up": True}
    with ExitStack() as stack:
        files = []
        if options.from_files:
            folder = stack.enter_context(disk.checkpoint_folder(options))
            task["folder"] = str(folder)
            disk.make_checkpoints({folder / name: model for name, model in models.items()}, options.device)
            files = [file for name in models for file in disk.files_in(folder / name)]
        jobs = []
        for arm in arms:
            facts = {**asdict(arm), "num_steps": arm.num_steps or options.steps}
            job = Job(name=arm.name, task={**task, **facts}, facts=facts, ram_limit_bytes=arm.ram_limit_bytes)
            # A second image finds the page cache as the first one has left it, which says most where RAM is scarce.
            job.task["num_images"] = 1 if arm.is_cold and arm.ram_limit_bytes is None else 2
            job.environment, job.before = arm.environment, partial(disk.read_all, files, direct=False)
            if arm.is_cold:
                job.prepare = partial(disk.measure_drive, files, report["drive"], at_most=1)
                job.before = partial(disk.drop_page_cache, files, may_drop_all=not options.small)
            jobs.append(job)
        relay = Relay(report, options, jobs)
        for job, result in relay:
            residents = [arm for arm in report["arms"].values() if arm["engine"] == "resident"]
            compare(result, next((arm for arm in residents if arm["num_steps"] == result["num_steps"]), {}))
            if job is jobs[-1] and report["drive"]:
                disk.measure_drive(files, report["drive"])
    return relay.path


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pipeline", choices=PIPELINES, default="flux", help="default flux")
    parser.add_argument("--from-files", action="store_true", help="time to the first image, weights in files")
    add(parser, "device", "arms", "list", "small", "budget", "disk", "checkpoint", steps=10, timeout=150)


# ------------------------------------------------------------------------------------------------ the table


COLUMNS = (
    *("setup_s", "images, s", "prompt_and_first_step_s", "later_s", "decoding_s", "bits", "errors", "OOMs, retries"),
    *("device_peak_bytes", "device_reserved_bytes", "taken_bytes", "stays_bytes", "sent_a_step_bytes"),
    *("from_the_drive_bytes", "rss_bytes", "rss_peak_bytes"),
)


def compare(arm: Mapping[str, Any], resident: Mapping[str, Any]) -> None:
    """Say of each image, and of the latents that it was decoded from, whether it has the resident one's bits."""
    for image, reference in zip(arm.get("images", ()), resident.get("images", ()), strict=False):
        for what in ("latents", "image"):
            if f"{what}_sha256" in image and f"{what}_sha256" in reference:
                image[f"is_{what}_equal"] = image[f"{what}_sha256"] == reference[f"{what}_sha256"]


def render(report: Mapping[str, Any]) -> str:
    rows = {name: row_of(arm) for name, arm in report["arms"].items()}
    return reports.render(report, COLUMNS, rows, "images")


def row_of(arm: reports.Arm) -> dict[str, Any]:
    """An arm that made images; its times are those of the last one that was made."""
    if "images" not in arm:
        return dict(arm)
    images = arm["images"]
    made = [image for image in images if "error" not in image]
    last, failed = made[-1] if made else {}, [image["error"] for image in images if "error" in image]
    texts = [f"{error['message'][:80]} ({error['where'][-1]})" for error in failed[:1]]
    row = {
        **arm,
        "images, s": " ".join(
            f"{image['s']:.2f}" if "error" not in image else image["error"]["type"] for image in images
        ),
        "decoding_s": last.get("decode"),
        "bits": _bits(arm),
        "errors": "; ".join([*([str(len(failed))] if failed else []), *texts, *filter(None, [arm.get("error")])]),
        "taken_bytes": arm.get("device_taken_bytes") or None,
        "from_the_drive_bytes": images[0].get("disk_bytes") or None if images else None,
    }
    if last.get("steps"):
        first, *later = last["steps"]
        row["prompt_and_first_step_s"] = last["encode_prompt"] + first
        row["later_s"] = statistics.median(later) if later else None
        # By a later step. The last number is that of the decoding.
        sent = last.get("sent_bytes", [])[1:-1]
        row["sent_a_step_bytes"] = round(statistics.median(sent)) or None if sent else None
    if images:
        row["stays_bytes"] = sum(images[-1].get("resident_bytes", {}).values()) or None
        if "num_ooms" in images[-1] and arm.get("device_peak_bytes"):
            row["OOMs, retries"] = "{num_ooms}, {num_alloc_retries}".format_map(images[-1])
    return row


def _bits(arm: reports.Arm) -> str:
    """Which images differ, and whether their latents do."""
    if not any("is_image_equal" in image for image in arm["images"]):
        return reports.verdict(None)
    differ = [
        f"**{'image' if image['is_latents_equal'] else 'latents'} {at}**"
        for at, image in enumerate(arm["images"], 1)
        if not image.get("is_image_equal", True)
    ]
    return ", ".join(differ) or reports.verdict(True)
