"""Several changes of a module between two forwards: weights and modules at once, on every tier."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from group_offload import StateError, apply_group_offloading
from group_offload.runtime.groups import build

from ..support import edits
from ..support.asserts import assert_at_rest, assert_same
from ..support.faults import raise_at
from ..support.models import WIDTH, Model, inputs, make
from ..support.on_device import Twins, twin_on
from ..support.rigs import check, offload_to, pair, run, run_onloaded
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.tuning import tune

IN_MODULES = (
    edits.add_buffer, edits.add_parameter, edits.append_block, edits.delete_and_add_again, edits.lora, edits.move_block,
    edits.new_table, edits.remove_block, edits.remove_parameter, edits.replace_parameter, edits.swap_blocks,
    edits.swap_module, edits.swap_parameters, edits.tie,
)  # fmt: skip
IN_WEIGHTS = tuple(each for each in edits.EDITS if each not in (*IN_MODULES, edits.bfloat16))


HOMES: list[tuple[str, dict[str, Any]]] = [
    ("ram", {}),
    ("ram", {"offload_type": "leaf_level"}),
    ("folder", {}),
    ("folder", {"vram_budget": "1GiB", "ram_budget": "80%"}),
    ("checkpoint", {}),
    ("checkpoint", {"offload_type": "leaf_level"}),
    ("checkpoint", {"ram_budget": "80%"}),
]


@pytest.fixture(params=HOMES, ids=str)
def twins(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Twins]:
    """A model on a tier, at a level, and its resident twin."""
    tier, options = request.param
    model, home = twin_on(tier, make(Model), tmp_path)
    with use_simulated_device(SimulatedDevice(0)) as device, Twins(device, model, **home, **options) as twins:
        yield twins


def fits(model: nn.Module, change: Any) -> bool:
    """Whether the module still has what is to be changed, after the changes before, and computes with that."""
    tried = copy.deepcopy(model)
    try:
        change(tried)
        run(tried, inputs())
    except (AttributeError, IndexError, RuntimeError):
        return False
    return True


def change_and_check(twins: Twins, changes: list[list[Any]], *, refreshes: random.Random | None = None) -> None:
    """After each list of changes a forward is right; they happen alike to a resident twin."""
    twins.step(x=inputs())
    for number, several in enumerate(changes):
        for change in several:
            if fits(twins.resident, change):
                with torch.no_grad():
                    twins.edit(change)
            if refreshes is not None and refreshes.random() < 0.3:
                twins.handle.refresh()
        twins.check()
        for _ in range(1 + number % 2):
            twins.step(x=inputs(number))
            twins.check()


def test_a_swap_an_edit_and_a_new_module(twins: Twins) -> None:
    """Weights would be read where they no longer are."""
    swap, edit_all = edits.swap_data, edits.edit_all
    lora, merge = edits.lora, edits.merge_lora
    change_and_check(twins, [[lora], [merge], [lora, merge], [swap, edit_all, lora]])
    change_and_check(twins, [[edits.share_memory, edits.replace_data, edits.add_buffer, swap]])


@pytest.mark.parametrize("seed", range(4))
def test_random_changes(seed: int, twins: Twins) -> None:
    """Edits and new modules at once, as those who load, merge and unload a LoRA make them."""
    rng = random.Random(seed)
    changes = [
        rng.choices(IN_WEIGHTS, k=rng.randint(0, 2)) + rng.choices((*IN_WEIGHTS, *IN_MODULES), k=rng.randint(1, 3))
        for _ in range(6)
    ]
    change_and_check(twins, changes, refreshes=rng if seed % 2 else None)


@pytest.mark.parametrize("table", ["_parameters", "_buffers", "_modules"])
@pytest.mark.parametrize("is_refreshed", [True, False], ids=["refreshed", "failed"])
def test_another_table(is_refreshed: bool, table: str, level: str) -> None:
    """`refresh()`, or a forward that fails: torch finds the new weights on another device. The next one is right."""
    model, reference = make(Model), make(Model)
    for each in (model, reference):
        each.blocks[1].register_forward_hook(lambda block, args, output: output + sum(block._buffers.values()))
    handle = apply_group_offloading(model, "cpu", offload_type=level)
    check(model, reference, inputs())
    for number in range(2):
        for each in (model, reference):
            block = each.blocks[1]
            new: dict[str, Any] = {
                "_parameters": {"scale": nn.Parameter(inputs(number, WIDTH))},
                "_buffers": {"shift": inputs(number, WIDTH)},
                "_modules": {**block._modules, "up": make(nn.Linear, WIDTH, 2 * WIDTH, seed=number)},
            }
            setattr(block, table, new[table])
        if is_refreshed:
            handle.refresh()
        else:
            with pytest.raises(AssertionError, match="where it rests"):  # torch says: "to be on the same device"
                run_onloaded(model, inputs())
        check(model, reference, inputs())


def test_somebody_who_goes_on_changing_the_module() -> None:
    class Restless(Model):
        is_restless = False

        def named_modules(self, *args: Any, **options: Any) -> Any:
            yield from super().named_modules(*args, **options)
            if self.is_restless:
                self.blocks[0].extra = nn.Linear(WIDTH, WIDTH)

    model, reference = pair(Restless)
    offload_to(None, model)
    model.is_restless = True
    edits.add_buffer(model)
    edits.add_buffer(reference)
    with pytest.raises(StateError, match="changed by another thread"):
        run(model, inputs())
    model.is_restless = False
    assert_same(run(model, inputs()), run(reference, inputs()))


# ---------------------------------------------------------------- edits that cannot be taken up


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
            raise_at(patch, build, "Segment", after + 1, MemoryError(), ever_after=True)
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


# ---------------------------------------------------------------- parameters that share memory


class Interleaved(nn.Module):
    """Two parameters whose elements lie between each other's. A forward replaces the value of the first."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(half, False) for half in torch.arange(8.0).reshape(2, 4).chunk(2, dim=1))
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled = self.a.data * 2
        if self.how == "in place":
            self.a.data.copy_(doubled)
            torch.autograd.graph.increment_version(self.a)
        else:
            self.a.data = doubled if self.how == "dense" else torch.empty(2, 4)[:, :2].copy_(doubled)
        return x @ self.a + x @ self.b


@pytest.mark.parametrize("how", ["strided", "dense", "in place"])
def test_a_forward_replaces_one_of_two_that_interleave(how: str, folder: Path | None) -> None:
    """The value of the other one would be overwritten."""
    model, reference = Interleaved(how), Interleaved(how)
    handle = offload_to(folder, model)
    x = inputs(0, 3, 2)
    for _ in range(3):
        assert_same(run(model, x), run(reference, x))
        assert_at_rest(model, reference)
    handle.remove()
    assert_at_rest(model, reference)
