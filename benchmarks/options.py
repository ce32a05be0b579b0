"""The command line of all benchmarks: options that several of them have are described once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from group_offload.base.device import default_device

from . import models
from .report import RESULTS

_SHARED: dict[str, dict[str, Any]] = {
    "model": {"default": "flux", "choices": models.NAMES, "help": "default flux; small is the small flux"},
    "blocks": {"type": int, "nargs": "+", "metavar": "COUNT", "help": "how many blocks, of each kind"},
    "tokens": {"type": int, "help": "tokens of the input (flux: of the image)"},
    "frames": {"type": int, "help": "frames of latents (wan14b)"},
    "arms": {"nargs": "+", "metavar": "ARM", "help": "only these, in this order"},
    "list": {"action": "store_true", "help": "print the names of the arms"},
    "small": {"action": "store_true", "help": "a tiny model of the same kind: does it run?"},
    "steps": {"type": int, "help": "timed steps (default {default})"},
    "device": {"default": default_device().type, "help": "default: the accelerator, else cpu"},
    "disk": {"type": Path, "help": "folder for files that are deleted afterwards (default: the temporary one)"},
    "checkpoint": {
        "type": Path,
        "metavar": "FOLDER",
        "help": "the checkpoint: used if it is there, else written and kept",
    },
    "ram": {"default": "12GiB", "metavar": "SIZE", "help": "of arms that read files (default {default})"},
    "min_bytes": {"type": int, "help": "activations that are smaller stay (default: 1 MiB)"},
    "timeout": {"type": float, "help": "seconds for each process (default {default})"},
    "budget": {
        "type": float,
        "default": 1800,
        "help": "seconds for all arms, after which none begins (default {default})",
    },
    "output": {"type": Path, "default": RESULTS, "help": "a file .json, or the folder of all results"},
    "label": {"default": "", "help": "goes into the name of the file, to tell two runs apart"},
    "table": {"type": Path, "metavar": "FILE.json", "help": "print a result as Markdown; run nothing"},
    "child": {"action": "store_true", "help": argparse.SUPPRESS},
}


def parse(name: str, benchmark: Any, arguments: Sequence[str]) -> argparse.Namespace:
    """The options of one benchmark: its `add_options` says which ones it has."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=benchmark.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    benchmark.add_options(parser)
    add(parser, "output", "label", "table", "child")
    options = parser.parse_args(arguments)
    for count in ("steps", "slow_steps", "repeats"):
        if getattr(options, count, 1) < 1:
            parser.error(f"--{count.replace('_', '-')}: at least 1")
    return options


def add(parser: argparse.ArgumentParser, *names: str, **defaults: Any) -> None:
    """Give a parser shared options, some of them with defaults of its own."""
    for name in (*names, *defaults):
        settings = {**_SHARED[name], **({"default": defaults[name]} if name in defaults else {})}
        settings["help"] = settings["help"].replace("{default}", f"{settings.get('default')}")
        parser.add_argument(f"--{name.replace('_', '-')}", **settings)


def sizes_of(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `models.find`."""
    found = {name: getattr(options, name, None) for name in ("blocks", "tokens", "frames")}
    return {"name": options.model, "small": options.small, **found}


def model_of(options: argparse.Namespace, **sizes: Any) -> models.Model:
    """The model that is asked for; the program ends if there is none of this size."""
    try:
        return models.find(**{**sizes_of(options), **sizes})
    except ValueError as error:
        raise SystemExit(str(error)) from None
