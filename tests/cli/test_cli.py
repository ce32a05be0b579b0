"""The command `group-offload` itself: arguments, streams, interrupts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import group_offload
from group_offload.cli import doctor
from group_offload.cli import main as cli

from ..support.terminal import Terminal

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "usage: group-offload"),
        (["inspect", "."], "usage: group-offload"),
        (["pack", "."], "usage: group-offload"),
        (["doctor", ""], "argument DIR: it is empty"),  # a variable of the shell that is not set
        (["bench", ""], "argument DIR: it is empty"),
        (["plan", ""], "MODEL is empty"),
        (["pack", "", "folder"], "MODEL is empty"),
    ],
)
def test_wrong_arguments(arguments: list[str], said: str, run: Terminal) -> None:
    assert said in run(*arguments, status=2)


@pytest.mark.parametrize("name", ["stdin", "stdout", "stderr"])
def test_a_process_without_a_stream(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard: standard error is closed (`2>&-`), and a file that's opened gets its number."""
    monkeypatch.setattr(cli.sys, name, None)  # which `make portable` exchanges
    assert cli.main(["plan", str(tmp_path)]) == cli.FAILED
    getattr(cli.sys, name).close()


def test_version(run: Terminal) -> None:
    assert run("--version") == f"group-offload {group_offload.__version__}\n"


def test_interrupt(tmp_path: Path, run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "chosen_backend", interrupted)
    run("doctor", tmp_path, status=130)


def test_as_a_program(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "group_offload", "doctor", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "group-offload doctor" in done.stdout
    scripts = pytest.importorskip("tomllib", reason="came with Python 3.11").loads(
        (ROOT / "pyproject.toml").read_text()
    )["project"]["scripts"]
    assert scripts == {"group-offload": "group_offload.cli.main:main"}


def test_the_package_does_not_import_the_command() -> None:
    code = "import sys, group_offload; print({'group_offload.cli'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_whoever_reads_the_output_may_stop(tmp_path: Path) -> None:
    """`group-offload doctor DIR --json | head -1`: no traceback, and no error."""
    code = (
        "import sys\nfrom group_offload.cli import main\n"
        "assert sys.stdin.readline()\n"  # once nobody reads any more
        f"sys.exit(main.main(['doctor', {str(tmp_path)!r}, '--json']))"
    )
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=writing, stderr=subprocess.PIPE
    )
    os.close(writing)
    os.close(reading)
    _, errors = process.communicate(b"go\n", timeout=100)
    assert (process.returncode, errors) == (0, b"")


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    """The drive is full; the terminal has no letters for a name. No traceback."""
    command = f"{sys.executable} -m group_offload"
    folder = tmp_path / "mödel"
    folder.mkdir()
    for more, status in (("> /dev/full", 2), ("", 0)):
        done = subprocess.run(
            f"{command} doctor {folder} {more}",
            shell=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
            timeout=100,
        )
        assert done.returncode == status and "Traceback" not in done.stderr, done.stderr
