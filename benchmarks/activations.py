"""Training steps of whole transformers with activations on the device, recomputed, and offloaded: time, memory, bits.

    python benchmarks/activations.py --output flux.json                     6 + 12 blocks of FLUX.1, on the accelerator
    python benchmarks/activations.py --model wan14b --output wan.json       8 blocks of Wan 14B
    python benchmarks/activations.py --small --device cpu --output r.json   the same code in a few seconds
    python benchmarks/activations.py --table flux.json --chart flux.svg     a result as a table, and as a picture

A step is forward and backward, with gradients of all weights and no optimizer. All arms run in one process, on one model, one
after another, at each length of the sequence. First come steps with deterministic kernels, from the same inputs and random
numbers: the report says whether the loss and all gradients have the bits of the arm `none` (of the first arm, if that runs
out of memory), and whether `none` repeats itself. Steps with the usual kernels are timed after them.

`none, copies beside` is the arm `none` while as many bytes as `ours` moves are copied for nothing, out during forward and in
during backward: what compute itself loses to the copies. Two limits follow from it. The bar is the longest of compute, the way
out and the way back. But bytes leave only in forward and come back only in backward, so that no engine which keeps bits
can be faster than the sum of both phases' own longest.
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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from chart import draw_panels
from machine import (
    default_device,
    device_peak,
    elapsed,
    fix_algorithms,
    forget_device_peak,
    mark,
    measure_machine,
    synchronize,
)
from models import Model, find, make_inputs, make_model
from tables import markdown
from torch import nn

from group_offload.activations import ActivationOffloadHandle, ActivationStats, apply_activation_offloading
from group_offload.errors import GroupOffloadError
from group_offload.plan.budgets import parse_bytes

ARMS = (
    "none",
    "checkpointing",
    "save_on_cpu",
    "torchtune",
    "ours",
    "ours + checkpointing",
    "none, copies beside",
)
TWINS = {"ours": ("none, copies beside", "none"), "ours + checkpointing": ("checkpointing",)}
"""The arms that compute the same without moving anything; the first one that ran counts."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "flux": {"blocks": [6, 12], "tokens": [1024, 4096, 16384]},
    "wan14b": {"blocks": [8], "frames": [2, 5, 11]},
}
SMALL_DEFAULTS: dict[str, dict[str, Any]] = {"flux": {"tokens": [16, 64]}, "wan14b": {"frames": [1, 3]}}
NUM_COMPARED = 2
"""Steps whose bits are compared: in the first one an engine may still learn."""


# ------------------------------------------------------------------------------------------------ peers


class LikeTorchtune(torch.autograd.graph.saved_tensors_hooks):
    """The way of torchtune's `OffloadActivations` with streams, in short.

    Each tensor goes to page-locked memory of torch's own, on a stream of its own, and the last five copies are waited for
    at the most; in backward each is brought back when it is asked for.
    """

    def __init__(self, device: torch.device, min_bytes: int) -> None:
        self._stash: list[tuple[torch.Tensor, Any]] = []
        has_streams = device.type != "cpu"
        side: Any = torch.Stream(device=device) if has_streams else None

        def pack(tensor: torch.Tensor) -> Any:
            if tensor.nbytes < min_bytes or is_weight(tensor):
                return tensor if tensor.grad_fn is None else tensor.detach()
            target = torch.empty_like(tensor, device="cpu", pin_memory=has_streams)
            if not has_streams:
                return tensor.device, target.copy_(tensor)
            compute = torch.accelerator.current_stream(device)
            if len(self._stash) >= 5:
                compute.wait_event(self._stash.pop(0)[1])
            side.wait_stream(compute)
            with side:
                target.copy_(tensor, non_blocking=True)
            self._stash.append((tensor.detach(), side.record_event()))
            return tensor.device, target

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            to, source = packed
            if not has_streams:
                return source.clone()
            self._stash.clear()
            compute = torch.accelerator.current_stream(device)
            with side:
                found = source.to(to, non_blocking=True)
            compute.wait_stream(side)
            found.record_stream(compute)
            return found

        super().__init__(pack, unpack)


