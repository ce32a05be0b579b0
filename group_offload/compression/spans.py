"""Which bytes of a strip are compressed, and how: decided from how often each exponent is there."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..base.layout import BlobLayout
from .layout import (
    COMPRESSIBLE,
    ENTRY_BYTES,
    FP8,
    ROW_BYTES,
    SPAN_ALIGNMENT,
    TILE_BYTES,
    Span,
    compressed_size,
    record_bytes,
)

_MAX_GAP = 256
"""Between two tensors of one span. Padding is smaller."""


class _SpanRun:
    """Bytes of the strip that are weights in bf16, or in fp8, but for padding."""

    def __init__(self, start: int, end: int, counts: torch.Tensor, is_fp8: bool) -> None:
        """
        Args:
            counts: How often each exponent is there: int64 [256], on the CPU.
        """
        self.start, self.end, self.counts, self.is_fp8 = start, end, counts, is_fp8
        self.num_tiles = (end - start) // TILE_BYTES
        others = {bits: int(counts.sum() - counts.topk((1 << bits) - 1).values.sum()) for bits in (3, 4)}
        costs = {0: end - start} | {
            bits: self.num_tiles * record_bytes(bits) + (end - start) % TILE_BYTES + others[bits] for bits in others
        }
        self.bits = min(costs, key=costs.__getitem__) if self.num_tiles else 0
        self.cost = costs[self.bits] + ROW_BYTES + self.num_tiles * ENTRY_BYTES
        """About how many bytes the run takes."""
        self.num_escapes = others.get(self.bits, 0)
        """At most: what is behind the last tile counts too."""


def choose_spans(
    layout: BlobLayout, first: int, last: int, count: Callable[[int, int, bool], torch.Tensor]
) -> tuple[tuple[Span, ...], int]:
    """The spans of a strip, which is bytes `first` to `last` of the image.

    Args:
        count: how often each exponent is there between two bytes of the strip, which are fp8 or bf16 (int64 [256], on the CPU).

    Returns:
        The spans, and how many escapes they have at most.
    """
    runs: list[_SpanRun] = []
    for start, stop, is_fp8 in _weights_within(layout, first, last):
        run = _SpanRun(start, stop, count(start, stop, is_fp8), is_fp8)
        # Exponents of neighbors mostly agree. One table for both then saves a part of a tile, and a span.
        if runs and start - runs[-1].end < _MAX_GAP and is_fp8 == runs[-1].is_fp8:
            before = runs[-1]
            counts = before.counts + count(before.end, start, is_fp8) + run.counts
            both = _SpanRun(before.start, stop, counts, is_fp8)
            if both.cost <= before.cost + run.cost:
                runs[-1] = both
                continue
        runs.append(run)
    spans, end, compressed = list[Span](), 0, [run for run in runs if run.bits]
    for run in compressed:
        if run.start > end:
            spans.append(Span(end, run.start - end))
        end = run.start + run.num_tiles * TILE_BYTES
        known = _most_frequent(run.counts, (1 << run.bits) - 1)
        spans.append(Span(run.start, end - run.start, run.bits, known, run.is_fp8))
    if last - first > end:
        spans.append(Span(end, last - first - end))
    plain, most_escapes = (Span(0, last - first),), sum(run.num_escapes for run in compressed)
    if compressed_size(spans, most_escapes) > compressed_size(plain, 0):
        return plain, 0
    return tuple(spans), most_escapes


def _most_frequent(counts: torch.Tensor, num: int) -> tuple[int, ...]:
    """So many exponents, in order. Of those that are there equally often, such as never, the ones next to the most frequent."""
    counted, middle = counts.tolist(), int(counts.argmax())
    return tuple(sorted(sorted(range(256), key=lambda each: (-counted[each], abs(each - middle)))[:num]))


def _weights_within(layout: BlobLayout, first: int, last: int) -> list[tuple[int, int, bool]]:
    """The bytes of a strip that hold bf16 weights and nothing else, or fp8 weights: the first and the last one, exclusive, and
    which. They begin at multiples of 16, are whole words, and are in order."""
    found = []
    for extent in layout.extents:
        dtypes = {layout.specs[i].dtype for i in extent.tensors}
        is_fp8 = dtypes <= FP8
        if len(dtypes) == 1 and dtypes <= COMPRESSIBLE and (is_fp8 or extent.offset % 2 == 0):
            start = max(first, -(-extent.offset // SPAN_ALIGNMENT) * SPAN_ALIGNMENT)
            end = start + (min(last, extent.offset + extent.num_bytes) - start) // 2 * 2
            if start < end:
                found.append((start - first, end - first, is_fp8))
    return sorted(found)
