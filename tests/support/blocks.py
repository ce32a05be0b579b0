"""What the code blocks of the docs find: pipelines of the names that they open, tiny and with random weights.

A block that names a checkpoint of the hub finds a folder of that name. `/nvme` is a folder, too. Blocks that give a
`vram_budget` run on the simulated device, because a CPU has no memory of its own to give.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import pytest
import torch
from diffusers import FluxPipeline, WanPipeline
from safetensors.torch import save_file

from . import tiny_models as tiny
from .simulated import SimulatedDevice, use_simulated_device


def _controlnet() -> Any:
    from diffusers import FluxControlNetModel  # diffusers 0.36 warns as it is imported

    sizes = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
    return FluxControlNetModel.from_transformer(tiny.flux_transformer(), **sizes)


CHECKPOINTS: dict[str, Callable[[], Any]] = {
    "black-forest-labs/FLUX.1-dev": tiny.flux_pipeline,
    "FLUX.1-dev": tiny.flux_pipeline,
    "InstantX/FLUX.1-dev-Controlnet-Canny": _controlnet,
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": tiny.wan_pipeline,
}
LORAS = ("style.safetensors", "face.safetensors")
_SIZES = {"height": 16, "width": 16, "max_sequence_length": 16, "num_inference_steps": 1}
SMALL: dict[type, dict[str, Any]] = {
    FluxPipeline: _SIZES,
    WanPipeline: {**_SIZES, "num_frames": 5, "output_type": "latent"},
}

_BLOCK = re.compile(r"^( *)```(\w*)[ ]*([^\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    language: str
    mark: str
    """What the fence says behind the language: "run", "not run: REASON", or nothing."""
    code: str
    line: int

    @property
    def why_not(self) -> str | None:
        """The reason why no test runs it."""
        return self.mark.removeprefix("not run:").strip() if self.mark.startswith("not run") else None


def blocks(page: str) -> Iterator[Block]:
    for found in _BLOCK.finditer(page):
        yield Block(found[2], found[3].strip(), found[4], page[: found.start()].count("\n") + 1)


def without_blocks(page: str) -> str:
    return _BLOCK.sub("", page)


class World:
    """The current folder and the names that the blocks of one page, or one row of a table, find."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._names: dict[str, Any] = {"__name__": "__main__"}
        monkeypatch.chdir(folder)
        for kind, arguments in SMALL.items():
            monkeypatch.setattr(kind, "__call__", _small(kind.__call__, arguments))

    def run(self, code: str, file: str, line: int = 0) -> None:
        """Run a block. `pipe` is a tiny pipeline if no block before it has made another one."""
        code = code.replace("/nvme/", f"{self._folder}/nvme/")
        tree = ast.parse("\n" * line + code, file)
        if any(isinstance(node, ast.Name) and node.id == "pipe" for node in ast.walk(tree)):
            self._names.setdefault("pipe", tiny.flux_pipeline())
        with catch_warnings():
            simplefilter("ignore")  # of diffusers and peft, about one another
            self._save_checkpoints(code)
            exec(compile(tree, file, "exec"), self._names)

    def _save_checkpoints(self, code: str) -> None:
        for name, make in CHECKPOINTS.items():
            if f'"{name}' in code and not (self._folder / name).exists():
                make().to(torch.bfloat16).save_pretrained(self._folder / name)
        for name in LORAS:
            if name in code and not (self._folder / name).exists():
                state = tiny.lora_of(tiny.flux_transformer(), ("to_q", "to_k"))
                save_file({f"transformer.{key}": tensor for key, tensor in state.items()}, self._folder / name)


@contextmanager
def on_a_device() -> Iterator[None]:
    """Whatever is called computes on the simulated device."""
    device = SimulatedDevice(0, "eager")
    with use_simulated_device(device), device.use_stream(device.current_stream()), device.running():
        yield


def _small(call: Callable[..., Any], arguments: dict[str, Any]) -> Callable[..., Any]:
    @wraps(call)
    def small(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.set_progress_bar_config(disable=True)
        return call(self, *args, **{**kwargs, **arguments})

    return small
