"""What the runtime asks of an image, whatever tier it rests on."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import NamedTuple, Protocol

import torch

from ..base.layout import ImageLayout, as_bytes
from .moves import Move, Stage


class Tier(Enum):
    """Where an image rests."""

    RAM = "ram"
    """Page-locked RAM: one asynchronous copy to the device."""
    PAGEABLE = "pageable ram"
    """RAM that is not page-locked: through staging buffers to the device."""
    FILE = "file"
    """A file, read for each onload."""


class Store(Protocol):
    """What one or several images rest in."""

    def commit_edits(self, wait: Callable[[], None]) -> bool:
        """Make what was written into weights at rest part of what their images send.

        An image whose bytes changed has a new `generation` then, or is `is_outdated`. `wait` is called before memory
        changes that copies may still be reading: it returns when they are done.

        Returns:
            Whether anything was written.

        Raises:
            GroupFileError: a file was changed by somebody else, or a new one cannot be written (nothing is lost).
        """


class Image(Protocol):
    """The bytes of some tensors at rest. Used by one thread at a time.

    Order of calls: made from live tensors, which are then rebound to `rest`; any number of `send`, `write` and its
    store's `commit_edits`; at last `close`. `rest` stays readable for as long as anybody holds a tensor of it.
    """

    layout: ImageLayout
    tier: Tier
    rest: list[torch.Tensor]
    """The tensors at rest, in the order of `layout.specs`: CPU, true values."""
    generation: int
    """Goes up whenever the bytes change other than by `write`: what was sent before is out of date."""
    is_outdated: bool
    """`rest` holds edits that the image cannot take up: it has to be made again."""

    @property
    def store(self) -> Store: ...

    @property
    def detects_edits(self) -> bool:
        """Whether an edit of `rest` leaves copies that are on their way alone, and `commit_edits` finds it.

        If not, nothing may be on its way, and nothing that was sent may be used again, once anybody can edit `rest`.
        """

    @property
    def pinned_bytes(self) -> int:
        """Page-locked RAM that the image takes."""

    @property
    def where(self) -> str:
        """The file's name, or the kind of RAM, for people to read."""

    def check(self) -> None:
        """Raise if reading `rest` would not give the weights, because somebody changed the file under it."""

    def write(self, index: int, value: torch.Tensor) -> bool:
        """Keep the bytes that a forward left in tensor `index`, in `rest` and in what is sent from now on.

        Returns:
            Whether `commit_edits` has to be called before the next `send`.
        """

    def moves(self, at: int, label: str) -> list[Move]:
        """How the image gets to byte `at` of a slot, as it is now.

        Args:
            label: the name of the group that needs it, for errors and traces.
        """

    def close(self, *, forget: bool) -> None:
        """Give up what the image holds. `forget`: its content is out of date, so that nobody will look for it again."""


class PlacedImage(NamedTuple):
    """An image, and where in a slot it goes."""

    at: int
    """The byte of the slot that the image begins at."""
    label: str
    """The name of the group that the image belongs to."""
    image: Image


def moves_of_rest(image: Image, at: int) -> list[Move]:
    """How the weights at rest get to byte `at` of a slot: for an image that does not hold their edits.

    This happens where an image is outdated in the middle of a pass. When the next pass begins the image is made again.
    """
    values = [(spec.offset, as_bytes(tensor)) for spec, tensor in zip(image.layout.specs, image.rest, strict=True)]
    return [Stage(at + offset, value.numel(), partial(_fill_from, value)) for offset, value in values]


def _fill_from(value: torch.Tensor, chunk: torch.Tensor, start: int) -> None:
    chunk.copy_(value[start : start + chunk.numel()])
