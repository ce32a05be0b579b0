"""Images in the checkpoint itself: weights that are views of a mapped file already rest where they are.

`from_pretrained` leaves weights as views of a private mapping of their safetensors file, if nothing casts them. Nothing is
copied or written to offload them. They stay what they were, so an edit gets a page of its own, as for any image (see
[Note: Edits at rest] in `pinned`).
"""

from __future__ import annotations

import os
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from ..layout import ALIGNMENT, as_bytes, lay_out_at, span_bytes
from .base import Mover, Tier
from .files import FileImage, Piece, SourceFile, merged
from .mapping import forget_writes
from .pagemap import PAGE, SLOW_SCAN_SECONDS, tells_writes, written_pages

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


class Checkpoint(SourceFile):
    """A file that somebody else wrote, and whose views weights are."""

    def __init__(self, places: Sequence[Place]) -> None:
        """
        Raises:
            OSError: the file cannot be opened, or is another one by now.
        """
        path = Path(places[0].path)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if os.fstat(fd).st_ino != places[0].inode:
                raise OSError(f"{path} is not what was mapped any more")
            start = min(place.position for place in places)
            end = max(place.position + place.num_bytes for place in places)
            super().__init__(path, fd, start, end, keeps_open=True)
        finally:
            os.close(fd)
        self._images: weakref.WeakSet[CheckpointImage] = weakref.WeakSet()
        self._ranges: list[tuple[int, int]] | None = None
        """The pages of all images; None until somebody asks."""

    def add(self, image: CheckpointImage) -> None:
        self._images.add(image)
        self._ranges = None
        self.hold()

    def let_go(self) -> None:
        self._ranges = None
        super().let_go()

    def take_up_edits(self, wait: Callable[[], None]) -> bool:
        """Find the images that weights at rest hold edits of: those have to be made again, somewhere else."""
        self.check()
        found = False
        if self._ranges is None:
            # Images of one file mostly lie in one mapping, one after another: few scans serve all of them.
            self._ranges = merged([pages for image in self._images for pages in image.addresses])
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


class CheckpointImage(FileImage):
    """An image whose tensors are views of a mapped checkpoint already: they stay what they are."""

    def __init__(
        self,
        fqns: Sequence[str],
        tensors: Sequence[torch.Tensor],
        places: Sequence[Place],
        source: Checkpoint,
    ) -> None:
        offsets, self.pieces, num_bytes = _arrange(places)
        super().__init__(lay_out_at(fqns, tensors, offsets, num_bytes))
        self.source: Checkpoint = source
        self.rest = list(tensors)
        self.addresses = merged([_pages_of(tensor) for tensor in tensors])
        """The pages that the weights at rest lie in, as ranges of addresses."""
        self._is_open = True
        source.add(self)

    @property
    def store(self) -> Checkpoint:
        return self.source

    @property
    def where(self) -> str:
        return f"{'page cache, ' if self.tier is Tier.RAM else ''}{self.source.path.name}"

    def write(self, index: int, value: torch.Tensor) -> bool:
        with torch.inference_mode(False), torch.no_grad():
            as_bytes(self.rest[index]).copy_(value)
        self.is_outdated = True
        return False

    def send(self, mover: Mover, at: int) -> None:
        if not self.is_outdated:
            super().send(mover, at)
            return
        # In the middle of a pass: at the next one the image is made again.
        for spec, tensor in zip(self.layout.specs, self.rest, strict=True):
            value = as_bytes(tensor)
            mover.stage(at + spec.offset, value.numel(), partial(_fill_from, value))

    def close(self, *, forget: bool) -> None:
        if self._is_open:
            self._is_open = False
            self.source.let_go()


def _arrange(places: Sequence[Place]) -> tuple[list[int], list[Piece], int]:
    """Where each tensor goes in the image, in as few pieces of the file as alignment allows, and the image's size."""
    offsets = [0] * len(places)
    pieces: list[Piece] = []
    end = 0
    for index in sorted(range(len(places)), key=lambda index: places[index].position):
        place = places[index]
        last = pieces[-1] if pieces else None
        if (
            last is None
            or place.position - last.position - last.num_bytes > _MAX_GAP
            or (place.position - last.position) % _KEPT_ALIGNMENT
        ):
            last = Piece(-(-end // ALIGNMENT) * ALIGNMENT, place.position, 0)
            pieces.append(last)
        offsets[index] = last.offset + place.position - last.position
        size = max(last.num_bytes, place.position + place.num_bytes - last.position)
        pieces[-1] = replace(last, num_bytes=size)
        end = last.offset + size
    return offsets, pieces, -(-end // ALIGNMENT) * ALIGNMENT


def _fill_from(value: torch.Tensor, chunk: torch.Tensor, start: int) -> None:
    chunk.copy_(value[start : start + chunk.numel()])


def _pages_of(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start // PAGE * PAGE, -(-(start + span_bytes(tensor)) // PAGE) * PAGE


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
