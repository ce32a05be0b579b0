"""The compressed bytes of a group, as they stay on the device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from ...base.layout import ALIGNMENT
from ...stores.base import PlacedImage
from ...stores.compressed import CompressedImage
from ..slots.slot import Slot
from .part import Part


class CompressedGroup:
    """What stays on the device of a group that is decompressed for each use. It is in a slot of its own, as groups are.

    Nothing that takes the slot's memory has to wait for it: the allocator knows which streams read the memory.
    """

    holds = 0
    detects_edits = True

    def __init__(self, group_id: str, parts: Sequence[Part]) -> None:
        self.group_id = group_id
        self._parts = parts
        self.slot: Slot[Any] | None = None
        """The slot that the compressed bytes are in, or on their way to."""
        self._sent: list[CompressedImage | None] = []
        """For each part, what was sent to the slot."""

    @property
    def _images(self) -> list[CompressedImage | None]:
        sent = [part.blob.good_image for part in self._parts]
        return [None if image is None or image.is_read else image for image in sent]

    @property
    def num_bytes(self) -> int:
        return _starts(self._images)[-1]

    @property
    def is_current(self) -> bool:
        """Whether the slot has the compressed bytes of the blobs as they are now."""
        return self._sent == self._images

    def blobs_at(self, offset: int) -> list[PlacedImage]:
        """The compressed bytes, placed in a slot."""
        images = self._images
        starts = zip(_starts(images), images, strict=False)
        return [PlacedImage(offset + at, self.group_id, image) for at, image in starts if image is not None]

    def was_sent(self, slot: Slot[Any], offset: int) -> None:
        """Note that the compressed bytes, as they are now, are on their way to `slot`."""
        self.slot, self._sent = slot, self._images

    def on_device(self) -> list[torch.Tensor | None]:
        """For each part, its compressed bytes on the device, if they are there."""
        slot = self.slot
        if slot is None or not self.is_current:
            return [None] * len(self._parts)
        starts = zip(_starts(self._sent), self._sent, strict=False)
        return [None if image is None else slot.memory[at : at + image.num_bytes] for at, image in starts]


def _starts(images: Sequence[CompressedImage | None]) -> list[int]:
    """Where each image begins, and the end."""
    sizes = [0 if image is None else -(-image.num_bytes // ALIGNMENT) * ALIGNMENT for image in images]
    return [*accumulate(sizes, initial=0)]
