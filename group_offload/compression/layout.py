"""Where everything lies in a compressed image, byte by byte.

[Note: A compressed image]
An image is the bytes of a blob: the data section that a plain group file would have, a multiple of 256 bytes. It is cut into
*strips*, which follow one another in the compressed image too. A strip decodes by itself, is a multiple of 16 bytes, and takes
at most 64 MiB compressed: so the device needs little memory beside the slot that an image is decoded into, however large it is.

The *spans* of a strip follow one another, at multiples of 16 bytes: those of weights whose exponents are compressed in codes of
3 (4) bits, and *plain* ones of 0 bits, which are copied. A compressed span is made of *words* of 16 bits. A word is a bf16
weight, or two neighbors in fp8 (e4m3) with bits 3 to 6 and 7 to 10 exchanged: then bits 7 to 14 are the exponents of both,
where a bf16 weight has its own. Below, those 8 bits are the exponent. A compressed span has 7 (15) exponents in rising order. A
code is the place of an exponent among these, and the last code is the *escape*, for all others. All of a span is cut into
*tiles* of 4096 bytes of the image (the last of a plain span may be shorter), numbered through the strip. Each tile decodes by
itself, so one launch of one kernel decodes a strip. A compressed span holds whole tiles of weights and padding, so kernels need
no mask for it. What is left of a tensor is in the plain span behind it.

A compressed strip has these parts. Each begins at a multiple of 256, and so does each span; numbers are little-endian.

- The table of spans, 48 bytes each: offset in the strip (8), size (8), where its bytes begin in the compressed strip (8),
  number of its first tile (4), bits, of fp8 16 more (4), exponents (16, zero-padded).
- The table of tiles, 8 bytes each: escapes before it (32 bits), its span (20 bits), escapes in its first half (12 bits).
- The spans: a plain span's bytes, or a record for each tile. A record of 2048 words is 3 (4) planes of 256 bytes, then 2048
  bytes. Byte r of all planes, the first lowest, is a number of 24 (32) bits with the codes of words 8r to 8r + 7, the first
  lowest. Byte i behind the planes has bit 15 (as bit 7) and bits 0 to 6 of word i.
- The exponents of the escaped words, a byte each, in order. Then at least 2064 zeros, to the next multiple of 256: damage can't
  lead a reader out of the strip.

`group_offload.compressed`, in a file's header, is a JSON object: `version` (3; 2 has no fp8), `plain_bytes` (size of the
image), `compressed_bytes` (size of the data, never more), `hash` (xxh3_128 of the image), and `strips`, a list of `[escapes,
spans]` in the order of the image. `escapes` counts the words whose exponent has no code; `spans` lists `[bytes of the image,
bits, exponents in hex]`, with 16 more than the bits of fp8.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from ..base.layout import aligned

VERSION = 3
FP8 = frozenset([torch.float8_e4m3fn, torch.float8_e4m3fnuz])
"""Each has a sign, 4 bits of an exponent, and 3 of a mantissa."""
COMPRESSIBLE = FP8 | {torch.bfloat16}
"""The dtypes of weights whose exponents are compressed."""
TILE_WEIGHTS = 2048
"""Words that one program decodes. `python -m benchmarks compression --device cuda` measures what another number would bring."""
TILE_BYTES = 2 * TILE_WEIGHTS
SPAN_ALIGNMENT = 16
"""Spans begin at multiples of this, in the image and in the compressed one: kernels move 16 bytes at once."""
ROW_BYTES = 48
"""Of a span, in the table of spans."""
ENTRY_BYTES = 8
"""Of a tile, in the table of tiles."""
_FP8_CODE = 16
_BEHIND_ESCAPES = TILE_WEIGHTS + 16
"""A tile of escapes more would fit behind the last one, so that no damage leads out of the strip."""

Runs = tuple[tuple[int, int], ...]
"""Bytes of a compressed strip: first and last byte of each run, exclusive."""


@dataclass(frozen=True, slots=True)
class Span:
    """A run of bytes of a strip, all compressed in one way."""

    offset: int
    num_bytes: int
    bits: int = 0
    """Of the code of an exponent: 3 or 4. 0: the span is plain."""
    exponents: tuple[int, ...] = ()
    """The exponents with a code, by their codes: 7 or 15. The last code is the escape."""
    is_fp8: bool = False
    """Its words are two weights each."""

    @property
    def code(self) -> int:
        """The bits, and what the words are, as one number."""
        return self.bits + _FP8_CODE * self.is_fp8

    @property
    def num_tiles(self) -> int:
        return -(-self.num_bytes // TILE_BYTES)

    @property
    def compressed_bytes(self) -> int:
        """Without escapes."""
        return self.num_tiles * record_bytes(self.bits) if self.bits else self.num_bytes


def record_bytes(bits: int) -> int:
    """The size of a compressed tile: its codes, then what else each word has."""
    return TILE_WEIGHTS * bits // 8 + TILE_WEIGHTS


@dataclass(frozen=True)
class Strip:
    """What decoding a strip needs to know, as plain data.

    Places are counted from the first byte of the strip, in the image and in the compressed image.
    """

    spans: tuple[Span, ...]
    """In order. Together they are the strip."""
    num_escapes: int

    @cached_property
    def plain_bytes(self) -> int:
        return sum(span.num_bytes for span in self.spans)

    @cached_property
    def compressed_bytes(self) -> int:
        return compressed_size(self.spans, self.num_escapes)

    @cached_property
    def num_tiles(self) -> int:
        return sum(span.num_tiles for span in self.spans)

    @property
    def tiles_at(self) -> int:
        """Where the table of tiles begins in the compressed strip."""
        return aligned(ROW_BYTES * len(self.spans))

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Where the bytes of each span begin in the compressed strip, and where those of the last one end."""
        return tuple(_places(self.spans))

    @property
    def escapes_at(self) -> int:
        """Where the escapes begin."""
        return self.places[-1]

    @cached_property
    def first_tiles(self) -> tuple[int, ...]:
        """The number of the first tile of each span, and how many tiles there are."""
        return tuple(accumulate((span.num_tiles for span in self.spans), initial=0))

    def tiles_of(self, start: int, end: int) -> tuple[int, int]:
        """The tiles that hold bytes `start` to `end` of the strip: the number of the first one, and of that behind the last."""
        return self._tile_at(start), self._tile_at(end - 1) + 1

    def _tile_at(self, offset: int) -> int:
        number = bisect_right(self.spans, offset, key=lambda span: span.offset) - 1
        return self.first_tiles[number] + (offset - self.spans[number].offset) // TILE_BYTES

    def needed(self, start: int, end: int, escapes_before: Callable[[int], int]) -> Runs:
        """The bytes of the compressed strip that bytes `start` to `end` of the strip are decoded from.

        Args:
            escapes_before: How many escapes come before a tile.

        Returns:
            Runs of bytes, in order. The first one begins at 0.
        """
        first, last = self.tiles_of(start, end)
        before = escapes_before(first)
        behind = max(before, self.num_escapes if last == self.num_tiles else escapes_before(last))
        table = self.tiles_at + first * ENTRY_BYTES, self.tiles_at + min(last + 1, self.num_tiles) * ENTRY_BYTES
        # Kernels read escapes in words of eight bytes, and the word behind them.
        escapes = self.escapes_at + before // 8 * 8, self.escapes_at + behind // 8 * 8 + 16
        return (
            (0, ROW_BYTES * len(self.spans)),
            table,
            (self._place_of(first), self._place_of(last - 1, ends=True)),
            escapes,
        )

    def _place_of(self, tile: int, *, ends: bool = False) -> int:
        """Where the bytes of a tile begin in the compressed strip, or end."""
        number = bisect_right(self.first_tiles, tile) - 1
        span, nth = self.spans[number], tile - self.first_tiles[number] + ends
        return self.places[number] + min(
            nth * (record_bytes(span.bits) if span.bits else TILE_BYTES), span.compressed_bytes
        )

    def rows(self) -> torch.Tensor:
        """The table of spans: int64 [spans, 6]."""
        rows, tile = torch.zeros(len(self.spans), ROW_BYTES // 8, dtype=torch.int64, device="cpu"), 0
        table = rows.view(torch.uint8)
        for number, (span, place) in enumerate(zip(self.spans, self.places, strict=False)):
            facts = [span.offset, span.num_bytes, place, tile | span.code << 32]
            rows[number, :4] = torch.tensor(facts, device="cpu")
            table[number, 32 : 32 + len(span.exponents)] = torch.tensor(span.exponents, dtype=torch.uint8, device="cpu")
            tile += span.num_tiles
        return rows

    def entries(self, starts: torch.Tensor, halves: torch.Tensor) -> torch.Tensor:
        """The table of tiles: int64 [tiles].

        Args:
            starts, halves: for each tile, how many escapes come before it, and how many its first half has (int64).
        """
        counts = torch.tensor([span.num_tiles for span in self.spans], device=starts.device)
        spans = torch.repeat_interleave(counts, output_size=self.num_tiles)
        return starts | spans << 32 | halves << 52


@dataclass(frozen=True)
class CompressedLayout:
    """What decoding an image needs to know, as plain data."""

    plain_bytes: int
    """The size of the image: `BlobLayout.num_bytes`."""
    compressed_bytes: int
    strips: tuple[Strip, ...]
    """In order. Together they are the image."""
    hash: str
    """XXH3 (128 bits, hexadecimal) of the image."""

    @cached_property
    def placed(self) -> tuple[tuple[Strip, int, int], ...]:
        """Each strip, and where it begins in the image and in the compressed image."""
        starts = accumulate((strip.plain_bytes for strip in self.strips), initial=0)
        places = accumulate((strip.compressed_bytes for strip in self.strips), initial=0)
        return tuple(zip(self.strips, starts, places, strict=False))

    def cut(self, data: torch.Tensor) -> list[torch.Tensor]:
        """The compressed strips, as views of the compressed image."""
        return [*data.split_with_sizes([strip.compressed_bytes for strip in self.strips])]

    @cached_property
    def largest_strip(self) -> int:
        """The compressed bytes of the largest strip."""
        return max(strip.compressed_bytes for strip in self.strips)

    def to_json(self) -> str:
        strips = [
            [strip.num_escapes, [[span.num_bytes, span.code, bytes(span.exponents).hex()] for span in strip.spans]]
            for strip in self.strips
        ]
        return json.dumps(
            {
                "version": VERSION,
                "plain_bytes": self.plain_bytes,
                "compressed_bytes": self.compressed_bytes,
                "hash": self.hash,
                "strips": strips,
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> CompressedLayout:
        """What `to_json` has written. Whether somebody has changed it since is not seen here: headers have a hash.

        Raises:
            ValueError, TypeError, LookupError, RecursionError: it was written by something else.
        """
        found = json.loads(text)
        if found["version"] not in (2, VERSION):
            raise ValueError(f"version {found['version']}, not {VERSION}")
        return cls(
            found["plain_bytes"], found["compressed_bytes"], tuple(map(_strip_of, found["strips"])), found["hash"]
        )


def _strip_of(found: tuple[int, list[tuple[int, int, str]]]) -> Strip:
    num_escapes, listed = found
    starts = accumulate((num_bytes for num_bytes, *_ in listed), initial=0)
    spans = zip(listed, starts, strict=False)
    decoded = (
        Span(at, size, code % _FP8_CODE, tuple(bytes.fromhex(known)), code > _FP8_CODE)
        for (size, code, known), at in spans
    )
    return Strip(tuple(decoded), num_escapes)


def compressed_size(spans: Sequence[Span], num_escapes: int) -> int:
    """The size of a compressed strip."""
    return _places(spans)[-1] + aligned(num_escapes + _BEHIND_ESCAPES)


def _places(spans: Sequence[Span]) -> list[int]:
    num_tiles = sum(span.num_tiles for span in spans)
    found = [aligned(ROW_BYTES * len(spans)) + aligned(ENTRY_BYTES * num_tiles)]
    for span in spans:
        found.append(aligned(found[-1] + span.compressed_bytes))
    return found
