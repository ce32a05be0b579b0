"""The scripts of examples/: each runs with `--tiny`, says where weights rest, and saves what it made."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from PIL import Image
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel

from examples import demo

from .support.blocks import on_a_device

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in ("demo", "tiny"))
HERE = [script for script in SCRIPTS if script not in ("quantized", "two_gpus")]
"""Importing torchao prints warnings, so that one runs in a process of its own. The other one is several processes."""
SHARED = ("serve", "wan_two_experts")
"""Their forwards share passes. (On the CPU none do with a `ram_budget`, which Qwen-Image has.)"""
OURS = ("tiny-", "offload")
"""How the names of what is no output begin: tiny checkpoints, and folders of group files."""

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*FluxPosEmbed:FutureWarning"
)  # diffusers' ControlNet of FLUX imports it


@pytest.fixture(autouse=True)
def _as_in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)  # as Python does for a script
    yield
    sys.modules.pop("tiny", None)


def run(script: str, *arguments: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{script}.py", *arguments])
        runpy.run_path(str(EXAMPLES / f"{script}.py"), run_name="__main__")


def check(said: str) -> None:
    """It said where weights rest and what it wrote, and wrote that."""
    assert "stored on" in said
    outputs = [path for path in Path().iterdir() if not path.name.startswith(OURS)]
    assert outputs
    for path in outputs:
        assert f"to {path}." in said
        if path.is_dir():
            [weights] = path.glob("*.safetensors")
            tensors = load_file(weights)
            assert tensors and all(tensor.isfinite().all() for tensor in tensors.values())
            assert any(tensor.any() for name, tensor in tensors.items() if "lora_B" in name), "nothing was trained"
        else:
            with Image.open(path) as image:
                low, high = image.convert("L").getextrema()
            assert low < high, "all pixels are the same"


def test_the_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell runs twice, and then all of them again. The image is the resident pipeline's; handles and stats are tables."""
    monkeypatch.setenv("TINY", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, EXAMPLES))))
    notebook = nbformat.read(str(EXAMPLES / "notebook.ipynb"), as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    runs = [*(cell for cell in cells for _ in range(2)), *cells, cells[3]]  # the last when offloading is disabled
    notebook.cells = [nbformat.v4.new_code_cell(cell.source) for cell in runs]
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": Path.cwd()}}).execute()
    shown = [
        output.data for cell in notebook.cells for output in cell.outputs if output.output_type == "execute_result"
    ]
    assert sum("<table" in data.get("text/html", "") for data in shown) == 6
    images = [data["image/png"] for data in shown if "image/png" in data]
    assert images[0] == images[1] != images[2] == images[3]  # the first cell makes a checkpoint of its own


@pytest.mark.parametrize("script", HERE)
def test_tiny(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(script, "--tiny")
    said = capsys.readouterr().out
    check(said)
    shared = [int(number) for number in re.findall(r"interleave_forwards: (\d+) of \d+ forwards", said)]
    assert max(shared) > 0 if script in SHARED else not any(shared)


@pytest.mark.parametrize("script", ["quantized", "two_gpus"])
def test_tiny_in_processes(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    if script == "quantized" and importlib.util.find_spec("torchao") is None:
        for arguments, status in (["--tiny"], 0), ([], 1):
            with pytest.raises(SystemExit) as end:
                run(script, *arguments)
            assert end.value.code == status
            assert "needs torchao, which is not installed. Install it with: pip" in capsys.readouterr().out
        return
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, str(EXAMPLES / f"{script}.py"), "--tiny"]
    said = subprocess.check_output(command, env={**os.environ, "PYTHONPATH": path}, text=True)
    check(said)
    assert script == "quantized" or "0.0 MiB came from other GPUs" in said  # which CPUs do not send


@pytest.mark.parametrize("script", [script for script in HERE if script not in ("train_lora", "serve")])
def test_options_of_a_real_run(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU has no memory for a `vram_budget`, and the simulated device has. (Training gives no options; threads leave it.)"""
    import tiny

    text = (EXAMPLES / f"{script}.py").read_text()
    [options] = re.findall(r"^options\b.* = (\{.*?\})", text, re.MULTILINE)
    monkeypatch.setattr(tiny, "ON_CPU", ast.literal_eval(options))
    with on_a_device():
        run(script, "--tiny")
    check(capsys.readouterr().out)


@pytest.mark.gpu
@pytest.mark.parametrize("script", HERE)
def test_as_on_a_card(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With the budgets, sizes and steps of a real run; only the checkpoint is tiny."""
    import tiny

    arguments = {"train_lora": ["--steps", "4"], "serve": ["--try", "--port", "0"]}.get(script, [])
    for builder in re.findall(r"tiny\.(\w+)\(\)", (EXAMPLES / f"{script}.py").read_text()):
        option = {"flux_controlnet": ["--controlnet"], "pictures": []}.get(builder, ["--model"])
        arguments += [*option, getattr(tiny, builder)()]
    # The gradients of fused attention with heads of 16 are NaN on an H200 (torch 2.11), also where nothing is offloaded.
    with sdpa_kernel(SDPBackend.MATH) if script == "train_lora" else nullcontext():
        run(script, *arguments)
    check(capsys.readouterr().out)


@pytest.mark.parametrize("script", SCRIPTS)
def test_stands_alone(script: str) -> None:
    """Users copy one file: the builders of tiny checkpoints are imported only for `--tiny`. And the page has it."""
    top = re.findall(r"^(?:import|from) (\w+)", (EXAMPLES / f"{script}.py").read_text(), re.MULTILINE)
    assert top and not {"tiny", "tests", "examples", "benchmarks"} & {*top}
    assert f"../examples/{script}.py" in (ROOT / "docs" / "quickstart.md").read_text()


def test_demo_compares_with_diffusers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All arms of `make demo`, with a smaller model and in one process."""
    monkeypatch.setattr(demo, "quiet", lambda: None)
    try:
        demo.build(tmp_path / "pipeline", num_layers=1, num_single_layers=1, num_attention_heads=1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert list(demo.ARMS) == ["resident", "diffusers", "offloaded"]
    results = [demo.run_arm(arm, tmp_path, steps=2, size=32) for arm in demo.ARMS]
    table = demo.table(results)
    rows = dict(zip(demo.ARMS, table.splitlines()[2:5], strict=True))
    assert rows["resident"].endswith("-") and all(rows[arm].endswith("yes") for arm in ("diffusers", "offloaded"))
    assert torch.accelerator.is_available() or "No accelerator was used" in table
