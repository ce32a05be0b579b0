"""Backward over offloaded weights: losses, gradients and trained parameters are those of the resident model, bit by bit."""

from __future__ import annotations

import copy
import gc
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.utils import BaseOutput
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from group_offload import ConfigError, OffloadHandle, StateError, apply_activation_offloading, apply_group_offloading
from group_offload.runtime import backward as backward_module
from group_offload.runtime.groups.trained import MAX_FROZEN_PASSES
from group_offload.runtime.slots import slot as slots

from ..activations.test_activations import (
    CHECKPOINTS,
    DIM,
    STEPS,
    TOKENS,
    Put,
    Step,
    assert_same_bits,
    data,
    in_part,
    plain,
    selective,
    train,
)
from ..support.common import OnloadedOnly, same_bits
from ..support.simulated import SimulatedDevice, use_simulated_device

__all__ = ["train"]


class Lora(nn.Module):
    """A frozen layer, and a small one beside it that is trained."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.base = nn.Linear(num_in, num_out).requires_grad_(False)
        self.down = nn.Linear(num_in, 2, bias=False)
        self.up = nn.Linear(2, num_out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x) + 0.5 * self.up(self.down(x))
        return result


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = Lora(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        result: torch.Tensor = self.out((q @ k.transpose(-1, -2)).softmax(-1) @ v)
        return result


class Block(nn.Module):
    """A norm, parts that a checkpoint may be around, dropout, and weights that are used in more ways than a layer does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM).requires_grad_(False)
        self.attention = Attention()
        self.up = nn.Linear(DIM, 2 * DIM).requires_grad_(False)
        self.down = Lora(2 * DIM, DIM)
        self.scale = nn.Parameter(torch.randn(3, DIM), requires_grad=False)
        self.mix = nn.Parameter(torch.randn(DIM, DIM) / 4, requires_grad=False)
        self.run_part: Callable[..., torch.Tensor] = lambda part, *args: part(*args)

    def forward(self, x: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        shift, gain, gate = self.scale.chunk(3)
        x = x + F.dropout(self.run_part(self.attention, self.norm(x) * gain + shift), 0.2, self.training) * gate
        x = x * shared + x @ self.mix.t() @ self.mix
        return x + self.run_part(self.down, F.gelu(self.run_part(self.up, x)))


class Model(nn.Module):
    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.shift = nn.Parameter(torch.randn(DIM), requires_grad=False)
        self.head = nn.Linear(DIM, DIM)
        self.run_block: Callable[..., torch.Tensor] = lambda block, *args: block(*args)
        self.order = list(range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) * self.shift
        if torch.is_grad_enabled() and not x.requires_grad:
            x.requires_grad_()  # as `enable_input_require_grads` does, for reentrant checkpoints
        shared = torch.sigmoid(x.mean(1, keepdim=True)).expand_as(x).contiguous()
        for index in self.order:
            x = self.run_block(self.blocks[index], x, shared)
        result: torch.Tensor = self.head(x)
        return result


def make(num_blocks: int = 3, run_part: Any = None, **attributes: Any) -> Model:
    torch.manual_seed(0)
    model = Model(num_blocks)
    for name, value in attributes.items():
        setattr(model, name, value)
    for block in model.blocks:
        if run_part is not None:
            block.run_part = run_part  # type: ignore[assignment]
    return model


OPTIONS: dict[str, dict[str, Any]] = {
    "block": {},
    "pairs": {"num_blocks_per_group": 2},
    "no stream": {"use_stream": False},
    "record_stream": {"record_stream": True},
    "leaf": {"offload_type": "leaf_level"},
    "leaf, no stream": {"offload_type": "leaf_level", "use_stream": False},
    "files": {"in_files": True},
    "files, leaf": {"in_files": True, "offload_type": "leaf_level"},
    "checkpoint": {"in_checkpoint": True},
    "budget": {"vram_budget": 120_000},
}


@contextmanager
def offloaded(
    model: nn.Module, device: str, folder: Path, seed: int = 0, **options: Any
) -> Iterator[tuple[nn.Module, OffloadHandle, Put, Put]]:
    """The model, offloaded: how a tensor gets to the device, and how it comes back."""
    with ExitStack() as stack:
        put: Put = torch.clone
        get: Put = torch.clone
        simulated = None
        if device != "cpu":
            simulated = SimulatedDevice(seed, device)  # type: ignore[arg-type]
            stack.enter_context(use_simulated_device(simulated))
            put, get = simulated.put, simulated.get
        if options.pop("in_checkpoint", False):
            save_file(model.state_dict(), folder / "model.safetensors")
            os.utime(folder / "model.safetensors", (1e9, 1e9))
            model.load_state_dict(load_file(folder / "model.safetensors"), assign=True)
            options["offload_device"] = "disk"
        if options.pop("in_files", False):
            options["offload_to_disk_path"] = folder
        handle = apply_group_offloading(model, "cpu", **options)
        if simulated is not None:
            stack.enter_context(simulated.running())
        yield model, handle, put, get
        if simulated is not None:
            simulated.synchronize()


def frozen_bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().clone() for name, parameter in model.named_parameters() if not parameter.requires_grad
    }


