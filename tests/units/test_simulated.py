"""The simulated device itself: right programs give right bytes, and every missing wait is found with every seed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch.nn import functional as F

from ..support.simulated import Laziness, RaceError, SimulatedDevice, UninitializedRead, use_simulated_device

WIDTH = 8
SLOT_BYTES = WIDTH * WIDTH * 4
SCHEDULES = [(seed, laziness) for laziness in get_args(Laziness) for seed in range(8)]


def make_layers() -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(WIDTH, WIDTH) for _ in range(6)], torch.randn(4, WIDTH)


def resident(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for weight in weights:
        x = torch.relu(F.linear(x, weight))
    return x


def streamed(device: SimulatedDevice, weights: list[torch.Tensor], x: torch.Tensor, omit: str = "") -> torch.Tensor:
    """Six layers through one pinned staging buffer and two slots, prefetching one layer; without the wait `omit`."""
    compute, copies = device.current_stream(), device.new_stream()
    staging = torch.empty(SLOT_BYTES, dtype=torch.uint8)
    undo: list[Callable[[], None]] = []
    assert device.pin(staging, undo)
    arena = device.empty(2 * SLOT_BYTES, copies)
    slots = arena.view(2, SLOT_BYTES).unbind()
    staged, allocated = device.new_event(), device.new_event()
    ready = [device.new_event() for _ in slots]
    last_use = [device.new_event() for _ in slots]
    allocated.record(copies)

    def load(index: int) -> None:
        if omit != "staging":
            staged.synchronize()
        staging.copy_(weights[index].view(torch.uint8).flatten())
        if omit != "last use":
            copies.wait_event(last_use[index % 2])
        device.copy(slots[index % 2], staging, copies)
        staged.record(copies)
        ready[index % 2].record(copies)

    with device.running():
        x = device.put(x)
        load(0)
        for index in range(len(weights)):
            if index + 1 < len(weights):
                load(index + 1)
            if omit != "ready":
                compute.wait_event(ready[index % 2])
            x = torch.relu(F.linear(x, slots[index % 2].view(torch.float32).view(WIDTH, WIDTH)))
            last_use[index % 2].record(compute)
    if omit != "free":
        for event in last_use:
            copies.wait_event(event)
    device.free(arena)
    if omit != "unpin":
        staged.synchronize()
    undo[0]()
    return device.get(x)


@pytest.mark.parametrize("omit", ["", "staging", "last use", "ready", "free", "unpin"])
@pytest.mark.parametrize(("seed", "laziness"), SCHEDULES)
def test_each_missing_wait_is_found(seed: int, laziness: Laziness, omit: str) -> None:
    """If none is missing, the bytes are those of the resident model."""
    weights, x = make_layers()
    device = SimulatedDevice(seed, laziness)
    if omit:
        with pytest.raises(RaceError, match=r"test_simulated\.py:\d+\).*test_simulated\.py:\d+\)"):
            streamed(device, weights, x, omit)
        return
    assert torch.equal(streamed(device, weights, x), resident(weights, x))
    assert (device.num_copies, device.num_copies_back, device.copied_bytes) == (6, 0, 6 * SLOT_BYTES)
    assert (device.peak_bytes, device.allocated_bytes, device.pinned_bytes) == (2 * SLOT_BYTES, 0, 0)


@pytest.mark.parametrize("laziness", get_args(Laziness))
def test_uninitialized_memory_cannot_be_read(laziness: Laziness) -> None:
    device = SimulatedDevice(0, laziness)
    memory = device.empty(512)
    assert memory.data_ptr() % 256 == 0
    with device.running():
        memory[:256].zero_()
        memory[:256].add_(1)
        with pytest.raises(UninitializedRead, match="bytes 256 to 512"):
            memory + 1
        with pytest.raises(UninitializedRead):
            torch.empty_like(memory).add_(1)


def test_a_weight_that_was_not_onloaded_is_an_error() -> None:
    device, weight = SimulatedDevice(), torch.ones(4)
    with device.running():
        x = device.put(weight)
        assert device.get(x + weight).eq(2).all()
        device.pin(weight, [])
        with pytest.raises(RuntimeError, match="on the device"):
            x + weight
    with device.running(strict=True), pytest.raises(RuntimeError, match="on the device"):
        x + torch.ones(4)


def test_swallowed_errors_are_raised_at_the_end() -> None:
    memory = torch.zeros(256, dtype=torch.uint8)

    def program() -> None:
        with use_simulated_device(SimulatedDevice(0, "lazy")) as device:
            undo: list[Callable[[], None]] = []
            assert device.pin(memory, undo)
            device.copy(device.empty(256), memory, device.current_stream())
            with contextlib.suppress(RaceError):
                undo[0]()

    with pytest.raises(RaceError, match="'unpin' on the host"):
        program()
