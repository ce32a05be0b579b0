"""Writes checkpoints as `save_pretrained` does, without the model as a whole being in RAM, and files side by side."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from machine import GIB
from models import Model, make_model, own_dtype, random_values
from processes import say
from torch import nn

_BUFFER_BYTES = 32 << 20
_NUM_THREADS = 8
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def save(model: Model, device: torch.device, folder: Path, max_shard_bytes: int | None = None) -> None:
    """Write the model's checkpoint: the weights of `make_model`. It is on the drive, and in the page cache, afterwards.

    Args:
        max_shard_bytes: default: what `save_pretrained` takes.
    """
    start = time.perf_counter()
    with torch.device("meta"):
        module: Any = model.build().eval()
    shards = {} if max_shard_bytes is None else {"max_shard_size": max_shard_bytes}
    if _is_plain(module):
        _write(module, model, device, folder, **shards)
    else:
        make_model(model, device, resident=False).save_pretrained(folder, **shards)  # type: ignore[operator]
        for file in folder.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
    size = sum(file.stat().st_size for file in folder.iterdir())
    took = time.perf_counter() - start
    say(f"checkpoint of {size / GIB:.2f} GiB saved in {took:.1f} s")


def _is_plain(module: nn.Module) -> bool:
    """One of diffusers' models whose checkpoint has its parameters, each by one name, and nothing else."""
    from diffusers import ModelMixin

    names = [name for name, _ in module.named_parameters()]
    return isinstance(module, ModelMixin) and set(names) == set(module.state_dict())


def _write(module: Any, model: Model, device: torch.device, folder: Path, max_shard_size: int | str = "10GB") -> None:
    from huggingface_hub import split_torch_state_dict_into_shards

    folder.mkdir(parents=True, exist_ok=True)
    float32_names = model.float32_names(module)
    weights = dict(module.named_parameters())
    meta = {
        name: torch.empty(weight.shape, dtype=own_dtype(name, model.dtype, float32_names), device="meta")
        for name, weight in weights.items()
    }
    plan = split_torch_state_dict_into_shards(
        meta, max_shard_size=max_shard_size, filename_pattern="diffusion_pytorch_model{suffix}.safetensors"
    )
    with ExitStack() as stack:
        places: dict[str, tuple[int, int]] = {}
        fds = []
        for filename, names in plan.filename_to_tensors.items():
            header, offsets = _header({name: meta[name] for name in names})
            fd = os.open(folder / filename, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            stack.callback(os.close, fd)
            fds.append(fd)
            os.pwrite(fd, header, 0)
            places |= {name: (fd, len(header) + offset) for name, offset in offsets.items()}
        # A file is written by one thread at a time, whatever is asked for: so the files take turns.
        turns = zip_longest(*plan.filename_to_tensors.values())
        numbers = {name: number for number, name in enumerate(weights, model.first_number)}
        writer = _Writer(device)
        for name in (name for turn in turns for name in turn if name is not None):
            values = random_values(weights[name].shape, meta[name].dtype, name, numbers[name], device)
            writer.write(values, *places[name])
        writer.finish()
        with ThreadPoolExecutor(len(fds)) as pool:
            list(pool.map(os.fsync, fds))
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        name = "diffusion_pytorch_model.safetensors.index.json"
        (folder / name).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    module.save_config(folder)  # last: it says that the checkpoint is there


def _header(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, int]]:
    """The beginning of a safetensors file, and where each tensor is behind it. In the order of the stock writer."""
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    offsets: dict[str, int] = {}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        offsets[name] = end
        end += tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": [*tensor.shape],
            "data_offsets": [offsets[name], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets


class _Writer:
    """Writes tensors of a device to files: one buffer is filled while others are written."""

    def __init__(self, device: torch.device) -> None:
        is_pinned = device.type != "cpu"
        self._free = [
            torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(2 * _NUM_THREADS)
        ]
        self._busy: deque[tuple[Future[None], torch.Tensor]] = deque()
        self._pool = ThreadPoolExecutor(_NUM_THREADS)

    def write(self, values: torch.Tensor, fd: int, position: int) -> None:
        for part in values.view(-1).view(torch.uint8).split(_BUFFER_BYTES):
            if not self._free:
                self._wait_for_one()
            buffer = self._free.pop()
            buffer[: part.numel()].copy_(part)
            task = self._pool.submit(_pwrite, fd, memoryview(buffer.numpy())[: part.numel()], position)
            self._busy.append((task, buffer))
            position += part.numel()

    def finish(self) -> None:
        while self._busy:
            self._wait_for_one()
        self._pool.shutdown()

    def _wait_for_one(self) -> None:
        task, buffer = self._busy.popleft()
        task.result()
        self._free.append(buffer)


def _pwrite(fd: int, data: Sequence[int] | memoryview, position: int) -> None:
    data = memoryview(data)
    while data:
        count = os.pwrite(fd, data, position)
        data, position = data[count:], position + count
