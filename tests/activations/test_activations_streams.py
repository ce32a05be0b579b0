"""Stream order of activation offloading, on a simulated device where every missing wait is an error.

`everything` is what one engine has to get right; with any single wait taken out it has to fail.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from group_offload import StateError
from group_offload.activations import host_pool, offloader, streams

from ..support.activations import Calls, check, offload, on, random_training
from ..support.asserts import same_bits
from ..support.models import Stop
from ..support.simulated import SimulatedDevice
from ..support.training import DIM, plain, retained, stopped_backward, two_by_two
from ..support.tuning import tune
from ..support.waits import waits_of


@contextmanager
def simulated(
    num_blocks: int = 5,
    laziness: str = "lazy",
    function: Callable[..., torch.Tensor] = lambda x, w: torch.sin(x @ w) * torch.cos(x),
    **options: Any,
) -> Iterator[tuple[SimulatedDevice, Any, torch.Tensor, list[torch.Tensor]]]:
    """A model on the device, its input there, and what its gradients have to be. Nothing of it is freed before the end."""
    torch.manual_seed(0)
    model = Calls(*[function] * num_blocks)
    x = torch.randn(DIM, DIM)
    model(x).sum().backward()
    expected = take_gradients(model)
    with on(laziness, model) as (put, _):
        device: SimulatedDevice = put.__self__  # type: ignore[attr-defined]
        handle = offload(model, **{"keep_last": 0, **options})
        yield device, model, put(x), expected
        device.synchronize()
        handle.remove()
        assert device.pinned_bytes == 0


def take_gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for parameter in model.parameters():
        parameter.grad = None
    return found


def assert_gradients(device: SimulatedDevice, model: nn.Module, expected: list[torch.Tensor]) -> None:
    """Of the backward before, which are taken."""
    assert expected
    for one, other in zip(take_gradients(model), expected, strict=True):
        assert same_bits(device.get(one), other)


def order(device: SimulatedDevice, before: Any, after: Any) -> None:
    event = device.new_event()
    event.record(before)
    after.wait_event(event)


ON_ANOTHER_STREAM: list[dict[str, Any]] = [{}, {"laziness": "random"}, {"num_blocks": 8, "prefetch": 0}]


@pytest.mark.parametrize("options", ON_ANOTHER_STREAM, ids=str)
def test_backward_on_another_stream_than_forward(options: dict[str, Any]) -> None:
    """It waits for forward's compute, as autograd would make it, and nothing waits for it but the end. With 8 blocks, forward's
    stream comes to wait for the copies only in backward: the other one does not see that."""
    with simulated(**options) as (device, model, x, expected):
        main, side = device.current_stream(), device.new_stream()
        for _ in range(2):
            loss = model(x).sum()
            order(device, main, side)
            with device.use_stream(side):
                loss.backward()
                del loss
            assert_gradients(device, model, expected)


def test_blocks_of_ram_go_to_a_pass_on_another_stream() -> None:
    """A backward that fails leaves copies to the device on their way; a pass that knows nothing of it takes their RAM."""
    with simulated() as (device, model, x, expected):
        side = device.new_stream()
        order(device, device.current_stream(), side)
        for stream in (device.current_stream(), side, device.current_stream()):
            with device.use_stream(stream):
                fail_in_backward(model, x, at=2)
                take_gradients(model)
        with device.use_stream(side):
            model(x).sum().backward()
        assert_gradients(device, model, expected)


def fail_in_backward(model: Any, x: torch.Tensor, at: int) -> None:
    def stop(*args: Any) -> None:
        raise Stop

    def watch(module: Any, args: Any, output: torch.Tensor) -> None:
        output.register_hook(stop)

    hook = model.blocks[at].register_forward_hook(watch)
    loss = model(x).sum()
    hook.remove()
    try:
        loss.backward()
    except Stop as error:
        error.__traceback__ = None
    del loss


def test_a_graph_is_dropped_while_its_copies_are_on_their_way() -> None:
    for options in ({}, {"prefetch": 3}):
        with simulated(**options) as (device, model, x, expected):
            for at in (4, 3, 1):
                loss = model(x).sum()
                del loss  # all that is on its way is to RAM
                fail_in_backward(model, x, at)
                take_gradients(model)
            model(x).sum().backward()
            assert_gradients(device, model, expected)


@pytest.mark.parametrize("at", ["product", "all"])
def test_blocks_that_compute_on_streams_of_their_own(at: str) -> None:
    """What is saved on one stream was allocated on the stream that the pass began on; or a group saves on two streams: what
    leaves together was written by one, and an event on the other says nothing of it."""

    def last(product: torch.Tensor) -> torch.Tensor:
        return product if at == "product" else torch.sin(product)

    with simulated(function=lambda x, w: last(torch.sin(x) @ w)) as (device, model, x, expected):
        main, side = device.current_stream(), device.new_stream()
        alive: list[torch.Tensor] = []  # whoever takes memory to another stream keeps it until that is done

        def hop(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            order(device, main, side)
            with device.use_stream(side):
                y = torch.sin(x)
            alive.append(y)
            order(device, side, main)
            return last(y @ w)

        for block in model.blocks:
            block.function = hop
        model(x).sum().backward()
        assert_gradients(device, model, expected)
        order(device, main, side)
        alive.clear()


def test_large_activations_travel_in_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    tune(monkeypatch, activation_batch_bytes=1500)
    for laziness in ("random", "lazy", "eager"):
        random_training(random.Random(6), laziness)


def test_removed_at_once() -> None:
    """RAM is given back to the system while copies to it, and from it, are on their way: no one waited for them."""
    for at in (-1, 3):
        with simulated() as (device, model, x, _):
            if at < 0:
                model(x).sum()
            else:
                fail_in_backward(model, x, at)
            offload(model, keep_last=0).remove()
            assert device.pinned_bytes == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_of_the_work_on_activations(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can tell what is where: what is under way is waited for, no host memory stays pinned, and graphs from before
    refuse. Hazard: Ctrl-C during a copy: gradients are wrong, or memory is freed under the copy."""
    with simulated() as (device, model, x, expected):
        held = [model(x).sum() for _ in range(2)]
        assert device.pinned_bytes > 0
        copy_back = streams.CopyStreams.copy_back

        def copy_back_and_raise(*args: Any) -> None:
            copy_back(*args)
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(streams.CopyStreams, "copy_back", copy_back_and_raise)
            with pytest.raises(error):
                held[0].backward(retain_graph=True)
        gc.collect()  # the traceback
        assert device.pinned_bytes == 0
        for loss in held:
            with pytest.raises(StateError, match="Call the forward again"):
                loss.backward()
        take_gradients(model)
        model(x).sum().backward()
        assert_gradients(device, model, expected)
        del loss
        held.clear()


