"""The tables of docs/benchmarks.md: which figures of which results they show. `make pages` writes them.

page.json has them by name. A row is a label and more texts; a cell is "FILE: ARM: KEY" for the folder of results, where
{1} stands for the row's text behind its label. What a result does not have is a dash.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from .report import RESULTS, figure, markdown


@cache
def _arms(file: str) -> dict[str, Any]:
    path = RESULTS / f"{file}.json"
    return json.loads(path.read_text())["arms"] if path.exists() else {}  # type: ignore[no-any-return]


def _table(head: Sequence[str], cells: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """With links to the files of the figures: in a column, or below the table if it is one file."""
    lines, links = [[*head]], []
    for row in rows:
        line, files = [row[0]], []
        for cell in cells:
            file, arm, key = cell.format(*row).split(": ")
            shown = figure(_arms(file).get(arm, {}), key)
            line.append(shown)
            files += [file] if arm in _arms(file) else []
        lines.append(line)
        numbered = enumerate(dict.fromkeys(files), 1)
        links.append(", ".join(f"[{number}](../benchmarks/results/{file}.json)" for number, file in numbered))
    if len({*links}) == 1:
        return f"{markdown(lines, max_width=0)}\n\nResults: {links[0]}."
    return markdown([[*line, link] for line, link in zip(lines, ["results", *links], strict=True)], max_width=0)


def tables() -> dict[str, str]:
    """The generated parts of the page, by name."""
    specs: Mapping[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
    return {name: _table(**spec) for name, spec in specs.items()}
