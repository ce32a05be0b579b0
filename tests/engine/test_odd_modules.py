"""Modules that others make, share or fill in: scripted ones, lazy ones, copies of parts, weights of two models."""

from __future__ import annotations

import copy
import io
import pickle
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import diffusers.hooks  # noqa: F401 - so that modules are marked for it
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from group_offload import ModuleError, StateError, apply_group_offloading

from ..support.asserts import assert_at_rest, assert_same
from ..support.models import WIDTH, Block, Model, inputs, make
from ..support.on_device import Twins, forward, offload
from ..support.participants import in_threads
from ..support.rigs import Offload, check, offload_to, run
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.tuning import tune

# ---------------------------------------------------------------- TorchScript


def scripted(how: str) -> nn.Module:
    model = make(Model)
    block: Any = model.blocks[1]
    if how == "root":
        script: nn.Module = torch.jit.script(block)
        return script
    if how == "child":
        model.blocks[1] = torch.jit.freeze(torch.jit.script(block))
    elif how == "traced":
        model.blocks[1] = torch.jit.trace(block, inputs())
    else:
        block.up = torch.jit.script(block.up)
        model.proj_in = torch.jit.script(model.proj_in)
    return model


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning", "ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("how", ["child", "traced", "inside", "root"])
def test_scripted_modules(how: str, offload_either: Offload) -> None:
    """One that is scripted moves as a whole, around its call."""
    model, reference = scripted(how), scripted(how)
    reference.load_state_dict(model.state_dict())
    handle = offload_either(model)
    x = inputs()
    for _ in range(2):
        check(model, reference, x, passes=2)
        for each in (model, reference):
            for parameter in each.parameters():
                parameter.data.mul_(0.5)
    if how == "root":
        saved = io.BytesIO()
        torch.jit.save(model, saved)
        saved.seek(0)
        assert_same(run(torch.jit.load(saved), x), run(reference, x))
    handle.remove()
    assert_at_rest(model, reference)
    for left, right in zip(model.modules(), reference.modules(), strict=True):
        assert left.__dict__.keys() == right.__dict__.keys()
    offload_either(model)
    check(model, reference, x)


# ---------------------------------------------------------------- lazy modules


def test_lazy_modules(offload_either: Offload) -> None:
    """They can be offloaded once they were called. Hazard: an error of torch that names no weight."""
    model, reference = make(Model), make(Model)
    for each in (model, reference):
        each.blocks[1].down = nn.LazyLinear(WIDTH)
    with pytest.raises(ModuleError, match=r"blocks\.1\.down\.weight has no shape yet .*Run the model once"):
        offload_either(model)
    for each in (model, reference):
        torch.manual_seed(7)  # a lazy module draws its weights when it gets a shape
        run(each, inputs())
    offload_either(model)
    check(model, reference, inputs())
    model.blocks[0].last = nn.LazyBatchNorm1d()
    with pytest.raises(ModuleError, match=r"blocks\.0\.last\.weight has no shape yet"):
        run(model, inputs())
    del model.blocks[0].last
    check(model, reference, inputs())


# ---------------------------------------------------------------- hooks


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "before": lambda layer: layer.register_forward_pre_hook(lambda _, args: (2 * args[0],)),
    "before, with kwargs": lambda layer: layer.register_forward_pre_hook(
        lambda _, args, kwargs: ((2 * args[0],), kwargs), with_kwargs=True
    ),
    "after": lambda layer: layer.register_forward_hook(lambda *args: 2 * args[-1]),
    "before any": lambda layer: register_module_forward_pre_hook(
        lambda module, args: (2 * args[0],) if module is layer else None
    ),
    "after any": lambda layer: register_module_forward_hook(
        lambda module, _, output: 2 * output if module is layer else None
    ),
    "backward": lambda layer: layer.register_full_backward_hook(lambda *args: (2 * args[1][0],)),
    "before backward": lambda layer: layer.register_full_backward_pre_hook(lambda *args: (2 * args[-1][0],)),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_yours_run_once_and_until_they_are_removed(kind: str, level: str) -> None:
    """A layer that has none is called without torch's search for hooks."""
    model, reference = make(Model), make(Model)
    apply_group_offloading(model, "cpu", offload_type=level)

    def gradient(each: nn.Module) -> torch.Tensor:
        x = inputs().requires_grad_()
        (seen,) = torch.autograd.grad(each(x).sum(), x)
        return torch.cat([run(each, inputs()), seen])

    plain = gradient(reference)
    assert_same(gradient(model), plain)
    hooks = [HOOKS[kind](each.proj_in) for each in (model, reference)]
    assert not torch.equal(gradient(reference), plain)
    assert_same(gradient(model), gradient(reference))
    for hook in hooks:
        hook.remove()
    assert_same(gradient(model), plain)


# ---------------------------------------------------------------- copies of hooks


def test_hooks_that_are_copied_do_nothing(level: str) -> None:
    """`quantize_dynamic` copies hooks, without how they want to be called."""
    model, reference = make(Model), make(Model)
    apply_group_offloading(model, "cpu", offload_type=level)
    for module in [*model.modules()]:
        other = nn.Linear(WIDTH, WIDTH)
        expected = run(other, inputs())
        for with_kwargs in (False, True):
            for hook in module._forward_pre_hooks.values():
                other.register_forward_pre_hook(hook, with_kwargs=with_kwargs)
            for hook in module._forward_hooks.values():
                other.register_forward_hook(hook, with_kwargs=with_kwargs)
        assert_same(run(other, inputs()), expected)
    copied = copy.deepcopy(model.blocks[1])
    copied.requires_grad_(True)(inputs()).sum().backward()
    check(model, reference, inputs())


