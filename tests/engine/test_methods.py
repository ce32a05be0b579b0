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
from torch.utils.checkpoint import checkpoint

from group_offload import apply_group_offloading

from ..support.asserts import assert_at_rest, assert_same
from ..support.on_device import any_mode, offload
from ..support.rigs import LEVELS, TIERS, OnloadedOnly, offload_to, pair
from ..support.simulated import Laziness, SimulatedDevice, use_simulated_device

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


def made() -> tuple[Any, Any]:
    return pair(Autoencoder)


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


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("level", LEVELS)
def test_bits(level: str, tier: str, tmp_path: Path) -> None:
    """No weight is read where it rests, whichever method is called, in whichever order."""
    model, reference = made()
    before = {name: set(vars(part)) for name, part in model.named_modules()}
    handle = offload_to(tmp_path if tier == "file" else None, model, level)
    check(model, reference)
    handle.remove()
    assert {name: set(vars(part)) for name, part in model.named_modules()} == before
    assert_same(called(model, CALLS["both"], torch.ones(1, DIM)), called(reference, CALLS["both"], torch.ones(1, DIM)))


@pytest.mark.parametrize("laziness", ["random", "lazy"])
@any_mode
def test_stream_order(options: dict[str, Any], laziness: Laziness) -> None:
    model, reference = made()
    device = SimulatedDevice(3, laziness)
    with use_simulated_device(device):
        handle = offload(model, **options)
        outputs = []
        for _ in range(2):
            for call in CALLS.values():
                x = torch.randn(2, DIM)
                with device.running(), OnloadedOnly(model):
                    outputs.append((called(model, call, device.put(x)), called(reference, call, x)))
        for output, expected in outputs:
            for one, other in zip(
                *(each if isinstance(each, tuple) else (each,) for each in (output, expected)), strict=True
            ):
                assert torch.equal(device.get(one), other)
        device.synchronize()
        del outputs, output, one
        handle.remove()
        assert device.allocated_bytes == 0


def test_a_call_is_one_pass_and_foresees_the_next_one_like_it() -> None:
    """The blocks of a decode come ahead of its compute, beside encodes with another order."""
    model, _ = made()
    device = SimulatedDevice(0, "lazy")
    with use_simulated_device(device):
        handle = offload(model)
        for turn in range(4):
            before = handle.stats()
            for call in (CALLS["encode"], CALLS["decode"]):
                with device.running():
                    called(model, call, device.put(torch.randn(2, DIM)))
            after = handle.stats()
            assert after.passes - before.passes == 2
            assert turn < 2 or after.stalls == before.stalls
        device.synchronize()
        handle.remove()


def test_gradients_with_a_checkpoint() -> None:
    """The method is called again in backward, outside of any pass."""
    model, reference = made()
    for each in (model, reference):
        each.requires_grad_(False)
    offload_to(None, model, "leaf_level")
    for _ in range(2):
        grads = []
        for each in (model, reference):
            x = torch.ones(2, DIM, requires_grad=True)
            checkpoint(each.decode, x, use_reentrant=False).sum().backward()
            grads.append(x.grad)
        assert_same(*grads)


def test_what_is_called_without_a_tensor_changes_weights_at_rest() -> None:
    model, reference = made()
    handle = offload_to(None, model, "block_level")
    num_passes = handle.stats().passes
    for each in (model, reference):
        each.reset(2.0)
    assert handle.stats().passes == num_passes
    check(model, reference)
    handle.remove()


def test_callers_see_the_method() -> None:
    model, reference = made()
    offload_to(None, model)
    assert {name for name in vars(model) if name in vars(Autoencoder)} == METHODS
    assert inspect.signature(model.encode) == inspect.signature(reference.encode)
    assert model.encode.__name__ == "encode" and model.encode.__self__ is model and model.decode
    assert callable(model.encode) and not hasattr(model.encode, "missing")


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_resident(duplicate: Callable[[Any], Any]) -> None:
    model, reference = made()
    handle = offload_to(None, model, "leaf_level")
    check(model, reference, passes=1)
    other = duplicate(model)
    handle.remove()
    with torch.no_grad():
        model.shift.zero_()
    assert other.encode.__self__ is other
    for call in CALLS.values():
        assert_same(called(other, call, torch.ones(2, DIM)), called(reference, call, torch.ones(2, DIM)))
    offload_to(None, other, "leaf_level")
    check(other, reference, passes=1)


@pytest.mark.parametrize("is_late", [False, True])
def test_methods_of_an_instance(is_late: bool) -> None:
    """A library may replace a method of one module, before it is offloaded or after."""
    model, reference = made()
    if is_late:
        handle = apply_group_offloading(model, "cpu")
    for each in (model, reference):
        before = each.decode
        each.decode = MethodType(lambda self, x, before=before: before(x) + 1, each)
    if not is_late:
        handle = apply_group_offloading(model, "cpu")
    mine = model.decode
    check(model, reference)
    with torch.no_grad():
        for each in (model, reference):
            each.up.append(copy.deepcopy(each.up[0]))  # it is cut into groups again
    check(model, reference)
    handle.remove()
    assert is_late is (model.decode is mine)
    assert_same(called(model, CALLS["both"], torch.ones(1, DIM)), called(reference, CALLS["both"], torch.ones(1, DIM)))


def test_a_stale_method_still_computes() -> None:
    """Whoever took the method while the model was offloaded has it afterwards."""
    model, reference = made()
    handle = apply_group_offloading(model, "cpu")
    encode = model.encode
    handle.remove()
    assert_same(
        called(model, lambda _, x: encode(x), torch.ones(1, DIM)),
        called(reference, CALLS["encode"], torch.ones(1, DIM)),
    )


class TestCompiled:
    @pytest.fixture(autouse=True)
    def _fresh_compiler(self) -> Iterator[None]:
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @pytest.mark.parametrize("level", LEVELS)
    def test_methods(self, level: str) -> None:
        """As users of diffusers do it, before and after offloading: the graphs contain no weight that moves."""
        for is_late in (False, True):
            model, reference = made()
            handle = None if is_late else offload_to(None, model, level)
            model.decode = torch.compile(model.decode, backend="eager")
            handle = handle or offload_to(None, model, level)
            for turn in range(3):
                x = torch.randn(2, DIM)
                assert_same(called(model, CALLS["decode"], x), called(reference, CALLS["decode"], x))
                assert handle.stats().passes == turn + 1
            handle.remove()

    @pytest.mark.parametrize("is_late", [False, True])
    def test_blocks_that_call_their_methods(self, is_late: bool) -> None:
        """A block's own graph contains no gate, and equal blocks share it."""
        model, reference = made()
        backend = torch._dynamo.testing.CompileCounterWithBackend("eager")
        handle = offload_to(None, model) if is_late else None
        for block in (*model.down, *model.up):
            block.compile(backend=backend, fullgraph=True)
        handle = handle or offload_to(None, model)
        for _ in range(2):
            x = torch.randn(2, DIM)
            assert_same(called(model, CALLS["forward"], x), called(reference, CALLS["forward"], x))
        assert backend.frame_count == 1
        assert not any("step" in vars(block) for block in (*model.down, *model.up))
        assert "decode" in vars(model)
