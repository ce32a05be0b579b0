"""How much RAM there is to take, and what that means for files: which are locked, cached, or read directly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import psutil

from .control_groups import memory_rooms
from .files import FileImage, locked

LOCKED_SHARE = 0.5
"""Of the RAM that is available, so much is locked without anybody asking for it."""
_MAX_LIBRARY_BYTES = 512 << 20
"""Pages of files that a process has touched, but for weights: code. More than this is not code."""
_RESERVE_BYTES = 1 << 30
"""Left alone, whoever asks: the process itself and the system have to live too."""


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


def choose_ways(images: Sequence[FileImage], *, may_lock: bool) -> list[FileImage]:
    """Decide how each image is read. See [Note: Ways to read a file].

    Returns:
        The images to lock, once they are in the page cache: all, if half of the RAM that is available is enough for them
        (the other half stays with everybody else); else none.
    """
    num_bytes = sum(image.layout.num_bytes for image in images)
    if not num_bytes:
        return []
    available = available_ram()
    to_lock = may_lock and num_bytes <= available * LOCKED_SHARE
    # The same share of images is cached in each pass. If all were, none would be: each would drive out the next.
    share = min(1.0, available / 2 / num_bytes)
    credit = 0.0
    for image in images:
        credit += share * image.layout.num_bytes
        image.is_direct = not to_lock and credit < image.layout.num_bytes * (1 - 1e-9)
        if image.is_direct:
            image.source.avoid_readahead()
        else:
            credit -= image.layout.num_bytes
    return [image for image in images if image.layout.num_bytes] if to_lock else []
