"""The model of torch's allocator: what it asks the driver for, keeps, gives back and refuses."""

from __future__ import annotations

import random

import pytest
import torch

from ..support.allocator import Block, CachingAllocator, State

MIB = 1 << 20
GIB = 1 << 30


class Point:
    is_reached = False

    def query(self) -> bool:
        return self.is_reached

    def synchronize(self) -> None:
        self.is_reached = True


def sizes(card: CachingAllocator) -> list[list[float]]:
    """MiB of the blocks of each segment; free ones are negative. Addresses without memory are left out."""
    signs = {State.USED: 1, State.FREE: -1}
    return [
        [signs[block.state] * block.num_bytes / MIB for block in segment.blocks if block.state in signs]
        for segment in card.segments
    ]


def test_what_is_cached_is_released_before_anything_is_refused() -> None:
    """But for segments of which a part is in use: they are fragments."""
    card = CachingAllocator(100 * MIB)
    waits: list[object] = []
    card.wait = waits.append
    whole, use = card.malloc(40 * MIB, "stream"), Point()
    card.free(card.malloc(40 * MIB, "stream"))
    part = card.malloc(10 * MIB, "stream")
    card.free(whole, [use])
    card.malloc(60 * MIB, "other")
    assert use.is_reached and waits == [None] and card.num_frees == 1
    with pytest.raises(torch.OutOfMemoryError, match="31457280 bytes are reserved but unallocated"):
        card.malloc(31 * MIB, "other")
    assert (card.num_refused, card.free_bytes) == (1, 0)
    card.free(part)
    card.malloc(31 * MIB, "other")


def test_expandable_segments_grow_and_shrink_by_pages() -> None:
    card = CachingAllocator(200 * MIB, expandable=True)
    first, second, third = (card.malloc(30 * MIB, "stream") for _ in range(3))
    assert card.reserved.now == 100 * MIB and sizes(card) == [[30, 30, 30, -10]]
    card.free(second)
    card.release_cached()  # of 30 to 60 MiB the page from 40 to 60; of the last ten none
    assert card.reserved.now == 80 * MIB and sizes(card) == [[30, -10, 30, -10]]
    card.malloc(25 * MIB, "stream")  # where the page was
    assert card.reserved.now == 100 * MIB and sizes(card) == [[30, 25, -5, 30, -10]]
    card.free(first)
    card.malloc(110 * MIB, "other")  # takes the page of the first
    assert sizes(card) == [[-10, 25, -5, 30, -10], [110, -10]] and card.num_refused == 0
    card.free(third)
    card.release_cached()
    assert card.free_bytes == 40 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_nothing_gets_lost(expandable: bool) -> None:
    rng = random.Random(0)
    card = CachingAllocator(300 * MIB, expandable=expandable)
    held: list[Block] = []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            card.free(held.pop(rng.randrange(len(held))), [Point()] * rng.choice([0, 0, 1]))
        else:
            try:
                held.append(card.malloc(rng.choice([1000, MIB, 3 * MIB, 11 * MIB, 45 * MIB]), rng.choice("ab")))
            except torch.OutOfMemoryError:
                card.free(held.pop())
        blocks = [block for segment in card.segments for block in segment.blocks if block.state is not State.UNMAPPED]
        assert sum(block.num_bytes for block in blocks) == card.reserved.now <= card.capacity
        assert sum(block.num_bytes for block in held) == card.allocated.now
        assert all(block.state is State.USED and block in blocks for block in held)
        for segment in card.segments:
            starts = [block.start for block in segment.blocks]
            assert starts == [0, *(block.start + block.num_bytes for block in segment.blocks)][:-1]
    for block in held:
        card.free(block)
    card.release_cached()
    assert card.reserved.now == 0 and card.segments == []
