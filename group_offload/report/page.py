"""The page of a report: one HTML file that needs nothing else, neither the network nor another file.

Numbers are in the HTML itself, so that they can be read and printed without scripts. The same numbers, and what pictures are
drawn from, stand in the page as JSON (`facts`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from html import escape
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from ..base.publish import check_path, publish
from ..base.text import html_table, printable
from ..base.timeline import COMPUTE, Slice, side_by_side
from ..errors import GroupFileError
from ..plan.budgets import describe_bytes
from ..plan.report import memory_rows
from .facts import LANES, GroupFacts, MemoryFacts, ModelFacts, PassFacts, Place, ReportFacts

_MAX_SLICES = 36_000
"""The number of slices in a page, about. Neighbours become one where there are more, so a page stays below 2 MB."""
_MAX_CELLS = 4000
"""The number of groups that a picture of a model shows one by one."""
_MAX_ROWS = 40
_MAX_READ_ROWS = 8
_UNITS = 1_000_000
"""Times in pictures are whole numbers of this share of the pass."""


def write_page(facts: ReportFacts, path: str | os.PathLike[str]) -> Path:
    """Write the page, whole or not at all, and return its path.

    Raises:
        GroupFileError: the file cannot be written.
    """
    found = Path(path)
    check_path(found)
    write_text(found, render(facts))
    return found


def write_text(path: Path, text: str) -> None:
    """Write a file, whole or not at all. A link goes on to lead to it, and a device or a pipe (/dev/stdout) gets the text.

    Raises:
        GroupFileError: the file cannot be written.
    """
    content = text.encode("utf-8", "replace")
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content)
        else:
            publish(path.resolve() if path.is_symlink() else path, [content])
    except (OSError, RuntimeError) as error:  # links in a circle
        raise GroupFileError(f"Cannot write {path}: {getattr(error, 'strerror', None) or error}.") from error


def render(facts: ReportFacts) -> str:
    """The page."""
    here = Path(__file__).parent
    num_lanes = sum(len(LANES) for model in facts.models for _ in model.passes)
    limit = max(200, _MAX_SLICES // max(1, num_lanes))
    data = {
        "places": {place.name.lower(): place.value for place in Place},
        "memories": [_memory_as_dict(memory) for memory in facts.memories],
        "models": [_model_as_dict(model, limit) for model in facts.models],
    }
    # A "<" in a name must not end the script.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'\">",
        f"<title>{_safe(facts.title)}</title>",
        f"<style>\n{(here / 'page.css').read_text(encoding='utf-8')}</style></head><body><main>",
        f"<h1>{_safe(facts.title)}</h1>",
        *(f'<p class="soft">{_safe(sentence)}</p>' for sentence in (*facts.sentences, _made())),
        *(_overview(facts.models) if len(facts.models) > 1 else ()),
        *(_memory_cards(facts.memories) if len(facts.models) > 1 else ()),
        *(
            part
            for index, model in enumerate(facts.models)
            for part in _model_section(index, model, facts.memories if len(facts.models) == 1 else (), facts.title)
        ),
        '</main><div id="tip" role="tooltip" hidden></div>',
        f'<script type="application/json" id="facts">{text}</script>',
        f"<script>\n{(here / 'page.js').read_text(encoding='utf-8')}</script></body></html>\n",
    ]
    return "\n".join(parts)


def _made() -> str:
    with suppress(PackageNotFoundError):
        now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        return f"Written {now} by group_offload {version('group-offload')}, with torch {torch.__version__}."
    return ""


def _safe(text: object) -> str:
    return escape(printable(str(text)))


def seconds(value: float) -> str:
    """Seconds for people."""
    scale, unit = (1.0, "s") if value >= 1 or not value else (1e3, "ms") if value >= 1e-3 else (1e6, "µs")
    return f"{value * scale:.4g} {unit}"


# ------------------------------------------------------------------------------------------------ memory


def _memory_cards(memories: Sequence[MemoryFacts]) -> Iterator[str]:
    if memories:
        yield '<div class="card memory">'
    for memory in memories:
        used = sum(part.num_bytes for part in memory.parts)
        whole = (
            max(used, memory.budget_bytes or 0, (memory.total_bytes or 0) if memory.budget_bytes is None else 0) or 1
        )
        budget = "" if memory.budget_bytes is None else f", budget {describe_bytes(memory.budget_bytes)}"
        total = "" if memory.total_bytes is None else f", of {describe_bytes(memory.total_bytes)} there are"
        yield f"<h3>{_safe(memory.name)}: {describe_bytes(used)}{budget}{total}</h3>"
        yield '<div class="bar">'
        shown = [(part, f"{part.label}: {describe_bytes(part.num_bytes)}") for part in memory.parts if part.num_bytes]
        for part, label in shown:
            style = f"width:{part.num_bytes / whole:.3%};background:var(--{part.colour})"
            yield f'<i style="{style}" title="{_safe(label)}"></i>'
        if memory.budget_bytes is not None:
            yield f'<i class="budget" style="left:{memory.budget_bytes / whole:.3%}" title="{budget[2:]}"></i>'
        yield f'</div><ul class="key">{"".join(_key(part.colour, label) for part, label in shown)}</ul>'
        yield from (f'<p class="soft">{_safe(sentence)}</p>' for sentence in memory.sentences)
    if memories:
        yield "</div>"


def _memory_as_dict(memory: MemoryFacts) -> dict[str, Any]:
    return {
        "name": memory.name,
        "parts": {part.label: part.num_bytes for part in memory.parts},
        "budget_bytes": memory.budget_bytes,
        "total_bytes": memory.total_bytes,
    }


# ------------------------------------------------------------------------------------------------ a model


def _overview(models: Sequence[ModelFacts]) -> Iterator[str]:
    yield '<div class="card scroll"><table><tr><th>model</th><th class="number">weights</th><th class="number">a pass</th>'
    yield "<th>what bounds it</th></tr>"
    for index, model in enumerate(models):
        step = "" if model.step is None else seconds(model.step[0])
        yield f'<tr><td class="name"><a href="#model-{index}">{_safe(model.title)}</a></td>'
        yield f'<td class="number">{describe_bytes(sum(group.num_bytes for group in model.groups))}</td>'
        yield f'<td class="number">{step}</td><td class="words">{_safe(model.sentences[0])}</td></tr>'
    yield "</table></div>"


def _model_section(index: int, model: ModelFacts, memories: Sequence[MemoryFacts], title: str) -> Iterator[str]:
    total = sum(group.num_bytes for group in model.groups)
    where = f", computed on {_safe(model.device)}" if model.device else ""
    yield f'<section id="model-{index}">'
    if not memories or model.title != title:
        yield f"<h2>{_safe(model.title)}</h2>"
    yield f'<p class="soft">{describe_bytes(total)} in {len(model.groups)} groups{where}</p>'
    yield '<div class="card">'
    for number, sentence in enumerate(model.sentences):
        yield f"<p{'' if number else ' class=headline'}>{_safe(sentence)}</p>"
    yield from (
        f"<p>{describe_bytes(gain.num_bytes, round_up=True)} more of {_safe(gain.memory)} {_safe(gain.sentence)}.</p>"
        for gain in model.gains
    )
    tiles = "".join(_tiles(model))
    yield f'<div class="tiles">{tiles}</div></div>' if tiles else "</div>"
    yield from _memory_cards(memories)
    if model.memory:
        yield f'<div class="card scroll"><h3>Device memory now</h3>{html_table(memory_rows(model.memory))}</div>'
    yield '<div class="card"><h3>Where each group rests</h3>'
    yield '<canvas class="map" role="img" aria-label="Each group, as wide as its bytes, in the colour of its place"></canvas>'
    used = {group.place for group in model.groups}
    yield f'<ul class="key">{"".join(_key(place.name.lower(), place.value) for place in Place if place in used)}</ul>'
    yield from _groups_table(model.groups, f"{model.name}.")
    yield "</div>"
    if model.passes:
        yield from _timeline(model)
    else:
        yield '<div class="card"><p>There is no timeline: no pass was recorded, and none can be foreseen.</p></div>'
    for title, numbers in (
        ("Statistics since the module was offloaded", model.stats),
        ("The plan in numbers", model.plan),
    ):
        if numbers is not None:
            yield f'<details class="card"><summary>{title}</summary><div class="scroll"><table>'
            for name, value in numbers.items():
                yield f'<tr><td class="name">{_safe(name)}</td><td class="number">{_safe(value_text(name, value))}</td></tr>'
            yield "</table></div></details>"
    yield "</section>"


def _tiles(model: ModelFacts) -> Iterator[str]:
    plan, stats = model.plan or {}, model.stats or {}
    if model.step is not None:
        yield f"<div class=tile><b>{seconds(model.step[0])}</b><span>a pass, {model.step[1]}</span></div>"
    for key, label in (("h2d_bytes", "sent in each pass"), ("drive_bytes", "read from the drive in each pass")):
        if plan.get(key) and (key == "drive_bytes" or model.device_has_memory):
            yield f"<div class=tile><b>{describe_bytes(plan[key])}</b><span>{label}</span></div>"
    if stats:
        yield f"<div class=tile><b>{stats['passes'] + stats['backward_passes']}</b><span>passes so far</span></div>"
        if model.device_has_memory:
            yield f"<div class=tile><b>{seconds(stats['stalled_seconds'])}</b><span>compute waited, in all</span></div>"


def _key(colour: str, label: str) -> str:
    return f'<li><i style="background:var(--{colour})"></i>{_safe(label)}</li>'


def value_text(name: str, value: Any) -> str:
    """A statistic or a figure of a plan for people: its unit follows from its name."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {value_text(name, each)}" for key, each in value.items()) or "none"
    if isinstance(value, (tuple, list)):
        return ", ".join(value_text("_seconds" if isinstance(each, float) else "", each) for each in value)
    if value is None:
        return "none"
    if name.endswith("per_s"):
        return f"{value / 1e9:.3g} GB/s"
    if "bytes" in name:
        return f"{describe_bytes(value)} ({value} B)" if value >= 1024 else f"{value} B"
    return seconds(value) if name.endswith("_seconds") else str(value)


