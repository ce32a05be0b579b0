"""LoRA training of real models whose base weights are offloaded: the bits of training with all on the device."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from group_offload import apply_group_offloading

from ..support import tiny_models as tiny
from ..support.asserts import same_bits
from ..support.training import assert_same_bits, train

TARGETS = {"clip": ["q_proj", "v_proj"], "t5": ["q", "v"]}


def adapted(model: Any, name: str = "flux", how: str = "") -> Any:
    """The model with a LoRA that is trained."""
    model.requires_grad_(False).train()
    torch.manual_seed(0)
    is_dora = how == "DoRA"
    targets = TARGETS.get(name, ["to_q", "to_v", "to_out.0"])
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=is_dora, use_dora=is_dora)
    if name in TARGETS:
        inject_adapter_in_model(config, model)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": how == "reentrant"})
        model.enable_input_require_grads()
        return model
    model.add_adapter(config)
    if how == "checkpoints":
        model.enable_gradient_checkpointing()
    return model


def with_lora(name: str, how: str = "") -> Any:
    return adapted(tiny.MODELS[name][0](), name, how)


def bits_of_training(model: nn.Module, name: str) -> list[torch.Tensor]:
    """Losses, gradients and parameters of three steps, on the CPU."""

    def step(model: nn.Module, put: Any) -> torch.Tensor:
        loss: torch.Tensor = model(**tiny.MODELS[name][1]())[0].square().mean()
        loss.backward()
        return loss.detach()

    return [each.cpu() for each in train(model, step, num_steps=3)]


def assert_same_training(ours: nn.Module, resident: nn.Module, name: str) -> None:
    expected = bits_of_training(resident.to(tiny.device()), name)
    assert_same_bits(bits_of_training(ours, name), expected)


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")
@pytest.mark.parametrize("level", ["block_level", "leaf_level"])
@pytest.mark.parametrize(
    ("name", "how"),
    [
        *product(["flux", "wan", "unet"], ["", "checkpoints"]),
        *product(TARGETS, ["checkpoints", "reentrant"]),
        ("flux", "DoRA"),
    ],
)
def test_lora_on_models(name: str, level: str, how: str) -> None:
    """A DoRA takes the norm of a frozen weight, and saves that weight in ways no layer does. Hazard: streams and gradient
    checkpointing exclude each other (SimpleTuner #1984, #3150)."""
    ours = with_lora(name, how)
    handle = apply_group_offloading(ours, tiny.device(), offload_type=level)
    assert_same_training(ours, with_lora(name, how), name)
    stats = handle.stats()
    # On the CPU, where weights are used in place, backward needs nothing unless a checkpoint calls blocks in it.
    is_in_place = handle.config.onload_device.type == "cpu" and how in ("", "DoRA")
    assert stats.backward_passes == (0 if is_in_place else 3) and stats.trainable_bytes > 0
    if handle.config.use_stream and level == "block_level" and name not in TARGETS:
        bits_of_training(ours, name)
        assert (handle.stats().stalls, handle.stats().rebuilds) == (stats.stalls, stats.rebuilds)
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
