"""The package as a whole: what importing it costs, which way its imports run, and lists of tests that have to be true."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib.metadata import version
from importlib.util import resolve_name
from pathlib import Path

import torch

import group_offload
from group_offload.base.device import AcceleratorBackend

from .support.portable import ABOUT_LINUX
from .support.slow import slow_tests

PACKAGE = Path(group_offload.__file__).parent
TESTS = Path(__file__).parent

LAYERS = (
    {"errors"},
    {"base"},
    {"activations"},  # know nothing of weights
    {"packing"},
    {"stores"},
    {"plan"},
    {"report"},
    {"config"},
    {"weights"},
    {"partition"},
    {"runtime"},
    {"run_report"},
    {"handle"},
    {"owners"},
    {"api", ""},  # `group_offload` itself, for those who import it inside of a function
    {"integrations"},
    {"cli"},
    {"__main__"},
)
"""A module may import from its own layer and from those before it."""


def modules() -> dict[str, Path]:
    """The modules of the package by their dotted names."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imports_of(name: str, path: Path, known: set[str]) -> set[str]:
    """The modules of the package that a module imports, anywhere in its text, for types too."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            found |= {f"{base}.{alias.name}" for alias in node.names} & known or {base} & known
    return found


def test_imports_run_one_way() -> None:
    """From later layers to earlier ones, and in no circle."""
    known = modules()
    graph = {name: imports_of(name, path, set(known)) for name, path in known.items() if name != "group_offload"}
    layers = {name: number for number, names in enumerate(LAYERS) for name in names}

    def layer_of(name: str) -> int:
        return layers[name.partition(".")[2].partition(".")[0]]

    assert not [(name, other) for name in graph for other in graph[name] if layer_of(other) > layer_of(name)]
    assert "group_offload.runtime.gates" in graph["group_offload.runtime.engine"]
    for others in graph.values():
        others.discard("group_offload")  # imported inside of a function, when everything is loaded
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_import_brings_in_nothing_heavy() -> None:
    """Beyond what torch imports itself there is only the package, what it depends on and the standard library."""
    script = """
import json, sys
import torch
before = set(sys.modules)
import group_offload
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    command = [sys.executable, "-W", "error", "-c", script]
    new = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, cwd=PACKAGE.parent).stdout)
    assert "group_offload.api" in new
    foreign = {name.partition(".")[0] for name in new} - set(sys.stdlib_module_names)
    assert foreign <= {"group_offload", "psutil", "tqdm", "torch", "xxhash"}
    assert not [name for name in new if name.startswith(("torch.distributed", "torch._dynamo", "torch._inductor"))]


def test_public_names() -> None:
    """(docs/api.md lists them: tests/test_docs.py compares.)"""
    assert group_offload.__version__ == version("group-offload")
    found = {name: getattr(group_offload, name) for name in group_offload.__all__}
    assert all(each.__module__.startswith("group_offload.") for each in found.values())
    errors = [each for name, each in found.items() if name.endswith("Error")]
    assert all(issubclass(error, group_offload.GroupOffloadError) for error in errors)


def test_streams_are_entered_by_objects_of_their_own() -> None:
    """What was current before is kept in the object: threads that enter the same stream must not share one."""
    stream = torch.Stream(device="cpu")
    entered = AcceleratorBackend(stream.device).on_stream(stream)
    assert entered == stream and entered is not stream


def test_tests_that_lists_name_exist() -> None:
    """tests/slow.txt, what `make portable` leaves out, and the table of tests/README.md: none names a test that is gone."""
    classes = re.findall(r"`(\S+\.py::\w+)`", (TESTS / "README.md").read_text())
    assert classes
    for name in (*slow_tests(), *ABOUT_LINUX, *classes):
        file, _, test = name.partition("::")
        assert re.search(rf"\b{test}\b", (TESTS / file).read_text()), name
