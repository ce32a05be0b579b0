"""How much RAM is available to this process, and how much it uses."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from .release import wait_for_releases
from .system import kernel_says, ram_of_machine

_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_MAX_LIBRARY_BYTES = 512 << 20
"""The most that the code of libraries takes in pages of files. More than this is not code, but weights."""
_RESERVE_BYTES = 1 << 30
"""RAM that is left to the process itself and to the system, whatever is asked for."""


class Tally:
    """Bytes that are counted for as long as objects exist."""

    def __init__(self) -> None:
        self._sizes: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()

    @property
    def num_bytes(self) -> int:
        return sum([*self._sizes.values()])

    def add(self, owner: object, num_bytes: int) -> None:
        """Count `num_bytes` for as long as `owner` exists."""
        self._sizes[owner] = num_bytes


pinned = Tally()
"""The bytes of files that this process has pinned. The kernel still counts their pages as reclaimable."""


def available_ram() -> int:
    """The bytes that this process may take before the system has to swap. The page cache counts, where it can be given up.

    The figure is the system's own estimate, or less if a control group of the process (a container) is nearer to its limit. The
    bytes that are pinned in the page cache are subtracted, because both count them as reclaimable.
    """
    wait_for_releases()
    found = [ram_of_machine("available")]
    for folder, limit, usage in _control_groups():
        with suppress(OSError, ValueError):
            room = int((folder / limit).read_text()) - int((folder / usage).read_text())
            found.append(room + _cached_bytes(folder / "memory.stat"))
    return max(0, min(found) - pinned.num_bytes)


def ram_in_use() -> int:
    """The bytes of RAM that this process takes, without the weights that are stored in the page cache, pinned there or not.

    Where the system does not tell them apart, all pages of files count. Where it tells nothing, that is 0.
    """
    wait_for_releases()
    found = {}
    try:
        lines = kernel_says("/proc/self/status").splitlines()
    except OSError:
        try:
            return int(psutil.Process().memory_info().rss)
        except (OSError, psutil.Error):
            return 0
    for line in lines:
        name, _, value = line.partition(":")
        if name in ("RssAnon", "RssShmem", "RssFile"):
            found[name] = int(value.split()[0]) << 10
    of_files = max(0, found.get("RssFile", 0) - pinned.num_bytes)
    return found.get("RssAnon", 0) + found.get("RssShmem", 0) + min(of_files, _MAX_LIBRARY_BYTES)


def fits(num_bytes: int) -> bool:
    """Whether RAM has room for `num_bytes` of weights, for as long as they are offloaded."""
    return num_bytes + _RESERVE_BYTES <= available_ram()


def memory_limits() -> list[int]:
    """The limits in bytes of the control groups (a container's) that the process is in, and of their parents."""
    found = []
    for folder, limit, _ in _control_groups():
        with suppress(OSError, ValueError):
            found.append(int((folder / limit).read_text()))
    return [limit for limit in found if limit > 0]


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


def _control_groups() -> Iterator[tuple[Path, str, str]]:
    """The folder of each group, and the names of its files for the limit and for the usage."""
    lines: list[str] = []
    with suppress(OSError):
        lines = kernel_says("/proc/self/cgroup").splitlines()
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, colon, name = rest.partition(":")
        if not colon or (controllers and "memory" not in controllers.split(",")):
            continue
        # Version 1 has a tree for each controller.
        root = _CONTROL_GROUPS / "memory" if controllers else _CONTROL_GROUPS
        files = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        folder = root / name.lstrip("/")
        while True:
            yield folder, *files
            if folder in (root, folder.parent):
                break
            folder = folder.parent
