"""A whole pipeline: is the device's peak the need of its largest model, or the sum of all of them?"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import first_image
from . import report as reports
from .arms import Arm, apply_function, arm_of, choose, parse_size, plan_facts
from .machine import (
    PeakWatch,
    device_peak,
    device_reserved,
    forget_device_peak,
    process_memory,
    sha256,
    synchronize,
    wait_for_output,
)
from .models import Model, make_inputs, make_model, warm_up
from .options import add
from .pipelines import PIPELINES, Pipeline
from .processes import Relay, say
from .report import gib, is_equal, machine_facts, number, seconds, span, verdict

SETTLING_IMAGES = 3
"""With a budget: the first passes measure, and fill what is to stay."""
MODEL_CPU_OFFLOAD = "diffusers model_cpu_offload"
ARMS = {
    name: arm_of(name)
    for name in (
        "resident",
        "diffusers block+stream",
        *(f"diffusers leaf+stream{recorded}" for recorded in ("", "+record_stream")),
        *(f"ours block{recorded}" for recorded in ("", "+record_stream")),
        "ours leaf",
        MODEL_CPU_OFFLOAD,
        "diffusers block, no stream",
    )
}
DEFAULTS: dict[str, tuple[str, ...]] = {
    "flux": tuple(ARMS),
    # The most telling ones first: a run that is cut short has them.
    "flux-whole": ("resident", "ours block", MODEL_CPU_OFFLOAD, "diffusers block+stream"),
    "flux-control": (
        "resident",
        "ours block",
        "ours block vram=16GiB",
        "ours block vram=40GiB",
        "diffusers block+stream",
        MODEL_CPU_OFFLOAD,
    ),
    "wan": (
        "resident",
        "ours block",
        "ours block vram=25%",
        "ours block vram=6GiB",
        "ours block vram=8GiB",
        "ours block vram=16GiB",
        MODEL_CPU_OFFLOAD,
        "diffusers block+stream",
    ),
}
ALONE = "ours block"
"""The arm that each model is measured alone under."""


# ------------------------------------------------------------------------------------------------ the child


class Steps:
    """The denoising steps of one image: which model ran each, how long it took, and what it had to wait for."""

    def __init__(self, pipe: Any, denoisers: Sequence[str], device: torch.device) -> None:
        self._device = device
        self._model = denoisers[0]
        self._start = 0.0
        self._stats: Mapping[str, Any] = {}
        self.handles: Mapping[str, Any] = {}
        """Those of the denoisers, if they are offloaded by this package."""
        self.done: list[dict[str, Any]] = []
        for name in denoisers:
            getattr(pipe, name).register_forward_pre_hook(partial(self._note_model, name))
        # Hooks of a model run when its first weights are on their way already. The loop begins with its progress bar.
        self._progress_bar, pipe.progress_bar = pipe.progress_bar, self._begin

    def _begin(self, *args: Any, **kwargs: Any) -> Any:
        wait_for_output(self._device)
        self.done = []
        bar = self._progress_bar(*args, **kwargs)
        self._next()
        return bar

    def _note_model(self, name: str, module: torch.nn.Module, args: Any) -> None:
        self._model = name

    def end(self, pipe: Any, number: int, timestep: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The pipeline's `callback_on_step_end`."""
        wait_for_output(self._device)
        step: dict[str, Any] = {"model": self._model, "s": time.perf_counter() - self._start}
        handle, before = self.handles.get(self._model), self._stats.get(self._model)
        if handle is not None and before is not None:
            stats = handle.stats()
            step |= {
                "stalls": stats.stalls - before.stalls,
                "stalled_s": stats.stalled_seconds - before.stalled_seconds,
                "sent_bytes": sum(stats.bytes_onloaded.values()) - sum(before.bytes_onloaded.values()),
                "resident_bytes": stats.resident_bytes,
            }
        self.done.append(step)
        self._next()
        return tensors

    def _next(self) -> None:
        self._stats = {name: handle.stats() for name, handle in self.handles.items()}
        self._start = time.perf_counter()


