"""How a file in a folder of group files gets its name, and how processes keep out of each other's way there.

[Note: Write protocol]
1. A new file is made under a temporary name (`.NAME.PID.BOOTRANDOM.tmp`). No link is followed, and no existing file is opened.
2. The content is written and synced, so a name never leads to bytes that a crash of the machine can take away.
3. The file gets its name: by link(2), which never replaces a file; a manifest, whose name says whose it is, by rename(2).
4. The folder is synced, where the file system can do that, and the temporary name is removed.
A process that dies at any of these steps leaves a whole file or none under the name, and at most one temporary file. The next
set-up in the folder removes the temporary file if it is of this boot of the machine: only then does its lock tell that its
process is dead.

[Note: Locks]
All locks are flock(2), which the kernel releases when a process ends, however it ends. They save work. Where a file system has
no locks, nothing goes wrong. Whoever may read a file can lock it, and a process that is stopped keeps its locks. So every wait
has an end, and is logged.
- The folder, exclusively: a process sets a model up there. A second set-up waits and finds the files of the first.
  This lock needs no file and no right to write. On network file systems it holds between the processes of one machine.
- A file under its temporary name, exclusively: a process is writing it.
- A group file, shared: it is in use. A mapping keeps the lock of the descriptor that it was made with, so the lock lasts
  exactly as long as weights rest in the file, and takes no descriptor.
- A manifest of edited weights, shared: the model that was edited still exists.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..errors import GroupFileError
from . import system
from .layout import memory_of
from .ownership import Owners
from .tuning import tuning

logger = logging.getLogger("group_offload")

_CHUNK_BYTES = 16 << 20
_POLL_SECONDS = 0.05


def publish(
    path: Path, header: bytes, data: Iterable[torch.Tensor], on_written: Callable[[int], None]
) -> tuple[int, os.stat_result] | None:
    """Write a file and give it its name once it is durable. See [Note: Write protocol].

    Returns:
        A descriptor of the file, marked as in use, and its stamp, whose size and time of change are those of the content that
        was written here. None if another file took the name, or if another program changed the file as soon as it had it.

    Raises:
        OSError: the file cannot be written. No temporary file is left.
    """
    with _temporary(path) as (temporary, opened):
        _write_all(opened.fd, memoryview(header))
        for piece in data:
            _write_all(opened.fd, memory_of(piece))
            on_written(piece.numel())
        os.fsync(opened.fd)
        written = os.fstat(opened.fd)
        opened.let_name()
        is_named = _name_exclusively(temporary, path)
        if is_named:
            sync_folder(path.parent)
    try:
        if not is_named:
            return None
        opened.reopen(path)
        with suppress(OSError):  # another process has locked or deleted the file by now: what is open stays readable
            mark_in_use(opened.fd)
        # The stamp has to be the last one: the temporary name changed `st_ctime_ns` when it went. But everybody could open the
        # file before that. A stamp of another content would make a change by another program count as what was written here.
        stamp = os.fstat(opened.fd)
        is_same = os.path.samestat(stamp, written)
        if not is_same or (stamp.st_size, stamp.st_mtime_ns) != (written.st_size, written.st_mtime_ns):
            return None
        return opened.detach(), stamp
    finally:
        opened.close()


def publish_anew(path: Path, content: bytes) -> int:
    """Write a small file and put it in the place of the file that has its name. See [Note: Write protocol].

    Returns:
        A descriptor of the file, marked as in use.

    Raises:
        OSError: the file cannot be written. The file that had the name still has it.
    """
    with _temporary(path) as (temporary, opened):
        _write_all(opened.fd, memoryview(content))
        os.fsync(opened.fd)
        with suppress(
            OSError
        ):  # before it has its name: a manifest of edited weights without a lock counts as abandoned
            mark_in_use(opened.fd)
        opened.let_name()
        os.replace(temporary, path)
        sync_folder(path.parent)
    opened.reopen(path)
    return opened.detach()


@contextmanager
def opened_to_read(path: Path) -> Iterator[int]:
    """The descriptor that `open_to_read` gives, closed at the end."""
    fd = system.open_to_read(path)
    try:
        yield fd
    finally:
        os.close(fd)


def remove_unused(
    path: Path, owners: Owners, *, needs_locks: bool = False, is_right: Callable[[int], bool] = lambda fd: True
) -> bool:
    """Delete a file that this package wrote, unless a process of this machine uses or writes it.

    Args:
        needs_locks: whether to leave the file where the file system has no locks.
        is_right: whether the file behind a descriptor is the one that is meant. A name alone may be another file's.

    Returns:
        Whether it was deleted.

    Raises:
        FileNotFoundError: it is not there any more.
        OSError: the system refused, or the file is another user's.
    """
    with owners.opened(path) as fd:
        if not is_right(fd) or not claim(fd, needs_locks=needs_locks):
            return False
        if not os.fstat(fd).st_nlink:  # the name may be another file's by now
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        if not system.IS_WINDOWS:
            os.unlink(path)
            return True
    os.unlink(path)  # which Windows does not do while the file is open
    return True


def mark_in_use(fd: int) -> None:
    """Keep other processes from deleting the file for as long as the descriptor, or a mapping that is made with it, exists.

    A process that is giving the file its name is waited for: until then the file's time of change is not final.

    Raises:
        OSError: another process keeps the file for itself, or the file was deleted. It must not be used.
    """
    try:
        is_marked = _take_lock(
            fd,
            tuning().file_patience_seconds,
            lambda: logger.warning("%s holds %s: waiting for it, but not for long.", _holder(fd), _path_of(fd)),
            is_shared=True,
        )
    except OSError:  # a file system without locks
        return
    if not is_marked:
        raise BlockingIOError(errno.EWOULDBLOCK, f"{_holder(fd)} holds it")
    if not os.fstat(fd).st_nlink:
        raise FileNotFoundError(errno.ENOENT, "it was deleted meanwhile")


def claim(fd: int, *, needs_locks: bool = False) -> bool:
    """Whether no process of this machine uses or writes the file. None begins to while the descriptor is open.

    Args:
        needs_locks: whether the answer is False where the file system has no locks. Otherwise it is True there: a file that
            is deleted stays readable to the processes that have it open.
    """
    try:
        system.lock(fd)
    except BlockingIOError:
        return False
    except OSError:
        return not needs_locks
    return True


@cache
def boot() -> str:
    """8 hex digits that tell this boot of this machine, whose kernel keeps our locks, from others; or an empty text."""
    try:
        found = system.kernel_says("/proc/sys/kernel/random/boot_id")
    except OSError:
        return ""
    return found[:8] if re.fullmatch("[0-9a-f]{8}", found[:8]) else ""


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Keep other processes, and threads, from setting up in `folder` meanwhile. Not reentrant.

    Where there are no locks, where the folder cannot be opened, or if another process keeps the lock for too long, the block
    runs without the lock: see [Note: Locks].
    """
    try:
        opened = _Opened(system.open_folder, folder)
    except (OSError, NotImplementedError):
        yield
        return
    try:
        _wait_for_turn(opened.fd, folder)
        yield
    finally:
        opened.close()


