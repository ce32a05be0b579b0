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
from ..support.inside import engine_of
from ..support.training import DIM, STEPS, Put, assert_same_bits, data, plain, train
from ..support.travellers import in_threads
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


def test_a_value_that_a_forward_has_taken_up_before_an_earlier_backward_is_an_error(tmp_path: Path) -> None:
    with offloaded(make(), "cpu", tmp_path) as (model, _, put, _):
        early = model(data(0, put)).sum()
        model.blocks[1].mix.data = model.blocks[1].mix.data * 2
        late = model(data(0, put)).sum()
        with pytest.raises(StateError, match=r"weights in files were edited"):
            early.backward()
        late.backward()


class Halves(nn.Module):
    """Its weights were made as views of one tensor, as converters of checkpoints do: they share a version counter."""

    def __init__(self, *weights: torch.Tensor) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(weight, requires_grad=False) for weight in weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ self.up) @ self.down


class Stacked(nn.Module):
    """Each block has views of one tensor, or (if `is_one`) all blocks have."""

    def __init__(self, is_one: bool) -> None:
        super().__init__()
        stacked = torch.randn(6, DIM, DIM) / 4
        parts = stacked.unbind() if is_one else [half for pair in stacked.clone().split(2) for half in pair.clone()]
        self.blocks = nn.ModuleList(Halves(*parts[at : at + 2]) for at in (0, 2, 4))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x.requires_grad_() if x.is_leaf else x)
        return self.head(x)


def stacked(is_one: bool) -> Stacked:
    torch.manual_seed(0)
    return Stacked(is_one)


@pytest.mark.parametrize("step", ["plain", "accumulated", "retained"])
@pytest.mark.parametrize("is_one", [False, True], ids=["of each block", "of all"])
@pytest.mark.parametrize("options", [{}, {"offload_type": "leaf_level"}, {"in_files": True}], ids=str)
def test_weights_that_share_a_version_counter(options: dict[str, Any], is_one: bool, step: str, tmp_path: Path) -> None:
    check(STEPS[step], "random", tmp_path, partial(stacked, is_one), **options)


@pytest.mark.parametrize("is_one", [False, True], ids=["of each block", "of all"])
def test_an_edit_of_a_weight_that_shares_its_version_counter_is_an_error(is_one: bool, tmp_path: Path) -> None:
    model: Any
    with offloaded(stacked(is_one), "cpu", tmp_path) as (model, _, put, _):
        for _ in range(2):
            model(data(0, put)).sum().backward()
        loss = model(data(0, put)).sum()
        with torch.no_grad():
            model.blocks[1].up.mul_(2)
        with pytest.raises(StateError, match="modified by an inplace operation: the weight"):
            loss.backward()
        model.blocks.append(Halves(*torch.randn(2, DIM, DIM).unbind()))  # cut into groups again
        for _ in range(2):
            model(data(0, put)).sum().backward()


def test_a_checkpoint_that_is_saved_while_training_can_be_read(tmp_path: Path) -> None:
    """Storages of trained parameters are as large as these: `torch.save` writes, and checks, whole storages."""
    with offloaded(make(), "cpu", tmp_path) as (model, _, put, _):
        plain(model, put)
        torch.save(model.state_dict(), tmp_path / "state.pt")
        expected = {name: value.clone() for name, value in model.state_dict().items()}
    found = torch.load(tmp_path / "state.pt")
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert same_bits(value, expected[name]), name
    for name, parameter in model.named_parameters():
        assert not parameter.requires_grad or parameter.untyped_storage().nbytes() == parameter.nbytes, name


def test_an_optimizers_state_that_was_loaded_before_the_first_forward(tmp_path: Path) -> None:
    def resume(model: nn.Module, state: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
        optimizer.load_state_dict(copy.deepcopy(state))
        return optimizer

    resident = make()
    first = torch.optim.AdamW([p for p in resident.parameters() if p.requires_grad], lr=0.1)
    plain(resident, torch.clone)
    first.step()
    state = copy.deepcopy(first.state_dict())
    ours = copy.deepcopy(resident)
    resident.zero_grad()
    ours.zero_grad()
    torch.manual_seed(1)
    plain(resident, torch.clone)
    resume(resident, state).step()
    gc.collect()
    num_hooks = len(hooks)  # of handles that other tests left to the garbage collector
    with offloaded(ours, "random", tmp_path) as (ours, handle, put, get):
        optimizer = resume(ours, state)  # on the CPU, as the parameters are
        torch.manual_seed(1)
        plain(ours, put)
        optimizer.step()
        for one, other in zip(ours.parameters(), resident.parameters(), strict=True):
            if one.requires_grad:
                assert same_bits(get(one), other)
        assert len(hooks) == num_hooks + 1
        handle.remove()
        assert len(hooks) == num_hooks


@pytest.mark.parametrize("change", ["remove", "cut again"])
def test_weights_that_were_given_up_before_backward_are_an_error(change: str, tmp_path: Path) -> None:
    model = make()
    with offloaded(model, "cpu", tmp_path) as (_, handle, put, _):
        plain(model, put)
        loss = model(data(0, put)).square().mean()
        if change == "remove":
            handle.remove()
        else:
            model.blocks[1].mix = nn.Parameter(torch.randn(2 * DIM, DIM), requires_grad=False)
            handle.refresh()
        with pytest.raises(StateError, match=r"groups were rebuilt after the forward|remove\(\) was called between"):
            loss.backward()


def test_a_backward_that_breaks_off_ends_the_pass(tmp_path: Path) -> None:
    """Hazard: a backward breaks off, and the next forward finds the module half onloaded."""
    model, reference = make(), make()
    expected = train(reference, plain)
    with offloaded(model, "cpu", tmp_path) as (_, handle, put, _):

        def stop(*args: Any) -> None:
            raise KeyError("stop")

        for _ in range(2):
            hook = model.blocks[1].register_full_backward_hook(stop)  # type: ignore[union-attr]
            with pytest.raises(KeyError):
                plain(model, put)
            hook.remove()
            model.zero_grad()
            engine = engine_of(handle)
            assert engine is not None and not engine._passes.is_running
        assert_same_bits(train(model, plain, put), expected)


def test_remove_in_a_backward_is_refused(tmp_path: Path) -> None:
    model = make()
    with offloaded(model, "cpu", tmp_path) as (_, handle, put, _):
        errors: list[StateError] = []

        def try_it(*args: Any) -> None:
            with pytest.raises(StateError, match="in the middle of a forward or backward") as caught:
                handle.remove()
            errors.append(caught.value)

        hook = model.blocks[1].register_full_backward_hook(try_it)  # type: ignore[union-attr]
        plain(model, put)
        hook.remove()
        assert errors


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
    tune(monkeypatch, backward_patience_seconds=0.2)
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