def check(
    step: Step, device: str, folder: Path, model: Callable[[], nn.Module] = make, num_steps: int = 2, **options: Any
) -> Any:
    """Training is the same bits as without offloading, and the frozen weights are what they were."""
    expected = train(model(), step, num_steps=num_steps)
    ours = model()
    before = frozen_bits(ours)
    with offloaded(ours, device, folder, **options) as (ours, handle, put, get):
        actual = train(ours, step, put, num_steps=num_steps)
        assert_same_bits(actual, expected, get)
        stats = handle.stats()
        gc.collect()
        handle.remove()
        for name, value in frozen_bits(ours).items():
            assert same_bits(value, before[name]), name
    return stats


# ---------------------------------------------------------------- bits


@pytest.mark.parametrize("device", ["cpu", "random"])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_bits(step: Step, device: str, tmp_path: Path) -> None:
    stats = check(step, device, tmp_path)
    if step is not in_part:  # which needs nothing of what is offloaded
        assert stats.backward_passes > 0
    assert 0 < stats.trainable_bytes < 6000


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_bits_with_options(device: str, options: dict[str, Any], tmp_path: Path) -> None:
    if device == "cpu" and {"record_stream", "vram_budget"} & options.keys():
        pytest.skip("needs a device with streams")
    check(STEPS["retained" if device == "cpu" else "plain"], device, tmp_path, **options)


def test_bits_of_twenty_steps(tmp_path: Path) -> None:
    check(plain, "cpu", tmp_path, num_steps=20)
    check(plain, "random", tmp_path, num_steps=6, offload_type="leaf_level")


@pytest.mark.parametrize("options", [{}, {"offload_type": "leaf_level"}, {"in_files": True}], ids=str)
@pytest.mark.parametrize("run_block", CHECKPOINTS)
def test_bits_with_checkpoints_around_blocks(run_block: Any, options: dict[str, Any], tmp_path: Path) -> None:
    for step in ("plain",) if options else ("two_by_two", "autocast"):
        check(STEPS[step], "random", tmp_path, lambda: make(run_block=run_block), **options)


@pytest.mark.parametrize("options", [{}, {"offload_type": "leaf_level"}], ids=str)
@pytest.mark.parametrize("run_part", CHECKPOINTS)
def test_bits_with_checkpoints_inside_blocks(run_part: Any, options: dict[str, Any], tmp_path: Path) -> None:
    """What is repeated is a part of a group: nobody calls the group's own module again."""
    check(STEPS["retained"], "random", tmp_path, lambda: make(run_part=run_part), **options)


@pytest.mark.parametrize("run_part", CHECKPOINTS[1:])
@pytest.mark.parametrize("run_block", CHECKPOINTS[1:])
def test_bits_with_checkpoints_inside_of_checkpoints(run_block: Any, run_part: Any, tmp_path: Path) -> None:
    check(plain, "random", tmp_path, lambda: make(run_block=run_block, run_part=run_part))


@pytest.mark.parametrize("where", ["run_block", "run_part"])
@pytest.mark.parametrize("options", [{}, {"offload_type": "leaf_level"}, {"in_files": True}], ids=str)
def test_bits_with_selective_checkpoints(options: dict[str, Any], where: str, tmp_path: Path) -> None:
    """They count operations: not ours, which are others each time."""
    for step, device in (("plain", "random"), ("two_by_two", "cpu"), ("autocast", "cpu")):
        check(STEPS[step], device, tmp_path / step, lambda: make(**{where: selective}), **options)


def test_a_selective_checkpoint_that_keeps_views_of_weights_is_refused(tmp_path: Path) -> None:
    """They would be views of a slot that holds something else by then."""

    def keeps_all(block: nn.Module, *args: torch.Tensor) -> torch.Tensor:
        context = partial(create_selective_checkpoint_contexts, lambda *args, **kwargs: CheckpointPolicy.MUST_SAVE)
        return checkpoint(block, *args, use_reentrant=False, context_fn=context)

    model = make(run_block=keeps_all)
    with offloaded(model, "cpu", tmp_path) as (model, _handle, put, _), pytest.raises(RuntimeError, match="checkpoint"):
        plain(model, put)


TRANSFORMS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).sum())(x),
    "vmap": lambda model, x: torch.func.vmap(model)(x),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (torch.ones_like(x),))[1],
}


