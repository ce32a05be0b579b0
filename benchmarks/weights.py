"""Time and memory of one model: resident, under diffusers' group offloading, under accelerate, under this package.

    python benchmarks/weights.py                     a FLUX.1-size transformer, all arms; results in benchmarks/results/
    python benchmarks/weights.py --tokens 16384      the same model where compute, not copies, sets the time
    python benchmarks/weights.py --model wan14b      other models: see --help
    python benchmarks/weights.py --small             tiny models, on the CPU too: does it run?
    python benchmarks/weights.py --ram 12GiB         with so much RAM, and from the drive
    python benchmarks/weights.py --table FILE.json   a result as a Markdown table

Each arm runs in a process of its own, one after another, with the same random weights and inputs. Results are written
after every arm, so an interrupted run keeps what it has.

Before a process makes its weights it runs the model with one block of each kind (a model without like blocks, the whole
one) resident on the device, with the inputs that are measured later: torch and CUDA load kernels when they are first used.
What the first step takes beyond the later ones is then what the engine learns in it.

Arms with "from_pretrained" or "checkpoint" load the model from a checkpoint, which the run saves once and reads before each
of them, so that it is in the page cache. Their set-up time is that of the offloading alone, as in all arms; loading is
`load_s`. Those with "from_pretrained" then offload to RAM, those with "checkpoint" leave the weights in its files.

With " vram=25%" (of the weights; or "vram=8GiB") or " ram=auto" behind an arm's name this package gets budgets. The first
steps then are not timed: they measure, and fill what is to stay. *predicted* is what the plan says, *x limit* the step over
the longest of: the resident model's step, bytes sent over what the link gives, bytes read over what the drive gives.

An arm whose name ends in "@12GiB" (or all, with --ram 12GiB) gets so much RAM: its process runs in a control group that
counts what it has in the page cache, too. The model comes from the checkpoint, and the page cache is empty before it is
loaded, and again before it is set up. What the drive gives is measured in the same run, before those arms and after them:
a plain reader of the same files (`disk.py`), with 4 and with 8 threads; the best counts.

After the timed steps one more runs under torch's profiler, which counts how often the host waits for the device and how
often memory is taken from the driver or given back to it.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import checkpoints
import torch
from arms import ARMS, ROOT, Arm, apply_function, parse_size, split_budgets
from disk import cached_bytes, drop_page_cache, files_in, read_all, size_of, transferred
from limits import MemoryGroup
from machine import (
    GIB,
    CopiesBeside,
    count_driver_calls,
    default_device,
    device_peak,
    device_reserved,
    fix_algorithms,
    forget_device_peak,
    grow_ram,
    measure_machine,
    process_memory,
    sha256,
    start_device,
    synchronize,
    used_ram,
    wait_for_output,
)
from models import NAMES, SEED, Model, find, make_inputs, make_model, warm_up
from processes import Child, Relay, anonymous_bytes, say, serve, tell_measured, tell_so_far
from tables import count, gib, markdown, seconds
from torch import nn

IN_A_ROW_SECONDS = 4
"""So long are steps timed together, with no wait between them: at least two, and no more than a pipeline would take."""
MAX_IN_A_ROW = 20
SLOW_SECONDS = 3
"""Steps that take longer are not timed together."""
MAX_TRACE_BYTES = 16 << 20
SETTLING_STEPS = 5
"""With a budget: the first passes measure, and fill what is to stay."""
FROM_DRIVE = ("direct", "buffered")
"""How the plain reader may have read the drive; the second only where the first is refused."""


# ------------------------------------------------------------------------------------------------ one arm: the child


def run_arm(
    arm: Arm,
    model: Model,
    *,
    device: torch.device,
    num_steps: int,
    folder: str | None,
    checkpoint: str | None,
    trace: str | None,
    is_profiled: bool,
    begin: Callable[[], None],
) -> dict[str, Any]:
    """Set the arm up and run it; `begin` is called before anything is measured. Times are seconds, sizes are bytes."""
    used_before = used_ram()
    start_device(device)
    anonymous_started = anonymous_bytes()
    apply = apply_function(arm.engine)
    warm_up(model, device)
    inputs = make_inputs(model, device)
    start = time.perf_counter()
    if arm.is_from_checkpoint:
        assert checkpoint is not None
        module = load(model, Path(checkpoint))
    else:
        module = make_model(model, device, resident=arm.engine == "resident")
    load_s = time.perf_counter() - start
    weights = {name: weight.numel() * weight.element_size() for name, weight in module.named_parameters()}
    num_bytes, num_parameters = sum(weights.values()), sum(weight.numel() for weight in module.parameters())
    forget_device_peak(device)
    anonymous_before = anonymous_bytes()
    begin()

    transferred_before = transferred()
    start = time.perf_counter()
    options = {**arm.options, **({"offload_to_disk_path": folder} if folder else {}), **arm.budgets(num_bytes)}
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
        "num_parameters": num_parameters,
    }
    tell_so_far(result)

    copy_beside = CopiesBeside(num_bytes, device) if arm.copies_beside else None
    times: list[float] = []
    reads = [_reads(handle)]
    outputs: list[torch.Tensor] = []  # looked at later: nothing happens between two steps
    settling: list[float] = []
    for number in range(1 + num_steps + (SETTLING_STEPS if arm.has_budget else 0)):
        start = time.perf_counter()
        if copy_beside is not None:
            copy_beside()
        outputs.append(model.call(module, inputs))
        wait_for_output(device)
        is_settling = arm.has_budget and 0 < number <= SETTLING_STEPS
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
            if copy_beside is not None:
                copy_beside()
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
        result["ways"] = _ways(handle)
        if arm.has_budget:
            result |= _plan(handle, options)
    hashes = [sha256(output) for output in outputs]
    if not torch.isfinite(outputs[-1]).all():
        raise RuntimeError("The output is not finite: its hash would show nothing.")
    result |= {"output_sha256": hashes[-1], "is_same_every_step": len(set(hashes)) == 1}
    tell_so_far(result)
    if trace is not None and handle is not None:
        result["trace"] = _record(handle, lambda: model.call(module, inputs), device, Path(trace))
    if is_profiled:
        result |= count_driver_calls(lambda: model.call(module, inputs), device)
    return result


def _reads(handle: Any) -> dict[str, int]:
    """Bytes that came from files so far: by how, if the engine tells, and from the drive, if the kernel tells."""
    by_way = getattr(handle.stats(), "bytes_read", None) if handle is not None else None
    drive = transferred().get("read_bytes")
    return {**(by_way or {}), **({} if drive is None else {"drive": drive})}


def _difference(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {name: after[name] - before.get(name, 0) for name in after}


def _ways(handle: Any) -> dict[str, int]:
    """Bytes of the groups by how their files are read."""
    ways: dict[str, int] = {}
    for group in handle.groups:
        way = getattr(group, "way", "") or group.tier
        ways[way] = ways.get(way, 0) + group.num_bytes
    return ways


def _plan(handle: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """What the budgets came to."""
    plan = handle.plan
    prediction = plan.details.prediction
    return {
        "vram_budget": options.get("vram_budget"),
        "ram_budget": options.get("ram_budget"),
        "predicted_s": plan.step_seconds,
        "plan": str(plan),
        "speeds": asdict(plan.details.problem.speeds),
        "h2d_bytes": prediction.h2d_bytes,
        "drive_bytes": prediction.drive_bytes,
        "compute_s": prediction.compute_seconds,
    }


def _record(handle: Any, step: Callable[[], object], device: torch.device, path: Path) -> str:
    """Record one step's timeline. Returns the file's name, or why there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with handle.trace(path):
        step()
        synchronize(device)
    size = path.stat().st_size
    if size > MAX_TRACE_BYTES:
        path.unlink()
        return f"none: it had {size:,} bytes"
    return path.name


