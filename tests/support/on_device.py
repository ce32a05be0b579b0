"""Models on the simulated device: how a test offloads and calls them, and `exercise`, which does both at random."""

from __future__ import annotations

import copy
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from group_offload import OffloadHandle, api, apply_group_offloading
from group_offload.base.release import wait_for_releases
from group_offload.config import ModelOptions, OffloadConfig

from .asserts import same_bits
from .inside import engine_of
from .models import DIM, RoutedModel, Stop, stay
from .reads import late_reads, watch_file_reads
from .rigs import run
from .simulated import SimulatedDevice, use_simulated_device
from .speeds import use_speeds
from .tuning import tune

MODES: list[dict[str, Any]] = [
    {},
    {"record_stream": True},
    {"offload_type": "leaf_level"},
    {"offload_type": "leaf_level", "record_stream": True},
]
any_mode = pytest.mark.parametrize("options", MODES, ids=str)


def lay_in_file(model: nn.Module, path: Path) -> nn.Module:
    """Leave the model as a loader that copies nothing does: its weights are views of the file."""
    if not path.exists():
        save_file(model.state_dict(), path)
        os.utime(path, (1e9, 1e9))  # so that a change shows in the time, however soon it comes
    model.load_state_dict(load_file(path), assign=True)
    return model


def from_file(model: nn.Module, path: Path) -> nn.Module:
    return lay_in_file(copy.deepcopy(model), path)


def twin_on(tier: str, model: nn.Module, folder: Path) -> tuple[Any, dict[str, Any]]:
    """A copy of the model, and the options that offload it to a tier: "ram", or group files or a checkpoint in a folder."""
    if tier == "checkpoint":
        return from_file(model, folder / "model.safetensors"), {"offload_device": "disk"}
    return copy.deepcopy(model), {"offload_to_disk_path": folder} if tier == "folder" else {}


@contextmanager
def compression(pinned_share: float = 0.5) -> Iterator[None]:
    """Let small blobs be compressed, the larger ones in several strips, and what is stored in files. With a share of 0
    compressed bytes are read from a folder."""
    with pytest.MonkeyPatch.context() as patch:
        tune(patch, min_compressed_bytes=4096, strip_bytes=24 << 10, pinned_share=pinned_share)
        yield


def offload(model: nn.Module, *, ram_quota_bytes: int | None = None, **options: Any) -> OffloadHandle:
    """Offload it on the CPU, which is what the simulated device stands for.

    Args:
        ram_quota_bytes: What it gets of the budget for RAM, in bytes.
    """
    if ram_quota_bytes is None:
        return apply_group_offloading(model, "cpu", **options)
    config = OffloadConfig.from_options(ModelOptions(onload_device="cpu", **options), model)
    return api.offload(model, replace(config, ram_quota_bytes=ram_quota_bytes))


def forward(device: SimulatedDevice, model: nn.Module, x: torch.Tensor, stream: Any = None) -> torch.Tensor:
    """Enqueue a forward; the output is on the device, and mostly not computed yet."""
    with torch.no_grad(), device.use_stream(stream or device.current_stream()), device.running():
        result: torch.Tensor = model(device.put(x))
    return result


class Twins:
    """A model on the simulated device and its resident twin: called alike, and edited alike.

    At the end of the `with` block the model is restored, and nothing is left on the device or pinned.
    """

    def __init__(self, device: SimulatedDevice, model: Any, resident: Any = None, **options: Any) -> None:
        """
        Args:
            resident: None for a copy of the model.
        """
        self.device, self.model = device, model
        self.resident = copy.deepcopy(model) if resident is None else resident
        self.handle = offload(model, **options)
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __enter__(self) -> Twins:
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        if kind is None:
            self.check()
            self.handle.remove()
            assert_same_state(self.model, self.resident, self.device)
            self.forget()
            wait_for_releases()
            self.device.synchronize()
            assert self.device.pinned_bytes == 0 and self.device.allocated_bytes == 0

    def forget(self) -> None:
        """Free the activations that the models keep."""
        for module in (*self.model.modules(), *self.resident.modules()):
            getattr(module, "alive", []).clear()

    def step(self, part: str = "", x: torch.Tensor | None = None) -> None:
        """A forward of both, or of a part of them. Nobody asks for the output before `check`."""
        x = torch.randn(3, DIM).to(next(self.resident.parameters()).dtype) if x is None else x
        output = forward(self.device, self.model.get_submodule(part), x)
        self._pending.append((output, run(self.resident.get_submodule(part), x)))

    def run(self, passes: int = 1, x: torch.Tensor | None = None) -> None:
        """Forwards, each of which is checked before the next one."""
        for _ in range(passes):
            self.step(x=x)
            self.forget()
            self.check()

    def edit(self, change: Callable[..., object], *args: Any) -> None:
        with self.device.running():
            change(self.model, *args)
        change(self.resident, *args)

    def check(self) -> None:
        """All outputs so far, and the weights, are those of the resident twin."""
        for output, expected in self._pending:
            assert same_bits(self.device.get(output), expected)
        self._pending.clear()
        assert_same_state(self.model, self.resident, self.device)


@contextmanager
def several(device: SimulatedDevice, *twins: Twins) -> Iterator[tuple[Twins, ...]]:
    """In the end all models are right and restored, and nothing is left on the device or pinned."""
    yield twins
    for each in twins:
        each.check()
    for each in twins:
        each.handle.remove()
        assert_same_state(each.model, each.resident, device)
    device.synchronize()
    for each in twins:
        each.forget()
    device.synchronize()
    assert device.pinned_bytes == 0 and device.allocated_bytes == 0


