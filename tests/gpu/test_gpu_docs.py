"""The pages of the docs with blocks that a GPU has to run: all of their blocks, in a process of their own."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ..support.blocks import python_blocks

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    file for file in sorted((ROOT / "docs").rglob("*.md")) if any(block.needs_gpu for block in python_blocks(file))
]


def _missing(file: Path) -> set[str]:
    """The packages that a page imports, and that are not installed."""
    found: set[str] = set()
    for block in python_blocks(file):
        for node in ast.walk(ast.parse(block.code)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module is not None else []
            found.update(name.partition(".")[0] for name in names)
    return {name for name in found if find_spec(name) is None}


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.stem)
def test_a_page(file: Path, tmp_path: Path) -> None:
    missing = _missing(file)
    if missing:
        pytest.skip(f"{', '.join(sorted(missing))} is not installed")
    # Some pages speak of processes that torchrun starts: it starts one.
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command = [*launch, "-m", "tests.support.blocks", str(file), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
