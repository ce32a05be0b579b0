"""Pinning by a driver that answers wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from group_offload.base.device import AcceleratorBackend
from group_offload.base.pinning import PinnedPages

from ..support.drivers import PinningDriver


class OneDevice(AcceleratorBackend):
    """A CUDA device whose memory is RAM, and whose copies are `move`."""

    def __init__(self, move: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        super().__init__(torch.device("cuda", 0))
        self.move = move

    def new_stream(self) -> Any:
        return None

    def empty(self, num_bytes: int, stream: Any = None) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any, *, blocking: bool = False) -> None:
        assert blocking
        self.move(target, source)


def fails(target: torch.Tensor, source: torch.Tensor) -> None:
    raise RuntimeError("CUDA error: invalid argument")


def is_full(target: torch.Tensor, source: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def brings_the_first(target: torch.Tensor, source: torch.Tensor) -> None:
    """All but the last page, which has other bytes."""
    if source[-1] == 1:
        target.copy_(source)


@pytest.mark.parametrize(
    ("move", "is_pinned"),
    [
        (torch.Tensor.copy_, True),
        (is_full, True),
        (fails, False),
        (lambda target, source: None, False),
        (brings_the_first, False),
    ],
)
def test_memory_is_locked_if_copies_from_it_arrive(
    move: Any, is_pinned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A driver may lock memory, and fail at the first copy. A device that is full says nothing of the memory."""
    driver = PinningDriver(monkeypatch)
    memory = (torch.arange(10_000) // 5000 + 1).to(torch.uint8)
    memory[-4096:].clone()  # freed at once: what is allocated next may hold the same bytes
    lock = PinnedPages.take(OneDevice(move), memory, lambda: None)
    assert len(driver.pinned) == (lock is not None) == is_pinned == (not caplog.text)
    if lock is not None:
        lock.release()
    else:
        assert "pinned 9.77 KiB" in caplog.text and "driver" in caplog.text
    assert not driver.pinned and not driver.errors