def exercise(seed: int, laziness: Any, options: dict[str, Any]) -> OffloadHandle:
    """Some passes of a random model, in random order and on random streams, with edits in between: every output is right."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    device = SimulatedDevice(seed, laziness)
    is_compressed, has_budget = bool(options.get("compress")), "vram_budget" in options
    choices = [4, 24, 600, 600, 900] if is_compressed else [4, 8, 8, 24, 40]  # the small ones are not worth compressing
    widths = [rng.choice(choices) for _ in range(rng.randint(1, 6))]
    model = RoutedModel(widths, counts=rng.random() < 0.3)
    dtype = torch.bfloat16 if is_compressed else torch.float32
    model.to(dtype)
    resident = copy.deepcopy(model)
    other_model = RoutedModel([rng.choice([8, 32])] * 2).to(dtype)
    streams = [device.current_stream(), device.new_stream()]
    options = dict(options)
    in_files, in_checkpoint, reads_compressed = (
        options.pop(name, False) for name in ("in_files", "in_checkpoint", "reads_compressed")
    )
    with ExitStack() as stack:
        stack.enter_context(use_simulated_device(device))
        stack.enter_context(watch_file_reads(device))
        if is_compressed:
            stack.enter_context(compression())
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if has_budget:
            tune(patch, device_margin_bytes=0)
            use_speeds(patch, h2d=2, disk=1)  # a simulated second is one thing that ran
        if in_checkpoint:
            model = from_file(resident, Path(folder) / "model.safetensors")
            options["offload_device"] = "disk"
        if reads_compressed:  # RAM has room for none of the compressed bytes, or for some
            room = rng.choice([0, 1]) * sum(parameter.nbytes for parameter in model.parameters()) * 2 // 3
            patch.setattr("group_offload.runtime.compressor.available_ram", lambda: room)
        if in_files or reads_compressed:
            options["offload_to_disk_path"] = folder
        if in_files or in_checkpoint:
            stack.enter_context(late_reads(rng))
        if not options.pop("is_told_of_edits", True):
            patch.setattr("group_offload.stores.pinned.can_detect_writes", lambda: False)
        one, other = stack.enter_context(
            several(device, Twins(device, model, resident, **options), Twins(device, other_model))
        )
        for _ in range(8 if has_budget else 4):  # a budget is used once passes were measured
            route = list(range(len(widths)))
            if rng.random() < 0.5:
                route = [rng.randrange(len(widths)) for _ in range(rng.randint(0, 8))]
            model.route = resident.route = route
            model.stop_at = resident.stop_at = rng.randrange(len(route)) if route and rng.random() < 0.15 else -1
            if rng.random() < 0.3:  # blocks that compute on streams of their own, one after another
                model.on_block = hop_between(device, streams)
            x = torch.randn(3, DIM).to(dtype)
            try:
                with device.use_stream(rng.choice(streams)):
                    one.step(x=x)
            except Stop:
                with pytest.raises(Stop):
                    run(resident, x)
            model.on_block = stay
            assert_same_state(model, resident, device)
            if rng.random() < 0.3:
                with device.use_stream(rng.choice(streams)):
                    other.step(x=x)
            if rng.random() < 0.4:  # while kernels, and copies unless somebody waited, are on their way
                edit(device, rng, model, resident)
        assert one.handle.stats().forward_passes >= 1
    return one.handle


def hop_between(device: SimulatedDevice, streams: list[Any]) -> Callable[[int], Any]:
    @contextmanager
    def on_block(position: int) -> Iterator[None]:
        before, mine = device.current_stream(), streams[position % 2]
        event = device.new_event()
        event.record(before)
        mine.wait_event(event)  # what a caller owes for its activations; the weights are the engine's business
        with device.use_stream(mine):
            yield
        event = device.new_event()
        event.record(mine)
        before.wait_event(event)

    return on_block


def edit(device: SimulatedDevice, rng: random.Random, model: RoutedModel, resident: RoutedModel) -> None:
    name = rng.choice([name for name, _ in model.named_parameters()])
    with device.running(), torch.no_grad():
        if rng.random() < 0.5:
            model.get_parameter(name).data.mul_(2)
        else:
            model.get_parameter(name).data = model.get_parameter(name).data * 2
    resident.get_parameter(name).data.mul_(2)


def assert_same_state(model: nn.Module, resident: nn.Module, device: SimulatedDevice) -> None:
    with device.running():
        for (name, value), expected in zip(model.state_dict().items(), resident.state_dict().values(), strict=True):
            assert same_bits(value, expected), name


@contextmanager
def options_for(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The options for `offload`, with a folder for `in_files`."""
    with tempfile.TemporaryDirectory() as folder:
        real = {name: value for name, value in options.items() if name != "in_files"}
        yield {**real, "offload_to_disk_path": folder} if options.get("in_files") else real


def assert_reads_have_owners(handle: OffloadHandle) -> None:
    """Every read ahead has a group that waits for it; without one it would keep its part of the staging memory for good."""
    engine = engine_of(handle)
    engine.transfer.reader.wait_until_enqueued()
    assert set(engine.transfer.reader._jobs) <= {ahead.job for ahead in engine._prefetcher._ahead.values()}


def on_their_way(device: SimulatedDevice) -> int:
    """Copies to the device that were enqueued and have not run."""
    return sum(work.access.label == "copy H2D" for stream in device._streams for work in stream.queue)


def raise_interrupt(*args: Any, **kwargs: Any) -> None:
    raise KeyboardInterrupt
