"""Memory that threads give back. The system takes 0.15 s to unmap a GiB that is in RAM, and the caller has better to do."""

from __future__ import annotations

from .pool import Task, on_pool
from .system import on_fork

_under_way: list[Task[None]] = []


def release_later(objects: list[object]) -> None:
    """Drop the objects of a list on another thread. They have to be the last references to the memory."""
    _under_way[:] = [task for task in _under_way if not task.is_done]
    _under_way.append(on_pool(objects.clear))


def wait_for_releases() -> None:
    """Return once all memory of `release_later` is given back: whoever takes or measures RAM calls this before."""
    for task in [*_under_way]:  # other threads may wait too
        task.wait()


on_fork(after_in_child=_under_way.clear)  # the threads are the parent's
