"""LoRA training over frozen weights, on the device and streamed: time of a step, device memory, bits.

Arms run in one process, one after another, from the same weights, inputs and random numbers.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from group_offload import apply_activation_offloading, apply_group_offloading

from . import report as reports
from .arms import apply_function, parse_size
from .disk import drop_page_cache, files_in, read_all
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
    synchronize,
)
from .models import make_inputs, make_model
from .options import add, model_of
from .processes import Budget
from .report import machine_facts, number

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
            owner, _, last = name.rpartition(".")
            parent = model.get_submodule(owner)
            wrapped = Lora(layer, rank, place)
            if isinstance(parent, (nn.Sequential, nn.ModuleList)):
                parent[int(last)] = wrapped
            else:
                setattr(parent, last, wrapped)


class Moved(NamedTuple):
    sent: int
    """To the device."""
    read: int
    """From files that are not page-locked."""

    def since(self, before: Moved) -> Moved:
        return Moved(self.sent - before.sent, self.read - before.read)


class Run:
    """One arm, on a model that is there."""

    def __init__(self, name: str, model: nn.Module, options: argparse.Namespace) -> None:
        self.name, self.model, self.options = name, model, options
        self.device = torch.device(options.device)
        self.called: Any = model
        """What a step calls: the model, or what is wrapped around it."""
        self.handle: Any = None
        self.activations: Any = None
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.before = [parameter.detach().clone() for parameter in self.trained]

    def open(self, folder: Path, **sharing: Any) -> None:
        """Offload the model, in the way that the name says.

        Args:
            sharing: `process_group` and `share`, for this package.
        """
        where, *extras = self.name.split(" + ")
        if "checkpointing" in extras:
            self.model.enable_gradient_checkpointing()  # type: ignore[operator]
        else:
            self.model.disable_gradient_checkpointing()  # type: ignore[operator]
        if where == "fsdp2":
            shard(self.model, self.device, self.trained)
        elif where == "diffusers block":
            blocks = {"offload_type": "block_level", "num_blocks_per_group": 1}
            apply_function("diffusers")(self.model, self.device, {**blocks, "use_stream": self.device.type != "cpu"})
        elif where != "resident":
            choice = dict(PLACES[where])
            if choice.pop("in_files", False):
                choice["offload_to_disk_path"] = folder
            if (share := choice.pop("vram_share", None)) is not None:  # of the weights
                choice["vram_budget"] = int(share * sum(parameter.nbytes for parameter in self.model.parameters()))
            self.handle = apply_group_offloading(self.model, self.device, **choice, **sharing)
            if "ram_budget" in choice:  # what is in the page cache would be taken from there
                drop_page_cache(files_in(folder), may_drop_all=False)
        if "activations" in extras:
            self.activations = apply_activation_offloading(
                self.model, device=self.device, min_bytes=self.options.min_bytes
            )

    def close(self) -> None:
        for handle in (self.activations, self.handle):
            if handle is not None:
                handle.remove()
        with torch.no_grad():
            for parameter, value in zip(self.trained, self.before, strict=True):
                parameter.grad = None
                parameter.copy_(value)

    def step(self, inputs: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """`marks` are the moments of compute's stream when forward begins and ends, and when all is done."""
        self.marks = [mark(self.device)]
        loss = self.called(**inputs, return_dict=False)[0].float().square().mean()
        self.marks.append(mark(self.device))
        self.after_forward()
        loss.backward()
        optimizer.step()
        self.marks.append(mark(self.device))
        return loss.detach()  # type: ignore[no-any-return]

    def after_forward(self) -> None:
        self.after_forward_bytes = allocated(self.device)
        self.moved_after_forward = self.moved()

    def moved(self) -> Moved:
        """Bytes of weights, since this arm began."""
        if self.handle is None:
            return Moved(0, 0)
        stats = self.handle.stats()
        return Moved(sum(stats.bytes_onloaded.values()), stats.bytes_read["direct"] + stats.bytes_read["page cache"])

    def measure(self, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
        options = self.options
        torch.manual_seed(0)
        optimizer = torch.optim.AdamW(self.trained, lr=1e-3, foreach=True)
        bits = hashlib.sha256()
        times, host, phases = [], [], []
        moved: list[tuple[Moved, Moved]] = []
        before: Any = None
        retries = 0
        for at in range(NUM_COMPARED + options.steps):
            optimizer.zero_grad()
            torch.use_deterministic_algorithms(at < NUM_COMPARED)
            if at == NUM_COMPARED:
                forget_device_peak(self.device)
                before = None if self.handle is None else self.handle.stats()
                retries = alloc_retries(self.device)
            synchronize(self.device)
            moved_before = self.moved()
            begun = time.perf_counter()
            loss = self.step(inputs, optimizer)
            host.append(time.perf_counter() - begun)
            synchronize(self.device)
            times.append(time.perf_counter() - begun)
            start, middle, end = self.marks
            phases.append((elapsed(start, middle), elapsed(middle, end)))
            moved.append((self.moved_after_forward.since(moved_before), self.moved().since(self.moved_after_forward)))
            if at < NUM_COMPARED:
                gradients = [parameter.grad for parameter in self.trained if parameter.grad is not None]
                for tensor in (loss, *gradients, *self.trained):
                    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
                    bits.update(flat.numpy().tobytes())
        report: dict[str, Any] = {
            "step_s": statistics.median(times[NUM_COMPARED:]),
            "steps_s": times,
            "host_s": statistics.median(host[NUM_COMPARED:]),
            "forward_s": statistics.median(forward for forward, _ in phases[NUM_COMPARED:]),
            "backward_s": statistics.median(backward for _, backward in phases[NUM_COMPARED:]),
            "peak_bytes": device_peak(self.device),
            "reserved_bytes": device_reserved(self.device),
            "alloc_retries": alloc_retries(self.device) - retries,
            "after_forward_bytes": self.after_forward_bytes,
            "bits": bits.hexdigest(),
        }
        if self.handle is not None:
            after = self.handle.stats()
            report |= {
                "sent_forward_bytes": statistics.median(forward.sent for forward, _ in moved[NUM_COMPARED:]),
                "sent_backward_bytes": statistics.median(backward.sent for _, backward in moved[NUM_COMPARED:]),
                "read_forward_bytes": statistics.median(forward.read for forward, _ in moved[NUM_COMPARED:]),
                "read_backward_bytes": statistics.median(backward.read for _, backward in moved[NUM_COMPARED:]),
                "stalls_per_step": (after.stalls - before.stalls) / options.steps,
                "stalled_s": (after.stalled_seconds - before.stalled_seconds) / options.steps,
                "pinned_bytes": after.pinned_bytes,
                "trainable_bytes": after.trainable_bytes,
                "weight_slots_peak_bytes": after.peak_device_bytes,
            }
        if self.activations is not None:
            stats = self.activations.stats()
            report["activations_bytes_per_step"] = stats.offloaded_bytes // stats.passes
        return report


def shard(model: nn.Module, device: torch.device, trained: Sequence[nn.Parameter] = ()) -> None:
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


def measure_drive(folder: Path) -> float | None:
    """Bytes a second that a plain reader gets of the files; None if the file system has no direct reads."""
    files, num_bytes = [], 0
    for file in files_in(folder):
        if file.suffix == ".safetensors" and num_bytes < RAW_BYTES:
            files.append(file)
            num_bytes += file.stat().st_size
    drop_page_cache(files, may_drop_all=False)
    try:
        return max(num_bytes / read_all(files, num_threads, direct=True) for num_threads in (4, 8))
    except OSError:
        return None


def limit_device_memory(size: int | None, device: torch.device) -> None:
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if size is None else min(1.0, size / total), device)


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
            arm = Run(name, module, options)
            with tempfile.TemporaryDirectory(dir=options.disk) as folder:
                try:
                    arm.open(Path(folder))
                    report["arms"][name] = arm.measure(inputs)
                finally:
                    torch.use_deterministic_algorithms(False)
                    arm.close()
                if "ram=" in name:
                    report["arms"][name]["raw_bytes_per_s"] = measure_drive(Path(folder))
        except (RuntimeError, NotImplementedError) as error:  # torch.OutOfMemoryError is one
            report["arms"][name] = {"error": _first_line(error)}
        if "error" in report["arms"][name] or not name.startswith(("resident", "ours")):
            whereabouts = module = None  # what the arm did to the model stays
        del arm
        gc.collect()
        result = report["arms"][name]
        print(f"{name}: {result.get('error') or result['step_s']}", file=sys.stderr, flush=True)
        judge(report)
        path = reports.write(report, options.output)
    if dist.is_initialized():
        dist.destroy_process_group()
    return path


