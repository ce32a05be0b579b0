"""The command `group-offload pack`: a model's weights in fewer bytes, once for all later runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from ..base.progress import progress_bar
from ..base.text import table
from ..errors import ConfigError
from ..integrations.packing import PackedModel, pack_model
from ..packing.codec import can_unpack
from ..plan.budgets import describe_bytes
from .arguments import add_device, add_dtype, chosen_backend, find_checkpoint, new_command, path_of
from .outline import find_models, usual_dtype
from .output import say


def add_command(commands: Any) -> None:
    """Add the command to what `ArgumentParser.add_subparsers` returned."""
    text = "Compress the weights of a model or pipeline without loss, into group files in DIR. Rerun it to continue."
    command = new_command(commands, "pack", text)
    text = "the folder of a model or a pipeline, a safetensors file in one, or a downloaded name of the hub"
    command.add_argument("model", metavar="MODEL", help=text)
    command.add_argument("folder", metavar="DIR", type=path_of, help="pass it later as offload_to_disk_path")
    add_dtype(command)
    add_device(command)
    command.set_defaults(run=_pack)


def _pack(arguments: argparse.Namespace) -> int:
    device = chosen_backend(arguments.device).device
    if not can_unpack(device):
        if arguments.device is not None:
            raise ConfigError(
                f"--device {arguments.device} needs Triton. Run `pip install triton`, or pass --device cpu."
            )
        device = torch.device("cpu")
    path = find_checkpoint(arguments.model)
    models, left_out = find_models(path)
    packed: dict[str, PackedModel] = {}
    for name, model in models.items():
        with ExitStack() as stack:
            packed[name] = pack_model(
                model.model_class,
                model.folder,
                arguments.folder,
                variant=model.variant,
                dtype=arguments.dtype or usual_dtype(model),
                device=device,
                on_start=partial(_begin_bar, stack, f"Packing {name}".rstrip()),
            )
    if arguments.json:
        print(json.dumps({name: asdict(each) for name, each in packed.items()}, indent=2))
        return 0
    rows = [("model", "original", "packed", "ratio")]
    for name, model in models.items():
        groups = packed[name].groups
        plain, small = sum(group.plain_bytes for group in groups), sum(group.packed_bytes for group in groups)
        title = f"{name} {model.model_class.__name__}, {len(groups)} groups".strip()
        rows.append((title, describe_bytes(plain), describe_bytes(small), f"{small / plain:.3f}" if plain else ""))
    say(*table(rows))
    say(*(f"Not packed: {name}. {reason}" for name, reason in left_out.items()))
    if num_changed := sum(each.num_changed for each in packed.values()):
        say(
            f"Packed {num_changed} groups again: the checkpoint changed. The old files are still in {arguments.folder}. To "
            f"free them, delete its group files while no program uses them, and pack again."
        )
    return 0


def _begin_bar(stack: ExitStack, title: str, total_bytes: int) -> Callable[[int], None]:
    return stack.enter_context(progress_bar(total_bytes, title))