def named_in_the_error(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    y = x.clone().requires_grad_()
    functional = torch.autograd.functional
    return [
        *torch.autograd.grad(model(y).sum(), y),
        functional.jacobian(lambda x: model(x).sum(0), x, vectorize=True),
        functional.hessian(lambda x: model(x).sum(), x),
        functional.jvp(model, x, torch.ones_like(x))[1],
    ]


def plain_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.GELU()) for _ in range(3))).requires_grad_(False)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own jvp
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_of_torch_func_are_refused(transform: Callable[[nn.Module, torch.Tensor], Any]) -> None:
    """What torch makes inside of them are no tensors that bytes could be copied to. What the error names works."""
    model, x = plain_model(), torch.randn(4, DIM)
    expected = transform(model, x)
    slopes = named_in_the_error(model, x)
    handle = apply_group_offloading(model, "cpu")
    for _ in range(2):
        with pytest.raises(StateError, match=r"torch\.func.*remove\(\)"):
            transform(model, x)
        for actual, wanted in zip(named_in_the_error(model, x), slopes, strict=True):
            assert same_bits(actual, wanted)
    handle.remove()
    assert same_bits(transform(model, x), expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own jvp
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_activations_stay_in_transforms_of_torch_func(transform: Callable[[nn.Module, torch.Tensor], Any]) -> None:
    model, x = plain_model(), torch.randn(4, DIM)
    expected = transform(model, x)
    handle = apply_activation_offloading(model, device="cpu", min_bytes=0)
    assert same_bits(transform(model, x), expected)
    assert handle.stats().saved_tensors == 0
    model(x.requires_grad_()).sum().backward()
    assert handle.stats().offloads > 0
    handle.remove()


@pytest.mark.parametrize("options", [{}, {"in_checkpoint": True}], ids=str)
def test_calls_of_a_block_share_autocasts_copies(options: dict[str, Any], tmp_path: Path) -> None:
    """Which a thread that reads files must not make autocast forget: gradients are added up in bfloat16."""
    check(STEPS["autocast"], "random", tmp_path, lambda: make(5, order=[0, 1, 0]), **options)


@pytest.mark.parametrize("seed", range(5))
def test_random_training(seed: int, tmp_path: Path) -> None:
    """Blocks that are left out or called again, checkpoints here and there, steps of all kinds, on any tier."""
    exercise(seed, "random" if seed % 2 else "lazy", tmp_path)


def exercise(seed: int, device: str, folder: Path) -> None:
    rng = random.Random(seed)
    num_blocks = rng.randint(1, 5)
    order = [rng.randrange(num_blocks) for _ in range(rng.randint(1, 7))] if rng.random() < 0.5 else None
    attributes: dict[str, Any] = {"order": order or list(range(num_blocks))}
    if rng.random() < 0.5:
        attributes["run_block"] = rng.choice(CHECKPOINTS)
    elif rng.random() < 0.5:
        attributes["run_part"] = rng.choice(CHECKPOINTS)
    options = dict(rng.choice([*OPTIONS.values()]))
    step = STEPS[rng.choice(["plain", "accumulated", "two_by_two", "both_at_once", "autocast", "evaluated"])]
    if attributes.get("run_block") is None and attributes.get("run_part") is None and rng.random() < 0.5:
        step = rng.choice([STEPS["retained"], STEPS["doubled"]])
    check(step, device, folder, lambda: make(num_blocks, **attributes), num_steps=3, seed=seed, **options)


def test_bits_beside_activation_offloading(tmp_path: Path) -> None:
    """Both at once, whichever was applied first: each leaves what is the other's to it."""
    for first in ("weights", "activations"):
        for run_block in (None, CHECKPOINTS[1 if first == "weights" else 0]):
            attributes = {} if run_block is None else {"run_block": run_block}
            expected = train(make(**attributes), plain)
            model = make(**attributes)
            with offloaded(model, "random", tmp_path, offload_type="block_level") as (_, handle, put, get):
                if first == "activations":
                    handle.remove()
                activations = apply_activation_offloading(model, device="cpu", min_bytes=0)
                if first == "activations":
                    handle = apply_group_offloading(model, "cpu")
                assert_same_bits(train(model, plain, put), expected, get)
                saved = activations.stats()
                assert saved.offloads > 0
                assert handle.stats().backward_passes == 2
                activations.remove()
                handle.remove()


def test_weights_never_go_to_ram_as_activations(tmp_path: Path) -> None:
    """Not even views of buffers: what activation offloading moves is the same as without weight offloading."""

    def moved(is_offloaded: bool) -> int:
        model = make()
        if is_offloaded:
            apply_group_offloading(model, "cpu")
        handle = apply_activation_offloading(model, device="cpu", min_bytes=0)
        train(model, plain)
        return handle.stats().offloaded_bytes

    assert moved(True) == moved(False)


# ---------------------------------------------------------------- what moves, and when


@pytest.mark.parametrize("run_block", [None, *CHECKPOINTS[:2]])
def test_groups_come_once_each_way_and_ahead(run_block: Any, tmp_path: Path) -> None:
    """Of L blocks with two slots 2 L - 4 move in a step: at both turns the last two are there. None is late."""
    attributes = {} if run_block is None else {"run_block": run_block}
    model = make(6, **attributes)
    with offloaded(model, "lazy", tmp_path) as (_, handle, put, _):
        train(model, plain, put)
        before = handle.stats()
        train(model, plain, put, num_steps=3)
        after = handle.stats()
        assert after.onloads - before.onloads == 3 * (2 * 6 - 4)
        assert after.stalls == before.stalls
        assert after.backward_passes - before.backward_passes == 3
        handle.remove()


def test_nothing_is_remembered_of_steps_that_are_over(tmp_path: Path) -> None:
    """Of groups that stay on the device nobody asks whether views of them are kept."""
    model = make()
    with offloaded(model, "lazy", tmp_path, vram_budget="1GiB") as (_, handle, put, _):
        train(model, plain, put, num_steps=12)
        assert handle._engine is not None
        found = [len(slot.aliases) for slot in handle._engine._memory.slots]
        assert any(found)
        assert max(found) < 4
        handle.remove()


@pytest.mark.parametrize("run_block", CHECKPOINTS)
def test_checkpoints_repeat_each_call_once(run_block: Any, tmp_path: Path) -> None:
    """Offloading neither stands in for recomputation nor adds to it; at leaf level a weight crosses for it once more."""
    for level, num_times in (("block_level", 2), ("leaf_level", 3)):
        model = make(5, run_block=run_block)
        calls = [0] * 5
        for index, block in enumerate(model.blocks):

            def count(*args: Any, index: int = index, calls: list[int] = calls) -> None:
                calls[index] += 1

            block.attention.register_forward_hook(count)  # type: ignore[union-attr]
        with offloaded(model, "lazy", tmp_path, offload_type=level) as (_, handle, put, _):
            train(model, plain, put, num_steps=1)
            calls[:] = [0] * 5
            before = handle.stats()
            train(model, plain, put, num_steps=1)
            after = handle.stats()
            assert calls == [2] * 5
            sent = sum(after.bytes_onloaded.values()) - sum(before.bytes_onloaded.values())
            assert num_times - 1 < sent / after.host_bytes <= num_times  # less what is there still at each turn
            handle.remove()


@pytest.mark.parametrize("run_block", [None, *CHECKPOINTS])
def test_the_first_backward_is_foreseen(run_block: Any, tmp_path: Path) -> None:
    attributes = {} if run_block is None else {"run_block": run_block}
    model = make(6, **attributes)
    with offloaded(model, "lazy", tmp_path) as (_, handle, put, _):
        train(model, plain, put, num_steps=1)
        assert handle.stats().stalls == 0
        handle.remove()


@pytest.mark.parametrize("level", ["block_level", "leaf_level"])
def test_device_memory_is_that_of_slots(level: str, tmp_path: Path) -> None:
    """Nothing that autograd holds keeps weights on the device: a step takes what a forward without gradients does."""
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
        handle.remove()


def test_trained_parameters_stay_on_the_device(tmp_path: Path) -> None:
    model = make()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with offloaded(model, "random", tmp_path) as (_, handle, put, _):
        with torch.no_grad():
            model(data(0, put))
        assert handle.stats().trainable_bytes == 0  # as long as nobody trains
        plain(model, put)
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert handle.stats().trainable_bytes == sum(parameter.nbytes for parameter in trained.values())
        places = {name: parameter.data_ptr() for name, parameter in trained.items()}
        plain(model, put)
        assert places == {name: parameter.data_ptr() for name, parameter in trained.items()}
        assert handle.stats().rebuilds == 1
        # What is frozen later takes turns with the others again, once it seems to be so for good.
        model.head.requires_grad_(False)
        for _ in range(MAX_FROZEN_PASSES):
            plain(model, put)
        assert places == {name: parameter.data_ptr() for name, parameter in trained.items()}
        plain(model, put)
        assert handle.stats().trainable_bytes < sum(parameter.nbytes for parameter in trained.values())
        handle.remove()
    for name, parameter in model.named_parameters():
        assert same_bits(parameter.detach(), before[name]), name
        assert parameter.grad is None or parameter.grad.shape == parameter.shape


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
    stats = check(reference_between, device, tmp_path, lambda: make(**attributes), **options)
    assert stats.rebuilds == 1


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
    with offloaded(make(), "random", tmp_path) as (model, handle, put, get):
        leaves_its_group = name == "blocks.1"
        with pytest.raises(StateError, match="others require gradients now") if leaves_its_group else nullcontext():
            assert_same_bits(gradients(model, put), expected, get)
        plain(model, put)
        handle.remove()


def test_a_weight_in_a_graph_of_its_own(tmp_path: Path) -> None:
    """Recorded outside of calls: right if no forward comes between it and backward, else an error."""

    def term(model: Any) -> torch.Tensor:
        lora = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        found: torch.Tensor = (lora.sum() * model.embed.weight).square().sum()
        return found

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        (model(data(0, torch.clone)).square().mean() + term(model)).backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    expected = gradients(make())
    with offloaded(make(), "cpu", tmp_path) as (model, handle, put, _):
        assert_same_bits(gradients(model), expected)
        before = term(model)
        loss = model(data(0, put)).square().mean()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (loss + before).backward()
        handle.remove()


def test_parts_that_are_trained_in_turn(tmp_path: Path) -> None:
    """What was trained before and what is now are more than half together: then only what is now stays."""

    def in_turn(model: nn.Module, put: Put) -> torch.Tensor:
        losses = []
        for block in model.blocks:  # type: ignore[union-attr]
            model.requires_grad_(False)
            block.requires_grad_(True)
            losses.append(plain(model, put))
        return torch.stack(losses)

    expected = train(make(4), in_turn)
    with offloaded(make(4), "random", tmp_path) as (model, handle, put, get):
        assert_same_bits(train(model, in_turn, put), expected, get)
        stats = handle.stats()
        assert 0 < stats.trainable_bytes < stats.host_bytes
        handle.remove()


def test_gradients_switched_on_in_the_middle_of_a_forward_without(tmp_path: Path) -> None:
    """Nobody knew that something is trained: it is not on the device, where its gradient would be."""
    model, reference = make(), make()

    class Tail(nn.Module):
        def __init__(self, inside: nn.Module) -> None:
            super().__init__()
            self.inside = inside
            self.tail = nn.Linear(DIM, DIM)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inside(x)
            with torch.enable_grad():
                return self.tail(x)

    def truncated(model: nn.Module, put: Put) -> torch.Tensor:
        with torch.no_grad():
            loss = model(data(0, put))
        with torch.enable_grad():
            loss = loss.square().mean()
        loss.backward()
        return loss.detach()

    torch.manual_seed(0)
    model, reference = Tail(model), Tail(reference)
    reference.load_state_dict(model.state_dict())
    for twin in (model, reference):
        twin.inside.requires_grad_(False)
    with offloaded(model, "random", tmp_path) as (_, handle, put, get):
        with pytest.raises(StateError, match="the module is called with gradients enabled"):
            truncated(model, put)
        assert all(parameter.grad is None for parameter in model.parameters())
        model(data(0, put))  # with gradients, as the error says
        assert_same_bits(train(model, truncated, put), train(reference, truncated), get)
        handle.remove()


def test_a_model_that_could_not_be_offloaded_can_be_trained() -> None:
    model, reference = make(), make()
    with use_simulated_device(SimulatedDevice(0, "lazy")), pytest.raises(ConfigError, match="vram_budget"):
        apply_group_offloading(model, "cpu", vram_budget=100)
    assert_same_bits(train(model, plain), train(reference, plain))


def test_what_is_frozen_is_written_once(tmp_path: Path) -> None:
    """What is trained leaves its groups in the first step, and comes back when it is frozen: alone."""
    model = make()
    with offloaded(model, "cpu", tmp_path, in_files=True) as (_, handle, put, _):
        files = set(tmp_path.rglob("*.safetensors"))
        plain(model, put)
        assert handle.stats().rebuilds == 1
        assert set(tmp_path.rglob("*.safetensors")) <= files
        model.requires_grad_(False)
        for _ in range(MAX_FROZEN_PASSES + 1):
            model(data(0, put).requires_grad_()).sum().backward()
        written = set(tmp_path.rglob("*.safetensors")) - files
        assert sum(path.stat().st_size for path in written) < 100_000 // 4
        handle.remove()


def test_state_dict_while_training(tmp_path: Path) -> None:
    reference, model = make(), make()
    expected = train(reference, plain, num_steps=3)
    with offloaded(model, "cpu", tmp_path, in_files=True) as (_, handle, put, get):
        assert_same_bits(train(model, plain, put, num_steps=3), expected, get)
        state = model.state_dict()
        assert state.keys() == reference.state_dict().keys()
        for name, value in reference.state_dict().items():
            assert same_bits(state[name], value), name
        handle.remove()


# ---------------------------------------------------------------- never silently wrong


def test_gradients_of_offloaded_weights_are_refused(tmp_path: Path) -> None:
    """A model as it is made, with nothing frozen: forward and gradients of inputs work, `backward()` says what to do."""
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
            with pytest.raises(
                StateError, match=r"leave a gradient in '.*', which is offloaded.*requires_grad_\(False\)"
            ):
                model(x).square().mean().backward()
            x.grad = None
            torch.manual_seed(3)
            model(x).square().mean().backward(inputs=[x])
            assert x.grad is not None and same_bits(get(x.grad), expected)
        assert all(parameter.grad is None for parameter in model.parameters())
        handle.remove()
        assert model.embed.weight._post_accumulate_grad_hooks in (None, {})


@pytest.mark.parametrize("device", ["cpu", "random"])
def test_activations_modified_between_forward_and_backward_are_an_error(device: str, tmp_path: Path) -> None:
    """Our hooks give back what they were given for what is no weight; torch itself does not check versions then."""
    model = make()
    kept: list[torch.Tensor] = []
    hook = model.blocks[1].up.register_forward_hook(lambda module, args, output: kept.append(output))  # type: ignore[union-attr]
    with offloaded(model, device, tmp_path) as (_, handle, put, _):
        loss = model(data(0, put)).square().mean()
        with torch.no_grad():
            kept[0].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        hook.remove()
        plain(model, put)
        handle.remove()


def test_weights_modified_between_forward_and_backward_are_an_error(tmp_path: Path) -> None:
    model = make()
    with offloaded(model, "cpu", tmp_path) as (_, handle, put, _):
        loss = model(data(0, put)).square().mean()
        with torch.no_grad():
            model.blocks[1].mix.mul_(2)  # type: ignore[union-attr, operator]
        with pytest.raises(StateError, match=r"modified by an inplace operation: the weight 'blocks.1.mix'"):
            loss.backward()
        plain(model, put)  # as it is now
        handle.remove()


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
    with offloaded(ours, device, tmp_path, **options) as (_, handle, put, get):
        assert_same_bits(train(ours, partial(step, is_late=False), put, num_steps=3), expected, get)
        gc.collect()
        handle.remove()
    for name, value in frozen_bits(ours).items():
        assert same_bits(value, frozen_bits(resident)[name]), name


def test_a_value_that_a_forward_has_taken_up_before_an_earlier_backward_is_an_error(tmp_path: Path) -> None:
    with offloaded(make(), "cpu", tmp_path) as (model, _, put, _):
        early = model(data(0, put)).sum()
        model.blocks[1].mix.data = model.blocks[1].mix.data * 2
        late = model(data(0, put)).sum()
        with pytest.raises(StateError, match=r"modified by an inplace operation: the weight 'blocks\.1\.mix'"):
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
        result: torch.Tensor = self.head(x)
        return result


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
    with offloaded(stacked(is_one), "cpu", tmp_path) as (model, handle, put, _):
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
        handle.remove()


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
        with pytest.raises(StateError, match=r"cut into groups again between|remove\(\) was called between"):
            loss.backward()
        handle.remove()


def test_a_slot_that_is_used_again_changes_nothing(tmp_path: Path) -> None:
    """Between forward and backward all slots are filled with other weights, by this model and by another one."""
    expected = train(make(), plain, num_steps=1)
    model, other = make(), make().requires_grad_(False)
    with offloaded(model, "cpu", tmp_path) as (_, handle, put, _):
        plain(model, put)
        model.zero_grad()
        apply_group_offloading(other, "cpu")
        torch.manual_seed(1)
        loss = model(data(0, put)).square().mean()
        with torch.no_grad():
            for _ in range(2):
                other(data(1, put))
                model(data(1, put))
        loss.backward()
        actual = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        assert_same_bits(actual, expected[: len(actual)])
        handle.remove()


def test_whoever_looks_at_a_graph_sees_the_weight(tmp_path: Path) -> None:
    model = make(1)
    with offloaded(model, "cpu", tmp_path) as (_, handle, put, _):
        plain(model, put)
        output = model.embed(data(0, put).requires_grad_())
        seen = output.grad_fn.next_functions[0][0] if not hasattr(output.grad_fn, "_saved_mat2") else output.grad_fn
        weight = getattr(seen, "_saved_mat2", None)
        if weight is not None:
            model(data(1, put))
            assert same_bits(weight.t().contiguous(), model.embed.weight.detach())
        handle.remove()


def test_a_backward_that_breaks_off_ends_the_pass(tmp_path: Path) -> None:
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
            engine = handle._engine
            assert engine is not None and not engine.is_running
        assert_same_bits(train(model, plain, put), expected)
        handle.remove()


def test_removed_after_a_backward_that_broke_off(tmp_path: Path) -> None:
    model = make()
    before = frozen_bits(model)
    with offloaded(model, "random", tmp_path) as (_, handle, put, _):
        x = data(0, put).requires_grad_()
        loss = model(x).square().mean()
        x.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
    assert all(same_bits(value, before[name]) for name, value in frozen_bits(model).items())


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
        handle.remove()


def test_gradients_inside_of_a_forward(tmp_path: Path) -> None:
    """Guidance: a gradient with regard to the input, computed while the model's own forward is in progress."""

    class Guided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make()
            self.last = nn.Linear(DIM, DIM).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.inner(x).square().mean(), [x])
            result: torch.Tensor = self.last(x + gradient)
            return result

    torch.manual_seed(0)
    model = Guided()
    reference = copy.deepcopy(model)
    with offloaded(model, "random", tmp_path) as (_, handle, put, get):
        for _ in range(3):
            torch.manual_seed(5)
            expected = reference(data(0, torch.clone))
            torch.manual_seed(5)
            assert same_bits(get(model(data(0, put))).detach(), expected.detach())
        handle.remove()


