"""Forwards that share passes: the two calls of a step of guidance, and the requests of several threads, with and without it.

All arms run the same loops in one process, and the bits of their latents are compared with those of the resident model.
`--files FOLDER` lets the weights rest in group files there. A control group that limits RAM is the caller's business
(`systemd-run --scope -p MemoryMax=12G ...`).
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from group_offload import OffloadHandle, apply_group_offloading, free_slots

from . import report as reports
from .machine import device_peak, forget_device_peak, measure_machine, synchronize
from .models import Model, make_inputs, make_model
from .options import add, model_of
from .report import gib, machine_facts, number, seconds, verdict

ARMS = {"guidance": "two calls a step", "threads": "one request in each of several threads"}


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


def measure(
    options: argparse.Namespace, model: Model, device: torch.device, module: nn.Module, what: str, num_threads: int
) -> tuple[float, list[torch.Tensor]]:
    """The seconds of a step, and the latents at the end."""
    num_calls = 2 if what == "guidance" else 1
    requests = [Request(model, make_inputs(model, device), number) for number in range(num_threads)]
    began: list[float] = []

    def begin() -> None:
        synchronize(device)
        began.append(time.perf_counter())

    barrier = threading.Barrier(num_threads, begin)
    errors: list[BaseException] = []

    def work(request: Request) -> None:
        try:
            request.steps(module, options.warm_up, num_calls)
            barrier.wait()
            request.steps(module, options.steps, num_calls)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(request,)) for request in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    synchronize(device)
    if errors:
        raise errors[0]
    return (time.perf_counter() - began[0]) / options.steps, [request.latents.cpu() for request in requests]


def run(options: argparse.Namespace) -> Path | None:
    device = torch.device(options.device)
    model = model_of(options)
    report = reports.new(
        "shared", options, model=model.facts(), steps=options.steps, in_files=options.files is not None
    )
    report["machine"] = measure_machine(device)
    module = make_model(model, device, resident=False)
    kinds: list[tuple[str, Callable[[], OffloadHandle | None]]] = [
        ("alone", lambda: _offload(module, device, options, share_passes=False)),
        ("shared", lambda: _offload(module, device, options, share_passes=True)),
    ]
    if not options.no_resident:
        kinds.append(("resident", lambda: _resident(module, device)))
    found: dict[str, dict[str, Any]] = {}
    latents: dict[str, dict[str, list[torch.Tensor]]] = {}
    for kind, prepare in kinds:
        handle = prepare()
        for what in options.arms or ARMS:
            num_threads = 1 if what == "guidance" else options.threads
            forget_device_peak(device)
            before = _bytes_moved(handle)
            took, end = measure(options, model, device, module, what, num_threads)
            arm = found[f"{what}, {kind}"] = {"step_s": took, "num_forwards": 2 if what == "guidance" else num_threads}
            arm["peak_bytes"] = device_peak(device)
            if handle is not None:
                arm["moved_bytes"] = (_bytes_moved(handle) - before) / (options.steps + options.warm_up)
                arm["num_shared"] = handle.stats().passes_shared
            latents.setdefault(what, {})[kind] = end
        if handle is not None:
            handle.remove()
            free_slots()
    for what, by_kind in latents.items():
        wanted = by_kind.get("resident", by_kind["alone"])
        for kind, end in by_kind.items():
            arm = found[f"{what}, {kind}"]
            arm["is_equal"] = all(map(torch.equal, end, wanted))
            arm["of_alone"] = arm["step_s"] / found[f"{what}, alone"]["step_s"]
    report["arms"] = {name: found[name] for what in latents for name in found if name.startswith(what)}
    return reports.write(report, options.output)


def _offload(
    module: nn.Module, device: torch.device, options: argparse.Namespace, *, share_passes: bool
) -> OffloadHandle:
    return apply_group_offloading(
        module, device, offload_to_disk_path=options.files, vram_budget=options.vram, share_passes=share_passes
    )


def _resident(module: nn.Module, device: torch.device) -> None:
    module.to(device)


def _bytes_moved(handle: OffloadHandle | None) -> int:
    return 0 if handle is None else sum(handle.stats().bytes_onloaded.values())


def render(report: Mapping[str, Any]) -> str:
    columns: reports.Columns = {
        "a step": lambda arm: seconds(arm["step_s"]),
        "of alone": lambda arm: f"**{number(arm['of_alone'], 3)}**",
        "forwards a second": lambda arm: number(arm["num_forwards"] / arm["step_s"], 2),
        "weights moved a step": lambda arm: gib(arm.get("moved_bytes")),
        "device peak": lambda arm: gib(arm.get("peak_bytes")),
        "bits equal": lambda arm: verdict(arm["is_equal"]),
    }
    model = report["model"]
    place = "files" if report["in_files"] else "RAM"
    head = f"{model['class_name'] if 'class_name' in model else model['name']}, {model['what']}, {model['goes_in']}"
    head = f"{head}; weights in {place}, {report['steps']} steps, {machine_facts(report, 'diffusers')}."
    return "\n".join([head, "", reports.table(report["arms"], columns, "step_s")])


def add_options(parser: argparse.ArgumentParser) -> None:
    add(parser, "model", "blocks", "tokens", "frames", "small", "device")
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="only these")
    parser.add_argument("--steps", type=int, default=6, help="timed steps (default %(default)s)")
    parser.add_argument(
        "--warm-up", type=int, default=5, help="steps before, in which forwards are checked (default 5)"
    )
    parser.add_argument("--threads", type=int, default=4, help="default %(default)s")
    parser.add_argument("--files", type=Path, metavar="FOLDER", help="folder for group files")
    parser.add_argument("--vram", metavar="SIZE", help="the vram_budget")
    parser.add_argument(
        "--no-resident", action="store_true", help="without the resident model: bits are those of `alone`"
    )
