"""Weights that are views of a mapped file: they are stored in the page cache, whatever happens to them and to the file."""

from __future__ import annotations

import gc
import logging
import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from group_offload import OffloadHandle
from group_offload.base import system
from group_offload.base.ram import pinned

from ..support.models import DIM, RoutedModel
from ..support.on_device import Twins, assert_same_state, forward, from_file, offload, on_their_way
from ..support.reading import eventually, num_fds
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.tuning import tune

MODES: list[dict[str, Any]] = [{}, {"offload_type": "leaf_level", "record_stream": True}]
any_mode = pytest.mark.parametrize("options", MODES, ids=str)

WIDE = [512] * 4
"""Blocks of many pages each."""
NARROW = [16] * 4
"""Blocks that are all in one or two pages."""


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with use_simulated_device(SimulatedDevice(0, "lazy")) as device:
        yield device


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def mappings_of(path: Path) -> list[str]:
    """How the file is mapped by this process: "rw-p", "r--s"."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted(line.split()[1] for line in lines if line.endswith(str(path)))


def in_page_cache(handle: OffloadHandle) -> list[bool]:
    """For each group, whether all of it is there."""
    wheres = [group.location for group in handle.groups if group.num_bytes]
    return [where.startswith("page cache") and "RAM" not in where for where in wheres]


@contextmanager
def twins(device: SimulatedDevice, model: nn.Module, path: Path, **options: Any) -> Iterator[Twins]:
    """The model, whose weights are views of the file, offloaded beside its resident twin. Nothing is left at the end."""
    with Twins(device, from_file(model, path), **options) as both:
        yield both
    # A thread that read the file may still be on its way out; what the loader made is for what still is a view of it.
    assert eventually(lambda: mappings_of(path) in ([], ["rw-p"]))


def watch_pins(device: SimulatedDevice, patch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The bytes of all memory that is pinned from now on, and whether it is read only."""
    pinned: list[tuple[int, bool]] = []
    pin = device.pin

    def spy(memory: torch.Tensor, undo: list[Any], *, read_only: bool = False) -> bool:
        pinned.append((memory.numel(), read_only))
        return pin(memory, undo, read_only=read_only)

    patch.setattr(device, "pin", spy)
    return pinned


# ---------------------------------------------------------------- in the page cache


