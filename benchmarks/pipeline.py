"""A whole pipeline: time of an image, and is the device's peak the need of its largest model, or the sum of all of them?

With `--from-files` the time from files to the first image: files are in the page cache or not, with much RAM and with little.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from . import checkpoints
from . import report as reports
from .arms import Arm, choose, parse_size
from .disk import drive_speed, drop_page_cache, files_in, size_of, warm
from .images import Card, make_images, pipeline_of
from .machine import GIB, say
from .options import add
from .processes import Job, Relay
from .report import is_equal, machine_facts, span, verdict

SETTLING_IMAGES = 3
"""With a budget: the first passes measure, and fill what is to stay."""
MODEL_CPU_OFFLOAD = "diffusers model_cpu_offload"
ARMS = (
    "resident",
    "diffusers block+stream",
    *(f"diffusers leaf+stream{recorded}" for recorded in ("", "+record_stream")),
    *(f"ours block{recorded}" for recorded in ("", "+record_stream")),
    "ours leaf",
    MODEL_CPU_OFFLOAD,
    "diffusers block, no stream",
)
_PEERS = (MODEL_CPU_OFFLOAD, "diffusers block+stream")
DEFAULTS: dict[str, tuple[str, ...]] = {
    "flux": ARMS,
    # The most telling ones first: a run that is cut short has them.
    "flux-whole": ("resident", "ours block", *_PEERS),
    "flux-control": ("resident", "ours block", "ours block vram=16GiB", "ours block vram=40GiB", *_PEERS),
    "wan": (
        "resident",
        "ours block",
        *(f"ours block vram={size}" for size in ("25%", "6GiB", "8GiB", "16GiB")),
        *_PEERS,
    ),
}
SHARD_BYTES = 2 << 30
NUM_THREADS = 8
DRIVE_BYTES = 4 << 30
"""How much of the files is read, at least, to tell the drive's speed."""
NOTHING_CHANGES = {"sizes": [], "lora_after": None, "free_bytes": None, "breathes_bytes": 0, "is_warmed_up": True}


_ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "resident": ("resident", {}),
    "ours": ("ours", {"offload_device": "disk"}),
    "model offload": ("model", {}),
    "group offload": ("diffusers", {"offload_type": "block_level", "num_blocks_per_group": 1, "use_stream": True}),
}
CASES = (
    # The files are in the page cache once they are written, so those come first that find them there.
    *(f"{engine}, warm, 4 steps" for engine in _ENGINES),
    "ours, cold, 4 steps",
    "ours, cold, 4 steps @12GiB",
    "ours, warm, 28 steps",
    "resident, warm, 28 steps",
    "ours, cold, 28 steps",
    "model offload, cold, 4 steps",
    "group offload, cold, 4 steps",
)


def case_of(name: str) -> dict[str, Any]:
    """What a case from files is, by its name: "ours, cold, 4 steps @12GiB". The first part is the engine, see `_ENGINES`.

    "is_cold": nothing of the files is in the page cache. "ram_limit_bytes": the process gets so much RAM, what it has in the
    page cache included.

    Raises:
        ValueError: it says none.
    """
    whole, _, ram = name.partition(" @")
    engine, *rest = whole.split(", ")
    steps = [part.removesuffix(" steps") for part in rest if part.endswith(" steps")]
    if engine not in _ENGINES or len(steps) != 1 or set(rest) - {f"{steps[0]} steps", "cold", "warm"}:
        raise ValueError(f"no case {name!r}. One is 'ours, cold, 4 steps @12GiB'; engines: {', '.join(_ENGINES)}")
    limit = parse_size(ram) if ram else None
    is_cold = "cold" in rest or limit is not None
    return {"engine": engine, "num_steps": int(steps[0]), "is_cold": is_cold, "ram_limit_bytes": limit}


# ------------------------------------------------------------------------------------------------ the child


