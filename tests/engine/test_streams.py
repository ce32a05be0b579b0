"""Stream order, on a simulated device where copies and kernels land late and every missing wait is an error.

`exercise` runs one random model through the engine: random blocks, sizes, order, repeats, skips, exceptions, edits,
streams, options. The same function, on an engine with one wait taken out, has to fail: see `test_every_wait_is_needed`.
"""

from __future__ import annotations

import gc
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from group_offload import OffloadHandle, StorageError, free_device_buffers
from group_offload.base import arena
from group_offload.plan.placement import Placement
from group_offload.runtime import compressor, engine, memory, passes, placer
from group_offload.runtime.interleave import passes as interleaved_passes
from group_offload.runtime.interleave import turn_lock
from group_offload.runtime.prefetch import prefetcher
from group_offload.runtime.prefetch.schedule import Schedule
from group_offload.runtime.slots import compressed_buffers
from group_offload.runtime.slots import slot as slots
from group_offload.runtime.transfers import last as copies
from group_offload.runtime.transfers import reader, staging, transfer, write_order
from group_offload.stores import pinned
from group_offload.stores.source import SourceFile

from ..support.inside import engine_of, wait_until_enqueued
from ..support.models import DIM, RoutedBlock, RoutedModel, Stop
from ..support.on_device import (
    Twins,
    assert_reads_have_owners,
    compression,
    exercise,
    forward,
    from_file,
    offload,
    raise_interrupt,
    several,
)
from ..support.participants import interrupt_where_it_waits, travel
from ..support.reads import HeldReads, held_reads, hold_what_the_next_pass_needs, many_frames, watch_file_reads
from ..support.rigs import run
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.speeds import use_speeds
from ..support.tuning import tune
from ..support.waits import waits_of

OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_blocks_per_group": 2},
    {"offload_type": "leaf_level"},
    {"record_stream": True},
    {"record_stream": True, "offload_type": "leaf_level"},
    {"use_stream": False},
    {"use_stream": False, "non_blocking": True, "num_blocks_per_group": 2},
    {"low_cpu_mem_usage": True},
    {"in_files": True},
    {"in_files": True, "record_stream": True},
    {"in_files": True, "offload_type": "leaf_level"},
    {"in_files": True, "use_stream": False},
    {"in_checkpoint": True},
    {"in_checkpoint": True, "offload_type": "leaf_level", "record_stream": True},
    {"use_stream": True, "num_blocks_per_group": 3},
    {"is_told_of_edits": False},
    {"is_told_of_edits": False, "record_stream": True, "offload_type": "leaf_level"},
    {"compress": True},
    {"compress": True, "in_checkpoint": True, "record_stream": True},
    {"compress": True, "use_stream": False, "non_blocking": True},
    {"compress": True, "in_files": True, "reads_compressed": True},
    {"compress": True, "in_checkpoint": True, "reads_compressed": True, "record_stream": True},
    {"compress": True, "in_files": True, "reads_compressed": True, "use_stream": False},
]
BUDGETS: list[dict[str, Any]] = [
    {"vram_budget": 20_000, "record_stream": True},
    {"vram_budget": 20_000, "in_checkpoint": True},
    {"vram_budget": 40_000, "offload_type": "leaf_level", "in_files": True},
    {"vram_budget": 1 << 20, "is_told_of_edits": False},
]


@pytest.mark.parametrize("options", [*OPTIONS, *BUDGETS], ids=str)
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), laziness=st.sampled_from(["random", "lazy", "eager"]))
def test_random_models_match_the_resident_one(options: dict[str, Any], seed: int, laziness: str) -> None:
    """Bits (diffusers #11041, #11981, #12721). A block that comes twice in a row at the end of the order waits for itself; one
    that is skipped after its prefetch does not stay on the device; blocks are called conditionally, or in another order than
    they were registered in (#11307, #11375, #13211)."""
    exercise(seed, laziness, options)


