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

from group_offload import ModuleError, StateError, apply_group_offloading, remove_group_offloading

from ..support.asserts import assert_at_rest, assert_same
from ..support.models import WIDTH, Block, Model, inputs, make
from ..support.rigs import LEVELS, TIERS, check, offload_to, run
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.travellers import in_threads

every_tier = pytest.mark.parametrize("tier", TIERS)
every_level = pytest.mark.parametrize("level", LEVELS)


def put(tier: str, tmp_path: Path) -> Path | None:
    return tmp_path / "groups" if tier == "file" else None


# ---------------------------------------------------------------- TorchScript

scripts = pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning", "ignore:.*torch.jit.*:DeprecationWarning")


def scripted(how: str) -> nn.Module:
    model = make(Model)
    if how == "root":
        script: nn.Module = torch.jit.script(Block().eval())
        return script
    block: Any = model.blocks[1]
    if how == "child":
        model.blocks[1] = torch.jit.script(block)
    elif how == "traced":
        model.blocks[1] = torch.jit.trace(block, inputs())
    elif how == "frozen":
        model.blocks[1] = torch.jit.freeze(torch.jit.script(block))
    else:
        block.up = torch.jit.script(block.up)
        model.proj_in = torch.jit.script(model.proj_in)
    return model


@scripts
@every_tier
@every_level
@pytest.mark.parametrize("how", ["child", "traced", "frozen", "inside", "root"])
def test_scripted_modules(how: str, tier: str, level: str, tmp_path: Path) -> None:
    """One that is scripted moves as a whole, around its call."""
    model, reference = scripted(how), scripted(how)
    reference.load_state_dict(model.state_dict())
    handle = offload_to(put(tier, tmp_path), model, level)
    x = inputs()
    for _ in range(3):
        check(model, reference, x, passes=2)
        for each in (model, reference):
            for parameter in each.parameters():
                parameter.data.mul_(0.5)
    saved = io.BytesIO()
    if how == "root":
        torch.jit.save(model, saved)
        saved.seek(0)
        assert_same(run(torch.jit.load(saved), x), run(reference, x))
    handle.remove()
    assert_at_rest(model, reference)
    for left, right in zip(model.modules(), reference.modules(), strict=True):
        assert left.__dict__.keys() == right.__dict__.keys()
    assert_same(run(model, x), run(reference, x))
    remove_group_offloading(model)
    offload_to(put(tier, tmp_path), model, level)
    check(model, reference, x)


# ---------------------------------------------------------------- lazy modules


class WithLazy(Model):
    def __init__(self) -> None:
        super().__init__(3)
        self.blocks[1].down = nn.LazyLinear(WIDTH)
        self.last = nn.Sequential(nn.LazyLinear(WIDTH), nn.LazyBatchNorm1d())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(super().forward(x))


