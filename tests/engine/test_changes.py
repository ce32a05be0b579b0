"""Several changes of a module between two forwards: weights and modules at once, on every tier."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from group_offload import OffloadHandle, StateError, apply_group_offloading
from group_offload.runtime.groups import build

from ..support.asserts import assert_at_rest, assert_same
from ..support.models import WIDTH, Block, Model, inputs, make
from ..support.on_device import Twins, from_file
from ..support.rigs import LEVELS, TIERS, check, offload_to, run, run_onloaded
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.tuning import tune


class Block(Block):
    """A block that computes with whatever was added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.added = nn.ModuleList()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.scale * self.down(F.gelu(self.up(x)))
        for layer in self.added:
            x = x + layer(x)
        for buffer in self._buffers.values():
            x = x + buffer
        return x / 2


class Model(Model):
    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))


def values(rng: random.Random, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))


def any_parameter(model: Any, rng: random.Random) -> nn.Parameter:
    return rng.choice([*model.parameters()])


def edit(model: Any, rng: random.Random) -> None:
    any_parameter(model, rng).data.mul_(0.5)


def edit_half_of_all(model: Any, rng: random.Random) -> None:
    for parameter in model.parameters():
        if rng.random() < 0.5:
            parameter.data.add_(0.125)


def replace(model: Any, rng: random.Random) -> None:
    parameter = any_parameter(model, rng)
    parameter.data = parameter.data * 0.5


def recast(model: Any, rng: random.Random) -> None:
    model.double()
    model.float()


def swap(model: Any, rng: random.Random) -> None:
    one, two = rng.choice(model.blocks).up.weight, rng.choice(model.blocks).up.weight
    one.data, two.data = two.data, one.data


def tie(model: Any, rng: random.Random) -> None:
    rng.choice(model.blocks).up.bias = rng.choice(model.blocks).up.bias


def tie_values(model: Any, rng: random.Random) -> None:
    rng.choice(model.blocks).scale.data = rng.choice(model.blocks).scale.data


def new_parameter(model: Any, rng: random.Random) -> None:
    rng.choice(model.blocks).scale = nn.Parameter(values(rng, WIDTH))


def add_buffer(model: Any, rng: random.Random) -> None:
    rng.choice(model.blocks).register_buffer(f"shift{rng.randrange(3)}", values(rng, WIDTH))


def new_layer(rng: random.Random) -> nn.Linear:
    layer = nn.Linear(WIDTH, WIDTH)
    for parameter in layer.parameters():
        parameter.data = values(rng, *parameter.shape)
    return layer


def add_layer(model: Any, rng: random.Random) -> None:
    rng.choice(model.blocks).added.append(new_layer(rng))


def remove_layers(model: Any, rng: random.Random) -> None:
    rng.choice(model.blocks).added = nn.ModuleList()


def add_block(model: Any, rng: random.Random) -> None:
    block = Block()
    for parameter in block.parameters():
        parameter.data = values(rng, *parameter.shape) / 8
    model.blocks.insert(rng.randrange(len(model.blocks) + 1), block)


def move_block(model: Any, rng: random.Random) -> None:
    model.blocks.append(model.blocks.pop(rng.randrange(len(model.blocks))))


def remove_block(model: Any, rng: random.Random) -> None:
    if len(model.blocks) > 1:
        model.blocks.pop(rng.randrange(len(model.blocks)))


def new_table(model: Any, rng: random.Random) -> None:
    block = rng.choice(model.blocks)
    block._parameters = {**block._parameters, "scale": nn.Parameter(values(rng, WIDTH))}


def load(model: Any, rng: random.Random) -> None:
    state = {name: value / 2 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=rng.random() < 0.5)


def share(model: Any, rng: random.Random) -> None:
    model.share_memory()


WEIGHTS = (edit, edit_half_of_all, replace, recast, swap, tie_values, load, share)
MODULES = (tie, new_parameter, add_buffer, add_layer, remove_layers, add_block, move_block, remove_block, new_table)
Change = Callable[[Any, random.Random], None]


HOMES: dict[str, dict[str, Any]] = {
    "ram": {},
    "ram, leaves": {"offload_type": "leaf_level"},
    "files": {"offload_to_disk_path": True},
    "files, budgets": {"offload_to_disk_path": True, "vram_budget": "1GiB", "ram_budget": "80%"},
    "checkpoint": {"offload_device": "disk"},
    "checkpoint, leaves": {"offload_device": "disk", "offload_type": "leaf_level"},
    "checkpoint, budget": {"offload_device": "disk", "ram_budget": "80%"},
}


@pytest.fixture(params=HOMES)
def twins(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Twins]:
    """A model on a tier, at a level, and its resident twin."""
    options = dict(HOMES[request.param])
    model = make(Model)
    if "offload_device" in options:
        model = from_file(model, tmp_path / "model.safetensors")
    if "offload_to_disk_path" in options:
        options["offload_to_disk_path"] = tmp_path
    with use_simulated_device(SimulatedDevice(0)) as device, Twins(device, model, **options) as twins:
        yield twins


