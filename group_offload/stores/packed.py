"""Packed images: the bytes of a blob once more, in fewer bytes of page-locked RAM, or of a file. They are what is sent.

[Note: Packed weights at rest]
The weights at rest stay what they are without packing: views of their checkpoint, of a group file, or of RAM. So they can be
read, edited and saved as always, and edits are found as always. A packed image is made from them, and lies beside them. It is
good as long as the blob has the same `generation`: after an edit the blob itself is sent, until it was packed again.

Memory that is only read does not have to be page-locked. So what rests in a checkpoint or in a group file takes no RAM beside
its packed image, and what rests in RAM takes its own size and that of the image.

A packed group file is page-locked where it lies in the page cache, if the device allows that: its image takes RAM once, for all
processes of the host. Else the image is read into page-locked RAM. Where RAM has no room for it, it stays in its file, and is
read from there each time.

What is read or locked the first time is compared with its hash, as the file may have been packed long ago. From then on the
file is watched as every file is that weights are read from ([Note: Which file it is] in `source`), and with `verify_files` each
read is compared. If it is damaged, or was changed, the forward or backward that needs it raises, and later ones use the weights
as they rest.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import repeat

import torch

from ..base.device import Backend
from ..base.layout import BlobLayout, span_of
from ..base.mapping import flat_view, map_anonymous, touch_all
from ..base.page_lock import LockLimit, PageLock
from ..base.pool import Task, finish_all, on_pool
from ..base.release import release_later
from ..base.tuning import tuning
from ..errors import GroupFileError
from ..packing.codec import pack
from ..packing.layout import ENTRY_BYTES, PackedLayout, Runs, Strip
from ..packing.operators import escapes_of, tile_table
from .moves import Copy, Move, Read, Unpack
from .packed_files import PackedFile
from .source import Piece, Proof, SourceFile


class FileContents:
    """A packed group file, as its reads and checks see it: see `Contents` in `source`."""

    def __init__(self, file: PackedFile, generation: int) -> None:
        """
        Args:
            file: Its descriptor is the caller's to close.

        Raises:
            GroupFileError: the file cannot be mapped.
        """
        self.name = file.group_id
        self.content: str | None = file.content
        self.generation = generation
        self.pieces: Sequence[Piece] = [Piece(0, file.start, file.packed.packed_bytes)]
        try:
            self.source = _PackedSource(file.path, file.fd, file.start, file.stamp.st_size, file.stamp)
        except OSError as error:
            raise GroupFileError(f"Cannot map {file.path}, which has packed weights: {error}") from error
        self.source.blobs.add(self)
        self.is_proven = False
        """Whether the bytes were compared with their hash since the file was opened."""

    @property
    def position(self) -> int:
        """Where the image begins in the file."""
        return self.pieces[0].position

    def prove(self) -> None:
        """See `Contents.prove`."""
        proof = _ImageProof(self)
        for chunk in self.source.chunks(self.position, self.pieces[0].num_bytes):
            proof.update(chunk)

    def escapes_before(self, tile: int, strip: Strip, place: int) -> int:
        """How many escapes come before a tile of the strip that begins at byte `place` of the image.

        Raises:
            GroupFileError: the file cannot be read.
        """
        entry, at = bytearray(ENTRY_BYTES), place + strip.tiles_at + tile * ENTRY_BYTES
        self.source.read_straight(memoryview(entry), self.position + at)
        return escapes_of(int.from_bytes(entry, "little"), strip)


class _ImageProof(Proof):
    """Notes that an image is proven."""

    def __init__(self, contents: FileContents) -> None:
        super().__init__(contents)
        self._of = contents

    def update(self, data: memoryview) -> bool:
        is_whole = super().update(data)
        self._of.is_proven |= is_whole
        return is_whole


class _PackedSource(SourceFile):
    """A packed group file. It is not the only place of its weights."""

    is_lost = False

    def lost(self, position: int, what: str) -> GroupFileError:
        self.is_lost = True
        return GroupFileError(
            f"Cannot read the packed weights in {self.path} at byte {position:,}: {what}. No weight is lost: the next forward "
            f"reads them as they are at rest. Delete the file, and it is packed again when the model is offloaded again."
        )


class PackedImage(ABC):
    """The packed bytes of a blob. See [Note: Packed weights at rest]."""

    is_read: bool
    """Whether the packed bytes are read from a file each time that they are sent."""

    def __init__(self, layout: PackedLayout, generation: int, contents: FileContents | None) -> None:
        """
        Args:
            generation: The blob's, when it was packed.
            contents: The packed file, if the packed bytes are taken from it for as long as the image is used.
        """
        self.layout = layout
        self.contents = contents
        self._generation = generation
        self._needed: dict[tuple[int, int, int], Runs] = {}
        """What `_needed_for` has found. Each pass asks for the same parts."""

    @property
    def num_bytes(self) -> int:
        return self.layout.packed_bytes

    @property
    def generation(self) -> int:
        """The generation of the blob that the packed bytes are good for."""
        return self._generation if self.contents is None else self.contents.generation

    @property
    def is_lost(self) -> bool:
        """Whether the packed bytes cannot be had any more, so that the blob is sent as it is."""
        return self.contents is not None and self.contents.source.is_lost

    def check(self) -> None:
        """
        Raises:
            GroupFileError: another program changed the file that the packed bytes are page-locked in. (Reads of others tell.)
        """
        if self.contents is not None and not self.is_read:
            self.contents.source.check()

    @property
    def ram_bytes(self) -> int:
        """What the packed bytes take of page-locked RAM."""
        return 0 if self.is_read else self.num_bytes

    @abstractmethod
    def moves(self, at: int, label: str, on_device: torch.Tensor | None) -> list[Move]:
        """How the blob gets to byte `at` of a slot, strip by strip: see `Blob.moves`.

        Args:
            on_device: The packed bytes in memory of the device, if they are there.
        """

    def _unpacks(
        self, at: int, label: str, packed: Iterable[torch.Tensor | None], *, is_on_device: bool = False
    ) -> Iterator[Unpack]:
        for number, ((strip, start, _), mine) in enumerate(zip(self.layout.placed, packed, strict=False)):
            needed_for = partial(self._needed_for, number)
            yield Unpack(at + start, strip.plain_bytes, strip, mine, label, needed_for, is_on_device)

    def _needed_for(self, number: int, start: int, end: int) -> Runs:
        """The packed bytes that bytes `start` to `end` of a strip are unpacked from, by the number of the strip.

        Raises:
            GroupFileError: the file cannot be read.
        """
        found = self._needed.get((number, start, end))
        if found is None:
            strip, _, place = self.layout.placed[number]
            escapes_before = partial(self._escapes_before, strip=strip, place=place)
            found = self._needed[number, start, end] = strip.needed(start, end, escapes_before)
        return found

    @abstractmethod
    def _escapes_before(self, tile: int, strip: Strip, place: int) -> int:
        """How many escapes come before a tile of the strip that begins at byte `place` of the image."""

    def close(self) -> None:  # noqa: B027
        """Give up the memory. A file is closed with the last read that is on its way."""


class RamImage(PackedImage):
    """Packed bytes in page-locked RAM."""

    is_read = False

    def __init__(
        self,
        layout: PackedLayout,
        memory: torch.Tensor,
        lock: PageLock | None,
        generation: int,
        contents: FileContents | None = None,
    ) -> None:
        """
        Args:
            memory: Page-locked, flat uint8.
            lock: None if the driver allocated the memory, or `contents` holds the lock.
            contents: The file whose page cache the memory is, if it is that.
        """
        super().__init__(layout, generation, contents)
        self._memory = memory
        self._lock = lock
        self._strips = layout.cut(memory)

    def moves(self, at: int, label: str, on_device: torch.Tensor | None) -> list[Move]:
        if on_device is not None:
            return [*self._unpacks(at, label, self.layout.cut(on_device), is_on_device=True)]
        return [*self._unpacks(at, label, self._strips)]

    def _escapes_before(self, tile: int, strip: Strip, place: int) -> int:
        if self.contents is not None:  # a page of a file that was cut off must not be touched
            return self.contents.escapes_before(tile, strip, place)
        return escapes_of(int(tile_table(self._memory[place:], strip)[tile]), strip)

    def copy(self, at: int) -> Copy:
        """How the packed bytes get to byte `at` of a slot."""
        return Copy(at, self.num_bytes, self._memory, 0)

    def close(self) -> None:
        """Give the memory back, on another thread, once no copy reads it."""
        memory: list[object] = [self._lock, self._strips, self._memory, self.contents]
        self._lock, self._strips, self._memory, self.contents = None, [], flat_view(b"", 0, 0), None
        release_later(memory)


class FileImage(PackedImage):
    """Packed bytes in a packed group file."""

    is_read = True

    def __init__(self, file: PackedFile, generation: int, *, is_verified: bool) -> None:
        """
        Args:
            file: Its descriptor is the caller's to close.
            is_verified: Whether each read is compared with what was packed.

        Raises:
            GroupFileError: the file cannot be mapped.
        """
        self._contents = FileContents(file, generation)
        super().__init__(file.packed, generation, self._contents)
        self._contents.source.avoid_readahead()
        self._is_verified = is_verified

    def moves(self, at: int, label: str, on_device: torch.Tensor | None) -> list[Move]:
        """See `PackedImage.moves`. The bytes do not stay on the device."""
        contents, source = self._contents, self._contents.source
        is_checked = self._is_verified or source.is_adrift or not contents.is_proven
        proof = _ImageProof(contents) if is_checked else None
        # Past the page cache: packed bytes that there is RAM for are in RAM.
        return [
            Read(0, strip.packed_bytes, source, contents.position + place, True, label, proof, unpack)
            for (strip, _, place), unpack in zip(
                self.layout.placed, self._unpacks(at, label, repeat(None)), strict=True
            )
        ]

    def _escapes_before(self, tile: int, strip: Strip, place: int) -> int:
        return self._contents.escapes_before(tile, strip, place)


def is_packable(layout: BlobLayout) -> bool:
    """Whether a blob is of a kind that packing makes smaller: large, and mostly bfloat16."""
    num_bytes = sum(span_of(s.shape, s.stride, 2) for s in layout.specs if s.dtype == torch.bfloat16)
    return layout.num_bytes >= tuning().min_packed_bytes and 2 * num_bytes >= layout.num_bytes


class LockedMemory:
    """Makes page-locked memory for packed bytes."""

    def __init__(self, limit: LockLimit, wait: Callable[[], None]) -> None:
        """
        Args:
            limit: How much more may be page-locked.
            wait: A function that returns once no copy is on its way: the pages stay locked until then.
        """
        self._limit, self._wait = limit, wait
        self._found: tuple[torch.Tensor, PageLock | None] | None = None

    def begin(self, num_bytes: int) -> Callable[[], torch.Tensor]:
        """Begin to make memory that is page-locked, if the system allows it. Returns a function that waits for it."""
        memory = flat_view(map_anonymous(num_bytes), 0, num_bytes)
        touched = touch_all(memory)
        locked = on_pool(self._lock, memory, touched)  # all of `touched` were begun before: none waits for a thread

        def finish() -> torch.Tensor:
            locked.wait()
            self._found = locked.result()
            return memory if self._found is None else self._found[0]

        return finish

    def _lock(self, memory: torch.Tensor, touched: Sequence[Task[None]]) -> tuple[torch.Tensor, PageLock | None] | None:
        finish_all(touched)
        lock = self._limit.lock(memory, self._wait)
        if lock is not None:
            return memory, lock
        by_driver = self._limit.allocate(memory.numel())
        return None if by_driver is None else (by_driver, None)

    def image(self, layout: PackedLayout, generation: int) -> PackedImage | None:
        """What is in the memory that was made last; None if it is not page-locked."""
        if self._found is None:
            return None
        memory, lock = self._found
        return RamImage(layout, memory[: layout.packed_bytes], lock, generation)


def pack_image(
    image: torch.Tensor,
    layout: BlobLayout,
    device: torch.device | None,
    generation: int,
    memory: LockedMemory,
    hashed: Task[str],
) -> PackedImage | None:
    """Pack the bytes of a blob.

    Args:
        image: Flat uint8, on the CPU.
        device: The device that packs, unless its memory is full; None for the CPU.
        hashed: The work of the pool that hashes the bytes.

    Returns:
        None if packing saves too little, or if no more memory can be page-locked.
    """
    packed = pack(image, layout, device, memory.begin, hashed)
    return None if packed is None else memory.image(packed.layout, generation)


def lock_image(
    file: PackedFile, generation: int, backend: Backend, wait: Callable[[], None]
) -> tuple[RamImage, Task[str]] | None:
    """Page-lock what was packed before where it lies in the page cache. The descriptor is closed, unless this returns None.

    Args:
        wait: A function that returns once no copy is on its way: the pages stay locked until then.

    Returns:
        The image, and the work of the pool that proves it: its result is what is wrong with the file, empty if nothing is. None
        if the device page-locks no files.

    Raises:
        GroupFileError: the file cannot be mapped.
    """
    with ExitStack() as stack:
        stack.callback(os.close, file.fd)
        contents = FileContents(file, generation)
        if not contents.source.lock(contents.pieces, backend, wait, in_one=True):
            contents.source.release()
            stack.pop_all()
            return None
    ((_, num_bytes, memory, start),) = contents.source.locked_parts(contents.pieces[0])
    image = RamImage(file.packed, memory[start : start + num_bytes], None, generation, contents)
    return image, on_pool(_prove, contents)


def _prove(contents: FileContents) -> str:
    try:
        contents.prove()
    except GroupFileError as error:  # whoever kept it would keep the memory
        why = error.__cause__ or "its data is not what was written"
        return f"{contents.source.path} cannot be used: {why}. Delete it: it is packed again when it is needed."
    return ""


def read_image(file: PackedFile, generation: int, memory: LockedMemory) -> PackedImage | None:
    """Read what was packed before. The file is closed.

    Returns:
        None if no more memory can be page-locked.

    Raises:
        GroupFileError: the file cannot be read, or is damaged.
    """
    try:
        file.read(memory.begin(file.packed.packed_bytes)())
    finally:
        os.close(file.fd)
    return memory.image(file.packed, generation)


def open_image(file: PackedFile, generation: int, *, is_verified: bool) -> FileImage:
    """What was packed before, to be read from its file each time. Nothing is read now, and the descriptor is closed.

    Raises:
        GroupFileError: the file cannot be mapped.
    """
    try:
        return FileImage(file, generation, is_verified=is_verified)
    finally:
        os.close(file.fd)
