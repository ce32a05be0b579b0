"""Forwards that run before they are called for, and what their bits depend on besides inputs and weights."""

from __future__ import annotations

import pickle
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from ...base.device import Backend
from ...base.layout import memory_of
from .arguments import Arguments
from .caller import Caller
from .lock import Traveller
from .passes import SharedPasses


class Speculation(threading.Thread):
    """A forward that runs in a thread of its own, in place of a thread that should call for it later."""

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
        super().__init__(name="group_offload forward", daemon=True)
        self._passes, self._alone, self._caller, self._traveller = passes, alone, caller, traveller
        self.arguments = arguments
        self.output: Any = None
        self.error: BaseException | None = None

    def start(self) -> None:
        try:
            super().start()
        except RuntimeError as error:  # the system has no more threads
            self.error = error
            self._passes.turns.disembark(self._traveller)

    def run(self) -> None:
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
            self._passes.leave()


def random_states(backend: Backend) -> tuple[bytes, bytes, object]:
    """The states of the generators that are used where none is given: Python's and NumPy's, torch's, and the device's."""
    numpy = sys.modules.get("numpy")
    host = pickle.dumps((random.getstate(), numpy and numpy.random.get_state(legacy=False)))
    return host, bytes(memory_of(torch.get_rng_state())), backend.generator_state()
