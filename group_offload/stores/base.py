"""What the runtime asks of an image, whatever tier it rests on."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from ..base.layout import ImageLayout, as_bytes

if TYPE_CHECKING:
    from .files import Proof, SourceFile


class Tier(Enum):
    """Where an image rests."""

    RAM = "ram"
    """Page-locked RAM: one asynchronous copy to the device."""
    PAGEABLE = "pageable ram"
    """RAM that is not page-locked: through staging buffers to the device."""
    FILE = "file"
    """A file, read for each onload."""


class Mover(Protocol):
    """How an image gets into a slot: one of these is handed to `Image.send`. Places are byte offsets in the slot."""

    def copy(self, at: int, memory: torch.Tensor, start: int, num_bytes: int) -> None:
        """Enqueue the copy of `memory[start : start + num_bytes]` (page-locked, flat uint8). It must not change before."""

    def stage(self, at: int, num_bytes: int, fill: Callable[[torch.Tensor, int], None]) -> None:
        """Bring bytes over in chunks: `fill(chunk, start)` writes image bytes from `start` on into `chunk`."""

    def read(
        self, at: int, source: SourceFile, position: int, num_bytes: int, *, direct: bool, proof: Proof | None
    ) -> None:
        """Bring bytes of a file over, from `position` on: they are read later, by other threads.

        Args:
            direct: what is not in the page cache is read past it.
            proof: is shown what was read, in the order of these calls.
        """


class Store(Protocol):
    """What one or several images rest in."""

    def take_up_edits(self, wait: Callable[[], None]) -> bool:
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
    store's `take_up_edits`; at last `close`. `rest` stays readable for as long as anybody holds a tensor of it.
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
    def is_stable(self) -> bool:
        """Whether an edit of `rest` leaves copies that are on their way alone, and `take_up_edits` finds it.

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
            Whether `take_up_edits` has to be called before the next `send`.
        """

    def send(self, mover: Mover, at: int) -> None:
        """Enqueue all copies that bring the image to byte `at` of the mover's slot."""

    def close(self, *, forget: bool) -> None:
        """Give up what the image holds. `forget`: its content is out of date, so that nobody will look for it again."""


def send_rest(image: Image, mover: Mover, at: int) -> None:
    """Send an image that is outdated in the middle of a pass: as it is at rest. At the next pass it is made again."""
    for spec, tensor in zip(image.layout.specs, image.rest, strict=True):
        value = as_bytes(tensor)
        mover.stage(at + spec.offset, value.numel(), partial(_fill_from, value))


def _fill_from(value: torch.Tensor, chunk: torch.Tensor, start: int) -> None:
    chunk.copy_(value[start : start + chunk.numel()])
