"""Packs the blobs of a module, and packs them again once they were edited. See [Note: Packed weights at rest]."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch

from ..base.device import Backend
from ..base.mapping import flat_view, map_anonymous
from ..base.page_lock import LockLimit, PageLock
from ..base.progress import progress_bar
from ..base.ram import fits
from ..plan.budgets import describe_bytes
from ..stores.base import Tier
from ..stores.files import FileBlob
from ..stores.packed import is_packable, pack_image
from ..stores.pinned import RamBlob
from .copies.transfer import Transfer
from .groups.group import Group
from .groups.part import Part

logger = logging.getLogger("group_offload")


_USUAL_RATIO = 0.7
"""Packed bytes for each plain one, before anything was packed: bfloat16 weights have 0.66 to 0.70."""


class Packer:
    """Makes the packed images of a module. An engine owns it, and uses it under its lock, between passes.

    Order of calls: `begin` whenever the module was cut into groups; then `limit`, `choose`, and `pack` what is `lacking`.
    """

    def __init__(self, backend: Backend, transfer: Transfer, *, is_on: bool) -> None:
        self._backend = backend
        self._transfer = transfer
        self.is_on = is_on
        """Whether blobs are packed."""
        self._groups: tuple[Group, ...] = ()
        """The groups whose packed bytes are wanted."""

    def begin(self, groups: Sequence[Group]) -> None:
        """The module was cut into these groups. All of them are to be packed."""
        self._groups = tuple(groups)
        for part in _parts_of(groups):
            part.may_pack = part.may_pack and is_packable(part.blob.layout)

    def switch_on(self) -> None:
        """Pack from now on. What is page-locked itself so far is not any more: `begin` comes next."""
        self.is_on = True
        for part in _parts_of(self._groups):
            blob = part.blob
            if isinstance(blob, FileBlob):
                blob.source.unlock()
                blob.tier = Tier.FILE
            elif isinstance(blob, RamBlob):
                blob.store.unlock(LockLimit(self._backend))

    def expected_bytes(self, group: Group) -> int:
        """What `packed_bytes` would be if blobs were packed."""
        was_on, self.is_on = self.is_on, True
        try:
            return self.packed_bytes(group)
        finally:
            self.is_on = was_on

    def limit(self, groups: Iterable[Group], room: int) -> int:
        """Pack only as many of these groups, which rest in RAM, as there is room for their packed bytes besides.

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
                part.drop_packed()
                if isinstance(part.blob, RamBlob):
                    part.blob.store.lock_after_all(LockLimit(self._backend))
        return taken

    def choose(self, groups: Sequence[Group], in_ram: Collection[Group]) -> None:
        """RAM is limited: of the groups whose weights a file holds, want the packed bytes of those `in_ram` alone."""
        self._groups = tuple(group for group in groups if group in in_ram or not group.is_in_file)
        for group in groups:
            if group not in self._groups:
                for part in group.parts:
                    part.drop_packed()

    def packed_bytes(self, group: Group) -> int:
        """What is sent of a group if it is packed, about, as long as it was not; 0 if it is not going to be packed."""
        sizes = [
            part.packed.num_bytes if part.packed is not None else int(part.blob.layout.num_bytes * _USUAL_RATIO)
            for part in group.parts
            if part.packed is not None or self._may_pack(part)
        ]
        others = [
            part.blob.layout.num_bytes for part in group.parts if part.packed is None and not self._may_pack(part)
        ]
        return sum(sizes) + sum(others) if sizes else 0

    def lacking(self) -> list[Part]:
        """The parts that have no packed bytes, or out-of-date ones, and could have some."""
        if not self.is_on:
            return []
        return [part for part in _parts_of(self._groups) if part.sent_packed is None and self._may_pack(part)]

    def _may_pack(self, part: Part) -> bool:
        return self.is_on and part.may_pack and not part.blob.is_outdated and part.blob.detects_edits

    def pack(self, parts: Sequence[Part]) -> None:
        """Pack the blobs of these parts, one after another. Where it saves too little, or RAM is short, they stay plain.

        Raises:
            GroupFileError: a blob cannot be read from its file.
        """
        if not parts:
            return
        limit = LockLimit(self._backend)
        read = [part.blob.layout.num_bytes for part in parts if not isinstance(part.blob, RamBlob)]
        buffer = _Buffer(max(read, default=0), self._backend)
        no_room = 0
        try:
            with progress_bar(sum(part.blob.layout.num_bytes for part in parts), "Packing weights") as advance:
                for part in parts:
                    part.drop_packed()
                    num_bytes = part.blob.layout.num_bytes
                    if fits(num_bytes):
                        self._pack(part, buffer, limit)
                    else:
                        part.may_pack = False
                        no_room += num_bytes
                    advance(num_bytes)
        finally:
            buffer.close()
        for part in _parts_of(self._groups):  # what stays plain is copied from where it rests
            if part.packed is None and isinstance(part.blob, RamBlob):
                part.blob.store.lock_after_all(limit)
        limit.report()
        if no_room:
            logger.warning("%s of weights are not packed: RAM has no room for them.", describe_bytes(no_room))

    def _pack(self, part: Part, buffer: _Buffer, limit: LockLimit) -> None:
        blob = part.blob
        if isinstance(blob, RamBlob):
            image = blob.sent_bytes
        else:
            image = buffer.memory[: blob.layout.num_bytes].zero_()  # padding too, which no weight fills
            self._transfer.read_now(blob, image)
        device = None if self._backend.device.type == "cpu" else self._backend.device
        wait = self._transfer.last_copies.synchronize
        part.take_packed(pack_image(image, blob.layout, device, blob.generation, limit, wait))


def _parts_of(groups: Iterable[Group]) -> Iterator[Part]:
    return (part for group in groups for part in group.parts)


class _Buffer:
    """Page-locked memory that blobs are read into from files, one after another."""

    def __init__(self, num_bytes: int, backend: Backend) -> None:
        self.memory: torch.Tensor = flat_view(map_anonymous(num_bytes), 0, num_bytes)
        self._lock = PageLock.take(backend, self.memory, _no_wait)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()


def _no_wait() -> None:
    """Packing returns only once nothing reads the memory any more."""
