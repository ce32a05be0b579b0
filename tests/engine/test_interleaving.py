"""Forwards of several threads that share a pass. Those of one step of guidance: test_interleaving_contract.py."""

from __future__ import annotations

import copy
import gc
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from group_offload import apply_group_offloading
from group_offload.runtime.interleave import turn_lock
from group_offload.runtime.interleave.turn_lock import TurnLock

from ..interrupts import Strike
from ..support.inside import engine_of
from ..support.models import DIM, WIDTH, Model, inputs, make
from ..support.on_device import forward, offload
from ..support.participants import (
    Participating,
    in_threads,
    interrupt_where_it_waits,
    shared_forwards,
    taken_as_shared,
    travel,
)
from ..support.rigs import run
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.tuning import tune


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:
    gc.collect()
    tune(monkeypatch, interleave_wait_seconds=5.0)  # however busy the machine is, threads that call together meet
    with use_simulated_device(SimulatedDevice(0, "random")) as device:
        yield device


def calls(
    device: SimulatedDevice, model: nn.Module, resident: nn.Module, x: torch.Tensor, times: int, num_threads: int = 1
) -> Callable[[], None]:
    """The work of a thread that calls a model, each time when all threads do. It is right each time."""
    barrier = threading.Barrier(num_threads, timeout=240)

    def work() -> None:
        for _ in range(times):
            barrier.wait()
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


def test_other_orders_on_the_cpu() -> None:
    """Hazard: what waits for a forward of another order was used on no stream there, and can't be released."""
    model = Participating([8] * 4)
    resident, barrier = copy.deepcopy(model), threading.Barrier(2, timeout=240)

    def work(route: tuple[int, ...]) -> None:
        for _ in range(3):
            barrier.wait()
            x = torch.randn(2, DIM)
            assert torch.equal(run(model, x, route), run(resident, x, route))

    with taken_as_shared():
        handle = apply_group_offloading(model, "cpu", interleave_forwards=True)
        in_threads([lambda route=route: work(route) for route in ((0, 1, 2, 3), (3, 1, 0, 2, 2))])
    assert handle.stats().forwards_interleaved
    handle.remove()


def test_threads_send_each_group_once(device: SimulatedDevice) -> None:
    model, resident = make(Model, 6), make(Model, 6)
    handle = offload(model, interleave_forwards=True)
    barrier = threading.Barrier(4, timeout=240)
    sent = []

    def job(number: int) -> Callable[[], None]:
        def work() -> None:
            for at in range(6):
                barrier.wait()
                x = inputs(10 * number + at, (3, 3, 2, 17)[number], WIDTH)  # of several sizes
                assert torch.equal(device.get(forward(device, model, x)), run(resident, x))
                if at > 2:
                    barrier.wait()
                    sent.append(sum(handle.stats().bytes_onloaded.values()))

        return work

    in_threads([job(number) for number in range(4)])
    stats = handle.stats()
    num_bytes = sum(group.num_bytes for group in handle.groups)
    assert max(sent) - min(sent) <= 3 * num_bytes, "two rounds of four forwards"
    assert stats.forwards_interleaved >= 8
    assert "interleave_forwards: " in str(handle.plan)
    handle.remove()


@pytest.mark.parametrize("num_strikes", [1, 2])
def test_an_interrupt_where_a_forward_waits(num_strikes: int) -> None:
    interrupt_where_it_waits(num_strikes)


def test_a_finalizer_that_asks_for_the_lock_in_the_middle_of_its_calls() -> None:
    """Garbage is collected anywhere. The finalizer does not get the lock, and all goes on."""
    asked: list[bool] = []

    def collect(participant: object) -> None:
        asked.append(turns._is_owned() or turns.acquire(blocking=False))

    turns, mine = TurnLock(collect), list[Any]()

    def travel() -> None:
        turns.board([()], mine)
        with turns:
            assert turns._is_owned()

    in_threads([travel])
    assert asked == [False, False] and not turns._is_owned()
    assert turns.acquire(blocking=False)
    turns.release()


def test_an_interrupt_on_any_line() -> None:
    """Of what lets forwards share passes. The others of its pass are right, and later ones."""
    rng, folder = random.Random(0), str(Path(turn_lock.__file__).parent)
    with shared_forwards("eager") as call:

        def usual() -> None:
            for _ in range(4):
                call()

        def struck() -> None:
            with suppress(KeyboardInterrupt), Strike(rng.randrange(1, 1000), path=folder):
                for _ in range(3):
                    call()
            call()

        for _ in range(8):
            in_threads([struck, usual, usual], 30)


