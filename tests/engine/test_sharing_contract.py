"""What is looked at of the contract: forwards that break it go alone, or results are thrown away. The bits stay the same."""

from __future__ import annotations

import contextlib
import contextvars
import random
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from group_offload import OffloadStats, apply_group_offloading, handle_of
from group_offload.base.tuning import tuning

from ..support.tuning import tune

NUM_STEPS = 8
variable: contextvars.ContextVar[float] = contextvars.ContextVar("variable", default=1.0)
buffer = torch.zeros(6, 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.up(x))


class Model(nn.Module):
    """Called twice a step, as guidance does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.state: Any = None
        self.use: Callable[[Model, torch.Tensor, Any], torch.Tensor] = lambda model, x, other: x

    def forward(self, x: torch.Tensor, t: torch.Tensor, prompt: torch.Tensor, other: Any = None) -> torch.Tensor:
        x = x * t + prompt.mean(0)
        for block in self.blocks:
            x = block(x)
            x = self.use(self, x, other)
        return x


def run(
    model: nn.Module,
    around: Callable[[int, int], Any] = lambda step, call: contextlib.nullcontext(),
    between: Callable[[int], None] = lambda step: None,
    other: Callable[[int, int], Any] = lambda step, call: None,
    error: type[Exception] | tuple[()] = (),
) -> list[torch.Tensor]:
    prompts, latents, found = [torch.full((5, 8), value) for value in (0.3, -0.7)], torch.ones(6, 8), []
    for step in range(NUM_STEPS):
        t, outputs = torch.tensor([step + 1.0]), []
        for call in (0, 1):
            with torch.no_grad(), around(step, call):
                try:
                    outputs.append(model(latents, t / 10, prompts[call], other(step, call)))
                except error:
                    outputs.append(latents)
            found.append(outputs[-1].clone())
            if not call:
                between(step)
        latents = latents - 0.05 * (outputs[0] + 1.5 * (outputs[0] - outputs[1])).float()
    return found


def have_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def check(make: Callable[[Model], dict[str, Any]]) -> OffloadStats:
    """Compare with the resident model.

    Args:
        make: A function that prepares a model, and gives the arguments of `run`.
    """
    found, random_states, stats = [], [], None
    for is_offloaded in (False, True):
        torch.manual_seed(0)
        model = Model().eval()
        options = make(model)
        handle = apply_group_offloading(model, "cpu", share_passes=True) if is_offloaded else None
        torch.manual_seed(5)
        random.seed(5)
        found.append(run(model, **options))
        random_states.append((torch.rand(1).item(), random.random()))
        if handle is not None:
            stats = handle.stats()
            handle.remove()
    assert all(map(have_same_bits, *found))
    assert len({*random_states}) == 1
    assert stats is not None
    return stats


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        return found * 1.5 if function is torch.tanh else found


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        return found * 1.5 if function is torch.ops.aten.tanh.default else found


@contextlib.contextmanager
def changed(get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    with warnings.catch_warnings(action="ignore"), torch.backends.mkldnn.flags(enabled=False):
        yield


MODES = FunctionMode(), DispatchMode()
"""They are told apart by which object they are."""
AROUND: dict[str, Callable[[], Any]] = {
    "the dtype of autocast that is off": lambda: torch.autocast("cpu", dtype=torch.float64, enabled=False),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "a context variable": lambda: changed(variable.get, variable.set, 2.0),
    "a function mode": lambda: MODES[0],
    "a dispatch mode": lambda: MODES[1],
    "threads": lambda: changed(torch.get_num_threads, torch.set_num_threads, 3),
    "a default dtype": lambda: changed(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "a kind of attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "without oneDNN": without_onednn,
}


@pytest.mark.parametrize(("what", "is_same"), [*((what, False) for what in AROUND), ("all of them", True)])
def test_calls_are_made_in_another_state_of_the_thread(what: str, is_same: bool) -> None:
    """What is foreseen is run as the first call is made, with all of its state: for nothing, if the second one has another."""

    def make(model: Model) -> dict[str, Any]:
        def use(_: Model, x: torch.Tensor, other: Any) -> torch.Tensor:
            assert not torch.is_grad_enabled()
            return (
                x * variable.get()
                + torch.tensor(1.0).element_size()
                + torch.get_num_threads() * 0.1
                + torch.get_autocast_dtype("cpu").itemsize
            )

        model.use = use

        def around(step: int, call: int) -> Any:
            stack = contextlib.ExitStack()
            for each in (*AROUND,) if is_same else (what,) if call else ():
                if step >= 4:
                    stack.enter_context(AROUND[each]())
            return stack

        return {"around": around}

    stats = check(make)
    assert stats.passes_predicted == (NUM_STEPS - 1 if is_same else stats.passes_predicted)
    assert bool(stats.passes_discarded) != is_same


@pytest.mark.parametrize("kind", [dict, list])
def test_a_container_that_the_forward_fills(kind: Callable[[], Any]) -> None:
    given: list[Any] = []

    def make(model: Model) -> dict[str, Any]:
        def fill(_: Model, x: torch.Tensor, other: Any) -> torch.Tensor:
            other.append(x) if isinstance(other, list) else other.update(feature=x)
            return x

        def other(step: int, call: int) -> Any:
            given.append(kind())
            return given[-1]

        model.use = fill
        return {"other": other}

    assert not check(make).passes_predicted
    assert len(given) == 4 * NUM_STEPS and all(given)


@pytest.mark.parametrize("first", [1, 2, 4], ids=["when calls are compared", "in the first pass", "later"])
@pytest.mark.parametrize("where", ["a number", "the module"])
def test_random_numbers_that_are_drawn_later(where: str, first: int) -> None:
    """Forwards that were run for nothing leave the generators as they were."""

    def make(model: Model) -> dict[str, Any]:
        def noisy(_: Model, x: torch.Tensor, other: Any) -> torch.Tensor:
            noise = {"a number": other, "the module": model.state}[where]
            return x + noise * (torch.randn(x.shape) + random.random() + np.random.rand()) if noise else x

        def other(step: int, call: int) -> Any:
            model.state = noise = 0.3 if step >= first else 0.0
            return {"a number": noise, "the module": None}[where]

        np.random.seed(0)
        model.use = noisy
        return {"other": other}

    assert bool(check(make).passes_predicted) == (first > 1)


@pytest.mark.parametrize("error", [ValueError, torch.OutOfMemoryError])
def test_random_numbers_beside_a_forward_that_fails(error: type[Exception]) -> None:
    """What the other call of the step has drawn is put back."""

    def make(model: Model) -> dict[str, Any]:
        state, failed = SimpleNamespace(step=0), []  # out of sight

        def noisy(model: Model, x: torch.Tensor, call: float) -> torch.Tensor:
            if state.step < 4:
                return x
            x = x + torch.randn(x.shape)
            runs_out = error is torch.OutOfMemoryError and not failed and handle_of(model) is not None
            if state.step == 4 and call == 0.0 and (runs_out or error is ValueError):
                failed.append(call)
                raise error("it fails")
            return x

        def other(step: int, call: int) -> float:
            state.step = step
            return float(call)

        model.use = noisy
        return {"other": other, "error": ValueError}

    assert check(make).passes_discarded == 1


@pytest.mark.parametrize(
    "value",
    [
        torch.eye(2).to_sparse(),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(3, 4)[:, :3],
    ],
    ids=["sparse", "conjugate", "strided"],
)
def test_small_inputs_of_all_kinds(value: torch.Tensor) -> None:
    def make(model: Model) -> dict[str, Any]:
        model.use = lambda _, x, other: x + float(other.is_contiguous()) if other.layout is torch.strided else x
        is_strided = value.shape == (
            3,
            3,
        )  # later another tensor of the same numbers, which is contiguous, comes second
        return {"other": lambda step, call: torch.ones(3, 3) if is_strided and step > 4 and call else value.clone()}

    check(make)


@pytest.mark.parametrize("kind", ["sparse", "conjugate", "one buffer"])
def test_outputs_that_cannot_be_compared(kind: str) -> None:
    class Other(Model):
        def forward(self, *args: Any) -> torch.Tensor:
            found = super().forward(*args)
            if kind == "one buffer":
                return torch.add(found, 0, out=buffer)
            return found.to_sparse() if kind == "sparse" else torch.complex(found, found).conj()

    torch.manual_seed(0)
    model = Other().eval()
    prompts, latents = [torch.ones(5, 8), -torch.ones(5, 8)], torch.ones(6, 8)

    def step() -> list[torch.Tensor]:
        found, now = [], latents + 0
        for each in prompts:
            with torch.no_grad():
                output = model(now, torch.ones(1), each)
            found.append(output.to_dense() if output.is_sparse else output.clone())
        return found

    expected = step()
    handle = apply_group_offloading(model, "cpu", share_passes=True)
    for _ in range(6):
        assert all(map(torch.equal, step(), expected))
    assert not handle.stats().passes_predicted
    handle.remove()


def test_a_buffer_that_is_changed_later() -> None:
    """The pass of the first change was shared. No other one is."""
    model = Model().eval()
    model.register_buffer("mean", torch.zeros(6, 8))
    state = SimpleNamespace(step=0)  # out of sight
    model.use = lambda model, x, call: model.mean.add_(1) if state.step >= 4 else x
    handle = apply_group_offloading(model, "cpu", share_passes=True)
    run(model, other=lambda step, call: state.__dict__.update(step=step) or float(call))
    stats = handle.stats()
    assert (stats.passes_predicted, stats.passes_discarded) == (4, 1)
    handle.remove()


def test_a_model_inside_of_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forwards wait for no company: the other forward of the step waits for the turn of this one."""
    tune(monkeypatch, convoy_wait_seconds=5.0)
    model, inner = Model().eval(), Model().eval()
    handles = [apply_group_offloading(each, "cpu", share_passes=True) for each in (inner, model)]
    model.use = lambda model, x, other: x + inner(x, torch.ones(1), x)
    run(model)
    started = time.monotonic()
    run(model)
    assert time.monotonic() - started < NUM_STEPS * tuning().convoy_wait_seconds / 2
    assert handles[1].stats().passes_predicted and not handles[0].stats().passes_shared
    for handle in reversed(handles):
        handle.remove()


