"""Files that are read into the page cache before they are needed, while the drive has nothing else to do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from ...base.pool import Task, num_threads, on_pool
from ...base.ram import available_ram
from ...base.tuning import tuning
from ...errors import GroupFileError
from ...stores.files import FileBlob
from ...stores.source import SourceFile

_RESERVE_BYTES = 1 << 30
"""RAM that is left free."""


class CacheReads:
    """Reads blobs into the page cache, in small steps. Its owner waits for the last step before it closes the files.

    Only blobs are read that passes read through the page cache: where RAM is scarce, or a budget says so, these are few.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[SourceFile, int, int]] = deque()
        """What is to be read: a file, the first byte, and how many."""
        self._tasks: list[Task[None]] = []

    def __del__(self) -> None:
        with suppress(AttributeError):  # `__init__` was interrupted
            self.stop()  # the model was dropped

    def plan(self, blobs: Iterable[FileBlob], beside_bytes: int) -> None:
        """Read these blobs from now on, as far as the page cache has room for them and for `beside_bytes`."""
        self.stop()
        if not (blobs := [*blobs]):
            return  # asking what is available may take the kernel milliseconds, in which the device waits
        room = available_ram() - _RESERVE_BYTES - beside_bytes
        steps: deque[tuple[SourceFile, int, int]] = deque()
        for blob in blobs:
            room -= blob.layout.num_bytes
            if room < 0:
                break
            for piece in blob.pieces:
                for start in range(0, piece.num_bytes, tuning().cache_read_bytes):
                    size = min(tuning().cache_read_bytes, piece.num_bytes - start)
                    steps.append((blob.source, piece.position + start, size))
        self._steps = steps

    def go_on(self, is_idle: Callable[[], bool]) -> bool:
        """Read on with half of the threads, until `is_idle()` is false. Returns whether there is more to read."""
        self._tasks = [task for task in self._tasks if not task.is_done]
        while len(self._tasks) < min(len(self._steps), num_threads() // 2) and is_idle():
            self._tasks.append(on_pool(_read, self._steps, is_idle))
        return bool(self._steps)

    def stop(self) -> None:
        """Begin no more reads."""
        self._steps.clear()

    def wait(self) -> None:
        """Return once none of the reads is under way."""
        self.stop()
        for task in self._tasks:
            task.wait()
        self._tasks = []

    def reset_after_fork(self) -> None:
        """Forget reads of the parent's threads, in a child process."""
        self._steps, self._tasks = deque(), []


def _read(steps: deque[tuple[SourceFile, int, int]], is_idle: Callable[[], bool]) -> None:
    buffer = memoryview(bytearray(tuning().cache_read_bytes))
    # The pass that needs the file raises the error of it. Another thread may have taken the last step.
    with suppress(GroupFileError, IndexError):
        while is_idle():
            source, position, num_bytes = steps.popleft()
            source.bring_to_cache(buffer[:num_bytes], position)
