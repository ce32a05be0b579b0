"""Images in the page cache: weights that are views of a mapped file already, page-locked where they are.

`from_pretrained` leaves weights as views of a private mapping of their safetensors file, if nothing casts them. The pages
of such a file are in RAM once, in the kernel's page cache, for all processes that map it. They are page-locked through a
mapping of our own, shared and read-only, and copied to the device from there: no RAM is taken, nothing is filled. The
weights stay what they were, so an edit gets a page of its own, as for any image (see [Note: Edits at rest] in `pinned`).

Only shared, read-only mappings are ever registered with a driver: a writable one of a file is refused, and the call has
been seen to hang on a private one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ..device import Backend
from ..errors import GroupFileError
from ..layout import ALIGNMENT, as_bytes, lay_out_at, span_bytes
from .base import Mover, Tier
from .mapping import flat_view, forget_writes, map_page_cache
from .pagemap import PAGE, SLOW_SCAN_SECONDS, tells_writes, written_pages
from .pinned import unlock

logger = logging.getLogger("group_offload")

_KEPT_ALIGNMENT = 64
"""Tensors that lie in a file as they may lie in an image, up to this, are copied together. No kernel asks for more."""
_MAX_GAP = 4096
"""Bytes between two tensors that are copied along rather than left out."""


@dataclass(frozen=True, slots=True)
class _Region:
    """One private file mapping of this process."""

    start: int
    end: int
    file_offset: int
    path: str
    inode: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a file a tensor's bytes are."""

    path: str
    inode: int
    position: int
    num_bytes: int


class FileMap:
    """Tells of tensors whether they are unchanged views of a file, as of when it was made."""

    def __init__(self) -> None:
        self._regions = _private_file_mappings() if tells_writes() else []
        self._starts = [region.start for region in self._regions]

    def find(self, tensor: torch.Tensor) -> Place | None:
        """Where `tensor` is a view of a file that still is what it was mapped from; None for any other tensor."""
        num_bytes = span_bytes(tensor)
        if not self._regions or not num_bytes or tensor.device.type != "cpu":
            return None
        address = tensor.data_ptr()
        index = bisect_right(self._starts, address) - 1
        if index < 0 or address + num_bytes > self._regions[index].end:
            return None
        first = address // PAGE * PAGE
        if written_pages(first, address + num_bytes - first) != []:
            return None
        region = self._regions[index]
        return Place(region.path, region.inode, region.file_offset + address - region.start, num_bytes)


class CachedFile:
    """The part of a file that images lie in, page-locked in the page cache."""

    def __init__(self, places: Sequence[Place], backend: Backend, wait: Callable[[], None]) -> None:
        """
        Args:
            wait: returns once no copy is on its way: before that the pages stay locked.

        Raises:
            OSError: the file cannot be opened, is another one by now, or its pages cannot be locked.
        """
        self.path = Path(places[0].path)
        self._start = min(place.position for place in places) // PAGE * PAGE
        self._end = max(place.position + place.num_bytes for place in places)
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self._stamp = os.fstat(fd)
            if self._stamp.st_ino != places[0].inode or not stat.S_ISREG(self._stamp.st_mode):
                raise OSError(f"{self.path} is not what was mapped any more")
            if self._end > self._stamp.st_size:
                raise OSError(f"{self.path} was cut off")
            with contextlib.suppress(OSError):  # what is not in RAM is read in long runs, not page by page
                os.posix_fadvise(fd, self._start, self._end - self._start, os.POSIX_FADV_WILLNEED)
            self.bytes = flat_view(map_page_cache(fd, self._start, self._end - self._start), 0, self._end - self._start)
        finally:
            os.close(fd)
        unpin = backend.pin(self.bytes, read_only=True)
        if unpin is None:
            raise OSError(f"the device refuses to page-lock {self.path} in the page cache")
        self._unpin = weakref.finalize(self, unlock, wait, unpin, self.bytes)
        self._unpin.atexit = False
        self._images: weakref.WeakSet[CachedImage] = weakref.WeakSet()
        self._ranges: list[tuple[int, int]] | None = None
        """The pages of all images; None until somebody asks."""
        self._num_open = 0

    def hold(self, image: CachedImage) -> None:
        self._images.add(image)
        self._num_open += 1
        self._ranges = None

    def let_go(self) -> None:
        self._num_open -= 1
        self._ranges = None
        if not self._num_open:
            self._unpin()

    def offset_of(self, position: int) -> int:
        """Where in `bytes` a byte of the file is."""
        return position - self._start

    def take_up_edits(self, wait: Callable[[], None]) -> bool:
        self.check()
        found = False
        if self._ranges is None:
            pages = [(start, end, image) for image in self._images for start, end in image.addresses]
            # Images of one file mostly lie in one mapping, one after another: few scans serve all of them.
            self._ranges = _merged([(start, end) for start, end, _ in pages])
        for start, end in self._ranges:
            started = time.perf_counter()
            written = written_pages(start, end - start) or ()
            if not written and time.perf_counter() - started > SLOW_SCAN_SECONDS:
                forget_writes(start, end - start)  # there are none: this unmaps what was read
            for low, high in written:
                found = True
                for image in self._images:
                    if any(first < start + high and start + low < last for first, last in image.addresses):
                        image.is_outdated = True
        return found

    def check(self) -> None:
        try:
            now = self.path.stat()
        except FileNotFoundError:
            return  # the mapping holds it
        except OSError as error:
            raise self._lost(str(error.strerror)) from error
        if (now.st_dev, now.st_ino) != (self._stamp.st_dev, self._stamp.st_ino):
            return  # so it does if another file has its name
        if (now.st_size, now.st_mtime_ns) != (self._stamp.st_size, self._stamp.st_mtime_ns):
            raise self._lost("another program changed it after it was loaded")

    def _lost(self, what: str) -> GroupFileError:
        return GroupFileError(
            f"Cannot use the weights in {self.path}: {what}. They were views of that file, and cannot be had from there any "
            f"more: load the model again."
        )


