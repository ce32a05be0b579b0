"""What is in slots between passes, and on its way there: it is what the weights are, whoever edits them and when."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import os
import platform
import threading
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

from group_offload import OffloadHandle, StateError, free_slots
from group_offload.base import mapping, pagemap
from group_offload.base.pagemap import PAGE, written_pages
from group_offload.runtime.copies.transfer import Transfer
from group_offload.stores.base import Tier
from group_offload.stores.moves import PageableMemory
from group_offload.stores.pinned import RamBlob, Segment

from ..support.inside import engine_of
from ..support.models import DIM, EditsItsBlocks, NormedModel, RoutedBlock, RoutedModel
from ..support.on_device import MODES, any_mode, assert_same_state, forward, offload, on_their_way
from ..support.page_map import PageMap
from ..support.rigs import run
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.tuning import tune


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    gc.collect()  # models of other tests, some of them offloaded by engines that were broken on purpose
    with use_simulated_device(SimulatedDevice(0, "lazy")) as device:
        yield device


@pytest.fixture
def is_told_of_edits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the system tells which pages of weights at rest were written to: parameter "told"."""
    is_told: bool = request.param
    if not is_told:
        monkeypatch.setattr("group_offload.stores.pinned.can_detect_writes", lambda: False)
    return is_told


def told(*also_not: dict[str, Any]) -> pytest.MarkDecorator:
    """All modes where the system tells of edits, and those of `also_not` where it does not too."""
    values = [pytest.param(mode, True, id=str(mode)) for mode in MODES]
    values += [pytest.param(mode, False, id=f"{mode}-not told") for mode in also_not]
    return pytest.mark.parametrize(("options", "is_told_of_edits"), values, indirect=["is_told_of_edits"])


@contextmanager
def taken_away(handle: OffloadHandle, device: SimulatedDevice, *models: Any) -> Iterator[None]:
    """At the end `remove()`, and nothing is left on the device or page-locked."""
    yield
    handle.remove()
    for model in models:
        getattr(model, "alive", []).clear()
    device.synchronize()
    assert device.pinned_bytes == 0 and device.allocated_bytes == 0


def segments_of(handle: OffloadHandle) -> list[Segment]:
    blobs = [part.blob for group in engine_of(handle).groups for part in group.parts]
    return list(dict.fromkeys(blob.store for blob in blobs if isinstance(blob, RamBlob)))


def private_bytes(handle: OffloadHandle) -> int:
    """RAM that weights at rest take beside their blobs: pages of their own of the private mapping."""
    total = 0
    for segment in segments_of(handle):
        assert segment._private is not None
        written = written_pages(segment._private.data_ptr(), segment._private.numel())
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


def through_the_state_dict(model: nn.Module, name: str) -> None:
    value = model.state_dict()[name]
    value.copy_(value * 2)


def through_numpy(model: nn.Module, name: str) -> None:
    model.get_parameter(name).detach().numpy()[...] *= 2


def load_state_dict(model: nn.Module, name: str) -> None:
    model.load_state_dict({name: model.get_parameter(name).detach() * 2}, strict=False)


EDITS = [in_place, through_data, new_data, through_the_state_dict, through_numpy, load_state_dict]


@told(MODES[0])
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_an_edit_while_the_next_pass_is_on_its_way(
    edit: Callable[[nn.Module, str], None], options: dict[str, Any], is_told_of_edits: bool, device: SimulatedDevice
) -> None:
    model = RoutedModel([16, 24, 16, 16])
    resident = copy.deepcopy(model)
    handle = offload(model, **options)
    x = torch.randn(2, DIM)
    with taken_away(handle, device, model):
        pending = [(forward(device, model, x), run(resident, x)) for _ in range(2)]
        # The first that the next pass needs, what the root holds, one in the middle, and the same one again.
        for name in ("blocks.0.up.weight", "embed.weight", "shift", "blocks.2.down.bias", "blocks.0.up.weight"):
            if is_told_of_edits:
                assert on_their_way(device) > 0
            with device.running():
                edit(model, name)
            edit(resident, name)
            assert_same_state(model, resident, device)
            pending.append((forward(device, model, x), run(resident, x)))
            if is_told_of_edits:
                assert private_bytes(handle) == 0
        for output, expected in pending:
            assert torch.equal(device.get(output), expected)
        assert handle.stats().rebuilds == 0
        del pending, output


