"""Budgets under a running model: what stays on the device, what is page-locked, and that neither is ever exceeded."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from group_offload import (
    ConfigError,
    OffloadHandle,
    api,
    disable_group_offload,
    enable_group_offload,
)
from group_offload.base.tuning import tuning
from group_offload.config import ModelOptions, OffloadConfig
from group_offload.plan import speeds
from group_offload.runtime.budget.budgeter import Budgeter
from group_offload.runtime.sharing.crew import Trial

from ..support.inside import engine_of, wait_until_enqueued
from ..support.models import DIM, RoutedModel
from ..support.on_device import exercise, forward, from_file
from ..support.processes import run_python
from ..support.reads import watch_file_reads
from ..support.rigs import run
from ..support.simulated import SimulatedDevice, SimulatedEvent, SimulatedStream, use_simulated_device
from ..support.speeds import KNOWN_SPEEDS
from ..support.tuning import tune

WIDTHS = [64] * 6
MODES: list[dict[str, Any]] = [{}, {"record_stream": True}, {"offload_type": "leaf_level"}]

every_mode = pytest.mark.parametrize("options", MODES, ids=str)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:
    tune(monkeypatch, device_margin_bytes=0)
    slow = replace(KNOWN_SPEEDS, h2d=2, drive=1)  # a simulated second is one thing that ran
    monkeypatch.setattr("group_offload.runtime.budget.budgeter.known_speeds", lambda *args, **options: slow)
    device = SimulatedDevice(0, "random")
    with use_simulated_device(device), watch_file_reads(device):
        yield device


def weight_bytes(handle: OffloadHandle) -> int:
    return sum(group.num_bytes for group in handle.groups)


def check(device: SimulatedDevice, model: Any, resident: RoutedModel, *, batch: int = 2, passes: int = 1) -> None:
    for _ in range(passes):
        x = torch.randn(batch, DIM)
        output = forward(device, model, x)
        model.alive.clear()
        assert torch.equal(device.get(output), run(resident, x))
        resident.alive.clear()


def offload(model: Any, *, ram_share: int | None = None, **options: Any) -> OffloadHandle:
    return api.offload(
        model, OffloadConfig.from_options(ModelOptions(onload_device="cpu", **options), model, ram_share=ram_share)
    )


def offloaded(resident: RoutedModel, **options: Any) -> tuple[RoutedModel, OffloadHandle]:
    model = copy.deepcopy(resident)
    return model, offload(model, **options)


def needed(device: SimulatedDevice, resident: RoutedModel, **options: Any) -> tuple[int, int]:
    """Bytes of weights, and the device's peak without a budget."""
    model, handle = offloaded(resident, **options)
    num_bytes = weight_bytes(handle)
    check(device, model, resident, passes=2)
    peak = device.peak_bytes_in_use()
    handle.remove()
    device.synchronize()
    device.reset_peak()
    return num_bytes, peak


def all_resident(device: SimulatedDevice, **options: Any) -> tuple[RoutedModel, RoutedModel, OffloadHandle]:
    """A resident model, its offloaded twin with room for all of it on the device, and the handle of that."""
    resident = RoutedModel(WIDTHS).eval()
    num_bytes, peak = needed(device, resident, **options)
    model, handle = offloaded(resident, vram_budget=peak + num_bytes, **options)
    check(device, model, resident, passes=4)
    assert handle.stats().resident_bytes
    return resident, model, handle


def nothing_is_foreseen(handle: OffloadHandle) -> None:
    """Else groups are given up before device memory runs out."""
    for name in ("replan", "make_room"):
        setattr(engine_of(handle).placer, name, lambda kind, **_: None)


