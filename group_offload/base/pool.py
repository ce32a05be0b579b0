"""The threads of the process that read files and fill memory. They own nothing. A forked child starts its own.

[Note: Interrupts]
Ctrl-C may raise between any two steps of a caller here, also while the caller waits or starts a thread. So no lock is used that
such an exception could leave taken, and no count is kept that it could leave wrong. The calls of a queue happen as a whole or
not at all, the first thread that claims a task has it, and each thread puts itself on the list. `concurrent.futures` leaves its
locks taken.

Where no thread can be started, the calling thread does the work.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterable
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from .system import num_cores, on_fork

T = TypeVar("T")

MIN_THREADS, MAX_THREADS = 4, 16
"""A disk is fast only with several reads at once, however few cores there are."""


def num_threads() -> int:
    """The number of threads that read at once: the cores of the process, within limits beyond which more bring nothing."""
    return max(MIN_THREADS, min(MAX_THREADS, num_cores()))


def num_copy_threads() -> int:
    """The number of threads that copy RAM at once. More would slow down the thread that launches compute, and each other."""
    return max(MIN_THREADS, num_threads() * 3 // 4)


class Task(Generic[T]):
    """Work for the pool. It keeps all objects that the work needs, memory too, until it is done or withdrawn."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._claims: dict[str, object] = {}
        """Under "by": the thread of the pool that does the work, or another object if a caller does it or has withdrawn it."""
        self._waiting: list[SimpleQueue[None]] = []
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._is_over = False

    @property
    def is_done(self) -> bool:
        """Whether no thread does the work, or ever will."""
        by = self._claims.get("by")
        return self._is_over or not (by is None or isinstance(by, _Thread))

    def begin(self) -> None:
        """Give the work to the pool. If the pool has no thread and gets none, do it here. If this raises, call `withdraw`."""
        pool = _pool
        pool.tasks.put(self)
        is_started = pool.start_thread()
        if pool.is_closed or not (is_started or pool.threads):
            self.do(object())

    def withdraw(self) -> None:
        """Keep every thread from beginning the work."""
        self._claim(object())
        if self.is_done:
            self._work = None

    def wait(self) -> None:
        """Return once no thread does the work. Begin or withdraw it first."""
        if self.is_done:
            return  # nobody would take what wakes it off the list again
        woken: SimpleQueue[None] = SimpleQueue()
        self._waiting.append(woken)
        while not self.is_done:
            woken.get()

    def result(self) -> T:
        """The result of work that is done. An error of the work is raised."""
        if self._error is not None:
            raise self._error
        return self._result[0]

    def do(self, by: object) -> None:
        """Do the work, unless another thread has claimed it."""
        work = self._work
        if not self._claim(by) or work is None:
            return
        try:
            self._result.append(work())
        except BaseException as error:
            self._error = error
            if not isinstance(by, _Thread) and not isinstance(error, Exception):
                raise  # an interrupt of the caller
        self._work = work = None
        self._is_over = True
        for woken in self._waiting:
            woken.put(None)

    def _claim(self, by: object) -> bool:
        return self._claims.setdefault("by", by) is by


class _Pool:
    def __init__(self) -> None:
        self.tasks: SimpleQueue[Task[Any] | None] = SimpleQueue()
        """The last one is None."""
        self.threads: list[_Thread] = []
        """The threads that take tasks. Only the thread itself adds and removes itself."""
        self.is_closed = False

    def start_thread(self) -> bool:
        """Start one more thread if there are not enough, and return whether one was started."""
        if self.is_closed or len(self.threads) >= num_threads():
            return False
        try:
            _Thread(self).start()
        except (RuntimeError, MemoryError):  # no more threads, or the interpreter is about to exit
            return False
        return True

    def close(self) -> None:
        """End all threads at exit, while they can still end: later, Python would end them in the middle of torch's C++."""
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
                return  # two callers have started threads at the same moment
            while (task := pool.tasks.get()) is not None:
                task.do(self)
                del task  # while it waits for the next one, this thread would keep what the task keeps
            pool.tasks.put(None)  # for the others
        finally:
            pool.threads.remove(self)


_pool = _Pool()


def on_pool(work: Callable[..., T], *args: object) -> Task[T]:
    """Begin `work(*args)` on the pool.

    Only an interrupt makes this raise. The work is under way then, or never begins, and the caller does not wait for it.
    """
    task = Task(partial(work, *args))
    try:
        task.begin()
    except BaseException:
        task.withdraw()
        raise
    return task


def signal() -> Task[None]:
    """A task without work, which threads wait for until another one calls `do`. (`threading.Event` is written in Python: Ctrl-C
    may leave its lock taken.)"""
    return Task(lambda: None)


def run_all(works: Iterable[Callable[[], T]]) -> list[T]:
    """Do all works, and return the results. If one raises, the first error is raised once no thread is at any of them.

    The same holds for an interrupt: works that have not begun never begin, and those that have begun are waited for. A second
    interrupt breaks that wait too, so a work has to own the memory that it writes to.
    """
    tasks = [Task(work) for work in works]
    try:
        for task in tasks:
            task.begin()
        for task in tasks:
            task.wait()
        return [task.result() for task in tasks]
    except BaseException:
        for task in tasks:
            task.withdraw()
        for task in tasks:
            task.wait()
        raise


def _forget() -> None:
    global _pool
    _pool = _Pool()


atexit.register(lambda: _pool.close())
on_fork(after_in_child=_forget)
