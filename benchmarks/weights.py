"""Time and memory of one model: resident, under diffusers' group offloading, under accelerate, under this package.

    python benchmarks/weights.py                     a FLUX.1-size transformer, all arms; results in benchmarks/results/
    python benchmarks/weights.py --tokens 16384      the same model where compute, not copies, sets the time
    python benchmarks/weights.py --model wan14b      other models: see --help
    python benchmarks/weights.py --small             tiny models, on the CPU too: does it run?
    python benchmarks/weights.py --table FILE.json   a result as a Markdown table

Each arm runs in a process of its own, one after another, with the same random weights and inputs. Results are written
after every arm, so an interrupted run keeps what it has.

Before a process makes its weights it runs the model with one block of each kind (a model without like blocks, the whole
one) resident on the device, with the inputs that are measured later: torch and CUDA load kernels when they are first used.
What the first step takes beyond the later ones is then what the engine learns in it.

Arms with "from_pretrained" load the model from a checkpoint, which the run saves once and reads before each of them, so
that it is in the page cache. Their set-up time is that of the offloading alone, as in all arms; loading is `load_s`.

After the timed steps one more runs under torch's profiler, which counts how often the host waits for the device and how
often memory is taken from the driver or given back to it.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from arms import ARMS, ROOT, Arm, apply_function
from machine import (
    GIB,
    CopiesBeside,
    count_driver_calls,
    default_device,
    device_peak,
    device_reserved,
    fix_algorithms,
    forget_device_peak,
    measure_machine,
    process_memory,
    sha256,
    synchronize,
    used_ram,
)
from models import NAMES, SEED, Model, find, make_inputs, make_model, warm_up
from processes import Child, Relay, say, serve
from tables import count, gib, markdown, seconds
from torch import nn

READ_BYTES = 64 << 20
MAX_IN_A_ROW = 5
"""Steps that are timed together, with no wait between them."""


# ------------------------------------------------------------------------------------------------ one arm: the child


def run_arm(
    arm: Arm,
    model: Model,
    *,
    device: torch.device,
    num_steps: int,
    folder: str | None,
    checkpoint: str | None,
    is_profiled: bool,
    begin: Callable[[], None],
) -> dict[str, Any]:
    """Set the arm up and run it; `begin` is called before anything is measured. Times are seconds, sizes are bytes."""
    used_before = used_ram()
    apply = apply_function(arm.engine)
    warm_up(model, device)
    inputs = make_inputs(model, device)
    start = time.perf_counter()
    if arm.is_from_checkpoint:
        assert checkpoint is not None
        module = _load(model, Path(checkpoint))
    else:
        module = make_model(model, device, resident=arm.engine == "resident")
    load = time.perf_counter() - start
    weights = {name: weight.numel() * weight.element_size() for name, weight in module.named_parameters()}
    num_bytes, num_parameters = sum(weights.values()), sum(weight.numel() for weight in module.parameters())
    forget_device_peak(device)
    begin()

    start = time.perf_counter()
    handle = apply(module, device, {**arm.options, **({"offload_to_disk_path": folder} if folder else {})})
    synchronize(device)
    setup = time.perf_counter() - start
    setup_device_peak = device_peak(device)
    forget_device_peak(device)
    say(f"{num_bytes / GIB:.2f} GiB of weights set up in {setup:.1f} s")

    copy_beside = CopiesBeside(num_bytes, device) if arm.copies_beside else None
    times: list[float] = []
    outputs: list[torch.Tensor] = []  # looked at later: nothing happens between two steps
    for _ in range(1 + num_steps):
        start = time.perf_counter()
        if copy_beside is not None:
            copy_beside()
        outputs.append(model.call(module, inputs))
        synchronize(device)
        times.append(time.perf_counter() - start)
    # As in a pipeline's loop: nobody waits between two steps.
    num_in_a_row = min(num_steps, MAX_IN_A_ROW)
    start = time.perf_counter()
    for _ in range(num_in_a_row):
        if copy_beside is not None:
            copy_beside()
        output = model.call(module, inputs)
    synchronize(device)
    in_a_row = (time.perf_counter() - start) / num_in_a_row
    outputs.append(output)
    say(f"first step {times[0]:.3f} s, then {statistics.median(times[1:]):.3f} s")

    peak = device_peak(device)
    result: dict[str, Any] = {
        "setup_s": setup,
        "load_s": load if arm.is_from_checkpoint else None,
        "first_step_s": times[0],
        "steps_s": times[1:],
        "step_s": statistics.median(times[1:]),
        "step_min_s": min(times[1:]),
        "step_max_s": max(times[1:]),
        "in_a_row_s": in_a_row,
        "device_peak_bytes": peak,
        "device_peak_run_bytes": None if peak is None else max(peak, setup_device_peak or 0),
        "device_reserved_bytes": device_reserved(device),
        **process_memory(),
        "ram_used_bytes": used_ram() - used_before,
        "weight_bytes": num_bytes,
        "used_weight_bytes": sum(size for name, size in weights.items() if model.is_used(name)),
        "num_parameters": num_parameters,
    }
    if handle is not None:
        result["stats"] = asdict(handle.stats())
        result["num_groups"] = len(handle.groups)
    hashes = [sha256(output) for output in outputs]
    if not torch.isfinite(outputs[-1]).all():
        raise RuntimeError("The output is not finite: its hash would show nothing.")
    result |= {"output_sha256": hashes[-1], "is_same_every_step": len(set(hashes)) == 1}
    if is_profiled:
        result |= count_driver_calls(lambda: model.call(module, inputs), device)
    return result


def _load(model: Model, checkpoint: Path) -> nn.Module:
    for file in sorted(checkpoint.iterdir()):
        with file.open("rb", buffering=0) as opened:
            while opened.read(READ_BYTES):
                pass
    with torch.device("meta"):
        kind: Any = type(model.build())
    module: nn.Module = kind.from_pretrained(checkpoint, dtype=model.dtype)
    return module.eval().requires_grad_(False)


def save(model: Model, device: torch.device, checkpoint: Path) -> dict[str, Any]:
    """Write the model as `save_pretrained` does. It is on the drive when this returns: nothing is written later."""
    module: Any = make_model(model, device, resident=False)
    start = time.perf_counter()
    module.save_pretrained(checkpoint)
    for file in checkpoint.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    say(f"checkpoint saved in {time.perf_counter() - start:.1f} s")
    return {}


@torch.no_grad()
def work(job: dict[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """What a child process does with its job."""
    fix_algorithms()
    device, model = torch.device(job["device"]), find(**job["model"])
    if job["arm"] is None:
        return save(model, device, Path(job["checkpoint"]))
    result = run_arm(
        ARMS[job["arm"]],
        model,
        device=device,
        num_steps=job["num_steps"],
        folder=job["folder"],
        checkpoint=job["checkpoint"],
        is_profiled=job["is_profiled"],
        begin=begin,
    )
    if job["measures_machine"]:
        gc.collect()
        result["machine"] = measure_machine(device)
    return result


def child_main() -> None:
    import diffusers.hooks  # noqa: F401
    from diffusers import AutoencoderKL, FluxTransformer2DModel, UNet2DConditionModel, WanTransformer3DModel  # noqa: F401

    serve(work)


# ------------------------------------------------------------------------------------------------ all arms: the parent


def run(arms: Sequence[Arm], options: argparse.Namespace) -> Path | None:
    """Run the arms one after another. Returns the file with the results, if there are any."""
    sizes = _sizes(options)
    model = find(**sizes)
    report: dict[str, Any] = {
        "benchmark": "weights",
        "date": datetime.date.today().isoformat(),
        "label": options.label,
        "model": {
            **asdict(model),
            "what": model.what,
            "goes_in": model.goes_in,
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        "seed": SEED,
        "is_warmed_up": True,
        "machine": None,
        "arms": {},
    }
    path: Path | None = None
    runnable = [arm for arm in arms if options.device != "cpu" or not arm.needs_streams]
    relay = Relay(__file__, timeout=options.timeout, budget=options.budget)
    with ExitStack() as stack:
        checkpoint: Path | None = None
        for number, arm in enumerate(runnable, 1):
            say(f"{number}/{len(runnable)} {arm.name}", relay.elapsed)
            missing = arm.missing()
            result: dict[str, Any] = {}
            if missing is not None:
                result = {"error": f"not run: {missing} is not installed"}
            elif arm.is_from_checkpoint and checkpoint is None:
                checkpoint = stack.enter_context(_checkpoint(options))
                if not (checkpoint / "config.json").exists():
                    result = Child(__file__).run(_job(options, sizes, arm=None, checkpoint=checkpoint), options.timeout)
            if not result:
                with _folder(arm, options.disk) as folder:
                    job = _job(options, sizes, arm=arm, checkpoint=checkpoint, folder=folder)
                    job["measures_machine"] = report["machine"] is None
                    result = relay.run(job, is_last=number == len(runnable))
            report["machine"] = result.pop("machine", None) or report["machine"]
            report["arms"][arm.name] = {**asdict(arm), **result}
            if "error" in result:
                say(result["error"])
            if report["machine"] is not None:
                path = _write(report, options.output)
    relay.end()
    say("done", relay.elapsed)
    return path


def _job(
    options: argparse.Namespace,
    sizes: dict[str, Any],
    *,
    arm: Arm | None,
    checkpoint: Path | None,
    folder: str | None = None,
) -> dict[str, Any]:
    """What a child is sent. Without an arm it saves the checkpoint."""
    return {
        "arm": arm and arm.name,
        "model": sizes,
        "device": options.device,
        "num_steps": min(options.steps, options.slow_steps) if arm and arm.is_slow else options.steps,
        "folder": folder,
        "checkpoint": checkpoint and str(checkpoint),
        "is_profiled": not options.no_profile,
        "measures_machine": False,
    }


@contextmanager
def _checkpoint(options: argparse.Namespace) -> Iterator[Path]:
    """The folder of the checkpoint: the user's, which stays, or a temporary one."""
    if options.checkpoint is not None:
        yield options.checkpoint
        return
    with tempfile.TemporaryDirectory(prefix="group-offload-checkpoint-", dir=options.disk) as folder:
        yield Path(folder)


