"""Memory mappings as torch tensors.

The `mmap` module duplicates the file's descriptor for the life of the mapping: a model of a thousand groups would use up
a process's descriptors. So file mappings are made by the C library's `mmap`, and hold the file by themselves.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any

import torch

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value

HUGE_PAGE = 2 << 20


def map_file(fd: int, num_bytes: int) -> Any:
    """A private, writable mapping of the first `num_bytes` of a file: a buffer that is unmapped with its last user.

    What is written stays in pages of this process; the file never changes.

    Raises:
        OSError: the system refuses the mapping.
    """
    address = _libc.mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, fd, 0)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    buffer = (ctypes.c_char * num_bytes).from_address(address)
    # Not at exit: tensors of the mapping may be read until the very end, and it goes with the process.
    weakref.finalize(buffer, _libc.munmap, address, num_bytes).atexit = False
    return buffer


def map_anonymous(num_bytes: int) -> Any:
    """Zeroed memory of exactly `num_bytes` (whole pages), in huge pages where the kernel has them."""
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= HUGE_PAGE:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def flat_view(buffer: Any, offset: int, num_bytes: int) -> torch.Tensor:
    """`num_bytes` of a mapping as a uint8 tensor with a storage of its own, which keeps the mapping alive."""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    with torch.inference_mode(False):
        return torch.frombuffer(buffer, dtype=torch.uint8, count=num_bytes, offset=offset)
