"""python -m benchmarks NAME [options]: runs one benchmark, writes its result, and prints it as a Markdown table."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

NAMES = {
    "weights": "one model: resident, under diffusers' group offloading, under accelerate, under this package",
    "pipeline": "a whole pipeline: time of an image or a video, and the device's peak",
    "card": "whole pipelines on a device whose memory another process holds, but for some GiB",
    "training": "a LoRA over frozen weights that are offloaded",
    "activations": "training steps with activations on the device, recomputed, and offloaded",
    "hooks": "the host's work for one group",
    "quantized": "quantized weights of several kinds: resident, under this package, under diffusers' group offloading",
    "shared": "interleaved forwards: guidance, and requests of several threads",
    "several": "one model on several GPUs of a host: alone, replicated, and with each loading a shard of every group",
    "compression": "compressed weights: how many bytes are left, and how fast they are compressed and decompressed",
}


ALIASES = {
    # In RAM neither engine moves any bytes on the CPU: what is beyond the resident step is hooks'. The fastest step counts.
    "hooks": (
        *("weights", "--model", "tiny-layers", "--device", "cpu", "--no-profile", "--steps", "100"),
        *("--arms", "resident", "ours block", "ours leaf", "diffusers block+stream", "diffusers leaf+stream"),
        *("diffusers block, no stream", "diffusers leaf, no stream"),
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    listed = "\n".join(f"  {name:<13}{what}" for name, what in NAMES.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"{listed}\n\n`python -m benchmarks NAME --help` lists the options, docs/benchmarks.md has the tables.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=NAMES)
    name = parser.parse_args(arguments[:1]).name
    put_python_path_first()
    name, *more = ALIASES.get(name, (name,))
    run(name, [*more, *arguments[1:]])


def run(name: str, arguments: Sequence[str]) -> None:
    from . import report as reports
    from .options import parse

    benchmark: Any = importlib.import_module(f"benchmarks.{name}")
    options = parse(name, benchmark, arguments)
    render = benchmark.render if hasattr(benchmark, "render") else partial(reports.render, columns=benchmark.COLUMNS)
    if options.child:
        from .pipelines import preload
        from .processes import serve

        preload(pipelines=name in ("card", "pipeline"))
        serve(benchmark.work)
    elif options.table:
        print(render(json.loads(options.table.read_text())))
    elif getattr(options, "list", False):
        print("\n".join(benchmark.ARMS))
    else:
        path: Path | None = benchmark.run(options)
        if path is None:
            raise SystemExit("No arm gave a result.")
        print(render(json.loads(path.read_text())))
        print(f"\n{path}", file=sys.stderr)


def put_python_path_first() -> None:
    """Let PYTHONPATH go before the current directory, which `python -m` puts first: it may name an older package."""
    named = os.environ.get("PYTHONPATH")
    if named and sys.path[0] == str(Path.cwd()):
        sys.path.insert(len(named.split(os.pathsep)), sys.path.pop(0))


if __name__ == "__main__":
    main()
