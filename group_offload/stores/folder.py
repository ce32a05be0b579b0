"""A folder of group files: which file a group of a model is stored in, and which files have to be written.

[Note: Files of a folder]
Files are written when a model is set up, and never changed or deleted: what changes later stays in RAM. A file that is found
under the name of a group is used if it is right. Otherwise it is another model's, or damaged, or another program's. It is left
alone, and the next name is tried.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..base.layout import memory_of
from ..base.ownership import ForeignFileError, Owners
from ..base.publish import folder_lock, publish, temporary_name
from ..base.system import NEW_FILE, open_to_read
from ..base.text import describe_bytes
from ..errors import StorageError
from .safetensors_file import file_holds
from .source import state_of

_MOST_NAMES = 1000
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_GROUP_FILE = re.compile(r"group_[0-9a-f]{16}\.safetensors")
_TEMPORARY_FILE = re.compile(rf"\.(?:{_GROUP_FILE.pattern}|probe)\.[0-9]+\.[0-9a-f]{{16}}\.tmp")

logger = logging.getLogger("group_offload")

T = TypeVar("T")


def file_name(group_id: str) -> str:
    """The name of the file of a group. It is the name that diffusers gives it."""
    return f"group_{hashlib.sha256(group_id.encode(errors='backslashreplace')).hexdigest()[:16]}.safetensors"


@dataclass(frozen=True, slots=True)
class ProvenFile:
    """A group file whose every byte was hashed, or written, and is what the weights are."""

    path: Path
    file: Any
    """What `open_to_read` returned."""
    stamp: os.stat_result
    """What `fstat` said about the file before it was compared, or once it was written."""


class Folder:
    """A folder of group files, as one model uses it.

    Order of calls: `find_or_write` for each group, under `hold`. See [Note: Files of a folder].
    """

    def __init__(self, path: Path, model_class: str = "") -> None:
        """
        Args:
            model_class: the class of the model whose groups these are. Models of other classes do not use its files.
        """
        self.path = path
        self.model_class = model_class
        self.owners = Owners()
        """Whose files are used. See [Note: Files of others]."""
        self._of_others: set[Path] = set()
        """The files of other users that were in the way."""

    def has(self, path: Path) -> bool:
        """Whether a file is a group file of the folder, by its name."""
        with suppress(OSError):
            return _GROUP_FILE.fullmatch(path.name) is not None and path.parent.samefile(self.path)
        return False

    @contextmanager
    def hold(self, num_bytes: int) -> Iterator[None]:
        """Hold this around setting a model up, whose files take `num_bytes` in all. The folder is made if it is not there.

        A process that sets up the same model meanwhile waits, and finds its files. Not reentrant. Where there are no locks, or
        if another process keeps them for too long, it goes on without. Both may write the same files then, which is a waste
        and no harm. The temporary files of processes that died are removed.

        Raises:
            StorageError: the folder cannot be made or written to, or has too little room. One that cannot be written to is
                accepted if its files may be all that are needed.
        """
        with ExitStack() as stack:
            try:
                read_only = self._enter()
                has_lock = stack.enter_context(folder_lock(self.path))
                present = sum(_size_of(file) for file in self.path.glob("group_*.safetensors"))
                if read_only is not None and present < max(num_bytes, 1):
                    raise read_only
                if read_only is not None:
                    logger.info("%s is read-only: using the files in it.", self.path)
                elif has_lock:
                    self._tidy()
                free = 0 if read_only is not None else shutil.disk_usage(self.path).free
            except OSError as error:
                raise StorageError(
                    f"Cannot write group files to {self.path}: {_why_not(self.path, error)}. Pass a folder of your own as "
                    f"offload_to_disk_path. Nothing was changed."
                ) from error
            if num_bytes > free + present:  # files that are present may turn out to be ours
                raise StorageError(
                    f"Not enough disk space in {self.path}: {describe_bytes(free)} free, {describe_bytes(num_bytes)} needed. "
                    f"Free some (delete group files that no program uses), or pass another folder as offload_to_disk_path. "
                    f"Nothing was changed."
                )
            yield
        if self._of_others:
            logger.warning(
                "Didn't use %d files in %s: other users own them or can write to them.", len(self._of_others), self.path
            )
            self._of_others.clear()

    def _enter(self) -> OSError | None:
        """Make the folder. Where every user can replace files, a folder in it is used that belongs to this user alone.

        Returns:
            Why no file can be written, if the folder is read-only.

        Raises:
            OSError: the folder cannot be used.
        """
        self._make()
        read_only = self._probe()
        if self.owners.is_open_to_all(self.path):
            own = self.owners.own_folder(self.path)
            logger.info("Every user can replace files in %s, so group files go to %s.", self.path, own)
            self.path, read_only = own, self._probe()
        self.owners.check_folder(self.path)
        return read_only

    def _probe(self) -> OSError | None:
        """Find out whether files can be written, and to whom they belong then."""
        probe = self.path / temporary_name("probe")
        try:
            fd = os.open(probe, NEW_FILE, 0o600)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                return error
            raise
        self.owners.learn(os.fstat(fd))
        os.close(fd)
        probe.unlink(missing_ok=True)
        return None

    def find_or_write(
        self,
        group_id: str,
        header: bytes,
        content: str,
        data: Callable[[], Iterable[torch.Tensor]],
        on_written: Callable[[int], None],
        replaced: Path | None = None,
    ) -> ProvenFile:
        """A file that is proven to have this header, and `data`, whose hash is `content`.

        A header has that hash, so a file of other weights is recognized without reading its data. Where the header is right the
        data is hashed all the same: a byte of it may not be.

        Args:
            replaced: The file that it takes the place of, if it shall.

        Raises:
            StorageError: the file cannot be written.
        """

        def is_right(fd: int) -> bool:
            return file_holds(fd, header, content)

        def pieces() -> Iterator[memoryview]:
            yield memoryview(header)
            for piece in data():
                yield memory_of(piece)
                on_written(piece.numel())

        while True:
            path, found = (replaced, None) if replaced is not None else self.search(group_id, is_right)
            if found is not None:
                file, _ = found
                on_written(file.stamp.st_size - len(header))
                return file
            try:
                self._make()  # it may have been deleted: files in use stay open
                written = publish(path, pieces(), replaces=replaced is not None)
            except OSError as error:
                remedy = "Free some space, or pass" if error.errno in _NO_ROOM else "Pass"
                raise StorageError(
                    f"Cannot write group {group_id!r} to {path}: {error.strerror}. {remedy} another folder as "
                    f"offload_to_disk_path. The weights are still in RAM."
                ) from error
            opened = None if written is None else _opened_as_written(path, written)
            if opened is not None:
                return opened
            replaced = None  # another file took the name, or another program changed this one as soon as it had it

    def search(self, group_id: str, is_right: Callable[[int], T | None]) -> tuple[Path, tuple[ProvenFile, T] | None]:
        """Look for the file of a group.

        Args:
            is_right: A function that looks at the file behind a descriptor. Its result is false if it is another one.

        Returns:
            The path of the file that is right, the file, and what `is_right` returned. Or the first of the group's names that
            no file has, and None.

        Raises:
            StorageError: other files have all names, or the folder cannot be searched.
        """
        for attempt in range(_MOST_NAMES):
            path = self.path / file_name(f"{group_id}@{attempt}" if attempt else group_id)
            try:
                file = self.owners.open(path)
            except FileNotFoundError:
                return path, None
            except OSError as error:
                if isinstance(error, ForeignFileError):
                    self._of_others.add(path)
                elif not os.path.lexists(path):  # it isn't about the file
                    raise StorageError(
                        f"Cannot look for the file of group {group_id!r} in {self.path}: {error.strerror or error}. Check "
                        f"ulimit -n, the folder's permissions and the disk, or pass another folder as offload_to_disk_path."
                    ) from error
                continue
            try:
                stamp = os.fstat(file.fileno())
                if found := is_right(file.fileno()):
                    return path, (ProvenFile(path, file, stamp), found)
            except OSError as error:  # a disk that fails: the file is not one to rely on
                logger.info("%s cannot be read: %s.", path, error)
            logger.info("Didn't use %s for group %r: it holds other weights.", path, group_id)
        raise StorageError(
            f"{self.path} holds {_MOST_NAMES} files with the names of group {group_id!r}. Empty it, or pass another folder."
        )

    def _make(self) -> None:
        self.path.mkdir(0o755, parents=True, exist_ok=True)  # whatever the umask, not for everybody to write to

    def _tidy(self) -> None:
        """Remove the files that processes were writing when they died."""
        for path in self.path.glob(".*.tmp"):
            with suppress(OSError):
                found = path.lstat()
                self.owners.check(found)
                if _TEMPORARY_FILE.fullmatch(path.name) and stat.S_ISREG(found.st_mode):
                    path.unlink()


def _opened_as_written(path: Path, written: os.stat_result) -> ProvenFile | None:
    """The file, opened; None if it is not what was written."""
    with suppress(OSError):  # a disk that fails, or a file that went again
        file = open_to_read(path)
        # The stamp has to be the last one: the name changed `st_ctime_ns`. But everybody could open the file before that. A
        # stamp of another content would make a change by another program count as what was written here.
        stamp = os.fstat(file.fileno())
        if state_of(stamp) == state_of(written):
            return ProvenFile(path, file, stamp)
    return None


def _size_of(file: Path) -> int:
    try:
        return file.lstat().st_size
    except FileNotFoundError:  # somebody has just deleted the file
        return 0


def _why_not(path: Path, error: OSError) -> str:
    if isinstance(error, FileExistsError) and os.path.lexists(path) and not path.is_dir():
        return "it is a link that leads nowhere" if path.is_symlink() and not path.exists() else "it is not a folder"
    return str(error.strerror or error)
