"""Forwards that share passes, with and without it: the calls of a step of guidance, requests of several threads, pipelines.

The arms of one kind run the same loops in one process, over one model, and their bits are compared.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from group_offload import OffloadHandle, apply_group_offloading, disable_group_offload, enable_group_offload, free_slots

from . import checkpoints, pipeline, weights
from . import report as reports
from .arms import parse_size
from .disk import drop_page_cache, files_in, transferred
from .machine import device_peak, forget_device_peak, said, say, sha256, synchronize, wait_for_output
from .models import Model, find, make_inputs
from .options import add, model_of, sizes_of
from .pipelines import GUIDED, PIPELINES
from .processes import Job, Relay
from .report import gib, machine_facts

DEFAULT = ("guidance", "threads")
"""Two calls a step, and one request in each of several threads."""
ARMS = (*DEFAULT, "files", *GUIDED)
"""The third is two calls a step, weights in the checkpoint's files, with little RAM. The others are pipelines, in RAM."""
IN_RAM = "RAM"
"""The kind of the default arms, which run in one process. Each of the other arms is a kind of its own."""
BAR = 0.6
"""At most so much of the time without sharing a step of these arms is to take."""
BARRED = ("files", *GUIDED)
SHARD_BYTES = 5 << 30
FEW_STEPS, FEW_WARM_UP = 2, 3
"""Of arms that read a drive. From the third step on, calls share passes."""
PIPELINE_STEPS = 3
"""Of each denoiser."""


class Request:
    """One loop of steps, as a pipeline makes them. Each call of a step gets the same latents, and a new tensor for the time."""

    def __init__(self, model: Model, inputs: Mapping[str, torch.Tensor], number: int) -> None:
        self._model = model
        self._latents, *_ = inputs
        self._inputs = dict(inputs)
        scale = 1 + number / 8
        self._prompts = [inputs["encoder_hidden_states"] * scale, inputs["encoder_hidden_states"] * (scale / 2)]
        self.latents = inputs[self._latents] * scale

    def steps(self, module: nn.Module, num_steps: int, num_calls: int) -> None:
        with torch.no_grad():
            for _ in range(num_steps):
                outputs = []
                for prompt in self._prompts[:num_calls]:
                    time_now = self._inputs["timestep"] / 1
                    given = {**self._inputs, self._latents: self.latents, "timestep": time_now}
                    outputs.append(self._model.call(module, {**given, "encoder_hidden_states": prompt}))
                guided = outputs[0] if num_calls == 1 else outputs[1] + 4 * (outputs[0] - outputs[1])
                self.latents = self.latents - 0.01 * guided


# ------------------------------------------------------------------------------------------------ one kind: the child


