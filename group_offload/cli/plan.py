"""The command `group-offload plan`: where each group of a model will be stored, and how fast a forward will be."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ..base.ram import available_ram
from ..base.text import describe_bytes, describe_seconds, html_paragraph
from ..base.tuning import tuning
from ..errors import ConfigError, StorageError
from ..integrations.ram_split import NUM_STEPS
from ..plan.placement import ASSUMED_DECOMPRESS, Placement, Problem, Speeds, smallest_device_bytes
from ..plan.planner import Plan, make_plan
from ..plan.ram_split import ComponentLoad, share_ram
from ..plan.report import OffloadPlan
from ..plan.speeds import ASSUMED_DISK, ASSUMED_H2D, filesystem_of, recorded
from ..report.page import write_page
from ..runtime.interleave.contract import DENOISERS
from .arguments import add_json, dtype_of, find_checkpoint, is_on_hub, new_command, path_of, positive_size_of, size_of
from .hub import sketched
from .meta_model import MetaModel, find_models, meta_model_of, read_json
from .output import say

_PROCESS_RAM = "1.5GiB"
_PLACES = {
    Placement.DEVICE: "on the device",
    Placement.COMPRESSED: "on the device, compressed",
    Placement.RAM: "pinned RAM",
    Placement.FILE: "file",
}
_AROUND_BLOCKS = "on the device during a forward"


def add_command(commands: Any) -> None:
    """Add the command to what `ArgumentParser.add_subparsers` returned."""
    text = "Show where a checkpoint's weights will be stored, and how fast a forward will be. No weights are read."
    plan = new_command(commands, "plan", text)
    add = plan.add_argument
    text = "the folder of a model or a pipeline, or a name on the Hugging Face hub, whose configs and headers are downloaded"
    add("model", metavar="MODEL", help=text)
    add("--vram", metavar="SIZE", type=positive_size_of, help="device memory for the whole process, such as 8GiB")
    text = "RAM for the whole process (default: enough for all weights)"
    add("--ram", metavar="SIZE", type=positive_size_of, help=text)
    text = "the part of --vram for activations (default: 0)"
    add("--activations", metavar="SIZE", type=size_of, default=0, help=text)
    text = f"the part of --ram for Python, torch and the driver (default: {_PROCESS_RAM}, a guess)"
    add("--host-overhead", metavar="SIZE", type=size_of, default=_PROCESS_RAM, help=text)
    text = "the dtype that weights are cast to, such as bfloat16 (default: that of the files)"
    add("--dtype", type=dtype_of, help=text)
    text = "compress bfloat16 weights to an assumed 0.72 of their size, as compress=True does"
    add("--compress", action="store_true", help=text)
    add("--step-seconds", type=_seconds, metavar="S", help="compute time of one forward (default: unknown)")
    text = "forwards of a pipeline's denoiser (default: %(default)s)"
    add("--steps", type=_number, default=NUM_STEPS, metavar="N", help=text)
    text = "{}, such as {}, per second (default: as doctor measured)"
    add("--h2d-speed", metavar="SPEED", type=positive_size_of, help=text.format("RAM to device", "25GB"))
    add("--disk-speed", metavar="SPEED", type=positive_size_of, help=text.format("disk to RAM", "3.5GB"))
    text = "write a page: groups, bottleneck"
    add_json(plan)
    add("--html", metavar="FILE.html", type=path_of, help=text)
    plan.set_defaults(run=_plan)


def _seconds(text: str) -> float:
    if not 0 < float(text) <= 1e6:
        raise argparse.ArgumentTypeError("expected a number of seconds, more than 0 and at most 1e+06")
    return float(text)


def _number(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("expected a whole number of 1 or more")
    return int(text)


@dataclass(frozen=True, slots=True)
class _Component:
    """A model and its plan."""

    name: str
    model: MetaModel
    uses: int
    plan: Plan

    @property
    def title(self) -> str:
        return f"{self.name} {self.model.model_class}".strip()

    def described(self, dtype: torch.dtype | None) -> tuple[str, OffloadPlan]:
        """A sentence, and what is shown below it."""
        model, outer = self.model, self.model.outer_bytes
        uses = f", {self.uses} forwards" if self.uses > 1 else ""
        held = f" {describe_bytes(outer)} around its blocks are on the device only during a forward." if outer else ""
        size, details = describe_bytes(model.num_bytes), self.plan if self.plan.problem.groups else None
        said = f"{self.title}: {size} in {len(model.groups)} groups{uses}.{held}"
        cast = f"{model.num_cast} weights are cast to {dtype}. Those on disk are written to offload_to_disk_path first"
        return said, OffloadPlan(self.title, details, notes=[f"{cast}."] if model.num_cast else [])


_Speeds = Mapping[str, tuple[int, str]]
"""Bytes a second, and where they come from, by the names in `Speeds`."""


def _plan(arguments: argparse.Namespace) -> int:
    try:
        path = find_checkpoint(arguments.model)
    except StorageError:
        if not is_on_hub(arguments.model) or find_spec("huggingface_hub") is None:
            raise
        from huggingface_hub.constants import HF_HUB_CACHE

        with sketched(arguments.model) as path:
            return _plan_of(path, Path(HF_HUB_CACHE), arguments)
    return _plan_of(path, path, arguments)


def _plan_of(path: Path, weights: Path, arguments: argparse.Namespace) -> int:
    """
    Args:
        path: Where configs and headers are.
        weights: Where the weights are, or will be.
    """
    speeds = _speeds(arguments, weights)
    found, left_out = find_models(path)
    dtype, compresses = arguments.dtype, arguments.compress
    models = {name: meta_model_of(model, dtype, compresses=compresses) for name, model in found.items()}
    components = _components(models, arguments, Speeds(**{name: speed for name, (speed, _) in speeds.items()}))
    sentences = [
        "All times are predicted; nothing has run.",
        *_notes(arguments, speeds, components),
        *(f"Not planned: {name}. {reason}" for name, reason in left_out.items()),
    ]
    title, call = f"Plan of {arguments.model}", [*_call(path, components, arguments)]
    described = {component.title: component.described(arguments.dtype) for component in components}
    if arguments.html is not None:
        sections = {name: html_paragraph(said) + plan._repr_html_() for name, (said, plan) in described.items()}
        write_page(title, sentences, sections, arguments.html)
    if arguments.json:
        facts: dict[str, Any] = {"title": title, "models": [*map(_figures, components)]}
        facts |= {"sentences": sentences, "call": "\n".join(call)}
        print(json.dumps(facts, indent=2))  # these fields are stable
        return 0
    for said, plan in described.values():
        say(said, "", *str(plan).splitlines(), "")
    if len(components) > 1:
        seconds = sum(each.uses * each.plan.prediction.step_seconds for each in components)
        say(f"One image or video, all forwards of all models: {describe_seconds(seconds)}.")
    say(*sentences, "", "To run it here:", *(f"    {line}" for line in call))
    if arguments.html is not None:
        say(f"Wrote {arguments.html}.")
    return 0


def _speeds(arguments: argparse.Namespace, path: Path) -> _Speeds:
    """The speeds that were given, else measured here before, else assumed. No device is asked."""
    kept, found = recorded(), dict[str, tuple[int, str]]()
    device = next((name for name in reversed(kept["h2d"]) if not name.startswith("CPU ")), "")
    for name, given, where, assumed in (
        ("h2d", arguments.h2d_speed, device, ASSUMED_H2D),
        ("disk", arguments.disk_speed, filesystem_of(path), ASSUMED_DISK),
        ("decompress", None, device, ASSUMED_DECOMPRESS),
    ):
        measured = kept[name].get(where)
        if given is not None:
            found[name] = given, "given"
        elif measured is not None:
            found[name] = measured, f"measured on {where}"
        else:
            found[name] = assumed, "assumed"
    return found


def _components(models: Mapping[str, MetaModel], arguments: argparse.Namespace, speeds: Speeds) -> list[_Component]:
    """
    Raises:
        ConfigError: a budget is too small. The message names the smallest that works for all models.
    """
    uses = {name: arguments.steps if name.startswith(DENOISERS) else 1 for name in models}
    shares, problems, others = _shares(models, uses, arguments), dict[str, Problem](), dict[str, int]()
    for name, model in models.items():
        is_timed = arguments.step_seconds is not None and (len(models) == 1 or name.startswith(DENOISERS))
        seconds = arguments.step_seconds if is_timed else 0.0
        planned = [group for group in model.groups if group.name not in model.outer]
        total = sum(group.num_bytes for group in planned) or 1
        groups = tuple(replace(each, compute_seconds=seconds * each.num_bytes / total) for each in planned)
        problems[name] = Problem(
            groups=groups,
            order=tuple(range(len(groups))),
            speeds=speeds,
            ram_budget=shares[name],
            staging_bytes=tuning().reading_bytes,
        )
        others[name] = arguments.activations + model.outer_bytes + tuning().device_margin_bytes
    if arguments.vram is not None:
        least = {name: smallest_device_bytes(problem) + others[name] for name, problem in problems.items()}
        name = max(least, key=lambda name: least[name])
        if arguments.vram < least[name]:
            raise ConfigError(
                f"{name}{': ' * bool(name)}--vram {describe_bytes(arguments.vram)} is too small. The smallest that works is "
                f"{describe_bytes(least[name], round_up=True)}: {describe_bytes(least[name] - others[name])} of buffers, "
                f"{describe_bytes(models[name].outer_bytes)} of weights around the blocks, "
                f"{describe_bytes(arguments.activations)} of activations, and a margin of "
                f"{describe_bytes(tuning().device_margin_bytes)}."
            )
        problems = {
            name: replace(problem, device_budget=arguments.vram - others[name]) for name, problem in problems.items()
        }
    return [_Component(name, models[name], uses[name], make_plan(problem)) for name, problem in problems.items()]


def _shares(
    models: Mapping[str, MetaModel], uses: Mapping[str, int], arguments: argparse.Namespace
) -> dict[str, int | None]:
    """RAM for the weights of each model. None: no limit was given."""
    if arguments.ram is None:
        return dict.fromkeys(models)
    others = arguments.host_overhead + len(models) * tuning().reading_bytes + tuning().ram_margin_bytes
    if arguments.ram < others:
        raise ConfigError(
            f"--ram {describe_bytes(arguments.ram)} is too small: --host-overhead and buffers for reads alone need "
            f"{describe_bytes(others, round_up=True)}."
        )
    loads = [ComponentLoad(num_bytes=model.num_bytes, uses=uses[name], must_bytes=0) for name, model in models.items()]
    return dict(zip(models, share_ram(loads, arguments.ram - others), strict=True))


def _notes(arguments: argparse.Namespace, speeds: _Speeds, components: Sequence[_Component]) -> Iterator[str]:
    """Sentences about what the numbers assume."""
    if arguments.vram is None:
        yield "Without --vram, no weights stay on the device between forwards."
    if arguments.ram is None:
        yield "Without --ram, all weights are in RAM."
    elif len(components) > 1:
        yield "RAM goes first to the models that run most often."
    names = {"h2d": "RAM to device", "disk": "disk to RAM"}
    names |= {"decompress": "decompression"} if arguments.compress else {}
    told = {label: speeds[name] for name, label in names.items()}
    yield f"Speeds: {', '.join(f'{label} {speed / 1e9:.3g} GB/s ({source})' for label, (speed, source) in told.items())}."
    if any(source == "assumed" for name, (_, source) in speeds.items() if name != "decompress"):
        yield "To measure what is assumed: group-offload doctor DIR"
    if arguments.compress:
        yield "Compressed weights on disk need offload_to_disk_path."
    untimed = [each.name for each in components if not each.plan.prediction.compute_seconds]
    if len(untimed) == len(components):
        yield "Times cover weight transfers only. Pass --step-seconds to include compute."
    elif untimed:
        yield f"Times of {', '.join(untimed)} cover weight transfers only: --step-seconds is the denoiser's."


def _call(path: Path, components: Sequence[_Component], arguments: argparse.Namespace) -> Iterator[str]:
    """Lines of Python that open the model: in RAM if this machine, or --ram, has room for its weights, else from its files."""
    index = path / "model_index.json"
    thing = "pipe" if index.exists() else "model"
    largest = max(components, key=lambda each: each.model.num_bytes)
    model_class = str(read_json(index).get("_class_name")) if index.exists() else largest.model.model_class
    library = "diffusers" if index.exists() or hasattr(import_module("diffusers"), model_class) else "transformers"
    dtype = arguments.dtype or largest.model.usual_dtype  # diffusers loads float32 unless it is told otherwise
    name, inside = str(path), list[str]()
    if path != Path(os.path.expanduser(arguments.model)):  # of the hub: loaders of models take owner/model
        parts = arguments.model.split("/")
        name, inside = (arguments.model, []) if index.exists() else ("/".join(parts[:2]), parts[2:])
    given = [json.dumps(name, ensure_ascii=False)] + ([f'subfolder="{"/".join(inside)}"'] if inside else [])
    given += [f"dtype={dtype}"] if dtype != torch.float32 else []
    given += [f'variant="{largest.model.variant}"'] if largest.model.variant else []
    limits = {"vram_budget": arguments.vram, "ram_budget": arguments.ram}
    options = [f'{name}="{describe_bytes(limit, digits=6)}"' for name, limit in limits.items() if limit is not None]
    options += ["compress=True"] if arguments.compress else []
    needed = sum(each.model.num_bytes for each in components) + arguments.host_overhead
    if dtype != torch.float32:
        yield "import torch"
    yield f"from {library} import {model_class}"
    if needed > (available_ram() if arguments.ram is None else arguments.ram):
        # Weights that are cast, or compressed, do not stay in the checkpoint's files.
        if arguments.compress or any(each.model.num_cast for each in components):
            options.append('offload_to_disk_path="offload"')
        yield "from group_offload import from_pretrained"
        yield f"{thing} = from_pretrained({', '.join([model_class, *given, *options])})"
        return
    if not index.exists() and arguments.vram is None:
        options.append('vram_budget="auto"')
    apply = "enable_group_offload" if index.exists() else "apply_group_offloading"
    yield f"from group_offload import {apply}"
    yield f"{thing} = {model_class}.from_pretrained({', '.join(given)})"
    yield f"{apply}({', '.join([thing, *options])})"


def _figures(component: _Component) -> dict[str, Any]:
    """A model and its plan, for programs."""
    plan, model, prediction = component.plan, component.model, component.plan.prediction
    placed = {group.name: _PLACES[at] for group, at in zip(plan.problem.groups, plan.placements, strict=True)}
    groups = [
        {"name": each.name, "num_bytes": each.num_bytes, "place": placed.get(each.name, _AROUND_BLOCKS)}
        for each in model.groups
    ]
    return {
        "name": component.name,
        "model_class": model.model_class,
        "groups": groups,
        "sentences": plan.sentences(),
        **asdict(prediction),
        "limit_seconds": prediction.limit_seconds,
        "bound": prediction.bound if prediction.limit_seconds else None,
        "device_bytes": plan.device_bytes,
        "slot_bytes": plan.slot_bytes,
        "ram_bytes": plan.ram_bytes,
        "h2d_bytes_per_s": plan.problem.speeds.h2d,
        "drive_bytes_per_s": plan.problem.speeds.disk,
        "num_bytes": model.num_bytes,
        "num_passes": component.uses,
        "num_cast": model.num_cast,
        "outer_bytes": model.outer_bytes,
        "ram_share_bytes": plan.problem.ram_budget,
    }
