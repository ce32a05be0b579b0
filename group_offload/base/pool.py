"""The process's threads for reading and filling memory. They own nothing; a forked child makes its own.

[Note: Interrupts]
Ctrl-C may raise between any two steps of a caller here, also while it waits or starts a thread. So nothing is guarded by a
lock that such an exception could leave taken, and nothing is counted that it could leave wrong: the queue's calls are whole
or have not happened, whoever claims a task first has it, and threads put themselves on the list. `concurrent.futures`
leaves its locks taken.

Where no thread can be started, the calling thread does the work.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")

MIN_THREADS, MAX_THREADS = 4, 16
"""A drive wants several reads at once, however few cores there are."""


def num_threads() -> int:
    """Threads that read at once: as many as the process may use, but not more than bring something."""
    return max(MIN_THREADS, min(MAX_THREADS, len(os.sched_getaffinity(0))))


class Task(Generic[T]):
    """Work for the pool. It holds all that it needs, memory too, until it is done or withdrawn."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._claims: dict[str, object] = {}
        """Who does it: a thread of the pool, or somebody else, who has done it by the time that others see it."""
        self._waiting: list[SimpleQueue[None]] = []
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._is_over = False

    @property
    def is_done(self) -> bool:
        """Whether nobody is at it, nor will be."""
        by = self._claims.get("by")
        return self._is_over or not (by is None or isinstance(by, _Thread))

    def begin(self) -> None:
        """Give it to the pool; do it here and now if the pool has no thread and gets none. If this raises, `withdraw`."""
        pool = _pool
        pool.tasks.put(self)
        is_started = pool.start_thread()
        if pool.is_closed or not (is_started or pool.threads):
            self.do(object())

    def withdraw(self) -> None:
        """Let nobody begin it any more."""
        self._claim(object())
        if self.is_done:
            self._work = None

    def wait(self) -> None:
        """Return once nobody is at it. Begin or withdraw it first."""
        woken: SimpleQueue[None] = SimpleQueue()
        self._waiting.append(woken)
        while not self.is_done:
            woken.get()

    def result(self) -> T:
        """What the work returned, once it is done. What it raised is raised."""
        if self._error is not None:
            raise self._error
        return self._result[0]

    def do(self, by: object) -> None:
        """Do the work, unless somebody else has claimed it."""
        work = self._work
        if not self._claim(by) or work is None:
            return
        try:
            self._result.append(work())
        except BaseException as error:
            self._error = error
            if not isinstance(by, _Thread) and not isinstance(error, Exception):
                raise  # it is an interrupt of the caller
        self._work = work = None
        self._is_over = True
        for woken in self._waiting:
            woken.put(None)

    def _claim(self, by: object) -> bool:
        return self._claims.setdefault("by", by) is by


class _Pool:
    def __init__(self) -> None:
        self.tasks: SimpleQueue[Task[Any] | None] = SimpleQueue()
        """None is the last thing in it."""
        self.threads: list[_Thread] = []
        """Those that take tasks. Each one alone puts itself here, and removes itself."""
        self.is_closed = False

    def start_thread(self) -> bool:
        """Whether one more was started, since there are not enough."""
        if self.is_closed or len(self.threads) >= num_threads():
            return False
        try:
            _Thread(self).start()
        except (RuntimeError, MemoryError):  # no more threads, or the interpreter is about to exit
            return False
        return True

    def close(self) -> None:
        """At exit, while threads can still end: later, Python would end them in the middle of torch's C++."""
        self.is_closed = True
        self.tasks.put(None)
        for thread in [*self.threads]:
            thread.join()


class _Thread(threading.Thread):
    def __init__(self, pool: _Pool) -> None:
        super().__init__(name="group_offload-io", daemon=True)
        self._pool = pool

    def run(self) -> None:
        pool = self._pool
        pool.threads.append(self)
        try:
            if pool.threads.index(self) >= num_threads():
                return  # two callers started one at once
            while (task := pool.tasks.get()) is not None:
                task.do(self)
                del task  # what it holds may go
            pool.tasks.put(None)  # for the others
        finally:
            pool.threads.remove(self)


_pool = _Pool()


def on_pool(work: Callable[..., T], *args: object) -> Task[T]:
    """Begin `work(*args)` on the pool.

    If this raises, which only an interrupt makes it do, the work is either under way or never begins: nobody waits for it.
    """
    task = Task(partial(work, *args))
    try:
        task.begin()
    except BaseException:
        task.withdraw()
        raise
    return task


def run_all(works: Iterable[Callable[[], T]]) -> list[T]:
    """Do all of it, and return the results. If a part of it raises, the first error is raised once no thread is at any of it.

    The same holds for an interrupt: what has not begun never does, and what has begun is waited for. A second interrupt
    breaks that wait too: so what a part writes to has to belong to it.
    """
    tasks = [Task(work) for work in works]
    try:
        for task in tasks:
            task.begin()
        return _results(tasks)
    except BaseException:
        _withdraw_all(tasks)
        raise


def begin_all(works: Iterable[Callable[[], T]]) -> list[Task[T]]:
    """The first half of `run_all`. If it raises, no thread is at any of it."""
    tasks = [Task(work) for work in works]
    try:
        for task in tasks:
            task.begin()
        return tasks
    except BaseException:
        _withdraw_all(tasks)
        raise


def finish_all(tasks: Sequence[Task[T]]) -> list[T]:
    """The second half of `run_all`."""
    try:
        return _results(tasks)
    except BaseException:
        _withdraw_all(tasks)
        raise


def _results(tasks: Sequence[Task[T]]) -> list[T]:
    for task in tasks:
        task.wait()
    return [task.result() for task in tasks]


def _withdraw_all(tasks: Sequence[Task[Any]]) -> None:
    for task in tasks:
        task.withdraw()
    for task in tasks:
        task.wait()


def _forget() -> None:
    global _pool
    _pool = _Pool()


atexit.register(lambda: _pool.close())
os.register_at_fork(after_in_child=_forget)
