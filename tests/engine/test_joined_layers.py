"""Leaf level after the first pass: layers of a block that follow one another move together, for the same bytes and memory."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from group_offload import OffloadHandle
from group_offload.runtime.engine import Engine

from ..support.inside import engine_of
from ..support.models import Blocks, Stop
from ..support.on_device import Twins, forward, offload
from ..support.rigs import check, pair, run
from ..support.simulated import SimulatedDevice, use_simulated_device
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


class Repeating(Attention):
    """Calls two layers in turns, and one of them in a row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.k(self.q(self.q(x)))
        x = self.out(self.v(x))
        return x + self.down(self.up(x))


class Choosing(Attention):
    """Calls its layers in the order that it is told, and catches an error of one."""

    order = "q k v out"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.order.split():
            try:
                x = self.get_submodule(name)(x)
            except Stop:
                x = x + 1
        return x


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


def set_order(model: Any, order: str) -> None:
    for block in model.blocks:
        block.order = order


def groups_of(handle: OffloadHandle) -> list[str]:
    return [group.group_id for group in handle.groups]


def joined(handle: OffloadHandle) -> list[str]:
    return [name for name in groups_of(handle) if " to " in name]


def largest_layer(handle: OffloadHandle) -> int:
    return max(part.blob.layout.num_bytes for group in engine_of(handle).groups for part in group.parts)


def outer_bytes(handle: OffloadHandle) -> int:
    return sum(group.num_bytes for group in engine_of(handle).groups if group.height)


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
                most = (5 if "record_stream" in options else 2) * largest_layer(twins.handle) + outer_bytes(
                    twins.handle
                )
    assert sent[1] <= sent[0]
    assert peaks[1] <= most


def test_layers_are_joined_in_the_order_of_their_calls(device: SimulatedDevice) -> None:
    with Twins(device, blocks(), **LEAF) as twins:
        for _ in range(3):
            twins.step()
        names = {name for name in groups_of(twins.handle) if name.startswith("blocks.1.")}
        assert names == {"blocks.1.norm to blocks.1.out", "blocks.1.up", "blocks.1.down"}
        assert twins.handle.stats().stalls <= 2 + 7 * 4  # those of the first pass


def test_a_layer_that_is_not_called_is_parted_from_others(device: SimulatedDevice) -> None:
    """Else each pass would send it in vain."""
    with Twins(device, blocks(Choosing), **LEAF) as twins:
        for _ in range(3):
            twins.step()
        assert "blocks.0.q to blocks.0.out" in joined(twins.handle)
        twins.edit(set_order, "q k out")
        for _ in range(2):
            twins.step()
        assert not joined(twins.handle)
        twins.edit(set_order, "q k v out")
        for _ in range(2):
            twins.step()
        assert not joined(twins.handle)


