"""The page of a run: its numbers are those of the run, it needs nothing else, and names cannot speak to the browser."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

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
from group_offload.integrations.reporting import report_of
from group_offload.plan.budgets import describe_bytes
from group_offload.report.facts import ModelFacts, Place

from ..support import tiny_models as tiny
from ..support.files import failing
from ..support.models import inputs, make
from ..support.on_device import offload
from ..support.pages import Page
from ..support.pipelines import models_of
from ..support.rigs import run
from ..support.simulated import use_simulated_device
from ..support.speeds import KNOWN_SPEEDS
from ..support.timed import TimedDevice
from ..support.traces import lanes_of
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


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[TimedDevice]:
    speeds = replace(KNOWN_SPEEDS, h2d=int(LINK))
    monkeypatch.setattr("group_offload.runtime.budget.budgeter.known_speeds", lambda *args, **kwargs: speeds)
    tune(monkeypatch, max_run_bytes=BYTES, resident_bytes=0, device_margin_bytes=0)
    with use_simulated_device(TimedDevice(LINK)) as device:  # type: ignore[arg-type]
        yield device  # type: ignore[misc]


def timed_model(device: TimedDevice, num_blocks: int = 8) -> nn.Module:
    return nn.Sequential(*(Timed(device) for _ in range(num_blocks)))


def facts_of(handle: OffloadHandle) -> ModelFacts:
    [found] = report_of({"": handle}).models
    return found


def test_numbers_are_those_of_the_run(device: TimedDevice, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Hazard: nobody can tell where the time of a step goes (diffusers #14702)."""
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
    assert f": {stays} resident on cpu; each forward transfers {sent} and takes " in told[-1]
    page, plan, stats = Page(write_report(handle, tmp_path / "run.html")), handle.plan, handle.stats()
    report = report_of({"": handle})
    [facts], [memory, _] = report.models, report.memories
    assert plan.details is not None
    assert facts.figures["Statistics since the module was offloaded"] == asdict(stats)
    figures = facts.figures["The plan in numbers"]
    assert figures["step_seconds"] == plan.step_seconds and figures["device_bytes"] == plan.details.device_bytes
    assert figures["measured_seconds"] == pytest.approx(took)
    gains = {"VRAM": plan.details.gain_from(device_bytes=1 << 30), "RAM": plan.details.gain_from(ram_bytes=1 << 30)}
    assert gains == {"VRAM": 0, "RAM": 0}  # compute takes longer than copies
    assert "1 GiB more VRAM wouldn't help." in page.words and plan.details.verdict() in page.words
    assert f"onloads {stats.onloads}" in page.words
    # Who holds device memory.
    held = dict(plan.memory)
    assert held["resident weights"] == stats.resident_bytes and held["weights of other models"] == 0
    assert held["resident weights"] + held["buffers for streamed weights"] == device.bytes_in_use()
    for label, num_bytes in plan.memory:
        assert not num_bytes or f"{label}: {describe_bytes(num_bytes)}" in page.words
        assert re.search(rf"{label} +{describe_bytes(num_bytes)}", str(plan))
        assert f"<td>{label}</td><td class=number>{describe_bytes(num_bytes)}</td>" in plan._repr_html_()
    # Where groups rest.
    at = {place: sum(each.num_bytes for each in facts.groups if each.place is place) for place in Place}
    assert at[Place.DEVICE] == stats.resident_bytes == 3 * BYTES and at[Place.LOCKED] == 5 * BYTES
    assert [(each.name, each.num_bytes) for each in facts.groups] == [(g.group_id, g.num_bytes) for g in handle.groups]
    assert f"{len(handle.groups)} {describe_bytes(8 * BYTES)}" in page.words
    # A timeline of one more forward: what was sent, computed and waited for.
    with handle.trace(tmp_path / "trace.json"):
        forward_of(model)
    busy = {lane: sum(each["dur"] for each in mine) / 1e6 for lane, mine in lanes_of(tmp_path / "trace.json").items()}
    assert busy["compute"] == pytest.approx(8 * SECONDS) and busy["stalls"] == pytest.approx(took - 8 * SECONDS)
    assert busy["H2D"] == pytest.approx(5 * BYTES / LINK)
    assert memory.budget_bytes == BYTES * 5 and [part[:2] for part in memory.parts] == [*plan.memory]
    assert sum(num_bytes for _, num_bytes, _ in memory.parts) <= memory.budget_bytes
    handle.remove()


