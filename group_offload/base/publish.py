"""How files get their names, and how processes keep out of each other's way in a folder of group files.

[Note: Write protocol]
1. A new file is made under a temporary name (`.NAME.PID.RANDOM.tmp`). No link is followed, and no existing file is opened.
2. The content is written and synced, so a name never leads to bytes that a crash of the machine can take away.
3. The file gets its name by link(2), which takes no name that another file has, and loses the temporary one. Where it replaces
   a file, or the file system has no links, it is renamed. Then the folder is synced, where the file system can do that.
A process that dies at any of these steps leaves a whole file or none under the name, and at most one temporary file, which the
next set-up in the folder removes.

[Note: Locks]
A set-up holds flock(2) on the folder: a second one waits, and finds the files of the first. The kernel releases the lock when
the process ends, however it ends. The lock saves work: where a file system has none, nothing goes wrong. Whoever may read the
folder can lock it, and a process that is stopped keeps its lock. So the wait has an end. On network file systems the lock holds
between the processes of one machine. A writer that loses its temporary file to another set-up writes it once more.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from ..errors import StorageError
from . import system
from .tuning import tuning

logger = logging.getLogger("group_offload")

_CHUNK_BYTES = 16 << 20
_POLL_SECONDS = 0.05


def publish(path: Path, content: Iterable[memoryview | bytes], *, replaces: bool = True) -> os.stat_result | None:
    """Write a file and give it its name once it is durable. See [Note: Write protocol].

    Args:
        replaces: Whether the file may take the place of another one.

    Returns:
        What `fstat` said of the file before it got its name. None if another file has the name, and may not be replaced, or
        if another process removed the temporary file.

    Raises:
        OSError: the file cannot be written. No temporary file is left.
    """
    temporary = path.with_name(temporary_name(path.name))
    # An object in C closes it: an interrupt would also strike a finalizer that is written in Python.
    opened = system.own_descriptor(os.open(temporary, system.NEW_FILE, 0o644))
    try:
        for piece in content:
            left = memoryview(piece)
            while left:
                left = left[os.write(opened.fileno(), left[:_CHUNK_BYTES]) :]
        os.fsync(opened.fileno())
        written = os.fstat(opened.fileno())
        opened.close()  # Windows gives no name to an open file
        try:
            if not replaces:
                os.link(temporary, path)
        except (FileExistsError, FileNotFoundError):
            return None
        except OSError:  # a file system without links
            if os.path.lexists(path):
                return None
            replaces = True
        if replaces:
            os.replace(temporary, path)
        _sync_folder(path.parent)
        return written
    finally:
        with suppress(OSError):
            os.unlink(temporary)
        opened.close()


@contextmanager
def folder_lock(folder: Path) -> Iterator[bool]:
    """Keep other processes, and threads, from setting up in `folder` meanwhile. Not reentrant. See [Note: Locks].

    Yields:
        Whether the lock is held. It is not where there are no locks, where the folder cannot be opened, or if another process
        keeps it for too long.
    """
    try:
        opened = system.open_folder(folder)
    except OSError:
        yield False
        return
    with closing(opened):
        yield _wait_for_lock(opened.fileno(), folder)


def _wait_for_lock(fd: int, folder: Path) -> bool:
    start, patience, is_said = time.monotonic(), tuning().setup_timeout_seconds, False
    while True:
        try:
            system.lock(fd)
            return True
        except BlockingIOError:
            waited = time.monotonic() - start
        except OSError as error:
            logger.info("Cannot lock %s (%s): two processes may write the same files.", folder, error.strerror)
            return False
        if waited > tuning().seconds_until_said and not is_said:
            is_said = True
            logger.warning(
                "Another process is setting a model up in %s. Waiting up to %.0f seconds; matching files will be used.",
                folder,
                patience,
            )
        if waited > patience:
            logger.warning("%s is still locked after %.0f seconds; continuing without the lock.", folder, patience)
            return False
        time.sleep(_POLL_SECONDS)


def temporary_name(name: str) -> str:
    """The name of a file that is going to be `name`. It cannot be predicted."""
    return f".{name}.{os.getpid()}.{os.urandom(8).hex()}.tmp"


def _sync_folder(folder: Path) -> None:
    """Make names durable, where the file system can. Elsewhere a loss of power can take a whole file away."""
    with suppress(OSError):
        opened = system.open_folder(folder)
        os.fsync(opened.fileno())


def check_path(path: Path) -> None:
    """
    Raises:
        StorageError: no file can be written there: its folder does not exist or is read-only, it is a folder itself, or it is
            no path.
    """
    if "\0" in str(path):
        raise StorageError(f"Cannot write {str(path)!r}: a path cannot contain the character \\0.")
    if not path.parent.is_dir():
        raise StorageError(f"Cannot write {path}: {path.parent} is not a folder.")
    if path.is_dir():
        raise StorageError(f"Cannot write {path}: it is a folder. Pass the name of a file in it.")
    if not path.exists() and not os.access(path.parent, os.W_OK):
        raise StorageError(f"Cannot write {path}: no files can be created in {path.parent}.")
