"""From files to the first image: a whole pipeline whose files are in the page cache or not, with much RAM and with little."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import checkpoints
from . import report as reports
from .arms import parse_size
from .disk import drop_page_cache, files_in, read_all, size_of, transferred
from .limits import MemoryGroup
from .machine import GIB, forget_device_peak, sha256, start_device, synchronize
from .models import warm_up
from .pipelines import PIPELINES, Pipeline
from .processes import Child, Relay, say, tell_so_far
from .report import gib, is_equal, machine_facts, number, seconds, verdict

SHARD_BYTES = 2 << 30
NUM_THREADS = 8
DRIVE_BYTES = 4 << 30
"""How much of the files is read, at least, to tell the drive's speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to run the pipeline, and where its files are."""

    name: str
    engine: str
    """"resident", "ours", "model offload" or "group offload": the last two are diffusers'."""
    num_steps: int
    is_cold: bool = False
    """Nothing of the files is in the page cache."""
    ram_limit_bytes: int | None = None
    """The process gets so much RAM, what it has in the page cache included."""

    @property
    def num_images(self) -> int:
        """A second image finds the page cache as the first one has left it, which says most where RAM is scarce."""
        return 1 if self.is_cold and self.ram_limit_bytes is None else 2


def case_of(name: str) -> Case:
    """The case that a name says: "ours, cold, 4 steps @12GiB".

    Raises:
        ValueError: it says none.
    """
    whole, _, ram = name.partition(" @")
    engine, *rest = whole.split(", ")
    steps = [part.removesuffix(" steps") for part in rest if part.endswith(" steps")]
    if engine not in _ENGINES or len(steps) != 1 or set(rest) - {f"{steps[0]} steps", "cold", "warm"}:
        raise ValueError(f"no case {name!r}. One is 'ours, cold, 4 steps @12GiB'; engines: {', '.join(_ENGINES)}")
    limit = parse_size(ram) if ram else None
    return Case(
        name=name, engine=engine, num_steps=int(steps[0]), is_cold="cold" in rest or bool(ram), ram_limit_bytes=limit
    )


# ------------------------------------------------------------------------------------------------ the child


