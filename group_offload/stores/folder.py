"""A folder of group files: whose each one is, and which of them a model uses or has to write."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from ..base.layout import ImageLayout
from ..base.mapping import map_file
from ..base.publish import boot, folder_lock, mark_in_use, open_to_read, publish, temporary_name
from ..errors import GroupFileError
from .manifest import Manifest, ManifestEntry, publish_manifest, tidy_manifests, tidy_temporary_files
from .safetensors_file import content_of, data_pieces, encode_header, holds, printable_id

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

logger = logging.getLogger("group_offload")

_lock = threading.RLock()
_num_users: Counter[Path] = Counter()
"""Images of this process that rest in each file, and models that have each manifest. Models with equal weights share."""
_left: deque[Path] = deque()
"""Files with one image less, not counted yet. Whoever collects garbage leaves them, perhaps in a thread that has the lock."""
_written_here: set[Path] = set()
"""Files that this process wrote: it may delete them once their content is out of date."""


def file_name(group_id: str) -> str:
    """The name of a group's file: diffusers' own, so that a folder of either can be told by its names."""
    return f"group_{hashlib.sha256(printable_id(group_id).encode()).hexdigest()[:16]}.safetensors"


@dataclass(frozen=True, slots=True)
class ProvenFile:
    """A group file whose every byte was compared with, or written from, what rests there."""

    path: Path
    fd: int
    stamp: os.stat_result
    """Of the file, from before it was compared."""
    entry: ManifestEntry


class Folder:
    """A folder of group files.

    Order of calls, under `locked`: `prepare`, `find_or_write` for each group, `publish_manifest`, `report`. Later, for a
    group whose weights changed: `find_or_write`, and `publish_manifest` once all are written.

    Files are only ever added. One that is found under a group's name is used if every byte is what would be written;
    else it belongs to another model, or to other weights: it is left alone and the next name is tried.
    """

    def __init__(self, path: Path, model_class: str = "", *, is_verified: bool = False) -> None:
        """
        Args:
            model_class: of the model whose groups these are: what people read in listings. Files are used by one class only.
            is_verified: what is read from the files is hashed each time, so they may be anybody's.
        """
        self.path = path
        self.model_class = model_class
        self._is_verified = is_verified
        self._trusted = {0, os.geteuid()}
        """The users whose files are used: others could change theirs later. Network file systems may map users."""
        self._num_of_others = 0
        self._num_in_the_way = 0
        self._mine: set[Path] = set()
        """Files of groups of the module that this folder is for. It gives them up when it is laid out again."""
        self._held: object = None
        """A mapping of the manifest, which keeps its lock, if weights were edited: [Note: Manifests of edited weights]."""

    def report(self) -> None:
        """Say once what was found in the way since the last call."""
        if self._num_in_the_way > self._num_of_others:
            logger.warning(
                "%d files in %s have the names of groups but hold other weights (another model's, or older ones). They were "
                "left alone, and other names were used.",
                self._num_in_the_way - self._num_of_others,
                self.path,
            )
        if self._num_of_others:
            logger.warning(
                "%d files in %s belong to other users, who may change them at any time. They were left alone, and other names "
                "were used. With verify_files=True they are used, and what is read from them is checked.",
                self._num_of_others,
                self.path,
            )
        self._num_in_the_way = self._num_of_others = 0

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold this around setting a model up: whoever sets up the same one meanwhile waits, and finds its files.

        Not reentrant. Where there are no locks, or somebody keeps them for too long, it goes on without: both may write the
        same files then, which is a waste and no harm.
        """
        with suppress(OSError):  # `prepare` says what is wrong
            self.path.mkdir(parents=True, exist_ok=True)
        with folder_lock(self.path):
            yield

    def prepare(self, num_bytes: int) -> None:
        """Make the folder and check that files of `num_bytes` in all can be written, before any weight is touched.

        A folder that cannot be written to is accepted if its files may be all that are needed. Temporary files of processes
        that died go.

        Raises:
            GroupFileError: it cannot be made or written to, or holds too little room.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            tidy_temporary_files(self.path)
            present = sum(_size_of(file) for file in self.path.glob("group_*.safetensors"))
            try:
                self._write_probe()
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS) or present < max(num_bytes, 1):
                    raise
                logger.info("%s cannot be written to: its files have to be those that are needed.", self.path)
                return
            free = shutil.disk_usage(self.path).free
        except OSError as error:
            raise GroupFileError(
                f"Cannot write group files to {self.path}: {_why_not(self.path, error)}. Pass a folder that this user can "
                f"write to as offload_to_disk_path."
            ) from error
        if num_bytes > free + present:  # files that are present may turn out to be ours
            raise GroupFileError(
                f"{self.path} has {free:,} bytes free, and the group files take {num_bytes:,}. Free some room "
                f"(`group-offload prune {self.path}` removes what no model needs), or pass another folder as "
                f"offload_to_disk_path. The weights were left where they are."
            )

    def find_or_write(
        self,
        group_id: str,
        layout: ImageLayout,
        tensors: Sequence[torch.Tensor],
        on_written: Callable[[int], None],
        outdated: Path | None = None,
    ) -> ProvenFile:
        """A file that is proven to hold `tensors`, and a descriptor of it that the caller closes.

        It is marked as in use until nobody has the descriptor, or a mapping that was made with it, any more.

        `outdated` is a file of this group that holds other values, and is still needed until the new one is durable.

        Raises:
            GroupFileError: it cannot be written.
        """
        content = content_of(data_pieces(layout, tensors))
        header = encode_header(layout, group_id, self.model_class, content)
        for attempt in range(1000):
            path = self.path / file_name(group_id if attempt == 0 else f"{group_id}@{attempt}")
            if path == outdated:
                continue
            found = self._open_if_equal(path, header, layout, tensors)
            if found is not None:
                on_written(layout.num_bytes)
            elif not os.path.lexists(path):
                fd = self._write(path, group_id, header, layout, tensors, on_written)
                if fd is not None:
                    found = fd, _stamp_of(fd)
                    with _lock:
                        _written_here.add(path)
                else:
                    found = self._open_if_equal(path, header, layout, tensors)  # another process was quicker
            if found is not None:
                self._mine.add(path)
                entry = ManifestEntry(group_id, path.name, content, len(header) + layout.num_bytes)
                return ProvenFile(path, *found, entry)
            logger.info("%s is not what group %r rests in: left alone, another name is used.", path, group_id)
            self._num_in_the_way += path not in self._mine
        raise GroupFileError(
            f"{self.path} holds 1000 files with the names of group {group_id!r}. Empty it, or pass another folder."
        )

    def publish_manifest(self, entries: Sequence[ManifestEntry], replaces: Path | None = None) -> Path | None:
        """Write down which files a model needs, once all of them are there. `leave` the manifest when the model goes.

        Args:
            entries: `ProvenFile.entry` of each of its files.
            replaces: the manifest that this model has had so far: its weights have changed since. It is left, and deleted if
                this process wrote it and no other model of the process has it. Without, what models of the class
                needed that were edited and have died goes.

        Returns:
            The manifest, or `replaces` if none can be written (the log says why; the model works all the same).
        """
        manifest = Manifest(self.model_class, tuple(sorted(entries)), "" if replaces is None else boot())
        published = publish_manifest(self.path, manifest) if entries else None
        if entries and published is None:
            return replaces
        path, is_new, held = published or (None, False, None)
        self._held = None
        if held is not None:
            with suppress(OSError):  # the files themselves are held all the same
                self._held = map_file(held, 1)
            os.close(held)
        if replaces is None:
            tidy_manifests(self.path, self.model_class)
        if path == replaces:
            return path
        if path is not None:
            use(path)
            if is_new:
                with _lock:
                    _written_here.add(path)
        if replaces is not None:
            leave(replaces)
            delete_if_unused(replaces)
        return path

    def _write_probe(self) -> None:
        probe = self.path / temporary_name("probe")
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        self._trusted.add(os.fstat(fd).st_uid)
        os.close(fd)
        probe.unlink(missing_ok=True)

    def _open_if_equal(
        self, path: Path, header: bytes, layout: ImageLayout, tensors: Sequence[torch.Tensor]
    ) -> tuple[int, os.stat_result] | None:
        """A descriptor of the file if it holds exactly this, and what `fstat` said before that was found out.

        The header has the hash of the data, so what was written for other weights is told without reading its data.
        The data is compared all the same: a header can be right, and a byte behind it not.
        """
        try:
            fd = open_to_read(path)
        except OSError:
            return None
        try:
            mark_in_use(fd)
            stamp = os.fstat(fd)
            is_trusted = self._is_verified or stamp.st_uid in self._trusted
            self._num_of_others += not is_trusted
            if is_trusted and holds(fd, header, data_pieces(layout, tensors)):
                return fd, stamp
        except OSError:  # a drive that fails: not a file to rely on
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def _write(
        self,
        path: Path,
        group_id: str,
        header: bytes,
        layout: ImageLayout,
        tensors: Sequence[torch.Tensor],
        on_written: Callable[[int], None],
    ) -> int | None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)  # somebody may have deleted it: what is in use stays open
            return publish(path, header, data_pieces(layout, tensors), on_written)
        except OSError as error:
            prune = f"Free some room (`group-offload prune {self.path}` removes what no model needs) or pass"
            remedy = prune if error.errno in _NO_ROOM else "Pass"
            raise GroupFileError(
                f"Cannot write group {group_id!r} ({len(header) + layout.num_bytes:,} bytes) to {path}: {error.strerror}. "
                f"{remedy} another folder as offload_to_disk_path. The weights are still in RAM."
            ) from error


def _stamp_of(fd: int) -> os.stat_result:
    try:
        return os.fstat(fd)
    except OSError as error:
        os.close(fd)
        raise GroupFileError(f"A group file that was just written cannot be looked at: {error.strerror}.") from error


def use(path: Path) -> None:
    """One more image of this process rests in the file."""
    with _lock:
        _num_users[path] += 1
        _count_left()


def leave(path: Path) -> None:
    """One image less. The file stays. Takes no lock: finalizers call it, at any moment."""
    _left.append(path)


def delete_if_unused(path: Path) -> None:
    """Delete a file whose content is out of date, if this process wrote it and none of its images rests there."""
    with _lock:
        _count_left()
        if _num_users[path] > 0 or path not in _written_here:
            return
        _written_here.discard(path)
    with suppress(OSError):
        path.unlink()


def keep(path: Path) -> None:
    """Leave the file for whoever comes next, whatever happens."""
    with _lock:
        _written_here.discard(path)


def _size_of(file: Path) -> int:
    try:
        return file.lstat().st_size
    except FileNotFoundError:  # its process has just deleted it
        return 0


def _why_not(path: Path, error: OSError) -> str:
    if isinstance(error, FileExistsError) and os.path.lexists(path) and not path.is_dir():
        return "it is a link that leads nowhere" if path.is_symlink() and not path.exists() else "it is not a folder"
    return str(error.strerror)


# What a child deletes its parent may be using.
os.register_at_fork(after_in_child=_written_here.clear)


def _count_left() -> None:
    while _left:
        _num_users[_left.popleft()] -= 1