@any_mode
def test_an_edit_and_its_undoing(options: dict[str, Any], device: SimulatedDevice) -> None:
    """What is on its way holds neither value for sure. (The case of a LoRA that is fused and unfused.)"""
    model = RoutedModel([16] * 4)
    resident = copy.deepcopy(model)
    handle = offload(model, **options)
    x = torch.randn(2, DIM)
    with taken_away(handle, device, model):
        outputs = []
        for factor in (1, 2, 0.5, 0.5, 2, 1):
            with device.running():
                model.blocks[0].up.weight.data.mul_(factor)
            resident.blocks[0].up.weight.data.mul_(factor)
            outputs.append((forward(device, model, x), run(resident, x)))
        for output, expected in outputs:
            assert torch.equal(device.get(output), expected)
        del outputs, output


def test_edits_take_no_memory_for_good(device: SimulatedDevice) -> None:
    """Every weight edited: until the next pass each page is there twice, and then once again."""
    model = RoutedModel([64] * 8)
    handle = offload(model)
    with taken_away(handle, device, model):
        x = torch.randn(2, DIM)
        forward(device, model, x)
        assert private_bytes(handle) == 0
        total = sum(group.num_bytes for group in handle.groups)
        with device.running():
            for parameter in model.parameters():
                parameter.data.mul_(2)
        assert private_bytes(handle) == -(-total // PAGE) * PAGE
        forward(device, model, x)
        assert private_bytes(handle) == 0
        assert handle.stats().host_bytes == total


# ---------------------------------------------------------------- edits in the middle of a pass


@any_mode
@pytest.mark.parametrize(
    ("tier", "is_told_of_edits"),
    [({}, True), ({}, False), ({"low_cpu_mem_usage": True}, True), ({"in_files": True}, True)],
    ids=["ram", "ram-not told", "pageable ram", "files"],
    indirect=["is_told_of_edits"],
)
def test_an_edit_in_the_middle_of_a_forward(
    options: dict[str, Any], tier: dict[str, Any], is_told_of_edits: bool, device: SimulatedDevice, tmp_path: Path
) -> None:
    """A parent's forward edits a weight of a child that is at rest, and calls the child: it computes with the new one."""
    model = EditsItsBlocks()
    resident = copy.deepcopy(model)
    if tier.get("in_files"):
        tier = {"offload_to_disk_path": tmp_path}
    handle = offload(model, **options, **tier)
    if not is_told_of_edits:
        # Weights at rest are what copies read. To edit them in a pass is a race, unless nothing is on its way any more.
        model.before_edit = device.synchronize
    x = torch.randn(2, DIM)
    with taken_away(handle, device):
        for number in range(5):
            model.edits = resident.edits = number in (1, 3, 4)  # the others only learn the order
            output = forward(device, model, x)
            assert torch.equal(device.get(output), run(resident, x)), number
            with device.running():
                for (name, value), expected in zip(
                    model.state_dict().items(), resident.state_dict().values(), strict=True
                ):
                    assert torch.equal(value, expected), (number, name)
        del output


@any_mode
@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.double(),
        lambda data: data.as_strided(data.shape, (1, data.shape[0])),
    ],
    ids=["another dtype", "other strides in the same memory"],
)
def test_another_form_in_the_middle_of_a_forward_is_refused(
    options: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor], device: SimulatedDevice
) -> None:
    """And nothing is lost: the next forward computes with it, as it does if the change was made between forwards."""
    model = EditsItsBlocks()
    model.edits = False
    handle = offload(model, **options)
    x = torch.randn(2, DIM)
    for _ in range(2):
        forward(device, model, x)
    weight = model.blocks[2].up.weight
    wanted = change(weight.data.clone())

    def reshape(position: int) -> None:
        weight.data = change(weight.data)

    seen = model.blocks[1].register_forward_hook(lambda *args: reshape(1))
    with pytest.raises(StateError, match=r"blocks[._]2.*in the middle of a forward. Do that between forwards"):
        forward(device, model, x)
    seen.remove()
    with device.running():
        assert weight.dtype == wanted.dtype and torch.equal(weight, wanted)
    if wanted.dtype == torch.float32:
        resident = copy.deepcopy(model)
        output = forward(device, model, x)
        assert torch.equal(device.get(output), run(resident, x))
        del output
    handle.remove()
    assert torch.equal(weight, wanted)


# ---------------------------------------------------------------- forwards that change their own weights


