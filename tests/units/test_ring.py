"""Places in a ring of device memory: inside of it, never across its two parts, and the same in every pass."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from group_offload.plan.ring import Geometry


@given(st.data())
def test_places_lie_in_one_part(data: st.DataObject) -> None:
    first, second = sorted((data.draw(st.integers(1, 100)), data.draw(st.integers(1, 100))), reverse=True)
    ring = Geometry(first + second, first)
    size = data.draw(st.integers(1, first))
    head = data.draw(st.integers(0, ring.num_bytes))
    live = data.draw(st.lists(st.integers(0, ring.num_bytes)))
    found = list(ring.starts(size, head, live, is_first=data.draw(st.booleans())))
    assert found and len(set(found)) == len(found)
    for start in found:
        assert start >= 0 and start + size <= ring.num_bytes
        assert start + size <= first or start >= first


def test_behind_the_last_one_and_then_where_the_oldest_is() -> None:
    ring = Geometry(20, 10)
    assert list(ring.starts(4, 4, [12, 0], is_first=False)) == [4, 12, 0]
    assert list(ring.starts(4, 8, [12, 0], is_first=False)) == [10, 12, 0]  # else it would lie in both parts
    assert list(ring.starts(4, 18, [], is_first=False)) == [0]


def test_a_pass_begins_where_the_ring_does() -> None:
    assert list(Geometry(20, 10).starts(4, 14, [14], is_first=True)) == [0, 14]


def test_what_is_larger_than_the_second_part_goes_to_the_first() -> None:
    ring = Geometry(15, 10)
    assert list(ring.starts(10, 10, [10, 4], is_first=False)) == [0]
