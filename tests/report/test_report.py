"""The page of a run: its numbers are those of the run, it needs nothing else, and names cannot speak to the browser."""

from __future__ import annotations

import copy
import json
import os
import random
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from group_offload import (
    ConfigError,
    GroupFileError,
    OffloadHandle,
    StateError,
    apply_group_offloading,
    enable_group_offload,
    write_report,
)
from group_offload.base.timeline import COMPUTE, COPIES, DECODE, READS, STALLS, Slice
from group_offload.plan.budgets import describe_bytes
from group_offload.plan.pass_model import foresee, simulate
from group_offload.plan.placement import Budgets, Placement, PlannedGroup, Problem, Speeds
from group_offload.plan.planner import make_plan
from group_offload.report.facts import GroupFacts, ModelFacts, PassFacts, Place, ReportFacts
from group_offload.report.page import write_page
from group_offload.run_report import memory_of
from group_offload.runtime.measure.recorder import NUM_RECORDED, SENT_AHEAD

from ..support import tiny_models as tiny
from ..support.inside import engine_of
from ..support.models import DIM, RoutedModel, Stop, inputs, make
from ..support.on_device import forward, offload, options_for
from ..support.pages import Page
from ..support.pipelines import models_of
from ..support.rigs import run
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.speeds import KNOWN_SPEEDS
from ..support.timed import TimedDevice
from ..support.tuning import tune

LINK = 1e6
BYTES, SECONDS = 4096, 0.003


class Timed(nn.Module):
    def __init__(self, device: TimedDevice, num_bytes: int = BYTES) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_bytes // 4), requires_grad=False)
        self.compute = device.compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.compute(SECONDS)
        return x


class CountingDevice(TimedDevice):
    num_events = 0

    def new_event(self) -> Any:
        self.num_events += 1
        return super().new_event()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingDevice]:
    speeds = replace(KNOWN_SPEEDS, h2d=int(LINK))
    monkeypatch.setattr("group_offload.runtime.placer.known_speeds", lambda *args, **kwargs: speeds)
    tune(monkeypatch, max_run_bytes=BYTES, resident_bytes=0, device_margin_bytes=0)
    with use_simulated_device(CountingDevice(LINK)) as device:  # type: ignore[arg-type]
        yield device  # type: ignore[misc]


def timed_model(device: TimedDevice, num_blocks: int = 8) -> nn.Module:
    return nn.Sequential(*(Timed(device) for _ in range(num_blocks)))


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def busy(page: Page, lane: str) -> int:
    """In millionths of the last pass, as it is drawn."""
    lanes = page.facts["models"][0]["passes"][-1]["lanes"]
    return sum(sum(found["lengths"]) for found in lanes if found["kind"] == lane)


