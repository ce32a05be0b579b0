"""What slots need from files and RAM, cut into chunks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from group_offload.base.reading import BLOCK, blocks_around
from group_offload.runtime.copies.jobs import parts_of
from group_offload.stores.moves import PageableMemory, Read

MEMORY = PageableMemory(torch.zeros(1, dtype=torch.uint8))


def a_read(position: int, num_bytes: int, at: int = 0) -> Read:
    return Read(at, num_bytes, MEMORY, position, False, "group")


@given(position=st.integers(0, 3 * BLOCK), num_bytes=st.integers(0, 40 * BLOCK), limit=st.integers(1, 9 * BLOCK))
def test_parts_cover_each_byte_once_and_fit_into_a_frame(position: int, num_bytes: int, limit: int) -> None:
    at = 7
    for (part,) in parts_of([a_read(position, num_bytes, at)], limit):
        assert (part.at, part.position) == (at, position) and part.num_bytes > 0
        assert blocks_around(part.position, part.num_bytes) <= max(limit, BLOCK)
        at, position, num_bytes = at + part.num_bytes, position + part.num_bytes, num_bytes - part.num_bytes
    assert not num_bytes


@pytest.mark.parametrize(("num_blocks", "sizes"), [(4, [4]), (5, [3, 2]), (9, [3, 3, 3]), (10, [4, 4, 2])])
def test_parts_of_one_read_have_nearly_the_same_size(num_blocks: int, sizes: list[int]) -> None:
    """All of them are waited for: four blocks and one take as long as two times four."""
    parts = parts_of([a_read(0, num_blocks * BLOCK)], 4 * BLOCK)
    assert [sum(read.num_bytes for read in part) // BLOCK for part in parts] == sizes
