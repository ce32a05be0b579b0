"""Asks the kernel which pages of a private mapping were written to.

An edit through `.data` (fusing a LoRA makes such edits) bumps no version counter. On a private mapping it leaves a page behind
that is present and no longer backed by the file. Linux 6.7 finds those with one ioctl (`PAGEMAP_SCAN`,
Documentation/admin-guide/mm/pagemap.rst: 0.1 ms for 256 MiB), older kernels through `/proc/self/pagemap` (1 ms on one thread).
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import struct
from collections.abc import Sequence
from functools import partial

import torch

from .mapping import TwiceMapped
from .pool import run_all
from .system import ioctl, on_fork, read_at

logger = logging.getLogger("group_offload")

PAGE = mmap.PAGESIZE

_PAGEMAP_SCAN = 0xC0606610  # _IOWR('f', 16, struct pm_scan_arg)
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4
_MAX_REGIONS = 64
_LOOK_BYTES = 256 << 20
"""What one thread looks at, where entries are read."""
_REQUEST = struct.Struct("12Q")
"""`struct pm_scan_arg`."""
_WALK_END = 4
"""The place of `walk_end` in it."""

_PASSES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR}
"""The errors of a moment: the next try may succeed."""
_NO_SCAN = {errno.ENOTTY, errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP}
"""The errors of a kernel that has no `PAGEMAP_SCAN`, or forbids it."""

# Bits of one 64-bit entry of /proc/self/pagemap, which torch has as a signed number.
_ENTRY_THERE = (1 << 62) - (1 << 63)
"""The page is present, or swapped out."""
_ENTRY_FILE = 1 << 61

Ranges = list[tuple[int, int]]


def written_pages(address: int, num_bytes: int) -> Ranges | None:
    """The written pages of a private mapping that starts at `address`, the start of a page.

    Returns:
        The byte ranges (start, end) of the written pages, relative to `address`, ascending and page-aligned. None if the system
        does not tell, at all or at this moment. Then any page may be written.
    """
    length = -(-num_bytes // PAGE) * PAGE
    try:
        fd = _open_pagemap()
        if fd is None:
            return None
        if not _Known.lacks_scan:
            try:
                return _scan(fd, address, length)
            except OSError as error:
                _Known.lacks_scan = error.errno in _NO_SCAN
        if length <= _LOOK_BYTES:
            return _read_entries(fd, address, length)
        starts = range(0, length, _LOOK_BYTES)
        parts = run_all(
            partial(_read_entries, fd, address + start, min(_LOOK_BYTES, length - start)) for start in starts
        )
        return [
            (start + first, start + last) for start, part in zip(starts, parts, strict=True) for first, last in part
        ]
    except OSError:
        return None


def _scan(fd: int, address: int, length: int) -> Ranges:
    regions = (ctypes.c_uint64 * (3 * _MAX_REGIONS))()
    found: Ranges = []
    start, end = address, address + length
    while start < end:
        request = bytearray(
            _REQUEST.pack(
                _REQUEST.size,
                0,  # flags
                start,
                end,
                start,  # walk_end: filled in by the kernel
                ctypes.addressof(regions),
                _MAX_REGIONS,
                0,  # max_pages: no limit
                _IS_FILE,  # inverted: the bits below ask for "not file"
                _IS_FILE,  # all of these
                _IS_PRESENT | _IS_SWAPPED,  # and one of these
                _IS_FILE,
            )
        )
        for i in range(ioctl(fd, _PAGEMAP_SCAN, request)):
            first, last, _ = regions[3 * i : 3 * i + 3]
            found.append((first - address, last - address))
        walked = _REQUEST.unpack(request)[_WALK_END]
        if walked <= start:
            raise OSError(errno.ENOTTY, "the kernel has looked at nothing")
        start = walked
    return found


class _Known:
    """The facts that were found out about this process. A forked child starts anew: it may have other rights."""

    fd: int | None = None
    """The descriptor of the page map."""
    is_refused = False
    """Whether opening the page map was refused."""
    lacks_scan = False
    """Whether `PAGEMAP_SCAN` was refused."""
    detects_writes: bool | None = None
    """What `can_detect_writes` found out."""

    @classmethod
    def forget(cls) -> None:
        if cls.fd is not None:
            os.close(cls.fd)
        cls.fd, cls.is_refused, cls.lacks_scan, cls.detects_writes = None, False, False, None


on_fork(after_in_child=_Known.forget)


def scans_quickly() -> bool:
    """Whether one call tells of each mapping (`PAGEMAP_SCAN`). Else threads read an entry for each page, if there are any."""
    return can_detect_writes() and not _Known.lacks_scan


def can_detect_writes() -> bool:
    """Whether the system tells which pages of memory that is mapped twice were written to. It is tried out once."""
    if _Known.detects_writes is None:
        try:
            _Known.detects_writes = _try_out()
        except (OSError, AttributeError) as error:
            if isinstance(error, OSError) and error.errno in _PASSES:
                return False
            _Known.detects_writes = False
        if not _Known.detects_writes:
            logger.warning(
                "/proc/self/pagemap isn't readable (gVisor? container without /proc?). Falling back to slower edit "
                "detection: no prefetch across forwards, and a sync after each."
            )
    return _Known.detects_writes


def _try_out() -> bool:
    if _open_pagemap() is None:
        return False
    memory = TwiceMapped(2 * PAGE)
    shared, private = memory.shared, memory.private
    address = ctypes.addressof(private)
    shared[0], shared[PAGE] = b"a", b"b"
    before = private[0], written_pages(address, 2 * PAGE)
    private[PAGE] = b"c"
    after = shared[PAGE], written_pages(address, 2 * PAGE)
    if before[1] is None or after[1] is None:
        raise OSError(errno.EAGAIN, "the page map cannot be read")
    return before == (b"a", []) and after == (b"b", [(PAGE, 2 * PAGE)])


_NOTHING = bytes(64 << 10)
"""Entries of pages that nobody has touched, as many as a processor's caches hold: so many are read at a time."""


def _read_entries(fd: int, address: int, length: int) -> Ranges:
    raw, num_entries = bytearray(_NOTHING), length // PAGE
    pages: list[int] = []
    for first in range(0, num_entries, len(raw) // 8):
        size = min(len(raw), (num_entries - first) * 8)
        if read_at(fd, memoryview(raw)[:size], (address // PAGE + first) * 8) < size:
            raise OSError(errno.EAGAIN, "the page map was not read to its end")
        if raw == _NOTHING:  # which is nearly always so, and quick to see
            continue
        with torch.inference_mode(False):
            entries = torch.frombuffer(raw, dtype=torch.int64, count=size // 8)
            is_written = ((entries & _ENTRY_THERE) != 0) & ((entries & _ENTRY_FILE) == 0)
            pages += (torch.nonzero(is_written).flatten() + first).tolist()
    return merged([(page * PAGE, (page + 1) * PAGE) for page in pages])


def merged(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """The union of `ranges`, as ranges that neither overlap nor touch."""
    found: Ranges = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _open_pagemap() -> int | None:
    """A descriptor of the page map of this process, opened once. None if the system refuses it for good.

    Raises:
        OSError: the system refuses it at this moment.
    """
    if _Known.fd is None and not _Known.is_refused:
        try:
            _Known.fd = os.open("/proc/self/pagemap", os.O_RDONLY)
        except OSError as error:
            if error.errno in _PASSES:
                raise
            _Known.is_refused = True
    return _Known.fd