class HandsOut(Model):
    """Its copies and pickles are made of its `__dict__`."""

    def __deepcopy__(self, memo: Any) -> HandsOut:
        made = HandsOut.__new__(HandsOut)
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __reduce__(self) -> Any:
        return HandsOut.__new__, (HandsOut,), self.__dict__.copy()


@pytest.mark.parametrize("kind", [Model, HandsOut], ids=["plain", "hands out"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "of a shallow copy"])
def test_copies_are_modules_as_any_other(kind: Any, how: str, tmp_path: Path) -> None:
    model, reference = make(kind), make(kind)
    handle = offload_to(tmp_path, model)
    if how == "pickle":
        copied = pickle.loads(pickle.dumps(model))
    else:
        copied = copy.deepcopy(model if how == "deepcopy" else copy.copy(model))
    model.gain.data.zero_()
    assert_same(run(copied, inputs()), run(reference, inputs()))
    assert handle.stats().forward_passes == 0
    apply_group_offloading(copied, "cpu")
    check(copied, reference, inputs())


class Unbound(nn.Module):
    """Calls forwards of classes, past `__call__` of its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [linear.weight.data_ptr() for linear in (*self.blocks, self.last)]
        for block in self.blocks:
            x = nn.Linear.forward(block, x)
        return nn.Linear.forward(self.last, x)


def test_an_unbound_call_of_a_forward_has_its_weights_on_the_device(level: str) -> None:
    with use_simulated_device(SimulatedDevice()) as device, Twins(device, make(Unbound), offload_type=level) as twins:
        model = twins.model
        at_rest = {linear.weight.data_ptr() for linear in (*model.blocks, model.last)}
        for _ in range(2):
            twins.step(x=inputs())
            twins.check()
            assert len({*model.seen}) == 4 and at_rest.isdisjoint(model.seen)


# ---------------------------------------------------------------- weights of two models


class Sharing(nn.Module):
    """An embedding that two models share, which they read before and after all else."""

    def __init__(self, embed: nn.Embedding) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, WIDTH)
        self.embed.weight = embed.weight
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.inner: list[nn.Module] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
            time.sleep(0)
        for inner in self.inner:
            x = x + inner(ids).mean()
        return x @ self.embed.weight.t()


def two() -> tuple[Sharing, Sharing]:
    torch.manual_seed(0)
    embed = nn.Embedding(8, WIDTH)
    return Sharing(embed).eval(), Sharing(embed).eval()


@pytest.mark.parametrize("has_budget", [False, True], ids=["a weight", "a budget"])
def test_two_models_in_two_threads(has_budget: bool, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One would compute with the other's slot: they have a weight in common, or displace each other's residents where there is
    room for those of one."""
    tune(monkeypatch, device_margin_bytes=0)
    models = [make(Model, 5, seed=seed) for seed in range(2)] if has_budget else two()
    references, x = copy.deepcopy(models), inputs() if has_budget else torch.arange(8)
    budget = {"vram_budget": 2 * sum(each.nbytes for each in models[0].parameters())} if has_budget else {}
    expected = [run(each, x) for each in references]
    with use_simulated_device(SimulatedDevice()) as device:
        handles = [offload(model, offload_type=level, **budget) for model in models]

        def repeat(index: int) -> None:
            for _ in range(30):
                assert_same(device.get(forward(device, models[index], x)), expected[index])

        in_threads([partial(repeat, index) for index in range(2)])
        assert not has_budget or any(handle.stats().resident_bytes for handle in handles)
        for handle in handles:
            handle.remove()


def test_one_of_two_models_is_called_inside_of_the_other(offload_either: Offload) -> None:
    models, references = two(), two()
    ids = torch.arange(8)
    for one, other in (models, references):
        one.inner.append(other)
    handles = [offload_either(model) for model in models]
    for _ in range(3):
        for model, reference in zip(models, references, strict=True):
            assert_same(run(model, ids), run(reference, ids))
        for one, _ in (models, references):
            one.embed.weight.data.mul_(0.5)
    handles[0].remove()
    for model, reference in zip(models, references, strict=True):
        assert_same(run(model, ids), run(reference, ids))


def test_weights_that_come_to_be_shared() -> None:
    """Who takes turns with whom is settled when a model is offloaded."""
    one, two, three = make(Model), make(Model, seed=1), make(Model, seed=2)
    handles = [apply_group_offloading(model, "cpu") for model in (one, two)]
    two.gain = one.gain
    with pytest.raises(StateError, match="gain of Model is a weight of Model too"):
        run(two, inputs())
    two.gain = nn.Parameter(torch.ones(WIDTH))
    run(two, inputs())
    three.gain, three.norm.weight = one.gain, two.norm.weight
    references = copy.deepcopy((one, two, three))
    with pytest.raises(StateError, match="offload this one first"):
        apply_group_offloading(three, "cpu")
    for handle in handles:
        handle.remove()
    for model in (three, one, two):
        apply_group_offloading(model, "cpu")
    for model, reference in zip((one, two, three), references, strict=True):
        check(model, reference, inputs(), passes=1)