@contextmanager
def _folder(arm: Arm, parent: Path | None) -> Iterator[str | None]:
    """For the group files of an arm that has some. It goes with them, also when the arm was stopped."""
    if not arm.on_disk:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="group-offload-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield folder


def _write(report: dict[str, Any], folder: Path) -> Path:
    device = report["machine"]["device"].lower().replace("nvidia ", "").replace(" ", "-")
    parts = ("weights", report["model"]["name"], report["label"], device, report["date"])
    path = folder / f"{'-'.join(part for part in parts if part)}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path


# ------------------------------------------------------------------------------------------------ the table


def render_table(report: Mapping[str, Any]) -> str:
    """A report of this benchmark as Markdown: what was measured where, then one row for each arm."""
    arms = report["arms"]
    reference = arms.get("resident", {}).get("output_sha256")
    floor = copy_floor(report)
    columns = {
        "step": lambda arm: f"{seconds(arm['step_s'])} s",
        "(min to max)": lambda arm: f"{seconds(arm['step_min_s'])} to {seconds(arm['step_max_s'])}",
        "in a row": lambda arm: f"{seconds(arm['in_a_row_s'])} s" if "in_a_row_s" in arm else "",
        "x floor": lambda arm: f"{arm['step_s'] / floor:.2f}" if floor and arm["engine"] != "resident" else "",
        "first step": lambda arm: f"{seconds(arm['first_step_s'])} s",
        "first / later": lambda arm: f"{arm['first_step_s'] / arm['step_s']:.2f}",
        "set-up": lambda arm: f"{arm['setup_s']:.1f} s",
        "device peak": lambda arm: gib(arm["device_peak_bytes"]),
        "reserved": lambda arm: gib(arm.get("device_reserved_bytes")),
        "RSS": lambda arm: gib(arm["rss_bytes"]),
        "RSS peak": lambda arm: gib(arm["rss_peak_bytes"]),
        "waits": lambda arm: count(arm.get("host_synchronisations")),
        "allocations": lambda arm: count(arm.get("device_allocations")),
        "bit-equal": lambda arm: _verdict(arm, reference),
    }
    rows: list[tuple[str, ...]] = [("", *columns)]
    for name, arm in arms.items():
        is_done = "step_s" in arm
        cells = [column(arm) for column in columns.values()] if is_done else [arm["error"], *[""] * (len(columns) - 1)]
        rows.append((name, *cells))
    return "\n".join([" ".join(_facts(report)), "", markdown(rows)])


