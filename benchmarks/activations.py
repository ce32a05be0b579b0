"""Training steps of whole transformers with activations on the device, recomputed, and offloaded: time, memory, bits.

All arms run in one process, on one model, one after another, at each length of the sequence.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from group_offload import GroupOffloadError, apply_activation_offloading

from . import models
from . import report as reports
from .machine import (
    BANDWIDTH_BYTES,
    GIB,
    CopiesBeside,
    allocated,
    bandwidth,
    fix_training_algorithms,
    forget_device_peak,
    measure_machine,
    say,
)
from .models import Model, make_inputs, make_model
from .options import add, model_of
from .processes import Budget
from .report import first_line, machine_facts
from .training import Steps

ARMS = ("none", "checkpointing", "save_on_cpu", "torchtune", "ours", "ours + checkpointing")
PEERS = ("save_on_cpu", "torchtune")
TWINS = {"ours": "none", "ours + checkpointing": "checkpointing"}
"""The arms that compute the same without moving anything."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "flux": {"blocks": [6, 12], "tokens": [1024, 4096, 16384]},
    "wan14b": {"blocks": [8], "frames": [2, 5, 11]},
}
SMALL_DEFAULTS: dict[str, dict[str, Any]] = {"flux": {"tokens": [16, 64]}, "wan14b": {"frames": [1, 3]}}
NUM_COMPARED = 2
"""Steps whose bits are compared: in the first one an engine may still learn."""


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
            is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
            if tensor.nbytes < min_bytes or is_weight:
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


class Arm(Steps):
    """What is around forward, and what there is to tell afterwards."""

    def __init__(self, name: str, model: Model, module: nn.Module, options: argparse.Namespace) -> None:
        super().__init__(model, module, torch.device(options.device))
        self.options, self.activations = options, None
        if "checkpointing" in name:
            module.enable_gradient_checkpointing()  # type: ignore[operator]
        if name.startswith("ours"):
            self.activations = apply_activation_offloading(module, device=self.device, min_bytes=options.min_bytes)
        elif name == "save_on_cpu":
            self.around = lambda: torch.autograd.graph.save_on_cpu(pin_memory=self.device.type != "cpu")
        elif name == "torchtune":
            self.around = lambda: LikeTorchtune(self.device, options.min_bytes)

    def close(self) -> None:
        if self.activations is not None:
            self.activations.remove()
        self.module.disable_gradient_checkpointing()  # type: ignore[operator]
        self.module.zero_grad(set_to_none=True)

    def measure(self, inputs: dict[str, torch.Tensor], reference: dict[str, str]) -> dict[str, Any]:
        """The first arm fills `reference`: the bits of the loss and of all gradients."""
        every = self.bits(inputs, NUM_COMPARED)
        is_first = not reference
        reference |= {} if reference else every[0]
        names = [name for each in every for name in {**reference, **each} if reference.get(name) != each.get(name)]
        report = {
            "num_gradients": len(every[0]) - 1,
            "bits_equal": not names,
            "first_difference": names[0] if names else None,
            **({"repeats": not names} if is_first else {}),
            **self.time(inputs, self.options.steps, self.options.warm_up),
            "pinned_bytes": pinned(),
        }
        if self.activations is not None:
            after, before, steps = self.activations.stats(), self._stats_before, self.options.steps
            report |= {
                "out_bytes": (after.offloaded_bytes - before.offloaded_bytes) // steps,
                "back_bytes": (after.reloaded_bytes - before.reloaded_bytes) // steps,
                "stalls": (after.stalls - before.stalls) / steps,
                "pinned_bytes": after.pinned_bytes,
                "stats": asdict(after),
            }
        return report

    def before_timed(self) -> None:
        self._stats_before: Any = None if self.activations is None else self.activations.stats()


# ------------------------------------------------------------------------------------------------ the machine


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
    """Bytes a second between page-locked RAM and the device: out, and back."""
    if device.type == "cpu":
        return None
    copies = CopiesBeside(BANDWIDTH_BYTES, device, 1 << 28)
    return {name: bandwidth(way, device, repeats=5) for name, way in (("d2h", copies.out), ("h2d", copies.back))}


# ------------------------------------------------------------------------------------------------ the report


