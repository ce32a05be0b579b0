"""How torch hands out the memory of a device: `Memory` keeps nothing that was freed, `CachingAllocator` does as CUDA's does.

Both only count. Which bytes a block stands for is the business of the device that asks. Sizes, thresholds and behavior are
those of c10/cuda/CUDACachingAllocator.cpp in torch 2.6 to 2.11 with its default settings: kMinBlockSize, kSmallSize,
kSmallBuffer, kMinLargeAlloc, kLargeBuffer and kRoundLarge there, `should_split`, `get_free_block`,
`try_allocate_expandable_block`, `unmap_block` and `release_cached_blocks`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from group_offload.base.device import Backend, Refusal

_MIB = 1 << 20


@dataclass(slots=True)
class Meter:
    now: int = 0
    peak: int = 0
    whole: Meter | None = None

    def add(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        if self.whole is not None:
            self.whole.add(num_bytes)


class State(Enum):
    FREE = "cached"
    USED = "handed out, or freed and still used by a stream"
    UNMAPPED = "addresses without memory, in an expandable segment"


@dataclass(slots=True, eq=False)
class Block:
    num_bytes: int
    state: State = State.FREE
    segment: Segment | None = None
    start: int = 0


@dataclass(slots=True, eq=False)
class Segment:
    """What the driver gave at once, cut into blocks; or the addresses of an expandable segment, cut so too."""

    stream: Hashable
    is_small: bool
    page_bytes: int | None
    """What is mapped and unmapped at once, if the segment is expandable."""
    blocks: list[Block] = field(default_factory=list)
    """By address. Neighbors that are both free, or both unmapped, are one block."""

    def add(self, block: Block) -> Block:
        block.segment = self
        self.blocks.append(block)
        return block

    def neighbor(self, block: Block, step: int) -> Block | None:
        index = self.blocks.index(block) + step
        return self.blocks[index] if 0 <= index < len(self.blocks) else None

    def split(self, block: Block, num_bytes: int) -> None:
        """Let `block` end after so many bytes. The rest is a block in the same state."""
        rest = Block(block.num_bytes - num_bytes, block.state, self, block.start + num_bytes)
        if rest.num_bytes:
            block.num_bytes = num_bytes
            self.blocks.insert(self.blocks.index(block) + 1, rest)

    def become(self, block: Block, state: State) -> None:
        """Change the state of `block`, which takes in the neighbors that are in that state."""
        block.state = state
        for step in (1, -1):
            other = self.neighbor(block, step)
            if other is not None and other.state is state:
                block.num_bytes += other.num_bytes
                block.start = min(block.start, other.start)
                self.blocks.remove(other)


class Memory:
    """Memory of a device that several processes share. What this process frees is free at once.

    `free` may be called at any moment and by any thread, as finalizers are.
    """

    expandable = True  # in effect: there are no fragments

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.allocated = Meter()
        self.reserved = self.allocated
        self.num_refused = 0
        self.refusal = Refusal()
        self.last_refused_bytes = 0
        self.num_mallocs = self.num_frees = 0  # calls of cudaMalloc and cudaFree
        self.num_pages = 0  # pages that were mapped or unmapped
        self.wait: Callable[[Any], None] = lambda stream: None
        """Waits until the device has done what a stream, or all streams (None), had to do. The device sets it."""
        self._elsewhere = 0  # what other processes and the driver have
        self._lock = threading.Lock()
        self._freed: deque[tuple[Block, Sequence[Any]]] = deque()

    @property
    def free_bytes(self) -> int:
        """What the driver could give."""
        return max(0, self.capacity - self._elsewhere - self.reserved.now)

    def other_takes(self, num_bytes: int) -> int:
        """Another process takes memory, of what is free. Returns how much it got."""
        taken = min(num_bytes, self.free_bytes)
        self._elsewhere += taken
        return taken

    def other_gives(self, num_bytes: int) -> None:
        """Another process gives memory back."""
        self._elsewhere -= num_bytes

    def driver_takes(self, num_bytes: int) -> None:
        """The driver loads kernels, or cuBLAS and cuDNN make their handles, whatever is free: it had come earlier otherwise."""
        self._elsewhere += num_bytes

    def reset_peak(self) -> None:
        for meter in (self.allocated, self.reserved):
            meter.peak = meter.now

    def malloc(self, num_bytes: int, stream: Hashable) -> Block:
        """A block for work of `stream`.

        Raises:
            torch.OutOfMemoryError: neither the cache nor the driver has one.
        """
        with self._lock:
            self._take_back()
            block = self._find(num_bytes, stream)
            if block is not None:
                block.state = State.USED
                self.allocated.add(block.num_bytes)
                return block
            self.num_refused += 1
            self.last_refused_bytes = num_bytes
        self.refusal.note(num_bytes)
        raise torch.OutOfMemoryError(
            f"Out of memory. Tried to allocate {num_bytes} bytes. Of {self.capacity} bytes {self.free_bytes} are free. "
            f"{self.allocated.now} bytes are allocated, and {self.reserved.now - self.allocated.now} bytes are reserved but "
            f"unallocated."
        )

    def free(self, block: Block, uses: Sequence[Any] = ()) -> None:
        """Give a block back.

        Args:
            uses: Events in the work of other streams: before them the block is not handed out again.
        """
        self._freed.append((block, uses))
        if self._lock.acquire(blocking=False):  # else whoever has it takes the block back, or the next one does
            try:
                self._take_back()
            finally:
                self._lock.release()

    def release_cached(self) -> None:
        """Give cached memory back to the driver."""

    def _take_back(self) -> None:
        while self._freed:
            block, uses = self._freed.popleft()
            self.allocated.add(-block.num_bytes)
            self._put_back(block, uses)

    def _find(self, num_bytes: int, stream: Hashable) -> Block | None:
        return Block(num_bytes) if num_bytes <= self.free_bytes else None

    def _put_back(self, block: Block, uses: Sequence[Any]) -> None:
        pass


class CachingAllocator(Memory):
    """torch's allocator for CUDA: what was freed is kept for later calls of the same stream, in pieces that may be too small.

    Args:
        scale: All of torch's sizes are divided by that.
        expandable: Whether `expandable_segments:True` is set.
    """

    def __init__(self, capacity: int, *, scale: int = 1, expandable: bool = False) -> None:
        super().__init__(capacity)
        self.reserved = Meter()
        self.expandable = expandable
        self.segments: list[Segment] = []
        self._pending: list[tuple[Block, Sequence[Any]]] = []
        self._min_block = max(1, 512 // scale)
        self._small = _MIB // scale
        self._small_segment = 2 * _MIB // scale
        self._large_from = 10 * _MIB // scale
        self._large_segment = 20 * _MIB // scale
        self._large_step = 2 * _MIB // scale

    def release_cached(self) -> None:
        with self._lock:
            self._take_back()
            self._release()

    def _find(self, num_bytes: int, stream: Hashable) -> Block | None:
        self._process_events()
        size = _round_up(num_bytes, self._min_block)
        is_small = size <= self._small
        block = self._best_fit(size, stream, is_small) or self._grow(size, stream, is_small)
        if block is None:
            self._release()
            block = self._grow(size, stream, is_small)
        if block is None:
            return None
        rest = block.num_bytes - size
        if rest >= self._min_block if is_small or self.expandable else rest > self._small:
            assert block.segment is not None
            block.segment.split(block, size)
        return block

    def _put_back(self, block: Block, uses: Sequence[Any]) -> None:
        if uses:
            self._pending.append((block, uses))
        else:
            assert block.segment is not None
            block.segment.become(block, State.FREE)

    def _process_events(self) -> None:
        pending, self._pending = self._pending, []
        for block, uses in pending:
            self._put_back(block, [use for use in uses if not use.query()])

    def _segments_of(self, stream: Hashable, is_small: bool) -> Iterator[Segment]:
        return (each for each in self.segments if each.stream is stream and each.is_small is is_small)

    def _best_fit(self, size: int, stream: Hashable, is_small: bool) -> Block | None:
        found = [
            block
            for segment in self._segments_of(stream, is_small)
            for block in segment.blocks
            if block.state is State.FREE and block.num_bytes >= size
        ]
        found.sort(key=lambda block: block.num_bytes)
        # A block that could grow counts as large as it could become, for as long as the next one counts less.
        while len(found) > 1 and _expandable_bytes(found[1]) < _expandable_bytes(found[0]):
            found.pop(0)
        return found[0] if found else None

    def _grow(self, size: int, stream: Hashable, is_small: bool) -> Block | None:
        if self.expandable:
            return self._expand(size, stream, is_small)
        if is_small:
            num_bytes = self._small_segment
        else:
            num_bytes = self._large_segment if size < self._large_from else _round_up(size, self._large_step)
        if num_bytes > self.free_bytes:
            return None
        self.num_mallocs += 1
        self.reserved.add(num_bytes)
        self.segments.append(Segment(stream, is_small, None))
        return self.segments[-1].add(Block(num_bytes))

    def _expand(self, size: int, stream: Hashable, is_small: bool) -> Block | None:
        """Map pages at the lowest addresses where free and unmapped blocks in a row have the room."""
        for segment in self._segments_of(stream, is_small):
            for index, block in enumerate(segment.blocks):
                if block.state is State.UNMAPPED:
                    before = segment.blocks[index - 1] if index else block
                    first = before if before.state is State.FREE else block
                    if _room(segment, first) >= size:
                        return self._map(segment, first, size)
        page_bytes = self._small_segment if is_small else self._large_segment
        segment = Segment(stream, is_small, page_bytes)
        self.segments.append(segment)
        addresses = Block(_round_up(self.capacity + self.capacity // 8, page_bytes), State.UNMAPPED)
        return self._map(segment, segment.add(addresses), size)

    def _map(self, segment: Segment, block: Block, size: int) -> Block | None:
        """Make `block`, and what follows it, one free block of `size` bytes at least."""
        assert segment.page_bytes is not None
        while block.state is State.UNMAPPED or block.num_bytes < size:
            gap, missing = block, size
            if block.state is State.FREE:
                after = segment.neighbor(block, 1)
                assert after is not None
                gap, missing = after, size - block.num_bytes
            num_bytes = _round_up(min(missing, gap.num_bytes), segment.page_bytes)
            if num_bytes > self.free_bytes:
                return None
            self.num_pages += num_bytes // segment.page_bytes
            self.reserved.add(num_bytes)
            segment.split(gap, num_bytes)
            segment.become(gap, State.FREE)
            block = gap
        return block

    def _release(self) -> None:
        pending, self._pending = self._pending, []
        for block, uses in pending:
            for use in uses:
                use.synchronize()
            self._put_back(block, ())
        for segment in [*self.segments]:
            for block in [*segment.blocks]:
                if block.state is not State.FREE:
                    continue
                if segment.page_bytes is not None:
                    self._unmap(segment, block, segment.page_bytes)
                elif len(segment.blocks) == 1:
                    self.wait(None)  # cudaFree waits for the device
                    self.num_frees += 1
                    self.reserved.add(-block.num_bytes)
                    self.segments.remove(segment)
            if all(block.state is State.UNMAPPED for block in segment.blocks):
                self.segments.remove(segment)

    def _unmap(self, segment: Segment, block: Block, page_bytes: int) -> None:
        """Take the whole pages of a free block away. What is beside them stays free."""
        begin = _round_up(block.start, page_bytes)
        num_bytes = (block.start + block.num_bytes) // page_bytes * page_bytes - begin
        if num_bytes <= 0:
            return
        self.wait(segment.stream)
        self.num_pages += num_bytes // page_bytes
        self.reserved.add(-num_bytes)
        if begin > block.start:
            segment.split(block, begin - block.start)
            after = segment.neighbor(block, 1)
            assert after is not None
            block = after
        segment.split(block, num_bytes)
        segment.become(block, State.UNMAPPED)


def _round_up(num_bytes: int, step: int) -> int:
    return -(-num_bytes // step) * step


def _room(segment: Segment, first: Block) -> int:
    """The bytes of the free and unmapped blocks in a row that begins with `first`."""
    room = 0
    for block in segment.blocks[segment.blocks.index(first) :]:
        if block.state is State.USED:
            break
        room += block.num_bytes
    return room


def _expandable_bytes(block: Block) -> int:
    assert block.segment is not None
    after = block.segment.neighbor(block, 1)
    return block.num_bytes + (after.num_bytes if after is not None and after.state is State.UNMAPPED else 0)


class OnCard(Backend):
    """What a `Backend` tells of its memory, for devices of tests that have a card. They stand for the CPU."""

    has_streams = True

    def __init__(self, card: Memory) -> None:
        super().__init__(torch.device("cpu"))
        self.card, self.refusal, self.joins_fragments = card, card.refusal, card.expandable
        card.wait = self._wait_for
        self.errors: list[AssertionError] = []  # raised so far: finalizers and threads swallow them
        self._streams: list[Any] = []

    def _wait_for(self, stream: Any) -> None:
        for each in self._streams if stream is None else [stream]:
            self._finish(each)

    def _finish(self, stream: Any) -> None:
        raise NotImplementedError

    def copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: Any) -> None:
        for target, source in pairs:
            self.copy(target, source, stream)

    def peak_bytes_in_use(self) -> int:
        return self._bytes("allocated_bytes", "peak")

    def _bytes(self, which: str, when: str) -> int:
        meter = {"allocated_bytes": self.card.allocated, "reserved_bytes": self.card.reserved}[which]
        return {"current": meter.now, "peak": meter.peak}[when]

    def reset_peak(self) -> None:
        self.card.reset_peak()

    def refusals(self) -> tuple[int, int]:
        return self.card.num_refused, self.card.last_refused_bytes

    def total_bytes(self) -> int:
        return self.card.capacity

    def free_bytes(self) -> int:
        return self.card.free_bytes
