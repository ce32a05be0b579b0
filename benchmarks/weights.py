"""Time and memory of one model: resident, under diffusers' group offloading, under accelerate, under this package."""

from __future__ import annotations

import argparse
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
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
from .limits import MemoryGroup
from .machine import (
    BANDWIDTH_BYTES,
    GIB,
    CopiesBeside,
    count_driver_calls,
    device_peak,
    device_reserved,
    forget_device_peak,
    process_memory,
    sha256,
    start_device,
    synchronize,
    time_first_kernel,
    used_ram,
    wait_for_output,
)
from .models import SEED, Model, find, make_inputs, make_model, warm_up
from .options import add, model_of, sizes_of
from .processes import Child, Relay, anonymous_bytes, limit_ram, say, tell_measured, tell_so_far
from .report import gib, is_equal, machine_facts, number, seconds, span, verdict
from .restrictions import RESTRICTIONS

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
    num_bytes, num_parameters = sum(weights.values()), sum(weight.numel() for weight in module.parameters())
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
        "num_parameters": num_parameters,
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
        result["ways"] = _ways(handle)
        result |= plan_facts(handle.plan)
        if arm.has_budget:
            result |= {name: options.get(name) for name in ("vram_budget", "ram_budget")}
    hashes = [sha256(output) for output in outputs]
    if not torch.isfinite(outputs[-1]).all():
        raise RuntimeError("The output is not finite: its hash would show nothing.")
    result |= {"output_sha256": hashes[-1], "is_same_every_step": len(set(hashes)) == 1}
    tell_so_far(result)
    if job["trace"] is not None and handle is not None:
        result["trace"] = _record(handle, lambda: model.call(module, inputs), device, Path(job["trace"]))
    if arm.starts_on_device:
        start = time.perf_counter()
        handle.remove()
        synchronize(device)
        result["remove_s"] = time.perf_counter() - start
        return result
    if typical < SLOW_SECONDS:
        result["first_kernel_s"] = statistics.median(time_first_kernel(lambda: model.call(module, inputs), device))
    if job["is_profiled"]:
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