def run_loops(
    job: Mapping[str, Any], model: Model, device: torch.device, module: nn.Module, what: str
) -> dict[str, Any]:
    """Times are seconds."""
    num_threads, num_calls = (job["threads"], 1) if what == "threads" else (1, 2)
    requests = [Request(model, make_inputs(model, device), number) for number in range(num_threads)]
    began: list[tuple[float, dict[str, int]]] = []

    def begin() -> None:
        synchronize(device)
        began.append((time.perf_counter(), transferred()))

    aligned, barrier = threading.Barrier(num_threads), threading.Barrier(num_threads, begin)
    errors: list[BaseException] = []

    def work(request: Request) -> None:
        try:
            for _ in range(job["warm_up"]):
                request.steps(module, 1, num_calls)
                aligned.wait()  # who first went alone would be one step ahead, and go alone in its last step as well
            barrier.wait()
            request.steps(module, job["steps"], num_calls)
        except BaseException as error:
            errors.append(error)
            aligned.abort()
            barrier.abort()

    threads = [threading.Thread(target=work, args=(request,)) for request in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    synchronize(device)
    if errors:
        raise errors[0]
    [(start, drive)] = began
    step = (time.perf_counter() - start) / job["steps"]
    later = transferred()
    return {
        "step_s": step,
        "num_forwards": num_threads * num_calls,
        "drive_bytes": (later["read_bytes"] - drive["read_bytes"]) / job["steps"] if drive else None,
        "output_sha256": [sha256(request.latents) for request in requests],
    }


def run_model(job: Mapping[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """The arms of one model, loaded once."""
    device, model = torch.device(job["device"]), find(**job["model"])
    with said("load"):
        module = weights.load(model, Path(job["checkpoint"]))
    begin()
    where = "disk" if job["kind"] == "files" else "cpu"
    found: dict[str, dict[str, Any]] = {}
    for way in ("alone", "shared", *(() if job["no_resident"] else ("resident",))):
        start = time.perf_counter()
        handles: list[OffloadHandle] = []
        if way == "resident":
            module.to(device)
        else:
            options = {"vram_budget": job["vram"], "share_passes": way == "shared"}
            handles = [apply_group_offloading(module, device, where, **options)]
        setup = time.perf_counter() - start
        for what in job["arms"]:
            loops = partial(run_loops, job, model, device, module, what)
            arm = found[f"{what}, {way}"] = _counted(handles, device, loops, job["steps"] + job["warm_up"])
            arm["setup_s"] = setup
            say(f"{what}, {way}: {arm}")
        for handle in handles:
            handle.remove()
        free_slots()
    return {"arms": found}


def run_pipeline(job: Mapping[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """A pipeline, made once: its first image is not measured, because the denoisers' forwards are checked in it."""
    device, made = torch.device(job["device"]), PIPELINES[GUIDED[job["kind"]]](small=job["model"]["small"])
    for name in made.denoisers if job["denoiser_blocks"] is not None else ():
        made.models[name] = made.models[name].resized(num_layers=job["denoiser_blocks"])
    with said("make the pipeline"):
        pipe = made.make(device)
    begin()
    num_steps = PIPELINE_STEPS * len(made.denoisers)
    found: dict[str, dict[str, Any]] = {}
    for way in ("alone", "shared"):
        start = time.perf_counter()
        every = enable_group_offload(pipe, onload_device=device, vram_budget=job["vram"], share_passes=way == "shared")
        setup = time.perf_counter() - start
        handles = [every[name] for name in made.denoisers]
        made.call(pipe, num_steps, lambda pipe, number, timestep, tensors: tensors)

        def image() -> dict[str, Any]:
            ends: list[float] = []

            def end(pipe: Any, number: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
                wait_for_output(device)
                ends.append(time.perf_counter())
                return tensors

            start = time.perf_counter()
            output = made.call(pipe, num_steps, end)
            synchronize(device)
            steps = [after - before for before, after in pairwise(ends)]
            return {
                # A denoiser's first step goes alone: the prompts are new.
                "step_s": statistics.median(steps),
                "steps_s": steps,
                "image_s": time.perf_counter() - start,
                "num_forwards": 2,
                "output_sha256": [sha256(output)],
            }

        arm = found[f"{job['kind']}, {way}"] = _counted(handles, device, image, num_steps)
        arm["setup_s"] = setup
        say(f"{job['kind']}, {way}: {arm}")
        disable_group_offload(pipe)
        free_slots()
    return {"arms": found, "models": {name: model.facts() for name, model in made.models.items()}}


def _counted(
    handles: Sequence[OffloadHandle], device: torch.device, run: Callable[[], dict[str, Any]], num_steps: int
) -> dict[str, Any]:
    """What `run` measures in so many steps, and what was moved for them."""
    forget_device_peak(device)
    moved, shared = _counts(handles)
    arm = {**run(), "peak_bytes": device_peak(device)}
    moved_later, shared_later = _counts(handles)
    if handles:
        arm |= {"moved_bytes": (moved_later - moved) / num_steps, "num_shared": shared_later - shared}
    return arm


def _counts(handles: Sequence[OffloadHandle]) -> tuple[int, int]:
    """Bytes that were sent to the device, and forwards that shared a pass."""
    every = [handle.stats() for handle in handles]
    return sum(sum(each.bytes_onloaded.values()) for each in every), sum(each.passes_shared for each in every)


def work(job: dict[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """What a child process does with its job."""
    return run_pipeline(job, begin) if job["kind"] in GUIDED else run_model(job, begin)


preload = pipeline.preload


# ------------------------------------------------------------------------------------------------ the parent


def run(options: argparse.Namespace) -> Path | None:
    model = model_of(options)
    by_kind: dict[str, list[str]] = {}
    for name in options.arms:
        by_kind.setdefault(IN_RAM if name in DEFAULT else name, []).append(name)
    has_model = not by_kind.keys() <= GUIDED.keys()
    facts = model.facts() if has_model else {"name": "-".join(by_kind)}
    report = reports.new("shared", options, model=facts, steps=options.steps, kinds={kind: {} for kind in by_kind})
    with ExitStack() as stack:
        checkpoint = stack.enter_context(checkpoints.folder_of(options))
        if has_model:
            checkpoints.make_sure({checkpoint: model}, options.device, SHARD_BYTES)
        jobs = []
        for kind, names in by_kind.items():
            task = {"model": sizes_of(options), "kind": kind, "arms": names, "checkpoint": str(checkpoint)}
            kept = ("steps", "warm_up", "threads", "vram", "no_resident", "denoiser_blocks")
            job = Job(name=kind, task={**task, **{name: getattr(options, name) for name in kept}}, into="kinds")
            if kind == "files":
                few = {"steps": min(options.steps, FEW_STEPS), "warm_up": min(options.warm_up, FEW_WARM_UP)}
                job.task = {**job.task, **few, "no_resident": True}
                job.ram_limit_bytes = parse_size(options.ram)
                # Before the model is loaded, and before it is set up.
                job.prepare = job.before = partial(
                    drop_page_cache, files_in(checkpoint), may_drop_all=not options.small
                )
            jobs.append(job)
        relay = Relay(report, options, jobs)
        for job, result in relay:
            failed = {"error": result.get("error")}
            report["arms"] |= result.pop("arms", {f"{name}, alone": failed for name in by_kind[job.name]})
            judge(report)
        return relay.path


def judge(report: dict[str, Any]) -> None:
    """Compare each arm with the one without sharing, and its bits with the resident model's, or with that one's."""
    arms = report["arms"]
    for name, arm in arms.items():
        what = name.rpartition(", ")[0]
        alone = arms.get(f"{what}, alone", {})
        reference = arms.get(f"{what}, resident", alone)
        if "step_s" in arm and "step_s" in alone:
            arm["is_equal"] = arm["output_sha256"] == reference["output_sha256"]
            arm["of_alone"] = arm["step_s"] / alone["step_s"]
            if what in BARRED and name.endswith(", shared"):
                arm["is_met"] = arm["of_alone"] <= BAR


# ------------------------------------------------------------------------------------------------ the table


COLUMNS = ("step_s", "of_alone", "bar", "forwards_a_second", "num_shared", "moved_bytes", "drive_bytes", "image_s")
COLUMNS += ("peak_bytes", "is_equal")


def render(report: Mapping[str, Any]) -> str:
    rows = {name: dict(arm) for name, arm in report["arms"].items()}
    for row in rows.values():
        if "step_s" in row:
            row["forwards_a_second"] = row["num_forwards"] / row["step_s"]
            row["bar"] = f"{BAR}: {'met' if row['is_met'] else 'MISSED'}" if "is_met" in row else ""
    model, lines = report["model"], []
    if "what" in model:
        lines.append(f"- {model['name']}: {model['what']}, {model['goes_in']}, {report['steps']} steps.")
    for kind, facts in report["kinds"].items():
        made = [f"{name}: {each['what']}, {each['goes_in']}" for name, each in facts.get("models", {}).items()]
        if "group_error" in facts:
            made.append(f"RAM was not restricted: {facts['group_error']}")
        elif "group_limit_bytes" in facts:
            made.append(f"{gib(facts['group_limit_bytes'])} of RAM")
        lines += [f"- {kind}: {'; '.join(made)}."] if made else []
    head = f"Weights in RAM, unless an arm says otherwise; {machine_facts(report, 'diffusers')}."
    return "\n".join([head, "", reports.table(rows, COLUMNS, "step_s"), "", *lines])


def add_options(parser: argparse.ArgumentParser) -> None:
    add(parser, "model", "blocks", "tokens", "frames", "small", "device", "list", "disk", "checkpoint", "budget")
    add(parser, steps=6, timeout=400)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*DEFAULT], help=f"default: {' '.join(DEFAULT)}")
    parser.add_argument(
        "--warm-up", type=int, default=5, help="steps before, in which forwards are checked (default 5)"
    )
    parser.add_argument("--threads", type=int, default=4, help="default %(default)s")
    parser.add_argument("--ram", default="12GiB", metavar="SIZE", help="of the arm that reads files (default 12GiB)")
    parser.add_argument("--vram", metavar="SIZE", help="the vram_budget")
    parser.add_argument("--denoiser-blocks", type=int, help="of each denoiser of a pipeline (default: all)")
    parser.add_argument(
        "--no-resident", action="store_true", help="without the resident model: bits are those of `alone`"
    )
