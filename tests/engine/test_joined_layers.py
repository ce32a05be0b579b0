"""Leaf level after the first pass: layers of a block that follow one another move together, for the same bytes and memory."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from group_offload import OffloadHandle
from group_offload.runtime.engine import Engine

from ..support.allocator import Memory
from ..support.inside import engine_of
from ..support.models import Blocks, Stop, make, stay
from ..support.on_device import Twins, forward, hop_between, offload
from ..support.rigs import check, gradient_of_input, pair, run
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.timed import TimedDevice
from ..support.tuning import tune

DIM = 8
LEAF: dict[str, Any] = {"offload_type": "leaf_level"}


class Attention(nn.Module):
    """Registers its layers in another order than it calls them in; the two largest are as large as the others together."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.v, self.k, self.q = (nn.Linear(DIM, DIM) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, 12 * DIM), nn.Linear(12 * DIM, DIM)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        x = x + self.out(self.q(x) * self.k(x) + self.v(x))
        return x + self.down(F.gelu(self.up(x)))


class Choosing(Attention):
    """Calls its layers in the order and on the streams that it is told, edits those that are yet to be called, and catches an
    error of one."""

    order = "q k v out"
    edits = False
    on_layer: Any = staticmethod(stay)

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[torch.Tensor] = []
        """The activations, some of which cross streams."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for position, name in enumerate(self.order.split()):
            self.alive.append(x)
            try:
                with self.on_layer(position % 3):
                    x = self.get_submodule(name)(x)
            except Stop:
                x = x + 1
            if self.edits and name == "q":
                with torch.no_grad():
                    self.k.weight.mul_(2)
                    self.v.bias.add_(1)
        self.alive.append(x)
        return x


class Repeating(Attention):
    """Calls two layers in turns, and one of them in a row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.k(self.q(self.q(x)))
        x = self.out(self.v(x))
        return x + self.down(self.up(x))


class Tied(Attention):
    """One weight belongs to two layers, which both need the group of it."""

    def __init__(self) -> None:
        super().__init__()
        self.k.weight = self.q.weight


class Branches(Attention):
    """Two parts whose layers come in turns: no two of a part follow one another."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(3))) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one, other in zip(*self.parts, strict=True):
            x = one(x) + other(x)
        return super().forward(x)


KINDS = [Attention, Repeating, Choosing, Tied, Branches]


@pytest.fixture(params=range(2))
def device(request: pytest.FixtureRequest) -> Iterator[SimulatedDevice]:
    gc.collect()
    with use_simulated_device(SimulatedDevice(request.param, "random")) as device:
        yield device


@pytest.fixture(autouse=True)
def _largest_layer_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in models of usual size, whose largest layer is larger than the smallest window."""
    tune(monkeypatch, min_window_bytes=1)


def blocks(kind: type[nn.Module] = Attention, count: int = 4) -> Blocks:
    torch.manual_seed(0)
    return Blocks(*(kind() for _ in range(count)))


def set_all(model: Any, name: str, value: object) -> None:
    for block in model.blocks:
        setattr(block, name, value)


def groups_of(handle: OffloadHandle) -> list[str]:
    return [group.group_id for group in handle.groups]


def joined(handle: OffloadHandle) -> list[str]:
    return [name for name in groups_of(handle) if " to " in name]


