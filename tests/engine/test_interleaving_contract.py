"""Steps of guidance whose calls share a pass. What breaks the contract goes alone, or is thrown away, and keeps all bits."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from group_offload import OffloadStats, apply_group_offloading, handle_of
from group_offload.base.tuning import tuning
from group_offload.runtime.interleave.caller import Caller
from group_offload.runtime.interleave.guidance_steps import announce, begin_step
from group_offload.runtime.interleave.speculation import Speculation
from group_offload.runtime.transfers.transfer import Transfer

from ..support.asserts import assert_same
from ..support.faults import raise_at
from ..support.inside import engine_of
from ..support.participants import in_threads
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.tuning import tune

NUM_STEPS = 8
variable: contextvars.ContextVar[float] = contextvars.ContextVar("variable", default=1.0)
buffer = torch.zeros(6, 8)


class Denoiser(nn.Module):
    """Called as the transformers of diffusers' pipelines are."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.scale, self.settings, self.state = 1.0, {"gain": 1.0}, None
        self.use: Callable[[Any, torch.Tensor, Any], torch.Tensor] = lambda model, x, other: x

    def forward(self, x: torch.Tensor, t: Any, prompt: torch.Tensor, other: Any = None) -> torch.Tensor:
        x = x * t + prompt.mean(0)
        for block in self.blocks:
            x = self.use(self, x + torch.tanh(block(x)), other)
        return x * self.scale * self.settings["gain"]


class Branch:
    """As those that guiders prepare."""

    def __init__(self, prompt: torch.Tensor) -> None:
        self.prompt = prompt


class Loop:
    """A loop with guidance: two calls of its model in a step."""

    announces = False
    """Whether it says at the begin of a step which calls will come. Then latents are cast anew for each call."""

    def __init__(self, kind: type[nn.Module] = Denoiser, num_prompts: int = 2) -> None:
        torch.manual_seed(0)
        self.model: Any = kind().eval()
        self.prompts = [torch.full((5, 8), value) for value in (0.3, -0.7, 0.4)[:num_prompts]]
        self.num_calls: Callable[[int], int] = lambda step: num_prompts
        self.around: Callable[[int, int], Any] = lambda step, call: nullcontext()
        self.between: Callable[[int, Any], Any] = lambda step, model: None
        """Called after the first call of each step."""
        self.after: Callable[[int, list[torch.Tensor]], Any] = lambda step, prompts: None
        """Called after each step. (`callback_on_step_end`)"""
        self.other: Callable[[int, int], Any] = lambda step, call: None
        """One more input."""
        self.error: Any = ()
        """What calls may raise."""

    def run(self, device: SimulatedDevice | None = None, num_steps: int = NUM_STEPS) -> list[torch.Tensor]:
        """All outputs."""
        if device is None:
            return self._steps(torch.clone, num_steps)
        with device.running():
            return [device.get(each) for each in self._steps(device.put, num_steps)]

    def _steps(self, put: Callable[[torch.Tensor], torch.Tensor], num_steps: int) -> list[torch.Tensor]:
        prompts, latents, found = [put(each) for each in self.prompts], put(torch.ones(6, 8)), []
        for step in range(num_steps):
            t, outputs = put(torch.tensor([step + 1.0])), []
            begin_step()
            branches = [Branch(prompt) for prompt in prompts] if self.announces else []
            for number, branch in enumerate(branches):
                announce(branch, number)
            for call in range(self.num_calls(step)):
                with torch.no_grad(), self.around(step, call):
                    try:
                        x = latents.clone() if self.announces else latents
                        output = self.model(x, t / 10, prompts[call], self.other(step, call))
                        outputs.append(output.to_dense() if output.is_sparse else output.real)
                    except self.error:
                        outputs.append(latents)
                found.append(outputs[-1].clone())
                if not call:
                    self.between(step, self.model)
            latents = latents - 0.05 * (outputs[0] + 1.5 * (outputs[0] - outputs[-1])).float()
            self.after(step, prompts)
        begin_step()
        return found


