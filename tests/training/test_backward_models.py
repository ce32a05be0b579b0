"""LoRA training of real models whose base weights are offloaded: the bits of training with all on the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from group_offload import OffloadHandle, apply_group_offloading, from_pretrained

from ..support import tiny_models as tiny
from ..support.asserts import same_bits

DENOISERS = ["flux", "wan", "unet"]
LEVELS = ["block_level", "leaf_level"]


TARGETS = ["to_q", "to_v", "to_out.0"]


def adapted(model: Any, *, checkpointing: bool = False, use_dora: bool = False) -> Any:
    """The model with a LoRA that is trained."""
    model.requires_grad_(False).train()
    torch.manual_seed(0)
    model.add_adapter(LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=use_dora, use_dora=use_dora))
    if checkpointing:
        model.enable_gradient_checkpointing()
    return model


def with_lora(name: str, **options: bool) -> Any:
    return adapted(tiny.MODELS[name][0](), **options)


def train(model: nn.Module, name: str, num_steps: int = 3) -> list[torch.Tensor]:
    """Losses, gradients of each step, and the trained parameters, on the CPU."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, foreach=True)
    torch.manual_seed(1)
    bits = []
    for _ in range(num_steps):
        loss = model(**tiny.MODELS[name][1]())[0].square().mean()
        loss.backward()
        bits += [loss.detach().cpu(), *(parameter.grad.cpu() for parameter in trained if parameter.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return bits + [parameter.detach().cpu() for parameter in trained]


def assert_same_training(ours: nn.Module, resident: nn.Module, name: str) -> None:
    device = tiny.device()
    expected = train(resident.to(device), name)
    actual = train(ours, name)
    assert len(actual) == len(expected) > 10
    assert all(same_bits(one, other) for one, other in zip(actual, expected, strict=True))


def assert_ahead(handle: OffloadHandle, run: Callable[[], object]) -> None:
    before = handle.stats()
    run()
    after = handle.stats()
    assert after.stalls == before.stalls
    assert after.rebuilds == before.rebuilds


@pytest.mark.parametrize(
    ("name", "checkpointing", "use_dora"),
    [("flux", False, True), *((name, checkpointing, False) for name in DENOISERS for checkpointing in (False, True))],
)
@pytest.mark.parametrize("level", LEVELS)
def test_lora_on_diffusers_models(name: str, level: str, checkpointing: bool, use_dora: bool) -> None:
    """A DoRA takes the norm of a frozen weight, and saves that weight in ways no layer does. Hazard: streams and gradient
    checkpointing exclude each other (SimpleTuner #1984, #3150)."""
    ours = with_lora(name, checkpointing=checkpointing, use_dora=use_dora)
    handle = apply_group_offloading(ours, tiny.device(), offload_type=level)
    assert_same_training(ours, with_lora(name, checkpointing=checkpointing, use_dora=use_dora), name)
    stats = handle.stats()
    # On the CPU, where weights are used in place, backward needs nothing unless a checkpoint calls blocks in it.
    is_in_place = handle.config.onload_device.type == "cpu" and not checkpointing
    assert stats.backward_passes == (0 if is_in_place else 3) and stats.trainable_bytes > 0
    if handle.config.use_stream and level == "block_level":
        assert_ahead(handle, lambda: train(ours, name))
    handle.remove()


def test_lora_that_comes_and_goes_after_offloading(tmp_path: Path) -> None:
    """Base weights in files; adapters are added, trained, saved, deleted, and added again."""
    ours: Any = tiny.flux_transformer().requires_grad_(False).train()
    handle = apply_group_offloading(ours, tiny.device(), offload_to_disk_path=tmp_path)
    for _ in range(2):
        assert_same_training(adapted(ours), with_lora("flux"), "flux")
        ours.delete_adapters("default")
        with torch.no_grad():
            found = tiny.call(ours, tiny.flux_inputs())
            assert same_bits(found, tiny.call(tiny.flux_transformer().train().to(tiny.device()), tiny.flux_inputs()))
    handle.remove()


def test_lora_over_a_checkpoint_that_was_never_loaded(tmp_path: Path) -> None:
    tiny.flux_transformer().save_pretrained(tmp_path)
    ours: Any = from_pretrained(type(tiny.flux_transformer()), tmp_path, onload_device=tiny.device())
    assert_same_training(adapted(ours, checkpointing=True), with_lora("flux", checkpointing=True), "flux")


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["clip", "t5"])
def test_lora_on_transformers_models(name: str, level: str, use_reentrant: bool) -> None:
    def model() -> Any:
        targets = ["q_proj", "v_proj"] if name == "clip" else ["q", "v"]
        base: Any = tiny.MODELS[name][0]().train()
        torch.manual_seed(0)
        found = get_peft_model(base, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        base.enable_input_require_grads()
        return found

    ours = model()
    handle = apply_group_offloading(ours, tiny.device(), offload_type=level)
    assert_same_training(ours, model(), name)
    assert handle.stats().backward_passes == 3
    handle.remove()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("is_compiled_first", [False, True])
def test_blocks_that_compile_themselves(is_compiled_first: bool) -> None:
    """Compiled code hands autograd all of a block's weights at once."""
    results = []
    for is_offloaded in (False, True):
        model: Any = with_lora("flux")
        blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
        if is_compiled_first:
            for block in blocks:
                block.compile(backend="aot_eager")
        if is_offloaded:
            apply_group_offloading(model, tiny.device())
        else:
            model.to(tiny.device())
        if not is_compiled_first:
            for block in blocks:
                block.compile(backend="aot_eager")
        results.append(train(model, "flux"))
    assert all(same_bits(one, other) for one, other in zip(*results, strict=True))
