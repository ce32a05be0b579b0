"""Training steps with activations on the device, recomputed, and offloaded: time, memory, bits.

    python benchmarks/activations.py --output results.json             FLUX-size blocks on the accelerator
    python benchmarks/activations.py --tiny --device cpu --output r.json   the same code in a few seconds

All arms run in one process, on one model, one after another. Each begins with the same weights, inputs and random numbers;
the report says whether losses and gradients have the bits of the arm `none` (of the first arm, if that runs out of memory).
`none, copies beside` is the arm `none` while as many bytes as the arm `ours` moves are copied for nothing, out during forward
and in during backward: what compute itself loses to the copies.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from group_offload.activations import ActivationOffloadHandle, apply_activation_offloading

ARMS = (
    "none",
    "checkpointing",
    "save_on_cpu",
    "torchtune",
    "ours",
    "ours + checkpointing",
    "none, copies beside",
)


# ------------------------------------------------------------------------------------------------ the model


class Block(nn.Module):
    """A single-stream block of FLUX: modulated norm, one projection for q, k, v and the MLP, attention, one projection back."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulation = nn.Linear(dim, 3 * dim)
        self.norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.inwards = nn.Linear(dim, 7 * dim)
        self.norm_q = nn.RMSNorm(dim // heads)
        self.norm_k = nn.RMSNorm(dim // heads)
        self.outwards = nn.Linear(5 * dim, dim)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift, scale, gate = self.modulation(F.silu(condition))[:, None].chunk(3, dim=-1)
        inner = self.inwards(self.norm(x) * (1 + scale) + shift)
        q, k, v, mlp = inner.split([x.shape[-1]] * 3 + [4 * x.shape[-1]], dim=-1)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (q, k, v))
        attention = F.scaled_dot_product_attention(self.norm_q(q), self.norm_k(k), v).transpose(1, 2).flatten(2)
        return x + gate * self.outwards(torch.cat([attention, F.gelu(mlp, approximate="tanh")], dim=-1))


class Model(nn.Module):
    def __init__(self, num_layers: int, dim: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Linear(64, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(num_layers))
        self.head = nn.Linear(dim, 64)
        self.is_checkpointing = False

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, condition, use_reentrant=False) if self.is_checkpointing else block(x, condition)
        result: torch.Tensor = self.head(x)
        return result


# ------------------------------------------------------------------------------------------------ a peer


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
            if tensor.nbytes < min_bytes or isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
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


# ------------------------------------------------------------------------------------------------ one arm


class CopiesBeside:
    """Copies bytes for nothing, on streams of their own."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._num_bytes = num_bytes
        size = min(num_bytes, 1 << 28)
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type != "cpu")
        self._device = torch.empty(size, dtype=torch.uint8, device=device)
        self._streams = [torch.Stream(device=device) for _ in range(2)] if device.type != "cpu" else [nullcontext()] * 2

    def out(self) -> None:
        self._copy(self._streams[0], self._host, self._device)

    def back(self) -> None:
        self._copy(self._streams[1], self._device, self._host)

    def _copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        with stream:
            for start in range(0, self._num_bytes, max(1, target.numel())):
                size = min(target.numel(), self._num_bytes - start)
                target[:size].copy_(source[:size], non_blocking=True)


class Arm:
    """What is around forward, and what there is to tell afterwards."""

    def __init__(self, name: str, model: Model, options: argparse.Namespace, moved_bytes: int) -> None:
        self.name = name
        self.handle: ActivationOffloadHandle | None = None
        self.beside: CopiesBeside | None = None
        device = torch.device(options.device)
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext
        model.is_checkpointing = "checkpointing" in name
        if name.startswith("ours"):
            self.handle = apply_activation_offloading(
                model,
                device=device,
                min_bytes=options.min_bytes,
                keep_last=options.keep_last,
                prefetch=options.prefetch,
            )
        elif name == "save_on_cpu":
            self.around = lambda: torch.autograd.graph.save_on_cpu(pin_memory=device.type != "cpu")
        elif name == "torchtune":
            self.around = lambda: LikeTorchtune(device, options.min_bytes)
        elif name == "none, copies beside":
            self.beside = CopiesBeside(moved_bytes, device)

    def close(self) -> None:
        if self.handle is not None:
            self.handle.remove()


def step(model: Model, inputs: tuple[torch.Tensor, ...], arm: Arm, after_forward: Callable[[], None]) -> torch.Tensor:
    if arm.beside is not None:
        arm.beside.out()
    with arm.around():
        loss = model(*inputs).float().square().mean()
    after_forward()
    if arm.beside is not None:
        arm.beside.back()
    loss.backward()
    return loss.detach()


def measure(
    name: str, model: Model, inputs: tuple[torch.Tensor, ...], options: argparse.Namespace, moved: int
) -> dict[str, Any]:
    device = torch.device(options.device)
    arm = Arm(name, model, options, moved)
    try:
        report = _measure(arm, model, inputs, options, device)
    except torch.OutOfMemoryError as error:
        report = {"out_of_memory": str(error).partition(".")[0]}
    finally:
        arm.close()
        model.zero_grad(set_to_none=True)
        model.is_checkpointing = False
        arm.around, arm.beside = nullcontext, None
    return report


def _measure(
    arm: Arm, model: Model, inputs: tuple[torch.Tensor, ...], options: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    settle(device)
    weights_bytes = allocated(device)
    torch.manual_seed(0)
    bits = hashlib.sha256()
    loss = step(model, inputs, arm, lambda: None)
    for tensor in (loss, *(p.grad for p in model.parameters() if p.grad is not None)):
        bits.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    del loss, tensor
    times, after = [], []
    for index in range(options.warm_up + options.steps):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()  # they stay: their memory is the same in all arms
        if index == options.warm_up:
            settle(device)
            reset_peak(device)
        synchronize(device)
        started = time.perf_counter()
        step(model, inputs, arm, lambda: after.append(allocated(device)))
        synchronize(device)
        times.append(time.perf_counter() - started)
    times = times[options.warm_up :]
    report: dict[str, Any] = {
        "step_s": statistics.median(times),
        "steps_s": times,
        "peak_bytes": peak(device),
        "before_bytes": weights_bytes,
        "after_forward_bytes": after[-1],
        "pinned_bytes": pinned(),
        "bits": bits.hexdigest(),
    }
    if arm.handle is not None:
        stats = arm.handle.stats()
        report["stats"] = {name: getattr(stats, name) for name in stats.__dataclass_fields__}
        report["pinned_bytes"] = stats.pinned_bytes
        report["moved_bytes_per_step"] = stats.offloaded_bytes // max(1, stats.passes)
    return report


# ------------------------------------------------------------------------------------------------ the machine


def settle(device: torch.device) -> None:
    gc.collect()
    synchronize(device)
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def allocated(device: torch.device) -> int | None:
    return None if device.type == "cpu" else int(torch.accelerator.memory_allocated(device))


def peak(device: torch.device) -> int | None:
    return None if device.type == "cpu" else int(torch.accelerator.max_memory_allocated(device))


def reset_peak(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)


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


@contextmanager
def deterministic() -> Iterator[None]:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    yield


# ------------------------------------------------------------------------------------------------ the report


def run(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device)
    torch.manual_seed(0)
    dtype = torch.float32 if options.tiny else torch.bfloat16
    with torch.device(device):
        default, _ = torch.get_default_dtype(), torch.set_default_dtype(dtype)
        model = Model(options.layers, options.dim, options.heads)
        torch.set_default_dtype(default)
    report: dict[str, Any] = {
        "device": "CPU" if device.type == "cpu" else getattr(torch, device.type).get_device_name(device),
        "torch": torch.__version__,
        "model": {"layers": options.layers, "dim": options.dim, "heads": options.heads, "dtype": str(dtype)},
        "weight_bytes": sum(p.nbytes for p in model.parameters()),
        "options": {key: value for key, value in vars(options).items() if key != "output"},
        "bandwidth_bytes_per_s": bandwidths(device),
        "tokens": {},
    }
    for num_tokens in options.tokens:
        generator = torch.Generator().manual_seed(1)
        inputs = (
            torch.randn(1, num_tokens, 64, generator=generator).to(device, dtype),
            torch.randn(1, options.dim, generator=generator).to(device, dtype),
        )
        arms: dict[str, Any] = {}
        for name in options.arms:
            moved = arms.get("ours", {}).get("moved_bytes_per_step", 0)
            if name == "none, copies beside" and not moved:
                continue
            arms[name] = measure(name, model, inputs, options, moved)
        judge(arms, report["bandwidth_bytes_per_s"])
        report["tokens"][str(num_tokens)] = arms
        print(table(num_tokens, arms), flush=True)
    return report


def judge(arms: dict[str, Any], bandwidth: dict[str, float] | None) -> None:
    """Compare each arm with `none` (or the first that ran) and with what the link allows."""
    done = {name: arm for name, arm in arms.items() if "step_s" in arm}
    if not done:
        return
    reference = done.get("none", next(iter(done.values())))
    compute = done.get("none, copies beside", done.get("none", {})).get("step_s")
    for arm in done.values():
        arm["bits_equal"] = arm["bits"] == reference["bits"]
        arm["exposed_s"] = arm["step_s"] - reference["step_s"] if "none" in done else None
        moved = arm.get("moved_bytes_per_step")
        if moved and bandwidth and compute:
            # Out in forward and back in backward: neither can begin before the other's bytes are there.
            arm["limit_s"] = max(compute, moved / bandwidth["d2h"], moved / bandwidth["h2d"])
            arm["times_of_limit"] = arm["step_s"] / arm["limit_s"]


def table(num_tokens: int, arms: dict[str, Any]) -> str:
    lines = [
        f"\n{num_tokens} tokens",
        "| arm | step, s | peak, GiB | after forward, GiB | pinned, GiB | moved, GiB | times of limit | same bits |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, arm in arms.items():
        if "step_s" not in arm:
            lines.append(f"| {name} | out of memory | | | | | | |")
            continue
        sizes = (arm["peak_bytes"], arm["after_forward_bytes"], arm["pinned_bytes"], arm.get("moved_bytes_per_step"))
        times = arm.get("times_of_limit")
        lines.append(
            f"| {name} | {arm['step_s']:.4f} | {' | '.join('' if s is None else f'{s / 2**30:.2f}' for s in sizes)} | "
            f"{'' if times is None else f'{times:.3f}'} | {'yes' if arm['bits_equal'] else 'no'} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, required=True, help="a JSON file")
    parser.add_argument("--tiny", action="store_true", help="blocks of 32 features and few tokens")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dim", type=int)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--min-bytes", type=int)
    parser.add_argument("--keep-last", type=int, default=1)
    parser.add_argument("--prefetch", type=int, default=1)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    options = parser.parse_args()
    defaults = (4, 32, 2, [16, 32], 0) if options.tiny else (24, 3072, 24, [1024, 2048, 4096, 8192, 16384], 1 << 20)
    for name, value in zip(("layers", "dim", "heads", "tokens", "min_bytes"), defaults, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    with deterministic():
        report = run(options)
    options.output.write_text(json.dumps(report, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
