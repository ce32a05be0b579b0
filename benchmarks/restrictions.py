"""Systems that refuse what is fast: older kernels, and those with little page-locked memory."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

_LOCKED_BYTES = 512 << 20


def _no_scans() -> None:
    """As before Linux 6.7, and where a sandbox forbids it."""

    def refuse(*_: Any) -> int:
        raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))

    mock.patch.object(fcntl, "ioctl", refuse).start()


def _little_locked() -> None:
    """As under WSL2, and in containers: so much memory is page-locked, and no more."""
    from group_offload.base.device import AcceleratorBackend

    locked: dict[int, int] = {}
    pin = AcceleratorBackend.pin

    def pin_some(
        self: AcceleratorBackend, memory: torch.Tensor, undo: list[Callable[[], None]], *, read_only: bool = False
    ) -> bool:
        address = memory.data_ptr()
        if sum(locked.values()) + memory.numel() > _LOCKED_BYTES or not pin(self, memory, undo, read_only=read_only):
            return False
        locked[address] = memory.numel()
        unlock = undo.pop()
        undo.append(lambda: (unlock(), locked.pop(address, None))[0])
        return True

    mock.patch.object(AcceleratorBackend, "pin", pin_some).start()
    mock.patch.object(AcceleratorBackend, "empty_pinned", return_value=None).start()


RESTRICTIONS: dict[str, Callable[[], None]] = {"no PAGEMAP_SCAN": _no_scans, "512 MiB locked": _little_locked}
"""By name: what puts it in force for the rest of the process."""
