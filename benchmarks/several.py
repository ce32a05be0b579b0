"""One model on several GPUs of a host: alone, replicated, and with each GPU bringing a share of every group.

The arms of one kind run in the same processes, one after another, and keep the module that the arm before has left.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from group_offload.plan.budgets import parse_bytes

from . import disk, machine, processes, report, training
from .arms import apply
from .models import Draw, Model, find, make_inputs
from .options import add, model_of, sizes_of

SLOW_STEPS = 2
"""Timed steps of arms that read a disk."""
LORA_RANK = 16
SHARES = {"one GPU": None, "each alone": False, "shared": True, "resident": False, "FSDP2": False}
"""How an arm ends, and whether its ranks share. None: one GPU runs, and the others wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    kind: str
    """What runs in the same processes: "RAM", "files" (with little RAM) or "training"."""
    share: bool | None
    engine: str
    form: tuple[str, ...]
    """What is made of the module before: "context parallel", "compiled", "LoRA"; and engines that leave it changed. The module
    cannot be used for another form afterwards."""
    reference: str
    """The arm whose time this one's is compared with."""
    same_as: str
    """The arm with the same arithmetic, whose bits this one is to have."""


def arm_of(name: str) -> Arm:
    """The arm that a name says: "compiled, context parallel, shared"."""
    *parts, how = name.split(", ")
    share = SHARES[how]
    reference = same_as = ", ".join([*(part for part in parts if part != "context parallel"), "one GPU"])
    if "context parallel" in parts:
        same_as = ", ".join([*parts, "each alone"])
    elif parts == ["compiled"] and share:
        same_as = "compiled, each alone"  # each process compiles for itself
    elif parts == ["LoRA"] and share is not None:
        same_as = "LoRA, each alone"  # a batch is other arithmetic
    engine = {"resident": "resident", "FSDP2": "fsdp2"}.get(how, "ours")
    return Arm(
        kind={"files": "files", "LoRA": "training"}.get(parts[0], "RAM") if parts else "RAM",
        share=share,
        engine=engine,
        form=(*(part for part in parts if part != "files"), *([] if engine == "ours" else [engine])),
        reference=reference,
        same_as=same_as,
    )


DEFAULT = ("one GPU", "each alone", "shared", "context parallel, each alone", "context parallel, shared")
ARMS = {
    name: arm_of(name)
    for name in (
        *DEFAULT,
        *("resident", "context parallel, resident", "FSDP2"),
        *(f"{part}, {how}" for part in ("compiled", "files", "LoRA") for how in ("one GPU", "each alone", "shared")),
        *(f"compiled, context parallel, {how}" for how in ("each alone", "shared", "resident")),
        *(f"LoRA, {how}" for how in ("FSDP2", "resident")),
    )
}


def add_options(parser: argparse.ArgumentParser) -> None:
    add(parser, "model", "blocks", "tokens", "small", "arms", "list", "disk", "checkpoint", "device", "ram")
    add(parser, steps=10, budget=600, timeout=600)
    parser.set_defaults(arms=[*DEFAULT])
    many = "processes, each with a device of its own (default 2); all arms run with each of these numbers"
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], metavar="N", help=many)


def run(options: argparse.Namespace) -> Path | None:
    model, jobs = model_of(options), []
    if unknown := [name for name in options.arms if name not in ARMS]:
        raise SystemExit(f"No such arm: {unknown[0]!r}. There are {[*ARMS]}.")
    found = report.new("several", options, model=model.facts(), num_steps=options.steps)
    with ExitStack() as stack:
        checkpoint = stack.enter_context(disk.checkpoint_folder(options))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        disk.make_checkpoints({checkpoint: model}, options.device)
        for kind, num_ranks in product(dict.fromkeys(ARMS[name].kind for name in options.arms), options.ranks):
            arms = {}
            for name in options.arms:
                arm = ARMS[name]
                # One GPU trains with the samples of all.
                differs = arm.share is not None or arm.kind == "training"
                if arm.kind == kind and (differs or num_ranks == options.ranks[0]):
                    title = _titled(name, num_ranks) if differs and len(options.ranks) > 1 else name
                    num_measured = 1 if arm.share is None else num_ranks
                    arms[title] = {"arm": name, "num_ranks": num_ranks, "num_measured": num_measured}
            job = processes.Job(name=_titled(kind, num_ranks), task={"kind": kind, "arms": arms}, num_ranks=num_ranks)
            # As torchrun does it: else the threads of all ranks, as many as the host has cores in each, wait for each other.
            job.environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
            job.task |= {
                "model": sizes_of(options),
                "checkpoint": str(checkpoint),
                "folder": str(folder / job.name),
                "num_ranks": num_ranks,
                "num_steps": options.steps,
            }
            (folder / job.name).mkdir()
            if kind == "files":
                job.task["num_steps"] = min(options.steps, SLOW_STEPS)
                job.ram_limit_bytes = parse_bytes(options.ram, "--ram")
                files = disk.files_in(checkpoint)
                job.prepare = partial(disk.drop_page_cache, files, may_drop_all=not options.small)
            jobs.append(job)
        return processes.Relay(found, options, jobs).run()


