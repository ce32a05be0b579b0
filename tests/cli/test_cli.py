"""The command `group-offload` itself: its arguments and its streams. (An interrupt: test_cli_doctor.py.)"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..support.terminal import Terminal

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "usage: group-offload"),
        ("compress .", "usage: group-offload"),
        ("doctor -", "argument DIR: it is empty"),  # a variable of the shell that is not set
        ("plan -", "MODEL is empty"),
        ("doctor --device abacus", "--device abacus"),
        ("doctor --device cpu:3", "torch sees 1 cpu device"),
        ("compress nowhere groups", "There is no nowhere"),
        ("compress . groups --dtype int8", "floating point"),
        ("compress . groups --device meta", "--device 'meta' isn't supported. Use 'cuda'"),
    ],
)
def test_wrong_arguments(arguments: str, said: str, run: Terminal) -> None:
    assert said in run(*(word.strip("-") if word == "-" else word for word in arguments.split()), status=2)


@pytest.mark.parametrize(
    ("more", "status"), [("", 0), ("> /dev/full", 2), (">&-", 0), ("| true; exit ${PIPESTATUS[0]}", 0)]
)
def test_as_a_program(more: str, status: int, tmp_path: Path) -> None:
    """The disk is full; whoever reads the output stops; the terminal has no letters for a name. No traceback."""
    folder = tmp_path / "mödel"
    folder.mkdir()
    command = f"{sys.executable} -m group_offload doctor {folder} {more}"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == status and bool(done.stderr) == (status == 2), done.stderr
    assert "Traceback" not in done.stderr and ("group-offload doctor" in done.stdout) == (not more)
