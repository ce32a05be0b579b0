"""Page-locking by a driver that answers wrongly."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from group_offload.base.device import AcceleratorBackend
from group_offload.base.page_lock import PageLock

from ..support.drivers import LockingDriver


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


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> LockingDriver:
    driver = LockingDriver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return driver


@pytest.mark.parametrize(
    ("move", "num_bytes"), [(torch.Tensor.copy_, 1), (torch.Tensor.copy_, 10_000), (is_full, 4096)]
)
def test_memory_is_locked_if_copies_from_it_arrive(
    move: Any, num_bytes: int, driver: LockingDriver, caplog: pytest.LogCaptureFixture
) -> None:
    """A device that is full says nothing of the memory."""
    lock = PageLock.take(OneDevice(move), torch.ones(num_bytes, dtype=torch.uint8), lambda: None)
    assert lock is not None and len(driver.locked) == 1 and not caplog.text
    lock.release()
    assert not driver.locked and not driver.errors


@pytest.mark.parametrize("move", [fails, lambda target, source: None], ids=["fails", "brings nothing"])
def test_memory_is_unlocked_if_copies_from_it_do_not_arrive(
    move: Any, driver: LockingDriver, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver locks it, and fails at the first copy."""
    assert PageLock.take(OneDevice(move), torch.ones(10_000, dtype=torch.uint8), lambda: None) is None
    assert not driver.locked and not driver.errors
    assert "pinned 9.77 KiB" in caplog.text and "driver" in caplog.text


def test_only_the_last_page_does_not_arrive(driver: LockingDriver) -> None:
    memory = torch.arange(10_000).to(torch.uint8)

    def brings_the_first(target: torch.Tensor, source: torch.Tensor) -> None:
        if source.data_ptr() != memory[-4096:].data_ptr():
            target.copy_(source)

    assert PageLock.take(OneDevice(brings_the_first), memory, lambda: None) is None and not driver.locked
