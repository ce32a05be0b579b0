"""Packed group files: which file of a folder holds a blob packed, and how one is made.

[Note: Whose a packed file is]
A packed file is used for a blob if it is proven to hold the weights, in one of two ways. Both take the word of a header, so
both are for files that no other user can have written: see [Note: Files of others] in `ownership`.

- *By hashes.* Its header has the hash of the image that was packed, which has to be that of the weights now, and the hash of
  its data, which has to be that of its bytes now. (That the data unpacks to the image was proven when it was packed.) All
  weights and the file are read for that.
- *By facts.* Weights that are views of a file are what they were as long as that file is, byte for byte. So the header has
  the facts of the file that was packed, from before it was read, and where the weights lie in it: nothing is read. The data is
  compared with its hash when it is read.

A file that was found by its hashes, and was packed from another file (or from the same one before it was touched), is written
again with the facts of this one, so that it is found by facts from then on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from ..base.layout import BlobLayout, memory_of
from ..base.pool import done
from ..base.reading import read_into
from ..errors import GroupFileError
from ..packing.codec import Packed, hash_of, pack
from ..packing.layout import PackedLayout
from .folder import Folder, ProvenFile
from .safetensors_file import (
    PackedFrom,
    PackedHeader,
    content_of,
    content_of_file,
    data_pieces,
    encode_header,
    read_packed_header,
)
from .source import Piece, SourceFile

logger = logging.getLogger("group_offload")


def facts_of(found: os.stat_result) -> str:
    """What changes if a byte of the file does: see [Note: Which file it is] in `source`.

    Without the device, whose number may be another one after the next boot, or in the next container.
    """
    return f"{found.st_ino}:{found.st_size}:{found.st_mtime_ns}:{found.st_ctime_ns}"


def packed_from(source: SourceFile, pieces: Sequence[Piece], layout: BlobLayout) -> PackedFrom | None:
    """The bytes of a file that a blob is made of.

    Args:
        source: the file that the tensors of the blob are views of.
        pieces: where they lie in it.

    Returns:
        None if the file was deleted, renamed or replaced since: what is under its name now proves nothing.
    """
    found = source.named_stat()
    if found is None:
        return None
    specs = [[spec.fqn, str(spec.dtype), spec.shape, spec.stride, spec.offset] for spec in layout.specs]
    place = json.dumps([[[piece.offset, piece.position, piece.num_bytes] for piece in pieces], specs])
    return PackedFrom(str(source.path), facts_of(found), hashlib.sha256(place.encode()).hexdigest()[:32])


@dataclass(frozen=True, slots=True)
class PackedFile(ProvenFile):
    """A packed group file that is proven to be the right one. Its `content` is the hash of the packed image."""

    group_id: str
    packed: PackedLayout
    origin: PackedFrom | None
    """What it was packed from, if that was in a file."""

    @property
    def start(self) -> int:
        """Where the packed image begins in the file. It ends where the file does."""
        return self.stamp.st_size - self.packed.packed_bytes

    def read(self, memory: torch.Tensor) -> None:
        """Read the packed image, and check it. It stays packed.

        Args:
            memory: uint8 [packed.packed_bytes], on the CPU.

        Raises:
            GroupFileError: the file cannot be read, or its data is not what was written.
        """
        try:
            num_bytes = read_into(self.fd, memory_of(memory), self.start)
            if num_bytes < memory.numel() or content_of([memory]) != self.content:
                raise GroupFileError("its data is not what was written")
        except OSError as error:
            raise GroupFileError(
                f"{self.path} cannot be used: {error.strerror or error}. Delete it, and it is packed again."
            ) from error


class Wanted(NamedTuple):
    """A blob whose packed file is wanted."""

    group_id: str
    layout: BlobLayout
    tensors: Sequence[torch.Tensor]
    origin: PackedFrom | None = None
    """The bytes of a file that the tensors are views of, so that the packed file is found by facts the next time."""


class PackedFiles:
    """The packed files of a folder, as one model uses them. Order of calls: as those of `Folder`."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.num_changed = 0
        """The blobs whose weights were packed before, and whose file has changed since."""

    def find(self, wanted: Wanted) -> PackedFile | None:
        """The file that is proven by facts to hold the weights of `wanted.origin`."""
        origin, others = wanted.origin, list[PackedFrom]()
        if origin is None:
            return None

        def is_right(header: PackedHeader, fd: int) -> bool:
            others.extend([] if header.packed_from is None else [header.packed_from])
            return header.packed_from == origin

        found = self._search(wanted, is_right)
        self.num_changed += found is None and any(
            each.path == origin.path and each.facts != origin.facts for each in others
        )
        return found

    def find_or_pack(
        self, wanted: Iterable[Wanted], device: torch.device | None = None
    ) -> Generator[PackedFile | None]:
        """For each of the blobs, in order, the file that holds it packed. It is written if there is none.

        Args:
            device: packs. None: the CPU.

        Yields:
            None if packing the blob would not save enough.

        Raises:
            GroupFileError: the file cannot be written.
        """
        for one in wanted:
            yield self.find(one) or self._find_or_pack(one, device)

    def _find_or_pack(self, wanted: Wanted, device: torch.device | None) -> PackedFile | None:
        with torch.no_grad():
            image = torch.cat([*data_pieces(wanted.layout, wanted.tensors)])
        plain = hash_of(image)

        def is_right(header: PackedHeader, fd: int) -> bool:
            start = os.fstat(fd).st_size - header.packed.packed_bytes
            return header.packed.hash == plain and content_of_file(fd, start) == header.content

        found = self._search(wanted, is_right)
        if found is None:
            packed = pack(image, wanted.layout, device, hashed=done(plain))
            return None if packed is None else self._write(wanted, packed)
        if wanted.origin in (None, found.origin):
            return found
        try:  # the same packed bytes with the facts of now
            memory = torch.empty(found.packed.packed_bytes, dtype=torch.uint8, device="cpu")
            found.read(memory)
            renewed = self._write(wanted, Packed(found.packed, memory), found.path)
        except GroupFileError as error:  # the folder may be full
            logger.info("%s is used as it is: %s", found.path, error)
            return found
        os.close(found.fd)
        return renewed

    def _write(self, wanted: Wanted, packed: Packed, replaced: Path | None = None) -> PackedFile:
        group_id, layout, _, origin = wanted
        content = content_of([packed.data])
        header = encode_header(layout, group_id, self._folder.model_class, content, packed.layout, origin)
        written = self._folder.obtain(
            _id_of(group_id), header, content, lambda: [packed.data], lambda num_bytes: None, replaced
        )
        return PackedFile(written.path, written.fd, written.stamp, content, group_id, packed.layout, origin)

    def _search(self, wanted: Wanted, is_right: Callable[[PackedHeader, int], bool]) -> PackedFile | None:
        """See `Folder.search`."""

        def header_of(fd: int) -> PackedHeader | None:
            header = read_packed_header(fd, wanted.layout, wanted.group_id, self._folder.model_class)
            return header if header is not None and is_right(header, fd) else None

        path, found = self._folder.search(_id_of(wanted.group_id), header_of)
        if found is None:
            return None
        fd, stamp, (content, packed, origin) = found
        return PackedFile(path, fd, stamp, content, wanted.group_id, packed, origin)


def _id_of(group_id: str) -> str:
    """What the packed file of a group is named by. The plain one is named by the group's id itself."""
    return f"{group_id}|packed"
