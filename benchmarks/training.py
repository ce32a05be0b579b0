"""LoRA training over frozen weights, on the device and streamed: time of a step, device memory, bits.

Arms run from the same weights, inputs and random numbers.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from group_offload import apply_activation_offloading
from group_offload.plan.budgets import parse_bytes

from . import disk, machine
from . import report as reports
from .arms import apply, arm_of
from .models import Model, find, make_inputs, make_model
from .options import add, model_of, sizes_of
from .processes import Job, Relay

TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
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
    "fsdp2 + checkpointing",
    "diffusers block + checkpointing",
)
NUM_COMPARED = 3
"""Steps whose bits are compared."""


def add_lora(model: nn.Module, rank: int) -> None:
    """A random LoRA of the attention's projections, the same one wherever the weights are."""
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)
    inject_adapter_in_model(LoraConfig(r=rank, target_modules=[*TARGETS], init_lora_weights=False), model)


# ------------------------------------------------------------------------------------------------ steps


class LikeTorchtune(torch.autograd.graph.saved_tensors_hooks):
    """The way of torchtune's `OffloadActivations` with streams, in short.

    Each tensor goes to pinned memory of torch's own, on a stream of its own, and the last five copies are waited for
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


class Run:
    """One arm on a model that is there: steps of training, their bits, their times, and what they take.

    The name says where weights are, and behind " + " what is done for activations: "checkpointing" (they are recomputed), and
    "activations" (this package offloads them), "save_on_cpu" or "torchtune".
    """

    def __init__(self, name: str, model: Model, module: nn.Module, device: torch.device) -> None:
        self._where, *self._extras = name.split(" + ")
        self.model, self.module, self.device = model, module, device
        self.called: Any = module
        """What a step calls: the module, or what is wrapped around it."""
        self.handle: Any = None
        """Of offloaded weights."""
        self._activations: Any = None
        """Of offloaded activations."""
        self._around: Callable[[], AbstractContextManager[Any]] = nullcontext
        """What is around forward."""
        self._optimizer: torch.optim.Optimizer | None = None
        self._trained = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
        self._before: list[torch.Tensor] = []
        """What was trained, before it was."""

    def open(self, folder: Path, min_bytes: int = 0, **sharing: Any) -> None:
        """Offload the model, in the way that the name says.

        Args:
            folder: for group files, of arms that have some.
            min_bytes: of activations that are offloaded.
            sharing: more options of this package.
        """
        module: Any = self.module
        if "checkpointing" in self._extras:
            module.enable_gradient_checkpointing()
        else:
            module.disable_gradient_checkpointing()
        arm = arm_of(self._where)
        if arm.engine == "fsdp2":
            shard(module, self.device, self._trained.values())
        else:
            files = {"offload_to_disk_path": folder} if arm.on_disk else {}
            streams = {"use_stream": self.device.type != "cpu"} if arm.engine == "diffusers" else {}
            self.handle = apply(arm.engine, module, self.device, {**arm.options, **files, **streams, **sharing})
        if "ram_budget" in arm.options:  # what is in the page cache would be taken from there
            disk.drop_page_cache(disk.files_in(folder), may_drop_all=False)
        if "activations" in self._extras:
            self._activations = apply_activation_offloading(module, device=self.device, min_bytes=min_bytes)
        elif "save_on_cpu" in self._extras:
            self._around = lambda: torch.autograd.graph.save_on_cpu(pin_memory=self.device.type != "cpu")
        elif "torchtune" in self._extras:
            self._around = lambda: LikeTorchtune(self.device, min_bytes)

    def close(self) -> None:
        for handle in (self._activations, self.handle):
            if handle is not None:
                handle.remove()
        with torch.no_grad():
            for parameter, value in zip(self._trained.values(), self._before, strict=False):
                parameter.grad = None
                parameter.copy_(value)

    def measure(self, inputs: dict[str, torch.Tensor], num_steps: int, *, updates: bool = True) -> dict[str, Any]:
        """
        Args:
            updates: whether a step changes what is trained. Else gradients stay allocated.
        """
        if updates:
            self._before = [weight.detach().clone() for weight in self._trained.values()]
            self._optimizer = torch.optim.AdamW(self._trained.values(), lr=1e-3, foreach=True)
        bits = hashlib.sha256(str(self._bits(inputs)).encode()).hexdigest()
        return {**self._time(inputs, num_steps), "bits": bits}

    def _step(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """`_marks` are the moments of compute's stream when forward begins and ends, and when all is done."""
        self._marks = [self._mark()]
        with self._around():
            loss = self.model.call(self.called, inputs).float().square().mean()
        self._marks.append(self._mark())
        self._after_forward_bytes = machine.allocator(self.device, "allocated_bytes.all.current")
        loss.backward()
        if self._optimizer is not None:
            self._optimizer.step()
        self._marks.append(self._mark())
        return loss.detach()

    def _mark(self) -> tuple[Any, int]:
        """Now, and the bytes of weights that were sent to the device so far."""
        sent = 0 if self.handle is None else sum(self.handle.stats().bytes_onloaded.values())
        return machine.mark(self.device), sent

    def _bits(self, inputs: dict[str, torch.Tensor]) -> list[dict[str, str]]:
        """What is left of each step with deterministic kernels, as hashes: loss, gradients, and weights if they change."""
        found = []
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        for _ in range(NUM_COMPARED):
            self.module.zero_grad(set_to_none=True)
            torch.manual_seed(0)
            tensors = {"loss": self._step(inputs)}
            tensors |= {name: weight.grad for name, weight in self._trained.items() if weight.grad is not None}
            if self._optimizer is not None:
                tensors |= {f"{name}, then": weight.detach() for name, weight in self._trained.items()}
            found.append({name: _hash(tensor) for name, tensor in tensors.items()})
        torch.use_deterministic_algorithms(False)
        return found

    def _time(self, inputs: dict[str, torch.Tensor], num_steps: int) -> dict[str, Any]:
        """Time and memory of steps: gradients stay allocated, unless there is an optimizer."""
        times: list[dict[str, float]] = []
        is_cuda = self.device.type == "cuda"
        machine.forget_device_peak(self.device)
        before, retries = self._stats(), machine.allocator(self.device, "num_alloc_retries") or 0
        for _ in range(num_steps):
            self.module.zero_grad(set_to_none=self._optimizer is not None)
            machine.synchronize(self.device)
            begun = time.perf_counter()
            self._step(inputs)
            host = time.perf_counter() - begun
            machine.synchronize(self.device)
            found = {"step_s": time.perf_counter() - begun, "host_s": host}
            for phase, start, end in zip(("forward", "backward"), self._marks, self._marks[1:], strict=False):
                found[f"{phase}_s"] = machine.elapsed(start[0], end[0])
                if self.handle is not None:
                    found[f"sent_{phase}_bytes"] = end[1] - start[1]
            times.append(found)
        report = {
            **{key: statistics.median(each[key] for each in times) for key in times[0]},
            "steps_s": [each["step_s"] for each in times],
            "peak_bytes": machine.allocator(self.device, machine.PEAK),
            "reserved_bytes": machine.allocator(self.device, machine.RESERVED),
            # Of torch's own allocator.
            "pinned_bytes": torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) if is_cuda else None,
            "alloc_retries": (machine.allocator(self.device, "num_alloc_retries") or 0) - retries,
            "after_forward_bytes": self._after_forward_bytes,
        }
        (weights, activations), (weights_then, activations_then) = before, self._stats()
        if weights is not None:
            report |= {
                "stalls_per_step": (weights_then.stalls - weights.stalls) / num_steps,
                "pinned_bytes": weights_then.pinned_bytes,
            }
        if activations is not None:
            report |= {
                "out_bytes": (activations_then.offloaded_bytes - activations.offloaded_bytes) // num_steps,
                "back_bytes": (activations_then.reloaded_bytes - activations.reloaded_bytes) // num_steps,
                "stalls": (activations_then.stalls - activations.stalls) / num_steps,
                "pinned_bytes": activations_then.host_bytes,
            }
        return report

    def _stats(self) -> list[Any]:
        return [handle and handle.stats() for handle in (self.handle, self._activations)]