@every_mode
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_a_budget_for_the_device(share: float, options: dict[str, Any], device: SimulatedDevice) -> None:
    """Never more than that, never less sent than it allows, and the same bits (diffusers #10999)."""
    resident = RoutedModel(WIDTHS).eval()
    num_bytes, peak = needed(device, resident, **options)
    budget = peak + int(share * num_bytes)
    model, handle = offloaded(resident, vram_budget=budget, **options)
    sent = []
    for _ in range(6):
        before = handle.stats().bytes_onloaded["ram"]
        check(device, model, resident)
        assert device.peak_bytes_in_use() <= budget
        sent.append(handle.stats().bytes_onloaded["ram"] - before)
    resident_bytes = handle.stats().resident_bytes
    outer = num_bytes - sum(group.num_bytes for group in handle.plan.details.problem.groups)
    assert sent[-1] <= num_bytes - outer - resident_bytes
    # Memory that is taken just in time may count twice: among activations, and as slots.
    largest = max(group.num_bytes for group in handle.groups)
    assert resident_bytes >= min(num_bytes - outer, share * num_bytes - largest * (4 if options else 1))
    handle.remove()
    assert device.pinned_bytes == 0 and device.allocated_bytes == 0


@pytest.mark.parametrize("tier", ["checkpoint", "folder"])
@pytest.mark.parametrize("options", [{}, {"offload_type": "leaf_level"}], ids=str)
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_a_budget_for_ram(
    share: float, options: dict[str, Any], tier: str, device: SimulatedDevice, tmp_path: Path
) -> None:
    """So much of the files is page-locked, after they were read once, and the rest is read past the page cache."""
    resident = RoutedModel([1000] * 8).eval()
    model, options = place(resident, tier, tmp_path, options)
    num_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    num_bytes += num_bytes // 10  # blobs begin where kernels want them to
    handle = offload(model, **options, ram_budget="1GiB", ram_share=int(share * num_bytes))
    outer = num_bytes // 10
    for _ in range(4):
        check(device, model, resident)
        # A small blob may lie in a page that is locked for its neighbour.
        assert handle.stats().pinned_bytes <= share * num_bytes + 1024 or share == 0
    pinned = handle.stats().pinned_bytes
    largest = max(group.num_bytes for group in handle.groups)
    assert pinned >= min(share * num_bytes - largest - outer, weight_bytes(handle))
    ways = {group.way for group in handle.groups if group.num_bytes >= largest // 2}
    assert ways == {0.0: {"direct"}, 0.4: {"direct", "locked"}, 1.0: {"locked"}}[share]
    before = handle.stats()
    check(device, model, resident)
    wait_until_enqueued(handle)
    after = handle.stats()
    read = sum(after.bytes_read[way] - before.bytes_read[way] for way in ("direct", "page cache"))
    assert read <= (1 - share) * num_bytes + after.staging_bytes if share < 1 else read == 0
    handle.remove()
    assert device.pinned_bytes == 0 and device.allocated_bytes == 0


def place(resident: RoutedModel, tier: str, folder: Path, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if tier == "checkpoint":
        return from_file(resident, folder / "model.safetensors"), {**options, "offload_device": "disk"}
    return copy.deepcopy(resident), {**options, "offload_to_disk_path": folder}


def check_at_rest(model: RoutedModel, resident: RoutedModel) -> None:
    state = resident.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_larger_inputs_evict_no_more_than_they_can_need(device: SimulatedDevice) -> None:
    """That is the square of what smaller inputs needed. Only where nothing is known yet, all that stays is evicted."""
    resident = RoutedModel(WIDTHS).eval()
    model, handle = offloaded(resident, vram_budget=1 << 30)
    kept = []
    for batch in (2, 2, 2, 4, 7):
        check(device, model, resident, batch=batch)
        kept.append(handle.stats().resident_bytes)
    assert kept[0] == 0 < kept[1] == kept[3] == kept[4]
    handle.remove()


class Captioned(RoutedModel):
    """If it attends, activations grow with the square of the tokens."""

    attends = False

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward((x[:, None] * x[None]).relu().mean(1) if self.attends else x + text.mean())


@pytest.mark.parametrize("attends", [False, True])
def test_more_tokens_beside_a_long_text(
    attends: bool, device: SimulatedDevice, caplog: pytest.LogCaptureFixture
) -> None:
    """Of all elements that go in those of the image are few. Larger inputs find nothing in their way, whatever grows."""
    torch.manual_seed(0)
    resident, text = Captioned(WIDTHS).eval(), torch.randn(500, DIM)
    resident.attends = attends

    def peak_of(model: nn.Module, batch: int) -> int:
        x = torch.randn(batch, DIM)
        device.reset_peak()
        with torch.no_grad(), device.running():
            output = model(device.put(x), device.put(text))
        model.alive.clear()  # type: ignore[operator, union-attr]
        assert torch.equal(device.get(output), run(resident, x, text))
        resident.alive.clear()
        return device.peak_bytes_in_use()

    model = copy.deepcopy(resident)
    handle = offload(model)
    budget = max(peak_of(model, 96) for _ in range(2)) + 4096
    handle.remove()
    model = copy.deepcopy(resident)
    handle = offload(model, vram_budget=budget)
    for batch, passes in ((8, 4), (96, 2), (8, 8)):
        assert all(peak_of(model, batch) <= budget for _ in range(passes))
        assert (handle.stats().resident_bytes > 0) == (batch == 8)
    assert "over vram_budget" not in caplog.text
    peak_of(model, 500)
    assert "Captioned: peak VRAM was " in caplog.text and "over vram_budget=" in caplog.text
    handle.remove()


@every_mode
def test_memory_runs_out(options: dict[str, Any], device: SimulatedDevice) -> None:
    """Somebody else takes device memory, and nobody foresees it: residents give way, and refused calls are repeated
    (diffusers #14304)."""
    resident, model, handle = all_resident(device, **options)
    before = handle.stats().resident_bytes
    taken = device.empty(weight_bytes(handle))
    device.capacity = device.total.now + 2 * DIM * 4  # room for the input, and no more
    nothing_is_foreseen(handle)
    check(device, model, resident)
    assert device.card.num_refused and handle.stats().resident_bytes < before
    for name in ("replan", "make_room"):
        delattr(engine_of(handle).placer, name)
    model.alive.clear()
    resident.alive.clear()
    check(device, model, resident, passes=3)
    device.free(taken)
    device.capacity = 1 << 40
    check(device, model, resident, passes=40)  # what was refused is tried again by halves
    assert handle.stats().resident_bytes == before
    handle.remove()
    check_at_rest(model, resident)


@pytest.mark.parametrize("what", ["a trial of links", "a measurement", "an input"])
def test_residents_give_way_to_all_that_the_package_takes(
    what: str, device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only to slots (`test_give_way.py` has the rest). Nothing fails for want of memory that a resident has."""
    resident, model, handle = all_resident(device)
    before, device.capacity = handle.stats().resident_bytes, device.total.now
    if what == "a trial of links":
        tune(monkeypatch, share_trial_bytes=1 << 13)
        peers = SimpleNamespace(place_of=lambda each: (1, 0), start_of=lambda each: 0, handle_of=lambda each: "")
        assert Trial(device, 0, 2, peers).memory.numel() == 1 << 13  # type: ignore[arg-type]
    elif what == "an input":
        monkeypatch.setattr(device, "bring", lambda tensor, non_blocking: device.empty(tensor.nbytes))
        engine_of(handle)._gates.move_inputs((torch.empty(4096, device="meta"),), {})
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        link = speeds.measure_link
        monkeypatch.setattr(
            speeds, "measure_link", lambda backend, num_bytes, **options: link(backend, 4096, **options)
        )
        monkeypatch.setattr("group_offload.runtime.budget.budgeter.known_speeds", speeds.known_speeds)
        other = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4))).requires_grad_(False)
        offload(other, vram_budget="1GiB").remove()
    assert device.card.num_refused and handle.stats().resident_bytes < before
    device.capacity = 1 << 40
    check(device, model, resident)
    handle.remove()


def test_memory_runs_out_where_nothing_can_be_given_up(device: SimulatedDevice) -> None:
    resident = RoutedModel(WIDTHS).eval()
    _, peak = needed(device, resident)
    model, handle = offloaded(resident, vram_budget=peak)
    check(device, model, resident, passes=2)
    device.capacity = device.total.now + 1
    with pytest.raises(torch.OutOfMemoryError, match="No resident weights of RoutedModel left to evict"):
        check(device, model, resident)
    device.capacity = 1 << 40
    model.alive.clear()
    check(device, model, resident)
    handle.remove()


class Remembering(torch.nn.Module):
    """Keeps things between forwards, as caches of videos' frames and of steps do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor, act: Any = None, **kwargs: Any) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        if act is not None:
            act(self, x, kwargs)
        return x


def call(device: SimulatedDevice, model: Remembering, act: Any = None, **kwargs: Any) -> None:
    with torch.no_grad(), device.running():
        model(device.put(torch.zeros(2, 64)), act, **kwargs)


def test_a_forward_that_ran_out_of_memory_does_not_run_again(device: SimulatedDevice) -> None:
    """What it has counted, drawn or kept until then it would count, draw or keep twice."""
    model = Remembering().eval()
    handle = offload(model, vram_budget="1GiB")
    calls = []

    def fail(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("there is no more")

    for _ in range(4):
        call(device, model)
    assert handle.stats().resident_bytes
    message = r"there is no more Evicted .* of resident weights: call Remembering again"
    with pytest.raises(torch.OutOfMemoryError, match=message):
        call(device, model, fail)
    assert len(calls) == 1 and not handle.stats().resident_bytes
    call(device, model, fail)
    assert len(calls) == 2
    handle.remove()


def test_what_a_forward_replaces_is_freed(device: SimulatedDevice) -> None:
    """A cache of frames that a video's VAE hands from one call to the next takes memory once, with a budget too."""
    model = Remembering().eval()
    handle = offload(model, vram_budget="1GiB")
    cache = [torch.zeros(64)]

    def replace_and_look(model: Remembering, x: torch.Tensor, kwargs: Any) -> None:
        before = weakref.ref(kwargs["cache"][0])
        kwargs["cache"][0] = torch.ones(64)
        assert before() is None

    for _ in range(5):
        call(device, model, replace_and_look, cache=cache)
    assert handle.stats().resident_bytes
    handle.remove()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vram_budget": "1000B"}, "vram_budget=1000 B is too small for RoutedModel: its device buffers alone need"),
        ({"vram_budget": "lots"}, "vram_budget='lots'.*'8GiB'"),
        ({"ram_budget": "1KiB"}, "ram_budget=1 KiB is too small.*for Python, torch and the driver"),
        ({"vram_budget": "1GiB", "low_cpu_mem_usage": True}, "can.t be combined with low_cpu_mem_usage=True"),
    ],
    ids=str,
)
def test_bad_budgets(options: dict[str, Any], message: str, device: SimulatedDevice) -> None:
    """A clear error, and the module is as it was."""
    resident = RoutedModel(WIDTHS).eval()
    model = copy.deepcopy(resident)
    with pytest.raises(ConfigError, match=message):
        offload(model, **options)
    assert device.pinned_bytes == 0
    check_at_rest(model, resident)
    offload(model).remove()


def test_a_budget_larger_than_the_device(device: SimulatedDevice, caplog: pytest.LogCaptureFixture) -> None:
    device.capacity = 1 << 30
    model = RoutedModel(WIDTHS).eval()
    handle = offload(model, vram_budget="4GiB")
    assert handle.config.vram_budget == 1 << 30 and "exceeds the device" in caplog.text
    handle.remove()


@pytest.mark.parametrize("options", MODES[:2], ids=str)  # at leaf level this model's blocks have weights of their own
def test_groups_that_stay_put_nothing_between_kernels(
    options: dict[str, Any], device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event takes its time there: how many a pass records does not depend on how many groups stay."""
    num_recorded = 0
    record = SimulatedEvent.record

    def count(event: SimulatedEvent, stream: SimulatedStream) -> None:
        nonlocal num_recorded
        num_recorded += 1
        record(event, stream)

    def recorded(widths: list[int]) -> int:
        resident = RoutedModel(widths)
        num_bytes, peak = needed(device, resident, **options)
        model, handle = offloaded(resident, vram_budget=peak + num_bytes, **options)
        check(device, model, resident, passes=6)
        sent, before = handle.stats().onloads, num_recorded
        check(device, model, resident)
        assert handle.stats().onloads == sent
        found = num_recorded - before
        handle.remove()
        return found

    monkeypatch.setattr(SimulatedEvent, "record", count)
    assert recorded(WIDTHS) == recorded(WIDTHS * 2) > 0


def test_ram_that_others_need(
    device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Page-locked files are given up, a part at a time, and read instead. The system is asked at most once a second."""
    resident = RoutedModel([1000] * 8).eval()
    model, options = place(resident, "checkpoint", tmp_path, {})
    handle = offload(model, **options, ram_budget="1GiB", ram_share=1 << 20)
    check(device, model, resident, passes=3)
    num_looks = 0

    def available_ram() -> int:
        nonlocal num_looks
        num_looks += 1
        return 1000

    monkeypatch.setattr("group_offload.runtime.copies.cached.available_ram", available_ram)
    assert tuning().relief_seconds == 1
    tune(monkeypatch, relief_seconds=100)
    check(device, model, resident, passes=3)
    assert num_looks <= 1
    before = handle.stats().pinned_bytes
    assert before > 0
    tune(monkeypatch, relief_seconds=0)
    pinned = [before]
    for _ in range(3):
        check(device, model, resident)
        pinned.append(handle.stats().pinned_bytes)
    assert pinned == sorted(pinned, reverse=True) and 0 < pinned[1] < before and pinned[3] < pinned[1]
    assert "Low on RAM" in caplog.text
    handle.remove()
    assert device.pinned_bytes == 0


@pytest.mark.parametrize("seed", range(10))
def test_budgets_whatever_happens(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routes that change, exceptions, edits (that the system tells of, or not), two streams, two models that take turns."""
    tune(monkeypatch, device_margin_bytes=0)
    slow = replace(KNOWN_SPEEDS, h2d=2, drive=1)
    monkeypatch.setattr("group_offload.runtime.budget.budgeter.known_speeds", lambda *args, **options: slow)
    rng = random.Random(seed)
    options = {
        **rng.choice(MODES),
        "vram_budget": rng.choice([20_000, 40_000, 1 << 20]),
        **rng.choice([{}, {"in_files": True}, {"in_checkpoint": True}, {"is_told_of_edits": False}]),
    }
    exercise(seed, rng.choice(["random", "lazy", "eager"]), options, num_passes=8)


def test_four_gib_in_one(tmp_path: Path) -> None:
    """The CPU computes: RSS stays within the budget, and what room there is keeps weights between forwards."""
    done = run_python(
        """
        import json
        from safetensors.torch import load_file
        torch.set_num_threads(2)
        size, names = 4096 * 4096 * 4, [f"layers.{index}.weight" for index in range(64)]
        header = {
            name: {"dtype": "F32", "shape": [4096, 4096], "data_offsets": [i * size, (i + 1) * size]}
            for i, name in enumerate(names)
        }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(sys.argv[1], "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for index in range(64):  # one weight, and holes: the file takes little of the drive
                file.seek(8 + len(text) + index * size)
                file.write(torch.tensor(1.5 - index % 2).numpy().tobytes())
            file.truncate(8 + len(text) + 64 * size)
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(4096, 4096, bias=False, device="meta") for _ in range(64))
            def forward(self, x):
                for layer in self.layers:
                    x = layer(x)
                return x
        model = Model().requires_grad_(False)
        model.load_state_dict(load_file(sys.argv[1]), assign=True)
        handle = apply_group_offloading(model, "cpu", offload_device="disk", ram_budget="1GiB")
        for _ in range(3):
            y = model(torch.ones(1, 4096))
        expected = torch.ones(())
        for index in range(64):
            expected = expected * (1.5 - index % 2)
        assert y[0, 0].item() == expected.item() and y.count_nonzero() == 1
        peak = next(int(l.split()[1]) << 10 for l in open("/proc/self/status") if l.startswith("VmHWM"))
        assert peak <= 1 << 30 and handle.stats().resident_bytes >= 64 << 20, (peak, handle.stats())
        """,
        tmp_path / "model.safetensors",
    )
    assert done.returncode == 0, done.stderr[-2000:]


RAM_WITHOUT_WEIGHTS = 200 << 20


@pytest.fixture
def ram(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What the process takes besides weights: now."""
    gc.collect()  # what other tests left behind has been promised RAM
    ram = {"now": RAM_WITHOUT_WEIGHTS}
    monkeypatch.setattr("group_offload.plan.ram_shares.ram_in_use", lambda: ram["now"])
    return ram


def budget_for(num_bytes: int) -> int:
    """A budget for RAM that leaves so much for weights in files."""
    return RAM_WITHOUT_WEIGHTS + tuning().reading_bytes + tuning().ram_margin_bytes + num_bytes


def locked_bytes(handle: OffloadHandle) -> int:
    return sum(blob.layout.num_bytes for blob in engine_of(handle)._files.blobs if blob.is_locked)


@pytest.mark.parametrize("where", ["checkpoint", "folder"])
def test_a_module_that_is_cut_again_keeps_its_ram(
    where: str, device: SimulatedDevice, ram: dict[str, int], tmp_path: Path
) -> None:
    """By then the process has taken what weights are read into, pages that it has locked, and whatever else it needs."""
    resident = RoutedModel(WIDTHS).eval()
    model, options = place(resident, where, tmp_path, {})
    handle = offload(model, ram_budget=budget_for(20_000), **options)
    check(device, model, resident, passes=3)
    locked = locked_bytes(handle)
    assert locked > 10_000
    ram["now"] += 1 << 30
    for twin in (model, resident):
        twin.blocks[0].register_parameter("extra", torch.nn.Parameter(torch.ones(3)))
    check(device, model, resident, passes=4)
    assert handle.stats().rebuilds == 1 and 0.7 * locked <= locked_bytes(handle) <= 30_000  # whole pages
    handle.remove()
    check_at_rest(model, resident)


def test_one_budget_for_ram_is_for_all_modules(device: SimulatedDevice, ram: dict[str, int], tmp_path: Path) -> None:
    """Else page-locked memory freezes the system."""
    models, residents, handles = [], [], []
    for number in range(2):
        residents.append(RoutedModel([640] * 6).eval())
        models.append(from_file(residents[-1], tmp_path / f"{number}.safetensors"))
    whole = sum(parameter.nbytes for parameter in models[0].parameters())
    for model in models:
        budget = budget_for(whole + 20_000) + tuning().reading_bytes
        handles.append(offload(model, offload_device="disk", ram_budget=budget))
        ram["now"] += tuning().reading_bytes  # and for weights the first one leaves 20,000 bytes at most
    for _ in range(4):
        for model, resident in zip(models, residents, strict=True):
            check(device, model, resident)  # type: ignore[arg-type]
    assert locked_bytes(handles[0]) >= whole and locked_bytes(handles[1]) <= 60_000 < whole
    handles[0].remove()
    handles[1].remove()
    ram["now"] = RAM_WITHOUT_WEIGHTS
    again = offload(models[1], offload_device="disk", ram_budget=budget_for(whole + 20_000))
    check(device, models[1], residents[1], passes=4)
    assert locked_bytes(again) >= whole
    again.remove()


@pytest.mark.parametrize(
    ("vram", "ram", "chunk_bytes", "schedule"),
    [(0.25, 0.25, None, "eager"), (0.25, 0.25, None, "lazy"), (0.27, 0.45, 8192, "eager"), (0.55, 0.45, 8192, "lazy")],
)
def test_three_tiers_read_each_group_of_the_drive_once(
    vram: float, ram: float, chunk_bytes: int | None, schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read ahead is what has to be read: not given up for what rests in RAM, and nothing that is locked there by now.

    With small chunks one group alone takes all frames, as large ones do.
    """
    tune(monkeypatch, device_margin_bytes=0)
    if chunk_bytes is not None:
        tune(monkeypatch, chunk_bytes=chunk_bytes, small_chunk_bytes=chunk_bytes)
    resident = RoutedModel([1296] * 6 + [540] * 12).eval()
    with use_simulated_device(SimulatedDevice(0, schedule)) as device:
        model, options = place(resident, "checkpoint", tmp_path, {})
        num_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
        shares = {"vram_budget": int(num_bytes * vram), "ram_share": int(num_bytes * ram)}
        handle = offload(model, **options, ram_budget="1GiB", **shares)
        check(device, model, resident, passes=6)
        monkeypatch.setattr(
            Budgeter, "before_pass", lambda *args: False
        )  # on a busy machine the plan may go on changing
        check(device, model, resident)
        wait_until_enqueued(handle)
        before, details = handle.stats().bytes_read, handle.plan.details
        check(device, model, resident, passes=4)
        wait_until_enqueued(handle)
        after = handle.stats().bytes_read
        handle.remove()
    assert details is not None and {place.value for place in details.placements} == {"device", "ram", "file"}
    planned = list(zip(details.problem.groups, details.placements, strict=True))
    on_drive = sum(group.num_bytes for group, place in planned if place.value == "file")
    read = sum(after[way] - before[way] for way in ("direct", "page cache"))
    largest = max(group.num_bytes for group, _ in planned)
    assert abs(read - 4 * on_drive) <= 4 * 4096 + largest  # of the next pass more, or less, is read already


def test_a_ram_budget_that_an_error_names_works(tmp_path: Path) -> None:
    """What was tried before leaves nothing in RAM, and weights that get files need none: for a model and a pipeline."""
    done = run_python(
        """
        import gc, re
        from types import SimpleNamespace
        gc.disable()
        offloads = (
            lambda model, **options: apply_group_offloading(model, "cpu", **options),
            lambda model, **options: enable_group_offload(SimpleNamespace(components={"unet": model}), "cpu", **options),
        )
        for number, offload in enumerate(offloads):
            model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(16)))
            budget = 1 << 20
            for _ in range(5):  # the process itself takes a little more, now and then
                try:
                    offload(model, ram_budget=budget, offload_to_disk_path=f"{sys.argv[1]}/{number}")
                    break
                except ConfigError as error:
                    assert "without a file" not in str(error), error
                    found = re.search(r"at least ([0-9.]+ [A-Za-z]+)", str(error))
                    budget = found[1]
            else:
                raise AssertionError(budget)
            model(torch.zeros(1, 2048))
            remove_group_offloading(model)
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_a_pipeline(device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two denoisers of one class, and an encoder that runs once: both budgets hold for all of them together."""
    monkeypatch.setattr("group_offload.integrations.sharing.ram_for_weights", lambda budget, in_ram, staging, **_: ram)
    residents = {
        "text_encoder": RoutedModel([300] * 6).eval(),
        "transformer": RoutedModel([500] * 6).eval(),
        "transformer_2": RoutedModel([500] * 6).eval(),
    }
    models = {name: from_file(model, tmp_path / f"{name}.safetensors") for name, model in residents.items()}
    num_bytes = {name: sum(t.nbytes for t in model.state_dict().values()) for name, model in models.items()}
    ram, vram = num_bytes["transformer"], int(num_bytes["transformer"] * 0.7)
    pipeline = SimpleNamespace(components=models)
    handles = enable_group_offload(pipeline, "cpu", offload_device="disk", vram_budget=vram, ram_budget="4GiB")
    for name in ("text_encoder", *["transformer"] * 4, *["transformer_2"] * 4, "transformer", "text_encoder"):
        check(device, models[name], residents[name])
        assert device.peak_bytes_in_use() <= vram
        assert sum(handle.stats().pinned_bytes for handle in handles.values()) <= ram
    # What runs most often for an image has RAM first, and both alike.
    shares = {name: handle.config.ram_share for name, handle in handles.items()}
    assert shares["text_encoder"] < shares["transformer"] == shares["transformer_2"]
    disable_group_offload(pipeline)
    assert device.pinned_bytes == 0
