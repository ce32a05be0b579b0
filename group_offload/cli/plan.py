"""The command `group-offload plan`: where each group of a model will rest, and how fast a pass will be."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console

from ..base.publish import check_path
from ..base.terminal import add_row, new_console, new_table, say
from ..base.tuning import tuning
from ..errors import ConfigError
from ..integrations.sharing import DENOISERS, NUM_STEPS
from ..packing.codec import MIN_SAVING
from ..plan.budgets import describe_bytes, parse_bytes
from ..plan.placement import (
    ASSUMED_UNPACK,
    Budgets,
    Placement,
    PlannedGroup,
    Problem,
    Speeds,
    smallest_device_bytes,
)
from ..plan.planner import Plan, make_plan
from ..plan.ram_shares import ComponentLoad, share_ram
from ..plan.speeds import (
    ASSUMED_DRIVE,
    ASSUMED_H2D,
    filesystem_of,
    recorded,
)
from ..report.facts import (
    PLACES,
    GainFacts,
    GroupFacts,
    MemoryFacts,
    ModelFacts,
    PartFacts,
    Place,
    ReportFacts,
    plan_as_dict,
    predicted_pass,
)
from ..report.page import write_page
from . import bench
from .arguments import find_checkpoint, named_dtype, path_of
from .outline import Outline, OutlinedGroup, absent_parts, outline

_PROCESS_RAM = "1.5GiB"
_MAX_SECONDS = 1e6
"""A pass that is said to take longer is a mistake."""
_LETTERS = {Placement.DEVICE: "D", Placement.PACKED: "P", Placement.RAM: "R", Placement.FILE: "f"}
_LEGEND = "D stays on the device, R rests in RAM and is sent, f is read from its file and sent."
_PACKED_LEGEND = (
    "P stays on the device packed, and is unpacked for each use. What is sent from RAM is packed too, and so is what is read: "
    "that takes a folder for packed files (offload_to_disk_path)."
)
_PACKED_RATIO = 0.72
"""What packing leaves of bf16 weights, by the measured ratios: 0.70 to 0.73 (docs/benchmarks/packing.md)."""


def add_commands(commands: Any) -> None:
    """Add `plan` and `bench` to what `ArgumentParser.add_subparsers` returned."""
    bench.add_command(commands)
    text = "Show what rests where, and how fast a pass is predicted to be, from a checkpoint's headers. No weight is loaded."
    plan = commands.add_parser("plan", help=text, description=text)
    plan.add_argument(
        "model",
        metavar="MODEL",
        help="the folder of a model or a pipeline, a safetensors file in such a folder, or a name in the hub's cache",
    )
    plan.add_argument("--vram", metavar="SIZE", help="device memory for the whole process, such as 8GiB")
    plan.add_argument("--ram", metavar="SIZE", help="RAM for the whole process (default: enough for all weights)")
    plan.add_argument(
        "--activations", metavar="SIZE", default="0", help="the part of --vram that is no weights (default: 0)"
    )
    plan.add_argument(
        "--process-ram",
        metavar="SIZE",
        default=_PROCESS_RAM,
        help=f"the part of --ram that Python, torch and the driver take (default: {_PROCESS_RAM}, which is a guess)",
    )
    plan.add_argument(
        "--dtype", help="the dtype that weights are cast to, such as bfloat16 (default: that of the files)"
    )
    plan.add_argument(
        "--pack", action="store_true", help="pack bfloat16 weights, to an assumed 0.72 of their size, as pack=True does"
    )
    plan.add_argument("--step-seconds", type=float, metavar="S", help="compute of one pass (default: not known)")
    plan.add_argument(
        "--steps",
        type=int,
        default=NUM_STEPS,
        metavar="N",
        help="passes of a pipeline's denoiser (default: %(default)s)",
    )
    plan.add_argument(
        "--h2d", metavar="SPEED", help="RAM to device, such as 25GB (a second; default: what bench measured)"
    )
    plan.add_argument(
        "--drive", metavar="SPEED", help="drive to RAM, such as 3.5GB (a second; default: what bench measured)"
    )
    plan.add_argument(
        "--html",
        metavar="FILE.html",
        type=path_of,
        help="write a page: each group, a pass over time, memory, what bounds it",
    )
    plan.add_argument("--json", action="store_true", help="for programs")
    plan.set_defaults(run=_plan)


# ------------------------------------------------------------------------------------------------ plan


@dataclass(frozen=True, slots=True)
class _Asked:
    """The options, as numbers."""

    vram: int | None
    ram: int | None
    activations: int
    process_ram: int
    step_seconds: float | None
    num_steps: int
    packs: bool

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> _Asked:
        """
        Raises:
            ConfigError: an option is no number, or one that makes no sense.
        """
        seconds, num_steps = arguments.step_seconds, arguments.steps
        if seconds is not None and not 0 < seconds <= _MAX_SECONDS:
            raise ConfigError(
                f"--step-seconds {seconds:g}: expected a number of seconds, more than 0 and at most {_MAX_SECONDS:g}."
            )
        if num_steps < 1:
            raise ConfigError(f"--steps {num_steps}: expected a whole number of 1 or more.")
        return cls(
            vram=_size(arguments.vram, "--vram"),
            ram=_size(arguments.ram, "--ram"),
            activations=parse_bytes(arguments.activations, "--activations"),
            process_ram=parse_bytes(arguments.process_ram, "--process-ram"),
            step_seconds=seconds,
            num_steps=num_steps,
            packs=arguments.pack,
        )


@dataclass(frozen=True, slots=True)
class _Source:
    """Where speeds come from."""

    speeds: Speeds
    h2d: str
    """"given", "measured" or "assumed"."""
    drive: str
    unpack: str
    measured_on: str


@dataclass(frozen=True, slots=True)
class _Component:
    """A model and its plan."""

    name: str
    outline: Outline
    uses: int
    plan: Plan
    outer_bytes: int
    """Device memory of the groups that are needed around others."""
    is_timed: bool
    """Whether the compute time of a pass was given."""
    ram_share: int | None
    gain_from_vram: float | None
    """Seconds that a pass would be faster with `Plan.more_bytes` more; None without a budget."""
    gain_from_ram: float | None


def _plan(arguments: argparse.Namespace) -> int:
    asked = _Asked.of(arguments)
    if arguments.html is not None:
        check_path(arguments.html)
    path = find_checkpoint(arguments.model)
    source = _source(arguments, path)
    models = outline(path, named_dtype(arguments.dtype))
    components = _components(models, asked, source.speeds)
    if arguments.html is not None:
        write_page(_facts(arguments, asked, source, components), arguments.html)
    if arguments.json:
        print(json.dumps(_as_json(arguments, asked, source, components), indent=2))
        return 0
    console = new_console()
    for component in components:
        _show(console, component, asked, arguments.dtype)
    if len(components) > 1:
        seconds = sum(each.uses * each.plan.prediction.step_seconds for each in components)
        say(console, f"One image or video, all passes of all models: {seconds:.4g} s.")
    absent = absent_parts(path)
    if absent:
        say(console, f"Not planned, because {path} does not have it: {', '.join(absent)}.")
    legends = (_LEGEND, _PACKED_LEGEND) if asked.packs else (_LEGEND,)
    for sentence in (*legends, *_notes(asked, source, components)):
        say(console, sentence)
    if arguments.html is not None:
        say(console, f"Wrote {arguments.html}.")
    return 0


def _size(text: str | None, name: str) -> int | None:
    if text is None:
        return None
    num_bytes = parse_bytes(text, name)
    if not num_bytes:
        raise ConfigError(f"{name} {text}: it has to be more than 0 bytes.")
    return num_bytes


def _source(arguments: argparse.Namespace, path: Path) -> _Source:
    """The speeds that were given, else measured here before, else assumed. No device is asked."""
    measured = recorded()
    link = next((found for found in measured if not found.device.startswith("CPU ")), None)
    device = None if link is None else link.device
    where = filesystem_of(path)
    drive = next((found for found in measured if found.filesystem == where and found.drive is not None), None)
    unpack = next((found.unpack for found in measured if found.device == device and found.unpack is not None), None)
    h2d_given, drive_given = _speed(arguments.h2d, "--h2d"), _speed(arguments.drive, "--drive")
    h2d = h2d_given or (link.h2d if link is not None else ASSUMED_H2D)
    read = drive_given or (drive.drive if drive is not None and drive.drive is not None else ASSUMED_DRIVE)
    return _Source(
        Speeds(h2d=h2d, drive=read, unpack=unpack or ASSUMED_UNPACK),
        "given" if h2d_given else "measured" if link is not None else "assumed",
        "given" if drive_given else "measured" if drive is not None else "assumed",
        "assumed" if unpack is None else "measured",
        ", ".join(dict.fromkeys(f"{each.device}, {each.measured_at}" for each in (link, drive) if each is not None)),
    )


def _speed(text: str | None, name: str) -> int | None:
    return None if text is None else _size(text.strip().removesuffix("/s"), name)


def _components(models: Mapping[str, Outline], asked: _Asked, speeds: Speeds) -> list[_Component]:
    uses = {name: asked.num_steps if name.startswith(DENOISERS) else 1 for name in models}
    shares = _shares(models, uses, asked, 0)
    found = []
    # If the device's budget is too small, the error is about the model that needs most of it.
    for name, model in sorted(models.items(), key=lambda item: _turn_bytes(item[1]), reverse=True):
        is_timed = asked.step_seconds is not None and (len(models) == 1 or name.startswith(DENOISERS))
        seconds = asked.step_seconds if is_timed else None
        problem = _problem(name, model, asked, shares[name], seconds, speeds)
        plan = make_plan(problem)
        gain_from_vram = gain_from_ram = None
        if asked.vram is not None:
            gain_from_vram = plan.gain_from(device_bytes=plan.more_bytes)
        share, more = shares[name], _shares(models, uses, asked, plan.more_bytes)[name]
        if share is not None and more is not None:
            gain_from_ram = plan.gain_from(ram_bytes=more - share)
        found.append(
            _Component(
                name, model, uses[name], plan, _outer_bytes(model), is_timed, share, gain_from_vram, gain_from_ram
            )
        )
    names = list(models)
    return sorted(found, key=lambda component: names.index(component.name))


def _shares(models: Mapping[str, Outline], uses: Mapping[str, int], asked: _Asked, more: int) -> dict[str, int | None]:
    """RAM for the weights of each model, of `more` bytes than were given. None: no limit was given."""
    if asked.ram is None:
        return dict.fromkeys(models)
    others = asked.process_ram + len(models) * tuning().reading_bytes + tuning().ram_margin_bytes
    if asked.ram < others:
        raise ConfigError(
            f"--ram is {describe_bytes(asked.ram)}, and the process takes {describe_bytes(others, round_up=True)} without any "
            f"weights, by --process-ram and what files are read into. Give it that at least."
        )
    loads = [ComponentLoad(num_bytes=model.num_bytes, uses=uses[name], must_bytes=0) for name, model in models.items()]
    return dict(zip(models, share_ram(loads, asked.ram + more - others), strict=True))


def _outer_bytes(model: Outline) -> int:
    return sum(group.num_bytes for group in model.groups if group.is_outer)


def _turn_bytes(model: Outline) -> int:
    """About how much device memory the model needs."""
    return _outer_bytes(model) + sum(nlargest(2, (group.num_bytes for group in model.groups if not group.is_outer)))


def _packed_bytes(group: OutlinedGroup) -> int:
    """What packing is assumed to leave of a group; 0 if it saves too little."""
    saved = int((1 - _PACKED_RATIO) * group.bf16_bytes)
    return group.num_bytes - saved if saved > MIN_SAVING * group.num_bytes else 0


def _problem(
    name: str,
    model: Outline,
    asked: _Asked,
    ram: int | None,
    seconds: float | None,
    speeds: Speeds,
) -> Problem:
    """
    Raises:
        ConfigError: the device's budget is too small.
    """
    vram, activations = asked.vram, asked.activations
    planned = [group for group in model.groups if not group.is_outer]
    total = sum(group.num_bytes for group in planned) or 1
    groups = tuple(
        PlannedGroup(
            name=group.name,
            num_bytes=group.num_bytes,
            compute_seconds=(seconds or 0.0) * group.num_bytes / total,
            is_in_file=True,
            packed_bytes=_packed_bytes(group) if asked.packs else 0,
            reads_packed=asked.packs,
        )
        for group in planned
    )
    problem = Problem(
        groups=groups,
        order=tuple(range(len(groups))),
        speeds=speeds,
        budgets=Budgets(device_bytes=None, ram_bytes=ram),
        staging_bytes=tuning().reading_bytes,
    )
    if vram is None:
        return problem
    others = activations + _outer_bytes(model) + tuning().device_margin_bytes
    least = smallest_device_bytes(problem) + others
    if vram < least:
        raise ConfigError(
            f"{f'{name}: ' if name else ''}--vram is {describe_bytes(vram)}, and the smallest that works is "
            f"{describe_bytes(least, round_up=True)}: {describe_bytes(least - others)} for groups to take turns in, "
            f"{describe_bytes(_outer_bytes(model))} for what is needed around them, {describe_bytes(activations)} of "
            f"activations, {describe_bytes(tuning().device_margin_bytes)} to spare."
        )
    return replace(problem, budgets=Budgets(device_bytes=vram - others, ram_bytes=ram))


# ------------------------------------------------------------------------------------------------ for people


def _show(console: Console, component: _Component, asked: _Asked, dtype: str | None) -> None:
    model, plan = component.outline, component.plan
    uses = f", {component.uses} passes" if component.uses > 1 else ""
    title = " ".join(part for part in (component.name, model.model_class) if part) or "model"
    title = f"{title}: {describe_bytes(model.num_bytes)} in {len(model.groups)} groups{uses}"
    table = new_table(title, "groups", "number", "each", "where", numbers=("number", "each"))
    for names, size, places in _rows(component):
        add_row(table, names, str(len(places) or 1), describe_bytes(size), places or "during a pass")
    console.print(table)
    taken = _bytes_by_place(plan)
    taken[Placement.RAM] += taken[Placement.PACKED]  # what stays on the device packed rests in RAM too
    sizes = {place: describe_bytes(num_bytes) for place, num_bytes in taken.items()}
    held = f", {describe_bytes(component.outer_bytes)} during a pass" if component.outer_bytes else ""
    total = describe_bytes(plan.device_bytes + component.outer_bytes)
    packed = f", {sizes[Placement.PACKED]} that stay packed" if asked.packs else ""
    say(
        console,
        f"Device: {total}: {sizes[Placement.DEVICE]} that stay{packed}, {describe_bytes(plan.slot_bytes)} to take turns "
        f"in{held}. RAM: {sizes[Placement.RAM]}. Files alone: {sizes[Placement.FILE]}.",
    )
    if model.num_cast:
        say(
            console,
            f"{model.num_cast} weights are cast to {dtype}: what rests in files is written to a folder for group files first "
            f"(offload_to_disk_path).",
        )
    say(console, plan.verdict())
    for gain, name in ((component.gain_from_vram, "VRAM"), (component.gain_from_ram, "RAM")):
        step = plan.prediction.step_seconds
        if gain is not None and step:
            what = f"makes a pass {gain:.3g} s ({gain / step:.0%}) faster" if gain > step / 1000 else "changes nothing"
            say(console, f"{describe_bytes(plan.more_bytes, round_up=True)} more {name} {what}.")
    console.print()


def _rows(component: _Component) -> Iterator[tuple[str, int, str]]:
    """Rows of the table: names, the size of each group, a letter for each. Neighbours of one list and one size are one row."""
    placed = {
        group.name: _LETTERS[place]
        for group, place in zip(component.plan.problem.groups, component.plan.placements, strict=True)
    }
    for (_, size, is_outer), run in groupby(
        component.outline.groups, key=lambda group: (group.name.rsplit("_", 2)[0], group.num_bytes, group.is_outer)
    ):
        names = [group.name for group in run]
        label = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        yield label, size, "" if is_outer else "".join(placed[name] for name in names)


def _bytes_by_place(plan: Plan) -> dict[Placement, int]:
    """What groups take where they rest."""
    found = dict.fromkeys(Placement, 0)
    for group, place in zip(plan.problem.groups, plan.placements, strict=True):
        is_packed = group.packed_bytes and place in (Placement.PACKED, Placement.RAM)
        found[place] += group.packed_bytes if is_packed else group.num_bytes
    return found


def _notes(asked: _Asked, source: _Source, components: Sequence[_Component]) -> Iterator[str]:
    """Sentences about what the numbers stand on."""
    if asked.vram is None:
        yield "Without --vram nothing stays on the device."
    if asked.ram is None:
        yield "Without --ram all weights rest in RAM."
    speeds = source.speeds
    said = f"RAM to device {speeds.h2d / 1e9:.3g} GB/s ({source.h2d}), drive {speeds.drive / 1e9:.3g} GB/s ({source.drive})."
    if asked.packs:
        said += f" Unpacking {speeds.unpack / 1e9:.3g} GB/s ({source.unpack})."
    if "measured" in (source.h2d, source.drive):
        said += f" Measured on {source.measured_on}."
    if "assumed" in (source.h2d, source.drive):
        said += " What is assumed can be measured: group-offload bench DIR."
    yield said
    untimed = [each for each in components if not each.is_timed]
    if len(untimed) == len(components):
        yield "Times cover weight transfers only. Pass --step-seconds to include compute."
    elif untimed:
        names = ", ".join(each.name for each in untimed)
        yield f"Times of {names} cover weight transfers only: --step-seconds is the denoiser's."


# ------------------------------------------------------------------------------------------------ for programs


def _as_json(
    arguments: argparse.Namespace, asked: _Asked, source: _Source, components: Sequence[_Component]
) -> dict[str, Any]:
    return {
        "model": arguments.model,
        "dtype": arguments.dtype,
        "budgets": {
            "vram_bytes": asked.vram,
            "ram_bytes": asked.ram,
            "activation_bytes": asked.activations,
            "process_ram_bytes": asked.process_ram,
        },
        "speeds": {
            "h2d": source.speeds.h2d,
            "h2d_source": source.h2d,
            "drive": source.speeds.drive,
            "drive_source": source.drive,
            "unpack": source.speeds.unpack,
            "unpack_source": source.unpack,
        },
        "components": [_component_as_json(component) for component in components],
    }


def _component_as_json(component: _Component) -> dict[str, Any]:
    plan, prediction = component.plan, component.plan.prediction
    placed = {group.name: place.value for group, place in zip(plan.problem.groups, plan.placements, strict=True)}
    return {
        "name": component.name,
        "model_class": component.outline.model_class or None,
        "passes": component.uses,
        "num_bytes": component.outline.num_bytes,
        "num_cast": component.outline.num_cast,
        "ram_share_bytes": component.ram_share,
        "bytes_by_place": {place.value: num_bytes for place, num_bytes in _bytes_by_place(plan).items()},
        "slot_bytes": plan.slot_bytes,
        "outer_bytes": component.outer_bytes,
        "device_bytes": plan.device_bytes + component.outer_bytes,
        "ram_bytes": plan.ram_bytes,
        "is_compute_known": component.is_timed,
        "step_seconds": prediction.step_seconds,
        "stall_seconds": prediction.stall_seconds,
        "h2d_seconds": prediction.h2d_seconds,
        "drive_seconds": prediction.drive_seconds,
        "bound": prediction.bound if prediction.step_seconds else None,
        "verdict": plan.verdict(),
        "gain_from_vram": component.gain_from_vram,
        "gain_from_ram": component.gain_from_ram,
        "groups": [
            {"name": group.name, "num_bytes": group.num_bytes, "place": placed.get(group.name)}
            for group in component.outline.groups
        ],
    }


# ------------------------------------------------------------------------------------------------ the page


def _facts(
    arguments: argparse.Namespace, asked: _Asked, source: _Source, components: Sequence[_Component]
) -> ReportFacts:
    return ReportFacts(
        title=f"Plan of {arguments.model}",
        models=[_model_facts(component, asked) for component in components],
        memories=[*_memories(asked, components)],
        sentences=["Nothing has run: all times are predicted.", *_notes(asked, source, components)],
    )


def _model_facts(component: _Component, asked: _Asked) -> ModelFacts:
    plan, model = component.plan, component.outline
    step = plan.prediction.step_seconds
    placed = {group.name: PLACES[at] for group, at in zip(plan.problem.groups, plan.placements, strict=True)}
    vram = (
        plan.gain_from(device_bytes=plan.more_bytes) if component.gain_from_vram is None else component.gain_from_vram
    )
    gains = {"VRAM": vram, "RAM": component.gain_from_ram or 0.0}
    sentences = [plan.headline(), plan.verdict()]
    if component.uses > 1:
        sentences.append(f"{component.uses} passes of it make one image or video.")
    return ModelFacts(
        name=component.name,
        model_class=model.model_class,
        device="",
        groups=[
            GroupFacts(
                name=group.name,
                num_bytes=group.num_bytes,
                place=Place.PASS if group.is_outer else placed[group.name],
                is_outer=group.is_outer,
            )
            for group in model.groups
        ],
        passes=[predicted_pass(plan)] if step else [],
        sentences=sentences,
        gains=[
            GainFacts(memory=name, num_bytes=plan.more_bytes, seconds=gain, step_seconds=step)
            for name, gain in gains.items()
            if step
        ],
        plan=plan_as_dict(plan),
        stats=None,
    )


def _memories(asked: _Asked, components: Sequence[_Component]) -> Iterator[MemoryFacts]:
    for component in components:
        beside = f" while {component.name} runs" if component.name else ""
        yield MemoryFacts(
            name=f"Device{beside}",
            parts=[
                PartFacts("weights that stay", component.plan.device_bytes - component.plan.slot_bytes, "device"),
                PartFacts("weights that take turns", component.plan.slot_bytes, "locked"),
                PartFacts("weights around the blocks", component.outer_bytes, "ram"),
                PartFacts("activations, as given", asked.activations, "pass"),
            ],
            budget_bytes=asked.vram,
            total_bytes=None,
        )
    places = [_bytes_by_place(component.plan) for component in components]
    in_ram = sum(each[Placement.RAM] + each[Placement.PACKED] for each in places)
    yield MemoryFacts(
        name="RAM",
        parts=[
            PartFacts("weights, page-locked", in_ram, "locked"),
            PartFacts("buffers for files", len(components) * tuning().reading_bytes, "file"),
            PartFacts("Python, torch and everything else, as given", asked.process_ram, "pass"),
        ],
        budget_bytes=asked.ram,
        total_bytes=None,
    )
