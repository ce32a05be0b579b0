"""The page of docs that shows the matrix."""

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

from .arms import ARMS, NO_LORA
from .cases import FAMILIES, NOT_RUN
from .row import Row

PATH = Path(__file__).parents[2] / "docs" / "support-matrix.md"

INTRODUCTION = """\
# Support matrix

This table was measured: `make matrix` runs every model class that diffusers exports, and every model of transformers that a
pipeline of diffusers imports, and writes this page. It did so on {date}, with diffusers {diffusers}, transformers
{transformers}, peft {peft}, torch {torch} and Python {python}. `test_matrix.py` fails if a class is left out.

Each class is built with a tiny configuration and random weights, and called as a pipeline calls it: an autoencoder by `encode`
and `decode` too. **yes** means that all outputs of all calls have the resident module's bits.

| column | the weights |
|---|---|
| RAM, blocks | rest in RAM and move block by block |
| RAM, layers | rest in RAM and move layer by layer (`offload_type="leaf_level"`) |
| group files | rest in group files, at both levels |
| checkpoint | stay in the file of `save_pretrained`; `group_offload.from_pretrained` opened it |
| budget | rest in RAM, and some of them stay on the device (`vram_budget`) |
| LoRA | rest in RAM, at both levels; an adapter is added while they do, and deleted. **no**: the class takes none |

On the CPU no kernel may read a weight where it rests, so a weight that was not onloaded is an error. On a simulated device
copies and kernels run late, so a missing wait is an error. The columns of RAM had both, and budget the device alone. A class
with a note about the simulated device ran on the CPU alone.

{summary}
"""


def write(rows: Mapping[str, Row]) -> None:
    notes: dict[str, int] = {}
    tables = []
    for family, cases in FAMILIES.items():
        lines = [f"## {family}\n", f"| class | {' | '.join(ARMS)} |", f"|---|{'---|' * len(ARMS)}"]
        for case in sorted(cases, key=lambda case: case.name):
            cells = [_show(rows[case.name], arm, notes) for arm in ARMS]
            lines.append(f"| `{case.name}` | {' | '.join(cells)} |")
        tables.append("\n".join(lines))
    absent = [f"- `{name}`: {reason}." for name, reason in NOT_RUN.items()]
    outcomes = [cell.outcome for row in rows.values() for cell in row.cells.values()]
    num_same = sum(all(row.cells[arm].outcome == "yes" for arm in list(ARMS)[:3]) for row in rows.values())
    summary = (
        f"{num_same} of {len(rows)} classes run bit-equal in RAM, at both levels, and in group files.\n"
        f"{outcomes.count('FAILS')} cells fail, and {sum(row.is_refused for row in rows.values())} classes are refused."
    )
    introduction = INTRODUCTION.format(
        date=datetime.datetime.now(datetime.timezone.utc).date(),
        diffusers=diffusers.__version__,
        transformers=transformers.__version__,
        peft=peft.__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        summary=summary,
    )
    listed = [f"{number}. {note}" for note, number in notes.items()]
    parts = [introduction, *tables, "## Not run\n\n" + "\n".join(absent), "## Notes\n\n" + "\n".join(listed)]
    PATH.write_text("\n\n".join(part.strip() for part in parts) + "\n")


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
    return set(re.findall(r"^(?:\| |- )`(\w+)`", PATH.read_text(), re.MULTILINE))


def version() -> str:
    """The version of diffusers that the page is about."""
    found = re.search(r"with diffusers (\S+),", PATH.read_text())
    assert found is not None
    return found[1]
