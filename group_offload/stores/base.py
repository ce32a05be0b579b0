"""Blobs: the bytes of some offloaded tensors, whichever tier they are stored on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from ..base.layout import BlobLayout, as_bytes
from .compressed import CompressedImage
from .moves import Move, PageableMemory, Read, Tier


class Store(Protocol):
    """The memory or the file that one or several blobs are stored in."""

    commits_late: bool
    """Whether edits may be committed in the middle of a pass, just before the store's first blob is used in it.

    Then none is stored elsewhere afterwards, and a blob becomes outdated only after a fork.
    """

    def commit_edits(self, wait: Callable[[], None]) -> bool:
        """Make edits of offloaded weights a part of the bytes that their blobs send.

        A blob whose bytes changed then has a new `generation`, or is `is_outdated`.

        Args:
            wait: A function that returns when no copy is on its way. It is called before memory changes that copies may
                still be reading.

        Returns:
            Whether there were edits.

        Raises:
            StorageError: another program changed a file. No edit is lost.
        """

    def remove(self, blob: Any) -> None:
        """Forget a blob. With the last one the memory or the file is given up."""


class Blob(ABC):
    """The bytes of some offloaded tensors. Used by one thread at a time.

    Order of calls: a blob is made from live tensors, which are then rebound to `rest`; any number of `moves`, `write` and
    `commit_edits` of its store; at last `close`. A tensor of `rest` stays readable for as long as it is referred to.
    """

    layout: BlobLayout
    store: Store
    tier: Tier
    location: str
    """The file's name, or the kind of RAM, for messages."""
    rest: list[torch.Tensor]
    """The offloaded tensors, on the CPU and with their values, in the order of `layout.specs`."""
    generation = 0
    """A number that goes up whenever the bytes change other than by `write`: bytes that were sent before are out of date."""
    is_outdated = False
    """Whether `rest` has edits that the blob cannot take, or belongs elsewhere: the blob has to be made again."""
    compressed: CompressedImage | None = None
    """The compressed bytes of the blob, which may be out of date: see `good_image`."""
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
    def good_image(self) -> CompressedImage | None:
        """The compressed bytes, if they are those of the blob: then they are sent."""
        compressed = self.compressed
        return (
            None if compressed is None or compressed.generation != self.generation or self.is_outdated else compressed
        )

    def drop_compressed(self) -> None:
        """Give up the compressed bytes. From now on the blob itself is sent."""
        compressed, self.compressed = self.compressed, None
        if compressed is not None:
            compressed.close()

    def check(self) -> None:  # noqa: B027
        """
        Raises:
            StorageError: another program changed the file, so that `rest` may not have the weights any more.
        """

    @abstractmethod
    def write(self, index: int, value: torch.Tensor) -> None:
        """Keep the bytes that a forward left in tensor `index`, in `rest` and in what is sent from now on, uncompressed."""

    def moves(self, at: int, label: str) -> list[Move]:
        """How the blob, as it is now, gets to byte `at` of a slot.

        Where it is outdated in the middle of a pass, the offloaded weights are sent. As the next pass begins it is made again.

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
        """Give up the memory or the file, and the compressed bytes."""
        self.drop_compressed()
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
    compressed: CompressedImage | None = None
    """The compressed bytes of the blob, if they are what is sent."""
    on_device: torch.Tensor | None = None
    """The same bytes in memory of the device, if they stay there: then nothing is sent."""

    def moves(self) -> list[Move]:
        """How the blob gets to the slot."""
        if self.compressed is None:
            return self.blob.moves(self.at, self.label)
        return self.compressed.moves(self.at, self.label, self.on_device)


class PlacedImage(NamedTuple):
    """Compressed bytes that go to a slot as they are, to stay on the device."""

    at: int
    """The byte of the slot that they begin at."""
    label: str
    image: CompressedImage

    def moves(self) -> list[Move]:
        return [self.image.copy(self.at)]
