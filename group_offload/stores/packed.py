"""Packed images: the bytes of a blob once more, in fewer bytes of page-locked RAM. They are what is sent to the device.

[Note: Packed weights at rest]
The weights at rest stay what they are without packing: views of their checkpoint, of a group file, or of RAM. So they can be
read, edited and saved as always, and edits are found as always. A packed image is made from them, and lies beside them. It is
good as long as the blob has the same `generation`: after an edit the blob itself is sent, until it was packed again.

Memory that is only read does not have to be page-locked. So what rests in a checkpoint or in a group file takes no RAM beside
its packed image, and what rests in RAM takes its own size and that of the image.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from ..base.layout import BlobLayout, span_of
from ..base.mapping import flat_view, map_anonymous
from ..base.page_lock import LockLimit, PageLock
from ..base.release import release_later
from ..base.tuning import tuning
from ..packing.codec import pack
from ..packing.layout import PackedLayout
from .manifest import ManifestEntry
from .moves import Copy, Unpack
from .packed_files import PackedFile


class PackedImage:
    """The packed bytes of a blob. See [Note: Packed weights at rest]."""

    def __init__(
        self,
        layout: PackedLayout,
        memory: torch.Tensor,
        lock: PageLock | None,
        generation: int,
        entry: ManifestEntry | None = None,
    ) -> None:
        """
        Args:
            memory: Page-locked, flat uint8.
            lock: None if the driver allocated the memory.
            generation: The blob's, when it was packed.
            entry: What the manifest says of the packed file, if there is one.
        """
        self.layout = layout
        self.generation = generation
        self.entry = entry
        self._memory = memory
        self._lock = lock

    @property
    def num_bytes(self) -> int:
        return self.layout.packed_bytes

    def unpack(self, at: int, label: str, on_device: torch.Tensor | None) -> Unpack:
        """How the blob gets to byte `at` of a slot: see `Blob.moves`.

        Args:
            on_device: The packed bytes in memory of the device, if they are there.
        """
        packed = self._memory if on_device is None else on_device
        return Unpack(at, self.layout.plain_bytes, self.layout, packed, label, on_device is not None)

    def copy(self, at: int) -> Copy:
        """How the packed bytes get to byte `at` of a slot."""
        return Copy(at, self.num_bytes, self._memory, 0)

    def close(self) -> None:
        """Give the memory back, on another thread, once no copy reads it."""
        memory: list[object] = [self._lock, self._memory]
        self._lock, self._memory = None, flat_view(b"", 0, 0)
        release_later(memory)


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

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Memory that is page-locked, if the system allows it."""
        memory = flat_view(map_anonymous(num_bytes), 0, num_bytes)
        lock = self._limit.lock(memory, self._wait)
        by_driver = self._limit.allocate(num_bytes) if lock is None else None
        self._found = (memory, lock) if lock is not None else None if by_driver is None else (by_driver, None)
        return memory if self._found is None else self._found[0]

    def image(self, layout: PackedLayout, generation: int, entry: ManifestEntry | None = None) -> PackedImage | None:
        """What is in the memory that was allocated last; None if it is not page-locked."""
        return None if self._found is None else PackedImage(layout, *self._found, generation, entry)


def pack_image(
    image: torch.Tensor, layout: BlobLayout, device: torch.device | None, generation: int, memory: LockedMemory
) -> PackedImage | None:
    """Pack the bytes of a blob.

    Args:
        image: Flat uint8, on the CPU.
        device: The device that packs, unless its memory is full; None for the CPU.

    Returns:
        None if packing saves too little, or if no more memory can be page-locked.
    """
    try:
        packed = pack(image, layout, device, memory.allocate)
    except torch.OutOfMemoryError:
        packed = pack(image, layout, None, memory.allocate)
    return None if packed is None else memory.image(packed.layout, generation)


def read_image(file: PackedFile, generation: int, memory: LockedMemory) -> PackedImage | None:
    """Read what was packed before. The file is closed.

    Returns:
        None if no more memory can be page-locked.

    Raises:
        GroupFileError: the file cannot be read, or is damaged.
    """
    try:
        file.read(memory.allocate(file.packed.packed_bytes))
    finally:
        os.close(file.fd)
    return memory.image(file.packed, generation, file.entry)
