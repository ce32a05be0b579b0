"""What training over offloaded weights cannot do right is an error: nothing is silently wrong."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

from group_offload import StateError

from ..support.asserts import same_bits
from ..support.backward import check, frozen_bits, make, offloaded
from ..support.participants import in_threads
from ..support.training import DIM, STEPS, Put, assert_same_bits, data, plain, train
from ..support.tuning import tune


def test_gradients_of_offloaded_weights_are_refused(tmp_path: Path) -> None:
    """A model as it is made, with nothing frozen: forward and gradients of inputs work, `backward()` says what to do.
    Hazard: gradients end up beside parameters that are somewhere else by then."""
    model, reference = make().requires_grad_(True), make().requires_grad_(True)
    with offloaded(model, "random", tmp_path) as (_, handle, put, get):
        for _ in range(2):
            x = data(0, put).requires_grad_()
            torch.manual_seed(3)
            (gradient,) = torch.autograd.grad(model(x).square().mean(), [x])
            y = data(0, torch.clone).requires_grad_()
            torch.manual_seed(3)
            (expected,) = torch.autograd.grad(reference(y).square().mean(), [y])
            assert same_bits(get(gradient), expected)
            with pytest.raises(StateError, match=r"reached the offloaded weight '.*'.*requires_grad_\(False\)"):
                model(x).square().mean().backward()
            x.grad = None
            torch.manual_seed(3)
            model(x).square().mean().backward(inputs=[x])
            assert x.grad is not None and same_bits(get(x.grad), expected)
        assert all(parameter.grad is None for parameter in model.parameters())
        handle.remove()
        assert model.embed.weight._post_accumulate_grad_hooks in (None, {})


@pytest.mark.parametrize("device", ["cpu", "random"])
@pytest.mark.parametrize("what", ["an activation", "a weight"])
def test_what_is_modified_between_forward_and_backward_is_an_error(what: str, device: str, tmp_path: Path) -> None:
    """Our hooks give back what they were given for what is no weight; torch itself does not check versions then."""
    model: Any = make()
    kept: list[torch.Tensor] = []
    hook = model.blocks[1].up.register_forward_hook(lambda module, args, output: kept.append(output))
    with offloaded(model, device, tmp_path) as (_, _, put, _):
        loss = model(data(0, put)).square().mean()
        with torch.no_grad():
            (kept[0] if what == "an activation" else model.blocks[1].mix).mul_(2)
        named = "" if what == "an activation" else r": the weight 'blocks\.1\.mix'"
        with pytest.raises(RuntimeError, match="modified by an inplace operation" + named):
            loss.backward()
        hook.remove()
        plain(model, put)  # as it is now


@pytest.mark.parametrize("device", ["cpu", "random"])
@pytest.mark.parametrize("options", [{}, {"offload_type": "leaf_level"}, {"in_files": True}], ids=str)
def test_a_value_that_is_replaced_between_forward_and_backward(
    options: dict[str, Any], device: str, tmp_path: Path
) -> None:
    """Backward computes with what its forward had. (LoRA is fused that way.)

    Without offloading it does where autograd has saved a view of the weight, and not where it has saved the weight itself.
    """

    def replace(model: Any) -> None:
        for block in model.blocks:
            for weight in (block.mix, block.down.base.weight):
                weight.data = weight.data * 1.5

    def step(model: Any, put: Put, *, is_late: bool) -> torch.Tensor:
        loss = model(data(0, put)).square().mean()
        if not is_late:
            replace(model)
        loss.backward()
        if is_late:
            replace(model)
        return loss.detach()

    resident, ours = make(), make()
    expected = train(resident, partial(step, is_late=True), num_steps=3)
    with offloaded(ours, device, tmp_path, **options) as (_, _, put, get):
        assert_same_bits(train(ours, partial(step, is_late=False), put, num_steps=3), expected, get)
        gc.collect()
    for name, value in frozen_bits(ours).items():
        assert same_bits(value, frozen_bits(resident)[name]), name


class Stacked(nn.Module):
    """Its weights were made as views of tensors, as converters of checkpoints do: they share version counters. Each block has
    views of one tensor, or (if `is_one`) all blocks have."""

    def __init__(self, is_one: bool) -> None:
        super().__init__()
        whole = torch.randn(3, 2, DIM, DIM) / 4
        self.blocks = nn.ModuleList()
        for two in whole if is_one else [two.clone() for two in whole]:
            self.blocks.append(nn.ParameterList(nn.Parameter(weight, False) for weight in two))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in self.blocks:
            x = x.requires_grad_() if x.is_leaf else x
            x = x + torch.tanh(x @ up) @ down
        return self.head(x)


def stacked(is_one: bool) -> Stacked:
    torch.manual_seed(0)
    return Stacked(is_one)


@pytest.mark.parametrize("step", ["accumulated", "retained"])
@pytest.mark.parametrize("is_one", [False, True], ids=["of each block", "of all"])
@pytest.mark.parametrize("options", [{}, {"offload_type": "leaf_level"}, {"in_files": True}], ids=str)
def test_weights_that_share_a_version_counter(options: dict[str, Any], is_one: bool, step: str, tmp_path: Path) -> None:
    check(STEPS[step], "random", tmp_path, partial(stacked, is_one), **options)


@pytest.mark.parametrize("is_one", [False, True], ids=["of each block", "of all"])
def test_an_edit_of_a_weight_that_shares_its_version_counter_is_an_error(is_one: bool, tmp_path: Path) -> None:
    with offloaded(stacked(is_one), "cpu", tmp_path) as (model, _, put, _):
        model(data(0, put)).sum().backward()
        versions = [parameter._version for parameter in model.parameters()]
        loss = model(data(0, put)).sum()
        assert [parameter._version for parameter in model.parameters()] == versions
        with torch.no_grad():
            model.blocks[1][0].mul_(2)
        with pytest.raises(StateError, match="modified by an inplace operation: the weight"):
            loss.backward()
        model(data(0, put)).sum().backward()


def test_an_optimizers_state_that_was_loaded_before_the_first_forward(tmp_path: Path) -> None:
    """And a checkpoint that is saved while training: its storages are as large as the parameters."""

    def step(model: nn.Module, put: Put, state: Any = None) -> Any:
        """Of an optimizer with this state, whose tensors are on the CPU."""
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
        if state is not None:
            optimizer.load_state_dict(copy.deepcopy(state))
        torch.manual_seed(1)
        plain(model, put)
        optimizer.step()
        optimizer.zero_grad()
        return optimizer.state_dict()

    resident = make()
    state = copy.deepcopy(step(resident, torch.clone))
    ours = copy.deepcopy(resident)
    step(resident, torch.clone, state)
    gc.collect()
    num_hooks = len(hooks)  # of handles that other tests left to the garbage collector
    with offloaded(ours, "random", tmp_path) as (ours, handle, put, get):
        step(ours, put, state)
        for one, other in zip(ours.parameters(), resident.parameters(), strict=True):
            if one.requires_grad:
                assert same_bits(get(one), other) and one.untyped_storage().nbytes() == one.nbytes
        assert len(hooks) == num_hooks + 1
        handle.remove()
        assert len(hooks) == num_hooks


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("remove", r"remove\(\) was called between"),
        ("cut again", "groups were rebuilt after the forward"),
        ("edited, and taken up by a forward", "weights in files were edited"),
    ],
)
def test_weights_that_were_given_up_before_backward_are_an_error(change: str, said: str, tmp_path: Path) -> None:
    model: Any = make()
    with offloaded(model, "cpu", tmp_path) as (_, handle, put, _):
        plain(model, put)
        loss = model(data(0, put)).square().mean()
        if change == "remove":
            handle.remove()
        elif change == "cut again":
            model.blocks[1].mix = nn.Parameter(torch.randn(2 * DIM, DIM), requires_grad=False)
            handle.refresh()
        else:
            model.blocks[1].mix.data = model.blocks[1].mix.data * 2
            late = model(data(0, put)).sum()
        with pytest.raises(StateError, match=said):
            loss.backward()
        if "edited" in change:
            late.backward()


def test_remove_in_a_backward_is_refused(tmp_path: Path) -> None:
    model: Any = make()
    with offloaded(model, "cpu", tmp_path) as (_, handle, put, _):
        hook = model.blocks[1].register_full_backward_hook(lambda *_: handle.remove())
        with pytest.raises(StateError, match="in the middle of a forward or backward"):
            plain(model, put)
        hook.remove()
        plain(model, put)


def test_two_threads_train_two_models_and_share_one(tmp_path: Path) -> None:
    """A forward of one thread waits for the backward of another one, and the other way round."""
    base = make().requires_grad_(False)
    reference = copy.deepcopy(base)
    expected: dict[int, Any] = {}
    for seed in range(4):
        x = data(seed, torch.clone).requires_grad_()
        base.eval(), reference.eval()
        reference(x).square().mean().backward()
        expected[seed] = x.grad
    with offloaded(base, "cpu", tmp_path):

        def work(seed: int) -> None:
            for _ in range(5):
                x = data(seed, torch.clone).requires_grad_()
                base(x).square().mean().backward()
                assert same_bits(x.grad, expected[seed])

        in_threads([partial(work, seed) for seed in range(4)], 120)


@pytest.mark.parametrize("waits", ["a forward", "a backward"])
def test_a_pass_that_waits_for_another_thread_that_waits_for_it(
    waits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward whose hook waits for another thread's backward over an earlier graph of the same model, and the other way
    round. Hazard: both wait for ever."""
    tune(monkeypatch, backward_timeout_seconds=0.2)
    model = make().requires_grad_(False).eval()
    errors: list[StateError] = []

    def catch(call: Callable[[], object]) -> None:
        try:
            call()
        except StateError as error:
            errors.append(error)

    def wait(*args: Any) -> None:
        thread = threading.Thread(target=catch, args=(there,))
        thread.start()
        thread.join(60)
        assert not thread.is_alive()

    with offloaded(model, "cpu", tmp_path) as (_, _, put, _):
        forward = torch.no_grad()(lambda: model(data(1, put)))
        backward = model(data(0, put).requires_grad_()).square().mean().backward
        block: Any = model.blocks[1]
        here, there = (forward, backward) if waits == "a forward" else (backward, forward)
        register = block.register_forward_pre_hook if waits == "a forward" else block.register_full_backward_hook
        hook = register(wait)
        if waits == "a backward":  # the hook has to be in the graph
            here = model(data(0, put).requires_grad_()).square().mean().backward
        here()
        hook.remove()
        assert len(errors) == 1 and "in another thread" in str(errors[0])
        forward()
