"""What the code blocks of the docs find: pipelines of the names that they open, tiny and with random weights.

A block that names a checkpoint of the hub finds a folder of that name. `/nvme` is a folder, too. Blocks that give a
`vram_budget` run on the simulated device, because a CPU has no memory of its own to give. Models and data that a page speaks of
and does not make are in `STOCK`.

`python -m tests.support.blocks FILE FOLDER` runs all blocks of a page on the accelerator of this machine.
"""

from __future__ import annotations

import ast
import re
import sys
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

from group_offload import OffloadHandle

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


def _pipeline() -> Any:
    """With more blocks than cache-dit always computes."""
    pipe = tiny.flux_pipeline()
    pipe.transformer = tiny.flux_transformer(num_layers=8, num_single_layers=8)
    return pipe


def _trainer_arguments() -> Any:
    from transformers import TrainingArguments

    return TrainingArguments("trainer", max_steps=2, save_strategy="no", report_to=[], disable_tqdm=True)


def _language_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 3, "n_head": 2, "n_embd": 16, "vocab_size": 32, "bos_token_id": 0, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False))


STOCK: dict[str, Callable[[dict[str, Any]], Any]] = {
    "pipe": lambda names: _pipeline(),
    "transformer": lambda names: tiny.flux_transformer().to(tiny.device()),
    "batches": lambda names: [tiny.flux_inputs(seed) for seed in range(2)],
    "compute_loss": lambda names: lambda model, batch: model(**batch)[0].square().mean(),
    "optimizer": lambda names: torch.optim.AdamW(names["transformer"].parameters()),
    "language_model": lambda names: _language_model(),
    "data": lambda names: [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)],
    "arguments": lambda names: _trainer_arguments(),
}
"""What blocks find under these names, if no block before has made something else, from the names that are there."""
LORAS = ("style.safetensors", "face.safetensors")
_SIZES = {"height": 16, "width": 16, "max_sequence_length": 16, "num_inference_steps": 1}
SMALL: dict[type, dict[str, Any]] = {
    FluxPipeline: _SIZES,
    WanPipeline: {**_SIZES, "num_frames": 5, "output_type": "latent"},
}

_ON_A_GPU = "run on a GPU:"
_BLOCK = re.compile(r"^( *)```(\w*)[ ]*([^\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    language: str
    mark: str
    """What the fence says behind the language: "run", "run on a GPU: REASON", or nothing."""
    code: str
    line: int

    @property
    def needs_gpu(self) -> str:
        """The reason why it is run on a GPU only; empty if it is run without one."""
        return self.mark.removeprefix(_ON_A_GPU).strip() if self.mark.startswith(_ON_A_GPU) else ""


def blocks(page: str) -> Iterator[Block]:
    for found in _BLOCK.finditer(page):
        yield Block(found[2], found[3].strip(), found[4], page[: found.start()].count("\n") + 1)


def python_blocks(file: Path) -> list[Block]:
    return [block for block in blocks(file.read_text()) if block.language == "python"]


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
        """Run a block. A module that a block before has offloaded by itself is restored if this one offloads modules too."""
        code = code.replace("/nvme/", f"{self._folder}/nvme/")
        tree = ast.parse("\n" * line + code, file)
        handle = self._names.get("handle")
        if isinstance(handle, OffloadHandle) and "apply_group_offloading(" in code:
            handle.remove()
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        wanted = {node.id for node in names} - {node.id for node in names if isinstance(node.ctx, ast.Store)}
        for name, make in STOCK.items():
            if name in wanted and name not in self._names:
                self._names[name] = make(self._names)
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


if __name__ == "__main__":
    page = Path(sys.argv[1]).resolve()
    with pytest.MonkeyPatch.context() as patch:
        world = World(Path(sys.argv[2]), patch)
        for block in python_blocks(page):
            world.run(block.code, str(page), block.line)
