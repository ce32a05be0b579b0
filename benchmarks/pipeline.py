"""A whole pipeline: is the device's peak the need of its largest model, or the sum of all of them?

    python benchmarks/pipeline.py                     FLUX, all arms, results in benchmarks/results/
    python benchmarks/pipeline.py --pipeline wan      two transformers that take turns; budgets
    python benchmarks/pipeline.py --small             tiny models, on the CPU too: does it run?
    python benchmarks/pipeline.py --table FILE.json   a result as Markdown tables

diffusers' `FluxPipeline`, from two text encoders to the decoded image, or its `WanPipeline` with two transformers, one for
the first steps and one for the later ones; what they consist of is in pipelines.py. Weights are random. Each arm is a
process of its own, as in weights.py, and makes two images (or videos): the first while the engine learns, the second as all
later ones. Of FLUX each model then runs alone in a process of its own, under this package: that is what it needs.

With " vram=25%" (of the weights of all models; or "vram=8GiB") or " ram=auto" behind an arm's name this package gets
budgets for the whole process. Before the image that is measured there are three then: plans are made, and what is to stay on
the device comes there. *held* says whether the allocator's peak, from before set-up on, was within `vram_budget`.

A *step* is the denoiser's forward and the scheduler's part, until its result is there (copies for the next one may be on
their way). A denoiser's first step is not among those that *step* is the median of: it is *first step*, *excess* is what it
takes longer, *x streamed pass* that over the time that copying all of the denoiser's weights takes. *predicted* is what its
plan says of a forward.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from arms import ROOT, Arm, apply_function, parse_size, split_budgets
from machine import (
    PeakWatch,
    default_device,
    device_peak,
    device_reserved,
    fix_algorithms,
    forget_device_peak,
    measure_machine,
    process_memory,
    sha256,
    synchronize,
    wait_for_output,
)
from models import Model, make_inputs, make_model, warm_up
from pipelines import PIPELINES, Pipeline
from processes import Relay, say, serve
from tables import gib, markdown, seconds

SETTLING_IMAGES = 3
"""With a budget: the first passes measure, and fill what is to stay."""
BLOCK: dict[str, Any] = {"offload_type": "block_level", "num_blocks_per_group": 1}
LEAF: dict[str, Any] = {"offload_type": "leaf_level"}
STREAM = {"use_stream": True}
RECORDED = {"use_stream": True, "record_stream": True}

ARMS = {
    name: Arm(name=name, engine=engine, options=options)
    for name, engine, options in (
        ("resident", "resident", {}),
        ("diffusers block+stream", "diffusers", {**BLOCK, **STREAM}),
        ("diffusers leaf+stream", "diffusers", {**LEAF, **STREAM}),
        ("diffusers leaf+stream+record_stream", "diffusers", {**LEAF, **RECORDED}),
        ("ours block", "ours", BLOCK),
        ("ours block+record_stream", "ours", {**BLOCK, **RECORDED}),
        ("ours leaf", "ours", LEAF),
        ("diffusers model_cpu_offload", "model_cpu_offload", {}),
        ("diffusers block, no stream", "diffusers", BLOCK),
    )
}
DEFAULTS: dict[str, tuple[str, ...]] = {
    "flux": tuple(ARMS),
    # The most telling ones first: a run that is cut short has them.
    "wan": (
        "resident",
        "ours block",
        "ours block vram=25%",
        "ours block vram=6GiB",
        "ours block vram=8GiB",
        "ours block vram=16GiB",
        "diffusers model_cpu_offload",
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
        handles = _place(pipe, arm, {**arm.options, **budgets}, device)
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
    say(f"{pipeline.product}s in {', '.join(f'{image_s:.2f} s' for image_s in images_s)}")
    if not all(bool(torch.isfinite(image).all()) for image in images):
        raise RuntimeError(f"The {pipeline.product} is not finite: its hash would show nothing.")
    hashes = [sha256(image) for image in images]
    return {**result, "output_sha256": hashes[-1], "is_same_every_image": len(set(hashes)) == 1}


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
    prediction = plan.details.prediction
    if not prediction.compute_seconds:  # on the CPU it is not measured
        return {}
    return {
        "predicted_s": plan.step_seconds,
        "plan": str(plan),
        "speeds": asdict(plan.details.problem.speeds),
        "h2d_bytes": prediction.h2d_bytes,
        "compute_s": prediction.compute_seconds,
    }


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


def _place(pipe: Any, arm: Arm, options: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Returns this package's handles, by the names of models."""
    if arm.engine == "resident":
        pipe.to(device)
    elif arm.engine == "diffusers":
        pipe.enable_group_offload(onload_device=device, **options)
    elif arm.engine == "model_cpu_offload":
        pipe.enable_model_cpu_offload(device=device)
    else:
        sys.path.insert(0, str(ROOT))
        from group_offload import enable_group_offload

        return dict(enable_group_offload(pipe, onload_device=device, **options))
    return {}