def _hash(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


def shard(model: nn.Module, device: torch.device, trained: Any = ()) -> None:
    """FSDP2 as one would use it for this: a block at a time, over all processes, and what is trained stays on the device."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    has_streams = device.type != "cpu"
    if not dist.is_initialized():
        dist.init_process_group("nccl" if has_streams else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    for tensor in (*trained, *model.buffers()):
        tensor.data = tensor.data.to(device)
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


def work(job: dict[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """What a child process does with its job: one arm. With "rank" 0 all weights are trained, and no optimizer changes them."""
    device, model, name = torch.device(job["device"]), find(**job["model"]), job["arm"]
    is_resident = name.startswith("resident")
    machine.fix_training_algorithms()
    if not is_resident and job["device_memory"] is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job["device_memory"] / total), device)
    module = make_model(model, device, resident=is_resident).train()
    if job["rank"]:
        add_lora(module, job["rank"])
    else:
        module.requires_grad_(True)
    arm, inputs = Run(name, model, module, device), make_inputs(model, device)
    begin()
    with torch.enable_grad(), tempfile.TemporaryDirectory(dir=job["disk"]) as folder:
        arm.open(Path(folder), job["min_bytes"])
        found = arm.measure(inputs, job["num_steps"], updates=bool(job["rank"]))
        found["weight_bytes"] = sum(parameter.nbytes for parameter in module.parameters())
        arm.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    return found


# ------------------------------------------------------------------------------------------------ all arms


def run(options: argparse.Namespace) -> Path | None:
    """Run the arms. Returns the file with the results, which is written after each arm."""
    model = model_of(options)
    names = {"name": model.name, "what": model.what, "inputs": model.goes_in, "rank": options.rank}
    report = reports.new("training", options, model=names, device_memory=options.device_memory)
    task = {
        "model": sizes_of(options),
        "rank": options.rank,
        "device_memory": options.device_memory and parse_bytes(options.device_memory, "--device-memory"),
        "disk": options.disk and str(options.disk),
        "min_bytes": options.min_bytes,
        "num_steps": options.steps,
    }
    return Relay(report, options, [Job(name=name, task={**task, "arm": name}) for name in options.arms]).run(judge)


def judge(report: dict[str, Any]) -> None:
    """Compare each arm with the resident one, and with what the link allows, forward and backward each."""
    arms = report["arms"]
    bandwidth = (report["machine"] or {}).get("pinned_h2d_bytes_per_s")
    for name, arm in arms.items():
        if "error" in arm:
            continue
        twin = arms.get("resident + checkpointing" if "checkpointing" in name else "resident", {})
        arm["is_equal"] = arm["bits"] == twin["bits"] if "bits" in twin else None
        if "sent_forward_bytes" in arm and bandwidth:
            total = dict.fromkeys(("sent_bytes", "link_s", "limit_s"), 0.0)
            for phase, activations in (("forward", "out_bytes"), ("backward", "back_bytes")):
                sent, moved = arm[f"sent_{phase}_bytes"], arm.get(activations, 0)
                # Activations go out beside weights, and come back after them.
                link = (max(sent, moved) if phase == "forward" else sent + moved) / bandwidth
                total["sent_bytes"] += sent
                total["link_s"] += link
                total["limit_s"] += max(link, twin.get(f"{phase}_s", 0.0))
            arm |= {**total, "times_of_limit": arm["step_s"] / total["limit_s"]}


COLUMNS = (
    *("step_s", "forward_s", "backward_s", "host_s", "peak_bytes", "reserved_bytes"),
    *("after_forward_bytes", "sent_bytes", "link_s", "limit_s", "times_of_limit", "is_equal"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add(parser, "device", "model", "small", "blocks", "tokens", "list", "disk", "budget")
    add(parser, steps=5, min_bytes=1 << 20, timeout=400)
    parser.add_argument("--rank", type=int, default=16, help="of the LoRA (default 16)")
    parser.add_argument("--device-memory", help="what torch may take of the device in arms that stream: 8GiB")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help="only these")
