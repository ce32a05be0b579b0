"""Models that share weights take turns: a weight can be in the slot of only one model at a time.

Their passes have one reentrant lock in common, so that one model may be called inside of the other. A model gets its lock
before other threads can see that it is offloaded, and keeps it: so no thread waits for a lock that has gone out of use.
"""

from __future__ import annotations

import threading
import weakref

from torch import nn

from ..base.system import forked_free, on_fork
from ..errors import StateError
from .passes import Passes

_lock = forked_free(threading.RLock())
_all: weakref.WeakSet[Passes] = weakref.WeakSet()


def join(passes: Passes) -> None:
    """Give `passes`, which no other thread knows yet, the lock of the models that it shares weights with.

    Raises:
        StateError: Those models have several locks, or one of them is in the middle of a forward in this thread.
    """
    with _lock:
        others = _sharing(passes)
        if any(other.runs_here for other in others):
            raise StateError(f"{_shared(others)}, which is in the middle of a forward. Offload this one afterwards.")
        if len({id(other.lock) for other in others}) > 1:
            raise StateError(
                f"{_shared(others)}, and other weights are shared with models that run at the same time. Call "
                f"remove_group_offloading() on those, and offload this one first."
            )
        for other in others:
            passes.lock = other.lock
        _all.add(passes)


def check(passes: Passes) -> None:
    """Check that all models that share weights with `passes` have its lock.

    Raises:
        StateError: The module has come to share weights with a model that has another lock.
    """
    with _lock:
        others = {other: shared for other, shared in _sharing(passes).items() if other.lock is not passes.lock}
    if others:
        raise StateError(
            f"{_shared(others)}, which was offloaded before they shared it. Call remove_group_offloading() on one of the two, "
            f"and offload it again."
        )


def _sharing(passes: Passes) -> dict[Passes, str]:
    """Other models that share a weight with this one, and how one such weight is called in a message."""
    mine = {id(tensor): f"{name} of {passes.name}" for name, tensor in _tensors_of(passes.root)}
    found = {}
    for other in _all:
        root = None if other is passes or other.is_removed else Passes.root.of(other)
        shared = [] if root is None else [mine[id(each)] for _, each in _tensors_of(root) if id(each) in mine]
        if shared:
            found[other] = shared[0]
    return found


def _shared(others: dict[Passes, str]) -> str:
    other, name = next(iter(others.items()))
    return f"{name} is a weight of {other.name} too"


def _tensors_of(module: nn.Module) -> list[tuple[str, object]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _enter_child() -> None:
    """A fork has one thread. A model that another thread was running begins again from its weights."""
    for passes in [*_all]:
        passes.enter_child()


on_fork(after_in_child=_enter_child)
