"""Blobs in RAM. They take exactly the bytes of the weights, and are pinned where the device can do so.

[Note: Edits of offloaded weights]
Copies to the device read RAM long after they were enqueued, and the first groups of the next pass are on their way
before the pass begins. So copies must not read the memory that users edit. Blobs therefore are stored in memory that is mapped
twice: copies read the shared mapping, and offloaded weights are views of a private one. Both mappings show the same pages, so
RAM is taken once, until a weight is written to: then the kernel copies that page, and only that page, for the private
mapping. In each pass, before a blob is sent or used, the kernel tells which pages were copied (`pagemap`), and they are
written to the blob.

A forked child has both mappings too, and a write to the shared one is seen on both sides of the fork. So segments from
before a fork are never written to again, neither by the parent nor by the child. A blob with edits is made again, in
memory of one process alone (`Blob.is_outdated`), and the other process goes on to read the bytes as of the fork.

Where the kernel does not tell, offloaded weights are the blob itself: nothing is prefetched across passes, and the host
waits for the last copy at the end of each pass (`Blob.detects_edits`).
"""

from __future__ import annotations

import ctypes
import errno
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ..base.device import Backend
from ..base.layout import BlobLayout, as_bytes, extent_bytes, memory_of
from ..base.mapping import TwiceMapped, flat_view, forget_writes, map_anonymous
from ..base.pagemap import PAGE, can_detect_writes, written_pages
from ..base.pinning import PinLimit, PinnedPages
from ..base.release import release_later
from ..base.system import on_fork
from ..base.text import describe_bytes
from ..base.tuning import tuning
from ..errors import StateError
from .base import Blob
from .moves import Copy, Move, PageableMemory, Read, Tier

logger = logging.getLogger("group_offload")


_num_forks = 0
"""How many forks this process has been through, as parent or as child."""


def _count_fork() -> None:
    global _num_forks
    _num_forks += 1


on_fork(before=_count_fork)


class HostAllocator(Protocol):
    """RAM that the processes of a host have in common. Each of them fills segments in the same order."""

    turn: int
    """The number of segments until now."""

    @property
    def is_first(self) -> bool:
        """Whether this process makes the segments."""

    def names(self, num_bytes: int) -> Sequence[str]:
        """What the next segment is found by, if another process has made it; empty if this one makes it."""

    def was_filled(self, twice: TwiceMapped, num_bytes: int) -> None:
        """The segment has its content. `twice` is sealed once the other processes have it."""

    def differs(self, fqn: str) -> Exception:
        """The error for weights that are not those of the process that has made the segment."""