def test_numbers_are_those_of_the_run(device: CountingDevice, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = timed_model(device)
    with caplog.at_level("INFO", "group_offload"):
        handle = offload(model, vram_budget=BYTES * 5)
        for _ in range(8):
            before = device.now
            forward_of(model)
    took = device.now - before
    told = [line for line in caplog.messages if line.startswith("Plan for ")]
    assert 1 <= len(told) <= 3  # when it is made, and when it is another one: never in each pass
    stays, sent = (describe_bytes(num_blocks * BYTES) for num_blocks in (3, 5))
    assert f": {stays} stay on cpu, each step sends {sent}, which takes " in told[-1]
    path = handle.report(tmp_path / "run.html")
    assert path == tmp_path / "run.html"
    page = Page(path)
    [facts] = page.facts["models"]
    plan, stats = handle.plan, handle.stats()
    assert plan.details is not None
    assert facts["stats"] == as_json(asdict(stats))
    assert (
        facts["plan"]["step_seconds"] == plan.step_seconds
        and facts["plan"]["device_bytes"] == plan.details.device_bytes
    )
    assert facts["plan"]["measured_seconds"] == pytest.approx(took)
    assert facts["gains"] == {
        "VRAM": plan.details.gain_from(device_bytes=1 << 30),
        "RAM": plan.details.gain_from(ram_bytes=1 << 30),
    }
    assert plan.details.verdict() in page.words and plan.details.headline() in page.words
    # Who holds device memory.
    held = dict(plan.memory)
    assert held["residents"] == stats.resident_bytes and held["weights of other models"] == 0
    assert held["residents"] + held["slots to take turns in"] == device.bytes_in_use()
    for label, num_bytes in plan.memory:
        assert f"{label} {describe_bytes(num_bytes)}" in page.words
        assert re.search(rf"{label} +{describe_bytes(num_bytes)}", str(plan))
        assert f"<td>{label}</td><td class=number>{describe_bytes(num_bytes)}</td>" in plan._repr_html_()
    # Where groups rest.
    places = facts["bytes_by_place"]
    assert places["device"] == stats.resident_bytes == 3 * BYTES
    assert sum(places.values()) == sum(group.num_bytes for group in handle.groups) == sum(facts["cells"]["bytes"])
    assert places["locked"] == places["device"] // 3 * 5
    # The last pass: what was sent, computed and waited for.
    last = facts["passes"][-1]
    assert last["title"] == "forward 8" and last["seconds"] == pytest.approx(took)
    assert busy(page, "compute") / 1e6 * took == pytest.approx(8 * SECONDS, rel=1e-3)
    sent = [sum(lane["bytes"]) for lane in last["lanes"] if lane["kind"] == "link"]
    assert sum(sent) <= places["locked"]
    assert busy(page, "link") / 1e6 * took == pytest.approx(5 * BYTES / LINK, rel=1e-3)
    assert busy(page, "stalls") / 1e6 * took == pytest.approx(took - 8 * SECONDS, rel=1e-3)
    [memory, _] = page.facts["memories"]
    assert memory["budget_bytes"] == BYTES * 5 and memory["parts"]["weights that stay"] == stats.resident_bytes
    assert sum(memory["parts"].values()) <= memory["budget_bytes"]
    handle.remove()


def forward_of(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.zeros(1))


def test_before_any_pass(device: CountingDevice, tmp_path: Path) -> None:
    model = timed_model(device)
    handle = offload(model)
    page = Page(handle.report(tmp_path / "run.html"))
    assert "No pass has run yet. The timeline is what the plan foresees." in page.words
    [only] = page.facts["models"][0]["passes"]
    assert only["title"] == "predicted" and only["seconds"] == handle.plan.step_seconds
    handle.remove()


def test_passes_that_are_recorded(device: CountingDevice, tmp_path: Path) -> None:
    """Those that are timed anyway, and all inside of a trace."""
    model = timed_model(device)
    handle = offload(model)
    for _ in range(7):
        forward_of(model)
    titles = [f"forward {number}" for number in (1, 2, 3, 4)]
    assert [one["title"] for one in recorded(handle, tmp_path)] == titles
    with handle.trace(tmp_path / "trace.json"):
        for _ in range(2):
            forward_of(model)
        assert [one["title"] for one in recorded(handle, tmp_path)][-1] == "forward 9"
    passes = recorded(handle, tmp_path)
    assert [one["title"] for one in passes] == ["forward 3", "forward 4", "forward 8", "forward 9"]
    # Steady passes are alike, also where the pass before was not recorded.
    assert len({round(one["seconds"], 9) for one in passes[1:]}) == 1
    for one in passes:
        [link] = [lane for lane in one["lanes"] if lane["kind"] == "link"]
        inside = (
            min(start + length, 10**6) - max(start, 0)
            for start, length in zip(link["starts"], link["lengths"], strict=True)
        )
        assert sum(inside) / 1e6 * one["seconds"] == pytest.approx(8 * BYTES / LINK, rel=2e-3)
    for _ in range(7):
        forward_of(model)
    [*_, last] = recorded(handle, tmp_path)
    names = handle_names(handle, tmp_path)
    assert last["title"] == "forward 16" and len(engine_of(handle).recorder.passes) == NUM_RECORDED
    assert SENT_AHEAD in [names[index] for lane in last["lanes"] for index in lane["names"]]
    handle.remove()


def recorded(handle: OffloadHandle, folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = Page(handle.report(folder / "run.html")).facts["models"][0]["passes"]
    return found


def handle_names(handle: OffloadHandle, folder: Path) -> list[str]:
    names: list[str] = Page(handle.report(folder / "run.html")).facts["models"][0]["names"]
    return names


def test_what_recording_costs(device: CountingDevice) -> None:
    """[Note: What recording costs], counted: no event in a pass that is not recorded."""
    model = timed_model(device)
    handle = offload(model)
    events = []
    for _ in range(8):
        before, copies = device.num_events, handle.stats().copies
        forward_of(model)
        events.append((device.num_events - before, handle.stats().copies - copies))
    assert events[4] == events[5] == events[6] == (0, 8)
    # The stopwatch: the pass, and three for each group. The trace: its beginning, what was sent ahead, two for each copy.
    assert events[7] == (2 + 3 * 8 + 2 + 2 * 8, 8)
    handle.remove()


@pytest.mark.parametrize(
    "options", [{}, {"offload_type": "leaf_level"}, {"in_files": True}, {"use_stream": False}], ids=str
)
def test_while_work_is_on_its_way(options: dict[str, Any], tmp_path: Path) -> None:
    """The page is right, and changes nothing, when kernels and copies have not run yet."""
    with use_simulated_device(SimulatedDevice(0, "random")) as device, options_for(options) as given:
        model = RoutedModel([16, 24, 16, 16])
        resident = copy.deepcopy(model)
        handle = offload(model, **given)
        x = torch.randn(2, DIM)
        for _ in range(3):
            output = forward(device, model, x)
            page = Page(handle.report(tmp_path / "run.html"))
            assert page.facts["models"][0]["stats"] == as_json(asdict(handle.stats()))
            assert torch.equal(device.get(output), run(resident, x))
        kinds = {lane["kind"] for lane in page.facts["models"][0]["passes"][-1]["lanes"]}
        assert {"link", "compute"} <= kinds  # reads are told by the host's clock, which this device knows nothing of
        model.alive.clear()
        handle.remove()


def test_a_forward_that_raises_is_not_shown(tmp_path: Path) -> None:
    with use_simulated_device(SimulatedDevice(0, "lazy")) as device:
        model = RoutedModel([16] * 3)
        handle = offload(model)
        x = torch.randn(2, DIM)
        model.stop_at = 1
        with pytest.raises(Stop):
            forward(device, model, x)
        page = Page(handle.report(tmp_path / "run.html"))
        assert "No pass was recorded that completed." in page.words
        model.stop_at = -1
        forward(device, model, x)
        assert [one["title"] for one in recorded(handle, tmp_path)] == ["forward 2"]
        model.alive.clear()
        handle.remove()


def test_the_host_waits_for_no_recording() -> None:
    with use_simulated_device(SimulatedDevice(0, "lazy")) as device:
        model = RoutedModel([16] * 3)
        handle = offload(model)
        for _ in range(4):
            forward(device, model, torch.randn(2, DIM))
        assert len(engine_of(handle).recorder.passes) == 4 and device.num_host_waits == 0
        model.alive.clear()
        handle.remove()


@pytest.mark.parametrize("tier", ["ram", "file"])
def test_on_the_cpu(tier: str, tmp_path: Path) -> None:
    model = make()
    handle = apply_group_offloading(model, "cpu", offload_to_disk_path=tmp_path / "groups" if tier == "file" else None)
    first = Page(handle.report(tmp_path / "run.html"))
    assert "No pass has run yet." in first.words
    for _ in range(2):
        run(model, inputs())
    page = Page(handle.report(tmp_path / "run.html"))
    [facts] = page.facts["models"]
    kinds = {lane["kind"] for lane in facts["passes"][-1]["lanes"]}
    assert "compute" in kinds and "link" not in kinds and ("drive" in kinds) == ("stalls" in kinds) == (tier == "file")
    assert facts["passes"][-1]["seconds"] > 0 and facts["stats"] == as_json(asdict(handle.stats()))
    assert facts["bytes_by_place"]["file" if tier == "file" else "ram"] == sum(g.num_bytes for g in handle.groups)
    assert [memory["name"] for memory in page.facts["memories"]] == ["RAM of this process"]
    if tier == "file":
        assert "compute waited for weights from files" in page.words
    handle.remove()


def test_training(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)), nn.Linear(64, 4))
    model[:4].requires_grad_(False)
    handle = apply_group_offloading(model, "cpu", offload_to_disk_path=tmp_path / "groups")
    for _ in range(2):
        model(torch.randn(2, 64, requires_grad=True)).sum().backward()
    titles = [one["title"] for one in recorded(handle, tmp_path)]
    assert titles == ["forward 1", "backward 1", "forward 2", "backward 2"]
    assert any(lane["kind"] == "compute" for lane in recorded(handle, tmp_path)[-1]["lanes"])
    handle.remove()


