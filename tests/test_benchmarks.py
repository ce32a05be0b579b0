"""The benchmarks run, with tiny models on the CPU; and what they print is what they measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("weights-*.json"))


def run(script: str, *arguments: str | Path) -> str:
    """What a script prints."""
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def measure(folder: Path, model: str, *arms: str) -> dict[str, Any]:
    arguments = ("--model", model, "--small", "--device", "cpu", "--steps", "2", "--slow-steps", "1")
    table = run("benchmarks/weights.py", *arguments, "--output", folder, "--disk", folder, "--arms", *arms)
    assert table.count("| yes") == len(arms), table
    (file,) = folder.glob("weights-*.json")
    report: dict[str, Any] = json.loads(file.read_text())
    assert set(report["arms"]) == set(arms)
    return report


@pytest.mark.parametrize("model", ["flux", "wan14b", "unet-sd15", "vae-decode", "t5-xxl"])
def test_every_model_runs(model: str, tmp_path: Path) -> None:
    report = measure(tmp_path, model, "resident", "ours block")
    ours = report["arms"]["ours block"]
    assert len(ours["steps_s"]) == 2
    assert ours["stats"]["passes"] >= 3  # `vae.decode` calls two parts
    assert ours["used_weight_bytes"] <= ours["weight_bytes"]


def test_checkpoint_files_and_peers(tmp_path: Path) -> None:
    report = measure(
        tmp_path,
        "flux",
        "resident",
        "ours block, from_pretrained",
        "ours block, disk",
        "diffusers block, no stream",
        "accelerate cpu_offload",
    )
    assert report["arms"]["ours block, from_pretrained"]["load_s"] > 0
    assert len(report["arms"]["accelerate cpu_offload"]["steps_s"]) == 1
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_pipeline_runs(tmp_path: Path) -> None:
    tables = run(
        "benchmarks/pipeline.py",
        *("--small", "--device", "cpu", "--steps", "2", "--output", tmp_path, "--arms", "resident", "ours block"),
    )
    assert tables.count("| yes") == 2, tables
    (file,) = tmp_path.glob("*.json")
    report = json.loads(file.read_text())
    assert all("error" not in alone for alone in report["alone"].values())
    assert set(report["alone"]) == {"text_encoder", "text_encoder_2", "transformer", "vae"}


@pytest.mark.parametrize("file", RESULTS, ids=[file.stem for file in RESULTS])
def test_committed_results_are_rendered(file: Path) -> None:
    table = run("benchmarks/weights.py", "--table", file)
    for name in json.loads(file.read_text())["arms"]:
        assert f"| {name} " in table


def test_pictures_are_drawn(tmp_path: Path) -> None:
    run("docs/images/draw_benchmarks.py", RESULTS[-1], "--output", tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"step-and-peak.svg", "rss.svg"}