def work(job: dict[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """What a child process does with its job."""
    model = find(**job["model"])
    if job["arm"] is None:
        checkpoints.save(model, torch.device(job["device"]), Path(job["checkpoint"]), job["shard_bytes"])
        return {}
    arm = Arm(**job["arm"])
    with RESTRICTIONS[arm.restriction]() if arm.restriction else nullcontext():
        return run_arm(arm, model, job, begin)


def preload() -> None:
    import diffusers.hooks  # noqa: F401
    from diffusers import AutoencoderKL, FluxTransformer2DModel, UNet2DConditionModel, WanTransformer3DModel  # noqa: F401


# ------------------------------------------------------------------------------------------------ all arms: the parent


def run(options: argparse.Namespace) -> Path | None:
    """Run the arms that were chosen. Returns the file with the results, if there are any."""
    model = model_of(options)
    names = options.arms or [arm.name for arm in ARMS.values() if model.has_all_arms or arm.is_basic]
    report = reports.new("weights", options, model=model.facts(), seed=SEED, is_warmed_up=True)
    return run_arms(report, choose(names, ram=options.ram), options)


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
        errors: dict[str, Any] = {}
        relay = Relay(report, options, len(runnable), _group_for(runnable[0], stack, errors) if runnable else None)
        disk: _Disk | None = None
        for at, arm in enumerate(runnable):
            if arm.is_from_checkpoint and disk is None:
                disk = _Disk(stack.enter_context(checkpoints.folder_of(options)), may_drop_all=not options.small)
                report["disk"] = disk.facts
                if not (disk.folder / "config.json").exists():
                    job = {**_job(options, arm=None, checkpoint=disk.folder), "device": options.device}
                    failed = Child(report["benchmark"]).run(job, options.timeout).get("error")
                    if failed is not None:
                        raise SystemExit(f"The checkpoint could not be saved: {failed}")
            facts, drop = {**asdict(arm), **errors.get(arm.name, {})}, None
            if disk is not None and arm.is_from_checkpoint:
                is_limited = arm.ram_limit_bytes is not None
                disk.prepare(is_limited=is_limited, is_measured=not options.no_raw)
                drop = partial(disk.drop, facts) if is_limited else None
            next_group = _group_for(runnable[at + 1], stack, errors) if at + 1 < len(runnable) else None
            with _folder(arm, options.disk) as folder:
                job = _job(options, arm=arm, checkpoint=disk.folder if disk else None, folder=folder)
                relay.run(arm.name, job, facts=facts, next_group=next_group, before=drop)
        if disk is not None and any(arm.ram_limit_bytes for arm in runnable) and not options.no_raw:
            disk.measure_drive("after")
            relay.write()
    return relay.end()


def _group_for(arm: Arm, stack: ExitStack, errors: dict[str, Any]) -> MemoryGroup | None:
    """What limits an arm's RAM. None if no limit is asked for, or none can be set here: `errors` says why."""
    if arm.ram_limit_bytes is None:
        return None
    return limit_ram(arm.ram_limit_bytes, stack, errors.setdefault(arm.name, {}))


class _Disk:
    """The checkpoint, in the page cache or not, and what a plain reader gets of it."""

    def __init__(self, folder: Path, *, may_drop_all: bool) -> None:
        self.folder = folder
        self._may_drop_all = may_drop_all
        self.facts: dict[str, Any] = {"raw": []}
        """`raw`: what was read how, with how many threads: seconds, bytes a second."""

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

    def drop(self, facts: dict[str, Any]) -> None:
        """Before an arm with a limit is set up. `facts` gets how it was done, and what was left in the page cache."""
        facts |= {"dropped_by": self._drop(), "bytes_not_dropped": cached_bytes(files_in(self.folder))}

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
    options: argparse.Namespace, *, arm: Arm | None, checkpoint: Path | None, folder: str | None = None
) -> dict[str, Any]:
    """What a child is sent. Without an arm it saves the checkpoint."""
    return {
        "arm": arm and asdict(arm),
        "model": sizes_of(options),
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
def _folder(arm: Arm, parent: Path | None) -> Iterator[str | None]:
    """For the group files of an arm that has some. It goes with them, also when the arm was stopped."""
    if not arm.on_disk:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="group-offload-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield folder


# ------------------------------------------------------------------------------------------------ the table


def render(report: Mapping[str, Any]) -> str:
    """A report of this benchmark as Markdown: what was measured where, then one row for each arm."""
    arms, floor = report["arms"], copy_floor(report)
    whole: Mapping[str, Any] = next(
        (arms[name] for name in ("resident", "resident, from_pretrained") if name in arms), {}
    )
    reference = whole.get("output_sha256")
    in_files = any("step_reads" in arm and (arm["on_disk"] or arm["is_from_checkpoint"]) for arm in arms.values())
    columns: reports.Columns = {
        "step": lambda arm: seconds(arm["step_s"]),
        "(min to max)": span,
        "in a row": lambda arm: seconds(arm.get("in_a_row_s")),
        "x floor": lambda arm: number(arm["step_s"] / floor, 2) if floor and arm["engine"] != "resident" else "",
        "x raw": lambda arm: _share_of_raw(arm, report),
        "from the drive": lambda arm: gib(arm["step_reads"].get("drive")) if arm.get("ram_limit_bytes") else "",
        "predicted": lambda arm: seconds(arm.get("predicted_s")),
        "x limit": lambda arm: _share_of_limit(arm, report),
        "budget": lambda arm: (
            gib(arm["vram_budget"]) if isinstance(arm.get("vram_budget"), int) else arm.get("vram", "")
        ),
        "first step": lambda arm: seconds(arm["first_step_s"]),
        "first / later": lambda arm: number(arm["first_step_s"] / arm["step_s"], 2),
        "set-up": lambda arm: f"{arm['setup_s']:.1f} s",
        "remove": lambda arm: f"{arm['remove_s']:.1f} s" if "remove_s" in arm else "",
        "written": lambda arm: gib(arm.get("setup_write_bytes")) if in_files else "",
        "device peak": lambda arm: gib(arm["device_peak_bytes"]),
        "reserved": lambda arm: gib(arm.get("device_reserved_bytes")),
        "RSS": lambda arm: gib(arm["rss_bytes"]),
        "RSS peak": lambda arm: gib(arm["rss_peak_bytes"]),
        "anonymous": lambda arm: _anonymous(arm) if in_files else "",
        "RSS + cache": lambda arm: gib(arm.get("group_peak_bytes")),
        "waits": lambda arm: number(arm.get("host_synchronisations"), 0),
        "allocations": lambda arm: number(arm.get("device_allocations"), 0),
        "first kernel": lambda arm: seconds(arm.get("first_kernel_s")),
        "bit-equal": lambda arm: verdict(is_equal(arm, reference, "is_same_every_step")),
    }
    return "\n".join([" ".join(_facts(report)), "", reports.table(arms, columns, "step_s")])


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


def add_options(parser: argparse.ArgumentParser) -> None:
    add(parser, "device", "model", "arms", "list", "small", "blocks", "tokens", "frames", steps=10)
    parser.add_argument("--slow-steps", type=int, default=3, help="the same for arms that take seconds (default 3)")
    parser.add_argument("--no-profile", action="store_true", help="do not count the calls to the driver")
    add(parser, "disk", "checkpoint", "shard_size", "budget", timeout=150)
    parser.add_argument("--ram", metavar="SIZE", help="so much for each arm's process, like 12GiB; from the drive")
    parser.add_argument("--no-raw", action="store_true", help="do not measure what a plain reader of the files gets")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="a timeline of one more step of each of our arms")