def run(options: argparse.Namespace) -> Path | None:
    """Run all arms at each length of the sequence. Returns the file with the results, which is written after each arm."""
    sizes, device, budget = choose_sizes(options), torch.device(options.device), Budget(options.budget)
    if options.min_bytes is None:
        options.min_bytes = 0 if options.small else 1 << 20
    fix_training_algorithms()
    module = make_model(sizes[0], device, resident=True).train().requires_grad_(True)
    facts = sizes[0].facts()
    report = reports.new(
        "activations",
        options,
        model={
            "name": models.find(options.model, small=options.small).name,
            "what": facts["what"],
            "dtype": facts["dtype"],
        },
        bandwidth_bytes_per_s=bandwidths(device),
        weight_bytes=sum(parameter.nbytes for parameter in module.parameters()),
        options={name: getattr(options, name) for name in ("warm_up", "steps", "min_bytes")},
        sizes=[],
    )
    report["machine"] = measure_machine(device)
    path: Path | None = None
    for model in sizes:
        inputs, arms = make_inputs(model, device), {}
        reference: dict[str, str] = {}
        size = {"num_tokens": model.num_tokens, "inputs": model.goes_in, "arms": arms}
        report["sizes"].append(size)
        for name in options.arms:
            forget_host_cache(device)
            arms[name] = (
                budget.refusal()
                or _refusal_of_peer(name, arms)
                or measure(name, model, module, options, inputs, reference)
            )
            judge(arms, report["bandwidth_bytes_per_s"])
            path = reports.write(report, options.output)
            say(f"{model.num_tokens} tokens, {name}: {arms[name].get('error') or arms[name]['step_s']}")
        gc.collect()
    return path


def _refusal_of_peer(name: str, arms: Mapping[str, Any]) -> dict[str, Any] | None:
    """Peers page-lock each saved tensor, rounded up to a power of two: none begins that RAM has no room for."""
    none = arms.get("none", {})
    saved = (none.get("after_forward_bytes") or 0) - (none.get("before_bytes") or 0)
    if name not in PEERS or 2 * saved < psutil.virtual_memory().available:
        return None
    return {"error": f"left out: it would page-lock up to {2 * saved / GIB:.1f} GiB"}


def measure(
    name: str,
    model: Model,
    module: nn.Module,
    options: argparse.Namespace,
    inputs: dict[str, torch.Tensor],
    reference: dict[str, str],
) -> dict[str, Any]:
    """What an arm reports, or why it could not."""
    arm: Arm | None = None
    before = allocated(torch.device(options.device))
    try:
        arm = Arm(name, model, module, options)
        return {"before_bytes": before, **arm.measure(inputs, reference)}
    except (RuntimeError, MemoryError, OSError, GroupOffloadError) as error:  # torch.OutOfMemoryError is one
        return {"error": first_line(error)}
    finally:
        if arm is not None:
            arm.close()


def judge(arms: Mapping[str, dict[str, Any]], bandwidth: Mapping[str, float] | None) -> None:
    """Compare arms with `none`, and with what the link and compute allow."""
    done = {name: arm for name, arm in arms.items() if "error" not in arm}
    for name, arm in done.items():
        if "none" in done:
            arm["exposed_s"] = arm["step_s"] - done["none"]["step_s"]
        twin = done.get(TWINS.get(name, ""))
        if twin is None or bandwidth is None:
            continue
        forward, backward = twin["forward_s"], twin["backward_s"]
        out, back = arm["out_bytes"] / bandwidth["d2h"], arm["back_bytes"] / bandwidth["h2d"]
        arm["out_s"], arm["back_s"] = out, back
        arm["limit_s"] = max(forward + backward, out, back)
        arm["phases_limit_s"] = max(forward, out) + max(backward, back)
        arm["times_of_limit"] = arm["step_s"] / arm["limit_s"]
        arm["times_of_phases_limit"] = arm["step_s"] / arm["phases_limit_s"]


COLUMNS = ("step_s", "forward_s", "backward_s", "exposed_s", "times_of_limit", "times_of_phases_limit", "peak_bytes")
COLUMNS += (
    "times_of_expected_peak",
    "after_forward_bytes",
    "pinned_bytes",
    "out_bytes",
    "bits_equal",
    "first_difference",
)


def render(report: Mapping[str, Any]) -> str:
    """A report of this benchmark as Markdown: a table for each length of the sequence."""
    model, rates = report["model"], report["bandwidth_bytes_per_s"]
    link = "" if rates is None else f" Link: {rates['d2h'] / 1e9:.1f} GB/s out, {rates['h2d'] / 1e9:.1f} GB/s back."
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
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help="only these")
    add(parser, "device", "small", "blocks", "list", "min_bytes", "budget", steps=4)
