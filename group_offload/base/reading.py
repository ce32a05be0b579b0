"""Read files into memory with several threads: one alone reads the page cache at a fifth of the speed of PCIe."""

from __future__ import annotations

import errno
import logging
import os
import threading
from functools import partial

from .pool import num_threads, run_all

logger = logging.getLogger("group_offload")

MIN_BYTES_PER_THREAD = 1 << 20
"""Less is not worth handing to another thread."""
BLOCK = 4096
"""Direct reads begin and end at multiples of this, in the file and in memory: no drive asks for more."""
_MAX_BYTES_PER_CALL = 16 << 20
_REFUSALS = {errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT, errno.ENOSYS, errno.ENOTTY}
"""What file systems, sandboxes and odd memory say to a way of reading that they do not have."""


def read_into(fd: int, target: memoryview, position: int) -> int:
    """Read from `position` on until `target` is full or the file ends.

    Returns:
        The bytes read, from the start of `target` without a gap.

    Raises:
        OSError: what the system said. No thread writes to `target` any more.
        KeyboardInterrupt: the same.
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


def read_part(fd: int, target: memoryview, position: int) -> int:
    """`read_into` by the calling thread alone."""
    done = 0
    try:
        while done < len(target):
            count = os.preadv(fd, [target[done : done + _MAX_BYTES_PER_CALL]], position + done)
            if count == 0:
                break
            done += count
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        _say_once(
            error.errno or 0, "Reads at a position are not possible here (%s): files are read one seek at a time."
        )
        done += _read_plainly(fd, target[done:], position + done)
    return done


def _read_plainly(fd: int, target: memoryview, position: int) -> int:
    """Without `preadv`, for what does not have it: a descriptor with a position of its own."""
    done = 0
    with open(f"/proc/self/fd/{fd}", "rb", buffering=0) as file:
        file.seek(position)
        while done < len(target):
            count = file.readinto(target[done : done + _MAX_BYTES_PER_CALL])
            if not count:
                break
            done += count
    return done


def read_around(fd: int, target: memoryview, position: int) -> int:
    """Direct: read the blocks that hold `position` and what follows it into `target`, which begins with the first one.

    Args:
        fd: opened with O_DIRECT.
        target: whole blocks, aligned to them.

    Returns:
        The bytes read. Fewer than `target` has where the file ends.

    Raises:
        OSError: what the system said.
    """
    start = position // BLOCK * BLOCK
    done = 0
    while done < len(target):
        count = os.preadv(fd, [target[done : done + _MAX_BYTES_PER_CALL]], start + done)
        done += count
        if count == 0 or count % BLOCK:  # the file ends inside a block
            break
    return done


def blocks_around(position: int, num_bytes: int) -> int:
    """The size of the blocks that hold so many bytes from `position` on."""
    return -(-(position + num_bytes) // BLOCK) * BLOCK - position // BLOCK * BLOCK


def open_direct(fd: int) -> int | None:
    """The same file, opened for direct reads; None where its file system has none."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        say_that_not_direct(error.errno or 0)
        return None


def refuses_direct(error: OSError) -> bool:
    """Whether a direct read failed because it was direct."""
    return error.errno in _REFUSALS


def say_that_not_direct(code: int) -> None:
    """Log that files are read through the page cache although RAM is scarce."""
    _say_once(code, "Direct reads are not possible here (%s): files are read through the page cache.")


_said: set[tuple[int, str]] = set()
_said_lock = threading.RLock()


def _say_once(code: int, message: str) -> None:
    """Log `message`, once a process, with what the system said."""
    with _said_lock:
        if (code, message) in _said:
            return
        _said.add((code, message))
    logger.warning(message, os.strerror(code))
