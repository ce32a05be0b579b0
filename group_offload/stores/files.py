"""Blobs whose bytes lie in files."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..base.layout import BlobLayout
from .base import Tier, moves_of_rest
from .moves import Copy, Move, Read
from .origin import Origin
from .source import Piece, Proof, SourceFile


class FileBlob:
    """A blob whose bytes are pieces of a file. At rest its tensors are views of a private mapping of that file.

    They take no RAM until they are read, and the kernel copies the pages that are edited.
    """

    detects_edits = True
    is_outdated = False
    origin: Origin | None = None
    generation = 0
    layout: BlobLayout
    rest: list[torch.Tensor]
    source: SourceFile
    pieces: Sequence[Piece]

    def __init__(self, layout: BlobLayout) -> None:
        self.layout = layout
        self.content: str | None = None
        """The XXH3 hash (128 bits, hexadecimal) of the pieces' bytes, if it is known."""
        self.is_verified = False
        """Whether each read is compared, by its hash, with what was written, or with what was read the first time."""
        self.tier = Tier.FILE
        self.is_direct = False
        """Whether parts that are not in the page cache are read past it."""
        self.is_packed = False
        """Whether packed bytes of the blob are sent in its place: then the file is not read in passes."""
        self.is_read_packed = False
        """Whether these are read from a file of their own."""
        self._is_locked = False
        self._asked: tuple[SourceFile, int] | None = None
        """The file, and its `num_lockings`, when `_is_locked` was found out."""

    @property
    def name(self) -> str:
        return self.layout.specs[0].fqn

    @property
    def is_locked(self) -> bool:
        """Whether the blob is page-locked in the page cache: then copies take it from there, and nothing is read."""
        asked = self.source, self.source.num_lockings
        if asked != self._asked:
            self._is_locked, self._asked = self.source.is_locked(self.pieces), asked
        return self._is_locked

    @property
    def is_read(self) -> bool:
        """Whether each pass reads the blob, from its file or from a packed one."""
        return self.is_read_packed or not (self.is_locked or self.is_packed)

    @property
    def pinned_bytes(self) -> int:
        return self.layout.num_bytes if self.is_locked else 0

    @property
    def way(self) -> str:
        """How the file is read: see [Note: Ways to read a file]."""
        if self.is_locked:
            return "locked"
        return "direct" if self.is_direct else "page cache"

    @property
    def same_as(self) -> str:
        return "" if self.is_outdated else self.content or f"{self.source.content} {self.pieces}"

    def check(self) -> None:
        self.source.check()

    def prove(self) -> None:
        """
        Raises:
            GroupFileError: the file does not hold the bytes any more whose hash is known.
        """
        proof = Proof(self)
        for piece in self.pieces:
            for chunk in self.source.chunks(piece.position, piece.num_bytes):
                proof.update(chunk)

    def moves(self, at: int, label: str) -> list[Move]:
        if self.is_outdated:
            return moves_of_rest(self.layout, self.rest, at, label)
        source = self.source
        if self.is_locked:
            return [
                Copy(at + offset, num_bytes, memory, start)
                for piece in self.pieces
                for offset, num_bytes, memory, start in source.locked_parts(piece)
            ]
        proof = Proof(self) if self.is_verified or source.is_adrift else None
        return [
            Read(at + piece.offset, piece.num_bytes, source, piece.position, self.is_direct, label, proof)
            for piece in self.pieces
        ]
