"""Reads files into memory with several threads: one thread alone reads the page cache at a fifth of the speed of PCIe."""

from __future__ import annotations

import errno
import logging
import os
from functools import partial
from typing import Any

from .pool import num_threads, run_all
from .system import open_past_cache, read_at

logger = logging.getLogger("group_offload")

MIN_BYTES_PER_THREAD = 1 << 20
"""Fewer bytes are not worth handing to another thread."""
BLOCK = 4096
"""Direct reads begin and end at multiples of this size, in the file and in memory. No disk asks for a larger one."""
_MAX_BYTES_PER_CALL = 16 << 20
_REFUSALS = {errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT, errno.ENOSYS, errno.ENOTTY}
"""The errors of file systems, sandboxes and odd memory that do not support direct reads."""


def read_into(fd: int, target: memoryview, position: int) -> int:
    """Read from `position` on until `target` is full or the file ends.

    Returns:
        The number of bytes read. They lie at the start of `target`, without a gap.

    Raises:
        OSError: the system refused the read. No thread writes to `target` any more.
        KeyboardInterrupt: the read was interrupted. No thread writes to `target` any more.
    """
    num_parts = min(num_threads(), len(target) // MIN_BYTES_PER_THREAD)
    if num_parts < 2:
        return read_part(fd, target, position)
    size = -(-len(target) // num_parts)
    starts = range(0, len(target), size)
    parts = run_all(partial(read_part, fd, target[start : start + size], position + start) for start in starts)
    done = 0
    for start, part in zip(starts, parts, strict=True):
        if start != done:
            break
        done += part
    return done


def read_part(fd: int, target: memoryview, position: int, unit: int = 1) -> int:
    """Do the same as `read_into` in the calling thread alone.

    Args:
        unit: `BLOCK` for direct reads, which begin and end at blocks. One that ends inside of a block has met the file's end.
    """
    done = 0
    while done < len(target):
        count = read_at(fd, target[done : done + _MAX_BYTES_PER_CALL], position + done)
        done += count
        if count == 0 or count % unit:
            break
    return done


def blocks_around(position: int, num_bytes: int) -> int:
    """The size of the whole blocks that hold `num_bytes` bytes from `position` on."""
    return -(-(position + num_bytes) // BLOCK) * BLOCK - position // BLOCK * BLOCK


def open_direct(fd: int) -> Any:
    """The same file, opened for direct reads: see `own_descriptor`. None if its file system has no direct reads."""
    try:
        return open_past_cache(fd)
    except OSError as error:
        warn_no_direct_io(error.errno or 0)
        return None


def refuses_direct(error: OSError) -> bool:
    """Whether a direct read failed because it was direct."""
    return error.errno in _REFUSALS


_said: dict[int, object] = {}
"""The error codes that were logged, and what tells their first threads from later ones."""


def warn_no_direct_io(code: int) -> None:
    """Log, once a process for each error, that files are read through the page cache although RAM is scarce."""
    mine = object()
    if _said.setdefault(code, mine) is mine:
        logger.warning(
            "Direct reads aren't possible here (%s): files are read through the page cache, slower if RAM is short.",
            os.strerror(code),
        )
