"""Forwards that run before they are called for, and what their bits depend on besides inputs and weights."""

from __future__ import annotations

import pickle
import random
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import torch

from .arguments import Arguments
from .caller import Caller
from .passes import InterleavedPasses
from .turn_lock import Participant


class Speculation:
    """A forward that runs in another thread, in place of a thread that should call for it later."""

    def __init__(
        self,
        passes: InterleavedPasses,
        alone: Callable[..., Any],
        caller: Caller,
        participant: Participant,
        arguments: Arguments,
    ) -> None:
        self._passes, self._alone, self._caller, self._participant = passes, alone, caller, participant
        self.arguments = arguments
        self.output: Any = None
        self.error: BaseException | None = None
        self._is_over = SimpleQueue[None]()
        self._worker: _Worker | None = None
        """The thread that the forward was given to, until it is over."""

    def start(self) -> None:
        try:
            worker = _idle_worker()
            worker.forwards.put(self)
            self._worker = worker
        except RuntimeError as error:  # the system has no more threads
            self.error = error
            self._passes.turns.leave(self._participant)

    def join(self) -> None:
        """Wait until the forward is over, if it was started."""
        while self._worker is not None and self._worker.is_alive():  # in a forked child it is not
            with suppress(Empty):
                self._is_over.get(timeout=1)
                self._worker = None

    def run(self) -> None:
        if not self._passes.turns.join(self._participant):
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


class _Worker(threading.Thread):
    """A thread for one forward after another. It stays, because libraries keep handles and plans of kernels for each thread.
    There are as many as there ever were forwards at once."""

    def __init__(self) -> None:
        super().__init__(name="group_offload forward", daemon=True)
        self.forwards = SimpleQueue[Speculation]()

    def run(self) -> None:
        while True:
            forward = self.forwards.get()
            is_over = forward._is_over
            try:
                forward.run()
                del forward  # it keeps an output alive
                _idle.append(self)
            finally:
                is_over.put(None)


_idle: list[_Worker] = []


def _idle_worker() -> _Worker:
    while _idle:
        worker = _idle.pop()
        if worker.is_alive():  # in a forked child none is
            return worker
    worker = _Worker()
    worker.start()
    return worker


class RandomStates:
    """The states of the generators that are used where none is given: Python's, torch's, NumPy's, and the device's."""

    def __init__(self, device: torch.device) -> None:
        numpy = sys.modules.get("numpy")
        self._host = pickle.dumps((random.getstate(), numpy and numpy.random.get_state(legacy=False)))
        self._device = device
        self._torch = [torch.get_rng_state()]
        if device.type != "cpu":
            self._torch.append(torch.get_device_module(device).get_rng_state(device))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RandomStates) or self._host != other._host:
            return False
        return all(map(torch.equal, self._torch, other._torch))

    __hash__ = None  # type: ignore[assignment]

    def restore(self) -> None:
        """Let the generators go on from here again."""
        of_python, of_numpy = pickle.loads(self._host)
        random.setstate(of_python)
        if of_numpy is not None:
            sys.modules["numpy"].random.set_state(of_numpy)
        torch.set_rng_state(self._torch[0])
        for state in self._torch[1:]:
            torch.get_device_module(self._device).set_rng_state(state, self._device)


def others_may_draw() -> bool:
    """Whether there are threads, besides this one and those that are known, which may draw random numbers meanwhile."""
    here = threading.current_thread()
    others = [each for each in threading.enumerate() if each is not here and not each.name.startswith("group_offload")]
    return any(type(each).__name__ != "TMonitor" for each in others)  # that of tqdm draws none
