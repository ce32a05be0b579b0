"""Modular diffusers: a manager that moves the components that are not offloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import ComponentsManager
from diffusers.modular_pipelines.components_manager import AutoOffloadStrategy
from diffusers.utils import torch_utils
from torch import nn

from group_offload import GroupOffloadStrategy, apply_group_offloading
from group_offload.api import handle_of

from ..support import tiny_models as tiny
from ..support.allocator import Memory
from ..support.asserts import snapshot
from ..support.models import inputs, make
from ..support.on_device import forward, offload
from ..support.rigs import run
from ..support.simulated import SimulatedDevice, use_simulated_device

MIB = 1 << 20


class Other(nn.Module):
    """A component that is on the device until it is asked to leave."""

    def __init__(self, num_bytes: int, place: torch.device) -> None:
        super().__init__()
        self.num_bytes, self.device = num_bytes, place

    def get_memory_footprint(self) -> int:
        return self.num_bytes

    def to(self, place: Any) -> Other:  # type: ignore[override]
        self.device = torch.device(place)
        return self


def tell_of_room(patch: pytest.MonkeyPatch, device: torch.device, room: Callable[[], int]) -> None:
    """Tell managers that a device has so many free bytes."""
    backend = getattr(torch_utils, "TorchDeviceBackend", None)  # diffusers 0.36 to 0.39 ask torch itself
    asked = getattr(torch, device.type, torch.cuda) if backend is None else backend
    patch.setattr(asked, "mem_get_info", lambda *_: (room(), 1 << 40), raising=False)


class Managed:
    """Our model among the components of a manager, with others that are on the device."""

    def __init__(self, patch: pytest.MonkeyPatch, device: torch.device, free: int, *sizes: int) -> None:
        self.place = torch.device(device.type, 0)
        self.free = free
        tell_of_room(patch, device, lambda: self.room)
        self.model = tiny.flux_transformer()
        self.others = [Other(size, self.place) for size in sizes]
        self.manager = ComponentsManager()
        for number, part in enumerate([self.model, *self.others]):
            self.manager.add(f"part{number}", part)

    def offload(self) -> Any:
        return apply_group_offloading(self.model, self.place, num_blocks_per_group=1)

    def manage(self) -> None:
        self.manager.enable_auto_cpu_offload(self.place, memory_reserve_margin="0MB")
        for other in self.others:
            other.to(self.place)

    def begin(self, order: str) -> None:
        for step in (self.offload, self.manage)[:: 1 if order == "ours first" else -1]:
            step()

    @property
    def room(self) -> int:
        """The device memory that is free, with that of others who left."""
        return self.free + sum(other.num_bytes for other in self.others if other.device != self.place)

    @property
    def are_there(self) -> list[bool]:
        return [other.device == self.place for other in self.others]

    def run(self) -> torch.Tensor:
        return tiny.call(self.model, tiny.flux_inputs())


@pytest.mark.parametrize("order", ["ours first", "the manager first"])
@pytest.mark.parametrize(("free", "stay"), [(1 << 40, [True, True]), (0, [True, False])])
def test_others_make_room(
    free: int, stay: list[bool], order: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest of them that is enough leaves, before the forward takes memory. Either ends first. Hazard: under a
    `ComponentsManager` an offloaded model evicts nobody (diffusers #14346, #14358)."""
    managed = Managed(monkeypatch, device, free, 64 * MIB, 32 * MIB)
    expected = tiny.call(tiny.flux_transformer().to(device), tiny.flux_inputs())
    managed.manage()
    managed.manager.disable_auto_cpu_offload()
    before, seen = snapshot(managed.model.to(device)), list[list[bool]]()  # the manager leaves something behind
    managed.begin(order)
    hook = managed.model.transformer_blocks[0].register_forward_pre_hook(lambda *_: seen.append(managed.are_there))
    for _ in range(2):
        assert torch.equal(managed.run(), expected)
    assert seen == [stay, stay]
    handle = handle_of(managed.model)
    assert handle is not None
    for step in (handle.remove, managed.manager.disable_auto_cpu_offload)[:: 1 if free else -1]:
        step()
        managed.model.to(device)
        assert torch.equal(managed.run(), expected)
    hook.remove()
    assert snapshot(managed.model) == before


@pytest.mark.parametrize("looks_away", [False, True], ids=["diffusers", "transformers"])
def test_only_what_a_pass_takes_counts(looks_away: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that take turns need less than all of them at once, also for a model that says it is in RAM. Hazard:
    under a `ComponentsManager` all weights of an offloaded model are counted."""
    managed = Managed(monkeypatch, device, 0, 64 * MIB)
    handle = managed.offload()
    managed.free = handle._live.placer.missing_bytes + 1
    assert managed.free < managed.model.get_memory_footprint()
    managed.manage()
    if looks_away:
        monkeypatch.setattr(type(managed.model), "device", torch.device("meta"))
    managed.run()
    assert managed.are_there == [True]
    managed.free = -1
    managed.run()
    assert managed.are_there == [False]


@pytest.mark.parametrize("kind", [AutoOffloadStrategy, GroupOffloadStrategy])
def test_resident_weights_give_way_to_a_whole_model(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before another whole model does. Hazard: residents fill the device, and a component that a manager moves there finds no
    memory."""
    model, resident = make(), make()
    whole = nn.Linear(16, 16)
    num_bytes = sum(each.nbytes for each in whole.parameters())
    card = Memory(8 << 30)
    with use_simulated_device(SimulatedDevice(0, "eager", card=card)) as device:
        handle = offload(model, vram_budget="auto")
        for seed in range(3):
            assert torch.equal(device.get(forward(device, model, inputs(seed))), run(resident, inputs(seed)))
        kept = handle.stats().resident_bytes
        tell_of_room(monkeypatch, torch.device("cuda"), lambda: card.free_bytes)
        strategy = kind("0MB")
        assert strategy([], "whole", whole, device.device) == [] and handle.stats().resident_bytes == kept > num_bytes
        card.other_takes(card.free_bytes)
        with pytest.raises(torch.OutOfMemoryError):
            device.empty(num_bytes)
        assert strategy([], "whole", whole, device.device) == []
        moved = device.empty(num_bytes)  # as the manager does now
        assert 0 < kept - handle.stats().resident_bytes < kept
        assert torch.equal(device.get(forward(device, model, inputs(0))), run(resident, inputs(0)))
        del moved
        handle.remove()
