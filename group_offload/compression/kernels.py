"""The kernel that decompresses on accelerators, in plain Triton. Import this only where triton is installed.

[Note: One tile, one program]
A program decodes one tile, so a launch over the table of tiles decodes a strip. Half a tile is 128 rows of eight words (see
[Note: A compressed image]), and a thread has a row of each half. The codes of a row are 24 (or 32) bits, a byte in each of 3
(or 4) planes. A thread loads these bytes and eight bytes of signs and mantissas, and stores 16 bytes. Neighboring threads have
neighboring rows, so all of these accesses are coalesced. Words are computed in pairs, which fill a register. Those of fp8 have
four bits exchanged at last: a shift by 4, where bf16 has one by 0.

The escapes of a tile lie one after another. How many of them come before a weight is known without a look at other weights:
the escape has all bits of its code set, so three (or four) ANDs of shifted bits mark the escapes of a row, a multiplication
adds the marks up (each field of the product is the number of marks before it), and a prefix sum over the rows gives the rest.
One prefix sum serves both halves, in 16 bits each, because the table tells how many escapes the first half has. A row that has
escapes loads the 16 bytes around its first one, and takes exponents out of them as out of the table of exponents: by a shift.

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
    sizes = (
        strip.plain_bytes,
        len(strip.spans),
        strip.tiles_at,
        strip.escapes_at,
        strip.num_escapes,
        first,
        start,
        end,
    )
    is_part = out.numel() < strip.plain_bytes
    if out.device.type == "cpu":  # Triton's interpreter
        _decode[(last - first,)](data, out, *sizes, IS_PART=is_part)
        return
    with _launching, torch.get_device_module(out.device).device(out.device):
        num_warps = _num_warps(out.device)
        _decode[(last - first,)](data, out, *sizes, IS_PART=is_part, num_warps=num_warps, enable_fp_fusion=False)


@cache
def _num_warps(device: torch.device) -> int:
    """A thread for each row of half a tile: then no value moves between threads."""
    return 128 // getattr(torch.get_device_module(device).get_device_properties(device), "warp_size", 32)


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
def _codes_of(planes, BITS: tl.constexpr):
    """The codes of each row, which of them are escapes, and how many escapes come before each weight, and in all."""
    ONES: tl.constexpr = 0x249249 if BITS == 3 else 0x11111111  # the lowest bit of each code of a row
    row = tl.arange(0, ROWS)
    codes = tl.load(planes + row).to(tl.uint32)
    codes |= tl.load(planes + PLANE + row).to(tl.uint32) << 8
    codes |= tl.load(planes + 2 * PLANE + row).to(tl.uint32) << 16
    marks = codes & (codes >> 1) & (codes >> 2) & ONES
    if BITS == 4:
        last = tl.load(planes + 3 * PLANE + row).to(tl.uint32)
        codes |= last << 24
        marks = codes & (codes >> 1) & (codes >> 2) & (codes >> 3) & ONES
    before = marks * (ONES << BITS & 0xFFFFFFFF)
    num = (((before >> (7 * BITS)) & 7) + (marks >> (7 * BITS))).to(tl.int32)
    return codes, before, num


@triton.jit
def _exponents(codes, before, window, low, high, shift, BITS: tl.constexpr):
    """Of one weight of each pair. What is above their 8 bits is noise."""
    code = ((codes[:, None] >> shift) << 3) & (((1 << BITS) - 1) << 3)  # times 8: bits of a table
    table = low if BITS == 3 else tl.where(code < 64, low, high)
    known = table >> (code & 56).to(tl.uint64)
    escaped = window[:, None] >> (((before[:, None] >> shift) & 7) * 8).to(tl.uint64)
    return tl.where(code == ((1 << BITS) - 1) << 3, escaped.to(tl.uint32), known.to(tl.uint32))


@triton.jit
def _window(escapes, first, num):
    """The escapes of each row, its first one lowest. They begin anywhere, and loads at multiples of their size: so two."""
    word = escapes + (first >> 3)
    shift = ((first & 7) * 8).to(tl.uint64)
    low = tl.load(word, mask=num > 0, other=0)
    high = tl.load(word + 1, mask=num > 0, other=0)
    return low >> shift | high << 1 << (63 - shift)


@triton.jit
def _pairs(codes, before, window, rest, low, high, exchange, BITS: tl.constexpr):
    """The words of each row, two in each 32 bits."""
    shift = (tl.arange(0, 4) * (2 * BITS)).to(tl.uint32)[None, :]
    even = _exponents(codes, before, window, low, high, shift, BITS)
    odd = _exponents(codes, before, window, low, high, shift + BITS, BITS)
    exponents = ((even & 0xFFFF) | (odd << 16)) << 7
    rest = (rest | rest << 8) & 0x00FF00FF
    rest = (rest << 8) & 0x80008000 | rest & 0x007F007F
    words = exponents & 0x7F807F80 | rest
    return words & 0xF807F807 | (words & 0x07800780) >> exchange | (words & 0x00780078) << exchange


@triton.jit
def _decode_tile(
    record,
    escapes,
    first,
    half,
    out,
    target,
    low,
    high,
    exchange,
    start,
    end,
    BITS: tl.constexpr,
    IS_PART: tl.constexpr,
):
    codes_0, before_0, num_0 = _codes_of(record, BITS)
    codes_1, before_1, num_1 = _codes_of(record + ROWS, BITS)
    i = tl.arange(0, ROWS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    rest = (record + BITS * PLANE).to(tl.pointer_type(tl.uint16)) + i
    rest_0 = tl.load(rest).to(tl.uint32)
    rest_1 = tl.load(rest + _HALF // 2).to(tl.uint32)
    sums = tl.cumsum(num_0 | num_1 << 16, 0)
    window_0 = _window(escapes, first + (sums & 0xFFFF) - num_0, num_0)
    window_1 = _window(escapes, first + half + (sums >> 16) - num_1, num_1)
    pairs_0 = _pairs(codes_0, before_0, window_0, rest_0, low, high, exchange, BITS)
    pairs_1 = _pairs(codes_1, before_1, window_1, rest_1, low, high, exchange, BITS)
    pairs = (out + _aligned(target - start)).to(tl.pointer_type(tl.uint32)) + i
    if IS_PART:
        row = target + tl.arange(0, ROWS)[:, None] * 16
        tl.store(pairs, pairs_0, mask=(row >= start) & (row < end))
        tl.store(pairs + _HALF // 2, pairs_1, mask=(row + 2 * _HALF >= start) & (row + 2 * _HALF < end))
    else:
        tl.store(pairs, pairs_0)
        tl.store(pairs + _HALF // 2, pairs_1)


@triton.jit(
    do_not_specialize=[
        "plain_bytes",
        "num_spans",
        "tiles_at",
        "escapes_at",
        "num_escapes",
        "first_tile",
        "start",
        "end",
    ]
)
def _decode(
    data,
    out,
    plain_bytes: tl.int64,  # said here, so that no size of a strip makes for a kernel of its own
    num_spans: tl.int64,
    tiles_at: tl.int64,
    escapes_at: tl.int64,
    num_escapes: tl.int64,
    first_tile: tl.int64,
    start: tl.int64,  # the bytes of the strip that `out` has
    end: tl.int64,
    IS_PART: tl.constexpr,
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
    exchange = ((first_and_code >> 34) & 4).to(tl.uint32)
    target = _aligned(tl.load(row) + number * TILE_BYTES)
    if bits > 0:
        size = _REST + bits * PLANE
        source = _aligned(tl.load(row + 2) + number * size)
        is_inside = (target >= 0) & (target <= plain_bytes - TILE_BYTES) & (source >= 0) & (source <= escapes_at - size)
        escapes = (data + escapes_at).to(tl.pointer_type(tl.uint64))
        table = row.to(tl.pointer_type(tl.uint64)) + 4
        if is_inside & (bits == 3):
            low = tl.load(table)
            _decode_tile(data + source, escapes, first, half, out, target, low, low, exchange, start, end, 3, IS_PART)
        elif is_inside & (bits == 4):
            low, high = tl.load(table), tl.load(table + 1)
            _decode_tile(data + source, escapes, first, half, out, target, low, high, exchange, start, end, 4, IS_PART)
    else:
        source = _aligned(tl.load(row + 2) + number * TILE_BYTES)
        num_bytes = tl.minimum(tl.load(row + 1) - number * TILE_BYTES, TILE_BYTES)
        num_bytes = tl.minimum(num_bytes, tl.minimum(plain_bytes - target, escapes_at - source))
        if (target >= 0) & (source >= 0) & (num_bytes > 0):
            _copy_tile(data + source, out, target, num_bytes, start, end, IS_PART)