def _groups_table(groups: Sequence[GroupFacts], prefix: str) -> Iterator[str]:
    """One row for the groups of one list, by the part of their names before the first number."""
    rows: dict[str, list[GroupFacts]] = {}
    for group in groups:
        rows.setdefault(_stem(group.name.removeprefix(prefix)), []).append(group)
    places = [place for place in Place if any(group.place is place for group in groups)]
    yield '<details open><summary>By list</summary><div class="scroll"><table><tr><th>groups</th><th class="number">number</th>'
    yield "".join(f'<th class="number">{_safe(place.value)}</th>' for place in places) + "</tr>"
    for number, mine in enumerate(sorted(rows.values(), key=lambda row: -sum(group.num_bytes for group in row))):
        if number == _MAX_ROWS:
            yield f'<tr><td class="name soft">{len(rows) - _MAX_ROWS} smaller lists</td></tr>'
            break
        label = mine[0].name if len(mine) == 1 else f"{mine[0].name} to {mine[-1].name}"
        yield f'<tr><td class="name">{_safe(label)}</td><td class="number">{len(mine)}</td>'
        for place in places:
            num_bytes = sum(group.num_bytes for group in mine if group.place is place)
            yield f'<td class="number">{describe_bytes(num_bytes) if num_bytes else ""}</td>'
        yield "</tr>"
    yield '<tr><td class="name">all</td><td class="number">' + str(len(groups)) + "</td>"
    for place in places:
        yield f'<td class="number">{describe_bytes(sum(g.num_bytes for g in groups if g.place is place))}</td>'
    yield "</tr></table></div></details>"


