"""What the runtime asks of an image, whatever tier it rests on."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from enum import Enum
from typing import Protocol

import torch

from ..layout import ImageLayout


class Tier(Enum):
    """Where an image rests."""

    RAM = "ram"
    """Page-locked RAM: one asynchronous copy to the device."""
    PAGEABLE = "pageable ram"
    """RAM that is not page-locked: through staging buffers to the device."""
    FILE = "file"
    """A safetensors file: through staging buffers to the device."""


class Mover(Protocol):
    """How an image gets onto the device: one of these is handed to `Image.send`."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue the copy of page-locked `source` to `target` (both flat uint8, same size)."""

    def stage(self, target: torch.Tensor, fill: Callable[[torch.Tensor, int], None]) -> None:
        """Bring bytes to `target` in chunks: `fill(chunk, start)` writes image bytes from `start` on into `chunk`."""


class Image(Protocol):
    """The bytes of some tensors at rest. Used by one thread at a time.

    Order of calls: made from live tensors, which are then rebound to `rest`; any number of `keep_edits`, `send`; at last
    `close`. `rest` stays readable for as long as anybody holds a tensor of it.
    """

    layout: ImageLayout
    tier: Tier
    rest: list[torch.Tensor]
    """The tensors at rest, in the order of `layout.specs`: CPU, true values."""
    pinned_bytes: int
    """Page-locked RAM that the image takes."""

    @property
    def where(self) -> str:
        """The file's name, or the kind of RAM, for people to read."""

    def check(self) -> None:
        """Raise if reading `rest` would not give the weights, because somebody changed the file under it."""

    def keep_edits(self) -> None:
        """Make what was written into `rest` since the last call part of what `send` sends."""

    def send(self, target: torch.Tensor, mover: Mover) -> None:
        """Enqueue all copies that bring the image to `target` (uint8, [layout.num_bytes], on the device)."""

    def close(self, *, forget: bool) -> None:
        """Give up what the image holds. `forget`: its content is out of date, so that nobody will look for it again."""


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a flat CPU uint8 tensor, for system calls that read or write it. Keep the tensor alive."""
    size = tensor.numel()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B") if size else memoryview(b"")
