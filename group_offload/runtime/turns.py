"""Models that share weights take turns: a weight can be in the slot of only one model at a time.

Each model has a lock that its passes hold. Models that share a parameter or a buffer have one lock in common. The thread
that holds the lock can take it again, so one model may be called inside of the other. A model gets its lock before other
threads can see that it is offloaded, and keeps it: so no thread waits for a lock that has gone out of use.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

from torch import nn

from ..base.system import forked_free, on_fork
from ..errors import StateError


class Member(Protocol):
    """The passes of an offloaded model."""

    root: nn.Module
    lock: Any
    """The reentrant lock that a pass holds."""

    def enter_child(self) -> None:
        """See `_enter_child`."""

    @property
    def is_gone(self) -> bool:
        """Whether the model is gone."""

    @property
    def runs_here(self) -> bool:
        """Whether this thread is in the middle of a call of the model."""


_lock = forked_free(threading.RLock())
_engines: weakref.WeakSet[Member] = weakref.WeakSet()


def join(engine: Member) -> None:
    """Give `engine`, which no other thread knows yet, the lock of the models that it shares weights with.

    Raises:
        StateError: Those models have several locks, or one of them is in the middle of a forward in this thread.
    """
    with _lock:
        others = _sharing(engine)
        if any(other.runs_here for _, other in others):
            raise StateError(
                f"{_shared(engine, others)}, which is in the middle of a forward. Offload this one afterwards."
            )
        if len({id(other.lock) for _, other in others}) > 1:
            raise StateError(
                f"{_shared(engine, others)}, and others are of models that do not take turns with it. Call "
                f"remove_group_offloading() on those, and offload this one first."
            )
        for _, other in others:
            engine.lock = other.lock
        _engines.add(engine)


def leave(engine: Member) -> None:
    with _lock:
        _engines.discard(engine)


def check(engine: Member) -> None:
    """Check that all models that share weights with `engine` have its lock.

    Raises:
        StateError: The module has come to share weights with a model that has another lock.
    """
    with _lock:
        others = [(name, other) for name, other in _sharing(engine) if other.lock is not engine.lock]
    if others:
        raise StateError(
            f"{_shared(engine, others)}, which was offloaded by itself. Models that share weights take turns, which is "
            f"settled when they are offloaded: call remove_group_offloading() on one of the two, and offload it again."
        )


def _sharing(engine: Member) -> list[tuple[str, Member]]:
    """Other models that share a weight with `engine`, each after the name of one such weight."""
    mine = {id(tensor): name for name, tensor in _tensors_of(engine.root)}
    found = []
    for other in _engines:
        if other is not engine and not other.is_gone:
            for _, tensor in _tensors_of(other.root):
                if id(tensor) in mine:
                    found.append((mine[id(tensor)], other))
                    break
    return found


def _shared(engine: Member, others: list[tuple[str, Member]]) -> str:
    name, other = others[0]
    return f"{name} of {type(engine.root).__name__} is a weight of {type(other.root).__name__} too"


def _tensors_of(module: nn.Module) -> list[tuple[str, object]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _enter_child() -> None:
    """A fork has one thread. A model that another thread was running begins again from its weights."""
    for engine in [*_engines]:
        engine.enter_child()


on_fork(after_in_child=_enter_child)
