"""Memory that is pinned, so that a device copies from it asynchronously."""

from __future__ import annotations

import logging
import platform
import threading
import weakref
from collections.abc import Callable

import torch

from .device import Backend
from .system import IS_WINDOWS, forked_free, ram_of_machine
from .text import describe_bytes

logger = logging.getLogger("group_offload")


class PinnedPages:
    """Memory that is pinned until `release`, or until nothing refers to this object any more.

    A module that is dropped without `remove()` therefore leaves no page pinned, and a release that was interrupted is
    done again. (At interpreter exit the driver is gone already, and the pages go with the process.)
    """

    def __init__(self, memory: torch.Tensor, wait: Callable[[], None]) -> None:
        self._wait, self._memory = wait, memory
        self._undo: list[Callable[[], None]] = []
        # The finalizer holds the memory, so that it is unpinned before it is unmapped. A driver that is told too late takes
        # whatever is mapped to these addresses next for pinned memory.
        weakref.finalize(self, _release, self._undo, wait, memory).atexit = False

    @classmethod
    def take(
        cls, backend: Backend, memory: torch.Tensor, wait: Callable[[], None], *, read_only: bool = False
    ) -> PinnedPages | None:
        """Lock `memory`; None if the device refuses.

        Args:
            wait: A function that returns once no copy is on its way: the pages stay pinned until then.
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


class PinLimit:
    """How much RAM may be pinned for the weights of one set-up. After its first refusal the device is asked no more.

    Each refusal takes time, and a system that has given its last pinned memory fails elsewhere: in other programs, and
    in copies that torch makes.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._guard = forked_free(threading.RLock())  # memory is pinned by threads of the pool
        self._num_left = careful_bytes()
        self.num_pinned = 0
        """Bytes that were pinned in place."""
        self.num_by_driver = 0
        """Bytes that the driver allocated and pinned."""
        self._num_refused = 0

    @property
    def was_refused(self) -> bool:
        return self._num_refused > 0

    def lock(self, memory: torch.Tensor, wait: Callable[[], None]) -> PinnedPages | None:
        """Lock `memory` in place; None if it stays unpinned. See `PinnedPages.take`."""
        with self._guard:
            if memory.numel() <= self._num_left:
                found = PinnedPages.take(self._backend, memory, wait)
                if found is not None:
                    self._num_left -= memory.numel()
                    self.num_pinned += memory.numel()
                    return found
            self._num_left = 0
            return None

    def allocate(self, num_bytes: int) -> torch.Tensor | None:
        """Memory that the driver allocates and locks, where it locks none in place; None if there is none."""
        with self._guard:
            memory = None if self.num_pinned or self.was_refused else self._backend.empty_pinned(num_bytes)
            if memory is None:
                self._num_refused += num_bytes
            else:
                self.num_by_driver += num_bytes
            return memory

    def give_back(self, num_bytes: int) -> None:
        """Memory that `lock` pinned was unpinned again."""
        self.num_pinned -= num_bytes
        self._num_refused += num_bytes

    def report(self) -> None:
        """Say in the log what could not be pinned, if anything."""
        num_pinned = self.num_pinned + self.num_by_driver
        if self.num_by_driver:
            logger.warning(
                "Couldn't pin %s in place on %s; falling back to driver-allocated pinned memory, which can take up to "
                "twice the RAM.",
                describe_bytes(self.num_by_driver),
                self._backend.device,
            )
        if self.was_refused:
            logger.warning(
                "Pinned only %s of %s for %s; the rest is copied through a staging buffer, which is slower. Raise "
                "`ulimit -l`, or the container's or WSL2's memory.",
                describe_bytes(num_pinned),
                describe_bytes(num_pinned + self._num_refused),
                self._backend.device,
            )


def is_wsl2() -> bool:
    return "microsoft" in platform.release().lower()


def careful_bytes() -> float:
    """What is asked for at most. Windows gives half of the memory, and fails later if it was asked for more, as under WSL2."""
    return ram_of_machine("total") / 2 if IS_WINDOWS or is_wsl2() else float("inf")


def _release(undo: list[Callable[[], None]], wait: Callable[[], None], memory: torch.Tensor) -> None:
    while undo:
        wait()
        undo[0]()
        undo.clear()
