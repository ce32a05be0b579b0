"""RAM and time that it takes to open a checkpoint: diffusers' `from_pretrained`, and this package's.

    python benchmarks/opening.py                     a FLUX-like transformer of 4 GiB, all arms; results in benchmarks/results/
    python benchmarks/opening.py --small             a tiny one: does it run?
    python benchmarks/opening.py --table FILE.json   a result as a Markdown table

The checkpoint is saved once, in float32 and in several files, and read before each arm, so that it is in the page cache.
Arms with a cast ask for bfloat16. Each is a process of its own. A thread looks every few milliseconds at how much memory
the process has; the peaks are those beyond what it had before. *Anonymous* is memory that is in no file (RssAnon, RssShmem).
The rest of the RSS are pages of mapped files, which the kernel takes back when it needs the RAM.

diffusers leaves the model on the CPU: that is not offloaded yet. Its arms with group offloading go on to that.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from arms import ROOT
from machine import GIB, default_device, measure_machine, sha256
from models import SMALL, Flux, fill
from processes import Child, Relay, say, serve
from tables import gib, markdown
from torch import nn

READ_BYTES = 64 << 20
SAMPLE_SECONDS = 0.003
MODEL = Flux(name="flux-4gib", num_double=4, num_single=20, num_heads=12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to open the checkpoint."""

    name: str
    engine: str
    """"diffusers" or "ours"."""
    dtype: str = "float32"
    """The one that is asked for."""
    writes: bool = False
    """It gets a folder."""
    offloads: bool = True
    is_again: bool = False
    """In the folder of the arm before it."""


ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm(name="diffusers", engine="diffusers", offloads=False),
        Arm(name="ours", engine="ours", writes=True),
        Arm(name="diffusers, cast", engine="diffusers", dtype="bfloat16", offloads=False),
        Arm(name="diffusers, cast, then group offloading to disk", engine="diffusers", dtype="bfloat16", writes=True),
        Arm(name="ours, cast", engine="ours", dtype="bfloat16", writes=True),
        Arm(name="ours, cast, again", engine="ours", dtype="bfloat16", writes=True, is_again=True),
        Arm(name="ours, cast, into RAM", engine="ours", dtype="bfloat16"),
    )
}


# ------------------------------------------------------------------------------------------------ one arm: the child


class Peaks:
    """The most memory that this process has while it is active, beyond what it had before. Sizes are bytes."""

    def __enter__(self) -> Peaks:
        self._before = self._now()
        self._most = self._before
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._look()
        after = self._now()
        self.anonymous, self.total = (most - before for most, before in zip(self._most, self._before, strict=True))
        self.anonymous_after = after[0] - self._before[0]

    def _watch(self) -> None:
        while not self._is_over.wait(SAMPLE_SECONDS):
            self._look()

    def _look(self) -> None:
        self._most = tuple(map(max, self._most, self._now()))

    @staticmethod
    def _now() -> tuple[int, ...]:
        """Anonymous bytes, and all. Read as quickly as can be: this runs beside what is measured."""
        with open("/proc/self/status", "rb", buffering=0) as file:
            status = file.read(1 << 12)
        anonymous, in_files, shared = (
            int(status[status.index(key) + len(key) :].split(maxsplit=1)[0]) << 10
            for key in (b"RssAnon:", b"RssFile:", b"RssShmem:")
        )
        return anonymous + shared, anonymous + shared + in_files


def run_arm(
    arm: Arm, checkpoint: Path, folder: str | None, device: torch.device, begin: Callable[[], None]
) -> dict[str, Any]:
    """Open the checkpoint. Times are seconds, sizes are bytes."""
    from diffusers import FluxTransformer2DModel

    _read(checkpoint)
    _open_nothing(device)
    begin()
    with Peaks() as peaks:
        start = time.perf_counter()
        module = _open(arm, FluxTransformer2DModel, checkpoint, folder, device)
        took = time.perf_counter() - start
    say(f"{took:.2f} s, {peaks.anonymous / GIB:.2f} GiB of anonymous memory at most")
    return {
        "open_s": took,
        "anonymous_peak_bytes": peaks.anonymous,
        "anonymous_after_bytes": peaks.anonymous_after,
        "rss_peak_bytes": peaks.total,
        "weight_bytes": sum(weight.numel() * weight.element_size() for weight in module.parameters()),
        "written_bytes": sum(file.stat().st_size for file in Path(folder).iterdir()) if folder else 0,
        "largest_group_bytes": _largest_group(module),
        "weights_sha256": _hash(module) if arm.engine == "ours" or not arm.offloads else None,
    }


