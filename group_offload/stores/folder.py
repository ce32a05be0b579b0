"""A folder of group files: whose each one is, and how a new one comes to be."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from ..errors import GroupFileError
from ..layout import ImageLayout
from .safetensors_file import encode_header, holds, pieces, publish

logger = logging.getLogger("group_offload")

_lock = threading.Lock()
_num_users: Counter[Path] = Counter()
"""Images of this process that rest in each file. Models with equal weights share files."""
_written_here: set[Path] = set()
"""Files that this process wrote: it may delete them once their content is out of date."""


def file_name(group_id: str) -> str:
    """The name of a group's file: diffusers' own, so that a folder of either can be told by its names."""
    return f"group_{hashlib.sha256(group_id.encode()).hexdigest()[:16]}.safetensors"


class Folder:
    """A folder of group files.

    Files are only ever added. One that is found under a group's name is used if every byte is what would be written;
    else it belongs to another model, or to other weights: it is left alone and the next name is tried.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._num_in_the_way = 0

    def report(self) -> None:
        """Say once what was found in the way since the last call."""
        if self._num_in_the_way:
            logger.warning(
                "%d files in %s have the names of groups but hold other weights (another model's, or older ones). They were "
                "left alone, and other names were used.",
                self._num_in_the_way,
                self.path,
            )
            self._num_in_the_way = 0

    def prepare(self, num_bytes: int) -> None:
        """Make the folder and check that files of `num_bytes` in all can be written, before any weight is touched.

        Raises:
            GroupFileError: it cannot be made or written to, or holds too little room.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".probe.{os.getpid()}.{os.urandom(4).hex()}.tmp"
            probe.touch(exist_ok=False)
            probe.unlink()
        except OSError as error:
            raise GroupFileError(
                f"Cannot write group files to {self.path}: {error.strerror}. Pass a folder that this user can write to as "
                f"offload_to_disk_path."
            ) from error
        present = sum(file.lstat().st_size for file in self.path.glob("group_*.safetensors"))
        free = shutil.disk_usage(self.path).free
        if num_bytes > free + present:  # files that are present may turn out to be ours
            raise GroupFileError(
                f"{self.path} has {free:,} bytes free, and the group files take {num_bytes:,}. Free some room, or pass "
                f"another folder as offload_to_disk_path. The weights were left where they are."
            )

    def find_or_write(
        self,
        group_id: str,
        layout: ImageLayout,
        tensors: Sequence[torch.Tensor],
        on_written: Callable[[int], None],
        outdated: Path | None = None,
    ) -> tuple[Path, int]:
        """A file that is proven to hold `tensors`, and a descriptor of it.

        `outdated` is a file of this group that holds other values, and is still needed until the new one is durable.

        Raises:
            GroupFileError: it cannot be written.
        """
        header = encode_header(layout, group_id)
        for attempt in range(1000):
            path = self.path / file_name(group_id if attempt == 0 else f"{group_id}@{attempt}")
            if path == outdated:
                continue
            fd = self._open_if_it_holds(path, header, layout, tensors)
            if fd is None and not os.path.lexists(path):
                fd = self._write(path, group_id, header, layout, tensors, on_written)
                if fd is not None:
                    with _lock:
                        _written_here.add(path)
                    return path, fd
                fd = self._open_if_it_holds(path, header, layout, tensors)  # another process was quicker
            if fd is not None:
                on_written(layout.num_bytes)
                return path, fd
            logger.info("%s is not what group %r rests in: left alone, another name is used.", path, group_id)
            self._num_in_the_way += 1
        raise GroupFileError(
            f"{self.path} holds 1000 files with the names of group {group_id!r}. Empty it, or pass another folder."
        )

    @staticmethod
    def _open_if_it_holds(
        path: Path, header: bytes, layout: ImageLayout, tensors: Sequence[torch.Tensor]
    ) -> int | None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would wait for a writer
        except OSError:
            return None
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode) and holds(fd, header, pieces(layout, tensors)):
                return fd
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
            return publish(path, header, pieces(layout, tensors), on_written)
        except OSError as error:
            raise GroupFileError(
                f"Cannot write group {group_id!r} ({len(header) + layout.num_bytes:,} bytes) to {path}: {error.strerror}. "
                f"Free some room or pass another folder as offload_to_disk_path. The weights are still in RAM."
            ) from error


def use(path: Path) -> None:
    """One more image of this process rests in the file."""
    with _lock:
        _num_users[path] += 1


def leave(path: Path) -> None:
    """One image less. The file stays."""
    with _lock:
        _num_users[path] -= 1


def delete_if_unused(path: Path) -> None:
    """Delete a file whose content is out of date, if this process wrote it and none of its images rests there."""
    with _lock:
        if _num_users[path] > 0 or path not in _written_here:
            return
        _written_here.discard(path)
    with suppress(OSError):
        path.unlink()


def keep(path: Path) -> None:
    """Leave the file for whoever comes next, whatever happens."""
    with _lock:
        _written_here.discard(path)
