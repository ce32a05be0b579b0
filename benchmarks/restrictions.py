"""Systems that refuse what is fast: older kernels, and those with little page-locked memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

_LOCKED_BYTES = 512 << 20


@contextmanager
def _no_scans() -> Iterator[None]:
    """As before Linux 6.7, and where a sandbox forbids it: the first look finds out, and later ones do as it says."""
    from group_offload.base.pagemap import _Known

    with mock.patch.object(_Known, "lacks_scan", True):
        yield


@contextmanager
def _little_locked() -> Iterator[None]:
    """As under WSL2, and in containers: so much memory is page-locked, and no more."""
    from group_offload.base.device import AcceleratorBackend

    locked: dict[int, int] = {}
    pin = AcceleratorBackend.pin

    def pin_some(self: Any, memory: torch.Tensor, undo: list[Callable[[], None]], *, read_only: bool = False) -> bool:
        if sum(locked.values()) + memory.numel() > _LOCKED_BYTES or not pin(self, memory, undo, read_only=read_only):
            return False
        address, unlock = memory.data_ptr(), undo.pop()
        locked[address] = memory.numel()

        def unlock_it() -> None:
            unlock()
            locked.pop(address, None)

        undo.append(unlock_it)
        return True

    with (
        mock.patch.object(AcceleratorBackend, "pin", pin_some),
        mock.patch.object(AcceleratorBackend, "empty_pinned", return_value=None),
    ):
        yield


RESTRICTIONS: dict[str, Callable[[], Any]] = {"no PAGEMAP_SCAN": _no_scans, "512 MiB locked": _little_locked}
"""By name: a context manager that puts it in force in this process."""
