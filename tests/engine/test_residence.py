"""What is in slots between passes, and on its way there: it is what the weights are, whoever edits them and when."""

from __future__ import annotations

import copy
import gc
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from group_offload import OffloadHandle, StateError, free_device_buffers
from group_offload.base import mapping, pagemap
from group_offload.base.pagemap import PAGE, written_pages
from group_offload.base.text import describe_bytes
from group_offload.stores.moves import PageableMemory, Tier
from group_offload.stores.pinned import RamBlob, Segment

from ..support.inside import engine_of
from ..support.models import DIM, Normed, RoutedModel, stay
from ..support.on_device import MODES, Twins, any_mode, forward, offload, on_their_way
from ..support.rigs import run
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.tuning import tune

UNEVEN = [16, 24, 16, 16]


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    gc.collect()  # models of other tests, some of them offloaded by engines that were broken on purpose
    with use_simulated_device(SimulatedDevice(0, "lazy")) as device:
        yield device


@pytest.fixture
def is_told_of_edits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the system tells which pages of offloaded weights were written to: parameter "told"."""
    is_told: bool = request.param
    if not is_told:
        monkeypatch.setattr("group_offload.stores.pinned.can_detect_writes", lambda: False)
    return is_told


def told(*also_not: dict[str, Any]) -> pytest.MarkDecorator:
    """All modes where the system tells of edits, and those of `also_not` where it does not too."""
    values = [pytest.param(mode, True, id=str(mode)) for mode in MODES]
    values += [pytest.param(mode, False, id=f"{mode}-not told") for mode in also_not]
    return pytest.mark.parametrize(("options", "is_told_of_edits"), values, indirect=["is_told_of_edits"])


def segments_of(handle: OffloadHandle) -> list[Segment]:
    blobs = [part.blob for group in engine_of(handle).groups for part in group.parts]
    return list(dict.fromkeys(blob.store for blob in blobs if isinstance(blob, RamBlob)))


def private_bytes(handle: OffloadHandle) -> int:
    """RAM that offloaded weights take beside their blobs: pages of their own of the private mapping."""
    total = 0
    for segment in segments_of(handle):
        assert segment.detects_edits
        written = written_pages(segment.rest(0, 1).data_ptr(), segment.bytes.numel())
        assert written is not None
        total += sum(end - start for start, end in written)
    return total


# ---------------------------------------------------------------- edits between passes


def in_place(model: nn.Module, name: str) -> None:
    with torch.no_grad():
        model.get_parameter(name).mul_(2)


def through_data(model: nn.Module, name: str) -> None:
    model.get_parameter(name).data.mul_(2)


def new_data(model: nn.Module, name: str) -> None:
    model.get_parameter(name).data = model.get_parameter(name).data * 2


def through_numpy(model: nn.Module, name: str) -> None:
    model.get_parameter(name).detach().numpy()[...] *= 2


@told(MODES[0])
@pytest.mark.parametrize("edit", [in_place, new_data, through_numpy], ids=lambda edit: edit.__name__)
def test_an_edit_while_the_next_pass_is_on_its_way(
    edit: Callable[[nn.Module, str], None], options: dict[str, Any], is_told_of_edits: bool, device: SimulatedDevice
) -> None:
    with Twins(device, RoutedModel(UNEVEN), **options) as twins:
        twins.step()
        twins.step()
        # The first that the next pass needs, what the root holds, one in the middle, and the same one again.
        for name in ("blocks.0.up.weight", "embed.weight", "shift", "blocks.2.down.bias", "blocks.0.up.weight"):
            if is_told_of_edits:
                assert on_their_way(device) > 0
            twins.edit(edit, name)
            twins.step()
            if is_told_of_edits:
                assert private_bytes(twins.handle) == 0
        assert twins.handle.stats().rebuilds == 0


# ---------------------------------------------------------------- edits in the middle of a pass


@any_mode
@pytest.mark.parametrize(
    ("tier", "is_told_of_edits"),
    [({}, True), ({}, False), ({"low_cpu_mem_usage": True}, True), ({"in_files": True}, True)],
    ids=["ram", "ram-not told", "pageable", "files"],
    indirect=["is_told_of_edits"],
)
def test_an_edit_in_the_middle_of_a_forward(
    options: dict[str, Any], tier: dict[str, Any], is_told_of_edits: bool, device: SimulatedDevice, tmp_path: Path
) -> None:
    """A parent's forward edits a weight of a child that is offloaded, and calls the child: it computes with the new one."""
    if tier.get("in_files"):
        tier = {"offload_to_disk_path": tmp_path}

    @contextmanager
    def edit(model: RoutedModel, position: int) -> Iterator[None]:
        if not is_told_of_edits:
            # Offloaded weights are what copies read. To edit them in a pass is a race, unless nothing is on its way any more.
            device.synchronize()
        block: Any = model.blocks[position]
        block.up.weight.mul_(1.25)
        block.gain.add_(1)
        yield

    with Twins(device, RoutedModel([16] * 4), **options, **tier) as twins:
        for number in range(5):
            for each in (twins.model, twins.resident):
                each.on_block = partial(edit, each) if number in (1, 3, 4) else stay  # the others only learn the order
            twins.step()
            twins.check()


