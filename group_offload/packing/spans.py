"""Which bytes of a strip are packed, and how: decided from how often each exponent is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ..base.layout import BlobLayout
from .layout import ENTRY_BYTES, ROW_BYTES, SPAN_ALIGNMENT, TILE_BYTES, Span, packed_size, record_bytes

_MAX_GAP = 256
"""Between two tensors of one span. Padding is smaller."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Bytes of the strip that are bf16 weights, but for gaps of padding."""

    start: int
    end: int
    counts: torch.Tensor
    """How often each exponent is there: int64 [256], on the CPU."""
    num_between: int = 0
    """The weights that have room in the gaps. They are taken for zeros, and are what a file has there."""

    @property
    def num_tiles(self) -> int:
        return (self.end - self.start) // TILE_BYTES

    def num_others(self, bits: int) -> int:
        """The weights whose exponents are not among the most frequent ones."""
        return int(self.counts.sum() - self.counts.topk((1 << bits) - 1).values.sum())

    def cost(self, bits: int) -> int:
        """About how many bytes the run takes with codes of so many bits, or plain."""
        overhead = ROW_BYTES + self.num_tiles * ENTRY_BYTES
        if not bits:
            return self.end - self.start + overhead
        packed = self.num_tiles * record_bytes(bits) + self.num_others(bits)
        return packed + (self.end - self.start) % TILE_BYTES + overhead

    @property
    def best_bits(self) -> int:
        return min((0, 3, 4), key=self.cost) if self.num_tiles else 0

    def with_next(self, other: _Run) -> _Run:
        counts, gap = self.counts + other.counts, (other.start - self.end) // 2
        counts[0] += gap
        return _Run(self.start, other.end, counts, self.num_between + other.num_between + gap)


def choose_spans(
    weights: Iterable[tuple[int, int]], num_bytes: int, count: Callable[[int, int], torch.Tensor]
) -> tuple[tuple[Span, ...], int]:
    """The spans of a strip.

    Args:
        weights: the bytes of the strip that hold bf16 weights and nothing else: from `weights_within`.
        num_bytes: of the strip.
        count: how often each exponent is there in the bf16 weights between two bytes of the strip (int64 [256], on the CPU).

    Returns:
        The spans, and how many escapes they have at most: what is in gaps counts, and what is behind the last tile of a span.
    """
    runs: list[_Run] = []
    for start, end in weights:
        run = _Run(start, end, count(start, end))
        # Exponents of neighbours mostly agree. One table for both then saves a part of a tile, and a span.
        if runs and start - runs[-1].end < _MAX_GAP:
            both = runs[-1].with_next(run)
            if both.cost(both.best_bits) <= sum(each.cost(each.best_bits) for each in (runs[-1], run)):
                runs[-1] = both
                continue
        runs.append(run)
    spans, end, most_escapes = [], 0, 0
    for run in runs:
        bits = run.best_bits
        if not bits:
            continue
        if run.start > end:
            spans.append(Span(end, run.start - end))
        spans.append(Span(run.start, run.num_tiles * TILE_BYTES, bits, _most_frequent(run.counts, (1 << bits) - 1)))
        end = run.start + spans[-1].num_bytes
        most_escapes += run.num_others(bits) + run.num_between
    if num_bytes > end:
        spans.append(Span(end, num_bytes - end))
    plain = (Span(0, num_bytes),)
    if packed_size(spans, most_escapes) > packed_size(plain, 0):
        return plain, 0
    return tuple(spans), most_escapes


def _most_frequent(counts: torch.Tensor, num: int) -> tuple[int, ...]:
    """So many exponents, in order. Of those that are there equally often, such as never, the ones next to the most frequent."""
    counted, middle = counts.tolist(), int(counts.argmax())
    return tuple(sorted(sorted(range(256), key=lambda each: (-counted[each], abs(each - middle)))[:num]))


def weights_within(layout: BlobLayout, first: int, last: int) -> list[tuple[int, int]]:
    """The bytes of a strip, which is bytes `first` to `last` of the image, that hold bf16 weights and nothing else.

    They begin at multiples of 16, and are in order.
    """
    found = []
    for extent in layout.extents:
        is_bf16 = all(layout.specs[i].dtype == torch.bfloat16 for i in extent.tensors)
        if is_bf16 and extent.num_bytes >= 2 and extent.offset % 2 == 0:
            start = max(first, -(-extent.offset // SPAN_ALIGNMENT) * SPAN_ALIGNMENT)
            end = min(last, extent.offset + extent.num_bytes // 2 * 2)
            if start < end:
                found.append((start - first, end - first))
    return sorted(found)