def check(
    prepare: Callable[[Loop], object],
    device: SimulatedDevice | None = None,
    kind: type[nn.Module] = Denoiser,
    **options: Any,
) -> OffloadStats:
    """Run a loop that `prepare` has changed with a resident model and an offloaded one, and compare."""
    found, drawn, stats = [], [], None
    for is_offloaded in (False, True):
        loop = Loop(kind)
        prepare(loop)
        handle = (
            apply_group_offloading(loop.model, "cpu", interleave_forwards=True, **options) if is_offloaded else None
        )
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(0)
        found.append(loop.run(device if is_offloaded else None))
        drawn.append((torch.rand(1).item(), random.random(), np.random.rand()))
        if handle is not None:
            stats = handle.stats()
            handle.remove()
    assert_same(*found)
    assert len({*drawn}) == 1 and stats is not None
    return stats


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    gc.collect()
    with use_simulated_device(SimulatedDevice(0, "random")) as device:
        yield device
        gc.collect()
        device.synchronize()
    assert device.allocated_bytes == 0


@pytest.fixture(params=["random", "cpu"])
def any_device(request: pytest.FixtureRequest) -> SimulatedDevice | None:
    return None if request.param == "cpu" else request.getfixturevalue("device")


# ---------------------------------------------------------------- guidance


@pytest.mark.parametrize(("num_prompts", "announces"), [(2, False), (3, False), (3, True)])
def test_the_calls_of_a_step_share_a_pass(
    num_prompts: int, announces: bool, any_device: SimulatedDevice | None
) -> None:
    loop = Loop(num_prompts=num_prompts)
    loop.announces = announces
    expected = loop.run()
    handle = apply_group_offloading(loop.model, "cpu", interleave_forwards=True)
    assert_same(loop.run(any_device), expected)
    stats = handle.stats()
    assert stats.forwards_speculated == (NUM_STEPS - 1) * (num_prompts - 1), "all but the first step"
    assert stats.forwards_discarded == 0
    assert_same(loop.run(any_device), expected)
    sent = sum(handle.stats().bytes_onloaded.values()) - sum(stats.bytes_onloaded.values())
    assert sent <= (NUM_STEPS - 1 + num_prompts) * sum(group.num_bytes for group in handle.groups)
    handle.remove()


def test_nothing_is_kept_once_the_branches_are_gone() -> None:
    loop = Loop()
    loop.announces = True
    handle = apply_group_offloading(loop.model, "cpu", interleave_forwards=True)
    loop.run(num_steps=3)
    branches, latents = [Branch(prompt) for prompt in loop.prompts], torch.ones(6, 8)
    for at in range(2):
        announce(branches[at], at)
    with torch.no_grad():
        loop.model(latents, torch.ones(1), loop.prompts[0])
    seen = weakref.ref(latents)
    assert handle.stats().forwards_speculated == 3
    del latents
    assert seen() is not None, "kept for the call that is to come"
    branches.clear()
    gc.collect()
    assert seen() is None
    with torch.no_grad():
        loop.model(torch.zeros(6, 8), torch.ones(1), loop.prompts[1])
    assert handle.stats().forwards_discarded == 1
    handle.remove()


def scaled(prompts: list[torch.Tensor]) -> None:
    prompts[1] = prompts[1] * 2


def replaced(model: Any) -> None:
    model.blocks[2].weight = nn.Parameter(model.blocks[2].weight.detach().cpu() * 1.5)


AFTER: dict[str, Callable[[list[torch.Tensor]], object]] = {
    "a prompt in place": lambda prompts: prompts[1].mul_(2),
    "another prompt": scaled,
    "a prompt of another size": lambda prompts: prompts.__setitem__(1, torch.cat([prompts[1], prompts[1]])),
}
BETWEEN: dict[str, Callable[[Any], object]] = {
    "a weight's data": lambda model: model.blocks[2].weight.data.mul_(1.5),
    "a weight in place": lambda model: model.blocks[2].weight.detach().mul_(1.5),
    "another weight": replaced,
    "an attribute": lambda model: setattr(model, "scale", model.scale * 1.5),
    "within an attribute": lambda model: model.settings.update(gain=model.settings["gain"] * 1.5),
}


@pytest.mark.parametrize("change", [*AFTER, *BETWEEN, "guidance ends"])
def test_what_was_predicted_is_not_called_for(change: str, device: SimulatedDevice) -> None:
    """A callback changes the embeddings, guidance is switched off half way, or weights and modules are edited between the calls
    of a step: the second one computes with what is there then."""

    def prepare(loop: Loop) -> None:
        if change == "guidance ends":
            loop.num_calls = lambda step: 2 if step < 4 else 1
        loop.after = lambda step, prompts: step == 3 and change in AFTER and AFTER[change](prompts)
        loop.between = lambda step, model: step in (3, 5) and change in BETWEEN and BETWEEN[change](model)

    stats = check(prepare, device)
    # Calls of which one is of a kind that was not tried yet are tried in step 5.
    assert stats.forwards_speculated >= (6 if change == "a prompt of another size" else 3)
    assert stats.forwards_discarded >= (change not in AFTER)


