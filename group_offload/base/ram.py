"""How much RAM there is to take."""

from __future__ import annotations

import weakref
from pathlib import Path

import psutil

from .control_groups import memory_rooms

_MAX_LIBRARY_BYTES = 512 << 20
"""Pages of files that a process has touched, but for weights: code. More than this is not code."""
_RESERVE_BYTES = 1 << 30
"""Left alone, whoever asks: the process itself and the system have to live too."""


class _Locked:
    """Bytes of files that this process has page-locked. The kernel still counts these pages as reclaimable."""

    def __init__(self) -> None:
        self._sizes: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()

    @property
    def num_bytes(self) -> int:
        return sum([*self._sizes.values()])

    def add(self, lock: object, num_bytes: int) -> None:
        """They count until the lock goes."""
        self._sizes[lock] = num_bytes


locked = _Locked()


def available_ram() -> int:
    """Bytes that this process may take without anybody having to swap. What the page cache can give up counts.

    The system's own estimate, or less if a control group that the process is in (a container) is nearer to its limit;
    and less what is page-locked in the page cache, which both take for what can be given up.
    """
    return max(0, min([int(psutil.virtual_memory().available), *memory_rooms()]) - locked.num_bytes)


def ram_in_use() -> int:
    """RAM that this process takes, without weights in the page cache: views of files, and what is page-locked there."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("RssAnon", "RssShmem", "RssFile"):
            found[name] = int(value.split()[0]) << 10
    of_files = max(0, found.get("RssFile", 0) - locked.num_bytes)
    return found.get("RssAnon", 0) + found.get("RssShmem", 0) + min(of_files, _MAX_LIBRARY_BYTES)


def fits(num_bytes: int) -> bool:
    """Whether RAM can be given to so many bytes of weights, for as long as they are offloaded."""
    return num_bytes + _RESERVE_BYTES <= available_ram()
