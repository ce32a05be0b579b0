"""Time and memory of one model: resident, under diffusers' group offloading, under accelerate, under this package."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import checkpoints
from . import report as reports
from .arms import ARMS, Arm, apply_function, choose, plan_facts
from .disk import cached_bytes, drop_page_cache, files_in, read_all, size_of, transferred
from .machine import (
    BANDWIDTH_BYTES,
    GIB,
    CopiesBeside,
    anonymous_bytes,
    count_driver_calls,
    device_peak,
    device_reserved,
    forget_device_peak,
    process_memory,
    say,
    sha256,
    start_device,
    synchronize,
    used_ram,
    wait_for_output,
)
from .models import SEED, Model, find, make_inputs, make_model, warm_up
from .options import add, model_of, sizes_of
from .processes import Job, Relay, tell_measured, tell_so_far
from .report import is_equal, machine_facts, seconds, span, verdict
from .restrictions import RESTRICTIONS

IN_A_ROW_SECONDS = 4
"""So long are steps timed together, with no wait between them: at least two, and no more than a pipeline would take."""
MAX_IN_A_ROW = 20
SLOW_SECONDS = 3
"""Steps that take longer are not timed together."""
SETTLING_STEPS = 5
"""With a budget: the first passes measure, and fill what is to stay."""
FROM_DRIVE = ("direct", "buffered")
"""How the plain reader may have read the drive; the second only where the first is refused."""


# ------------------------------------------------------------------------------------------------ one arm: the child


def run_arm(arm: Arm, model: Model, job: Mapping[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """Set the arm up and run it; `begin` is called before anything is measured. Times are seconds, sizes are bytes."""
    device, folder = torch.device(job["device"]), job["folder"]
    used_before = used_ram()
    start_device(device)
    anonymous_started = anonymous_bytes()
    apply = apply_function(arm.engine)
    warm_up(model, device)
    inputs = make_inputs(model, device)
    start = time.perf_counter()
    if arm.is_from_checkpoint:
        module = load(model, Path(job["checkpoint"]))
    else:
        module = make_model(model, device, resident=arm.engine == "resident" or arm.starts_on_device)
    load_s = time.perf_counter() - start
    folder_options = {"offload_to_disk_path": folder} if folder else {}
    if arm.is_again:
        apply(module, device, arm.options | folder_options).remove()
        module = load(model, Path(job["checkpoint"]))
    weights = {name: weight.numel() * weight.element_size() for name, weight in module.named_parameters()}
    num_bytes = sum(weights.values())
    forget_device_peak(device)
    anonymous_before = anonymous_bytes()
    begin()

    transferred_before = transferred()
    start = time.perf_counter()
    options = {**arm.options, **folder_options, **arm.budgets(num_bytes)}
    handle = apply(module, device, options)
    synchronize(device)
    setup = time.perf_counter() - start
    transferred_after = transferred()
    setup_device_peak = device_peak(device)
    forget_device_peak(device)
    say(f"{num_bytes / GIB:.2f} GiB of weights set up in {setup:.1f} s")
    result: dict[str, Any] = {
        "setup_s": setup,
        "load_s": load_s if arm.is_from_checkpoint else None,
        **{f"setup_{name}": transferred_after[name] - transferred_before[name] for name in transferred_after},
        "anonymous_started_bytes": anonymous_started,
        "anonymous_before_bytes": anonymous_before,
        "anonymous_setup_bytes": anonymous_bytes(),
        "weight_bytes": num_bytes,
        "used_weight_bytes": sum(size for name, size in weights.items() if model.is_used(name)),
        "num_parameters": sum(weight.numel() for weight in module.parameters()),
    }
    tell_so_far(result)

    beside = CopiesBeside(num_bytes, device, BANDWIDTH_BYTES).back if arm.copies_beside else lambda: None
    times: list[float] = []
    reads = [_reads(handle)]
    outputs: list[torch.Tensor] = []  # looked at later: nothing happens between two steps
    settling: list[float] = []
    for at in range(1 + job["num_steps"] + (SETTLING_STEPS if arm.has_budget else 0)):
        start = time.perf_counter()
        beside()
        outputs.append(model.call(module, inputs))
        wait_for_output(device)
        is_settling = arm.has_budget and 0 < at <= SETTLING_STEPS
        (settling if is_settling else times).append(time.perf_counter() - start)
        if times[-1] >= SLOW_SECONDS:
            tell_so_far({"first_step_s": times[0], "steps_s": times[1:]})
        reads.append(_reads(handle))
    typical = statistics.median(times[1:])
    if typical < SLOW_SECONDS:
        # As in a pipeline's loop: nobody waits between two steps.
        num_in_a_row = max(2, min(MAX_IN_A_ROW, int(IN_A_ROW_SECONDS / typical)))
        start = time.perf_counter()
        for _ in range(num_in_a_row):
            beside()
            output = model.call(module, inputs)
        synchronize(device)
        result |= {"in_a_row_s": (time.perf_counter() - start) / num_in_a_row, "num_in_a_row": num_in_a_row}
        outputs.append(output)
    say(f"first step {times[0]:.3f} s, then {typical:.3f} s")

    peak = device_peak(device)
    result |= {
        "first_step_s": times[0],
        "settling_s": settling,
        "steps_s": times[1:],
        "step_s": typical,
        "step_min_s": min(times[1:]),
        "step_max_s": max(times[1:]),
        "first_step_reads": _difference(reads[0], reads[1]),
        # Of the last one: earlier ones may still fill the page cache.
        "step_reads": _difference(reads[-2], reads[-1]),
        "device_peak_bytes": peak,
        "device_peak_run_bytes": None if peak is None else max(peak, setup_device_peak or 0),
        "device_reserved_bytes": device_reserved(device),
        "anonymous_after_bytes": anonymous_bytes(),
        **process_memory(),
        "ram_used_bytes": used_ram() - used_before,
    }
    tell_so_far(result)
    tell_measured()
    if handle is not None:
        result["stats"] = asdict(handle.stats())
        result["num_groups"] = len(handle.groups)
        result["largest_group_bytes"] = max(group.num_bytes for group in handle.groups)
        result |= plan_facts(handle.plan)
        if arm.has_budget:
            result |= {name: options.get(name) for name in ("vram_budget", "ram_budget")}
    hashes = [sha256(output) for output in outputs]
    if not torch.isfinite(outputs[-1]).all():
        raise RuntimeError("The output is not finite: its hash would show nothing.")
    result |= {"output_sha256": hashes[-1], "is_same_every_step": len(set(hashes)) == 1}
    tell_so_far(result)
    if arm.starts_on_device:
        start = time.perf_counter()
        handle.remove()
        synchronize(device)
        result["remove_s"] = time.perf_counter() - start
    elif job["is_profiled"]:
        result |= count_driver_calls(lambda: model.call(module, inputs), device)
    return result


def _reads(handle: Any) -> dict[str, int]:
    """Bytes that came from files so far: by how, if the engine tells, and from the drive, if the kernel tells."""
    by_way = {} if handle is None else handle.stats().bytes_read
    drive = transferred().get("read_bytes")
    return {**by_way, **({} if drive is None else {"drive": drive})}


def _difference(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {name: after[name] - before.get(name, 0) for name in after}


def load(model: Model, checkpoint: Path) -> nn.Module:
    with torch.device("meta"):
        kind: Any = type(model.build())
    module: nn.Module = kind.from_pretrained(checkpoint, dtype=model.dtype)
    return module.eval().requires_grad_(False)


def work(job: dict[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """What a child process does with its job."""
    arm = Arm(**job["arm"])
    with RESTRICTIONS[arm.restriction]() if arm.restriction else nullcontext():
        return run_arm(arm, find(**job["model"]), job, begin)


def preload() -> None:
    import diffusers.hooks
    from diffusers import AutoencoderKL, FluxTransformer2DModel, UNet2DConditionModel, WanTransformer3DModel  # noqa: F401

    diffusers.utils.logging.disable_progress_bar()


# ------------------------------------------------------------------------------------------------ all arms: the parent


def run(options: argparse.Namespace) -> Path | None:
    """Run the arms that were chosen. Returns the file with the results, if there are any."""
    model = model_of(options)
    arms = choose(options.arms or ARMS, ram=options.ram)
    if not (options.arms or model.has_all_arms):
        arms = [arm for arm in arms if arm.is_basic]
    report = reports.new("weights", options, model=model.facts(), seed=SEED, is_warmed_up=True)
    return run_arms(report, arms, options)


def run_arms(report: dict[str, Any], arms: Sequence[Arm], options: argparse.Namespace) -> Path | None:
    """Run the arms one after another. Returns the file with the results, if there are any."""
    for arm in arms:
        missing = arm.missing()
        if missing is not None:
            report["arms"][arm.name] = {**asdict(arm), "error": f"not run: {missing} is not installed"}
    runnable = [
        arm for arm in arms if arm.name not in report["arms"] and (options.device != "cpu" or not arm.needs_streams)
    ]
    with ExitStack() as stack:
        disk: _Disk | None = None
        if any(arm.is_from_checkpoint for arm in runnable):
            disk = _Disk(stack.enter_context(checkpoints.folder_of(options)), options)
            checkpoints.make_sure({disk.folder: model_of(options)}, options.device, options.shard_size)
            report["disk"] = disk.facts
        parent = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="group-offload-", dir=options.disk)))
        jobs = [_job(arm, options, disk, parent / str(number)) for number, arm in enumerate(runnable)]
        relay = Relay(report, options, jobs)
        for job, _ in relay:
            if job.task["folder"] is not None:
                shutil.rmtree(job.task["folder"], ignore_errors=True)
            if job is jobs[-1] and disk is not None and any(arm.ram_limit_bytes for arm in runnable):
                disk.measure_drive("after")
    return relay.path


def _job(arm: Arm, options: argparse.Namespace, disk: _Disk | None, folder: Path) -> Job:
    task = {
        "arm": asdict(arm),
        "model": sizes_of(options),
        "num_steps": min(options.steps, options.slow_steps) if arm.is_slow else options.steps,
        "folder": str(folder) if arm.on_disk else None,
        "checkpoint": disk and str(disk.folder),
        "is_profiled": not options.no_profile,
    }
    if arm.on_disk:
        folder.mkdir()
    job = Job(name=arm.name, task=task, facts=asdict(arm), ram_limit_bytes=arm.ram_limit_bytes)
    if disk is not None and arm.is_from_checkpoint:
        is_limited = arm.ram_limit_bytes is not None
        job.prepare = partial(disk.prepare, is_limited=is_limited)
        if is_limited:
            job.before = partial(disk.drop, job.facts)
    return job


class _Disk:
    """The checkpoint, in the page cache or not, and what a plain reader gets of it."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder = folder
        self._may_drop_all, self._is_measured = not options.small, not options.no_raw
        self.facts: dict[str, Any] = {"raw": []}
        """`raw`: what was read how, with how many threads: seconds, bytes a second."""

    def prepare(self, *, is_limited: bool) -> None:
        """Before an arm's process loads the model."""
        known = {each["how"] for each in self.facts["raw"]}
        if is_limited:
            if not known & {*FROM_DRIVE}:
                self.measure_drive("before")
            self._drop()
            return
        num_threads = min(16, max(4, os.cpu_count() or 1))
        read_all(files_in(self.folder), num_threads, direct=False)
        if self._is_measured and "page cache" not in known:
            self._measure("page cache", num_threads)

    def drop(self, facts: dict[str, Any]) -> None:
        """Before an arm with a limit is set up. `facts` gets how it was done, and what was left in the page cache."""
        facts |= {"dropped_by": self._drop(), "bytes_not_dropped": cached_bytes(files_in(self.folder))}

    def measure_drive(self, when: str) -> None:
        """What the plain reader gets of the drive: with 4 and 8 threads, or, later, as was best."""
        if not self._is_measured:
            return
        earlier = [each for each in self.facts["raw"] if each["how"] in FROM_DRIVE]
        best = max(earlier, key=lambda each: float(each["bytes_per_s"]), default=None)
        for num_threads in (4, 8) if best is None else (best["threads"],):
            self._drop()
            try:
                self._measure("direct", num_threads, when)
            except OSError as error:  # this file system has no direct reads
                self.facts["direct_error"] = str(error)
                self._drop()
                self._measure("buffered", num_threads, when)

    def _measure(self, how: str, num_threads: int, when: str = "") -> None:
        files = files_in(self.folder)
        took = read_all(files, num_threads, direct=how == "direct")
        rate = size_of(files) / took
        self.facts["raw"].append({"how": how, "when": when, "threads": num_threads, "s": took, "bytes_per_s": rate})
        say(f"plain reader, {how}, {num_threads} threads: {rate / 1e9:.2f} GB/s")

    def _drop(self) -> str:
        return drop_page_cache(files_in(self.folder), may_drop_all=self._may_drop_all)


