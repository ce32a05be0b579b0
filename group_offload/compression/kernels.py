"""The kernel that decompresses on accelerators, in plain Triton. Import this only where triton is installed.

[Note: One tile, one program]
A program decodes one tile, so a launch over the table of tiles decodes a strip. Half a tile is 128 rows of eight words (see
[Note: A compressed image]), and a thread has two neighbors of each half. The codes of a row are 24 (or 32) bits, a byte in each
of 3 (or 4) planes. For each row a thread loads these and eight bytes of signs and mantissas, and stores 16 bytes.

Integer instructions set the time. So codes become nibbles, of which `prmt` looks four up at once: it chooses four bytes out of
eight, which are exponents of the table, or escapes. The upper bytes of four words are computed at once, and so are the lower.

The escapes of a tile lie one after another. How many of them come before a weight is known without a look at other weights:
the escape has all bits of its code set, so three (or four) ANDs of shifted bits mark the escapes of a row, a multiplication
adds the marks up (each nibble of the product is the number of marks before it), and a prefix sum over the rows gives the rest.
One prefix sum serves both halves, in 16 bits each, because the table tells how many escapes the first half has. A row that has
escapes loads the 12 bytes around its first one.

No access depends on the bytes alone: places are clamped to the strip and to the compressed strip, whose sizes the caller gives.
Places are 64 bits wide.

A part of a strip may begin and end in the middle of tiles, at multiples of 16 bytes. A thread stores 16 bytes, so it stores
them or not. That is another kernel (`IS_PART`): a whole strip is decoded without these tests.
"""
# mypy: ignore-errors

from __future__ import annotations

from functools import cache
from threading import Lock

import torch
import triton
import triton.language as tl

from .layout import Strip

_launching = Lock()
"""Triton compiles at the first launch, and threads that read files launch too."""


def decode(data: torch.Tensor, strip: Strip, out: torch.Tensor, start: int = 0) -> None:
    """Enqueue on the current stream of the device: write the strip from byte `start` on to `out`. Nothing is allocated."""
    end = start + out.numel()
    first, last = strip.tiles_of(start, end)
    sizes = strip.plain_bytes, len(strip.spans), strip.tiles_at, strip.escapes_at, strip.num_escapes, first, start, end
    flags = {"IS_PART": out.numel() < strip.plain_bytes, "HAS_PRMT": out.is_cuda and not torch.version.hip}
    if out.device.type == "cpu":  # Triton's interpreter
        _decode[(last - first,)](data, out, *sizes, **flags)
        return
    with _launching, torch.get_device_module(out.device).device(out.device):
        num_warps = _num_warps(out.device)
        _decode[(last - first,)](data, out, *sizes, **flags, num_warps=num_warps, enable_fp_fusion=False)


@cache
def _num_warps(device: torch.device) -> int:
    """A thread for each pair of rows of half a tile: then no value moves between threads."""
    return 64 // getattr(torch.get_device_module(device).get_device_properties(device), "warp_size", 32)


ROWS = tl.constexpr(128)
"""Of eight weights, in half a tile."""
PLANE = tl.constexpr(256)
"""The bytes of one plane of codes."""
TILE_BYTES = tl.constexpr(4096)
_REST = tl.constexpr(2048)
"""The bytes of signs and mantissas."""
_HALF = tl.constexpr(1024)
_ROW_WORDS = tl.constexpr(6)
_LOW_HALF = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _aligned(place):
    return tl.multiple_of(place & -16, 16)


@triton.jit
def _copy_tile(source, out, target, num_bytes, start, end, IS_PART: tl.constexpr):
    unit = tl.arange(0, TILE_BYTES // 16)[:, None]
    i = unit * 16 + tl.arange(0, 16)[None, :]
    is_there = unit < num_bytes // 16
    if IS_PART:
        is_there = is_there & (target + unit * 16 >= start) & (target + unit * 16 < end)
    tl.store(out + _aligned(target - start) + i, tl.load(source + i, mask=is_there), mask=is_there)


@triton.jit
def _choose(low, high, places, HAS_PRMT: tl.constexpr):
    """Four bytes of eight, `low` first: those whose numbers are the lowest four nibbles of `places`."""
    if HAS_PRMT:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, places], tl.uint32, is_pure=True, pack=1
        )
    found = tl.zeros_like(places)
    both = low.to(tl.uint64) | high.to(tl.uint64) << 32
    for i in tl.static_range(4):
        byte = (both >> (((places >> 4 * i) & 7) * 8).to(tl.uint64)).to(tl.uint32) & 0xFF
        found |= byte << 8 * i
    return found


