"""The part of docs/compatibility.md that shows the matrix: its tables, and what it says of versions and numbers."""

from __future__ import annotations

import datetime
import platform
import re
from collections.abc import Mapping
from pathlib import Path

import diffusers
import peft
import torch
import transformers

from docs import generated

from .arms import ARMS, NO_LORA, Row
from .cases import FAMILIES, NOT_RUN

PATH = Path(__file__).parents[2] / "docs" / "compatibility.md"
PART = "matrix"


def write(rows: Mapping[str, Row]) -> None:
    """Write the generated part of the page, and nothing else."""
    generated.write(PATH, {PART: text(rows)})


def text(rows: Mapping[str, Row]) -> str:
    notes: dict[str, int] = {}
    tables = []
    for family, cases in FAMILIES.items():
        lines = [f"### {family}\n", f"| class | {' | '.join(ARMS)} |", f"|---|{'---|' * len(ARMS)}"]
        for case in sorted(cases, key=lambda case: case.name):
            cells = [_show(rows[case.name], arm, notes) for arm in ARMS]
            lines.append(f"| `{case.name}` | {' | '.join(cells)} |")
        tables.append("\n".join(lines))
    absent = [f"- `{name}`: {reason}." for name, reason in NOT_RUN.items()]
    outcomes = [cell.outcome for row in rows.values() for cell in row.cells.values()]
    num_same = sum(all(row.cells[arm].outcome == "yes" for arm in list(ARMS)[:3]) for row in rows.values())
    today = datetime.datetime.now(datetime.timezone.utc).date()
    summary = (
        f"{num_same} of {len(rows)} classes run bit-exact in RAM, at both levels, and from group files.\n"
        f"{outcomes.count('FAILS')} cells fail, and {sum(row.is_refused for row in rows.values())} classes are refused.\n"
        f"Measured on {today} with diffusers {diffusers.__version__}, transformers {transformers.__version__},\n"
        f"peft {peft.__version__}, torch {torch.__version__} and Python {platform.python_version()}."
    )
    listed = [f"{number}. {note}" for note, number in notes.items()]
    parts = [summary, *tables, "### Not run\n\n" + "\n".join(absent), "### Notes\n\n" + "\n".join(listed)]
    return "\n\n".join(parts)


def _show(row: Row, arm: str, notes: dict[str, int]) -> str:
    cell = row.cells[arm]
    if not cell.reason:
        return cell.outcome
    reason = re.sub(r"(: \[|: block \d).*", "", re.sub(r"\s+", " ", cell.reason)).strip().rstrip(".")
    reason = reason[:1].upper() + reason[1:]
    if cell.reason == NO_LORA:
        return cell.outcome
    return f"{cell.outcome} [{notes.setdefault(f'{reason}.', len(notes) + 1)}](#notes)"


def classes() -> set[str]:
    """The classes on the page."""
    return set(re.findall(r"^(?:\| |- )`(\w+)`", shown(), re.MULTILINE))


def version() -> str:
    """The version of diffusers that the page is about."""
    found = re.search(r"with diffusers (\S+),", shown())
    assert found is not None
    return found[1]


def shown() -> str:
    """The generated part of the page."""
    return generated.parts_of(PATH.read_text())[PART]