def _open(arm: Arm, model_class: Any, checkpoint: Path, folder: str | None, device: torch.device) -> nn.Module:
    dtype = getattr(torch, arm.dtype)
    if arm.engine == "ours":
        from group_offload.integrations.opening import from_pretrained

        opened: nn.Module = from_pretrained(
            model_class, checkpoint, dtype=dtype, onload_device=device, offload_to_disk_path=folder
        )
        return opened
    module: nn.Module = model_class.from_pretrained(checkpoint, dtype=dtype)
    if arm.offloads:
        from diffusers.hooks import apply_group_offloading

        apply_group_offloading(
            module,
            onload_device=device,
            offload_device=torch.device("cpu"),
            offload_type="block_level",
            num_blocks_per_group=1,
            offload_to_disk_path=folder,
        )
    return module


def _open_nothing(device: torch.device) -> None:
    """Open a tiny checkpoint in both ways: what is imported and made once is not measured."""
    model = SMALL["flux"]
    with torch.device("meta"):
        module: Any = model.build()
    fill(module, torch.device("cpu"), torch.float32, resident=False)
    with tempfile.TemporaryDirectory() as parent:
        module.save_pretrained(parent)
        for arm in (ARMS["diffusers, cast"], ARMS["ours, cast"]):
            _open(arm, type(module), Path(parent), f"{parent}/files" if arm.writes else None, device)


def _largest_group(module: nn.Module) -> int | None:
    from group_offload.api import handle_of

    handle = handle_of(module)
    return None if handle is None else max(group.num_bytes for group in handle.groups)


def _hash(module: nn.Module) -> str:
    """Of all weights, by name. What is to be compared is bytes, so a sum for each of them serves."""
    sums = [f"{name} {weight.dtype} {sha256(weight.detach())}" for name, weight in module.named_parameters()]
    return hashlib.sha256("\n".join(sums).encode()).hexdigest()


def _read(checkpoint: Path) -> None:
    for file in sorted(checkpoint.iterdir()):
        with file.open("rb", buffering=0) as opened:
            while opened.read(READ_BYTES):
                pass


def save(model: Flux, checkpoint: Path, shard_bytes: int) -> dict[str, Any]:
    """Write the checkpoint. It is on the drive when this returns: nothing is written later."""
    with torch.device("meta"):
        module: Any = model.build()
    fill(module, torch.device("cpu"), torch.float32, resident=False)
    start = time.perf_counter()
    module.save_pretrained(checkpoint, max_shard_size=shard_bytes)
    for file in checkpoint.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    say(f"checkpoint saved in {time.perf_counter() - start:.1f} s")
    return {}


@torch.no_grad()
def work(job: dict[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """What a child process does with its job."""
    checkpoint, device = Path(job["checkpoint"]), torch.device(job["device"])
    if job["arm"] is None:
        return save(_model(is_small=job["is_small"]), checkpoint, (1 << 16) if job["is_small"] else 1 << 30)
    result = run_arm(ARMS[job["arm"]], checkpoint, job["folder"], device, begin)
    if job["measures_machine"]:
        result["machine"] = measure_machine(device)
    return result


def child_main() -> None:
    import accelerate  # noqa: F401
    import diffusers.hooks
    from diffusers import FluxTransformer2DModel  # noqa: F401

    import group_offload  # noqa: F401

    diffusers.utils.logging.disable_progress_bar()
    serve(work)


# ------------------------------------------------------------------------------------------------ all arms: the parent


def run(arms: Sequence[Arm], options: argparse.Namespace) -> Path | None:
    """Run the arms one after another. Returns the file with the results, if there are any."""
    model = _model(is_small=options.small)
    report: dict[str, Any] = {
        "benchmark": "opening",
        "date": datetime.date.today().isoformat(),
        "label": options.label,
        "model": {**asdict(model), "what": model.what},
        "machine": None,
        "arms": {},
    }
    path: Path | None = None
    relay = Relay(__file__, timeout=options.timeout, budget=options.budget)
    with ExitStack() as stack:
        checkpoint = stack.enter_context(_checkpoint(options))
        job = {"is_small": options.small, "device": options.device, "checkpoint": str(checkpoint)}
        if not (checkpoint / "config.json").exists():
            result = Child(__file__).run({**job, "arm": None}, options.timeout)
            if result:
                raise SystemExit(result["error"])
        files = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="group-offload-", dir=options.disk)))
        number_of_folder = 0
        for number, arm in enumerate(arms, 1):
            say(f"{number}/{len(arms)} {arm.name}", relay.elapsed)
            number_of_folder += not arm.is_again
            folder = files / str(number_of_folder)
            if arm.writes:
                folder.mkdir(exist_ok=True)
            job |= {"arm": arm.name, "folder": str(folder) if arm.writes else None}
            job["measures_machine"] = report["machine"] is None
            result = relay.run(job, is_last=number == len(arms))
            report["machine"] = result.pop("machine", None) or report["machine"]
            report["arms"][arm.name] = {**asdict(arm), **result}
            if "error" in result:
                say(result["error"])
            if report["machine"] is not None:
                path = _write(report, options.output)
    relay.end()
    say("done", relay.elapsed)
    return path