def test_latents_that_are_changed_in_place() -> None:
    """Nothing piles up while they are the same object."""
    model, latents, prompts = Model().eval(), torch.ones(6, 8), [torch.ones(5, 8), -torch.ones(5, 8)]
    handle = apply_group_offloading(model, "cpu", share_passes=True)
    for _ in range(20):
        for prompt in prompts:
            with torch.no_grad():
                model(latents, torch.ones(1), prompt)
        latents.mul_(0.9)
    assert handle.stats().passes_predicted >= 17
    assert len(weakref.getweakrefs(latents)) < 12
    handle.remove()


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("an int for the time", [2, 4, 2, 2, 2, 2, 2, 2]),
        ("an input that grows", [2, 4, 4, 4, 4, 2, 2, 2]),
        ("no room for two", [2, 5, 2, 2, 2, 2, 2, 2]),
    ],
)
def test_steps_are_not_tried_for_ever(what: str, expected: list[int]) -> None:
    """How many forwards begin in each step of two calls. A trial makes each twice."""
    under_way, begun = set[int](), list[int]()

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor, time: Any, prompt: torch.Tensor) -> torch.Tensor:
            begun.append(1)
            under_way.add(threading.get_ident())
            try:
                x = x * time + prompt.mean()
                for block in self.blocks:
                    x = block(x)
                    if what == "no room for two" and len(under_way) > 1:
                        raise torch.OutOfMemoryError(what)
                return x
            finally:
                under_way.discard(threading.get_ident())

    model = Counting().eval()
    handle = apply_group_offloading(model, "cpu", share_passes=True)
    prompts, found = [torch.randn(5, 4) for _ in range(2)], []
    with torch.no_grad():
        for step in range(1, 9):
            begun.clear()
            x = torch.randn(3 + (step if what == "an input that grows" else 0), 4)
            time = step if what == "an int for the time" else torch.tensor([step / 8])
            for prompt in prompts:
                model(x, time, prompt)
            found.append(len(begun))
    assert found == expected
    handle.remove()