def _facts(report: Mapping[str, Any]) -> Iterator[str]:
    machine, model = report["machine"], report["model"]
    done = [arm for arm in report["arms"].values() if "step_s" in arm]
    num_bytes = done[0]["weight_bytes"] if done else 0
    # Reports of before there were several models have the counts only.
    what = model.get("what") or f"{model['num_double']} + {model['num_single']} blocks"
    goes_in = model.get("goes_in") or f"{model['num_tokens']} image tokens and {model['num_text_tokens']} text tokens"
    packages = [f"{name} {machine[name]}" for name in ("torch", "diffusers", "accelerate") if machine.get(name)]
    yield (
        f"{what}, {num_bytes / GIB:.2f} GiB {model.get('dtype', 'bfloat16')}, {goes_in}; one {machine['device']}, "
        f"{', '.join(packages)}, {report['date']}."
    )
    floor = copy_floor(report)
    if floor:
        used = done[0].get("used_weight_bytes", num_bytes)
        which = "every weight" if used == num_bytes else f"the {used / GIB:.2f} GiB that are used"
        yield (
            f"Page-locked RAM to the device: {machine['pinned_h2d_bytes_per_s'] / 1e9:.1f} GB/s, so streaming {which} once "
            f"takes at least {seconds(floor)} s (the floor)."
        )
    if report.get("is_warmed_up"):
        yield (
            "Before its weights were made, each process ran one block of each kind, or a small model as a whole, with the "
            "same inputs: no first step loads CUDA kernels."
        )
    if any(arm.get("host_synchronisations") is not None for arm in done):
        yield "Waits of the host for the device and allocations (and releases) by the driver are those of one later step."
    if any(arm["on_disk"] for arm in done):
        yield "Files had just been written when they were read: they were in the page cache."
    if any(arm.get("is_from_checkpoint") for arm in done):
        yield "The checkpoint of from_pretrained was in the page cache, too."


