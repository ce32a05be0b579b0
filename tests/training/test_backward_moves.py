"""Which groups move in a training step, when, and what stays on the device."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from group_offload import StateError
from group_offload.runtime.groups.trained import MAX_FROZEN_PASSES

from ..support.asserts import same_bits
from ..support.backward import LoraModel, check, make, offloaded
from ..support.training import CHECKPOINTS, DIM, Put, assert_same_bits, data, plain, train


@pytest.mark.parametrize("run_block", [None, *CHECKPOINTS])
def test_groups_come_once_each_way_and_ahead(run_block: Any, tmp_path: Path) -> None:
    """Of L blocks with two slots 2 L - 4 move in a step: at both turns the last two are there. None is late. Offloading neither
    stands in for recomputation nor adds to it. Hazard: in backward weights come on demand, one after another."""
    model = make(6, **({} if run_block is None else {"run_block": run_block}))
    calls: list[nn.Module] = []
    for block in model.blocks:
        block.attention.register_forward_hook(lambda module, *_: calls.append(module))  # type: ignore[union-attr]
    with offloaded(model, "lazy", tmp_path) as (_, handle, put, _):
        train(model, plain, put)
        before = handle.stats()
        calls.clear()
        train(model, plain, put, num_steps=3)
        after = handle.stats()
        assert len(calls) == 3 * 6 * (1 if run_block is None else 2)
        assert after.onloads - before.onloads == 3 * (2 * 6 - 4)
        assert after.stalls == 0  # the first backward is predicted, too
        assert after.backward_passes - before.backward_passes == 3


@pytest.mark.parametrize("level", ["block_level", "leaf_level"])
def test_device_memory_is_that_of_slots(level: str, tmp_path: Path) -> None:
    """Nothing that autograd holds keeps weights on the device: a step takes what a forward without gradients does.
    Hazard: autograd holds every weight on the device until backward, and nothing is saved."""
    model = make(6)
    with offloaded(model, "eager", tmp_path, offload_type=level) as (_, handle, put, _):
        with torch.no_grad():
            for _ in range(2):
                model(data(0, put))
        inference = handle.stats().peak_device_bytes
        train(model, plain, put, num_steps=3)
        stats = handle.stats()
        # At leaf level weights may take a third of what activations take, which is more here.
        assert stats.peak_device_bytes <= (inference if level == "block_level" else stats.host_bytes // 2)


def test_trained_parameters_stay_on_the_device(tmp_path: Path) -> None:
    """Hazard: gradients end up beside parameters that are somewhere else; the memory of a deleted trained parameter stays on
    the device."""
    model = make()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with offloaded(model, "random", tmp_path) as (_, handle, put, _):
        with torch.no_grad():
            model(data(0, put))
        assert handle.stats().trainable_bytes == 0  # as long as nobody trains
        plain(model, put)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        num_bytes = sum(parameter.nbytes for parameter in trained)
        assert handle.stats().trainable_bytes == num_bytes and handle.stats().rebuilds == 1
        places = [parameter.data_ptr() for parameter in trained]
        # What is frozen later takes turns with the others again, once it seems to be so for good.
        model.head.requires_grad_(False)
        for _ in range(MAX_FROZEN_PASSES):
            plain(model, put)
        assert places == [parameter.data_ptr() for parameter in trained]
        plain(model, put)
        assert handle.stats().trainable_bytes < num_bytes
        for name, parameter in model.named_parameters():
            assert same_bits(parameter.detach(), before[name]), name
            assert parameter.grad is None or parameter.grad.shape == parameter.shape
        for _ in range(2):  # one that comes, is trained, and goes
            model.adapter = nn.Linear(DIM, DIM)
            hook = model.register_forward_hook(lambda module, _, output: module.adapter(output))
            plain(model, put)
            assert model.adapter.weight.grad is not None
            weight, with_it = weakref.ref(model.adapter.weight), handle.stats().trainable_bytes
            hook.remove()
            del model.adapter
            with torch.no_grad():
                model(data(0, put))
            gc.collect()
            assert weight() is None and handle.stats().trainable_bytes < with_it


def reference_between(model: nn.Module, put: Put) -> torch.Tensor:
    """A forward with what is trained frozen, between forward and backward: a reference's, or a critic's turn."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loss = model(data(0, put)).square().mean()
    for parameter in trained:
        parameter.requires_grad_(False)
    reference = model(data(1, put)).detach()
    for parameter in trained:
        parameter.requires_grad_(True)
    loss.backward()
    return torch.stack([loss.detach(), reference.sum()])


@pytest.mark.parametrize("options", [{}, {"offload_type": "leaf_level"}], ids=str)
@pytest.mark.parametrize("run_block", [None, CHECKPOINTS[1]])
@pytest.mark.parametrize("device", ["cpu", "random"])
def test_what_is_frozen_for_one_forward(device: str, run_block: Any, options: dict[str, Any], tmp_path: Path) -> None:
    attributes = {} if run_block is None else {"run_block": run_block}
    assert check(reference_between, device, tmp_path, lambda: make(**attributes), **options).rebuilds == 1


@pytest.mark.parametrize("name", ["embed", "blocks.1", "head"])
def test_more_is_trained_between_forward_and_backward(name: str, tmp_path: Path) -> None:
    """What is in the graph may have left its group meanwhile: then it is said so."""

    def gradients(model: nn.Module, put: Put) -> list[torch.Tensor]:
        torch.manual_seed(1)
        plain(model, put)
        loss = model(data(0, put)).square().mean()
        model.get_submodule(name).requires_grad_(True)
        model(data(1, put))
        loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    expected = gradients(make(), torch.clone)
    with offloaded(make(), "random", tmp_path) as (model, _, put, get):
        leaves_its_group = name == "blocks.1"
        with pytest.raises(StateError, match="others require gradients now") if leaves_its_group else nullcontext():
            assert_same_bits(gradients(model, put), expected, get)
        plain(model, put)


def test_gradients_switched_on_in_the_middle_of_a_forward_without(tmp_path: Path) -> None:
    """Nobody knew that something is trained: it is not on the device, where its gradient would be."""

    def with_a_tail() -> LoraModel:
        model = make().requires_grad_(False)
        model.head.forward = torch.enable_grad()(model.head.requires_grad_(True).forward)  # type: ignore[method-assign]
        return model

    def truncated(model: nn.Module, put: Put) -> torch.Tensor:
        with torch.no_grad():
            output = model(data(0, put))
        loss = output.square().mean()
        loss.backward()
        return loss.detach()

    model = with_a_tail()
    with offloaded(model, "random", tmp_path) as (_, _, put, get):
        with pytest.raises(StateError, match="Call the model once with gradients enabled first"):
            truncated(model, put)
        assert all(parameter.grad is None for parameter in model.parameters())
        model(data(0, put))  # with gradients, as the error says
        assert_same_bits(train(model, truncated, put), train(with_a_tail(), truncated), get)
