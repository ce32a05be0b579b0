"""Several threads that call one model, whose forwards share passes."""

from __future__ import annotations

import copy
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import nn

from group_offload.runtime.interleave.policy import InterleavePolicy
from group_offload.runtime.interleave.turn_lock import Participant, TurnLock

from .models import DIM, RoutedBlock, Stop
from .on_device import offload, options_for
from .reads import late_reads, watch_file_reads
from .rigs import run
from .simulated import SimulatedDevice, use_simulated_device


class Participating(nn.Module):
    """Blocks that each forward calls in an order of its own. Forwards keep no state."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(RoutedBlock(width, counts=False) for width in widths)
        self.on_block: Callable[[], None] | None = None
        """Called in the middle of a forward."""
        self.shift = nn.Parameter(torch.randn(DIM))
        self.eval()

    def forward(self, x: torch.Tensor, route: Sequence[int], stop_at: int = -1) -> torch.Tensor:
        x = self.embed(x) + self.shift
        for position, index in enumerate(route):
            if position == stop_at:
                raise Stop
            x = self.blocks[index](x)
            if self.on_block is not None and position == len(route) // 2:
                self.on_block()
        return x * self.shift


def in_threads(jobs: Sequence[Callable[[], object]], seconds: float = 240) -> None:
    """Run each job in a thread of its own. A deadlock is a failure, with the stacks of the threads."""
    errors: list[BaseException] = []

    def work(job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        while thread.is_alive() and time.monotonic() < deadline and not errors:
            thread.join(0.05)
    for thread in threads:
        thread.join(5 if errors else 0)
    if errors:
        raise AssertionError("".join(traceback.format_exception(errors[0]))) from errors[0]
    frames = sys._current_frames()
    stuck = ["".join(traceback.format_stack(frames[t.ident])) for t in threads if t.is_alive() and t.ident in frames]
    assert not stuck, "threads wait for one another:\n" + "\n\n".join(stuck)


@contextmanager
def taken_as_shared() -> Iterator[None]:
    """Let all forwards share passes, without the check of a first one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterleavePolicy, "_judgement", lambda self, key: True)
        yield


def travel(seed: int, laziness: Any, options: dict[str, Any], seconds: float = 240) -> None:
    """Random forwards of several threads on the simulated device, each on a stream of its own. Every output is right.

    Some forwards take another order, and some raise.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    device = SimulatedDevice(seed, laziness)
    widths = [rng.choice([4, 8, 8, 24]) for _ in range(rng.randint(2, 6))]
    model = Participating(widths)
    resident = copy.deepcopy(model)
    usual = tuple(range(len(widths)))
    with (
        use_simulated_device(device),
        watch_file_reads(device),
        late_reads(rng),
        taken_as_shared(),
        options_for(options) as options,
    ):
        handle = offload(model, interleave_forwards=True, **options)

        def job(number: int) -> Callable[[], None]:
            mine = random.Random(seed * 100 + number)
            stream = device.new_stream() if mine.random() < 0.7 else device.current_stream()

            def work() -> None:
                outputs = []
                for at in range(4):
                    route = usual
                    if mine.random() < 0.3:
                        route = tuple(mine.randrange(len(widths)) for _ in range(mine.randint(0, 8)))
                    stop_at = mine.randrange(len(route)) if route and mine.random() < 0.15 else -1
                    x = torch.randn(3, DIM, generator=torch.Generator().manual_seed(1000 * number + at))
                    try:
                        with torch.no_grad(), device.use_stream(stream), device.running():
                            output = model(device.put(x), route, stop_at)
                    except Stop:
                        assert stop_at >= 0
                        continue
                    outputs.append((output, run(resident, x, route)))
                for output, expected in outputs:
                    assert torch.equal(device.get(output), expected)

            return work

        in_threads([job(number) for number in range(3)], seconds)
        handle.remove()
        for name, value in model.state_dict().items():
            assert torch.equal(value, resident.state_dict()[name]), name
        assert device.pinned_bytes == 0
        assert device.allocated_bytes == 0


@contextmanager
def shared_forwards(laziness: Any) -> Iterator[Callable[[], None]]:
    """A forward, for several threads at a time, of a model that is offloaded. In the end nothing is left on the device."""
    device, model = SimulatedDevice(0, laziness), Participating([8] * 4)
    x, route = torch.randn(2, DIM), (0, 1, 2, 3)
    expected = run(model, x, route)

    def call() -> None:
        with torch.no_grad(), device.running():
            output = model(device.put(x), route)
        assert torch.equal(device.get(output), expected)

    with use_simulated_device(device), taken_as_shared():
        handle = offload(model, interleave_forwards=True)
        yield call
        handle.remove()
        assert device.allocated_bytes == 0


def interrupt_where_it_waits(num_strikes: int, seconds: float = 240) -> None:
    """Ctrl-C strikes a forward where it gives way, or once more where it waits to end that call. The others are right."""
    victims: list[int] = []
    struck: list[int] = []
    wait = TurnLock._wait_for_turn

    def strike(self: TurnLock, participant: Participant) -> None:
        is_near = participant.can_go is not None or struck
        if is_near and len(struck) < num_strikes and threading.get_ident() in victims:
            struck.append(1)
            raise KeyboardInterrupt
        wait(self, participant)

    with shared_forwards("lazy") as call, pytest.MonkeyPatch.context() as patch:

        def usual() -> None:
            for _ in range(4):
                call()

        def victim() -> None:
            victims.append(threading.get_ident())
            for _ in range(4):
                with suppress(KeyboardInterrupt):
                    call()

        in_threads([usual])  # a first pass tells how many have room in one
        patch.setattr(TurnLock, "_wait_for_turn", strike)
        in_threads([usual, usual, victim], seconds)
        assert struck
        in_threads([usual] * 2, seconds)