def _first_line(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return str(error).partition("\n")[0][:160]


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


COLUMNS: reports.Columns = {
    **{
        # Times: of a step as a whole, of compute's stream in it, of the thread that launches, and of waits for weights.
        f"{part}, s": lambda arm, part=part: number(arm.get(f"{part}_s") or None, 3)  # type: ignore[misc]
        for part in ("step", "forward", "backward", "host", "stalled")
    },
    "peak, GiB": lambda arm: _gib(arm, "peak_bytes"),
    "reserved, GiB": lambda arm: _gib(arm, "reserved_bytes"),
    "after forward, GiB": lambda arm: _gib(arm, "after_forward_bytes"),
    "sent a step, GiB": lambda arm: _gib(arm, "sent_bytes"),
    "read a step, GiB": lambda arm: _gib(arm, "read_bytes"),
    "link alone, s": lambda arm: number(arm.get("link_s") or None, 3),
    "drive alone, s": lambda arm: number(arm.get("drive_s") or None, 3),
    "limit, s": lambda arm: number(arm.get("limit_s"), 3),
    "x limit": lambda arm: number(arm.get("times_of_limit"), 3),
    "same bits": lambda arm: {True: "yes", False: "NO", None: ""}[arm["is_equal"]],
}


def _gib(arm: Mapping[str, Any], key: str) -> str:
    return number(arm[key] / GIB, 2) if arm.get(key) else ""


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
