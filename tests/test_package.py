"""The package as a whole: what importing it costs, which way its imports run, and lists of tests that have to be true."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import group_offload

from .support.portable import ABOUT_LINUX
from .support.slow import slow_tests

PACKAGE = Path(group_offload.__file__).parent
TESTS = Path(__file__).parent

LAYERS = (
    {"errors"},
    {"base"},
    {"activations"},  # know nothing of weights
    {"compression"},
    {"stores"},
    {"plan"},
    {"report"},
    {"config"},
    {"weights"},
    {"partition"},
    {"runtime"},
    {"handle"},
    {"owners"},
    {"api", ""},  # `group_offload` itself, for those who import it inside of a function
    {"integrations"},
    {"cli"},
    {"__main__"},
)
"""A module may import from its own layer and from those before it."""


def test_imports_run_one_way() -> None:
    """From later layers to earlier ones."""
    layers = {name: number for number, names in enumerate(LAYERS) for name in names}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).parts
        if parts != ("__init__.py",):
            mine, root = layers[parts[0].removesuffix(".py")], "." * len(parts)
            found = re.findall(
                rf"^ *from {re.escape(root)}(\w*)[\w.]* import \(?\s*(\w+)", path.read_text(), re.MULTILINE
            )
            later = [name for name in found if layers[name[0] or (name[1] if name[1] in layers else "")] > mine]
            assert not later, path


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
    heavy = ("torch.distributed", "torch._dynamo", "torch._inductor", "group_offload.cli")
    assert not [name for name in new if name.startswith(heavy)]


def test_public_names() -> None:
    """(docs/api.md lists them: tests/test_docs.py compares.)"""
    assert group_offload.__version__ == version("group-offload")
    found = {name: getattr(group_offload, name) for name in group_offload.__all__}
    assert all(each.__module__.startswith("group_offload.") for each in found.values())
    errors = [each for name, each in found.items() if name.endswith("Error")]
    assert all(issubclass(error, group_offload.GroupOffloadError) for error in errors)


def test_tests_that_lists_name_exist() -> None:
    """tests/slow.txt, what `make portable` leaves out, and the table of tests/README.md: none names a test that is gone."""
    classes = re.findall(r"`(\S+\.py::\w+)`", (TESTS / "README.md").read_text())
    assert classes
    for name in (*slow_tests(), *ABOUT_LINUX, *classes):
        file, _, test = name.partition("::")
        assert re.search(rf"\b{test}\b", (TESTS / file).read_text()), name
