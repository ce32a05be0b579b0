"""Compressed group files: which file of a folder holds a blob compressed, and how one is made.

[Note: Whose a compressed file is]
A compressed file is used for a blob if it is proven to hold the weights, in one of two ways. Both take the word of a header, so
both are for files that no other user can have written: see [Note: Files of others] in `ownership`.

- *By hashes.* Its header has the hash of the image that was compressed, which has to be that of the weights now, and the hash
  of its data, which has to be that of its bytes now. (That the data decompresses to the image was proven when it was
  compressed.) All weights and the file are read for that.
- *By facts.* Weights that are views of a file are what they were as long as that file is, byte for byte. So the header has
  the facts of the file that was compressed, from before it was read, and where the weights lie in it: nothing is read. The data
  is compared with its hash when it is read.

A file that was found by its hashes, and was compressed from another file (or from the same one before it was touched), is
written again with the facts of this one, so that it is found by facts from then on.
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
from ..compression.codec import Compressed, compress, hash_of
from ..errors import StorageError
from .folder import Folder, ProvenFile
from .safetensors_file import (
    CompressedFrom,
    CompressedHeader,
    content_of,
    content_of_file,
    data_pieces,
    encode_header,
    read_compressed_header,
)
from .source import Contents, Piece, SourceFile

logger = logging.getLogger("group_offload")


def compressed_from(source: SourceFile, pieces: Sequence[Piece], layout: BlobLayout) -> CompressedFrom | None:
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
    return CompressedFrom(str(source.path), facts, hashlib.sha256(place.encode()).hexdigest()[:32])


class _CompressedSource(SourceFile):
    """A compressed group file. It is not the only place of its weights."""

    is_lost = False

    def lost(self, position: int, what: str) -> StorageError:
        self.is_lost = True
        return StorageError(
            f"Cannot read the compressed weights in {self.path} at byte {position:,}: {what}. No weight is lost: call the "
            f"model again, and it uses the original ones. Delete the file to have it compressed again when you offload next."
        )


class CompressedFile(Contents):
    """A compressed group file that is proven to be the right one. Its `content` is the hash of the compressed image."""

    source: _CompressedSource

    def __init__(self, file: ProvenFile, group_id: str, header: CompressedHeader) -> None:
        """
        Raises:
            StorageError: the file cannot be mapped.
        """
        self.content, self.compressed, self.origin = header
        end = file.stamp.st_size
        self.position = end - self.compressed.compressed_bytes
        """Where the compressed image begins in the file. It ends where the file does."""
        try:
            source = _CompressedSource(file.path, file.file, self.position, end, file.stamp)
        except OSError as error:
            raise StorageError(f"Cannot map {file.path}, which has compressed weights: {error}") from error
        super().__init__(group_id, [Piece(0, self.position, self.compressed.compressed_bytes)], source)
        source.add(self)

    def read(self, memory: torch.Tensor) -> None:
        """Read the compressed image, and check it. It stays compressed.

        Args:
            memory: uint8 [compressed.compressed_bytes], on the CPU.

        Raises:
            StorageError: the file cannot be read, or its data is not what was written.
        """
        try:
            num_bytes = read_into(self.source.fd, memory_of(memory), self.position)
        except OSError as error:
            raise self.unusable(str(error.strerror or error)) from error
        if num_bytes < memory.numel() or content_of([memory]) != self.content:
            raise self.unusable("its data is not what was written")

    def unusable(self, why: str) -> StorageError:
        """The error for a file that cannot be used from the start."""
        return StorageError(f"{self.source.path} cannot be used: {why}. Delete it, and it is compressed again.")


class Wanted(NamedTuple):
    """A blob whose compressed file is wanted."""

    group_id: str
    layout: BlobLayout
    tensors: Sequence[torch.Tensor]
    origin: CompressedFrom | None = None
    """The bytes of a file that the tensors are views of, so that the compressed file is found by facts the next time."""


def find(folder: Folder, wanted: Wanted) -> CompressedFile | None:
    """The file that is proven by facts to hold the weights of `wanted.origin`."""
    origin = wanted.origin
    return None if origin is None else _search(folder, wanted, lambda header, fd: header.compressed_from == origin)


def find_or_compress(folder: Folder, wanted: Wanted, device: torch.device | None = None) -> CompressedFile | None:
    """The file that holds a blob compressed. It is written if there is none. Hold `Folder.hold` meanwhile.

    Args:
        device: compresses. None: the CPU.

    Returns:
        None if compressing the blob would not save enough.

    Raises:
        StorageError: the file cannot be written, or mapped.
    """
    found = find(folder, wanted)
    if found is not None:
        return found
    with torch.no_grad():
        image = torch.cat([*data_pieces(wanted.layout, wanted.tensors)])
    plain = hash_of(image)

    def is_right(header: CompressedHeader, fd: int) -> bool:
        start = os.fstat(fd).st_size - header.compressed.compressed_bytes
        return header.compressed.hash == plain and content_of_file(fd, start) == header.content

    found = _search(folder, wanted, is_right)
    if found is None:
        compressed = compress(image, wanted.layout, device, plain=plain)
        return None if compressed is None else _write(folder, wanted, compressed)
    if wanted.origin in (None, found.origin):
        return found
    try:  # the same compressed bytes with the facts of now
        memory = torch.empty(found.compressed.compressed_bytes, dtype=torch.uint8, device="cpu")
        found.read(memory)
        return _write(folder, wanted, Compressed(found.compressed, memory), found.source.path)
    except StorageError as error:  # the folder may be full
        logger.info("%s is used as it is: %s", found.source.path, error)
        return found


def _write(folder: Folder, wanted: Wanted, compressed: Compressed, replaced: Path | None = None) -> CompressedFile:
    group_id, layout, _, origin = wanted
    content = content_of([compressed.data])
    header = encode_header(layout, group_id, folder.model_class, content, compressed.layout, origin)
    written = folder.find_or_write(
        _id_of(group_id), header, content, lambda: [compressed.data], lambda num_bytes: None, replaced
    )
    return CompressedFile(written, group_id, CompressedHeader(content, compressed.layout, origin))


def _search(folder: Folder, wanted: Wanted, is_right: Callable[[CompressedHeader, int], bool]) -> CompressedFile | None:
    """See `Folder.search`."""

    def header_of(fd: int) -> CompressedHeader | None:
        header = read_compressed_header(fd, wanted.layout, wanted.group_id, folder.model_class)
        return header if header is not None and is_right(header, fd) else None

    _, found = folder.search(_id_of(wanted.group_id), header_of)
    return None if found is None else CompressedFile(found[0], wanted.group_id, found[1])


def _id_of(group_id: str) -> str:
    """What the compressed file of a group is named by. The plain one is named by the group's id itself."""
    return f"{group_id}|compressed"
