"""Blobs in the file that weights are views of: a checkpoint, where nothing is copied or written, or a group file of ours.

`from_pretrained` leaves weights as views of a private mapping of their safetensors file, if nothing casts them. Such weights
stay the same tensors. The kernel copies the pages that are edited (see [Note: Edits of offloaded weights] in `pinned`), and a
weight that was edited leaves the file for RAM.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch

from ..base.layout import BlobLayout, Extent, aligned, as_bytes, lay_out_at, span_bytes
from ..base.mapping import FileMapping, FileMappings, flat_view, forget_writes, is_cut_off, map_file
from ..base.pagemap import PAGE, can_detect_writes, merged, written_pages
from ..base.system import IS_LINUX, open_to_read
from ..base.text import describe_bytes
from ..base.tuning import tuning
from ..errors import StorageError
from .base import Blob
from .folder import Folder
from .moves import Copy, Move, Read, Tier
from .safetensors_file import content_of, data_pieces, encode_header
from .source import Contents, Piece, Proof, SourceFile, state_of

_KEPT_ALIGNMENT = 64
"""Tensors are copied together if their distance in the file is a multiple of this. No kernel asks for more alignment."""
_MAX_GAP = 4096
"""How many bytes between two tensors are copied along, at most, rather than left out."""
_MAX_MAPPINGS = 128
"""Extents of a group file that are smaller than this part of it share one mapping: a process has 65530 of them."""


@dataclass(frozen=True, slots=True)
class FileSpan:
    """The bytes of a file that a tensor is a view of."""

    path: str
    identity: tuple[str, int]
    """The file, as the kernel shows it: see `FileMapping`."""
    position: int
    num_bytes: int


class FileMap:
    """Finds tensors that are unchanged views of files, by the mappings that there were when it was made."""

    def __init__(self) -> None:
        self._mappings: FileMappings | None = None
        with suppress(OSError):  # this system does not tell
            self._mappings = FileMappings()

    def find(self, tensor: torch.Tensor) -> FileSpan | None:
        """The bytes that `tensor` is an unchanged view of; None for a tensor that is no view of a file, or was edited."""
        mapping = self._mapping_of(tensor)
        if mapping is None or not mapping.is_private or not can_detect_writes():
            return None
        address, num_bytes = tensor.data_ptr(), span_bytes(tensor)
        first = address // PAGE * PAGE
        if written_pages(first, address + num_bytes - first) != []:
            return None
        return FileSpan(mapping.path, mapping.identity, mapping.file_offset + address - mapping.start, num_bytes)

    def check(self, fqn: str, tensor: torch.Tensor) -> None:
        """
        Raises:
            StorageError: `tensor` is a view of a file that was cut off: reading it would end the process (SIGBUS).
        """
        mapping = self._mapping_of(tensor)
        if mapping is not None and is_cut_off(tensor.data_ptr() + span_bytes(tensor) - 1):
            raise StorageError(
                f"{mapping.path} was cut off after {fqn!r} was loaded from it: that weight cannot be read any more. Load the "
                f"model again, and keep other programs from changing the file."
            )

    def _mapping_of(self, tensor: torch.Tensor) -> FileMapping | None:
        num_bytes = span_bytes(tensor)
        if not num_bytes or tensor.device.type != "cpu" or self._mappings is None:
            return None
        mapping = self._mappings.at(tensor.data_ptr())
        return mapping if mapping is not None and tensor.data_ptr() + num_bytes <= mapping.end else None


class Checkpoint(SourceFile):
    """A file that weights are views of."""

    commits_late = False
    is_ours = False
    """Whether it is a group file, so that weights leave it when the module is offloaded no more."""
    _pages: _Pages | None = None
    """The memory of all blobs; None until it is needed."""

    @classmethod
    def of(cls, spans: Sequence[FileSpan], folder: Folder | None = None) -> Checkpoint:
        """The file that tensors are views of.

        Args:
            folder: The folder of the model's group files.

        Raises:
            OSError: it cannot be opened, or its name leads to another one by now.
        """
        # A name may have a newline, or look as if it had.
        path = Path(spans[0].path.replace("\\012", "\n"))
        if not path.exists():
            path = Path(spans[0].path)
        start = min(span.position for span in spans)
        end = max(span.position + span.num_bytes for span in spans)
        found = cls(path, open_to_read(path), start, end)
        # `fstat` may give another device than the kernel shows for mappings. So a mapping is compared with a mapping.
        mapping = FileMappings().at(found.bytes.data_ptr())
        if mapping is None or mapping.identity != spans[0].identity:
            raise OSError(f"{path} has changed since it was mapped")
        found.is_ours = folder is not None and folder.has(path)
        return found

    def add(self, blob: Contents) -> None:
        super().add(blob)
        self._pages = None

    def remove(self, blob: FileBlob) -> None:
        """Forget a blob. The last one unpins the file."""
        self.blobs.discard(blob)
        blob.is_pinned = False
        self._pages = None
        if not self.blobs:
            self.unlock()

    def commit_edits(self, wait: Callable[[], None]) -> bool:
        """Find the blobs whose offloaded weights were edited: they have to be made again, elsewhere."""
        self.check()
        blobs, pages = [blob for blob in self.blobs if isinstance(blob, FileBlob)], self._pages
        # A blob that was never closed, because of an interrupt, may have gone. Its pages are another blob's by now, maybe one
        # of another `Checkpoint`: whoever forgets them loses that blob's edits.
        if pages is None or pages.num_blobs != len(blobs):
            pages = self._pages = _Pages(blobs)
        for start, end in pages.all:
            started = time.perf_counter()
            written = written_pages(start, end - start)
            if written == []:
                if time.perf_counter() - started > tuning().slow_scan_seconds:
                    pages.forget(start, end)  # this unmaps the pages that were read, so that the next scan is fast
                continue
            # Pinned pages count as written too, and where the system does not tell, all pages do. So bytes are compared.
            for low, high in [(0, end - start)] if written is None else written:
                found = [blob for blob in blobs if blob.has_edits(start + low, start + high)]
                if not found and written is not None:
                    pages.forget(start + low, start + high)
        return any(blob.is_outdated for blob in blobs)


class _Pages:
    """The memory that weights of some blobs are stored in."""

    def __init__(self, blobs: Sequence[FileBlob]) -> None:
        self.num_blobs = len(blobs)
        spans = merged(
            [(start, start + num_bytes) for blob in blobs for start, _, num_bytes in blob.mapped if num_bytes]
        )
        # Blobs of one file mostly lie in one mapping, one after another: few scans serve all of them.
        self.all = merged([(start // PAGE * PAGE, -(-end // PAGE) * PAGE) for start, end in spans])
        """The whole pages around the weights."""
        self._own = [(-(-start // PAGE) * PAGE, end // PAGE * PAGE) for start, end in spans]
        """The pages that hold nothing but these weights."""

    def forget(self, start: int, end: int) -> None:
        """Nothing was written to these pages. Pages that also hold other memory are left alone."""
        for first, last in self._own:
            low, high = max(start, first), min(end, last)
            if low < high:
                forget_writes(low, high - low)


class FileBlob(Contents, Blob):
    """A blob whose bytes are pieces of a file. At rest its tensors are views of a private mapping of that file.

    They take no RAM until they are read, and the kernel copies the pages that are edited.
    """

    detects_edits = True
    source: Checkpoint
    store: Checkpoint

    def __init__(
        self,
        layout: BlobLayout,
        pieces: Sequence[Piece],
        tensors: Sequence[torch.Tensor],
        positions: Sequence[int],
        source: Checkpoint,
    ) -> None:
        """
        Args:
            pieces: The bytes of the file that are sent.
            positions: The byte of the file that each tensor begins at.
        """
        super().__init__(layout.specs[0].fqn if layout.specs else "", pieces, source)
        self.layout = layout
        self.rest = list(tensors)
        self.mapped = [
            (tensor.data_ptr(), position, span_bytes(tensor))
            for tensor, position in zip(tensors, positions, strict=True)
        ]
        """For each offloaded weight: its address, its position in the file, and its bytes."""
        self.is_verified = False
        """Whether each read is compared, by its hash, with what was written, or with what was read the first time."""
        self.tier = Tier.FILE
        self.is_direct = False
        """Whether parts that are not in the page cache are read past it."""
        self.store = source
        source.add(self)

    @classmethod
    def of(
        cls, fqns: Sequence[str], tensors: Sequence[torch.Tensor], spans: Sequence[FileSpan], source: Checkpoint
    ) -> FileBlob:
        """The blob of tensors that are views of a file."""
        offsets, pieces, num_bytes = _arrange(spans)
        layout = lay_out_at(fqns, tensors, offsets, num_bytes)
        return cls(layout, pieces, tensors, [span.position for span in spans], source)

    @property
    def location(self) -> str:  # type: ignore[override]
        return f"{'page cache, ' if self.tier is Tier.RAM else ''}{self.source.path.name}"

    @property
    def is_read(self) -> bool:
        """Whether each pass reads the blob, from its file or from a compressed one."""
        return not self.is_pinned if self.compressed is None else self.compressed.is_read

    @property
    def pinned_bytes(self) -> int:
        return self.layout.num_bytes if self.is_pinned else 0

    @property
    def read_mode(self) -> str:
        """How the file is read: see [Note: Ways to read a file]."""
        return "pinned" if self.is_pinned else "direct" if self.is_direct else "page cache"

    @property
    def same_as(self) -> str:
        return "" if self.is_outdated else self.content or f"{state_of(self.source.stamp)} {self.pieces}"

    def check(self) -> None:
        self.source.check()

    def _moves(self, at: int, label: str) -> list[Move]:
        source = self.source
        if self.is_pinned:
            return [
                Copy(at + offset, num_bytes, memory, start, self.tier)
                for piece in self.pieces
                for offset, num_bytes, memory, start in source.pinned_parts(piece)
            ]
        proof = Proof(self) if self.is_verified else None
        return [
            Read(at + piece.offset, piece.num_bytes, source, piece.position, self.is_direct, label, self.tier, proof)
            for piece in self.pieces
        ]

    def has_edits(self, start: int, end: int) -> bool:
        """Whether offloaded weights differ from the file between these addresses. If so the blob is outdated from now on.

        Raises:
            StorageError: with `is_verified`, the file is damaged: the damage would become a part of the edited blob.
        """
        if self.is_outdated:
            return True
        for tensor, (first, position, num_bytes) in zip(self.rest, self.mapped, strict=True):
            low, high = max(start - first, 0), min(end - first, num_bytes)
            if low < high and not self.source.holds(position + low, as_bytes(tensor)[low:high]):
                if self.is_verified and self.content is not None:
                    self.prove()
                self.is_outdated = True
                break
        return self.is_outdated

    def write(self, index: int, value: torch.Tensor) -> None:
        self.drop_compressed()
        with torch.inference_mode(False), torch.no_grad():
            as_bytes(self.rest[index]).copy_(value)
        self.is_outdated = True


def _arrange(spans: Sequence[FileSpan]) -> tuple[list[int], list[Piece], int]:
    """Where each tensor goes in the blob, in as few pieces of the file as alignment allows, and the blob's size."""
    offsets = [0] * len(spans)
    pieces: list[Piece] = []
    end = 0
    for index in sorted(range(len(spans)), key=lambda index: spans[index].position):
        span = spans[index]
        last = pieces[-1] if pieces else None
        if (
            last is None
            or span.position - last.position - last.num_bytes > _MAX_GAP
            or (span.position - last.position) % _KEPT_ALIGNMENT
        ):
            last = Piece(aligned(end), span.position, 0)
            pieces.append(last)
        offsets[index] = last.offset + span.position - last.position
        size = max(last.num_bytes, span.position + span.num_bytes - last.position)
        pieces[-1] = replace(last, num_bytes=size)
        end = last.offset + size
    return offsets, pieces, aligned(end)


