"""One model on several GPUs of a host: alone, replicated, and with each GPU bringing a share of every group."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import checkpoints, report
from .machine import default_device, fix_algorithms, measure_machine, sha256, synchronize
from .models import find, make_inputs
from .options import add, model_of, sizes_of
from .processes import QUIET, share_of_anonymous_bytes
from .weights import load

ARMS: dict[str, dict[str, Any]] = {
    "one GPU": {"is_alone": True},
    "each alone": {"share": False},
    "shared": {"share": True},
    "context parallel, each alone": {"share": False, "is_parallel": True},
    "context parallel, shared": {"share": True, "is_parallel": True},
}
SHARD_BYTES = 5 << 30


def add_options(parser: argparse.ArgumentParser) -> None:
    add(
        parser,
        "model",
        "blocks",
        "tokens",
        "small",
        "arms",
        "list",
        "disk",
        "checkpoint",
        steps=10,
        device=default_device(),
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes, each with a device of its own (default 2)")
    parser.add_argument("--limit", type=float, default=600, help="seconds for all of them (default 600)")


def run(options: argparse.Namespace) -> Path | None:
    model = model_of(options)
    names = options.arms or [*ARMS]
    unknown = [name for name in names if name not in ARMS]
    if unknown:
        raise SystemExit(f"No such arm: {unknown[0]!r}. There are {[*ARMS]}.")
    found = report.new("several", options, model=model.facts(), num_ranks=options.ranks, num_steps=options.steps)
    with checkpoints.folder_of(options) as checkpoint, tempfile.TemporaryDirectory() as folder:
        if not any(checkpoint.glob("*.json")):
            checkpoints.save(model, torch.device(options.device), checkpoint, SHARD_BYTES)
        job = {
            "model": sizes_of(options),
            "arms": names,
            "checkpoint": str(checkpoint),
            "folder": folder,
            "device": torch.device(options.device).type,
            "num_ranks": options.ranks,
            "num_steps": options.steps,
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.several", json.dumps({**job, "rank": rank})],
                env={**QUIET, **os.environ},
                stdout=sys.stderr,
            )
            for rank in range(options.ranks)
        ]
        limit = time.monotonic() + options.limit
        try:
            for rank in ranks:
                rank.wait(max(1.0, limit - time.monotonic()))
        finally:
            for rank in ranks:
                rank.kill()
        results = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank*.json"))]
    if len(results) < options.ranks:
        return None
    found["machine"] = results[0]["machine"]
    for name in names:
        found["arms"][name] = {"ranks": [result["arms"][name] for result in results if name in result["arms"]]}
    return report.write(found, options.output)


def render(found: Mapping[str, Any]) -> str:
    rows = [
        (
            "",
            "set-up",
            "step",
            "in a row",
            "against one GPU",
            "output",
            "gathered a step",
            "missed",
            "anonymous RAM, all",
        )
    ]
    one = _worst(found["arms"].get("one GPU"), "in_a_row_s")
    hashes: dict[bool, str] = {}
    for name, arm in found["arms"].items():
        ranks = arm["ranks"]
        row, outputs = _worst(arm, "in_a_row_s"), {each["output"] for each in ranks}
        reference = hashes.setdefault("context" in name, ranks[0]["output"])
        rows.append(
            (
                name,
                report.seconds(_worst(arm, "setup_s")),
                report.seconds(_worst(arm, "step_s")),
                report.seconds(row),
                f"{row / one:.3f}" if one and row else "",
                "equal" if outputs == {reference} else "DIFFERENT",
                report.gib(int(ranks[0]["gathered_bytes"])),
                str(sum(each["missed"] for each in ranks)),
                report.gib(sum(each["anonymous_bytes"] for each in ranks)),
            )
        )
    model = found["model"]
    head = f"{model['name']}: {model['what']}, {model['goes_in']}, {found['num_ranks']} processes. "
    plans = [f"- {name}: {arm['ranks'][0]['plan']}" for name, arm in found["arms"].items() if arm["ranks"][0]["plan"]]
    return "\n".join([head + report.machine_facts(found), "", report.markdown(rows), "", *plans])


def _worst(arm: Mapping[str, Any] | None, what: str) -> float | None:
    return None if arm is None else max(float(each[what]) for each in arm["ranks"])


# ------------------------------------------------------------------------------------------------ one rank


def run_rank(job: Mapping[str, Any]) -> None:
    rank, num_ranks = job["rank"], job["num_ranks"]
    device = torch.device("cpu" if job["device"] == "cpu" else f"{job['device']}:{rank}")
    if device.type != "cpu":
        torch.accelerator.set_device_index(rank)
    fix_algorithms()
    dist.init_process_group(
        "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl",
        init_method=f"file://{job['folder']}/meeting",
        rank=rank,
        world_size=num_ranks,
    )
    result: dict[str, Any] = {"arms": {}}
    with torch.no_grad():
        for name in job["arms"]:
            arm = ARMS[name]
            dist.barrier()
            if rank == 0 or not arm.get("is_alone"):
                result["arms"][name] = run_arm(arm, job, device)
            dist.barrier()
    result["machine"] = measure_machine(device) if rank == 0 else None
    Path(job["folder"], f"rank{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def run_arm(arm: Mapping[str, Any], job: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    from group_offload import apply_group_offloading

    model = find(**job["model"])
    inputs = make_inputs(model, device)
    module = load(model, Path(job["checkpoint"]))
    if arm.get("is_parallel"):
        from diffusers import ContextParallelConfig

        module.enable_parallelism(config=ContextParallelConfig(ulysses_degree=job["num_ranks"]))
    meet = (lambda: None) if arm.get("is_alone") else dist.barrier
    meet()
    shared = {} if arm.get("is_alone") else {"process_group": dist.group.WORLD, "share": arm["share"]}
    start = time.perf_counter()
    handle = apply_group_offloading(module, device, **shared)
    setup = time.perf_counter() - start
    times = []
    for _ in range(1 + job["num_steps"]):
        meet()
        start = time.perf_counter()
        output = model.call(module, inputs)
        synchronize(device)
        times.append(time.perf_counter() - start)
    before = handle.stats()
    meet()
    start = time.perf_counter()
    for _ in range(job["num_steps"]):
        output = model.call(module, inputs)
    synchronize(device)
    in_a_row = (time.perf_counter() - start) / job["num_steps"]
    stats = handle.stats()
    found = {
        "setup_s": setup,
        "first_step_s": times[0],
        "step_s": statistics.median(times[1:]),
        "in_a_row_s": in_a_row,
        "output": sha256(output),
        "gathered_bytes": (stats.bytes_gathered - before.bytes_gathered) / job["num_steps"],
        "missed": stats.gathers_missed,
        "stalls": stats.stalls,
        "stalled_s": stats.stalled_seconds,
        "anonymous_bytes": share_of_anonymous_bytes(),
        "plan": handle.plan.gpus,
    }
    print(f"rank {job['rank']}: {found}", file=sys.stderr, flush=True)
    handle.remove()
    return found


if __name__ == "__main__":
    run_rank(json.loads(sys.argv[1]))
