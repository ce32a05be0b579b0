"""What the files for GitHub call is there: make targets, folders of tests, versions of Python."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ci: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_targets_exist(path: Path) -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = [words.split() for words in re.findall(r"make ([\w ]+)", re.sub(r"(?m)^\s*#.*$", "", path.read_text()))]
    assert called and {word for words in called for word in words if word != "ARGS"} <= targets


def test_each_test_is_in_one_shard() -> None:
    shards = [
        {path for pattern in shard.split() for path in ROOT.glob(pattern)}
        for shard in ci["jobs"]["test"]["strategy"]["matrix"]["tests"]
    ]
    covered = [path for shard in shards for path in shard]
    here = {path.parent for path in (ROOT / "tests").glob("*/**/test_*.py")} | set((ROOT / "tests").glob("test_*.py"))
    assert len(covered) == len(set(covered))
    assert not {path for path in here if not {path, *path.parents} & set(covered)}


def test_pythons_are_those_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    named = set(re.findall(r"Python :: (3\.\d+)", text))
    assert named <= set(ci["jobs"]["test"]["strategy"]["matrix"]["python"])
    assert min(named, key=lambda each: int(each[2:])) in text.partition("requires-python")[2][:20]


def test_libraries_may_have_odd_escapes() -> None:
    """Python warns of them as it compiles a library (torchao has one), which may be when a test first imports it."""
    compile(r"'\.'", "library.py", "exec")