def is_weight(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def pinned_bytes_of_peers(model: Model, module: nn.Module, inputs: dict[str, torch.Tensor], min_bytes: int) -> Any:
    """What the peers would page-lock: each saved tensor, rounded up to a power of two by torch's allocator.

    It is counted in a forward that keeps nothing, so that it is known even where activations fit nowhere.
    """
    found = dict.fromkeys(("save_on_cpu", "torchtune"), 0)

    def pack(tensor: torch.Tensor) -> None:
        rounded = 1 << max(0, tensor.nbytes - 1).bit_length()
        found["save_on_cpu"] += rounded
        if tensor.nbytes >= min_bytes and not is_weight(tensor):
            found["torchtune"] += rounded

    def unpack(_: None) -> torch.Tensor:
        raise AssertionError("There is no backward.")

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        model.call(module, inputs)
    return found


class CopiesBeside:
    """Copies bytes for nothing, on streams of their own, from the point that compute has come to."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._num_bytes = num_bytes
        self._compute_on = device
        size = min(num_bytes, 1 << 28)
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type != "cpu")
        self._device = torch.empty(size, dtype=torch.uint8, device=device)
        self._streams: list[Any] = [None, None]
        if device.type != "cpu":
            self._streams = [torch.Stream(device=device) for _ in range(2)]

    def out(self) -> None:
        self._copy(self._streams[0], self._host, self._device)

    def back(self) -> None:
        self._copy(self._streams[1], self._device, self._host)

    def _copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        if stream is not None:
            stream.wait_stream(torch.accelerator.current_stream(self._compute_on))
        with stream or nullcontext():
            for start in range(0, self._num_bytes, max(1, target.numel())):
                size = min(target.numel(), self._num_bytes - start)
                target[:size].copy_(source[:size], non_blocking=True)


# ------------------------------------------------------------------------------------------------ one arm


class Reference:
    """The loss and the gradients that all arms are to have, in RAM."""

    def __init__(self) -> None:
        self.arm: str | None = None
        self.pinned_bytes = 0
        """Of torch's own allocator."""
        self._tensors: dict[str, torch.Tensor] = {}

    def first_difference(self, arm: str, tensors: dict[str, torch.Tensor]) -> str | None:
        """The name of a tensor that has other bits. The first arm that asks is the reference."""
        if self.arm is None:
            self.arm = arm
            before = pinned() or 0
            self._tensors = {name: _in_ram(tensor) for name, tensor in tensors.items()}
            self.pinned_bytes = (pinned() or 0) - before
            return None
        for name in (*self._tensors, *tensors):
            if name not in self._tensors or name not in tensors:
                return name
            expected = self._tensors[name].to(tensors[name].device)
            if not torch.equal(as_bytes(tensors[name]), as_bytes(expected)):
                return name
        return None


def _in_ram(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu").copy_(tensor.detach())


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


class Arm:
    """What is around forward, and what there is to tell afterwards."""

    def __init__(
        self, name: str, model: Model, module: nn.Module, options: argparse.Namespace, moved_bytes: int
    ) -> None:
        self.name, self.model, self.module, self.options = name, model, module, options
        self.device = torch.device(options.device)
        self.handle: ActivationOffloadHandle | None = None
        self.beside: CopiesBeside | None = None
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext
        if "checkpointing" in name:
            module.enable_gradient_checkpointing()  # type: ignore[operator]
        if name.startswith("ours"):
            self.handle = apply_activation_offloading(
                module,
                device=self.device,
                min_bytes=options.min_bytes,
                keep_last=options.keep_last,
                prefetch=options.prefetch,
            )
        elif name == "save_on_cpu":
            self.around = lambda: torch.autograd.graph.save_on_cpu(pin_memory=self.device.type != "cpu")
        elif name == "torchtune":
            self.around = lambda: LikeTorchtune(self.device, options.min_bytes)
        elif name == "none, copies beside":
            self.beside = CopiesBeside(moved_bytes, self.device)

    def close(self) -> None:
        if self.handle is not None:
            self.handle.remove()
        self.module.disable_gradient_checkpointing()  # type: ignore[operator]
        self.module.zero_grad(set_to_none=True)

    def step(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Forward and backward. `marks` are the moments of compute's stream at its ends and in between."""
        self.marks = [mark(self.device)]
        if self.beside is not None:
            self.beside.out()
        with self.around():
            loss = self.model.call(self.module, inputs).float().square().mean()
        self.marks.append(mark(self.device))
        self.after_forward_bytes = allocated(self.device)
        if self.beside is not None:
            self.beside.back()
        loss.backward()
        self.marks.append(mark(self.device))
        return loss.detach()

    def compare(self, inputs: dict[str, torch.Tensor], reference: Reference) -> dict[str, Any]:
        """Bits of the loss and of all gradients, with deterministic kernels."""
        differences = []
        with deterministic():
            for _ in range(NUM_COMPARED):
                self.module.zero_grad(set_to_none=True)
                torch.manual_seed(0)
                tensors = {"loss": self.step(inputs)}
                tensors |= {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}
                differences.append(reference.first_difference(self.name, tensors))
        report: dict[str, Any] = {
            "loss": tensors["loss"].item(),
            "num_gradients": len(tensors) - 1,
            "bits_equal": not any(differences),
            "first_difference": next((name for name in differences if name is not None), None),
        }
        if reference.arm == self.name:
            report["repeats"] = report["bits_equal"]
        return report

    def measure(self, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Time and memory of steps. Gradients stay allocated: their memory is the same in all arms."""
        options = self.options
        times: list[tuple[float, float, float]] = []
        before: ActivationStats | None = None
        forget_device_peak(self.device)
        for number in range(-options.warm_up, options.steps):
            self.module.zero_grad(set_to_none=False)
            if number == 0:
                reset_peak(self.device)  # and nothing else: no timed step is to allocate anew
                before = None if self.handle is None else self.handle.stats()
            synchronize(self.device)
            begun = time.perf_counter()
            self.step(inputs)
            synchronize(self.device)
            start, middle, end = self.marks
            times.append((time.perf_counter() - begun, elapsed(start, middle), elapsed(middle, end)))
        timed = times[options.warm_up :]
        report: dict[str, Any] = {
            **{
                name: statistics.median(each[number] for each in timed)
                for number, name in enumerate(("step_s", "forward_s", "backward_s"))
            },
            "steps_s": [each[0] for each in timed],
            "peak_bytes": device_peak(self.device),
            "after_forward_bytes": self.after_forward_bytes,
            "pinned_bytes": pinned(),
        }
        if self.handle is not None:
            assert before is not None
            report |= self._moved(before, inputs)
        return report

    def _moved(self, before: ActivationStats, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
        """What the engine did in a timed step, and in one more, which is traced: what each group moves."""
        assert self.handle is not None
        after, steps = self.handle.stats(), self.options.steps
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            with self.handle.trace(path):
                self.step(inputs)
            events = json.loads(path.read_text())["traceEvents"]
        lanes = {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}
        groups: dict[str, int] = {}
        for event in events:
            if event["ph"] == "X" and lanes[event["tid"]] == "D2H":
                groups[event["name"]] = groups.get(event["name"], 0) + event["args"]["bytes"]
        return {
            "out_bytes": (after.offloaded_bytes - before.offloaded_bytes) // steps,
            "back_bytes": (after.reloaded_bytes - before.reloaded_bytes) // steps,
            "kept_bytes": (after.kept_bytes - before.kept_bytes) // steps,
            "stalls": (after.stalls - before.stalls) / steps,
            "group_bytes": groups,
            "pinned_bytes": after.pinned_bytes,
            "stats": {name: getattr(after, name) for name in after.__dataclass_fields__},
        }


def measure(arm: Callable[[], Arm], inputs: dict[str, torch.Tensor], reference: Reference) -> dict[str, Any]:
    """What an arm reports, or why it could not."""
    opened: Arm | None = None
    report: dict[str, Any] = {}
    try:
        opened = arm()
        before = allocated(opened.device)
        report |= opened.compare(inputs, reference)
        report |= {"before_bytes": before, **opened.measure(inputs)}
        if opened.handle is None and report["pinned_bytes"] is not None:
            report["pinned_bytes"] -= reference.pinned_bytes
    except torch.OutOfMemoryError as error:
        report["error"] = f"out of memory: {str(error).partition('.')[0]}"
    except (RuntimeError, MemoryError, OSError, GroupOffloadError) as error:
        report["error"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    finally:
        if opened is not None:
            opened.close()
    return report


# ------------------------------------------------------------------------------------------------ the machine


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def allocated(device: torch.device) -> int | None:
    return None if device.type == "cpu" else int(torch.accelerator.memory_allocated(device))


def reset_peak(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)


def forget_host_cache(device: torch.device) -> None:
    """Give back what torch's own allocator of page-locked memory keeps, so that the next arm does not suffer from it."""
    forget_device_peak(device)
    if device.type != "cpu" and hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache()


def pinned() -> int | None:
    """What torch's own allocator of page-locked memory holds."""
    if not torch.cuda.is_available() or not hasattr(torch.cuda, "host_memory_stats"):
        return None
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def bandwidths(device: torch.device) -> dict[str, float] | None:
    """Bytes a second between page-locked RAM and the device: out, back, and both at once (in each direction)."""
    if device.type == "cpu":
        return None
    copies = CopiesBeside(1 << 30, device)
    other = CopiesBeside(1 << 30, device)

    def rate(run: Callable[[], object]) -> float:
        times = []
        for _ in range(5):
            synchronize(device)
            started = time.perf_counter()
            run()
            synchronize(device)
            times.append(time.perf_counter() - started)
        return (1 << 30) / statistics.median(times[1:])

    return {
        "d2h": rate(copies.out),
        "h2d": rate(copies.back),
        "each_of_both": rate(lambda: (copies.out(), other.back())),
    }


# ------------------------------------------------------------------------------------------------ the report


def run(options: argparse.Namespace, sizes: list[Model]) -> dict[str, Any]:
    begun = time.perf_counter()
    device = torch.device(options.device)
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward does not repeat itself
    module = make_model(sizes[0], device, resident=True).train().requires_grad_(True)
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": measure_machine(device),
        "bandwidth_bytes_per_s": bandwidths(device),
        "model": {"name": options.model, "what": sizes[0].what, "dtype": str(sizes[0].dtype).removeprefix("torch.")},
        "weight_bytes": sum(parameter.nbytes for parameter in module.parameters()),
        "options": {
            name: getattr(options, name) for name in ("warm_up", "steps", "min_bytes", "keep_last", "prefetch")
        },
        "sizes": [],
    }
    host_bytes = None if options.host_memory is None else parse_bytes(options.host_memory, "--host-memory")
    for model in sizes:
        inputs, reference = make_inputs(model, device), Reference()
        arms: dict[str, Any] = {}
        would_pin = pinned_bytes_of_peers(model, module, inputs, options.min_bytes)
        size = {
            "num_tokens": model.num_tokens,  # type: ignore[attr-defined]
            "inputs": model.goes_in,
            "peers_would_pin_bytes": would_pin,
            "arms": arms,
        }
        report["sizes"].append(size)
        for name in options.arms:
            moved = arms.get("ours", {}).get("out_bytes", 0)
            if name == "none, copies beside" and not moved:
                arms[name] = {"error": "left out: the arm `ours` has not said how many bytes"}
            elif options.budget is not None and time.perf_counter() - begun > options.budget:
                arms[name] = {"error": f"left out: the budget of {options.budget:g} s was spent"}
            elif host_bytes is not None and would_pin.get(name, 0) > host_bytes:
                arms[name] = {"error": f"left out: it would page-lock {would_pin[name] / 2**30:.1f} GiB"}
            else:
                forget_host_cache(device)
                new = (name, model, module, options, moved)
                arms[name] = measure(lambda new=new: Arm(*new), inputs, reference)  # type: ignore[misc]
                forget_host_cache(device)
            judge(size, report)
            write(options.output, json.dumps(report, indent=1) + "\n")
            step = arms[name].get("step_s")
            said = arms[name].get("error") if step is None else f"{step:.4f} s"
            print(f"{size['num_tokens']} tokens, {name}: {said}", file=sys.stderr, flush=True)
        del reference
        gc.collect()
    return report


def write(path: Path, content: str) -> None:
    """At once: who is interrupted keeps the file from before."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(content)
    partial.replace(path)


def judge(size: dict[str, Any], report: dict[str, Any]) -> None:
    """Compare arms with `none`, with what the link and compute allow, and with the formula of memory."""
    arms = {name: arm for name, arm in size["arms"].items() if "error" not in arm}
    for arm in arms.values():
        if "none" in arms:
            arm["exposed_s"] = arm["step_s"] - arms["none"]["step_s"]
    for name, names in TWINS.items():
        twin = next((arms[each] for each in names if each in arms), None)
        if name in arms and twin is not None and report["bandwidth_bytes_per_s"] is not None:
            _compare_times(arms[name], twin, report["bandwidth_bytes_per_s"])
        alone = arms.get(names[-1])  # dummy copies have a buffer on the device
        if name in arms and alone is not None and alone["peak_bytes"] is not None:
            _compare_peaks(arms[name], alone, report["options"]["prefetch"])


def _compare_times(arm: dict[str, Any], twin: dict[str, Any], bandwidth: dict[str, float]) -> None:
    forward, backward = twin["forward_s"], twin["backward_s"]
    out, back = arm["out_bytes"] / bandwidth["d2h"], arm["back_bytes"] / bandwidth["h2d"]
    arm["out_s"], arm["back_s"] = out, back
    arm["limit_s"] = max(forward + backward, out, back)
    arm["phases_limit_s"] = max(forward, out) + max(backward, back)
    arm["times_of_limit"] = arm["step_s"] / arm["limit_s"]
    arm["times_of_phases_limit"] = arm["step_s"] / arm["phases_limit_s"]


def _compare_peaks(arm: dict[str, Any], twin: dict[str, Any], prefetch: int) -> None:
    """Of what groups save, the device holds one group, and two on their way out or `prefetch` on their way back.

    The groups that stay are one here. All the rest is what the twin has at its peak, without what its groups save.
    """
    saved = [*arm["group_bytes"].values(), arm["kept_bytes"]]
    window = 1 + max(2, prefetch)
    most = max(sum(saved[start : start + window]) for start in range(max(1, len(saved) - window + 1)))
    arm["expected_peak_bytes"] = twin["peak_bytes"] - sum(saved) + most
    arm["times_of_expected_peak"] = arm["peak_bytes"] / arm["expected_peak_bytes"]


HEAD = (
    *("arm", "step, s", "forward, s", "backward, s", "beyond none, s", "x bar", "x both phases", "peak, GiB"),
    *("x formula", "after forward, GiB", "page-locked, GiB", "moved out, GiB", "same bits"),
)


def table(report: dict[str, Any]) -> str:
    machine, model, bandwidth = report["machine"], report["model"], report["bandwidth_bytes_per_s"]
    link = ""
    if bandwidth is not None:
        both = f"{bandwidth['each_of_both'] / 1e9:.1f} GB/s in each direction at once"
        link = f" Link: {bandwidth['d2h'] / 1e9:.1f} GB/s out, {bandwidth['h2d'] / 1e9:.1f} GB/s back, {both}."
    lines = [
        f"{model['name']}: {model['what']}, {report['weight_bytes'] / 2**30:.2f} GiB {model['dtype']}, all trained; "
        f"one {machine['device']}, torch {machine['torch']}, diffusers {machine['diffusers']}, {report['date']}.{link}"
    ]
    for size in report["sizes"]:
        rows = [HEAD]
        for name, arm in size["arms"].items():
            if "error" in arm:
                rows.append((name, arm["error"], *[""] * (len(HEAD) - 2)))
                continue
            row = (
                *(_number(arm.get(key), 4) for key in ("step_s", "forward_s", "backward_s", "exposed_s")),
                *(_number(arm.get(key), 3) for key in ("times_of_limit", "times_of_phases_limit")),
                _gib(arm["peak_bytes"]),
                _number(arm.get("times_of_expected_peak"), 3),
                *(_gib(arm.get(key)) for key in ("after_forward_bytes", "pinned_bytes", "out_bytes")),
            )
            rows.append((name, *row, "yes" if arm["bits_equal"] else f"NO: {arm['first_difference']}"))
        lines += ["", f"{size['inputs']}:", "", markdown(rows)]
    return "\n".join(lines)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _gib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 2**30:.2f}"


def chart(report: dict[str, Any]) -> str:
    """Step and peak of each arm over the length of the sequence, and the two limits of the arm `ours`."""
    machine, model = report["machine"], report["model"]

    def lines(arm: str, key: str, scale: float = 1) -> dict[float, float]:
        found = {size["num_tokens"]: size["arms"].get(arm, {}).get(key) for size in report["sizes"]}
        return {tokens: value * scale for tokens, value in found.items() if value}

    shown = [arm for arm in ARMS if arm != "none, copies beside" and lines(arm, "step_s")]
    limits = {"bar of ours": lines("ours", "limit_s"), "both phases of ours": lines("ours", "phases_limit_s")}
    formula = {"formula of ours": lines("ours", "expected_peak_bytes", 2**-30)}
    panels = {
        "seconds a step": ({arm: lines(arm, "step_s") for arm in shown}, limits),
        "GiB of device memory at the peak": ({arm: lines(arm, "peak_bytes", 2**-30) for arm in shown}, formula),
    }
    facts = f"{model['name']}, {model['what']}, one {machine['device']}, torch {machine['torch']}, {report['date']}"
    return draw_panels("A training step over the length of the sequence", facts, "tokens", panels)


def choose_sizes(options: argparse.Namespace) -> list[Model]:
    """The model at each length of its sequence.

    Raises:
        ValueError: the model has no such size.
    """
    defaults = (SMALL_DEFAULTS if options.small else DEFAULTS)[options.model]
    blocks = options.blocks or defaults.get("blocks")
    if options.tokens is None and options.frames is None:
        options.tokens, options.frames = defaults.get("tokens"), defaults.get("frames")
    return [
        find(options.model, small=options.small, blocks=blocks, tokens=tokens, frames=frames)
        for tokens in options.tokens or [None]
        for frames in options.frames or [None]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="flux", choices=tuple(DEFAULTS))
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--output", type=Path, help="a JSON file, which is written after each arm")
    parser.add_argument("--table", type=Path, help="print the table of a JSON file, and run nothing")
    parser.add_argument("--chart", type=Path, metavar="FILE.svg", help="draw the result, or that of --table")
    parser.add_argument("--small", action="store_true", help="a tiny model of the same kind")
    parser.add_argument("--blocks", type=int, nargs="+", help="the number of blocks, of each kind")
    parser.add_argument("--tokens", type=int, nargs="+", help="of flux: image tokens")
    parser.add_argument("--frames", type=int, nargs="+", help="of wan14b: frames of latents")
    parser.add_argument("--steps", type=int, default=4, help="timed steps")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before those, after the compared ones")
    parser.add_argument("--min-bytes", type=int, help="smaller tensors stay (default: 1 MiB; with --small 0)")
    parser.add_argument("--keep-last", type=int, default=1)
    parser.add_argument("--prefetch", type=int, default=1)
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="no arm begins later than that")
    parser.add_argument("--host-memory", help="peers that would page-lock more are left out: 100GiB")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    options = parser.parse_args()
    if options.table is not None:
        report = json.loads(options.table.read_text())
    elif options.output is None:
        parser.error("--output says where the result goes.")
    else:
        try:
            sizes = choose_sizes(options)
        except ValueError as error:
            parser.error(str(error))
        if options.min_bytes is None:
            options.min_bytes = 0 if options.small else 1 << 20
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts; for deterministic kernels
        fix_algorithms()
        report = run(options, sizes)
    print(table(report))
    if options.chart is not None:
        options.chart.write_text(chart(report))


if __name__ == "__main__":
    main()