def change_and_check(twins: Twins, changes: list[list[Change]], *, refreshes: random.Random | None = None) -> None:
    """After each list of changes a forward is right; they happen alike to a resident twin."""
    twins.step(x=inputs())
    for number, several in enumerate(changes):
        for index, change in enumerate(several):
            with torch.no_grad():
                twins.edit(lambda model, change=change, seed=1000 * number + index: change(model, random.Random(seed)))
            if refreshes is not None and refreshes.random() < 0.3:
                twins.handle.refresh()
        twins.check()
        for _ in range(1 + number % 2):
            twins.step(x=inputs(number))
            twins.check()


def test_a_swap_an_edit_and_a_new_module(twins: Twins) -> None:
    """Weights would be read where they no longer are."""
    change_and_check(twins, [[swap, edit_half_of_all, add_layer], [share, edit, add_buffer, swap]])


@pytest.mark.parametrize("seed", range(4))
def test_random_changes(seed: int, twins: Twins) -> None:
    """Edits and new modules at once, as those who load and fuse a LoRA make them."""
    rng = random.Random(seed)
    changes = [
        rng.choices(WEIGHTS, k=rng.randint(0, 2)) + rng.choices((*WEIGHTS, *MODULES), k=rng.randint(1, 3))
        for _ in range(6)
    ]
    change_and_check(twins, changes, refreshes=rng if seed % 2 else None)


def test_edits_of_a_checkpoint_on_the_cpu_within_a_budget(tmp_path: Path) -> None:
    """Edited weights rest in RAM: an edit does not make the budget too small."""
    model, reference = from_file(make(Model), tmp_path / "model.safetensors"), make(Model)
    handle = apply_group_offloading(model, "cpu", offload_device="disk", ram_budget="80%")
    for number, change in enumerate((edit, edit_half_of_all, add_layer, load, edit_half_of_all)):
        for each in (model, reference):
            with torch.no_grad():
                change(each, random.Random(number))
        for _ in range(2):
            assert_same(run(model, inputs()), run(reference, inputs()))
            assert_at_rest(model, reference)
    handle.remove()


