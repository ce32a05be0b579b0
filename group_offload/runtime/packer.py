"""Packs the blobs of a module, and packs them again once they were edited. See [Note: Packed weights at rest]."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack

import torch

from ..base.mapping import flat_view, map_anonymous
from ..base.page_lock import LockLimit, PageLock
from ..base.progress import progress_bar
from ..base.ram import available_ram, fits
from ..base.tuning import tuning
from ..config import OffloadConfig
from ..errors import GroupFileError
from ..packing.codec import pack
from ..plan.budgets import describe_bytes
from ..stores.base import Blob
from ..stores.files import FileBlob
from ..stores.folder import Folder
from ..stores.moves import Copy, Read
from ..stores.packed import LockedMemory, PackedImage, is_packable, lock_image
from ..stores.packed_files import Wanted, find_or_pack, packed_from
from ..stores.pinned import RamBlob
from .copies.transfer import Transfer
from .groups.group import Group
from .groups.part import Part

logger = logging.getLogger("group_offload")

_USUAL_RATIO = 0.7
"""Packed bytes for each plain one, before anything was packed: 0.70 to 0.73 were measured (docs/benchmarks.md)."""


class Packer:
    """Makes the packed images of a module. An engine owns it, and uses it under its lock, between passes.

    Order of calls: `begin` whenever the module was partitioned; then `limit`, `choose`, and `pack` what is `lacking`.
    """

    def __init__(self, config: OffloadConfig, transfer: Transfer, folder: Folder | None) -> None:
        """
        Args:
            folder: Where packed files are kept for the next time.
        """
        self._backend = config.backend
        self._transfer = transfer
        self._folder = folder
        self._spares_ram = config.rests_in_files and not config.has_budgets
        """Whether weights that are stored in files are packed only if RAM has plenty of room for that."""
        self._has_ram_budget = (config.ram_budget, config.ram_share) != (None, None)
        """Whether a plan keeps RAM free for others, so that what it puts there is packed without a reserve."""
        self._may_lock = config.may_lock_files
        self._is_verified = config.verify_files
        self._is_on = config.pack
        """Whether blobs are packed."""
        self.is_set_up = False
        """Whether the module has been offloaded. Then weights stay plain where the folder does not take packed files."""
        self._groups: tuple[Group, ...] = ()
        """The groups whose packed bytes are wanted."""
        self._ids: dict[Part, str] = {}
        """What blobs are called in files."""
        self._to_read: set[Part] = set()
        """The parts whose packed bytes stay in their files, and are read each time."""
        self._sizes: dict[Part, int] = {}
        """The packed bytes of parts that were packed before, which tell more than `_USUAL_RATIO`."""
        self._missing = 0
        """Packed bytes of parts in files that RAM had no room for, or could not be pinned, since `take_missing`."""

    @property
    def reads_packed(self) -> bool:
        """Whether there is a folder of packed files, so that what rests in files is read packed."""
        return self._folder is not None

    def begin(self, groups: Sequence[Group]) -> None:
        """The module was partitioned into these groups. All of them are to be packed, if any are."""
        self._groups = tuple(groups) if self._is_on else ()
        self._ids = ids_of(groups)
        for part in _parts_of(groups):
            part.may_pack = self._is_on and part.may_pack and is_packable(part.blob.layout)
        self._to_read.intersection_update(self._ids)
        self._sizes = {part: size for part, size in self._sizes.items() if part in self._ids}

    def limit(self, groups: Iterable[Group], room: int) -> int:
        """Pack only as many of these groups, which are stored in RAM, as there is room for their packed bytes besides.

        Returns:
            The bytes of these.
        """
        taken = 0
        for group in groups:
            num_bytes = self.packed_bytes(group)
            if taken + num_bytes <= room:
                taken += num_bytes
                continue
            for part in group.parts:
                part.may_pack = False
                part.blob.drop_packed()
                if isinstance(part.blob, RamBlob):
                    part.blob.store.lock(LockLimit(self._backend))
        return taken

    def choose(self, groups: Sequence[Group], in_ram: Collection[Group]) -> None:
        """RAM is limited: of the groups whose weights a file holds, want the packed bytes of those `in_ram` alone there.

        Those of the others stay in their packed files, if there is a folder of them.
        """
        read = {group for group in groups if group.is_in_file and group not in in_ram}
        if not self.reads_packed:
            self._groups = tuple(group for group in groups if group not in read)
        else:
            # What is needed around others is stored in RAM as it is, whatever a plan says.
            self._groups = tuple(group for group in groups if group not in read or not group.height)
            self._to_read = {part for part in _parts_of(read) if isinstance(part.blob, FileBlob)}
        for group in groups:
            if group not in self._groups:
                for part in group.parts:
                    part.blob.drop_packed()

    def packed_bytes(self, group: Group) -> int:
        """What is sent of a group if it is packed, about, as long as it was not; 0 if it is not going to be packed."""
        total, has_packed = 0, False
        for part in group.parts:
            num_bytes = part.blob.layout.num_bytes
            if part.blob.packed is not None:
                total, has_packed = total + part.blob.packed.num_bytes, True
            elif self._could_pack(part):
                total, has_packed = total + self._size_of(part), True
            else:
                total += num_bytes
        return total if has_packed else 0

    def _size_of(self, part: Part) -> int:
        return self._sizes.get(part, int(part.blob.layout.num_bytes * _USUAL_RATIO))

    def take_missing(self) -> int:
        """The packed bytes that were to be in RAM, and could not be. They count once."""
        missing, self._missing = self._missing, 0
        return missing

    def check(self) -> None:
        """Look at the packed files that are pinned, before anything is sent from them. (Reads of others tell.)

        Raises:
            GroupFileError: another program changed one since the last pass began: what was sent since may be wrong. From now on
                the weights are sent as they rest.
        """
        errors: list[GroupFileError] = []
        for part in _parts_of(self._groups):
            packed = part.blob.packed
            if packed is not None and packed.file is not None and not (packed.is_read or packed.is_lost):
                try:
                    packed.file.source.check()
                except GroupFileError as error:
                    errors.append(error)
                    self._lose(part)
        if errors:
            raise errors[0]

    def lacking(self) -> list[Part]:
        """The parts that have no packed bytes, or out-of-date ones, and could have some."""
        parts = [part for part in _parts_of(self._groups) if self._could_pack(part)]
        for part in parts:
            if part.blob.packed is not None and part.blob.packed.is_lost:  # the same file would be found again
                self._lose(part)
        sent = ((part, part.blob.good_image) for part in parts if part.may_pack)
        return [part for part, packed in sent if packed is None or packed.is_read != (part in self._to_read)]

    def _lose(self, part: Part) -> None:
        logger.warning("The packed weights of group %r are lost; the original ones are used.", self._ids[part])
        part.blob.drop_packed()
        part.may_pack = False
        part.sent_generation = -1  # what is in the group's slot may be wrong, and is sent again

    def _could_pack(self, part: Part) -> bool:
        return part.may_pack and not part.blob.is_outdated and part.blob.detects_edits

    def pack(self, parts: Sequence[Part]) -> None:
        """Pack the blobs of these parts, one after another. Where it saves too little, or RAM is short, they stay plain.

        Where RAM is short and there is a folder, packed bytes stay in their files.

        Raises:
            GroupFileError: a blob cannot be read from its file; or, while the module is set up, packed files cannot be written.
        """
        for part in parts:
            if part in self._to_read and part.blob.packed is not None and not part.blob.packed.is_read:
                part.blob.drop_packed()  # the RAM that it leaves has room for others
        parts = self._with_room(parts)
        if not parts:
            return
        limit, total = LockLimit(self._backend), sum(part.blob.layout.num_bytes for part in parts)
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))  # a forward in that mode may begin with this
            stack.enter_context(torch.no_grad())
            if self._folder is not None:
                try:
                    stack.enter_context(self._folder.locked(int(total * _USUAL_RATIO)))
                except GroupFileError as error:
                    parts = self._left_plain(parts, error)
            in_ram = [part.blob for part in parts if self._folder is None or isinstance(part.blob, RamBlob)]
            plain_bytes = max((blob.layout.num_bytes for blob in in_ram), default=0)
            buffer = flat_view(map_anonymous(plain_bytes), 0, plain_bytes)
            lock = PageLock.take(self._backend, buffer, self._transfer.last_copies.synchronize)
            stack.callback(lambda: None if lock is None else lock.release())
            advance = stack.enter_context(progress_bar(total, "Packing weights"))
            stack.callback(_drop_unproven, parts)
            for number, part in enumerate(parts):
                part.blob.drop_packed()
                try:
                    image = self._pack(part, buffer, limit)
                except GroupFileError as error:
                    if self._folder is None:
                        raise
                    for each in parts[number:]:
                        each.blob.check()  # else it is the folder that fails
                    self._left_plain(parts[number:], error)
                    break
                if image is not None:
                    self._sizes[part] = image.num_bytes
                part.blob.packed, part.may_pack = image, image is not None  # else packing saves too little
                advance(part.blob.layout.num_bytes)
            for part in parts:
                proof = None if part.blob.packed is None else part.blob.packed.proof
                if proof is not None:
                    proof.wait()
                    if problem := proof.result():
                        part.blob.drop_packed()
                        self._left_plain([part], GroupFileError(problem))
        for part in _parts_of(self._groups):  # what stays plain is copied from where it rests
            if part.blob.packed is None and isinstance(part.blob, RamBlob):
                part.blob.store.lock(limit)
        limit.report()

    def _left_plain(self, parts: Sequence[Part], error: GroupFileError) -> list[Part]:
        """Leave parts plain that the folder takes no packed files of. Returns what is to be packed: nothing."""
        if not self.is_set_up:
            raise error
        left = sum(part.blob.layout.num_bytes for part in parts)
        for part in parts:
            part.may_pack = False
        logger.warning("%s of weights are not packed: %s", describe_bytes(left), error)
        return []

    def _with_room(self, parts: Sequence[Part]) -> list[Part]:
        """The parts that RAM has room for, packed, or that are read packed. The others stay as they are."""
        to_ram = [part for part in parts if part not in self._to_read]
        num_bytes = sum(part.blob.layout.num_bytes for part in to_ram if isinstance(part.blob, FileBlob))
        room = available_ram() * tuning().locked_share
        is_much = self._spares_ram and num_bytes * _USUAL_RATIO > room
        # Packing takes the plain bytes of one part besides; without a budget the reserve has room for them.
        most_read = max((part.blob.layout.num_bytes for part in to_ram if isinstance(part.blob, FileBlob)), default=0)
        taken, left, passed = 0, 0, 0
        for part in to_ram:
            size, is_in_file = part.blob.layout.num_bytes, isinstance(part.blob, FileBlob)
            packed_bytes = self._size_of(part)
            passed += size * is_in_file
            # Files are read beside the link: so what is read is spread evenly over what is sent from RAM.
            most = room * passed / max(1, num_bytes) if self.reads_packed else 0
            is_too_much = is_much and is_in_file and taken + packed_bytes > most
            if self._has_ram_budget and is_in_file:
                has_room = taken + packed_bytes + most_read <= available_ram()
            else:
                has_room = fits(taken + packed_bytes)
            self._missing += packed_bytes if is_in_file and not has_room else 0
            if not is_too_much and has_room:
                taken += packed_bytes
            elif is_in_file and self.reads_packed:
                self._to_read.add(part)
            else:
                part.may_pack = False
                left += size
        if left:
            logger.warning(
                "%s of weights are not packed: RAM has too little space for the packed copy. Raise ram_budget, free RAM, or "
                "pass offload_to_disk_path to keep packed weights of files on disk.",
                describe_bytes(left),
            )
        return [part for part in parts if part.may_pack]

    def _pack(self, part: Part, buffer: torch.Tensor, limit: LockLimit) -> PackedImage | None:
        """
        Args:
            buffer: Memory for the plain bytes.
        """
        blob, wait = part.blob, self._transfer.last_copies.synchronize
        device = None if self._backend.device.type == "cpu" else self._backend.device
        memory = LockedMemory(limit, wait)
        if self._folder is None or isinstance(blob, RamBlob):
            generation = blob.generation
            plain = self._bring(blob, buffer[: blob.layout.num_bytes])
            packed = pack(plain, blob.layout, device, memory.begin)
            image = None if packed is None else memory.image(packed.layout, generation, packed.data)
            return image if isinstance(blob, RamBlob) else self._noted(image, part, limit)
        assert isinstance(blob, FileBlob)
        found = find_or_pack(self._folder, wanted_of(self._ids[part], blob), device)
        if found is None:
            return None
        if part in self._to_read:
            found.source.avoid_readahead()
            return PackedImage(found.packed, blob.generation, None, file=found, is_verified=self._is_verified)
        locked = lock_image(found, blob.generation, self._backend, wait) if self._may_lock else None
        self._may_lock = locked is not None  # the device is asked no more
        if locked is not None:
            return locked
        there = memory.begin(found.packed.packed_bytes)
        there.wait()
        found.read(there.result())
        return self._noted(memory.image(found.packed, blob.generation, there.result()), part, limit)

    def _bring(self, blob: Blob, target: torch.Tensor) -> torch.Tensor:
        """Bring the plain bytes of a blob to memory of the CPU. Between weights are zeros, or what a file has there.

        Raises:
            GroupFileError: the file cannot be read.
        """
        target.zero_()
        moves = [*blob.moves(0, "")]
        for move in moves:
            if isinstance(move, Copy):
                target[move.at : move.at + move.num_bytes] = move.memory[move.start : move.start + move.num_bytes]
        self._transfer.reader.read_now(target, [move for move in moves if isinstance(move, Read)])
        return target

    def _noted(self, image: PackedImage | None, part: Part, limit: LockLimit) -> PackedImage | None:
        """Note what could not be pinned."""
        if image is None and limit.was_refused:
            self._missing += self._size_of(part)
        return image


def ids_of(groups: Iterable[Group]) -> dict[Part, str]:
    """What the parts of groups are called in packed files."""
    return {
        part: f"{group.group_id}+{index}" if index else group.group_id
        for group in groups
        for index, part in enumerate(group.parts)
    }


def wanted_of(group_id: str, blob: Blob) -> Wanted:
    """
    Raises:
        GroupFileError: the file that the blob rests in is not the one that it was.
    """
    blob.check()
    origin = packed_from(blob.source, blob.pieces, blob.layout) if isinstance(blob, FileBlob) else None
    return Wanted(group_id, blob.layout, blob.rest, origin)


def _drop_unproven(parts: Iterable[Part]) -> None:
    """An interrupt, or an error, may have come before files were compared with their hashes."""
    for part in parts:
        packed = part.blob.packed
        if packed is not None and packed.proof is not None and packed.file is not None:
            packed.proof.withdraw()
            packed.proof.wait()
            if not packed.file.is_proven:
                part.blob.drop_packed()


def _parts_of(groups: Iterable[Group]) -> Iterator[Part]:
    return (part for group in groups for part in group.parts)
