"""Compiled modules: the same bits, onloads that really happen, no graph break in a block, no recompile."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from group_offload import ActivationOffloadHandle, StateError, apply_activation_offloading, apply_group_offloading

from ..support.asserts import assert_at_rest, assert_same
from ..support.models import Model, inputs, make
from ..support.rigs import gradient_of_input, offload_to, run
from ..support.versions import TORCH

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture
def backend() -> CompileCounterWithBackend:
    """Counts the graphs that are compiled."""
    return CompileCounterWithBackend("eager")


def check(model: nn.Module, call: Callable[..., Any], handle: Any, expected: list[torch.Tensor], backend: Any) -> None:
    """Four passes: bits, onloads, and nothing is compiled after the second one."""
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    compiled = []
    for number in range(4):
        before = handle.stats()
        assert_same(run(call, inputs(number)), expected[number])
        after = handle.stats()
        assert after.forward_passes - before.forward_passes == 1  # through the root's gate
        # What came from a file stays good in its slot: the root's own is brought again only if the slots were given up.
        at_least = len(handle.groups) - 1 if handle.groups[0].tier == "disk" else 0
        assert at_least <= after.onloads - before.onloads <= at_least * 5, number
        compiled.append(backend.frame_count)
        assert_same(model.state_dict(), weights)
    assert compiled[0] > 0 and compiled[1] == compiled[3]


def expected_of(model: nn.Module) -> list[torch.Tensor]:
    return [run(model, inputs(number)) for number in range(4)]


@cache
def compiled_outputs() -> list[torch.Tensor]:
    """Those of the resident model, compiled as a whole: once, since compiling takes a second."""
    return expected_of(torch.compile(make(Model), backend="eager"))


@pytest.mark.parametrize("is_first", [True, False], ids=["compiled first", "offloaded first"])
def test_blocks_that_are_compiled(level: str, is_first: bool, folder: Path | None, backend: Any) -> None:
    """In any order, without recompiling (diffusers #11584, #11605)."""
    torch.manual_seed(0)
    model = Model(12).eval()
    resident = copy.deepcopy(model)
    for block in resident.blocks:
        block.compile(fullgraph=True, backend="eager")
    expected = expected_of(resident)
    torch._dynamo.reset()
    counters.clear()

    def compile_blocks() -> None:
        for block in model.blocks:
            block.compile(fullgraph=True, backend=backend)

    if is_first:
        compile_blocks()
    handle = offload_to(folder, model, level)
    if not is_first:
        compile_blocks()
    check(model, model, handle, expected, backend)
    for _ in range(2):  # edits reach compiled code, a fused LoRA, for example
        for twin in (model, resident):
            twin.blocks[1].up.weight.data.mul_(2)
            twin.blocks[2].up.bias = nn.Parameter(twin.blocks[2].up.bias.detach() + 1)
        assert_same(run(model, inputs()), run(resident, inputs()))
    assert backend.frame_count == 1  # shared by all blocks
    assert not counters["graph_break"]
    handle.remove()
    assert_same(run(model, inputs()), run(resident, inputs()))
    assert backend.frame_count <= 2
    assert all(block._compiled_call_impl is not None for block in model.blocks)


@pytest.mark.parametrize(
    "how",
    [
        *("wrap, apply to the wrapped", "wrap, apply to the module", "apply, wrap"),
        *("compile itself, apply", "apply, compile itself", "apply, compile itself, unbound"),
    ],
)
def test_whole_model_that_is_compiled(how: str, level: str, folder: Path | None, backend: Any) -> None:
    """It would trace past the hook that onloads."""
    model, expected = make(Model), compiled_outputs()
    torch._dynamo.reset()
    counters.clear()

    def compiled() -> Any:
        if "itself" not in how:
            return torch.compile(model, backend=backend)
        call = partial(nn.Module.compile, model) if "unbound" in how else model.compile
        call(backend=backend)
        return model

    call = None if how.startswith("apply") else compiled()
    handle = offload_to(folder, call if "wrapped" in how else model, level)
    call = compiled() if call is None else call
    assert handle.module is model
    assert copy.deepcopy(model).compile.__self__ is not model  # a copy compiles itself
    check(model, call, handle, expected, backend)
    handle.remove()
    assert_same(run(call, inputs(0)), expected[0])
    assert (model._compiled_call_impl is not None) is ("itself" in how)


def test_whole_model_in_one_graph_is_refused(level: str, folder: Path | None) -> None:
    model, reference = make(Model), make(Model)
    offload_to(folder, model, level)
    with pytest.raises(Exception, match=r"(?i)graph|skip"):
        run(torch.compile(model, fullgraph=True, backend="eager"), inputs())
    torch._dynamo.reset()
    assert_at_rest(model, reference)
    assert_same(run(model, inputs()), run(reference, inputs()))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("order", ["".join(order) for order in permutations("CGA")])
def test_blocks_that_are_compiled_with_weights_and_activations_offloaded(order: str, folder: Path | None) -> None:
    """In any order: compiled (C), weights (G), activations (A)."""
    torch.manual_seed(0)
    model = Model(12).requires_grad_(False)
    resident = copy.deepcopy(model)
    handles: list[Any] = []

    def compile_blocks() -> None:
        for block in model.blocks:
            block.compile(fullgraph=True, backend="aot_eager")

    steps = {
        "C": compile_blocks,
        "G": lambda: handles.append(offload_to(folder, model)),
        "A": lambda: handles.append(apply_activation_offloading(model, device="cpu", min_bytes=0)),
    }
    for name in order:
        steps[name]()
    for number in range(3):
        assert torch.equal(*(gradient_of_input(each, inputs(number)) for each in (model, resident)))
    activations = next(handle for handle in handles if isinstance(handle, ActivationOffloadHandle))
    assert activations.stats().passes == 3 and activations.stats().offloads > 0
    for handle in handles:
        handle.remove()
    for block in model.blocks:
        assert not hasattr(block.__dict__["_compiled_call_impl"], "compiled")  # no gate is left


def test_forward_while_another_thread_compiles(folder: Path | None) -> None:
    """Torch says of all threads that they are being compiled then. One with gradients, and activations offloaded, as well."""
    model, resident = make(), make()
    for twin in (model, resident):
        twin.requires_grad_(False)
    expected = run(resident, inputs()), gradient_of_input(resident, inputs())
    handle = offload_to(folder, model)
    began, may_end = threading.Event(), threading.Event()

    def slow(graph: Any, example_inputs: Any) -> Any:
        began.set()
        assert may_end.wait(60)
        return graph.forward

    def compile_something() -> torch.Tensor:
        compiled = torch.compile(lambda x: x.sin() + 1, backend=slow)
        found: torch.Tensor = compiled(torch.zeros(3))
        return found

    with ThreadPoolExecutor(1) as pool:
        elsewhere = pool.submit(compile_something)
        assert began.wait(60)
        try:
            assert torch.compiler.is_compiling() == (TORCH >= (2, 13))  # before, only of what is traced
            assert_same(run(model, inputs()), expected[0])
            assert handle.stats().forward_passes == 1
            activations = apply_activation_offloading(model, device="cpu", min_bytes=0)
            assert_same(gradient_of_input(model, inputs()), expected[1])
            assert activations.stats().offloads > 0
        finally:
            may_end.set()
        assert_same(elsewhere.result(), torch.ones(3))
    handle.remove()


def test_export(folder: Path | None) -> None:
    """It takes weights where they rest, and what it gives is a model of its own."""
    model = make()
    expected = run(model, inputs())
    handle = offload_to(folder, model)
    exported = torch.export.export(model, (inputs(),), strict=False).module()
    assert handle.stats().forward_passes == 0
    assert_same(run(exported, inputs()), expected)
    assert_same(run(model, inputs()), expected)
    handle.remove()


def test_a_trace_of_torch_jit_is_refused(level: str) -> None:
    """It would record where weights are in one forward. The model is as before, and can be traced once it is not offloaded."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())).eval()
    x = torch.ones(1, 4)
    expected = module(x)
    handle = apply_group_offloading(module, "cpu", offload_type=level)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", message=r"`torch\.jit")  # torch has deprecated it
        with pytest.raises(StateError, match=r"torch\.jit\.trace.*Call handle\.remove\(\) first"):
            torch.jit.trace(module, x)  # type: ignore[no-untyped-call]
        assert torch.equal(module(x), expected)
        handle.remove()
        assert torch.equal(torch.jit.trace(module, x)(x), expected)  # type: ignore[no-untyped-call]