def test_two_threads_train_two_models_and_share_one(tmp_path: Path) -> None:
    """A forward of one thread waits for the backward of another one, and the other way round."""
    base = make().requires_grad_(False)
    reference = copy.deepcopy(base)
    expected = {}
    for seed in range(4):
        x = data(seed, torch.clone).requires_grad_()
        base.eval(), reference.eval()
        reference(x).square().mean().backward()
        expected[seed] = x.grad
    with offloaded(base, "cpu", tmp_path) as (_, handle, _, _):
        wrong: list[object] = []

        def work(seed: int) -> None:
            try:
                for _ in range(5):
                    x = data(seed, torch.clone).requires_grad_()
                    base(x).square().mean().backward()
                    assert x.grad is not None and expected[seed] is not None
                    if not same_bits(x.grad, expected[seed]):  # type: ignore[arg-type]
                        wrong.append(seed)
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads)
        assert not wrong
        handle.remove()


def in_a_thread(run: Callable[[], object]) -> tuple[Callable[..., None], list[StateError]]:
    """A hook that runs something in a thread and waits for it, and the errors that came of that."""
    errors: list[StateError] = []

    def catch() -> None:
        try:
            run()
        except StateError as error:
            errors.append(error)

    def hook(*args: Any) -> None:
        thread = threading.Thread(target=catch)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()

    return hook, errors


