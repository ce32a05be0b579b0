"""The page of a run: it needs nothing else, and names cannot speak to the browser. (Its numbers: engine/test_timing.py.)"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from group_offload import (
    ConfigError,
    StateError,
    StorageError,
    apply_group_offloading,
    enable_group_offload,
    write_report,
)
from group_offload.plan.budgets import describe_bytes

from ..support import tiny_models as tiny
from ..support.files import failing
from ..support.models import inputs, make
from ..support.pages import Page
from ..support.pipelines import models_of
from ..support.rigs import run


@pytest.mark.parametrize("tier", ["ram", "file"])
def test_on_the_cpu(tier: str, tmp_path: Path) -> None:
    """Hazard: the page says that weights in RAM are copied on the CPU, where they're used in place."""
    model = make()
    handle = apply_group_offloading(model, "cpu", offload_to_disk_path=tmp_path / "groups" if tier == "file" else None)
    assert "No forward has run yet." in Page(write_report(handle, tmp_path / "run.html")).words
    for _ in range(2):
        run(model, inputs())
    page = Page(write_report(handle, tmp_path / "run.html"))
    where = "All weights are in RAM" if tier == "ram" else "from disk, into"
    assert where in page.words and "RAM of this process" in page.words and "device memory now" not in page.words
    assert f"pageable weights {describe_bytes(handle.stats().host_bytes)} " in page.words
    assert "No forward has run yet." not in page.words
    handle.remove()


# ---------------------------------------------------------------- the file


def test_names_cannot_speak_to_the_browser_or_the_terminal(tmp_path: Path) -> None:
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
    for said in ((tmp_path / "run.html").read_text(), str(handle), str(handle.plan)):
        assert "\N{REPLACEMENT CHARACTER}" in said and not any(c in said for c in "\x1b\u202e")
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
        with pytest.raises(StorageError, match=why):
            write_report(handle, path)
    before = Path("run.html").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(errno.ENOSPC))
        with pytest.raises(StorageError, match=r"Cannot write run\.html: No space left on device\."):
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
    assert "FluxPipeline" in pages[0].words and "Not offloaded: vae." in pages[0].words
    one = Page(write_report(pipe.transformer, tmp_path / "run.html"))
    assert one.words.startswith("FluxTransformer2DModel") and "T5EncoderModel" not in one.words
    same = Page(write_report({"a": pipe.transformer, "b": handles["transformer"]}, tmp_path / "run.html"))
    assert "a, b FluxTransformer2DModel" in same.words
    for wrong, message in (({"a": 1}, "'a' is int"), (1, "diffusers pipeline, got 1")):
        with pytest.raises(ConfigError, match=message):
            write_report(wrong, tmp_path / "run.html")