def test_two_misses_in_a_row_end_it(device: SimulatedDevice, said: Callable[[], list[str]]) -> None:
    kept: list[torch.Tensor] = []

    def change(step: int, prompts: list[torch.Tensor]) -> None:
        if step >= 3:
            kept.append(prompts[1])
            prompts[1] = prompts[1] * 1.5

    assert check(lambda loop: setattr(loop, "after", change), device).forwards_discarded == 2
    assert any("twice in a row" in each for each in said())


class Takes(Denoiser):
    def forward(self, x: Any, t: Any, prompt: Any, other: Any = None) -> Any:
        return super().forward(x, t, prompt)


@pytest.mark.parametrize(
    ("why", "reason"),
    [
        ("an object", "which can't be compared between calls"),
        ("a generator", "which can't be compared between calls"),
        ("inference tensors", "inference tensors"),
        ("slow scans", "can't be detected quickly"),
        ("no copies in RAM", "can't be detected quickly"),
    ],
)
def test_what_cannot_be_compared_is_not_predicted(
    why: str, reason: str, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    if why == "slow scans":
        monkeypatch.setattr("group_offload.runtime.interleave.policy.scans_quickly", lambda: False)

    def prepare(loop: Loop) -> None:
        given = {"an object": [SimpleNamespace(gain=2.0)], "a generator": torch.Generator()}.get(why)
        loop.other = lambda step, call: given
        loop.between = lambda step, model: step == 3 and model.blocks[2].weight.data.mul_(1.5)

    with torch.inference_mode() if why == "inference tensors" else nullcontext():
        stats = check(
            prepare, device if "slow" in why or "copies" in why else None, Takes, low_cpu_mem_usage="no" in why
        )
    assert not stats.forwards_speculated and reason in said()[0]
    if why == "an object":
        assert check(lambda loop: setattr(loop, "other", lambda *_: {"scale": [1.0, None, "text"]})).forwards_speculated


@pytest.mark.parametrize("where", [0, 2, 5, "boarded"])
def test_an_interrupt_in_a_step(where: Any, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """No seat stays taken: the next forwards would wait for it."""
    loop, num_calls = Loop(), 0
    expected = loop.run()
    handle = apply_group_offloading(loop.model, "cpu", interleave_forwards=True)
    loop.run(device, 4)
    send = Transfer.send

    def strike(self: Transfer, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        if threading.current_thread() is threading.main_thread():
            num_calls += 1
            if num_calls == where + 1:
                raise KeyboardInterrupt
        return send(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        raise_at(patch, Speculation, "__init__") if where == "boarded" else patch.setattr(Transfer, "send", strike)
        with pytest.raises(KeyboardInterrupt):
            loop.run(device, 40)
    before = handle.stats().forwards_speculated
    in_threads([lambda: assert_same(loop.run(device), expected)])
    assert handle.stats().forwards_speculated > before
    handle.remove()


def test_an_end_of_offloading_while_a_step_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the forward."""
    loop, start, removers = Loop(), Speculation.start, list[threading.Thread]()
    expected = loop.run()
    handle = apply_group_offloading(loop.model, "cpu", interleave_forwards=True)
    loop.run()

    def start_late(ahead: Speculation) -> None:
        if not removers:
            removers.append(threading.Thread(target=handle.remove, daemon=True))
            removers[0].start()
            while not engine_of(handle).lock._outsiders:
                time.sleep(0.001)
        start(ahead)

    monkeypatch.setattr(Speculation, "start", start_late)
    assert_same(loop.run(), expected)
    removers[0].join(120)
    assert not removers[0].is_alive()


def test_forwards_of_all_steps_share_their_threads(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard: what libraries keep for each thread (handles, plans of kernels) is made anew in each step, for a new thread."""
    loop, run, idents = Loop(num_prompts=3), Caller.run, list[int]()
    monkeypatch.setattr(
        Caller, "run", lambda self, function: (idents.append(threading.get_ident()), run(self, function))[1]
    )
    apply_group_offloading(loop.model, "cpu", interleave_forwards=True)
    loop.run(device)
    assert len(idents) > len({*idents}) == 2


def test_threads_that_guide(device: SimulatedDevice) -> None:
    """Each runs its own steps; the calls of all may share one pass."""
    loops = [Loop() for _ in range(3)]
    for number, loop in enumerate(loops):
        loop.model, loop.prompts = loops[0].model, [prompt * (number + 1) for prompt in loop.prompts]
    all_expected = [loop.run() for loop in loops]
    handle = apply_group_offloading(loops[0].model, "cpu", interleave_forwards=True)
    pairs = zip(loops, all_expected, strict=True)
    in_threads([lambda loop=loop, expected=each: assert_same(loop.run(device), expected) for loop, each in pairs])
    assert handle.stats().forwards_speculated
    handle.remove()


# ---------------------------------------------------------------- the contract


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


MODES = FunctionMode(), DispatchMode()
"""They are told apart by which object they are."""
AROUND: dict[str, Callable[[], Any]] = {
    "the dtype of autocast that is off": lambda: torch.autocast("cpu", dtype=torch.float64, enabled=False),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "a context variable": lambda: changed(variable.get, variable.set, 2.0),
    "a function mode": lambda: MODES[0],
    "a dispatch mode": lambda: MODES[1],
    "threads": lambda: changed(torch.get_num_threads, torch.set_num_threads, 3),
}


@pytest.mark.parametrize(("what", "is_same"), [*((what, False) for what in AROUND), ("all of them", True)])
def test_calls_are_made_in_another_state_of_the_thread(what: str, is_same: bool) -> None:
    """What is predicted is run as the first call is made, with all of its state: for nothing, if the second one has another."""

    def prepare(loop: Loop) -> None:
        def use(_: Any, x: torch.Tensor, other: Any) -> torch.Tensor:
            assert not torch.is_grad_enabled()
            return x * variable.get() + torch.get_autocast_dtype("cpu").itemsize + torch.get_num_threads() * 0.1

        def around(step: int, call: int) -> Any:
            stack = contextlib.ExitStack()
            for each in (*AROUND,) if is_same else (what,) if call else ():
                if step >= 4:
                    stack.enter_context(AROUND[each]())
            return stack

        loop.model.use, loop.around = use, around

    stats = check(prepare)
    assert stats.forwards_speculated == (NUM_STEPS - 1 if is_same else stats.forwards_speculated)
    assert bool(stats.forwards_discarded) != is_same


@pytest.mark.parametrize("kind", [dict, list])
def test_a_container_that_the_forward_fills(kind: Callable[[], Any]) -> None:
    given: list[Any] = []

    def prepare(loop: Loop) -> None:
        def fill(_: Any, x: torch.Tensor, other: Any) -> torch.Tensor:
            other.append(x) if isinstance(other, list) else other.update(feature=x)
            return x

        def other(step: int, call: int) -> Any:
            given.append(kind())
            return given[-1]

        loop.model.use, loop.other = fill, other

    assert not check(prepare).forwards_speculated
    assert len(given) == 4 * NUM_STEPS and all(given)


@pytest.mark.parametrize("first", [1, 2, 4], ids=["when calls are compared", "in the first pass", "later"])
@pytest.mark.parametrize("where", ["a number", "the module"])
def test_random_numbers_that_are_drawn_later(where: str, first: int) -> None:
    """Forwards that were run for nothing leave the generators as they were."""

    def prepare(loop: Loop) -> None:
        def noisy(model: Any, x: torch.Tensor, other: Any) -> torch.Tensor:
            noise = other if where == "a number" else model.state
            return x + noise * (torch.randn(x.shape) + random.random() + np.random.rand()) if noise else x

        def other(step: int, call: int) -> Any:
            loop.model.state = noise = 0.3 if step >= first else 0.0
            return noise if where == "a number" else None

        loop.model.use, loop.other = noisy, other

    assert bool(check(prepare).forwards_speculated) == (first > 1)


@pytest.mark.parametrize(("error", "at"), [(ValueError, 0.0), (ValueError, 1.0), (torch.OutOfMemoryError, 0.0)])
def test_a_forward_of_a_step_fails(error: type[Exception], at: float) -> None:
    """It is raised where that call is made, and what the other call of the step has drawn is put back."""

    def prepare(loop: Loop) -> None:
        state, failed = SimpleNamespace(step=0), []  # out of sight

        def noisy(model: Any, x: torch.Tensor, call: float) -> torch.Tensor:
            if state.step < 4:
                return x
            x = x + torch.randn(x.shape)
            runs_out = error is torch.OutOfMemoryError and not failed and handle_of(model) is not None
            if state.step == 4 and call == at and (runs_out or error is ValueError):
                failed.append(call)
                raise error("it fails")
            return x

        def other(step: int, call: int) -> float:
            state.step = step
            return float(call)

        loop.model.use, loop.other, loop.error = noisy, other, ValueError

    assert check(prepare).forwards_discarded == 1


@pytest.mark.parametrize(
    "value",
    [torch.eye(2).to_sparse(), torch.ones(2, dtype=torch.complex64).conj(), torch.ones(3, 4)[:, :3], torch.tensor(0.5)],
    ids=["sparse", "conjugate", "strided", "expanded"],
)
def test_small_inputs_of_all_kinds(value: torch.Tensor) -> None:
    """Later a contiguous tensor of the same numbers comes second. One element that is expanded has no view as bytes."""
    value = value if value.dim() else value.expand(1)

    def prepare(loop: Loop) -> None:
        loop.model.use = lambda _, x, other: x + float(other.is_contiguous()) if other.layout is torch.strided else x
        is_strided = value.shape == (3, 3)
        loop.other = lambda step, call: torch.ones(3, 3) if is_strided and step > 4 and call else value.clone()
        if value.shape == (1,):
            loop.other = lambda step, call: value

    check(prepare)


@pytest.mark.parametrize("kind", ["sparse", "conjugate", "one buffer", "one buffer, of zeros in the first steps"])
def test_outputs_that_cannot_be_compared(kind: str) -> None:
    class Other(Denoiser):
        def forward(self, x: torch.Tensor, t: torch.Tensor, *args: Any) -> torch.Tensor:
            found = super().forward(x, t, *args)
            if kind.startswith("one buffer"):
                return torch.mul(found, (t > 0.45).float() if "zeros" in kind else 1, out=buffer)
            return found.to_sparse() if kind == "sparse" else torch.complex(found, found).conj()

    assert not check(lambda loop: None, kind=Other).forwards_speculated


def test_a_buffer_that_is_changed_later() -> None:
    """The pass of the first change was shared. No other one is."""
    loop, state = Loop(), SimpleNamespace(step=0)  # out of sight
    loop.model.register_buffer("mean", torch.zeros(6, 8))
    loop.model.use = lambda model, x, call: model.mean.add_(1) if state.step >= 4 else x
    loop.other = lambda step, call: state.__dict__.update(step=step) or float(call)
    handle = apply_group_offloading(loop.model, "cpu", interleave_forwards=True)
    loop.run()
    stats = handle.stats()
    assert (stats.forwards_speculated, stats.forwards_discarded) == (4, 1)
    handle.remove()


def test_a_model_inside_of_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forwards wait for no company: the other forward of the step waits for the turn of this one."""
    tune(monkeypatch, interleave_wait_seconds=5.0)
    loop, inner = Loop(), Denoiser().eval()
    handles = [apply_group_offloading(each, "cpu", interleave_forwards=True) for each in (inner, loop.model)]
    loop.model.use = lambda model, x, other: x + inner(x, torch.ones(1), x)
    loop.run()
    started = time.monotonic()
    loop.run()
    assert time.monotonic() - started < (NUM_STEPS - 1) * tuning().interleave_wait_seconds
    assert handles[1].stats().forwards_speculated and not handles[0].stats().forwards_interleaved
    for handle in reversed(handles):
        handle.remove()


@pytest.mark.parametrize(("grows", "expected"), [(False, [2, 4, 2, 2, 2, 2, 2, 2]), (True, [2, 4, 4, 4, 4, 2, 2, 2])])
def test_steps_are_not_tried_for_ever(grows: bool, expected: list[int]) -> None:
    """How many forwards begin in each step of two calls. A trial makes each twice, and each time may be another number."""
    model, begun, found = Denoiser().eval(), list[int](), []
    model.use = lambda model, x, other: begun.append(1) or x
    handle = apply_group_offloading(model, "cpu", interleave_forwards=True)
    prompts = [torch.randn(5, 8) for _ in range(2)]
    with torch.no_grad():
        for step in range(1, 9):
            begun.clear()
            x, t = (torch.randn(3 + step, 8), torch.tensor([step / 8])) if grows else (torch.randn(3, 8), step)
            for prompt in prompts:
                model(x, t, prompt)
            found.append(len(begun) // 3)
    assert found == expected
    handle.remove()
