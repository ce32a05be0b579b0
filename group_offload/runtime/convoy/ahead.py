"""Forwards that run before they are called for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .arguments import Arguments
from .caller import Caller
from .helpers import Helpers
from .lock import Traveller
from .passes import SharedPasses


class _Company(threading.local):
    is_there = False


_company = _Company()


@contextmanager
def in_company(size: int) -> Iterator[None]:
    """While a forward of this thread shares a pass with `size` - 1 others."""
    before = _company.is_there
    _company.is_there = before or size > 1
    try:
        yield
    finally:
        _company.is_there = before


def is_in_company() -> bool:
    """Whether a forward of this thread shares a pass. A model inside goes alone: the others wait for this thread's turn."""
    return _company.is_there


class Ahead:
    """A forward that runs in another thread, in place of a thread that should call for it later."""

    def __init__(
        self,
        passes: SharedPasses,
        helpers: Helpers,
        alone: Callable[..., Any],
        caller: Caller,
        traveller: Traveller,
        arguments: Arguments,
    ) -> None:
        """
        Args:
            alone: The call of the module, for a thread that is a traveller's.
        """
        self.arguments = arguments
        self.traveller = traveller
        self.output: Any = None
        self.error: BaseException | None = None
        self._passes = passes
        self._helpers = helpers
        self._work: tuple[Callable[..., Any], Caller] | None = alone, caller
        self._done = threading.Lock()
        self._done.acquire()
        self._is_given = False
        self._claims: dict[str, str] = {}
        """Under "by" who has the forward: a helper, or the caller, who has not given it away. (Ctrl-C may come in between.)"""

    def start(self) -> None:
        try:
            self._helpers.begin(self._run, self._done)
            self._is_given = True
        except RuntimeError as error:  # the system has no more threads
            self.error = error
            self._withdraw()

    def _withdraw(self) -> bool:
        """Keep the helper from beginning. False if it has begun."""
        if self._claims.setdefault("by", "caller") != "caller":
            return False
        self._passes._turns.disembark(self.traveller)
        return True

    def join(self, timeout: float = -1) -> None:
        """Wait until the forward is over, if it was started."""
        if (self._is_given or not self._withdraw()) and self._done.acquire(timeout=timeout):
            self._done.release()

    def _run(self) -> None:
        if self._claims.setdefault("by", "helper") != "helper":
            return
        assert self._work is not None
        alone, caller = self._work
        self._passes._turns.embark(self.traveller)
        try:
            given = self.arguments.given()
            if given is not None:
                with in_company(self.traveller.convoy.size):
                    self.output = caller.run(lambda: alone(*given[0], **given[1]))
                if not self.arguments.are_unchanged(*given):
                    self.error = RuntimeError("it has changed its inputs")
                elif caller.has_set_variables:
                    self.error = RuntimeError("it has set a context variable")
            else:
                self.error = RuntimeError("a tensor is gone")
        except BaseException as error:
            self.error = error.with_traceback(None)  # frames keep activations alive
        finally:
            self._work = None
            self._passes.leave(self.traveller)


def drop(ahead: Sequence[Any]) -> None:
    """Let results go whose latents are gone: nobody can call for them any more."""
    for reference in ahead:
        found = reference()
        if found is not None:
            found.output, found.error = None, found.error or ReferenceError("the latents are gone")