@triton.jit
def _nibbles(codes, BITS: tl.constexpr):
    """The codes of a row, 4 bits each."""
    if BITS == 3:  # the upper half of them moves up by 4, the upper half of each half by 2, and every other code by 1
        codes += (codes & 0x00FFF000) * 15
        codes += (codes & 0x0FC00FC0) * 3
        codes += codes & 0x38383838
    return codes


@triton.jit
def _codes_of(planes, BITS: tl.constexpr):
    """The codes of the even and the odd rows of half a tile."""
    plane = planes.to(tl.pointer_type(tl.uint16)) + tl.arange(0, ROWS // 2)
    a = tl.load(plane).to(tl.uint32)
    b = tl.load(plane + PLANE // 2).to(tl.uint32)
    c = tl.load(plane + PLANE).to(tl.uint32)
    even = a & 0xFF | (b & 0xFF) << 8 | (c & 0xFF) << 16
    odd = a >> 8 | b & 0xFF00 | (c & 0xFF00) << 8
    if BITS == 4:
        d = tl.load(plane + 3 * PLANE // 2).to(tl.uint32)
        even |= d << 24
        odd |= (d & 0xFF00) << 16
    return _nibbles(even, BITS), _nibbles(odd, BITS)


@triton.jit
def _escapes_in(codes, BITS: tl.constexpr):
    """In a row: 1 for each escape, how many escapes come before each weight, as nibbles, and how many there are."""
    marks = codes & (codes >> 1) & (codes >> 2) & 0x11111111
    if BITS == 4:
        marks &= codes >> 3
    before = marks * 0x11111110
    return marks, before, ((before >> 28) + (marks >> 28)).to(tl.int32)


@triton.jit
def _window(escapes, first, num, HAS_PRMT: tl.constexpr):
    """The escapes of each row, its first one lowest. They begin anywhere, and loads at multiples of their size: so three."""
    word = escapes + (first >> 2)
    a = tl.load(word, mask=num > 0, other=0)
    b = tl.load(word + 1, mask=num > 0, other=0)
    c = tl.load(word + 2, mask=num > 0, other=0)
    places = (first & 3).to(tl.uint32) * 0x1111 + 0x3210
    return _choose(a, b, places, HAS_PRMT), _choose(b, c, places, HAS_PRMT)


@triton.jit
def _words(codes, marks, escaped, rest, table, is_fp8, BITS: tl.constexpr, HAS_PRMT: tl.constexpr):
    """The words of the lowest four nibbles, two in each 32 bits. `escaped` and `rest` have a byte of each."""
    zeros = tl.zeros_like(codes)
    low_bits = codes & 0x7777 if BITS == 4 else codes
    exponents = _choose(table[0], table[1], low_bits, HAS_PRMT)
    if BITS == 4:
        is_high = _choose(zeros + 0xFF00, zeros, (codes >> 3) & 0x1111, HAS_PRMT)
        exponents ^= (exponents ^ _choose(table[2], table[3], low_bits, HAS_PRMT)) & is_high
    exponents ^= (exponents ^ escaped) & _choose(zeros + 0xFF00, zeros, marks, HAS_PRMT)
    if is_fp8:
        upper = (exponents >> 1) & 0x78787878 | (rest >> 4) & 0x07070707
        lower = (rest << 4) & 0x80808080 | (exponents << 3) & 0x78787878 | rest & 0x07070707
    else:
        upper = (exponents >> 1) & 0x7F7F7F7F
        lower = (exponents << 7) & 0x80808080 | rest & 0x7F7F7F7F
    upper |= rest & 0x80808080
    # A lower byte, its upper byte, and those of the next word.
    return _choose(lower, upper, zeros + 0x5140, HAS_PRMT), _choose(lower, upper, zeros + 0x7362, HAS_PRMT)


@triton.jit
def _decode_tile(
    record,
    escapes,
    first,
    half,
    table,
    is_fp8,
    out,
    target,
    start,
    end,
    BITS: tl.constexpr,
    IS_PART: tl.constexpr,
    HAS_PRMT: tl.constexpr,
):
    table = (tl.load(table), tl.load(table + 1), tl.load(table + 2), tl.load(table + 3))
    row = tl.arange(0, ROWS // 2) * 2
    rest = (record + BITS * PLANE).to(tl.pointer_type(tl.uint64)) + row
    out = (out + _aligned(target - start)).to(tl.pointer_type(tl.uint32)) + row[:, None] * 4 + tl.arange(0, 4)[None, :]
    at = target + row[:, None] * 16
    even_0, odd_0 = _codes_of(record, BITS)
    even_1, odd_1 = _codes_of(record + ROWS, BITS)
    num_0 = _escapes_in(even_0, BITS)[2] + _escapes_in(odd_0, BITS)[2]
    num_1 = _escapes_in(even_1, BITS)[2] + _escapes_in(odd_1, BITS)[2]
    sums = tl.cumsum(num_0 | num_1 << 16, 0)
    place = first + (sums & 0xFFFF) - num_0
    for i in tl.static_range(4):  # the even rows of the first half, its odd rows, and so the second half
        codes = even_0 if i == 0 else odd_0 if i == 1 else even_1 if i == 2 else odd_1
        if i == 2:
            place = first + half + (sums >> 16) - num_1
        marks, before, num = _escapes_in(codes, BITS)
        low, high = _window(escapes, place, num, HAS_PRMT)
        place += num
        bytes_ = tl.load(rest + (i // 2 * ROWS + i % 2))
        escaped, rests = _choose(low, high, before, HAS_PRMT), bytes_.to(tl.uint32)
        a, b = _words(codes, marks, escaped, rests, table, is_fp8, BITS, HAS_PRMT)
        escaped, rests = _choose(low, high, before >> 16, HAS_PRMT), (bytes_ >> 32).to(tl.uint32)
        c, d = _words(codes >> 16, marks >> 16, escaped, rests, table, is_fp8, BITS, HAS_PRMT)
        words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (ROWS // 2, 4))
        skipped = i // 2 * ROWS * 16 + i % 2 * 16
        if IS_PART:
            tl.store(out + skipped // 4, words, mask=(at + skipped >= start) & (at + skipped < end))
        else:
            tl.store(out + skipped // 4, words)


@triton.jit(do_not_specialize=[*range(2, 10)])  # no size of a strip makes for a kernel of its own
def _decode(
    data,
    out,
    plain_bytes: tl.int64,
    num_spans: tl.int64,
    tiles_at: tl.int64,
    escapes_at: tl.int64,
    num_escapes: tl.int64,
    first_tile: tl.int64,
    start: tl.int64,  # the bytes of the strip that `out` has
    end: tl.int64,
    IS_PART: tl.constexpr,
    HAS_PRMT: tl.constexpr,
):
    tile = tl.program_id(0) + first_tile
    entry = tl.load((data + tiles_at).to(tl.pointer_type(tl.int64)) + tile)
    span = tl.minimum((entry >> 32) & 0xFFFFF, num_spans - 1)
    half = tl.minimum((entry >> 52) & 0xFFF, _HALF)
    first = tl.minimum(entry & _LOW_HALF, num_escapes)
    row = data.to(tl.pointer_type(tl.int64)) + span * _ROW_WORDS
    first_and_code = tl.load(row + 3)
    number = tile - (first_and_code & _LOW_HALF)
    bits = (first_and_code >> 32) & 15
    is_fp8 = (first_and_code >> 36) & 1 > 0
    target = _aligned(tl.load(row) + number * TILE_BYTES)
    if bits > 0:
        size = _REST + bits * PLANE
        source = _aligned(tl.load(row + 2) + number * size)
        is_inside = (target >= 0) & (target <= plain_bytes - TILE_BYTES) & (source >= 0) & (source <= escapes_at - size)
        record, escapes = data + source, (data + escapes_at).to(tl.pointer_type(tl.uint32))
        table = row.to(tl.pointer_type(tl.uint32)) + 8
        if is_inside & (bits == 3):
            _decode_tile(record, escapes, first, half, table, is_fp8, out, target, start, end, 3, IS_PART, HAS_PRMT)
        elif is_inside & (bits == 4):
            _decode_tile(record, escapes, first, half, table, is_fp8, out, target, start, end, 4, IS_PART, HAS_PRMT)
    else:
        source = _aligned(tl.load(row + 2) + number * TILE_BYTES)
        num_bytes = tl.minimum(tl.load(row + 1) - number * TILE_BYTES, TILE_BYTES)
        num_bytes = tl.minimum(num_bytes, tl.minimum(plain_bytes - target, escapes_at - source))
        if (target >= 0) & (source >= 0) & (num_bytes > 0):
            _copy_tile(data + source, out, target, num_bytes, start, end, IS_PART)
