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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ..base.layout import BlobLayout, memory_of
from ..base.reading import read_into
from ..errors import GroupFileError
from ..packing.codec import Packed, hash_of, pack
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
from .source import Contents, Piece, SourceFile

logger = logging.getLogger("group_offload")


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
    # Without the device, whose number may be another one after the next boot, or in the next container.
    facts = f"{found.st_ino}:{found.st_size}:{found.st_mtime_ns}:{found.st_ctime_ns}"
    return PackedFrom(str(source.path), facts, hashlib.sha256(place.encode()).hexdigest()[:32])


class _PackedSource(SourceFile):
    """A packed group file. It is not the only place of its weights."""

    is_lost = False

    def lost(self, position: int, what: str) -> GroupFileError:
        self.is_lost = True
        return GroupFileError(
            f"Cannot read the packed weights in {self.path} at byte {position:,}: {what}. No weight is lost: call the model "
            f"again, and it uses the original ones. Delete the file to have it packed again when you offload next."
        )


class PackedFile(Contents):
    """A packed group file that is proven to be the right one. Its `content` is the hash of the packed image."""

    source: _PackedSource

    def __init__(self, file: ProvenFile, group_id: str, header: PackedHeader) -> None:
        """
        Raises:
            GroupFileError: the file cannot be mapped.
        """
        self.content, self.packed, self.origin = header
        end = file.stamp.st_size
        self.position = end - self.packed.packed_bytes
        """Where the packed image begins in the file. It ends where the file does."""
        try:
            source = _PackedSource(file.path, file.file, self.position, end, file.stamp)
        except OSError as error:
            raise GroupFileError(f"Cannot map {file.path}, which has packed weights: {error}") from error
        super().__init__(group_id, [Piece(0, self.position, self.packed.packed_bytes)], source)
        source.add(self)

    def read(self, memory: torch.Tensor) -> None:
        """Read the packed image, and check it. It stays packed.

        Args:
            memory: uint8 [packed.packed_bytes], on the CPU.

        Raises:
            GroupFileError: the file cannot be read, or its data is not what was written.
        """
        try:
            num_bytes = read_into(self.source.fd, memory_of(memory), self.position)
        except OSError as error:
            raise self.unusable(str(error.strerror or error)) from error
        if num_bytes < memory.numel() or content_of([memory]) != self.content:
            raise self.unusable("its data is not what was written")

    def unusable(self, why: str) -> GroupFileError:
        """The error for a file that cannot be used from the start."""
        return GroupFileError(f"{self.source.path} cannot be used: {why}. Delete it, and it is packed again.")


class Wanted(NamedTuple):
    """A blob whose packed file is wanted."""

    group_id: str
    layout: BlobLayout
    tensors: Sequence[torch.Tensor]
    origin: PackedFrom | None = None
    """The bytes of a file that the tensors are views of, so that the packed file is found by facts the next time."""


def find(folder: Folder, wanted: Wanted) -> PackedFile | None:
    """The file that is proven by facts to hold the weights of `wanted.origin`."""
    origin = wanted.origin
    return None if origin is None else _search(folder, wanted, lambda header, fd: header.packed_from == origin)


def find_or_pack(folder: Folder, wanted: Wanted, device: torch.device | None = None) -> PackedFile | None:
    """The file that holds a blob packed. It is written if there is none. Hold `Folder.locked` meanwhile.

    Args:
        device: packs. None: the CPU.

    Returns:
        None if packing the blob would not save enough.

    Raises:
        GroupFileError: the file cannot be written, or mapped.
    """
    found = find(folder, wanted)
    if found is not None:
        return found
    with torch.no_grad():
        image = torch.cat([*data_pieces(wanted.layout, wanted.tensors)])
    plain = hash_of(image)

    def is_right(header: PackedHeader, fd: int) -> bool:
        start = os.fstat(fd).st_size - header.packed.packed_bytes
        return header.packed.hash == plain and content_of_file(fd, start) == header.content

    found = _search(folder, wanted, is_right)
    if found is None:
        packed = pack(image, wanted.layout, device, plain=plain)
        return None if packed is None else _write(folder, wanted, packed)
    if wanted.origin in (None, found.origin):
        return found
    try:  # the same packed bytes with the facts of now
        memory = torch.empty(found.packed.packed_bytes, dtype=torch.uint8, device="cpu")
        found.read(memory)
        return _write(folder, wanted, Packed(found.packed, memory), found.source.path)
    except GroupFileError as error:  # the folder may be full
        logger.info("%s is used as it is: %s", found.source.path, error)
        return found


def _write(folder: Folder, wanted: Wanted, packed: Packed, replaced: Path | None = None) -> PackedFile:
    group_id, layout, _, origin = wanted
    content = content_of([packed.data])
    header = encode_header(layout, group_id, folder.model_class, content, packed.layout, origin)
    written = folder.find_or_write(
        _id_of(group_id), header, content, lambda: [packed.data], lambda num_bytes: None, replaced
    )
    return PackedFile(written, group_id, PackedHeader(content, packed.layout, origin))


def _search(folder: Folder, wanted: Wanted, is_right: Callable[[PackedHeader, int], bool]) -> PackedFile | None:
    """See `Folder.search`."""

    def header_of(fd: int) -> PackedHeader | None:
        header = read_packed_header(fd, wanted.layout, wanted.group_id, folder.model_class)
        return header if header is not None and is_right(header, fd) else None

    _, found = folder.search(_id_of(wanted.group_id), header_of)
    return None if found is None else PackedFile(found[0], wanted.group_id, found[1])


def _id_of(group_id: str) -> str:
    """What the packed file of a group is named by. The plain one is named by the group's id itself."""
    return f"{group_id}|packed"
