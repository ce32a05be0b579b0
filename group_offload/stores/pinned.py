"""Images in RAM: exactly the weights' own bytes, page-locked where the device can do so.

[Note: Edits at rest]
Copies to the device read RAM long after they were enqueued, and the first groups of the next pass are on their way
before it begins. So what copies read must not be what users edit. Images therefore rest in memory that is mapped twice:
copies read the shared mapping, weights at rest are views of a private one. Both show the same pages, and RAM is taken
once, until somebody writes to a weight: that page, and only that, gets a copy of its own. At the beginning of a pass the
kernel tells which pages those are (`pagemap`), and they become part of the image.

Where the kernel does not tell, weights at rest are the image itself, nothing is prefetched across passes, and the host
waits for the last copy at the end of each pass (`Image.is_stable`).
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence

import torch

from ..device import Backend
from ..layout import ImageLayout, as_bytes, extent_bytes
from .base import Mover, Tier, memory_of
from .mapping import TwiceMapped, flat_view, forget_writes, map_anonymous
from .pagemap import PAGE, SLOW_SCAN_SECONDS, PageScan, tells_writes

logger = logging.getLogger("group_offload")

SEGMENT_BYTES = 256 << 20
"""Images are packed into segments of this size; one that is larger has its own. Page-locking works while the next fills."""


class Segment:
    """RAM that images lie in one after another, page-locked as one. See [Note: Edits at rest].

    Order of calls: `fill`, `lock`, then images are made.
    """

    def __init__(self, num_bytes: int, backend: Backend, *, pin: bool, wait: Callable[[], None]) -> None:
        self._backend = backend
        self._wait = wait
        """Returns once no copy is on its way: before that the pages stay locked."""
        self._pins = pin and backend.has_streams and num_bytes > 0
        self._num_bytes = num_bytes
        self._private: torch.Tensor | None = None
        self._scan: PageScan | None = None
        self._images: weakref.WeakSet[RamImage] = weakref.WeakSet()
        self._num_open = 0
        self._unpin: Callable[[], object] | None = None
        self._twice = TwiceMapped(num_bytes) if self._pins and tells_writes() else None
        if self._twice is not None:
            self._rest_memory = self._twice.private
            self._private = flat_view(self._rest_memory, 0, num_bytes)
            self._scan = PageScan(self._private.data_ptr(), num_bytes)
            self.bytes = flat_view(self._twice.shared, 0, num_bytes)
        else:
            self._rest_memory = map_anonymous(num_bytes)
            self.bytes = flat_view(self._rest_memory, 0, num_bytes)

    @property
    def is_locked(self) -> bool:
        return self._unpin is not None

    @property
    def is_stable(self) -> bool:
        return self._private is not None

    def fill(self, images: Sequence[tuple[ImageLayout, Sequence[torch.Tensor]]]) -> None:
        """Copy the bytes of images, one after another."""
        runs = []
        start = 0
        for layout, tensors in images:
            for extent in layout.extents:
                source = extent_bytes(tensors, extent)
                if self._twice is not None and source.device.type == "cpu":
                    runs.append((start + extent.offset, memory_of(source)))
                else:
                    begin = start + extent.offset
                    self.bytes[begin : begin + extent.num_bytes].copy_(source)
            start += layout.num_bytes
        if self._twice is not None:
            self._twice.write(runs)
            self._twice.seal()

    def lock(self) -> None:
        """Page-lock what was filled. Where that is refused the device's own memory serves, else pageable RAM."""
        if not self._pins:
            return
        unpin = self._backend.pin(self.bytes)
        if unpin is None:
            self._fall_back()
            return
        # A module that is dropped without remove() must not leave its pages locked. At interpreter exit the driver is
        # gone already and the pages go with the process.
        finalizer = weakref.finalize(self, unlock, self._wait, unpin, self.bytes)
        finalizer.atexit = False
        self._unpin = finalizer

    def rest(self, start: int, num_bytes: int) -> torch.Tensor:
        """A part of the memory, as weights at rest see it: with a storage of its own."""
        if self._rest_memory is None:
            return self.bytes[start : start + num_bytes]  # of torch's own making
        return flat_view(self._rest_memory, start, num_bytes)

    def hold(self, image: RamImage) -> None:
        self._images.add(image)
        self._num_open += 1

    def let_go(self) -> None:
        """One image less. The last one unlocks the memory, and gives it back if no tensor at rest is left."""
        self._num_open -= 1
        if self._num_open:
            return
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self._private = self._scan = self._twice = self._rest_memory = None
        self.bytes = flat_view(b"", 0, 0)

    def take_up_edits(self, wait: Callable[[], None]) -> bool:
        private, scan = self._private, self._scan
        if private is None or scan is None:
            return False
        started = time.perf_counter()
        ranges = scan.written()
        if ranges is None:  # it did once, and no longer does: compare
            ranges = [] if torch.equal(private, self.bytes) else [(0, -(-self._num_bytes // PAGE) * PAGE)]
        address = private.data_ptr()
        if not ranges:
            if time.perf_counter() - started > SLOW_SCAN_SECONDS:
                forget_writes(address, self._num_bytes)  # there are none: this unmaps what was read
            return False
        wait()
        for start, end in ranges:
            inside = slice(start, min(end, self._num_bytes))
            with torch.inference_mode(False), torch.no_grad():
                self.bytes[inside].copy_(private[inside])
            forget_writes(address + start, end - start)
        for image in self._images:
            if any(start < image.start + image.layout.num_bytes and image.start < end for start, end in ranges):
                image.generation += 1
        return True

    def _fall_back(self) -> None:
        memory = self._backend.empty_pinned(self._num_bytes)
        if memory is None:
            logger.warning(
                "Could not page-lock %d bytes of RAM for %s: copies go through a staging buffer. A smaller model, or "
                "offload_to_disk_path, needs less of it.",
                self._num_bytes,
                self._backend.device,
            )
            return
        logger.warning(
            "Could not page-lock %d bytes of RAM in place for %s: memory of the driver's own making is used, which may take "
            "up to twice as much.",
            self._num_bytes,
            self._backend.device,
        )
        memory.copy_(self.bytes)
        self.bytes = memory
        self._private = self._scan = self._twice = self._rest_memory = None
        self._unpin = _nothing


class RamImage:
    """An image in a segment."""

    is_outdated = False

    def __init__(self, layout: ImageLayout, segment: Segment, start: int) -> None:
        self.layout = layout
        self.store = segment
        self.start = start
        self.generation = 0
        self.rest = layout.views_by_extent(lambda extent: segment.rest(start + extent.offset, extent.num_bytes))
        self.tier, self.where = Tier.RAM, "RAM, page-locked"
        if not segment._backend.has_streams or not layout.num_bytes:
            # Without streams every copy is done when it returns: page-locking would buy nothing.
            self.where = "RAM"
        elif not segment.is_locked:
            self.tier, self.where = Tier.PAGEABLE, "RAM, not page-locked"
        segment.hold(self)
        self._is_open = True

    @property
    def pinned_bytes(self) -> int:
        return self.layout.num_bytes if self.store.is_locked else 0

    @property
    def is_stable(self) -> bool:
        return self.store.is_stable

    def check(self) -> None:
        pass

    def write(self, index: int, value: torch.Tensor) -> bool:
        spec = self.layout.specs[index]
        begin = self.start + spec.offset
        with torch.inference_mode(False), torch.no_grad():
            self.store.bytes[begin : begin + value.numel()].copy_(value)
            rest = as_bytes(self.rest[index])
            if not torch.equal(rest, value):  # a page of its own hides the image: the weight beside it was edited
                rest.copy_(value)
        return False

    def send(self, mover: Mover, at: int) -> None:
        if self.tier is Tier.RAM:
            mover.copy(at, self.store.bytes, self.start, self.layout.num_bytes)
        else:
            mover.stage(at, self.layout.num_bytes, self._fill)

    def close(self, *, forget: bool) -> None:
        if self._is_open:
            self._is_open = False
            self.store.let_go()

    def _fill(self, chunk: torch.Tensor, start: int) -> None:
        begin = self.start + start
        chunk.copy_(self.store.bytes[begin : begin + chunk.numel()])


def unlock(wait: Callable[[], None], unpin: Callable[[], object], memory: torch.Tensor) -> None:
    """Unlock pages that copies may be reading. `memory` is what is locked: so it is unmapped later, never before.

    (A driver that is not told in time takes whatever is mapped to those addresses next for locked.)
    """
    wait()
    unpin()


def _nothing() -> None:
    pass