@any_mode
@pytest.mark.parametrize(
    "change",
    [lambda data: data.double(), lambda data: data.as_strided(data.shape, (1, data.shape[0]))],
    ids=["another dtype", "other strides in the same memory"],
)
def test_another_form_in_the_middle_of_a_forward_is_refused(
    options: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor], device: SimulatedDevice
) -> None:
    """And nothing is lost: the next forward computes with it, as it does if the change was made between forwards."""
    model = RoutedModel([16] * 4)
    handle = offload(model, **options)
    x = torch.randn(2, DIM)
    for _ in range(2):
        forward(device, model, x)
    weight = model.blocks[2].up.weight
    wanted = change(weight.data.clone())

    def reshape(*args: Any) -> None:
        weight.data = change(weight.data)

    seen = model.blocks[1].register_forward_hook(reshape)
    with pytest.raises(StateError, match=r"blocks[._]2.*in the middle of a forward. Do that between forwards"):
        forward(device, model, x)
    seen.remove()
    with device.running():
        assert weight.dtype == wanted.dtype and torch.equal(weight, wanted)
    if wanted.dtype == torch.float32:
        model.alive.clear()
        resident = copy.deepcopy(model)
        assert torch.equal(device.get(forward(device, model, x)), run(resident, x))
    model.alive.clear()
    handle.remove()
    assert torch.equal(weight, wanted)


# ---------------------------------------------------------------- forwards that change their own weights


@told(MODES[0])
@pytest.mark.parametrize("in_files", [False, True], ids=["ram", "files"])
def test_forwards_that_change_their_weights(
    options: dict[str, Any], in_files: bool, is_told_of_edits: bool, device: SimulatedDevice, tmp_path: Path
) -> None:
    """In place, and by other tensors; beside weights in the same page that the user edits, between passes and in one."""

    @contextmanager
    def edit_what_was_used(model: nn.Module, position: int) -> Iterator[None]:
        yield
        if position >= 1:  # a page of its own then hides the blobs of the blocks beside it
            model.get_submodule(f"blocks.{position - 1}").proj.bias.data.add_(1)  # type: ignore[operator, union-attr]
            if is_told_of_edits:
                at_rest: Any = model.get_submodule(f"blocks.{(position + 1) % 4}")
                at_rest.gain.data = at_rest.gain.data + 1

    def edit_between(model: nn.Module, number: int) -> None:
        block: Any = model.get_submodule(f"blocks.{number - 1}")
        block.proj.weight.data.mul_(0.5)
        block.norm.running_mean.add_(1)

    def replace(layer: Any, *args: Any) -> None:
        layer.weight.data = layer.weight.data + 1

    folder = {"offload_to_disk_path": tmp_path} if in_files else {}
    model = RoutedModel([DIM] * 4)
    model.blocks = nn.ModuleList(Normed() for _ in range(4))
    with Twins(device, model, **options, **folder) as twins:
        for each in (twins.model, twins.resident):
            each.blocks[3].proj.register_forward_pre_hook(replace)
        assert in_files or all(group.num_bytes < PAGE for group in twins.handle.groups)
        for number in range(5):
            for each in (twins.model, twins.resident):
                each.on_block = partial(edit_what_was_used, each) if number in (2, 3) else stay
            twins.step()
            twins.check()
            if number % 2:
                twins.edit(edit_between, number)
        assert twins.handle.stats().tensors_copied_back > 0


