"""How the tests are cut: no test file is the library of another one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from .support.portable import ABOUT_LINUX
from .support.slow import slow_tests

TESTS = Path(__file__).parent
FILES = sorted(TESTS.rglob("*.py"))

RUNS_TESTS_OF_OTHERS = {"files/test_without_page_map.py"}
"""Runs tests of edits once more on another kind of system; for that it imports them."""


def imported(path: Path) -> set[str]:
    """The dotted names that a file imports, relative ones made absolute."""
    package = ["tests", *path.relative_to(TESTS).parts[:-1]]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            found.update({module, *(f"{module}.{alias.name}" for alias in node.names)})
    return found


def is_in_a_test_file(name: str) -> bool:
    return name.startswith("tests.") and any(part.startswith("test_") for part in name.split("."))


def test_nothing_is_imported_from_test_files() -> None:
    """What several files need stands in `tests/support/`."""
    found = {str(path.relative_to(TESTS)): sorted(filter(is_in_a_test_file, imported(path))) for path in FILES}
    assert {path for path, names in found.items() if names} == RUNS_TESTS_OF_OTHERS, found


def test_files_have_names_of_their_own() -> None:
    """docs/hazards.md names a test by the name of its file alone."""
    names = [path.name for path in FILES if path.name.startswith("test_")]
    assert len(names) == len(set(names))


def test_slow_tests_exist() -> None:
    for name in slow_tests():
        file, test = name.split("::")
        assert re.search(rf"\b{test}\b", (TESTS / file).read_text()), f"tests/slow.txt names {name}"


def test_tests_about_linux_exist() -> None:
    for name in ABOUT_LINUX:
        file, _, test = name.partition("::")
        assert re.search(rf"\b{test}\b", (TESTS / file).read_text()), f"tests/support/portable.py names {name}"


def test_running_engines_are_looked_into_at_one_place() -> None:
    """All else goes through the public calls. (The suite of diffusers runs as a script.)"""
    windows = {"support/inside.py", "support/diffusers_suite.py", "test_layout.py"}
    found = {str(path.relative_to(TESTS)) for path in FILES if "handle._engine" in path.read_text()}
    assert found <= windows
