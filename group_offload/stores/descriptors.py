"""File descriptors that stay open between reads, as many as a process can spare."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import suppress
from typing import ClassVar

from ..base.reading import open_direct
from ..base.system import forked_free, max_descriptors
from ..base.tuning import tuning


class KeptDescriptors:
    """The descriptors of one file: they stay open, unless too many of other files do."""

    lock = forked_free(threading.RLock())
    """Guards all of them. A finalizer may call `close` of another one in a thread that holds the lock."""
    _all: ClassVar[weakref.WeakSet[KeptDescriptors]] = weakref.WeakSet()
    """The open ones are counted anew each time: an interrupt could leave a stored count wrong."""

    def __init__(self, fd: int) -> None:
        self.fd: int | None = None
        """The descriptor for reads through the page cache; None if it could not be kept."""
        self.has_no_direct = False
        """Whether the file cannot be opened for direct reads."""
        self._direct: int | None = None
        KeptDescriptors._all.add(self)
        with KeptDescriptors.lock, suppress(OSError):  # the process has no descriptor left
            if self._may_keep():
                self.fd = os.dup(fd)

    @staticmethod
    def num_open() -> int:
        """How many descriptors of this process are kept open."""
        return sum((each.fd is not None) + (each._direct is not None) for each in [*KeptDescriptors._all])

    @staticmethod
    def _may_keep() -> bool:
        limit = min(tuning().max_kept_open, max_descriptors() // 4)
        return KeptDescriptors.num_open() < limit

    def direct(self, fd: int) -> tuple[int, bool] | None:
        """A descriptor for direct reads of the file that `fd` belongs to, and whether it stays open.

        None if the file cannot be read directly.
        """
        if self.has_no_direct:
            return None
        with KeptDescriptors.lock:
            if self._direct is None:
                opened = open_direct(fd)
                if opened is None or self.fd is None or not self._may_keep():
                    self.has_no_direct = self.fd is not None and opened is None
                    return None if opened is None else (opened, False)
                self._direct = opened
            return self._direct, True

    def close(self) -> None:
        with KeptDescriptors.lock:
            fds = self.fd, self._direct
            # Forgotten before they are closed: another file may get these numbers, and an interrupt must not leave them here.
            self.fd = self._direct = None
            for fd in fds:
                if fd is not None:
                    os.close(fd)
