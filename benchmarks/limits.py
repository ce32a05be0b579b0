"""Limits the RAM of processes, the page cache that they fill included: with a control group of their own (Linux)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .machine import say

_ENTER = (
    "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)
_FILES: dict[int, dict[str, str]] = {
    2: {
        "limit": "memory.max",
        "peak": "memory.peak",
        "current": "memory.current",
        "anonymous": "anon",
        "cache": "file",
        "events": "memory.events",
        "swap": "memory.swap.max",
    },
    1: {
        "limit": "memory.limit_in_bytes",
        "peak": "memory.max_usage_in_bytes",
        "current": "memory.usage_in_bytes",
        "anonymous": "total_rss",
        "cache": "total_cache",
        "events": "memory.oom_control",
        "swap": "memory.swappiness",
    },
}
"""The files of a control group, by its version; "anonymous" and "cache" are lines of memory.stat."""


def limit_ram(num_bytes: int, facts: dict[str, Any]) -> MemoryGroup | None:
    """What limits the RAM of processes, until it is removed. None if no limit can be set here: `facts` says why."""
    try:
        return MemoryGroup(num_bytes)
    except OSError as error:
        facts["group_error"] = str(error)
        say(f"no limit of RAM: {error}")
        return None


class MemoryGroup:
    """A control group. It is below that of this process, where that can be."""

    def __init__(self, limit_bytes: int) -> None:
        """
        Raises:
            OSError: none can be made here. It says what was tried.
        """
        self.limit_bytes = limit_bytes
        reasons: list[str] = []
        for version, parent in (*_parents_version_2(reasons), *_parents_version_1(reasons)):
            try:
                self._make(version, parent)
            except OSError as error:
                reasons.append(f"version {version}, {parent}: {error}")
            else:
                return
        raise OSError("; ".join(reasons) or "no control groups of memory are mounted")

    def _make(self, version: int, parent: Path) -> None:
        self._files = _FILES[version]
        self.folder = Path(tempfile.mkdtemp(prefix="group-offload-", dir=parent))
        self.where = f"version {version}, {self.folder}"
        try:
            (self.folder / self._files["limit"]).write_text(str(self.limit_bytes))
            with suppress(OSError):  # most machines have no swap
                (self.folder / self._files["swap"]).write_text("0")
            done = subprocess.run(self.command(["-S", "-c", ""]), capture_output=True, text=True, timeout=20)
            if done.returncode:
                raise OSError(f"no process gets in: {done.stderr.strip().splitlines()[-1:]}")
        except BaseException:
            self.remove()
            raise

    def command(self, arguments: Sequence[str]) -> list[str]:
        """What runs Python with these arguments, in the group from its beginning."""
        return [sys.executable, "-S", "-c", _ENTER, str(self.folder / "cgroup.procs"), *arguments]

    def usage(self) -> dict[str, Any]:
        """Bytes: the most that was charged to the group, and what is now. None is what this kernel does not tell."""
        stat = self._lines("memory.stat")
        peak, current = (self._lines(self._files[name]).get("") for name in ("peak", "current"))
        return {
            "group_limit_bytes": self.limit_bytes,
            "group_peak_bytes": peak,
            "group_bytes": current,
            "group_anonymous_bytes": stat.get(self._files["anonymous"]),
            "group_cache_bytes": stat.get(self._files["cache"]),
            "group_oom_kills": self._lines(self._files["events"]).get("oom_kill"),
            "group": self.where,
        }

    def remove(self) -> None:
        """Its process has ended: a few moments later the group can go."""
        for _ in range(50):
            try:
                self.folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.1)
            else:
                return

    def _lines(self, name: str) -> dict[str, int]:
        """The numbers in a file, by the word before each; {} if there is no such file."""
        try:
            lines = (self.folder / name).read_text().splitlines()
        except OSError:
            return {}
        return {key: int(value) for key, _, value in (line.rpartition(" ") for line in lines) if value.isdecimal()}


def _parents_version_2(reasons: list[str]) -> Iterator[tuple[int, Path]]:
    for root, _ in _mounts("cgroup2"):
        for parent in dict.fromkeys((root / _own_group("").lstrip("/"), root)):
            try:
                if "memory" not in (parent / "cgroup.controllers").read_text().split():
                    reasons.append(f"version 2, {parent}: it has no controller of memory")
                    continue
                enabled = parent / "cgroup.subtree_control"
                if "memory" not in enabled.read_text().split():
                    enabled.write_text("+memory")  # refused if processes are in a group that is not the first
            except OSError as error:
                reasons.append(f"version 2, {parent}: {error}")
            else:
                yield 2, parent


def _parents_version_1(reasons: list[str]) -> Iterator[tuple[int, Path]]:
    roots = [root for root, options in _mounts("cgroup") if "memory" in options.split(",")]
    for root in roots or _mounted_version_1(reasons):
        own = root / _own_group("memory").lstrip("/")
        yield from ((1, parent) for parent in dict.fromkeys((own, root)) if parent.is_dir())


def _mounted_version_1(reasons: list[str]) -> list[Path]:
    if os.geteuid():
        reasons.append("version 1: not mounted, and only root can do that")
        return []
    for target in (Path("/sys/fs/cgroup/memory"), Path(tempfile.gettempdir()) / "group-offload-cgroup"):
        try:
            target.mkdir(exist_ok=True)
            command = ["mount", "-t", "cgroup", "-o", "memory", "none", str(target)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        except OSError as error:
            reasons.append(f"version 1, mounting at {target}: {error}")
            continue
        if not done.returncode:
            return [target]
        reasons.append(f"version 1, mounting at {target}: {done.stderr.strip()}")
    return []


def _mounts(kind: str) -> list[tuple[Path, str]]:
    with suppress(OSError):
        fields = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
        return [(Path(each[1]), each[3]) for each in fields if len(each) > 3 and each[2] == kind]
    return []


def _own_group(controller: str) -> str:
    """The group that this process is in: of a controller of version 1, or ("") of version 2."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controller in controllers.split(",") and bool(controller) == bool(controllers):
                return name
    return ""
