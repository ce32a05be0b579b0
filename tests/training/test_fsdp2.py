"""FSDP2 around what is trained, beside frozen weights that are offloaded. Two processes do the same in `several`."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from group_offload import ModuleError, apply_activation_offloading, apply_group_offloading

from ..support import tiny_models as tiny
from ..support.several import local, world_of_one
from ..support.training import TrainingModel, assert_same_bits, data

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")  # a linear layer does


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with world_of_one():
        yield init_device_mesh("cpu", (1,))


def make() -> TrainingModel:
    torch.manual_seed(0)
    model = TrainingModel().requires_grad_(requires_grad=False)
    model.head.requires_grad_(requires_grad=True)
    return model


def step(model: nn.Module, seed: int = 0) -> list[torch.Tensor]:
    """The gradients of a step."""
    torch.manual_seed(seed)
    model(data(seed, torch.clone)).square().mean().backward()
    bits = [local(each.grad) for each in model.parameters() if each.grad is not None]
    model.zero_grad()
    return bits


def assert_same_steps(model: nn.Module, reference: nn.Module) -> None:
    for seed in range(2):
        mine, expected = step(model, seed), step(reference, seed)
        assert mine
        assert_same_bits(mine, expected)


def with_lora(mesh: DeviceMesh, where: str) -> Any:
    """A transformer, and what puts FSDP2 around the LoRA in its blocks."""
    model: Any = tiny.flux_transformer().requires_grad_(requires_grad=False).train()
    torch.manual_seed(0)
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v", "to_out.0"], init_lora_weights=False))

    def wrap() -> None:
        ignored = {each for each in model.parameters() if not each.requires_grad}
        parts = [*model.transformer_blocks, *model.single_transformer_blocks, model]
        if where == "layers":
            named = model.named_modules()
            ignored, parts = set(), [each for name, each in named if "lora_" in name and isinstance(each, nn.Linear)]
        for part in parts:
            fully_shard(part, mesh=mesh, ignored_params=ignored)

    return model, wrap


@pytest.mark.parametrize("where", ["layers", "blocks"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_lora_in_each_block(order: str, where: str, mesh: DeviceMesh) -> None:
    """Activations are offloaded too, and the adapters are switched off for one forward. Hazard: FSDP2 exchanges trained
    parameters in each forward, which is taken for a change."""
    bits: list[list[torch.Tensor]] = []
    for is_offloaded in (False, True):
        model, wrap = with_lora(mesh, where)
        if not is_offloaded or order == "before":
            wrap()
        handle = apply_group_offloading(model, "cpu") if is_offloaded else None
        if is_offloaded and order == "after":
            wrap()
        if is_offloaded:
            apply_activation_offloading(model, device="cpu", min_bytes=0)
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer, found, rebuilds = torch.optim.AdamW(trained, lr=1e-2), [], []
        for seed in range(3):
            model(**tiny.flux_inputs(seed))[0].square().mean().backward()
            found += [local(each.grad) for each in trained]
            optimizer.step()
            optimizer.zero_grad()
            rebuilds.append(handle.stats().rebuilds if handle else 0)
        model.disable_adapters()
        with torch.no_grad():
            found.append(model(**tiny.flux_inputs())[0])
        model.enable_adapters()
        found += [local(value) for value in model.state_dict().values()]
        if handle is not None:
            assert rebuilds == [order == "after"] * 3 and handle.stats().trainable_bytes == 0
            handle.remove()
        model(**tiny.flux_inputs())[0].square().mean().backward()
        bits.append(found + [local(each.grad) for each in model.parameters() if each.grad is not None])
    assert len(bits[0]) > 100
    assert_same_bits(*bits)


def under_fsdp(model: TrainingModel, mesh: DeviceMesh) -> FSDPModule:
    return fully_shard(model.head, mesh=mesh, reshard_after_forward=False)


@pytest.mark.parametrize("removed_first", [False, True])
def test_a_parameter_that_was_kept_is_let_go(removed_first: bool, mesh: DeviceMesh) -> None:
    """It was trained before FSDP2 took it. Hazard: FSDP2 takes a trained parameter, and its old memory stays on the
    device."""
    model, reference = make(), make()
    handle = apply_group_offloading(model, "cpu")
    step(model)
    before, num_bytes = weakref.ref(model.head.weight), model.head.weight.nbytes + model.head.bias.nbytes
    assert handle.stats().trainable_bytes == num_bytes
    under_fsdp(model, mesh)
    under_fsdp(reference, mesh)
    if removed_first:
        handle.remove()
    assert_same_steps(model, reference)
    gc.collect()
    assert before() is None
    if not removed_first:
        assert handle.stats().trainable_bytes == 0
        handle.remove()
        assert_same_steps(model, reference)


def test_offloaded_while_parameters_are_gathered(mesh: DeviceMesh) -> None:
    """After an evaluation, which leaves them so. The module looks as one without FSDP2 then. Hazard: what FSDP2 has
    gathered is offloaded."""
    model, reference = make(), make()
    for each in (model, reference):
        under_fsdp(each, mesh)
        with torch.no_grad():
            each(data(0, torch.clone))
    assert type(model.head.weight) is nn.Parameter
    handle = apply_group_offloading(model, "cpu")
    gathered = model.head.weight
    assert_same_steps(model, reference)
    assert handle.stats().rebuilds == 0
    assert sum(group.num_tensors for group in handle.groups) == len([*model.parameters()]) - 2
    with torch.no_grad():
        model(data(0, torch.clone))
    assert model.head.weight is gathered
    handle.refresh()
    handle.remove()
    assert_same_steps(model, reference)


def test_what_is_refused(mesh: DeviceMesh) -> None:
    """Frozen weights, before offloading and after it, and a model without any other weights."""
    refused = (
        r"blocks\.0\.norm\.weight is a DTensor that FSDP2 moves itself, and it is frozen.*ignored_params.*CPUOffload"
    )
    model = make()
    fully_shard(model, mesh=mesh)
    with pytest.raises(ModuleError, match=refused.replace(r"blocks\.0\.norm", "embed")):
        apply_group_offloading(model, "cpu")
    model = make()
    apply_group_offloading(model, "cpu")
    fully_shard(model.blocks[0], mesh=mesh)
    with pytest.raises(ModuleError, match=refused):
        step(model)
    model = make()
    apply_group_offloading(model, "cpu")
    around = fully_shard(nn.Sequential(model), mesh=mesh)  # when the engine looks, FSDP2 has gathered all
    with pytest.raises(ModuleError, match=r"DTensor that FSDP2 moves itself, and it is frozen"):
        step(around)
    whole = fully_shard(nn.Sequential(nn.Linear(8, 8)), mesh=mesh)
    with pytest.raises(
        ModuleError, match=r"All weights of FSDPSequential are left to FSDP2.*wrap only what is trained"
    ):
        apply_group_offloading(whole, "cpu")
