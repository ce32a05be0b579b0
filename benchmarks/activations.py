"""Training steps of whole transformers with activations on the device, recomputed, and offloaded: time, memory, bits.

All arms run at each length of the sequence. They are those of `training` on the device, all weights trained.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from typing import Any

from . import report as reports
from .models import find
from .options import add, model_of, sizes_of
from .processes import Job, Relay
from .training import work  # noqa: F401

ARMS = {
    "none": "resident",
    "checkpointing": "resident + checkpointing",
    "save_on_cpu": "resident + save_on_cpu",
    "torchtune": "resident + torchtune",
    "ours": "resident + activations",
    "ours + checkpointing": "resident + checkpointing + activations",
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "flux": {"blocks": [6, 12], "tokens": [1024, 4096, 16384]},
    "wan14b": {"blocks": [8], "frames": [2, 5, 11]},
}
SMALL_DEFAULTS: dict[str, dict[str, Any]] = {"flux": {"tokens": [16, 64]}, "wan14b": {"frames": [1, 3]}}
COLUMNS = (
    *("step_s", "forward_s", "backward_s", "exposed_s", "peak_bytes", "after_forward_bytes"),
    *("pinned_bytes", "out_bytes", "bits_equal"),
)


def run(options: argparse.Namespace) -> Path | None:
    """Run all arms at each length of the sequence. Returns the file with the results, which is written after each arm."""
    defaults = (SMALL_DEFAULTS if options.small else DEFAULTS)[options.model]
    if options.tokens is None and options.frames is None:
        options.tokens, options.frames = defaults.get("tokens"), defaults.get("frames")
    min_bytes = (0 if options.small else 1 << 20) if options.min_bytes is None else options.min_bytes
    task = {"min_bytes": min_bytes, "num_steps": options.steps, "rank": 0, "device_memory": None, "disk": None}
    jobs = []
    for tokens, frames in product(options.tokens or [None], options.frames or [None]):
        blocks = options.blocks or defaults.get("blocks")
        sizes = {**sizes_of(options), "blocks": blocks, "tokens": tokens, "frames": frames}
        model = model_of(options, **sizes)
        for name in options.arms:
            job = Job(name=f"{name}, {model.num_tokens} tokens", task={**task, "model": sizes, "arm": ARMS[name]})
            job.facts = {"arm": name, "num_tokens": model.num_tokens}
            jobs.append(job)
    facts = {"what": model.what, "name": find(options.model, small=options.small).name}
    report = reports.new("activations", options, model=facts, options=task)
    return Relay(report, options, jobs).run(judge)


def judge(report: dict[str, Any]) -> None:
    """Compare arms with `none`, which comes first."""
    done = {(arm["arm"], arm["num_tokens"]): arm for arm in report["arms"].values() if "step_s" in arm}
    for (_, num_tokens), arm in done.items():
        none = done.get(("none", num_tokens))
        if none is not None:
            arm |= {"exposed_s": arm["step_s"] - none["step_s"], "bits_equal": arm["bits"] == none["bits"]}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="flux", choices=tuple(DEFAULTS), help="default flux")
    parser.add_argument("--tokens", type=int, nargs="+", help="of flux: image tokens")
    parser.add_argument("--frames", type=int, nargs="+", help="of wan14b: frames of latents")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help="only these")
    add(parser, "device", "small", "blocks", "list", "min_bytes", "budget", steps=4, timeout=400)