# ---------------------------------------------------------------- the file


def test_names_cannot_speak_to_the_browser(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><!--\x1b\u202e'\"&amp;"
    model = nn.Module()
    model.add_module(evil, nn.ModuleList([nn.Linear(4, 4)]))
    model.forward = lambda x: getattr(model, evil)[0](x)  # type: ignore[method-assign]
    model.__class__ = type("<b>Model", (nn.Module,), {})
    handle = apply_group_offloading(model, "cpu")
    with torch.no_grad():
        model(torch.zeros(1, 4))
    page = Page(handle.report(tmp_path / "run.html"))
    assert page.tags["script"] == 2 and not page.tags["b"] - 2
    assert "<script>alert(1)</script>" in page.words and "<b>Model" in page.words
    assert not any(c in (tmp_path / "run.html").read_text() for c in "\x1b\u202e")
    handle.remove()


def test_where_the_page_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    handle = apply_group_offloading(model, "cpu")
    monkeypatch.chdir(tmp_path)
    assert handle.report("run.html") == Path("run.html") and Path("run.html").stat().st_mode & 0o444
    with pytest.raises(GroupFileError, match="nowhere is not a folder"):
        handle.report("nowhere/run.html")
    with pytest.raises(GroupFileError, match="it is a folder"):
        handle.report(tmp_path)
    with pytest.raises(GroupFileError, match=r"a path cannot contain the character"):
        handle.report("a\0b")
    before = Path("run.html").read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(GroupFileError, match=r"Cannot write run\.html: No space left on device\."):
            handle.report("run.html")
    assert Path("run.html").read_bytes() == before and os.listdir() == ["run.html"]
    handle.report("run.html")
    assert os.listdir() == ["run.html"]
    handle.remove()
    with pytest.raises(StateError, match="no longer offloaded"):
        handle.report("run.html")


# ---------------------------------------------------------------- several models


def test_a_pipeline(tmp_path: Path) -> None:
    pipe = tiny.flux_pipeline()
    with pytest.raises(StateError, match=r"No model is group-offloaded: .*vae.*enable_group_offload"):
        write_report(pipe, tmp_path / "run.html")
    handles = enable_group_offload(pipe, onload_device="cpu", exclude_modules="vae")
    pages = [Page(write_report(models, tmp_path / "run.html")) for models in (pipe, handles, models_of(pipe))]
    for page in pages:
        assert [model["name"] for model in page.facts["models"]] == [*handles]
        for found, handle in zip(page.facts["models"], handles.values(), strict=True):
            assert found["stats"] == as_json(asdict(handle.stats())) and found["num_groups"] == len(handle.groups)
    assert "FluxPipeline" in pages[0].words and "Not offloaded: vae." in pages[0].words
    one = Page(write_report(pipe.transformer, tmp_path / "run.html"))
    assert [model["model_class"] for model in one.facts["models"]] == ["FluxTransformer2DModel"]
    same = Page(write_report({"a": pipe.transformer, "b": handles["transformer"]}, tmp_path / "run.html"))
    assert [model["name"] for model in same.facts["models"]] == ["a, b"]
    for wrong, message in (({"a": 1}, "'a' is int"), (1, "diffusers pipeline, got int")):
        with pytest.raises(ConfigError, match=message):
            write_report(wrong, tmp_path / "run.html")
    with pytest.raises(GroupFileError, match="nowhere"):
        write_report(pipe, tmp_path / "nowhere" / "run.html")


def test_several_devices() -> None:
    """Each has a memory of its own; models on one device share its slots."""

    def model_on(device: str, resident: int, slots: int, budget: int | None) -> Any:
        backend = SimpleNamespace(has_streams=True, total_bytes=lambda: 1000, peak_reserved_bytes=lambda: 700)
        config = SimpleNamespace(onload_device=torch.device(device), backend=backend, ram_budget=None)
        placer = SimpleNamespace(vram_budget=budget, slot_bytes=slots)
        engine = SimpleNamespace(config=config, placer=placer, groups=())
        stats = dict.fromkeys(("trainable_bytes", "pinned_bytes", "host_bytes", "staging_bytes", "file_bytes"), 0)
        return SimpleNamespace(engine=engine, stats={**stats, "resident_bytes": resident})

    first, second, ram = memory_of(
        [model_on("cuda:0", 100, 50, 800), model_on("cuda:1", 10, 20, None), model_on("cuda:0", 30, 60, 800)]
    )
    assert (first.name, first.budget_bytes, second.name, second.budget_bytes) == (
        "Device cuda:0",
        800,
        "Device cuda:1",
        None,
    )
    assert [part.num_bytes for part in first.parts] == [130, 60, 0, 510]
    assert [part.num_bytes for part in second.parts] == [10, 20, 0, 670] and ram.name == "RAM of this process"


# ---------------------------------------------------------------- many groups, and lanes


def many(num_groups: int, num_slices: int) -> ModelFacts:
    names = [f"blocks.{number}.a_layer_with_a_long_name" for number in range(num_groups)]
    slices = [
        Slice(lane, names[number % num_groups], number / num_slices, (number + 0.5) / num_slices, 1000)
        for lane in (READS, COPIES, COMPUTE, STALLS)
        for number in range(num_slices)
    ]
    places = [*Place]
    return ModelFacts(
        name="",
        model_class="Model",
        device="cuda:0",
        groups=[
            GroupFacts(name=n, num_bytes=1000 + i, place=places[i % 3], detail="a file") for i, n in enumerate(names)
        ],
        passes=[PassFacts(title=f"forward {n}", seconds=1.0, slices=slices, how="recorded") for n in range(4)],
        sentences=["A verdict."],
        gains=[],
        plan=None,
        stats=None,
    )


@pytest.mark.parametrize(("num_groups", "num_slices"), [(1200, 1200), (9000, 12_000)])
def test_many_groups(num_groups: int, num_slices: int, tmp_path: Path) -> None:
    """The page stays small, no byte is lost, and how busy a lane was is told of all slices."""
    model = many(num_groups, num_slices)
    path = write_page(ReportFacts(title="Many", models=[model], memories=[], sentences=[]), tmp_path / "many.html")
    assert path.stat().st_size < 2 << 20
    [facts] = Page(path).facts["models"]
    assert sum(facts["cells"]["bytes"]) == sum(group.num_bytes for group in model.groups)
    for one in facts["passes"]:
        assert "compute 500 ms" in one["caption"]
        for lane in one["lanes"]:
            assert sum(lane["bytes"]) == 1000 * num_slices and len(lane["starts"]) <= num_slices


def test_a_lane_that_is_not_used_is_left_out(tmp_path: Path) -> None:
    slices = [Slice(COMPUTE, "a", 0.1, 0.2, 1), Slice(DECODE, "a", 0.0, 0.1, 1)]
    model = replace(many(1, 1), passes=[PassFacts(title="forward 1", seconds=1.0, slices=slices, how="recorded")])
    path = write_page(ReportFacts(title="One", models=[model], memories=[], sentences=[]), tmp_path / "one.html")
    lanes = Page(path).facts["models"][0]["passes"][0]["lanes"]
    assert [lane["kind"] for lane in lanes] == ["decode", "compute"]


# ---------------------------------------------------------------- what is foreseen


@pytest.mark.parametrize("seed", range(8))
def test_a_foreseen_pass_is_the_predicted_one(seed: int) -> None:
    rng = random.Random(seed)
    groups = tuple(
        PlannedGroup(
            name=f"g{n}", num_bytes=rng.randint(1, 9) << 20, compute_seconds=rng.random() / 1000, is_in_file=True
        )
        for n in range(rng.randint(3, 20))
    )
    total = sum(group.num_bytes for group in groups)
    budgets = Budgets(device_bytes=max(total // rng.randint(1, 4), 18 << 20), ram_bytes=total // rng.randint(1, 4))
    problem = Problem(
        groups=groups, order=tuple(range(len(groups))), speeds=Speeds(h2d=5e9, drive=1e9), budgets=budgets
    )
    plan = make_plan(problem)
    prediction, slices = plan.prediction, foresee(problem, plan.placements)
    one = PassFacts(title="", seconds=prediction.step_seconds, slices=slices, how="predicted")
    ends = [each.end for each in slices if each.lane == COMPUTE]
    assert max(ends) == pytest.approx(prediction.step_seconds, rel=2e-3)
    assert one.busy_seconds(COMPUTE) == pytest.approx(prediction.compute_seconds)
    assert one.busy_seconds(STALLS) == pytest.approx(prediction.stall_seconds, rel=5e-3, abs=1e-6)
    assert one.busy_seconds(COPIES) == pytest.approx(prediction.h2d_seconds, rel=0.02, abs=1e-6)
    computes = {each.name: each for each in slices if each.lane == COMPUTE}
    assert one.busy_seconds(READS) == pytest.approx(prediction.drive_seconds, rel=0.05, abs=1e-6)
    for each in slices:  # nothing computes before it is there; what comes later is for the next pass
        if each.lane == COPIES:
            assert each.end <= computes[each.name].start + 1e-9 or each.start >= computes[each.name].end - 1e-9


@pytest.mark.parametrize("size", [1 << 30, 5 << 28])
def test_more_ram_gains_what_it_holds(size: int) -> None:
    """Without a budget, one GiB, or one group, is added to what rests in RAM: not RAM for all."""
    groups = tuple(PlannedGroup(name=f"g{n}", num_bytes=size, compute_seconds=0.0, is_in_file=True) for n in range(8))
    none = Budgets(device_bytes=None, ram_bytes=None)
    problem = Problem(groups=groups, order=tuple(range(8)), speeds=Speeds(h2d=50e9, drive=2e9), budgets=none)
    placements = (Placement.RAM,) * 2 + (Placement.FILE,) * 6
    plan = replace(make_plan(problem), placements=placements, prediction=simulate(problem, placements))
    assert plan.gain_from(ram_bytes=plan.more_bytes) == pytest.approx(size / 2e9, rel=0.05)
    assert 0 < plan.gain_from(device_bytes=plan.more_bytes) < 2 * size / 2e9
