"""Models that are larger than RAM, on the CPU: that they run, what memory that takes, and how fast files are read.

    python benchmarks/files.py                       a 6 GiB model in 2 GiB of RAM; results in benchmarks/results/
    python benchmarks/files.py --small               a tiny one: does it run?
    python benchmarks/files.py --table FILE.json     a result as Markdown tables

The first part is arms of `weights.py`: a transformer runs from its checkpoint with its process, and what that has in the page
cache, limited to 2 GiB (a control group; without one it runs unlimited, and the result says so), and without a limit as the
reference for its outputs.

The second part reads all weights once, group by group, and computes nothing. Each way is a process of its own; they take
turns, with an empty page cache (cold) and with the files in it (warm), several times.

- *ours*: a module with the transformer's blocks whose forward does nothing, offloaded to its checkpoint.
- *load_file*: `safetensors.torch.load_file` of each file of the checkpoint; every tensor is copied into the same memory.
- *as diffusers*: `load_file` of a file for each group, which was written for it, and a fresh copy of every tensor, as its
  onloading with a stream makes one in page-locked memory (on a CPU it would read nothing).
- *plain reader*: `preadv` by 4 threads, 16 MiB at a time, past the page cache (cold) or through it (warm).
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import weights
from arms import ROOT, parse_size
from disk import cached_bytes, drop_page_cache, files_in, read_all, size_of
from limits import MemoryGroup
from machine import GIB
from models import Model, find
from processes import Child, anonymous_bytes, say, serve
from tables import gib, markdown, seconds
from torch import nn

NUM_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to read all weights once."""

    name: str
    kind: str
    """"ours", "load_file" or "as diffusers"."""
    is_limited: bool = False


WAYS = {
    way.name: way
    for is_limited in (False, True)
    for kind in ("ours", "load_file", "as diffusers")
    for way in (Way(name=f"{kind}, limited" if is_limited else kind, kind=kind, is_limited=is_limited),)
}


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


@torch.no_grad()
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


def child_main() -> None:
    import diffusers
    from diffusers import FluxTransformer2DModel  # noqa: F401

    diffusers.utils.logging.disable_progress_bar()
    serve(read)


# ------------------------------------------------------------------------------------------------ reading: the parent