@pytest.mark.parametrize("options", [{}, {"record_stream": True}, {"use_stream": False}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_and_memory_are_those_of_single_layers(
    kind: type[nn.Module], options: dict[str, Any], device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that are sent together are all needed then, and take no more than the largest layer would."""
    sent, peaks = [], []
    for joins in (False, True):
        with monkeypatch.context() as patch:
            if not joins:
                patch.setattr(Engine, "_joined", lambda self, top, scope: scope)
            with Twins(device, blocks(kind), **LEAF, **options) as twins:
                for number in range(5):
                    twins.step()
                    twins.check()
                    if number == 2:
                        before = device.copied_bytes
                sent.append(device.copied_bytes - before)
                assert bool(joined(twins.handle)) is joins
                peaks.append(twins.handle.stats().peak_device_bytes)
                groups = engine_of(twins.handle).groups
                largest = max(part.blob.layout.num_bytes for group in groups for part in group.parts)
                outer = sum(group.num_bytes for group in groups if group.nesting)
                most = (5 if "record_stream" in options else 2) * largest + outer
    assert sent[1] <= sent[0]
    assert peaks[1] <= most


@pytest.mark.parametrize(
    ("at_most", "ends"),
    [
        (None, ("norm to blocks.1.out", "up", "down")),
        (2, ("norm to blocks.1.q", "k to blocks.1.v", "out", "up", "down")),
    ],
)
def test_layers_are_joined_in_the_order_of_their_calls(
    at_most: int | None, ends: tuple[str, ...], device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large ones stay apart: they would be held through what is computed between them. What adjoins in RAM is one copy."""
    with Twins(device, blocks(), **LEAF) as twins:
        if at_most is not None:
            layer = next(group for group in engine_of(twins.handle).groups if group.group_id == "blocks.1.q")
            tune(monkeypatch, max_joined_bytes=at_most * layer.num_bytes)
        for _ in range(3):
            twins.step()
            twins.check()
        names = {name for name in groups_of(twins.handle) if name.startswith("blocks.1.")}
        assert names == {f"blocks.1.{each}" for each in ends}
        assert twins.handle.stats().stalls <= 2 + 7 * 4  # those of the first pass
        assert all(len(group.copies()) <= 2 for group in engine_of(twins.handle).groups)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_sent_ahead_waits_and_gives_way_on_a_full_card(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(monkeypatch, min_window_bytes=44 << 20)
    rng = random.Random(seed)
    with use_simulated_device(TimedDevice(1e9, card=Memory(7680))), torch.no_grad():
        handle = offload(model := blocks(Choosing), **LEAF, record_stream=True)
        for _ in range(12):
            for block in model.blocks:
                block.order = " ".join(rng.sample(["out", *"qkv"], 4))
            model(torch.randn(2, DIM))
        assert not engine_of(handle).memory.arena.has_refused  # what an operator was refused


def test_an_order_that_depends_on_data_leaves_layers_apart(device: SimulatedDevice) -> None:
    """A layer that is not called would be sent in vain. The module is cut again a few times, and not in each pass."""
    with Twins(device, blocks(Choosing, 6), **LEAF) as twins:
        engine = engine_of(twins.handle)
        cuts = set()
        for number in range(24):
            names = ["out", *"qkv"]
            names.insert(number % 3, names.pop(number // 3 % 4))
            twins.edit(set_all, "order", " ".join(names[number % 2 :]))
            twins.step()
            cuts.add(engine.groups)
        assert len(cuts) <= 5 and not joined(twins.handle)


CHANGES: dict[Any, Callable[[Any], object]] = {
    "edit": lambda block: block.k.weight.data.mul_(2),
    "replace": lambda block: setattr(block.k.weight, "data", torch.ones(DIM, DIM)),
    "another layer": lambda block: setattr(block, "k", make(nn.Linear, DIM, DIM, seed=1)),
    "cast back": lambda block: block.k.to(torch.float64).to(torch.float32),
}


@pytest.mark.parametrize("seed", range(6))
def test_edits_and_errors_among_joined_layers(seed: int, device: SimulatedDevice) -> None:
    """Also in a forward, where a layer that has yet to be called is on the device; and by hooks that call other layers."""
    rng = random.Random(seed)
    error: Any = None

    def fail(*args: Any) -> None:
        if error is not None:
            raise error

    with Twins(device, blocks(Choosing), **LEAF) as twins:
        for model in (twins.model, twins.resident):
            for block in model.blocks:
                block.v.register_forward_pre_hook(fail)
            first, up = model.blocks[0], model.blocks[3].up
            if seed % 2:
                first.k.register_forward_hook(lambda module, args, output, up=up: output + up(args[0])[:, :DIM])
                first.q.register_forward_hook(lambda module, args, output, v=first.out: output + v(args[0]))
        for _ in range(12):
            event = rng.choice([*CHANGES, "in the forward", Stop, KeyboardInterrupt, None, None])
            error = event if isinstance(event, type) else None
            if event in CHANGES:
                twins.edit(lambda model, change=CHANGES[event]: change(model.blocks[1]))
            twins.edit(set_all, "edits", event == "in the forward")
            if event is KeyboardInterrupt:
                with pytest.raises(KeyboardInterrupt):
                    forward(device, twins.model, torch.randn(3, DIM))
            else:
                twins.step()
            if rng.random() < 0.5:
                twins.check()
            assert not any(group.holds for group in engine_of(twins.handle).groups)
        error = None
        for _ in range(3):
            twins.step()
        assert joined(twins.handle)


def test_memory_runs_out_in_joined_layers(device: SimulatedDevice) -> None:
    """The group that stays bound is given up, and the next forward is right.

    Hazard: the error is kept in a frame, which its traceback keeps, and with it the tensors of the call.
    """
    with Twins(device, blocks(), **LEAF) as twins:
        for _ in range(4):
            twins.step()
            twins.check()
        assert joined(twins.handle)
        refused, outputs, engine = 0, list[Any](), engine_of(twins.handle)
        twins.model.blocks[0].register_forward_hook(lambda *args: outputs.append(weakref.ref(args[-1])))
        for room in range(0, 32 << 10, 512):
            device.card.capacity = device.card.allocated.now + room
            try:
                twins.step()
            except torch.OutOfMemoryError:
                refused += 1
            device.card.capacity = 1 << 40
            assert not any(output() is not None for output in outputs)
            twins.step()
            twins.check()
            assert not any(group.holds for group in engine.groups) and engine._passes.lingering is None
        assert 8 < refused < 64


def test_calls_on_other_streams(device: SimulatedDevice) -> None:
    """In one pass after another, and in the middle of joined layers."""
    streams = [device.current_stream(), device.new_stream()]
    with Twins(device, blocks(Choosing), **LEAF) as twins:
        for block in twins.model.blocks:
            block.on_layer = hop_between(device, streams)
        for number in range(8):
            with device.use_stream(streams[number % 4 == 3]):
                twins.step()
            device.synchronize()
            twins.check()
        assert joined(twins.handle)


def test_a_graph_parts_layers(device: SimulatedDevice) -> None:
    """Backward needs weights in an order of its own."""
    with Twins(device, blocks(), **LEAF) as twins:
        for _ in range(3):
            twins.step()
        assert joined(twins.handle)
        twins.edit(lambda model: model.requires_grad_(False))
        with device.running():
            actual = gradient_of_input(twins.model, device.put(torch.ones(3, DIM)))
        assert torch.equal(device.get(actual), gradient_of_input(twins.resident, torch.ones(3, DIM)))
        assert not joined(twins.handle)
        twins.step()


@pytest.mark.parametrize("tier", ["ram", "file"])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_where_weights_rest(kind: type[nn.Module], tier: str, tmp_path: Path) -> None:
    """In place in RAM, and from files, which are those of single layers."""
    model, reference = pair(blocks(kind))
    handle = offload(model, **LEAF, offload_to_disk_path=tmp_path if tier == "file" else None)
    files = sorted(tmp_path.iterdir())
    check(model, reference, torch.randn(3, DIM), passes=4)
    assert joined(handle) and sorted(tmp_path.iterdir()) == files
    again = copy.deepcopy(model)
    handle.remove()
    assert torch.equal(run(again, torch.ones(3, DIM)), run(reference, torch.ones(3, DIM)))