def _model(*, is_small: bool) -> Flux:
    model = SMALL["flux"] if is_small else MODEL
    assert isinstance(model, Flux)
    return model


@contextmanager
def _checkpoint(options: argparse.Namespace) -> Iterator[Path]:
    """The folder of the checkpoint: the user's, which stays, or a temporary one."""
    if options.checkpoint is not None:
        yield options.checkpoint
        return
    with tempfile.TemporaryDirectory(prefix="group-offload-checkpoint-", dir=options.disk) as folder:
        yield Path(folder)


def _write(report: dict[str, Any], folder: Path) -> Path:
    device = report["machine"]["device"].lower().replace("nvidia ", "").replace(" ", "-")
    parts = ("opening", report["model"]["name"], report["label"], device, report["date"])
    path = folder / f"{'-'.join(part for part in parts if part)}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path


# ------------------------------------------------------------------------------------------------ the table


def render_table(report: Mapping[str, Any]) -> str:
    """A report of this benchmark as Markdown: what was measured where, then one row for each arm."""
    arms, machine = report["arms"], report["machine"]
    by_dtype = {
        arm["dtype"]: arm.get("weights_sha256")
        for arm in arms.values()
        if arm["engine"] == "diffusers" and not arm["offloads"]
    }
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "weights": lambda arm: gib(arm["weight_bytes"]),
        "anonymous, peak": lambda arm: gib(arm["anonymous_peak_bytes"]),
        "anonymous, after": lambda arm: gib(arm["anonymous_after_bytes"]),
        "RSS, peak": lambda arm: gib(arm["rss_peak_bytes"]),
        "group files": lambda arm: gib(arm["written_bytes"]),
        "time": lambda arm: f"{arm['open_s']:.2f} s",
        "weights bit-equal": lambda arm: _verdict(arm, by_dtype.get(arm["dtype"])),
    }
    rows: list[tuple[str, ...]] = [("", *columns)]
    for name, arm in arms.items():
        is_done = "open_s" in arm
        cells = [column(arm) for column in columns.values()] if is_done else [arm["error"], *[""] * (len(columns) - 1)]
        rows.append((name, *cells))
    packages = ", ".join(f"{name} {machine[name]}" for name in ("torch", "diffusers", "accelerate") if machine[name])
    largest = max((arm.get("largest_group_bytes") or 0 for arm in arms.values()), default=0)
    facts = (
        f"A FLUX-like transformer, {report['model']['what']}, saved in float32; {machine['cpu_count']} CPU cores, "
        f"onload device {machine['device']}, {packages}, {report['date']}. With a cast: to bfloat16. The largest group of all "
        f"arms has {gib(largest)}. The checkpoint was in the page cache."
    )
    return "\n".join([facts, "", markdown(rows)])


def _verdict(arm: Mapping[str, Any], reference: str | None) -> str:
    if reference is None or arm["weights_sha256"] is None:
        return "not compared"
    return "yes" if arm["weights_sha256"] == reference else "**no**"


# ------------------------------------------------------------------------------------------------ command line


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", metavar="ARM", choices=ARMS, default=list(ARMS), help="only these")
    parser.add_argument("--list", action="store_true", help="print the names of the arms")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--device", default=default_device(), help="default: the accelerator, else cpu")
    parser.add_argument(
        "--disk",
        type=Path,
        help="folder for group files and the checkpoint, deleted afterwards (default: the temporary one)",
    )
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FOLDER", help="the checkpoint: used if it is there, else written and kept"
    )
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each arm (default 300)")
    parser.add_argument("--budget", type=float, default=1800, help="seconds for all of them (default 1800)")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--label", default="", help="goes into the name of the file, to tell two runs apart")
    parser.add_argument("--table", type=Path, metavar="FILE.json", help="print a result as Markdown; run nothing")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        child_main()
    elif options.table:
        print(render_table(json.loads(options.table.read_text())))
    elif options.list:
        print("\n".join(ARMS))
    else:
        path = run([ARMS[name] for name in options.arms], options)
        if path is None:
            raise SystemExit("No arm gave a result.")
        print(render_table(json.loads(path.read_text())))
        print(f"\n{path}", file=sys.stderr)


if __name__ == "__main__":
    main()