class CachedImage:
    """An image whose tensors are pieces of a mapped file."""

    tier = Tier.RAM
    generation = 0
    is_stable = True

    def __init__(
        self, fqns: Sequence[str], tensors: Sequence[torch.Tensor], places: Sequence[Place], file: CachedFile
    ) -> None:
        offsets, self._pieces, num_bytes = _arrange(places)
        self.layout = lay_out_at(fqns, tensors, offsets, num_bytes)
        self.store = file
        self.rest = list(tensors)
        self.is_outdated = False
        self.pinned_bytes = num_bytes
        self.where = f"page cache, {file.path.name}"
        self.addresses = _merged([_pages_of(tensor) for tensor in tensors])
        """The pages that the weights at rest lie in, as ranges of addresses."""
        file.hold(self)
        self._is_open = True

    def check(self) -> None:
        self.store.check()

    def write(self, index: int, value: torch.Tensor) -> bool:
        with torch.inference_mode(False), torch.no_grad():
            as_bytes(self.rest[index]).copy_(value)
        self.is_outdated = True
        return False

    def send(self, mover: Mover, at: int) -> None:
        if self.is_outdated:  # in the middle of a pass: at the next one the image is made again
            for spec, tensor in zip(self.layout.specs, self.rest, strict=True):
                value = as_bytes(tensor)
                mover.stage(at + spec.offset, value.numel(), partial(_fill_from, value))
            return
        for piece in self._pieces:
            mover.copy(at + piece.offset, self.store.bytes, self.store.offset_of(piece.position), piece.num_bytes)

    def close(self, *, forget: bool) -> None:
        if self._is_open:
            self._is_open = False
            self.pinned_bytes = 0
            self.store.let_go()


@dataclass(slots=True)
class _Piece:
    """Bytes of a file that are copied together, to `offset` in the image."""

    offset: int
    position: int
    num_bytes: int


def _arrange(places: Sequence[Place]) -> tuple[list[int], list[_Piece], int]:
    """Where each tensor goes in the image, in as few pieces of the file as alignment allows, and the image's size."""
    offsets = [0] * len(places)
    pieces: list[_Piece] = []
    end = 0
    for index in sorted(range(len(places)), key=lambda index: places[index].position):
        place = places[index]
        last = pieces[-1] if pieces else None
        if (
            last is None
            or place.position - last.position - last.num_bytes > _MAX_GAP
            or (place.position - last.position) % _KEPT_ALIGNMENT
        ):
            last = _Piece(-(-end // ALIGNMENT) * ALIGNMENT, place.position, 0)
            pieces.append(last)
        offsets[index] = last.offset + place.position - last.position
        last.num_bytes = max(last.num_bytes, place.position + place.num_bytes - last.position)
        end = last.offset + last.num_bytes
    return offsets, pieces, -(-end // ALIGNMENT) * ALIGNMENT


def _fill_from(value: torch.Tensor, chunk: torch.Tensor, start: int) -> None:
    chunk.copy_(value[start : start + chunk.numel()])


def _pages_of(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start // PAGE * PAGE, -(-(start + span_bytes(tensor)) // PAGE) * PAGE


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of `ranges`, as ranges that neither overlap nor touch."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _private_file_mappings() -> list[_Region]:
    found = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            addresses, flags, offset, _, inode, *path = line.split(maxsplit=5)
            if flags[3] != "p" or inode == "0" or not path or not path[0].startswith("/"):
                continue
            start, _, end = addresses.partition("-")
            found.append(_Region(int(start, 16), int(end, 16), int(offset, 16), path[0].rstrip("\n"), int(inode)))
    return found