@pytest.mark.parametrize("options", [{}, {"record_stream": True}, {"offload_type": "leaf_level"}], ids=str)
def test_the_host_never_waits(options: dict[str, Any]) -> None:
    """While a block computes the next blob is already on its way: in steady state nothing is started on demand."""
    device = SimulatedDevice(0, "lazy")
    model = RoutedModel([16] * 6)
    with use_simulated_device(device):
        handle = offload(model, **options)
        for _ in range(4):
            before = handle.stats()
            forward(device, model, torch.randn(2, DIM))
        assert device.num_host_waits == 0
        assert handle.stats().stalls == before.stalls
        assert handle.stats().onloads - before.onloads <= len(handle.groups)
        handle.remove()


class Fork(nn.Module):
    """One block computes on another stream, the first one on both, and nothing inside of the pass waits for that."""

    def __init__(self, device: SimulatedDevice, at: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([RoutedBlock(16, counts=False) for _ in range(4)])
        self.device, self.at = [device, device.new_stream()], at

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        device, side = self.device
        for position, block in enumerate(self.blocks):
            if position == self.at:
                with device.use_stream(side):
                    y = block(y)
            if position != self.at or not position:
                x = block(x)
        return x, y


@pytest.mark.parametrize("options", [{}, {"record_stream": True}], ids=str)
def test_what_a_forward_changed_is_fetched_after_it_was_changed(options: dict[str, Any]) -> None:
    """The pass ends on another stream than the one on which a block, still expected again, was used last."""
    device = SimulatedDevice(0, "lazy")
    model = RoutedModel([16, 16], counts=True)
    with use_simulated_device(device), Twins(device, model, **options) as twins:
        twins.model.route = twins.resident.route = [0, 1, 1]
        twins.step()
        twins.model.route = twins.resident.route = [0, 1]
        side = device.new_stream()

        @contextmanager
        def on_side(position: int) -> Iterator[None]:
            event = device.new_event()
            event.record(device.current_stream())
            side.wait_event(event)
            with device.use_stream(side):
                yield

        model.on_block = on_side
        with torch.no_grad(), device.running():
            model(device.put(torch.randn(2, DIM)), finish=False)
            run(twins.resident, torch.randn(2, DIM))
        assert model.blocks[1].calls.tolist() == [3, 3, 3]


def test_slots_go_to_another_model_after_a_refresh_on_its_stream() -> None:
    """The first one's pass computes on another stream still: the refresh must not make the arena forget that."""
    device = SimulatedDevice(0, "lazy")
    side = device.new_stream()
    with (
        use_simulated_device(device),
        several(device, *(Twins(device, RoutedModel([16] * 3)) for _ in range(2))) as (one, two),
    ):
        for _ in range(2):
            one.step()
            with device.use_stream(side):
                one.handle.refresh()
                two.step()
            one.check()
            two.check()


@contextmanager
def drive(
    *held: str, laziness: Any = "lazy", frames: bool = False
) -> Iterator[tuple[SimulatedDevice, HeldReads, Path, pytest.MonkeyPatch]]:
    """A device that is told of reads of files, and a folder.

    Args:
        held: What the names of groups begin with whose reads can be held.
        frames: Whether the staging memory has room for all that is on its way.
    """
    device = SimulatedDevice(0, laziness)
    with (
        use_simulated_device(device),
        watch_file_reads(device),
        many_frames() if frames else nullcontext(),
        held_reads(*held) if held else nullcontext(HeldReads()) as gate,
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        yield device, gate, Path(folder), patch


def is_being_read(handle: OffloadHandle) -> bool:
    return any(job.landing is not None for job in engine_of(handle).transfer.reader._jobs)


def weak(self: SourceFile, *args: Any, **kwargs: Any) -> bool:
    raise StorageError("the disk had a moment of weakness")


@pytest.mark.parametrize("options", [{}, {"record_stream": True}, {"offload_type": "leaf_level"}], ids=str)
def test_slots_go_to_another_model_while_files_are_being_read(options: dict[str, Any]) -> None:
    """The first one's next pass is being read when the other one, in RAM, takes its slots; then those reads end."""
    with (
        drive("blocks_0", "embed") as (device, held, folder, _),
        several(
            device,
            Twins(device, RoutedModel([16] * 4), offload_to_disk_path=folder, **options),
            Twins(device, RoutedModel([16] * 4), **options),
        ) as (one, two),
    ):
        one.step()  # the first pass does not know in which order it needs layers
        hold_what_the_next_pass_needs(one.model, held)
        for _ in range(3):
            held.open()
            one.step()
            unread = is_being_read(one.handle)
            two.step()
            two.step()
            held.open()
            wait_until_enqueued(one.handle)
        assert unread


def test_what_was_read_ahead_in_vain_is_given_up() -> None:
    """Whatever the order is, it holds no frame for longer than until something else is expected sooner."""
    rng = random.Random(0)
    with (
        drive(laziness="random") as (device, _, folder, _),
        Twins(device, RoutedModel([16] * 8), offload_to_disk_path=folder) as twins,
    ):
        for number in range(8):
            twins.model.route = twins.resident.route = rng.sample(range(8), 5)
            twins.step()
            if number % 2:
                twins.edit(lambda model: model.shift.data.add_(1))
            twins.check()
            assert_reads_have_owners(twins.handle)


def test_an_edit_of_what_was_edited_before_in_the_same_forward() -> None:
    """Threads may have read the weights of the first edit, of a group that has no slot yet."""
    with (
        drive(laziness="random", frames=True) as (device, _, folder, _),
        Twins(device, from_file(RoutedModel([16] * 6), folder / "model.safetensors"), offload_device="disk") as twins,
    ):
        twins.step()

        def edit(twin: Any, position: int) -> Any:
            if position in (0, 2):
                wait_until_enqueued(twins.handle)  # all that is read ahead by now was read
                with torch.no_grad():
                    for index in (1, 4):
                        twin.blocks[index].up.weight.mul_(1.5)
            return nullcontext()

        for twin in (twins.model, twins.resident):
            twin.on_block, twin.route = partial(edit, twin), [0, 1, 4]  # the last one has no slot yet
        twins.step()


@pytest.mark.parametrize("end", ["remove", "change", "edit"])
def test_files_are_being_read_when(end: str) -> None:
    """Old bytes lie in the staging memory."""
    with drive("blocks_0") as (device, held, folder, patch):
        tune(patch, chunk_bytes=4096)  # so that the staging memory has another size after the change
        with Twins(device, RoutedModel([16] * 4), offload_to_disk_path=folder) as twins:
            twins.step()
            hook = hold_what_the_next_pass_needs(twins.model, held)
            twins.step()
            hook.remove()
            assert is_being_read(twins.handle)
            threading.Timer(0.2, held.open).start()
            if end == "change":
                for twin in (twins.model, twins.resident):
                    torch.manual_seed(0)
                    twin.blocks[2] = RoutedBlock(400, counts=False)
                twins.step()
            elif end == "edit":  # of groups that have no slot yet, too
                twins.edit(lambda model: [parameter.data.mul_(1.5) for parameter in model.parameters()])
                twins.step()
            else:
                twins.handle.remove()


@pytest.mark.parametrize("options", [{}, {"low_cpu_mem_usage": True}], ids=str)
def test_weights_come_from_the_device(options: dict[str, Any]) -> None:
    """All of them, or half; the last kernels that write to them are on their way."""
    for share in (1, 2):
        device = SimulatedDevice(0, "lazy")
        model, resident = RoutedModel([16] * 4), RoutedModel([16] * 4)
        resident.load_state_dict(model.state_dict())
        with use_simulated_device(device), pytest.MonkeyPatch.context() as patch:
            tune(patch, segment_bytes=4096)
            with device.running():
                for tensor in [*model.parameters()][::share]:
                    tensor.data = device.put(tensor.data)
                for each in (*model.parameters(), *resident.parameters()):
                    each.data.mul_(2)
            assert device.activations.now > 0
            with Twins(device, model, resident, **options) as twins:
                del tensor, each
                twins.check()
                device.synchronize()  # here the simulated device takes notice of what was freed
                assert device.activations.now == 0 and device.num_copies_back > 0
                twins.run(2)


def test_removed_after_an_interrupt_at_the_end_of_a_pass() -> None:
    """Copies from staging buffers of pageable RAM are on their way: nobody waited for them."""
    device = SimulatedDevice(0, "lazy")
    model = RoutedModel([16] * 4)
    with use_simulated_device(device), pytest.MonkeyPatch.context() as patch:
        handle = offload(model, low_cpu_mem_usage=True)
        forward(device, model, torch.randn(2, DIM))
        patch.setattr(Schedule, "end", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            forward(device, model, torch.randn(2, DIM))
        handle.remove()
        device.synchronize()
        assert not device.pinned_bytes


def test_removed_while_what_was_read_is_being_copied() -> None:
    """The staging memory goes after the copies from it."""
    with drive() as (device, _, folder, _), Twins(device, RoutedModel([16] * 6), offload_to_disk_path=folder) as twins:
        twins.step()
        twins.handle.remove()


def test_what_rests_in_ram_does_not_overtake_what_is_read() -> None:
    """A large block made room for a small one, which is still read, and behind it for one that needs no reading.

    That one has to wait for the large block's compute as well, although its bytes are behind the first small one's.
    """
    resident = RoutedModel([400, 400, 100, 100, 100]).eval()
    with (
        drive("blocks_2") as (device, held, folder, _),
        Twins(device, from_file(resident, folder / "model.safetensors"), offload_device="disk") as twins,
    ):
        for twin in (twins.model, twins.resident):
            state = {name: torch.full_like(value, 0.1) for name, value in resident.blocks[3].state_dict().items()}
            twin.blocks[3].load_state_dict(state, assign=True)

        def until_needed(position: int) -> Any:
            if position == 2:
                held.open()
            return nullcontext()

        twins.model.on_block = until_needed
        for _ in range(3):
            held.close()
            twins.step()
            twins.check()
        assert {group.tier for group in twins.handle.groups if group.group_id == "blocks_3_3"} == {"ram"}


def test_what_could_not_be_read_ahead_is_read_again() -> None:
    """One read in four fails, but none of the same bytes two times in a row: so no forward does."""
    read, num_reads = SourceFile.read, 0
    failed: set[Any] = set()

    def failing(self: SourceFile, *args: Any, **kwargs: Any) -> bool:
        nonlocal num_reads
        num_reads += 1
        place = self.path, args[1]
        if num_reads % 4 == 0 and place not in failed:
            failed.add(place)
            weak(self)
        failed.discard(place)
        time.sleep(0.01)
        return read(self, *args, **kwargs)

    with (
        drive() as (device, _, folder, patch),
        Twins(device, RoutedModel([16] * 6), offload_to_disk_path=folder) as twins,
    ):
        for number in range(5):
            # What is needed at once is not tried again: so all is read ahead.
            twins.step()
            twins.check()
            wait_until_enqueued(twins.handle)
            if not number:
                patch.setattr(SourceFile, "read", failing)
        assert num_reads > 12


def test_a_forward_that_raises_ends_the_reads_that_are_under_way() -> None:
    """Else what was read late would be copied to memory that is somebody else's by then."""
    with (
        drive("blocks", frames=True) as (device, held, folder, _),
        Twins(device, RoutedModel([16] * 6), offload_to_disk_path=folder) as twins,
    ):
        twins.step()
        twins.step()
        late = threading.Timer(0.3, held.open)

        def hold(*_: Any) -> None:
            held.close()
            late.start()

        hook = twins.model.blocks[0].register_forward_hook(hold)
        twins.model.stop_at = 1
        try:
            with pytest.raises(Stop):
                forward(device, twins.model, torch.randn(2, DIM))
            assert not engine_of(twins.handle).transfer.reader._jobs
        finally:
            hook.remove()
            late.join()


def test_the_bytes_of_what_could_not_be_read_go_to_others() -> None:
    """Who takes a slot's bytes next waits for its job only, although the job copied nothing there."""
    with (
        drive() as (device, _, folder, patch),
        Twins(device, RoutedModel([16] * 2), offload_to_disk_path=folder) as twins,
    ):
        engine = engine_of(twins.handle)
        group = max(engine.groups, key=lambda group: group.num_bytes)
        patch.setattr(SourceFile, "read", weak)
        with device.running():
            memory = device.empty(group.num_bytes).zero_()
            used, ready = device.new_event(), device.new_event()
            used.record(device.current_stream())
            job = engine.transfer.send(group.blobs_at(0), write_order.Landing(memory, [used], ready))
            assert job is not None
            with pytest.raises(StorageError):
                job.wait()
            next_one = device.new_stream()
            next_one.wait_event(ready)
            with device.use_stream(next_one):
                memory.add_(1)
        device.synchronize()
        del memory


@pytest.mark.parametrize("at", [3, 0])
@pytest.mark.parametrize("options", [{}, {"record_stream": True}], ids=str)
def test_slots_go_to_another_model_while_a_side_stream_reads_them(options: dict[str, Any], at: int) -> None:
    """With 0 a block is on two streams that nothing orders."""
    device = SimulatedDevice(0, "lazy")
    model, other = Fork(device, at), Fork(device, at)
    side = model.device[1]
    other.device = model.device
    x, y = torch.randn(2, DIM), torch.randn(2, DIM)
    with torch.no_grad():
        expected = [model(x, y), other(x, y)]
    with use_simulated_device(device):
        handles = [offload(model, **options), offload(other, **options)]
        for _ in range(3):
            outputs = []
            for module in (model, other):
                given = device.put(x)
                with device.use_stream(side):
                    given_to_side = device.put(y)
                with torch.no_grad(), device.running():
                    outputs.append(module(given, given_to_side))
            for (one, two), wanted in zip(outputs, expected, strict=True):
                assert torch.equal(device.get(one), wanted[0]) and torch.equal(device.get(two), wanted[1])
        del outputs, one, two, given, given_to_side
        for handle in handles:
            handle.remove()
        assert device.allocated_bytes == 0


@pytest.mark.parametrize("options", [{}, {"record_stream": True}], ids=str)
def test_compressed_files_are_read(options: dict[str, Any]) -> None:
    """Two models take slots and the reading buffer from one another; reads are given up; the models are removed."""
    models = [RoutedModel([600, 900, 600, 600, 600]).bfloat16() for _ in range(2)]
    x = torch.randn(2, DIM).bfloat16()
    with (
        compression(pinned_share=0.0),
        drive(frames=True) as (device, _, folder, _),
        several(
            device, *(Twins(device, model, compress=True, offload_to_disk_path=folder, **options) for model in models)
        ) as both,
    ):
        for number in range(3):
            for twins in both:
                twins.step(x=x)
                twins.step(x=x)
                twins.model.stop_at = 1 + number
                with pytest.raises(Stop):
                    forward(device, twins.model, x)
                twins.model.stop_at = -1
        for twins in both:
            assert twins.handle.stats().bytes_decompressed and not twins.handle.stats().compressed_bytes
            twins.model.alive.clear()
            twins.handle.remove()  # while they compute


@pytest.mark.parametrize(("share", "options"), [(0.8, {}), (1.0, {}), (0.8, {"record_stream": True})], ids=str)
def test_compressed_weights_stay_on_the_device(share: float, options: dict[str, Any]) -> None:
    """Two models displace one another's groups, compressed or not, while these are on their way, or are decompressed."""
    models = [RoutedModel([2400] * 10).bfloat16() for _ in range(2)]
    x = torch.randn(2, DIM).bfloat16()
    budget = int(share * sum(parameter.nbytes for parameter in models[0].parameters()))
    with compression(), drive() as (device, _, _, patch):
        tune(patch, device_margin_bytes=0, strip_bytes=40 << 10)  # two strips: more would not fit the budget compressed
        use_speeds(patch, h2d=2, disk=1)
        options = {"compress": True, "vram_budget": budget, **options}
        places = set()
        with several(device, *(Twins(device, model, **options) for model in models)) as both:
            for number in range(4):
                for twins in both:
                    twins.step(x=x)
                    twins.step(x=x)
                    assert twins.handle.plan.details is not None
                    places |= {*twins.handle.plan.details.placements}
                    if number == 3:
                        free_device_buffers()  # what is decompressed ahead of the next pass is read meanwhile
                    if number == 2:
                        with torch.no_grad():
                            for twin in (twins.model, twins.resident):
                                twin.blocks[number].up.weight.mul_(2)
        assert Placement.COMPRESSED in places
    assert device.peak_bytes_in_use() <= budget


def test_slots_go_back_to_the_allocator_while_another_stream_reads_them() -> None:
    """The allocator must not hand them out on the stream that took them before the pass on the other one has computed."""
    device = SimulatedDevice(0, "lazy")
    side = device.new_stream()
    with use_simulated_device(device), Twins(device, RoutedModel([16] * 3)) as twins:
        twins.step()
        twins.check()
        with device.use_stream(side):
            twins.step()
        holding = engine_of(twins.handle).memory.memory
        assert holding is not None
        num_bytes = holding.numel()
        del holding
        free_device_buffers()
        taken, ones = device.empty(num_bytes, device.current_stream()), torch.ones(num_bytes, dtype=torch.uint8)
        device.copy(taken, ones, device.current_stream(), blocking=True)
        device.free(taken)
        del taken
        twins.check()


# ---------------------------------------------------------------- mutations


CALLS = {
    "wait_event",
    "synchronize",
    "record",
    "record_stream",
    "wait_for_copies",
    "abandon",
    "cancel",
    "cancel_pending",
    "order_behind_jobs",
    "wait_for_room",
    "regain",
    "_wait_for_turn",
}
WAITS_FOR_THREADS = {"slot.job.wait()", "job.wait()"}
NO_ORDER = {("Reader", "_next"), ("Transfer", "_send_share")}
"""Waits that only keep a thread from going round in circles, and reads that only other GPUs have in vain."""
SHARED = (turn_lock, interleaved_passes)
WEIGHTS = (engine, passes, placer, compressor, prefetcher, memory)
MODULES = (*SHARED, copies, *WEIGHTS, slots, arena, compressed_buffers, transfer, write_order, reader, staging, pinned)
WAITS, without_wait = waits_of(MODULES, CALLS, WAITS_FOR_THREADS, NO_ORDER)
assert len(WAITS) >= 12


def cases(test: Any) -> Iterator[partial[Any]]:
    """A test with all values of its parameters."""
    marks = [mark.args for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    for values in product(*(values for _, values in marks)):
        pairs = zip([names for names, _ in marks], values, strict=True)
        given = ({names: value} if isinstance(names, str) else zip(names, value, strict=True) for names, value in pairs)
        yield partial(test, **{name: value for each in given for name, value in dict(each).items()})


def scenarios() -> Iterator[partial[Any]]:
    """The tests above, and `exercise`: what alone finds some missing wait comes first."""
    for seed, options in FIRST:
        yield partial(exercise, seed, "random", options)
    for name, test in globals().items():
        if name.startswith("test_") and test not in (
            test_random_models_match_the_resident_one,
            test_every_wait_is_needed,
        ):
            yield from cases(test)
    for options in ({"low_cpu_mem_usage": True}, {"in_files": True}):
        yield partial(exercise, 0, "lazy", options)
    for seed in range(2):
        for options in OPTIONS:
            if (seed, options) not in FIRST:
                yield partial(exercise, seed, "random", options)


def scenarios_of_shared_passes() -> Iterator[partial[Any]]:
    """Scenarios in which threads take turns within a pass. A deadlock is an error of them."""
    for num_strikes in (1, 2):
        yield partial(interrupt_where_it_waits, num_strikes, 5)
    yield partial(travel, 0, "random", {}, seconds=5)
    for laziness in ("lazy", "eager"):
        yield partial(travel, 0, laziness, {"in_files": True}, seconds=5)


FIRST: list[tuple[int, dict[str, Any]]] = [
    (0, {"is_told_of_edits": False}),
    (0, {"offload_type": "leaf_level"}),
    (0, {"in_files": True, "use_stream": False}),
    (0, {"compress": True}),
    (0, {"compress": True, "in_files": True, "reads_compressed": True}),
    (1, {"in_files": True}),
]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # errors in what weakref.finalize calls
@pytest.mark.parametrize(("owner", "name", "index"), WAITS, ids=[f"{o.__name__}.{n}-{i}" for o, n, i in WAITS])
def test_every_wait_is_needed(owner: Any, name: str, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute does not wait for the copy stream (diffusers #13502); `record_stream` gets the wrong stream (#12673); weights are
    decompressed into a slot that compute still reads."""
    mutant, text = without_wait(owner, name, index)
    monkeypatch.setattr(owner, name, mutant)
    try:
        for _ in range(3):  # threads that read may be done by luck
            for scenario in scenarios_of_shared_passes() if sys.modules[owner.__module__] in SHARED else scenarios():
                scenario()
    except AssertionError:
        return
    finally:
        gc.collect()  # what the mutant left behind is in no state to be used by `free_device_buffers` of later tests
    pytest.fail(f"{owner.__name__}.{name} without `{text}` passed every scenario")
