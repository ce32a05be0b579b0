"""The plainest reader of files, which others are compared with, and what the page cache holds of them."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

READ_BYTES = 16 << 20
_BLOCK = 4096
_FEW = 0.005
"""So much of the files may stay in the page cache: a model that was loaded has the beginnings of its files mapped."""
_CACHESTAT = 451
"""The number of the system call, on every architecture (Linux 6.5)."""


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def size_of(files: Sequence[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def read_all(files: Sequence[Path], num_threads: int, *, direct: bool) -> float:
    """Seconds that it takes to read all of the files with so many threads, 16 MiB at a time, each into the same memory.

    Args:
        direct: past the page cache.

    Raises:
        OSError: this file system has no direct reads, say.
    """
    # A mapping of its own for each thread: aligned to pages, as direct reads have it, and touched before time is taken.
    buffers = [mmap.mmap(-1, READ_BYTES) for _ in range(num_threads)]
    for buffer in buffers:
        buffer.write(bytes(READ_BYTES))
    fds = [os.open(file, os.O_RDONLY | (os.O_DIRECT if direct else 0)) for file in files]
    lock = threading.Lock()
    parts = ((fd, at) for fd in fds for at in range(0, os.fstat(fd).st_size, READ_BYTES))

    def take() -> Iterator[tuple[int, int]]:
        while True:
            with lock:
                part = next(parts, None)
            if part is None:
                return
            yield part

    def read(buffer: mmap.mmap) -> None:
        with memoryview(buffer) as memory:
            for fd, at in take():
                end = min(at + READ_BYTES, os.fstat(fd).st_size)
                while at < end:
                    count = os.preadv(fd, [memory[: -(-(end - at) // _BLOCK) * _BLOCK]], at)
                    # A direct read goes on at a block.
                    count = count if at + count >= end else count // _BLOCK * _BLOCK
                    if not count:
                        raise OSError(f"the file cannot be read beyond byte {at}")
                    at += count

    try:
        start = time.perf_counter()
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(read, buffers))
        return time.perf_counter() - start
    finally:
        for fd in fds:
            os.close(fd)
        for buffer in buffers:
            buffer.close()


def warm(files: Sequence[Path], num_threads: int = 8) -> None:
    """Bring the files into the page cache."""
    if files and (cached_bytes(files) or 0) < size_of(files):  # or the kernel does not tell
        read_all(files, num_threads, direct=False)


def drive_speed(files: Sequence[Path], num_threads: int, most_bytes: int) -> float | None:
    """Bytes a second past the page cache, of so much of the files; None if the file system has no direct reads."""
    chosen: list[Path] = []
    for file in files:
        if size_of(chosen) < most_bytes:
            chosen.append(file)
    try:
        return size_of(chosen) / read_all(chosen, num_threads, direct=True)
    except OSError:
        return None


def drop_page_cache(files: Sequence[Path], *, may_drop_all: bool) -> str:
    """Let the page cache forget these files. Returns how.

    Args:
        may_drop_all: if that leaves some of them, let it forget everything (which only root may do).
    """
    for file in files:
        with suppress(OSError), file.open("rb") as opened:
            os.fsync(opened.fileno())  # what is not on the drive yet cannot be dropped
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    left = cached_bytes(files)
    if not may_drop_all or (left is not None and left < _FEW * size_of(files)):
        return "posix_fadvise"
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError as error:
        return f"posix_fadvise only: {error}"
    return "drop_caches"


def cached_bytes(files: Sequence[Path]) -> int | None:
    """How much of the files the page cache holds; None if this kernel does not tell."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = 0
    for file in files:
        with file.open("rb") as opened:
            span = ctypes.create_string_buffer(struct.pack("QQ", 0, 0))  # all of it
            found = ctypes.create_string_buffer(5 * 8)
            if libc.syscall(_CACHESTAT, opened.fileno(), span, found, 0):
                return None
            pages += struct.unpack_from("Q", found)[0]
    return pages * mmap.PAGESIZE


def transferred() -> dict[str, int]:
    """Bytes that this process has had read from drives, and written to them; {} where the kernel does not tell."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return {}
    fields = dict(line.split(": ") for line in lines)
    return {name: int(fields[name]) for name in ("read_bytes", "write_bytes") if name in fields}
