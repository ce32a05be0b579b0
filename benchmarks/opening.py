"""RAM and time that it takes to open a checkpoint: diffusers' `from_pretrained`, and this package's."""

from __future__ import annotations

import argparse
import hashlib
import mmap
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import checkpoints
from . import report as reports
from .disk import files_in, size_of, warm
from .machine import GIB, anonymous_bytes, say, sha256
from .models import MODELS, SMALL, Model, make_model
from .options import add
from .processes import Job, Relay
from .report import gib, machine_facts, verdict

SAMPLE_SECONDS = 0.003
MODEL = "flux-4gib"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to open the checkpoint."""

    engine: str
    """"diffusers" or "ours"."""
    dtype: str = "float32"
    """The one that is asked for."""
    writes: bool = False
    """It gets a folder."""
    offloads: bool = True
    is_again: bool = False
    """In the folder of the arm before it."""


ARMS = {
    "diffusers": Arm(engine="diffusers", offloads=False),
    "ours": Arm(engine="ours", writes=True),
    "diffusers, cast": Arm(engine="diffusers", dtype="bfloat16", offloads=False),
    "diffusers, cast, then group offloading to disk": Arm(engine="diffusers", dtype="bfloat16", writes=True),
    "ours, cast": Arm(engine="ours", dtype="bfloat16", writes=True),
    "ours, cast, again": Arm(engine="ours", dtype="bfloat16", writes=True, is_again=True),
    "ours, cast, into RAM": Arm(engine="ours", dtype="bfloat16"),
}


# ------------------------------------------------------------------------------------------------ one arm: the child


@contextmanager
def peaks(found: dict[str, Any]) -> Iterator[None]:
    """The most memory that this process has within, beyond what it had before. `found` gets bytes."""

    def look() -> tuple[int, int]:
        return anonymous_bytes(), int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    def watch() -> None:
        while not is_over.wait(SAMPLE_SECONDS):
            most.append(tuple(map(max, most.pop(), look())))

    before = look()
    most, is_over = [before], threading.Event()
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        after = look()
        anonymous, total = map(max, most[0], after)
        found["anonymous_peak_bytes"], found["rss_peak_bytes"] = anonymous - before[0], total - before[1]
        found["anonymous_after_bytes"] = after[0] - before[0]


def work(job: dict[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """What a child process does with its job: open the checkpoint. Times are seconds, sizes are bytes."""
    from diffusers import FluxTransformer2DModel

    arm, checkpoint, device = ARMS[job["arm"]], Path(job["checkpoint"]), torch.device(job["device"])
    warm(files_in(checkpoint))
    _open_nothing(device)
    begin()
    found: dict[str, Any] = {}
    with peaks(found):
        start = time.perf_counter()
        module = _open(arm, FluxTransformer2DModel, checkpoint, job["folder"], device)
        found["open_s"] = time.perf_counter() - start
    say(f"{found['open_s']:.2f} s, {found['anonymous_peak_bytes'] / GIB:.2f} GiB of anonymous memory at most")
    # What is to be compared is bytes, so a hash for each weight serves.
    sums = [f"{name} {weight.dtype} {sha256(weight.detach())}" for name, weight in module.named_parameters()]
    is_compared = arm.engine == "ours" or not arm.offloads
    return {
        **found,
        "weight_bytes": sum(weight.numel() * weight.element_size() for weight in module.parameters()),
        "written_bytes": size_of(files_in(Path(job["folder"]))) if job["folder"] else 0,
        "largest_group_bytes": _largest_group(module),
        "weights_sha256": hashlib.sha256("\n".join(sums).encode()).hexdigest() if is_compared else None,
    }


def _open(arm: Arm, model_class: Any, checkpoint: Path, folder: str | None, device: torch.device) -> nn.Module:
    dtype = getattr(torch, arm.dtype)
    if arm.engine == "ours":
        from group_offload import from_pretrained

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
    module: Any = make_model(SMALL["flux"], torch.device("cpu"), resident=False, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as parent:
        module.save_pretrained(parent)
        for arm in (ARMS["diffusers, cast"], ARMS["ours, cast"]):
            _open(arm, type(module), Path(parent), f"{parent}/files" if arm.writes else None, device)


def _largest_group(module: nn.Module) -> int | None:
    from group_offload.api import handle_of

    handle = handle_of(module)
    return None if handle is None else max(group.num_bytes for group in handle.groups)


def preload() -> None:
    import accelerate  # noqa: F401
    import diffusers.hooks
    from diffusers import FluxTransformer2DModel  # noqa: F401

    import group_offload  # noqa: F401

    diffusers.utils.logging.disable_progress_bar()


# ------------------------------------------------------------------------------------------------ all arms: the parent


def run(options: argparse.Namespace) -> Path | None:
    """Run the arms one after another. Returns the file with the results, if there are any."""
    model: Model = (SMALL if options.small else MODELS)[MODEL]
    report = reports.new("opening", options, model=model.facts())
    with ExitStack() as stack:
        checkpoint = stack.enter_context(checkpoints.folder_of(options))
        checkpoints.make_sure({checkpoint: model}, "cpu", 1 << 16 if options.small else 1 << 30, torch.float32)
        files = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="group-offload-", dir=options.disk)))
        jobs, number = [], 0
        for name in options.arms or ARMS:
            arm = ARMS[name]
            number += not arm.is_again
            folder = files / str(number) if arm.writes else None
            if folder is not None:
                folder.mkdir(exist_ok=True)
            task = {"arm": name, "checkpoint": str(checkpoint), "folder": folder and str(folder)}
            jobs.append(Job(name=name, task=task, facts={"name": name, **asdict(arm)}))
        return Relay(report, options, jobs).run()


# ------------------------------------------------------------------------------------------------ the table


def render(report: Mapping[str, Any]) -> str:
    """A report of this benchmark as Markdown: what was measured where, then one row for each arm."""
    arms = report["arms"]
    by_dtype = {
        arm["dtype"]: arm.get("weights_sha256")
        for arm in arms.values()
        if arm["engine"] == "diffusers" and not arm["offloads"]
    }

    rows = {name: dict(arm) for name, arm in arms.items()}
    for row in rows.values():
        found, expected = row.get("weights_sha256"), by_dtype.get(row["dtype"])
        row["weights_bit-equal"] = verdict(None if found is None or expected is None else found == expected)
    columns = (
        "weight_bytes",
        "anonymous_peak_bytes",
        "anonymous_after_bytes",
        "rss_peak_bytes",
        "written_bytes",
        "open_s",
    )
    largest = max((arm.get("largest_group_bytes") or 0 for arm in arms.values()), default=0)
    facts = (
        f"A FLUX-like transformer, {report['model']['what']}, saved in float32; {report['machine']['cpu_count']} CPU cores, "
        f"{machine_facts(report, 'diffusers', 'accelerate')}. With a cast: to bfloat16. The largest group of all arms has "
        f"{gib(largest)}. The checkpoint was in the page cache."
    )
    return "\n".join([facts, "", reports.table(rows, (*columns, "weights_bit-equal"), "open_s")])


def add_options(parser: argparse.ArgumentParser) -> None:
    add(parser, "device", "list", "small", "disk", "checkpoint", "budget", timeout=300)
    parser.add_argument("--arms", nargs="+", metavar="ARM", choices=ARMS, help="only these")
