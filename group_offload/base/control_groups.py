"""The memory limits of the control groups of this process: a container may have less memory than its machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from .system import kernel_says

_ROOT = Path("/sys/fs/cgroup")


def memory_limits() -> list[int]:
    """The limits in bytes of the control groups that the process is in, and of their parents."""
    found = []
    for folder, limit, _ in _folders():
        with suppress(OSError, ValueError):
            found.append(int((folder / limit).read_text()))
    return [limit for limit in found if limit > 0]


def memory_rooms() -> list[int]:
    """The bytes that each of these groups has left. The page cache counts as free, since the kernel gives it up."""
    found = []
    for folder, limit, usage in _folders():
        with suppress(OSError, ValueError):
            room = int((folder / limit).read_text()) - int((folder / usage).read_text())
            found.append(room + _cached_bytes(folder / "memory.stat"))
    return found


def _cached_bytes(stat: Path) -> int:
    """The page cache of a group and of those inside of it; 0 if the system does not tell."""
    found: dict[str, int] = {}
    with suppress(OSError):
        for line in stat.read_text(errors="replace").splitlines():
            key, _, value = line.partition(" ")
            with suppress(ValueError):
                found[key] = int(value)
    names = ("inactive_file", "active_file")
    # In version 1 these are the group's own, while its usage is that of all groups inside of it too.
    return sum(found.get(f"total_{name}", found.get(name, 0)) for name in names)


def _folders() -> Iterator[tuple[Path, str, str]]:
    """The folder of each group, and the names of its files for the limit and for the usage."""
    lines: list[str] = []
    with suppress(OSError):
        lines = kernel_says("/proc/self/cgroup").splitlines()
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, colon, name = rest.partition(":")
        if not colon or (controllers and "memory" not in controllers.split(",")):
            continue
        root = _ROOT / "memory" if controllers else _ROOT  # version 1 has a tree for each controller
        files = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        folder = root / name.lstrip("/")
        while True:
            yield folder, *files
            if folder in (root, folder.parent):
                break
            folder = folder.parent
