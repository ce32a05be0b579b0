"""How a file in a folder of group files gets its name, and how processes keep out of each other's way there.

[Note: Write protocol]
1. A new file under a temporary name (`.NAME.PID.BOOTRANDOM.tmp`): no link is followed and nothing is opened that was there.
2. Its content, then fsync: a name never leads to bytes that a crash of the machine can take away.
3. Its name, by link(2), which never replaces what has that name; manifests, whose name says whose they are, by rename(2).
4. fsync of the folder, where the file system has that; the temporary name goes.
A process that dies at any of these steps leaves a whole file or none under the name, and at most a temporary one. Whoever
sets a model up in the folder next removes that, if it is of this boot of the machine: then its lock tells that it is dead.

[Note: Locks]
All are flock(2): the kernel releases them when a process ends, however it ends. They save work, and nothing is wrong
without them, where a file system has none. Whoever may read a file can take its lock, and a process that is stopped keeps
its locks: so nobody waits without end, or without a word.
- The folder itself, exclusively: who sets a model up there, or prunes. The second one finds the first one's files. That
  needs no file of its own, no right to write, and works on network file systems between the processes of one machine.
- A file under its temporary name, exclusively: somebody is writing it.
- A group file, shared: it is in use. A mapping keeps the lock of the descriptor that it was made with, so this lasts
  exactly as long as weights rest there, and takes no descriptor.
- A manifest of edited weights, shared: the model that was edited is still there.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import select
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..errors import GroupFileError
from .layout import memory_of

logger = logging.getLogger("group_offload")

_OWNER: Any = select.epoll if hasattr(select, "epoll") else select.kqueue  # type: ignore[attr-defined,unused-ignore]
_CHUNK_BYTES = 16 << 20
_POLL_SECONDS = 0.05
_SECONDS_UNTIL_SAID = 1.0
FILE_PATIENCE_SECONDS = 10.0
"""For whoever holds a group file that another process may be giving its name."""
SETUP_PATIENCE_SECONDS = 600.0
"""For whoever sets a model up in the folder: writing a large one takes minutes."""
PRUNE_PATIENCE_SECONDS = 60.0


def publish(path: Path, header: bytes, data: Iterable[torch.Tensor], on_written: Callable[[int], None]) -> int | None:
    """Write a file and give it its name once it is durable. See [Note: Write protocol].

    Returns:
        A descriptor of the file, marked as in use, or None if the name was taken meanwhile.

    Raises:
        OSError: the file cannot be written; nothing is left behind.
    """
    with _temporary(path) as (temporary, opened):
        fd = opened.fd
        _write_all(fd, memoryview(header))
        for piece in data:
            _write_all(fd, memory_of(piece))
            on_written(piece.numel())
        os.fsync(fd)
        is_named = _name_exclusively(temporary, path)
        if is_named:
            _sync_folder(path.parent)
    if not is_named:
        opened.close()
        return None
    with suppress(OSError):  # somebody took the lock meanwhile, or the name: what is open stays readable
        mark_in_use(fd)
    return opened.detach()


def publish_anew(path: Path, content: bytes) -> int:
    """Write a small file and put it in the place of what has its name. See [Note: Write protocol].

    Returns:
        A descriptor of the file, marked as in use.

    Raises:
        OSError: the file cannot be written; what was there is there.
    """
    with _temporary(path) as (temporary, opened):
        _write_all(opened.fd, memoryview(content))
        os.fsync(opened.fd)
        with suppress(OSError):
            mark_in_use(opened.fd)
        os.replace(temporary, path)
        _sync_folder(path.parent)
    return opened.detach()


def open_to_read(name: str | Path, dir_fd: int | None = None, *, follows_links: bool = False) -> int:
    """Open a regular file, and nothing else: no link is followed unless that is asked for, no FIFO waited for.

    Raises:
        OSError: it cannot be opened, or is something else.
    """
    links = 0 if follows_links else os.O_NOFOLLOW
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | links, dir_fd=dir_fd)
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

    Raises:
        OSError: somebody keeps the file to himself, or it was deleted: it is not to be used.
    """

    def tell() -> None:
        logger.warning("%s holds %s: waiting for it, but not for long.", _holder(fd), _path_of(fd))

    try:
        is_marked = _take_lock(fd, fcntl.LOCK_SH, FILE_PATIENCE_SECONDS, tell)
    except OSError:  # a file system without locks
        return
    if not is_marked:
        raise BlockingIOError(errno.EWOULDBLOCK, f"{_holder(fd)} holds it")
    if not os.fstat(fd).st_nlink:
        raise FileNotFoundError(errno.ENOENT, "it was deleted meanwhile")


