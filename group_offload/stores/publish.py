"""How a file in a folder of group files gets its name, and how processes keep out of each other's way there.

[Note: Write protocol]
1. A new file under a temporary name (`.NAME.PID.RANDOM.tmp`): no link is followed and nothing is opened that was there.
2. Its content, then fsync: a name never leads to bytes that a crash of the machine can take away.
3. Its name, by link(2), which never replaces what has that name; manifests, whose name says whose they are, by rename(2).
4. fsync of the folder; the temporary name goes.
A process that dies at any of these steps leaves a whole file or none under the name, and at most a temporary one.

[Note: Locks]
All are flock(2): the kernel releases them when a process ends, however it ends. They save work, and nothing is wrong
without them, where a file system has none.
- The folder itself, exclusively: who sets a model up there, or prunes. The second one finds the first one's files. That
  needs no file of its own, no right to write, and works on network file systems between the processes of one machine.
- A file under its temporary name, exclusively: somebody is writing it.
- A group file, shared: it is in use. A mapping keeps the lock of the descriptor that it was made with, so this lasts
  exactly as long as weights rest there, and takes no descriptor.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from .base import memory_of

logger = logging.getLogger("group_offload")

_CHUNK_BYTES = 16 << 20
_POLL_SECONDS = 0.05
_SECONDS_UNTIL_SAID = 1.0


def publish(path: Path, header: bytes, data: Iterable[torch.Tensor], on_written: Callable[[int], None]) -> int | None:
    """Write a file and give it its name once it is durable. See [Note: Write protocol].

    Returns:
        A descriptor of the file, marked as in use, or None if the name was taken meanwhile.

    Raises:
        OSError: the file cannot be written; nothing is left behind.
    """
    with _temporary(path) as (temporary, fd):
        _write_all(fd, memoryview(header))
        for piece in data:
            _write_all(fd, memory_of(piece))
            on_written(piece.numel())
        os.fsync(fd)
        is_named = _name_exclusively(temporary, path)
        if is_named:
            _sync_folder(path.parent)
    if not is_named:
        os.close(fd)
        return None
    mark_in_use(fd)
    return fd


def publish_anew(path: Path, content: bytes) -> None:
    """Write a small file and put it in the place of what has its name. See [Note: Write protocol].

    Raises:
        OSError: the file cannot be written; what was there is there.
    """
    with _temporary(path) as (temporary, fd):
        _write_all(fd, memoryview(content))
        os.fsync(fd)
        os.replace(temporary, path)
        _sync_folder(path.parent)
    os.close(fd)


def open_to_read(name: str | Path, dir_fd: int | None = None) -> int:
    """Open a regular file, and nothing else: no link is followed, no FIFO waited for.

    Raises:
        OSError: it cannot be opened, or is something else.
    """
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=dir_fd)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError("not a regular file")
    except BaseException:
        os.close(fd)
        raise
    return fd


def mark_in_use(fd: int) -> None:
    """Keep `prune` from the file for as long as the descriptor, or a mapping that is made with it, is there.

    Waits for the one who is giving the file its name: until that is done, its time of change is not final.
    """
    with suppress(OSError):  # a file system without locks
        fcntl.flock(fd, fcntl.LOCK_SH)


def claim(fd: int) -> bool:
    """Whether nobody on this machine uses or writes the file; nobody begins to while the descriptor is open."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: an open file outlives its name
        pass
    return True


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Keep other processes, and threads, from setting up or pruning in `folder` meanwhile. Not reentrant.

    Without locks, or where the folder cannot be opened, it goes on without: see [Note: Locks].
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        _wait_for_turn(fd, folder)
        yield
    finally:
        os.close(fd)


def _wait_for_turn(fd: int, folder: Path) -> None:
    start, is_said = time.monotonic(), False
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not is_said and time.monotonic() - start > _SECONDS_UNTIL_SAID:
                is_said = True
                logger.warning(
                    "Waiting for another process or thread that is setting a model up in %s (or prunes it). Its files are "
                    "used then, if they hold the same weights.",
                    folder,
                )
        except OSError as error:
            logger.info("%s cannot be locked (%s): two processes may write the same files.", folder, error.strerror)
            return
        time.sleep(_POLL_SECONDS)


@contextmanager
def _temporary(path: Path) -> Iterator[tuple[Path, int]]:
    """A new file beside `path`, locked. Its name goes at the end; its descriptor stays, unless there was an error."""
    temporary, fd = _create(path)
    try:
        try:
            yield temporary, fd
        finally:
            temporary.unlink(missing_ok=True)
    except BaseException:
        os.close(fd)
        raise


def _create(path: Path) -> tuple[Path, int]:
    while True:
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return temporary, fd
        os.close(fd)  # `prune` found it before it was locked


def _name_exclusively(temporary: Path, path: Path) -> bool:
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError:
        # A file system without hard links (exFAT, some network drives): the name is checked, then taken.
        if os.path.lexists(path):
            return False
        os.replace(temporary, path)
    return True


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data[:_CHUNK_BYTES]) :]
