"""Time and memory of a FLUX.1-size transformer: resident, under diffusers' group offloading, under this package.

    python benchmarks/weights.py                     all arms, results in benchmarks/results/
    python benchmarks/weights.py --tokens 16384      the same model where compute, not copies, sets the time
    python benchmarks/weights.py --small             a tiny model, on the CPU too: does it run?
    python benchmarks/weights.py --table FILE.json   a result as a Markdown table

Each arm runs in a process of its own, one after another, with the same random weights and inputs. Results are written
after every arm, so an interrupted run keeps what it has.

[Note: The next process]
Importing takes about as long as the measured steps of an arm. So the process of the next arm is started early, and
imports while the current one makes its weights. The current one starts to measure only once the next one is done with
that and waits for its turn: nothing else runs beside a measurement.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30
SEED = 0
BANDWIDTH_BYTES = 1 << 30
STAGING_BYTES = 32 << 20
MIN_SECONDS = 15
"""Less time than this is not enough to start an arm."""


# ------------------------------------------------------------------------------------------------ what is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to run the model."""

    name: str
    engine: str
    """"resident", "diffusers" or "ours"."""
    options: Mapping[str, Any] = field(default_factory=dict)
    on_disk: bool = False
    is_slow: bool = False
    """Few steps are enough: each takes seconds."""

    @property
    def needs_streams(self) -> bool:
        return bool(self.options.get("use_stream"))


def _arms() -> Iterator[Arm]:
    """The most telling ones first: a run that is cut short has them."""
    block: dict[str, Any] = {"offload_type": "block_level", "num_blocks_per_group": 1}
    leaf: dict[str, Any] = {"offload_type": "leaf_level"}
    stream = {"use_stream": True}
    recorded = {"use_stream": True, "record_stream": True}
    # This package copies ahead by itself where the device has streams; diffusers has to be told.
    engines: tuple[tuple[str, str, dict[str, Any]], ...] = (("diffusers", "+stream", stream), ("ours", "", {}))
    yield Arm(name="resident", engine="resident")
    for engine, suffix, ahead in engines:
        for kind, options in (("block", block), ("leaf", leaf)):
            yield Arm(name=f"{engine} {kind}{suffix}", engine=engine, options={**options, **ahead})
            yield Arm(name=f"{engine} {kind}{suffix}+record_stream", engine=engine, options={**options, **recorded})
    for engine, suffix, ahead in engines:
        yield Arm(
            name=f"{engine} block{suffix}, disk", engine=engine, options={**block, **ahead}, on_disk=True, is_slow=True
        )
    without = {**block, "use_stream": False}
    for engine, _, _ in engines:
        yield Arm(name=f"{engine} block, no stream", engine=engine, options=without, is_slow=True)
    pageable = {**block, "low_cpu_mem_usage": True}
    yield Arm(name="ours block, low_cpu_mem_usage", engine="ours", options=pageable, is_slow=True)
    yield Arm(name="ours leaf, disk", engine="ours", options=leaf, on_disk=True, is_slow=True)