def test_a_backward_that_waits_for_itself_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that waits for another thread's backward over an earlier graph of the same model."""
    monkeypatch.setattr(backward_module, "PATIENCE_SECONDS", 0.2)
    model = make().requires_grad_(False).eval()
    with offloaded(model, "cpu", tmp_path) as (_, handle, put, _):
        loss = model(data(0, put).requires_grad_()).square().mean()
        wait, errors = in_a_thread(loss.backward)
        hook = model.blocks[1].register_forward_pre_hook(wait)  # type: ignore[union-attr]
        with torch.no_grad():
            model(data(0, put))
        hook.remove()
        assert len(errors) == 1 and "in another thread" in str(errors[0])
        handle.remove()


def test_a_forward_that_waits_for_its_own_backward_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook of a backward that waits for another thread's forward of the same model."""
    monkeypatch.setattr(backward_module, "PATIENCE_SECONDS", 0.2)
    model = make().requires_grad_(False).eval()
    with offloaded(model, "cpu", tmp_path) as (_, handle, put, _):
        wait, errors = in_a_thread(torch.no_grad()(lambda: model(data(1, put))))
        hook = model.blocks[1].register_full_backward_hook(wait)  # type: ignore[union-attr]
        x = data(0, put).requires_grad_()
        model(x).square().mean().backward()
        hook.remove()
        assert len(errors) == 1 and "in another thread" in str(errors[0])
        with torch.no_grad():
            model(data(1, put))
        handle.remove()