def test_memory_that_runs_out_in_a_shared_pass(
    device: SimulatedDevice, said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward is made again alone, and fewer share a pass from then on."""
    model = Participating([8] * 4)
    resident = copy.deepcopy(model)
    x, route = torch.randn(2, DIM), (0, 1, 2, 3)
    failed: list[int] = []
    together: list[int] = []

    def run_out() -> None:
        participant = engine_of(handle).lock.here
        together.append(participant.interleaved.size if participant is not None else 1)
        if not failed and together[-1] > 1 and engine_of(handle).counters.shared > 3:
            failed.append(together[-1])
            tune(monkeypatch, interleave_wait_seconds=0.1)  # from now on not all have room
            raise torch.OutOfMemoryError("no room")

    model.on_block = run_out
    handle, barrier = offload(model, interleave_forwards=True), threading.Barrier(3, timeout=240)

    def work() -> None:
        for _ in range(5):
            barrier.wait()
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
        handle = offload(model, interleave_forwards=True, vram_budget=budget)
        work = calls(device, model, resident, x, 6)
        work()
        device.reset_peak()
        before = handle.stats()
        in_threads([work] * 4)
        assert device.peak_bytes_in_use() <= budget
        after = handle.stats()
        assert after.forwards_interleaved == 0 or not has_room_for_all
        assert after.onloads == before.onloads or not has_room_for_all
        handle.remove()


@pytest.mark.parametrize("what", ["looks", "edits"])
def test_what_others_do_with_the_model(what: str, device: SimulatedDevice) -> None:
    """Meanwhile the plan, a refresh, a part that is called by itself; or edits between shared passes; the end of offloading."""
    model, resident = make(Model, 6), make(Model, 6)
    handle = offload(model, interleave_forwards=True)
    x, is_over, barrier = inputs(), threading.Event(), threading.Barrier(3, timeout=240)

    def edit() -> None:
        for twin in (model, resident):
            twin.get_parameter("blocks.1.up.weight").data.mul_(1.5)

    def work() -> None:
        for _ in range(6):
            calls(device, model, resident, x, 1)()
            if not barrier.wait() and what == "edits":
                edit()
            barrier.wait()

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
    assert handle.stats().forwards_interleaved or what == "looks"
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
_scales = [1.0]


def scales_out_of_sight(model: Acts, x: torch.Tensor) -> Any:
    """The first of two forwards that share a pass is right nevertheless."""
    _scales.append(2 * _scales[-1])
    added = _scales[-1] * model.blocks[0](x)
    _scales.pop()
    return added


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
    "outputs differ from those of separate forwards": scales_out_of_sight,
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
    handle, barrier = offload(model, interleave_forwards=True), threading.Barrier(2, timeout=240)

    def work() -> None:
        for _ in range(5):
            barrier.wait()
            device.get(forward(device, model, inputs()))

    in_threads([work] * 2)
    if hook is not None:
        hook.remove()
    tried = 2 * ("outputs" in reason)  # two that share a pass, whose bits are compared with those of two more
    assert handle.stats().forwards_interleaved <= tried and 10 <= handle.stats().forward_passes <= 10 + tried
    assert len(said()) == 1 and reason in said()[0], said()
    handle.remove()


def test_what_changes_later_is_looked_at_again(device: SimulatedDevice, said: Callable[[], list[str]]) -> None:
    model, resident = make(Model), make(Model)
    handle, work = offload(model, interleave_forwards=True), calls(device, model, resident, inputs(), 4, 2)
    in_threads([work] * 2)
    shared = handle.stats().forwards_interleaved
    assert shared
    hook = model.get_submodule("blocks.0").register_forward_pre_hook(lambda *args: None)
    in_threads([work] * 2)
    assert handle.stats().forwards_interleaved == shared and len(said()) == 1
    hook.remove()
    in_threads([work] * 2)
    assert handle.stats().forwards_interleaved > shared
    handle.remove()


@pytest.mark.parametrize("reason", ["gradients are enabled", "shares weights"])
def test_models_that_go_alone(reason: str, said: Callable[[], list[str]]) -> None:
    models = [make(Model), make(Model, 2)]
    if reason == "shares weights":
        models[1].get_submodule("proj_in").weight = models[0].get_submodule("proj_in").weight
    residents = copy.deepcopy(models)
    handles = [apply_group_offloading(each, "cpu", interleave_forwards=True) for each in models]
    for _ in range(3):
        for model, resident in zip(models, residents, strict=True):
            with nullcontext() if "gradients" in reason else torch.no_grad():
                assert torch.equal(model(inputs()), resident(inputs()))
    assert not any(handle.stats().forwards_interleaved for handle in handles) and any(reason in each for each in said())
    for handle in handles:
        handle.remove()