def write_blob(
    layout: BlobLayout,
    tensors: Sequence[torch.Tensor],
    folder: Folder,
    group_id: str,
    on_written: Callable[[int], None],
) -> FileBlob:
    """A blob in a group file, which is written unless the folder has it.

    Raises:
        StorageError: the file cannot be written, or mapped.
    """
    content = content_of(data_pieces(layout, tensors))
    header = encode_header(layout, group_id, folder.model_class, content)
    found = folder.find_or_write(group_id, header, content, lambda: data_pieces(layout, tensors), on_written)
    size = found.stamp.st_size
    start = size - layout.num_bytes
    try:
        source = Checkpoint(found.path, found.file, start, size, found.stamp)
        rest = layout.views_by_extent(_mapper(found.file.fileno(), start, layout))
    except OSError as error:
        raise StorageError(
            f"Cannot map {found.path} ({describe_bytes(size)}) of group {group_id!r}: {error.strerror or error}. Raise ulimit "
            f"-n, or ulimit -v: all weights must fit into the address space twice."
        ) from error
    source.is_ours = True
    pieces = [Piece(0, start, layout.num_bytes)] if layout.num_bytes else []
    blob = FileBlob(layout, pieces, rest, [start + spec.offset for spec in layout.specs], source)
    blob.content = content
    return blob


def _mapper(fd: int, start: int, layout: BlobLayout) -> Callable[[Extent], torch.Tensor]:
    """Maps extents of the blob that begins at byte `start` of the file.

    Large ones get a mapping of their own: pages that were edited are freed once the weight is in RAM. All others share one, and
    where each mapping may take a descriptor all extents do.
    """
    limit = layout.num_bytes // _MAX_MAPPINGS if IS_LINUX else layout.num_bytes
    mapping = cache(partial(map_file, fd))

    def mapped(extent: Extent) -> torch.Tensor:
        if not extent.num_bytes:
            return flat_view(None, 0, 0)
        position = start + extent.offset
        first, end = start, start + layout.num_bytes
        if extent.num_bytes > limit:
            first, end = position, position + extent.num_bytes
        first -= first % mmap.ALLOCATIONGRANULARITY
        return flat_view(mapping(end - first, first), position - first, extent.num_bytes)

    return mapped
