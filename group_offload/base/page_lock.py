"""Memory that is page-locked, so that a device copies from it asynchronously."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from .device import Backend


class PageLock:
    """Memory that is page-locked until `release`, or until nothing refers to this object any more.

    A module that is dropped without `remove()` therefore leaves no page locked, and a release that was interrupted is
    done again. (At interpreter exit the driver is gone already, and the pages go with the process.)
    """

    def __init__(self, memory: torch.Tensor, wait: Callable[[], None]) -> None:
        self._wait, self._memory = wait, memory
        self._undo: list[Callable[[], None]] = []
        # The finalizer holds the memory, so that it is unlocked before it is unmapped. A driver that is told too late takes
        # whatever is mapped to these addresses next for locked memory.
        weakref.finalize(self, _release, self._undo, wait, memory).atexit = False

    @classmethod
    def take(
        cls, backend: Backend, memory: torch.Tensor, wait: Callable[[], None], *, read_only: bool = False
    ) -> PageLock | None:
        """Lock `memory`; None if the device refuses.

        Args:
            wait: A function that returns once no copy is on its way: the pages stay locked until then.
            read_only: Whether the device only ever reads the memory.
        """
        lock = cls(memory, wait)
        if backend.pin(memory, lock._undo, read_only=read_only):
            return lock
        lock._undo.clear()
        return None

    def release(self) -> None:
        """Unlock the memory. Repeated calls do nothing."""
        _release(self._undo, self._wait, self._memory)


def _release(undo: list[Callable[[], None]], wait: Callable[[], None], memory: torch.Tensor) -> None:
    while undo:
        wait()
        undo[0]()
        undo.clear()
