"""Runs the tests with other versions of Python, torch and diffusers, each in an environment of its own: `make versions`.

Each environment is made in a temporary folder, and removed after its tests: it takes 7 GB, and a download of 3 GB.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OTHERS = ["psutil", "tqdm", "xxhash", "huggingface_hub", "accelerate", "peft", "hypothesis", "safetensors"]
RUNNERS = ["pytest", "pytest-timeout", "pytest-xdist"]


@dataclass(frozen=True)
class Row:
    python: str
    torch: str
    diffusers: str
    others: tuple[str, ...] = ()
    """Other packages, where their newest versions do not go with these."""

    @property
    def name(self) -> str:
        return f"python{self.python}-torch{self.torch}-diffusers{self.diffusers}"


ROWS = [
    Row("3.10", "2.8.0", "0.36.0", ("transformers<5",)),
    Row("3.11", "2.9.1", "0.37.1", ("transformers<5",)),
    Row("3.12", "2.10.0", "0.38.0", ("transformers<5",)),
    Row("3.11", "2.11.0", "0.39.0"),
    Row("3.12", "2.12.1", "0.41.0"),
    Row("3.11", "2.13.0", "0.42.1"),
    Row("3.13", "2.14.1", "0.42.1"),
    Row("3.13", "2.15.0", "0.42.1"),
]


def python_of(version: str) -> str | None:
    """A Python of this version: of the path, or of pyenv."""
    found = shutil.which(f"python{version}")
    if found and subprocess.run([found, "-c", "pass"], capture_output=True).returncode == 0:
        return found  # pyenv has names that lead nowhere
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    return next(map(str, sorted(root.glob(f"versions/{version}.*/bin/python"))), None)


def run_row(row: Row, folder: Path, arguments: list[str]) -> str:
    """Make the environment, run the tests, and return pytest's last line, or what went wrong before."""
    python = python_of(row.python)
    if python is None:
        return f"not run: there is no Python {row.python} here"
    path = folder / f"{row.name}.log"
    with path.open("w") as log, tempfile.TemporaryDirectory(dir=folder) as place:
        here = Path(place) / "bin" / "python"
        install = [str(here), "-m", "pip", "install", "--quiet", "--no-compile", "--no-cache-dir"]
        others = [f"diffusers=={row.diffusers}", *(row.others or ("transformers",)), *OTHERS, *RUNNERS]
        steps = [[python, "-m", "venv", place], [*install, f"torch=={row.torch}"], [*install, *others]]
        steps.append([*install, "--no-deps", "--editable", str(ROOT)])
        for command in steps:
            if subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode:
                return f"not run: {' '.join(command[1:4])} failed"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": f"{place}/bytecode"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        tests = [str(here), "-m", "pytest", "-p", "no:cacheprovider", "-q", "-n", "2", "--dist", "worksteal"]
        done = subprocess.run([*tests, *arguments], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
    last = re.findall(r"^.*\b(?:passed|failed|error)\b.* in .*$", path.read_text(), re.MULTILINE)
    return last[-1].strip("= ") if last else f"pytest ended with {done.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="*", metavar="TORCH", help="torch versions of the rows to run (default: all)")
    parser.add_argument("--folder", type=Path, help="where environments and logs go (default: a new temporary folder)")
    parser.add_argument(
        "tests", nargs="*", help="arguments for pytest, after -- (default: all tests but those of benchmarks)"
    )
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="versions-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"Logs: {folder}. Date: {datetime.date.today()}.\n")
    print("| Python | torch | diffusers | tests |\n| --- | --- | --- | --- |")
    is_good = True
    for row in ROWS:
        if options.rows and row.torch not in options.rows:
            continue
        result = run_row(row, folder, options.tests)
        is_good &= bool(re.match(r"\d+ passed", result))
        print(f"| {row.python} | {row.torch} | {row.diffusers} | {result} |", flush=True)
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
