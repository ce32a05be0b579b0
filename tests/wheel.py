"""Builds the release, installs its wheel into an environment, and does a new user's first steps: the README, plan, report.

`python -m tests.wheel` takes half a minute: the environment finds what the wheel depends on in this one. Needs the packages of
the extra `dev`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

from .support.blocks import python_blocks

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ["CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"]
FOLDERS = ["docs", "examples", "group_offload"]
MODEL = "black-forest-labs/FLUX.1-dev"
"""What the README opens: here it is a folder of that name, with a tiny checkpoint."""

_CLEAN = {"PYTHONPATH": "", "PYTHONNOUSERSITE": "1"}
"""For what is to see an environment alone."""
_FIRST = """
import functools
import group_offload
import tiny
import torch
from diffusers import FluxPipeline
from importlib.metadata import version
from pathlib import Path
assert Path(group_offload.__file__).is_relative_to({environment!r}), group_offload.__file__
assert group_offload.__version__ == version("group-offload")
assert (Path(group_offload.__file__).parent / "py.typed").exists()
FluxPipeline.__call__ = functools.partialmethod(FluxPipeline.__call__, height=16, width=16, num_inference_steps=1)
pipe = FluxPipeline.from_pretrained(tiny.flux({model!r}), torch_dtype=torch.bfloat16)
"""
_LAST = """
from group_offload import disable_group_offload, handles_of, write_report
from group_offload.cli.main import main
assert "FluxTransformer2DModel: " in str(handles_of(pipe)["transformer"].plan)
assert write_report(pipe, "run.html").stat().st_size
disable_group_offload(pipe)
assert main(["plan", {model!r}, "--html", "plan.html"]) == 0 and Path("plan.html").stat().st_size
"""


def call(*command: str | Path, folder: Path = ROOT, **environment: str) -> str:
    """What a command writes. One that fails ends this program, with all that it wrote."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}\nended with exit code {done.returncode}")
    return done.stdout


def build(out: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it. The working tree stays as it is."""
    with tempfile.TemporaryDirectory() as place:
        for name in SOURCES:
            shutil.copy(ROOT / name, place)
        for name in FOLDERS:
            shutil.copytree(ROOT / name, Path(place, name), ignore=shutil.ignore_patterns("__pycache__"))
        call(sys.executable, "-m", "build", "--outdir", out, "--no-isolation", place)
    [sdist], [wheel] = out.glob("*.tar.gz"), out.glob("*.whl")
    call(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
    return sdist, wheel


def check_contents(sdist: Path, wheel: Path) -> None:
    """The wheel has the package and nothing else; the sdist has its sources, the docs and the examples, and no tests."""
    package = {str(path.relative_to(ROOT)) for path in files_in(ROOT / "group_offload")}
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert inside == package, sorted(inside ^ package)
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    missing = {*SOURCES, *(str(path.relative_to(ROOT)) for name in FOLDERS for path in files_in(ROOT / name))} - inside
    assert not missing, sorted(missing)
    assert not [name for name in inside if name.startswith(("tests", "benchmarks", ".")) or name.endswith(".pyc")]


def files_in(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="wheel-") as place:
        sdist, wheel = build(Path(place, "dist"))
        check_contents(sdist, wheel)
        environment, folder = Path(place, "environment"), Path(place, "work")
        python = environment / "bin" / "python"
        venv.create(environment, with_pip=False, symlinks=True)
        call(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile", "--no-deps", wheel)
        [site] = environment.glob("lib/python*/site-packages")
        (site / "shared.pth").write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))
        folder.mkdir()
        shutil.copy(ROOT / "examples" / "tiny.py", folder)
        readme = [block.code for block in python_blocks(ROOT / "README.md")]
        names = {"environment": str(environment), "model": MODEL}
        (folder / "readme.py").write_text("\n".join([_FIRST.format(**names), *readme, _LAST.format(**names)]))
        call(python, "readme.py", folder=folder, **_CLEAN)
        for command in ((environment / "bin" / "group-offload",), (python, "-m", "group_offload")):
            assert "group_offload" in call(*command, "doctor", ".", folder=folder, **_CLEAN)
        print(f"{sdist.name}, {wheel.name}: built, checked, and the README's {len(readme)} blocks ran")


if __name__ == "__main__":
    main()
