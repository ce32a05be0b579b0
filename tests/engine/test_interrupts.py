"""Whatever is raised, wherever: the pass ends, nobody writes to memory that others get, and what comes after is right.

Hazard: an exception, or Ctrl-C, in the middle of a forward leaves groups onloaded.
"""

from __future__ import annotations

import copy
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from group_offload import ModuleError, StateError, StorageError, api, apply_group_offloading, enable_group_offload
from group_offload.api import handle_of
from group_offload.base.arena import Arena
from group_offload.base.device import AcceleratorBackend
from group_offload.base.pinning import PinnedPages
from group_offload.runtime.gates import Gate, Gates
from group_offload.runtime.memory import DeviceMemory
from group_offload.runtime.passes import Passes
from group_offload.runtime.prefetch.prefetcher import Prefetcher
from group_offload.runtime.prefetch.schedule import Schedule
from group_offload.runtime.slots.slot import Slot
from group_offload.runtime.transfers.reader import Reader
from group_offload.runtime.transfers.transfer import Transfer

from .. import interrupts
from ..interrupts import OPERATIONS, SCENARIOS, Place, Places, Strike
from ..support.asserts import assert_at_rest, assert_same, snapshot
from ..support.drivers import PinningDriver
from ..support.faults import raise_at
from ..support.inside import engine_of
from ..support.models import Model, inputs, make
from ..support.on_device import Twins, options_for, raise_interrupt
from ..support.participants import in_threads
from ..support.processes import run_python
from ..support.reading import eventually
from ..support.rigs import check, offload_to, run
from ..support.simulated import SimulatedDevice, use_simulated_device

STRIKES = os.environ.get("STRIKES", "4")
"""How many places each sweep strikes, of one operation in each scenario; or "each": each line once, of all operations."""
SEED = int(os.environ.get("SEED", "0")) or random.SystemRandom().randrange(1 << 30)


# ---------------------------------------------------------------- everywhere


def some(most: int = 0, seed: int = SEED) -> Places:
    """Others in each run: it is told which if one fails."""
    return Places(None if STRIKES == "each" else max(most, int(STRIKES)), seed)


SWEPT: list[tuple[str, str, int, type[BaseException]]] = [
    *(
        (each, name, 0, KeyboardInterrupt)
        for each in SCENARIOS
        for name in (OPERATIONS if STRIKES == "each" else ["any"])
    ),
    *(
        (f"{where} {tier}", "apply", 30, KeyboardInterrupt)
        for where in ("cpu", "simulated")
        for tier in ("ram", "ram leaf", "files", "checkpoint")
    ),
    *((each, "refresh", 30, KeyboardInterrupt) for each in ("cpu files", "simulated files leaf")),
    *(
        (each, "forward", 0, error)
        for each in ("cpu ram", "cpu files leaf", "simulated files")
        for error in (MemoryError, RuntimeError)
    ),
]
"""Scenarios, operations, how many places at least, and what is raised there."""


@pytest.mark.parametrize(
    ("scenario", "operation", "most", "error"), SWEPT, ids=lambda each: getattr(each, "__name__", each)
)
def test_interrupts_at_a_few_places(scenario: str, operation: str, most: int, error: type[BaseException]) -> None:
    """Of a set-up also between a hook and what torch notes of it: nothing is left half offloaded. As edited weights of files
    move to RAM ("refresh") no edit is lost, nor is the next one, and files keep their bytes."""
    chosen = random.Random(f"{SEED} {scenario}").choice([*OPERATIONS]) if operation == "any" else operation
    for attempt in range(4):  # an operation may come to none of the places as often as it did when they were counted
        result = interrupts.sweep(scenario, chosen, some(most, SEED + attempt), error)
        if result.struck or result.failures:
            break
    assert result.struck and not result.failures, (chosen, SEED, result.failures)


@dataclass(frozen=True)
class Inside(Places):
    """Each line of some functions, once."""

    functions: tuple[Callable[..., Any], ...] = ()

    def choose(self, found: Counter[Place]) -> list[tuple[Place, int]]:
        codes = {function.__code__ for function in self.functions}
        chosen = super().choose(Counter({place: number for place, number in found.items() if place[0] in codes}))
        assert codes == {place[0] for place, _ in chosen}, codes - {place[0] for place, _ in chosen}
        return chosen


CALLS = (Passes.begin_call, Passes.end_call, Passes.end_interrupted_call)
SENT = (Transfer.send, Schedule.observe, Schedule.end)
TAKEN = (Arena.lease, DeviceMemory.take, DeviceMemory.take_back, Slot.evict)
STRUCK: list[tuple[str, str, tuple[Callable[..., Any], ...]]] = [
    ("cpu ram", "forward", CALLS),
    ("cpu ram leaf", "changed", (Gates.install, Gates._opened, Gate.uninstall)),
    ("simulated record_stream", "forward", SENT),
    ("simulated files", "forward", (*CALLS, *SENT, Reader._hire)),
    ("simulated pipeline", "forward", TAKEN),
    ("simulated pipeline, budget", "forward", (Arena.displace, Slot.evict)),
    ("simulated budget", "free", (DeviceMemory.free,)),
]
"""Scenarios, operations, and functions whose lines change what belongs to whom."""