def run_pipeline(
    arm: Arm, pipeline: Pipeline, *, device: torch.device, num_steps: int, begin: Callable[[], None]
) -> dict[str, Any]:
    """Two images, or more with a budget; the last one is measured. Times are seconds, sizes are bytes."""
    # Experts are alike but for the numbers of their weights.
    for model in {(type(model), model.what): model for model in pipeline.models.values()}.values():
        warm_up(model, device)
    pipe = pipeline.make(device)
    num_bytes = {
        name: sum(each.numel() * each.element_size() for each in getattr(pipe, name).parameters())
        for name in pipeline.models
    }
    steps = Steps(pipe, pipeline.denoisers, device)
    budgets = arm.budgets(sum(num_bytes.values()))
    forget_device_peak(device)
    begin()
    with PeakWatch(device) as setting_up:
        start = time.perf_counter()
        engine = "model" if arm.name == MODEL_CPU_OFFLOAD else arm.engine
        handles = place(pipe, engine, {**arm.options, **budgets}, device)
        synchronize(device)
        setup = time.perf_counter() - start
    say(f"set up in {setup:.1f} s")
    steps.handles = {name: handles[name] for name in pipeline.denoisers if name in handles}

    images: list[torch.Tensor] = []
    images_s: list[float] = []
    with PeakWatch(device) as running:
        for _ in range(1 + (SETTLING_IMAGES if arm.has_budget else 1)):
            start = time.perf_counter()
            images.append(pipeline.call(pipe, num_steps, steps.end))
            synchronize(device)
            images_s.append(time.perf_counter() - start)
    later = [step["s"] for each in _by_denoiser(steps.done).values() for step in each[1:]]
    result = {
        "setup_s": setup,
        "images_s": images_s,
        "step_s": statistics.median(later),
        "step_min_s": min(later),
        "step_max_s": max(later),
        "device_peak_bytes": running.allocated,
        "device_reserved_bytes": running.reserved,
        "device_peak_setup_bytes": setting_up.allocated,
        **process_memory(),
        "weight_bytes": num_bytes,
        "steps": steps.done,
        "denoisers": {
            name: {**_summary(each), **_plan(steps.handles.get(name))}
            for name, each in _by_denoiser(steps.done).items()
        },
        **_budgets(budgets, [setting_up.allocated, running.allocated]),
    }
    if pipeline.decodes_tiles:
        result["tiled"] = _decode_tiles(pipe, pipeline, handles.get("vae"), device)
    say(f"{pipeline.product}s in {', '.join(f'{image_s:.2f} s' for image_s in images_s)}")
    if not all(bool(torch.isfinite(image).all()) for image in images):
        raise RuntimeError(f"The {pipeline.product} is not finite: its hash would show nothing.")
    hashes = [sha256(image) for image in images]
    return {**result, "output_sha256": hashes[-1], "is_same_every_image": len(set(hashes)) == 1}


def _decode_tiles(pipe: Any, pipeline: Pipeline, handle: Any, device: torch.device) -> dict[str, Any]:
    """Decode an image of twice the size, tile by tile, twice; the second time is measured."""
    size = 2 * pipeline.models["vae"].sizes["size"]
    shape = (1, pipeline.models["vae"].config["latent_channels"], size, size)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(device, pipe.vae.dtype)
    pipe.vae.enable_tiling()
    pipe.vae.tile_latent_min_size, pipe.vae.tile_sample_min_size = size // 4, 8 * (size // 4)
    for _ in range(2):
        before = None if handle is None else handle.stats()
        start = time.perf_counter()
        image = pipe.vae.decode(latents, return_dict=False)[0]
        synchronize(device)
        took = time.perf_counter() - start
    found: dict[str, Any] = {"s": took, "pixels": image.shape[-1], "output_sha256": sha256(image)}
    if before is not None:
        after = handle.stats()
        found |= {
            "passes": after.passes - before.passes,
            "onloads": after.onloads - before.onloads,
            "sent_bytes": sum(after.bytes_onloaded.values()) - sum(before.bytes_onloaded.values()),
        }
    return found


