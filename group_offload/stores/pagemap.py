"""Which pages of a private mapping were written to: the kernel knows.

An edit through `.data` (what fusing a LoRA does) bumps no version counter. On a private mapping it leaves a page behind
that is present and no longer backed by the file. Linux 6.7 finds those with one ioctl (`PAGEMAP_SCAN`,
Documentation/admin-guide/mm/pagemap.rst: 0.1 ms for 256 MiB), older kernels through `/proc/self/pagemap` (1 ms).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import sys
from functools import cache

from .mapping import TwiceMapped

PAGE = os.sysconf("SC_PAGE_SIZE")
SLOW_SCAN_SECONDS = 1e-3
"""A scan takes longer than this only where somebody has read what is mapped: the kernel looks at pages that are there."""

_PAGEMAP_SCAN = 0xC0606610  # _IOWR('f', 16, struct pm_scan_arg)
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4
_MAX_REGIONS = 64

# Bits of one 64-bit entry of /proc/self/pagemap.
_ENTRY_PRESENT, _ENTRY_SWAPPED, _ENTRY_FILE = 1 << 63, 1 << 62, 1 << 61


def written_pages(address: int, num_bytes: int) -> list[tuple[int, int]] | None:
    """Byte ranges, relative to `address`, of the pages of a private file mapping that hold something of their own.

    Args:
        address: where the mapping starts (page-aligned).
        num_bytes: its length.

    Returns:
        Ranges (start, end) in ascending order, page-aligned; None where this system does not tell.
    """
    end = -(-num_bytes // PAGE) * PAGE
    fd = _open_pagemap()
    if fd is None:
        return None
    try:
        return _scan(fd, address, end)
    except OSError:
        return _read_entries(fd, address, end)


@cache
def tells_writes() -> bool:
    """Whether this system tells which pages of memory that is mapped twice were written to: tried out, once."""
    try:
        memory = TwiceMapped(2 * PAGE)
    except (OSError, AttributeError):
        return False
    shared, private = memory.shared, memory.private
    address = ctypes.addressof(private)
    shared[0], shared[PAGE] = b"a", b"b"
    before = private[0], written_pages(address, 2 * PAGE)
    private[PAGE] = b"c"
    after = shared[PAGE], written_pages(address, 2 * PAGE)
    return before == (b"a", []) and after == (b"b", [(PAGE, 2 * PAGE)])


def _scan(fd: int, address: int, length: int) -> list[tuple[int, int]]:
    regions = (ctypes.c_uint64 * (3 * _MAX_REGIONS))()
    found = []
    start = address
    while start < address + length:
        request = bytearray(
            struct.pack(
                "12Q",
                96,  # size of this struct
                0,  # flags
                start,
                address + length,
                0,  # walk_end: filled in by the kernel
                ctypes.addressof(regions),
                _MAX_REGIONS,
                0,  # max_pages: no limit
                _IS_FILE,  # inverted: the bits below ask for "not file"
                _IS_FILE,  # all of these
                _IS_PRESENT | _IS_SWAPPED,  # and one of these
                _IS_FILE,
            )
        )
        count = fcntl.ioctl(fd, _PAGEMAP_SCAN, request)
        found += [(regions[3 * i] - address, regions[3 * i + 1] - address) for i in range(count)]
        start = struct.unpack_from("Q", request, 32)[0]
    return found


def _read_entries(fd: int, address: int, length: int) -> list[tuple[int, int]]:
    num_pages = length // PAGE
    raw = os.pread(fd, num_pages * 8, address // PAGE * 8)
    found: list[tuple[int, int]] = []
    for page, entry in enumerate(memoryview(raw).cast("Q")):
        if entry & (_ENTRY_PRESENT | _ENTRY_SWAPPED) and not entry & _ENTRY_FILE:
            if found and found[-1][1] == page * PAGE:
                found[-1] = (found[-1][0], (page + 1) * PAGE)
            else:
                found.append((page * PAGE, (page + 1) * PAGE))
    return found


@cache
def _open_pagemap() -> int | None:
    """A descriptor of this process's page map, opened once. A forked child must not use its parent's."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    os.register_at_fork(after_in_child=_open_pagemap.cache_clear)
    return fd
