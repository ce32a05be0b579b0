"""Training steps of whole transformers with activations on the device, recomputed, and offloaded: time, memory, bits.

All arms run in one process, on one model, one after another, at each length of the sequence.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from group_offload import (
    ActivationOffloadHandle,
    ActivationStats,
    GroupOffloadError,
    apply_activation_offloading,
)

from . import models
from . import report as reports
from .arms import parse_size
from .machine import (
    BANDWIDTH_BYTES,
    GIB,
    CopiesBeside,
    allocated,
    bandwidth,
    device_peak,
    elapsed,
    fix_training_algorithms,
    forget_device_peak,
    mark,
    measure_machine,
    synchronize,
)
from .models import Model, make_inputs, make_model
from .options import add, model_of
from .processes import Budget
from .report import machine_facts, number

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
BUFFER_BYTES = 1 << 28
"""What copies beside compute go through."""
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
            self.beside = CopiesBeside(moved_bytes, self.device, BUFFER_BYTES, follows_compute=True)

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
        for at in range(-options.warm_up, options.steps):
            self.module.zero_grad(set_to_none=False)
            if at == 0:
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
                name: statistics.median(each[part] for each in timed)
                for part, name in enumerate(("step_s", "forward_s", "backward_s"))
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
        """What the engine did in a timed step."""
        assert self.handle is not None
        after, steps = self.handle.stats(), self.options.steps
        return {
            "out_bytes": (after.offloaded_bytes - before.offloaded_bytes) // steps,
            "back_bytes": (after.reloaded_bytes - before.reloaded_bytes) // steps,
            "kept_bytes": (after.kept_bytes - before.kept_bytes) // steps,
            "stalls": (after.stalls - before.stalls) / steps,
            "group_bytes": self._bytes_by_group(inputs),
            "pinned_bytes": after.pinned_bytes,
            "stats": asdict(after),
        }

    def _bytes_by_group(self, inputs: dict[str, torch.Tensor]) -> dict[str, int]:
        """What each group moves, counted in one more forward."""
        handle = self.handle
        assert handle is not None
        reached = [("", handle.stats().offloaded_bytes)]

        def reach(name: str) -> Callable[..., None]:
            return lambda *_: reached.append((name, handle.stats().offloaded_bytes))

        hooks = [self.module.get_submodule(name).register_forward_pre_hook(reach(name)) for name in handle.groups]
        self.model.call(self.module, inputs)
        reach("")()
        for hook in hooks:
            hook.remove()
        found: dict[str, int] = {}
        for (name, before), (_, after) in pairwise(reached):
            if after > before:
                found[name] = found.get(name, 0) + after - before
        return found


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
    copies, other = (CopiesBeside(BANDWIDTH_BYTES, device, BUFFER_BYTES, follows_compute=True) for _ in range(2))
    ways = {"d2h": copies.out, "h2d": copies.back, "each_of_both": lambda: (copies.out(), other.back())}
    return {name: bandwidth(way, device, repeats=5) for name, way in ways.items()}


# ------------------------------------------------------------------------------------------------ the report


def run(options: argparse.Namespace) -> Path | None:
    """Run all arms at each length of the sequence. Returns the file with the results, which is written after each arm."""
    sizes, device, budget = choose_sizes(options), torch.device(options.device), Budget(options.budget)
    if options.min_bytes is None:
        options.min_bytes = 0 if options.small else 1 << 20
    fix_training_algorithms()
    module = make_model(sizes[0], device, resident=True).train().requires_grad_(True)
    kept = ("warm_up", "steps", "min_bytes", "keep_last", "prefetch")
    report = reports.new(
        "activations",
        options,
        model={key: value for key, value in sizes[0].facts().items() if key in ("what", "dtype")},
        bandwidth_bytes_per_s=bandwidths(device),
        weight_bytes=sum(parameter.nbytes for parameter in module.parameters()),
        options={name: getattr(options, name) for name in kept},
        sizes=[],
    )
    report["model"]["name"] = models.find(options.model, small=options.small).name
    report["machine"] = measure_machine(device)
    path: Path | None = None
    for model in sizes:
        inputs, reference = make_inputs(model, device), Reference()
        arms: dict[str, Any] = {}
        would_pin = pinned_bytes_of_peers(model, module, inputs, options.min_bytes)
        size = {
            "num_tokens": model.num_tokens,
            "inputs": model.goes_in,
            "peers_would_pin_bytes": would_pin,
            "arms": arms,
        }
        report["sizes"].append(size)
        for name in options.arms:
            moved = arms.get("ours", {}).get("out_bytes", 0)
            refusal = budget.refusal()
            if name == "none, copies beside" and not moved:
                arms[name] = {"error": "left out: the arm `ours` has not said how many bytes"}
            elif refusal is not None:
                arms[name] = refusal
            elif options.host_memory is not None and would_pin.get(name, 0) > options.host_memory:
                arms[name] = {"error": f"left out: it would page-lock {would_pin[name] / GIB:.1f} GiB"}
            else:
                forget_host_cache(device)
                new = (name, model, module, options, moved)
                arms[name] = measure(lambda new=new: Arm(*new), inputs, reference)  # type: ignore[misc]
                forget_host_cache(device)
            judge(size, report)
            path = reports.write(report, options.output)
            step = arms[name].get("step_s")
            said = arms[name].get("error") if step is None else f"{step:.4f} s"
            print(f"{size['num_tokens']} tokens, {name}: {said}", file=sys.stderr, flush=True)
        del reference
        gc.collect()
    return path


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


COLUMNS: reports.Columns = {
    "step, s": lambda arm: number(arm["step_s"], 4),
    "forward, s": lambda arm: number(arm["forward_s"], 4),
    "backward, s": lambda arm: number(arm["backward_s"], 4),
    "beyond none, s": lambda arm: number(arm.get("exposed_s"), 4),
    "x bar": lambda arm: number(arm.get("times_of_limit"), 3),
    "x both phases": lambda arm: number(arm.get("times_of_phases_limit"), 3),
    "peak, GiB": lambda arm: _gib(arm["peak_bytes"]),
    "x formula": lambda arm: number(arm.get("times_of_expected_peak"), 3),
    "after forward, GiB": lambda arm: _gib(arm["after_forward_bytes"]),
    "page-locked, GiB": lambda arm: _gib(arm["pinned_bytes"]),
    "moved out, GiB": lambda arm: _gib(arm.get("out_bytes")),
    "same bits": lambda arm: "yes" if arm["bits_equal"] else f"NO: {arm['first_difference']}",
}


def _gib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else number(num_bytes / GIB, 2)


def render(report: Mapping[str, Any]) -> str:
    """A report of this benchmark as Markdown: a table for each length of the sequence."""
    model, rates = report["model"], report["bandwidth_bytes_per_s"]
    link = ""
    if rates is not None:
        both = f"{rates['each_of_both'] / 1e9:.1f} GB/s in each direction at once"
        link = f" Link: {rates['d2h'] / 1e9:.1f} GB/s out, {rates['h2d'] / 1e9:.1f} GB/s back, {both}."
    lines = [
        f"{model['name']}: {model['what']}, {report['weight_bytes'] / GIB:.2f} GiB {model['dtype']}, all trained; "
        f"{machine_facts(report, 'diffusers')}.{link}"
    ]
    for size in report["sizes"]:
        lines += ["", f"{size['inputs']}:", "", reports.table(size["arms"], COLUMNS, "step_s", head="arm")]
    return "\n".join(lines)


def choose_sizes(options: argparse.Namespace) -> list[Model]:
    """The model at each length of its sequence."""
    defaults = (SMALL_DEFAULTS if options.small else DEFAULTS)[options.model]
    blocks = options.blocks or defaults.get("blocks")
    if options.tokens is None and options.frames is None:
        options.tokens, options.frames = defaults.get("tokens"), defaults.get("frames")
    return [
        model_of(options, blocks=blocks, tokens=tokens, frames=frames)
        for tokens in options.tokens or [None]
        for frames in options.frames or [None]
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="flux", choices=tuple(DEFAULTS), help="default flux")
    parser.add_argument("--tokens", type=int, nargs="+", help="of flux: image tokens")
    parser.add_argument("--frames", type=int, nargs="+", help="of wan14b: frames of latents")
    parser.add_argument(
        "--warm-up", type=int, default=2, help="steps before those, after the compared ones (default 2)"
    )
    parser.add_argument("--keep-last", type=int, default=1, help="groups whose activations stay (default 1)")
    parser.add_argument("--prefetch", type=int, default=1, help="groups that are brought back ahead (default 1)")
    parser.add_argument(
        "--host-memory", type=parse_size, metavar="SIZE", help="peers that would page-lock more are left out: 100GiB"
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help="only these")
    add(parser, "device", "small", "blocks", "list", "min_bytes", "budget", steps=4)
