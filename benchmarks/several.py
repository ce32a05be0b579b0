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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import checkpoints, processes, report, training, weights
from .arms import parse_size
from .disk import drop_page_cache, files_in, transferred
from .limits import MemoryGroup, limit_ram
from .machine import (
    default_device,
    fix_training_algorithms,
    measure_machine,
    said,
    say,
    sha256,
    share_of_anonymous_bytes,
    synchronize,
)
from .models import Draw, Model, find, make_inputs
from .options import add, model_of, sizes_of
from .report import gib

BAR = 0.6
"""At most so much of one GPU's time an arm that shares is to take."""
TRACED = "shared"
SHARD_BYTES = 5 << 30
SLOW_STEPS = 2
"""Timed steps of arms that read a drive."""
TRACED_STEPS = 2
LORA_RANK = 16
GRACE_SECONDS = 5
"""How long the other ranks have, once one of them has failed, to say what they saw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    kind: str = "RAM"
    """What runs in the same processes: "RAM", "files" (with little RAM) or "training"."""
    share: bool | None = None
    """None: one GPU runs, and the others wait."""
    form: tuple[str, ...] = ()
    """What is made of the module before: "context parallel", "compiled", "LoRA", "FSDP2", "resident". The module cannot be used
    for another form afterwards."""
    reference: str = "one GPU"
    """The arm whose time this one's is compared with."""
    same_as: str = "one GPU"
    """The arm with the same arithmetic, whose bits this one is to have."""
    bar: float | None = None
    packs: bool = False
    """Whether weights are packed, into files of a folder."""


SHARES: dict[str, bool | None] = {
    "one GPU": None,
    "each alone": False,
    "shared": True,
    "resident": False,
    "FSDP2": False,
}


def arm_of(name: str) -> Arm:
    """The arm that a name says: "compiled, context parallel, shared"."""
    *parts, how = name.split(", ")
    share, prefix = SHARES[how], ", ".join(parts)
    words = [word for part in parts for word in part.split(" and ")]
    form = tuple(word for word in words if word in ("context parallel", "compiled", "LoRA"))
    form += (how,) if how in ("resident", "FSDP2") else ()
    reference = same_as = f"{prefix}, one GPU" if prefix and "context parallel" not in words else "one GPU"
    if "context parallel" in words:
        reference = "compiled, one GPU" if "compiled" in words else "one GPU"
        same_as = f"{prefix}, each alone"
    elif words in (["compiled"], ["compiled", "packed"]):
        same_as = "compiled, each alone" if share else "compiled, one GPU"  # each process compiles for itself
    elif words == ["packed"]:
        same_as = "one GPU"
    elif words == ["LoRA"] and share is not None:
        same_as = "LoRA, each alone"  # a batch is other arithmetic
    kind = {"files": "files", "LoRA": "training"}.get(prefix, "RAM")
    has_bar = bool(share and parts and (words != ["context parallel"]))
    return Arm(
        kind=kind,
        share=share,
        form=form,
        reference=reference,
        same_as=same_as,
        bar=BAR if has_bar else None,
        packs="packed" in words,
    )


DEFAULT = ("one GPU", "each alone", "shared", "context parallel, each alone", "context parallel, shared")
_PREFIXES = ("compiled", "packed", "compiled and packed", "files", "LoRA")
ARMS = {
    name: arm_of(name)
    for name in (
        *DEFAULT,
        "resident",
        "context parallel, resident",
        "FSDP2",
        *(f"{prefix}, {how}" for prefix in _PREFIXES for how in ("one GPU", "each alone", "shared")),
        *(f"compiled, context parallel, {how}" for how in ("each alone", "shared", "resident")),
        *(f"LoRA, {how}" for how in ("FSDP2", "resident")),
    )
}


def add_options(parser: argparse.ArgumentParser) -> None:
    add(parser, "model", "blocks", "tokens", "small", "arms", "list", "disk", "checkpoint")
    add(parser, steps=10, device=default_device())
    parser.set_defaults(arms=[*DEFAULT])
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=[2],
        metavar="N",
        help="processes, each with a device of its own (default 2); all arms run with each of these numbers",
    )
    parser.add_argument("--limit", type=float, default=600, help="seconds for all of them (default 600)")
    parser.add_argument("--ram", default="12GiB", metavar="SIZE", help="of all ranks, from files (default 12GiB)")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help=f"the timeline of {TRACED_STEPS} more steps of the arm {TRACED!r}, with the first number of ranks",
    )