def load(model: Model, checkpoint: Path) -> nn.Module:
    with torch.device("meta"):
        kind: Any = type(model.build())
    module: nn.Module = kind.from_pretrained(checkpoint, dtype=model.dtype)
    return module.eval().requires_grad_(False)


@torch.no_grad()
def work(job: dict[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """What a child process does with its job."""
    fix_algorithms()
    device, model = torch.device(job["device"]), find(**job["model"])
    if job["arm"] is None:
        checkpoints.save(model, device, Path(job["checkpoint"]), job["shard_bytes"])
        return {}
    result = run_arm(
        Arm(**job["arm"]),
        model,
        device=device,
        num_steps=job["num_steps"],
        folder=job["folder"],
        checkpoint=job["checkpoint"],
        trace=job["trace"],
        is_profiled=job["is_profiled"],
        begin=begin,
    )
    if job["measures_machine"]:
        gc.collect()
        result["machine"] = measure_machine(device)
    return result


def child_main() -> None:
    import diffusers.hooks  # noqa: F401
    from diffusers import AutoencoderKL, FluxTransformer2DModel, UNet2DConditionModel, WanTransformer3DModel  # noqa: F401

    serve(work)


# ------------------------------------------------------------------------------------------------ all arms: the parent


def run(arms: Sequence[Arm], options: argparse.Namespace) -> Path | None:
    """Run the arms one after another. Returns the file with the results, if there are any."""
    sizes = _sizes(options)
    model = find(**sizes)
    report: dict[str, Any] = {
        "benchmark": "weights",
        "date": datetime.date.today().isoformat(),
        "label": options.label,
        "model": {
            **asdict(model),
            "what": model.what,
            "goes_in": model.goes_in,
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        "seed": SEED,
        "is_warmed_up": True,
        "machine": None,
        "arms": {},
    }
    path: Path | None = None
    for arm in arms:
        missing = arm.missing()
        if missing is not None:
            report["arms"][arm.name] = {**asdict(arm), "error": f"not run: {missing} is not installed"}
    runnable = [
        arm for arm in arms if arm.name not in report["arms"] and (options.device != "cpu" or not arm.needs_streams)
    ]
    if options.touch_ram:
        report["ram"] = grow_ram(options.touch_ram)
    with ExitStack() as stack:
        groups = _Groups(stack)
        first = groups.of(runnable[0]) if runnable else None
        relay = Relay(__file__, timeout=options.timeout, budget=options.budget, group=first)
        disk: _Disk | None = None
        for number, arm in enumerate(runnable, 1):
            say(f"{number}/{len(runnable)} {arm.name}", relay.elapsed)
            if arm.is_from_checkpoint and disk is None:
                disk = _Disk(stack.enter_context(_checkpoint(options)), may_drop_all=not options.small)
                report["disk"] = disk.facts
                if not (disk.folder / "config.json").exists():
                    job = _job(options, sizes, arm=None, checkpoint=disk.folder)
                    failed = Child(__file__).run(job, options.timeout).get("error")
                    if failed is not None:
                        raise SystemExit(f"The checkpoint could not be saved: {failed}")
            before = None
            if disk is not None and arm.is_from_checkpoint:
                is_limited = arm.ram_limit_bytes is not None
                disk.prepare(is_limited=is_limited, is_measured=not options.no_raw)
                before = disk.drop if is_limited else None
            next_arm = runnable[number] if number < len(runnable) else None
            with _folder(arm, options.disk) as folder:
                job = _job(options, sizes, arm=arm, checkpoint=disk and disk.folder, folder=folder)
                job["measures_machine"] = report["machine"] is None
                result = relay.run(
                    job, is_last=next_arm is None, next_group=next_arm and groups.of(next_arm), before=before
                )
            report["machine"] = result.pop("machine", None) or report["machine"]
            report["arms"][arm.name] = {**asdict(arm), **groups.end(arm), **result}
            if before is not None and disk is not None:
                report["arms"][arm.name] |= disk.dropped
            if "error" in result:
                say(result["error"])
            if report["machine"] is not None:
                path = _write(report, options.output)
        relay.end()
        if disk is not None and any(arm.ram_limit_bytes for arm in runnable) and not options.no_raw:
            disk.measure_drive("after")
            path = _write(report, options.output) if report["machine"] is not None else path
    say("done", relay.elapsed)
    return path


class _Groups:
    """The control groups of arms with a limit, each made before its process and removed after it."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._made: dict[str, MemoryGroup] = {}
        self._errors: dict[str, str] = {}

    def of(self, arm: Arm) -> MemoryGroup | None:
        """None if the arm has no limit, or none can be set here: it is run without one then, and the report says so."""
        if arm.ram_limit_bytes is None:
            return None
        try:
            group = self._made[arm.name] = MemoryGroup(arm.ram_limit_bytes)
        except OSError as error:
            self._errors[arm.name] = str(error)
            say(f"no limit of RAM: {error}")
            return None
        self._stack.callback(group.remove)
        return group

    def end(self, arm: Arm) -> dict[str, str]:
        group = self._made.pop(arm.name, None)
        if group is not None:
            group.remove()
        return {"group_error": self._errors[arm.name]} if arm.name in self._errors else {}


class _Disk:
    """The checkpoint, in the page cache or not, and what a plain reader gets of it."""

    def __init__(self, folder: Path, *, may_drop_all: bool) -> None:
        self.folder = folder
        self._may_drop_all = may_drop_all
        self.facts: dict[str, Any] = {"raw": []}
        """`raw`: what was read how, with how many threads: seconds, bytes a second."""
        self.dropped: dict[str, Any] = {}
        """How the page cache was dropped before the last arm with a limit, and what was left of the checkpoint in it."""

    def prepare(self, *, is_limited: bool, is_measured: bool) -> None:
        """Before an arm's process loads the model."""
        if is_limited:
            if is_measured and not any(each["how"] in FROM_DRIVE for each in self.facts["raw"]):
                self.measure_drive("before")
            self._drop()
            return
        self._read("page cache, first", _num_threads())
        if is_measured and not any(each["how"] == "page cache" for each in self.facts["raw"]):
            self._measure("page cache", _num_threads())

    def drop(self) -> None:
        """Before an arm with a limit is set up."""
        self.dropped = {"dropped_by": self._drop(), "bytes_not_dropped": cached_bytes(files_in(self.folder))}

    def measure_drive(self, when: str) -> None:
        """What the plain reader gets of the drive: with 4 and 8 threads, or, later, as was best."""
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
        took = self._read(how, num_threads)
        rate = size_of(files_in(self.folder)) / took
        self.facts["raw"].append({"how": how, "when": when, "threads": num_threads, "s": took, "bytes_per_s": rate})
        say(f"plain reader, {how}, {num_threads} threads: {rate / 1e9:.2f} GB/s")

    def _drop(self) -> str:
        return drop_page_cache(files_in(self.folder), may_drop_all=self._may_drop_all)

    def _read(self, how: str, num_threads: int) -> float:
        return read_all(files_in(self.folder), num_threads, direct=how == "direct")


def _num_threads() -> int:
    return min(16, max(4, os.cpu_count() or 1))


def _job(
    options: argparse.Namespace,
    sizes: dict[str, Any],
    *,
    arm: Arm | None,
    checkpoint: Path | None,
    folder: str | None = None,
) -> dict[str, Any]:
    """What a child is sent. Without an arm it saves the checkpoint."""
    return {
        "arm": arm and asdict(arm),
        "model": sizes,
        "device": options.device,
        "num_steps": min(options.steps, options.slow_steps) if arm and arm.is_slow else options.steps,
        "folder": folder,
        "checkpoint": checkpoint and str(checkpoint),
        "shard_bytes": options.shard_size,
        "trace": _trace_file(options, arm),
        "is_profiled": not options.no_profile,
        "measures_machine": False,
    }


def _trace_file(options: argparse.Namespace, arm: Arm | None) -> str | None:
    if options.trace is None or arm is None or arm.engine != "ours":
        return None
    return str(options.trace.resolve() / f"trace-{re.sub('[^A-Za-z0-9]+', '-', arm.name)}.json")


@contextmanager
def _checkpoint(options: argparse.Namespace) -> Iterator[Path]:
    """The folder of the checkpoint: the user's, which stays, or a temporary one."""
    if options.checkpoint is not None:
        yield options.checkpoint
        return
    with tempfile.TemporaryDirectory(prefix="group-offload-checkpoint-", dir=options.disk) as folder:
        yield Path(folder)


@contextmanager
def _folder(arm: Arm, parent: Path | None) -> Iterator[str | None]:
    """For the group files of an arm that has some. It goes with them, also when the arm was stopped."""
    if not arm.on_disk:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="group-offload-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield folder


def _write(report: dict[str, Any], folder: Path) -> Path:
    device = report["machine"]["device"].lower().replace("nvidia ", "").replace(" ", "-")
    parts = ("weights", report["model"]["name"], report["label"], device, report["date"])
    path = folder / f"{'-'.join(part for part in parts if part)}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path


# ------------------------------------------------------------------------------------------------ the table


def render_table(report: Mapping[str, Any]) -> str:
    """A report of this benchmark as Markdown: what was measured where, then one row for each arm."""
    arms = report["arms"]
    reference = arms.get("resident", {}).get("output_sha256")
    if reference is None:
        reference = arms.get("resident, from_pretrained", {}).get("output_sha256")
    floor = copy_floor(report)
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "step": lambda arm: f"{seconds(arm['step_s'])} s",
        "(min to max)": lambda arm: f"{seconds(arm['step_min_s'])} to {seconds(arm['step_max_s'])}",
        "in a row": lambda arm: f"{seconds(arm['in_a_row_s'])} s" if "in_a_row_s" in arm else "",
        "x floor": lambda arm: f"{arm['step_s'] / floor:.2f}" if floor and arm["engine"] != "resident" else "",
        "x raw": lambda arm: _share_of_raw(arm, report),
        "from the drive": lambda arm: gib(arm["step_reads"].get("drive")) if arm.get("ram_limit_bytes") else "",
        "predicted": lambda arm: f"{seconds(arm['predicted_s'])} s" if "predicted_s" in arm else "",
        "x limit": lambda arm: _share_of_limit(arm, report),
        "budget": lambda arm: (
            gib(arm["vram_budget"]) if isinstance(arm.get("vram_budget"), int) else arm.get("vram", "")
        ),
        "first step": lambda arm: f"{seconds(arm['first_step_s'])} s",
        "first / later": lambda arm: f"{arm['first_step_s'] / arm['step_s']:.2f}",
        "set-up": lambda arm: f"{arm['setup_s']:.1f} s",
        "written": lambda arm: gib(arm.get("setup_write_bytes")) if is_in_files else "",
        "device peak": lambda arm: gib(arm["device_peak_bytes"]),
        "reserved": lambda arm: gib(arm.get("device_reserved_bytes")),
        "RSS": lambda arm: gib(arm["rss_bytes"]),
        "RSS peak": lambda arm: gib(arm["rss_peak_bytes"]),
        "anonymous": lambda arm: _anonymous(arm) if is_in_files else "",
        "RSS + cache": lambda arm: gib(arm.get("group_peak_bytes")),
        "waits": lambda arm: count(arm.get("host_synchronisations")),
        "allocations": lambda arm: count(arm.get("device_allocations")),
        "bit-equal": lambda arm: _verdict(arm, reference),
    }
    done = [arm for arm in arms.values() if "step_s" in arm]
    is_in_files = any("step_reads" in arm and (arm["on_disk"] or arm["is_from_checkpoint"]) for arm in done)
    for name in ("x raw", "from the drive", "predicted", "x limit", "budget", "written", "anonymous", "RSS + cache"):
        if not any(columns[name](arm) for arm in done):
            del columns[name]
    rows: list[tuple[str, ...]] = [("", *columns)]
    for name, arm in arms.items():
        is_done = "step_s" in arm
        cells = [column(arm) for column in columns.values()] if is_done else [arm["error"], *[""] * (len(columns) - 1)]
        rows.append((name, *cells))
    return "\n".join([" ".join(_facts(report)), "", markdown(rows)])


def _facts(report: Mapping[str, Any]) -> Iterator[str]:
    machine, model = report["machine"], report["model"]
    done = [arm for arm in report["arms"].values() if "step_s" in arm]
    num_bytes = done[0]["weight_bytes"] if done else 0
    # Reports of before there were several models have the counts only.
    what = model.get("what") or f"{model['num_double']} + {model['num_single']} blocks"
    goes_in = model.get("goes_in") or f"{model['num_tokens']} image tokens and {model['num_text_tokens']} text tokens"
    packages = [f"{name} {machine[name]}" for name in ("torch", "diffusers", "accelerate") if machine.get(name)]
    yield (
        f"{what}, {num_bytes / GIB:.2f} GiB {model.get('dtype', 'bfloat16')}, {goes_in}; one {machine['device']}, "
        f"{', '.join(packages)}, {report['date']}."
    )
    floor = copy_floor(report)
    if floor:
        used = done[0].get("used_weight_bytes", num_bytes)
        which = "every weight" if used == num_bytes else f"the {used / GIB:.2f} GiB that are used"
        yield (
            f"Page-locked RAM to the device: {machine['pinned_h2d_bytes_per_s'] / 1e9:.1f} GB/s, so streaming {which} once "
            f"takes at least {seconds(floor)} s (the floor)."
        )
    if report.get("is_warmed_up"):
        yield (
            "Before its weights were made, each process ran one block of each kind, or a small model as a whole, with the "
            "same inputs: no first step loads CUDA kernels."
        )
    if any(arm.get("host_synchronisations") is not None for arm in done):
        yield "Waits of the host for the device and allocations (and releases) by the driver are those of one later step."
    raw = _raw(report, is_limited=True)
    limited = [arm for arm in done if arm.get("ram_limit_bytes")]
    if limited and raw is not None:
        yield (
            f"Arms with @ had so much RAM, the page cache that they fill included, and found it empty. A plain reader of the "
            f"same files got {raw / 1e9:.2f} GB/s from the drive in this run (the best of several), so reading all of them "
            f"once takes {num_bytes / raw:.2f} s; *x raw* is that time over the step."
        )
    if limited:
        failed = sorted({arm["group_error"] for arm in limited if "group_error" in arm})
        yield from (f"**Without a limit of RAM**: {error}." for error in failed)
    warm = _raw(report, is_limited=False)
    if warm is not None and any(_reads_files(arm) and not arm.get("ram_limit_bytes") for arm in done):
        yield (
            f"From the page cache a plain reader got {warm / 1e9:.1f} GB/s: that is what *x raw* of the other arms in files "
            f"is about."
        )
    if any(arm["on_disk"] and not arm.get("ram_limit_bytes") for arm in done):
        yield "Files had just been written when they were read: they were in the page cache."
    if any(arm.get("is_from_checkpoint") and not arm.get("ram_limit_bytes") for arm in done):
        yield "The checkpoint of from_pretrained was in the page cache, too."


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


def _reads_files(arm: Mapping[str, Any]) -> bool:
    return bool(arm["on_disk"] or arm["options"].get("offload_device") == "disk")


def _share_of_raw(arm: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    raw = _raw(report, is_limited=bool(arm.get("ram_limit_bytes")))
    return f"{arm['used_weight_bytes'] / raw / arm['step_s']:.2f}" if raw and _reads_files(arm) else ""


def _share_of_limit(arm: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """The step over the longest of: compute, what is sent over the link, what is read over the drive's raw speed."""
    resident = report["arms"].get("resident", {}).get("step_s")
    if "predicted_s" not in arm or resident is None:
        return ""
    link = next((a["machine"]["pinned_h2d_bytes_per_s"] for a in [report] if "machine" in a), None)
    raw = [run["bytes_per_s"] for run in report.get("disk", {}).get("raw", []) if run["how"] in FROM_DRIVE]
    limits = [resident]
    if link:
        limits.append(arm["h2d_bytes"] / link)
    if raw and arm["drive_bytes"]:
        limits.append(arm["drive_bytes"] / max(raw))
    return f"{arm['step_s'] / max(limits):.2f}"


def _anonymous(arm: Mapping[str, Any]) -> str:
    """The most anonymous memory from set-up on, beyond what the process had once the device was started."""
    peak, start = arm.get("anonymous_peak_bytes"), arm.get("anonymous_started_bytes")
    return "" if peak is None or start is None else f"+{gib(max(0, peak - start))}"


def _verdict(arm: Mapping[str, Any], reference: str | None) -> str:
    if reference is None:
        return "not compared"
    return "yes" if arm["output_sha256"] == reference and arm["is_same_every_step"] else "**no**"


# ------------------------------------------------------------------------------------------------ command line


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=NAMES, default="flux", help="default flux; small is the small flux")
    parser.add_argument(
        "--arms",
        nargs="+",
        metavar="ARM",
        help="only these: whole names, or 'ours', 'diffusers', each with ' @12GiB' behind it if its RAM is to be limited "
        "(default: all for a large model, else those from page-locked RAM)",
    )
    parser.add_argument("--list", action="store_true", help="print the names of the arms")
    parser.add_argument("--small", action="store_true", help="a tiny model of the same kind")
    parser.add_argument("--blocks", nargs="+", type=int, metavar="COUNT", help="how many blocks, of each kind")
    parser.add_argument("--tokens", type=int, help="tokens (flux: of the image)")
    parser.add_argument("--frames", type=int, help="latent frames (wan14b)")
    parser.add_argument("--steps", type=int, default=10, help="steps that are timed after the first (default 10)")
    parser.add_argument("--slow-steps", type=int, default=3, help="the same for arms that take seconds (default 3)")
    parser.add_argument("--no-profile", action="store_true", help="do not count the calls to the driver")
    parser.add_argument("--device", help="default: the accelerator, else cpu")
    parser.add_argument(
        "--disk",
        type=Path,
        help="folder for group files and the checkpoint, deleted afterwards (default: the temporary one)",
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FOLDER",
        help="the checkpoint of the from_pretrained arms: used if it is there, else written and kept",
    )
    parser.add_argument(
        "--shard-size",
        type=parse_size,
        metavar="SIZE",
        help="of the checkpoint's files (default: save_pretrained's, 10 GB)",
    )
    parser.add_argument("--ram", metavar="SIZE", help="so much for each arm's process, like 12GiB; from the drive")
    parser.add_argument("--no-raw", action="store_true", help="do not measure what a plain reader of the files gets")
    parser.add_argument(
        "--touch-ram",
        type=parse_size,
        metavar="SIZE",
        help="first use RAM until so much is available: some virtual machines get it only then",
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FOLDER", help="for a timeline of one more step of each of our arms"
    )
    parser.add_argument("--timeout", type=float, default=150, help="seconds for each arm (default 150)")
    parser.add_argument("--budget", type=float, default=1800, help="seconds for all of them (default 1800)")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--label", default="", help="goes into the name of the file, to tell two runs apart")
    parser.add_argument("--table", type=Path, metavar="FILE.json", help="print a result as Markdown; run nothing")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.slow_steps < 1:
        parser.error("--steps and --slow-steps: at least 1")
    if options.device is None:
        options.device = default_device()
    return options


def _sizes(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `models.find`."""
    return {
        "name": options.model,
        "small": options.small,
        "blocks": options.blocks,
        "tokens": options.tokens,
        "frames": options.frames,
    }


def choose(names: Sequence[str] | None, model: Model, ram: str | None = None) -> list[Arm]:
    """The arms with these names, those of an engine, or all that say something about `model`.

    Args:
        names: " @12GiB" behind a name limits that arm's RAM; behind that, " vram=25%" and " ram=auto" are budgets.
        ram: the limit of all others.
    """
    chosen: dict[str, Arm] = {}
    # In the order given: a run that is cut short has the first ones.
    for whole in names or [arm.name for arm in ARMS.values() if model.has_all_arms or arm.is_basic]:
        whole, budgets = split_budgets(whole)
        name, _, limit = whole.partition(" @")
        # The name of an engine that is an arm's too ("resident") is the arm's.
        found = [ARMS[name]] if name in ARMS else [arm for arm in ARMS.values() if arm.engine == name]
        if not found:
            raise SystemExit(f"No arm {name!r}. Arms: {', '.join(map(repr, ARMS))}.")
        for arm in found:
            size = limit or ram
            try:
                arm = arm.limited(size) if size and arm.engine != "resident" else arm
                arm = arm.budgeted(budgets) if budgets else arm
            except ValueError:
                raise SystemExit(f"{whole!r}: {size!r} is no size like 12GiB.") from None
            chosen.setdefault(arm.name, arm)
    return list(chosen.values())


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.child:
        child_main()
        return
    if options.table:
        print(render_table(json.loads(options.table.read_text())))
        return
    if options.list:
        print("\n".join(ARMS))
        return
    try:
        model = find(**_sizes(options))
    except ValueError as error:
        raise SystemExit(str(error)) from None
    path = run(choose(options.arms, model, options.ram), options)
    if path is None:
        raise SystemExit("No arm gave a result.")
    print(render_table(json.loads(path.read_text())))
    print(f"\n{path}", file=sys.stderr)


if __name__ == "__main__":
    main()