@pytest.mark.parametrize(("name", "operation", "functions"), STRUCK, ids=[name for name, *_ in STRUCK])
def test_interrupts_inside_of_functions(name: str, operation: str, functions: tuple[Callable[..., Any], ...]) -> None:
    """Else the pass never ends, and edits are not seen from then on; a module loses its gates for good; the next forward waits
    for threads that were never started; copies go on into slots that others get; models no longer share memory, or hold it
    twice; two slots get the same events."""
    result = interrupts.sweep(name, operation, Inside(seed=SEED, functions=functions))
    assert result.struck > len(functions) and not result.failures, (SEED, result.failures)


@pytest.mark.parametrize("where", ["cpu", "random"])
def test_interrupts_of_a_step_with_activations(where: str) -> None:
    """Else gradients are wrong, or memory is freed under a copy."""
    result = interrupts.sweep_activations(where, some(8))
    assert result.struck and not result.failures, (SEED, result.failures)


def test_real_signals() -> None:
    """In a process of its own: they strike torch and Python too, and leave there what they leave."""
    scenarios = [*SCENARIOS] if STRIKES == "each" else ["cpu ram leaf", "cpu files", "cpu checkpoint"]
    done = run_python(
        f"""
        from tests.interrupts import strike_by_signals
        torch.set_num_threads(1)
        for scenario in {scenarios}:
            result = strike_by_signals(scenario, 2, least=4)
            assert not result.failures, (scenario, result)
        print("right")
        """
    )
    assert done.stdout.strip() == "right", done


# ---------------------------------------------------------------- one by one


def test_interrupts_of_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every line: nothing stays pinned, and nothing is unpinned that is not pinned."""
    driver, backend = PinningDriver(monkeypatch), AcceleratorBackend(torch.device("cuda"))
    monkeypatch.setattr(AcceleratorBackend, "_can_copy_from", lambda *_: True)

    def lock_and_unlock() -> None:
        lock = PinnedPages.take(backend, torch.empty(64, dtype=torch.uint8), lambda: None)
        assert lock is not None and driver.pinned
        lock.release()

    counting = Strike()
    with counting:
        lock_and_unlock()
    assert len(counting.places) > 8 and not driver.pinned
    for place in counting.places:
        with suppress(KeyboardInterrupt), Strike(1, place=place):
            lock_and_unlock()
        assert not driver.pinned and not driver.errors, place


class Retrying(Model):
    """Calls a block again if its weights could not be read or copied."""

    caught: Any = (StorageError, torch.OutOfMemoryError)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.proj_in(x)
        for block in self.blocks:
            try:
                x = block(x)
            except self.caught:
                x = block(x)
        return self.norm(x) * self.gain


@pytest.mark.parametrize(
    "options", [{}, {"record_stream": True}, {"use_stream": False}, {"use_stream": False, "in_files": True}], ids=str
)
def test_a_block_that_is_tried_again_after_a_copy_or_a_read_failed(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot was taken, and holds what was there before."""
    for number in range(1, 10):
        with (
            use_simulated_device(SimulatedDevice()) as device,
            options_for(options) as given,
            Twins(device, make(Retrying), **given) as twins,
        ):
            twins.step(x=inputs())
            fails: Any = (device, "copy", number, torch.OutOfMemoryError("no room"))
            if "in_files" in options:
                fails = (os, "preadv", number, OSError(5, "Input/output error"))
            with monkeypatch.context() as patch, suppress(torch.OutOfMemoryError, StorageError):
                raise_at(patch, *fails)
                twins.step(x=inputs())
            for _ in range(2):
                twins.step(x=inputs())


