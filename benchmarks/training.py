"""LoRA training over frozen weights, on the device and streamed: time of a step, device memory, bits.

Arms run in one process, one after another, from the same weights, inputs and random numbers.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from group_offload import apply_activation_offloading, apply_group_offloading

from . import report as reports
from .arms import apply_function, parse_size
from .disk import drive_speed, drop_page_cache, files_in
from .machine import (
    GIB,
    alloc_retries,
    allocated,
    device_peak,
    device_reserved,
    elapsed,
    fix_training_algorithms,
    forget_device_peak,
    mark,
    measure_machine,
    reset_peak,
    say,
    synchronize,
)
from .models import Model, make_inputs, make_model
from .options import add, model_of
from .processes import Budget
from .report import first_line, machine_facts

TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
PLACES: dict[str, dict[str, Any]] = {
    "ours block": {},
    "ours leaf": {"offload_type": "leaf_level"},
    "ours files": {"in_files": True},
    "ours files ram=8GiB": {"in_files": True, "ram_budget": "8GiB"},
    "ours block vram=50%": {"vram_share": 0.5},
}
ARMS = (
    "resident",
    "resident + checkpointing",
    "ours block",
    "ours block + checkpointing",
    "ours leaf + checkpointing",
    "ours files + checkpointing",
    "ours files ram=8GiB + checkpointing",
    "ours block + activations",
    "ours block + checkpointing + activations",
    "ours block vram=50% + checkpointing",
    "fsdp2 + checkpointing",
    "diffusers block + checkpointing",
)
RAW_BYTES = 16 << 30
"""What the plain reader reads, at most."""
NUM_COMPARED = 3
"""Steps whose bits are compared."""


class Lora(nn.Module):
    """A frozen layer, and two small ones beside it that are trained."""

    def __init__(self, base: nn.Linear, rank: int, number: int) -> None:
        super().__init__()
        self.base = base
        weight = base.weight
        generator = torch.Generator().manual_seed(number)  # on the CPU: the same values wherever the weights are
        down = torch.randn(rank, base.in_features, generator=generator) * 0.02
        up = torch.randn(base.out_features, rank, generator=generator) * 0.02
        self.down = nn.Parameter(down.to(weight))
        self.up = nn.Parameter(up.to(weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x) + x @ self.down.t() @ self.up.t()
        return result


def add_lora(model: nn.Module, rank: int) -> None:
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    for place, (name, layer) in enumerate(layers):
        if name.endswith(TARGETS):
            model.set_submodule(name, Lora(layer, rank, place))


# ------------------------------------------------------------------------------------------------ steps


class Steps:
    """Steps of training on a model that is there: their bits, their times, and what they take."""

    def __init__(self, model: Model, module: nn.Module, device: torch.device) -> None:
        self.model, self.module, self.device = model, module, device
        self.called: Any = module
        """What a step calls: the module, or what is wrapped around it."""
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext
        """What is around forward."""
        self.handle: Any = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.trained = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}

    def step(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """`marks` are the moments of compute's stream when forward begins and ends, and when all is done."""
        self.marks, self.moved = [mark(self.device)], [self._moved()]
        with self.around():
            loss = self.model.call(self.called, inputs).float().square().mean()
        self.marks.append(mark(self.device))
        self.moved.append(self._moved())
        self.after_forward_bytes = allocated(self.device)
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        self.marks.append(mark(self.device))
        return loss.detach()

    def _moved(self) -> tuple[int, int]:
        """Bytes of weights that were sent to the device, and read from files that are not page-locked, so far."""
        if self.handle is None:
            return 0, 0
        stats = self.handle.stats()
        return sum(stats.bytes_onloaded.values()), stats.bytes_read["direct"] + stats.bytes_read["page cache"]

    def bits(self, inputs: dict[str, torch.Tensor], num_steps: int) -> list[dict[str, str]]:
        """What is left of each step with deterministic kernels, as hashes: loss, gradients, and weights if they change."""
        found = []
        with deterministic():
            for _ in range(num_steps):
                self.module.zero_grad(set_to_none=True)
                torch.manual_seed(0)
                tensors = {"loss": self.step(inputs)}
                tensors |= {name: weight.grad for name, weight in self.trained.items() if weight.grad is not None}
                if self.optimizer is not None:
                    tensors |= {f"{name}, then": weight.detach() for name, weight in self.trained.items()}
                found.append({name: _hash(tensor) for name, tensor in tensors.items()})
        return found

    def time(self, inputs: dict[str, torch.Tensor], num_steps: int, warm_up: int = 0) -> dict[str, Any]:
        """Time and memory of steps: gradients stay allocated, unless there is an optimizer."""
        times: list[dict[str, float]] = []
        forget_device_peak(self.device)
        for at in range(-warm_up, num_steps):
            self.module.zero_grad(set_to_none=self.optimizer is not None)
            if at == 0:
                reset_peak(self.device)  # and nothing else: no timed step is to allocate anew
                self.before_timed()
                retries = alloc_retries(self.device)
            synchronize(self.device)
            begun = time.perf_counter()
            self.step(inputs)
            host = time.perf_counter() - begun
            synchronize(self.device)
            took = time.perf_counter() - begun
            start, middle, end = self.marks
            (sent, read), (sent_then, read_then), (sent_last, read_last) = *self.moved, self._moved()
            times.append(
                {
                    "step_s": took,
                    "host_s": host,
                    "forward_s": elapsed(start, middle),
                    "backward_s": elapsed(middle, end),
                    "sent_forward_bytes": sent_then - sent,
                    "sent_backward_bytes": sent_last - sent_then,
                    "read_forward_bytes": read_then - read,
                    "read_backward_bytes": read_last - read_then,
                }
            )
        timed = times[warm_up:]
        found = {key: statistics.median(each[key] for each in timed) for key in timed[0]}
        if self.handle is None:
            found = {key: value for key, value in found.items() if key.endswith("_s")}
        return {
            **found,
            "steps_s": [each["step_s"] for each in timed],
            "peak_bytes": device_peak(self.device),
            "reserved_bytes": device_reserved(self.device),
            "alloc_retries": alloc_retries(self.device) - retries,
            "after_forward_bytes": self.after_forward_bytes,
        }

    def before_timed(self) -> None:
        """Called before the first step that is timed."""


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _hash(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


class Run(Steps):
    """One arm."""

    def __init__(self, name: str, model: Model, module: nn.Module, options: argparse.Namespace) -> None:
        super().__init__(model, module, torch.device(options.device))
        self.name, self.options = name, options
        self.activations: Any = None
        self._before = [weight.detach().clone() for weight in self.trained.values()]

    def open(self, folder: Path, **sharing: Any) -> None:
        """Offload the model, in the way that the name says.

        Args:
            folder: for group files, of arms that have some.
            sharing: more options of this package.
        """
        where, *extras = self.name.split(" + ")
        module: Any = self.module
        if "checkpointing" in extras:
            module.enable_gradient_checkpointing()
        else:
            module.disable_gradient_checkpointing()
        if where == "fsdp2":
            shard(module, self.device, self.trained.values())
        elif where == "diffusers block":
            blocks = {"offload_type": "block_level", "num_blocks_per_group": 1}
            apply_function("diffusers")(module, self.device, {**blocks, "use_stream": self.device.type != "cpu"})
        elif where != "resident":
            choice = dict(PLACES[where])
            if choice.pop("in_files", False):
                choice["offload_to_disk_path"] = folder
            if (share := choice.pop("vram_share", None)) is not None:  # of the weights
                choice["vram_budget"] = int(share * sum(parameter.nbytes for parameter in module.parameters()))
            self.handle = apply_group_offloading(module, self.device, **choice, **sharing)
            if "ram_budget" in choice:  # what is in the page cache would be taken from there
                drop_page_cache(files_in(folder), may_drop_all=False)
        if "activations" in extras:
            self.activations = apply_activation_offloading(module, device=self.device, min_bytes=self.options.min_bytes)

    def close(self) -> None:
        for handle in (self.activations, self.handle):
            if handle is not None:
                handle.remove()
        with torch.no_grad():
            for parameter, value in zip(self.trained.values(), self._before, strict=True):
                parameter.grad = None
                parameter.copy_(value)

    def measure(self, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=1e-3, foreach=True)
        bits = hashlib.sha256(str(self.bits(inputs, NUM_COMPARED)).encode()).hexdigest()
        report = {**self.time(inputs, self.options.steps), "bits": bits}
        if self.handle is not None:
            after, before, steps = self.handle.stats(), self._stats_before, self.options.steps
            report |= {
                "stalls_per_step": (after.stalls - before.stalls) / steps,
                "stalled_s": (after.stalled_seconds - before.stalled_seconds) / steps,
                "pinned_bytes": after.pinned_bytes,
                "trainable_bytes": after.trainable_bytes,
                "weight_slots_peak_bytes": after.peak_device_bytes,
            }
        if self.activations is not None:
            stats = self.activations.stats()
            report["activations_bytes_per_step"] = stats.offloaded_bytes // stats.passes
        return report

    def before_timed(self) -> None:
        self._stats_before = None if self.handle is None else self.handle.stats()


def shard(model: nn.Module, device: torch.device, trained: Any = ()) -> None:
    """FSDP2 as one would use it for this: a block at a time, over all processes, and what is trained stays on the device."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    has_streams = device.type != "cpu"
    if not dist.is_initialized():
        dist.init_process_group("nccl" if has_streams else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    for parameter in trained:
        parameter.data = parameter.data.to(device)
    for name, buffer in list(model.named_buffers()):
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, buffer.to(device))
    choice: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
        "offload_policy": CPUOffloadPolicy(pin_memory=has_streams),
        "ignored_params": set(trained),
    }
    for blocks in model.children():
        if isinstance(blocks, nn.ModuleList):
            for block in blocks:
                fully_shard(block, **choice)
    fully_shard(model, **choice)


def limit_device_memory(size: int | None, device: torch.device) -> None:
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if size is None else min(1.0, size / total), device)


# ------------------------------------------------------------------------------------------------ all arms


def run(options: argparse.Namespace) -> Path | None:
    """Run the arms, resident ones first. Returns the file with the results, which is written after each arm."""
    model, device, budget = model_of(options), torch.device(options.device), Budget(options.budget)
    limit = None if options.device_memory is None else parse_size(options.device_memory)
    fix_training_algorithms()
    names = {"name": model.name, "what": model.what, "inputs": model.goes_in, "rank": options.rank}
    report = reports.new("training", options, model=names, device_memory=options.device_memory)
    report["machine"] = measure_machine(device)
    inputs = make_inputs(model, device)
    module: nn.Module | None = None
    whereabouts: str | None = None
    path: Path | None = None
    for name in sorted(options.arms, key=lambda name: not name.startswith("resident")):
        if device.type == "cpu" and "vram" in name:
            continue
        refusal = budget.refusal()
        if refusal is not None:
            report["arms"][name] = refusal
            continue
        where = "device" if name.startswith("resident") else "RAM"
        arm: Run | None = None
        try:
            if whereabouts != where:
                whereabouts, module = where, None
                forget_device_peak(device)
                limit_device_memory(limit if where == "RAM" else None, device)
                module = make_model(model, device, resident=where == "device").train()
                add_lora(module, options.rank)
                report["weight_bytes"] = sum(parameter.nbytes for parameter in module.parameters())
            assert module is not None
            arm = Run(name, model, module, options)
            with tempfile.TemporaryDirectory(dir=options.disk) as folder:
                try:
                    arm.open(Path(folder))
                    report["arms"][name] = arm.measure(inputs)
                finally:
                    arm.close()
                if "ram=" in name:
                    files = [file for file in files_in(Path(folder)) if file.suffix == ".safetensors"]
                    drop_page_cache(files, may_drop_all=False)
                    speeds = [drive_speed(files, num_threads, RAW_BYTES) or 0 for num_threads in (4, 8)]
                    report["arms"][name]["raw_bytes_per_s"] = max(speeds) or None
        except (RuntimeError, NotImplementedError) as error:  # torch.OutOfMemoryError is one
            report["arms"][name] = {"error": first_line(error)}
        result = report["arms"][name]
        if "error" in result or not name.startswith(("resident", "ours")):
            whereabouts = module = None  # what the arm did to the model stays
        del arm
        gc.collect()
        say(f"{name}: {result.get('error') or result['step_s']}")
        judge(report)
        path = reports.write(report, options.output)
    if dist.is_initialized():
        dist.destroy_process_group()
    return path


def judge(report: dict[str, Any]) -> None:
    """Compare each arm with the resident one, and with what the link allows."""
    arms = report["arms"]
    bandwidth = report["machine"]["pinned_h2d_bytes_per_s"]
    for name, arm in arms.items():
        if "error" in arm:
            continue
        twin = arms.get("resident + checkpointing" if "checkpointing" in name else "resident", {})
        arm["is_equal"] = arm["bits"] == twin["bits"] if "bits" in twin else None
        if "sent_forward_bytes" in arm and bandwidth:
            forward, backward = arm["sent_forward_bytes"], arm["sent_backward_bytes"]
            activations = arm.get("activations_bytes_per_step", 0)
            arm["sent_bytes"] = forward + backward
            links = max(forward, activations) / bandwidth, (backward + activations) / bandwidth
            arm["link_s"] = sum(links)
            reads = [0.0, 0.0]
            if arm.get("raw_bytes_per_s"):
                read = arm["read_forward_bytes"], arm["read_backward_bytes"]
                arm["read_bytes"] = sum(read)
                reads = [num_bytes / arm["raw_bytes_per_s"] for num_bytes in read]
                arm["drive_s"] = sum(reads)
            forward_s, backward_s = twin.get("forward_s", 0.0), twin.get("backward_s", 0.0)
            arm["limit_s"] = max(links[0], reads[0], forward_s) + max(links[1], reads[1], backward_s)
            arm["times_of_limit"] = arm["step_s"] / arm["limit_s"]


COLUMNS = ("step_s", "forward_s", "backward_s", "host_s", "stalled_s", "peak_bytes", "reserved_bytes")
COLUMNS += (
    "after_forward_bytes",
    "sent_bytes",
    "read_bytes",
    "link_s",
    "drive_s",
    "limit_s",
    "times_of_limit",
    "is_equal",
)


def render(report: Mapping[str, Any]) -> str:
    """A report of this benchmark as Markdown: what was measured where, then one row for each arm."""
    model, limit = report["model"], report["device_memory"]
    facts = (
        f"{model['name']}: {model['what']}, {report['weight_bytes'] / GIB:.2f} GiB, {model['inputs']}; LoRA of rank "
        f"{model['rank']}; {machine_facts(report)}. Device memory: {f'{limit} (resident: all)' if limit else 'all'}."
    )
    return "\n".join([facts, "", reports.table(report["arms"], COLUMNS, "step_s", head="arm")])


def add_options(parser: argparse.ArgumentParser) -> None:
    add(parser, "device", "model", "small", "blocks", "tokens", "list", "disk", "budget", steps=5, min_bytes=1 << 20)
    parser.add_argument("--rank", type=int, default=16, help="of the LoRA (default 16)")
    parser.add_argument("--device-memory", help="what torch may take of the device in arms that stream: 8GiB")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help="only these")
