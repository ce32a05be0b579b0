"""Forwards that share passes, with and without it: the calls of a step of guidance, and requests of several threads.

The arms of one kind run the same loops in one process, over one model, and their bits are compared. `pipeline` measures
pipelines that do it: `--pipeline wan --arms ours ours+interleave`.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from group_offload import OffloadHandle, apply_group_offloading, free_device_buffers
from group_offload.plan.budgets import parse_bytes

from . import disk, machine
from . import report as reports
from .models import Model, find, make_inputs
from .options import add, model_of, sizes_of
from .processes import Job, Relay

DEFAULT = ("guidance", "threads")
"""Two calls a step, and one request in each of several threads."""
ARMS = (*DEFAULT, "files")
"""The third is two calls a step, weights in the checkpoint's files, with little RAM."""
FEW_STEPS, FEW_WARM_UP = 2, 3
"""Of arms that read a disk. From the third step on, calls share passes."""


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
    start, read = 0.0, 0

    def begin() -> None:
        nonlocal start, read
        machine.synchronize(device)
        start, read = time.perf_counter(), disk.transferred().get("read_bytes", 0)

    barrier = threading.Barrier(num_threads, begin)

    def work(request: Request) -> None:
        try:
            for _ in range(job["warm_up"]):
                barrier.wait()  # who first went alone would be one step ahead, and go alone in its last step as well
                request.steps(module, 1, num_calls)
            barrier.wait()
            request.steps(module, job["steps"], num_calls)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(num_threads) as pool:
        done, _ = wait([pool.submit(work, request) for request in requests])
    machine.synchronize(device)
    if errors := [error for error in (each.exception() for each in done) if error is not None]:
        raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
    return {
        "step_s": (time.perf_counter() - start) / job["steps"],
        "disk_bytes": (disk.transferred().get("read_bytes", 0) - read) / job["steps"],
        "output_sha256": [machine.sha256(request.latents) for request in requests],
    }


def work(job: Mapping[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """What a child process does with its job: the arms of one model, loaded once."""
    device, model = torch.device(job["device"]), find(**job["model"])
    module = disk.load(model, Path(job["checkpoint"]))
    begin()
    found: dict[str, dict[str, Any]] = {}
    for way in ("alone", "shared", *(() if job["no_resident"] else ("resident",))):
        start = time.perf_counter()
        handles: list[OffloadHandle] = []
        if way == "resident":
            module.to(device)
        else:
            handles = [apply_group_offloading(module, device, job["where"], interleave_forwards=way == "shared")]
        setup = time.perf_counter() - start
        for what in job["arms"]:
            machine.forget_device_peak(device)
            before = [handle.stats() for handle in handles]
            arm = found[f"{what}, {way}"] = run_loops(job, model, device, module, what)
            arm |= {"peak_bytes": machine.allocator(device, machine.PEAK), "setup_s": setup}
            for stats, handle in zip(before, handles, strict=True):
                later, num_steps = handle.stats(), job["steps"] + job["warm_up"]
                moved = sum(later.bytes_onloaded.values()) - sum(stats.bytes_onloaded.values())
                num_shared = later.forwards_interleaved - stats.forwards_interleaved
                arm |= {"moved_bytes": moved / num_steps, "num_shared": num_shared}
            machine.say(f"{what}, {way}: {arm['step_s']:.3f} s")
        for handle in handles:
            handle.remove()
        free_device_buffers()
    return {"arms": found}


# ------------------------------------------------------------------------------------------------ the parent


def run(options: argparse.Namespace) -> Path | None:
    model, jobs = model_of(options), []
    report = reports.new("shared", options, model=model.facts(), steps=options.steps)
    with ExitStack() as stack:
        checkpoint = stack.enter_context(disk.checkpoint_folder(options))
        disk.make_checkpoints({checkpoint: model}, options.device)
        task = {"model": sizes_of(options), "checkpoint": str(checkpoint), "where": "cpu"}
        task |= {name: getattr(options, name) for name in ("steps", "warm_up", "threads", "no_resident")}
        in_ram = [name for name in options.arms if name != "files"]
        if in_ram:
            jobs.append(Job(name="RAM", task={**task, "arms": in_ram}))
        if "files" in options.arms:
            ram = parse_bytes(options.ram, "--ram")
            few = {"steps": min(options.steps, FEW_STEPS), "warm_up": min(options.warm_up, FEW_WARM_UP)}
            task |= {**few, "where": "disk", "no_resident": True}
            jobs.append(Job(name="files", task={**task, "arms": ["files"]}, ram_limit_bytes=ram))
            # Before the model is loaded, and before it is set up.
            drop = partial(disk.drop_page_cache, disk.files_in(checkpoint), may_drop_all=not options.small)
            jobs[-1].prepare = jobs[-1].before = drop
        return Relay(report, options, jobs).run(judge)


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


# ------------------------------------------------------------------------------------------------ the table


COLUMNS = ("step_s", "of_alone", "num_shared", "moved_bytes", "disk_bytes", "peak_bytes", "is_equal")


def add_options(parser: argparse.ArgumentParser) -> None:
    add(parser, "model", "blocks", "tokens", "frames", "small", "device", "list", "disk", "checkpoint", "budget", "ram")
    add(parser, steps=6, timeout=400)
    parser.add_argument(
        "--warm-up", type=int, default=5, help="steps before, in which forwards are checked (default 5)"
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*DEFAULT], help=f"default: {' '.join(DEFAULT)}")
    parser.add_argument("--threads", type=int, default=4, help="default %(default)s")
    without = "without the resident model: bits are those of `alone`"
    parser.add_argument("--no-resident", action="store_true", help=without)
