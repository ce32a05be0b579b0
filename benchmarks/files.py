"""Models that are larger than RAM, on the CPU: that they run, what memory that takes, and how fast files are read."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import report as reports
from . import weights
from .arms import ARMS, choose, parse_size
from .checkpoints import folder_of
from .disk import cached_bytes, drop_page_cache, files_in, read_all, size_of
from .limits import MemoryGroup
from .machine import GIB
from .models import find
from .options import add, model_of, sizes_of
from .processes import Child, anonymous_bytes, say
from .report import gib, is_equal, machine_facts, mib, seconds, verdict

NUM_THREADS = 4
LIMITED = ", limited"


KINDS = ("ours", "load_file", "as diffusers")
WAYS = (*KINDS, *(f"{kind}{LIMITED}" for kind in KINDS))
"""The ways to read all weights once, with all RAM and with little."""


# ------------------------------------------------------------------------------------------------ reading: the child


class _Kept(nn.Module):
    """Has the weights of a part of a model, and does nothing when it is called."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class _Idle(nn.Module):
    """A model's blocks, each a group. A forward calls them one after another."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Kept(part) for part in _parts(model))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _parts(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model, and what is beside them."""
    children = [child for child in model.children() if any(True for _ in child.parameters())]
    return [part for child in children for part in (child if isinstance(child, nn.ModuleList) else (child,))]