# ------------------------------------------------------------------------------------------------ the table


COLUMNS = ("step_s", "(min to max)", "in_a_row_s", "x_floor", "x_raw", "from_the_drive_bytes", "predicted_s", "x_limit")
COLUMNS += ("budget_bytes", "first_step_s", "setup_s", "remove_s", "written_bytes", "device_peak_bytes")
COLUMNS += ("device_reserved_bytes", "rss_bytes", "rss_peak_bytes", "anonymous_bytes", "group_peak_bytes")
COLUMNS += ("host_synchronisations", "device_allocations", "first_kernel_s", "bit_equal")


def render(report: Mapping[str, Any]) -> str:
    """A report of this benchmark as Markdown: what was measured where, then one row for each arm."""
    return "\n".join([" ".join(_facts(report)), "", reports.table(compared(report), COLUMNS, "step_s")])


def compared(report: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The arms beside the resident one, and beside what the link and the drive allow."""
    arms, floor = report["arms"], copy_floor(report)
    link, drive = (report["machine"] or {}).get("pinned_h2d_bytes_per_s"), _raw(report, is_limited=True)
    whole: Mapping[str, Any] = arms.get("resident", arms.get("resident, from_pretrained", {}))
    in_files = any("step_reads" in arm and (arm["on_disk"] or arm["is_from_checkpoint"]) for arm in arms.values())
    rows = {}
    for name, arm in arms.items():
        rows[name] = row = dict(arm)
        if "step_s" not in arm:
            continue
        is_limited = bool(arm.get("ram_limit_bytes"))
        raw = _raw(report, is_limited=is_limited)
        row["(min to max)"] = span(arm)
        if floor and arm["engine"] != "resident":
            row["x_floor"] = arm["step_s"] / floor
        if raw and (arm["on_disk"] or arm["options"].get("offload_device") == "disk"):
            row["x_raw"] = arm["used_weight_bytes"] / raw / arm["step_s"]
        if is_limited:
            row["from_the_drive_bytes"] = arm["step_reads"].get("drive")
        if "predicted_s" in arm and "step_s" in whole:
            # The longest of: compute, what is sent over the link, what is read over the drive's raw speed.
            limits = whole["step_s"], arm["h2d_bytes"] / link if link else 0, arm["drive_bytes"] / drive if drive else 0
            row["x_limit"] = arm["step_s"] / max(limits)
        row["budget_bytes"] = arm.get("vram_budget", arm.get("vram"))
        if in_files and arm.get("anonymous_peak_bytes") is not None and "anonymous_started_bytes" in arm:
            # From set-up on, beyond what the process had once the device was started.
            row["anonymous_bytes"] = max(0, arm["anonymous_peak_bytes"] - arm["anonymous_started_bytes"])
            row["written_bytes"] = arm.get("setup_write_bytes")
        row["bit_equal"] = verdict(is_equal(arm, whole.get("output_sha256"), "is_same_every_step"))
    return rows


def _facts(report: Mapping[str, Any]) -> Iterator[str]:
    machine, model = report["machine"], report["model"]
    done = [arm for arm in report["arms"].values() if "step_s" in arm]
    num_bytes = done[0]["weight_bytes"] if done else 0
    where = machine_facts(report, "diffusers", "accelerate")
    yield f"{model['what']}, {num_bytes / GIB:.2f} GiB {model['dtype']}, {model['goes_in']}; {where}."
    floor = copy_floor(report)
    if floor:
        used = done[0].get("used_weight_bytes", num_bytes)
        which = "every weight" if used == num_bytes else f"the {used / GIB:.2f} GiB that are used"
        yield (
            f"Page-locked RAM to the device: {machine['pinned_h2d_bytes_per_s'] / 1e9:.1f} GB/s, so streaming {which} once "
            f"takes at least {seconds(floor)} (the floor)."
        )
    limited = [arm for arm in done if arm.get("ram_limit_bytes")]
    rates = {"the drive": limited and _raw(report, is_limited=True), "the page cache": _raw(report, is_limited=False)}
    yield from (f"A plain reader got {rate / 1e9:.2f} GB/s from {where}." for where, rate in rates.items() if rate)
    failed = sorted({arm["group_error"] for arm in limited if "group_error" in arm})
    yield from (f"**Without a limit of RAM**: {error}." for error in failed)


def copy_floor(report: Mapping[str, Any]) -> float | None:
    """Seconds that it takes to copy the weights that a step uses once, from page-locked RAM to the device."""
    bandwidth: float | None = (report["machine"] or {}).get("pinned_h2d_bytes_per_s")
    done = next((arm for arm in report["arms"].values() if "step_s" in arm), None)
    if not bandwidth or done is None:
        return None
    return float(done.get("used_weight_bytes", done["weight_bytes"]) / bandwidth)


def _raw(report: Mapping[str, Any], *, is_limited: bool) -> float | None:
    """Bytes a second that the plain reader got: from the drive, or from the page cache."""
    hows = FROM_DRIVE if is_limited else ("page cache",)
    found = [each["bytes_per_s"] for each in report.get("disk", {}).get("raw", ()) if each["how"] in hows]
    return max(found, default=None)


def add_options(parser: argparse.ArgumentParser) -> None:
    add(parser, "device", "model", "arms", "list", "small", "blocks", "tokens", "frames", steps=10)
    parser.add_argument("--slow-steps", type=int, default=3, help="the same for arms that take seconds (default 3)")
    parser.add_argument("--no-profile", action="store_true", help="do not count the calls to the driver")
    add(parser, "disk", "checkpoint", "shard_size", "budget", timeout=150)
    parser.add_argument("--ram", metavar="SIZE", help="so much for each arm's process, like 12GiB; from the drive")
    parser.add_argument("--no-raw", action="store_true", help="do not measure what a plain reader of the files gets")
