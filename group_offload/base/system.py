"""What systems do in different ways. Each name here works on every system; where a system lacks a call, a slower one serves.

Linux has them all. What is about one mechanism of Linux stays beside it: mappings in `mapping`, the page map in `pagemap`.
No other file of the package uses a name that some system lacks: `make portable` shows it none.
"""

from __future__ import annotations

import errno
import io
import os
import select
import stat
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
try:
    import resource
except ImportError:
    resource = None  # type: ignore[assignment]

IS_LINUX = sys.platform.startswith("linux")
IS_WINDOWS = os.name == "nt"

_PLAIN_FILE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_TO_READ = _PLAIN_FILE | os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
NEW_FILE = _PLAIN_FILE | os.O_RDWR | os.O_CREAT | os.O_EXCL
"""The flags that make a file which did not exist."""

_turn = threading.Lock()
"""Guards the positions of open files, where a read cannot say its position."""


class _OwnedFile(io.FileIO):
    """A file that is closed as it goes, without a warning."""

    def __del__(self) -> None:
        self.close()


own_descriptor: Callable[[int], Any] = next(
    (getattr(select, name).fromfd for name in ("epoll", "kqueue") if hasattr(select, name)), _OwnedFile
)
"""An object that closes a descriptor as it goes. The first two are written in C, and take descriptors of any kind."""


def on_fork(*, before: Callable[[], None] | None = None, after_in_child: Callable[[], None] | None = None) -> None:
    """Call these at each fork, where processes fork."""
    calls = {"before": before, "after_in_child": after_in_child}
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(**{when: call for when, call in calls.items() if call is not None})


L = TypeVar("L")
_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def forked_free(lock: L) -> L:
    """A reentrant lock that is free in a forked child, unless the thread that forks has it: no other thread is there."""
    _locks.add(lock)
    return lock


def _free_locks() -> None:
    for lock in [*_locks]:
        if not lock._is_owned():
            lock._at_fork_reinit()


on_fork(after_in_child=_free_locks)  # first: what others do in the child may take these locks


def num_cores() -> int:
    """The cores that this process may use, as far as the system tells."""
    with suppress(OSError, AttributeError):  # a sandbox that refuses it; a system that has none
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def ram_of_machine(what: str) -> int:
    """Bytes of RAM, for all programs.

    Args:
        what: "total", or "available": those that programs may take before the system has to swap, as it estimates.
    """
    try:
        return int(getattr(psutil.virtual_memory(), what))
    except (OSError, psutil.Error):  # no /proc, or no descriptor left. The next best answer takes no file.
        return os.sysconf({"total": "SC_PHYS_PAGES", "available": "SC_AVPHYS_PAGES"}[what]) * os.sysconf("SC_PAGE_SIZE")


def expect_open(fd: int) -> None:
    """The descriptor stays open for long. If few are left, the limit of the process is raised."""
    if resource is not None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if fd > soft // 2 and soft != hard:
            with suppress(OSError, ValueError):  # a system with a limit of its own
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_locked_bytes() -> int | None:
    """The bytes that this process may pin by itself (`ulimit -l`); None if the system sets no limit."""
    if not hasattr(resource, "RLIMIT_MEMLOCK"):
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def user() -> int:
    """The number of the user whose files this process makes, as `os.stat` gives it."""
    return os.geteuid() if hasattr(os, "geteuid") else 0


def name_of_disk(number: int) -> str:
    """A text for `st_dev`."""
    return f"{os.major(number)}:{os.minor(number)}" if hasattr(os, "major") else str(number)


def kernel_says(path: str | Path) -> str:
    """The text of a file below /proc or /sys.

    Raises:
        OSError: the system has no such file, or refuses it.
    """
    if not IS_LINUX:
        raise missing()
    return Path(path).read_text(errors="replace")


