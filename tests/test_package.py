"""The package as a whole: its public names, what importing it costs, and which way its imports run."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import version
from pathlib import Path

import pytest

import group_offload

PACKAGE = Path(group_offload.__file__).parent

PUBLIC_NAMES = {
    "ActivationOffloadCallback",
    "ActivationOffloadHandle",
    "ActivationStats",
    "ConfigError",
    "DeviceError",
    "GroupFileError",
    "GroupInfo",
    "GroupOffloadError",
    "ModuleError",
    "OffloadConfig",
    "OffloadHandle",
    "OffloadPlan",
    "OffloadStats",
    "OffloadType",
    "StateError",
    "activation_offloading",
    "apply_activation_offloading",
    "apply_group_offloading",
    "disable_group_offload",
    "disable_progress_bar",
    "enable_group_offload",
    "enable_progress_bar",
    "free_slots",
    "from_pretrained",
    "handle_of",
    "handles_of",
    "no_activation_offloading",
    "patch_diffusers",
    "remove_group_offloading",
    "unpatch_diffusers",
    "write_report",
}

LAYERS = (
    {"errors"},
    {"base"},
    {"packing"},
    {"stores"},
    {"plan"},
    {"report"},
    {"config"},
    {"weights"},
    {"partition"},
    {"runtime", "activations"},
    {"run_report"},
    {"handle"},
    {"owners"},
    {"api"},
    {"integrations"},
    {"cli"},
    {"__main__"},
)
"""A module may import from its own layer and from those before it."""


def test_public_names() -> None:
    assert set(group_offload.__all__) == PUBLIC_NAMES
    assert sorted(group_offload.__all__) == group_offload.__all__
    assert all(hasattr(group_offload, name) for name in PUBLIC_NAMES)


def test_public_names_say_where_they_live() -> None:
    """Nothing public is an alias of something foreign."""
    for name in PUBLIC_NAMES:
        assert getattr(group_offload, name).__module__.startswith("group_offload."), name


def test_public_names_are_documented() -> None:
    for name in PUBLIC_NAMES:
        assert getattr(group_offload, name).__doc__, name


def test_version_is_that_of_the_distribution() -> None:
    assert group_offload.__version__ == version("group-offload")


def test_type_hints_ship() -> None:
    assert (PACKAGE / "py.typed").exists()


def test_what_is_no_python_ships() -> None:
    """A page is made of files beside its code, which a wheel has only if they are listed."""
    listed = re.search(
        r"package-data = \{ group_offload = (\[.*?\]) \}", (PACKAGE.parent / "pyproject.toml").read_text()
    )
    assert listed is not None
    found = (path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    others = {path.relative_to(PACKAGE).as_posix() for path in found if path.suffix != ".py"}
    assert others == set(json.loads(listed[1]))


def test_errors_are_one_tree() -> None:
    errors = [getattr(group_offload, name) for name in PUBLIC_NAMES if name.endswith("Error")]
    assert all(issubclass(error, group_offload.GroupOffloadError) for error in errors)


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


def modules() -> dict[str, Path]:
    """The modules of the package by their dotted names inside it; the package itself is ""."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imports_of(name: str, path: Path, known: set[str]) -> set[str]:
    """The modules of the package that a module imports, anywhere in its text, for types too."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(a.name.removeprefix("group_offload").lstrip(".") for a in node.names if _is_ours(a.name))
        elif isinstance(node, ast.ImportFrom):
            base = _target_of(node, name, is_package=path.name == "__init__.py")
            if base is not None:
                inner = {f"{base}.{alias.name}".lstrip(".") for alias in node.names}
                found.update(inner & known or {base})
    return found


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == "group_offload"


def _target_of(node: ast.ImportFrom, importer: str, *, is_package: bool) -> str | None:
    if node.level == 0:
        target = node.module or ""
        return target.removeprefix("group_offload").lstrip(".") if _is_ours(target) else None
    parts = importer.split(".") if importer else []
    parts = parts[: len(parts) + is_package - node.level]
    return ".".join(filter(None, (*parts, node.module)))


def layer_of(name: str) -> int:
    if not name:
        # `import group_offload` inside the package: the public names, which are no lower than the api.
        return layer_of("api")
    top = name.partition(".")[0]
    found = [number for number, layer in enumerate(LAYERS) if top in layer]
    assert found, f"group_offload.{name} is in no layer: put it into LAYERS"
    return found[0]


@pytest.mark.parametrize("name", sorted(set(modules()) - {""}))
def test_imports_run_one_way(name: str) -> None:
    known = modules()
    upward = {other for other in imports_of(name, known[name], set(known)) if layer_of(other) > layer_of(name)}
    assert not upward, f"group_offload.{name} imports from a later layer: {sorted(upward)}"


def test_imports_have_no_cycle() -> None:
    """Imports for types count: what is read together with another file belongs beside it, or below it."""
    known = modules()
    graph = {name: imports_of(name, path, set(known)) for name, path in known.items() if name}
    for name in graph:
        graph[name].discard("")  # made inside a function, when everything is loaded
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_a_cycle_of_imports_for_types_is_seen(tmp_path: Path) -> None:
    """The test above would fail if one returned."""
    (tmp_path / "one.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .two import Two\n")
    (tmp_path / "two.py").write_text("from .one import One\n")
    known = {"one", "two"}
    graph = {name: imports_of(name, tmp_path / f"{name}.py", known) for name in known}
    with pytest.raises(CycleError):
        TopologicalSorter(graph).prepare()


def test_activations_know_nothing_of_weights() -> None:
    """They stand on what weights stand on too, and on nothing else; there is no cycle between them, for types or not."""
    known = modules()
    graph = {name: imports_of(name, known[name], set(known)) for name in known if name.startswith("activations")}
    for name, imported in graph.items():
        foreign = {other for other in imported if other.partition(".")[0] not in ("activations", "base", "errors")}
        assert not foreign, f"group_offload.{name} imports {sorted(foreign)}"
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_the_reader_of_imports_reads_imports() -> None:
    known = modules()
    assert {"config", "runtime.gates", "stores.folder"} <= imports_of(
        "runtime.engine", known["runtime.engine"], set(known)
    )
    assert "errors" in imports_of("api", known["api"], set(known))


def test_streams_are_entered_by_objects_of_their_own() -> None:
    """What was current before is kept in the object: threads that enter the same stream must not share one."""
    import torch

    from group_offload.base.device import _on

    stream = torch.Stream(device="cpu")
    entered = _on(stream)
    assert entered == stream and entered is not stream