def _titled(name: str, num_ranks: int) -> str:
    return f"{name} ({num_ranks} GPU{'s' * (num_ranks > 1)})"


# ------------------------------------------------------------------------------------------------ the table


COLUMNS = (
    *("setup_s", "step_s", "forward_s", "backward_s", "predicted_s", "in_a_row_s", "host_s", "of_one"),
    *("is_equal", "gathered_bytes", "disk_bytes", "missed", "anonymous_bytes"),
)


def judge(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """One row for each arm, of what all ranks measured: the slowest rank's times, compared with other arms.

    An arm is compared with others of as many processes, if these were measured.
    """
    arms, rows = found["arms"], {}
    outputs = {name: [each["output"] for each in arm["ranks"]] for name, arm in arms.items() if "ranks" in arm}
    for name, arm in arms.items():
        if name not in outputs:
            rows[name] = arm
            continue
        ranks, facts = arm["ranks"], ARMS[arm["arm"]]
        reference, same_as = (
            other if other in outputs else _titled(other, arm["num_ranks"])
            for other in (facts.reference, facts.same_as)
        )
        row: dict[str, Any] = {
            key: max(each[key] for each in ranks)
            for key in COLUMNS
            if key.endswith("_s") and ranks[0].get(key) is not None
        }
        for key in ("missed", "anonymous_bytes", "disk_bytes"):
            row[key] = sum(each.get(key) or 0 for each in ranks)
        row["gathered_bytes"] = int(ranks[0]["gathered_bytes"])
        compared = rows.get(reference, row if name == reference else {})
        if "step_s" in compared:
            took, other = (float(each.get("in_a_row_s") or each["step_s"]) for each in (row, compared))
            row["of_one"] = took / other
        expected = outputs.get(same_as, [])
        if expected and name != same_as:
            row["is_equal"] = all(output == expected[rank % len(expected)] for rank, output in enumerate(outputs[name]))
        rows[name] = row
    return rows


def render(found: Mapping[str, Any]) -> str:
    return report.render(found, COLUMNS, judge(found))


# ------------------------------------------------------------------------------------------------ one rank


def work(job: dict[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """What one rank does: all arms of a kind, one after another."""
    rank, is_training = job["rank"], job["kind"] == "training"
    device = torch.device("cpu" if job["device"] == "cpu" else f"{job['device']}:{rank}")
    if device.type != "cpu":
        torch.accelerator.set_device_index(rank)
    if is_training:
        machine.fix_training_algorithms()
    dist.init_process_group(
        "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl",
        init_method=f"file://{job['folder']}/meeting",
        rank=rank,
        world_size=job["num_ranks"],
    )
    begin()
    result: dict[str, Any] = {}
    module: nn.Module | None = None
    form: tuple[str, ...] = ()
    for title, facts in job["arms"].items():
        arm, start = ARMS[facts["arm"]], time.perf_counter()
        if module is None or form != arm.form:
            module, form = None, arm.form
            gc.collect()
            module = make(arm, job)
        loaded = time.perf_counter() - start
        dist.barrier()
        if rank == 0 or arm.share is not None:
            share = "auto" if arm.share and device.type == "cpu" else arm.share  # which uses weights in place
            sharing = {"process_group": dist.group.WORLD, "shard_transfers": share}
            sharing = sharing if arm.share is not None and arm.engine == "ours" else {}
            with torch.set_grad_enabled(is_training):
                measured = (train if is_training else infer)(arm, module, job, device, sharing)
            result[title] = {"load_s": loaded, "anonymous_bytes": machine.share_of_anonymous_bytes(), **measured}
            machine.say(f"{title}, rank {rank}, {time.perf_counter() - start:.1f} s: {result[title]}")
            processes.tell("so far", {"arms": result})
        dist.barrier()
    dist.destroy_process_group()
    return {"arms": result}


def make(arm: Arm, job: Mapping[str, Any]) -> nn.Module:
    """The module, loaded from the checkpoint, in the form that an arm needs."""
    module: Any = disk.load(find(**job["model"]), Path(job["checkpoint"]))
    if "context parallel" in arm.form:
        from diffusers import ContextParallelConfig

        module.enable_parallelism(config=ContextParallelConfig(ulysses_degree=job["num_ranks"]))
    if "compiled" in arm.form:  # then the host launches few kernels
        module.compile_repeated_blocks(fullgraph=True)
    if "LoRA" in arm.form:
        training.add_lora(module.train(), LORA_RANK)
    return module  # type: ignore[no-any-return]


def infer(
    arm: Arm, module: nn.Module, job: Mapping[str, Any], device: torch.device, sharing: dict[str, Any]
) -> dict[str, Any]:
    model, num_steps = find(**job["model"]), job["num_steps"]
    inputs = make_inputs(model, device)
    meet = (lambda: None) if arm.share is None else dist.barrier
    handle: Any = None
    meet()
    start = time.perf_counter()
    if arm.engine == "fsdp2":
        training.shard(module, device)
    else:
        where = {"offload_device": "disk" if arm.kind == "files" else "cpu"} if arm.engine == "ours" else {}
        handle = apply(arm.engine, module, device, {**where, **sharing})
    setup = time.perf_counter() - start

    step = partial(model.call, module, inputs)
    times = []
    for _ in range(1 + num_steps):
        meet()
        times.append(machine.timed(step, device)[0])
    before, drive = _counts(handle), disk.transferred().get("read_bytes", 0)
    meet()
    start = time.perf_counter()
    for _ in range(num_steps):
        output = step()
    launched = time.perf_counter() - start
    machine.synchronize(device)
    took = time.perf_counter() - start
    found = {
        "setup_s": setup,
        "first_step_s": times[0],
        "step_s": statistics.median(times[1:]),
        "in_a_row_s": took / num_steps,
        "host_s": launched / num_steps,
        "output": machine.sha256(output),
        **{key: (value - before[key]) / num_steps for key, value in _counts(handle).items()},
        "disk_bytes": (disk.transferred().get("read_bytes", 0) - drive) / num_steps,
        **_plan_of(handle),
    }
    if handle is not None:
        handle.remove()
    return found


def _counts(handle: Any) -> dict[str, float]:
    """What a handle has counted so far."""
    if handle is None:
        return {"gathered_bytes": 0}
    stats = handle.stats()
    return {"gathered_bytes": stats.bytes_from_peers, "stalls": stats.stalls}


def _plan_of(handle: Any) -> dict[str, Any]:
    if handle is None:
        return {"missed": 0, "plan": ""}
    details = handle.plan.details
    predicted = None if details is None else details.prediction.step_seconds
    missed = handle.stats().peer_transfers_missed
    return {"missed": missed, "plan": " ".join(handle.plan.notes), "predicted_s": predicted}


def train(
    arm: Arm, module: nn.Module, job: Mapping[str, Any], device: torch.device, sharing: dict[str, Any]
) -> dict[str, Any]:
    """A LoRA's steps, each with one sample for each rank: in one batch, or under DDP."""
    model = find(**job["model"])
    inputs = samples(model, device, job["num_ranks"], None if arm.share is None else job["rank"])
    where = "ours block" if arm.engine == "ours" else arm.engine
    training_run = training.Run(f"{where} + checkpointing", model, module, device)
    start = time.perf_counter()
    training_run.open(Path(job["folder"]), **sharing)
    setup = time.perf_counter() - start
    handle = training_run.handle
    try:
        if arm.share is not None:
            if handle is not None:
                module(**inputs)  # brings what is trained to the device: DDP wants to find it there
            training_run.called = _in_parallel(module)
        before = _counts(handle)["gathered_bytes"]
        found = training_run.measure(inputs, job["num_steps"])
        gathered = (_counts(handle)["gathered_bytes"] - before) / len(found["steps_s"])
        return {"setup_s": setup, **found, "output": found["bits"], "gathered_bytes": gathered, **_plan_of(handle)}
    finally:
        training_run.close()


def samples(model: Model, device: torch.device, num_samples: int, which: int | None) -> dict[str, torch.Tensor]:
    """One of several samples; None: all of them as one batch."""
    draw = Draw(model, device)
    drawn = [draw.all() for _ in range(num_samples)]
    if which is not None:
        return drawn[which]
    # Positions have no dimension of samples.
    return {
        name: torch.cat([each[name] for each in drawn]) if first.shape[0] == 1 else first
        for name, first in drawn[0].items()
    }


def _in_parallel(module: nn.Module) -> nn.Module:
    """DDP of what is trained. It would send all other weights from the first rank to the others, too."""
    parallel: Any = nn.parallel.DistributedDataParallel
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    buffers = [name for name, _ in module.named_buffers()]
    parallel._set_params_and_buffers_to_ignore_for_model(module, [*frozen, *buffers])
    return parallel(module)  # type: ignore[no-any-return]