def count_saved() -> int:
    return sum(type(each) is backward_module.SavedWeight for each in gc.get_objects())


def test_graphs_that_are_dropped_hold_nothing(tmp_path: Path) -> None:
    model = make()
    with offloaded(model, "cpu", tmp_path) as (_, handle, put, _):
        plain(model, put)
        engine = weakref.ref(handle._engine)  # type: ignore[arg-type]
        gc.collect()
        gc.disable()
        try:
            before = count_saved()
            loss = model(data(0, put)).square().mean()
            assert count_saved() > before
            del loss
            assert count_saved() == before
        finally:
            gc.enable()
        handle.remove()
        del handle
    gc.collect()
    assert engine() is None


def test_autocast_copies_are_held_by_autograd(tmp_path: Path) -> None:
    """What autocast made of weights is not theirs: it stays until backward, which needs no weight again then."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(4))).requires_grad_(False)
    x = data(0, torch.clone)
    gradients = []
    for is_offloaded in (False, True):
        with offloaded(model, "cpu", tmp_path) if is_offloaded else nullcontext() as found:
            latents = x.clone().requires_grad_()
            before = count_saved()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(latents).float().square().mean()
            assert count_saved() == before
            loss.backward()
            gradients.append(latents.grad)
            if found is not None:
                assert found[1].stats().backward_passes == 0
    assert same_bits(*gradients)


def test_accelerate_leaves_the_model_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import Accelerator

    moves: list[Any] = []
    monkeypatch.setattr(Model, "to", lambda model, *args, **kwargs: moves.append(args) or model, raising=False)

    def step(model: nn.Module, put: Put) -> torch.Tensor:
        loss = model(data(0, put)).square().mean()
        accelerator.backward(loss)
        return loss.detach()

    accelerator = Accelerator(cpu=True)
    expected = train(make(), step, num_steps=3)
    with offloaded(make(), "cpu", tmp_path) as (model, handle, _, _):
        prepared = accelerator.prepare(model, device_placement=[False])
        assert not moves
        assert_same_bits(train(prepared, step, num_steps=3), expected, torch.clone)
        assert handle.stats().backward_passes == 3
        handle.remove()


def test_hooks_of_others_around_and_inside(tmp_path: Path) -> None:
    """`save_on_cpu` around the model gets what is no weight; inside of a block it gets all, which is right as well."""
    for where in ("around", "inside"):

        def run_block(block: nn.Module, *args: torch.Tensor, where: str = where) -> torch.Tensor:
            with torch.autograd.graph.save_on_cpu() if where == "inside" else nullcontext():
                result: torch.Tensor = block(*args)
            return result

        def step(model: nn.Module, put: Put, where: str = where) -> torch.Tensor:
            with torch.autograd.graph.save_on_cpu() if where == "around" else nullcontext():
                loss = model(data(0, put)).square().mean()
            loss.backward()
            return loss.detach()

        check(step, "cpu", tmp_path, lambda run_block=run_block: make(run_block=run_block))


def test_hooks_that_are_forbidden(tmp_path: Path) -> None:
    """Inside `torch.func` no hooks can be pushed: backward is right, or raises."""
    model = make().requires_grad_(False).eval()
    reference = copy.deepcopy(model)
    x = data(0, torch.clone)
    expected = torch.func.grad(lambda x: reference(x).square().mean())(x)
    with offloaded(model, "cpu", tmp_path) as (_, handle, _, _):
        for _ in range(2):
            try:
                found = torch.func.grad(lambda x: model(x).square().mean())(x)
            except RuntimeError:
                continue
            assert same_bits(found, expected)
        handle.remove()


class Scaled(torch.Tensor):
    """A tensor subclass around two plain tensors, as quantised weights are."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, device=data.device)  # type: ignore[attr-defined]

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.ints, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["ints", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["ints"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].ints, args[0].scale)
        plain = torch.utils._pytree.tree_map_only(cls, lambda t: t.ints * t.scale, args)
        return function(*plain, **(kwargs or {}))


