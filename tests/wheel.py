"""Builds the release, installs its wheel into environments, and does a new user's first steps: the README, plan, report.

    python -m tests.wheel            half a minute: the environment finds what the wheel depends on in this one
    python -m tests.wheel --full     each environment downloads all that it needs, once without extras and once for each extra

Needs the packages of the extra `dev`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ["CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"]
FOLDERS = ["docs", "examples", "group_offload"]
MODEL = "black-forest-labs/FLUX.1-dev"
"""What the README opens: here it is a folder of that name, with a tiny checkpoint."""

_CLEAN = {"PYTHONPATH": "", "PYTHONNOUSERSITE": "1"}
"""For what is to see an environment alone."""
_BLOCK = re.compile(r"^```python *([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_FIRST = """
import group_offload
from importlib.metadata import version
from pathlib import Path
assert Path(group_offload.__file__).is_relative_to({environment!r}), group_offload.__file__
assert group_offload.__version__ == version("group-offload")
assert (Path(group_offload.__file__).parent / "py.typed").exists()
"""
_WITHOUT_DIFFUSERS = """
from importlib.util import find_spec
assert find_spec("diffusers") is None, "this environment is to be without extras"
"""
_WITH_DIFFUSERS = """
import functools
import tiny
import torch
from diffusers import FluxPipeline
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


# ------------------------------------------------------------------------------------------------ the release


def build(out: Path, *, is_isolated: bool) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it. The working tree stays as it is."""
    with tempfile.TemporaryDirectory() as place:
        for name in SOURCES:
            shutil.copy(ROOT / name, place)
        for name in FOLDERS:
            shutil.copytree(ROOT / name, Path(place, name), ignore=shutil.ignore_patterns("__pycache__"))
        here = () if is_isolated else ("--no-isolation",)
        call(sys.executable, "-m", "build", "--outdir", out, *here, place)
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


# ------------------------------------------------------------------------------------------------ environments


def make(environment: Path, wheel: Path, extra: str, *, is_full: bool, pip_options: Sequence[str] = ()) -> Path:
    """An environment with the wheel (or, if `is_full`, the sdist). Returns its Python."""
    python = environment / "bin" / "python"
    venv.create(environment, with_pip=is_full, symlinks=True)
    if is_full:
        install = [python, "-m", "pip", "install", "--quiet", "--no-compile", "-c", ROOT / "constraints.txt"]
        call(*install, *pip_options, f"{wheel}[{extra}]" if extra else wheel, **_CLEAN)
        return python
    call(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile", "--no-deps", wheel)
    [site] = environment.glob("lib/python*/site-packages")
    (site / "shared.pth").write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))
    return python


def use(python: Path, environment: Path, extra: str) -> str:
    """Run what the README shows, in an empty folder. Returns what was run."""
    folder = environment / "work"
    folder.mkdir()
    is_bare = not extra
    has_diffusers = call(
        python, "-c", "from importlib.util import find_spec; print(find_spec('diffusers') is not None)", **_CLEAN
    )
    blocks = _BLOCK.findall((ROOT / "README.md").read_text())
    lines = [_FIRST.format(environment=str(environment))]
    if has_diffusers.strip() == "True":
        assert not is_bare
        shutil.copy(ROOT / "examples" / "tiny.py", folder)
        chosen = [code for _, code in blocks]
        lines += [_WITH_DIFFUSERS.format(model=MODEL), *chosen, _LAST.format(model=MODEL)]
    else:
        chosen = [code for mark, code in blocks if mark == "run"]
        lines += [_WITHOUT_DIFFUSERS if is_bare else "", *chosen]
    script = "\n".join(lines).replace("/nvme/", f"{folder}/nvme/")
    if "vram_budget" in script and not torch.accelerator.is_available():
        script = script.replace("vram_budget=", "ram_budget=")  # the CPU has no memory of its own
    (folder / "readme.py").write_text(script)
    call(python, "readme.py", folder=folder, **_CLEAN)
    assert "group_offload" in call(environment / "bin" / "group-offload", "doctor", ".", folder=folder, **_CLEAN)
    assert "group_offload" in call(python, "-m", "group_offload", "doctor", "offload", folder=folder, **_CLEAN)
    return f"{len(chosen)} of the README's {len(blocks)} blocks, group-offload doctor, python -m group_offload doctor"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.wheel", description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="download everything into each environment")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="wheel-") as place:
        sdist, wheel = build(Path(place, "dist"), is_isolated=options.full)
        check_contents(sdist, wheel)
        print(f"{sdist.name}, {wheel.name}: built and checked", flush=True)
        with zipfile.ZipFile(wheel) as archive:
            [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            extras = re.findall(r"^Provides-Extra: (.+)$", archive.read(name).decode(), re.MULTILINE)
        for extra in ["", *extras] if options.full else ["diffusers"]:
            environment = Path(place, f"environment-{extra}")
            python = make(environment, wheel, extra, is_full=options.full)
            said = use(python, environment, extra)
            print(f"{f'with [{extra}]' if extra else 'without extras'}: {said}", flush=True)
            shutil.rmtree(environment)
        if options.full:
            python = make(Path(place, "from-sdist"), sdist, "", is_full=True, pip_options=["--no-deps"])
            code = "from importlib.metadata import version; print(version('group-offload'))"
            print(f"from the sdist: {call(python, '-c', code, **_CLEAN).strip()}")


if __name__ == "__main__":
    main()