def test_an_order_that_depends_on_data_leaves_layers_apart(device: SimulatedDevice) -> None:
    """The module is cut again a few times, and not in each pass."""
    with Twins(device, blocks(Choosing, 6), **LEAF) as twins:
        engine = engine_of(twins.handle)
        cuts = set()
        for number in range(24):
            names = ["out", *"qkv"]
            names.insert(number % 3, names.pop(number // 3 % 4))
            twins.edit(set_order, " ".join(names[number % 2 :]))
            twins.step()
            cuts.add(engine.groups)
        assert len(cuts) <= 5 and not joined(twins.handle)


def test_a_gate_in_between_takes_few_calls() -> None:
    """Those of Python and of C. A gate that brings a group takes two hundred and more."""
    counts: list[int] = []

    def count(frame: Any, event: str, arg: Any) -> None:
        counts[-1] += event in ("call", "c_call")

    class Counting(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.v(self.q(x))
            counts.append(0)
            sys.setprofile(count)
            x = self.k(x)
            sys.setprofile(None)
            return self.out(x)

    model, reference = pair(blocks(Counting))
    offload(model, **LEAF)
    x = torch.ones(3, DIM)
    for _ in range(4):
        assert torch.equal(run(model, x), run(reference, x))
    plain, mine = counts[-1], counts[-5]
    assert mine - plain <= 45 < counts[0] - plain


@pytest.mark.parametrize("change", ["edit", "replace", "add", "cast back"])
def test_a_changed_layer_among_joined_ones(change: str, device: SimulatedDevice) -> None:
    def edit(model: Any) -> None:
        block = model.blocks[1]
        with torch.no_grad():
            if change == "edit":
                block.k.weight.mul_(2)
            elif change == "replace":
                block.k.weight.data = torch.ones(DIM, DIM)
            elif change == "add":
                torch.manual_seed(1)
                block.k = nn.Linear(DIM, DIM)
            else:
                block.k.to(torch.float64).to(torch.float32)

    with Twins(device, blocks(), **LEAF) as twins:
        for number in range(8):
            if number in (1, 3, 4):
                twins.edit(edit)
            twins.step()
        assert joined(twins.handle)


def test_an_edit_in_the_middle_of_joined_layers(device: SimulatedDevice) -> None:
    """A layer that has yet to be called is on the device by then: the edit is made there, and is brought back."""

    class Editing(Attention):
        edits = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.q(x)
            if self.edits:
                with torch.no_grad():
                    self.k.weight.mul_(2)
                    self.v.bias.add_(1)
            return self.out(self.k(x)) + self.v(x)

    def set_edits(model: Any, edits: bool) -> None:
        model.blocks[1].edits = edits

    with Twins(device, blocks(Editing), **LEAF) as twins:
        for number in range(7):
            twins.edit(set_edits, number in (0, 3, 4))
            twins.step()
            twins.check()
        assert joined(twins.handle)


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
def test_an_error_in_a_layer_whose_group_is_there(error: type[BaseException], device: SimulatedDevice) -> None:
    fails = False

    def fail(*args: Any) -> None:
        if fails:
            raise error

    with Twins(device, blocks(Choosing), **LEAF) as twins:
        for model in (twins.model, twins.resident):
            for block in model.blocks:
                block.v.register_forward_pre_hook(fail)
        for number in range(9):
            fails = number in (4, 6)
            if fails and error is KeyboardInterrupt:
                with pytest.raises(KeyboardInterrupt):
                    forward(device, twins.model, torch.randn(3, DIM))
            else:
                twins.step()
        assert not any(group.holds for group in engine_of(twins.handle).groups)


def test_a_layer_that_calls_another_one(device: SimulatedDevice) -> None:
    """A hook of a joined layer calls a layer of another group, and one of its own."""
    with Twins(device, blocks(), **LEAF) as twins:
        for model in (twins.model, twins.resident):
            first, last = model.blocks[0], model.blocks[3]
            first.k.register_forward_hook(lambda module, args, output, up=last.up: output + up(args[0])[:, :DIM])
            first.q.register_forward_hook(lambda module, args, output, v=first.v: output + v(args[0]))
        for _ in range(6):
            twins.step()


class Two(nn.Module):
    """A forward, and a method that needs the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)

    def back(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


WITHOUT_SOURCE = """
class Calling(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Two() for _ in range(12))
    def forward(self, x):
        for block in self.blocks:
            x = block.back(block(x))
        return x
"""
"""Nothing is known of the calls in this forward before they come."""


@pytest.mark.parametrize("options", [LEAF, {**LEAF, "record_stream": True}, {"record_stream": True}], ids=str)
def test_a_method_that_needs_a_group_between_calls(options: dict[str, Any], device: SimulatedDevice) -> None:
    """Passes learn that it was called, though the group is there. Else every second one would send each group twice."""
    names: dict[str, Any] = {"nn": nn, "Two": Two}
    exec(WITHOUT_SOURCE, names)
    with Twins(device, names["Calling"](), **options) as twins:
        sent = []
        for _ in range(8):
            before = device.copied_bytes
            twins.step()
            twins.check()
            sent.append(device.copied_bytes - before)
        assert sent[3:] == [12 * 256] * 5


def test_memory_runs_out_in_joined_layers(device: SimulatedDevice) -> None:
    """In whichever call it does: the group that stays bound is given up, and the next forward is right."""
    with Twins(device, blocks(), **LEAF) as twins:
        for _ in range(4):
            twins.step()
            twins.check()
        assert any(" to " in group.group_id for group in twins.handle.groups)
        refused = 0
        for room in range(0, 32 << 10, 512):
            device.capacity = device.total.now + room
            try:
                twins.step()
            except torch.OutOfMemoryError:
                refused += 1
            device.capacity = 1 << 40
            twins.step()
            twins.check()
            engine = engine_of(twins.handle)
            assert not any(group.holds for group in engine.groups) and engine._passes.lingering is None
        assert 8 < refused < 64


def test_calls_on_other_streams(device: SimulatedDevice) -> None:
    """In one pass after another, and in the middle of joined layers."""
    streams = [device.current_stream(), device.new_stream()]

    class Hopping(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for name in "q", "k", "v", "out":
                there, here = streams[(name == "v") ^ (device.current_stream() is streams[1])], device.current_stream()
                event = device.new_event()
                event.record(here)
                there.wait_event(event)
                with device.use_stream(there):
                    x = self.get_submodule(name)(x)
                    event.record(there)
                here.wait_event(event)
                alive.append(x)
            return x

    alive: list[torch.Tensor] = []
    model = blocks(Hopping)
    reference = copy.deepcopy(model)
    for block in reference.blocks:
        block.forward = lambda x, block=block: block.out(block.v(block.k(block.q(x))))
    handle = offload(model, **LEAF)
    for number in range(8):
        x = torch.randn(3, DIM)
        output = forward(device, model, x, streams[number % 4 == 3])
        device.synchronize()
        assert torch.equal(device.get(output), run(reference, x))
        alive.clear()
    assert joined(handle)
    handle.remove()


def test_a_graph_parts_layers(device: SimulatedDevice) -> None:
    """Backward needs weights in an order of its own."""
    with Twins(device, blocks(), **LEAF) as twins:
        for _ in range(3):
            twins.step()
        assert joined(twins.handle)
        grads = []
        for model, put in ((twins.model, device.put), (twins.resident, torch.Tensor.clone)):
            x = torch.ones(3, DIM)
            model.requires_grad_(False)
            with device.running() if model is twins.model else torch.enable_grad():
                x = put(x).requires_grad_()
                model(x).sum().backward()
            assert x.grad is not None
            grads.append(x.grad)
        assert torch.equal(device.get(grads[0]), grads[1])
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
