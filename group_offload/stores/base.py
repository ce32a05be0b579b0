"""Blobs: the bytes of some tensors at rest, whichever tier they rest on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from ..base.layout import BlobLayout, as_bytes
from .moves import Move, PageableMemory, Read, Tier
from .packed import PackedImage


class Store(Protocol):
    """The memory or the file that one or several blobs rest in."""

    commits_late: bool
    """Whether edits may be committed in the middle of a pass, just before the store's first blob is used in it.

    Then none is stored elsewhere afterwards, and a blob becomes outdated only after a fork.
    """

    def commit_edits(self, wait: Callable[[], None]) -> bool:
        """Make edits of weights at rest a part of the bytes that their blobs send.

        A blob whose bytes changed then has a new `generation`, or is `is_outdated`.

        Args:
            wait: A function that returns when no copy is on its way. It is called before memory changes that copies may
                still be reading.

        Returns:
            Whether there were edits.

        Raises:
            GroupFileError: another program changed a file. No edit is lost.
        """

    def remove(self, blob: Any) -> None:
        """Forget a blob. With the last one the memory or the file is given up."""


class Blob(ABC):
    """The bytes of some tensors at rest. Used by one thread at a time.

    Order of calls: a blob is made from live tensors, which are then rebound to `rest`; any number of `moves`, `write` and
    `commit_edits` of its store; at last `close`. A tensor of `rest` stays readable for as long as it is referred to.
    """

    layout: BlobLayout
    store: Store
    tier: Tier
    where: str
    """The file's name, or the kind of RAM, for messages."""
    rest: list[torch.Tensor]
    """The tensors at rest, on the CPU and with their values, in the order of `layout.specs`."""
    generation = 0
    """A number that goes up whenever the bytes change other than by `write`: bytes that were sent before are out of date."""
    is_outdated = False
    """Whether `rest` has edits that the blob cannot take, or belongs elsewhere: the blob has to be made again."""
    packed: PackedImage | None = None
    """The packed bytes of the blob, which may be out of date: see `good_image`."""
    _is_open = True

    @property
    @abstractmethod
    def detects_edits(self) -> bool:
        """Whether `commit_edits` finds edits of `rest`, and edits leave copies alone that are on their way.

        If not, no copy may be on its way, and no bytes that were sent may be used again, from when users can edit `rest`.
        """

    @property
    @abstractmethod
    def pinned_bytes(self) -> int:
        """Bytes of pinned RAM that the blob takes."""

    @property
    @abstractmethod
    def same_as(self) -> str:
        """A text that blobs of other processes of this host have only if they have the same bytes; empty if there is none."""

    @property
    def good_image(self) -> PackedImage | None:
        """The packed bytes, if they are those of the blob: then they are sent."""
        packed = self.packed
        return None if packed is None or packed.generation != self.generation or self.is_outdated else packed

    def drop_packed(self) -> None:
        """Give up the packed bytes. From now on the blob itself is sent."""
        packed, self.packed = self.packed, None
        if packed is not None:
            packed.close()

    def check(self) -> None:  # noqa: B027
        """
        Raises:
            GroupFileError: another program changed the file, so that `rest` may not have the weights any more.
        """

    @abstractmethod
    def write(self, index: int, value: torch.Tensor) -> None:
        """Keep the bytes that a forward left in tensor `index`, in `rest` and in what is sent from now on: no packed bytes."""

    def moves(self, at: int, label: str) -> list[Move]:
        """How the blob, as it is now, gets to byte `at` of a slot.

        Where it is outdated in the middle of a pass, the weights at rest are sent. As the next pass begins it is made again.

        Args:
            label: The name of the group that needs the blob, for errors.
        """
        if not self.is_outdated:
            return self._moves(at, label)
        values = [(spec.offset, as_bytes(tensor)) for spec, tensor in zip(self.layout.specs, self.rest, strict=True)]
        return [
            Read(at + offset, value.numel(), PageableMemory(value), 0, False, label, self.tier)
            for offset, value in values
            if value.numel()
        ]

    @abstractmethod
    def _moves(self, at: int, label: str) -> list[Move]: ...

    def close(self) -> None:
        """Give up the memory or the file, and the packed bytes."""
        self.drop_packed()
        if self._is_open:
            self._is_open = False
            self.store.remove(self)


class PlacedBlob(NamedTuple):
    """A blob, and where in a slot it goes."""

    at: int
    """The byte of the slot that the blob begins at."""
    label: str
    """The name of the group that the blob belongs to."""
    blob: Blob
    packed: PackedImage | None = None
    """The packed bytes of the blob, if they are what is sent."""
    on_device: torch.Tensor | None = None
    """The same bytes in memory of the device, if they stay there: then nothing is sent."""

    def moves(self) -> list[Move]:
        """How the blob gets to the slot."""
        if self.packed is None:
            return self.blob.moves(self.at, self.label)
        return self.packed.moves(self.at, self.label, self.on_device)


class PlacedImage(NamedTuple):
    """Packed bytes that go to a slot as they are, to stay on the device."""

    at: int
    """The byte of the slot that they begin at."""
    label: str
    image: PackedImage

    def moves(self) -> list[Move]:
        return [self.image.copy(self.at)]
