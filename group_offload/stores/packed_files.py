"""Packed group files: which file of a folder holds a blob packed, and how one is made.

[Note: Whose a packed file is]
A packed file is used for a blob if it is proven to hold the weights, in one of two ways. Both take the word of a header or of a
manifest, so both are for files that no other user can have written: see [Note: Files of others] in `ownership`.

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
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from ..base.layout import BlobLayout, memory_of
from ..base.pool import Task, done, withdraw_all
from ..base.publish import remove_unused
from ..base.ram import fits
from ..base.reading import read_into
from ..errors import GroupFileError
from ..packing.codec import Packed, check, hash_of, pack
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
_MOST_AT_ONCE = 4
"""Blobs that are read, packed and written at the same time."""


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


class Wanted(NamedTuple):
    """A blob whose packed file is wanted."""

    group_id: str
    layout: BlobLayout
    tensors: Sequence[torch.Tensor]
    origin: Origin | None = None
    """The bytes of a file that the tensors are views of, so that the packed file is found by facts the next time."""


def may_overlap(sizes: Iterable[int]) -> bool:
    """Whether RAM has room for several blobs of these sizes at a time: as they are, packed, or both."""
    return fits((_MOST_AT_ONCE + 1) * max(sizes, default=0))


class _Draft(NamedTuple):
    """A blob that was read, and is going to be packed."""

    wanted: Wanted
    image: torch.Tensor
    hash: str


class PackedFiles:
    """The packed files of a folder, as one model uses them. Order of calls: as those of `Folder`."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        known = [entry for each in manifests_in(folder.path, folder.owners).values() for entry in each.entries]
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
        self, wanted: Iterable[Wanted], device: torch.device | None = None, *, overlaps: bool = False
    ) -> Generator[PackedFile | None]:
        """For each of the blobs, in order, the file that holds it packed. It is written if there is none.

        Args:
            wanted: Consumed as work begins, which is before the files of the blobs before are there.
            device: packs. None: the CPU.
            overlaps: Whether threads read the blobs that come next and write those before, while one is packed. See
                `may_overlap`.

        Yields:
            None if packing the blob would not save enough.

        Raises:
            GroupFileError: the file cannot be written, or the file of `origin` changed meanwhile.
        """
        most = _MOST_AT_ONCE if overlaps else 1
        left = iter(wanted)
        drafts, files = deque[Task[PackedFile | _Draft]](), deque[Task[PackedFile | None]]()
        is_over = False
        try:
            while True:
                while not is_over and len(drafts) + len(files) < most:
                    one = next(left, None)
                    is_over = one is None
                    if one is not None:
                        drafts.append(self._draft_of(one))
                        _begin_last(drafts)
                if not (drafts or files):
                    return
                if drafts and len(files) <= most // 2:
                    drafts[0].wait()
                    files.append(self._file_of(drafts.popleft().result(), device))
                    _begin_last(files)
                else:
                    files[0].wait()
                    yield files.popleft().result()
        finally:
            tasks: list[Task[Any]] = [*drafts, *files]
            withdraw_all(tasks)
            for task in tasks:
                if isinstance(task.made, PackedFile):
                    os.close(task.made.fd)

    def _draft_of(self, wanted: Wanted) -> Task[PackedFile | _Draft]:
        """The file that is found by facts, or the work that reads what is going to be packed."""
        if wanted.origin is not None:
            found = self.find(wanted.group_id, wanted.layout, wanted.origin)
            if found is not None:
                return done(found)
        return Task(partial(self._find_or_read, wanted))

    def _find_or_read(self, wanted: Wanted) -> PackedFile | _Draft:
        image = _image_of(wanted.layout, wanted.tensors)
        plain = hash_of(image)
        for path in self._folder.names(f"{wanted.group_id}|packed"):
            if not os.path.lexists(path):
                return _Draft(wanted, image, plain)
            found = self._open_if_it_holds(path, wanted, plain)
            if found is not None:
                return found
        raise AssertionError("unreachable")

    def _file_of(self, draft: PackedFile | _Draft, device: torch.device | None) -> Task[PackedFile | None]:
        """Pack what was read. Returns the work that writes it."""
        if isinstance(draft, PackedFile):
            return done(draft)
        packed = pack(draft.image, draft.wanted.layout, device, hashed=done(draft.hash))
        if packed is None:
            return done(None)
        return Task(partial(self._write, draft.wanted, packed))

    def _open_if_it_holds(self, path: Path, wanted: Wanted, plain: str) -> PackedFile | None:
        """
        Args:
            plain: The hash of the plain bytes.
        """

        def is_right(header: GroupHeader, fd: int) -> bool:
            size = os.fstat(fd).st_size
            is_mine = header.packed is not None and header.packed.hash == plain
            return is_mine and content_of_file(fd, size - header.data_bytes, lambda num_bytes: None) == header.content

        return self._open(path, wanted.group_id, wanted.layout, is_right, wanted.origin)

    def _write(self, wanted: Wanted, packed: Packed) -> PackedFile:
        group_id, layout, _, origin = wanted
        if origin is not None and not origin.is_there:
            raise GroupFileError(
                f"{origin.path} changed while it was being packed: the result may be of the old weights and the new ones, and "
                f"was thrown away. Keep other programs from changing it, and try again."
            )
        content = content_of([packed.data])
        header = encode_header(layout, group_id, self._folder.model_class, content, packed.layout)
        size = len(header) + packed.layout.packed_bytes
        for path in self._folder.names(f"{group_id}|packed"):
            found = self._open_if_it_holds(path, wanted, packed.layout.hash)
            if found is None and not os.path.lexists(path):
                written = self._folder.write(path, group_id, header, size, [packed.data], lambda num_bytes: None)
                if written is not None:
                    entry = ManifestEntry(group_id, path.name, content, size, _packed_from(origin, written[1]))
                    return PackedFile(path, *written, entry, packed.layout)
                found = self._open_if_it_holds(path, wanted, packed.layout.hash)  # another process was quicker
            if found is not None:
                return found
            self._folder.leave(path, group_id)
        raise AssertionError("unreachable")

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


def _begin_last(tasks: Sequence[Task[Any]]) -> None:
    """Begin the last task, which is on the list by now: an interrupt has to find it there."""
    if not tasks[-1].is_done:
        tasks[-1].begin_apart()


def _image_of(layout: BlobLayout, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    image, end = torch.empty(layout.num_bytes, dtype=torch.uint8, device="cpu"), 0
    with torch.no_grad():
        for piece in data_pieces(layout, tensors):
            image[end : end + piece.numel()] = piece
            end += piece.numel()
    return image


def _packed_from(origin: Origin | None, stamp: os.stat_result) -> PackedFrom | None:
    if origin is None:
        return None
    return PackedFrom(str(origin.path), origin.facts, origin.place, facts_of(stamp))


def give_up_outdated(folder: Folder, entries: Sequence[ManifestEntry]) -> int:
    """Delete the manifests of packed files whose checkpoint was packed again as `entries`, because it has changed.

    Returns:
        How many there were.
    """
    num, mine = 0, {entry.packed_from.path for entry in entries if entry.packed_from is not None}
    for name, manifest in manifests_in(folder.path, folder.owners).items():
        sources = [entry.packed_from for entry in manifest.entries if entry.packed_from is not None]
        if any(source.path in mine and source.is_outdated for source in sources):
            try:
                num += remove_unused(folder.path / name, folder.owners)
            except OSError as error:
                logger.info("%s is out of date, and cannot be removed: %s.", folder.path / name, error)
    return num