class Stages:
    """How long each part of an image takes, waits for its weights included: the prompt, each step, the decoding."""

    def __init__(self, pipe: Any, device: torch.device) -> None:
        self.device = device
        self._last = 0.0
        self.seconds: dict[str, Any] = {}
        for owner, name in ((pipe, "encode_prompt"), (pipe.vae, "decode")):
            setattr(owner, name, partial(self._timed, name, getattr(owner, name)))
        self._progress_bar, pipe.progress_bar = pipe.progress_bar, self._begin

    def _timed(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = self._now()
        result = call(*args, **kwargs)
        self.seconds[name] = self.seconds.get(name, 0.0) + self._now() - start
        return result

    def _begin(self, *args: Any, **kwargs: Any) -> Any:
        self.seconds["steps"], self._last = [], self._now()
        return self._progress_bar(*args, **kwargs)

    def end_step(self, pipe: Any, number: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        now = self._now()
        self.seconds["steps"].append(now - self._last)
        self._last = now
        return tensors

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()


def open_pipeline(pipeline: Pipeline, folder: Path) -> Any:
    """The pipeline, its weights views of the files."""
    from .weights import load

    pipe = pipeline.assemble({name: load(model, folder / name) for name, model in pipeline.models.items()})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _place_ours(pipe: Any, device: torch.device) -> Any:
    from group_offload import enable_group_offload

    return enable_group_offload(pipe, onload_device=device, offload_device="disk", vram_budget=None)


_ENGINES: dict[str, Callable[[Any, torch.device], Any]] = {
    "resident": lambda pipe, device: pipe.to(device),
    "ours": _place_ours,
    "model offload": lambda pipe, device: pipe.enable_model_cpu_offload(device=device),
    "group offload": lambda pipe, device: pipe.enable_group_offload(
        onload_device=device, offload_type="block_level", num_blocks_per_group=1, use_stream=True
    ),
}


def run_case(case: Case, pipeline: Pipeline, folder: Path, device: torch.device, begin: Any) -> dict[str, Any]:
    """Times are seconds, sizes are bytes."""
    start_device(device)
    for model in pipeline.models.values():
        warm_up(model, device)
    forget_device_peak(device)
    begin()
    start = time.perf_counter()
    pipe = open_pipeline(pipeline, folder)
    handles = _ENGINES[case.engine](pipe, device)
    synchronize(device)
    result: dict[str, Any] = {"setup_s": time.perf_counter() - start, "images": []}
    say(f"set up in {result['setup_s']:.1f} s")
    stages = Stages(pipe, device)
    hashes = []
    for _ in range(case.num_images):
        stages.seconds = {}
        read, stalls = transferred().get("read_bytes", 0), _stalls(handles)
        start = time.perf_counter()
        image = pipeline.call(pipe, case.num_steps, stages.end_step)
        synchronize(device)
        took = time.perf_counter() - start
        say(f"{took:.2f} s")
        hashes.append(sha256(image))
        if not torch.isfinite(image).all():
            raise RuntimeError("The image is not finite: its hash would show nothing.")
        result["images"].append(
            {
                "s": took,
                **stages.seconds,
                "drive_bytes": transferred().get("read_bytes", 0) - read,
                "stalled_s": {name: _stalls(handles)[name] - before for name, before in stalls.items()},
            }
        )
        tell_so_far(result)
    return {**result, "output_sha256": hashes[0], "is_same_every_image": len(set(hashes)) == 1}


def _stalls(handles: Any) -> dict[str, float]:
    """Seconds that compute has waited for the weights of each model, if this package runs it."""
    return {name: each.stats().stalled_seconds for name, each in handles.items()} if isinstance(handles, dict) else {}


def work(job: dict[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """What a child process does with its job."""
    device, pipeline, folder = torch.device(job["device"]), _pipeline(is_small=job["small"]), Path(job["folder"])
    if job["case"] is None:
        for name, model in pipeline.models.items():
            checkpoints.save(model, device, folder / name, SHARD_BYTES)
        return {}
    return run_case(Case(**job["case"]), pipeline, folder, device, begin)


# ------------------------------------------------------------------------------------------------ the parent

DEFAULTS = (
    # The files are in the page cache once they are written, so those come first that find them there.
    "resident, warm, 4 steps",
    "ours, warm, 4 steps",
    "model offload, warm, 4 steps",
    "group offload, warm, 4 steps",
    "ours, cold, 4 steps",
    "ours, cold, 4 steps @12GiB",
    "ours, warm, 28 steps",
    "resident, warm, 28 steps",
    "ours, cold, 28 steps",
    "model offload, cold, 4 steps",
    "group offload, cold, 4 steps",
)


def run(options: argparse.Namespace) -> Path | None:
    """Run the cases one after another. Returns the file with the results, if there are any."""
    try:
        cases = [case_of(name) for name in options.arms or DEFAULTS]
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if options.device == "cpu":
        cases = [case for case in cases if case.engine in ("resident", "ours")]
    pipeline = _pipeline(is_small=options.small)
    report = reports.new(
        "pipeline",
        options,
        model={"name": "small-first-image" if options.small else "flux-first-image"},
        models={name: model.facts() for name, model in pipeline.models.items()},
        drive=[],
        from_files=True,
    )
    job = {"from_files": True, "small": options.small}
    with ExitStack() as stack:
        folder = stack.enter_context(checkpoints.folder_of(options))
        if not (folder / "vae" / "config.json").exists():
            saving = {**job, "case": None, "folder": str(folder), "device": options.device, "measures_machine": False}
            failed = Child("pipeline").run(saving, options.timeout).get("error")
            if failed is not None:
                raise SystemExit(f"The checkpoints could not be saved: {failed}")
        files = [file for name in pipeline.models for file in files_in(folder / name)]
        report["file_bytes"] = size_of(files)
        errors: dict[str, str] = {}
        relay = Relay(report, options, len(cases), _group_for(cases[0], stack, errors) if cases else None)
        for at, case in enumerate(cases):
            if case.is_cold and not report["drive"]:
                _measure_drive(files, report)
            next_group = _group_for(cases[at + 1], stack, errors) if at + 1 < len(cases) else None
            before = partial(_drop if case.is_cold else _warm, files, options)
            facts = {**asdict(case), **({"group_error": errors[case.name]} if case.name in errors else {})}
            relay.run(
                case.name,
                {**job, "case": asdict(case), "folder": str(folder)},
                facts=facts,
                next_group=next_group,
                before=before,
            )
        if any(case.is_cold for case in cases):
            _measure_drive(files, report)
            relay.write()
    return relay.end()


def _pipeline(*, is_small: bool) -> Pipeline:
    return PIPELINES["flux-whole"](small=is_small)


def _group_for(case: Case, stack: ExitStack, errors: dict[str, str]) -> MemoryGroup | None:
    if case.ram_limit_bytes is None:
        return None
    try:
        group = MemoryGroup(case.ram_limit_bytes)
    except OSError as error:
        errors[case.name] = str(error)
        say(f"no limit of RAM: {error}")
        return None
    stack.callback(group.remove)
    return group


def _drop(files: Sequence[Path], options: argparse.Namespace) -> None:
    say(f"page cache emptied by {drop_page_cache(files, may_drop_all=not options.small)}")


def _warm(files: Sequence[Path], options: argparse.Namespace) -> None:
    read_all(files, NUM_THREADS, direct=False)


def _measure_drive(files: Sequence[Path], report: dict[str, Any]) -> None:
    """What a plain reader gets of the drive, of the largest files."""
    chosen: list[Path] = []
    for file in sorted(files, key=lambda file: file.stat().st_size, reverse=True):
        if size_of(chosen) < DRIVE_BYTES:
            chosen.append(file)
    try:
        took = read_all(chosen, NUM_THREADS, direct=True)
    except OSError as error:
        say(f"the drive's speed is not known: {error}")
        return
    report["drive"].append(size_of(chosen) / took)
    say(f"plain reader, {NUM_THREADS} threads: {report['drive'][-1] / 1e9:.2f} GB/s")


# ------------------------------------------------------------------------------------------------ the tables


def render(report: Mapping[str, Any]) -> str:
    """A report as Markdown: one row for each case."""
    arms = {name: dict(arm) for name, arm in report["arms"].items()}
    drive = max(report["drive"], default=None)
    resident = {arm["num_steps"]: arm for arm in arms.values() if arm["engine"] == "resident" and "setup_s" in arm}
    for arm in arms.values():
        arm["limit_s"] = _limit(arm, resident.get(arm["num_steps"]), drive)
    columns: reports.Columns = {
        "set-up": lambda arm: f"{arm['setup_s']:.1f} s",
        "first image": lambda arm: seconds(arm["images"][0]["s"]),
        "with set-up": lambda arm: seconds(arm["setup_s"] + arm["images"][0]["s"]),
        "second": lambda arm: seconds(arm["images"][1]["s"]) if len(arm["images"]) > 1 else "",
        "from the drive": lambda arm: gib(arm["images"][0]["drive_bytes"]) if arm["images"][0]["drive_bytes"] else "",
        "limit": lambda arm: seconds(arm["limit_s"]),
        "first / limit": lambda arm: number(arm["images"][0]["s"] / arm["limit_s"], 2) if arm["limit_s"] else "",
        "bit-equal": lambda arm: verdict(_is_equal(arm, resident.get(arm["num_steps"]))),
    }
    stages: reports.Columns = {
        "prompt": lambda image: seconds(image["encode_prompt"]),
        "first step": lambda image: seconds(image["steps"][0]),
        "later": lambda image: seconds(_later(image)),
        "first / later": lambda image: number(image["steps"][0] / _later(image), 2),
        "decoding": lambda image: seconds(image["decode"]),
    }
    images = {
        f"{name}, image {at}": image for name, arm in arms.items() for at, image in enumerate(arm.get("images", ()), 1)
    }
    tables = [_facts(report, drive), reports.table(arms, columns, "output_sha256")]
    return "\n\n".join([*tables, reports.table(images, stages, "decode")] if images else tables)


def _limit(arm: Mapping[str, Any], resident: Mapping[str, Any] | None, drive: float | None) -> float | None:
    """The longer of all compute in a row and all bytes that came from the drive."""
    if resident is None or "images" not in arm:
        return None
    compute: float = resident["images"][-1]["s"]
    return max(compute, arm["images"][0]["drive_bytes"] / drive) if drive else compute


def _is_equal(arm: Mapping[str, Any], resident: Mapping[str, Any] | None) -> bool | None:
    return is_equal(arm, None if resident is None else resident["output_sha256"], "is_same_every_image")


def _later(image: Mapping[str, Any]) -> float:
    return statistics.median(image["steps"][1:] or image["steps"])


def _facts(report: Mapping[str, Any], drive: float | None) -> str:
    models = "; ".join(f"{name}: {model['what']}, {model['goes_in']}" for name, model in report["models"].items())
    speed = "" if drive is None else f" A plain reader got {drive / 1e9:.2f} GB/s of the drive."
    where = machine_facts(report, "diffusers", "transformers")
    return f"{models}; {report['file_bytes'] / GIB:.2f} GiB of files; {where}.{speed}"
