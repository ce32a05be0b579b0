"""Packing, and unpacking on the CPU, with torch's own operators: some tiles at a time, so that they stay in the caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .layout import ENTRY_BYTES, TILE_BYTES, TILE_WEIGHTS, PackedError, PackedLayout, Span, record_bytes

_TILES_AT_ONCE = 128
_TILES_ON_DEVICES = 8192
"""Enough for each operator to fill a device, and few enough for its memory: what is computed takes some hundred MiB."""

_GATHER = {3: ((5, 0x003F003F003F003F), (10, 0x00000FFF00000FFF), (20, 0x0000000000FFFFFF))}
_GATHER[4] = ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF), (16, 0x00000000FFFFFFFF))
"""How the codes of eight weights, a byte each, move together in 64 bits: step by step, by how many bits, and what stays."""
_SPREAD = {3: ((20, 0x00000FFF00000FFF), (10, 0x003F003F003F003F), (5, 0x0707070707070707))}
_SPREAD[4] = ((16, 0x0000FFFF0000FFFF), (8, 0x00FF00FF00FF00FF), (4, 0x0F0F0F0F0F0F0F0F))
"""The way back."""


def count_exponents(image: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """How often each exponent is there in the bf16 weights between two bytes of the image: int64 [256]."""
    counts = torch.zeros(256, dtype=torch.int64, device=image.device)
    step = _num_at_once(image.device) * TILE_BYTES
    for low in range(start, end, step):
        counts += torch.bincount(_exponents(image[low : min(low + step, end)]), minlength=256)
    return counts.cpu()


def encode(image: torch.Tensor, layout: PackedLayout, data: torch.Tensor) -> list[torch.Tensor]:
    """Write the records and the table of tiles into `data`.

    Args:
        layout: without the escapes, whose number is not known yet.
        data: the packed image as far as the escapes, on the device of the image.

    Returns:
        The escapes, in order.
    """
    escapes: list[torch.Tensor] = []
    halves = torch.zeros(2, layout.num_tiles, dtype=torch.int64, device="cpu")
    rows = layout.rows().view(torch.uint8).flatten()
    data[: rows.numel()].copy_(rows)
    tile = 0
    for span, place in zip(layout.spans, layout.places, strict=False):
        if not span.bits:
            data[place : place + span.num_bytes] = image[span.offset : span.offset + span.num_bytes]
            tile += span.num_tiles
            continue
        for first, weights, record in _parts(span, place, image, data):
            exponents = _exponents(weights)
            codes = _codes_of(exponents, span.exponents)
            is_escape = codes == len(span.exponents)
            halves[:, tile + first : tile + first + len(record)] = is_escape.view(-1, 2, TILE_WEIGHTS // 2).sum(2).T
            escapes.append(exponents[is_escape])
            split = TILE_WEIGHTS * span.bits // 8
            together = codes.view(torch.int64)
            for shift, mask in _GATHER[span.bits]:
                together = (together | together >> shift) & mask
            by_byte = together.view(torch.uint8).view(-1, TILE_WEIGHTS // 8, 8)[:, :, : span.bits].transpose(1, 2)
            record[:, :split].view(-1, span.bits, TILE_WEIGHTS // 8).copy_(by_byte)
            pairs = weights.view(-1, TILE_WEIGHTS, 2)
            record[:, split:] = (pairs[:, :, 1] & 0x80) | (pairs[:, :, 0] & 0x7F)
        tile += span.num_tiles
    halves = halves.cpu()
    num_each = halves.sum(0)
    tile_table(data, layout).copy_(layout.entries(num_each.cumsum(0) - num_each, halves[0]))
    return escapes


def decode(data: torch.Tensor, layout: PackedLayout, out: torch.Tensor) -> None:
    """Write the image to `out`.

    Raises:
        PackedError: the codes do not fit the escapes.
    """
    escapes = data[layout.escapes_at : layout.escapes_at + layout.num_escapes]
    used = 0
    for span, place in zip(layout.spans, layout.places, strict=False):
        if not span.bits:
            out[span.offset : span.offset + span.num_bytes] = data[place : place + span.num_bytes]
            continue
        for _, weights, record in _parts(span, place, out, data):
            split = TILE_WEIGHTS * span.bits // 8
            by_byte = torch.zeros(len(record), TILE_WEIGHTS // 8, 8, dtype=torch.uint8, device=out.device)
            by_byte[:, :, : span.bits] = record[:, :split].view(-1, span.bits, TILE_WEIGHTS // 8).transpose(1, 2)
            apart = by_byte.view(torch.int64)
            for shift, mask in _SPREAD[span.bits]:
                apart = (apart | apart << shift) & mask
            codes = apart.view(torch.uint8).flatten()
            is_escape = codes == len(span.exponents)
            num = int(is_escape.sum())
            if used + num > layout.num_escapes:
                raise PackedError(f"its codes of the span at byte {span.offset:,} ask for more escapes than there are")
            exponents = _exponents_of(codes, span.exponents).masked_scatter_(is_escape, escapes[used : used + num])
            used += num
            rest = record[:, split:].reshape(-1)
            pairs = weights.view(-1, 2)
            pairs[:, 0] = (rest & 0x7F) | exponents << 7
            pairs[:, 1] = (rest & 0x80) | exponents >> 1
    if used != layout.num_escapes:
        raise PackedError(f"its codes ask for {used:,} escapes, and it has {layout.num_escapes:,}")


def tile_table(data: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """The table of tiles, as a view: int64 [tiles]."""
    return data[layout.tiles_at : layout.tiles_at + layout.num_tiles * ENTRY_BYTES].view(torch.int64)


def _parts(
    span: Span, place: int, image: torch.Tensor, data: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Some tiles of a span at a time: the first one's number, their bytes of the image, and their records."""
    size = record_bytes(span.bits)
    at_once = _num_at_once(image.device)
    for first in range(0, span.num_tiles, at_once):
        num = min(at_once, span.num_tiles - first)
        start, there = span.offset + first * TILE_BYTES, place + first * size
        yield first, image[start : start + num * TILE_BYTES], data[there : there + num * size].view(num, size)


def _num_at_once(device: torch.device) -> int:
    return _TILES_AT_ONCE if device.type == "cpu" else _TILES_ON_DEVICES


def _exponents(weights: torch.Tensor) -> torch.Tensor:
    pairs = weights.view(-1, 2)
    return pairs[:, 1] << 1 | pairs[:, 0] >> 7


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