def run(options: argparse.Namespace) -> Path | None:
    model, device, until = model_of(options), torch.device(options.device), time.monotonic() + options.limit
    unknown = [name for name in options.arms if name not in ARMS]
    if unknown:
        raise SystemExit(f"No such arm: {unknown[0]!r}. There are {[*ARMS]}.")
    if options.trace is not None and TRACED not in options.arms:
        raise SystemExit(f"--trace: the arm {TRACED!r} is not among those that run.")
    teams: dict[tuple[str, int], list[str]] = {}
    for kind, num_ranks in product(dict.fromkeys(ARMS[name].kind for name in options.arms), options.ranks):
        names = [name for name in options.arms if ARMS[name].kind == kind]
        teams[kind, num_ranks] = [name for name in names if num_ranks == options.ranks[0] or _differs(ARMS[name])]
    found = report.new("several", options, model=model.facts(), num_steps=options.steps, ram={})
    path = None
    with ExitStack() as stack:
        checkpoint = stack.enter_context(checkpoints.folder_of(options))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # All of them import at the same time, while the checkpoint is made.
        every = {team: _team(*team, options, stack, found["ram"]) for team in teams}
        found["machine"] = measure_machine(device)
        checkpoints.make_sure({checkpoint: model}, options.device, SHARD_BYTES)
        for (kind, num_ranks), names in teams.items():
            ranks, group = every[kind, num_ranks]
            team = f"{kind}, {_gpus(num_ranks)}"
            if kind == "files":
                drop_page_cache(files_in(checkpoint), may_drop_all=not options.small)
            (folder / team).mkdir()
            job = {
                "model": sizes_of(options),
                "kind": kind,
                "arms": names,
                "checkpoint": str(checkpoint),
                "folder": str(folder / team),
                "device": device.type,
                "num_ranks": num_ranks,
                "num_steps": min(options.steps, SLOW_STEPS) if kind == "files" else options.steps,
                "trace": str(options.trace.absolute()) if options.trace and num_ranks == options.ranks[0] else None,
            }
            with said(f"all arms of {team}"):
                results = _work(ranks, job, until - time.monotonic())
            error = "; ".join(dict.fromkeys(result["error"] for result in results if "error" in result))
            if group is not None:
                found["ram"][team] = group.usage()
            for name in names:
                done = [result[name] for result in results if name in result]
                is_whole = len(done) == (1 if ARMS[name].share is None else num_ranks)
                title = name if len(options.ranks) == 1 or not _differs(ARMS[name]) else _title(name, num_ranks)
                facts = {"arm": name, "num_ranks": num_ranks}
                found["arms"][title] = {**facts, **({"ranks": done} if is_whole else {"error": error})}
            path = report.write(found, options.output)
    return path


def _differs(arm: Arm) -> bool:
    """Whether an arm is another one with other numbers of processes: one GPU trains with the samples of all."""
    return arm.share is not None or arm.kind == "training"


def _gpus(num_ranks: int) -> str:
    return "1 GPU" if num_ranks == 1 else f"{num_ranks} GPUs"


def _title(name: str, num_ranks: int) -> str:
    return f"{name} ({_gpus(num_ranks)})"


def _team(
    kind: str, num_ranks: int, options: argparse.Namespace, stack: ExitStack, limits: dict[str, Any]
) -> tuple[list[processes.Child], MemoryGroup | None]:
    """The processes of one kind, and what limits their RAM. They wait for their job."""
    group: MemoryGroup | None = None
    if kind == "files":
        group = limit_ram(parse_size(options.ram), limits.setdefault(f"{kind}, {_gpus(num_ranks)}", {}))
        if group is not None:
            stack.callback(group.remove)
    # As torchrun does it: else the threads of all ranks, as many as the host has cores in each, wait for each other.
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    ranks = []
    for _ in range(num_ranks):
        ranks.append(processes.Child("several", group, environment))
        stack.callback(ranks[-1].end)
        stack.callback(ranks[-1].kill)
    return ranks, group


