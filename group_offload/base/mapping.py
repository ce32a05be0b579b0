"""Memory mappings as torch tensors.

Python's `mmap` module duplicates the descriptor of the file for the life of the mapping, and a model of a thousand groups would
use up the descriptors of a process. So the mappings are made by the `mmap` of the C library, and hold the file by themselves.

Systems other than Linux have `map_file` and `map_anonymous` alone, by Python's `mmap` module. There a file is mapped with a
descriptor of its own before Python 3.13.

(Once Python 3.13 is the oldest supported version, `mmap.mmap(..., trackfd=False)` can take the place of `_map`. `TwiceMapped`
needs the C library for MAP_FIXED in any case.)
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from . import system
from .pool import Task, on_pool, run_all
from .tuning import tuning

_libc: Any = None
if system.IS_LINUX:
    _libc = ctypes.CDLL(None, use_errno=True)
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    _libc.munmap.argtypes = _libc.munlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    _libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    _libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_MAP_FAILED = ctypes.c_void_p(-1).value

_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
_MAX_PIECES = 64
"""Each piece takes a file descriptor until it is filled."""

HUGE_PAGE = 2 << 20


@dataclass(frozen=True, slots=True)
class FileMapping:
    """One mapping of a file in this process, as the kernel shows it."""

    start: int
    end: int
    file_offset: int
    path: str
    """The present path, after a renaming too. It ends in " (deleted)" if the file has none. \\012 stands for a newline."""
    identity: tuple[str, int]
    """Device and inode. (On btrfs and overlayfs the device is another one than `fstat` gives.)"""
    is_private: bool


class FileMappings:
    """The mappings of files of this process, as they were when this was made."""

    def __init__(self) -> None:
        """
        Raises:
            OSError: the system does not tell now.
        """
        with open("/proc/self/maps", "rb") as maps:  # a path may be in no encoding at all
            self._lines = [line for line in maps.read().split(b"\n") if b"/" in line]
        self._starts = [int(line[: line.index(b"-")], 16) for line in self._lines]

    def at(self, address: int) -> FileMapping | None:
        """The mapping that holds `address`; None if it is not a mapping of a file."""
        index = bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        addresses, flags, offset, device, inode, *path = self._lines[index].split(None, 5)
        start, end = (int(each, 16) for each in addresses.split(b"-"))
        if address >= end or not path or not path[0].startswith(b"/"):
            return None
        identity = device.decode(), int(inode)
        return FileMapping(start, end, int(offset, 16), os.fsdecode(path[0]), identity, flags[3:4] == b"p")


def is_cut_off(address: int) -> bool:
    """Whether this byte of a mapping lies past the end of the file. To touch it would end the process (SIGBUS)."""
    if _libc is None:
        return False
    byte, one = ctypes.c_char(), ctypes.c_ulong(1)
    into, out_of = ((ctypes.c_size_t * 2)(at, 1) for at in (ctypes.addressof(byte), address))
    count = _libc.process_vm_readv(os.getpid(), into, one, out_of, one, 0)
    return count < 0 and ctypes.get_errno() == errno.EFAULT  # other errors say that the system does not answer


def map_file(fd: int, num_bytes: int, start: int = 0) -> Any:
    """A private, writable mapping of bytes of a file: a buffer that is unmapped with its last user.

    Writes stay in pages of this process. The file never changes.

    Args:
        start: the first byte of the file, a multiple of `mmap.ALLOCATIONGRANULARITY`.

    Raises:
        OSError: the system refuses the mapping.
    """
    if _libc is not None:
        return _map(fd, start, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE)
    options: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) and not system.IS_WINDOWS else {}
    try:
        return mmap.mmap(fd, num_bytes, access=mmap.ACCESS_COPY, offset=start, **options)
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error)) from error


def page_cache_of(fd: int, num_bytes: int) -> torch.Tensor:
    """A shared, read-only mapping of the first bytes of a file, as flat uint8: pages of the page cache.

    A tensor without memory where the system shows no page cache.

    Raises:
        OSError: the system refuses the mapping.
    """
    if _libc is None:
        with torch.inference_mode(False):
            return torch.empty(num_bytes, dtype=torch.uint8, device="meta")
    mapping = _map(fd, 0, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED) if num_bytes else None
    return flat_view(mapping, 0, num_bytes)


class TwiceMapped:
    """Memory that is mapped twice: shared, and private.

    Writes to the shared mapping are seen in the private one. Writes to the private mapping stay in pages that are the mapping's
    alone (the kernel can tell which, see `pagemap`), until `forget_writes`.
    """

    def __init__(self, num_bytes: int, names: Sequence[str] = ()) -> None:
        """
        Args:
            names: The `names` of such memory of another process, of the same size. Then this is the same memory.

        Raises:
            OSError: the system has no such memory, or the other process does not let this one see it.
        """
        self.shared, self.private = reserve(num_bytes), reserve(num_bytes)
        whole_pages = -(-num_bytes // _MAX_PIECES // mmap.PAGESIZE) * mmap.PAGESIZE
        self._piece_bytes = max(tuning().min_mapped_piece_bytes, whole_pages)
        self._files: list[Any] = []
        # Several files in memory, side by side: threads that write to the same file take turns in the kernel.
        for index, start in enumerate(range(0, num_bytes, self._piece_bytes)):
            size = min(self._piece_bytes, num_bytes - start)
            fd = system.open_shared_file(names[index]) if names else system.new_shared_file(size)
            self._files.append(system.own_descriptor(fd))
            for buffer, flags in ((self.shared, mmap.MAP_SHARED), (self.private, mmap.MAP_PRIVATE)):
                address = ctypes.addressof(buffer) + start
                _mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags | _MAP_FIXED, fd, 0)

    @property
    def names(self) -> list[str]:
        """What another process finds the memory by, until `seal`."""
        return [system.name_of_shared_file(file.fileno()) for file in self._files]

    def write(self, runs: Sequence[tuple[int, memoryview]]) -> None:
        """Write runs of bytes, each an offset and its content, with several threads; take memory for all the others.

        This is three times as fast as through the mapping, where the kernel would first clear each page that is touched.

        Raises:
            OSError: the system has no memory left.
        """
        pieces: dict[int, list[tuple[int, memoryview]]] = {piece: [] for piece in range(len(self._files))}
        for start, content in runs:
            done = 0
            while done < len(content):
                piece, offset = divmod(start + done, self._piece_bytes)
                size = min(len(content) - done, self._piece_bytes - offset)
                pieces[piece].append((offset, content[done : done + size]))
                done += size
        run_all(partial(self._write_piece, piece, contents) for piece, contents in pieces.items())

    def seal(self) -> None:
        """Close the files: `write` is not called any more."""
        self._files.clear()

    def _write_piece(self, piece: int, contents: list[tuple[int, memoryview]]) -> None:
        fd = self._files[piece].fileno()
        for offset, content in contents:
            done = 0
            while done < len(content):
                done += os.pwrite(fd, content[done:], offset + done)
        start = piece * self._piece_bytes
        size = min(self._piece_bytes, len(self.shared) - start)
        if sum(len(content) for _, content in contents) < size:
            os.posix_fallocate(fd, 0, size)  # a page that is touched when none is left ends the process
        populate(flat_view(self.shared, start, size))


def map_anonymous(num_bytes: int) -> Any:
    """Zeroed memory of exactly `num_bytes` (whole pages), in huge pages where the kernel has them."""
    # Without the flags, which Windows lacks, a forked child would write to the same memory.
    options = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, max(num_bytes, 1), **options)
    if num_bytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel that was built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def cached_bytes(address: int, num_bytes: int) -> int:
    """The bytes of a file mapping, from a whole page on, that are in the page cache. Nothing is read to find out.

    Raises:
        OSError: the system does not tell.
    """
    if _libc is None:
        raise system.missing()
    num_pages = -(-num_bytes // mmap.PAGESIZE)
    is_there = bytearray(num_pages)
    found = (ctypes.c_char * num_pages).from_buffer(is_there)
    if _libc.mincore(address, num_bytes, ctypes.addressof(found)):
        raise _last_error()
    return min(num_bytes, sum(is_there) * mmap.PAGESIZE)  # bit 0 of each byte; the others are 0


def forget_writes(address: int, num_bytes: int) -> None:
    """Drop what was written to whole pages of a private mapping: they show the mapped bytes again."""
    if _libc.madvise(address, num_bytes, mmap.MADV_DONTNEED):
        error = _last_error()
        # A process may have pinned all of its memory (mlockall), and pinned pages are not dropped.
        if error.errno != errno.EINVAL or _libc.munlock(address, num_bytes):
            raise error
        if _libc.madvise(address, num_bytes, mmap.MADV_DONTNEED):
            raise _last_error()


def populate(memory: torch.Tensor, advice: int = _MADV_POPULATE_READ) -> None:
    """Bring the pages of mapped memory into RAM, and map them: locking them is quick then.

    Where this is refused (before Linux 5.14), locking does it.
    """
    _advise(memory, advice)


def touch_all(memory: torch.Tensor) -> list[Task[None]]:
    """Let threads give memory from `map_anonymous` its pages: locking it is quick then. It would do that with one thread."""
    step, touch = tuning().touched_bytes, partial(populate, advice=_MADV_POPULATE_WRITE)
    return [on_pool(touch, memory[start : start + step]) for start in range(0, memory.numel(), step)]


def expect_single_pages(memory: torch.Tensor, *, expected: bool) -> None:
    """Let the kernel read no more than the pages of a mapped file that are touched; or, as always, pages ahead too."""
    if _libc is not None:
        _advise(memory, mmap.MADV_RANDOM if expected else mmap.MADV_NORMAL)


def _advise(memory: torch.Tensor, advice: int) -> None:
    if _libc is not None and memory.numel():
        start = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        _libc.madvise(start, memory.data_ptr() + memory.nbytes - start, advice)


def trim_heap() -> None:
    """Give memory that was freed inside of the heap of the C library back to the system.

    glibc keeps freed blocks of up to 32 MiB, and most weights are smaller.
    """
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)


def flat_view(buffer: Any, offset: int, num_bytes: int) -> torch.Tensor:
    """`num_bytes` of a mapping as a flat uint8 tensor. Its storage is not shared, and keeps the mapping alive."""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    with torch.inference_mode(False):
        return torch.frombuffer(buffer, dtype=torch.uint8, count=num_bytes, offset=offset)


def _map(fd: int, start: int, num_bytes: int, protection: int, flags: int) -> Any:
    return _owned(_mmap(None, num_bytes, protection, flags, fd, start), num_bytes)


def reserve(num_bytes: int) -> Any:
    """Addresses (zeros on other systems than Linux), with nothing mapped there yet: they take no memory, and cannot be read."""
    if _libc is None:
        return map_anonymous(num_bytes)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return _owned(_mmap(None, num_bytes, _PROT_NONE, flags, -1, 0), num_bytes)


def _owned(address: int, num_bytes: int) -> Any:
    buffer = (ctypes.c_char * num_bytes).from_address(address)
    # Not at exit: tensors of the mapping may be read until the very end, and the mapping goes with the process.
    weakref.finalize(buffer, _libc.munmap, address, num_bytes).atexit = False
    return buffer


def _mmap(address: int | None, num_bytes: int, protection: int, flags: int, fd: int, start: int) -> int:
    found: int = _libc.mmap(address, num_bytes, protection, flags, fd, start)
    if found == _MAP_FAILED:
        raise _last_error()
    return found


def _last_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
