"""What a benchmark writes and prints: the report as JSON, its name, and its rows as a Markdown table."""

from __future__ import annotations

import argparse
import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .machine import GIB, QUANTIZERS

RESULTS = Path(__file__).resolve().parent / "results"
MAX_WIDTH = 48
Arm = Mapping[str, Any]


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


def table(arms: Mapping[str, Arm], columns: Sequence[str], done: str) -> str:
    """One row for each arm; an arm that failed says why. Columns that are empty in all rows are left out.

    Args:
        columns: the keys of what is shown.
        done: the key that an arm has which did not fail.
    """
    cells = {name: [shown(key, arm.get(key)) if done in arm else "" for key in columns] for name, arm in arms.items()}
    kept = [at for at in range(len(columns)) if any(row[at] for row in cells.values())] or [0]
    rows = [("", *(_title(key) for at, key in enumerate(columns) if at in kept))]
    for name, row in cells.items():
        texts = [row[at] for at in kept]
        rows.append((name, *(texts if done in arms[name] else [arms[name]["error"], *texts[1:]])))
    return markdown(rows)


_TITLES = {
    "s": "time",
    "setup_s": "set-up",
    "rss_bytes": "RSS",
    "rss_peak_bytes": "RSS peak",
    "host_synchronizations": "waits",
}
_TITLES |= {"device_allocations": "allocations", "group_peak_bytes": "RSS + cache", "device_reserved_bytes": "reserved"}


def _title(key: str) -> str:
    return _TITLES.get(key) or re.sub("^is_|_s$|_bytes$", "", key).replace("_", " ")


def shown(key: str, value: Any) -> str:
    """A value as the end of its key says: times in seconds, sizes in GiB, numbers with two digits."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, bool):
        return verdict(value)
    if key == "s" or key.endswith("_s"):
        return f"{value:.3f} s" if value >= 0.1 else f"{value:.4f} s"
    if key.endswith("_bytes"):
        return f"{value / GIB:.2f} GiB"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def figure(arm: Arm, key: str) -> str:
    """A figure of a result, as tables show it. "images.-1.s" is that of the last image, "ranks.max.step_s" of the slowest rank.

    An arm that failed, as a whole or in one of its images, says so; one that was not run to its end, or has none, has a dash.
    """
    errors = [arm.get("error"), *(image.get("error") for image in arm.get("images", ()))]
    for error in map(str, filter(None, errors)):
        if "OutOfMemoryError" in error or error == "out of memory":
            return "out of memory"
        return "-" if re.match("not run|stopped|TimeoutError", error) else "fails"
    value: Any = arm
    path = key.split(".")
    for at, part in enumerate(path):
        if part == "max":
            value = max(each[path[at + 1]] for each in value)
            break
        try:
            value = value[part] if isinstance(value, Mapping) else value[int(part)]
        except LookupError:
            return "-"
    return shown(path[-1] if path[-1].isidentifier() else path[-2], value)


def markdown(rows: Sequence[Sequence[str]], max_width: int = MAX_WIDTH) -> str:
    """A table; the first row is its head. What an error says does not widen its column."""
    widths = [max(min(len(row[column]), max_width) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * max(width + 2, 3) for width in widths) + "|")
    return "\n".join(lines)


def render(
    report: Mapping[str, Any], columns: Sequence[str], rows: Mapping[str, Arm] | None = None, done: str = "step_s"
) -> str:
    """A report as Markdown: what was measured where, then one row for each arm.

    Args:
        rows: the arms, and what follows from them and is shown, too; default: the arms.
        done: see `table`.
    """
    model, machine = report["model"], report["machine"]
    facts = [model[key] for key in ("name", "what", "inputs", "goes_in") if key in model]
    found = [f"{name} {machine[name]}" for name in ("torch", "diffusers", *QUANTIZERS) if machine.get(name)]
    facts.append(", ".join([f"one {machine['device']}", *found, *([report["date"]] if report.get("date") else [])]))
    if report.get("drive"):
        facts.append(f"a plain reader got {max(report['drive']) / 1e9:.2f} GB/s of the disk")
    processes = [*report["arms"].values(), *report.get("kinds", {}).values(), *report.get("ram", {}).values()]
    refusals = {each["group_error"] for each in processes if "group_error" in each}
    facts += [f"RAM was not restricted: {refusal}" for refusal in sorted(refusals)]
    return f"{'; '.join(facts)}.\n\n{table(rows or report['arms'], columns, done)}"


# ------------------------------------------------------------------------------------------------ cells


def verdict(is_equal: bool | None) -> str:
    """Whether an output has the bits of the reference; None: there is none."""
    return "not compared" if is_equal is None else "yes" if is_equal else "**no**"
