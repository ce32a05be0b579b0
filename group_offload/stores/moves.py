"""How bytes get into a slot: frozen data that a blob gives and `Transfer` carries out, in the order given.

A new way to bring bytes to the device is a new kind of move here, and a new case in `Transfer`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain
from typing import Any

import torch

from ..base.reading import BLOCK
from ..compression.codec import decompress_strip
from ..compression.layout import Runs, Strip
from .source import Proof, SourceFile


class Tier(Enum):
    """Where a blob is stored, or sent from."""

    RAM = "ram"
    """Pinned RAM: one asynchronous copy to the device."""
    PAGEABLE = "pageable"
    """RAM that is not pinned: through staging buffers to the device."""
    FILE = "disk"
    """A file, read for each onload."""


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """One asynchronous copy of pinned memory. The bytes must not change before it is done."""

    at: int
    """The byte of the slot that the first byte goes to."""
    num_bytes: int
    memory: torch.Tensor
    """Flat uint8."""
    start: int
    """The first byte of `memory` that is copied."""
    tier: Tier = Tier.RAM


@dataclass(frozen=True, slots=True, eq=False)
class PageableMemory:
    """RAM that is not pinned."""

    bytes: torch.Tensor
    """Flat uint8."""

    def read(self, area: memoryview, position: int, num_bytes: int, *, direct: bool) -> bool:
        """See `SourceFile.read`. Threads do this side by side."""
        self.read_straight(area[position % BLOCK :][:num_bytes], position)
        return False

    def read_straight(self, target: memoryview, position: int) -> None:
        """See `SourceFile.read_straight`."""
        area = ctypes.c_char.from_buffer(target)
        # Without Python's lock, and without torch, which would divide each piece among threads again.
        ctypes.memmove(ctypes.byref(area), self.bytes.data_ptr() + position, len(target))


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """Bytes of a file, or of RAM that is not pinned. Other threads read them later, and copy them to the slot."""

    at: int
    """The byte of the slot that the first byte goes to; with `decompress`, the byte of a compressed buffer."""
    num_bytes: int
    source: SourceFile | PageableMemory
    position: int
    """The first byte of the source that is read."""
    is_direct: bool
    """Whether bytes that are not in the page cache are read past it."""
    label: str
    """The name of the group that needs the bytes, for errors."""
    tier: Tier
    proof: Proof | None = None
    """A check of the bytes. It is shown what was read, in the order of the moves."""
    decompress: Decompress | None = None
    """What is done with the bytes once all that it needs are in a compressed buffer, if they are compressed."""


@dataclass(frozen=True, slots=True, eq=False)
class Decompress:
    """A strip of compressed bytes, which the device decompresses into the slot. See [Note: A compressed image]."""

    at: int
    """The byte of the slot that the first byte goes to."""
    num_bytes: int
    strip: Strip
    compressed: torch.Tensor | None
    """The compressed bytes of the strip, flat uint8, in pinned memory or on the device. None: they are read from a file."""
    needed_for: Callable[[int, int], Runs]
    """The compressed bytes that a part of the strip is decompressed from: see `Strip.needed`."""
    tier: Tier = Tier.RAM
    is_on_device: bool = False
    """Whether the compressed bytes are on the device already."""
    start: int = 0
    """The first byte of the strip that is decompressed."""
    needed: Runs = ()
    """The compressed bytes that are needed. Empty: all of them."""

    @property
    def sent(self) -> Runs:
        """The compressed bytes that go to a compressed buffer: they are there once the last of these are."""
        return self.needed or ((0, self.strip.compressed_bytes),)

    @property
    def sent_bytes(self) -> int:
        return 0 if self.is_on_device else sum(last - first for first, last in self.sent)

    def part(self, first: int, last: int) -> Decompress:
        """The same for bytes `first` to `last` of the slot alone."""
        if (first, last) == (self.at, self.at + self.num_bytes):
            return self
        start, num_bytes = self.start + first - self.at, last - first
        needed = self.needed_for(start, start + num_bytes)
        return replace(self, at=first, num_bytes=num_bytes, start=start, needed=needed)

    def kernel(self, compressed: torch.Tensor, target: torch.Tensor) -> None:
        """Decompress on the current stream: see `Backend.transform`."""
        decompress_strip(compressed, self.strip, target, self.start)


Move = Copy | Read | Decompress


def may_be_cut(moves: Iterable[Move]) -> bool:
    """Whether a part of these bytes can be brought without the others."""

    def may_be(move: Move) -> bool:
        if isinstance(move, Decompress):
            return not move.is_on_device
        return isinstance(move, Copy) or (isinstance(move, Read) and move.proof is None)

    return all(map(may_be, moves))


def moves_within(moves: Iterable[Move], start: int, end: int) -> list[Move]:
    """The moves of those bytes that go to bytes `start` to `end` of the slot."""
    found: list[Move] = []
    for move in moves:
        lands = move.decompress if isinstance(move, Read) and move.decompress is not None else move
        first, last = max(start, lands.at), min(end, lands.at + lands.num_bytes)
        if first >= last:
            continue
        skipped = first - lands.at
        match move:
            case Copy():
                found.append(replace(move, at=first, num_bytes=last - first, start=move.start + skipped))
            case Decompress():
                found.append(move.part(first, last))
            case Read(decompress=None):
                found.append(replace(move, at=first, num_bytes=last - first, position=move.position + skipped))
            case Read(decompress=Decompress() as whole):
                part = whole.part(first, last)
                found += [
                    replace(move, at=low, num_bytes=high - low, position=move.position + low, decompress=part)
                    for low, high in part.sent
                ]
    return found


def sent_bytes(move: Move) -> int:
    """The bytes that leave the host, or files."""
    return move.sent_bytes if isinstance(move, Decompress) else move.num_bytes


def joined(moves: Iterable[Iterable[Move]]) -> list[Move]:
    """The moves of several blobs, with neighbors that lie side by side both in their store and in the slot joined into one."""
    runs: list[list[Any]] = []
    for move in chain.from_iterable(moves):
        if runs and _continues(runs[-1][-1], move):
            runs[-1].append(move)
        else:
            runs.append([move])
    return [
        run[0] if len(run) == 1 else replace(run[0], num_bytes=sum([each.num_bytes for each in run])) for run in runs
    ]


def _continues(last: Move, move: Move) -> bool:
    if last.at + last.num_bytes != move.at:
        return False
    if isinstance(last, Copy):
        return isinstance(move, Copy) and last.memory is move.memory and last.start + last.num_bytes == move.start
    return (
        isinstance(last, Read)
        and isinstance(move, Read)
        and last.source is move.source
        and last.decompress is move.decompress
        and last.proof is move.proof
        and last.is_direct == move.is_direct
        and last.position + last.num_bytes == move.position
    )
