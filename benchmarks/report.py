"""What a benchmark writes and prints: the report as JSON, its name, and its rows as a Markdown table."""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .machine import GIB

RESULTS = Path(__file__).resolve().parent / "results"
MAX_WIDTH = 48
Arm = Mapping[str, Any]
Columns = Mapping[str, Callable[[Arm], str]]
"""The titles of a table, and what each shows of an arm."""


# ------------------------------------------------------------------------------------------------ the file


def new(benchmark: str, options: argparse.Namespace, /, **facts: Any) -> dict[str, Any]:
    """An empty report. `facts["model"]["name"]` and the label name its file."""
    date = datetime.date.today().isoformat()
    return {"benchmark": benchmark, "date": date, "label": options.label, "machine": None, **facts, "arms": {}}


def write(report: Mapping[str, Any], folder: Path) -> Path:
    """Write the report as `folder`/BENCHMARK/MODEL-LABEL-DEVICE.json, in the place of the one before it.

    A `folder` whose name ends in ".json" is the file itself.
    """
    device = report["machine"]["device"].lower().replace("nvidia ", "").replace(" ", "-")
    parts = (report["model"]["name"], report["label"], device)
    path = folder
    if folder.suffix != ".json":
        path = folder / report["benchmark"] / f"{'-'.join(part for part in parts if part)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    # At once: who is interrupted keeps the file from before.
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(report, indent=1) + "\n")
    partial.replace(path)
    return path


# ------------------------------------------------------------------------------------------------ the table


def table(arms: Mapping[str, Arm], columns: Columns, done: str, head: str = "") -> str:
    """One row for each arm; an arm that failed says why. Columns that are empty in all rows are left out.

    Args:
        done: the key that an arm has which did not fail.
        head: the title of the arms' names.
    """
    cells = {name: [column(arm) if done in arm else "" for column in columns.values()] for name, arm in arms.items()}
    kept = [at for at in range(len(columns)) if any(row[at] for row in cells.values())] or [0]
    rows = [(head, *(title for at, title in enumerate(columns) if at in kept))]
    for name, row in cells.items():
        shown = [row[at] for at in kept]
        rows.append((name, *(shown if done in arms[name] else [arms[name]["error"], *shown[1:]])))
    return markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row is its head. What an error says does not widen its column."""
    widths = [max(min(len(row[column]), MAX_WIDTH) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def machine_facts(report: Mapping[str, Any], *packages: str) -> str:
    """The device, the packages that were used, and the date."""
    machine = report["machine"]
    found = [f"{name} {machine[name]}" for name in ("torch", *packages) if machine.get(name)]
    return ", ".join([f"one {machine['device']}", *found, *([report["date"]] if report.get("date") else [])])


# ------------------------------------------------------------------------------------------------ cells


def seconds(value: float | None) -> str:
    """ "0.171 s"; times below a tenth of a second have a digit more."""
    return "" if value is None else f"{value:.3f} s" if value >= 0.1 else f"{value:.4f} s"


def span(arm: Arm) -> str:
    """The fastest and the slowest step."""
    return f"{seconds(arm['step_min_s']).removesuffix(' s')} to {seconds(arm['step_max_s']).removesuffix(' s')}"


def gib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / GIB:.2f} GiB"


def mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.0f} MiB"


def number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def verdict(is_equal: bool | None) -> str:
    """Whether an output has the bits of the reference; None: there is none."""
    return "not compared" if is_equal is None else "yes" if is_equal else "**no**"


def is_equal(arm: Arm, reference: str | None, repeats: str) -> bool | None:
    """Whether an arm's output has the hash of the reference, each time.

    Args:
        repeats: the key that says whether the arm repeats itself.
    """
    return None if reference is None else arm["output_sha256"] == reference and arm[repeats]
