"""A tree of control groups in files, in place of the system's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from group_offload.base import ram

GIB = 1 << 30


class Cgroups:
    """A tree of control groups in a folder of the test, and the text of /proc/self/cgroup."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.root = folder / "cgroup"
        self._said = folder / "self"
        self.root.mkdir()
        patch.setattr(ram, "_CONTROL_GROUPS", self.root)
        real = Path.read_text

        def read_text(path: Path, *args: Any, **kwargs: Any) -> str:
            return real(self._said if str(path) == "/proc/self/cgroup" else path, *args, **kwargs)

        patch.setattr(Path, "read_text", read_text)
        patch.setattr(
            ram, "pinned", type(ram.pinned)()
        )  # models of earlier tests may be waiting for Python's collector
        patch.setattr(ram.psutil, "virtual_memory", lambda: SimpleNamespace(available=100 * GIB))

    def say(self, *lines: str) -> None:
        self._said.write_text("".join(f"{line}\n" for line in lines))

    def write(self, name: str, version: int = 2, **files: object) -> None:
        folder = self.root / ("memory" if version == 1 else "") / name.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        for file, value in files.items():
            (folder / file.replace("__", ".")).write_text(f"{value}\n")


def stat(inactive: int, active: int) -> str:
    return f"anon 5\nfile {inactive + active}\ninactive_anon 0\ninactive_file {inactive}\nactive_file {active}"
