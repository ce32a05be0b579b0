"""Backward over offloaded weights: losses, gradients and trained parameters are those of the resident model, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from group_offload import StateError, apply_activation_offloading, apply_group_offloading

from ..support.asserts import same_bits
from ..support.backward import OPTIONS, LoraBlock, LoraModel, check, make, offloaded
from ..support.on_device import compression
from ..support.training import CHECKPOINTS, DIM, STEPS, Step, assert_same_bits, in_part, plain, selective, train


@pytest.mark.parametrize("device", ["in place", "cpu", "random"])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_bits(step: Step, device: str, tmp_path: Path) -> None:
    """Hazard: autograd holds a view of a buffer that's refilled before backward: silently wrong gradients. A backward breaks
    off, and the next forward finds the module half onloaded."""
    if device == "in place":
        stats = check(step, "cpu", tmp_path, in_files=False)
        assert (stats.copies, stats.onloads, stats.backward_passes, stats.peak_device_bytes) == (0, 0, 0, 0)
        return
    stats = check(step, device, tmp_path)
    if step is not in_part:  # which needs nothing of what is offloaded
        assert stats.backward_passes > 0
    assert 0 < stats.trainable_bytes < 6000


@pytest.mark.parametrize("options", [{}, {"offload_type": "leaf_level"}, {"in_files": True}], ids=str)
@pytest.mark.parametrize("run", [*CHECKPOINTS, selective])
def test_bits_with_checkpoints(run: Any, options: dict[str, Any], tmp_path: Path) -> None:
    """Around blocks, and around parts of them, where nobody calls the group's own module again. Selective ones count
    operations: not ours, which are others each time. Hazard: streams and gradient checkpointing exclude each other
    (SimpleTuner #1984, #3150); a checkpoint around a part of a block calls it again while its weights are offloaded."""
    for step, where in (("two_by_two", "run_block"), ("autocast", "run_block"), ("retained", "run_part")):
        if run is not selective or step != "retained":
            check(STEPS[step], "random", tmp_path / step, lambda where=where: make(**{where: run}), **options)
    check(plain, "random", tmp_path / "part", lambda: make(run_part=run), **options)


@pytest.mark.parametrize("run_part", CHECKPOINTS[1:])
@pytest.mark.parametrize("run_block", CHECKPOINTS[1:])
def test_bits_with_checkpoints_inside_of_checkpoints(run_block: Any, run_part: Any, tmp_path: Path) -> None:
    """Hazard: a checkpoint keeps weights of its repeated calls, which are gone in backward."""
    check(plain, "random", tmp_path, lambda: make(run_block=run_block, run_part=run_part))


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


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # a reentrant checkpoint in an evaluation
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("seed", range(2))
def test_random_training(seed: int, options: dict[str, Any], tmp_path: Path) -> None:
    """Blocks that are left out or called again, checkpoints here and there, steps of all kinds, on any tier."""
    rng = random.Random(f"{seed} {options}")
    num_blocks = rng.randint(1, 5)
    order = [rng.randrange(num_blocks) for _ in range(rng.randint(1, 7))] if rng.random() < 0.5 else None
    attributes: dict[str, Any] = {"order": order or list(range(num_blocks))}
    steps = ["plain", "accumulated", "two_by_two", "both_at_once", "autocast", "evaluated"]
    where = rng.choice(["run_block", "run_part", None])
    if where is not None:
        attributes[where] = rng.choice(CHECKPOINTS)
    else:
        steps += ["retained", "doubled"] * 2
    step, device = STEPS[rng.choice(steps)], rng.choice(["random", "lazy"])
    check(step, device, tmp_path, lambda: make(num_blocks, **attributes), num_steps=3, seed=seed, **options)


@pytest.mark.parametrize("first", ["weights", "activations"])
@pytest.mark.parametrize("run_block", [None, *CHECKPOINTS[:2]])
def test_bits_beside_activation_offloading(first: str, run_block: Any, tmp_path: Path) -> None:
    """Both at once, whichever was applied first: each leaves what is the other's to it. Weights never go to RAM as activations,
    not even views of buffers."""
    attributes = {} if run_block is None else {"run_block": run_block}
    bits, moved = [], []
    for is_offloaded in (False, True):
        model = make(**attributes)
        with offloaded(model, "random", tmp_path, offload_type="block_level") as (_, handle, put, get):
            if not is_offloaded or first == "activations":
                handle.remove()
            activations = apply_activation_offloading(model, device="cpu", min_bytes=0)
            if is_offloaded and first == "activations":
                handle = apply_group_offloading(model, "cpu")
            bits.append([get(each) for each in train(model, plain, put)])
            moved.append(activations.stats().offloaded_bytes)
            assert not is_offloaded or handle.stats().backward_passes == 2
            activations.remove()
            handle.remove()
    assert_same_bits(*bits)
    assert moved[0] == moved[1] > 0
    assert_same_bits(bits[0], train(make(**attributes), plain))


class WideBlock(LoraBlock):
    """Wide enough for compression to be worth it."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(DIM, 1000).requires_grad_(False)
        self.back = nn.Linear(1000, DIM).requires_grad_(False)

    def forward(self, x: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        x = super().forward(x, shared)
        return x + torch.tanh(self.back(torch.tanh(self.wide(x))))


class CompressedModel(LoraModel):
    block_class = WideBlock

    def embedded(self, x: torch.Tensor) -> torch.Tensor:
        return super().embedded(x.to(self.embed.weight.dtype))


def make_wide() -> nn.Module:
    torch.manual_seed(0)
    return CompressedModel(4).bfloat16()


@pytest.mark.parametrize(
    ("step", "options"),
    [
        ("stopped_backward", {"record_stream": True}),
        ("two_by_two", {"in_checkpoint": True}),
        ("plain", {"vram_budget": 420_000}),
        ("plain", {"offload_type": "leaf_level"}),
    ],
    ids=str,
)
def test_a_lora_is_trained_over_compressed_weights(step: str, options: dict[str, Any], tmp_path: Path) -> None:
    with compression():
        stats = check(STEPS[step], "random", tmp_path, make_wide, num_steps=3, compress=True, **options)
    assert stats.bytes_decompressed and stats.compressed_bytes and stats.backward_passes
