"""Forwards whose state torch does not know: they go alone, or what was foreseen is thrown away. The bits stay the same."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import math
import random
import threading
import time
import warnings
import weakref
from collections import deque
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


def in_context() -> Any:
    return changed(variable.get, variable.set, 2.0)


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    with warnings.catch_warnings(action="ignore"), torch.backends.mkldnn.flags(enabled=False):
        yield


AROUND: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "a context variable": in_context,
    "a function mode": FunctionMode,
    "a dispatch mode": DispatchMode,
    "threads": lambda: changed(torch.get_num_threads, torch.set_num_threads, 3),
    "a default dtype": lambda: changed(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "a kind of attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "without oneDNN": without_onednn,
}


@pytest.mark.parametrize("what", AROUND)
def test_the_second_call_is_made_in_another_state_of_the_thread(what: str) -> None:
    """What was foreseen was run as the first call was made."""

    def make(model: Model) -> dict[str, Any]:
        model.use = lambda _, x, other: (
            x * variable.get() + torch.tensor(1.0).element_size() + torch.get_num_threads() * 0.1
        )
        return {"around": lambda step, call: AROUND[what]() if step >= 4 and call else contextlib.nullcontext()}

    stats = check(make)
    assert stats.passes_predicted and stats.passes_discarded


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
@pytest.mark.parametrize("where", ["a number", "an object", "the module"])
def test_random_numbers_that_are_drawn_later(where: str, first: int) -> None:
    """Forwards that were run for nothing leave the generators as they were."""

    def make(model: Model) -> dict[str, Any]:
        options = SimpleNamespace(noise=0.0)

        def noisy(_: Model, x: torch.Tensor, other: Any) -> torch.Tensor:
            noise = {"a number": other, "an object": options.noise, "the module": model.state}[where]
            return x + noise * (torch.randn(x.shape) + random.random() + np.random.rand()) if noise else x

        def other(step: int, call: int) -> Any:
            options.noise = model.state = noise = 0.3 if step >= first else 0.0
            return {"a number": noise, "an object": options, "the module": None}[where]

        np.random.seed(0)
        model.use = noisy
        return {"other": other}

    assert bool(check(make).passes_predicted) == (first > 1)


@pytest.mark.parametrize("error", [ValueError, torch.OutOfMemoryError])
def test_random_numbers_beside_a_forward_that_fails(error: type[Exception]) -> None:
    """What the other call of the step has drawn is put back."""

    def make(model: Model) -> dict[str, Any]:
        model.state, failed = SimpleNamespace(step=0), []

        def noisy(model: Model, x: torch.Tensor, call: float) -> torch.Tensor:
            if model.state.step < 4:
                return x
            x = x + torch.randn(x.shape)
            runs_out = error is torch.OutOfMemoryError and not failed and handle_of(model) is not None
            if model.state.step == 4 and call == 0.0 and (runs_out or error is ValueError):
                failed.append(call)
                raise error("it fails")
            return x

        def other(step: int, call: int) -> float:
            model.state.step = step
            return float(call)

        model.use = noisy
        return {"other": other, "error": ValueError}

    assert check(make).passes_discarded == 1


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1.0

    def get(self) -> float:
        return self.value


class Lasting:
    value = 1.0


lasting = Lasting()


def reference_to_what_lasts() -> Any:
    lasting.value = 1.0
    return weakref.ref(lasting)


def nested() -> Any:
    return [[[[[[[1.0]]]]]]]


def set_deep(found: Any) -> None:
    while isinstance(found[0], list):
        found = found[0]
    found[0] = 2.0


EDITS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "an array": (lambda: np.ones(1), lambda s: float(s[0]), lambda s: s.__setitem__(0, 2.0)),
    "bytes": (lambda: bytearray(b"a"), lambda s: s[0], lambda s: s.__setitem__(0, 2)),
    "a deque": (lambda: deque([1.0]), lambda s: s[0], lambda s: s.__setitem__(0, 2.0)),
    "a slot": (Slotted, lambda s: s.value, lambda s: setattr(s, "value", 2.0)),
    "a partial": (
        lambda: functools.partial(max, default=1.0),
        lambda s: s(()),
        lambda s: s.keywords.update(default=2.0),
    ),
    "a list in lists": (nested, lambda s: float(torch.tensor(s).sum()), set_deep),
    "a module in a list": (
        lambda: [nn.Linear(1, 1, bias=False)],
        lambda s: s[0].weight.detach(),
        lambda s: s[0].weight.detach().mul_(2),
    ),
    "the kind of a module in a list": (
        lambda: [nn.Sequential(nn.Tanh())],
        lambda s: s[0](torch.ones(1)),
        lambda s: s[0].__setitem__(0, nn.Sigmoid()),
    ),
    "a hook of a module in a list": (
        lambda: [nn.Sequential(nn.Tanh())],
        lambda s: s[0](torch.ones(1)),
        lambda s: s[0][0].register_forward_hook(lambda module, args, output: output * 2),
    ),
    "a module in a list, in training": (
        lambda: [nn.Sequential(nn.Tanh()).eval()],
        lambda s: 1.0 + s[0].training,
        lambda s: s[0].train(),
    ),
    "a bound method": (lambda: Slotted().get, lambda s: s(), lambda s: setattr(s.__self__, "value", 2.0)),
    "a weak reference": (reference_to_what_lasts, lambda s: s().value, lambda s: setattr(s(), "value", 2.0)),
    "the sign of zero": (lambda: [0.0], lambda s: math.copysign(1.5, s[0]), lambda s: s.__setitem__(0, -0.0)),
}


@pytest.mark.parametrize("what", EDITS)
def test_an_edit_between_the_calls_of_a_step(what: str) -> None:
    start, get, edit = EDITS[what]

    def make(model: Model) -> dict[str, Any]:
        model.state = start()
        model.use = lambda model, x, other: x * get(model.state)
        return {"between": lambda step: edit(model.state) if step == 4 else None}

    stats = check(make)
    assert stats.passes_predicted and stats.passes_discarded


def test_weights_that_are_inference_tensors() -> None:
    def make(model: Model) -> dict[str, Any]:
        with torch.inference_mode():
            model.blocks[1].up.weight.data = model.blocks[1].up.weight.data.clone()
            model.blocks[1].up.register_buffer("scale", torch.ones(1))

        def edit(step: int) -> None:
            with torch.inference_mode():
                model.blocks[1].up.scale.mul_(1.0 + step)

        model.use = lambda model, x, other: x * model.blocks[1].up.scale
        return {"between": edit}

    assert not check(make).passes_predicted


STATES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a generator of NumPy": (lambda: np.random.default_rng(0), lambda s: float(s.random())),
    "a generator of Python": (lambda: random.Random(0), lambda s: s.random()),
    "a generator of torch": (lambda: torch.Generator().manual_seed(0), lambda s: float(torch.rand(1, generator=s))),
    "a module in a list": (
        lambda: [nn.Identity()],
        lambda s: s[0].__dict__.update(n=s[0].__dict__.get("n", 0) + 1) or s[0].n,
    ),
    "a proxy of what is gone": (lambda: [weakref.proxy(nn.Identity())], lambda s: 1.0),
    "a counter": (itertools.count, next),
    "a history": (lambda: deque([0.0]), lambda s: s.append(s[-1] + 1) or s[-1]),
    "a number in an array": (lambda: np.zeros(1), lambda s: float(np.add(s, 1, out=s)[0])),
}


@pytest.mark.parametrize("what", STATES)
def test_state_that_each_forward_changes(what: str) -> None:
    """It is not run once more to be compared."""
    start, use = STATES[what]

    def make(model: Model) -> dict[str, Any]:
        model.state = start()
        model.use = lambda model, x, other: x + 0.1 * use(model.state)
        return {}

    assert not check(make).passes_predicted


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
        )  # later another tensor with the same numbers, which is contiguous, comes second
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


def test_a_context_variable_that_each_forward_sets() -> None:
    seen: list[list[float]] = []

    def make(model: Model) -> dict[str, Any]:
        seen.append([])
        variable.set(1.0)
        model.use = lambda model, x, other: (variable.set(variable.get() + 1), x)[1]
        return {"between": lambda step: seen[-1].append(variable.get())}

    assert not check(make).passes_predicted
    assert seen[0] == seen[1]
    variable.set(1.0)


def test_a_context_variable_that_is_set_later() -> None:
    def make(model: Model) -> dict[str, Any]:
        def use(model: Model, x: torch.Tensor, call: float) -> torch.Tensor:
            if model.state.step >= 4 and call == 1.0:
                variable.set(3.0)
            return x

        def other(step: int, call: int) -> float:
            model.state.step = step
            return float(call)

        variable.set(1.0)
        model.state, model.use = SimpleNamespace(step=0), use
        return {"other": other}

    assert check(make).passes_discarded
    assert variable.get() == 3.0
    variable.set(1.0)


def test_a_buffer_that_is_changed_later() -> None:
    """The pass of the first change was shared. No other one is."""
    model = Model().eval()
    model.register_buffer("mean", torch.zeros(6, 8))
    model.use = lambda model, x, call: model.mean.add_(1) if model.state.step >= 4 else x
    model.state = SimpleNamespace(step=0)
    handle = apply_group_offloading(model, "cpu", share_passes=True)
    run(model, other=lambda step, call: model.state.__dict__.update(step=step) or float(call))
    stats = handle.stats()
    assert (stats.passes_predicted, stats.passes_discarded) == (3, 1)
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


def test_a_lock_that_is_held_for_a_whole_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that is foreseen cannot begin. It is waited for once."""
    tune(monkeypatch, traveller_patience_seconds=2.0)
    lock = threading.Lock()

    class Locked(Model):
        def forward(self, *args: Any) -> Any:
            with lock:
                return super().forward(*args)

    model = Locked().eval()
    handle = apply_group_offloading(model, "cpu", share_passes=True)
    started = time.monotonic()
    run(model)
    assert time.monotonic() - started < 4 * 2.0
    handle.remove()