def _work(ranks: Sequence[processes.Child], job: Mapping[str, Any], limit: float) -> list[dict[str, Any]]:
    """Let the ranks do their job. Returns what each of them has measured, and what went wrong."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        begun = [pool.submit(each.run, {**job, "rank": rank}, limit) for rank, each in enumerate(ranks)]
        open_: set[Any] = set(begun)
        while open_:
            done, open_ = wait(open_, return_when=FIRST_COMPLETED)
            if open_ and any("error" in each.result() for each in done):
                wait(open_, GRACE_SECONDS)  # they would wait for the one that failed
                for each in ranks:
                    each.kill()
        return [each.result() for each in begun]


# ------------------------------------------------------------------------------------------------ the table


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
            other if other in outputs else _title(other, arm["num_ranks"]) for other in (facts.reference, facts.same_as)
        )
        row: dict[str, Any] = {
            key: max(each[key] for each in ranks)
            for key in ("setup_s", "step_s", "in_a_row_s", "host_s", "forward_s", "backward_s", "predicted_s")
            if ranks[0].get(key) is not None
        }
        for key in ("missed", "anonymous_bytes", "drive_bytes"):
            row[key] = sum(each.get(key) or 0 for each in ranks)
        row["gathered_bytes"] = int(ranks[0]["gathered_bytes"])
        compared = rows.get(reference, row if name == reference else {})
        if "step_s" in compared:
            row["of_one"] = _time(row) / _time(compared)
            row["bar"] = (
                "" if facts.bar is None else f"{facts.bar}: {'met' if row['of_one'] <= facts.bar else 'MISSED'}"
            )
        expected = outputs.get(same_as, [])
        if expected and name != same_as:
            row["is_equal"] = all(output == expected[rank % len(expected)] for rank, output in enumerate(outputs[name]))
        rows[name] = row
    return rows


def _time(row: Mapping[str, Any]) -> float:
    return float(row.get("in_a_row_s") or row["step_s"])


COLUMNS = ("setup_s", "step_s", "forward_s", "backward_s", "predicted_s", "in_a_row_s", "host_s", "of_one", "bar")
COLUMNS += ("is_equal", "gathered_bytes", "drive_bytes", "missed", "anonymous_bytes")


def render(found: Mapping[str, Any]) -> str:
    model = found["model"]
    counts = " and ".join(str(each) for each in dict.fromkeys(arm["num_ranks"] for arm in found["arms"].values()))
    head = f"{model['name']}: {model['what']}, {model['goes_in']}, {counts} processes. "
    plans = [
        f"- {name}: {arm['ranks'][0]['plan']}"
        for name, arm in found["arms"].items()
        if "ranks" in arm and arm["ranks"][0]["plan"]
    ]
    for kind, limit in found.get("ram", {}).items():
        refusal = limit.get("group_error")
        text = f"RAM was not restricted: {refusal}" if refusal else f"{gib(limit['group_limit_bytes'])} of RAM"
        plans.append(f"- {kind}, all ranks: {text}")
    return "\n".join(
        [head + report.machine_facts(found), "", report.table(judge(found), COLUMNS, "step_s"), "", *plans]
    )


# ------------------------------------------------------------------------------------------------ one rank

preload = weights.preload


def work(job: dict[str, Any], begin: Callable[[], None]) -> dict[str, Any]:
    """What one rank does: all arms of a kind, one after another."""
    rank = job["rank"]
    device = torch.device("cpu" if job["device"] == "cpu" else f"{job['device']}:{rank}")
    if device.type != "cpu":
        torch.accelerator.set_device_index(rank)
    if job["kind"] == "training":
        fix_training_algorithms()
    dist.init_process_group(
        "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl",
        init_method=f"file://{job['folder']}/meeting",
        rank=rank,
        world_size=job["num_ranks"],
    )
    result: dict[str, Any] = {}
    module: nn.Module | None = None
    form: tuple[str, ...] = ()
    for name in job["arms"]:
        arm, start = ARMS[name], time.perf_counter()
        if module is None or form != arm.form:
            module, form = None, arm.form
            gc.collect()
            module = make(arm, job)
        loaded = time.perf_counter() - start
        dist.barrier()
        if rank == 0 or arm.share is not None:
            with torch.set_grad_enabled(job["kind"] == "training"):
                measure = train if job["kind"] == "training" else infer
                result[name] = {"load_s": loaded, **measure(name, module, job, device)}
            say(f"{name}, rank {rank}, {time.perf_counter() - start:.1f} s: {result[name]}")
            processes.tell_so_far(result)
        dist.barrier()
    dist.destroy_process_group()
    return result


def make(arm: Arm, job: Mapping[str, Any]) -> nn.Module:
    """The module, loaded from the checkpoint, in the form that an arm needs."""
    module: Any = weights.load(find(**job["model"]), Path(job["checkpoint"]))
    if "context parallel" in arm.form:
        from diffusers import ContextParallelConfig

        module.enable_parallelism(config=ContextParallelConfig(ulysses_degree=job["num_ranks"]))
    if "compiled" in arm.form:  # then the host launches few kernels
        module.compile_repeated_blocks(fullgraph=True)
    if "LoRA" in arm.form:
        training.add_lora(module.train(), LORA_RANK)
    return module  # type: ignore[no-any-return]


def sharing_of(arm: Arm) -> dict[str, Any]:
    return {} if arm.share is None else {"process_group": dist.group.WORLD, "share": arm.share}


def infer(name: str, module: nn.Module, job: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    from group_offload import apply_group_offloading

    model, arm = find(**job["model"]), ARMS[name]
    inputs = make_inputs(model, device)
    meet = (lambda: None) if arm.share is None else dist.barrier
    meet()
    start = time.perf_counter()
    handle: Any = None
    if "FSDP2" in arm.form:
        training.shard(module, device)
    elif "resident" in arm.form:
        module.to(device)
    else:
        where = "disk" if arm.kind == "files" else "cpu"
        packs = {"pack": True, "offload_to_disk_path": f"{job['folder']}/packed"} if arm.packs else {}
        handle = apply_group_offloading(module, device, where, **packs, **sharing_of(arm))
    setup = time.perf_counter() - start
    times = []
    for _ in range(1 + job["num_steps"]):
        meet()
        start = time.perf_counter()
        output = model.call(module, inputs)
        synchronize(device)
        times.append(time.perf_counter() - start)
    before, drive = _counts(handle), transferred()
    meet()
    start = time.perf_counter()
    for _ in range(job["num_steps"]):
        output = model.call(module, inputs)
    launched = time.perf_counter() - start
    synchronize(device)
    took = time.perf_counter() - start
    later = transferred()
    counts = {key: (value - before[key]) / job["num_steps"] for key, value in _counts(handle).items()}
    found = {
        "setup_s": setup,
        "first_step_s": times[0],
        "step_s": statistics.median(times[1:]),
        "in_a_row_s": took / job["num_steps"],
        "host_s": launched / job["num_steps"],
        "output": sha256(output),
        **counts,
        "missed": 0 if handle is None else handle.stats().gathers_missed,
        "drive_bytes": (later["read_bytes"] - drive["read_bytes"]) / job["num_steps"] if drive else None,
        "anonymous_bytes": share_of_anonymous_bytes(),
        "plan": "" if handle is None else handle.plan.gpus,
    }
    if job["trace"] is not None and name == TRACED:
        path = Path(job["trace"])
        path = path if job["rank"] == 0 else path.with_stem(f"{path.stem}-rank{job['rank']}")
        path.parent.mkdir(parents=True, exist_ok=True)
        meet()
        with handle.trace(path):
            start = time.perf_counter()
            for _ in range(TRACED_STEPS):
                model.call(module, inputs)
            synchronize(device)
            found["traced_step_s"] = (time.perf_counter() - start) / TRACED_STEPS
    if handle is not None:
        details = handle.plan.details
        found["predicted_s"] = None if details is None else details.prediction.step_seconds
        handle.remove()
    return found


def _counts(handle: Any) -> dict[str, float]:
    """What a handle has counted so far."""
    if handle is None:
        return {"gathered_bytes": 0}
    stats = handle.stats()
    return {"gathered_bytes": stats.bytes_gathered, "stalls": stats.stalls, "stalled_s": stats.stalled_seconds}


def train(name: str, module: nn.Module, job: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """A LoRA's steps, each with one sample for each rank: in one batch, or under DDP."""
    arm, model = ARMS[name], find(**job["model"])
    inputs = samples(model, device, job["num_ranks"], None if arm.share is None else job["rank"])
    way = "fsdp2" if "FSDP2" in arm.form else "resident" if "resident" in arm.form else "ours block"
    if way == "resident":
        module.to(device)
    options = argparse.Namespace(device=str(device), steps=job["num_steps"], min_bytes=0)
    training_run = training.Run(f"{way} + checkpointing", model, module, options)
    start = time.perf_counter()
    training_run.open(Path(job["folder"]), **sharing_of(arm))
    setup = time.perf_counter() - start
    handle = training_run.handle
    try:
        if arm.share is not None:
            if handle is not None:
                module(**inputs)  # brings what is trained to the device: DDP wants to find it there
            training_run.called = _in_parallel(module)
        before = _counts(handle)["gathered_bytes"]
        found = training_run.measure(inputs)
        return {
            "setup_s": setup,
            **found,
            "output": found["bits"],
            "gathered_bytes": (_counts(handle)["gathered_bytes"] - before) / len(found["steps_s"]),
            "missed": 0 if handle is None else handle.stats().gathers_missed,
            "anonymous_bytes": share_of_anonymous_bytes(),
            "plan": "" if handle is None else handle.plan.gpus,
        }
    finally:
        training_run.close()


def samples(model: Model, device: torch.device, num_samples: int, which: int | None) -> dict[str, torch.Tensor]:
    """One of several samples; None: all of them as one batch."""
    draw = Draw(device, model.dtype)
    drawn = [model.inputs(draw) for _ in range(num_samples)]
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