def _wait_for_turn(fd: int, folder: Path) -> None:
    patience = tuning().setup_patience_seconds

    def tell() -> None:
        logger.warning(
            "Waiting for %s, which is setting a model up in %s. Its files are used then, if they hold the "
            "same weights. This ends after %.0f seconds.",
            _holder(fd),
            folder,
            patience,
        )

    try:
        if _take_lock(fd, patience, tell):
            return
    except OSError as error:
        logger.info("%s cannot be locked (%s): two processes may write the same files.", folder, error.strerror)
        return
    held = f"{_holder(fd)} has held the lock on {folder} for {patience:.0f} seconds."
    logger.warning("%s Going on without: both may write the same files, and those of one are thrown away.", held)


def _take_lock(fd: int, patience: float, on_wait: Callable[[], None], *, is_shared: bool = False) -> bool:
    """Whether the lock was free within `patience` seconds. `on_wait` is called once if that takes a while.

    Raises:
        OSError: the file system has no locks.
    """
    start, is_said = time.monotonic(), False
    while True:
        try:
            system.lock(fd, is_shared=is_shared)
            return True
        except BlockingIOError:
            waited = time.monotonic() - start
        if waited > tuning().seconds_until_said and not is_said:
            is_said = True
            on_wait()
        if waited > patience:
            return False
        time.sleep(_POLL_SECONDS)


