"""Time and memory of one model: resident, under diffusers' group offloading, under accelerate, under this package."""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from . import disk, machine
from . import report as reports
from .arms import ARMS, BASIC, Arm, apply, choose
from .models import SEED, Model, find, make_inputs, make_model, warm_up
from .options import add, model_of, sizes_of
from .processes import Job, Relay, tell

IN_A_ROW_SECONDS = 4
"""So long are steps timed together, with no wait between them: at least two, and no more than a pipeline would take."""
MAX_IN_A_ROW = 20
SLOW_SECONDS = 3
"""Where a step takes longer, few are timed, and none together."""
SETTLING_STEPS = 5
"""With a budget: the first passes measure, and fill what is to stay."""


# ------------------------------------------------------------------------------------------------ one arm: the child


def run_arm(arm: Arm, model: Model, job: Mapping[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """Set the arm up and run it; `begin` is called before anything is measured. Times are seconds, sizes are bytes."""
    device = torch.device(job["device"])
    machine.start_device(device)
    warm_up(model, device)
    inputs = make_inputs(model, device)
    options = {**arm.options, **({"offload_to_disk_path": job["folder"]} if arm.on_disk else {})}

    def make() -> Any:
        if arm.is_from_checkpoint:
            return disk.load(model, Path(job["checkpoint"]))
        return make_model(model, device, resident=arm.engine == "resident")

    module = make()
    if arm.is_again:
        apply(arm.engine, module, device, options).remove()
        module = make()
    weights = {name: weight.numel() * weight.element_size() for name, weight in module.named_parameters()}
    result: dict[str, Any] = {
        "weight_bytes": sum(weights.values()),
        "used_weight_bytes": sum(size for name, size in weights.items() if name.startswith(model.used)),
    }
    vram = str(options.get("vram_budget", ""))
    if vram.endswith("%"):  # of the weights
        options["vram_budget"] = int(result["weight_bytes"] * float(vram.removesuffix("%")) / 100)
    machine.forget_device_peak(device)
    begin()

    before = disk.transferred()
    result["setup_s"], handle = machine.timed(lambda: apply(arm.engine, module, device, options), device)
    result |= {f"setup_{name}": value - before[name] for name, value in disk.transferred().items()}
    machine.forget_device_peak(device)
    machine.say(f"{result['weight_bytes'] / machine.GIB:.2f} GiB of weights set up in {result['setup_s']:.1f} s")
    tell("so far", result)

    times: list[float] = []
    reads = [disk.transferred().get("read_bytes", 0)]
    outputs: list[torch.Tensor] = []  # looked at later: nothing happens between two steps
    num_settling, num_steps = SETTLING_STEPS if options.keys() & {"vram_budget", "ram_budget"} else 0, job["num_steps"]
    while len(times) < 1 + num_settling + num_steps:
        start = time.perf_counter()
        outputs.append(model.call(module, inputs))
        machine.wait_for_output(device)  # copies for the next step may still be on their way
        times.append(time.perf_counter() - start)
        if times[-1] >= SLOW_SECONDS:
            num_steps = min(num_steps, job["num_slow_steps"])
            tell("so far", {"first_step_s": times[0], "steps_s": times[1:]})
        reads.append(disk.transferred().get("read_bytes", 0))
    first, settling, steps = times[0], times[1 : 1 + num_settling], times[1 + num_settling :]
    typical = statistics.median(steps)
    if typical < SLOW_SECONDS:
        # As in a pipeline's loop: nobody waits between two steps.
        num = max(2, min(MAX_IN_A_ROW, int(IN_A_ROW_SECONDS / typical)))
        took, output = machine.timed(lambda: model.call(module, inputs), device, num)
        result |= {"in_a_row_s": took, "num_in_a_row": num}
        outputs.append(output)
    machine.say(f"first step {first:.3f} s, then {typical:.3f} s")

    result |= {
        "first_step_s": first,
        "settling_s": settling,
        "steps_s": steps,
        "step_s": typical,
        "step_min_s": min(steps),
        "step_max_s": max(steps),
        # Of the last one: earlier ones may still fill the page cache.
        "from_the_drive_bytes": reads[-1] - reads[-2],
        "device_peak_bytes": machine.allocator(device, machine.PEAK),
        "device_reserved_bytes": machine.allocator(device, machine.RESERVED),
        **machine.process_memory(),
    }
    tell("so far", result)
    if handle is not None:
        prediction = handle.plan.details.prediction
        result |= {
            "stats": asdict(handle.stats()),
            "num_groups": len(handle.groups),
            "plan": str(handle.plan),
            "speeds": asdict(handle.plan.details.problem.speeds),
            "predicted_s": prediction.step_seconds,
            "h2d_bytes": prediction.h2d_bytes,
            "disk_bytes": prediction.disk_bytes,
        }
    hashes = [machine.sha256(output) for output in outputs]
    if not torch.isfinite(outputs[-1]).all():
        raise RuntimeError("The output is not finite: its hash would show nothing.")
    result |= {"output_sha256": hashes[-1], "is_same_every_step": len(set(hashes)) == 1}
    tell("so far", result)
    if job["is_profiled"]:
        result |= machine.count_driver_calls(lambda: model.call(module, inputs), device)
    return result


@contextmanager
def _little_locked(most_bytes: int) -> Iterator[None]:
    """As under WSL2, and in containers: so much memory is pinned, and no more."""
    from group_offload.base.device import AcceleratorBackend

    locked: dict[int, int] = {}
    pin = AcceleratorBackend.pin

    def pin_some(self: Any, memory: torch.Tensor, undo: list[Callable[[], None]], *, read_only: bool = False) -> bool:
        if sum(locked.values()) + memory.numel() > most_bytes or not pin(self, memory, undo, read_only=read_only):
            return False
        address, unlock = memory.data_ptr(), undo.pop()
        locked[address] = memory.numel()

        def unlock_it() -> None:
            unlock()
            locked.pop(address, None)

        undo.append(unlock_it)
        return True

    with (
        mock.patch.object(AcceleratorBackend, "pin", pin_some),
        mock.patch.object(AcceleratorBackend, "empty_pinned", return_value=None),
    ):
        yield


def work(job: dict[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """What a child process does with its job."""
    arm = Arm(**job["arm"])
    with ExitStack() as restrictions:
        if arm.locked_bytes is not None:
            restrictions.enter_context(_little_locked(arm.locked_bytes))
        if arm.lacks_scan:
            from group_offload.base import pagemap

            restrictions.enter_context(mock.patch.object(pagemap._Known, "lacks_scan", True))
        return run_arm(arm, find(**job["model"]), job, begin)


# ------------------------------------------------------------------------------------------------ all arms: the parent


def run(options: argparse.Namespace) -> Path | None:
    """Run the arms one after another. Returns the file with the results, if there are any."""
    model = model_of(options)
    arms = choose(options.arms or (ARMS if model.has_all_arms else BASIC), options.device)
    report = reports.new("weights", options, model=model.facts(), seed=SEED, drive=[])
    with ExitStack() as stack:
        checkpoint, files = None, []
        if any(arm.is_from_checkpoint for arm in arms):
            checkpoint = stack.enter_context(disk.checkpoint_folder(options))
            disk.make_checkpoints({checkpoint: model}, options.device, None)
            files = disk.files_in(checkpoint)
        drop = partial(disk.drop_page_cache, files, may_drop_all=not options.small)
        parent = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="group-offload-", dir=options.disk)))
        jobs = []
        for number, arm in enumerate(arms):
            folder = parent / str(number)
            folder.mkdir()
            task = {
                "arm": asdict(arm),
                "model": sizes_of(options),
                "num_steps": options.steps,
                "num_slow_steps": options.slow_steps,
                "folder": str(folder),
                "checkpoint": str(checkpoint),
                "is_profiled": not options.no_profile,
            }
            job = Job(name=arm.name, task=task, facts=asdict(arm), environment=arm.environment)
            job.ram_limit_bytes = arm.ram_limit_bytes
            if arm.ram_limit_bytes is not None:
                job.prepare, job.before = partial(_prepare_limited, files, report["drive"], drop), drop
            elif arm.is_from_checkpoint:
                job.prepare = partial(disk.read_all, files, direct=False)
            jobs.append(job)
        relay = Relay(report, options, jobs)
        for job, _ in relay:
            shutil.rmtree(job.task["folder"], ignore_errors=True)
            if job is jobs[-1] and report["drive"]:
                drop()
                disk.measure_drive(files, report["drive"])
    return relay.path


def _prepare_limited(files: list[Path], speeds: list[float], drop: Callable[[], object]) -> None:
    drop()
    disk.measure_drive(files, speeds, at_most=1)


# ------------------------------------------------------------------------------------------------ the table


COLUMNS = (
    *("step_s", "step_min_s", "step_max_s", "in_a_row_s", "from_the_drive_bytes", "predicted_s", "x_limit"),
    *("first_step_s", "setup_s", "device_peak_bytes", "device_reserved_bytes", "rss_bytes", "rss_peak_bytes"),
    *("group_peak_bytes", "host_synchronizations", "device_allocations", "bit_equal"),
)


def render(report: Mapping[str, Any]) -> str:
    """The arms beside the resident one, and beside what the link and the disk allow.

    The limit is the longest of compute, what is sent, and what is read.
    """
    whole: Mapping[str, Any] = report["arms"].get("resident", {})
    link, drive = report["machine"]["pinned_h2d_bytes_per_s"], max(report.get("drive", ()), default=None)
    rows = {name: dict(arm) for name, arm in report["arms"].items()}
    for row in rows.values():
        if "step_s" not in row:
            continue
        if "predicted_s" in row and "step_s" in whole:
            limits = whole["step_s"], row["h2d_bytes"] / link if link else 0, row["disk_bytes"] / drive if drive else 0
            row["x_limit"] = row["step_s"] / max(limits)
        if "output_sha256" in whole:
            row["bit_equal"] = row["output_sha256"] == whole["output_sha256"] and row["is_same_every_step"]
    return reports.render(report, COLUMNS, rows)


def add_options(parser: argparse.ArgumentParser) -> None:
    add(parser, "device", "model", "arms", "list", "small", "blocks", "tokens", "frames", steps=10)
    parser.add_argument("--slow-steps", type=int, default=3, help="the same where they take seconds (default 3)")
    parser.add_argument("--no-profile", action="store_true", help="do not count the calls to the driver")
    add(parser, "disk", "checkpoint", "budget", timeout=150)
