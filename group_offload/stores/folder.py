"""A folder of group files: which file a group of a model rests in, and which files have to be written."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from ..base.layout import BlobLayout
from ..base.ownership import ForeignFileError, Owners
from ..base.publish import boot, folder_lock, mark_in_use, publish, temporary_name
from ..base.system import NEW_FILE, forked_free, on_fork
from ..errors import GroupFileError
from .manifest import Manifest, ManifestEntry, publish_manifest, tidy_manifests, tidy_temporary_files
from .safetensors_file import content_of, data_pieces, encode_header, file_holds, printable_id

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

logger = logging.getLogger("group_offload")

_lock = forked_free(threading.RLock())
_users: dict[Path, weakref.WeakSet[object]] = {}
"""The blobs of this process that rest in each group file, and the folders whose model has each manifest."""
_written_here: dict[Path, tuple[int, int]] = {}
"""The files that this process wrote, with device and inode. It may delete them once their content is out of date."""


def file_name(group_id: str) -> str:
    """The name of the file of a group. It is the name that diffusers gives it."""
    return f"group_{hashlib.sha256(printable_id(group_id).encode()).hexdigest()[:16]}.safetensors"


@dataclass(frozen=True, slots=True)
class ProvenFile:
    """A group file whose every byte was compared with, or written from, the weights that rest there."""

    path: Path
    fd: int
    stamp: os.stat_result
    """What `fstat` said about the file before it was compared, or once it was written."""
    entry: ManifestEntry


class Folder:
    """A folder of group files, as one model uses it.

    Order of calls, under `locked`: `prepare`, `find_or_write` for each group, `publish_manifest`, `report`. Later, for a
    group whose weights changed: `find_or_write` and `discard`, and `publish_manifest` once all groups are written.

    Set-ups only add files. A file that is found under the name of a group is used if every byte is right. Otherwise it belongs
    to another model or to other weights. It is left alone, and the next name is tried.
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
        self._num_of_others = 0
        self._num_in_the_way = 0
        self._mine: set[Path] = set()
        """The files of groups of the model. It gives some of them up when it is laid out again."""
        self._is_set_up = False
        """Whether the manifest of the set-up was published."""
        self._is_edited = False
        """Whether a manifest of edited weights was published. Later manifests are those of edited weights too."""
        self._manifest: Path | None = None
        """The manifest that the folder has for this model."""
        self._manifest_lock: object = None
        """See [Note: Manifests of edited weights]."""

    def report(self) -> None:
        """Log the files that were in the way since the last call."""
        if self._num_in_the_way > self._num_of_others:
            logger.warning(
                "%d files in %s have the names of groups but hold other weights (another model's, or older ones). They were "
                "left alone, and other names were used.",
                self._num_in_the_way - self._num_of_others,
                self.path,
            )
        if self._num_of_others:
            logger.warning(
                "Didn't use %d files in %s: other users own them or can write to them. They were left alone, and other names "
                "were used.",
                self._num_of_others,
                self.path,
            )
        self._num_in_the_way = self._num_of_others = 0

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold this around setting a model up. A process that sets up the same model meanwhile waits, and finds its files.

        Not reentrant. Where there are no locks, or if another process keeps them for too long, it goes on without. Both may
        write the same files then, which is a waste and no harm.
        """
        with suppress(OSError):  # `prepare` raises an error that says what is wrong
            self._enter()
        with folder_lock(self.path):
            yield

    def prepare(self, num_bytes: int) -> None:
        """Make the folder and check that files of `num_bytes` in all can be written, before any weight is touched.

        A folder that cannot be written to is accepted if its files may be all that are needed. The temporary files of
        processes that died are removed.

        Raises:
            GroupFileError: the folder cannot be made or written to, or has too little room.
        """
        try:
            self._enter()
            present = sum(_size_of(file) for file in self.path.glob("group_*.safetensors"))
            try:
                self._write_probe()
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS) or present < max(num_bytes, 1):
                    raise
                logger.info("%s cannot be written to: its files have to be those that are needed.", self.path)
                self.owners.check_folder(self.path)
                return
            self.owners.check_folder(self.path)
            tidy_temporary_files(self.path, self.owners)
            free = shutil.disk_usage(self.path).free
        except ForeignFileError as error:
            raise GroupFileError(
                f"Cannot keep group files in {self.path}: {error}. Pass a folder of your own as offload_to_disk_path. The "
                f"weights were left where they are."
            ) from error
        except OSError as error:
            raise GroupFileError(
                f"Cannot write group files to {self.path}: {_why_not(self.path, error)}. Pass a folder that this user can "
                f"write to as offload_to_disk_path."
            ) from error
        if num_bytes > free + present:  # files that are present may turn out to be ours
            raise GroupFileError(
                f"{self.path} has {free:,} bytes free, and the group files take {num_bytes:,}. Free some room (group files "
                f"that no program uses can be deleted), or pass another folder as offload_to_disk_path. The weights were left "
                f"where they are."
            )

    def find_or_write(
        self,
        group_id: str,
        layout: BlobLayout,
        tensors: Sequence[torch.Tensor],
        on_written: Callable[[int], None],
        outdated: Path | None = None,
    ) -> ProvenFile:
        """A file that is proven to hold `tensors`, with a descriptor that the caller closes.

        The file is marked as in use until the descriptor, and every mapping that was made with it, is gone.

        Args:
            outdated: the file of this group that holds other values. It is needed until the new one is durable.

        Raises:
            GroupFileError: the file cannot be written.
        """
        content = content_of(data_pieces(layout, tensors))
        header = encode_header(layout, group_id, self.model_class, content)
        size = len(header) + layout.num_bytes

        def is_right(fd: int) -> bool:
            return file_holds(fd, header, data_pieces(layout, tensors))

        for path in self.names(group_id):
            if path == outdated:
                continue
            found = self.open_if(path, is_right)
            if found is not None:
                on_written(layout.num_bytes)
            elif not os.path.lexists(path):
                found = self.write(path, group_id, header, size, data_pieces(layout, tensors), on_written)
                if found is None:  # another process was quicker, or changed the file
                    found = self.open_if(path, is_right)
            if found is not None:
                self._mine.add(path)
                return ProvenFile(path, *found, ManifestEntry(group_id, path.name, content, size))
            self.leave(path, group_id)
        raise AssertionError("unreachable")

    def names(self, group_id: str) -> Iterator[Path]:
        """The names that a file of the group may have, the one to take first.

        Raises:
            GroupFileError: there are no more.
        """
        for attempt in range(1000):
            yield self.path / file_name(group_id if attempt == 0 else f"{group_id}@{attempt}")
        raise GroupFileError(
            f"{self.path} holds 1000 files with the names of group {group_id!r}. Empty it, or pass another folder."
        )

    def leave(self, path: Path, group_id: str) -> None:
        """Note that a file is not what the group rests in."""
        logger.info("%s is not what group %r rests in: left alone, another name is used.", path, group_id)
        self._num_in_the_way += path not in self._mine

    def publish_manifest(self, entries: Sequence[ManifestEntry], *, is_edit: bool = True) -> Path | None:
        """Write down which files the model needs, once all of them are there.

        The first call is that of the set-up. It also tidies up what models of the class left that were edited and have died.
        Later calls are for edited weights, or for weights that were packed only then. They give up the manifest before, which
        is deleted if this process wrote it and no other model of the process has it.

        Args:
            entries: the `ProvenFile.entry` of each file.
            is_edit: whether a call after the first one is for edited weights.

        Returns:
            The manifest of the model. None if it needs no file, or if it never had a manifest that could be written. (The log
            says so, and the model works all the same.)
        """
        self._is_edited |= self._is_set_up and is_edit
        manifest = Manifest(self.model_class, tuple(sorted(entries)), boot() if self._is_edited else "")
        published = publish_manifest(self.path, manifest, self.owners) if entries else None
        if not self._is_set_up:
            tidy_manifests(self.path, self.model_class, self.owners)
            self._is_set_up = True
        if entries and published is None:
            return self._manifest
        before, path, lock = self._manifest, None, None
        if published is not None:
            path, lock = published.path, published.lock
            add_user(path, self)
            if published.stamp is not None and (published.is_new or path in _written_here):
                _note_written(path, published.stamp)
        self._manifest, self._manifest_lock = path, lock
        if before is not None and before != path:
            self._give_up(before)
        return path

    def discard(self, path: Path) -> None:
        """Delete the file of a group that rests in another one by now, if this process wrote it and no other blob rests there.

        It does not wait for the new manifest, which comes when all groups are written: else an edit of all groups would need
        room for the model twice. A manifest of a set-up that names the file is deleted first. A process that is killed before
        the new manifest is there then leaves files that no manifest names, which the next set-up uses, and no
        manifest of a file that is gone.
        """
        if self._manifest is not None and self._manifest_lock is None and _may_delete(path):
            self._give_up(self._manifest)
        delete_if_unused(path)

    def keep_manifest(self) -> None:
        """The model is not offloaded any more. Its manifest stays, as its files do."""
        if self._manifest is not None:
            never_delete(self._manifest)
            remove_user(self._manifest, self)

    def _give_up(self, manifest: Path) -> None:
        remove_user(manifest, self)
        delete_if_unused(manifest)

    def _enter(self) -> None:
        """Make the folder. Where every user can replace files, a folder in it is used that belongs to this user alone."""
        self._make()
        if self.owners.is_open_to_all(self.path):
            with suppress(OSError):  # it may be read-only
                self._write_probe()  # its file system may have no modes
        if self.owners.is_open_to_all(self.path):
            own = self.owners.own_folder(self.path)
            logger.info("Every user can replace files in %s. Group files go to %s.", self.path, own)
            self.path = own

    def _make(self) -> None:
        self.path.mkdir(0o755, parents=True, exist_ok=True)  # whatever the umask, not for everybody to write to

    def _write_probe(self) -> None:
        probe = self.path / temporary_name("probe")
        fd = os.open(probe, NEW_FILE, 0o600)
        self.owners.learn(os.fstat(fd))
        os.close(fd)
        probe.unlink(missing_ok=True)

    def open_if(self, path: Path, is_right: Callable[[int], bool]) -> tuple[int, os.stat_result] | None:
        """A descriptor of the file if it is the right one, and what `fstat` said before it was compared.

        Args:
            is_right: A function that compares the file behind a descriptor. A header has the hash of the data, so a file of
                other weights is recognised without reading its data. Where the header is right the data is compared all the
                same: a byte of it may not be.
        """
        try:
            fd = self.owners.open(path)
        except OSError as error:
            self._num_of_others += isinstance(error, ForeignFileError)
            return None
        try:
            mark_in_use(fd)
            stamp = os.fstat(fd)
            if is_right(fd):
                return fd, stamp
        except OSError:  # a drive that fails: the file is not one to rely on
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def write(
        self,
        path: Path,
        group_id: str,
        header: bytes,
        num_bytes: int,
        data: Iterable[torch.Tensor],
        on_written: Callable[[int], None],
    ) -> tuple[int, os.stat_result] | None:
        """Write a file of `num_bytes`: see `publish`.

        Raises:
            GroupFileError: it cannot be written.
        """
        try:
            self._make()  # it may have been deleted: files in use stay open
            written = publish(path, header, data, on_written)
        except OSError as error:
            remedy = "Free some room, or pass" if error.errno in _NO_ROOM else "Pass"
            raise GroupFileError(
                f"Cannot write group {group_id!r} ({num_bytes:,} bytes) to {path}: {error.strerror}. "
                f"{remedy} another folder as offload_to_disk_path. The weights are still in RAM."
            ) from error
        if written is not None:
            _note_written(path, written[1])
        return written


def _note_written(path: Path, stamp: os.stat_result) -> None:
    with _lock:
        _written_here[path] = stamp.st_dev, stamp.st_ino


def add_user(path: Path, user: object) -> None:
    """Remember that a blob rests in the file, or that a model has the manifest, until it leaves or is collected."""
    with _lock:
        _users.setdefault(path, weakref.WeakSet()).add(user)


def remove_user(path: Path, user: object) -> None:
    """End what `add_user` began. The file stays."""
    with _lock:
        users = _users.get(path, weakref.WeakSet())
        users.discard(user)
        for each in [path, *_users] if not users else ():
            if not _users.get(each, True):
                del _users[each]


def delete_if_unused(path: Path) -> None:
    """Delete a file whose content is out of date, if this process wrote it and has no other user for it."""
    with _lock:
        if not _may_delete(path):
            return
        mine = _written_here.pop(path)
    with suppress(OSError):
        found = path.lstat()
        if (found.st_dev, found.st_ino) == mine:  # another program may have put a file of its own there
            path.unlink()


def never_delete(path: Path) -> None:
    """Leave the file for whoever comes next, whatever happens."""
    with _lock:
        _written_here.pop(path, None)


def _may_delete(path: Path) -> bool:
    return path in _written_here and not _users.get(path)


def _size_of(file: Path) -> int:
    try:
        return file.lstat().st_size
    except FileNotFoundError:  # its process has just deleted the file
        return 0


def _why_not(path: Path, error: OSError) -> str:
    if isinstance(error, FileExistsError) and os.path.lexists(path) and not path.is_dir():
        return "it is a link that leads nowhere" if path.is_symlink() and not path.exists() else "it is not a folder"
    return str(error.strerror)


# A file that the parent wrote is the parent's to delete.
on_fork(after_in_child=_written_here.clear)
