"""Packed group files: which file of a folder holds a blob packed, and how one is made.

[Note: Whose a packed file is]
A packed file is used for a blob if it is proven to hold the weights, in one of two ways.

- *By hashes.* Its header has the hash of the image that was packed, which has to be that of the weights now, and the hash of
  its data, which has to be that of its bytes now. (That the data unpacks to the image was proven when it was packed.) All
  weights and the file are read for that.
- *By facts.* Weights that are views of a file are what they were as long as that file is, byte for byte. So the manifest has
  the facts of the file that was packed, where the weights lie in it, and the facts of the packed file: nothing is read. The
  data is compared with its hash when it is read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from ..base.layout import BlobLayout, memory_of
from ..base.publish import remove_unused
from ..base.reading import read_into
from ..errors import GroupFileError
from ..packing.codec import Packed, check, pack
from ..packing.layout import PackedLayout
from .folder import Folder
from .manifest import ManifestEntry, PackedFrom, facts_of, manifests_in
from .safetensors_file import (
    GroupHeader,
    check_group_header,
    content_of,
    content_of_file,
    data_pieces,
    encode_header,
    printable_id,
    read_header,
)
from .source import Piece, SourceFile

logger = logging.getLogger("group_offload")

_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Origin:
    """The bytes of a file that a blob was made of."""

    path: Path
    facts: str
    place: str

    @property
    def is_there(self) -> bool:
        """Whether the file is still the one that the facts are of."""
        with suppress(OSError):
            return facts_of(os.stat(self.path)) == self.facts
        return False


def origin_of(source: SourceFile, pieces: Sequence[Piece], layout: BlobLayout) -> Origin | None:
    """
    Args:
        source: the file that the tensors of a blob are views of.
        pieces: where they lie in it.

    Returns:
        None if the file was deleted, renamed or replaced since: what is under its name now proves nothing.
    """
    found = source.stat_at(source.path)
    if found is None:
        return None
    specs = [[printable_id(spec.fqn), str(spec.dtype), spec.shape, spec.stride, spec.offset] for spec in layout.specs]
    place = json.dumps([[[piece.offset, piece.position, piece.num_bytes] for piece in pieces], specs])
    return Origin(source.path, facts_of(found), hashlib.sha256(place.encode()).hexdigest()[:32])


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A packed group file that is proven to be the right one."""

    path: Path
    fd: int
    """A descriptor that the caller closes. The file is marked as in use until it, and what is mapped with it, is gone."""
    stamp: os.stat_result
    entry: ManifestEntry
    packed: PackedLayout

    @property
    def start(self) -> int:
        """Where the packed image begins in the file. It ends where the file does."""
        return self.entry.num_bytes - self.packed.packed_bytes

    def read(self, memory: torch.Tensor, on_read: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Read the packed image, piece by piece, and check it. It stays packed.

        Args:
            memory: uint8 [packed.packed_bytes], on the CPU.

        Raises:
            GroupFileError: the file cannot be read, or its data is not what was written.
        """
        digest = xxhash.xxh3_128()
        try:
            for begin in range(0, memory.numel(), _CHUNK_BYTES):
                part = memory_of(memory[begin : begin + _CHUNK_BYTES])
                digest.update(part[: read_into(self.fd, part, self.start + begin)])
                on_read(len(part))
            if digest.hexdigest() != self.entry.content:
                raise GroupFileError("its data is not what was written")
            check(memory, self.packed)
        except OSError as error:
            raise GroupFileError(
                f"{self.path} cannot be used: {error.strerror or error}. Delete it: it is packed again when it is needed."
            ) from error


class PackedFiles:
    """The packed files of a folder, as one model uses them. Order of calls: as those of `Folder`."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        known = [entry for each in manifests_in(folder.path).values() for entry in each.entries]
        self._known = {
            (entry.group_id, source.source, source.place): entry
            for entry in known
            if (source := entry.packed_from) is not None
        }
        self._paths = {(entry.group_id, entry.packed_from.path) for entry in self._known.values() if entry.packed_from}
        self.num_changed = 0
        """The blobs whose weights were packed before, and whose file has changed since."""

    def find(self, group_id: str, layout: BlobLayout, origin: Origin) -> PackedFile | None:
        """The file that is proven by facts to hold the weights of `origin`."""
        entry = self._known.get((printable_id(group_id), origin.facts, origin.place))
        if entry is None or entry.packed_from is None:
            self.num_changed += (printable_id(group_id), str(origin.path)) in self._paths
            return None
        facts = entry.packed_from.file

        def is_right(header: GroupHeader, fd: int) -> bool:
            return header.content == entry.content and facts_of(os.fstat(fd)) == facts

        return self._open(self._folder.path / entry.file, group_id, layout, is_right, entry.packed_from)

    def find_or_pack(
        self,
        group_id: str,
        layout: BlobLayout,
        tensors: Sequence[torch.Tensor],
        on_done: Callable[[int], None] = lambda num_bytes: None,
        *,
        origin: Origin | None = None,
        device: torch.device | None = None,
    ) -> PackedFile | None:
        """The file that holds the tensors packed. It is written if there is none.

        Args:
            on_done: A function that is told how many bytes of the image are done.
            origin: the bytes of a file that the tensors are views of, so that they are found by facts the next time.
            device: packs. None: the CPU.

        Returns:
            None if packing them would not save enough.

        Raises:
            GroupFileError: the file cannot be written, or the file of `origin` changed meanwhile.
        """
        found = None if origin is None else self.find(group_id, layout, origin)
        if found is None:
            found = self._find_or_pack(group_id, layout, tensors, origin, device)
        on_done(layout.num_bytes)
        return found

    def _find_or_pack(
        self,
        group_id: str,
        layout: BlobLayout,
        tensors: Sequence[torch.Tensor],
        origin: Origin | None,
        device: torch.device | None,
    ) -> PackedFile | None:
        plain = content_of(data_pieces(layout, tensors))

        def is_right(header: GroupHeader, fd: int) -> bool:
            size = os.fstat(fd).st_size
            is_mine = header.packed is not None and header.packed.hash == plain
            return is_mine and content_of_file(fd, size - header.data_bytes, lambda num_bytes: None) == header.content

        packed: Packed | None = None
        for path in self._folder.names(f"{group_id}|packed"):
            found = self._open(path, group_id, layout, is_right, origin)
            if found is None and not os.path.lexists(path):
                packed = packed or _pack(layout, tensors, device)
                if packed is None:
                    return None
                if packed.layout.hash != plain or (origin and not origin.is_there):
                    raise GroupFileError(
                        f"{origin.path if origin else group_id} changed while it was being packed: the result may be of the "
                        f"old weights and the new ones, and was thrown away. Keep other programs from changing it, and try "
                        f"again."
                    )
                found = self._write(path, group_id, layout, packed, origin)
                if found is None:  # another process was quicker
                    found = self._open(path, group_id, layout, is_right, origin)
            if found is not None:
                return found
            self._folder.leave(path, group_id)
        raise AssertionError("unreachable")

    def _write(
        self, path: Path, group_id: str, layout: BlobLayout, packed: Packed, origin: Origin | None
    ) -> PackedFile | None:
        content = content_of([packed.data])
        header = encode_header(layout, group_id, self._folder.model_class, content, packed.layout)
        size = len(header) + packed.layout.packed_bytes
        written = self._folder.write(path, group_id, header, size, [packed.data], lambda num_bytes: None)
        if written is None:
            return None
        entry = ManifestEntry(group_id, path.name, content, size, _packed_from(origin, written[1]))
        return PackedFile(path, *written, entry, packed.layout)

    def _open(
        self,
        path: Path,
        group_id: str,
        layout: BlobLayout,
        is_right: Callable[[GroupHeader, int], bool],
        origin: Origin | PackedFrom | None,
    ) -> PackedFile | None:
        headers: list[GroupHeader] = []

        def is_packed(fd: int) -> bool:
            header = check_group_header(read_header(fd), os.fstat(fd).st_size)
            headers.append(header)
            expected = self._folder.model_class, printable_id(group_id), layout.specs, layout.num_bytes
            found = header.model_class, header.group_id, header.layout.specs, header.layout.num_bytes
            return header.packed is not None and found == expected and is_right(header, fd)

        opened = self._folder.open_if(path, is_packed)
        if opened is None or headers[0].packed is None:
            return None
        source = origin if isinstance(origin, PackedFrom) else _packed_from(origin, opened[1])
        entry = ManifestEntry(group_id, path.name, headers[0].content, opened[1].st_size, source)
        return PackedFile(path, *opened, entry, headers[0].packed)


def _pack(layout: BlobLayout, tensors: Sequence[torch.Tensor], device: torch.device | None) -> Packed | None:
    image, end = torch.empty(layout.num_bytes, dtype=torch.uint8, device="cpu"), 0
    for piece in data_pieces(layout, tensors):
        image[end : end + piece.numel()] = piece
        end += piece.numel()
    return pack(image, layout, device)


def _packed_from(origin: Origin | None, stamp: os.stat_result) -> PackedFrom | None:
    if origin is None:
        return None
    return PackedFrom(str(origin.path), origin.facts, origin.place, facts_of(stamp))


def give_up_outdated(folder: Path, entries: Sequence[ManifestEntry]) -> int:
    """Delete the manifests of packed files whose checkpoint was packed again as `entries`, because it has changed.

    `prune` then removes the files.

    Returns:
        How many there were.
    """
    num, mine = 0, {entry.packed_from.path for entry in entries if entry.packed_from is not None}
    for name, manifest in manifests_in(folder).items():
        sources = [entry.packed_from for entry in manifest.entries if entry.packed_from is not None]
        if any(source.path in mine and source.is_outdated for source in sources):
            try:
                num += remove_unused(folder / name)
            except OSError as error:
                logger.info("%s is out of date, and cannot be removed: %s.", folder / name, error)
    return num