def work(job: dict[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """What a child process does with its job: an arm of the first part, or a way to read."""
    return read(job, begin) if "kind" in job else weights.work(job, begin)


def read(job: dict[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """Read everything `job["num_passes"]` times; `begin` is called before each."""
    checkpoint, folder = Path(job["checkpoint"]), Path(job["folder"])
    handle: Any = None
    if job["kind"] == "ours":
        from group_offload import apply_group_offloading

        idle = _Idle(_open(job, checkpoint))
        handle = apply_group_offloading(
            idle, torch.device("cpu"), "disk", offload_type="block_level", num_blocks_per_group=1
        )
        x = torch.zeros(1)

        def run() -> None:
            idle(x)
    elif job["kind"] == "load_file":

        def run() -> None:
            _load_and_copy(checkpoint)
    else:
        if not files_in(folder):
            _write_groups(_open(job, checkpoint), folder)

        def run() -> None:
            _load_groups(folder)

    result: dict[str, Any] = {"passes_s": [], "cpu_s": [], "reads": [], "anonymous_before_bytes": anonymous_bytes()}
    for _ in range(job["num_passes"]):
        before = handle.stats().bytes_read if handle is not None else {}
        begin()
        start, cpu = time.perf_counter(), time.process_time()
        run()
        result["passes_s"].append(time.perf_counter() - start)
        result["cpu_s"].append(time.process_time() - cpu)
        after = handle.stats().bytes_read if handle is not None else {}
        result["reads"].append({way: after[way] - before[way] for way in after})
    if handle is not None:
        result["stats"] = asdict(handle.stats())
    return result


def _open(job: dict[str, Any], checkpoint: Path) -> nn.Module:
    return weights.load(find(**job["model"]), checkpoint)


def _load_and_copy(checkpoint: Path) -> None:
    from safetensors.torch import load_file

    memory = torch.empty(0, dtype=torch.uint8)
    for file in checkpoint.glob("*.safetensors"):
        for tensor in load_file(file).values():
            source = tensor.view(-1).view(torch.uint8)
            if memory.numel() < source.numel():
                memory = torch.empty_like(source)
            memory[: source.numel()].copy_(source)


def _write_groups(model: nn.Module, folder: Path) -> None:
    """As diffusers does: one file for each group."""
    from safetensors.torch import save_file

    for number, part in enumerate(_parts(model)):
        save_file(dict(part.named_parameters()), folder / f"group_{number:04}.safetensors")


def _load_groups(folder: Path) -> None:
    from safetensors.torch import load_file

    for file in files_in(folder):
        loaded = load_file(file)
        copies = [tensor.clone() for tensor in loaded.values()]
        del loaded, copies


def preload() -> None:
    import diffusers
    from diffusers import FluxTransformer2DModel  # noqa: F401

    diffusers.utils.logging.disable_progress_bar()


# ------------------------------------------------------------------------------------------------ reading: the parent


def compare_reading(options: argparse.Namespace, checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Every way takes its turn, cold and warm. Times are seconds."""
    made: list[tuple[str, Child, list[str]]] = []
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        for way in options.ways:
            group, is_limited = None, way.endswith(LIMITED)
            if is_limited:
                try:
                    group = MemoryGroup(parse_size(options.ram))
                except OSError as error:
                    found[way] = {"error": f"not run: no limit of RAM can be set here: {error}"}
                    continue
                stack.callback(group.remove)
            child = Child("files", group)
            # One way after another prepares itself, up to its first pass.
            states = ["cold"] if is_limited else ["cold", "warm"]
            job = {
                "kind": way.removesuffix(LIMITED),
                "checkpoint": str(checkpoint),
                "folder": str(folder),
                "model": sizes_of(options),
            }
            num_passes = options.repeats * len(states)
            child.send(json.dumps({**job, "num_passes": num_passes, "measures_machine": False}))
            error = _wait(child)
            if error is not None:
                found[way] = error
                continue
            made.append((way, child, states))
        plain: dict[str, list[float]] = {"cold": [], "warm": []}
        for number in range(options.repeats):
            say(f"reading, {number + 1}/{options.repeats}")
            for state in ("cold", "warm"):
                for way, child, states in made:
                    if state in states and way not in found:
                        files = files_in(folder if way.startswith("as diffusers") else checkpoint)
                        _prepare(state, files, may_drop_all=not options.small)
                        watch = child.watch()
                        child.send("go")
                        error = _wait(child)
                        peak = watch.stop() or 0
                        if error is not None:
                            found[way] = error
                            child.so_far |= error
                        child.so_far["peak"] = max(peak, child.so_far.get("peak", 0))
                files = files_in(checkpoint)
                _prepare(state, files, may_drop_all=not options.small)
                with suppress(OSError):  # no direct reads here
                    plain[state].append(read_all(files, NUM_THREADS, direct=state == "cold"))
        for way, child, states in made:
            found[way] = _times(found.get(way, {}), states)
            found[way]["anonymous_peak_bytes"] = child.so_far.get("peak")
            if child.group is not None:
                found[way] |= child.group.usage()
            child.end()
    num_bytes = size_of(list(checkpoint.glob("*.safetensors")))
    plain_times = {state: {"passes_s": times} for state, times in plain.items() if times}
    ways = {**{name: found[name] for name in options.ways}, "plain reader": plain_times}
    return {"bytes": num_bytes, "repeats": options.repeats, "ways": ways}


def _wait(child: Child) -> dict[str, Any] | None:
    """None if the child waits for its next turn, else its result, or {"error": ...}."""
    try:
        message = child.wait_for("made")
    except EOFError as error:
        return {"error": str(error)}
    return message["result"] if message["state"] == "done" else None


def _times(result: dict[str, Any], states: Sequence[str]) -> dict[str, Any]:
    """The passes of a result, which come in turns of `states`."""
    if "error" in result:
        return result
    by_state = {
        state: {name: result[name][number :: len(states)] for name in ("passes_s", "cpu_s", "reads")}
        for number, state in enumerate(states)
    }
    return {**by_state, **{name: result[name] for name in ("anonymous_before_bytes", "stats") if name in result}}


def _prepare(state: str, files: Sequence[Path], *, may_drop_all: bool) -> None:
    if state == "cold":
        drop_page_cache(files, may_drop_all=may_drop_all)
    elif (cached_bytes(files) or 0) < size_of(files):
        read_all(files, NUM_THREADS, direct=False)


# ------------------------------------------------------------------------------------------------ both parts


def run(options: argparse.Namespace) -> Path | None:
    """Run both parts. Returns the file with the results; it is written after each part."""
    names = ["resident, from_pretrained"]
    names += [f"ours {kind}, checkpoint @{options.ram}" for kind in ("block", "leaf")]
    if options.shard_size is None:
        options.shard_size = parse_size("500KiB" if options.small else "2GiB")
    report = reports.new("files", options, model=model_of(options).facts(), ram_limit=options.ram)
    with ExitStack() as stack:
        options.checkpoint = checkpoint = stack.enter_context(folder_of(options))
        if weights.run_arms(report, choose(names, ARMS), options) is None:
            return None
        made = tempfile.TemporaryDirectory(prefix="group-offload-groups-", dir=options.disk)
        report["reading"] = compare_reading(options, checkpoint, Path(stack.enter_context(made)))
        return reports.write(report, options.output)


# ------------------------------------------------------------------------------------------------ the tables


def render(report: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    model, arms = report["model"], report["arms"]
    done = [arm for arm in arms.values() if "step_s" in arm]
    facts = [
        f"{model['what']}, {done[0]['weight_bytes'] / GIB:.2f} GiB {model['dtype']}, {model['goes_in']}; "
        f"{machine_facts(report, 'diffusers')}, {report['machine']['cpu_count']} cores.",
        *sorted({f"**Without a limit of RAM**: {arm['group_error']}." for arm in done if "group_error" in arm}),
    ]
    parts = [" ".join(facts), "", _memory_table(arms)]
    if "reading" in report:
        reading = report["reading"]
        read = f"All {reading['bytes'] / GIB:.2f} GiB read once, medians of {reading['repeats']}"
        parts += ["", f"{read}; limited: to {report['ram_limit']} of RAM.", "", _reading_table(reading)]
    return "\n".join(parts)


def _memory_table(arms: Mapping[str, Any]) -> str:
    reference = arms.get("resident, from_pretrained", {}).get("output_sha256")
    columns: reports.Columns = {
        "step": lambda arm: seconds(arm["step_s"]),
        "set-up": lambda arm: f"{arm['setup_s']:.2f} s",
        "RSS + cache, peak": lambda arm: gib(arm.get("group_peak_bytes")),
        "anonymous, peak": lambda arm: gib(arm["anonymous_peak_bytes"]),
        "beyond what it was before": lambda arm: mib(arm["anonymous_peak_bytes"] - arm["anonymous_before_bytes"]),
        "slots": lambda arm: mib(arm["stats"]["peak_device_bytes"]) if "stats" in arm else "",
        "+ staging": lambda arm: mib(arm["stats"]["staging_bytes"]) if "stats" in arm else "",
        "the rest": lambda arm: mib(rest(arm)) if "stats" in arm else "",
        "bit-equal": lambda arm: verdict(is_equal(arm, reference, "is_same_every_step")),
    }
    return reports.table(arms, columns, "step_s")


def rest(arm: Mapping[str, Any]) -> int:
    """Anonymous bytes that are neither slots nor staging memory: activations, and what reads past the page cache take."""
    taken: int = arm["anonymous_peak_bytes"] - arm["anonymous_before_bytes"]
    return taken - int(arm["stats"]["peak_device_bytes"]) - int(arm["stats"]["staging_bytes"])


def _reading_table(reading: Mapping[str, Any]) -> str:
    def rate(way: Mapping[str, Any], state: str) -> str:
        passes = way.get(state, {}).get("passes_s")
        return f"{reading['bytes'] / statistics.median(passes) / 1e9:.2f} GB/s" if passes else ""

    def cpu(way: Mapping[str, Any], state: str) -> str:
        times = way.get(state, {}).get("cpu_s")
        return f"{statistics.median(times):.2f} s" if times else ""

    def anonymous(way: Mapping[str, Any]) -> str:
        before, peak = way.get("anonymous_before_bytes"), way.get("anonymous_peak_bytes")
        return "" if before is None or peak is None else f"+{mib(peak - before)}"

    columns: reports.Columns = {
        "cold": lambda way: rate(way, "cold"),
        "cold, CPU time": lambda way: cpu(way, "cold"),
        "warm": lambda way: rate(way, "warm"),
        "warm, CPU time": lambda way: cpu(way, "warm"),
        "anonymous memory, peak": anonymous,
    }
    ways = {name: {"error": "not measured", **way} for name, way in reading["ways"].items()}
    return reports.table(ways, columns, "cold")


def add_options(parser: argparse.ArgumentParser) -> None:
    add(parser, "small", "disk", "checkpoint", "shard_size", "budget", timeout=150)
    parser.add_argument("--ram", default="2GiB", metavar="SIZE", help="the limit (default 2GiB)")
    parser.add_argument("--repeats", type=int, default=3, help="of reading everything (default 3)")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=[*WAYS], metavar="WAY", help="to read (default: all)"
    )
    # What the first part takes of the options of `weights`.
    parser.set_defaults(device="cpu", model="flux-6gib", steps=2, slow_steps=2, trace=None)
    parser.set_defaults(no_raw=False, no_profile=True)