def read_at(fd: int, target: memoryview, position: int) -> int:
    """Read once from `position` on, and return the number of bytes. Several threads may read at once.

    Raises:
        OSError: the system refused.
    """
    if hasattr(os, "preadv"):
        return os.preadv(fd, [target], position)
    with _turn:
        os.lseek(fd, position, os.SEEK_SET)
        found = os.read(fd, len(target))
    target[: len(found)] = found
    return len(found)


def advise(fd: int, start: int, num_bytes: int, advice: str) -> None:
    """Tell the system how a part of a file will be read: "WILLNEED", "DONTNEED" or "RANDOM".

    Raises:
        OSError: the system refused.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, start, num_bytes, getattr(os, f"POSIX_FADV_{advice}"))


def open_past_cache(fd: int) -> Any:
    """The same file, opened for reads past the page cache: see `own_descriptor`.

    Raises:
        OSError: the system, or the file system, has no such reads.
    """
    if not hasattr(os, "O_DIRECT"):
        raise missing()
    return own_descriptor(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT))


def open_to_read(path: Path) -> Any:
    """Open a regular file and nothing else: no link is followed, and a FIFO is not waited for. See `own_descriptor`.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    expected = None
    if not hasattr(os, "O_NOFOLLOW"):
        expected = os.lstat(path)
        if not stat.S_ISREG(expected.st_mode):
            raise OSError("not a regular file")
    opened = own_descriptor(os.open(path, _TO_READ))
    found = os.fstat(opened.fileno())
    if not stat.S_ISREG(found.st_mode):
        raise OSError("not a regular file")
    if expected is not None and not os.path.samestat(expected, found):
        raise OSError("another file has just taken its place")
    return opened


def open_folder(path: Path) -> Any:
    """Open a folder: see `own_descriptor`.

    Raises:
        OSError: it is no folder, or cannot be opened; or this system opens none.
    """
    if not hasattr(os, "O_DIRECTORY"):
        raise missing()
    return own_descriptor(os.open(path, os.O_RDONLY | os.O_DIRECTORY))


def lock(fd: int) -> None:
    """Lock a file or folder with flock(2), unless that has to wait.

    Raises:
        BlockingIOError: another process has the lock.
        OSError: the system, or the file system, has no locks.
    """
    if fcntl is None:
        raise missing()
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock(fd: int) -> None:
    """Undo `lock`."""
    if fcntl is not None:
        fcntl.flock(fd, fcntl.LOCK_UN)


def new_shared_file(num_bytes: int) -> int:
    """A descriptor of a file in RAM, which other processes open by `name_of_shared_file` as long as it is open here.

    Raises:
        OSError: the system has no such files, or no memory.
    """
    if not hasattr(os, "memfd_create"):
        raise missing()
    fd = os.memfd_create("group_offload", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, num_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def name_of_shared_file(fd: int) -> str:
    found = os.fstat(fd)
    return f"/proc/{os.getpid()}/fd/{fd} {found.st_dev} {found.st_ino}"


def open_shared_file(name: str) -> int:
    """A descriptor of a file in RAM of another process, to read and to write.

    Raises:
        OSError: that process is gone, does not let this one see the file, or has closed it.
    """
    path, *identity = name.split()
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)  # another file may be behind the number by now: nothing is opened yet
    try:
        found = os.fstat(fd)
        if [str(found.st_dev), str(found.st_ino)] != identity:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(fd)


def place_of_process() -> str:
    """A text that two processes have in common only if each may look at the other's descriptors; empty if that cannot be."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {user()}"
    except OSError:
        return ""


def started_at(pid: int) -> str | None:
    """When a process was started, in ticks of the system; None if it is not there any more, or has ended."""
    try:
        # The name of the program is in parentheses, and may have any characters.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


def ioctl(fd: int, request: int, argument: bytearray) -> int:
    """
    Raises:
        OSError: the system, or the file, has no such request.
    """
    if fcntl is None:
        raise missing()
    return int(fcntl.ioctl(fd, request, argument))


def missing() -> OSError:
    """The error of a call that the system lacks."""
    return OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
