"""Asks the kernel which pages of a private mapping were written to.

An edit through `.data` (fusing a LoRA makes such edits) bumps no version counter. On a private mapping it leaves a page behind
that is present and no longer backed by the file. Linux 6.7 finds those with one ioctl (`PAGEMAP_SCAN`,
Documentation/admin-guide/mm/pagemap.rst: 0.1 ms for 256 MiB), older kernels through `/proc/self/pagemap` (1 ms).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct

from .mapping import TwiceMapped

PAGE = os.sysconf("SC_PAGE_SIZE")

_PAGEMAP_SCAN = 0xC0606610  # _IOWR('f', 16, struct pm_scan_arg)
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4
_MAX_REGIONS = 64
_REQUEST = struct.Struct("12Q")
"""`struct pm_scan_arg`."""
_WORD = struct.Struct("Q")
_START, _WALK_END = 16, 32
"""The offsets of `start` and `walk_end` in the request."""

_PASSES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR}
"""The errors of a moment: the next try may succeed."""

# Bits of one 64-bit entry of /proc/self/pagemap.
_ENTRY_PRESENT, _ENTRY_SWAPPED, _ENTRY_FILE = 1 << 63, 1 << 62, 1 << 61


def written_pages(address: int, num_bytes: int) -> list[tuple[int, int]] | None:
    """Do one scan: see `PageScan.written`."""
    return PageScan(address, num_bytes).written()


class PageScan:
    """Finds the written pages of a private file mapping, again and again. Not thread-safe.

    The request to the kernel is prepared once: all segments are scanned when a pass begins, while the device has nothing to do.
    """

    def __init__(self, address: int, num_bytes: int) -> None:
        """
        Args:
            address: where the mapping starts (page-aligned).
            num_bytes: its length.
        """
        self._address, self._length = address, -(-num_bytes // PAGE) * PAGE
        self._regions = (ctypes.c_uint64 * (3 * _MAX_REGIONS))()
        self._request = bytearray(_REQUEST.size)
        _REQUEST.pack_into(
            self._request,
            0,
            _REQUEST.size,
            0,  # flags
            address,
            address + self._length,
            0,  # walk_end: filled in by the kernel
            ctypes.addressof(self._regions),
            _MAX_REGIONS,
            0,  # max_pages: no limit
            _IS_FILE,  # inverted: the bits below ask for "not file"
            _IS_FILE,  # all of these
            _IS_PRESENT | _IS_SWAPPED,  # and one of these
            _IS_FILE,
        )

    def written(self) -> list[tuple[int, int]] | None:
        """
        Returns:
            The byte ranges (start, end) of the written pages, relative to the start of the mapping, ascending and page-aligned.
            None if the system does not tell, at all or at this moment. Then any page may be written.
        """
        try:
            fd = _open_pagemap()
            if fd is None:
                return None
            try:
                return self._scan(fd)
            except OSError:
                return _read_entries(fd, self._address, self._length)
        except OSError:
            return None

    def _scan(self, fd: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        start, end = self._address, self._address + self._length
        while start < end:
            _WORD.pack_into(self._request, _START, start)
            count = fcntl.ioctl(fd, _PAGEMAP_SCAN, self._request)
            for i in range(count):
                first, last, _ = self._regions[3 * i : 3 * i + 3]
                found.append((first - self._address, last - self._address))
            (start,) = _WORD.unpack_from(self._request, _WALK_END)
        return found


class _Known:
    """The facts that were found out about this process. A forked child starts anew: it may have other rights."""

    fd: int | None = None
    """The descriptor of the page map."""
    is_refused = False
    """Whether opening the page map was refused."""
    detects_writes: bool | None = None
    """What `can_detect_writes` found out."""

    @classmethod
    def forget(cls) -> None:
        if cls.fd is not None:
            os.close(cls.fd)
        cls.fd, cls.is_refused, cls.detects_writes = None, False, None


os.register_at_fork(after_in_child=_Known.forget)


def can_detect_writes() -> bool:
    """Whether the system tells which pages of memory that is mapped twice were written to. It is tried out once."""
    if _Known.detects_writes is None:
        try:
            _Known.detects_writes = _try_out()
        except (OSError, AttributeError) as error:
            if isinstance(error, OSError) and error.errno in _PASSES:
                return False
            _Known.detects_writes = False
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


def _read_entries(fd: int, address: int, length: int) -> list[tuple[int, int]]:
    num_bytes = length // PAGE * 8
    raw = os.pread(fd, num_bytes, address // PAGE * 8)
    if len(raw) < num_bytes:
        raise OSError(errno.EAGAIN, "the page map was not read to its end")
    found: list[tuple[int, int]] = []
    for page, entry in enumerate(memoryview(raw).cast("Q")):
        if entry & (_ENTRY_PRESENT | _ENTRY_SWAPPED) and not entry & _ENTRY_FILE:
            if found and found[-1][1] == page * PAGE:
                found[-1] = (found[-1][0], (page + 1) * PAGE)
            else:
                found.append((page * PAGE, (page + 1) * PAGE))
    return found


def _open_pagemap() -> int | None:
    """A descriptor of the page map of this process, opened once. None if the system refuses it for good.

    Raises:
        OSError: the system refuses it at this moment.
    """
    if _Known.fd is None and not _Known.is_refused:
        try:
            _Known.fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _PASSES:
                raise
            _Known.is_refused = True
    return _Known.fd
