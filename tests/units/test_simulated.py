"""The simulated device itself: right programs give right bytes, and every missing wait is found with every seed."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch.nn import functional as F

from ..support.simulated import Laziness, RaceError, SimulatedDevice, UninitialisedRead, use_simulated_device

WIDTH = 8
SLOT_BYTES = WIDTH * WIDTH * 4
SCHEDULES = [(seed, laziness) for laziness in get_args(Laziness) for seed in range(8)]

any_schedule = pytest.mark.parametrize(("seed", "laziness"), SCHEDULES)
any_laziness = pytest.mark.parametrize("laziness", get_args(Laziness))


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


@any_schedule
def test_streaming_gives_the_bytes_of_the_resident_model(seed: int, laziness: Laziness) -> None:
    weights, x = make_layers()
    device = SimulatedDevice(seed, laziness)
    assert torch.equal(streamed(device, weights, x), resident(weights, x))
    assert (device.num_copies, device.num_copies_back, device.copied_bytes) == (6, 0, 6 * SLOT_BYTES)
    assert (device.peak_bytes, device.allocated_bytes, device.pinned_bytes) == (2 * SLOT_BYTES, 0, 0)
    assert device.log.count(("compute", "aten.mm.default")) == 6


@pytest.mark.parametrize("omit", ["staging", "last use", "ready", "free", "unpin"])
@any_schedule
def test_each_missing_wait_is_found(seed: int, laziness: Laziness, omit: str) -> None:
    weights, x = make_layers()
    with pytest.raises(RaceError, match=r"test_simulated\.py:\d+\).*test_simulated\.py:\d+\)"):
        streamed(SimulatedDevice(seed, laziness), weights, x, omit)


@pytest.mark.parametrize("marked", [True, False])
@any_schedule
def test_record_stream_keeps_memory_until_the_other_stream_is_done(seed: int, laziness: Laziness, marked: bool) -> None:
    device = SimulatedDevice(seed, laziness)
    side, written = device.new_stream(), device.new_event()
    source, target = device.empty(1024), torch.zeros(1024, dtype=torch.uint8)
    device.pin(target, [])
    with device.running():
        source.fill_(7)
        written.record(device.current_stream())
        side.wait_event(written)
        device.copy(target, source, side)
        if not marked:
            with pytest.raises(RaceError, match=r"'free' on compute .* writes what was read by 'copy D2H' on stream 1"):
                device.free(source)
            return
        device.record_stream(source, side)
        device.free(source)
        device.empty(1024).fill_(9)
    device.synchronize()
    assert target.eq(7).all()


@any_laziness
def test_dropping_an_activation_that_another_stream_reads_is_a_race(laziness: Laziness) -> None:
    device = SimulatedDevice(0, laziness)
    side, written = device.new_stream(), device.new_event()
    target = torch.zeros(256, dtype=torch.uint8)
    device.pin(target, [])
    with device.running():
        activation = device.put(target) + 1
        written.record(device.current_stream())
        side.wait_event(written)
        device.copy(target, activation, side)
        del activation
        gc.collect()
    with pytest.raises(RaceError, match="'free' on compute"):
        device.synchronize()


def test_waits_keep_the_point_that_was_recorded_when_they_were_enqueued() -> None:
    device = SimulatedDevice(0, "lazy")
    first, second, event = device.new_stream(), device.new_stream(), device.new_event()
    source, memory = torch.ones(256, dtype=torch.uint8), device.empty(512, first)
    device.copy(memory[:256], source, first)
    event.record(first)
    second.wait_event(event)
    device.copy(memory[256:], source, first)
    event.record(first)
    with device.running(), device.use_stream(second):
        with pytest.raises(RaceError, match="stream 2"):
            memory[256:] + 1
        assert device.get(memory[:256] + 1).eq(2).all()
        second.wait_event(event)
        assert device.get(memory[256:] + 1).eq(2).all()


@any_laziness
def test_uninitialised_memory_cannot_be_read(laziness: Laziness) -> None:
    device = SimulatedDevice(0, laziness)
    memory = device.empty(512)
    assert memory.data_ptr() % 256 == 0
    with device.running():
        memory[:256].zero_()
        memory[:256].add_(1)
        with pytest.raises(UninitialisedRead, match="bytes 256 to 512"):
            memory + 1
        with pytest.raises(UninitialisedRead):
            torch.empty_like(memory).add_(1)


@any_laziness
def test_freed_memory_is_reused_at_once_and_cannot_be_used(laziness: Laziness) -> None:
    device = SimulatedDevice(0, laziness)
    host, side, event = torch.ones(512, dtype=torch.uint8), device.new_stream(), device.new_event()
    memory = device.empty(512)
    device.copy(memory, host, device.current_stream())
    device.free(memory)
    with pytest.raises(RaceError, match="after 'free'"):
        device.copy(memory, host, device.current_stream())
    with pytest.raises(ValueError, match="was freed"):
        device.free(memory)
    again = device.empty(256)
    assert again.data_ptr() == memory.data_ptr() and device.allocated_bytes == 256
    with pytest.raises(RaceError, match="'empty' on compute"):  # compute may still be using it
        device.copy(again, host[:256], side)
    event.record(device.current_stream())
    side.wait_event(event)
    device.copy(again, host[:256], side)
    assert device.get(again).eq(1).all()


@any_laziness
def test_host_memory_in_flight_cannot_be_changed(laziness: Laziness) -> None:
    device = SimulatedDevice(0, laziness)
    stream = device.current_stream()
    blob = torch.ones(512, dtype=torch.uint8)
    memory, undo = device.empty(512), list[Callable[[], None]]()
    assert device.pin(blob, undo) and not device.pin(blob[:8], []) and device.pinned_bytes == 512
    device.copy(memory, blob, stream)
    with device.running():
        assert blob[0] == 1
        with pytest.raises(RaceError, match=r"writes what was read by 'copy H2D' on compute"):
            blob[256:].add_(1)
    with pytest.raises(RaceError):
        device.host_access(blob, write=True)
    with pytest.raises(RaceError):
        undo[0]()
    device.synchronize()
    device.host_access(blob, write=True)
    device.copy(blob, memory, stream)
    with pytest.raises(RaceError):
        device.host_access(blob, write=False)
    device.synchronize()
    undo[0]()
    undo[0]()
    assert device.pinned_bytes == 0


@any_laziness
@pytest.mark.parametrize("wait", [True, False])
def test_host_writes_that_no_op_shows_are_noticed(laziness: Laziness, wait: bool) -> None:
    device = SimulatedDevice(0, laziness)
    staging, memory, event = torch.zeros(256, dtype=torch.uint8), device.empty(512), device.new_event()
    device.pin(staging, [])
    device.copy(memory[:256], staging, device.current_stream())
    event.record(device.current_stream())
    if wait:
        event.synchronize()
    staging.numpy()[:] = 1
    if wait:
        device.copy(memory[256:], staging, device.current_stream())
        device.copy(staging, memory[:256], device.current_stream())  # written by the device: that is seen
        device.copy(memory[256:], staging, device.current_stream())
        device.synchronize()
        assert memory.eq(0).all() and staging.eq(0).all()
        return
    with pytest.raises(RaceError, match="The host changed what 'copy H2D' on compute"):
        device.copy(memory[256:], staging, device.current_stream())
    with pytest.raises(RaceError, match="The host changed what 'copy H2D' on compute"):
        event.synchronize()


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