def _stem(name: str) -> str:
    digit = next((index for index, letter in enumerate(name) if letter.isdigit()), len(name))
    return name[:digit]


# ------------------------------------------------------------------------------------------------ the timeline


def _timeline(model: ModelFacts) -> Iterator[str]:
    last = len(model.passes) - 1
    yield '<div class="card"><h3>Passes over time</h3><figure class="passes"><div class="tools">'
    for index, each in enumerate(model.passes):
        pressed = str(index == last).lower()
        yield f'<button type="button" data-pass="{index}" aria-pressed="{pressed}">{_safe(each.title)}</button>'
    yield '<span class="gap"></span><button type="button" data-act="in" aria-label="Zoom in">+</button>'
    yield '<button type="button" data-act="out" aria-label="Zoom out">&minus;</button>'
    yield '<button type="button" data-act="all">whole pass</button></div>'
    yield '<canvas class="time" tabindex="0" role="img" aria-label="Drive, link, compute and stalls over time"></canvas>'
    yield f"<figcaption>{_safe(_caption(model.passes[last], model))}</figcaption></figure>"
    yield (
        '<p class="soft">Drag to move. Zoom with the buttons, a double click, or Ctrl and the wheel; with the keyboard: + and '
        "&minus;, arrows, 0. Under the pointer are a group's name, its times and its bytes.</p>"
    )
    yield '<details><summary>Seconds in each pass</summary><div class="scroll"><table>'
    yield '<tr><th>pass</th><th class="number">took</th>'
    lanes = [lane for lane in LANES if any(one.busy_seconds(lane, model.outer) for one in model.passes)]
    yield "".join(f'<th class="number">{LANES[lane]}</th>' for lane in lanes) + "</tr>"
    for one in model.passes:
        yield f'<tr><td>{_safe(one.title)}</td><td class="number">{seconds(one.seconds)}</td>'
        yield (
            "".join(f'<td class="number">{seconds(one.busy_seconds(lane, model.outer))}</td>' for lane in lanes)
            + "</tr>"
        )
    yield "</table></div></details></div>"


