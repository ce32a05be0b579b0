"""Budgets under a running model: what stays on the device, what is pinned, and that neither is ever exceeded."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from group_offload import disable_group_offload, enable_group_offload
from group_offload.base.tuning import tuning

from ..support.inside import engine_of, wait_until_enqueued
from ..support.models import DIM, Blocks, RoutedModel
from ..support.on_device import Twins, forward, from_file, offload, twin_on
from ..support.processes import run_python
from ..support.reads import watch_file_reads
from ..support.rigs import run
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.speeds import use_speeds
from ..support.tuning import tune

WIDTHS = [64] * 6
MODES: list[dict[str, Any]] = [{}, {"record_stream": True}, {"offload_type": "leaf_level"}]

every_mode = pytest.mark.parametrize("options", MODES, ids=str)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:
    tune(monkeypatch, device_margin_bytes=0)
    use_speeds(monkeypatch, h2d=2, disk=1)  # a simulated second is one thing that ran
    device = SimulatedDevice(0, "random")
    with use_simulated_device(device), watch_file_reads(device):
        yield device


def bytes_of(pair: Twins) -> int:
    return sum(group.num_bytes for group in pair.handle.groups)


def bytes_read_by(pair: Twins) -> int:
    """What was read of the disk, once all that is read ahead was."""
    wait_until_enqueued(pair.handle)
    read = pair.handle.stats().bytes_read
    return read["direct"] + read["page cache"]


def needed(device: SimulatedDevice, resident: RoutedModel, **options: Any) -> tuple[int, int]:
    """Bytes of weights, and the device's peak without a budget."""
    with Twins(device, resident, **options) as pair:
        pair.run(2)
        found = bytes_of(pair), device.peak_bytes_in_use()
    device.reset_peak()
    return found


def all_resident(device: SimulatedDevice, **options: Any) -> Twins:
    """Twins with room for all weights on the device."""
    resident = RoutedModel(WIDTHS).eval()
    pair = Twins(device, resident, vram_budget=sum(needed(device, resident, **options)), **options)
    pair.run(4)
    assert pair.handle.stats().resident_bytes
    return pair


@every_mode
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_a_budget_for_the_device(share: float, options: dict[str, Any], device: SimulatedDevice) -> None:
    """Never more than that, never less sent than it allows, and the same bits (diffusers #10999)."""
    resident = RoutedModel(WIDTHS).eval()
    num_bytes, peak = needed(device, resident, **options)
    budget = peak + int(share * num_bytes)
    with Twins(device, resident, vram_budget=budget, **options) as pair:
        for _ in range(6):
            before = pair.handle.stats().bytes_onloaded["ram"]
            pair.run()
            assert device.peak_bytes_in_use() <= budget
        sent = pair.handle.stats().bytes_onloaded["ram"] - before
        outer = num_bytes - sum(group.num_bytes for group in pair.handle.plan.details.problem.groups)
        assert sent <= num_bytes - outer - pair.handle.stats().resident_bytes
        # Memory that is taken just in time may count twice: among activations, and as slots.
        largest = max(group.num_bytes for group in pair.handle.groups)
        least = share * num_bytes - largest * (4 if options else 1)
        assert pair.handle.stats().resident_bytes >= min(num_bytes - outer, least)