def forward_of(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.zeros(1))


@pytest.mark.parametrize("tier", ["ram", "file"])
def test_on_the_cpu(tier: str, tmp_path: Path) -> None:
    """Hazard: the page says that weights in RAM are copied on the CPU, where they're used in place."""
    model = make()
    handle = apply_group_offloading(model, "cpu", offload_to_disk_path=tmp_path / "groups" if tier == "file" else None)
    first = Page(write_report(handle, tmp_path / "run.html"))
    assert "No forward has run yet." in first.words
    for _ in range(2):
        run(model, inputs())
    page = Page(write_report(handle, tmp_path / "run.html"))
    assert {group.place for group in facts_of(handle).groups} == {Place.FILE if tier == "file" else Place.RAM}
    assert [memory.name for memory in report_of({"": handle}).memories] == ["RAM of this process"]
    assert "No forward has run yet." not in page.words
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
    page = Page(write_report(handle, tmp_path / "run.html"))
    assert not page.tags["b"]
    assert "<script>alert(1)</script>" in page.words and "<b>Model" in page.words
    assert not any(c in (tmp_path / "run.html").read_text() for c in "\x1b\u202e")
    handle.remove()


def test_where_the_page_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    handle = apply_group_offloading(model, "cpu")
    monkeypatch.chdir(tmp_path)
    assert write_report(handle, "run.html") == Path("run.html") and Path("run.html").stat().st_mode & 0o444
    for path, why in (
        ("nowhere/run.html", "nowhere is not a folder"),
        (tmp_path, "it is a folder"),
        ("a\0b", r"a path cannot contain the character \\0"),
    ):
        with pytest.raises(GroupFileError, match=why):
            write_report(handle, path)
    before = Path("run.html").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(errno.ENOSPC))
        with pytest.raises(GroupFileError, match=r"Cannot write run\.html: No space left on device\."):
            write_report(handle, "run.html")
    assert Path("run.html").read_bytes() == before and os.listdir() == ["run.html"]
    handle.remove()
    with pytest.raises(StateError, match="No model is group-offloaded"):
        write_report(handle, "run.html")


# ---------------------------------------------------------------- several models


def test_a_pipeline(tmp_path: Path) -> None:
    pipe = tiny.flux_pipeline()
    with pytest.raises(StateError, match=r"No model is group-offloaded: .*vae.*enable_group_offload"):
        write_report(pipe, tmp_path / "run.html")
    handles = enable_group_offload(pipe, onload_device="cpu", exclude_modules="vae")
    pages = [Page(write_report(models, tmp_path / "run.html")) for models in (pipe, handles, models_of(pipe))]
    for page in pages:
        assert all(f"{name} {type(pipe.components[name]).__name__}" in page.words for name in handles)
        assert "Models model weights bottleneck" in page.words
    assert "FluxPipeline" in pages[0].words and "Not offloaded: vae." in pages[0].words
    one = Page(write_report(pipe.transformer, tmp_path / "run.html"))
    assert one.words.startswith("FluxTransformer2DModel") and "T5EncoderModel" not in one.words
    same = Page(write_report({"a": pipe.transformer, "b": handles["transformer"]}, tmp_path / "run.html"))
    assert "a, b FluxTransformer2DModel" in same.words
    for wrong, message in (({"a": 1}, "'a' is int"), (1, "diffusers pipeline, got 1")):
        with pytest.raises(ConfigError, match=message):
            write_report(wrong, tmp_path / "run.html")