def claim(fd: int, *, strictly: bool = False) -> bool:
    """Whether nobody on this machine uses or writes the file; nobody begins to while the descriptor is open.

    Args:
        strictly: False then, too, if the file system has no locks. Otherwise it is True there: an open file outlives its
            name.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return not strictly
    return True


@cache
def boot() -> str:
    """8 hex digits that tell this boot of this machine, whose kernel keeps our locks, from others; else empty."""
    try:
        found = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return ""
    return found[:8] if re.fullmatch("[0-9a-f]{8}", found[:8]) else ""


@contextmanager
def folder_lock(folder: Path, *, or_raise: bool = False) -> Iterator[None]:
    """Keep other processes, and threads, from setting up or pruning in `folder` meanwhile. Not reentrant.

    Without locks, where the folder cannot be opened, or if somebody keeps the lock for too long, it goes on without: see
    [Note: Locks].

    Args:
        or_raise: rather than to go on while somebody has the lock.

    Raises:
        GroupFileError: somebody keeps the lock.
    """
    try:
        opened = _Opened(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        _wait_for_turn(opened.fd, folder, or_raise=or_raise)
        yield
    finally:
        opened.close()


def _wait_for_turn(fd: int, folder: Path, *, or_raise: bool) -> None:
    patience = PRUNE_PATIENCE_SECONDS if or_raise else SETUP_PATIENCE_SECONDS

    def tell() -> None:
        logger.warning(
            "Waiting for %s, which is setting a model up in %s (or prunes it). Its files are used then, if they hold the "
            "same weights. This ends after %.0f seconds.",
            _holder(fd),
            folder,
            patience,
        )

    try:
        is_taken = _take_lock(fd, fcntl.LOCK_EX, patience, tell)
    except OSError as error:
        logger.info("%s cannot be locked (%s): two processes may write the same files.", folder, error.strerror)
        return
    if is_taken:
        return
    if or_raise:
        raise GroupFileError(
            f"{_holder(fd)} has held the lock on {folder} for {patience:.0f} seconds. Try again when it has set its model up, "
            f"or end it."
        )
    logger.warning(
        "%s has held the lock on %s for %.0f seconds. Going on without: both may write the same files, and those of one are "
        "thrown away.",
        _holder(fd),
        folder,
        patience,
    )


def _take_lock(fd: int, kind: int, patience: float, tell: Callable[[], None]) -> bool:
    """Whether it could be had in so many seconds. `tell` is called once if that takes a while.

    Raises:
        OSError: the file system has no locks.
    """
    start, is_said = time.monotonic(), False
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            waited = time.monotonic() - start
        if waited > patience:
            return False
        if waited > _SECONDS_UNTIL_SAID and not is_said:
            is_said = True
            tell()
        time.sleep(_POLL_SECONDS)


def _holder(fd: int) -> str:
    """Who has the lock, as far as the system tells."""
    with suppress(OSError, ValueError):
        status = os.fstat(fd)
        place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            found = line.split()  # 1: FLOCK ADVISORY WRITE 1234 fe:00:5678 0 EOF
            if found[1:2] == ["FLOCK"] and found[5:6] == [place] and int(found[4]) > 0:
                name = Path(f"/proc/{int(found[4])}/comm").read_bytes().strip().decode(errors="replace")
                return f"Process {int(found[4])} ({name!r})"
    return "Another process or thread"


def _path_of(fd: int) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}")
    return "a group file"


@contextmanager
def _temporary(path: Path) -> Iterator[tuple[Path, _Opened]]:
    """A new file beside `path`, locked. Its name goes at the end; its descriptor stays, unless there was an error."""
    temporary, opened = _create(path)
    try:
        try:
            yield temporary, opened
        finally:
            with suppress(OSError):
                os.unlink(temporary)
    except BaseException:
        opened.close()
        raise


def _create(path: Path) -> tuple[Path, _Opened]:
    while True:
        temporary = path.with_name(temporary_name(path.name))
        opened = _Opened(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            with suppress(OSError):  # a file system without locks
                _take_lock(opened.fd, fcntl.LOCK_EX, FILE_PATIENCE_SECONDS, lambda: None)
            if os.fstat(opened.fd).st_nlink:
                return temporary, opened
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            opened.close()
            raise
        opened.close()  # somebody who tidies up found it before it was locked


class _Opened:
    """A descriptor that is closed with this object: so an interrupt leaves no lock taken, whatever it strikes.

    An interrupt would also strike a finalizer that is written in Python, and the lock would stay for as long as the process
    lives. So the owner of the descriptor is an object written in C. `select.epoll` takes any descriptor, closes it as it goes,
    and does not warn as files do.
    """

    def __init__(self, path: Path, flags: int) -> None:
        self._owner = _OWNER.fromfd(os.open(path, flags, 0o666))

    @property
    def fd(self) -> int:
        fd: int = self._owner.fileno()
        return fd

    def detach(self) -> int:
        """The descriptor, for the caller to close."""
        fd = os.dup(self.fd)
        self.close()
        return fd

    def close(self) -> None:
        self._owner.close()


def temporary_name(name: str) -> str:
    """What a file is called that will be `name`: it tells whose it is, and cannot be foreseen."""
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


def _sync_folder(folder: Path) -> None:
    """Make names durable, where the file system can. Without, a machine that loses power may lose a whole file."""
    with suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data[:_CHUNK_BYTES]) :]
