"""Threads that make forwards in place of a caller's thread. They stay from step to step.

A thread's first product of matrices on a GPU takes long: cuBLAS makes a handle for each thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

_END_SECONDS = 1.0


class Helpers:
    """The threads of one module. A forked child starts its own."""

    def __init__(self) -> None:
        self.idle: list[_Helper] = []
        self.is_closed = False

    def begin(self, work: Callable[[], None], done: threading.Lock) -> None:
        """Do `work`, which does not raise, in another thread, and release `done` then.

        Raises:
            RuntimeError: the system has no more threads.
        """
        self.is_closed = False
        helper = None
        while self.idle and (helper is None or not helper.is_alive()):
            helper = self.idle.pop()
        if helper is None or not helper.is_alive():  # none of those before a fork is
            helper = _Helper(self)
            helper.start()
        helper.works.put((work, done))

    def close(self) -> None:
        """End all threads, once their work is done."""
        self.is_closed = True
        ending = []
        while self.idle:
            ending.append(self.idle.pop())
            ending[-1].works.put(None)
        for helper in ending:
            helper.join(_END_SECONDS)


class _Helper(threading.Thread):
    def __init__(self, helpers: Helpers) -> None:
        super().__init__(name="group_offload forward", daemon=True)
        self.works: SimpleQueue[tuple[Callable[[], None], threading.Lock] | None] = SimpleQueue()
        self._helpers = helpers

    def run(self) -> None:
        while (found := self.works.get()) is not None:
            work, done = found
            work()
            del work, found  # they keep activations alive
            if self._helpers.is_closed:
                done.release()
                return
            self._helpers.idle.append(self)
            done.release()
