"""Forwards, edits and set-ups in several threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from group_offload import StateError
from group_offload.runtime import passes
from group_offload.runtime.threads import where_it_waits

from ...support.asserts import assert_at_rest, assert_same
from ...support.models import WIDTH, Model, inputs, make
from ...support.reading import eventually
from ...support.rigs import Offload, check, offload_to, pair, run, run_onloaded
from ...support.travellers import in_threads
from ...support.tuning import tune


def test_blocks_that_a_forward_calls_in_threads_are_refused(
    offload_either: Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward waits for the threads: they must not wait for it."""
    tune(monkeypatch, turn_patience_seconds=0.2)

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
            self.max_workers = 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.max_workers:
                return sum(block(x) for block in self.blocks)
            with ThreadPoolExecutor(self.max_workers) as pool:
                return sum(pool.map(lambda block: block(x), self.blocks))

    model, reference = pair(Branches)
    handle = offload_either(model)
    with pytest.raises(StateError, match="in another thread than a forward that is in progress"):
        run(model, inputs())
    model.max_workers = 0
    assert_same(run_onloaded(model, inputs()), run(reference, inputs()))
    handle.remove()


@pytest.mark.parametrize("calls_a_part", [False, True])
def test_a_forward_that_works_in_threads_of_its_own_lets_others_wait(
    calls_a_part: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread calls the same model meanwhile, as servers do; or a part of it, while the forward gets on."""
    tune(monkeypatch, turn_patience_seconds=0.05)
    began, got_on, is_over, looks = threading.Event(), threading.Event(), threading.Event(), []

    def look(thread: int) -> Any:
        found = where_it_waits(thread)
        looks.append(found)
        got_on.clear()
        assert eventually(lambda: got_on.is_set() or is_over.is_set())
        return found

    monkeypatch.setattr(passes, "where_it_waits", look)

    class Tiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](x)
            began.set()
            while calls_a_part and is_offloaded and len(looks) < 4:
                pool.submit(time.sleep, 1e-3).result()
                got_on.set()
            pool.submit(time.sleep, 0.3).result()
            got_on.set()
            return self.blocks[1](x)

    model, reference = pair(Tiled)
    x, is_offloaded = inputs(), False
    with ThreadPoolExecutor(4) as pool:
        wanted = [run(called, x) for called in (reference, reference.blocks[0] if calls_a_part else reference)]
        began.clear()
        handle, is_offloaded = offload_to(None, model), True
        first = pool.submit(run_onloaded, model, x)
        first.add_done_callback(lambda _: is_over.set())
        assert began.wait(240)
        second = pool.submit(run_onloaded, model, x, call=model.blocks[0] if calls_a_part else model)
        for found, expected in zip((first, second), wanted, strict=True):
            assert_same(found.result(), expected)
    handle.remove()


def _job(model: nn.Module, reference: nn.Module, seed: int, passes: int = 8) -> Callable[[], None]:
    expected = run(reference, inputs(seed))

    def job() -> None:
        for _ in range(passes):
            assert_same(run(model, inputs(seed)), expected)

    return job


def test_two_threads_on_one_model(offload: Offload) -> None:
    model, reference = pair()
    handle = offload(model)
    in_threads([_job(model, reference, seed) for seed in range(3)])
    assert handle.stats().passes == 24
    assert_at_rest(model, reference)


def test_applying_and_running_in_two_threads(offload: Offload) -> None:
    model, reference = pair()
    offload(model)
    twins = [pair(make(Model, 2, seed=seed)) for seed in range(4)]

    def apply_all() -> None:
        for other, other_reference in twins:
            handle = offload(other)
            check(other, other_reference, inputs())
            handle.remove()

    in_threads([_job(model, reference, 0, passes=20), apply_all])