@any_mode
@pytest.mark.parametrize("widths", [WIDE, NARROW], ids=["wide", "narrow"])
def test_outputs_and_memory(
    options: dict[str, Any], widths: list[int], path: Path, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits for nothing; what is pinned is the file, read-only, and once. Hazard: a model that was removed
    keeps its checkpoint mapped and pinned."""
    pinned = watch_pins(device, monkeypatch)
    taken = lambda *args, **kwargs: pytest.fail("RAM was taken for weights")  # noqa: E731
    monkeypatch.setattr("group_offload.runtime.groups.build.Segment", taken)
    with twins(device, RoutedModel(widths), path, **options) as both:
        groups, stats = both.handle.groups, both.handle.stats()
        assert all(in_page_cache(both.handle)) and {group.tier for group in groups if group.num_bytes} == {"ram"}
        assert all(group.location.endswith(path.name) for group in groups if group.num_bytes)
        assert mappings_of(path) == ["r--s", "rw-p"]
        assert stats.pinned_bytes == stats.host_bytes == sum(group.num_bytes for group in groups)
        for _ in range(3):
            both.step()
        assert device.num_host_waits == 0 and on_their_way(device) > 0
        both.check()
        assert [read_only for _, read_only in pinned] == [True] and pinned[0][0] <= path.stat().st_size
        stats = both.handle.stats()
        assert stats.rebuilds == stats.staging_bytes == 0 and (stats.stalls == 0 or options)


# ---------------------------------------------------------------- not in the page cache


@pytest.mark.parametrize("options", [{}, {"low_cpu_mem_usage": True}, {"offload_device": "disk"}], ids=str)
def test_what_is_read_from_the_checkpoint(
    options: Any, path: Path, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """RAM that is too small, which is said; RAM that is not to be pinned; files that were asked for."""
    if not options:
        monkeypatch.setattr("group_offload.runtime.groups.build.fits", lambda num_bytes: False)
    with twins(device, RoutedModel(NARROW), path, **options) as both:
        assert {(group.tier, group.location) for group in both.handle.groups} == {("disk", path.name)}
        assert device.pinned_bytes == 0 and ("doesn't fit in available RAM" in caplog.text) == (not options)
        both.step()
        both.step()


@pytest.mark.parametrize("what", ["edited", "replaced"])
def test_what_does_not_rest_in_the_page_cache(what: str, path: Path, device: SimulatedDevice) -> None:
    """Weights that are no longer what the file under that name has."""
    model = from_file(RoutedModel(NARROW), path)
    if what == "replaced":  # by a file with other weights
        save_file({name: value + 1 for name, value in load_file(path).items()}, path.with_name("other"))
        path.with_name("other").replace(path)
    else:
        for parameter in model.parameters():
            parameter.data.mul_(2)
    with Twins(device, model) as both:
        assert not any(in_page_cache(both.handle)) and "r--s" not in mappings_of(path)
        both.step()
        both.step()


@any_mode
def test_files_are_locked_in_pieces(
    options: dict[str, Any], path: Path, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights lie across the ends of pieces: a driver copies from no more than one at a time, and neither does this device."""
    tune(monkeypatch, segment_bytes=3 * mmap.PAGESIZE)
    pinned = watch_pins(device, monkeypatch)
    with twins(device, RoutedModel(WIDE), path, **options) as both:
        assert all(in_page_cache(both.handle)) and len(pinned) > 10
        assert all(num_bytes <= 3 * mmap.PAGESIZE for num_bytes, _ in pinned)
        for number in range(4):
            both.step()
            both.check()
            both.edit(lambda model, at=number: model.blocks[at].down.weight.data.mul_(0.5))
        assert not both.handle.stats().bytes_onloaded["pageable"]


@pytest.mark.parametrize(("why", "last"), [("the device refused", 1), ("the device refused", 3), ("it took", 3)])
def test_a_driver_that_locks_some_pieces_and_no_more(
    why: str, last: int, path: Path, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or none. The weights go to RAM, and the file is let go."""
    messages: list[str] = []  # not caplog, which would hold the error, and with it the mapping
    logger = logging.getLogger("group_offload")
    monkeypatch.setattr(logger, "info", lambda message, *args: messages.append(message % args))
    tune(monkeypatch, segment_bytes=3 * mmap.PAGESIZE)
    num_pieces, pin = 0, device.pin

    def last_fails(memory: torch.Tensor, undo: list[Any], *, read_only: bool = False) -> bool:
        nonlocal num_pieces
        num_pieces += read_only
        if read_only and num_pieces == last:
            if why == "the device refused":
                return False
            tune(monkeypatch, pin_timeout_seconds=0.0)  # it took longer than that
        return pin(memory, undo, read_only=read_only)

    monkeypatch.setattr(device, "pin", last_fails)
    with twins(device, RoutedModel(WIDE), path) as both:
        assert num_pieces == last and device.pinned_bytes == both.handle.stats().pinned_bytes
        assert len(messages) == 2 and all(str(path) in message for message in messages)
        assert why in messages[0] and "to RAM" in messages[1]
        assert {group.location for group in both.handle.groups} == {"pinned RAM"}
        assert mappings_of(path) == []
        for _ in range(3):
            both.step()
            both.check()


# ---------------------------------------------------------------- edits


def edit_in_place(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight[3:5] *= 2


def edit_by_new_data(weight: nn.Parameter) -> None:
    weight.data = torch.cat([weight.data[:3], weight.data[3:5] * 2, weight.data[5:]])


@any_mode
@pytest.mark.parametrize("edit", [edit_in_place, edit_by_new_data], ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("widths", [WIDE, NARROW], ids=["wide", "narrow"])
def test_edits(
    edit: Callable[[nn.Parameter], None],
    widths: list[int],
    options: dict[str, Any],
    path: Path,
    device: SimulatedDevice,
) -> None:
    """What was edited is stored in RAM from then on. What shares no page with it stays in the page cache."""
    with twins(device, RoutedModel(widths), path, **options) as both:
        handle, num_groups = both.handle, len(in_page_cache(both.handle))
        both.step()
        both.step()
        for number, index in enumerate((0, 2, 0)):
            assert on_their_way(device) > 0
            both.edit(lambda model, at=index: edit(model.blocks[at].down.weight))
            assert_same_state(both.model, both.resident, device)
            both.step()
            assert_same_state(both.model, both.resident, device)
            num_left = sum(in_page_cache(handle))
            if widths is WIDE and edit is not edit_by_new_data:
                assert num_left == num_groups - min(number + 1, 2)
                assert handle.stats().rebuilds == min(number + 1, 2)
            else:  # groups lie in the same page, or the whole weight was written and its first page is another one's last
                assert 0 <= num_left < num_groups
        both.check()
        assert sum(group.num_bytes for group in handle.groups) == handle.stats().host_bytes


# ---------------------------------------------------------------- garbage


def test_a_model_is_collected_by_a_thread_that_has_a_lock(path: Path, tmp_path: Path, device: SimulatedDevice) -> None:
    """Garbage is collected wherever memory is allocated, and finalizers run there. Hazard: a finalizer takes a lock
    that its thread has already, and the process hangs."""
    gc.collect()
    pinned_before, open_before = pinned.num_bytes, num_fds()
    for options in ({}, {"offload_to_disk_path": tmp_path / "groups"}):
        model: nn.Module = RoutedModel(WIDE)
        if not options:
            model = from_file(model, path)
        offload(model, **options)
        forward(device, model, torch.randn(3, DIM))
        device.synchronize()
        assert options or (pinned.num_bytes > pinned_before and num_fds() > open_before)
        model.itself = [model]  # a cycle: only the collector takes it
        del model

    def collect() -> None:
        with ExitStack() as stack:
            for lock in [*system._locks]:
                stack.enter_context(lock)
            gc.collect()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert pinned.num_bytes == pinned_before and eventually(lambda: num_fds() <= open_before)