# ---------------------------------------------------------------- mutations

CALLS = {"wait_event", "synchronize", "record", "record_stream", "_wait"}
WAITS, without_wait = waits_of((offloader, host_pool, streams), CALLS)
assert len(WAITS) >= 13


def everything() -> None:
    test_removed_at_once()
    test_a_graph_is_dropped_while_its_copies_are_on_their_way()
    for options in (ON_ANOTHER_STREAM[0], ON_ANOTHER_STREAM[2]):
        test_backward_on_another_stream_than_forward(options)
    test_blocks_of_ram_go_to_a_pass_on_another_stream()
    for at in ("product", "all"):
        test_blocks_that_compute_on_streams_of_their_own(at)
    for step in (plain, retained, two_by_two, stopped_backward):
        check(step, "lazy")
    for seed in range(4):
        random_training(random.Random(seed), "random")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # errors in what weakref.finalize calls
@pytest.mark.filterwarnings("ignore:module forward hook with ``always_call=True`` raised")  # what departs fails as well
@pytest.mark.parametrize(("owner", "name", "index"), WAITS, ids=[f"{o.__name__}.{n}-{i}" for o, n, i in WAITS])
def test_every_wait_is_needed(owner: Any, name: str, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard: memory is freed before the copy from it is done, or a wait is on the wrong stream (torchtitan #2581)."""
    mutant, text = without_wait(owner, name, index)
    monkeypatch.setattr(owner, name, mutant)
    try:
        everything()
    except AssertionError:
        return
    finally:
        gc.collect()
    pytest.fail(f"{owner.__name__}.{name} without `{text}` passed every scenario")
