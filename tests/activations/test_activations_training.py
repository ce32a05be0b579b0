"""Activation offloading with what training brings along: checkpointing, LoRA, compilers, trainers, DDP, FSDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from group_offload import StateError, apply_activation_offloading
from group_offload.integrations.training import ActivationOffloadCallback

from ..matrix.case import mapped
from ..support import models, several, tiny_models
from ..support.activations import offload
from ..support.asserts import same_bits
from ..support.training import TrainingBlock, assert_same_bits, make, plain, train
from ..support.versions import TORCH

ROOT = Path(__file__).resolve().parent.parent.parent


# ---------------------------------------------------------------- checkpointing


@pytest.mark.filterwarnings("ignore:Please specify CheckpointImpl.NO_REENTRANT:FutureWarning")  # before torch 2.10
@pytest.mark.parametrize(
    ("impl", "applied"), [(CheckpointImpl.REENTRANT, "before"), (CheckpointImpl.NO_REENTRANT, "after")]
)
def test_checkpoint_wrapper(impl: CheckpointImpl, applied: str) -> None:
    """Applied before offloading, or after: recomputation is not switched off, and not offloaded."""

    def wrap(model: nn.Module) -> nn.Module:
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=lambda module: checkpoint_wrapper(module, checkpoint_impl=impl),
            check_fn=lambda module: isinstance(module, TrainingBlock),
        )
        return model

    expected = train(wrap(make()), plain)
    model = wrap(make()) if applied == "before" else make()
    handle = offload(model, groups=None if applied == "before" else TrainingBlock)
    if applied == "after":
        wrap(model)
    calls: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, TrainingBlock):
            module.register_forward_pre_hook(lambda module, args: calls.append(module))
    assert_same_bits(train(model, plain), expected)
    stats = handle.stats()
    assert len(calls) == 2 * 2 * 4  # two steps; forward and recomputation
    assert 0 < stats.saved_tensors <= stats.passes * (2 * 4 + 1)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["flux", "wan", "unet", "t5", "a LoRA"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_models_of_diffusers_and_transformers(name: str, checkpointing: bool) -> None:
    build, inputs = tiny_models.MODELS["flux" if name == "a LoRA" else name]

    def model() -> Any:
        found: Any = build().cpu().train()
        if name == "a LoRA":
            from peft import LoraConfig

            torch.manual_seed(0)
            found.requires_grad_(False)
            found.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False))
        if checkpointing and hasattr(found, "enable_gradient_checkpointing"):
            found.enable_gradient_checkpointing()
        elif checkpointing:
            found.gradient_checkpointing_enable()
        return found

    def step(model: nn.Module, put: Any) -> torch.Tensor:
        loss: torch.Tensor = model(**mapped(inputs(), torch.Tensor.cpu))[0].float().square().mean()
        loss.backward()
        return loss.detach()

    ours = model()
    handle = offload(ours)
    assert_same_bits(train(ours, step), train(model(), step))
    stats = handle.stats()
    assert stats.offloads > 0 and stats.used_host_bytes == 0 and stats.stalls == 0


# ---------------------------------------------------------------- compilers


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    found = []
    for _ in range(2):
        model(models.inputs()).square().mean().backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        for parameter in model.parameters():
            parameter.grad = None
    return found


@pytest.fixture
def _fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("what", ["blocks", "the whole"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_models_that_are_compiled(what: str, when: str) -> None:
    """The hooks run in Python, the blocks are compiled, in full graphs too: nothing is skipped silently."""

    def compiled(model: Any) -> Any:
        if what == "the whole":
            return torch.compile(model, backend="aot_eager")
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
        return model

    bits = gradients_of(compiled(models.make()))
    torch._dynamo.reset()
    model: Any = models.make()
    call = compiled(model) if when == "before" else None
    handle = offload(model, keep_last=1)
    call = compiled(model) if call is None else call
    actual = gradients_of(call)
    assert len(actual) == len(bits)
    assert all(torch.allclose(one, other) for one, other in zip(actual, bits, strict=True))
    stats = handle.stats()
    assert stats.passes == 2 and stats.stalls == 0
    assert 0 < stats.offloads < stats.saved_tensors - stats.shared_tensors  # what the last group saved stays
    handle.remove()
    if what == "blocks":
        assert_same_bits(actual, bits)
        assert_same_bits(gradients_of(model), bits)
        assert model.blocks[0]._compiled_call_impl is not None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("_fresh_dynamo")
def test_in_a_full_graph_the_error_says_what_to_do() -> None:
    model = make()
    offload(model)
    says_why = TORCH >= (2, 11)  # before, torch leaves the reason out
    what = r"group_offload offloads activations: use block.compile\(\)" if says_why else "skip_frame"
    with pytest.raises(Exception, match=what):
        plain(torch.compile(model, backend="eager", fullgraph=True), torch.clone)


# ---------------------------------------------------------------- trainers


def test_the_callback_in_a_trainer(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    # The same option, under its newer name and its older one.
    names = {"activation_checkpointing", "gradient_checkpointing"} & set(TrainingArguments.__dataclass_fields__)
    checkpointing: Any = {min(names): True}

    def run(*callbacks: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = GPT2LMHeadModel(
            GPT2Config(n_layer=3, n_head=2, n_embd=16, vocab_size=32, use_cache=False, bos_token_id=0, eos_token_id=1)
        )
        data = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(8)]
        steps = {"max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1}
        quiet = {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
        arguments = TrainingArguments(output_dir=str(tmp_path), **steps, **quiet, **checkpointing)
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=list(callbacks))
        trainer.train()
        return model, trainer

    resident, _ = run()
    callback = ActivationOffloadCallback(device="cpu", min_bytes=0)
    model, trainer = run(callback)
    for one, other in zip(model.parameters(), resident.parameters(), strict=True):
        assert same_bits(one, other)
    assert callback.handle is not None and not callback.handle.is_active
    assert callback.handle.stats().passes == 6 and callback.handle.stats().offloads > 0
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 3 and all(entry["activations_offloaded_gib"] > 0 for entry in logged)
    assert not model._forward_pre_hooks


def test_the_callback_of_a_training_that_was_broken_off_is_no_obstacle() -> None:
    model = make()
    broken = ActivationOffloadCallback(device="cpu", min_bytes=0)
    assert broken.on_something_new(None, None, None, model=None) is None
    broken.on_train_begin(None, None, None, model=model)  # and no `on_train_end`
    wrapped = nn.Sequential(model)  # as DDP does, anew for each training
    for again in (model, wrapped):
        callback = ActivationOffloadCallback(device="cpu", min_bytes=0, groups=nn.Linear)
        callback.on_train_begin(None, None, None, model=again)
        assert broken.handle is not None and not broken.handle.is_active
        assert callback.handle is not None and callback.handle.is_active
        broken = callback
    broken.on_train_end(None, None, None)
    assert not model._forward_pre_hooks
    apply_activation_offloading(model, device="cpu")
    with pytest.raises(StateError, match="other options"):
        ActivationOffloadCallback(device="cpu", min_bytes=0).on_train_begin(None, None, None, model=model)


# ---------------------------------------------------------------- several processes


def test_ddp_fsdp_and_fsdp2() -> None:
    """Hazard: parameters are copied, or held while FSDP2 resizes them."""
    several.run(several.offloads_activations)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ddp_fsdp_and_fsdp2_on_two_gpus() -> None:
    several.run(several.offloads_activations, device="cuda")
