"""Images in RAM: exactly the weights' own bytes, page-locked where the device can do so."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence

import torch

from ..device import Backend
from ..layout import Extent, ImageLayout, extent_bytes
from .base import Mover, Tier
from .mapping import flat_view, map_anonymous

logger = logging.getLogger("group_offload")


class RamImage:
    """An image in an anonymous mapping of its exact size.

    torch's own pinned allocator rounds every block up to a power of two. Here the pages are mapped first (huge pages
    where the kernel has them) and registered with the device in place, so no byte is taken twice.
    """

    def __init__(self, layout: ImageLayout, tensors: Sequence[torch.Tensor], backend: Backend, *, pin: bool) -> None:
        self.layout = layout
        self._backend = backend
        self._memory = map_anonymous(layout.num_bytes)
        self._bytes = flat_view(self._memory, 0, layout.num_bytes)
        for extent in layout.extents:
            self._bytes[extent.offset : extent.offset + extent.num_bytes].copy_(extent_bytes(tensors, extent))
        self.rest = layout.views_by_extent(self._extent)
        self.pinned_bytes = 0
        # Without streams every copy is done when it returns: page-locking would buy nothing.
        self.tier, self.where = Tier.RAM, "RAM"
        if not backend.has_streams or not layout.num_bytes:
            return
        self.tier, self.where = Tier.PAGEABLE, "RAM, not page-locked"
        if not pin:
            return
        unpin = backend.pin(self._bytes)
        if unpin is None:
            logger.warning("Could not page-lock %d bytes of RAM for %s: copies go through a staging buffer.",
                           layout.num_bytes, backend.device)  # fmt: skip
            return
        self.tier, self.pinned_bytes, self.where = Tier.RAM, layout.num_bytes, "RAM, page-locked"
        # A module that is dropped without remove() must not leave its pages locked. At interpreter exit the driver is
        # gone already and the pages go with the process.
        self._unpin = weakref.finalize(self, unpin)
        self._unpin.atexit = False

    def check(self) -> None:
        pass

    def keep_edits(self) -> None:
        pass  # `rest` is the image itself

    def send(self, target: torch.Tensor, mover: Mover) -> None:
        if self.tier is Tier.RAM:
            mover.copy(target, self._bytes)
        else:
            mover.stage(target, self._fill)

    def close(self, *, forget: bool) -> None:
        if self.pinned_bytes:
            self._unpin()
            self.pinned_bytes = 0

    def _fill(self, chunk: torch.Tensor, start: int) -> None:
        chunk.copy_(self._bytes[start : start + chunk.numel()])

    def _extent(self, extent: Extent) -> torch.Tensor:
        return flat_view(self._memory, extent.offset, extent.num_bytes)
