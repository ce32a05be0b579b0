"""The threads that read and fill memory: whatever interrupts their callers, work is done once or never, and waited for."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from group_offload.base import pool
from group_offload.base.layout import memory_of
from group_offload.base.mapping import TwiceMapped
from group_offload.base.pool import run_all
from group_offload.base.reading import read_into

from ..interrupts import Strike, contained
from ..support.reading import num_threads
from ..support.tuning import tune

MIB = 1 << 20


@pytest.fixture(autouse=True)
def fresh_pool() -> Iterator[None]:
    """Without any threads. Those of this test end with it."""
    pool._forget()
    yield
    pool._pool.close()
    pool._forget()


def test_results_come_in_order_and_errors_after_all_are_done() -> None:
    assert run_all(partial(int, number) for number in range(100)) == list(range(100))
    done: list[int] = []

    def work(number: int) -> None:
        done.append(number)
        if number % 3 == 1:
            raise OSError(number, "no")

    with pytest.raises(OSError, match="no") as error:
        run_all(partial(work, number) for number in range(30))
    assert error.value.errno == 1 and sorted(done) == list(range(30))
    assert num_threads() <= pool.num_threads()


@contextmanager
def refusing_starts(refused: Callable[[int], bool]) -> Iterator[None]:
    """`Thread.start` fails whenever `refused` says so of its number."""
    start, numbers = threading.Thread.start, itertools.count()

    def refuse(thread: threading.Thread) -> None:
        if refused(next(numbers)):
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield


def read(path: Path) -> None:
    """A file, by as many threads as there are."""
    target = torch.zeros(8 * MIB, dtype=torch.uint8)
    fd = os.open(path, os.O_RDONLY)
    try:
        assert read_into(fd, memory_of(target), 5) == target.numel()
    finally:
        os.close(fd)
    assert bytes(target.numpy()) == path.read_bytes()[5 : 5 + target.numel()]


def fill(path: Path) -> None:
    """Memory that is mapped twice."""
    content = path.read_bytes()
    memory = TwiceMapped(len(content))
    memory.write([(0, memoryview(content))])
    memory.seal()
    assert bytes(memory.private) == content


every_use = pytest.mark.parametrize("use", [read, fill])


@pytest.fixture
def content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tune(monkeypatch, min_mapped_piece_bytes=MIB)
    path = tmp_path / "content"
    path.write_bytes(os.urandom(8 * MIB + 77))
    return path


@pytest.mark.parametrize("can_start", [True, False])
@every_use
def test_an_interrupt_at_any_line(use: Callable[[Path], None], can_start: bool, content: Path) -> None:
    """Afterwards no thread is at the work, and the next one is done. (One inside of `ThreadPoolExecutor.submit` leaves a lock
    taken: every later read would hang.)
    """
    num_interrupts, line = 0, 1
    while True:
        with refusing_starts(lambda number: not can_start):
            running: list[int] = []
            preadv, pwrite = os.preadv, os.pwrite

            def counted(call: Callable[..., int], *args: Any, running: list[int] = running) -> int:
                running.append(1)
                try:
                    return call(*args)
                finally:
                    running.pop()

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, "preadv", partial(counted, preadv))
                patch.setattr(os, "pwrite", partial(counted, pwrite))
                strike = Strike(line, path=pool.__file__)
                try:
                    with strike:
                        contained(partial(use, content))
                except KeyboardInterrupt:
                    num_interrupts += 1
                assert not running
            assert num_threads() <= pool.num_threads() + 1
            if not strike.where:
                break
        if num_interrupts % 10 == 0:
            use(content)
        if num_interrupts % 50 == 0:  # threads are started anew
            pool._pool.close()
            pool._forget()
        line += 1 + line // 80  # the loop over the parts comes again and again
    assert num_interrupts > 80
    use(content)


def test_memory_is_nobody_elses_while_it_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two interrupts: the caller is gone, and so is its tensor, but its memory is not free before the last read ends."""
    path = tmp_path / "file"
    path.write_bytes(bytes(8 * MIB))
    go, preadv = threading.Event(), os.preadv
    num_waits = 0

    def slow(*args: Any) -> int:
        assert go.wait(60)
        return preadv(*args)

    def interrupted(task: Any) -> None:
        nonlocal num_waits
        num_waits += 1
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "preadv", slow)
    target = torch.zeros(8 * MIB, dtype=torch.uint8)
    is_alive = weakref.ref(target)
    fd = os.open(path, os.O_RDONLY)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(pool.Task, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                read_into(fd, memory_of(target), 0)
        assert num_waits == 2
        del target
        assert is_alive() is not None
        go.set()
        pool._pool.close()
        assert is_alive() is None
    finally:
        go.set()
        os.close(fd)


def test_work_that_comes_when_the_interpreter_exits() -> None:
    """Whoever comes before the pool ends has threads; whoever comes later does the work alone. None of it hangs."""
    script = """
import atexit, os, threading, time
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # in one piece: threads print at once
def late():
    from group_offload.base.pool import on_pool
    say("late", on_pool(lambda: threading.current_thread() is threading.main_thread()).result())
atexit.register(late)
from group_offload.base.pool import on_pool, run_all
atexit.register(lambda: say("sum", sum(run_all([lambda: 1] * 20))))
slow = on_pool(time.sleep, 0.2)
on_pool(say, "ended")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert sorted(done.stdout.splitlines()) == ["ended", "late True", "sum 20"]
