"""Packed images: every byte comes back, whatever the weights are, and damage is found or stays where it is."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from group_offload import GroupFileError
from group_offload.base.tuning import Tuning
from group_offload.packing import operators
from group_offload.packing.codec import MIN_SAVING, check, hash_of, pack, unpack, unpack_strip
from group_offload.packing.layout import (
    MAX_STRIP_BYTES,
    TILE_BYTES,
    TILE_WEIGHTS,
    PackedError,
    PackedLayout,
    Span,
    packed_size,
)

from ..support.packing import (
    image_of,
    only_needed,
    packable,
    packed_of,
    parts_of,
    tensors,
    weights,
    written_by,
)
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
    check(packed.data, packed.layout)
    assert PackedLayout.from_json(packed.layout.to_json()) == packed.layout
    assert torch.equal(unpacked(packed.data, packed.layout), image)
    assert packed.layout.hash == hash_of(image)
    assert packed.data.numel() == packed.layout.packed_bytes <= (1 - MIN_SAVING) * packed.layout.plain_bytes
    strip_bytes = Tuning().strip_bytes if num_tiles is None else num_tiles * TILE_BYTES
    assert len(packed.layout.strips) == -(-image.numel() // strip_bytes)
    for strip, start, place in packed.layout.placed:
        assert strip.plain_bytes <= strip_bytes
        assert strip.packed_bytes <= packed_size((Span(0, strip.plain_bytes),), 0)
        mine = packed.data[place : place + strip.packed_bytes].clone()
        found = written_by(lambda out, mine=mine, strip=strip: unpack_strip(mine, strip, out), strip.plain_bytes)
        assert torch.equal(found, image[start : start + strip.plain_bytes])


def test_a_strip_takes_no_more_than_it_may() -> None:
    """Weights that do not pack make the largest one."""
    assert packed_size((Span(0, Tuning().strip_bytes),), 0) <= MAX_STRIP_BYTES


def test_what_lies_between_weights_in_a_file() -> None:
    """It is packed with them. Of so few exponents that of zeros is a frequent one; what is there has others."""
    layout = image_of([torch.randint(-1, 2, (5120,)).mul(0.02).bfloat16() for _ in range(8)])[1]
    specs = tuple(replace(spec, offset=spec.offset + 192 * at) for at, spec in enumerate(layout.specs))
    extents = tuple(replace(extent, offset=extent.offset + 192 * at) for at, extent in enumerate(layout.extents))
    layout = replace(layout, specs=specs, extents=extents, num_bytes=layout.num_bytes + 192 * 7)
    image = torch.empty(layout.num_bytes // 2).uniform_(-60, 60).exp().bfloat16().view(torch.uint8)
    for spec in specs:
        ternary = torch.randint(-1, 2, (5120,)).mul(0.02).bfloat16()
        image[spec.offset : spec.offset + ternary.nbytes] = ternary.view(torch.uint8)
    packed = pack(image, layout)
    assert packed is not None
    assert any(span.bits and span.num_bytes > 2 * 5120 for span in packed.layout.strips[0].spans)
    assert torch.equal(unpacked(packed.data, packed.layout), image)


def test_the_cpu_packs_where_the_device_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    image, layout = image_of([packable()])
    count = operators.count_exponents

    def count_exponents(there: torch.Tensor, start: int, end: int) -> torch.Tensor:
        if there.device.type == "meta":
            raise torch.OutOfMemoryError
        return count(there, start, end)

    monkeypatch.setattr(operators, "count_exponents", count_exponents)
    found, expected = pack(image, layout, torch.device("meta")), pack(image, layout)
    assert found is not None and expected is not None
    assert found.layout == expected.layout and torch.equal(found.data, expected.data)


def test_an_edge_of_the_image() -> None:
    """Weights that begin at an odd place of the image, as in some checkpoints."""
    layout = image_of([packable()])[1]
    spec = replace(layout.specs[0], offset=6)
    extent = replace(layout.extents[0], offset=6)
    layout = replace(layout, specs=(spec,), extents=(extent,), num_bytes=layout.num_bytes + 512)
    image = torch.randint(256, (layout.num_bytes,), dtype=torch.uint8)
    spec.view(image).copy_(packable())
    packed = pack(image, layout)
    assert packed is not None
    assert packed.layout.strips[0].spans[0] == Span(0, 16)
    assert torch.equal(unpacked(packed.data, packed.layout), image)


@pytest.mark.parametrize("kind", ["words", "exponents", "wide"])
def test_what_does_not_pack_stays_plain(kind: str) -> None:
    assert pack(*image_of([weights(kind, 100_000)])) is None or kind == "wide"
    image, packed = packed_of([weights(kind, 100_000), *[packable()] * 3])
    assert torch.equal(unpacked(packed.data, packed.layout), image)


@pytest.mark.parametrize(
    "given",
    [[], [torch.empty(0)], [torch.ones(1).bfloat16()], [torch.randn(100_000)], [weights("normal", TILE_WEIGHTS - 1)]],
)
def test_too_little_to_pack(given: list[torch.Tensor]) -> None:
    assert pack(*image_of(given)) is None


@pytest.mark.parametrize(
    ("kind", "bits", "most"),
    [("normal", 3, 0.705), ("constant", 3, 0.695), ("sparse", 3, 0.71), ("cauchy", 3, 0.76), ("wide", 4, 0.87)],
)
def test_how_well_it_packs(kind: str, bits: int, most: float) -> None:
    _, packed = packed_of([weights(kind, 200 * TILE_WEIGHTS)])
    assert packed.layout.strips[0].spans[0].bits == bits
    assert packed.layout.packed_bytes / packed.layout.plain_bytes < most


def test_an_image_of_several_parts() -> None:
    tensors = [weights("cauchy", 3_000_000), weights("normal", 2_500_000)]
    with torch.inference_mode():
        image, packed = packed_of(tensors)
        assert torch.equal(unpacked(packed.data, packed.layout), image)
    image, packed = packed_of(tensors)
    assert torch.equal(unpacked(packed.data, packed.layout), image)
    check(packed.data, packed.layout)
    (strip,) = packed.layout.strips
    packed.data[strip.places[0] : strip.places[1]] = 0xFF
    with pytest.raises(PackedError, match="do not ask for the escapes"):
        unpacked(packed.data, packed.layout)


@pytest.mark.parametrize("length", [TILE_WEIGHTS - 1, 3 * TILE_WEIGHTS + 77])
def test_a_part_needs_a_part_of_the_packed_bytes(length: int) -> None:
    """Each GPU of a host decodes its share: tiles that are cut in the middle, beside spans that are plain."""
    given = [each for kind in ("normal", "wide", "sparse") for each in (weights(kind, 9 * length), torch.randn(33))]
    image, (layout, data) = packed_of(given)
    (strip,) = layout.strips
    assert {span.bits for span in strip.spans} >= {0, 3}
    for start, end in parts_of(strip):
        needed = only_needed(data, strip, start, end)
        found = written_by(lambda out, n=needed, s=start: unpack_strip(n, strip, out, s), end - start)
        assert torch.equal(found, image[start:end]), (start, end)


def test_neighbours_that_agree_share_a_table() -> None:
    small = [weights("normal", 1536, seed) for seed in range(9)]
    _, packed = packed_of([*small, packable(), weights("constant", 100_000)])
    assert [span.bits for span in packed.layout.strips[0].spans] == [3, 0, 3, 0]


# ------------------------------------------------------------------------------------------------ damage


IMAGE, PACKED = packed_of([packable(), torch.randn(1000), weights("wide", 30_000), weights("constant", 3)])
(STRIP,) = PACKED.layout.strips


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_bytes_are_found_or_stay_inside(data: st.DataObject) -> None:
    """Hazard: damaged packed bytes make the reader write outside of its memory."""
    damaged = PACKED.data.clone()
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, damaged.numel() - 1) | st.integers(0, 2048))
        damaged[place : place + data.draw(st.sampled_from([1, 8, 3000]))] = data.draw(st.integers(0, 255))
    try:
        check(damaged, PACKED.layout)
        out = unpacked(damaged, PACKED.layout)
    except PackedError:
        return
    used = torch.equal(damaged, PACKED.data) or hash_of(out) != PACKED.layout.hash
    assert used or torch.equal(out, IMAGE)  # a byte between the parts


@pytest.mark.parametrize(
    ("place", "which"),
    [(0, "spans"), (40, "spans"), (STRIP.tiles_at, "tiles"), (STRIP.tiles_at + 6, "tiles")],
)
def test_damaged_tables(place: int, which: str) -> None:
    damaged = PACKED.data.clone()
    damaged[place] ^= 0xFF
    with pytest.raises(PackedError, match=f"table of {which}"):
        check(damaged, PACKED.layout)


def test_out_of_the_wrong_size_or_place() -> None:
    """Hazard: a truncated packed image is read past its end."""
    for size in (0, 1, PACKED.data.numel() - 1):
        for call in (check, unpacked):
            with pytest.raises(PackedError, match="packed bytes"):
                call(PACKED.data[:size], PACKED.layout)
    with pytest.raises(ValueError, match="out has"):
        unpack(PACKED.data, PACKED.layout, torch.empty(5, dtype=torch.uint8))
    with pytest.raises(ValueError, match="multiples of 16"):
        unpack(PACKED.data, PACKED.layout, torch.empty(PACKED.layout.plain_bytes + 8, dtype=torch.uint8)[8:])


def changed(**values: Any) -> str:
    return json.dumps({**json.loads(PACKED.layout.to_json()), **values})


[[ESCAPES, SPANS]] = json.loads(PACKED.layout.to_json())["strips"]


def changed_spans(*spans: Any) -> str:
    return changed(strips=[[ESCAPES, spans]])


BAD_LAYOUTS = {
    "nothing": "",
    "no JSON": "{",
    "half of a character": '{"version": "\ud800"}',
    "a strip that is too large": changed(
        plain_bytes=65 << 20, packed_bytes=65 << 20, strips=[[0, [[65 << 20, 0, ""]]]]
    ),
    "no strip": changed(strips=[]),
    "an empty strip": changed(strips=[[ESCAPES, SPANS], [0, []]]),
    "spans that are short": changed_spans([4096, 3]),
    "five bits": changed_spans([SPANS[0][0], 5, SPANS[0][2]], *SPANS[1:]),
    "exponents of another code": changed_spans([SPANS[0][0], 4, SPANS[0][2]], *SPANS[1:]),
    "exponents in another order": changed_spans([SPANS[0][0], 3, "74" + SPANS[0][2][2:-2] + "73"], *SPANS[1:]),
    "an exponent twice": changed_spans([SPANS[0][0], 3, SPANS[0][2][:2] + SPANS[0][2][:-2]], *SPANS[1:]),
    "exponents that are no bytes": changed_spans([SPANS[0][0], 3, "xy"], *SPANS[1:]),
    "a part of a tile": changed_spans([SPANS[0][0] - 16, *SPANS[0][1:]], [16, 0, ""], *SPANS[1:]),
    "a span that is missing": changed_spans(*SPANS[1:]),
    "a span too many": changed_spans(*SPANS, SPANS[0]),
    "a huge span": changed_spans(*[[1 << 62, 0, ""]] * 3),
    "more escapes than weights": changed(strips=[[1 << 40, SPANS]]),
    "another size": changed(packed_bytes=4096),
    "a hash that is none": changed(hash="x" * 32),
}


@pytest.mark.parametrize("text", BAD_LAYOUTS.values(), ids=BAD_LAYOUTS)
def test_bad_layouts(text: str) -> None:
    with pytest.raises(PackedError, match=r"^(it|its|another) ") as caught:
        PackedLayout.from_json(text)
    assert isinstance(caught.value, GroupFileError)


def test_another_version() -> None:
    """Hazard: packed bytes of another version are unpacked as if of this one."""
    with pytest.raises(PackedError, match="another version packed it: this one reads version 2"):
        PackedLayout.from_json(changed(version=1))