def _by_denoiser(steps: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for step in steps:
        found.setdefault(step["model"], []).append(step)
    return found


def _summary(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A denoiser's steps: the first one, which finds another model's weights on the device, against the later ones."""
    first, later = steps[0], [step["s"] for step in steps[1:]]
    step_s = statistics.median(later)
    summary = {
        "step_s": step_s,
        "step_min_s": min(later),
        "step_max_s": max(later),
        "first_step_s": first["s"],
        "excess_s": first["s"] - step_s,
    }
    if "stalls" in first:
        for key in ("stalls", "stalled_s", "sent_bytes"):
            summary[f"first_{key}"] = first[key]
            summary[key] = statistics.median([step[key] for step in steps[1:]])
    return summary


def _plan(handle: Any) -> dict[str, Any]:
    """What a denoiser's plan says of one forward."""
    plan = None if handle is None else handle.plan
    if plan is None or plan.details is None:
        return {}
    # On the CPU compute is not measured.
    return plan_facts(plan) if plan.details.prediction.compute_seconds else {}


def _budgets(budgets: Mapping[str, Any], peaks: Sequence[int | None]) -> dict[str, Any]:
    """The budgets in bytes where they are so many, and whether the device's was kept."""
    vram = budgets.get("vram_budget")
    if isinstance(vram, str) and vram.endswith("iB"):
        vram = parse_size(vram)
    known = [peak for peak in peaks if peak is not None]
    is_held = max(known) <= vram if isinstance(vram, int) and known else None
    return {"vram_budget": vram, "ram_budget": budgets.get("ram_budget"), "is_budget_held": is_held}


def run_alone(model: Model, *, device: torch.device, begin: Callable[[], None]) -> dict[str, Any]:
    """What one model needs by itself: its slots and its activations."""
    apply = apply_function("ours")
    warm_up(model, device)
    module, inputs = make_model(model, device, resident=False), make_inputs(model, device)
    num_bytes = sum(weight.numel() * weight.element_size() for weight in module.parameters())
    forget_device_peak(device)
    begin()
    handle = apply(module, device, dict(ARMS[ALONE].options))
    for _ in range(3):
        output = model.call(module, inputs)
        synchronize(device)
    del output
    return {
        "weight_bytes": num_bytes,
        "device_peak_bytes": device_peak(device),
        "device_reserved_bytes": device_reserved(device),
        "stats": asdict(handle.stats()),
    }


def place(pipe: Any, engine: str, options: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Returns this package's handles, by the names of models."""
    if engine == "resident":
        pipe.to(device)
    elif engine == "model":
        pipe.enable_model_cpu_offload(device=device)
    elif engine == "sequential":
        pipe.enable_sequential_cpu_offload(device=device)
    elif engine == "diffusers":
        pipe.enable_group_offload(onload_device=device, **options)
    else:
        from group_offload import enable_group_offload

        return dict(enable_group_offload(pipe, onload_device=device, **{"vram_budget": None, **options}))
    return {}


def work(job: dict[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """What a child process does with its job."""
    if job.get("from_files"):
        return first_image.work(job, begin)
    device, pipeline = torch.device(job["device"]), PIPELINES[job["pipeline"]](small=job["small"])
    if job["component"] is not None:
        return run_alone(pipeline.models[job["component"]], device=device, begin=begin)
    return run_pipeline(Arm(**job["arm"]), pipeline, device=device, num_steps=job["num_steps"], begin=begin)


def preload() -> None:
    import diffusers
    import transformers
    from diffusers import FluxPipeline, WanPipeline  # noqa: F401

    diffusers.utils.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


# ------------------------------------------------------------------------------------------------ the parent


def run(options: argparse.Namespace) -> Path | None:
    """Run the arms, then each model alone. Returns the file with the results, if there are any."""
    if options.from_files:
        return first_image.run(options)
    pipeline = PIPELINES[options.pipeline](small=options.small)
    if options.steps < pipeline.min_steps:
        raise SystemExit(f"--steps: at least {pipeline.min_steps}: each transformer's first step is not timed.")
    report = reports.new(
        "pipeline",
        options,
        model={"name": f"small-{options.pipeline}" if options.small else options.pipeline},
        product=pipeline.product,
        num_steps=options.steps,
        models={name: model.facts() for name, model in pipeline.models.items()},
        alone={},
        alone_arm=ALONE,
    )
    arms = choose(options.arms or DEFAULTS[options.pipeline], ARMS)
    if options.device == "cpu":
        arms = [arm for arm in arms if not (arm.needs_streams or arm.vram or arm.name == MODEL_CPU_OFFLOAD)]
    alone = list(pipeline.models) if pipeline.is_measured_alone else []
    if options.alone is not None:
        if unknown := set(options.alone) - set(pipeline.models):
            raise SystemExit(f"No model {sorted(unknown)}. Models: {', '.join(pipeline.models)}.")
        alone = [name for name in pipeline.models if name in options.alone]
    job = {"pipeline": options.pipeline, "small": options.small, "num_steps": options.steps}
    relay = Relay(report, options, len(arms) + len(alone))
    for arm in arms:
        relay.run(arm.name, {**job, "arm": asdict(arm), "component": None})
    for name in alone:
        relay.run(name, {**job, "arm": None, "component": name}, into="alone")
    return relay.end()


# ------------------------------------------------------------------------------------------------ the tables


def render(report: Mapping[str, Any]) -> str:
    """A report as Markdown: the arms, their denoisers, then the models alone beside the pipeline."""
    if report.get("from_files"):
        return first_image.render(report)
    tables = [_facts(report), _arm_table(report), _denoiser_table(report), _tiles_table(report)]
    if report["alone"]:
        tables.append(reports.markdown(list(_alone_rows(report))))
    return "\n\n".join(filter(None, tables))


def _facts(report: Mapping[str, Any]) -> str:
    models = "; ".join(f"{name}: {model['what']}, {model['goes_in']}" for name, model in report["models"].items())
    product = report.get("product", "image")
    article = "an" if product == "image" else "a"
    where = machine_facts(report, "diffusers", "transformers")
    return f"{models}; {report['num_steps']} steps {article} {product}; {where}."


def _arm_table(report: Mapping[str, Any]) -> str:
    done = [arm for arm in report["arms"].values() if "step_s" in arm]
    last = "second" if all(len(arm["images_s"]) == 2 for arm in done) else "last"
    reference = report["arms"].get("resident", {}).get("output_sha256")
    columns: reports.Columns = {
        "step": lambda arm: seconds(arm["step_s"]),
        "(min to max)": span,
        f"first {report.get('product', 'image')}": lambda arm: seconds(arm["images_s"][0]),
        last: lambda arm: seconds(arm["images_s"][-1]),
        "set-up": lambda arm: f"{arm['setup_s']:.1f} s",
        "budget": _budget,
        "held": lambda arm: "" if arm.get("is_budget_held") is None else verdict(arm["is_budget_held"]),
        "device peak": lambda arm: gib(arm["device_peak_bytes"]),
        "reserved": lambda arm: gib(arm["device_reserved_bytes"]),
        "RSS": lambda arm: gib(arm["rss_bytes"]),
        "RSS peak": lambda arm: gib(arm["rss_peak_bytes"]),
        "bit-equal": lambda arm: verdict(is_equal(arm, reference, "is_same_every_image")),
    }
    return reports.table(report["arms"], columns, "step_s")


def _budget(arm: Mapping[str, Any]) -> str:
    vram = arm.get("vram_budget")
    return gib(vram) if isinstance(vram, int) else vram or ""


def _denoiser_table(report: Mapping[str, Any]) -> str:
    """One row for each arm and denoiser."""
    bandwidth = report["machine"]["pinned_h2d_bytes_per_s"]
    columns: reports.Columns = {
        "step": lambda found: seconds(found["step_s"]),
        "(min to max)": span,
        "predicted": lambda found: seconds(found.get("predicted_s")),
        "predicted / step": lambda found: (
            number(found["predicted_s"] / found["step_s"], 2) if "predicted_s" in found else ""
        ),
        "sent": lambda found: gib(found.get("sent_bytes")),
        "stalled": lambda found: f"{found['stalled_s']:.4f} s" if "stalled_s" in found else "",
        "first step": lambda found: seconds(found["first_step_s"]),
        "its sent": lambda found: gib(found.get("first_sent_bytes")),
        "its stalled": lambda found: f"{found['first_stalled_s']:.4f} s" if "first_stalled_s" in found else "",
        "excess": lambda found: f"{found['excess_s']:.4f} s",
        # Over the time of copying all of its weights from page-locked RAM to the device.
        "x streamed pass": lambda found: (
            number(found["excess_s"] * bandwidth / found["weight_bytes"], 2) if bandwidth else ""
        ),
    }
    rows = {
        f"{name}: {denoiser}": {**found, "weight_bytes": arm["weight_bytes"][denoiser]}
        for name, arm in report["arms"].items()
        for denoiser, found in arm.get("denoisers", {}).items()
    }
    return reports.table(rows, columns, "step_s") if rows else ""


def _tiles_table(report: Mapping[str, Any]) -> str:
    """One row for each arm that decoded an image tile by tile."""
    tiled = {name: arm["tiled"] for name, arm in report["arms"].items() if "tiled" in arm}
    reference = tiled.get("resident", {}).get("output_sha256")
    columns: reports.Columns = {
        "tiled decoding": lambda found: seconds(found["s"]),
        "pixels": lambda found: f"{found['pixels']} x {found['pixels']}",
        "passes": lambda found: str(found.get("passes", "")),
        "onloads": lambda found: str(found.get("onloads", "")),
        "sent": lambda found: gib(found.get("sent_bytes")),
        "bit-equal": lambda found: verdict(None if reference is None else found["output_sha256"] == reference),
    }
    return reports.table(tiled, columns, "s") if tiled else ""


def _alone_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Reserved memory has no sum: one pool serves all models."""
    yield (report["alone_arm"], "weights", "device peak", "reserved")
    done = {name: alone for name, alone in report["alone"].items() if "weight_bytes" in alone}
    for name, alone in report["alone"].items():
        if name in done:
            keys = ("weight_bytes", "device_peak_bytes", "device_reserved_bytes")
            yield (f"{name} alone", *(gib(alone[key]) for key in keys))
        else:
            yield (f"{name} alone", alone["error"], "", "")
    peaks = [alone["device_peak_bytes"] or 0 for alone in done.values()]
    if peaks and any(peaks):
        yield ("the largest of them", "", gib(max(peaks)), "")
        yield ("their sum", "", gib(sum(peaks)), "")
    whole = report["arms"].get(report["alone_arm"], {})
    if "step_s" in whole:
        peaks_of_it = (gib(whole["device_peak_bytes"]), gib(whole["device_reserved_bytes"]))
        yield ("the pipeline", gib(sum(whole["weight_bytes"].values())), *peaks_of_it)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pipeline", choices=PIPELINES, default="flux", help="default flux")
    parser.add_argument("--alone", nargs="*", metavar="MODEL", help="measure only these alone (default: all of FLUX)")
    parser.add_argument(
        "--from-files", action="store_true", help="time to the first image, with files in the page cache and not"
    )
    add(parser, "device", "arms", "list", "small", "budget", "disk", "checkpoint", steps=10, timeout=150)
