"""The page of a report: one HTML file that needs nothing else: no network, no other file, no script."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from ..base.publish import check_path, publish
from ..base.text import describe_seconds, html_table, printable
from ..base.timeline import COMPUTE, COPIES, READS, Slice, side_by_side
from ..errors import GroupFileError
from ..plan.budgets import describe_bytes
from ..plan.report import memory_rows
from .facts import LANES, GroupFacts, MemoryFacts, ModelFacts, PassFacts, ReportFacts

_MAX_PIECES = 240
"""Pieces of one row of a timeline. Neighbors become one where there are more, so a page stays below 2 MB."""
_MAX_CELLS = 1000
"""Pieces of the picture of where weights are stored."""
_MAX_LISTS = 40
_MAX_ROWS = 8
"""Rows of one lane: several threads read."""
_MAX_WIDTH = 12_000
"""Pixels. A timeline with many slices is wider than the window, and scrolls."""

_Piece = tuple[float, float, str, str]
"""Where a part of a bar begins, its length (both as shares of the bar), its color, and what the pointer says of it."""


def write_page(facts: ReportFacts, path: str | os.PathLike[str]) -> Path:
    """Write the page, whole or not at all, and return its path.

    A link goes on to lead to its file, and a device or a pipe (/dev/stdout) gets the text.

    Raises:
        GroupFileError: the file cannot be written.
    """
    found = Path(path)
    check_path(found)
    content = render(facts).encode("utf-8", "replace")
    try:
        if found.exists() and not found.is_file():
            found.write_bytes(content)
        else:
            publish(found.resolve() if found.is_symlink() else found, [content])
    except (OSError, RuntimeError) as error:  # links in a circle
        raise GroupFileError(f"Cannot write {found}: {getattr(error, 'strerror', None) or error}.") from error
    return found


def render(facts: ReportFacts) -> str:
    """The page."""
    css = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    overview = [("model", "weights", "a forward", "bottleneck")]
    for model in facts.models:
        size = describe_bytes(sum(group.num_bytes for group in model.groups))
        last = next((one for one in reversed(model.passes) if one.is_forward), None)
        overview.append((model.title, size, "" if last is None else describe_seconds(last.seconds), model.sentences[0]))
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>{_safe(facts.title)}</title><style>\n{css}</style></head><body><main>",
            f"<h1>{_safe(facts.title)}</h1>",
            *(f'<p class="soft">{_safe(sentence)}</p>' for sentence in (*facts.sentences, _made())),
            *([_card("Models", html_table(overview))] if len(facts.models) > 1 else ()),
            *(_card(*_memory(memory)) for memory in facts.memories),
            *(part for model in facts.models for part in _section(model)),
            "</main></body></html>\n",
        ]
    )


def _made() -> str:
    try:
        number = version("group-offload")
    except PackageNotFoundError:  # it runs from a folder
        number = ""
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return f"Written {now} by group_offload {number}, with torch {torch.__version__}."


def _safe(text: object) -> str:
    return escape(printable(str(text)))


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
    return describe_seconds(value) if name.endswith("_seconds") else str(value)


# ------------------------------------------------------------------------------------------------ parts of the page


def _card(title: str, *inside: str) -> str:
    return f'<div class="card scroll"><h3>{_safe(title)}</h3>{"".join(inside)}</div>'


def _bar(pieces: Iterable[_Piece]) -> str:
    drawn = (
        f'<i style="left:{start:.3%};width:{length:.3%};background:var(--{color})" title="{_safe(title)}"></i>'
        for start, length, color, title in pieces
    )
    return f'<div class="bar">{"".join(drawn)}</div>'


def _in_a_row(parts: Iterable[tuple[int, str, str]], whole: int) -> Iterator[_Piece]:
    """Pieces of so many bytes each, of a color, with a title."""
    start = 0
    for num_bytes, color, title in parts:
        yield start / whole, num_bytes / whole, color, title
        start += num_bytes


def _key(labels: Iterable[tuple[str, str]]) -> str:
    found = (f'<li><i style="background:var(--{color})"></i>{_safe(label)}</li>' for color, label in labels)
    return f'<ul class="key">{"".join(found)}</ul>'


def _memory(memory: MemoryFacts) -> Iterator[str]:
    used = sum(num_bytes for _, num_bytes, _ in memory.parts)
    limit = memory.budget_bytes if memory.budget_bytes is not None else memory.total_bytes or 0
    budget = "" if memory.budget_bytes is None else f", budget {describe_bytes(memory.budget_bytes)}"
    total = "" if memory.total_bytes is None else f", of {describe_bytes(memory.total_bytes)}"
    yield f"{memory.name}: {describe_bytes(used)}{budget}{total}"
    whole = max(used, limit, 1)
    shown = [(size, color, f"{label}: {describe_bytes(size)}") for label, size, color in memory.parts if size]
    mark = [] if memory.budget_bytes is None else [(memory.budget_bytes / whole - 0.003, 0.003, "ink", budget[2:])]
    yield _bar([*_in_a_row(shown, whole), *mark])
    yield _key((color, title) for _, color, title in shown)
    yield from (f'<p class="soft">{_safe(sentence)}</p>' for sentence in memory.sentences)


def _section(model: ModelFacts) -> Iterator[str]:
    total = sum(group.num_bytes for group in model.groups)
    where = f", computed on {model.device}" if model.device else ""
    sentences = (f"<p>{_safe(sentence)}</p>" for sentence in model.sentences)
    yield f"<h2>{_safe(model.title)}</h2>"
    yield _card(f"{describe_bytes(total)} in {len(model.groups)} groups{where}", *sentences)
    if model.memory:
        yield _card("Device memory now", html_table(memory_rows(model.memory)))
    yield _card("Where weights are stored", *_groups(model, total or 1))
    if model.passes:
        last = model.passes[-1]
        timelines = (_timeline(one, model.outer, is_open=one is last) for one in model.passes)
        hint = '<p class="soft">Hover over a group for its times and bytes.</p>'
        yield _card("Timeline", hint, *timelines)
    else:
        yield _card("No timeline: no forward was recorded, and none can be predicted.")
    for title, figures in model.figures.items():
        rows = [("", "value"), *((name, value_text(name, value)) for name, value in figures.items())]
        yield f'<details class="card scroll"><summary>{_safe(title)}</summary>{html_table(rows)}</details>'


def _groups(model: ModelFacts, total: int) -> Iterator[str]:
    """Each group as wide as its bytes, in the color of its place; then a row for the groups of one list."""
    prefix, most = f"{model.name}.", -(-len(model.groups) // _MAX_CELLS)
    cells: list[tuple[int, str, str]] = []
    for place, neighbors in groupby(model.groups, key=lambda group: group.place):
        found = [*neighbors]
        for mine in (found[start : start + most] for start in range(0, len(found), most)):
            size, detail = sum(group.num_bytes for group in mine), f", {mine[0].detail}" if mine[0].detail else ""
            said = f"{_span([group.name for group in mine])}: {describe_bytes(size)}, {place.value}{detail}"
            cells.append((size, place.name.lower(), said))
    yield _bar(_in_a_row(cells, total))
    yield _key((place.name.lower(), place.value) for place in dict.fromkeys(group.place for group in model.groups))
    lists: dict[str, list[GroupFacts]] = {}
    for group in model.groups:
        lists.setdefault(re.split(r"\d", group.name.removeprefix(prefix), maxsplit=1)[0], []).append(group)
    largest = sorted(lists.values(), key=lambda mine: -sum(group.num_bytes for group in mine))
    rows = [("groups", "number", "size", "where"), *map(_row, largest[:_MAX_LISTS])]
    if len(largest) > _MAX_LISTS:
        rows.append((f"{len(largest) - _MAX_LISTS} smaller lists", "", "", ""))
    yield html_table([*rows, ("all", *_row(model.groups)[1:])])


def _row(groups: Sequence[GroupFacts]) -> tuple[str, str, str, str]:
    places: dict[str, int] = {}
    for group in groups:
        places[group.place.value] = places.get(group.place.value, 0) + group.num_bytes
    where = ", ".join(f"{place} {describe_bytes(size)}" for place, size in places.items())
    return _span([group.name for group in groups]), str(len(groups)), describe_bytes(sum(places.values())), where


def _span(names: Sequence[str]) -> str:
    return " to ".join(dict.fromkeys((names[0], names[-1]))) if names else ""


# ------------------------------------------------------------------------------------------------ the timeline


def _timeline(one: PassFacts, outer: frozenset[str], *, is_open: bool) -> str:
    busy = [
        f"{label} {describe_seconds(took)}" for lane, label in LANES.items() if (took := one.busy_seconds(lane, outer))
    ]
    summary = f"{one.title}, {describe_seconds(one.seconds)}: {', '.join(busy) or 'nothing ran'}."
    length = one.seconds or 1e-9
    rows = [(label, [*_thinned(row, length)]) for label, row in _rows(one, outer)]
    width = min(_MAX_WIDTH, 5 * max((len(row) for _, row in rows), default=0))
    ticks = max(4, width // 250)
    axis = "".join(f"<span>{describe_seconds(length * tick / ticks)}</span>" for tick in range(ticks + 1))
    drawn = (
        f'<div class="lane {label}"><span>{label}</span>{_bar(_piece(each, label, length) for each in row)}</div>'
        for label, row in rows
    )
    return (
        f"<details{' open' * is_open}><summary>{_safe(summary)}</summary>"
        f'<div class="scroll"><div style="min-width:{width}px">'
        f'<div class="lane"><span></span><div class="axis">{axis}</div></div>{"".join(drawn)}</div></div></details>'
    )


def _rows(one: PassFacts, outer: frozenset[str]) -> Iterator[tuple[str, list[Slice]]]:
    """The rows of a timeline. Groups that are held around others have one of their own: they would hide those."""
    for lane, label in LANES.items():
        mine = [each for each in one.slices if each.lane == lane and each.start < min(each.end, one.seconds)]
        around = [each for each in mine if lane == COMPUTE and each.name in outer]
        rows = [("around", around)] if around else []
        rows += [(label, row) for row in side_by_side(each for each in mine if each not in around)[:_MAX_ROWS]]
        yield from rows


def _piece(each: Slice, color: str, length: float) -> _Piece:
    start, end = max(0.0, each.start / length), min(1.0, each.end / length)
    took = each.end - each.start
    size = f", {describe_bytes(each.num_bytes)}" if each.num_bytes else ""
    speed = f" at {each.num_bytes / took / 1e9:.3g} GB/s" if size and each.lane in (READS, COPIES) else ""
    return (
        start,
        max(0.0, end - start),
        color,
        f"{each.name}: {describe_seconds(took)}, from {each.start * 1e3:.4g} ms{size}{speed}",
    )


def _thinned(slices: Sequence[Slice], length: float) -> Iterable[Slice]:
    """The slices; neighbors in one of `_MAX_PIECES` equal parts of the pass are one if there are more of them."""
    if len(slices) <= _MAX_PIECES:
        return slices
    found: list[Slice] = []
    for _, run in groupby(slices, key=lambda each: int(each.start / length * _MAX_PIECES)):
        mine = [*run]
        size, end = sum(each.num_bytes for each in mine), max(each.end for each in mine)
        found.append(Slice(mine[0].lane, _span([each.name for each in mine]), mine[0].start, end, size))
    return found