def compare_reading(options: argparse.Namespace, checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Every way takes its turn, cold and warm. Times are seconds."""
    made: list[tuple[Way, Child, list[str]]] = []
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        for way in (WAYS[name] for name in options.ways):
            group = None
            if way.is_limited:
                try:
                    group = MemoryGroup(parse_size(options.ram))
                except OSError as error:
                    found[way.name] = {"error": f"not run: no limit of RAM can be set here: {error}"}
                    continue
                stack.callback(group.remove)
            child = Child(__file__, group)
            # One way after another prepares itself, up to its first pass.
            states = ["cold"] if way.is_limited else ["cold", "warm"]
            job = {"kind": way.kind, "checkpoint": str(checkpoint), "folder": str(folder), "model": _sizes(options)}
            child.send(json.dumps({**job, "num_passes": options.repeats * len(states)}))
            error = _wait(child)
            if error is not None:
                found[way.name] = error
                continue
            made.append((way, child, states))
        plain: dict[str, list[float]] = {"cold": [], "warm": []}
        for number in range(options.repeats):
            say(f"reading, {number + 1}/{options.repeats}")
            for state in ("cold", "warm"):
                for way, child, states in made:
                    if state in states and way.name not in found:
                        files = files_in(folder if way.kind == "as diffusers" else checkpoint)
                        _prepare(state, files, may_drop_all=not options.small)
                        watch = child.watch()
                        child.send("go")
                        error = _wait(child)
                        peak = watch.stop() or 0
                        if error is not None:
                            found[way.name] = error
                            child.so_far |= error
                        child.so_far["peak"] = max(peak, child.so_far.get("peak", 0))
                files = files_in(checkpoint)
                _prepare(state, files, may_drop_all=not options.small)
                with suppress(OSError):  # no direct reads here
                    plain[state].append(read_all(files, NUM_THREADS, direct=state == "cold"))
        for way, child, states in made:
            found[way.name] = _times(found.get(way.name, {}), states)
            found[way.name]["anonymous_peak_bytes"] = child.so_far.get("peak")
            if child.group is not None:
                found[way.name] |= child.group.usage()
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


def run(options: argparse.Namespace) -> Path:
    """Run both parts. Returns the file with the results; it is written after each part."""
    with ExitStack() as stack:

        def folder(what: str) -> Path:
            made = tempfile.TemporaryDirectory(prefix=f"group-offload-{what}-", dir=options.disk)
            return Path(stack.enter_context(made))

        checkpoint, results = options.checkpoint or folder("checkpoint"), folder("results")
        arms = ["resident, from_pretrained", f"ours block, checkpoint @{options.ram}"]
        arms.append(f"ours leaf, checkpoint @{options.ram}")
        arguments = [
            "--model",
            "flux-6gib",
            *(["--small"] if options.small else []),
            "--device",
            "cpu",
            "--arms",
            *arms,
        ]
        arguments += ["--steps", "2", "--slow-steps", "2", "--shard-size", options.shard_size]
        arguments += ["--checkpoint", str(checkpoint), "--output", str(results), "--timeout", str(options.timeout)]
        path = weights.run(weights.choose(arms, _model(options)), weights.parse(arguments))
        if path is None:
            raise SystemExit("No arm gave a result.")
        report = json.loads(path.read_text())
        report |= {"benchmark": "files", "date": datetime.date.today().isoformat(), "label": options.label}
        report["ram_limit"] = options.ram
        written = _write(report, options.output)
        report["reading"] = compare_reading(options, checkpoint, folder("groups"))
        return _write(report, options.output) or written


def _model(options: argparse.Namespace) -> Model:
    return find(**_sizes(options))


def _sizes(options: argparse.Namespace) -> dict[str, Any]:
    return {"name": "flux-6gib", "small": options.small}


def _write(report: dict[str, Any], folder: Path) -> Path:
    parts = ("files", report["model"]["name"], report["label"], "cpu", report["date"])
    path = folder / f"{'-'.join(part for part in parts if part)}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path


# ------------------------------------------------------------------------------------------------ the tables


def render(report: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    machine, model, arms = report["machine"], report["model"], report["arms"]
    done = [arm for arm in arms.values() if "step_s" in arm]
    packages = [f"{name} {machine[name]}" for name in ("torch", "diffusers") if machine.get(name)]
    facts = [
        f"{model['what']}, {done[0]['weight_bytes'] / GIB:.2f} GiB {model['dtype']}, {model['goes_in']}; computed on the CPU "
        f"({machine['cpu_count']} cores), {', '.join(packages)}, {report['date']}.",
        *sorted({f"**Without a limit of RAM**: {arm['group_error']}." for arm in done if "group_error" in arm}),
    ]
    parts = [" ".join(facts), "", _memory_table(arms)]
    if "reading" in report:
        reading = report["reading"]
        parts += [
            "",
            f"All {reading['bytes'] / GIB:.2f} GiB read once, medians of {reading['repeats']}; limited: to "
            f"{report['ram_limit']} of RAM.",
            "",
            _reading_table(reading),
        ]
    return "\n".join(parts)


def _memory_table(arms: Mapping[str, Any]) -> str:
    reference = arms.get("resident, from_pretrained", {}).get("output_sha256")
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "step": lambda arm: f"{seconds(arm['step_s'])} s",
        "set-up": lambda arm: f"{arm['setup_s']:.2f} s",
        "RSS + cache, peak": lambda arm: gib(arm.get("group_peak_bytes")),
        "anonymous, peak": lambda arm: gib(arm["anonymous_peak_bytes"]),
        "beyond what it was before": lambda arm: _mib(arm["anonymous_peak_bytes"] - arm["anonymous_before_bytes"]),
        "slots": lambda arm: _mib(arm["stats"]["peak_device_bytes"]) if "stats" in arm else "",
        "+ staging": lambda arm: _mib(arm["stats"]["staging_bytes"]) if "stats" in arm else "",
        "the rest": lambda arm: _mib(rest(arm)) if "stats" in arm else "",
        "bit-equal": lambda arm: "yes" if arm["output_sha256"] == reference and arm["is_same_every_step"] else "**no**",
    }
    rows: list[tuple[str, ...]] = [("", *columns)]
    for name, arm in arms.items():
        is_done = "step_s" in arm
        cells = [column(arm) for column in columns.values()] if is_done else [arm["error"], *[""] * (len(columns) - 1)]
        rows.append((name, *cells))
    return markdown(rows)


def rest(arm: Mapping[str, Any]) -> int:
    """Anonymous bytes that are neither slots nor staging memory: activations, and what reads past the page cache take."""
    taken: int = arm["anonymous_peak_bytes"] - arm["anonymous_before_bytes"]
    return taken - int(arm["stats"]["peak_device_bytes"]) - int(arm["stats"]["staging_bytes"])


def _reading_table(reading: Mapping[str, Any]) -> str:
    rows = [("", "cold", "CPU time", "warm", "CPU time", "anonymous memory, peak")]
    for name, way in reading["ways"].items():
        cells = [name]
        for state in ("cold", "warm"):
            passes = way.get(state, {})
            cells.append(_rate(reading["bytes"], passes["passes_s"]) if passes else way.get("error", ""))
            cells.append(f"{statistics.median(passes['cpu_s']):.2f} s" if passes.get("cpu_s") else "")
        before, peak = way.get("anonymous_before_bytes"), way.get("anonymous_peak_bytes")
        cells.append("" if before is None or peak is None else f"+{_mib(peak - before)}")
        rows.append(tuple(cells))  # type: ignore[arg-type]
    return markdown(rows)


def _rate(num_bytes: int, passes: Sequence[float]) -> str:
    return f"{num_bytes / statistics.median(passes) / 1e9:.2f} GB/s"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.0f} MiB"


# ------------------------------------------------------------------------------------------------ command line


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--ram", default="2GiB", metavar="SIZE", help="the limit (default 2GiB)")
    parser.add_argument("--repeats", type=int, default=3, help="of reading everything (default 3)")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=[*WAYS], metavar="WAY", help="to read (default: all)"
    )
    parser.add_argument("--shard-size", metavar="SIZE", help="of the checkpoint's files (default 2GiB; small 500KiB)")
    parser.add_argument(
        "--disk", type=Path, help="folder for all files, deleted afterwards (default: the temporary one)"
    )
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="used if it is there, else written and kept")
    parser.add_argument("--timeout", type=float, default=150, help="seconds for each arm (default 150)")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--label", default="", help="goes into the name of the file, to tell two runs apart")
    parser.add_argument("--table", type=Path, metavar="FILE.json", help="print a result as Markdown; run nothing")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.shard_size = options.shard_size or ("500KiB" if options.small else "2GiB")
    if options.child:
        child_main()
    elif options.table:
        print(render(json.loads(options.table.read_text())))
    else:
        path = run(options)
        print(render(json.loads(path.read_text())))
        print(f"\n{path}", file=sys.stderr)


if __name__ == "__main__":
    main()
