"""Compression, and decompression on the CPU, by torch's operators: some tiles at a time, which stay in the caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ..errors import StorageError
from .layout import ENTRY_BYTES, TILE_BYTES, TILE_WEIGHTS, Span, Strip, record_bytes

_TILES_AT_ONCE = 256
"""On the CPU. With fewer, the time goes into calls."""
_TILES_ON_DEVICES = 8192
"""Enough for each operator to fill a device, and few enough for its memory: what is computed takes some hundred MiB."""

_GATHER = {3: ((5, 0x003F003F003F003F), (10, 0x00000FFF00000FFF), (20, 0x0000000000FFFFFF))}
_GATHER[4] = ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF), (16, 0x00000000FFFFFFFF))
"""How the codes of eight weights, a byte each, move together in 64 bits: step by step, by how many bits, and what stays."""
_SPREAD = {3: ((20, 0x00000FFF00000FFF), (10, 0x003F003F003F003F), (5, 0x0707070707070707))}
_SPREAD[4] = ((16, 0x0000FFFF0000FFFF), (8, 0x00FF00FF00FF00FF), (4, 0x0F0F0F0F0F0F0F0F))
"""The way back."""


def count_exponents(image: torch.Tensor, start: int, end: int, is_fp8: bool) -> torch.Tensor:
    """How often each exponent is there in the words between two bytes of a strip: int64 [256]."""
    counts = torch.zeros(256, dtype=torch.int64, device=image.device)
    step = _num_at_once(image.device) * TILE_BYTES
    for low in range(start, end, step):
        counts += torch.bincount(_exponents(_words(image[low : min(low + step, end)], is_fp8)), minlength=256)
    return counts.cpu()


def encode(image: torch.Tensor, strip: Strip, data: torch.Tensor) -> list[torch.Tensor]:
    """Write the records and the tables into `data`.

    Args:
        strip: without the escapes, whose number is not known yet.
        data: the compressed strip as far as the escapes, on the device of the image.

    Returns:
        The escapes, in order.
    """
    halves = torch.zeros(2, strip.num_tiles, dtype=torch.int64, device=data.device)
    rows = strip.rows().view(torch.uint8).flatten()
    data[: rows.numel()].copy_(rows)

    def encode_part(part: _TileRange) -> torch.Tensor:
        span, record = part.span, part.record
        split = TILE_WEIGHTS * span.bits // 8
        words = _words(image[part.start : part.start + len(record) * TILE_BYTES], span.is_fp8)
        exponents = _exponents(words)
        codes = _codes_of(exponents, span.exponents)
        is_escape = codes == len(span.exponents)
        halves[:, part.tile : part.tile + len(record)] = is_escape.view(-1, 2, TILE_WEIGHTS // 2).sum(2).T
        together = codes.view(torch.int64)
        for shift, mask in _GATHER[span.bits]:
            together = (together | together >> shift) & mask
        by_byte = together.view(torch.uint8).view(-1, TILE_WEIGHTS // 8, 8)[:, :, : span.bits].transpose(1, 2)
        record[:, :split].view(-1, span.bits, TILE_WEIGHTS // 8).copy_(by_byte)
        record[:, split:] = (words >> 8 & 0x80).bitwise_or_(words & 0x7F).view(-1, TILE_WEIGHTS)
        return exponents[is_escape]

    for span, place in _plain_spans(strip):
        data[place : place + span.num_bytes] = image[span.offset : span.offset + span.num_bytes]
    escapes = [encode_part(part) for part in _parts(strip, data)]
    num_each = halves.sum(0)
    tile_table(data, strip).copy_(strip.entries(num_each.cumsum(0) - num_each, halves[0]))
    return escapes


def decode(data: torch.Tensor, strip: Strip, out: torch.Tensor, start: int = 0) -> None:
    """Write the strip from byte `start` on to `out`, as much as finds room there.

    Raises:
        StorageError: the codes do not fit the escapes.
    """
    escapes = data[strip.escapes_at : strip.escapes_at + strip.num_escapes]
    end = start + out.numel()
    first, last = strip.tiles_of(start, end)
    starts = [*((tile_table(data, strip)[first : last + 1] & 0xFFFFFFFF).tolist()), strip.num_escapes]

    def put(found: torch.Tensor, at: int) -> None:
        low, high = max(at, start), min(at + found.numel(), end)
        if low < high:
            out[low - start : high - start] = found[low - at : high - at]

    for span, place in _plain_spans(strip):
        put(data[place : place + span.num_bytes], span.offset)
    for part in _parts(strip, data, first, last):
        span, record = part.span, part.record
        split = TILE_WEIGHTS * span.bits // 8
        by_byte = torch.zeros(len(record), TILE_WEIGHTS // 8, 8, dtype=torch.uint8, device=out.device)
        by_byte[:, :, : span.bits] = record[:, :split].view(-1, span.bits, TILE_WEIGHTS // 8).transpose(1, 2)
        apart = by_byte.view(torch.int64)
        for shift, mask in _SPREAD[span.bits]:
            apart = (apart | apart << shift) & mask
        codes = apart.view(torch.uint8).flatten()
        is_escape = codes == len(span.exponents)
        begin, behind = starts[part.tile - first], starts[part.tile - first + len(record)]
        mine = escapes[begin : max(behind, begin)]
        if int(is_escape.sum()) != mine.numel():
            raise StorageError(
                f"Compressed weights are damaged: codes of the span at byte {span.offset:,} ask for other escapes than it has."
            )
        exponents = _exponents_of(codes, span.exponents).masked_scatter_(is_escape, mine)
        rest = record[:, split:].to(torch.int16).flatten()
        words = (rest & 0x80) << 8
        words.bitwise_or_(rest.bitwise_and_(0x7F)).bitwise_or_(exponents.to(torch.int16) << 7)
        put((_exchanged(words) if span.is_fp8 else words).view(torch.uint8), part.start)


def tile_table(data: torch.Tensor, strip: Strip) -> torch.Tensor:
    """The table of tiles, as a view: int64 [tiles]."""
    return data[strip.tiles_at : strip.tiles_at + strip.num_tiles * ENTRY_BYTES].view(torch.int64)


def escapes_of(entry: int, strip: Strip) -> int:
    """How many escapes come before a tile, by its entry in the table."""
    return min(entry & 0xFFFFFFFF, strip.num_escapes)


class _TileRange(NamedTuple):
    """Some tiles of a compressed span."""

    span: Span
    tile: int
    """The number of the first one in the table."""
    start: int
    """The byte of the strip that they begin at."""
    record: torch.Tensor
    """Their records: uint8 [tiles, record_bytes]."""


def _parts(strip: Strip, data: torch.Tensor, begin: int = 0, end: int | None = None) -> Iterator[_TileRange]:
    """The compressed tiles from number `begin` to `end`, some at a time."""
    end, at_once = strip.num_tiles if end is None else end, _num_at_once(data.device)
    for span, place, tile in zip(strip.spans, strip.places, strip.first_tiles, strict=False):
        size = record_bytes(span.bits)
        last = min(span.num_tiles, end - tile) if span.bits else 0
        for first in range(max(0, begin - tile), last, at_once):
            num, there = min(at_once, last - first), place + first * size
            record = data[there : there + num * size].view(num, size)
            yield _TileRange(span, tile + first, span.offset + first * TILE_BYTES, record)


def _plain_spans(strip: Strip) -> list[tuple[Span, int]]:
    return [(span, place) for span, place in zip(strip.spans, strip.places, strict=False) if not span.bits]


def _num_at_once(device: torch.device) -> int:
    return _TILES_AT_ONCE if device.type == "cpu" else _TILES_ON_DEVICES


def _words(weights: torch.Tensor, is_fp8: bool) -> torch.Tensor:
    words = weights.view(torch.int16)
    return _exchanged(words) if is_fp8 else words


def _exchanged(words: torch.Tensor) -> torch.Tensor:
    """Bits 3 to 6 and 7 to 10 exchanged."""
    return (words & ~0x7F8).bitwise_or_(words >> 4 & 0x78).bitwise_or_((words & 0x78) << 4)


def _exponents(words: torch.Tensor) -> torch.Tensor:
    return (words >> 7).to(torch.uint8)


def _codes_of(exponents: torch.Tensor, known: Sequence[int]) -> torch.Tensor:
    if known[-1] - known[0] == len(known) - 1:  # one after another, as those of most weights are
        return (exponents - known[0]).clamp_(max=len(known))
    codes = torch.full((256,), len(known), dtype=torch.uint8, device="cpu")
    codes[list(known)] = torch.arange(len(known), dtype=torch.uint8, device="cpu")
    return codes.to(exponents.device).index_select(0, exponents.int())


def _exponents_of(codes: torch.Tensor, known: Sequence[int]) -> torch.Tensor:
    if known[-1] - known[0] == len(known) - 1:
        return codes + known[0]
    return torch.tensor([*known, 0], dtype=torch.uint8, device=codes.device).index_select(0, codes.int())