# ---------------------------------------------------------------- how edits are found


@any_mode
def test_edits_are_looked_for_once_in_a_pass_and_not_before_it(
    options: dict[str, Any], device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has nothing to do before the first call: only what that call needs is looked at then."""
    tune(monkeypatch, segment_bytes=1024, max_run_bytes=0, max_read_run_bytes=0)
    looks: list[Segment] = []
    before_first_block: list[int] = []
    commit = Segment.commit_edits

    def counted(self: Segment, *args: Any, **kwargs: Any) -> bool:
        looks.append(self)
        return commit(self, *args, **kwargs)

    with Twins(device, RoutedModel([16] * 8), **options) as twins:
        twins.model.blocks[0].register_forward_pre_hook(lambda *_: before_first_block.append(len(looks)))
        twins.step()
        twins.step()
        monkeypatch.setattr(Segment, "commit_edits", counted)
        for number in range(3):
            looks.clear()
            twins.step()
            assert len(looks) == len(set(looks)) == len(segments_of(twins.handle)) > 4
            assert before_first_block[-1] < len(looks)
            for at in (0, number + 2):  # one that is on its way by now, and one that is not
                twins.edit(through_data, f"blocks.{at}.up.weight")
                twins.edit(through_numpy, f"blocks.{at}.up.weight")


def test_a_page_map_of_zeros_is_not_believed(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A kernel that hides the page map shows such a one."""
    pagemap._Known.forget()
    monkeypatch.setattr(pagemap._Known, "fd", os.open("/dev/zero", os.O_RDONLY))
    monkeypatch.setattr(pagemap._Known, "lacks_scan", True)
    with Twins(device, RoutedModel(UNEVEN)) as twins:
        assert "/proc/self/pagemap isn't readable" in caplog.text
        for _ in range(3):
            twins.step()
            twins.check()
            twins.edit(through_data, "shift")
    pagemap._Known.forget()


# ---------------------------------------------------------------- RAM that cannot be pinned


def limit_pins(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, num_own: int = 0
) -> tuple[list[int], list[Callable[[], None]]]:
    """Refuse to lock memory in place, and give `num_own` pieces of the driver's own at most.

    Returns:
        What the driver was asked for, and the calls that take its memory back.
    """
    pin, asked, undo = device.pin, list[int](), list[Callable[[], None]]()

    def empty_pinned(num_bytes: int) -> torch.Tensor | None:
        asked.append(num_bytes)
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        return memory if len(asked) <= num_own and pin(memory, undo) else None

    monkeypatch.setattr(device, "pin", lambda memory, undo, *, read_only=False: False)
    monkeypatch.setattr(device, "empty_pinned", empty_pinned)
    return asked, undo


def step_and_edit(twins: Twins) -> None:
    for number in range(4):
        twins.step()
        if number:
            twins.edit(in_place, f"blocks.{number}.up.weight")
            twins.edit(through_data, "shift")
    twins.check()


@pytest.mark.parametrize("num_own", [1 << 20, 9, 0], ids=["the driver's own", "some of them", "none"])
@pytest.mark.parametrize("options", MODES[::3], ids=str)
def test_pinning_is_refused(
    options: dict[str, Any],
    num_own: int,
    device: SimulatedDevice,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What the driver has no memory of its own for stays in plain RAM, and goes through threads."""
    asked, undo = limit_pins(device, monkeypatch, num_own)
    tune(monkeypatch, segment_bytes=1024)
    with caplog.at_level(logging.WARNING, "group_offload"), Twins(device, RoutedModel(UNEVEN * 4), **options) as twins:
        messages = [record.getMessage() for record in caplog.records]
        has_plain = num_own < 10
        assert len(asked) == (num_own + 1 if has_plain else len(segments_of(twins.handle))) > 0
        assert len(messages) == (2 if num_own == 9 else 1)
        assert ("driver-allocated" in messages[0]) == (num_own > 0) and ("staging buffer" in messages[-1]) == has_plain
        tiers = {Tier.RAM.value} if num_own else set()
        assert {group.tier for group in twins.handle.groups} == tiers | ({Tier.PAGEABLE.value} if has_plain else set())
        step_and_edit(twins)
        assert (twins.handle.stats().staging_bytes > 0) == has_plain
        device.synchronize()
        for take_back in undo:
            take_back()


@pytest.mark.parametrize("is_wsl", [False, True])
@pytest.mark.parametrize("room", [3000, 9000, 20_000], ids=lambda room: f"{room}-bytes")
def test_little_can_be_pinned(
    room: int, is_wsl: bool, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The buffers that threads read RAM into come first, then weights, and a refusal is the last that is asked for. Under
    WSL2, where Windows gives half of the RAM and no more, nothing is asked for that it would refuse."""
    pin, refused = device.pin, list[int]()

    def with_a_cap(memory: torch.Tensor, undo: list[Callable[[], None]], *, read_only: bool = False) -> bool:
        if device.pinned_bytes + memory.numel() <= room:
            return pin(memory, undo, read_only=read_only)
        refused.append(memory.numel())
        return False

    monkeypatch.setattr(device, "pin", with_a_cap)
    monkeypatch.setattr(device, "empty_pinned", lambda num_bytes: None)
    if is_wsl:
        monkeypatch.setattr(platform, "release", lambda: "6.6.87-microsoft-standard-WSL2")
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2 * room, available=1 << 30))
    tune(monkeypatch, segment_bytes=2500, chunk_bytes=4096, num_frames=2)
    with caplog.at_level(logging.WARNING, "group_offload"), Twins(device, RoutedModel(UNEVEN * 3)) as twins:
        assert len(refused) == (0 if is_wsl else 1)  # the device is not asked again after that
        (message,) = [record.getMessage() for record in caplog.records]
        stats = twins.handle.stats()
        pinned, most = map(describe_bytes, (stats.pinned_bytes, stats.host_bytes))
        assert f"Pinned only {pinned} of {most} for" in message and "ulimit -l" in message
        step_and_edit(twins)
        stats = twins.handle.stats()
        assert stats.bytes_onloaded["pageable"] > 0
        assert stats.staging_bytes == 8192 and (stats.pinned_bytes > 0) == (room == 20_000)
        assert device.pinned_bytes == stats.pinned_bytes + (stats.staging_bytes if room > 8192 else 0)