def seeded(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(7)  # a lazy module draws its weights when it gets a shape
    return run(model, x)


@every_tier
@every_level
@pytest.mark.parametrize("changes", [False, True])
def test_lazy_modules(tier: str, level: str, changes: bool, tmp_path: Path) -> None:
    """They are in no group until they have a shape, and run as they do resident."""
    model, reference = make(WithLazy), make(WithLazy)
    handle = offload_to(put(tier, tmp_path), model, level)
    num_tensors = sum(group.num_tensors for group in handle.groups)
    if changes:
        for each in (model, reference):
            each.gain.data.mul_(2)
            each.blocks[0].register_buffer("shift", torch.ones(WIDTH))
        num_tensors += 1
        handle.refresh()
        assert sum(group.num_tensors for group in handle.groups) == num_tensors
    assert_same(seeded(model, inputs()), seeded(reference, inputs()))
    check(model, reference, inputs())
    assert sum(group.num_tensors for group in handle.groups) == num_tensors + 8
    handle.remove()
    assert_same(run(model, inputs()), run(reference, inputs()))


def test_a_module_that_is_all_lazy() -> None:
    model = nn.Sequential(nn.LazyLinear(WIDTH))
    with pytest.raises(ModuleError, match="Run it once"):
        apply_group_offloading(model, "cpu")
    run(model, inputs())
    apply_group_offloading(model, "cpu")


# ---------------------------------------------------------------- hooks


class Doubled(nn.Linear):
    """torch's own steps around `forward` are others here."""

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super()._call_impl(*args, **kwargs)


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


@every_level
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


@every_level
def test_a_class_with_steps_of_its_own_around_forward(level: str) -> None:
    model, reference = (nn.Sequential(make(Model), Doubled(WIDTH, WIDTH)) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    apply_group_offloading(model, "cpu", offload_type=level)
    assert_same(run(model, inputs()), run(reference, inputs()))


def test_a_tool_that_patches_calls_of_all_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls, plain = make(Model), [], nn.Module._call_impl
    apply_group_offloading(model, "cpu", offload_type="leaf_level")

    def note(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(module)
        return plain(module, *args, **kwargs)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(nn.Module, "_call_impl", note)
    run(model, inputs())
    assert {*calls} == {module for module in model.modules() if not isinstance(module, nn.ModuleList)}


# ---------------------------------------------------------------- copies of hooks


@every_level
def test_hooks_that_are_copied_do_nothing(level: str) -> None:
    """`quantize_dynamic` copies hooks, without how they want to be called."""
    model, reference = make(Model), make(Model)
    apply_group_offloading(model, "cpu", offload_type=level)
    for module in [*model.modules()]:
        other = nn.Linear(WIDTH, WIDTH)
        expected = run(other, inputs())
        for hook in module._forward_pre_hooks.values():
            other.register_forward_pre_hook(hook)
            other.register_forward_pre_hook(hook, with_kwargs=True)
        for hook in module._forward_hooks.values():
            other.register_forward_hook(hook)
            other.register_forward_hook(hook, with_kwargs=True)
        assert_same(run(other, inputs()), expected)
    for each in (copy.deepcopy(model.blocks[1]), pickle.loads(pickle.dumps(model.blocks[1]))):
        assert_same(run(each, inputs()), run(reference.blocks[1], inputs()))
        each.requires_grad_(True)(inputs()).sum().backward()
    check(model, reference, inputs())


@every_level
def test_a_copy_is_compiled_as_one(level: str) -> None:
    """The copy of an offloaded module has its hooks, and nothing that they stand for."""
    model, reference = make(Model), make(Model)
    apply_group_offloading(model, "cpu", offload_type=level)
    for part, same in ((model, reference), (model.blocks[1], reference.blocks[1])):
        compiled = torch.compile(copy.deepcopy(part), fullgraph=True, backend="eager")
        assert_same(run(compiled, inputs()), run(same, inputs()))


class HandsOut(Model):
    """Its copies and pickles are made of its `__dict__`."""

    def __deepcopy__(self, memo: Any) -> HandsOut:
        return _made_of(copy.deepcopy(self.__dict__, memo))

    def __reduce__(self) -> Any:
        return _made_of, (self.__dict__.copy(),)


def _made_of(values: dict[str, Any]) -> HandsOut:
    model = HandsOut.__new__(HandsOut)
    model.__dict__.update(values)
    return model


@every_tier
@pytest.mark.parametrize("kind", [Model, HandsOut], ids=["plain", "hands out"])
@pytest.mark.parametrize(
    "make_copy",
    [
        copy.deepcopy,
        lambda model: pickle.loads(pickle.dumps(model)),
        lambda model: copy.deepcopy(copy.copy(model)),
    ],
    ids=["deepcopy", "pickle", "of a shallow copy"],
)
def test_copies_are_modules_as_any_other(
    kind: Any, make_copy: Callable[[nn.Module], nn.Module], tier: str, tmp_path: Path
) -> None:
    model, reference = make(kind), make(kind)
    handle = offload_to(put(tier, tmp_path), model)
    copied = make_copy(model)
    model.gain.data.zero_()
    assert_same(run(copied, inputs()), run(reference, inputs()))
    assert handle.stats().passes == 0
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


@every_level
def test_an_unbound_call_of_a_forward_has_its_weights_on_the_device(level: str) -> None:
    model, reference = make(Unbound), make(Unbound)
    x = torch.randn(2, WIDTH)
    with use_simulated_device(SimulatedDevice()) as device:
        apply_group_offloading(model, "cpu", offload_type=level)
        at_rest = {linear.weight.data_ptr() for linear in (*model.blocks, model.last)}
        for _ in range(2):
            with torch.no_grad(), device.running():
                output = model(device.put(x))
            assert_same(device.get(output), run(reference, x))
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
        self.running: list[nn.Module] = []
        self.overlaps = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.overlaps += any(each is not self for each in self.running) and not self.inner
        self.running.append(self)
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
            time.sleep(0)
        for inner in self.inner:
            x = x + inner(ids).mean()
        self.running.remove(self)
        return x @ self.embed.weight.t()


def two() -> tuple[Sharing, Sharing]:
    torch.manual_seed(0)
    embed = nn.Embedding(8, WIDTH)
    one, other = Sharing(embed).eval(), Sharing(embed).eval()
    other.running = one.running
    return one, other


@every_tier
@every_level
def test_two_models_with_a_weight_in_two_threads(tier: str, level: str, tmp_path: Path) -> None:
    """One would compute with the other's slot."""
    models, references = two(), two()
    ids = torch.arange(8)
    expected = [run(each, ids) for each in references]
    for index, model in enumerate(models):
        offload_to(put(tier, tmp_path / str(index)), model, level)
    found: list[list[torch.Tensor]] = [[], []]

    def repeat(index: int) -> None:
        for _ in range(30):
            found[index].append(run(models[index], ids))

    in_threads([partial(repeat, index) for index in range(2)])
    for index in range(2):
        assert len(found[index]) == 30
        for output in found[index]:
            assert_same(output, expected[index])
        assert models[index].overlaps == 0


@every_tier
@every_level
def test_one_of_two_models_is_called_inside_of_the_other(tier: str, level: str, tmp_path: Path) -> None:
    models, references = two(), two()
    ids = torch.arange(8)
    for one, other in (models, references):
        one.inner.append(other)
    handles = [offload_to(put(tier, tmp_path / str(i)), model, level) for i, model in enumerate(models)]
    for _ in range(3):
        for model, reference in zip(models, references, strict=True):
            assert_same(run(model, ids), run(reference, ids))
        for one, _ in (models, references):
            one.embed.weight.data.mul_(0.5)
    handles[0].remove()
    for model, reference in zip(models, references, strict=True):
        assert_same(run(model, ids), run(reference, ids))


def test_training_of_two_models_with_a_weight() -> None:
    """Their passes take turns under one lock, and so do their backwards."""
    models, references = (make(Model), make(Model, seed=1)), (make(Model), make(Model, seed=1))
    for one, other in (models, references):
        other.blocks[1].up.weight = one.blocks[1].up.weight
    device = SimulatedDevice()
    with use_simulated_device(device):
        for model in models:
            apply_group_offloading(model.requires_grad_(False), "cpu")
        for _ in range(3):
            for model, reference in zip(models, references, strict=True):
                x, wanted = inputs().requires_grad_(), inputs().requires_grad_()
                reference.requires_grad_(False)(wanted).sum().backward()
                with device.running():
                    on_device = device.put(x.detach()).requires_grad_()
                    model(on_device).sum().backward()
                assert on_device.grad is not None and wanted.grad is not None
                assert_same(device.get(on_device.grad), wanted.grad)
        for model in models:
            remove_group_offloading(model)


def test_weights_that_come_to_be_shared() -> None:
    """Who takes turns with whom is settled when a model is offloaded."""
    models, references = (make(Model), make(Model, seed=1)), (make(Model), make(Model, seed=1))
    handles = [apply_group_offloading(model, "cpu") for model in models]
    for one, other in (models, references):
        other.gain = one.gain
    with pytest.raises(StateError, match="gain of Model is a weight of Model too"):
        run(models[1], inputs())
    handles[1].remove()
    apply_group_offloading(models[1], "cpu")
    for model, reference in zip(models, references, strict=True):
        check(model, reference, inputs(), passes=1)


def test_a_model_that_shares_weights_with_two_others() -> None:
    one, two, three = make(Model), make(Model, seed=1), make(Model, seed=2)
    three.gain, three.norm.weight = one.gain, two.norm.weight
    references = copy.deepcopy((one, two, three))
    handles = [apply_group_offloading(model, "cpu") for model in (one, two)]
    with pytest.raises(StateError, match="offload this one first"):
        apply_group_offloading(three, "cpu")
    for handle in handles:
        handle.remove()
    for model in (three, one, two):
        apply_group_offloading(model, "cpu")
    for model, reference in zip((one, two, three), references, strict=True):
        check(model, reference, inputs(), passes=1)
