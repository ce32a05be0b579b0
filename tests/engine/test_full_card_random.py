"""Random pipelines on cards that hold little more than they need: no error, no race, and the bits of resident models.

The device is the simulated one, whose memory torch's allocator hands out. What a pipeline needs is what it runs in without a
budget: with one, everything that stays on the device can give way, so no call may run out of memory.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from group_offload import ConfigError, disable_group_offload, enable_group_offload
from group_offload.base.tuning import Tuning
from group_offload.plan.budgets import parse_bytes

from ..support.allocator import CachingAllocator, Meter
from ..support.models import DIM, RoutedModel
from ..support.on_device import compression
from ..support.rigs import run
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.speeds import use_speeds
from ..support.tuning import tune

SCALE = 16 << 10
"""Then blocks and activations are some dozens of torch's pages, as those of large models are."""
PAGE = (20 << 20) // SCALE
ROUNDS = 3


class Net(RoutedModel):
    """Keeps no activations, as pipelines do not, and lets other processes run before each block."""

    before_block: Callable[[], None] = staticmethod(lambda: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = self.embed(x) + self.shift
        for block in self.blocks:
            self.before_block()
            x = block(x)
        return x * self.shift


phases = st.builds(
    SimpleNamespace,  # a model, and how it is called each time that its turn comes
    blocks=st.lists(st.tuples(st.integers(1, 8), st.sampled_from([100, 300, 600, 900, 1500])), min_size=1, max_size=2),
    batch=st.sampled_from([2, 16, 64]),  # activations grow with it
    passes=st.integers(1, 3),
)
cases = st.builds(
    SimpleNamespace,
    phases=st.lists(phases, min_size=2, max_size=4),
    level=st.sampled_from(["block_level", "block_level", "leaf_level"]),
    record_stream=st.booleans(),
    compress=st.booleans(),
    # Between the least that is accepted (0) and all that the card has (1); None: "auto".
    budget=st.sampled_from([None, None, 0.0, 0.3, 0.8, 1.0]),
    # What the card has beyond what the pipeline needs, as a share of that.
    room=st.sampled_from([0.1, 0.3, 0.8, 1.5]),
    expandable=st.booleans(),
    is_shared=st.booleans(),  # another process takes and gives memory, of that room
    laziness=st.sampled_from(["random", "eager"]),
    seed=st.integers(0, 999),
)
Case = Any


@settings(
    max_examples=45,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # to shrink a failure takes minutes
    suppress_health_check=list(HealthCheck),
)
@given(cases)
def test_random_pipelines_on_full_cards(case: Case) -> None:
    torch.manual_seed(case.seed)
    all_widths = [[width for number, width in phase.blocks for _ in range(number)] for phase in case.phases]
    models = [Net(widths).eval().to(torch.bfloat16 if case.compress else torch.float32) for widths in all_widths]
    with sizes_and_speeds(case):
        card = CachingAllocator(1 << 40, scale=SCALE, expandable=case.expandable)
        card.allocated.whole = Meter()  # the package resets the peak of the card itself
        check(case, models, card, 1 << 40)
        least = card.allocated.whole.peak * 11 // 10 + 2 * PAGE
        lowest = lowest_budget(case, models)
        capacity = max(int(least * (1 + case.room)), lowest * 5 // 4)  # "auto" is less than all
        card = CachingAllocator(capacity, scale=SCALE, expandable=case.expandable)
        budget = "auto" if case.budget is None else lowest + int(case.budget * (capacity - lowest))
        try:
            check(case, models, card, least, vram_budget=budget)
        except torch.OutOfMemoryError:
            if suffices(case, models, least):
                raise


@contextmanager
def sizes_and_speeds(case: Case) -> Iterator[None]:
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        tune(patch, device_margin_bytes=Tuning().device_margin_bytes // SCALE)
        use_speeds(patch, h2d=2, disk=1)  # a simulated second is one thing that ran
        if case.compress:
            stack.enter_context(compression())
        yield


def suffices(case: Case, models: list[Net], num_bytes: int) -> bool:
    """Whether a card of that size is enough without a budget."""
    try:
        check(case, models, CachingAllocator(num_bytes, scale=SCALE, expandable=case.expandable), num_bytes)
    except torch.OutOfMemoryError:
        return False
    return True


def lowest_budget(case: Case, models: list[Net]) -> int:
    """The least budget that is accepted for each of the models: the error names the first one's alone."""
    least = []
    for model in copy.deepcopy(models):
        with use_simulated_device(SimulatedDevice()), pytest.raises(ConfigError) as error:
            offload(case, [model], vram_budget="1B")
        found = re.search(r"alone need ([0-9.]+ [A-Za-z]+)", str(error.value))
        assert found is not None
        least.append(parse_bytes(found[1], "vram_budget"))
    return max(least)


def offload(case: Case, models: list[Net], **options: Any) -> Any:
    pipe = SimpleNamespace(components={f"model_{number}": model for number, model in enumerate(models)})
    options |= {"offload_type": case.level, "record_stream": case.record_stream, "compress": case.compress}
    return pipe, enable_group_offload(pipe, "cpu", **options)


def check(case: Case, residents: list[Net], card: CachingAllocator, least: int, **options: Any) -> None:
    """Run the pipeline some times. Another process leaves the card `least` bytes."""
    rng = random.Random(case.seed)
    device = SimulatedDevice(case.seed, case.laziness, card=card)  # type: ignore[arg-type]
    models = copy.deepcopy(residents)
    taken = 0

    def take_or_give() -> None:
        nonlocal taken
        wanted = int(rng.random() * (card.capacity - least)) - taken
        if wanted > 0:
            taken += card.other_takes(wanted)
        elif rng.random() < 0.5:
            card.other_gives(-wanted)
            taken += wanted

    with use_simulated_device(device):
        inputs = [
            torch.randn(phase.batch, DIM).to(model.shift.dtype)
            for phase, model in zip(case.phases, models, strict=True)
        ]
        there = [device.put(x) for x in inputs]
        expected = [run(resident, x) for resident, x in zip(residents, inputs, strict=True)]
        pipe, handles = offload(case, models, **options)
        if case.is_shared and options:
            for model in models:
                model.before_block = take_or_give
        for number in [*range(len(models))] * ROUNDS:
            for _ in range(case.phases[number].passes):
                with torch.no_grad(), device.running():
                    output = models[number](there[number])
                assert torch.equal(device.get(output), expected[number])
                del output
        if isinstance(options.get("vram_budget"), int):
            # Compression needs memory beside weights, and the least is told before sizes compressed are known.
            assert case.compress or device.memory.peak <= options["vram_budget"]
            most = options["vram_budget"] * (1.1 if case.compress else 1)
            assert max(handle.stats().peak_device_bytes for handle in handles.values()) <= most
        disable_group_offload(pipe)
        assert device.pinned_bytes == 0 and device.allocated_bytes == 0
