"""Forwards that run before they are called for, and the threads that they run in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from .arguments import Arguments
from .caller import Caller
from .lock import Traveller
from .passes import SharedPasses


class Result:
    """What a forward has returned that nobody has called for yet."""

    def __init__(self, arguments: Arguments, output: Any = None) -> None:
        self.arguments = arguments
        self.output = output
        self.error: BaseException | None = None


class Speculation(Result):
    """A forward that runs in another thread, in place of a thread that should call for it later."""

    def __init__(
        self,
        passes: SharedPasses,
        alone: Callable[..., Any],
        caller: Caller,
        traveller: Traveller,
        arguments: Arguments,
    ) -> None:
        """
        Args:
            alone: The call of the module, for a thread that is a traveller's.
        """
        super().__init__(arguments)
        self._passes, self._alone, self._caller, self._traveller = passes, alone, caller, traveller
        self._done = threading.Lock()
        self._done.acquire()

    def start(self) -> None:
        try:
            _begin(self._run, self._done)
        except RuntimeError as error:  # the system has no more threads
            self.error = error
            self._passes.turns.disembark(self._traveller)
            self._done.release()

    def join(self) -> None:
        """Wait until the forward, which was started, is over."""
        self._done.acquire()

    def _run(self) -> None:
        if not self._passes.turns.embark(self._traveller):
            return
        try:
            given = self.arguments.given()
            if given is None:
                raise ReferenceError("a tensor is gone")
            self.output = self._caller.run(lambda: self._alone(*given[0], **given[1]))
            if not self.arguments.are_unchanged(*given):
                raise ValueError("it has changed its inputs")
        except BaseException as error:
            self.error = error.with_traceback(None)  # frames keep activations alive
        finally:
            self._passes.leave(self._traveller)


class _Helper(threading.Thread):
    """A thread that stays for later steps: cuBLAS makes a handle for each thread, which takes long.

    There are as many as forwards ever ran ahead at once, and one that an interrupt keeps from its work waits for ever.
    """

    def __init__(self) -> None:
        super().__init__(name="group_offload forward", daemon=True)
        self.works: SimpleQueue[tuple[Callable[[], None], threading.Lock]] = SimpleQueue()

    def run(self) -> None:
        while True:
            work, done = self.works.get()
            work()
            del work  # it keeps activations alive
            _idle.append(self)
            done.release()


_idle: list[_Helper] = []


def _begin(work: Callable[[], None], done: threading.Lock) -> None:
    """Do `work`, which does not raise, in another thread, and release `done` then."""
    helper = None
    while _idle and (helper is None or not helper.is_alive()):
        helper = _idle.pop()
    if helper is None or not helper.is_alive():  # none of those before a fork is
        helper = _Helper()
        helper.start()
    helper.works.put((work, done))