@pytest.mark.parametrize("tier", ["checkpoint", "folder"])
@pytest.mark.parametrize("options", [{}, {"offload_type": "leaf_level"}], ids=str)
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_a_budget_for_ram(
    share: float,
    options: dict[str, Any],
    tier: str,
    device: SimulatedDevice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So much of the files is pinned, after they were read once, and the rest is read past the page cache."""
    tune(monkeypatch, chunk_bytes=8192, small_chunk_bytes=8192)
    resident = RoutedModel([1000] * 8).eval()
    model, files = twin_on(tier, resident, tmp_path)
    num_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    num_bytes += num_bytes // 10  # blobs begin where kernels want them to
    ram_quota_bytes = int(share * num_bytes)
    with Twins(device, model, resident, **options, **files, ram_budget="1GiB", ram_quota_bytes=ram_quota_bytes) as pair:
        for _ in range(4):
            pair.run()
            # A small blob may lie in a page that is pinned for its neighbor.
            assert pair.handle.stats().pinned_bytes <= ram_quota_bytes + 1024 or share == 0
        largest = max(group.num_bytes for group in pair.handle.groups)
        assert pair.handle.stats().pinned_bytes >= min(share * num_bytes - largest - num_bytes // 10, bytes_of(pair))
        ways = {group.read_mode for group in pair.handle.groups if group.num_bytes >= largest // 2}
        assert ways == {0.0: {"direct"}, 0.4: {"direct", "pinned"}, 1.0: {"pinned"}}[share]
        before = bytes_read_by(pair)
        pair.run()
        read = bytes_read_by(pair) - before
        assert read <= (1 - share) * num_bytes + pair.handle.stats().staging_bytes if share < 1 else read == 0


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

    def peak_of(pair: Twins, batch: int) -> int:
        x = torch.randn(batch, DIM)
        device.reset_peak()
        with torch.no_grad(), device.running():
            output = pair.model(device.put(x), device.put(text))
        pair.model.alive.clear()
        assert torch.equal(device.get(output), run(resident, x, text))
        resident.alive.clear()
        return device.peak_bytes_in_use()

    with Twins(device, copy.deepcopy(resident), resident) as pair:
        budget = max(peak_of(pair, 96) for _ in range(2)) + 4096
    with Twins(device, copy.deepcopy(resident), resident, vram_budget=budget) as pair:
        for batch, passes in ((8, 4), (96, 2), (8, 8)):
            assert all(peak_of(pair, batch) <= budget for _ in range(passes))
            assert (pair.handle.stats().resident_bytes > 0) == (batch == 8)
        assert "over vram_budget" not in caplog.text
        peak_of(pair, 500)
        assert "Captioned: peak VRAM was " in caplog.text and "over vram_budget=" in caplog.text


@every_mode
def test_memory_runs_out(options: dict[str, Any], device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else takes device memory, and nobody predicts it: residents give way, and refused calls are repeated
    (diffusers #14304)."""
    with all_resident(device, **options) as pair:
        before, taken = pair.handle.stats().resident_bytes, device.empty(bytes_of(pair))
        device.card.capacity = device.card.allocated.now + 3 * DIM * 4  # room for the input, and no more
        with monkeypatch.context() as patch:
            for name in ("replan", "make_room"):
                patch.setattr(engine_of(pair.handle).placer, name, lambda kind, **_: None)
            pair.run()
            assert device.card.num_refused and pair.handle.stats().resident_bytes < before
        pair.run(3)
        device.free(taken)
        device.card.capacity = 1 << 40
        pair.run(40)  # what was refused is tried again by halves
        assert pair.handle.stats().resident_bytes == before
        refused, device.card.capacity = device.card.num_refused, device.card.allocated.now
        with monkeypatch.context() as patch:  # an input, not only slots and activations
            patch.setattr(device, "bring", lambda tensor, non_blocking: device.empty(tensor.nbytes))
            engine_of(pair.handle)._gates.move_inputs((torch.empty(4096, device="meta"),), {})
        assert device.card.num_refused > refused and pair.handle.stats().resident_bytes < before
        device.card.capacity = 1 << 40
        pair.run()


def test_memory_runs_out_where_nothing_can_be_given_up(device: SimulatedDevice) -> None:
    resident = RoutedModel(WIDTHS).eval()
    _, peak = needed(device, resident)
    with Twins(device, resident, vram_budget=peak) as pair:
        pair.run(2)
        device.card.capacity = device.card.allocated.now + 1
        with pytest.raises(torch.OutOfMemoryError, match="No resident weights of RoutedModel left to evict"):
            pair.run()
        device.card.capacity = 1 << 40
        pair.run()


class Remembering(Blocks):
    """Keeps things between forwards, as caches of videos' frames and of steps do."""

    def __init__(self) -> None:
        super().__init__(*(torch.nn.Linear(64, 64) for _ in range(6)))

    def forward(self, x: torch.Tensor, act: Any = None, **kwargs: Any) -> torch.Tensor:
        x = super().forward(x)
        if act is not None:
            act(self, x, kwargs)
        return x


def call(device: SimulatedDevice, model: Remembering, act: Any = None, **kwargs: Any) -> None:
    with torch.no_grad(), device.running():
        model(device.put(torch.zeros(2, 64)), act, **kwargs)


def test_a_forward_that_keeps_things(device: SimulatedDevice) -> None:
    """A cache of frames that a video's VAE hands from one call to the next takes memory once, with a budget too. A forward that
    ran out of memory does not run again: what it has counted, drawn or kept until then it would count, draw or keep twice."""
    model = Remembering().eval()
    handle = offload(model, vram_budget="1GiB")
    cache, calls = [torch.zeros(64)], []

    def replace_and_look(model: Remembering, x: torch.Tensor, kwargs: Any) -> None:
        before = weakref.ref(kwargs["cache"][0])
        kwargs["cache"][0] = torch.ones(64)
        assert before() is None

    def fail(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("there is no more")

    for _ in range(5):
        call(device, model, replace_and_look, cache=cache)
    assert handle.stats().resident_bytes
    message = r"there is no more Evicted .* of resident weights: call Remembering again"
    with pytest.raises(torch.OutOfMemoryError, match=message):
        call(device, model, fail, cache=cache)
    assert len(calls) == 1 and not handle.stats().resident_bytes
    call(device, model, fail, cache=cache)
    assert len(calls) == 2
    handle.remove()


def test_ram_that_others_need(
    device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Pinned files are given up, a part at a time, and read instead. The system is asked at most once a second."""
    resident, looks = RoutedModel([1000] * 8).eval(), list[int]()
    model, files = twin_on("checkpoint", resident, tmp_path)
    with Twins(device, model, resident, **files, ram_budget="1GiB", ram_quota_bytes=1 << 20) as pair:
        pair.run(3)
        monkeypatch.setattr(
            "group_offload.runtime.transfers.page_cache_pins.available_ram", lambda: looks.append(1) or 1000
        )
        assert tuning().relief_seconds == 1
        tune(monkeypatch, relief_seconds=1000)
        pair.run(3)
        assert len(looks) <= 1
        pinned = [pair.handle.stats().pinned_bytes]
        tune(monkeypatch, relief_seconds=0)
        for _ in range(3):
            pair.run()
            pinned.append(pair.handle.stats().pinned_bytes)
        assert pinned == sorted(pinned, reverse=True) and pinned[0] > pinned[1] > pinned[3]
        assert "Low on RAM" in caplog.text


def test_four_gib_in_one(tmp_path: Path) -> None:
    """The CPU computes: RSS stays within the budget, and what room there is keeps weights between forwards."""
    done = run_python(
        """
        import json
        from safetensors.torch import load_file
        torch.set_num_threads(2)
        size = 4096 * 4096 * 4
        header = {
            f"blocks.{i}.weight": {"dtype": "F32", "shape": [4096, 4096], "data_offsets": [i * size, (i + 1) * size]}
            for i in range(64)
        }
        text = json.dumps(header).encode().ljust(8192)
        with open(sys.argv[1], "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + 64 * size)  # zeros take nothing of the disk
        model = Blocks(*(nn.Linear(4096, 4096, bias=False, device="meta") for _ in range(64))).requires_grad_(False)
        model.load_state_dict(load_file(sys.argv[1]), assign=True)
        handle = apply_group_offloading(model, "cpu", offload_device="disk", ram_budget="1GiB")
        for _ in range(3):
            y = model(torch.ones(1, 4096))
        assert not y.any()
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
    monkeypatch.setattr("group_offload.plan.ram_split.ram_in_use", lambda: ram["now"])
    return ram


def budget_for(num_bytes: int) -> int:
    """A budget for RAM that leaves so much for weights in files."""
    return RAM_WITHOUT_WEIGHTS + tuning().reading_bytes + tuning().ram_margin_bytes + num_bytes


def pinned_memory(pair: Twins) -> int:
    return sum(blob.layout.num_bytes for blob in engine_of(pair.handle).placer._files.blobs if blob.is_pinned)


def test_a_module_that_is_cut_again_keeps_its_ram(device: SimulatedDevice, ram: dict[str, int], tmp_path: Path) -> None:
    """By then the process has taken what weights are read into, pages that it has pinned, and whatever else it needs."""
    resident = RoutedModel(WIDTHS).eval()
    model, files = twin_on("checkpoint", resident, tmp_path)
    with Twins(device, model, resident, ram_budget=budget_for(20_000), **files) as pair:
        pair.run(3)
        pinned = pinned_memory(pair)
        assert pinned > 10_000
        ram["now"] += 1 << 30
        for twin in (model, resident):
            twin.blocks[0].register_parameter("extra", torch.nn.Parameter(torch.ones(3)))
        pair.run(4)
        assert pair.handle.stats().rebuilds == 1 and 0.7 * pinned <= pinned_memory(pair) <= 30_000  # whole pages


def test_one_budget_for_ram_is_for_all_modules(device: SimulatedDevice, ram: dict[str, int], tmp_path: Path) -> None:
    """Else pinned memory freezes the system."""
    pairs: list[Twins] = []
    for number in range(2):
        resident = RoutedModel([640] * 6).eval()
        model = from_file(resident, tmp_path / f"{number}.safetensors")
        whole = sum(parameter.nbytes for parameter in model.parameters())
        budget = budget_for(whole + 20_000) + tuning().reading_bytes
        pairs.append(Twins(device, model, resident, offload_device="disk", ram_budget=budget))
        ram["now"] += tuning().reading_bytes  # and for weights the first one leaves 20,000 bytes at most
    for _ in range(4):
        for pair in pairs:
            pair.run()
    assert pinned_memory(pairs[0]) >= whole and pinned_memory(pairs[1]) <= 60_000 < whole
    for pair in pairs:
        pair.handle.remove()
    ram["now"] = RAM_WITHOUT_WEIGHTS
    with Twins(device, model, resident, offload_device="disk", ram_budget=budget_for(whole + 20_000)) as again:
        again.run(4)
        assert pinned_memory(again) >= whole


def test_a_ram_budget_that_an_error_names_works(tmp_path: Path) -> None:
    """What was tried before leaves nothing in RAM, and weights that get files need none."""
    done = run_python(
        """
        import gc, re
        gc.disable()
        model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(16)))
        budget = 1 << 20
        for _ in range(5):  # the process itself takes a little more, now and then
            try:
                apply_group_offloading(model, "cpu", ram_budget=budget, offload_to_disk_path=sys.argv[1])
                break
            except ConfigError as error:
                assert "without a file" not in str(error), error
                budget = re.search(r"at least ([0-9.]+ [A-Za-z]+)", str(error))[1]
        else:
            raise AssertionError(budget)
        model(torch.zeros(1, 2048))
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_a_pipeline(device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two denoisers of one class, and an encoder that runs once: both budgets hold for all of them together."""
    monkeypatch.setattr(
        "group_offload.integrations.ram_split.ram_for_weights", lambda budget, in_ram, staging, **_: ram
    )
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
        x = torch.randn(2, DIM)
        output = forward(device, models[name], x)
        models[name].alive.clear()
        assert torch.equal(device.get(output), run(residents[name], x))
        residents[name].alive.clear()
        assert device.peak_bytes_in_use() <= vram
        assert sum(handle.stats().pinned_bytes for handle in handles.values()) <= ram
    # What runs most often for an image has RAM first, and both alike.
    shares = {name: handle.config.ram_quota_bytes for name, handle in handles.items()}
    assert shares["text_encoder"] < shares["transformer"] == shares["transformer_2"]
    disable_group_offload(pipeline)
    share = f"{vram / device.total_bytes():%}"  # as a part of the device's memory
    handles = enable_group_offload(pipeline, "cpu", offload_device="disk", vram_budget=share, ram_budget="4GiB")
    assert {name: handle.config.ram_quota_bytes for name, handle in handles.items()} == shares
    disable_group_offload(pipeline)
    assert device.pinned_bytes == 0