def work(job: dict[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """What a child process does with its job."""
    if "arm" in job:
        arm, whole = Arm(**job["arm"]), pipeline_of(job)
        job["engine"] = "model" if arm.name == MODEL_CPU_OFFLOAD else arm.engine
        job["num_images"] = 1 + (SETTLING_IMAGES if arm.has_budget else 1)
        job["options"] = {**arm.options, **arm.budgets(_weight_bytes(whole) if "%" in arm.vram else 0)}
    result = make_images(job, begin, Card())
    for image in result["images"]:
        if "error" in image:
            return {**result, "error": f"{image['error']['type']}: {image['error']['message']}"}
        if not image["is_finite"]:
            raise RuntimeError("The image is not finite: its hash would show nothing.")
    return result if job["folder"] is not None else {**result, **_measured(result, job["options"])}


def _weight_bytes(whole: Any) -> int:
    import torch

    with torch.device("meta"):
        weights = [weight for model in whole.models.values() for weight in model.build().parameters()]
    return sum(weight.numel() for weight in weights) * 2  # all but a few of them have 16 bits


def _measured(result: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The steps of the last image, by denoiser, and whether the budget was kept."""
    by_denoiser: dict[str, list[dict[str, Any]]] = {}
    for step in result["steps"]:
        by_denoiser.setdefault(step["model"], []).append(step)
    vram = options.get("vram_budget")
    if isinstance(vram, str) and vram.endswith("iB"):
        vram = parse_size(vram)
    peaks = [peak for peak in (result["device_peak_setup_bytes"], result["device_peak_bytes"]) if peak is not None]
    return {
        **_times([step["s"] for each in by_denoiser.values() for step in each[1:]]),
        "denoisers": {name: {**_summary(each), **result["plans"].get(name, {})} for name, each in by_denoiser.items()},
        "vram_budget": vram,
        "ram_budget": options.get("ram_budget"),
        "is_budget_held": max(peaks) <= vram if isinstance(vram, int) and peaks else None,
    }


def _times(steps: Sequence[float]) -> dict[str, float]:
    return {"step_s": statistics.median(steps), "step_min_s": min(steps), "step_max_s": max(steps)}


def _summary(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A denoiser's steps: the first one, which finds another model's weights on the device, against the later ones."""
    first, *later = steps
    times = _times([step["s"] for step in later])
    summary = {**times, "first_step_s": first["s"], "excess_s": first["s"] - times["step_s"]}
    for key in ("stalls", "stalled_s", "sent_bytes"):
        if key in first:
            summary |= {f"first_{key}": first[key], key: statistics.median([step[key] for step in later])}
    return summary


def preload() -> None:
    import diffusers
    import transformers
    from diffusers import FluxPipeline, WanPipeline  # noqa: F401

    diffusers.utils.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


# ------------------------------------------------------------------------------------------------ the parent


def run(options: argparse.Namespace) -> Path | None:
    """Run the arms. Returns the file with the results, if there are any."""
    if options.from_files:
        return _run_from_files(options)
    job = {"pipeline": options.pipeline, "small": options.small, "num_steps": options.steps, "folder": None}
    pipeline = pipeline_of(job)
    if options.steps < pipeline.min_steps:
        raise SystemExit(f"--steps: at least {pipeline.min_steps}: each transformer's first step is not timed.")
    report = reports.new(
        "pipeline",
        options,
        model={"name": f"small-{options.pipeline}" if options.small else options.pipeline},
        product=pipeline.product,
        num_steps=options.steps,
        models={name: model.facts() for name, model in pipeline.models.items()},
    )
    arms = choose(options.arms or DEFAULTS[options.pipeline], ARMS)
    if options.device == "cpu":
        arms = [arm for arm in arms if not (arm.needs_streams or arm.vram or arm.name == MODEL_CPU_OFFLOAD)]
    jobs = [Job(name=arm.name, task={**job, **NOTHING_CHANGES, "arm": asdict(arm)}) for arm in arms]
    return Relay(report, options, jobs).run()


def _run_from_files(options: argparse.Namespace) -> Path | None:
    try:
        cases = {name: case_of(name) for name in options.arms or CASES}
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if options.device == "cpu":
        cases = {name: case for name, case in cases.items() if case["engine"] in ("resident", "ours")}
    job = {"pipeline": "flux-whole", "small": options.small, **NOTHING_CHANGES}
    models = pipeline_of(job).models
    report = reports.new(
        "pipeline",
        options,
        model={"name": "small-first-image" if options.small else "flux-first-image"},
        models={name: model.facts() for name, model in models.items()},
        drive=[],
        from_files=True,
    )
    with ExitStack() as stack:
        folder = stack.enter_context(checkpoints.folder_of(options))
        checkpoints.make_sure({folder / name: model for name, model in models.items()}, options.device, SHARD_BYTES)
        files = [file for name in models for file in files_in(folder / name)]
        report["file_bytes"] = size_of(files)
        jobs = []
        for name, case in cases.items():
            engine, how = _ENGINES[case["engine"]]
            is_cold, limit = case["is_cold"], case["ram_limit_bytes"]
            # A second image finds the page cache as the first one has left it, which says most where RAM is scarce.
            num_images = 1 if is_cold and limit is None else 2
            task = {**job, "folder": str(folder), "engine": engine, "options": how, "num_images": num_images}
            task["num_steps"] = case["num_steps"]
            each = Job(name=name, task=task, facts={"name": name, **case}, ram_limit_bytes=limit)
            each.before = partial(warm, files)
            if is_cold:
                each.before = partial(drop_page_cache, files, may_drop_all=not options.small)
                each.prepare = partial(_measure_drive, files, report, at_most=1)
            jobs.append(each)
        relay = Relay(report, options, jobs)
        for each, _ in relay:
            if each is jobs[-1] and any(case["is_cold"] for case in cases.values()):
                _measure_drive(files, report)
    return relay.path


def _measure_drive(files: Sequence[Path], report: dict[str, Any], at_most: int = 2) -> None:
    """What a plain reader gets of the drive, of the largest files, if that was not measured `at_most` times."""
    if len(report["drive"]) >= at_most:
        return
    largest = sorted(files, key=lambda file: file.stat().st_size, reverse=True)
    speed = drive_speed(largest, NUM_THREADS, DRIVE_BYTES)
    if speed is None:
        say("the drive's speed is not known: no direct reads here")
    else:
        report["drive"].append(speed)
        say(f"plain reader, {NUM_THREADS} threads: {speed / 1e9:.2f} GB/s")


# ------------------------------------------------------------------------------------------------ the tables


def render(report: Mapping[str, Any]) -> str:
    """A report as Markdown: the arms, then their denoisers and tiles; from files the cases, then their images."""
    models = "; ".join(f"{name}: {model['what']}, {model['goes_in']}" for name, model in report["models"].items())
    where = machine_facts(report, "diffusers", "transformers")
    if report.get("from_files"):
        drive = max(report["drive"], default=None)
        speed = "" if drive is None else f" A plain reader got {drive / 1e9:.2f} GB/s of the drive."
        head = f"{models}; {report['file_bytes'] / GIB:.2f} GiB of files; {where}.{speed}"
        tables = [_case_table(report["arms"], drive), _image_table(report["arms"])]
    else:
        product = report.get("product", "image")
        head = f"{models}; {report['num_steps']} steps {'an' if product == 'image' else 'a'} {product}; {where}."
        tables = [_arm_table(report, product), _denoiser_table(report), _tiles_table(report)]
    return "\n\n".join(filter(None, [head, *tables]))


MEMORY = ("device_peak_bytes", "device_reserved_bytes", "rss_bytes", "rss_peak_bytes", "bit_equal")
DENOISER = ("step_s", "(min to max)", "predicted_s", "predicted / step", "sent_bytes", "stalled_s", "first_step_s")
DENOISER += ("first_sent_bytes", "first_stalled_s", "excess_s", "x_streamed_pass")
TILES = ("s", "pixels", "passes", "onloads", "sent_bytes", "bit_equal")
IMAGE = ("encode_prompt_s", "first_step_s", "later_s", "first / later", "decode_s")


def _arm_table(report: Mapping[str, Any], product: str) -> str:
    reference, rows, first = report["arms"].get("resident", {}).get("output_sha256"), {}, f"first_{product}_s"
    for name, arm in report["arms"].items():
        rows[name] = row = dict(arm)
        if "step_s" in arm:
            row |= {"(min to max)": span(arm), first: arm["images_s"][0], "last_s": arm["images_s"][-1]}
            row |= {"budget_bytes": arm.get("vram_budget"), "held": arm.get("is_budget_held")}
            row["bit_equal"] = verdict(is_equal(arm, reference, "is_same_every_image"))
    columns = ("step_s", "(min to max)", first, "last_s", "setup_s", "budget_bytes", "held", *MEMORY)
    return reports.table(rows, columns, "step_s")


def _denoiser_table(report: Mapping[str, Any]) -> str:
    """One row for each arm and denoiser."""
    bandwidth, rows = report["machine"]["pinned_h2d_bytes_per_s"], {}
    for name, arm in report["arms"].items():
        for denoiser, found in arm.get("denoisers", {}).items():
            rows[f"{name}: {denoiser}"] = row = {**found, "(min to max)": span(found)}
            if "predicted_s" in found:
                row["predicted / step"] = found["predicted_s"] / found["step_s"]
            if bandwidth:  # over the time of copying all of its weights from page-locked RAM to the device
                row["x_streamed_pass"] = found["excess_s"] * bandwidth / arm["weight_bytes"][denoiser]
    return reports.table(rows, DENOISER, "step_s") if rows else ""


def _tiles_table(report: Mapping[str, Any]) -> str:
    """One row for each arm that decoded an image tile by tile."""
    tiled = {name: dict(arm["tiled"]) for name, arm in report["arms"].items() if "tiled" in arm}
    reference = tiled.get("resident", {}).get("output_sha256")
    for found in tiled.values():
        found["bit_equal"] = verdict(None if reference is None else found["output_sha256"] == reference)
    return reports.table(tiled, TILES, "s", head="tiled decoding") if tiled else ""


def _case_table(arms: Mapping[str, Mapping[str, Any]], drive: float | None) -> str:
    resident = {
        arm["num_steps"]: arm for arm in arms.values() if arm["engine"] == "resident" and "output_sha256" in arm
    }
    rows = {}
    for name, arm in arms.items():
        rows[name] = row = dict(arm)
        if "output_sha256" not in arm:
            continue
        first, *later = arm["images"]
        row |= {"first_image_s": first["s"], "with_set-up_s": arm["setup_s"] + first["s"]}
        row |= {"second_s": later[0]["s"] if later else None, "from_the_drive_bytes": first["drive_bytes"] or None}
        whole = resident.get(arm["num_steps"])
        if whole is not None:
            # The longer of all compute in a row and all bytes that came from the drive.
            row["limit_s"] = max(whole["images"][-1]["s"], first["drive_bytes"] / drive if drive else 0)
            row["first / limit"] = first["s"] / row["limit_s"]
        row["bit_equal"] = verdict(is_equal(arm, (whole or {}).get("output_sha256"), "is_same_every_image"))
    columns = (
        "setup_s",
        "first_image_s",
        "with_set-up_s",
        "second_s",
        "from_the_drive_bytes",
        "limit_s",
        "first / limit",
    )
    return reports.table(rows, (*columns, "bit_equal"), "output_sha256")


def _image_table(arms: Mapping[str, Mapping[str, Any]]) -> str:
    rows = {}
    for name, arm in arms.items():
        for at, image in enumerate(arm.get("images", ()), 1):
            if "decode" in image:
                first, later = image["steps"][0], statistics.median(image["steps"][1:] or image["steps"])
                times = {"encode_prompt_s": image["encode_prompt"], "decode_s": image["decode"]}
                rows[f"{name}, image {at}"] = {
                    **times,
                    "first_step_s": first,
                    "later_s": later,
                    "first / later": first / later,
                }
    return reports.table(rows, IMAGE, "decode_s") if rows else ""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pipeline", choices=DEFAULTS, default="flux", help="default flux")
    parser.add_argument(
        "--from-files", action="store_true", help="time to the first image, with files in the page cache and not"
    )
    add(parser, "device", "arms", "list", "small", "budget", "disk", "checkpoint", steps=10, timeout=150)