class ScaledProduct(torch.autograd.Function):
    """Saves the quantised weight itself, and restores it in backward, as the layers of such libraries do."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        context.save_for_backward(weight)
        return x @ (weight.ints * weight.scale)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        (weight,) = context.saved_tensors
        return gradient @ (weight.ints * weight.scale).t(), None


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        ints = torch.randint(-8, 8, (DIM, DIM), dtype=torch.int8)
        self.weight = nn.Parameter(Scaled(ints, torch.rand(1, DIM)), requires_grad=False)

    def forward(self, x: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = ScaledProduct.apply(x, self.weight)
        return result.sin()


def test_weights_that_are_tensor_subclasses(tmp_path: Path) -> None:
    def quantised() -> Model:
        model = make(1)
        model.blocks = nn.ModuleList(Quantised() for _ in range(5))
        model.order = list(range(5))
        torch.manual_seed(0)
        return model

    for device in ("cpu", "random"):
        for level in ("block_level", "leaf_level"):
            stats = check(plain, device, tmp_path, quantised, offload_type=level)
            assert stats.backward_passes == 2


class Stashing(torch.autograd.Function):
    """Keeps its weight where no hook sees it, as kernels for quantised weights do."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.kept = weight.t()
        return x @ context.kept

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient @ context.kept.t(), None


class StashingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / 4, requires_grad=False)
        self.lora = nn.Linear(DIM, DIM, bias=False)
        self.lora.weight.data /= 10

    def forward(self, x: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Stashing.apply(x, self.weight)
        return (result + self.lora(x)).sin()


def stashing(num_blocks: int = 6) -> Model:
    model = make(1)
    model.blocks = nn.ModuleList(StashingBlock() for _ in range(num_blocks))
    model.embed = nn.Linear(DIM, DIM).requires_grad_(False)
    model.order = list(range(num_blocks))
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    return model


@pytest.mark.parametrize("options", [{}, {"offload_type": "leaf_level"}, {"record_stream": True}], ids=str)
def test_weights_that_are_kept_past_our_hooks_stay_as_they_are(
    options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Gradients are right: what somebody keeps views of is not used again before they go."""
    for step in (plain, STEPS["two_by_two"]):
        check(step, "random", tmp_path, stashing, num_steps=3, **options)
    if not options:
        assert any("Something keeps views of weights of blocks_" in message for message in caplog.messages)


def test_slots_that_somebody_keeps_views_of_go_to_no_other_model(tmp_path: Path) -> None:
    expected = train(stashing(), plain, num_steps=1)
    model, other = stashing(), stashing().requires_grad_(False)
    with offloaded(model, "random", tmp_path) as (_, handle, put, get):
        other_handle = apply_group_offloading(other, "cpu")
        plain(model, put)
        model.zero_grad()
        torch.manual_seed(1)
        loss = model(data(0, put)).square().mean()
        with torch.no_grad():
            for _ in range(3):
                other(data(1, put))
        loss.backward()
        actual = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        assert_same_bits(actual, expected[: len(actual)], get)
        del loss, actual
        handle.remove()
        other_handle.remove()


@dataclass(frozen=True)
class Output:
    x: torch.Tensor
    queries: Any


@dataclass
class ModelOutput(BaseOutput):
    x: torch.Tensor
    queries: Any


@pytest.mark.parametrize("wrap", [dict, Output, ModelOutput])
def test_a_block_that_gives_its_weight_away(wrap: Any, tmp_path: Path) -> None:
    """What a call returns is the caller's, also if it is a view of a weight whose slot is used again."""

    class Giving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries = nn.Parameter(torch.randn(TOKENS, DIM))
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: torch.Tensor) -> Any:
            return wrap(x=torch.tanh(self.linear(x)), queries=(self.queries[1:], [self.queries.t()]))

    class Taking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Giving() for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            given = []
            for block in self.blocks:
                found = block(x)
                x, queries = (found["x"], found["queries"]) if isinstance(found, dict) else (found.x, found.queries)
                given.append(queries)
            return sum((first.sum() + second[0].cos().sum() for first, second in given), x)

    torch.manual_seed(0)
    model = Taking().requires_grad_(False)
    reference = copy.deepcopy(model)
    for level in ("block_level", "leaf_level"):
        with offloaded(model, "random", tmp_path, offload_type=level) as (_, handle, put, get):
            for _ in range(3):
                with torch.no_grad():
                    assert same_bits(get(model(data(0, put))), reference(data(0, torch.clone)))
                x, y = data(0, put).requires_grad_(), data(0, torch.clone).requires_grad_()
                model(x).square().sum().backward()
                reference(y).square().sum().backward()
                assert x.grad is not None and y.grad is not None
                assert same_bits(get(x.grad), y.grad)
            handle.remove()


# ---------------------------------------------------------------- stream order


def everything(folder: Path) -> None:
    for options in ({}, {"offload_type": "leaf_level"}):
        check(plain, "random", folder, lambda: make(6), **options)
    check(plain, "random", folder, stashing)
    test_a_block_that_gives_its_weight_away(dict, folder)
    for run_part in (None, CHECKPOINTS[1]):
        test_kernels_read_weights_on_the_device_only(run_part, folder)


@pytest.mark.parametrize("run_part", [None, *CHECKPOINTS])
def test_kernels_read_weights_on_the_device_only(run_part: Any, tmp_path: Path) -> None:
    model = make(run_part=run_part)
    with offloaded(model, "cpu", tmp_path) as (_, handle, put, _):
        plain(model, put)  # from now on what is trained is where it stays
        frozen = nn.Module()
        frozen.parts = nn.ParameterList(p for p in model.parameters() if not p.requires_grad)
        with OnloadedOnly(frozen):
            plain(model, put)
        handle.remove()


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "let go at once": lambda patch: patch.setattr(
        backward_module.Backward, "bring", _let_go_after(backward_module.Backward.bring)
    ),
    "saved as they are": lambda patch: patch.setattr(backward_module.Backward, "_packed", lambda self, tensor: None),
    "no gates inside of groups": lambda patch: patch.setattr(
        "group_offload.runtime.gates.Gates._install_inner_gates", lambda self: None
    ),
    "views that are kept are not noticed": lambda patch: patch.setattr(slots.Slot, "is_aliased", False),
    "what a call returns is not made its own": lambda patch: patch.setattr(
        "group_offload.runtime.gates.Gates.detach_from_slots", lambda self, output, groups: output
    ),
    "not waited for": lambda patch: patch.setattr(backward_module.Backward, "bring", _without_wait),
}


def _let_go_after(bring: Any) -> Any:
    def mutant(self: Any, saved: Any) -> torch.Tensor:
        found: torch.Tensor = bring(self, saved)
        with self._passes.lock:
            for now in self._tasks.values():
                self._release(now, ())
        return found

    return mutant


def _without_wait(self: Any, saved: Any) -> torch.Tensor:
    group = self._passes.group_of(saved.part)
    if group.slot is None:
        result: torch.Tensor = self.copy_of(saved)
        return result
    start = group.offset + saved.part.offset + saved.offset
    return backward_module.view_of(group.slot.memory, start, saved.dtype, saved.size, saved.stride)


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_every_part_is_needed(
    mutant: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any of them the tests above fail, on a device where a missing wait is an error."""
    mutant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        everything(tmp_path)