def _caption(one: PassFacts, model: ModelFacts) -> str:
    busy = [
        f"{label} {seconds(took)}" for lane, label in LANES.items() if (took := one.busy_seconds(lane, model.outer))
    ]
    return f"{one.title}, {seconds(one.seconds)}: {', '.join(busy) or 'nothing moved'}."


def _model_as_dict(model: ModelFacts, limit: int) -> dict[str, Any]:
    names: dict[str, int] = {}
    outer = model.outer
    return {
        "name": model.name,
        "model_class": model.model_class,
        "device": model.device,
        "plan": model.plan,
        "stats": model.stats,
        "sentences": list(model.sentences),
        "gains": {gain.memory: gain.seconds for gain in model.gains},
        "num_groups": len(model.groups),
        "bytes_by_place": {
            place.name.lower(): sum(group.num_bytes for group in model.groups if group.place is place)
            for place in Place
        },
        "cells": _cells(model.groups),
        "passes": [
            {
                "title": printable(one.title),
                "caption": _caption(one, model),
                "seconds": one.seconds or 1e-9,
                "lanes": [*_lanes(one, outer, limit, names)],
            }
            for one in model.passes
        ],
        "names": [printable(name) for name in names],  # last: the lanes have filled it
    }


def _cells(groups: Sequence[GroupFacts]) -> dict[str, list[Any]]:
    """The groups as columns. Neighbours in one place are one cell if there are too many groups."""
    most = -(-len(groups) // _MAX_CELLS)
    cells: list[list[GroupFacts]] = []
    for _, run in groupby(groups, key=lambda group: group.place):
        mine = [*run]
        cells += (mine[start : start + most] for start in range(0, len(mine), most))
    return {
        "names": [_one_of([group.name for group in cell]) for cell in cells],
        "bytes": [sum(group.num_bytes for group in cell) for cell in cells],
        "places": [cell[0].place.name.lower() for cell in cells],
        "details": [printable(cell[0].detail) if len(cell) == 1 else "" for cell in cells],
    }


def _one_of(names: Sequence[str]) -> str:
    return printable(names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more")


def _lanes(one: PassFacts, outer: frozenset[str], limit: int, names: dict[str, int]) -> Iterator[dict[str, Any]]:
    for lane, label in LANES.items():
        mine = [each for each in one.slices if each.lane == lane and each.end > each.start]
        if lane == COMPUTE:  # what is held around others would hide them
            yield from _lane("around", "around", [s for s in mine if s.name in outer], one.seconds, limit, names)
            mine = [each for each in mine if each.name not in outer]
        yield from _lane(label, label, mine, one.seconds, limit, names)


def _lane(
    kind: str, label: str, slices: Sequence[Slice], length: float, limit: int, names: dict[str, int]
) -> Iterator[dict[str, Any]]:
    if not slices or not length:
        return
    rows = side_by_side(slices)
    row = [[*_thinned(mine, length, max(1, limit // len(rows)))] for mine in rows[:_MAX_READ_ROWS]]
    flat = [(number, each) for number, mine in enumerate(row) for each in mine]
    yield {
        "kind": kind,
        "label": label,
        "rows": len(row),
        "starts": [round(each.start / length * _UNITS) for _, each in flat],
        "lengths": [max(1, round((each.end - each.start) / length * _UNITS)) for _, each in flat],
        "names": [names.setdefault(each.name, len(names)) for _, each in flat],
        "bytes": [each.num_bytes for _, each in flat],
        "row": [number for number, _ in flat] if len(row) > 1 else [],
    }


def _thinned(slices: Sequence[Slice], length: float, limit: int) -> Iterable[Slice]:
    """The slices; neighbours in one of `limit` equal parts of the pass are one if there are more of them."""
    if len(slices) <= limit:
        return slices
    found: list[Slice] = []
    for _, run in groupby(slices, key=lambda each: int(each.start / length * limit)):
        mine = [*run]
        first = mine[0]
        name = _one_of([each.name for each in mine])
        found.append(Slice(first.lane, name, first.start, mine[-1].end, sum(each.num_bytes for each in mine)))
    return found