@pytest.mark.parametrize("table", ["_parameters", "_buffers", "_modules"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("is_refreshed", [True, False], ids=["refreshed", "failed"])
def test_another_table(is_refreshed: bool, table: str, level: str) -> None:
    """`refresh()`, or a forward that fails: torch finds the new weights on another device. The next one is right."""

    def exchange(model: Any, rng: random.Random) -> None:
        block = model.blocks[1]
        new: dict[str, Any] = {
            "_parameters": {"scale": nn.Parameter(values(rng, WIDTH))},
            "_buffers": {"shift": values(rng, WIDTH)},
            "_modules": {**block._modules, "added": nn.ModuleList([*block.added, new_layer(rng)])},
        }
        setattr(block, table, new[table])

    model, reference = make(Model), make(Model)
    handle = apply_group_offloading(model, "cpu", offload_type=level)
    check(model, reference, inputs())
    for number in range(2):
        for each in (model, reference):
            exchange(each, random.Random(number))
        if is_refreshed:
            handle.refresh()
        else:
            with pytest.raises(AssertionError, match="where it rests"):  # torch says: "to be on the same device"
                run_onloaded(model, inputs())
        assert_same(run_onloaded(model, inputs()), run(reference, inputs()))
        check(model, reference, inputs())
    assert sum(group.num_bytes for group in handle.groups) >= sum(
        tensor.nbytes for tensor in model.state_dict().values()
    )


def test_somebody_who_goes_on_changing_the_module() -> None:
    class Restless(Model):
        is_restless = False

        def named_modules(self, *args: Any, **options: Any) -> Any:
            yield from super().named_modules(*args, **options)
            if self.is_restless:
                self.blocks[0].added.append(nn.Linear(WIDTH, WIDTH))

    model = make(Restless)
    reference = copy.deepcopy(model)
    offload_to(None, model)
    model.is_restless = True
    edit(model, random.Random(0))
    edit(reference, random.Random(0))
    model.blocks[1].register_buffer("shift", torch.ones(WIDTH))
    reference.blocks[1].register_buffer("shift", torch.ones(WIDTH))
    with pytest.raises(StateError, match="changed by another thread"):
        run(model, inputs())
    model.is_restless = False
    model.blocks[0].added = nn.ModuleList()
    assert_same(run(model, inputs()), run(reference, inputs()))


# ---------------------------------------------------------------- models of libraries


def llama(folder: Path, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    if not (folder / "config.json").exists():
        LlamaForCausalLM(config).save_pretrained(folder)
    found: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder).eval()
    return found


def offload_as(tier: str, model: nn.Module, folder: Path, level: str) -> OffloadHandle:
    """A model from `from_pretrained`: it stays in its checkpoint, or is read from a copy in RAM or in files."""
    if tier != "checkpoint":
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
    return offload_to(folder / "groups" if tier == "file" else None, model, level)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # between peft and transformers
@pytest.mark.parametrize("tier", [*TIERS, "checkpoint"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("runs_before", [True, False])
def test_merge_and_unload(tier: str, level: str, runs_before: bool, tmp_path: Path) -> None:
    """An adapter of peft: its modules go, and weights are edited."""
    ids = torch.arange(1, 9)[None]
    found = []
    for is_offloaded in (True, False):
        model = llama(tmp_path)
        if is_offloaded:
            offload_as(tier, model, tmp_path, level)
        outputs = [run(model, ids).logits]
        torch.manual_seed(1)
        adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
        if runs_before:
            outputs.append(run(adapted, ids).logits)
        merged = adapted.merge_and_unload()
        outputs += [run(merged, ids).logits for _ in range(2)]
        found.append(outputs)
    assert_same(*found)


# ---------------------------------------------------------------- edits that cannot be taken up


def fail_to_take_memory(patch: pytest.MonkeyPatch, after: int) -> None:
    """After so many segments there is no RAM for another one."""
    original, count = build.Segment, 0

    def failing(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count > after:
            raise MemoryError
        return original(*args, **options)

    patch.setattr(build, "Segment", failing)


@pytest.mark.parametrize(("level", "after"), [("block_level", 1), ("leaf_level", 0), ("leaf_level", 2)])
@pytest.mark.parametrize("then", ["forward", "refresh", "remove", "another failure", "a new module"])
def test_edits_after_one_that_there_was_no_ram_for(
    level: str, after: int, then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was taken up before it rests elsewhere by then: edits of that count too."""
    tune(monkeypatch, segment_bytes=1)  # one for each group
    model, reference = make(Model), make(Model)
    handle = offload_to(tmp_path, model, level)
    assert_same(run(model, inputs()), run(reference, inputs()))

    def edit_all() -> None:
        for each in (model, reference):
            for block in each.blocks:
                block.up.weight.data.mul_(0.5)

    for _ in range(2 if then == "another failure" else 1):
        edit_all()
        with monkeypatch.context() as patch:
            fail_to_take_memory(patch, after)
            with pytest.raises(MemoryError):
                run(model, inputs())
        assert_at_rest(model, reference)
    edit_all()
    assert_at_rest(model, reference)
    if then == "refresh":
        handle.refresh()
        edit_all()
    elif then == "remove":
        handle.remove()
    elif then == "a new module":
        for each in (model, reference):
            each.blocks[1].register_buffer("shift", torch.ones(1))
    assert_at_rest(model, reference)
    for _ in range(2):
        assert_same(run(model, inputs()), run(reference, inputs()))
        assert_at_rest(model, reference)


def test_edits_on_two_tiers_and_a_new_module(tmp_path: Path) -> None:
    """Weights of one block come from a checkpoint, those of another one rest in a group file."""
    model, reference = make(Model), make(Model)
    save_file(model.blocks[0].state_dict(), tmp_path / "model.safetensors")
    model.blocks[0].load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
    handle = offload_to(tmp_path, model)
    assert_same(run(model, inputs()), run(reference, inputs()))
    for number in range(3):
        for each in (model, reference):
            for block in each.blocks:
                block.up.weight.data.mul_(0.5)
            if number == 1:
                each.blocks[2].register_buffer("shift", torch.ones(1))
        if number != 2:
            handle.refresh()
            for each in (model, reference):
                each.blocks[1].up.weight.data.mul_(0.5)
        assert_same(run(model, inputs()), run(reference, inputs()))
        assert_at_rest(model, reference)


# ---------------------------------------------------------------- parameters that share memory


class Interleaved(nn.Module):
    """Two parameters whose elements lie between each other's. A forward replaces the value of the first."""

    def __init__(self, how: str) -> None:
        super().__init__()
        base = torch.arange(8.0).reshape(2, 4)
        self.a = nn.Parameter(base[:, :2], requires_grad=False)
        self.b = nn.Parameter(base[:, 2:], requires_grad=False)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "strided":
            self.a.data = torch.full((2, 4), -1.0)[:, :2].copy_(self.a.data * 2)
        elif self.how == "dense":
            self.a.data = self.a.data * 2
        else:
            self.a.data.copy_(self.a.data * 2)
            torch.autograd.graph.increment_version(self.a)
        return x @ self.a + x @ self.b


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("how", ["strided", "dense", "in place"])
def test_a_forward_replaces_one_of_two_that_interleave(tier: str, how: str, tmp_path: Path) -> None:
    """The value of the other one would be overwritten."""
    model, reference = Interleaved(how), Interleaved(how)
    handle = offload_to(tmp_path if tier == "file" else None, model)
    x = inputs(0, 3, 2)
    for _ in range(3):
        assert_same(run(model, x), run(reference, x))
        assert_at_rest(model, reference)
    handle.remove()
    assert_at_rest(model, reference)
