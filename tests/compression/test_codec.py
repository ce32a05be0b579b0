"""Compressed images: every byte comes back, whatever the weights are, and damage is found or stays where it is."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from group_offload import StorageError
from group_offload.base.layout import ALIGNMENT
from group_offload.base.tuning import Tuning
from group_offload.compression.codec import MIN_SAVING, compress, decompress, decompress_strip, hash_of
from group_offload.compression.layout import TILE_BYTES, TILE_WEIGHTS, CompressedLayout, Span, compressed_size

from ..support.compression import (
    compressed_of,
    compressible,
    image_of,
    only_needed,
    parts_of,
    tensors,
    weights,
    written_by,
)
from ..support.tuning import tune


def decompressed(data: torch.Tensor, layout: CompressedLayout) -> torch.Tensor:
    """What `decompress` writes. Bytes before and behind it have to stay what they are."""
    return written_by(lambda out: decompress(data, layout, out), layout.plain_bytes)


@given(tensors(), st.integers(4, 200) | st.none())
@settings(max_examples=150, deadline=None)
def test_every_byte_comes_back(given: list[torch.Tensor], num_tiles: int | None) -> None:
    """A strip decodes by itself, wherever tensors are cut, and takes little more than its own bytes. Hazard: NaN,
    infinities or denormals don't decompress to the weights."""
    with pytest.MonkeyPatch.context() as patch:
        if num_tiles is not None:
            tune(patch, strip_bytes=num_tiles * TILE_BYTES)
        image, layout = image_of(given)
        compressed = compress(image, layout)
    if compressed is None:  # tiny strips have much besides: what is in all tables, and the bytes behind escapes
        assert num_tiles is not None and num_tiles < 40
        return
    assert CompressedLayout.from_json(compressed.layout.to_json()) == compressed.layout
    assert torch.equal(decompressed(compressed.data, compressed.layout), image)
    assert compressed.layout.hash == hash_of(image)
    assert (
        compressed.data.numel()
        == compressed.layout.compressed_bytes
        <= (1 - MIN_SAVING) * compressed.layout.plain_bytes
    )
    strip_bytes = Tuning().strip_bytes if num_tiles is None else num_tiles * TILE_BYTES
    assert len(compressed.layout.strips) == -(-image.numel() // strip_bytes)
    for strip, start, place in compressed.layout.placed:
        assert strip.plain_bytes <= strip_bytes
        assert strip.compressed_bytes <= compressed_size((Span(0, strip.plain_bytes),), 0)
        assert strip.compressed_bytes % ALIGNMENT == 0  # compressed buffers of such a size lie one behind another
        mine = compressed.data[place : place + strip.compressed_bytes].clone()
        found = written_by(lambda out, mine=mine, strip=strip: decompress_strip(mine, strip, out), strip.plain_bytes)
        assert torch.equal(found, image[start : start + strip.plain_bytes])


def test_an_edge_of_the_image() -> None:
    """Weights that begin at an odd place of the image, as in some checkpoints."""
    layout = image_of([compressible()])[1]
    spec, extent = (replace(each[0], offset=6) for each in (layout.specs, layout.extents))  # type: ignore[type-var]
    layout = replace(layout, specs=(spec,), extents=(extent,), num_bytes=layout.num_bytes + 512)
    image = torch.randint(256, (layout.num_bytes,), dtype=torch.uint8)
    spec.view(image).copy_(compressible())
    compressed = compress(image, layout)
    assert compressed is not None
    assert compressed.layout.strips[0].spans[0] == Span(0, 16)
    assert torch.equal(decompressed(compressed.data, compressed.layout), image)


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
def test_what_does_not_compress(given: list[torch.Tensor]) -> None:
    """It stays plain beside what does."""
    assert compress(*image_of(given)) is None
    image, compressed = compressed_of([*given, *[compressible()] * 3])
    assert torch.equal(decompressed(compressed.data, compressed.layout), image)


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
def test_how_well_it_compresses(kind: str, bits: int, most: float) -> None:
    with torch.inference_mode():
        image, compressed = compressed_of([weights(kind, 500 * TILE_WEIGHTS)])
        assert torch.equal(decompressed(compressed.data, compressed.layout), image)
    assert compressed.layout.strips[0].spans[0].bits == bits
    assert compressed.layout.compressed_bytes / compressed.layout.plain_bytes < most


@pytest.mark.parametrize("length", [TILE_WEIGHTS - 1, 3 * TILE_WEIGHTS + 77])
def test_a_part_needs_a_part_of_the_compressed_bytes(length: int) -> None:
    """Each GPU of a host decodes its share: tiles that are cut in the middle, beside spans that are plain."""
    kinds = ("normal", "wide", "cast", "sparse")
    given = [each for kind in kinds for each in (weights(kind, 9 * length), torch.randn(33))]
    image, (layout, data) = compressed_of(given)
    (strip,) = layout.strips
    assert {span.code for span in strip.spans} >= {0, 3, 19}
    for start, end in parts_of(strip):
        needed = only_needed(data, strip, start, end)
        found = written_by(lambda out, n=needed, s=start: decompress_strip(n, strip, out, s), end - start)
        assert torch.equal(found, image[start:end]), (start, end)


COMPRESSED = compressed_of([compressible(), torch.randn(1000), weights("wide", 30_000), weights("scaled", 30_000)])[1]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_bytes_lead_nowhere(data: st.DataObject) -> None:
    """Their hash tells that they are damaged, maybe only after they were decompressed. Hazard: damaged compressed bytes make
    the reader write outside of its memory."""
    damaged = COMPRESSED.data.clone()
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, damaged.numel() - 1) | st.integers(0, 2048))
        damaged[place : place + data.draw(st.sampled_from([1, 8, 3000]))] = data.draw(st.integers(0, 255))
    with suppress(StorageError):
        decompressed(damaged, COMPRESSED.layout)
