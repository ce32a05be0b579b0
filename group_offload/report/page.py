"""The page of a report: one HTML file that needs nothing else: no network, no other file, no script."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from ..base.publish import check_path, publish
from ..base.text import describe_bytes, describe_seconds, html_table, printable
from ..errors import GroupFileError
from .facts import GroupFacts, MemoryFacts, ModelFacts, ReportFacts

_MAX_RUNS = 100
"""Rows of the table of groups."""

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
    content = _render(facts).encode("utf-8", "replace")
    try:
        if found.exists() and not found.is_file():
            found.write_bytes(content)
        else:
            publish(found.resolve() if found.is_symlink() else found, [content])
    except (OSError, RuntimeError) as error:  # links in a circle
        raise GroupFileError(f"Cannot write {found}: {getattr(error, 'strerror', None) or error}.") from error
    return found


def value_text(name: str, value: Any) -> str:
    """A statistic or a figure of a plan for people: its unit follows from its name."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {value_text(name, each)}" for key, each in value.items()) or "none"
    if value is None:
        return "none"
    if name.endswith("per_s"):
        return f"{value / 1e9:.3g} GB/s"
    if "bytes" in name:
        return f"{describe_bytes(value)} ({value} B)" if value >= 1024 else f"{value} B"
    return describe_seconds(value) if name.endswith("_seconds") else str(value)


def _render(facts: ReportFacts) -> str:
    css = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    made = f"Written {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, with torch {torch.__version__}."
    overview = [("model", "weights", "bottleneck")]
    overview += [(model.title, _size(model.groups), model.sentences[0]) for model in facts.models]
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>{_safe(facts.title)}</title><style>\n{css}</style></head><body><main>",
            f"<h1>{_safe(facts.title)}</h1>",
            *(f'<p class="soft">{_safe(sentence)}</p>' for sentence in (*facts.sentences, made)),
            *([_card("Models", html_table(overview))] if len(facts.models) > 1 else ()),
            *map(_memory, facts.memories),
            *(part for model in facts.models for part in _section(model)),
            "</main></body></html>\n",
        ]
    )


def _safe(text: object) -> str:
    return escape(printable(str(text)))


def _size(groups: Iterable[GroupFacts]) -> str:
    return describe_bytes(sum(group.num_bytes for group in groups))


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


def _memory(memory: MemoryFacts) -> str:
    used = sum(num_bytes for _, num_bytes, _ in memory.parts)
    budget = "" if memory.budget_bytes is None else f", budget {describe_bytes(memory.budget_bytes)}"
    total = "" if memory.total_bytes is None else f", of {describe_bytes(memory.total_bytes)}"
    whole = max(used, memory.budget_bytes or memory.total_bytes or 1)
    shown = [(size, color, f"{label}: {describe_bytes(size)}") for label, size, color in memory.parts if size]
    mark = [] if memory.budget_bytes is None else [(memory.budget_bytes / whole - 0.003, 0.003, "ink", budget[2:])]
    return _card(
        f"{memory.name}: {describe_bytes(used)}{budget}{total}",
        _bar([*_in_a_row(shown, whole), *mark]),
        _key((color, title) for _, color, title in shown),
    )


def _section(model: ModelFacts) -> Iterator[str]:
    yield f"<h2>{_safe(model.title)}</h2>"
    sentences = (f"<p>{_safe(sentence)}</p>" for sentence in model.sentences)
    yield _card(f"{_size(model.groups)} in {len(model.groups)} groups", *sentences)
    yield _card("Where weights are stored", *_groups(model.groups))
    for title, figures in model.figures.items():
        rows = [("", "value"), *((name, value_text(name, value)) for name, value in figures.items())]
        yield f'<details class="card scroll"><summary>{_safe(title)}</summary>{html_table(rows)}</details>'


def _groups(groups: Sequence[GroupFacts]) -> Iterator[str]:
    """A bar of the groups, each as wide as its bytes; then a row for each run of neighbors that are stored alike."""
    cells, rows = list[tuple[int, str, str]](), list[tuple[str, str, str, str]]()
    for each in groups:
        said = f"{each.name}: {describe_bytes(each.num_bytes)}, {each.place.value}, {each.detail}"
        cells.append((each.num_bytes, each.place.name.lower(), said.removesuffix(", ")))
    for place, run in groupby(groups, key=lambda group: group.place):
        mine = [*run]
        span = " to ".join(dict.fromkeys((mine[0].name, mine[-1].name)))
        rows.append((span, str(len(mine)), _size(mine), place.value))
    yield _bar(_in_a_row(cells, sum(size for size, *_ in cells) or 1))
    yield _key((place.name.lower(), place.value) for place in dict.fromkeys(group.place for group in groups))
    if len(rows) > _MAX_RUNS:
        rows[_MAX_RUNS:] = [(f"{len(rows) - _MAX_RUNS} more runs of groups", "", "", "")]
    yield html_table([("groups", "number", "size", "where"), *rows, ("all", str(len(groups)), _size(groups), "")])
