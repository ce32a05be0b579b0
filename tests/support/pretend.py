"""A pipeline of plain modules on the simulated device, whose models run one after another as a test says."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from group_offload import OffloadHandle, enable_group_offload

from .models import WIDTH, Model, make
from .on_device import forward, from_file
from .rigs import run
from .simulated import SimulatedDevice

IMAGE = ("encoder", *["transformer"] * 3, "vae")
"""The models that an image takes, in order."""
WITH_EXPERTS = ("encoder", *["transformer"] * 4, *["transformer_2"] * 4, "vae")
WITH_CONTROLNET = ("encoder", *["controlnet", "transformer"] * 3, "vae")


@dataclass(slots=True, kw_only=True)
class Passed:
    """What one pass of a model took."""

    name: str
    before: int
    """Onloads that were started before the model was called."""
    onloads: int
    """All of them since the model's last pass."""
    stalls: int
    num_bytes: int
    """Of those onloads."""
    resident_bytes: int


class PretendPipeline:
    """Order of use: make it, `offload`, then `image` as often as wanted. Each output is compared with the resident model's."""

    model_cpu_offload_seq = "encoder->transformer->vae"

    def __init__(self, device: SimulatedDevice, *, folder: Path | None = None, **blocks: int) -> None:
        """
        Args:
            folder: For models whose weights are views of files.
            blocks: The number of blocks of each model, by its name.
        """
        self.device = device
        blocks = {"encoder": 3, "transformer": 5, "vae": 4, "controlnet": 3, **blocks}
        self.resident: dict[str, nn.Module] = {
            name: make(Model, blocks[name], seed=number) for number, name in enumerate(blocks)
        }
        self.components: dict[str, nn.Module] = {
            name: copy.deepcopy(model) if folder is None else from_file(model, folder / f"{name}.safetensors")
            for name, model in self.resident.items()
        }
        self.handles: dict[str, OffloadHandle] = {}
        self._seen: dict[str, tuple[int, int]] = {}

    def offload(self, **options: Any) -> PretendPipeline:
        self.handles = enable_group_offload(self, onload_device="cpu", **{"vram_budget": None, **options})
        return self

    def call(self, name: str, x: torch.Tensor | None = None) -> Passed:
        handle, model = self.handles[name], self.components[name]
        x = torch.randn(3, WIDTH) if x is None else x
        before, seen = handle.stats(), self._seen.get(name, (0, 0))
        found = self.device.get(forward(self.device, model, x))
        assert torch.equal(found, run(self.resident[name], x)), name
        assert not self.device.errors
        now = handle.stats()
        self._seen[name] = now.onloads, sum(now.bytes_onloaded.values())
        return Passed(
            name=name,
            before=before.onloads - seen[0],
            onloads=now.onloads - seen[0],
            stalls=now.stalls - before.stalls,
            num_bytes=sum(now.bytes_onloaded.values()) - seen[1],
            resident_bytes=now.resident_bytes,
        )

    def image(self, names: tuple[str, ...] = IMAGE) -> list[Passed]:
        return [self.call(name) for name in names]

    def remove(self) -> None:
        for handle in self.handles.values():
            handle.remove()
        self.device.synchronize()
        assert self.device.allocated_bytes == 0 and self.device.pinned_bytes == 0


def settled(pipe: PretendPipeline, names: tuple[str, ...]) -> list[Passed]:
    """An image once all is learnt."""
    for _ in range(3):
        pipe.image(names)
    return pipe.image(names)


def peak_without_budget(device: SimulatedDevice) -> int:
    pipe = PretendPipeline(device).offload()
    device.reset_peak()
    for _ in range(2):
        pipe.image(WITH_CONTROLNET)
    peak = device.peak_bytes_in_use()
    pipe.remove()
    device.reset_peak()
    return peak
