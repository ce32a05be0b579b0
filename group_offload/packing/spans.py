"""Which bytes of an image are packed, and how: decided from how often each exponent is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..base.layout import BlobLayout
from .layout import ENTRY_BYTES, ROW_BYTES, SPAN_ALIGNMENT, TILE_BYTES, Span, record_bytes

_MAX_GAP = 256
"""Between two tensors of one span. Padding is smaller."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Bytes of the image that are bf16 weights, but for gaps of padding."""

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


def choose_spans(layout: BlobLayout, count: Callable[[int, int], torch.Tensor]) -> tuple[tuple[Span, ...], int]:
    """The spans of an image.

    Args:
        count: how often each exponent is there in the bf16 weights between two bytes of the image (int64 [256], on the CPU).

    Returns:
        The spans, and how many escapes they have at most: what is in gaps counts, and what is behind the last tile of a span.
    """
    runs: list[_Run] = []
    for start, end in _weights_of(layout):
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
    if layout.num_bytes > end:
        spans.append(Span(end, layout.num_bytes - end))
    return tuple(spans), most_escapes


def _most_frequent(counts: torch.Tensor, num: int) -> tuple[int, ...]:
    """So many exponents, in order. Of those that are there equally often, such as never, the ones next to the most frequent."""
    counted, middle = counts.tolist(), int(counts.argmax())
    return tuple(sorted(sorted(range(256), key=lambda each: (-counted[each], abs(each - middle)))[:num]))


def _weights_of(layout: BlobLayout) -> list[tuple[int, int]]:
    """The bytes of the image that hold bf16 weights and nothing else, aligned, in order."""
    found = []
    for extent in layout.extents:
        is_bf16 = all(layout.specs[i].dtype == torch.bfloat16 for i in extent.tensors)
        if is_bf16 and extent.num_bytes >= 2 and extent.offset % 2 == 0:
            start = -(-extent.offset // SPAN_ALIGNMENT) * SPAN_ALIGNMENT
            end = extent.offset + extent.num_bytes // 2 * 2
            if start < end:
                found.append((start, end))
    return sorted(found)
