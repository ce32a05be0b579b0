"""Which bytes of a strip are packed, and how: decided from how often each exponent is there."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..base.layout import ALIGNMENT, BlobLayout
from .layout import ROW_BYTES, SPAN_ALIGNMENT, TILE_BYTES, Span, packed_size, record_bytes

_SPAN_COST = 2 * (ROW_BYTES + ALIGNMENT)
"""What a packed span takes besides, at most: rows for it and for what follows it, and bytes to where these may begin."""


def choose_spans(
    layout: BlobLayout, first: int, last: int, count: Callable[[int, int], torch.Tensor]
) -> tuple[tuple[Span, ...], int]:
    """The spans of a strip, which is bytes `first` to `last` of the image.

    Args:
        count: how often each exponent is there in the bf16 weights between two bytes of the strip (int64 [256], on the CPU).

    Returns:
        The spans, and how many escapes they have at most: what is behind the last tile of a span counts too.
    """
    spans, end, most_escapes = list[Span](), 0, 0
    for start, stop in _weights_within(layout, first, last):
        num_tiles = (stop - start) // TILE_BYTES
        counts = count(start, stop)
        escapes = {bits: int(counts.sum() - counts.topk((1 << bits) - 1).values.sum()) for bits in (3, 4)}
        costs = {bits: num_tiles * record_bytes(bits) + escapes[bits] + _SPAN_COST for bits in escapes}
        bits = min(costs, key=costs.__getitem__)
        if costs[bits] >= num_tiles * TILE_BYTES:
            continue
        if start > end:
            spans.append(Span(end, start - end))
        end = start + num_tiles * TILE_BYTES
        spans.append(Span(start, end - start, bits, _most_frequent(counts, (1 << bits) - 1)))
        most_escapes += escapes[bits]
    if last - first > end:
        spans.append(Span(end, last - first - end))
    plain = (Span(0, last - first),)
    if packed_size(spans, most_escapes) > packed_size(plain, 0):
        return plain, 0
    return tuple(spans), most_escapes


def _most_frequent(counts: torch.Tensor, num: int) -> tuple[int, ...]:
    """So many exponents, in order. Of those that are there equally often, such as never, the ones next to the most frequent."""
    counted, middle = counts.tolist(), int(counts.argmax())
    return tuple(sorted(sorted(range(256), key=lambda each: (-counted[each], abs(each - middle)))[:num]))


def _weights_within(layout: BlobLayout, first: int, last: int) -> list[tuple[int, int]]:
    """The bytes of a strip that hold bf16 weights and nothing else. They begin at multiples of 16, and are in order."""
    found = []
    for extent in layout.extents:
        is_bf16 = all(layout.specs[i].dtype == torch.bfloat16 for i in extent.tensors)
        if is_bf16 and extent.num_bytes >= 2 and extent.offset % 2 == 0:
            start = max(first, -(-extent.offset // SPAN_ALIGNMENT) * SPAN_ALIGNMENT)
            end = min(last, extent.offset + extent.num_bytes // 2 * 2)
            if start < end:
                found.append((start - first, end - first))
    return sorted(found)