@told(MODES[0])
@pytest.mark.parametrize("in_files", [False, True], ids=["ram", "files"])
def test_forwards_that_change_their_weights(
    options: dict[str, Any], in_files: bool, is_told_of_edits: bool, device: SimulatedDevice, tmp_path: Path
) -> None:
    """Also beside weights in the same page that the user edits, between passes and in the middle of one."""
    model = NormedModel().train()
    resident = copy.deepcopy(model)
    handle = offload(model, **options, **({"offload_to_disk_path": tmp_path} if in_files else {}))
    assert in_files or all(group.num_bytes < PAGE for group in handle.groups)

    def edit_what_was_used(position: int, model: nn.Module) -> None:
        if position >= 1:  # a page of its own then hides the blobs of the blocks beside it
            model.blocks[position - 1].proj.bias.data.add_(1)

    with taken_away(handle, device):
        for number in range(5):
            x = torch.randn(3, DIM)
            if number in (2, 3):
                model.on_block = resident.on_block = edit_what_was_used
            else:
                model.on_block = resident.on_block = lambda position, block: None
            output = forward(device, model, x)
            expected = run(resident, x)
            with device.running():  # at rest already, though nobody has asked for the output
                for (name, value), wanted in zip(
                    model.state_dict().items(), resident.state_dict().values(), strict=True
                ):
                    assert torch.equal(value, wanted), (number, name)
            assert torch.equal(device.get(output), expected), number
            if number % 2:
                for each in (model, resident):
                    with device.running():
                        each.blocks[number - 1].proj.weight.data.mul_(0.5)
                        each.blocks[number - 1].norm.running_mean.add_(1)
        assert handle.stats().tensors_brought_back > 0
        del output


