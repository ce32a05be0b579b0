"""README and docs: links lead somewhere, tests that are named exist, Python blocks are Python, and those marked `run` run.

A block that starts with ```python run is executed. The blocks of one file run in one namespace, in order.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
names = [str(file.relative_to(ROOT)) for file in FILES]

_BLOCK = re.compile(r"^```(\w*)[ ]*([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HTML_LINK = re.compile(r"(?:src|href|srcset)=\"([^\"]+)\"")


def anchors(file: Path) -> set[str]:
    """The anchors of a file's headings, as GitHub makes them."""
    text = _BLOCK.sub("", file.read_text())
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(plain.strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("file", FILES, ids=names)
def test_links(file: Path) -> None:
    text = _BLOCK.sub("", file.read_text())
    broken = []
    for link in (*_LINK.findall(text), *_HTML_LINK.findall(text)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (file.parent / path).resolve() if path else file
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("file", FILES, ids=names)
def test_python_blocks(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in _BLOCK.finditer(file.read_text()):
        language, mark, code = block.groups()
        if language != "python":
            continue
        line = file.read_text()[: block.start()].count("\n") + 1
        tree = ast.parse("\n" * line + code, str(file))
        if mark == "run":
            exec(compile(tree, str(file), "exec"), namespace)


@pytest.mark.parametrize("page", ["answers.md", "hazards.md"])
def test_named_tests_exist(page: str) -> None:
    """Each row of a table names one, or says that there is none."""
    text = (ROOT / "docs" / page).read_text()
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", text)
    assert named
    for row in re.findall(r"^\| (.+) \|$", text, re.MULTILINE):
        last = row.split(" | ")[-1]
        assert last in ("test", "not run", "not solved") or "`test_" in last, row
    for file, name in named:
        [path] = (ROOT / "tests").rglob(file)
        assert f"def {name}(" in path.read_text(), f"{file}::{name}"


def test_every_page_is_reachable() -> None:
    linked = set()
    for file in FILES:
        for link in _LINK.findall(file.read_text()):
            linked.add((file.parent / link.partition("#")[0]).resolve())
    assert set((ROOT / "docs").rglob("*.md")) <= linked
