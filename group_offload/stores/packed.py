"""Packed images: the bytes of a blob once more, in fewer bytes of page-locked RAM. They are what is sent to the device.

[Note: Packed weights at rest]
The weights at rest stay what they are without packing: views of their checkpoint, of a group file, or of RAM. So they can be
read, edited and saved as always, and edits are found as always. A packed image is made from them, and lies beside them. It is
good as long as the blob has the same `generation`: after an edit the blob itself is sent, until it was packed again.

Memory that is only read does not have to be page-locked. So what rests in a checkpoint or in a group file takes no RAM beside
its packed image, and what rests in RAM takes its own size and that of the image.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..base.layout import BlobLayout, span_of
from ..base.mapping import flat_view, map_anonymous
from ..base.page_lock import LockLimit, PageLock
from ..base.release import release_later
from ..base.tuning import tuning
from ..packing.codec import pack
from ..packing.layout import PackedLayout
from .moves import Copy, Unpack


class PackedImage:
    """The packed bytes of a blob. See [Note: Packed weights at rest]."""

    def __init__(self, layout: PackedLayout, memory: torch.Tensor, lock: PageLock | None, generation: int) -> None:
        """
        Args:
            memory: Page-locked, flat uint8.
            lock: None if the driver allocated the memory.
            generation: The blob's, when it was packed.
        """
        self.layout = layout
        self.generation = generation
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


def pack_image(
    image: torch.Tensor,
    layout: BlobLayout,
    device: torch.device | None,
    generation: int,
    limit: LockLimit,
    wait: Callable[[], None],
) -> PackedImage | None:
    """Pack the bytes of a blob into page-locked memory.

    Args:
        image: Flat uint8, on the CPU.
        device: The device that packs; None for the CPU.
        limit: How much more may be page-locked.
        wait: A function that returns once no copy is on its way: the pages stay locked until then.

    Returns:
        None if packing saves too little, or if no more memory can be page-locked.
    """
    locks: list[PageLock | None] = []

    def allocate(num_bytes: int) -> torch.Tensor:
        memory = flat_view(map_anonymous(num_bytes), 0, num_bytes)
        lock = limit.lock(memory, wait)
        found = memory if lock is not None else limit.allocate(num_bytes)
        if found is not None:
            locks.append(lock)
        return memory if found is None else found

    try:
        packed = pack(image, layout, device, allocate)
    except torch.OutOfMemoryError:
        locks.clear()
        packed = pack(image, layout, None, allocate)
    if packed is None or not locks:
        return None
    return PackedImage(packed.layout, packed.data, locks[-1], generation)
