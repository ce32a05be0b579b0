"""Compressed images: the bytes of a blob once more, in fewer bytes of pinned RAM, or of a file. They are what is sent.

[Note: Compressed weights]
The offloaded weights stay what they are without compression: views of their checkpoint, of a group file, or of RAM. So they can
be read, edited and saved as always, and edits are found as always. A compressed image is made from them, and lies beside them.
It is good as long as the blob has the same `generation`: after an edit the blob itself is sent, until it was compressed again.

Memory that is only read does not have to be pinned. So what is stored in a checkpoint or in a group file takes no RAM beside
its compressed image, and what is stored in RAM takes its own size and that of the image.

A compressed group file is pinned where it lies in the page cache, if the device allows that: its image takes RAM once, for all
processes of the host. Else the image is read into pinned RAM. Where RAM has no room for it, it stays in its file, and is
read from there each time.

What is read or pinned the first time is compared with its hash, as the file may have been compressed long ago. From then on the
file is watched as every file is that weights are read from ([Note: Which file it is] in `source`), and with `verify_checksums`
each read is compared. If it is damaged, or was changed, the forward or backward that needs it raises, and later ones use the
weights as they rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from ..base.device import Backend
from ..base.layout import BlobLayout, span_of
from ..base.mapping import flat_view, map_anonymous, touch_all
from ..base.pinning import PinLimit, PinnedPages
from ..base.pool import Task, on_pool
from ..base.release import release_later
from ..base.tuning import tuning
from ..compression.layout import COMPRESSIBLE, ENTRY_BYTES, CompressedLayout, Runs, Strip
from ..compression.operators import escapes_of, tile_table
from ..errors import StorageError
from .compressed_files import CompressedFile
from .moves import Copy, Decompress, Move, Read, Tier
from .source import Proof


class CompressedImage:
    """The compressed bytes of a blob: in pinned RAM, or read from their file. See [Note: Compressed weights]."""

    def __init__(
        self,
        layout: CompressedLayout,
        generation: int,
        memory: torch.Tensor | None,
        lock: PinnedPages | None = None,
        file: CompressedFile | None = None,
        *,
        is_verified: bool = False,
    ) -> None:
        """
        Args:
            generation: That of the blob that the compressed bytes are good for.
            memory: Pinned, flat uint8. None: the compressed bytes are read each time that they are sent.
            lock: None if the driver allocated the memory, or `file` holds the lock.
            file: The compressed file, if the compressed bytes are taken from it for as long as the image is used.
            is_verified: Whether each read is compared with what was compressed.
        """
        self.layout = layout
        self.file = file
        self.is_read = memory is None
        """Whether the compressed bytes are read from a file each time that they are sent."""
        self.generation = generation
        self._memory, self._lock = memory, lock
        self._strips = [None] * len(layout.placed) if memory is None else layout.cut(memory)
        self._is_verified = is_verified
        self.proof: Task[str] | None = None
        """Compares a file that is pinned with its hash. The result is what is wrong with it, empty if nothing is."""
        self._needed: dict[tuple[int, int, int], Runs] = {}
        """What `_needed_for` has found. Each pass asks for the same parts."""

    @property
    def num_bytes(self) -> int:
        return self.layout.compressed_bytes

    @property
    def is_lost(self) -> bool:
        """Whether the compressed bytes cannot be had any more, so that the blob is sent as it is."""
        return self.file is not None and self.file.source.is_lost

    @property
    def ram_bytes(self) -> int:
        """What the compressed bytes take of pinned RAM."""
        return 0 if self.is_read else self.num_bytes

    def moves(self, at: int, label: str, on_device: torch.Tensor | None) -> list[Move]:
        """How the blob gets to byte `at` of a slot, strip by strip: see `Blob.moves`.

        Args:
            on_device: The compressed bytes in memory of the device, if they are there.
        """
        compressed = self._strips if on_device is None else self.layout.cut(on_device)
        decompresses = [
            Decompress(
                at + start,
                strip.plain_bytes,
                strip,
                mine,
                partial(self._needed_for, number),
                is_on_device=on_device is not None,
            )
            for number, ((strip, start, _), mine) in enumerate(zip(self.layout.placed, compressed, strict=True))
        ]
        if on_device is not None or self._memory is not None:
            return [*decompresses]
        file = self.file
        assert file is not None
        proof = Proof(file) if self._is_verified or not file.is_proven else None
        # Past the page cache: compressed bytes that there is RAM for are in RAM.
        return [
            Read(
                0, strip.compressed_bytes, file.source, file.position + place, True, label, Tier.FILE, proof, decompress
            )
            for (strip, _, place), decompress in zip(self.layout.placed, decompresses, strict=True)
        ]

    def _needed_for(self, number: int, start: int, end: int) -> Runs:
        """The compressed bytes that bytes `start` to `end` of a strip are decompressed from, by the number of the strip.

        Raises:
            StorageError: the file cannot be read.
        """
        found = self._needed.get((number, start, end))
        if found is None:
            strip, _, place = self.layout.placed[number]
            escapes_before = partial(self._escapes_before, strip=strip, place=place)
            found = self._needed[number, start, end] = strip.needed(start, end, escapes_before)
        return found

    def _escapes_before(self, tile: int, strip: Strip, place: int) -> int:
        """How many escapes come before a tile of the strip that begins at byte `place` of the image."""
        if self.file is not None:  # a page of a file that was cut off must not be touched
            entry, at = bytearray(ENTRY_BYTES), place + strip.tiles_at + tile * ENTRY_BYTES
            self.file.source.read_straight(memoryview(entry), self.file.position + at)
            return escapes_of(int.from_bytes(entry, "little"), strip)
        assert self._memory is not None
        return escapes_of(int(tile_table(self._memory[place:], strip)[tile]), strip)

    def copy(self, at: int) -> Copy:
        """How compressed bytes in pinned RAM get to byte `at` of a slot."""
        assert self._memory is not None
        return Copy(at, self.num_bytes, self._memory, 0)

    def close(self) -> None:
        """Give the memory back, on another thread, once no copy reads it. A file is closed with the last read of it."""
        if self._memory is not None:
            memory: list[object] = [self._lock, self._strips, self._memory, self.file]
            self._lock, self._strips, self._memory, self.file = None, [], flat_view(b"", 0, 0), None
            release_later(memory)


def is_compressible(layout: BlobLayout) -> bool:
    """Whether a blob is of a kind that compression makes smaller: large, and mostly bfloat16 or float8."""
    num_bytes = sum(span_of(s.shape, s.stride, s.dtype.itemsize) for s in layout.specs if s.dtype in COMPRESSIBLE)
    return layout.num_bytes >= tuning().min_compressed_bytes and 2 * num_bytes >= layout.num_bytes


class PinnedMemory:
    """Makes pinned memory for compressed bytes."""

    def __init__(self, limit: PinLimit, wait: Callable[[], None]) -> None:
        """
        Args:
            limit: How much more may be pinned.
            wait: A function that returns once no copy is on its way: the pages stay pinned until then.
        """
        self._limit, self._wait = limit, wait
        self._pinned: dict[int, tuple[torch.Tensor, PinnedPages | None]] = {}
        """What is pinned, by its address. What was begun before, and given up, may be pinned later."""

    def begin(self, num_bytes: int) -> Task[torch.Tensor]:
        """Begin to make memory that is pinned, if the system allows it."""
        memory = flat_view(map_anonymous(num_bytes), 0, num_bytes)
        return on_pool(self._lock, memory, touch_all(memory))  # touching has begun: none waits for a thread

    def _lock(self, memory: torch.Tensor, touched: Sequence[Task[None]]) -> torch.Tensor:
        for task in touched:
            task.wait()
        lock = self._limit.lock(memory, self._wait)
        by_driver = self._limit.allocate(memory.numel()) if lock is None else None
        memory = memory if by_driver is None else by_driver
        if lock is not None or by_driver is not None:
            self._pinned[memory.data_ptr()] = memory, lock
        return memory

    def image(self, layout: CompressedLayout, generation: int, data: torch.Tensor) -> CompressedImage | None:
        """What is in memory that was made; None if it is not pinned."""
        if data.data_ptr() not in self._pinned:
            return None
        memory, lock = self._pinned[data.data_ptr()]
        return CompressedImage(layout, generation, memory[: layout.compressed_bytes], lock)


def pin_image(
    file: CompressedFile, generation: int, backend: Backend, wait: Callable[[], None]
) -> CompressedImage | None:
    """Pin what was compressed before where it lies in the page cache, and begin to prove it.

    Args:
        wait: A function that returns once no copy is on its way: the pages stay pinned until then.

    Returns:
        None if the device pins no files.
    """
    if not file.source.lock(file.pieces, backend, wait, in_one=True):
        return None
    ((_, num_bytes, memory, start),) = file.source.pinned_parts(file.pieces[0])
    image = CompressedImage(file.compressed, generation, memory[start : start + num_bytes], file=file)
    image.proof = on_pool(_prove, file)
    return image


def _prove(file: CompressedFile) -> str:
    try:
        file.prove()
    except StorageError as error:  # whoever kept it would keep the memory
        return str(file.unusable(str(error.__cause__ or "its data is not what was written")))
    return ""