class Replaces(nn.Module):
    """Puts other tensors in place of its own, in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.gain = nn.Parameter(torch.randn(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.gain.data = self.gain.data * 2
        for block in self.blocks:
            x = block(x)
        return x * self.gain


@any_mode
@pytest.mark.parametrize("in_files", [False, True], ids=["ram", "files"])
def test_forwards_that_replace_their_weights(
    options: dict[str, Any], in_files: bool, device: SimulatedDevice, tmp_path: Path
) -> None:
    model = Replaces()

    def replace(block: nn.Module, *args: Any) -> None:
        block.weight.data = block.weight.data + 1

    for block in model.blocks:
        block.register_forward_pre_hook(replace)
    resident = copy.deepcopy(model)
    handle = offload(model, **options, **({"offload_to_disk_path": tmp_path} if in_files else {}))
    for _ in range(4):
        x = torch.randn(3, DIM)
        assert torch.equal(device.get(forward(device, model, x)), run(resident, x))
        with device.running():
            for value, wanted in zip(model.state_dict().values(), resident.state_dict().values(), strict=True):
                assert torch.equal(value, wanted)
    handle.remove()


@pytest.fixture
def no_scans(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kernel before Linux 6.7."""
    page_map = PageMap(monkeypatch)
    page_map.refuse_scans()
    yield
    monkeypatch.undo()
    page_map.allow()


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.usefixtures("no_scans")
def test_edits_are_found_in_the_entries_of_the_page_map(
    edit: Callable[[nn.Module, str], None], device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(monkeypatch, segment_bytes=4096)
    test_an_edit_while_the_next_pass_is_on_its_way(edit, {}, True, device)
    assert pagemap._Known.lacks_scan


def parts_of(handle: OffloadHandle) -> Iterator[Any]:
    for group in engine_of(handle).groups:
        yield from group.parts


@any_mode
@pytest.mark.parametrize("lacks_scan", [False, True], ids=["scans", "entries"])
def test_edits_are_looked_for_once_in_a_pass_and_not_before_it(
    options: dict[str, Any],
    lacks_scan: bool,
    device: SimulatedDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device has nothing to do before the first call: only what that call needs is looked at then."""
    monkeypatch.setattr(pagemap._Known, "lacks_scan", lacks_scan)
    tune(monkeypatch, segment_bytes=1024, max_run_bytes=0, max_read_run_bytes=0)
    model = RoutedModel([16] * 8)
    resident = copy.deepcopy(model)
    looks: list[Segment] = []
    commit = Segment.commit_edits

    def counted(self: Segment, *args: Any, **kwargs: Any) -> bool:
        looks.append(self)
        return commit(self, *args, **kwargs)

    before_first_block: list[int] = []
    handle = offload(model, **options)
    model.blocks[0].register_forward_pre_hook(lambda *_: before_first_block.append(len(looks)))
    with taken_away(handle, device, model):
        for number in range(5):
            if number == 2:
                monkeypatch.setattr(Segment, "commit_edits", counted)
            looks.clear()
            x = torch.randn(2, DIM)
            assert torch.equal(device.get(forward(device, model, x)), run(resident, x))
            if number >= 2:
                assert len(looks) == len(set(looks)) == len({id(part.blob.store) for part in parts_of(handle)}) > 4
                assert before_first_block[-1] < len(looks)
            for each in (model, resident):  # one that is on its way by now, and one that is not
                with device.running() if each is model else contextlib.nullcontext():
                    through_data(each, "blocks.0.up.weight")
                    through_data(each, f"blocks.{number + 2}.up.weight")


@pytest.mark.usefixtures("no_scans")
def test_threads_read_the_page_map_while_the_pass_goes_on(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(monkeypatch, segment_bytes=4096, max_run_bytes=0)
    model = RoutedModel([16] * 6)
    resident = copy.deepcopy(model)
    handle = offload(model)
    x = torch.randn(2, DIM)
    for _ in range(2):
        assert torch.equal(device.get(forward(device, model, x)), run(resident, x))
    last = model.blocks[-1].up.weight.data_ptr()
    may_read, read = threading.Event(), pagemap._read_entries

    def held(fd: int, address: int, length: int) -> Any:
        assert not address <= last < address + length or may_read.wait(60)
        return read(fd, address, length)

    monkeypatch.setattr(pagemap, "_read_entries", held)
    model.blocks[0].register_forward_hook(lambda *_: may_read.set())  # who waits before that never comes here
    for each in (model, resident):
        through_data(each, "blocks.5.up.weight")
    assert torch.equal(device.get(forward(device, model, x)), run(resident, x))
    assert may_read.is_set()
    handle.remove()


def test_edits_of_a_block_that_is_skipped_wait_for_the_pass_that_needs_it(device: SimulatedDevice) -> None:
    """Also if another model, a backward or another edit comes in between."""
    model = RoutedModel([16] * 4)
    resident = copy.deepcopy(model)
    handle = offload(model)
    x = torch.randn(2, DIM)
    for route in ([0, 1, 2, 3], [0, 3], [0, 3], [3, 2, 1, 0], [1], [0, 1, 2, 3]):
        for each in (model, resident):
            each.route = route
        assert torch.equal(device.get(forward(device, model, x)), run(resident, x))
        for each in (model, resident):
            for number in (1, 2):
                with device.running() if each is model else contextlib.nullcontext():
                    through_data(each, f"blocks.{number}.up.weight")
        assert_same_state(model, resident, device)
    handle.remove()


@pytest.fixture
def zeros() -> Iterator[None]:
    """A kernel that hides the page map."""
    pagemap._Known.forget()
    pagemap._Known.fd = os.open("/dev/zero", os.O_RDONLY)
    pagemap._Known.lacks_scan = True
    yield
    pagemap._Known.forget()


@pytest.mark.usefixtures("zeros")
def test_a_page_map_of_zeros(device: SimulatedDevice, caplog: pytest.LogCaptureFixture) -> None:
    """It is tried out, and not believed."""
    model = RoutedModel([16, 24, 16, 16])
    resident = copy.deepcopy(model)
    handle = offload(model)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "/proc/self/pagemap" in message
    for _ in range(3):
        x = torch.randn(2, DIM)
        assert torch.equal(device.get(forward(device, model, x)), run(resident, x))
        with device.running():
            through_data(model, "shift")
        through_data(resident, "shift")
        assert_same_state(model, resident, device)
    handle.remove()


# ---------------------------------------------------------------- RAM that cannot be page-locked


def test_the_drivers_own_memory_ends(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The tenth allocation fails, and nothing is locked in place: the rest stays in plain RAM, and goes through threads."""
    num, pin = 0, device.pin

    def empty_pinned(num_bytes: int) -> torch.Tensor | None:
        nonlocal num
        num += 1
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        return memory if num < 10 and pin(memory, []) else None

    monkeypatch.setattr(device, "pin", lambda memory, undo, *, read_only=False: False)
    monkeypatch.setattr(device, "empty_pinned", empty_pinned)
    tune(monkeypatch, segment_bytes=1024)
    model = RoutedModel([16, 24, 16, 16] * 4)
    resident = copy.deepcopy(model)
    handle = offload(model)
    assert num == 10 and len(segments_of(handle)) > 12
    assert len(caplog.records) == 2 and {group.tier for group in handle.groups} == {"ram", "pageable ram"}
    outputs = []
    for _ in range(3):
        x = torch.randn(2, DIM)
        outputs.append((forward(device, model, x), run(resident, x)))
        with device.running():
            in_place(model, "blocks.3.up.weight")
            through_data(model, "shift")
        in_place(resident, "blocks.3.up.weight")
        through_data(resident, "shift")
        assert_same_state(model, resident, device)
    for output, expected in outputs:
        assert torch.equal(device.get(output), expected)
    handle.remove()


@pytest.mark.parametrize("has_own", [True, False], ids=["the driver's own", "none"])
@any_mode
def test_page_locking_is_refused(
    options: dict[str, Any],
    has_own: bool,
    device: SimulatedDevice,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pin = device.pin

    def empty_pinned(num_bytes: int) -> torch.Tensor | None:
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        return memory if has_own and pin(memory, []) else None

    monkeypatch.setattr(device, "pin", lambda memory, undo, *, read_only=False: False)
    monkeypatch.setattr(device, "empty_pinned", empty_pinned)
    tune(monkeypatch, segment_bytes=4096)
    model = RoutedModel([16, 24, 16, 16])
    resident = copy.deepcopy(model)
    with caplog.at_level(logging.WARNING, "group_offload"):
        handle = offload(model, **options)
    messages = [record.getMessage() for record in caplog.records]
    segments = segments_of(handle)
    num_bytes = sum(segment.bytes.numel() for segment in segments)
    assert len(segments) > 1 and num_bytes == sum(group.num_bytes for group in handle.groups)
    (message,) = messages
    assert f" {num_bytes / 2**20:.4g} MiB" in message
    assert ("driver-allocated" in message) == has_own and ("staging buffer" in message) == (not has_own)
    stats = handle.stats()
    assert stats.pinned_bytes == (stats.host_bytes if has_own else 0)
    assert {group.tier for group in handle.groups} == {(Tier.RAM if has_own else Tier.PAGEABLE).value}
    outputs = []
    for number in range(4):
        x = torch.randn(2, DIM)
        outputs.append((forward(device, model, x), run(resident, x)))
        if number:
            with device.running():
                in_place(model, "blocks.0.up.weight")
                through_data(model, "shift")
            in_place(resident, "blocks.0.up.weight")
            through_data(resident, "shift")
        assert_same_state(model, resident, device)
    for output, expected in outputs:
        assert torch.equal(device.get(output), expected)
    del outputs, output
    assert (handle.stats().staging_bytes > 0) == (not has_own)
    handle.remove()
    model.alive.clear()
    device.synchronize()
    assert device.allocated_bytes == 0


@pytest.mark.parametrize("room", [3000, 9000, 20_000], ids=lambda room: f"{room}-bytes")
@any_mode
def test_little_can_be_page_locked(
    options: dict[str, Any],
    room: int,
    device: SimulatedDevice,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The buffers that threads read RAM into come first, then weights, and a refusal is the last that is asked for."""
    pin, asked = device.pin, list[tuple[int, bool]]()

    def with_a_cap(memory: torch.Tensor, undo: list[Callable[[], None]], *, read_only: bool = False) -> bool:
        fits = device.pinned_bytes + memory.numel() <= room
        asked.append((memory.numel(), fits))
        return fits and pin(memory, undo, read_only=read_only)

    monkeypatch.setattr(device, "pin", with_a_cap)
    monkeypatch.setattr(device, "empty_pinned", lambda num_bytes: None)
    frames = dict.fromkeys(("num_frames", "num_leaf_frames"), 2)
    tune(monkeypatch, segment_bytes=2500, chunk_bytes=4096, leaf_chunk_bytes=4096, **frames)
    model = RoutedModel([16, 24, 16, 16] * 3)
    resident = copy.deepcopy(model)
    with caplog.at_level(logging.WARNING, "group_offload"):
        handle = offload(model, **options)
    assert [fits for _, fits in asked].count(False) == 1  # the device is not asked again after that
    (message,) = [record.getMessage() for record in caplog.records]
    stats = handle.stats()
    pinned, most = (f"{size / 2**20:.4g}" for size in (stats.pinned_bytes, stats.host_bytes))
    assert f"Pinned only {pinned} of {most} MiB" in message and "ulimit -l" in message
    assert {group.tier for group in handle.groups} <= {Tier.RAM.value, Tier.PAGEABLE.value}
    outputs = []
    for number in range(5):
        x = torch.randn(2, DIM)
        outputs.append((forward(device, model, x), run(resident, x)))
        if number:
            for each in (model, resident):
                with device.running() if each is model else contextlib.nullcontext():
                    in_place(each, f"blocks.{number}.up.weight")
                    through_data(each, "shift")
        assert_same_state(model, resident, device)
    for output, expected in outputs:
        assert torch.equal(device.get(output), expected)
    stats = handle.stats()
    assert stats.bytes_onloaded["pageable ram"] > 0
    assert stats.staging_bytes == 8192 and (stats.pinned_bytes > 0) == (room == 20_000)
    assert device.pinned_bytes == stats.pinned_bytes + (stats.staging_bytes if room > 8192 else 0)
    del outputs, output
    handle.remove()
    model.alive.clear()
    device.synchronize()
    assert device.allocated_bytes == device.pinned_bytes == 0


def test_under_wsl2_no_more_than_half_of_the_ram_is_asked_for(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows gives no more, and the device is not asked until it refuses."""
    pin, asked = device.pin, list[int]()

    def counted(memory: torch.Tensor, undo: list[Callable[[], None]], *, read_only: bool = False) -> bool:
        asked.append(memory.numel())
        return pin(memory, undo, read_only=read_only)

    monkeypatch.setattr(device, "pin", counted)
    monkeypatch.setattr(device, "empty_pinned", lambda num_bytes: None)
    monkeypatch.setattr(platform, "release", lambda: "6.6.87-microsoft-standard-WSL2")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=20_000, available=1 << 30))
    tune(monkeypatch, segment_bytes=2500, chunk_bytes=4096, num_frames=1)
    model = RoutedModel([16, 24, 16, 16] * 3)
    resident = copy.deepcopy(model)
    handle = offload(model)
    monkeypatch.undo()
    assert 0 < sum(asked) <= 10_000 < handle.stats().host_bytes
    x = torch.randn(2, DIM)
    assert torch.equal(device.get(forward(device, model, x)), run(resident, x))
    handle.remove()


def test_an_edit_waits_for_threads_that_read_ram(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next pass is on its way: what it reads of RAM that is not page-locked must not change meanwhile."""
    monkeypatch.setattr(device, "pin", lambda memory, undo, *, read_only=False: False)
    monkeypatch.setattr(device, "empty_pinned", lambda num_bytes: None)
    model = RoutedModel([16] * 4)
    resident = copy.deepcopy(model)
    handle = offload(model)
    x = torch.randn(2, DIM)
    for _ in range(2):
        forward(device, model, x)
    device.synchronize()
    reading, read = threading.Event(), PageableMemory.read
    contents = []

    def slowly(self: PageableMemory, *args: Any, **options: Any) -> bool:
        before = self.bytes.clone()
        reading.set()
        time.sleep(0.1)
        contents.append(torch.equal(self.bytes, before))
        return read(self, *args, **options)

    monkeypatch.setattr(PageableMemory, "read", slowly)
    output, expected = forward(device, model, x), run(resident, x)
    reading.clear()
    assert torch.equal(device.get(output), expected)
    for each in (model, resident):
        in_place(each, "blocks.0.up.weight")
    assert torch.equal(device.get(forward(device, model, x)), run(resident, x))
    assert contents and all(contents)
    handle.remove()


# ---------------------------------------------------------------- from one pass to the next


@any_mode
def test_the_next_pass_is_on_its_way_before_it_begins(
    options: dict[str, Any], device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steady state nothing waits for its copy to be started, and each blob is brought once in a pass."""
    model = RoutedModel([16] * 6)
    events: list[str] = []
    send = Transfer.send

    def spy(self: Transfer, blobs: Any, *args: Any, **options: Any) -> Any:
        events.extend(dict.fromkeys(placed.label for placed in blobs))
        return send(self, blobs, *args, **options)

    monkeypatch.setattr(Transfer, "send", spy)
    handle = offload(model, **options)
    with taken_away(handle, device, model):
        x = torch.randn(2, DIM)
        counts = []
        for number in range(5):
            events.append(f"pass {number}")
            before = handle.stats()
            forward(device, model, x)
            after = handle.stats()
            counts.append((after.onloads - before.onloads, after.stalls - before.stalls))
        assert counts[2] == counts[3] == counts[4] and counts[2][1] == 0
        begin, end = events.index("pass 3"), events.index("pass 4")
        before, now = events[events.index("pass 2") + 1 : begin], events[begin + 1 : end]
        assert before == now
        assert len(set(now)) == len(now) == counts[3][0]  # no blob comes twice
        # A pass brings what it needs last, and then what the next one needs first.
        first = "embed" if options.get("offload_type") else "blocks_0_0"
        last = "blocks.5.down" if options.get("offload_type") else "blocks_5_5"
        assert now.index(last) < now.index(first)


class TwoWays(nn.Module):
    """Like a VAE: its parts are mostly called by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = RoutedModel([16, 24, 16]), RoutedModel([24, 16, 16, 16])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x))


@any_mode
def test_parts_that_are_called_in_turn(options: dict[str, Any], device: SimulatedDevice) -> None:
    model = TwoWays()
    resident = copy.deepcopy(model)
    handle = offload(model, **options)
    with taken_away(handle, device, model.encoder, model.decoder):
        x = torch.randn(2, DIM)
        outputs = []
        for part in ["encoder", "decoder"] * 3 + ["", "decoder", "decoder", "encoder", "", ""]:
            module, twin = model.get_submodule(part), resident.get_submodule(part)
            outputs.append((forward(device, module, x), run(twin, x)))
            if len(outputs) % 4 == 3:  # edits of what one of them has prefetched, before the other one is called
                for each in (model, resident):
                    with device.running():
                        through_data(each, "encoder.blocks.0.up.weight")
                        in_place(each, "decoder.blocks.0.up.weight")
        for output, expected in outputs:
            assert torch.equal(device.get(output), expected)
        del outputs, output


@any_mode
@pytest.mark.parametrize("goes_with_last_reference", [False, True], ids=["free", "references"])
def test_free_slots(
    options: dict[str, Any], goes_with_last_reference: bool, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Device memory is back after it, also where the allocator gets it only once nothing refers to it (torch's own)."""
    gc.collect()  # it is for all devices: those of other tests too, which may have ended in the middle of something
    if goes_with_last_reference:
        monkeypatch.setattr(device, "free", lambda memory: None)
    model = RoutedModel([16, 24, 16, 16])
    resident = copy.deepcopy(model)
    handle = offload(model, **options)
    with taken_away(handle, device, model):
        x = torch.randn(2, DIM)
        for _ in range(2):
            outputs = [forward(device, model, x) for _ in range(3)]
            assert device.allocated_bytes > 0
            free_slots()
            free_slots()
            device.synchronize()
            assert device.allocated_bytes == 0
            outputs.append(forward(device, model, x))
            for output in outputs:
                assert torch.equal(device.get(output), run(resident, x))


@any_mode
def test_free_slots_in_the_middle_of_a_pass(options: dict[str, Any], device: SimulatedDevice) -> None:
    """It leaves what is running alone."""
    model = RoutedModel([16, 24, 16, 16])
    resident = copy.deepcopy(model)
    handle = offload(model, **options)

    @contextmanager
    def on_block(position: int) -> Iterator[None]:
        before = device.allocated_bytes
        free_slots()
        assert device.allocated_bytes == before > 0
        yield
        free_slots()

    model.on_block = on_block
    with taken_away(handle, device, model):
        x = torch.randn(2, DIM)
        for _ in range(3):
            assert torch.equal(device.get(forward(device, model, x)), run(resident, x))


@pytest.mark.parametrize("goes_with_last_reference", [False, True], ids=["free", "references"])
@any_mode
def test_two_models_take_the_memory_of_one(
    options: dict[str, Any], goes_with_last_reference: bool, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots of other sizes take the place of those of before: never the sum."""
    if goes_with_last_reference:
        monkeypatch.setattr(device, "free", lambda memory: None)
    small, large = RoutedModel([16] * 4), RoutedModel([40] * 4)
    twins = copy.deepcopy(small), copy.deepcopy(large)
    handles = [offload(small, **options), offload(large, **options)]
    x = torch.randn(2, DIM)
    for number in range(6):
        model, twin = ((small, twins[0]), (large, twins[1]))[number // 2 % 2]
        assert torch.equal(device.get(forward(device, model, x)), run(twin, x))
    device.synchronize()
    assert device.peak_bytes <= max(handle.stats().peak_device_bytes for handle in handles)
    for handle in handles:
        handle.remove()
    device.synchronize()
    assert device.allocated_bytes == 0


@any_mode
def test_device_memory_is_the_formula(options: dict[str, Any], device: SimulatedDevice) -> None:
    """The rings; without them one group in use, and on its way as much as the largest one takes, or four of those."""
    model = RoutedModel([16, 16, 40, 16, 16, 24, 16, 16])
    handle = offload(model, **options)
    with taken_away(handle, device, model):
        sizes: dict[int, list[int]] = {}
        for group in engine_of(handle).groups:
            if group.num_bytes:
                sizes.setdefault(group.height, []).append(group.num_bytes)
        around = sum(sum(found) for height, found in sizes.items() if height)  # so little here that it stays
        for _ in range(4):
            forward(device, model, torch.randn(2, DIM))
        peak = handle.stats().peak_device_bytes
        assert device.peak_bytes == peak
        if options:
            is_deep = len(options) == 2
            assert around + max(sizes[0]) < peak <= around + max(sizes[0]) * (1 + (4 if is_deep else 1))
        else:
            assert peak == around + sum(sorted(sizes[0])[-2:])


@any_mode
@pytest.mark.parametrize("num_passes", [1, 3])
def test_a_module_that_is_dropped_right_after_a_forward(
    options: dict[str, Any], num_passes: int, device: SimulatedDevice
) -> None:
    model = RoutedModel([16] * 4)
    resident = copy.deepcopy(model)
    handle = offload(model, **options)
    x = torch.randn(2, DIM)
    outputs = [forward(device, model, x) for _ in range(num_passes)]
    assert on_their_way(device) > 0 and device.pinned_bytes > 0
    alive, model.alive = model.alive, []
    del model, handle
    gc.collect()
    for output in outputs:
        assert torch.equal(device.get(output), run(resident, x))
    del outputs, output
    alive.clear()
    device.synchronize()
    assert device.pinned_bytes == 0 and device.allocated_bytes == 0


def test_remove_in_the_middle_of_a_pass_is_refused(device: SimulatedDevice) -> None:
    model = RoutedModel([16] * 4)
    resident = copy.deepcopy(model)
    handle = offload(model)

    @contextmanager
    def on_block(position: int) -> Iterator[None]:
        with pytest.raises(StateError, match="in the middle of a forward"):
            handle.remove()
        yield

    model.on_block = on_block
    with taken_away(handle, device, model):
        x = torch.randn(2, DIM)
        assert torch.equal(device.get(forward(device, model, x)), run(resident, x))


def test_memory_is_unlocked_before_it_is_unmapped(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cycle that the garbage collector finds, finalizers run in any order."""
    order: list[tuple[str, int]] = []
    pin, munmap = SimulatedDevice.pin, mapping._libc.munmap

    def watched_pin(self: SimulatedDevice, memory: torch.Tensor, undo: list[Any], *, read_only: bool = False) -> bool:
        address = memory.data_ptr()
        assert pin(self, memory, undo, read_only=read_only)
        unpin = undo.pop()

        def watched_unpin() -> None:
            order.append(("unlock", address))
            unpin()

        undo.append(watched_unpin)
        return True

    class WatchedLibc:
        def __getattr__(self, name: str) -> Any:
            return getattr(libc, name)

        def munmap(self, address: int, num_bytes: int) -> int:
            order.append(("unmap", address))
            result: int = munmap(address, num_bytes)
            return result

    libc = mapping._libc
    monkeypatch.setattr(SimulatedDevice, "pin", watched_pin)
    monkeypatch.setattr(mapping, "_libc", WatchedLibc())
    model = RoutedModel([16] * 3)
    offload(model)
    forward(device, model, torch.randn(2, DIM))
    device.synchronize()
    model.alive.clear()
    order.clear()  # of whatever was at these addresses before
    del model  # it and its handle know each other
    gc.collect()
    unlocked = [address for what, address in order if what == "unlock"]
    assert unlocked
    for address in unlocked:
        assert order.index(("unlock", address)) < order.index(("unmap", address))


@any_mode
def test_a_weight_that_is_replaced_in_the_middle_of_a_forward(options: dict[str, Any], device: SimulatedDevice) -> None:
    model = EditsItsBlocks()
    model.edits = False
    resident = copy.deepcopy(model)
    handle = offload(model, **options)

    def replace(which: EditsItsBlocks) -> None:
        for block in which.blocks:
            assert isinstance(block, RoutedBlock)
            block.gain.data = block.gain.data + 1

    for number in range(5):
        x = torch.randn(2, DIM)
        for which in (model, resident):
            which.edits = number == 2
            which.before_edit = partial(replace, which)
        assert torch.equal(device.get(forward(device, model, x)), run(resident, x)), number
    for (name, value), expected in zip(model.state_dict().items(), resident.state_dict().values(), strict=True):
        assert torch.equal(value, expected), name
    handle.remove()


def test_a_weight_of_another_form_in_the_middle_of_a_forward(device: SimulatedDevice) -> None:
    model = EditsItsBlocks()
    model.edits = False
    handle = offload(model)
    forward(device, model, torch.randn(2, DIM))
    model.edits = True

    def replace() -> None:
        block = model.blocks[1]
        assert isinstance(block, RoutedBlock)
        block.gain.data = block.gain.data.double()

    model.before_edit = replace
    with pytest.raises(StateError, match="blocks_1_1"):
        forward(device, model, torch.randn(2, DIM))
    model.edits = False
    assert model.blocks[1].gain.dtype == torch.float64
    handle.remove()


class Scaled(nn.Module):
    """A module without weights, until it gets one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = getattr(self, "scale", None)
        return x if scale is None else x * scale


@pytest.mark.parametrize("kind", ["parameter", "buffer", "module"])
def test_a_weight_that_a_module_without_any_gets_between_passes(kind: str, device: SimulatedDevice) -> None:
    """It is onloaded like all others from the next pass on."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), Scaled()) for _ in range(3))).requires_grad_(False)
    handle = offload(model)
    x = torch.randn(2, 8)
    outputs, num_bytes = [], []
    for _ in range(2):
        with torch.no_grad(), device.running():
            outputs.append(device.get(model(device.put(x))))
        num_bytes.append(sum(group.num_bytes for group in handle.groups))
        late, scale = model.get_submodule("1.1"), torch.full((8,), 2.0)
        if kind == "parameter":
            late.register_parameter("scale", nn.Parameter(scale, requires_grad=False))
        elif kind == "buffer":
            late.register_buffer("scale", scale)
        else:
            late.add_module("extra", nn.Linear(8, 8))
    assert num_bytes[0] < num_bytes[1]
    assert torch.equal(*outputs) is (kind == "module")
    handle.remove()