def _holder(fd: int) -> str:
    """The process that has the lock, as far as the system tells."""
    with suppress(OSError, ValueError):
        lines = system.kernel_says("/proc/locks").splitlines()
        status = os.fstat(fd)
        major, minor = map(int, system.name_of_drive(status.st_dev).split(":"))
        place = f"{major:02x}:{minor:02x}:{status.st_ino}"
        for line in lines:
            found = line.split()  # 1: FLOCK ADVISORY WRITE 1234 fe:00:5678 0 EOF
            if found[1:2] == ["FLOCK"] and found[5:6] == [place] and int(found[4]) > 0:
                name = system.kernel_says(f"/proc/{int(found[4])}/comm").strip()
                return f"Process {int(found[4])} ({name!r})"
    return "Another process or thread"


def _path_of(fd: int) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}")
    return "a group file"


@contextmanager
def _temporary(path: Path) -> Iterator[tuple[Path, _Opened]]:
    """A new file beside `path`, locked. Its name is removed at the end. Its descriptor stays open, unless there is an error."""
    while True:
        temporary = path.with_name(temporary_name(path.name))
        opened = _Opened(os.open, temporary, system.NEW_FILE, 0o644)
        try:
            try:
                with suppress(OSError):  # a file system without locks
                    _take_lock(opened.fd, tuning().file_patience_seconds, lambda: None)
                if os.fstat(opened.fd).st_nlink:
                    yield temporary, opened
                    return
            finally:
                with suppress(OSError):
                    os.unlink(temporary)
        except BaseException:
            opened.close()
            raise
        opened.close()  # another process tidied the folder before the file was locked: once more


class _Opened:
    """A descriptor that is closed with this object, so an interrupt leaves no lock taken, wherever it strikes.

    An interrupt would also strike a finalizer that is written in Python, and the lock would stay for as long as the process
    lives. So the owner of the descriptor is an object written in C. `select.epoll` takes any descriptor, closes it as it goes,
    and does not warn as files do.
    """

    def __init__(self, open_: Callable[..., int], *args: Any) -> None:
        self._owner = system.own_descriptor(open_(*args))

    @property
    def fd(self) -> int:
        fd: int = self._owner.fileno()
        return fd

    def detach(self) -> int:
        """The descriptor, for the caller to close."""
        fd = os.dup(self.fd)
        self.close()
        return fd

    def let_name(self) -> None:
        """Close a file that was written, where the system gives no name to an open one, and takes none away."""
        if system.IS_WINDOWS:
            self.close()

    def reopen(self, path: Path) -> None:
        """Undo `let_name`: the file may be another one by then."""
        if system.IS_WINDOWS:
            self._owner = system.own_descriptor(system.open_to_read(path))

    def close(self) -> None:
        self._owner.close()


def temporary_name(name: str) -> str:
    """The name of a file that is going to be `name`. It tells the process and the boot, and cannot be foreseen."""
    return f".{name}.{os.getpid()}.{boot()}{os.urandom(4).hex()}.tmp"


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


def sync_folder(folder: Path) -> None:
    """Make names durable, where the file system can. Elsewhere a loss of power can take a whole file away."""
    with suppress(OSError, NotImplementedError):
        fd = system.open_folder(folder)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data[:_CHUNK_BYTES]) :]


def check_path(path: Path) -> None:
    """
    Raises:
        GroupFileError: no file can be written there: its folder does not exist or is read-only, it is a folder itself, or it is
            no path.
    """
    if "\0" in str(path):
        raise GroupFileError(f"Cannot write {str(path)!r}: a path cannot contain the character \\0.")
    if not path.parent.is_dir():
        raise GroupFileError(f"Cannot write {path}: {path.parent} is not a folder.")
    if path.is_dir():
        raise GroupFileError(f"Cannot write {path}: it is a folder. Give the name of a file in it.")
    if not path.exists() and not os.access(path.parent, os.W_OK):
        raise GroupFileError(f"Cannot write {path}: no files can be created in {path.parent}.")