@torch.no_grad()
def work(job: dict[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """What a child process does with its job."""
    fix_algorithms()
    device, pipeline = torch.device(job["device"]), PIPELINES[job["pipeline"]](small=job["small"])
    if job["component"] is not None:
        return run_alone(pipeline.models[job["component"]], device=device, begin=begin)
    result = run_pipeline(Arm(**job["arm"]), pipeline, device=device, num_steps=job["num_steps"], begin=begin)
    if job["measures_machine"]:
        result["machine"] = measure_machine(device)
    return result


def child_main() -> None:
    import diffusers
    import transformers
    from diffusers import FluxPipeline, WanPipeline  # noqa: F401

    diffusers.utils.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    serve(work)


# ------------------------------------------------------------------------------------------------ the parent


def run(arms: Sequence[Arm], options: argparse.Namespace) -> Path | None:
    """Run the arms, then each model alone. Returns the file with the results, if there are any."""
    pipeline = PIPELINES[options.pipeline](small=options.small)
    which = "pipeline" if options.pipeline == "flux" else f"pipeline-{options.pipeline}"
    report: dict[str, Any] = {
        "benchmark": "pipeline",
        "date": datetime.date.today().isoformat(),
        "name": f"small-{which}" if options.small else which,
        "product": pipeline.product,
        "num_steps": options.steps,
        "models": {
            name: {**asdict(model), "what": model.what, "goes_in": model.goes_in}
            for name, model in pipeline.models.items()
        },
        "machine": None,
        "arms": {},
        "alone": {},
        "alone_arm": ALONE,
    }
    if options.device == "cpu":
        arms = [arm for arm in arms if not (arm.needs_streams or arm.vram or arm.engine == "model_cpu_offload")]
    alone = pipeline.models if pipeline.is_measured_alone else ()
    if options.alone is not None:
        if unknown := set(options.alone) - set(pipeline.models):
            raise SystemExit(f"No model {sorted(unknown)}. Models: {', '.join(pipeline.models)}.")
        alone = [name for name in pipeline.models if name in options.alone]
    jobs: list[tuple[Arm | None, str]] = [*((arm, arm.name) for arm in arms), *((None, name) for name in alone)]
    path: Path | None = None
    relay = Relay(__file__, timeout=options.timeout, budget=options.budget)
    for number, (arm, name) in enumerate(jobs, 1):
        say(f"{number}/{len(jobs)} {name}{', alone' if arm is None else ''}", relay.elapsed)
        job = {
            "pipeline": options.pipeline,
            "arm": arm and asdict(arm),
            "component": name if arm is None else None,
            "small": options.small,
            "device": options.device,
            "num_steps": options.steps,
            "measures_machine": arm is not None and report["machine"] is None,
        }
        result = relay.run(job, is_last=number == len(jobs))
        report["machine"] = result.pop("machine", None) or report["machine"]
        report["alone" if arm is None else "arms"][name] = result
        if "error" in result:
            say(result["error"])
        if report["machine"] is not None:
            path = _write(report, options.output)
    relay.end()
    say("done", relay.elapsed)
    return path


def _write(report: dict[str, Any], folder: Path) -> Path:
    device = report["machine"]["device"].lower().replace("nvidia ", "").replace(" ", "-")
    path = folder / f"{report['name']}-{device}-{report['date']}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path


def render_tables(report: Mapping[str, Any]) -> str:
    """A report as Markdown: the arms, their denoisers, then the models alone beside the pipeline."""
    tables = [list(_arm_rows(report)), list(_denoiser_rows(report))]
    if report["alone"]:
        tables.append(list(_alone_rows(report)))
    return "\n\n".join([" ".join(_facts(report)), *(markdown(rows) for rows in tables if len(rows) > 1)])


def _facts(report: Mapping[str, Any]) -> Iterator[str]:
    machine = report["machine"]
    packages = [f"{name} {machine[name]}" for name in ("torch", "diffusers", "transformers") if machine.get(name)]
    models = "; ".join(f"{name}: {model['what']}, {model['goes_in']}" for name, model in report["models"].items())
    num_steps, product = report["num_steps"], report.get("product", "image")
    article = "an" if product == "image" else "a"
    yield (
        f"{models}; {num_steps} steps {article} {product}; one {machine['device']}, {', '.join(packages)}, {report['date']}."
    )


def _arm_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    done = [arm for arm in report["arms"].values() if "step_s" in arm]
    last = "second" if all(len(arm["images_s"]) == 2 for arm in done) else "last"
    has_budgets = any(arm.get("vram_budget") for arm in done)
    columns = ["step", "(min to max)", f"first {report.get('product', 'image')}", last, "set-up"]
    columns += [*(["budget", "held"] if has_budgets else []), "device peak", "reserved", "RSS", "RSS peak"]
    reference = report["arms"].get("resident", {}).get("output_sha256")
    yield ("", *columns, "bit-equal")
    for name, arm in report["arms"].items():
        if "step_s" not in arm:
            yield (name, arm["error"], *[""] * len(columns))
            continue
        is_equal = arm["output_sha256"] == reference and arm["is_same_every_image"]
        yield (
            name,
            f"{seconds(arm['step_s'])} s",
            f"{seconds(arm['step_min_s'])} to {seconds(arm['step_max_s'])}",
            *(f"{seconds(arm['images_s'][index])} s" for index in (0, -1)),
            f"{arm['setup_s']:.1f} s",
            *(_budget_cells(arm) if has_budgets else ()),
            *(gib(arm[f"{key}_bytes"]) for key in ("device_peak", "device_reserved", "rss", "rss_peak")),
            "not compared" if reference is None else "yes" if is_equal else "**no**",
        )


def _budget_cells(arm: Mapping[str, Any]) -> tuple[str, str]:
    vram, is_held = arm.get("vram_budget"), arm.get("is_budget_held")
    return gib(vram) if isinstance(vram, int) else vram or "", "" if is_held is None else "yes" if is_held else "**no**"


def _denoiser_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """One row for each arm and denoiser."""
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "step": lambda found: f"{seconds(found['step_s'])} s",
        "(min to max)": lambda found: f"{seconds(found['step_min_s'])} to {seconds(found['step_max_s'])}",
        "predicted": lambda found: f"{seconds(found['predicted_s'])} s" if "predicted_s" in found else "",
        "predicted / step": lambda found: (
            f"{found['predicted_s'] / found['step_s']:.2f}" if "predicted_s" in found else ""
        ),
        "sent": lambda found: gib(found.get("sent_bytes")),
        "stalled": lambda found: f"{found['stalled_s']:.4f} s" if "stalled_s" in found else "",
        "first step": lambda found: f"{seconds(found['first_step_s'])} s",
        "its sent": lambda found: gib(found.get("first_sent_bytes")),
        "its stalled": lambda found: f"{found['first_stalled_s']:.4f} s" if "first_stalled_s" in found else "",
        "excess": lambda found: f"{found['excess_s']:.4f} s",
    }
    bandwidth = report["machine"]["pinned_h2d_bytes_per_s"]
    yield ("", "steps of", *columns, *(["x streamed pass"] if bandwidth else []))
    for name, arm in report["arms"].items():
        for denoiser, found in arm.get("denoisers", {}).items():
            cells = [column(found) for column in columns.values()]
            if bandwidth:
                cells.append(f"{found['excess_s'] / streamed_pass_s(report, arm, denoiser):.2f}")
            yield (name, denoiser, *cells)


def streamed_pass_s(report: Mapping[str, Any], arm: Mapping[str, Any], model: str) -> float:
    """Seconds that it takes to copy all weights of a model from page-locked RAM to the device."""
    return float(arm["weight_bytes"][model] / report["machine"]["pinned_h2d_bytes_per_s"])


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


def choose(names: Sequence[str] | None, pipeline: str) -> list[Arm]:
    """The arms with these names, " vram=25%" and " ram=auto" behind them being budgets; or those of a pipeline."""
    chosen: dict[str, Arm] = {}
    for whole in names or DEFAULTS[pipeline]:
        name, budgets = split_budgets(whole)
        if name not in ARMS:
            raise SystemExit(f"No arm {name!r}. Arms: {', '.join(map(repr, ARMS))}.")
        arm = ARMS[name]
        if budgets and arm.engine != "ours":
            raise SystemExit(f"{whole!r}: only this package's arms have budgets.")
        chosen[whole] = arm.budgeted(budgets) if budgets else arm
    return list(chosen.values())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", choices=PIPELINES, default="flux", help="default flux")
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="only these; budgets behind their names: see above")
    parser.add_argument("--alone", nargs="*", metavar="MODEL", help="measure only these alone (default: all of FLUX)")
    parser.add_argument("--list", action="store_true", help="print the names of the arms")
    parser.add_argument("--small", action="store_true", help="tiny models")
    parser.add_argument("--steps", type=int, default=10, help="denoising steps an image (default 10)")
    parser.add_argument("--device", default=default_device(), help="default: the accelerator, else cpu")
    parser.add_argument("--timeout", type=float, default=150, help="seconds for each process (default 150)")
    parser.add_argument("--budget", type=float, default=1800, help="seconds for all of them (default 1800)")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--table", type=Path, metavar="FILE.json", help="print a result as Markdown; run nothing")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    min_steps = PIPELINES[options.pipeline](small=options.small).min_steps
    if options.steps < min_steps:
        parser.error(f"--steps: at least {min_steps}, because each transformer's first step is not timed")
    if options.child:
        child_main()
    elif options.table:
        print(render_tables(json.loads(options.table.read_text())))
    elif options.list:
        print("\n".join(dict.fromkeys([*ARMS, *DEFAULTS[options.pipeline]])))
    else:
        path = run(choose(options.arms, options.pipeline), options)
        if path is None:
            raise SystemExit("No arm gave a result.")
        print(render_tables(json.loads(path.read_text())))
        print(f"\n{path}", file=sys.stderr)


if __name__ == "__main__":
    main()
