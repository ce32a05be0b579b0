"""RAM and time that it takes to open a checkpoint: diffusers' `from_pretrained`, and this package's."""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import checkpoints
from . import report as reports
from .disk import files_in, read_all, size_of
from .machine import GIB, sha256
from .models import MODELS, SMALL, Model, make_model
from .options import add
from .processes import Child, Relay, say
from .report import gib, machine_facts, verdict

SAMPLE_SECONDS = 0.003
MODEL = "flux-4gib"
NUM_THREADS = 4


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

    read_all(files_in(checkpoint), NUM_THREADS, direct=False)
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
        "written_bytes": size_of(files_in(Path(folder))) if folder else 0,
        "largest_group_bytes": _largest_group(module),
        "weights_sha256": _hash(module) if arm.engine == "ours" or not arm.offloads else None,
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


def _hash(module: nn.Module) -> str:
    """Of all weights, by name. What is to be compared is bytes, so a sum for each of them serves."""
    sums = [f"{name} {weight.dtype} {sha256(weight.detach())}" for name, weight in module.named_parameters()]
    return hashlib.sha256("\n".join(sums).encode()).hexdigest()


def work(job: dict[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """What a child process does with its job."""
    checkpoint, device = Path(job["checkpoint"]), torch.device(job["device"])
    if job["arm"] is None:
        shard_bytes, dtype = 1 << 16 if job["small"] else 1 << 30, torch.float32
        checkpoints.save(_model(is_small=job["small"]), torch.device("cpu"), checkpoint, shard_bytes, dtype)
        return {}
    return run_arm(ARMS[job["arm"]], checkpoint, job["folder"], device, begin)


def preload() -> None:
    import accelerate  # noqa: F401
    import diffusers.hooks
    from diffusers import FluxTransformer2DModel  # noqa: F401

    import group_offload  # noqa: F401

    diffusers.utils.logging.disable_progress_bar()


# ------------------------------------------------------------------------------------------------ all arms: the parent


def run(options: argparse.Namespace) -> Path | None:
    """Run the arms one after another. Returns the file with the results, if there are any."""
    arms = [ARMS[name] for name in options.arms or ARMS]
    report = reports.new("opening", options, model=_model(is_small=options.small).facts())
    relay = Relay(report, options, len(arms))
    with ExitStack() as stack:
        checkpoint = stack.enter_context(checkpoints.folder_of(options))
        job = {"small": options.small, "checkpoint": str(checkpoint)}
        if not (checkpoint / "config.json").exists():
            saving = {**job, "arm": None, "device": "cpu", "measures_machine": False}
            result = Child("opening").run(saving, options.timeout)
            if "error" in result:
                raise SystemExit(f"The checkpoint could not be saved: {result['error']}")
        files = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="group-offload-", dir=options.disk)))
        number_of_folder = 0
        for arm in arms:
            number_of_folder += not arm.is_again
            folder = files / str(number_of_folder)
            if arm.writes:
                folder.mkdir(exist_ok=True)
            job |= {"arm": arm.name, "folder": str(folder) if arm.writes else None}
            relay.run(arm.name, job, facts=asdict(arm))
    return relay.end()


def _model(*, is_small: bool) -> Model:
    return (SMALL if is_small else MODELS)[MODEL]


# ------------------------------------------------------------------------------------------------ the table


def render(report: Mapping[str, Any]) -> str:
    """A report of this benchmark as Markdown: what was measured where, then one row for each arm."""
    arms = report["arms"]
    by_dtype = {
        arm["dtype"]: arm.get("weights_sha256")
        for arm in arms.values()
        if arm["engine"] == "diffusers" and not arm["offloads"]
    }

    def is_equal(arm: Mapping[str, Any]) -> bool | None:
        found, expected = arm["weights_sha256"], by_dtype.get(arm["dtype"])
        return None if found is None or expected is None else found == expected

    columns: reports.Columns = {
        "weights": lambda arm: gib(arm["weight_bytes"]),
        "anonymous, peak": lambda arm: gib(arm["anonymous_peak_bytes"]),
        "anonymous, after": lambda arm: gib(arm["anonymous_after_bytes"]),
        "RSS, peak": lambda arm: gib(arm["rss_peak_bytes"]),
        "group files": lambda arm: gib(arm["written_bytes"]),
        "time": lambda arm: f"{arm['open_s']:.2f} s",
        "weights bit-equal": lambda arm: verdict(is_equal(arm)),
    }
    largest = max((arm.get("largest_group_bytes") or 0 for arm in arms.values()), default=0)
    facts = (
        f"A FLUX-like transformer, {report['model']['what']}, saved in float32; {report['machine']['cpu_count']} CPU cores, "
        f"{machine_facts(report, 'diffusers', 'accelerate')}. With a cast: to bfloat16. The largest group of all arms has "
        f"{gib(largest)}. The checkpoint was in the page cache."
    )
    return "\n".join([facts, "", reports.table(arms, columns, "open_s")])


def add_options(parser: argparse.ArgumentParser) -> None:
    add(parser, "device", "list", "small", "disk", "checkpoint", "budget", timeout=300)
    parser.add_argument("--arms", nargs="+", metavar="ARM", choices=ARMS, help="only these")
