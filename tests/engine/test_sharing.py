"""Forwards that share a pass: those of several threads, and those of one step of guidance."""

from __future__ import annotations

import copy
import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from group_offload import OffloadHandle, apply_group_offloading
from group_offload.runtime.convoy.lock import TurnLock
from group_offload.runtime.convoy.speculation import Speculation
from group_offload.runtime.copies.transfer import Transfer

from ..support.inside import engine_of
from ..support.models import DIM, WIDTH, Block, Model, Stop, inputs, make
from ..support.on_device import forward, offload
from ..support.reading import eventually
from ..support.rigs import pair, run
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.travellers import (
    Travelling,
    in_threads,
    interrupt_on_lines,
    interrupt_where_it_waits,
    taken_as_shared,
    travel,
)
from ..support.tuning import tune


def bytes_sent(handle: OffloadHandle) -> int:
    return sum(handle.stats().bytes_onloaded.values())


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    gc.collect()
    with use_simulated_device(SimulatedDevice(0, "random")) as device:
        yield device


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, "group_offload")
    return lambda: [r.getMessage() for r in caplog.records if "separately (share_passes)" in r.getMessage()]


def calls(
    device: SimulatedDevice, model: nn.Module, resident: nn.Module, x: torch.Tensor, times: int
) -> Callable[[], None]:
    """The work of a thread that calls a model, which is right each time."""

    def work() -> None:
        for _ in range(times):
            assert torch.equal(device.get(forward(device, model, x)), run(resident, x))

    return work


# ---------------------------------------------------------------- several threads


OPTIONS: list[dict[str, Any]] = [
    {},
    {"record_stream": True},
    {"offload_type": "leaf_level"},
    {"in_files": True},
    {"use_stream": False},
    {"low_cpu_mem_usage": True},
]


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.sampled_from(["random", "lazy"]), st.sampled_from(OPTIONS))
def test_random_schedules(seed: int, laziness: str, options: dict[str, Any]) -> None:
    travel(seed, laziness, options)


