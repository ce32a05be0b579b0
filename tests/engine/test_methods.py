"""Methods that compute with weights, and are called by themselves: `vae.decode(latents)`."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from group_offload import ModuleError, apply_group_offloading

from ..support.asserts import assert_at_rest, assert_same
from ..support.on_device import any_mode, offload
from ..support.rigs import OnloadedOnly, gradient_of_input, offload_to, pair
from ..support.simulated import SimulatedDevice, use_simulated_device

DIM = 8


class Normal(nn.Module):
    """Has weights and no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.scale = nn.Parameter(torch.randn(DIM)), nn.Parameter(torch.rand(DIM) + 1)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.mean) / self.scale

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.mean


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(DIM, DIM), nn.Parameter(torch.randn(DIM))

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x) * self.gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(x)


class Autoencoder(nn.Module):
    """Its methods compute with its own weights, with those of parts that nobody calls, and with blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.normal = Normal()
        self.inlet, self.outlet = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.down, self.up = (nn.ModuleList(Block() for _ in range(3)) for _ in range(2))
        self.register_buffer("shift", torch.randn(DIM))
        self.fails = False

    def encode(self, x: torch.Tensor, *, noise: torch.Tensor | None = None) -> torch.Tensor:
        x = self.inlet(x) + self.shift
        for block in self.down:
            x = block(x)
        if self.fails:
            raise ValueError("stop")
        x = self.normal.encode(x)
        return x if noise is None else x + noise

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(self.normal.decode(x), self.outlet.weight)
        for block in self.up:
            x = block(x)
        return x - self.shift

    def both(self, x: torch.Tensor) -> torch.Tensor:
        """A method that calls the forward, and so the other two."""
        return self(x * self.shift) + self.decode(x)

    def steps(self, x: torch.Tensor) -> torch.Tensor:
        """Calls no block, but a method of each."""
        for block in self.up:
            x = block.step(x)
        return x

    def many(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [each + self.shift for each in tensors]

    def stream(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield self.decode(x)

    def reset(self, factor: float) -> None:
        self.shift.mul_(factor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))


CALLS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "encode": lambda model, x: model.encode(x),
    "encode, by name": lambda model, x: model.encode(x=x, noise=x),
    "decode": lambda model, x: model.decode(x),
    "both": lambda model, x: model.both(x),
    "steps": lambda model, x: model.steps(x),
    "a block's": lambda model, x: model.up[1].step(x),
    "many": lambda model, x: tuple(model.many([x, x + 1])),
    "a part's": lambda model, x: model.normal.encode(x),
    "forward": lambda model, x: model(x),
}
METHODS = {"encode", "decode", "both", "many", "reset"}
"""Those with a gate. A generator has none: programs ask what it is, and its call is over before it needs a weight."""


def called(model: Any, call: Callable[[Any, Any], Any], x: torch.Tensor) -> Any:
    with torch.no_grad():
        return call(model, x)


def check(model: Any, reference: Any, passes: int = 2) -> None:
    for _ in range(passes):
        for call in CALLS.values():
            x = torch.randn(2, DIM)
            with OnloadedOnly(model):
                assert_same(called(model, call, x), called(reference, call, x))
            assert_at_rest(model, reference)


def test_bits(level: str, folder: Path | None) -> None:
    """No weight is read where it rests, whichever method is called, in whichever order. Whoever took a method while the model
    was offloaded has it afterwards. Hazard: a pipeline reads weights outside of any `forward` (diffusers #13666, #14695)."""
    model, reference = pair(Autoencoder)
    before = {name: set(vars(part)) for name, part in model.named_modules()}
    handle = offload_to(folder, model, level)
    check(model, reference)
    encode, x = model.encode, torch.ones(1, DIM)
    assert {name for name in vars(model) if name in vars(Autoencoder)} == METHODS
    assert inspect.signature(encode) == inspect.signature(reference.encode)
    assert encode.__name__ == "encode" and encode.__self__ is model
    assert callable(encode) and not hasattr(encode, "missing")
    passes = handle.stats().forward_passes
    assert_same(*(called(each, lambda each, x: next(each.stream(x)), x) for each in (model, reference)))
    assert inspect.isgeneratorfunction(model.stream) and handle.stats().forward_passes == passes + 1
    handle.remove()
    assert {name: set(vars(part)) for name, part in model.named_modules()} == before
    assert_same(called(model, CALLS["both"], x), called(reference, CALLS["both"], x))
    assert_same(called(model, lambda _, x: encode(x), x), called(reference, CALLS["encode"], x))


@any_mode
def test_stream_order(options: dict[str, Any]) -> None:
    """A call is one pass, and predicts the next one like it: the blocks of a decode come ahead of its compute, beside calls of
    other methods with another order."""
    model, reference = pair(Autoencoder)
    device = SimulatedDevice(3, "lazy")
    with use_simulated_device(device):
        handle = offload(model, **options)
        outputs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for calls in (CALLS, CALLS, *[("encode", "decode")] * 4):
            before = handle.stats()
            for name in calls:
                x = torch.randn(2, DIM)
                with device.running(), OnloadedOnly(model):
                    found = called(model, CALLS[name], device.put(x))
                outputs += zip(tree_leaves(found), tree_leaves(called(reference, CALLS[name], x)), strict=True)
            after = handle.stats()
        assert after.forward_passes - before.forward_passes == 2 and after.stalls == before.stalls
        while outputs:
            output, expected = outputs.pop()
            assert torch.equal(device.get(output), expected)
        device.synchronize()
        del found, output
        handle.remove()
        assert device.allocated_bytes == 0


def test_parts_that_are_not_called_are_not_looked_at() -> None:
    """Hazard: an encoder that was freed, or is another one by now, stops calls of the decoder."""
    model, reference = pair(Autoencoder())
    offload_to(None, model)
    x = torch.randn(2, DIM)
    check(model, reference)
    model.down.to("meta")
    for call in (CALLS["a block's"], lambda model, x: model.up[0](x)):
        assert_same(called(model, call, x), called(reference, call, x))
    with pytest.raises(ModuleError, match="meta"):
        model(x)


def test_gradients_with_a_checkpoint() -> None:
    """The method is called again in backward, outside of any pass."""
    model, reference = pair(Autoencoder)
    for each in (model, reference):
        each.requires_grad_(False)
    offload_to(None, model, "leaf_level")
    for _ in range(2):
        assert_same(
            *(gradient_of_input(each.decode, torch.ones(2, DIM), is_checkpointing=True) for each in (model, reference))
        )


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("what", ["method", "blocks"])
def test_compiled(what: str, is_late: bool, level: str) -> None:
    """As users of diffusers do it, before and after offloading: the graphs contain no weight that moves, and no gate."""
    model, reference = pair(Autoencoder)
    backend = torch._dynamo.testing.CompileCounterWithBackend("eager")
    handle = offload_to(None, model, level) if is_late else None
    if what == "method":
        model.decode = torch.compile(model.decode, backend=backend)
    else:
        for block in (*model.down, *model.up):
            block.compile(backend=backend, fullgraph=True)
    handle = handle or offload_to(None, model, level)
    for turn in range(3):
        x = torch.randn(2, DIM)
        assert_same(called(model, CALLS["decode"], x), called(reference, CALLS["decode"], x))
        assert handle.stats().forward_passes == turn + 1
    if what == "blocks":
        assert backend.frame_count == 1  # equal blocks share it
        assert not any("step" in vars(block) for block in (*model.down, *model.up)) and "decode" in vars(model)
    handle.remove()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_resident(duplicate: Callable[[Any], Any]) -> None:
    """What is called without a tensor changes offloaded weights."""
    model, reference = pair(Autoencoder)
    handle = offload_to(None, model, "leaf_level")
    for each in (model, reference):
        each.reset(2.0)
    assert handle.stats().forward_passes == 0
    check(model, reference, passes=1)
    other = duplicate(model)
    handle.remove()
    model.reset(0)
    assert other.encode.__self__ is other
    for call in CALLS.values():
        assert_same(called(other, call, torch.ones(2, DIM)), called(reference, call, torch.ones(2, DIM)))
    offload_to(None, other, "leaf_level")
    check(other, reference, passes=1)


@pytest.mark.parametrize("is_late", [False, True])
def test_methods_of_an_instance(is_late: bool) -> None:
    """A library may replace a method of one module, before it is offloaded or after."""
    model, reference = pair(Autoencoder)
    handle = apply_group_offloading(model, "cpu") if is_late else None
    for each in (model, reference):
        before = each.decode
        each.decode = MethodType(lambda self, x, before=before: before(x) + 1, each)
    handle = handle or apply_group_offloading(model, "cpu")
    mine = model.decode
    check(model, reference)
    for each in (model, reference):
        each.up.append(copy.deepcopy(each.up[0]))  # it is cut into groups again
    check(model, reference)
    handle.remove()
    assert is_late is (model.decode is mine)
    assert_same(called(model, CALLS["both"], torch.ones(1, DIM)), called(reference, CALLS["both"], torch.ones(1, DIM)))