ARMS = {arm.name: arm for arm in _arms()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The model and its inputs."""

    name: str
    num_double: int
    num_single: int
    num_heads: int
    head_dim: int
    rope_dims: tuple[int, int, int]
    text_dim: int
    pooled_dim: int
    num_tokens: int
    num_text_tokens: int

    def config(self) -> dict[str, Any]:
        return {
            "num_layers": self.num_double,
            "num_single_layers": self.num_single,
            "num_attention_heads": self.num_heads,
            "attention_head_dim": self.head_dim,
            "axes_dims_rope": tuple(self.rope_dims),
            "joint_attention_dim": self.text_dim,
            "pooled_projection_dim": self.pooled_dim,
            "in_channels": 64,
            "guidance_embeds": False,
        }


FLUX1 = Shape(
    name="flux1",
    num_double=19,
    num_single=38,
    num_heads=24,
    head_dim=128,
    rope_dims=(16, 56, 56),
    text_dim=4096,
    pooled_dim=768,
    num_tokens=4096,
    num_text_tokens=512,
)
SMALL = Shape(
    name="small",
    num_double=3,
    num_single=6,
    num_heads=4,
    head_dim=32,
    rope_dims=(8, 12, 12),
    text_dim=64,
    pooled_dim=32,
    num_tokens=64,
    num_text_tokens=16,
)


# ------------------------------------------------------------------------------------------------ one arm: the child


def run_arm(
    arm: Arm, shape: Shape, *, device: torch.device, num_steps: int, folder: str | None, begin: Callable[[], None]
) -> dict[str, Any]:
    """Set the arm up and run it; `begin` is called before anything is measured. Times are seconds, sizes are bytes."""
    used_before = _used_ram()
    apply = _apply_function(arm.engine)
    model = _make_model(shape, device, resident=arm.engine == "resident")
    inputs = _make_inputs(shape, device)
    num_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    _forget_device_peak(device)
    begin()

    start = time.perf_counter()
    handle = apply(model, device, {**arm.options, **({"offload_to_disk_path": folder} if folder else {})})
    _synchronize(device)
    setup = time.perf_counter() - start
    setup_device_peak = _device_peak(device)
    _forget_device_peak(device)
    _say(f"{num_bytes / GIB:.2f} GiB of weights set up in {setup:.1f} s")

    times: list[float] = []
    outputs: list[torch.Tensor] = []  # looked at later: nothing happens between two steps
    for _ in range(1 + num_steps):
        start = time.perf_counter()
        outputs.append(model(**inputs, return_dict=False)[0])
        _synchronize(device)
        times.append(time.perf_counter() - start)
    _say(f"first step {times[0]:.3f} s, then {statistics.median(times[1:]):.3f} s")

    device_peak = _device_peak(device)
    hashes = [_hash(output) for output in outputs]
    if not torch.isfinite(outputs[-1]).all():
        raise RuntimeError("The output is not finite: its hash would show nothing.")
    result: dict[str, Any] = {
        "setup_s": setup,
        "first_step_s": times[0],
        "steps_s": times[1:],
        "step_s": statistics.median(times[1:]),
        "step_min_s": min(times[1:]),
        "step_max_s": max(times[1:]),
        "device_peak_bytes": device_peak,
        "device_peak_run_bytes": max(device_peak or 0, setup_device_peak or 0) if device_peak is not None else None,
        "device_reserved_bytes": _device_reserved(device),
        "rss_bytes": psutil.Process().memory_info().rss,
        "rss_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        # RAM that is neither free nor reclaimable, page-locked RAM included. The page cache is not in it.
        "ram_used_bytes": _used_ram() - used_before,
        "output_sha256": hashes[-1],
        "is_same_every_step": len(set(hashes)) == 1,
        "weight_bytes": num_bytes,
        "num_parameters": sum(weight.numel() for weight in model.parameters()),
    }
    if handle is not None:
        result["stats"] = asdict(handle.stats())
        result["num_groups"] = len(handle.groups)
    return result


def _apply_function(engine: str) -> Callable[[nn.Module, torch.device, dict[str, Any]], Any]:
    """What sets an arm up: returns a handle, or None."""
    if engine == "resident":
        return lambda model, device, options: None
    if engine == "diffusers":
        from diffusers.hooks import apply_group_offloading as theirs

        return lambda model, device, options: theirs(model, onload_device=device, **options)
    sys.path.insert(0, str(ROOT))
    from group_offload import apply_group_offloading as ours

    return lambda model, device, options: ours(model, onload_device=device, **options)


def _make_model(shape: Shape, device: torch.device, *, resident: bool) -> nn.Module:
    """The model in bf16. Every arm gets the same values: they are drawn on `device`, each tensor from its own seed."""
    from diffusers import FluxTransformer2DModel

    with torch.device("meta"):
        model: nn.Module = FluxTransformer2DModel(**shape.config()).eval()
    if next(model.buffers(), None) is not None:
        raise RuntimeError("This model has buffers, which would stay uninitialised.")
    staging = torch.empty(STAGING_BYTES // 2, dtype=torch.bfloat16, pin_memory=device.type != "cpu")
    generator = torch.Generator(device)
    for index, (name, weight) in enumerate(list(model.named_parameters())):
        values = torch.empty(weight.shape, dtype=torch.bfloat16, device=device)
        is_scale = weight.ndim == 1 and name.endswith("weight")  # of a norm
        values.normal_(float(is_scale), 0.02, generator=generator.manual_seed(SEED + index))
        if not resident:
            values = _to_ram(values, staging)
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner).register_parameter(last, nn.Parameter(values, requires_grad=False))
    return model


def _to_ram(values: torch.Tensor, staging: torch.Tensor) -> torch.Tensor:
    """`values` in ordinary RAM. By way of a page-locked buffer, which is three times as fast."""
    if values.device.type == "cpu":
        return values
    ram = torch.empty_like(values, device="cpu")
    for source, target in zip(values.view(-1).split(staging.numel()), ram.view(-1).split(staging.numel()), strict=True):
        target.copy_(staging[: source.numel()].copy_(source))
    return ram


def _make_inputs(shape: Shape, device: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(SEED)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)

    side = int(shape.num_tokens**0.5)
    rows = torch.arange(shape.num_tokens, device=device)
    image_ids = torch.stack([torch.zeros_like(rows), rows // side, rows % side], dim=1)
    return {
        "hidden_states": draw(1, shape.num_tokens, 64),
        "encoder_hidden_states": draw(1, shape.num_text_tokens, shape.text_dim),
        "pooled_projections": draw(1, shape.pooled_dim),
        "timestep": torch.full((1,), 0.5, device=device, dtype=torch.bfloat16),
        "img_ids": image_ids.to(torch.bfloat16),
        "txt_ids": torch.zeros(shape.num_text_tokens, 3, device=device, dtype=torch.bfloat16),
    }


def _hash(output: torch.Tensor) -> str:
    return hashlib.sha256(output.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def measure_machine(device: torch.device) -> dict[str, Any]:
    """The machine that the arms run on, and what its link to the device can do."""
    import diffusers

    return {
        "device": _device_name(device),
        "cpu_count": os.cpu_count(),
        "ram_bytes": psutil.virtual_memory().total,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "pinned_h2d_bytes_per_s": _pinned_bandwidth(device),
    }


def _pinned_bandwidth(device: torch.device) -> float | None:
    if device.type == "cpu":
        return None
    source = torch.empty(BANDWIDTH_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    times = []
    for _ in range(8):
        _synchronize(device)
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return BANDWIDTH_BYTES / statistics.median(times[1:])


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "CPU"
    return str(getattr(torch, device.type).get_device_name(device))


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _forget_device_peak(device: torch.device) -> None:
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)


def _device_peak(device: torch.device) -> int | None:
    return None if device.type == "cpu" else torch.accelerator.max_memory_allocated(device)


def _device_reserved(device: torch.device) -> int | None:
    return None if device.type == "cpu" else torch.accelerator.max_memory_reserved(device)


def _used_ram() -> int:
    memory = psutil.virtual_memory()
    return int(memory.total - memory.available)


def child_main() -> None:
    """Import, wait for a job, make the weights, wait again, measure. See [Note: The next process]."""
    import diffusers.hooks
    import diffusers.models.transformers.transformer_flux  # noqa: F401

    _tell({"state": "imported"})
    line = sys.stdin.readline()
    if not line:
        return  # nobody needs this process
    job = json.loads(line)
    device = torch.device(job["device"])

    def begin() -> None:
        _tell({"state": "made"})
        sys.stdin.readline()

    try:
        with torch.no_grad():
            result = run_arm(
                ARMS[job["arm"]],
                Shape(**job["shape"]),
                device=device,
                num_steps=job["num_steps"],
                folder=job["folder"],
                begin=begin,
            )
            if job["measures_machine"]:
                result["machine"] = measure_machine(device)
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
    _tell({"state": "done", "result": result})
    os._exit(0)  # gigabytes are not worth being freed one tensor at a time


def _tell(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


# ------------------------------------------------------------------------------------------------ all arms: the parent


class Child:
    """A process that runs one arm."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GROUP_OFFLOAD_PROGRESS_BAR": "0"},
        )

    def wait_for(self, state: str) -> dict[str, Any]:
        """The message that it has come to `state` or to its end.

        Raises:
            EOFError: the process ended without one.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"state"'):
                message: dict[str, Any] = json.loads(line)
                if message["state"] in (state, "done"):
                    return message
        raise EOFError(f"the process ended with status {self._process.wait()} and no result")

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: `wait_for` says so

    def run(self, job: dict[str, Any], limit: float, next_child: Child | None) -> dict[str, Any]:
        """The result of `job`, or {"error": ...}; stopped after `limit` seconds."""
        started = time.monotonic()
        timer = threading.Timer(limit, self._process.kill)
        timer.start()
        try:
            self.send(json.dumps(job))
            message = self.wait_for("made")
            if message["state"] == "made":
                if next_child is not None:
                    next_child.wait_for("imported")
                self.send("go")
                message = self.wait_for("done")
            result: dict[str, Any] = message["result"]
            return result
        except EOFError as error:
            return {"error": f"stopped after {limit:.0f} s" if time.monotonic() - started >= limit else str(error)}
        finally:
            timer.cancel()

    def end(self) -> None:
        """Wait until it is gone, with its memory."""
        self._process.communicate()


def run(arms: Sequence[Arm], shape: Shape, options: argparse.Namespace) -> Path | None:
    """Run the arms one after another. Returns the file with the results, if there are any."""
    report: dict[str, Any] = {
        "benchmark": "weights",
        "date": datetime.date.today().isoformat(),
        "model": asdict(shape),
        "seed": SEED,
        "machine": None,
        "arms": {},
    }
    path: Path | None = None
    started = time.monotonic()
    runnable = [arm for arm in arms if options.device != "cpu" or not arm.needs_streams]
    child: Child | None = Child()
    for number, arm in enumerate(runnable, 1):
        elapsed = time.monotonic() - started
        _say(f"{number}/{len(runnable)} {arm.name}", elapsed)
        left = options.budget - elapsed
        if left < MIN_SECONDS or child is None:
            result = {"error": f"not run: the {options.budget:.0f} s for all arms were over"}
        else:
            next_child = Child() if number < len(runnable) else None
            with _folder(arm, options.disk) as folder:
                job = {
                    "arm": arm.name,
                    "shape": asdict(shape),
                    "device": options.device,
                    "num_steps": min(options.steps, options.slow_steps) if arm.is_slow else options.steps,
                    "folder": folder,
                    "measures_machine": report["machine"] is None,
                }
                result = child.run(job, min(options.timeout, left), next_child)
                child.end()
            child = next_child
        report["machine"] = result.pop("machine", None) or report["machine"]
        report["arms"][arm.name] = {**asdict(arm), **result}
        if "error" in result:
            _say(result["error"])
        if report["machine"] is not None:
            path = _write(report, options.output)
    if child is not None:
        child.end()
    _say("done", time.monotonic() - started)
    return path


@contextmanager
def _folder(arm: Arm, parent: Path | None) -> Iterator[str | None]:
    """For the group files of an arm that has some. It goes with them, also when the arm was stopped."""
    if not arm.on_disk:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="group-offload-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield folder


def _say(text: str, elapsed: float | None = None) -> None:
    print(f"{f'[{elapsed:4.0f} s]' if elapsed is not None else '        '} {text}", file=sys.stderr, flush=True)


def _write(report: dict[str, Any], folder: Path) -> Path:
    model, machine = report["model"], report["machine"]
    device = machine["device"].lower().replace("nvidia ", "").replace(" ", "-")
    tokens = "" if model["num_tokens"] in (FLUX1.num_tokens, SMALL.num_tokens) else f"-{model['num_tokens']}-tokens"
    path = folder / f"weights-{model['name']}{tokens}-{device}-{report['date']}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path


# ------------------------------------------------------------------------------------------------ the table


def render_table(report: Mapping[str, Any]) -> str:
    """A report of this benchmark as Markdown: what was measured where, then one row for each arm."""
    machine, model, arms = report["machine"], report["model"], report["arms"]
    done = {name: arm for name, arm in arms.items() if "step_s" in arm}
    num_bytes = next((arm["weight_bytes"] for arm in done.values()), 0)
    reference = done.get("resident", {}).get("output_sha256")
    bandwidth = machine["pinned_h2d_bytes_per_s"]
    what = (
        f"{model['num_double']} + {model['num_single']} blocks, {num_bytes / GIB:.2f} GiB bf16, {model['num_tokens']} image "
        f"tokens and {model['num_text_tokens']} text tokens; "
    )
    where = f"one {machine['device']}, torch {machine['torch']}, diffusers {machine['diffusers']}, {report['date']}."
    facts = [what + where]
    if bandwidth:
        facts.append(
            f"Page-locked RAM to the device: {bandwidth / 1e9:.1f} GB/s, so streaming every weight once takes at least "
            f"{num_bytes / bandwidth:.3f} s."
        )
    if any(arm["on_disk"] for arm in done.values()):
        facts.append("Files had just been written when they were read: they were in the page cache.")
    rows = [("", "step", "(min to max)", "first step", "set-up", "device peak", "RSS", "RSS peak", "bit-equal")]
    for name, arm in arms.items():
        if "step_s" not in arm:
            rows.append((name, arm["error"], *[""] * 7))
            continue
        is_equal = arm["output_sha256"] == reference and arm["is_same_every_step"]
        rows.append(
            (
                name,
                f"{arm['step_s']:.3f} s",
                f"{arm['step_min_s']:.3f} to {arm['step_max_s']:.3f}",
                f"{arm['first_step_s']:.2f} s",
                f"{arm['setup_s']:.1f} s",
                _gib(arm["device_peak_bytes"]),
                _gib(arm["rss_bytes"]),
                _gib(arm["rss_peak_bytes"]),
                "not compared" if reference is None else "yes" if is_equal else "**no**",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join([" ".join(facts), "", *lines])


def _gib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / GIB:.2f} GiB"


# ------------------------------------------------------------------------------------------------ command line


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="only these: whole names, or 'ours', 'diffusers'")
    parser.add_argument("--list", action="store_true", help="print the names of the arms")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument(
        "--blocks", nargs=2, type=int, metavar=("DOUBLE", "SINGLE"), help="how many blocks of each kind"
    )
    parser.add_argument("--tokens", type=int, help="image tokens")
    parser.add_argument("--steps", type=int, default=8, help="steps that are timed after the first (default 8)")
    parser.add_argument("--slow-steps", type=int, default=3, help="the same for arms that take seconds (default 3)")
    parser.add_argument("--device", help="default: the accelerator, else cpu")
    parser.add_argument(
        "--disk", type=Path, help="folder for group files, deleted afterwards (default: the temporary one)"
    )
    parser.add_argument("--timeout", type=float, default=150, help="seconds for each arm (default 150)")
    parser.add_argument("--budget", type=float, default=1800, help="seconds for all of them (default 1800)")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--table", type=Path, metavar="FILE.json", help="print a result as Markdown; run nothing")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.device is None:
        options.device = "cuda" if torch.cuda.is_available() else "xpu" if torch.xpu.is_available() else "cpu"
    return options


def _chosen(names: Sequence[str] | None) -> list[Arm]:
    if names is None:
        return list(ARMS.values())
    unknown = [name for name in names if name not in ARMS and not any(arm.engine == name for arm in ARMS.values())]
    if unknown:
        raise SystemExit(f"No arm {unknown}. Arms: {', '.join(map(repr, ARMS))}.")
    return [arm for arm in ARMS.values() if arm.name in names or arm.engine in names]


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
    shape = asdict(SMALL if options.small else FLUX1)
    if options.blocks:
        shape["num_double"], shape["num_single"] = options.blocks
        shape["name"] += f"-{options.blocks[0]}+{options.blocks[1]}"
    if options.tokens:
        shape["num_tokens"] = options.tokens
    path = run(_chosen(options.arms), Shape(**shape), options)
    if path is None:
        raise SystemExit("No arm gave a result.")
    print(render_table(json.loads(path.read_text())))
    print(f"\n{path}", file=sys.stderr)


if __name__ == "__main__":
    main()