class Segment:
    """RAM that holds blobs one after another, pinned as a whole. See [Note: Edits of offloaded weights].

    Order of calls: `fill`, `lock`, `fetch`, then blobs are made.
    """

    commits_late = True

    def __init__(
        self,
        num_bytes: int,
        backend: Backend,
        *,
        pin: bool,
        wait: Callable[[], None],
        host: HostAllocator | None = None,
    ) -> None:
        self.backend = backend
        self._host = host
        """What other processes have in common with this one, if the segment belongs to that."""
        self._wait = wait
        """A function that returns once no copy is on its way: the pages stay pinned until then."""
        self._pins = pin and backend.has_streams and num_bytes > 0
        self._num_bytes = num_bytes
        self._is_of_another = False
        self.common = ""
        """The name of the segment, if other processes have the same memory, or have compared its bytes with theirs."""
        self.blobs: weakref.WeakSet[RamBlob] = weakref.WeakSet()
        self.is_pinned = False
        self._pinned: PinnedPages | None = None
        self._coming: list[tuple[int, torch.Tensor]] = []
        """Bytes that are in memory of a device, and where they go: `fetch` copies them."""
        self.pageable: PageableMemory | None = None
        """The memory, as threads read it that bring it to the device, if it is not pinned."""
        self._num_forks = _num_forks
        try:
            is_twice = (self._pins or (host is not None and num_bytes > 0)) and can_detect_writes()
            self._twice = self._map(num_bytes) if is_twice else None
            if self._twice is not None:
                sent, self._rest_memory = self._twice.shared, self._twice.private
            else:
                sent = self._rest_memory = map_anonymous(num_bytes)
            self.bytes = flat_view(sent, 0, num_bytes)
        except OSError as error:
            raise _no_room(num_bytes, error) from error

    def _map(self, num_bytes: int) -> TwiceMapped:
        names = () if self._host is None else self._host.names(num_bytes)
        self._is_of_another = bool(names)
        try:
            twice = TwiceMapped(num_bytes, names)
            if self._host is not None and (names or self._host.is_first):
                self.common = f"segment {self._host.turn}"
            return twice
        except OSError as error:
            if not names:
                raise
            logger.warning(
                "Each process holds its own copy of the weights: sharing memory between processes failed (%s).", error
            )
            self._is_of_another, self._host = False, None
            return TwiceMapped(num_bytes)

    @property
    def detects_edits(self) -> bool:
        return self._twice is not None

    @property
    def is_shared(self) -> bool:
        """Whether another process sees writes to the memory."""
        return self._twice is not None and (self._num_forks != _num_forks or self._host is not None)

    def fill(self, blobs: Sequence[tuple[BlobLayout, Sequence[torch.Tensor]]]) -> None:
        """Copy the bytes of blobs, one after another. Those in memory of a device have to be fetched later.

        The segment of another process has them: there they are compared.

        Raises:
            ModuleError: the segment is another process's, and has other bytes.
        """
        runs = []
        start = 0
        for layout, tensors in blobs:
            for extent in layout.extents:
                begin, source = start + extent.offset, extent_bytes(tensors, extent)
                there = self.bytes[begin : begin + extent.num_bytes]
                if self._host is not None:
                    source = source.cpu()  # all of it has to be there before another process looks
                if self._host is not None and self._is_of_another:
                    if not torch.equal(source, there):
                        raise self._host.differs(layout.specs[extent.tensors[0]].fqn)
                elif source.device.type != "cpu" or self.backend.holds(source):
                    self._coming.append((begin, source))
                elif self._twice is not None:
                    runs.append((begin, memory_of(source)))
                else:
                    there.copy_(source)
            start += layout.num_bytes
        if self._twice is None:
            return
        if not self._is_of_another:
            try:
                self._twice.write(runs)
            except OSError as error:
                raise _no_room(self._num_bytes, error) from error
        if self._host is not None:
            self._host.was_filled(self._twice, self._num_bytes)
        else:
            self._twice.seal()

    def lock(self, limit: PinLimit | None) -> None:
        """Pin the memory. If the device refuses, memory that the driver allocates serves, else pageable RAM.

        Blobs may be stored in it by now: then nothing but the memory itself can be pinned.

        Args:
            limit: None for memory that is not to be pinned, because compressed bytes are sent in place of it.
        """
        if self._pins and not self.is_pinned and limit is not None:
            self._pinned = limit.lock(self.bytes, self._wait)
            self.is_pinned = self._pinned is not None or (not self.blobs and self._fall_back(limit))
        self.pageable = None if self.is_pinned else self.pageable or PageableMemory(self.bytes)

    def unlock(self, limit: PinLimit) -> None:
        """Give up the lock, for memory that needs it more."""
        if self._pinned is not None:
            self._pinned.release()
            self._pinned, self.is_pinned, self.pageable = None, False, PageableMemory(self.bytes)
            limit.give_back(self._num_bytes)

    def fetch(self) -> bool:
        """Copy what is in memory of the device, at the speed of the link if the memory is pinned. It is there on return.

        Returns:
            Whether there was anything.
        """
        stream = self.backend.current_stream()
        for start, source in self._coming:
            target = self.bytes[start : start + source.numel()]
            if self.backend.holds(source):
                self.backend.copy(target, source, stream)
            else:
                target.copy_(source)
        if not self._coming:
            return False
        done = self.backend.new_event()
        done.record(stream)
        done.synchronize()
        self._coming.clear()
        return True

    def rest(self, start: int, num_bytes: int) -> torch.Tensor:
        """A part of the memory, as offloaded weights see it: with a storage of its own."""
        if self._rest_memory is None:
            return self.bytes[start : start + num_bytes]  # memory that the driver allocated: see `_fall_back`
        return flat_view(self._rest_memory, start, num_bytes)

    def remove(self, blob: RamBlob) -> None:
        """Forget a blob. With the last one threads unlock the memory, and give it back once no offloaded tensor is left."""
        self.blobs.discard(blob)
        if self.blobs:
            return
        memory = [self._pinned, self.pageable, self._twice, self._rest_memory, self.bytes]
        self._pinned, self.is_pinned, self.pageable = None, False, None
        self._twice = self._rest_memory = None
        self.bytes = flat_view(b"", 0, 0)
        release_later(memory)

    def may_have_edits(self) -> bool:
        """Whether offloaded weights may have other bytes than those that are sent."""
        twice = self._twice
        return twice is not None and (
            self.is_shared or written_pages(ctypes.addressof(twice.private), self._num_bytes) != []
        )

    def commit_edits(self, wait: Callable[[], None]) -> bool:
        twice, started = self._twice, time.perf_counter()
        if twice is None:
            return False
        address = ctypes.addressof(twice.private)
        ranges = written_pages(address, self._num_bytes)
        if ranges == []:
            if time.perf_counter() - started > tuning().slow_scan_seconds:
                # Nothing was written. This unmaps the pages that were read, so that the next scan is fast.
                forget_writes(address, self._num_bytes)
            return False
        private = flat_view(twice.private, 0, self._num_bytes)
        # Pinned pages count as written too, and where the system does not tell, all pages do. So bytes are compared.
        edited = []
        for start, end in ranges or [(0, -(-self._num_bytes // PAGE) * PAGE)]:
            inside = slice(start, min(end, self._num_bytes))
            if not torch.equal(private[inside], self.bytes[inside]):
                edited.append((start, end))
            elif ranges is not None:
                forget_writes(address + start, end - start)
        blobs = [
            blob
            for blob in self.blobs
            if any(start < blob.start + blob.layout.num_bytes and blob.start < end for start, end in edited)
        ]
        if self.is_shared:
            for blob in blobs:
                blob.is_outdated = True
            return any(blob.is_outdated for blob in self.blobs)
        if edited:
            wait()
        for start, end in edited:
            inside = slice(start, min(end, self._num_bytes))
            with torch.inference_mode(False), torch.no_grad():
                self.bytes[inside].copy_(private[inside])
            forget_writes(address + start, end - start)
        for blob in blobs:
            blob.generation += 1
        return bool(edited)

    def _fall_back(self, limit: PinLimit) -> bool:
        memory = limit.allocate(self._num_bytes)
        if memory is None:
            return False
        memory.copy_(self.bytes)
        self.bytes = memory
        self._twice = self._rest_memory = None
        return True


class RamBlob(Blob):
    """A blob in a segment."""

    store: Segment

    def __init__(self, layout: BlobLayout, segment: Segment, start: int) -> None:
        self.layout = layout
        self.store = segment
        self.start = start
        self.rest = layout.views_by_extent(lambda extent: segment.rest(start + extent.offset, extent.num_bytes))
        # Without streams every copy is done when it returns: pinning would buy nothing.
        self._gains_from_pinning = segment.backend.has_streams and layout.num_bytes > 0
        segment.blobs.add(self)

    @property
    def tier(self) -> Tier:  # type: ignore[override]
        return Tier.PAGEABLE if self._gains_from_pinning and not self.store.is_pinned else Tier.RAM

    @property
    def location(self) -> str:  # type: ignore[override]
        return "RAM" if not self._gains_from_pinning else "pinned RAM" if self.store.is_pinned else "pageable RAM"

    @property
    def pinned_bytes(self) -> int:
        return self.layout.num_bytes if self.store.is_pinned else 0

    @property
    def detects_edits(self) -> bool:
        return self.store.detects_edits

    @property
    def same_as(self) -> str:
        return f"{self.store.common} {self.start}" if self.store.common and not self.is_outdated else ""

    def write(self, index: int, value: torch.Tensor) -> None:
        self.drop_compressed()
        spec = self.layout.specs[index]
        begin = self.start + spec.offset
        self.is_outdated |= self.store.is_shared
        with torch.inference_mode(False), torch.no_grad():
            if self.is_outdated:
                as_bytes(self.rest[index]).copy_(value)
                return
            self.store.bytes[begin : begin + value.numel()].copy_(value)
            # Threads may have read the bytes for a later pass. (A copy by the device has not begun before this.)
            self.generation += self.tier is Tier.PAGEABLE
            rest = as_bytes(self.rest[index])
            if not torch.equal(rest, value):  # the page was copied, because the weight beside this one was edited
                rest.copy_(value)

    def _moves(self, at: int, label: str) -> list[Move]:
        if self.tier is Tier.RAM:
            return [Copy(at, self.layout.num_bytes, self.store.bytes, self.start)]
        assert self.store.pageable is not None
        return [Read(at, self.layout.num_bytes, self.store.pageable, self.start, False, label, self.tier)]

    def pinned_memory(self) -> torch.Tensor | None:
        """The bytes of the blob in pinned memory; None if offloaded weights may have other bytes."""
        if not self.store.is_pinned or self.is_outdated or self.store.may_have_edits():
            return None
        return self.store.bytes[self.start : self.start + self.layout.num_bytes]


def _no_room(num_bytes: int, error: OSError) -> Exception:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return StateError(
            f"Cannot take {describe_bytes(num_bytes)} of RAM for weights: {error.strerror}. Raise ulimit -n, or close files "
            f"that the process doesn't need."
        )
    return MemoryError(
        f"Cannot take {describe_bytes(num_bytes)} of RAM for weights: {error.strerror}. Pass offload_to_disk_path or "
        f"offload_device='disk' to keep them on disk, or raise ulimit -v: all weights must fit into the address space twice."
    )
