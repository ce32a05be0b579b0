"""Compresses the blobs of a module, and compresses them again once they were edited. See [Note: Compressed weights]."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack

import torch

from ..base.mapping import flat_view, map_anonymous
from ..base.pinning import PinLimit, PinnedPages
from ..base.progress import progress_bar
from ..base.ram import available_ram, fits
from ..base.tuning import tuning
from ..compression.codec import compress
from ..config import OffloadConfig
from ..errors import StorageError
from ..plan.budgets import describe_bytes
from ..stores.base import Blob
from ..stores.compressed import CompressedImage, PinnedMemory, is_compressible, pin_image
from ..stores.compressed_files import Wanted, compressed_from, find_or_compress
from ..stores.files import FileBlob
from ..stores.folder import Folder
from ..stores.moves import Copy, Read
from ..stores.pinned import RamBlob
from .groups.group import Group
from .groups.part import Part
from .transfers.transfer import Transfer

logger = logging.getLogger("group_offload")

_USUAL_RATIO = 0.7
"""Compressed bytes for each plain one, before anything was compressed: 0.70 to 0.73 were measured (docs/benchmarks.md)."""


class Compressor:
    """Makes the compressed images of a module. An engine owns it, and uses it under its lock, between passes.

    Order of calls: `begin` whenever the module was partitioned; then `limit`, `choose`, and `compress` what is `lacking`.
    """

    def __init__(self, config: OffloadConfig, transfer: Transfer, folder: Folder | None) -> None:
        """
        Args:
            folder: Where compressed files are kept for the next time.
        """
        self._backend = config.backend
        self._transfer = transfer
        self._folder = folder
        self._spares_ram = config.is_stored_on_disk and not config.has_budgets
        """Whether weights that are stored in files are compressed only if RAM has plenty of room for that."""
        self._has_ram_budget = (config.ram_budget, config.ram_quota_bytes) != (None, None)
        """Whether a plan keeps RAM free for others, so that what it puts there is compressed without a reserve."""
        self._may_pin = config.may_pin_files
        self._is_verified = config.verify_checksums
        self._is_on = config.compress
        """Whether blobs are compressed."""
        self.is_set_up = False
        """Whether the module has been offloaded. Then weights stay plain where the folder does not take compressed files."""
        self._groups: tuple[Group, ...] = ()
        """The groups whose compressed bytes are wanted."""
        self._ids: dict[Part, str] = {}
        """What blobs are called in files."""
        self._to_read: set[Part] = set()
        """The parts whose compressed bytes stay in their files, and are read each time."""
        self._sizes: dict[Part, int] = {}
        """The compressed bytes of parts that were compressed before, which tell more than `_USUAL_RATIO`."""
        self._missing = 0
        """Compressed bytes of parts in files that RAM had no room for, or could not be pinned, since `take_missing`."""

    @property
    def reads_compressed(self) -> bool:
        """Whether there is a folder of compressed files, so that what is stored in files is read compressed."""
        return self._folder is not None

    def begin(self, groups: Sequence[Group]) -> None:
        """The module was partitioned into these groups. All of them are to be compressed, if any are."""
        self._groups = tuple(groups) if self._is_on else ()
        self._ids = ids_of(groups)
        for part in _parts_of(groups):
            part.may_compress = self._is_on and part.may_compress and is_compressible(part.blob.layout)
        self._to_read.intersection_update(self._ids)
        self._sizes = {part: size for part, size in self._sizes.items() if part in self._ids}

    def limit(self, groups: Iterable[Group], room: int) -> int:
        """Compress only as many of these groups, which are stored in RAM, as there is room for their compressed bytes besides.

        Returns:
            The bytes of these.
        """
        taken = 0
        for group in groups:
            num_bytes = self.compressed_bytes(group)
            if taken + num_bytes <= room:
                taken += num_bytes
                continue
            for part in group.parts:
                part.may_compress = False
                part.blob.drop_compressed()
                if isinstance(part.blob, RamBlob):
                    part.blob.store.lock(PinLimit(self._backend))
        return taken

    def choose(self, groups: Sequence[Group], in_ram: Collection[Group]) -> None:
        """RAM is limited: of the groups whose weights a file holds, want the compressed bytes of those `in_ram` alone there.

        Those of the others stay in their compressed files, if there is a folder of them.
        """
        read = {group for group in groups if group.is_in_file and group not in in_ram}
        if not self.reads_compressed:
            self._groups = tuple(group for group in groups if group not in read)
        else:
            # What is needed around others is stored in RAM as it is, whatever a plan says.
            self._groups = tuple(group for group in groups if group not in read or not group.nesting)
            self._to_read = {part for part in _parts_of(read) if isinstance(part.blob, FileBlob)}
        for group in groups:
            if group not in self._groups:
                for part in group.parts:
                    part.blob.drop_compressed()

    def compressed_bytes(self, group: Group) -> int:
        """What is sent of a group if it is compressed, about, as long as it was not; 0 if it is not going to be compressed."""
        total, has_compressed = 0, False
        for part in group.parts:
            if part.blob.compressed is not None:
                total, has_compressed = total + part.blob.compressed.num_bytes, True
            elif self._could_compress(part):
                total, has_compressed = total + self._size_of(part), True
            else:
                total += part.blob.layout.num_bytes
        return total if has_compressed else 0

    def _size_of(self, part: Part) -> int:
        return self._sizes.get(part, int(part.blob.layout.num_bytes * _USUAL_RATIO))

    def take_missing(self) -> int:
        """The compressed bytes that were to be in RAM, and could not be. They count once."""
        missing, self._missing = self._missing, 0
        return missing

    def check(self) -> None:
        """Look at the compressed files that are pinned, before anything is sent from them. (Reads of others tell.)

        Raises:
            StorageError: another program changed one since the last pass began: what was sent since may be wrong. From now on
                the weights are sent as they rest.
        """
        errors: list[StorageError] = []
        for part in _parts_of(self._groups):
            compressed = part.blob.compressed
            if (
                compressed is not None
                and compressed.file is not None
                and not (compressed.is_read or compressed.is_lost)
            ):
                try:
                    compressed.file.source.check()
                except StorageError as error:
                    errors.append(error)
                    self._lose(part)
        if errors:
            raise errors[0]

    def lacking(self) -> list[Part]:
        """The parts that have no compressed bytes, or out-of-date ones, and could have some."""
        parts = [part for part in _parts_of(self._groups) if self._could_compress(part)]
        for part in parts:
            if part.blob.compressed is not None and part.blob.compressed.is_lost:  # the same file would be found again
                self._lose(part)
        sent = ((part, part.blob.good_image) for part in parts if part.may_compress)
        return [
            part for part, compressed in sent if compressed is None or compressed.is_read != (part in self._to_read)
        ]

    def _lose(self, part: Part) -> None:
        logger.warning("The compressed weights of group %r are lost; the original ones are used.", self._ids[part])
        part.blob.drop_compressed()
        part.may_compress = False
        part.sent_generation = -1  # what is in the group's slot may be wrong, and is sent again

    def _could_compress(self, part: Part) -> bool:
        return part.may_compress and not part.blob.is_outdated and part.blob.detects_edits

    def compress(self, parts: Sequence[Part]) -> None:
        """Compress the blobs of these parts, one after another. Where it saves too little, or RAM is short, they stay plain.

        Where RAM is short and there is a folder, compressed bytes stay in their files.

        Raises:
            StorageError: a blob cannot be read from its file; or, while the module is set up, compressed files cannot be
                written.
        """
        for part in parts:
            if part in self._to_read and part.blob.compressed is not None and not part.blob.compressed.is_read:
                part.blob.drop_compressed()  # the RAM that it leaves has room for others
        parts = self._with_room(parts)
        if not parts:
            return
        limit, total = PinLimit(self._backend), sum(part.blob.layout.num_bytes for part in parts)
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))  # a forward in that mode may begin with this
            stack.enter_context(torch.no_grad())
            if self._folder is not None:
                try:
                    stack.enter_context(self._folder.hold(int(total * _USUAL_RATIO)))
                except StorageError as error:
                    parts = self._left_plain(parts, error)
            in_ram = [part.blob for part in parts if self._folder is None or isinstance(part.blob, RamBlob)]
            plain_bytes = max((blob.layout.num_bytes for blob in in_ram), default=0)
            buffer = flat_view(map_anonymous(plain_bytes), 0, plain_bytes)
            lock = PinnedPages.take(self._backend, buffer, self._transfer.last_copies.synchronize)
            stack.callback(lambda: None if lock is None else lock.release())
            advance = stack.enter_context(progress_bar(total, "Compressing weights"))
            stack.callback(_drop_unproven, parts)
            for number, part in enumerate(parts):
                part.blob.drop_compressed()
                try:
                    image = self._compress(part, buffer, limit)
                except StorageError as error:
                    if self._folder is None:
                        raise
                    for each in parts[number:]:
                        each.blob.check()  # else it is the folder that fails
                    self._left_plain(parts[number:], error)
                    break
                if image is not None:
                    self._sizes[part] = image.num_bytes
                part.blob.compressed, part.may_compress = image, image is not None  # else compression saves too little
                advance(part.blob.layout.num_bytes)
            for part in parts:
                proof = None if part.blob.compressed is None else part.blob.compressed.proof
                if proof is not None:
                    proof.wait()
                    if problem := proof.result():
                        part.blob.drop_compressed()
                        self._left_plain([part], StorageError(problem))
        for part in _parts_of(self._groups):  # what stays plain is copied from where it is stored
            if part.blob.compressed is None and isinstance(part.blob, RamBlob):
                part.blob.store.lock(limit)
        limit.report()

    def _left_plain(self, parts: Sequence[Part], error: StorageError) -> list[Part]:
        """Leave parts plain that the folder takes no compressed files of. Returns what is to be compressed: nothing."""
        if not self.is_set_up:
            raise error
        left = sum(part.blob.layout.num_bytes for part in parts)
        for part in parts:
            part.may_compress = False
        logger.warning("%s of weights are not compressed: %s", describe_bytes(left), error)
        return []

    def _with_room(self, parts: Sequence[Part]) -> list[Part]:
        """The parts that RAM has room for, compressed, or that are read compressed. The others stay as they are."""
        to_ram = [part for part in parts if part not in self._to_read]
        num_bytes = sum(part.blob.layout.num_bytes for part in to_ram if isinstance(part.blob, FileBlob))
        room = available_ram() * tuning().pinned_share
        is_much = self._spares_ram and num_bytes * _USUAL_RATIO > room
        # Compression takes the plain bytes of one part besides; without a budget the reserve has room for them.
        most_read = max((part.blob.layout.num_bytes for part in to_ram if isinstance(part.blob, FileBlob)), default=0)
        taken, left, passed = 0, 0, 0
        for part in to_ram:
            size, is_in_file = part.blob.layout.num_bytes, isinstance(part.blob, FileBlob)
            compressed_bytes = self._size_of(part)
            passed += size * is_in_file
            # Files are read beside the link: so what is read is spread evenly over what is sent from RAM.
            most = room * passed / max(1, num_bytes) if self.reads_compressed else 0
            is_too_much = is_much and is_in_file and taken + compressed_bytes > most
            if self._has_ram_budget and is_in_file:
                has_room = taken + compressed_bytes + most_read <= available_ram()
            else:
                has_room = fits(taken + compressed_bytes)
            self._missing += compressed_bytes if is_in_file and not has_room else 0
            if not is_too_much and has_room:
                taken += compressed_bytes
            elif is_in_file and self.reads_compressed:
                self._to_read.add(part)
            else:
                part.may_compress = False
                left += size
        if left:
            logger.warning(
                "%s of weights are not compressed: RAM has too little space for the compressed copy. Raise ram_budget, free "
                "RAM, or pass offload_to_disk_path to keep compressed weights of files on disk.",
                describe_bytes(left),
            )
        return [part for part in parts if part.may_compress]

    def _compress(self, part: Part, buffer: torch.Tensor, limit: PinLimit) -> CompressedImage | None:
        """
        Args:
            buffer: Memory for the plain bytes.
        """
        blob, wait = part.blob, self._transfer.last_copies.synchronize
        device = None if self._backend.device.type == "cpu" else self._backend.device
        memory = PinnedMemory(limit, wait)
        if self._folder is None or isinstance(blob, RamBlob):
            generation = blob.generation
            plain = self._bring(blob, buffer[: blob.layout.num_bytes])
            compressed = compress(plain, blob.layout, device, memory.begin)
            image = None if compressed is None else memory.image(compressed.layout, generation, compressed.data)
            return image if isinstance(blob, RamBlob) else self._noted(image, part, limit)
        assert isinstance(blob, FileBlob)
        found = find_or_compress(self._folder, wanted_of(self._ids[part], blob), device)
        if found is None:
            return None
        if part in self._to_read:
            found.source.avoid_readahead()
            return CompressedImage(found.compressed, blob.generation, None, file=found, is_verified=self._is_verified)
        pinned = pin_image(found, blob.generation, self._backend, wait) if self._may_pin else None
        self._may_pin = pinned is not None  # the device is asked no more
        if pinned is not None:
            return pinned
        there = memory.begin(found.compressed.compressed_bytes)
        there.wait()
        found.read(there.result())
        return self._noted(memory.image(found.compressed, blob.generation, there.result()), part, limit)

    def _bring(self, blob: Blob, target: torch.Tensor) -> torch.Tensor:
        """Bring the plain bytes of a blob to memory of the CPU. Between weights are zeros, or what a file has there.

        Raises:
            StorageError: the file cannot be read.
        """
        target.zero_()
        moves = [*blob.moves(0, "")]
        for move in moves:
            if isinstance(move, Copy):
                target[move.at : move.at + move.num_bytes] = move.memory[move.start : move.start + move.num_bytes]
        self._transfer.reader.read_now(target, [move for move in moves if isinstance(move, Read)])
        return target

    def _noted(self, image: CompressedImage | None, part: Part, limit: PinLimit) -> CompressedImage | None:
        """Note what could not be pinned."""
        if image is None and limit.was_refused:
            self._missing += self._size_of(part)
        return image


def ids_of(groups: Iterable[Group]) -> dict[Part, str]:
    """What the parts of groups are called in compressed files."""
    return {
        part: f"{group.group_id}+{index}" if index else group.group_id
        for group in groups
        for index, part in enumerate(group.parts)
    }


def wanted_of(group_id: str, blob: Blob) -> Wanted:
    """
    Raises:
        StorageError: the file that the blob is stored in is not the one that it was.
    """
    blob.check()
    origin = compressed_from(blob.source, blob.pieces, blob.layout) if isinstance(blob, FileBlob) else None
    return Wanted(group_id, blob.layout, blob.rest, origin)


def _drop_unproven(parts: Iterable[Part]) -> None:
    """An interrupt, or an error, may have come before files were compared with their hashes."""
    for part in parts:
        compressed = part.blob.compressed
        if compressed is not None and compressed.proof is not None and compressed.file is not None:
            compressed.proof.withdraw()
            compressed.proof.wait()
            if not compressed.file.is_proven:
                part.blob.drop_compressed()


def _parts_of(groups: Iterable[Group]) -> Iterator[Part]:
    return (part for group in groups for part in group.parts)
