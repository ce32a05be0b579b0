"""LoRA training over frozen weights, on the device and streamed: time of a step, device memory, bits.

    python benchmarks/training.py --output results.json                     FLUX.1 on the accelerator
    python benchmarks/training.py --device-memory 8GiB --blocks 19 38 ...   the same; "resident" arms get more
    python benchmarks/training.py --small --device cpu --output r.json      the same code in a few seconds

Arms run in one process, one after another, from the same weights, inputs and random numbers. "resident" has all weights on the
device, "ours ..." streams them; "+ checkpointing" is the model's own gradient checkpointing, "+ activations" offloads what is
saved for backward. Peers: "fsdp2" is FSDP2 on one device with `CPUOffloadPolicy`, block by block, "diffusers" its group
offloading with streams. The report says whether losses, gradients and trained parameters of the first steps, for which
deterministic algorithms are on, have the bits of the resident arm with the same checkpointing. What a step could take at best
is the sum of what its two phases could: of forward, and of backward, the longer of what the resident arm takes and of the time
that the bytes sent in it need on the link. (They do not share: what backward has to spare comes after forward is over, and the
device has no room for what is not needed soon.) Offloaded activations go out in forward, beside the weights that come in, and
come back in backward, after one another with them; a byte out is taken to need as long as one in. With a budget for RAM,
files are dropped from the page cache and read past it, and the time that a plain reader needs for as many bytes of the same
files counts as well.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from disk import drop_page_cache, files_in, read_all
from machine import (
    alloc_retries,
    default_device,
    device_peak,
    device_reserved,
    elapsed,
    fix_algorithms,
    forget_device_peak,
    mark,
    measure_machine,
    synchronize,
)
from models import NAMES, find, make_inputs, make_model
from tables import markdown
from torch import nn

from group_offload import apply_activation_offloading, apply_group_offloading
from group_offload.plan.budgets import parse_bytes

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
PARTS = ("step", "forward", "backward", "host", "stalled")
"""Times: of a step as a whole, of compute's stream in it, of the thread that launches, and of waits for weights."""
SIZES = ("peak", "reserved", "after_forward", "sent", "read")
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
    for number, (name, layer) in enumerate(layers):
        if name.endswith(TARGETS):
            owner, _, last = name.rpartition(".")
            parent = model.get_submodule(owner)
            wrapped = Lora(layer, rank, number)
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
        self.handle: Any = None
        self.activations: Any = None
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.before = [parameter.detach().clone() for parameter in self.trained]

    def open(self, folder: Path) -> None:
        where, *extras = self.name.split(" + ")
        if "checkpointing" in extras:
            self.model.enable_gradient_checkpointing()  # type: ignore[operator]
        else:
            self.model.disable_gradient_checkpointing()  # type: ignore[operator]
        if where == "fsdp2":
            self._shard()
        elif where == "diffusers block":
            from diffusers.hooks import apply_group_offloading as theirs

            theirs(
                self.model,
                onload_device=self.device,
                offload_type="block_level",
                num_blocks_per_group=1,
                use_stream=self.device.type != "cpu",
            )
        elif where != "resident":
            choice = dict(PLACES[where])
            if choice.pop("in_files", False):
                choice["offload_to_disk_path"] = folder
            if (share := choice.pop("vram_share", None)) is not None:  # of the weights
                choice["vram_budget"] = int(share * sum(parameter.nbytes for parameter in self.model.parameters()))
            self.handle = apply_group_offloading(self.model, self.device, **choice)
            if "ram_budget" in choice:  # what is in the page cache would be taken from there
                drop_page_cache(files_in(folder), may_drop_all=False)
        if "activations" in extras:
            self.activations = apply_activation_offloading(
                self.model, device=self.device, min_bytes=self.options.min_bytes
            )

    def _shard(self) -> None:
        """FSDP2 as one would use it for this: a block at a time, and what is trained stays on the device."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        has_streams = self.device.type != "cpu"
        if not dist.is_initialized():
            dist.init_process_group("nccl" if has_streams else "gloo", store=dist.HashStore(), rank=0, world_size=1)
        for parameter in self.trained:
            parameter.data = parameter.data.to(self.device)
        for name, buffer in list(self.model.named_buffers()):
            owner, _, last = name.rpartition(".")
            setattr(self.model.get_submodule(owner), last, buffer.to(self.device))
        choice: dict[str, Any] = {
            "mesh": init_device_mesh(self.device.type, (1,)),
            "offload_policy": CPUOffloadPolicy(pin_memory=has_streams),
            "ignored_params": set(self.trained),
        }
        for blocks in self.model.children():
            if isinstance(blocks, nn.ModuleList):
                for block in blocks:
                    fully_shard(block, **choice)
        fully_shard(self.model, **choice)

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
        loss = self.model(**inputs, return_dict=False)[0].float().square().mean()  # type: ignore[operator]
        self.marks.append(mark(self.device))
        self.after_forward()
        loss.backward()
        optimizer.step()
        self.marks.append(mark(self.device))
        return loss.detach()  # type: ignore[no-any-return]

    def after_forward(self) -> None:
        self.after_forward_bytes = 0 if self.device.type == "cpu" else torch.accelerator.memory_allocated(self.device)
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
        for number in range(NUM_COMPARED + options.steps):
            optimizer.zero_grad()
            torch.use_deterministic_algorithms(number < NUM_COMPARED)
            if number == NUM_COMPARED:
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
            if number < NUM_COMPARED:
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


def limit_device_memory(size: str | None, device: torch.device) -> None:
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        total = torch.cuda.get_device_properties(device).total_memory
        share = 1.0 if size is None else min(1.0, parse_bytes(size, "--device-memory") / total)
        torch.cuda.set_per_process_memory_fraction(share, device)


def run(options: argparse.Namespace) -> dict[str, Any]:
    device, begun = torch.device(options.device), time.perf_counter()
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward does not repeat itself
    model = find(options.model, small=options.small, blocks=options.blocks, tokens=options.tokens)
    report: dict[str, Any] = {
        "machine": measure_machine(device),
        "model": {"name": model.name, "what": model.what, "inputs": model.goes_in, "rank": options.rank},
        "device_memory": options.device_memory,
        "arms": {},
    }
    inputs = make_inputs(model, device)
    module: nn.Module | None = None
    whereabouts: str | None = None
    for name in sorted(options.arms, key=lambda name: not name.startswith("resident")):
        if device.type == "cpu" and "vram" in name:
            continue
        if options.budget is not None and time.perf_counter() - begun > options.budget:
            report["arms"][name] = {"error": "no time left"}
            continue
        where = "device" if name.startswith("resident") else "RAM"
        arm: Run | None = None
        try:
            if whereabouts != where:
                whereabouts, module = where, None
                forget_device_peak(device)
                limit_device_memory(options.device_memory if where == "RAM" else None, device)
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
        if options.output is not None:
            options.output.write_text(json.dumps(report, indent=1) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()
    return report


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


HEAD = (
    *("arm", *(f"{part}, s" for part in PARTS), "peak, GiB", "reserved, GiB", "after forward, GiB"),
    *("sent a step, GiB", "read a step, GiB", "link alone, s", "drive alone, s", "limit, s", "x limit", "same bits"),
)

DRIVE = ("read a step, GiB", "drive alone, s")


def table(report: dict[str, Any]) -> str:
    machine, model, limit = report["machine"], report["model"], report["device_memory"]
    lines = [
        f"{model['name']}: {model['what']}, {report['weight_bytes'] / 2**30:.2f} GiB, {model['inputs']}; "
        f"LoRA of rank {model['rank']}.",
        f"{machine['device']}, torch {machine['torch']}. Device memory: {f'{limit} (resident: all)' if limit else 'all'}.",
    ]
    rows = [HEAD]
    for name, arm in report["arms"].items():
        if "error" in arm:
            rows.append((name, arm["error"], *[""] * (len(HEAD) - 2)))
            continue
        numbers = (*(_number(arm, f"{part}_s") for part in PARTS), *(_gib(arm, f"{key}_bytes") for key in SIZES))
        limits = tuple(_number(arm, key) for key in ("link_s", "drive_s", "limit_s", "times_of_limit"))
        rows.append((name, *numbers, *limits, {True: "yes", False: "NO", None: ""}[arm["is_equal"]]))
    # Without an arm that reads from the drive there is nothing to tell about it.
    kept = [at for at, title in enumerate(HEAD) if title not in DRIVE or any(row[at] for row in rows[1:])]
    return "\n".join([*lines, "", markdown([tuple(row[at] for at in kept) for row in rows])])


def _gib(arm: dict[str, Any], key: str) -> str:
    return f"{arm[key] / 2**30:.2f}" if arm.get(key) else ""


def _number(arm: dict[str, Any], key: str) -> str:
    return f"{arm[key]:.3f}" if arm.get(key) else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="flux", choices=NAMES)
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--table", type=Path, help="print the table of a JSON file, and do nothing else")
    parser.add_argument("--disk", type=Path, help="where files are written (default: the system's temporary folder)")
    parser.add_argument("--small", action="store_true", help="a tiny model of the same kind")
    parser.add_argument("--blocks", type=int, nargs="+", help="the number of blocks, of each kind")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5, help="timed steps; three more come first, and are compared")
    parser.add_argument("--min-bytes", type=int, default=1 << 20, help="activations that are smaller stay")
    parser.add_argument("--device-memory", help="what torch may take of the device in arms that stream: 8GiB")
    parser.add_argument("--budget", type=float, help="seconds, after which no other arm begins")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    options = parser.parse_args()
    if options.table is not None:
        print(table(json.loads(options.table.read_text())))
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts: for deterministic algorithms
    fix_algorithms()
    print(table(run(options)))


if __name__ == "__main__":
    main()
