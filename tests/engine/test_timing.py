"""How long steps take where copies and compute take the times of a real machine: bars, and what was predicted.

The model has the proportions of FLUX.1 (19 blocks, then 38 that are less than half as large), at a thousandth of its bytes;
the link and the blocks take what they take on one H200.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from group_offload import (
    OffloadHandle,
    apply_group_offloading,
    disable_group_offload,
    enable_group_offload,
    write_report,
)
from group_offload.base.text import describe_seconds
from group_offload.base.tuning import tuning
from group_offload.plan.budgets import describe_bytes

from ..support.pages import Page
from ..support.simulated import use_simulated_device
from ..support.speeds import use_speeds
from ..support.timed import TimedDevice
from ..support.tuning import tune

SCALE = 1024
LINK = 55.2e9 / SCALE
DOUBLE, SINGLE, REST = (num_bytes // SCALE for num_bytes in (679_600_000, 283_200_000, 110_000_000))
DOUBLE_SECONDS, SINGLE_SECONDS, REST_SECONDS = 0.00334, 0.00289, 0.0005
COMPUTE = 19 * DOUBLE_SECONDS + 38 * SINGLE_SECONDS + REST_SECONDS


_device: TimedDevice = None  # type: ignore[assignment]
"""What layers compute on. It is no state of theirs: a module that keeps such things could not be told to be unchanged."""


class Timed(nn.Module):
    def __init__(self, num_bytes: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_bytes // 2, dtype=torch.bfloat16), requires_grad=False)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _device.compute(self.seconds)
        return x


class Flux(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rest = Timed(REST, REST_SECONDS)
        self.doubles = nn.ModuleList(Timed(DOUBLE, DOUBLE_SECONDS) for _ in range(19))
        self.singles = nn.ModuleList(Timed(SINGLE, SINGLE_SECONDS) for _ in range(38))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.rest(x)
        for block in (*self.doubles, *self.singles):
            x = block(x)
        return x


TOTAL = sum(parameter.nbytes for parameter in Flux().parameters())


@pytest.fixture(autouse=True)
def _sizes_are_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("max_run_bytes", "max_joined_bytes", "resident_bytes", "device_margin_bytes", "strip_bytes")
    tune(monkeypatch, **{name: getattr(tuning(), name) // SCALE for name in names})


def a_device(monkeypatch: pytest.MonkeyPatch) -> TimedDevice:
    device = TimedDevice(LINK)
    use_speeds(monkeypatch, h2d=int(LINK), decompress=int(device.decompressed_bytes_per_second))
    monkeypatch.setattr(f"{__name__}._device", device)
    return device


@contextmanager
def offloaded(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[tuple[TimedDevice, Flux, OffloadHandle]]:
    tune(monkeypatch, min_compressed_bytes=tuning().min_compressed_bytes // SCALE)
    device, model = a_device(monkeypatch), Flux()
    with use_simulated_device(device):  # type: ignore[arg-type]
        handle = apply_group_offloading(model, "cpu", **options)
        yield device, model, handle
        handle.remove()


def steps(device: TimedDevice, model: nn.Module, num_steps: int, x: torch.Tensor | None = None) -> list[float]:
    times = []
    x = torch.zeros(1) if x is None else x
    with torch.no_grad():
        for _ in range(num_steps):
            begun = device.now
            model(x)
            times.append(device.now - begun)
    return times


def limit(copied_bytes: float, compute_seconds: float) -> float:
    return max(compute_seconds, copied_bytes / LINK)


class Block(nn.Module):
    """Registers its layers in another order than it calls them in, as FLUX.1's single blocks do."""

    def __init__(self, num_bytes: int, seconds: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.mlp, self.out, self.q, self.k, self.v = (Timed(num_bytes // 5, seconds / 5) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.norm, self.mlp, self.q, self.k, self.v, self.out):
            x = layer(x)
        return x


@pytest.mark.parametrize("num_rounds", [1, 2])
def test_a_first_forward_learns_from_its_own_blocks(num_rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard: a stall for each layer that a block registers out of order, in each block. A model may run its blocks again."""
    stalls = set()
    for num_blocks in (4, 12):
        device = a_device(monkeypatch)
        doubles = (Block(DOUBLE, 1.1 * DOUBLE / LINK) for _ in range(num_blocks))
        singles = (Block(SINGLE, 1.1 * SINGLE / LINK) for _ in range(2 * num_blocks))
        model = nn.Sequential(*[nn.Sequential(*doubles), nn.Sequential(*singles)] * num_rounds)
        with use_simulated_device(device):  # type: ignore[arg-type]
            handle = apply_group_offloading(model, "cpu", offload_type="leaf_level")
            (first,) = steps(device, model, 1, torch.zeros(64))
            stats = handle.stats()
            later = steps(device, model, 4, torch.zeros(64))
            assert handle.stats().stalls == stats.stalls
            assert handle.stats().peak_device_bytes == stats.peak_device_bytes
            if num_blocks == 12:
                assert first <= 1.05 * later[-1]
            stalls.add(stats.stalls)
            handle.remove()
    assert len(stalls) == 1 and max(stalls) <= 1 + num_rounds  # not more with more blocks


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("options", [{}, {"record_stream": True}, {"offload_type": "leaf_level"}], ids=str)
def test_streaming_everything_takes_what_the_link_takes(
    options: dict[str, Any], compress: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with offloaded(monkeypatch, compress=compress, **options) as (device, model, handle):
        steps(device, model, 8)
        before = device.copied_bytes
        times = steps(device, model, 3)
        sent = (device.copied_bytes - before) / 3
        assert sent <= (0.74 if compress else 1.001) * TOTAL
        assert max(times) <= 1.01 * limit(sent, COMPUTE)
        assert handle.plan.details is not None and handle.plan.details.measured_seconds is not None
        assert max(times) == pytest.approx(handle.plan.step_seconds, rel=0.01)
        assert max(times) == pytest.approx(handle.plan.details.prediction.step_seconds, rel=0.03)


PERCENTS = (10, 12, 20, 25, 33, 40, 50, 55, 60, 64, 66, 70, 72, 75, 80, 90, 100)


@pytest.mark.parametrize(
    ("percent", "compress"), [*((each, False) for each in PERCENTS), *((each, True) for each in (15, 25, 40, 60, 80))]
)
def test_budgets_reach_their_limit(percent: int, compress: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any budget a step takes at most 1.002 of the longer of compute and copies, and what was predicted; with compressed
    weights less is sent."""
    budget = TOTAL * percent // 100
    with offloaded(monkeypatch, vram_budget=budget, compress=compress) as (device, model, handle):
        steps(device, model, 8)  # they measure, and then the plan is made again
        device.reset_peak()
        before = device.copied_bytes
        times = steps(device, model, 3)
        sent = (device.copied_bytes - before) / 3
        details = handle.plan.details
        assert details is not None and device.peak_bytes_in_use() <= budget
        # Hazard: compute that was measured while the device decompressed counts decompression twice.
        assert details.prediction.compute_seconds == pytest.approx(COMPUTE, rel=0.01 if compress else 0.001)
        if compress:
            assert max(times) == pytest.approx(details.prediction.step_seconds, rel=0.01)
            # What the room beside slots does not hold, compressed, but for whole groups.
            left = 0.7 * TOTAL - (budget - (2 + 2 * 0.7) * DOUBLE - REST) + TOTAL // 16
            assert max(times) <= 1.01 * limit(left, COMPUTE + details.prediction.decompress_seconds)
        else:
            assert max(times) <= 1.002 * limit(sent, COMPUTE)
            assert sent <= TOTAL - budget + 2 * DOUBLE + REST + TOTAL // 32  # what has no slot stays
            assert max(times) == pytest.approx(details.prediction.step_seconds, rel=0.005)


def test_the_report_of_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Hazard: nobody can tell where the time of a step goes (diffusers #14702)."""
    budget = TOTAL // 2
    with (
        caplog.at_level("INFO", "group_offload"),
        offloaded(monkeypatch, vram_budget=budget) as (device, model, handle),
    ):
        took = steps(device, model, 8)[-1]
        page, plan, stats = Page(write_report(handle, tmp_path / "run.html")), handle.plan, handle.stats()
        assert plan.details is not None and plan.step_seconds == pytest.approx(took)
        told = [line for line in caplog.messages if line.startswith("Plan for ")]
        assert 1 <= len(told) <= 3  # when it is made, and when it is another one: never in each pass
        stays, sent = map(describe_bytes, (stats.resident_bytes, plan.details.prediction.h2d_bytes))
        assert f": {stays} resident on cpu; each forward transfers {sent} and takes " in told[-1]
        assert f" and takes {describe_seconds(plan.details.prediction.step_seconds)}" in told[-1]
        assert plan.verdict in page.words and f"budget of {describe_bytes(budget)}." in page.words
        assert f"onloads {stats.onloads}" in page.words
        held = dict(plan.memory)
        assert held["resident weights"] == stats.resident_bytes > 0 and held["weights of other models"] == 0
        assert held["resident weights"] + held["buffers for streamed weights"] == device.bytes_in_use()
        assert sum(held.values()) <= budget
        for label, num_bytes in plan.memory:
            assert f"{label} {describe_bytes(num_bytes)}" in page.words
            assert re.search(rf"{label} +{describe_bytes(num_bytes)}", str(plan))
        assert f"{describe_bytes(TOTAL)} in {len(handle.groups)} groups" in page.words
        assert all(f"{group.group_id} {group.num_tensors} " in page.words for group in handle.groups)


@pytest.mark.parametrize(
    "changes",
    [
        *([(1.0, 8, 1), (scale, 26, 1)] for scale in (1.15, 0.7, 3.0)),
        [(1.0, 6, 1), (4.0, 6, 4)],
        [(4.0, 6, 4), (1.0, 6, 1)],
    ],
    ids=str,
)
def test_the_plan_follows_compute(changes: list[tuple[float, int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A device becomes slower or faster: the 16th and the 32nd pass show that, and then the plan is for it. Inputs of another
    size compute for another time: what the others took does not count."""
    with offloaded(monkeypatch, vram_budget=TOTAL * 6 // 10) as (device, model, handle):
        for scale, num_steps, size in changes:
            device.scale = scale
            steps(device, model, num_steps, torch.zeros(size))
            assert handle.plan.details is not None
            prediction = handle.plan.details.prediction
            assert prediction.compute_seconds == pytest.approx(COMPUTE * scale, rel=0.001)
        before = device.copied_bytes
        (seconds,) = steps(device, model, 1, torch.zeros(size))
        assert prediction.step_seconds == pytest.approx(seconds, rel=0.01)
        assert seconds <= 1.02 * limit(device.copied_bytes - before, COMPUTE * scale)


def test_switching_models_costs_the_stalls_of_one_streamed_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two transformers of one class share the device, used in different steps, as in Wan 2.2."""
    device, budget = a_device(monkeypatch), TOTAL * 6 // 10
    with use_simulated_device(device):  # type: ignore[arg-type]
        models = [Flux(), Flux()]
        handles = [apply_group_offloading(model, "cpu", vram_budget=budget) for model in models]
        for model in models * 2:
            steady = steps(device, model, 8)[-1]
        device.reset_peak()
        for model in models * 2:
            first, *others = steps(device, model, 4)
            assert max(others[1:]) <= 1.01 * steady
            # What is to stay comes in the first pass: that waits no longer than one in which nothing stays. (The link
            # also carries what the other model would have needed next.)
            assert first - steady <= TOTAL / LINK - COMPUTE
        assert device.peak_bytes_in_use() <= budget
        for handle in handles:
            handle.remove()


class Guided(Flux):
    def forward(self, x: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) + prompt


@pytest.mark.parametrize(("scale", "budget", "shares"), [(1.0, 0.5, True), (4.9, 0.5, False), (4.9, 0.0, False)])
def test_a_pipeline_shares_passes_by_itself_where_transfers_bound(
    scale: float, budget: float, shares: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Hazards: where compute bounds, sharing saves nothing, and its trial costs a pass. The trial's pass is of a new kind, and
    would evict all that is resident. The log says once what is done."""
    caplog.set_level(logging.INFO, "group_offload")
    monkeypatch.setattr("group_offload.runtime.engine.is_function", lambda config, root: True)
    took, prompts = [], (torch.zeros(64), torch.ones(64))
    for options in ({}, {"interleave_forwards": False}):
        device, pipe = a_device(monkeypatch), SimpleNamespace(components={"transformer": Guided().eval()})
        device.scale = scale
        with use_simulated_device(device), torch.no_grad():  # type: ignore[arg-type]
            vram = int(budget * TOTAL) or None
            handle = enable_group_offload(pipe, "cpu", vram_budget=vram, **options)["transformer"]
            for _ in range(12):
                x = torch.zeros(64)
                for prompt in prompts:
                    pipe.components["transformer"](x, prompt)
            took.append(device.now)
            assert bool(handle.stats().forwards_speculated) == (shares and not options)
            disable_group_offload(pipe)
    assert took[0] <= (0.85 if shares else 1) * took[1]
    told = [record.getMessage() for record in caplog.records if "(interleave_forwards)" in record.getMessage()]
    assert len(told) == 1 and ("together" in told[0]) == shares, told