def test_an_edit_waits_for_threads_that_read_ram(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next pass is on its way: what it reads of RAM that is not pinned must not change meanwhile."""
    limit_pins(device, monkeypatch)
    with Twins(device, RoutedModel([16] * 4)) as twins:
        twins.step()
        twins.step()
        twins.check()
        contents, read = [], PageableMemory.read

        def slowly(self: PageableMemory, *args: Any, **options: Any) -> bool:
            before = self.bytes.clone()
            time.sleep(0.1)
            contents.append(torch.equal(self.bytes, before))
            return read(self, *args, **options)

        monkeypatch.setattr(PageableMemory, "read", slowly)
        twins.step()
        twins.edit(in_place, "blocks.0.up.weight")
        twins.step()
        twins.check()
        assert contents and all(contents)


# ---------------------------------------------------------------- from one pass to the next


@any_mode
@pytest.mark.parametrize("goes_with_last_reference", [False, True], ids=["free", "references"])
def test_free_slots(
    options: dict[str, Any], goes_with_last_reference: bool, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Device memory is back after it, also where the allocator gets it only once nothing refers to it (torch's own). It leaves
    what is running alone."""
    if goes_with_last_reference:
        monkeypatch.setattr(device, "free", lambda memory: None)

    @contextmanager
    def on_block(position: int) -> Iterator[None]:
        before = device.allocated_bytes
        free_device_buffers()
        assert device.allocated_bytes == before > 0
        yield
        free_device_buffers()

    with Twins(device, RoutedModel(UNEVEN), **options) as twins:
        for number in range(3):
            twins.step()
            twins.step()
            assert device.allocated_bytes > 0
            free_device_buffers()
            free_device_buffers()
            twins.model.alive.clear()
            twins.check()
            device.synchronize()
            assert device.allocated_bytes == 0
            if number:
                twins.model.on_block = on_block


@pytest.mark.parametrize("options", [*MODES, {"use_stream": False}], ids=str)
def test_device_memory_is_the_formula(options: dict[str, Any], device: SimulatedDevice) -> None:
    """The rings; without them one group in use, and on its way as much as the largest one takes, or four of those."""
    with Twins(device, RoutedModel([16, 16, 40, 16, 16, 24, 16, 16]), **options) as twins:
        sizes: dict[int, list[int]] = {}
        for group in engine_of(twins.handle).groups:
            if group.num_bytes:
                sizes.setdefault(group.nesting, []).append(group.num_bytes)
        around = sum(sum(found) for nesting, found in sizes.items() if nesting)  # so little here that it stays
        for _ in range(4):
            twins.step()
        peak = twins.handle.stats().peak_device_bytes
        assert device.peak_bytes == peak
        if options.get("use_stream") is False:
            assert peak == around + max(sizes[0])
        elif options:
            is_deep = len(options) == 2
            assert around + max(sizes[0]) < peak <= around + max(sizes[0]) * (1 + (4 if is_deep else 1))
        else:
            assert peak == around + sum(sorted(sizes[0])[-2:])


def test_memory_is_unlocked_before_it_is_unmapped(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cycle that the garbage collector finds, finalizers run in any order."""
    order: list[tuple[str, int]] = []
    pin, munmap = SimulatedDevice.pin, mapping._libc.munmap

    def watched_pin(self: SimulatedDevice, memory: torch.Tensor, undo: list[Any], *, read_only: bool = False) -> bool:
        address = memory.data_ptr()
        assert pin(self, memory, undo, read_only=read_only)
        unpin = undo.pop()
        undo.append(lambda: (order.append(("unlock", address)), unpin()))
        return True

    def watched_munmap(address: int, num_bytes: int) -> int:
        order.append(("unmap", address))
        result: int = munmap(address, num_bytes)
        return result

    monkeypatch.setattr(SimulatedDevice, "pin", watched_pin)
    monkeypatch.setattr(mapping._libc, "munmap", watched_munmap)
    model = RoutedModel([16] * 3)
    offload(model)
    forward(device, model, torch.randn(2, DIM))
    device.synchronize()
    model.alive.clear()
    order.clear()  # of whatever was at these addresses before
    del model  # it and its handle know each other
    gc.collect()
    unpinned = [address for what, address in order if what == "unlock"]
    assert unpinned
    for address in unpinned:
        assert order.index(("unlock", address)) < order.index(("unmap", address))