def copy_floor(report: Mapping[str, Any]) -> float | None:
    """Seconds that it takes to copy the weights that a step uses once, from page-locked RAM to the device."""
    bandwidth: float | None = (report["machine"] or {}).get("pinned_h2d_bytes_per_s")
    done = next((arm for arm in report["arms"].values() if "step_s" in arm), None)
    if not bandwidth or done is None:
        return None
    return float(done.get("used_weight_bytes", done["weight_bytes"]) / bandwidth)


def _verdict(arm: Mapping[str, Any], reference: str | None) -> str:
    if reference is None:
        return "not compared"
    return "yes" if arm["output_sha256"] == reference and arm["is_same_every_step"] else "**no**"


# ------------------------------------------------------------------------------------------------ command line


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=NAMES, default="flux", help="default flux; small is the small flux")
    parser.add_argument(
        "--arms",
        nargs="+",
        metavar="ARM",
        help="only these: whole names, or 'ours', 'diffusers' (default: all for a large model, else those from "
        "page-locked RAM)",
    )
    parser.add_argument("--list", action="store_true", help="print the names of the arms")
    parser.add_argument("--small", action="store_true", help="a tiny model of the same kind")
    parser.add_argument("--blocks", nargs="+", type=int, metavar="COUNT", help="how many blocks, of each kind")
    parser.add_argument("--tokens", type=int, help="tokens (flux: of the image)")
    parser.add_argument("--frames", type=int, help="latent frames (wan14b)")
    parser.add_argument("--steps", type=int, default=10, help="steps that are timed after the first (default 10)")
    parser.add_argument("--slow-steps", type=int, default=3, help="the same for arms that take seconds (default 3)")
    parser.add_argument("--no-profile", action="store_true", help="do not count the calls to the driver")
    parser.add_argument("--device", help="default: the accelerator, else cpu")
    parser.add_argument(
        "--disk",
        type=Path,
        help="folder for group files and the checkpoint, deleted afterwards (default: the temporary one)",
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FOLDER",
        help="the checkpoint of the from_pretrained arms: used if it is there, else written and kept",
    )
    parser.add_argument("--timeout", type=float, default=150, help="seconds for each arm (default 150)")
    parser.add_argument("--budget", type=float, default=1800, help="seconds for all of them (default 1800)")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--label", default="", help="goes into the name of the file, to tell two runs apart")
    parser.add_argument("--table", type=Path, metavar="FILE.json", help="print a result as Markdown; run nothing")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.slow_steps < 1:
        parser.error("--steps and --slow-steps: at least 1")
    if options.device is None:
        options.device = default_device()
    return options


def _sizes(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `models.find`."""
    return {
        "name": options.model,
        "small": options.small,
        "blocks": options.blocks,
        "tokens": options.tokens,
        "frames": options.frames,
    }


def _chosen(names: Sequence[str] | None, model: Model) -> list[Arm]:
    if names is None:
        return [arm for arm in ARMS.values() if model.has_all_arms or arm.is_basic]
    unknown = [name for name in names if name not in ARMS and not any(arm.engine == name for arm in ARMS.values())]
    if unknown:
        raise SystemExit(f"No arm {unknown}. Arms: {', '.join(map(repr, ARMS))}.")
    # In the order given: a run that is cut short has the first ones. The name of an engine that is an arm's too
    # ("resident") is the arm's.
    chosen = [
        arm for name in names for arm in ARMS.values() if arm.name == name or (arm.engine == name and name not in ARMS)
    ]
    return list({arm.name: arm for arm in chosen}.values())


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    if options.child:
        child_main()
        return
    if options.table:
        print(render_table(json.loads(options.table.read_text())))
        return
    if options.list:
        print("\n".join(ARMS))
        return
    try:
        model = find(**_sizes(options))
    except ValueError as error:
        raise SystemExit(str(error)) from None
    path = run(_chosen(options.arms, model), options)
    if path is None:
        raise SystemExit("No arm gave a result.")
    print(render_table(json.loads(path.read_text())))
    print(f"\n{path}", file=sys.stderr)


if __name__ == "__main__":
    main()
