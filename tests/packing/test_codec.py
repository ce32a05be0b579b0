"""Packed images: every byte comes back, whatever the weights are, and damage is found or stays where it is."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from group_offload import GroupFileError
from group_offload.base.layout import ALIGNMENT
from group_offload.base.tuning import Tuning
from group_offload.packing.codec import MIN_SAVING, hash_of, pack, unpack, unpack_strip
from group_offload.packing.layout import TILE_BYTES, TILE_WEIGHTS, PackedLayout, Span, packed_size

from ..support.packing import image_of, only_needed, packable, packed_of, parts_of, tensors, weights, written_by
from ..support.tuning import tune


def unpacked(data: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """What `unpack` writes. Bytes before and behind it have to stay what they are."""
    return written_by(lambda out: unpack(data, layout, out), layout.plain_bytes)


@given(tensors(), st.integers(4, 200) | st.none())
@settings(max_examples=150, deadline=None)
def test_every_byte_comes_back(given: list[torch.Tensor], num_tiles: int | None) -> None:
    """A strip decodes by itself, wherever tensors are cut, and takes little more than its own bytes. Hazard: NaN,
    infinities or denormals don't unpack to the weights."""
    with pytest.MonkeyPatch.context() as patch:
        if num_tiles is not None:
            tune(patch, strip_bytes=num_tiles * TILE_BYTES)
        image, layout = image_of(given)
        packed = pack(image, layout)
    if packed is None:  # tiny strips have much besides: what is in all tables, and the bytes behind escapes
        assert num_tiles is not None and num_tiles < 40
        return
    assert PackedLayout.from_json(packed.layout.to_json()) == packed.layout
    assert torch.equal(unpacked(packed.data, packed.layout), image)
    assert packed.layout.hash == hash_of(image)
    assert packed.data.numel() == packed.layout.packed_bytes <= (1 - MIN_SAVING) * packed.layout.plain_bytes
    strip_bytes = Tuning().strip_bytes if num_tiles is None else num_tiles * TILE_BYTES
    assert len(packed.layout.strips) == -(-image.numel() // strip_bytes)
    for strip, start, place in packed.layout.placed:
        assert strip.plain_bytes <= strip_bytes
        assert strip.packed_bytes <= packed_size((Span(0, strip.plain_bytes),), 0)
        assert strip.packed_bytes % ALIGNMENT == 0  # berths of such a size lie one behind another
        mine = packed.data[place : place + strip.packed_bytes].clone()
        found = written_by(lambda out, mine=mine, strip=strip: unpack_strip(mine, strip, out), strip.plain_bytes)
        assert torch.equal(found, image[start : start + strip.plain_bytes])


def test_an_edge_of_the_image() -> None:
    """Weights that begin at an odd place of the image, as in some checkpoints."""
    layout = image_of([packable()])[1]
    spec, extent = (replace(each[0], offset=6) for each in (layout.specs, layout.extents))  # type: ignore[type-var]
    layout = replace(layout, specs=(spec,), extents=(extent,), num_bytes=layout.num_bytes + 512)
    image = torch.randint(256, (layout.num_bytes,), dtype=torch.uint8)
    spec.view(image).copy_(packable())
    packed = pack(image, layout)
    assert packed is not None
    assert packed.layout.strips[0].spans[0] == Span(0, 16)
    assert torch.equal(unpacked(packed.data, packed.layout), image)


@pytest.mark.parametrize(
    "given",
    [
        [],
        [torch.empty(0)],
        [torch.ones(1).bfloat16()],
        [torch.randn(100_000)],
        [weights("normal", TILE_WEIGHTS - 1)],
        [weights("words", 100_000)],
        [weights("exponents", 100_000)],
    ],
)
def test_what_does_not_pack(given: list[torch.Tensor]) -> None:
    """It stays plain beside what does."""
    assert pack(*image_of(given)) is None
    image, packed = packed_of([*given, *[packable()] * 3])
    assert torch.equal(unpacked(packed.data, packed.layout), image)


@pytest.mark.parametrize(
    ("kind", "bits", "most"),
    [
        ("normal", 3, 0.705),
        ("constant", 3, 0.695),
        ("sparse", 3, 0.71),
        ("cauchy", 3, 0.76),
        ("wide", 4, 0.87),
        ("cast", 3, 0.73),
        ("scaled", 4, 0.91),
    ],
)
def test_how_well_it_packs(kind: str, bits: int, most: float) -> None:
    with torch.inference_mode():
        image, packed = packed_of([weights(kind, 500 * TILE_WEIGHTS)])
        assert torch.equal(unpacked(packed.data, packed.layout), image)
    assert packed.layout.strips[0].spans[0].bits == bits
    assert packed.layout.packed_bytes / packed.layout.plain_bytes < most


@pytest.mark.parametrize("length", [TILE_WEIGHTS - 1, 3 * TILE_WEIGHTS + 77])
def test_a_part_needs_a_part_of_the_packed_bytes(length: int) -> None:
    """Each GPU of a host decodes its share: tiles that are cut in the middle, beside spans that are plain."""
    kinds = ("normal", "wide", "cast", "sparse")
    given = [each for kind in kinds for each in (weights(kind, 9 * length), torch.randn(33))]
    image, (layout, data) = packed_of(given)
    (strip,) = layout.strips
    assert {span.code for span in strip.spans} >= {0, 3, 19}
    for start, end in parts_of(strip):
        needed = only_needed(data, strip, start, end)
        found = written_by(lambda out, n=needed, s=start: unpack_strip(n, strip, out, s), end - start)
        assert torch.equal(found, image[start:end]), (start, end)


PACKED = packed_of([packable(), torch.randn(1000), weights("wide", 30_000), weights("scaled", 30_000)])[1]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_bytes_lead_nowhere(data: st.DataObject) -> None:
    """Their hash tells that they are damaged, maybe only after they were unpacked. Hazard: damaged packed bytes make the
    reader write outside of its memory."""
    damaged = PACKED.data.clone()
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, damaged.numel() - 1) | st.integers(0, 2048))
        damaged[place : place + data.draw(st.sampled_from([1, 8, 3000]))] = data.draw(st.integers(0, 255))
    with suppress(GroupFileError):
        unpacked(damaged, PACKED.layout)