@pytest.mark.parametrize("number", range(1, 9))
def test_a_block_that_is_tried_again_after_a_read_failed_on_the_cpu(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reference = make(Retrying), make(Retrying)
    offload_to(tmp_path, model)
    check(model, reference, inputs())
    with monkeypatch.context() as patch, suppress(StorageError):  # outside of a block it is the forward's own
        raise_at(patch, os, "preadv", number, OSError(5, "Input/output error"))
        assert_same(run(model, inputs()), run(reference, inputs()))
    check(model, reference, inputs())


def test_a_forward_that_goes_on_after_an_interrupt_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows what it would compute with."""

    class GoesOn(Retrying):
        caught = KeyboardInterrupt

    model, reference = make(GoesOn), make(GoesOn)
    handle = offload_to(tmp_path, model)
    check(model, reference, inputs())
    with monkeypatch.context() as patch:
        raise_at(patch, Prefetcher, "was_released")
        with pytest.raises(StateError, match="goes on after it was interrupted"):
            run(model, inputs())
    check(model, reference, inputs())
    handle.remove()


# ---------------------------------------------------------------- threads


def test_an_interrupt_before_a_module_has_an_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not offloaded then."""
    model = make()
    monkeypatch.setattr(api, "add_owner", raise_interrupt)
    with pytest.raises(KeyboardInterrupt):
        offload_to(None, model)
    assert handle_of(model) is None


def test_a_module_that_is_given_back_while_a_thread_waits_for_its_turn() -> None:
    """The thread calls the module that it has become."""
    model, reference = make(), make()
    handle = offload_to(None, model)
    is_inside, go = threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        is_inside.set()
        assert go.wait(60)

    def are_blocked(number: int) -> bool:
        places = {"wait_for_turn", "remove"}
        return sum(each.f_code.co_name in places for each in sys._current_frames().values()) == number

    hook = model.blocks[0].register_forward_pre_hook(hold)
    with ThreadPoolExecutor(3) as pool:
        outputs = [pool.submit(run, model, inputs())]
        assert is_inside.wait(60)
        hook.remove()
        taker = pool.submit(handle.remove)
        assert eventually(lambda: are_blocked(1))
        outputs.append(pool.submit(run, model, inputs()))
        assert eventually(lambda: are_blocked(2))
        go.set()
        for output in outputs:
            assert_same(output.result(60), run(reference, inputs()))
        taker.result(60)
    assert not handle.is_active


def test_another_model_begins_while_slots_are_laid_out_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets memory of its own, and takes none that the first one is looking at."""
    with use_simulated_device(SimulatedDevice()) as device, Twins(device, make(), vram_budget="1GiB") as twins:
        for _ in range(4):
            twins.step(x=inputs())
        assert twins.handle.stats().resident_bytes
        other = Twins(device, make(Model, seed=1))
        before = twins.handle.stats().onloads
        placer: Any = engine_of(twins.handle).placer
        real = placer.replan

        def replan(kind: Any) -> None:
            with monkeypatch.context() as patch:
                patch.setattr(placer, "replan", real)
                in_threads([partial(other.step, x=inputs())])
            real(kind)

        placer.replan = replan
        twins.step(x=inputs())
        del placer.replan
        assert twins.handle.stats().onloads == before  # all that stayed there is still there
        other.check()
        other.handle.remove()


# ---------------------------------------------------------------- CUDA graphs


def test_a_capture_is_refused_at_once() -> None:
    """A replay would read memory that holds other weights by then. Captures of other modules are not our business."""
    device = SimulatedDevice()
    model, reference = make(), make()
    with use_simulated_device(device):
        handle = apply_group_offloading(model, "cpu")
        expected = run(reference, inputs())
        for _ in range(2):
            with torch.no_grad(), device.running():
                assert_same(device.get(model(device.put(inputs()))), expected)
            passes, copies = handle.stats().forward_passes, device.num_copies
            device.captures = True
            for part in (model, model.blocks[0]):
                with pytest.raises(StateError, match=r"captured in a CUDA graph.*remove\(\)"):
                    part(inputs())
            device.captures = False
            assert handle.stats().forward_passes == passes and device.num_copies == copies
            with device.running():
                x = device.put(inputs()).requires_grad_()
                loss = model.requires_grad_(False)(x).sum()
                device.captures = True
                with pytest.raises(StateError, match="captured in a CUDA graph"):
                    loss.backward()
                device.captures = False
        handle.remove()


def test_a_module_that_is_a_graph_already_is_refused() -> None:
    """Its kernels read the memory that its weights had when they were captured."""
    model = make()
    forward = model.blocks[1].forward
    model.blocks[1].forward = replay = lambda *args: forward(*args)
    replay.__module__ = torch.cuda.graphs.make_graphed_callables.__module__
    with pytest.raises(
        ModuleError, match=r"the forward of blocks\.1 is a CUDA graph .torch\.cuda\.make_graphed_callables"
    ):
        offload_to(None, model)
    del model.blocks[1].forward
    offload_to(None, model).remove()


# ---------------------------------------------------------------- applying that fails


@pytest.mark.parametrize("when", ["in the middle", "at the end", "while it is excluded", "one is offloaded already"])
def test_a_pipeline_of_which_one_model_fails(when: str) -> None:
    """The others would stay offloaded. What was offloaded before stays so."""

    class Fails(Model):
        def to(self, *args: Any, **options: Any) -> Any:
            super().to(*args, **options)
            raise MemoryError

    models = {"one": make(Model, 1), "two": make(Fails, 2), "three": make(Model, 3)}
    references = copy.deepcopy(models)
    before = {name: snapshot(model) for name, model in models.items()}
    handle = apply_group_offloading(models["three"], "cpu") if when == "one is offloaded already" else None
    if when != "while it is excluded":
        failing = models["three" if when == "at the end" else "two"]
        failing.empty = nn.Parameter(torch.empty(2, device="meta"))
    excluded = ["two"] if when == "while it is excluded" else []
    with pytest.raises((ModuleError, MemoryError)):
        enable_group_offload(SimpleNamespace(components=models), "cpu", exclude_modules=excluded)
    for name, model in models.items():
        if "empty" in model._parameters:
            del model.empty
        if handle is not None and name == "three":
            assert handle.is_active and handle_of(model) is handle
        else:
            assert snapshot(model) == before[name] and handle_of(model) is None
            assert_at_rest(model, references[name])
            assert_same(run(model, inputs()), run(references[name], inputs()))