def test_threads_send_each_group_once(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(monkeypatch, convoy_wait_seconds=2.0)
    model, resident = make(Model, 6), make(Model, 6)
    handle = offload(model, share_passes=True)
    barrier = threading.Barrier(4)
    sent = []

    def job(number: int) -> Callable[[], None]:
        def work() -> None:
            for at in range(6):
                if at > 3:
                    barrier.wait(60)
                x = inputs(10 * number + at, (3, 3, 2, 17)[number], WIDTH)  # of several sizes
                assert torch.equal(device.get(forward(device, model, x)), run(resident, x))
                if at > 2:
                    barrier.wait(60)
                    sent.append(bytes_sent(handle))

        return work

    in_threads([job(number) for number in range(4)])
    stats = handle.stats()
    num_bytes = sum(group.num_bytes for group in handle.groups)
    assert max(sent) - min(sent) <= 3 * num_bytes, "two rounds of four forwards"
    assert stats.passes_shared >= 8
    assert "share_passes: " in str(handle.plan)
    handle.remove()


@pytest.mark.parametrize("num_strikes", [1, 2])
def test_an_interrupt_where_a_forward_waits(num_strikes: int) -> None:
    interrupt_where_it_waits(num_strikes)


def test_a_thread_that_takes_the_lock_again_and_again_holds_up_no_convoy(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, is_over, mine = TurnLock(lambda traveller: None), threading.Event(), list[Any]()
    turns._recent = {-1: 0}  # a thread that came along last time, and does not come now

    def take() -> None:
        while not is_over.is_set():
            with turns:
                time.sleep(1e-3)

    other = threading.Thread(target=take)
    other.start()
    begun = time.monotonic()
    try:
        turns.board([()], 4, mine)
        assert time.monotonic() - begun < 30
    finally:
        is_over.set()
        turns.disembark(mine[0])
        other.join()


def test_who_was_late_for_one_pass_is_waited_for_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else threads that begin their steps together, and come in turns, never share a pass again."""
    turns, sizes = TurnLock(lambda traveller: None), dict[str, int]()
    tune(monkeypatch, convoy_wait_seconds=10)

    def board(name: str) -> None:
        mine: list[Any] = []
        turns.board([()], 4, mine)
        sizes[name] = mine[0].convoy.size
        turns.disembark(mine[0])

    def together(step: int) -> None:
        ahead = first.submit(board, f"first {step}")
        assert eventually(lambda: turns._convoy is not None or ahead.done())
        second.submit(board, f"second {step}").result(60)
        ahead.result(60)

    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        for thread in (first, second):
            thread.submit(turns.announce).result(60)
        together(0)
        tune(monkeypatch, convoy_wait_seconds=0.01)
        first.submit(board, "first 1").result(60)
        tune(monkeypatch, convoy_wait_seconds=10)
        together(2)
    assert sizes == {"first 0": 2, "second 0": 2, "first 1": 1, "first 2": 2, "second 2": 2}


def test_a_finalizer_that_asks_for_the_lock_in_the_middle_of_its_calls() -> None:
    """Garbage is collected anywhere. The finalizer does not get the lock, and all goes on."""
    asked: list[bool] = []

    def collect(traveller: object) -> None:
        asked.append(turns._is_owned() or turns.acquire(blocking=False))

    turns, mine = TurnLock(collect), list[Any]()

    def travel() -> None:
        turns.board([()], 1, mine)
        with turns:
            assert turns._is_owned()

    in_threads([travel], 10)
    assert asked == [False, False] and not turns._is_owned()
    assert turns.acquire(blocking=False)
    turns.release()


def test_what_was_seen_of_modules_goes_with_remove() -> None:
    """The state is kept from call to call, with all objects in it."""
    model = Travelling([8] * 4)
    model.seen = torch.zeros(1)
    gone = weakref.ref(model.seen)
    handle = apply_group_offloading(model, "cpu", share_passes=True)
    for _ in range(3):
        run(model, torch.randn(2, DIM), (0, 1, 2, 3))
    handle.remove()
    del model.seen
    assert gone() is None


def test_an_interrupt_on_any_line() -> None:
    interrupt_on_lines(0, 8)


def test_memory_that_runs_out_in_a_shared_pass(device: SimulatedDevice, said: Callable[[], list[str]]) -> None:
    """The forward is made again alone, and fewer share a pass from then on."""
    model = Travelling([8] * 4)
    resident = copy.deepcopy(model)
    x, route = torch.randn(2, DIM), (0, 1, 2, 3)
    failed: list[int] = []
    together: list[int] = []

    def run_out() -> None:
        traveller = engine_of(handle).lock.here
        together.append(traveller.convoy.size if traveller is not None else 1)
        if not failed and together[-1] > 1 and engine_of(handle).counters.shared > 3:
            failed.append(together[-1])
            raise torch.OutOfMemoryError("no room")

    model.on_block = run_out
    handle = offload(model, share_passes=True)

    def work() -> None:
        for _ in range(5):
            with torch.no_grad(), device.running():
                output = model(device.put(x), route)
            assert torch.equal(device.get(output), run(resident, x, route))

    with taken_as_shared():
        in_threads([work] * 3)
        assert any(f"out of memory with {failed[0]} at once" in each for each in said())
        together.clear()
        in_threads([work] * 3)
    assert max(together) < failed[0]
    handle.remove()


@pytest.mark.parametrize("has_room_for_all", [False, True])
def test_a_budget_holds_for_all_that_share_a_pass(has_room_for_all: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all weights stay on the device nothing is evicted to share what is not sent."""
    tune(monkeypatch, device_margin_bytes=0)
    gc.collect()
    device = SimulatedDevice(0, "lazy")
    with use_simulated_device(device):
        model, resident = make(Model, 6), make(Model, 6)
        weights = sum(tensor.nbytes for tensor in model.parameters())
        x = inputs(0, 64, WIDTH)
        budget = weights * (3 if has_room_for_all else 1) + 20 * x.nbytes
        handle, work = offload(model, share_passes=True, vram_budget=budget), calls(device, model, resident, x, 6)
        work()
        device.reset_peak()
        before = handle.stats()
        in_threads([work] * 4)
        assert device.peak_bytes_in_use() <= budget
        after = handle.stats()
        assert after.passes_shared == 0 or not has_room_for_all
        assert after.onloads == before.onloads or not has_room_for_all
        handle.remove()


@pytest.mark.parametrize("what", ["looks", "edits"])
def test_what_others_do_with_the_model(what: str, device: SimulatedDevice) -> None:
    """Meanwhile the plan, a refresh, a part that is called by itself; or edits between shared passes; the end of offloading."""
    model, resident = make(Model, 6), make(Model, 6)
    handle = offload(model, share_passes=True)
    x, is_over, barrier = inputs(), threading.Event(), threading.Barrier(3)

    def edit() -> None:
        for twin in (model, resident):
            twin.get_parameter("blocks.1.up.weight").data.mul_(1.5)

    def work() -> None:
        for _ in range(6):
            calls(device, model, resident, x, 1)()
            if not barrier.wait(60) and what == "edits":
                edit()
            barrier.wait(60)

    def look() -> None:
        while not is_over.is_set() and what == "looks":
            str(handle.plan)
            handle.refresh()
            calls(device, model.get_submodule("blocks.2"), resident.get_submodule("blocks.2"), x, 1)()

    def all_of_them() -> None:
        try:
            in_threads([work] * 3)
        finally:
            is_over.set()

    in_threads([all_of_them, look])
    assert handle.stats().passes_shared or what == "looks"
    handle.remove()
    assert torch.equal(run(model, x), run(resident, x))


# ---------------------------------------------------------------- what cannot be shared


class Acts(Model):
    """Adds something to its output, and may do more than that."""

    def __init__(self, act: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.act, self.calls = act, 0
        self.scaling = {"default": 1.0}
        self.register_buffer("steps", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.act(self, x)


_calls: list[int] = []


def scales(model: Acts, x: torch.Tensor) -> Any:
    """As a LoRA that is scaled for the length of a forward."""
    model.scaling["default"] *= 2
    added = model.scaling["default"] * model.blocks[0](x)
    model.scaling["default"] /= 2
    return added


def replaced(model: nn.Module) -> None:
    block: Any = model.get_submodule("blocks.1")
    block.forward = lambda x, own=block.forward: own(x)


ACTS: dict[str, Callable[[Acts, torch.Tensor], Any]] = {
    "it draws random numbers": lambda model, x: 0 * torch.rand(1),
    "it changes attributes of its modules": lambda model, x: setattr(model, "calls", model.calls + 1) or 0,
    "changes attributes of its modules": scales,
    "it changes its weights or buffers": lambda model, x: model.get_buffer("steps").add_(1).sum(),
    "it changes its inputs": lambda model, x: 0 * x.mul_(1.0).sum(),
    "outputs differ": lambda model, x: _calls.append(1) or len(_calls),  # type: ignore[func-returns-value]
}
CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "blocks.1 has a hook": lambda model: model.get_submodule("blocks.1").register_forward_hook(lambda *args: None),
    "a global module hook": lambda model: nn.modules.module.register_module_forward_hook(lambda *args: None),
    "blocks.1 is in training mode": lambda model: model.get_submodule("blocks.1").train() and None,
    "blocks.1 has a replaced forward": replaced,
}


@pytest.mark.parametrize("reason", [*ACTS, *CHANGES])
def test_what_is_no_function_goes_alone(reason: str, device: SimulatedDevice, said: Callable[[], list[str]]) -> None:
    """One forward scales a LoRA for its length, and another one that shares its pass would compute with that."""
    model = make(Acts, ACTS[reason]) if reason in ACTS else make(Model)
    hook = CHANGES[reason](model) if reason in CHANGES else None
    handle = offload(model, share_passes=True)

    def work() -> None:
        for _ in range(5):
            device.get(forward(device, model, inputs()))

    in_threads([work] * 2)
    if hook is not None:
        hook.remove()
    tried = 2 * (reason == "outputs differ")  # two that share a pass, whose bits are compared with those of two more
    assert handle.stats().passes_shared <= tried and 10 <= handle.stats().passes <= 10 + tried
    assert len(said()) == 1 and reason in said()[0], said()
    handle.remove()


def test_with_gradients_forwards_go_alone(said: Callable[[], list[str]]) -> None:
    model, resident = pair()
    handle = apply_group_offloading(model, "cpu", share_passes=True)
    for _ in range(3):
        assert torch.equal(model(inputs()), resident(inputs()))
    assert handle.stats().passes_shared == 0 and "gradients are enabled" in said()[0]
    handle.remove()


def test_what_changes_later_is_looked_at_again(
    device: SimulatedDevice, said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(monkeypatch, convoy_wait_seconds=2.0)
    model, resident = make(Model), make(Model)
    handle, work = offload(model, share_passes=True), calls(device, model, resident, inputs(), 4)
    in_threads([work] * 2)
    shared = handle.stats().passes_shared
    assert shared
    hook = model.get_submodule("blocks.0").register_forward_pre_hook(lambda *args: None)
    in_threads([work] * 2)
    assert handle.stats().passes_shared == shared and len(said()) == 1
    hook.remove()
    in_threads([work] * 2)
    assert handle.stats().passes_shared > shared
    handle.remove()


def test_models_that_share_weights(said: Callable[[], list[str]]) -> None:
    one, two = make(Model), make(Model, 2)
    two.get_submodule("proj_in").weight = one.get_submodule("proj_in").weight
    residents = copy.deepcopy((one, two))
    handles = [apply_group_offloading(each, "cpu", share_passes=True) for each in (one, two)]
    for _ in range(3):
        for model, resident in zip((one, two), residents, strict=True):
            assert torch.equal(run(model, inputs()), run(resident, inputs()))
    assert any("shares weights" in each for each in said())
    for handle in handles:
        handle.remove()


# ---------------------------------------------------------------- guidance


class Denoiser(nn.Module):
    """Called as the transformers of diffusers' pipelines are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.gain = nn.Parameter(torch.rand(WIDTH))
        self.scale = 1.0
        self.settings = {"gain": 1.0}
        self.on_call: Any = type(self)._nothing

    @staticmethod
    def _nothing(prompt: torch.Tensor) -> None:
        pass

    def forward(
        self, hidden_states: torch.Tensor, timestep: Any = None, prompt: Any = None, options: Any = None
    ) -> tuple[torch.Tensor]:
        self.on_call(prompt)
        x = hidden_states * timestep + self.embed(prompt).mean(0)
        for block in self.blocks:
            x = block(x)
        x = x * self.gain * self.scale * self.settings["gain"]
        return (x if options is None else x * options.gain,)


class Pipe:
    """A loop with guidance, over a model that is offloaded, and one that is not."""

    def __init__(
        self, device: SimulatedDevice | None, num_prompts: int = 2, kind: type[nn.Module] = Denoiser, **options: Any
    ) -> None:
        self.device = device
        self.resident = make(kind)
        self.model = copy.deepcopy(self.resident)
        self.handle = apply_group_offloading(self.model, "cpu", share_passes=True, **options)
        self.prompts = [inputs(number, 4, WIDTH) for number in range(num_prompts)]
        self.between: Callable[[int, nn.Module], None] = lambda step, model: None
        """Called after the first call of each step."""
        self.after: Callable[[int, list[torch.Tensor]], None] = lambda step, prompts: None
        """Called after each step, with the prompts. (`callback_on_step_end`)"""
        self.num_prompts_at: Callable[[int], int] = lambda step: num_prompts
        self.options: Any = None

    def run(self, num_steps: int = 6) -> None:
        """Every step is right."""
        expected = self._loop(self.resident, lambda tensor: tensor.clone(), num_steps)
        put = self.device.put if self.device is not None else lambda tensor: tensor.clone()
        if self.device is None:
            found = self._loop(self.model, put, num_steps)
        else:
            with self.device.running():
                found = [self.device.get(each) for each in self._loop(self.model, put, num_steps)]
        for step, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(one, other), f"step {step}"

    def _loop(
        self, model: nn.Module, put: Callable[[torch.Tensor], torch.Tensor], num_steps: int
    ) -> list[torch.Tensor]:
        prompts, found = [put(prompt) for prompt in self.prompts], []
        latents = put(inputs(9))
        with torch.no_grad():
            for step in range(num_steps):
                time = put(torch.tensor([float(step + 1)]))
                outputs = []
                for number in range(self.num_prompts_at(step)):
                    outputs.append(model(latents, timestep=time / 10, prompt=prompts[number], options=self.options)[0])
                    if not number:
                        self.between(step, model)
                guided = outputs[0] if len(outputs) == 1 else outputs[0] + 2 * (outputs[0] - sum(outputs[1:]))
                latents = latents - 0.1 * guided
                found.append(latents)
                self.after(step, prompts)
        return found

    def close(self) -> None:
        self.handle.remove()


@pytest.fixture(params=["random", "cpu"])
def any_device(request: pytest.FixtureRequest) -> Iterator[SimulatedDevice | None]:
    gc.collect()
    if request.param == "cpu":
        yield None
        return
    device = SimulatedDevice(0, request.param)
    with use_simulated_device(device):
        yield device
        gc.collect()
        device.synchronize()
    assert device.allocated_bytes == 0


@pytest.mark.parametrize("num_prompts", [2, 3])
def test_the_calls_of_a_step_share_a_pass(num_prompts: int, any_device: SimulatedDevice | None) -> None:
    pipe = Pipe(any_device, num_prompts)
    pipe.run()
    before = bytes_sent(pipe.handle)
    stats = pipe.handle.stats()
    assert stats.passes_predicted == 5 * (num_prompts - 1), "all but the first step"
    assert stats.passes_discarded == 0
    pipe.run()
    if any_device is not None:
        num_bytes = sum(group.num_bytes for group in pipe.handle.groups)
        assert bytes_sent(pipe.handle) - before <= (5 + num_prompts) * num_bytes
    pipe.close()


@pytest.mark.parametrize("what", ["in place", "another object", "another size", "guidance ends"])
def test_what_was_foreseen_is_not_called_for(what: str, any_device: SimulatedDevice | None) -> None:
    """A callback changes the embeddings, or switches guidance off half way."""
    pipe = Pipe(any_device)

    def change(step: int, prompts: list[torch.Tensor]) -> None:
        if step == 3 and what == "in place":
            prompts[1].mul_(2)
        elif step == 3:
            prompts[1] = prompts[1] * 2 if what == "another object" else torch.cat([prompts[1], prompts[1]])

    if what == "guidance ends":
        pipe.num_prompts_at = lambda step: 2 if step < 4 else 1
    else:
        pipe.after = change
    pipe.run(8)
    stats = pipe.handle.stats()
    assert stats.passes_predicted >= 3
    assert stats.passes_discarded == 1 if what == "guidance ends" else stats.passes_discarded <= 1
    pipe.close()


def test_two_misses_in_a_row_end_it(device: SimulatedDevice, said: Callable[[], list[str]]) -> None:
    pipe = Pipe(device)

    def change(step: int, prompts: list[torch.Tensor]) -> None:
        pipe.kept.append(prompts[1])
        prompts[1] = prompts[1] * 1.5

    pipe.kept = []  # type: ignore[attr-defined]
    pipe.run(4)
    pipe.after = change
    pipe.run(8)
    assert pipe.handle.stats().passes_discarded == 2
    assert any("twice in a row" in each for each in said())
    pipe.kept.clear()  # type: ignore[attr-defined]
    pipe.close()


@pytest.mark.parametrize("edit", ["in place", "data", "replaced", "attribute", "within"])
def test_an_edit_between_the_calls_of_a_step(edit: str, device: SimulatedDevice) -> None:
    """The second call computes with the weights that the model has then."""
    pipe = Pipe(device)

    def change(step: int, model: Any) -> None:
        if step not in (3, 5):
            return
        weight = model.blocks[2].up.weight
        with torch.no_grad():
            if edit == "in place":
                weight.mul_(1.5)
            elif edit == "data":
                weight.data.mul_(1.5)
            elif edit == "replaced":
                model.blocks[2].up.weight = nn.Parameter(weight.detach().cpu() * 1.5)
            elif edit == "attribute":
                model.scale *= 1.5
            else:
                model.settings["gain"] *= 1.5

    pipe.between = change
    pipe.run(8)
    stats = pipe.handle.stats()
    assert stats.passes_predicted and stats.passes_discarded
    pipe.close()


@pytest.mark.parametrize("given", [[SimpleNamespace(gain=2.0)], torch.Generator()], ids=["object", "generator"])
def test_a_call_with_another_input_than_tensors_and_plain_values(given: Any, said: Callable[[], list[str]]) -> None:
    class Takes(Denoiser):
        def forward(self, *args: Any, options: Any = None, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    pipe = Pipe(None, kind=Takes)
    pipe.options = given
    pipe.run()
    assert not pipe.handle.stats().passes_predicted
    assert "which can't be compared between calls" in said()[0]
    pipe.options = {"scale": [1.0, None, "text"]}
    pipe.run()
    assert pipe.handle.stats().passes_predicted
    pipe.close()


def test_an_end_of_offloading_while_a_step_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the forward."""
    pipe, start, removers = Pipe(None), Speculation.start, []
    pipe.run()

    def start_late(ahead: Speculation) -> None:
        if not removers:
            removers.append(threading.Thread(target=pipe.handle.remove, daemon=True))
            removers[0].start()
            while not engine_of(pipe.handle).lock._outsiders:
                time.sleep(0.001)
        start(ahead)

    monkeypatch.setattr(Speculation, "start", start_late)
    pipe.run(8)
    removers[0].join(30)
    assert not removers[0].is_alive()


class Refuses(Denoiser):
    def forward(self, hidden_states: Any, timestep: Any = None, prompt: Any = None, options: Any = None) -> Any:
        if bool(timestep > 0.45) and prompt.shape[0] == 5:
            raise Stop
        return super().forward(hidden_states, timestep, prompt, options)


@pytest.mark.parametrize("number", [0, 1])
def test_an_error_in_one_call_of_a_step(number: int, any_device: SimulatedDevice | None) -> None:
    """It is raised where that call is made."""
    pipe = Pipe(any_device, kind=Refuses)
    pipe.prompts[number] = inputs(5, 5, WIDTH)
    put = (lambda tensor: tensor.clone()) if any_device is None else any_device.put
    steps: list[int] = []
    pipe.between = lambda step, model: steps.append(step)
    with any_device.running() if any_device is not None else nullcontext(), pytest.raises(Stop):
        pipe._loop(pipe.model, put, 8)
    assert len(steps) == 4 + number, "the first call of that step returned"
    pipe.prompts[number] = inputs(5, 4, WIDTH)
    pipe.run(5)
    pipe.close()


@pytest.mark.parametrize("at", [0, 2, 5])
def test_an_interrupt_in_a_step(at: int, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = Pipe(device)
    pipe.run(4)
    send, num_calls = Transfer.send, 0

    def strike(self: Transfer, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        if threading.current_thread() is threading.main_thread():
            num_calls += 1
            if num_calls == at + 1:
                raise KeyboardInterrupt
        return send(self, *args, **kwargs)

    monkeypatch.setattr(Transfer, "send", strike)
    with pytest.raises(KeyboardInterrupt):
        pipe.run(40)
    monkeypatch.undo()
    pipe.run()
    pipe.close()


def test_an_interrupt_between_boarding_and_the_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """No seat stays taken: the next forwards would wait for it."""
    pipe = Pipe(None)
    pipe.run(4)

    def strike(self: Any, *args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("group_offload.runtime.convoy.policy.Speculation.__init__", strike)
        with pytest.raises(KeyboardInterrupt):
            pipe.run(40)
    in_threads([pipe.run], 20)
    assert pipe.handle.stats().passes_predicted > 4
    pipe.close()


def test_inference_tensors_are_not_foreseen(said: Callable[[], list[str]]) -> None:
    pipe = Pipe(None)
    with torch.inference_mode():
        pipe.prompts = [prompt.clone() for prompt in pipe.prompts]
        pipe.run()
    assert pipe.handle.stats().passes_predicted == 0
    assert any("inference tensors" in each for each in said())
    pipe.close()


@pytest.mark.parametrize("why", ["it takes long", "there are no copies in RAM"])
def test_where_edits_are_not_noticed_nothing_is_foreseen(
    why: str, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    if why == "it takes long":
        monkeypatch.setattr("group_offload.runtime.convoy.policy.scans_quickly", lambda: False)
    pipe = Pipe(device, low_cpu_mem_usage=why != "it takes long")
    pipe.between = lambda step, model: model.blocks[2].up.weight.data.mul_(1.5) if step == 3 else None  # type: ignore
    pipe.run(8)
    assert pipe.handle.stats().passes_predicted == 0 and "can't be detected quickly" in said()[0]
    pipe.close()


def test_threads_that_guide(device: SimulatedDevice) -> None:
    """Each runs its own steps; the calls of all may share one pass."""
    pipes = [Pipe(device)]
    for _ in range(2):
        twin = copy.copy(pipes[0])
        twin.prompts = [prompt * 2 for prompt in pipes[0].prompts]
        pipes.append(twin)
    in_threads([pipe.run for pipe in pipes])
    assert pipes[0].handle.stats().passes_predicted
    pipes[0].close()
