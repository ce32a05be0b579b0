"""Weights keep their values and outputs their bits, whatever a module looks like and whatever is done to it."""

from __future__ import annotations

import copy
import gc
import importlib.util
import io
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils.checkpoint import checkpoint

from group_offload import ModuleError, OffloadHandle, StateError, apply_group_offloading, remove_group_offloading
from group_offload.runtime import passes
from group_offload.runtime.groups.part import Part

from ..files.test_files import run_python
from ..support.common import (
    LEVELS,
    TIERS,
    WIDTH,
    Block,
    Model,
    assert_at_rest,
    assert_own_memory,
    assert_same,
    check,
    inputs,
    make,
    named_tensors,
    offload_to,
    plain_tensors,
    run,
    run_onloaded,
    same_bits,
)

Offload = Callable[..., OffloadHandle]


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["block_level-ram", "leaf_level-file"])
def offload_either(request: pytest.FixtureRequest, tmp_path: Path) -> Offload:
    """Like `offload`, each level and each tier once."""
    level, tier = request.param.split("-")
    return lambda module, **options: offload_to(tmp_path if tier == "file" else None, module, level, **options)


@pytest.fixture
def folder(tier: str, tmp_path: Path) -> Path | None:
    return tmp_path / "groups" if tier == "file" else None


@pytest.fixture
def offload(folder: Path | None, level: str) -> Offload:
    """Offloads a module at the level, and to the tier, of this run of the test."""

    def apply(module: nn.Module, **options: Any) -> OffloadHandle:
        handle = offload_to(folder, module, level, **options)
        assert {group.tier for group in handle.groups} == {"file" if folder else "ram"}
        return handle

    return apply


def pair(model: nn.Module | type[nn.Module] = Model, *args: Any) -> tuple[nn.Module, nn.Module]:
    """A model and its resident twin."""
    made = make(model, *args) if isinstance(model, type) else model
    return made, copy.deepcopy(made)


# ---------------------------------------------------------------- modules of every kind


class Wrapped(nn.Module):
    """A layer of interest inside a block inside a list."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(layer) for layer in layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class OnlyLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(Block() for _ in range(2))
        self.up = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.down, *self.up):
            x = block(x)
        return x


class NestedLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(Block() for _ in range(n)) for n in (2, 1, 3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            for block in stage:
                x = block(x)
        return self.out(x)


class DeepLists(nn.Module):
    """Lists and dicts in lists, three deep."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleList([nn.ModuleDict({"attn": Block(), "mlp": nn.ModuleList([Block()])}), Block()])
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for pair_of_blocks, last in self.stages:
            x = last(pair_of_blocks["mlp"][0](pair_of_blocks["attn"](x)))
        return x


class Dicts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({"a": Block(), "b": Block()})
        self.gains = nn.ParameterDict({"a": torch.rand(WIDTH), "b": torch.rand(WIDTH)})
        self.shifts = nn.ParameterList([torch.rand(WIDTH), torch.rand(WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for shift, (name, expert) in zip(self.shifts, self.experts.items(), strict=True):
            x = expert(x) * self.gains[name] + shift
        return x


class ListsInBlocks(nn.Module):
    """Parameter containers deep inside blocks."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shifts = nn.ParameterList([torch.rand(WIDTH), torch.rand(WIDTH)])
            self.heads = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum(head(x) + shift for head, shift in zip(self.heads, self.shifts, strict=True))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Inner() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class DirectWeights(nn.Module):
    """An inner module reads its own weights, and its child's, without calling the child."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("offset", torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(F.linear(x, self.weight)) + self.offset)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.mha(x, x, x, need_weights=False)[0])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x)[0])


class Recursive(nn.Module):
    """A block that calls itself."""

    class Inner(Block):
        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            x = super().forward(x)
            return self(x, depth - 1) + self.scale if depth else x

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Inner() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class SharedModule(nn.Module):
    """One module object inside two blocks, and once more at the root."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), shared) for _ in range(3))
        self.out = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class SharedBlock(nn.Module):
    """The same block object at three places of the list."""

    def __init__(self) -> None:
        super().__init__()
        shared = Block()
        self.blocks = nn.ModuleList([shared, Block(), shared, shared])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def weight_normed() -> nn.Module:
    norm = torch.nn.utils.parametrizations.weight_norm
    return Wrapped(norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH), norm(nn.Linear(WIDTH, WIDTH)))


def orthogonal() -> nn.Module:
    return Wrapped(torch.nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)), Block())


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def decoder_layer() -> nn.Module:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.TransformerDecoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True) for _ in range(2)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, x)
            return x

    return Decoder()


KINDS: dict[str, Callable[[], nn.Module]] = {
    "model": Model,
    "only lists": OnlyLists,
    "nested lists": NestedLists,
    "deep lists": DeepLists,
    "dicts": Dicts,
    "lists in blocks": ListsInBlocks,
    "direct weights": lambda: Wrapped(DirectWeights(), DirectWeights()),
    "MultiheadAttention": lambda: Wrapped(Attention(), Attention()),
    "MultiheadAttention as root": Attention,
    "TransformerEncoder": encoder,
    "TransformerDecoderLayer": decoder_layer,
    "LSTM": lambda: Wrapped(Recurrent(), Recurrent()),
    "LSTM as child": Recurrent,
    "recursive": Recursive,
    "shared module": SharedModule,
    "shared block": SharedBlock,
    "weight_norm": weight_normed,
    "orthogonal": orthogonal,
    "Sequential as root": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), nn.Sequential(Block(), nn.Tanh())),
    "Linear as root": lambda: nn.Linear(WIDTH, WIDTH),
    "weight_norm as root": lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "Block as root": Block,
}


@pytest.mark.parametrize("kind", KINDS)
def test_module_of_every_kind(kind: str, folder: Path | None, offload: Offload) -> None:
    torch.manual_seed(0)
    model, reference = pair(KINDS[kind]().eval())
    handle = offload(model)
    assert_at_rest(model, reference)
    brought = []
    for _ in range(3):
        before = handle.stats()
        check(model, reference, inputs(0, 2, 3, WIDTH), passes=1)
        after = handle.stats()
        num_bytes = sum(after.bytes_onloaded.values()) - sum(before.bytes_onloaded.values())
        brought.append((after.onloads - before.onloads, num_bytes))
    stats = handle.stats()
    assert stats.passes == 3 and stats.rebuilds == 0 and stats.tensors_brought_back == 0
    assert brought[0][0] >= 1 and brought[1] == brought[2]
    if folder is None:
        assert brought[0] == brought[1]
    else:  # what came from files is brought again unless it was in a slot all the time
        assert brought[0][1] - stats.peak_device_bytes <= brought[1][1] <= brought[0][1]


@pytest.mark.parametrize("kind", KINDS)
def test_module_of_every_kind_is_given_back(kind: str, offload_either: Offload) -> None:
    torch.manual_seed(0)
    model, reference = pair(KINDS[kind]().eval())
    handle = offload_either(model)
    run(model, inputs(0, 2, 3, WIDTH))
    handle.remove()
    assert_same(run(model, inputs(0, 2, 3, WIDTH)), run(reference, inputs(0, 2, 3, WIDTH)))
    assert_at_rest(model, reference)


def test_list_as_root_whose_elements_are_called(offload: Offload) -> None:
    model, reference = pair(nn.ModuleList(Block() for _ in range(3)).eval())
    handle = offload(model)
    for block, twin in zip(model, reference, strict=True):
        assert_same(run_onloaded(model, inputs(), call=block), run(twin, inputs()))
    assert handle.stats().onloads >= 3
    assert_at_rest(model, reference)


# ---------------------------------------------------------------- at rest


def test_weights_at_rest_are_true_and_have_memory_of_their_own(offload: Offload) -> None:
    model, reference = pair()
    offload(model)
    for _ in range(2):
        assert_at_rest(model, reference)
        assert_own_memory(model)
        assert all(tensor.is_leaf and tensor.requires_grad for tensor in model.parameters())
        run(model, inputs())


def test_parameters_stay_the_same_objects(offload: Offload) -> None:
    model, _ = pair()
    before = {name: id(tensor) for name, tensor in named_tensors(model)}
    handle = offload(model)
    run(model, inputs())
    assert {name: id(tensor) for name, tensor in named_tensors(model)} == before
    handle.remove()
    assert {name: id(tensor) for name, tensor in named_tensors(model)} == before


def test_state_dict(offload: Offload) -> None:
    model, reference = pair()
    offload(model)
    run(model, inputs())
    state, expected = model.state_dict(), reference.state_dict()
    assert list(state) == list(expected)
    for name in expected:
        assert same_bits(state[name], expected[name])


def test_state_dict_taken_before_stays_true_and_apart(offload: Offload) -> None:
    """What was taken at rest reads the weights as long as it is held, also after `remove`."""
    model, reference = pair()
    handle = offload(model)
    state = model.state_dict()
    run(model, inputs())
    handle.remove()
    del model, handle
    gc.collect()
    for name, expected in reference.state_dict().items():
        assert same_bits(state[name], expected)


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict(assign: bool, offload: Offload) -> None:
    model, _ = pair()
    reference = make(Model, seed=1)
    offload(model)
    for _ in range(2):
        run(model, inputs())
        model.load_state_dict(copy.deepcopy(reference.state_dict()), assign=assign)
        assert_at_rest(model, reference)
        check(model, reference, inputs())
        reference = make(Model, seed=2)


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_of_another_offloaded_model(assign: bool, offload: Offload) -> None:
    model, _ = pair()
    other, reference = pair(make(Model, seed=1))
    offload(model)
    offload(other)
    model.load_state_dict(other.state_dict(), assign=assign)
    check(model, reference, inputs())
    check(other, reference, inputs())


def test_deepcopy_is_a_resident_model(offload: Offload) -> None:
    model, reference = pair()
    handle = offload(model)
    run(model, inputs())
    twin = copy.deepcopy(model)
    assert_at_rest(twin, reference)
    with torch.no_grad():
        twin.gain.mul_(2)
        twin.blocks[0].up.weight.mul_(2)
    onloads = handle.stats().onloads
    changed = copy.deepcopy(reference)
    with torch.no_grad():
        changed.gain.mul_(2)
        changed.blocks[0].up.weight.mul_(2)
    assert_same(run(twin, inputs()), run(changed, inputs()))
    assert handle.stats().onloads == onloads
    assert_at_rest(model, reference)
    check(model, reference, inputs())


def test_deepcopy_can_be_offloaded(offload: Offload) -> None:
    model, reference = pair()
    offload(model)
    twin = copy.deepcopy(model)
    handle = offload(twin)
    check(twin, reference, inputs())
    handle.remove()
    assert_same(run(twin, inputs()), run(reference, inputs()))
    check(model, reference, inputs())


def test_saved_module_is_a_resident_model(offload: Offload) -> None:
    model, reference = pair()
    offload(model)
    run(model, inputs())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    assert_at_rest(twin, reference)
    assert_same(run(twin, inputs()), run(reference, inputs()))
    check(model, reference, inputs())


def test_saved_state_dict(offload: Offload) -> None:
    model, reference = pair()
    offload(model)
    file, plain = io.BytesIO(), io.BytesIO()
    torch.save(model.state_dict(), file)
    torch.save(reference.state_dict(), plain)
    assert len(file.getvalue()) < 1.5 * len(plain.getvalue())
    file.seek(0)
    for name, tensor in torch.load(file).items():
        assert same_bits(tensor, reference.state_dict()[name])


# ---------------------------------------------------------------- edits between forwards


def _edit_through_data(model: Any) -> None:
    model.blocks[1].up.weight.data.mul_(2)
    model.gain.data.add_(1)


def _edit_in_place(model: Any) -> None:
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(2)
        model.gain.add_(1)


def _edit_one_element(model: Any) -> None:
    with torch.no_grad():
        model.blocks[1].up.weight[3, 5] += 0.25
        model.gain[0] = 7


def _edit_one_element_through_data(model: Any) -> None:
    model.blocks[-1].down.bias.data[2] = 3.5


def _edit_detached(model: Any) -> None:
    model.blocks[0].down.weight.detach().zero_()


def _edit_through_numpy(model: Any) -> None:
    model.blocks[0].down.weight.detach().numpy()[0, 0] = 5


def _edit_through_state_dict(model: Any) -> None:
    model.state_dict()["blocks.2.up.weight"].fill_(0.125)


def _replace_data(model: Any) -> None:
    model.blocks[1].up.weight.data = model.blocks[1].up.weight.data * 2


def _replace_data_with_other_strides(model: Any) -> None:
    model.blocks[1].up.weight.data = (model.blocks[1].up.weight.data * 2).t().contiguous().t()


def _replace_data_with_other_shape(model: Any) -> None:
    model.blocks[1].up.weight.data = model.blocks[1].up.weight.data[:8].clone()
    model.blocks[1].up.bias.data = model.blocks[1].up.bias.data[:8].clone()
    model.blocks[1].down.weight.data = model.blocks[1].down.weight.data[:, :8]


def _replace_data_with_other_strides_in_the_same_memory(model: Any) -> None:
    weight = model.blocks[1].up.weight
    weight.data = weight.data.as_strided(weight.shape, (1, weight.shape[0]))


def _replace_data_with_a_part_of_itself(model: Any) -> None:
    block = model.blocks[1]
    for tensor, part in (
        (block.up.weight, block.up.weight.data[:8]),
        (block.up.bias, block.up.bias.data[:8]),
        (block.down.weight, block.down.weight.data[:, :8]),
    ):
        tensor.data = part


def _replace_data_with_expanded(model: Any) -> None:
    model.blocks[1].down.bias.data = torch.tensor([0.5]).expand(WIDTH)


def _swap_data(model: Any) -> None:
    first, second = model.blocks[0].up.weight, model.blocks[1].up.weight
    first.data, second.data = second.data, first.data


def _swap_data_within_a_block(model: Any) -> None:
    model.blocks[0].scale.data, model.blocks[0].down.bias.data = (
        model.blocks[0].down.bias.data,
        model.blocks[0].scale.data,
    )


def _swap_parameters(model: Any) -> None:
    first, second = model.blocks[0].up, model.blocks[1].up
    first.weight, second.weight = second.weight, first.weight


def _replace_parameter(model: Any) -> None:
    model.blocks[1].up.weight = nn.Parameter(model.blocks[1].up.weight.detach() * 2)
    model.gain = nn.Parameter(model.gain.detach() + 1)


def _add_parameter(model: Any) -> None:
    model.blocks[1].register_parameter("extra", nn.Parameter(torch.full((WIDTH,), 0.5)))
    model.blocks[1].register_forward_hook(lambda module, args, output: output + module.extra)


def _remove_parameter(model: Any) -> None:
    model.blocks[1].up.bias = None


def _delete_and_add_again(model: Any) -> None:
    weight = model.blocks[1].up.weight
    del model.blocks[1].up.weight
    model.blocks[1].up.weight = nn.Parameter(weight.detach().clone() * 3)


def _swap_module(model: Any) -> None:
    torch.manual_seed(5)
    model.blocks[1] = Block()
    model.proj_in = nn.Linear(WIDTH, WIDTH, bias=False)


def _swap_blocks(model: Any) -> None:
    model.blocks[0], model.blocks[2] = model.blocks[2], model.blocks[0]


def _append_block(model: Any) -> None:
    torch.manual_seed(5)
    model.blocks.append(Block())


def _remove_block(model: Any) -> None:
    del model.blocks[1]


def _tie(model: Any) -> None:
    model.blocks[2].up.weight = model.blocks[0].up.weight


def _tie_data(model: Any) -> None:
    model.blocks[2].up.weight.data = model.blocks[0].up.weight.data


def _cast_layer(model: Any) -> None:
    model.blocks[1].up.to(torch.float64).to(torch.float32)
    model.blocks[1].up.weight.data = model.blocks[1].up.weight.data.to(torch.bfloat16).to(torch.float32)


def _half(model: Any) -> None:
    model.half()


def _bfloat16(model: Any) -> None:
    model.to(torch.bfloat16)


def _double(model: Any) -> None:
    model.double()


def _reset(model: Any) -> None:
    torch.manual_seed(6)
    model.blocks[1].up.reset_parameters()


def _zero_all(model: Any) -> None:
    for parameter in model.parameters():
        nn.init.zeros_(parameter)


def _lora(model: Any) -> None:
    """A wrapper around a layer, as peft makes them."""

    class Lora(nn.Module):
        def __init__(self, base_layer: nn.Linear) -> None:
            super().__init__()
            self.base_layer = base_layer
            self.a = nn.Linear(WIDTH, 2, bias=False)
            self.b = nn.Linear(2, 2 * WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base_layer(x) + self.b(self.a(x))

    torch.manual_seed(4)
    model.blocks[1].up = Lora(model.blocks[1].up)


EDITS = [value for name, value in dict(globals()).items() if getattr(value, "__module__", "") == __name__
         and name.startswith("_") and callable(value)]  # fmt: skip
any_edit = pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__[1:])


@any_edit
def test_edit_after_a_forward(edit: Callable[[Any], None], offload_either: Offload) -> None:
    model, reference = pair()
    handle = offload_either(model)
    check(model, reference, inputs(), passes=2)
    edit(model)
    edit(reference)
    assert_at_rest(model, reference)
    x = inputs().to(next(reference.parameters()).dtype)
    check(model, reference, x)
    assert handle.stats().rebuilds <= 2
    handle.remove()
    assert_at_rest(model, reference)
    assert_same(run(model, x), run(reference, x))


@any_edit
def test_edit_before_the_first_forward_and_twice(edit: Callable[[Any], None], offload_either: Offload) -> None:
    model, reference = pair()
    offload_either(model)
    for twin in (model, reference):
        edit(twin)
    x = inputs().to(next(reference.parameters()).dtype)
    check(model, reference, x, passes=1)
    for twin in (model, reference):
        twin.gain.data.mul_(2)
        twin.blocks[0].down.weight.data.mul_(2)
    assert_at_rest(model, reference)
    check(model, reference, x)


@any_edit
def test_edit_is_kept_by_remove(edit: Callable[[Any], None], offload_either: Offload) -> None:
    model, reference = pair()
    handle = offload_either(model)
    run(model, inputs())
    edit(model)
    edit(reference)
    handle.remove()
    assert_at_rest(model, reference)
    x = inputs().to(next(reference.parameters()).dtype)
    assert_same(run(model, x), run(reference, x))


def test_edit_in_a_folder_of_ram(level: str) -> None:
    """Pages of a tmpfs file are told from edited pages too."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        pytest.skip("needs /dev/shm")
    import tempfile

    with tempfile.TemporaryDirectory(dir=memory) as folder:
        model, reference = pair()
        offload_to(Path(folder), model, level)
        for _ in range(3):
            for twin in (model, reference):
                _edit_one_element_through_data(twin)
                twin.gain.data[0] += 1
            check(model, reference, inputs(), passes=1)


def test_edits_do_not_reach_a_forward_that_is_over(offload: Offload) -> None:
    model, _ = pair()
    offload(model)
    output = run(model, inputs())
    kept = output.clone()
    _edit_in_place(model)
    run(model, inputs())
    assert torch.equal(output, kept)


def test_edit_breaks_no_tie_and_a_broken_tie_stays_broken(offload: Offload) -> None:
    """Two parameters over one storage; then one of them gets memory of its own, as `.data = ` does."""
    model, reference = pair()
    for twin in (model, reference):
        twin.blocks[2].up.weight.data = twin.blocks[0].up.weight.data
    handle = offload(model)
    for twin in (model, reference):
        twin.blocks[2].up.weight.data.mul_(2)  # changes both
    check(model, reference, inputs())
    for twin in (model, reference):
        twin.blocks[2].up.weight.data = twin.blocks[2].up.weight.data * 2  # one of them
    check(model, reference, inputs())
    handle.remove()
    assert_at_rest(model, reference)


def test_tie_made_after_applying_holds(offload: Offload) -> None:
    model, reference = pair()
    handle = offload(model)
    run(model, inputs())
    for twin in (model, reference):
        _tie_data(twin)
    check(model, reference, inputs())
    for twin in (model, reference):
        twin.blocks[0].up.weight.data.mul_(2)
    check(model, reference, inputs())
    handle.remove()
    for twin in (model, reference):
        twin.blocks[0].up.weight.data.mul_(2)
    assert_at_rest(model, reference)


def test_to_meta_is_refused_and_loses_nothing_that_is_loaded_again(offload: Offload) -> None:
    """Weights that were thrown away raise; once values are there again the forward is right."""
    model, reference = pair()
    offload(model)
    run(model, inputs())
    model.blocks[1].to("meta")
    with pytest.raises((ValueError, RuntimeError)):
        run(model, inputs())
    model.load_state_dict(copy.deepcopy(reference.state_dict()), assign=True)
    check(model, reference, inputs())


# ---------------------------------------------------------------- changes in forward


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("num_calls", torch.zeros(()))
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls.add_(1)
        self.total += x.sum(dim=tuple(range(x.ndim - 1)))
        return self.linear(x) * self.num_calls + self.total


class Reassigning(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls = self.num_calls + 1
        return self.linear(x) * self.num_calls + self.total


class CountingThroughData(Counting):
    """As moving averages of codebooks are kept."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls.data.add_(1)
        self.total.data.mul_(0.5).add_(x.sum(dim=tuple(range(x.ndim - 1))))
        return self.linear(x) * self.num_calls + self.total


class Codebook(nn.Module):
    """A parameter that forward updates: in place, or by another tensor."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.book = nn.Parameter(torch.randn(8, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.book.mean(0)
        with torch.no_grad():
            new = self.book * 0.9 + x.mean() * 0.1
            if self.how == "in place":
                self.book.copy_(new)
            elif self.how == "other data":
                self.book.data = new
            elif self.how == "other data, cast":
                self.book.data = new.to(torch.bfloat16)
            elif self.how == "other parameter":
                self.book = nn.Parameter(new)
        return x + self.book.mean(0)


class OwnStatistics(nn.Module):
    """Batch norm over statistics with names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("spread", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, WIDTH)
        return F.batch_norm(flat, self.average, self.spread, training=True).reshape(x.shape)


class Replacing(nn.Module):
    """Registers a buffer in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.cache: torch.Tensor | None
        self.register_buffer("cache", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache = x.mean(dim=0) if self.cache is None else self.cache * 2
        return self.linear(x) + self.cache


class Channels(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


CHANGING: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm": lambda: Channels(nn.BatchNorm1d(WIDTH)).train(),
    "BatchNorm, cumulative": lambda: Channels(nn.BatchNorm1d(WIDTH, momentum=None)).train(),
    "InstanceNorm": lambda: Channels(nn.InstanceNorm1d(WIDTH, track_running_stats=True, affine=True)).train(),
    "spectral_norm": lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)).train(),
    "counter": Counting,
    "reassigned buffer": Reassigning,
    "counter through data": CountingThroughData,
    "buffer from nothing": Replacing,
    "own statistics": OwnStatistics,
    **{
        f"codebook, {how}": (lambda how=how: Codebook(how))  # type: ignore[misc]
        # Not "through data": that leaves no trace, and docs/troubleshooting.md names the limit.
        for how in ("in place", "other data", "other data, cast", "other parameter")
    },
}


class Around(nn.Module):
    """The changing layer directly under the root, in a block, and in a block that is called twice."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = layer()
        self.blocks = nn.ModuleList(nn.Sequential(layer(), nn.Linear(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in (*self.blocks, self.blocks[-1]):
            x = block(x)
        return x


@pytest.mark.parametrize("kind", CHANGING)
def test_forward_changes_its_own_tensors(kind: str, offload_either: Offload) -> None:
    torch.manual_seed(0)
    model = Around(CHANGING[kind])
    reference = copy.deepcopy(model)
    x = inputs(0, 4, 3, WIDTH)
    handle = offload_either(model)
    check(model, reference, x, passes=4)
    handle.remove()
    assert_at_rest(model, reference)
    assert_same(run(model, x), run(reference, x))


def test_statistics_are_those_of_training_only(offload: Offload) -> None:
    torch.manual_seed(0)
    model, reference = pair(Around(CHANGING["BatchNorm"]))
    handle = offload(model)
    x = inputs(0, 4, 3, WIDTH)
    check(model, reference, x)
    for twin in (model, reference):
        twin.eval()
    brought_back = handle.stats().tensors_brought_back
    check(model, reference, x)
    assert handle.stats().tensors_brought_back == brought_back
    for twin in (model, reference):
        twin.train()
    check(model, reference, x)


def test_counter_costs_no_rebuild(offload: Offload) -> None:
    model, reference = pair(Around(Counting))
    handle = offload(model)
    check(model, reference, inputs(0, 4, 3, WIDTH))
    assert handle.stats().rebuilds == 0 and handle.stats().tensors_brought_back > 0


# ---------------------------------------------------------------- orders


class AnyOrder(Model):
    def forward(self, x: torch.Tensor, order: tuple[int, ...] = (), extra: torch.Tensor | None = None) -> torch.Tensor:
        x = self.proj_in(x)
        for index in order:
            x = self.blocks[index](x)
        if extra is not None:
            x = x + self.blocks[0](extra)
        return self.norm(x) * self.gain


ORDERS = [
    [(0, 1, 2, 3)] * 2,
    [(0, 0, 1, 2, 3, 3)] * 3,
    [(3, 3)] * 3,
    [(3, 2, 1, 0), (0, 1, 2, 3), (3, 2, 1, 0)],
    [(0, 2), (0, 1, 2, 3), (1, 3), ()],
    [(), (0,), (), (3, 0, 3, 0)],
    [(1,) * 5, (2,) * 5, (0, 1) * 3],
]


@pytest.mark.parametrize("num_blocks", [1, 3])
@pytest.mark.parametrize("orders", ORDERS, ids=str)
def test_any_order_of_blocks(orders: list[tuple[int, ...]], num_blocks: int, folder: Path | None) -> None:
    model, reference = pair(AnyOrder)
    offload_to(folder, model, num_blocks_per_group=num_blocks)
    for order in orders:
        for extra in (None, inputs(1)):
            check(model, reference, inputs(), order, extra=extra, passes=2)


@pytest.mark.parametrize("orders", ORDERS, ids=str)
def test_any_order_of_layers(orders: list[tuple[int, ...]], folder: Path | None) -> None:
    model, reference = pair(AnyOrder)
    offload_to(folder, model, "leaf_level")
    for order in orders:
        for extra in (None, inputs(1)):
            check(model, reference, inputs(), order, extra=extra, passes=2)


class Encoder(nn.Module):
    """As text encoders are: what is around the blocks lies two levels down."""

    def __init__(self) -> None:
        super().__init__()
        self.text_model = nn.Module()
        self.text_model.scale = nn.Parameter(torch.rand(()))
        self.text_model.embeddings = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.text_model.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.text_model.norm = nn.LayerNorm(WIDTH)
        self.text_model.forward = self.encode
        self.norms_itself = False

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = self.text_model.embeddings(x) * self.text_model.scale
        for layer in self.text_model.layers:
            x = layer(x)
        return x if self.norms_itself else self.text_model.norm(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.text_model(x)
        return self.text_model.norm(x) if self.norms_itself else x


def test_parts_of_parts_called_without_the_root(offload_either: Offload) -> None:
    """`text_encoder.text_model.final_layer_norm(x)`, as pipelines do that skip layers of CLIP."""
    model, reference = pair(Encoder)
    handle = offload_either(model)
    x = inputs()
    for part in (
        "text_model.norm",
        "text_model.embeddings",
        "text_model.embeddings.0",
        "text_model",
        "",
        "text_model.norm",
    ):
        for _ in range(2):
            before = handle.stats().passes
            expected = run(reference.get_submodule(part), x)
            assert_same(run_onloaded(model, x, call=model.get_submodule(part)), expected)
            assert handle.stats().passes == before + 1
            assert_at_rest(model, reference)
    for twin in (model, reference):
        twin.norms_itself = True  # outside of the call whose weights it uses, inside of a forward
    for _ in range(2):
        assert_same(run_onloaded(model, x), run(reference, x))


def test_a_shallow_copy_computes_too(offload_either: Offload) -> None:
    model, reference = pair(Encoder)
    handle = offload_either(model)
    for twins in (model, reference), (copy.copy(model), copy.copy(reference)), (model, reference):
        assert_same(run_onloaded(model, inputs(), call=twins[0]), run(twins[1], inputs()))
    handle.remove()
    assert_same(run(copy.copy(model), inputs()), run(reference, inputs()))


def test_a_default_device(folder: Path | None) -> None:
    """`torch.set_default_device("cuda")`, as user interfaces have it: what the engine makes for itself is not made there."""
    model, reference = pair(nn.Linear, 10, 10)  # with room around its tensors
    for _ in range(2):
        with torch.device("meta"):
            handle = offload_to(folder, model)
        for _ in range(2):
            with torch.device("meta"):
                output = model(torch.ones(1, 10, device="cpu"))
            assert_same(output, reference(torch.ones(1, 10)))
        with torch.device("meta"), torch.no_grad():
            for twin in (model, reference):
                twin.weight.mul_(0.5)
        with torch.device("meta"):
            output = model(torch.ones(1, 10, device="cpu"))
            assert_same(output, reference(torch.ones(1, 10, device="cpu")))
            handle.remove()


def test_values_that_are_exchanged_are_kept(offload_either: Offload) -> None:
    """`w.data, other = other, w.data`, as averages of weights are tried: neither is lost."""
    model, reference = pair()
    handle = offload_either(model)
    x = inputs()
    kept = [{name: 2 * w.detach() for name, w in twin.named_parameters()} for twin in (model, reference)]
    for _ in range(3):
        for twin, values in zip((model, reference), kept, strict=True):
            for name, w in twin.named_parameters():
                w.data, values[name] = values[name], w.data
        assert_same(run_onloaded(model, x), run(reference, x))
        assert all(torch.equal(value, kept[1][name]) for name, value in kept[0].items())
    before = [twin.state_dict() for twin in (model, reference)]
    for twin in (model, reference):
        for w in twin.parameters():
            w.data = w.data + 1
    assert_same(run_onloaded(model, x), run(reference, x))
    for twin, values in zip((model, reference), before, strict=True):
        twin.load_state_dict(values)
    assert_same(run_onloaded(model, x), run(reference, x))
    handle.remove()
    assert_at_rest(model, reference)


@pytest.mark.parametrize("when", ["before the first forward", "later"])
def test_weights_that_were_moved_to_shared_memory_can_be_edited(when: str, offload_either: Offload) -> None:
    model, reference = pair()
    handle = offload_either(model)
    x = inputs()
    if when == "later":
        assert_same(run_onloaded(model, x), run(reference, x))
    model.share_memory()
    for factor in (2.0, 0.5):
        with torch.no_grad():
            for twin in (model, reference):
                for w in twin.parameters():
                    w.mul_(factor)
        assert_same(run_onloaded(model, x), run(reference, x))
        assert_at_rest(model, reference)
    handle.remove()
    assert_at_rest(model, reference)


def test_views_of_weights_that_are_kept_stay_right(offload_either: Offload, caplog: pytest.LogCaptureFixture) -> None:
    """By a block, or a hook, beyond the call in which they were made, without gradients."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x))

    class Collects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Keeps() for _ in range(6))
            for block in self.blocks:
                block.linear.register_forward_hook(self.collect)

        def collect(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
            self.rows.append(module.weight.detach()[0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.rows: list[torch.Tensor] = []
            for block in self.blocks:
                x = block(x)
            return x + torch.stack(self.rows).sum(0)

    torch.manual_seed(0)
    model = Collects()
    torch.manual_seed(0)
    reference = Collects()
    handle = offload_either(model)
    for _ in range(3):
        assert_same(run_onloaded(model, inputs()), run(reference, inputs()))
        assert all(torch.equal(*rows) for rows in zip(model.rows, reference.rows, strict=True))
    assert caplog.text.count("keeps views of weights") == 1
    model.rows.clear()
    handle.remove()


def test_files_of_its_own_are_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are given up when the module is laid out again."""
    model, reference = pair()
    handle = offload_to(tmp_path, model)
    for dtype in (torch.float64, torch.float32):
        for twin in (model, reference):
            twin.to(dtype)
        assert_same(run_onloaded(model, inputs().to(dtype)), run(reference, inputs().to(dtype)))
    assert "names of groups" not in caplog.text
    handle.remove()


def test_edits_of_what_was_taken_from_weights_in_files_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, _ = pair()
    handle = offload_to(tmp_path, model)
    state = model.state_dict()
    run(model, inputs())
    with torch.no_grad():
        next(iter(state.values())).mul_(2)
    run(model, inputs())
    assert caplog.text.count("are copies now") == 1
    handle.remove()


def test_a_block_of_another_offloaded_model_is_refused(offload_either: Offload, tmp_path: Path) -> None:
    (model, reference), (other, other_reference) = pair(), pair()
    handle = offload_either(model)
    other_handle = offload_to(None, other)
    x = inputs()
    mine, theirs = model.blocks[1], other.blocks[1]
    model.blocks[1] = theirs
    for _ in range(2):
        with pytest.raises(StateError, match=r"blocks\.1 of Model is group-offloaded as a part of another module"):
            run(model, x)
        assert_same(run_onloaded(other, x), run(other_reference, x))
    model.blocks[1] = mine
    assert_same(run_onloaded(model, x), run(reference, x))
    other_handle.remove()
    model.blocks[1], reference.blocks[1] = theirs, other_reference.blocks[1]
    assert_same(run_onloaded(model, x), run(reference, x))
    handle.remove()


def test_blocks_that_a_forward_calls_in_threads_are_refused(
    offload_either: Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward waits for the threads: they must not wait for it."""
    monkeypatch.setattr(passes, "PATIENCE_SECONDS", 0.2)

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
            self.max_workers = 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.max_workers:
                return sum(block(x) for block in self.blocks)
            with ThreadPoolExecutor(self.max_workers) as pool:
                return sum(pool.map(lambda block: block(x), self.blocks))

    model, reference = pair(Branches)
    handle = offload_either(model)
    with pytest.raises(StateError, match="in another thread than a forward that is in progress"):
        run(model, inputs())
    model.max_workers = 0
    assert_same(run_onloaded(model, inputs()), run(reference, inputs()))
    handle.remove()


@pytest.mark.parametrize(
    ("waits", "calls_a_part"),
    [pytest.param([1.0], False, id="once"), pytest.param([0.02] * 50, True, id="often")],
)
def test_a_forward_that_works_in_threads_of_its_own_lets_others_wait(
    waits: list[float], calls_a_part: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread calls the same model meanwhile, as servers do; or a part of it, while the forward gets on."""
    monkeypatch.setattr(passes, "PATIENCE_SECONDS", 0.2)
    began = threading.Event()

    class Tiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](x)
            began.set()
            for seconds in waits:
                pool.submit(time.sleep, seconds).result()
            return self.blocks[1](x)

    model, reference = pair(Tiled)
    x = inputs()
    with ThreadPoolExecutor(4) as pool:
        wanted = [run(called, x) for called in (reference, reference.blocks[0] if calls_a_part else reference)]
        began.clear()
        handle = offload_to(None, model)
        first = pool.submit(run_onloaded, model, x)
        assert began.wait(60)
        second = pool.submit(run_onloaded, model.blocks[0] if calls_a_part else model, x)
        for found, expected in zip((first, second), wanted, strict=True):
            assert_same(found.result(), expected)
    handle.remove()


def test_what_others_take_for_a_mark_of_compiling(offload_either: Offload) -> None:
    """peft looks whether `_compiled_call_impl` is true."""
    model, _ = pair(Encoder)
    offload_either(model)
    assert not any(getattr(module, "_compiled_call_impl", False) for module in model.modules())


def test_part_called_without_the_root(offload_either: Offload) -> None:
    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = Model(2), Model(3)
            self.quant = nn.Linear(WIDTH, WIDTH)
            self.scale = nn.Parameter(torch.rand(()))

        def decode(self, x: torch.Tensor) -> torch.Tensor:
            return self.decoder(self.quant(x))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.decode(self.encoder(x) * self.scale)

    model, reference = pair(Autoencoder)
    handle = offload_either(model)
    x = inputs()
    in_files = handle.groups[0].tier == "file"
    for part in ("decoder", "encoder", "quant", "decoder.blocks.1", ""):
        for number in range(2):
            before = handle.stats()
            expected = run(reference.get_submodule(part), x)
            assert_same(run_onloaded(model, x, call=model.get_submodule(part)), expected)
            after = handle.stats()
            assert after.passes == before.passes + 1
            # A layer that came from a file is still in its slot if it is called twice with nothing in between.
            is_there = in_files and part == "quant" and number == 1
            assert (after.onloads == before.onloads) == is_there
            assert_at_rest(model, reference)
    with torch.no_grad():
        assert_same(model.decode(x), reference.decode(x))


@pytest.mark.parametrize("path", ["blocks.1", "blocks.3", "proj_in", "norm"])
def test_block_called_without_the_root(path: str, offload_either: Offload) -> None:
    model, reference = pair()
    offload_either(model)
    for _ in range(2):
        expected = run(reference.get_submodule(path), inputs())
        assert_same(run_onloaded(model, inputs(), call=model.get_submodule(path)), expected)
        assert_at_rest(model, reference)
    check(model, reference, inputs())


def test_layer_called_without_the_block(offload: Offload) -> None:
    """At block level nothing onloads for the layer by itself; on the CPU it is right either way."""
    model, reference = pair()
    offload(model)
    assert_same(run(model.blocks[1].up, inputs()), run(reference.blocks[1].up, inputs()))
    assert_at_rest(model, reference)


# ---------------------------------------------------------------- ties


class Tied(nn.Module):
    """Embedding and head share a weight; two blocks share one; within a block two layers do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self._tie(self.embed, self.head, how)
        self._tie(self.blocks[0][0], self.blocks[2][0], how)
        self._tie(self.blocks[1][0], self.blocks[1][1], how)

    @staticmethod
    def _tie(one: Any, other: Any, how: str) -> None:
        if how == "parameter":
            other.weight = one.weight
        elif how == "storage":
            other.weight.data = one.weight.data
        elif how == "transposed":
            other.weight.data = one.weight.data.t()
        elif how == "overlapping":
            whole = torch.randn(WIDTH + 4, WIDTH)
            one.weight.data, other.weight.data = whole[:WIDTH], whole[4:]
        elif how == "side by side":
            whole = torch.randn(2 * WIDTH, WIDTH)
            one.weight.data, other.weight.data = whole[:WIDTH], whole[WIDTH:]
        elif how == "interleaved":
            whole = torch.randn(WIDTH, 2 * WIDTH)
            one.weight.data, other.weight.data = whole[:, ::2], whole[:, 1::2]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("how", ["parameter", "storage", "transposed", "overlapping", "side by side", "interleaved"])
def test_tied_weights(how: str, offload: Offload) -> None:
    model, reference = make(Tied, how), make(Tied, how)  # a deepcopy would break the ties
    ids = torch.arange(6).reshape(2, 3)
    handle = offload(model)
    check(model, reference, ids)
    # An edit of one is an edit of the other, as before.
    for twin in (model, reference):
        twin.head.weight.data[5].mul_(2)
        with torch.no_grad():
            twin.blocks[0][0].weight[4:].add_(1)
    check(model, reference, ids)
    handle.remove()
    assert_at_rest(model, reference)
    for twin in (model, reference):
        twin.head.weight.data[5].mul_(2)
        twin.blocks[1][1].weight.data.add_(1)
    assert_at_rest(model, reference)
    assert_same(run(model, ids), run(reference, ids))


def test_tied_weights_take_memory_once(offload: Offload) -> None:
    model, _ = pair(Tied, "parameter")
    stats = offload(model).stats()
    resting = stats.host_bytes + stats.file_bytes
    own = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert own <= resting <= own + 256 * (len(list(model.parameters())) + 8)


@pytest.mark.parametrize("how", ["parameter", "storage", "overlapping"])
def test_tied_state_dict_and_deepcopy(how: str, offload_either: Offload) -> None:
    model, reference = make(Tied, how), make(Tied, how)
    offload_either(model)
    twin, expected = copy.deepcopy(model), copy.deepcopy(reference)
    for one in (twin, expected):
        one.head.weight.data.mul_(2)
    assert_at_rest(twin, expected)
    for one in (model, reference):
        one.load_state_dict(expected.state_dict())
    check(model, reference, torch.arange(6))


def test_two_models_share_a_weight(offload: Offload) -> None:
    one, two = make(Model, 2), make(Model, 3, seed=1)
    two.blocks[1].up.weight = one.blocks[1].up.weight
    two.gain = one.gain
    first, second = copy.deepcopy((one, two))
    offload(one)
    offload(two)
    for _ in range(3):
        check(one, first, inputs(), passes=2)
        check(two, second, inputs(), passes=2)
        for gain in (one.gain, first.gain):
            gain.data.add_(1)


# ---------------------------------------------------------------- tensors of every form


class Holder(nn.Module):
    """Returns its tensors as they are onloaded, in blocks of their own."""

    class Inner(nn.Module):
        def __init__(self, tensor: torch.Tensor, *, is_buffer: bool) -> None:
            super().__init__()
            if is_buffer:
                self.register_buffer("tensor", tensor)
            else:
                self.tensor = nn.Parameter(tensor, requires_grad=False)
            self.register_buffer("neighbour", torch.arange(3))

        def forward(self) -> tuple[torch.Tensor, tuple[int, ...], torch.Tensor]:
            return self.tensor.detach().clone(), self.tensor.stride(), self.neighbour + 1

    def __init__(self, tensors: list[torch.Tensor], *, is_buffer: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Inner(tensor, is_buffer=is_buffer) for tensor in tensors)

    def forward(self) -> list[Any]:
        return [block() for block in self.blocks]


FORMS: dict[str, Callable[[], torch.Tensor]] = {
    "0-dim": lambda: torch.tensor(1.5),
    "empty": lambda: torch.empty(0, 4),
    "empty strided": lambda: torch.empty(4, 0).t(),
    "one byte": lambda: torch.tensor([7], dtype=torch.uint8),
    "bool": lambda: torch.tensor([True, False, True]),
    "int8": lambda: torch.arange(-5, 5, dtype=torch.int8),
    "int64": lambda: torch.arange(5),
    "uint16": lambda: torch.arange(5).to(torch.uint16),
    "float16": lambda: torch.randn(5, 3).half(),
    "bfloat16": lambda: torch.randn(5, 3).bfloat16(),
    "float64": lambda: torch.randn(5, 3, dtype=torch.float64),
    "complex64": lambda: torch.randn(5, 3, dtype=torch.complex64),
    "complex128": lambda: torch.randn(5, 3, dtype=torch.complex128),
    "float8": lambda: torch.randn(5, 3).to(torch.float8_e4m3fn),
    "float8_e5m2": lambda: torch.randn(5, 3).to(torch.float8_e5m2),
    "float8_e8m0": lambda: torch.rand(5).to(torch.float8_e8m0fnu),
    "NaN and infinities": lambda: torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0]),
    "transposed": lambda: torch.randn(5, 3).t(),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "permuted": lambda: torch.randn(2, 3, 4).permute(2, 0, 1),
    "sliced": lambda: torch.randn(6, 8)[1::2, 2:5],
    "column": lambda: torch.randn(6, 8)[:, 3],
    "inner slice of a large one": lambda: torch.randn(100, 100)[50],
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
    "expanded 0-dim": lambda: torch.tensor(2.0).expand(5),
    "overlapping windows": lambda: torch.randn(10).as_strided((4, 5), (1, 1)),
    "odd offset": lambda: torch.arange(20, dtype=torch.uint8)[3:10],
    "real part": lambda: torch.randn(5, dtype=torch.complex64).real,
    "made in inference mode": lambda: _made_in_inference_mode(),
}


def _made_in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.randn(4, 3)


@pytest.mark.parametrize("is_buffer", [False, True], ids=["parameter", "buffer"])
@pytest.mark.parametrize("form", FORMS)
def test_tensor_of_every_form(form: str, is_buffer: bool, offload_either: Offload) -> None:
    torch.manual_seed(0)
    model = Holder([FORMS[form](), FORMS[form](), torch.randn(4)], is_buffer=is_buffer)
    # Not a deepcopy of the module: that would lose strides and conjugation.
    expected = [t.detach().resolve_conj().resolve_neg().clone() for _, t in named_tensors(model)]
    strides = [t.stride() for _, t in named_tensors(model)]
    handle = offload_either(model)

    def assert_true() -> None:
        for (name, tensor), value, stride in zip(named_tensors(model), expected, strides, strict=True):
            assert same_bits(tensor, value) and tensor.stride() == stride, name

    assert_true()
    for _ in range(2):
        output = run(model)
        assert_true()
        assert len(output) == 3
        for block, (value, stride, neighbour) in zip(model.blocks, output, strict=True):
            assert same_bits(value, block.tensor) and stride == block.tensor.stride()
            assert torch.equal(neighbour, torch.tensor([1, 2, 3]))
    handle.remove()
    assert_true()


def test_all_forms_in_one_group(tier: str, folder: Path | None) -> None:
    torch.manual_seed(0)
    forms = {name: make() for name, make in FORMS.items()}
    model = nn.Module()
    for index, tensor in enumerate(forms.values()):
        model.register_buffer(f"tensor_{index}", tensor)
    model.forward = lambda: [tensor.clone() for tensor in model.buffers()]
    expected = [tensor.clone() for tensor in model.buffers()]
    handle = offload_to(folder, model)
    assert len(handle.groups) == 1
    for _ in range(2):
        for tensor, value in zip(model(), expected, strict=True):
            assert same_bits(tensor, value)
    for tensor, value in zip(model.buffers(), expected, strict=True):
        assert same_bits(tensor, value)


def test_channels_last_model(offload: Offload) -> None:
    model, reference = pair(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)).to(memory_format=torch.channels_last).eval()
    )
    offload(model)
    x = inputs(0, 1, 3, 8, 8).to(memory_format=torch.channels_last)
    check(model, reference, x)
    assert model[0].weight.stride() == reference[0].weight.stride()


# ---------------------------------------------------------------- exceptions


class Raising(Model):
    error: BaseException | None = None
    where = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.proj_in(x)
        for index, block in enumerate(self.blocks):
            if self.error is not None and index == self.where:
                raise self.error
            x = block(x)
        return self.norm(x) * self.gain


def _at_rest_pointers(model: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in named_tensors(model)}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("where", [0, 2])
def test_forward_that_raises(error: type[BaseException], where: int, offload_either: Offload) -> None:
    model, reference = pair(Raising)
    offload_either(model)
    run(model, inputs())
    places = _at_rest_pointers(model)
    model.error, model.where = error(), where
    for _ in range(2):
        with pytest.raises(error):
            run(model, inputs())
        assert _at_rest_pointers(model) == places
        assert_at_rest(model, reference)
    model.error = None
    check(model, reference, inputs())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("path", ["blocks.1", "blocks.3.down", "proj_in", ""])
@pytest.mark.parametrize("kind", ["pre-hook", "hook"])
def test_hook_that_raises(error: type[BaseException], path: str, kind: str, offload_either: Offload) -> None:
    model, reference = pair()
    offload_either(model)
    run(model, inputs())
    places = _at_rest_pointers(model)

    def fail(*args: Any) -> None:
        raise error

    module = model.get_submodule(path)
    hook = module.register_forward_pre_hook(fail) if kind == "pre-hook" else module.register_forward_hook(fail)
    with pytest.raises(error):
        run(model, inputs())
    assert _at_rest_pointers(model) == places
    hook.remove()
    check(model, reference, inputs())


def test_forward_that_raises_and_is_caught_inside(offload: Offload) -> None:
    """A block fails, the model goes on without it."""

    class Catching(Model):
        def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
            x = self.proj_in(x)
            for index, block in enumerate(self.blocks):
                try:
                    x = block(x if not fail or index != 1 else x[:, :3])
                except RuntimeError:
                    x = x + 1
            return self.norm(x)

    model, reference = pair(Catching)
    offload(model)
    for fail in (False, True, True, False):
        check(model, reference, inputs(), fail=fail, passes=1)


def test_forward_with_wrong_arguments(offload: Offload) -> None:
    model, reference = pair()
    offload(model)
    with pytest.raises(TypeError):
        run(model)
    with pytest.raises(TypeError):
        run(model, inputs(), nonsense=3)
    check(model, reference, inputs())


def test_what_forward_changed_before_it_raised_is_kept(offload: Offload) -> None:
    class Failing(Around):
        fail = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            if self.fail:
                raise ValueError("on purpose")
            return x

    model, reference = pair(Failing, Counting)
    offload(model)
    x = inputs(0, 4, 3, WIDTH)
    for twin in (model, reference):
        twin.fail = True
        with pytest.raises(ValueError, match="on purpose"):
            run(twin, x)
        twin.fail = False
    check(model, reference, x)


def test_remove_in_the_middle_of_a_forward_is_refused(offload: Offload) -> None:
    model, reference = pair()
    handle = offload(model)
    hook = model.blocks[1].register_forward_hook(lambda *args: handle.remove())
    with pytest.raises(StateError, match="remove"):
        run(model, inputs())
    hook.remove()
    check(model, reference, inputs())


# ---------------------------------------------------------------- threads


def _in_threads(*jobs: Callable[[], None]) -> None:
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(jobs))

    def work(job: Callable[[], None]) -> None:
        try:
            barrier.wait(60)
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def _job(model: nn.Module, reference: nn.Module, seed: int, passes: int = 8) -> Callable[[], None]:
    expected = run(reference, inputs(seed))

    def job() -> None:
        for _ in range(passes):
            assert_same(run(model, inputs(seed)), expected)

    return job


def test_two_threads_on_one_model(offload: Offload) -> None:
    model, reference = pair()
    handle = offload(model)
    _in_threads(*(_job(model, reference, seed) for seed in range(3)))
    assert handle.stats().passes == 24
    assert_at_rest(model, reference)


def test_two_threads_on_parts_of_one_model(offload: Offload) -> None:
    model, reference = pair()
    offload(model)
    _in_threads(_job(model, reference, 0), *(_job(model.blocks[i], reference.blocks[i], i) for i in (1, 2)))
    assert_at_rest(model, reference)


def test_two_models_in_two_threads(offload: Offload) -> None:
    pairs = [pair(make(Model, count, seed=count)) for count in (2, 4, 3)]
    for model, _ in pairs:
        offload(model)
    _in_threads(*(_job(model, reference, 0) for model, reference in pairs))
    for model, reference in pairs:
        assert_at_rest(model, reference)


def test_applying_and_running_in_two_threads(offload: Offload) -> None:
    model, reference = pair()
    offload(model)
    twins = [pair(make(Model, 2, seed=seed)) for seed in range(4)]

    def apply_all() -> None:
        for other, other_reference in twins:
            handle = offload(other)
            check(other, other_reference, inputs())
            handle.remove()

    _in_threads(_job(model, reference, 0, passes=20), apply_all)


# ---------------------------------------------------------------- modes of autograd


def test_inference_mode(offload: Offload) -> None:
    model, reference = pair()
    offload(model)
    expected = run(reference, inputs())
    for _ in range(3):
        with torch.inference_mode():
            assert_same(model(inputs()), expected)
        assert not any(tensor.is_inference() for tensor in model.parameters())
        assert_at_rest(model, reference)
        check(model, reference, inputs(), passes=1)
        _edit_in_place(model)
        _edit_in_place(reference)
        expected = run(reference, inputs())


def test_offloaded_in_inference_mode(offload: Offload) -> None:
    model, reference = pair()
    with torch.inference_mode():
        offload(model)
        assert_same(model(inputs()), reference(inputs()))
    assert not any(tensor.is_inference() for tensor in model.parameters())
    check(model, reference, inputs())
    _edit_in_place(model)
    _edit_in_place(reference)
    check(model, reference, inputs())


def test_model_made_in_inference_mode(offload: Offload) -> None:
    with torch.inference_mode():
        model, reference = pair()
        handle = offload(model)
        check(model, reference, inputs())
        _edit_in_place(model)
        _edit_in_place(reference)
        check(model, reference, inputs())
        handle.remove()
        assert_at_rest(model, reference)


def test_model_made_in_inference_mode_and_used_outside(offload: Offload) -> None:
    with torch.inference_mode():
        model, reference = pair()
    handle = offload(model)
    check(model, reference, inputs())
    _edit_through_data(model)
    _edit_through_data(reference)
    check(model, reference, inputs())
    handle.remove()
    assert_at_rest(model, reference)


def test_changing_model_in_inference_mode(offload: Offload) -> None:
    torch.manual_seed(0)
    model, reference = pair(Around(CHANGING["BatchNorm"]))
    offload(model)
    x = inputs(0, 4, 3, WIDTH)
    for _ in range(3):
        with torch.inference_mode():
            assert_same(model(x), reference(x))
        assert_at_rest(model, reference)


@pytest.mark.parametrize("kind", ["BatchNorm", "counter"])
def test_changing_model_made_in_inference_mode(kind: str, offload_either: Offload) -> None:
    torch.manual_seed(0)
    with torch.inference_mode():
        model, reference = pair(Around(CHANGING[kind]))
        offload_either(model)
        check(model, reference, inputs(0, 4, 3, WIDTH))


def test_grad_enabled_forward(offload: Offload) -> None:
    model, reference = pair()
    offload(model)
    for _ in range(3):
        assert_same(model(inputs()), reference(inputs()))
        assert_at_rest(model, reference)


@pytest.mark.parametrize("frozen", [False, True])
def test_backward_over_offloaded_weights(frozen: bool, offload_either: Offload) -> None:
    model, reference = pair()
    model.requires_grad_(not frozen)
    offload_either(model)
    for _ in range(2):
        x, y = inputs().requires_grad_(), inputs().requires_grad_()
        loss = model(x).sum()
        if not frozen:
            with pytest.raises(StateError, match="leave a gradient in"):
                loss.backward()
            continue
        loss.backward()
        reference(y).sum().backward()
        assert_same(x.grad, y.grad)
        assert_at_rest(model, reference)


def gradients_of_input(model: nn.Module, x: torch.Tensor, is_checkpointing: bool) -> torch.Tensor | None:
    """What backward leaves in the input; None if it raises."""
    x = x.clone().requires_grad_()
    output = checkpoint(model, x, use_reentrant=False) if is_checkpointing else model(x)
    try:
        output.square().sum().backward()
    except RuntimeError:
        return None
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("is_checkpointing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_every_kind(kind: str, is_checkpointing: bool, offload: Offload) -> None:
    torch.manual_seed(0)
    model, reference = pair(KINDS[kind]().eval().requires_grad_(False))
    offload(model)
    for _ in range(2):
        x = inputs(0, 2, 3, WIDTH)
        expected = gradients_of_input(reference, x, is_checkpointing)
        assert expected is not None
        assert_same(gradients_of_input(model, x, is_checkpointing), expected)
        assert_at_rest(model, reference)


@pytest.mark.parametrize("kind", CHANGING)
def test_gradients_through_what_changes_itself(kind: str, offload_either: Offload) -> None:
    """Right, or an error if there is one without offloading."""
    torch.manual_seed(0)
    model = Around(CHANGING[kind]).requires_grad_(False)
    reference = copy.deepcopy(model)
    x = inputs(0, 4, 3, WIDTH)
    offload_either(model)
    for _ in range(3):
        expected = gradients_of_input(reference, x, False)
        actual = gradients_of_input(model, x, False)
        if actual is not None:
            assert_same(actual, expected)
        elif kind != "codebook, other parameter":  # the new one requires gradients, and is offloaded
            assert expected is None
        assert_at_rest(model, reference)


@pytest.mark.parametrize("path", ["blocks.1", "blocks.1.up", "proj_in"])
def test_backward_of_one_part_is_right_or_raises(path: str, offload_either: Offload) -> None:
    model, reference = pair()
    offload_either(model)
    x, y = inputs().requires_grad_(), inputs().requires_grad_()
    output = model.get_submodule(path)(x).square().sum()
    run(model, inputs(1))
    reference.get_submodule(path)(y).square().sum().backward()
    try:
        output.backward()
    except RuntimeError:
        return
    assert_same(x.grad, y.grad)


class LocalGrad(nn.Module):
    """Switches gradients on for some of its layers only, inside a call that has them off (or the other way round)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = torch.mm(x, self.weight.t() * 1).sin()
            x = torch.mm(x, self.weight.t())
            x = self.linear(x)
            x = self.blocks[1](self.blocks[0](x))
        with torch.no_grad():
            self.blocks[2](x)
        return x


@pytest.mark.parametrize("outer", [torch.no_grad, torch.enable_grad])
def test_backward_with_gradients_on_inside_only(outer: Any, offload: Offload) -> None:
    model, reference = pair(LocalGrad)
    offload(model)
    x, y = inputs().requires_grad_(), inputs().requires_grad_()
    with outer():
        output = model(x).square().sum() if outer is torch.enable_grad else model(x)
        expected = reference(y).square().sum() if outer is torch.enable_grad else reference(y)
    run(model, inputs(1))
    expected.sum().backward()
    try:
        output.sum().backward()
    except RuntimeError:
        return
    assert_same(x.grad, y.grad)
    for (name, parameter), (_, twin) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert (parameter.grad is None) == (twin.grad is None), name
        if twin.grad is not None:
            assert same_bits(parameter.grad, twin.grad), name


class RootGrad(nn.Module):
    """Only weights of the root itself, which are offloaded when the call is over."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return torch.mm(x, self.weight.t())


def test_backward_over_weights_of_a_root_without_gradients(offload: Offload) -> None:
    model, reference = pair(RootGrad)
    other, _ = pair(make(RootGrad, seed=1))
    offload(model)
    offload(other)
    x, y = inputs().requires_grad_(), inputs().requires_grad_()
    output, expected = run(model, x), run(reference, y)
    run(other, inputs())  # lands in the same slot
    expected.sum().backward()
    try:
        output.sum().backward()
    except RuntimeError:
        return
    assert_same(x.grad, y.grad)


def test_gradients_within_a_forward(offload: Offload) -> None:
    """Guidance computes gradients of a block's own weights before the block's call ends."""

    class Guided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                (grad,) = torch.autograd.grad(F.linear(x, self.weight).square().sum(), x)
            return self.linear(grad)

    model, reference = pair(Wrapped(Guided(), Guided()).eval())
    offload(model)
    check(model, reference, inputs())


# ---------------------------------------------------------------- inputs


class TakesAll(Model):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, dict[str, Any]]:  # type: ignore[override]
        return super().forward(x), kwargs


def test_inputs_that_are_there_already_keep_identity(offload: Offload) -> None:
    model, reference = pair(TakesAll)
    offload(model)
    values = {"a": [inputs(), 3], "b": {"c": (inputs(),)}, "d": inputs(), "e": None, "f": object()}
    output, received = run(model, inputs(), **values)
    assert_same(output, run(reference, inputs())[0])
    assert received.keys() == values.keys() and all(received[name] is values[name] for name in values)


def test_excluded_inputs_are_not_moved(offload: Offload) -> None:
    model, _ = pair(TakesAll)
    offload(model, exclude_kwargs=["cache"])
    elsewhere = [torch.empty(3, device="meta")]
    assert run(model, inputs(), cache=elsewhere)[1]["cache"] is elsewhere
    with pytest.raises(NotImplementedError):
        run(model, inputs(), other=elsewhere)


def test_skip_keys_of_the_class_are_not_moved(folder: Path | None) -> None:
    class Skips(TakesAll):
        _skip_keys = ["cache"]

    elsewhere = {"k": torch.empty(3, device="meta")}
    model, _ = pair(Skips)
    offload_to(folder, model)
    assert run(model, inputs(), cache=elsewhere)[1]["cache"] is elsewhere
    model, _ = pair(Skips)
    offload_to(folder, model, exclude_kwargs=[])
    with pytest.raises(NotImplementedError):
        run(model, inputs(), cache=elsewhere)


# ---------------------------------------------------------------- the way back


_HOOK_TABLES = [name for name in vars(nn.Module()) if "hooks" in name or "_with_kwargs" in name or "always" in name]


def _snapshot(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[name] = (
            module,
            type(module),
            list(module.__dict__),
            module.__dict__.get("forward"),
            {table: dict(module.__dict__[table]) for table in _HOOK_TABLES},
            {key: id(value) for key, value in {**module._parameters, **module._buffers}.items()},
        )
    return found


def test_remove_gives_the_module_back(offload: Offload) -> None:
    model, reference = pair()
    calls: list[str] = []
    model.blocks[1].register_forward_pre_hook(lambda *args: calls.append("pre"))
    model.register_forward_hook(lambda *args, **kwargs: calls.append("root"), with_kwargs=True, always_call=True)
    original = model.blocks[0].forward
    model.blocks[0].forward = lambda x: original(x)
    before = _snapshot(model)
    handle = offload(model)
    run(model, inputs())
    _edit_in_place(model)
    _edit_in_place(reference)
    handle.remove()
    assert _snapshot(model) == before
    assert_at_rest(model, reference)
    assert_own_memory(model)
    assert not handle.is_active
    assert_same(run(model, inputs()), run(reference, inputs()))
    assert calls == ["pre", "root"] * 2
    handle.remove()  # nothing more to do
    remove_group_offloading(model)
    with pytest.raises(StateError):
        handle.stats()


def test_remove_that_finds_no_room_loses_nothing(offload: Offload, monkeypatch: pytest.MonkeyPatch) -> None:
    """What got memory of its own before keeps it; the next forward takes all up again, or `remove()` goes on."""
    model, reference = pair()
    handle = offload(model)
    real, num_left = engine.materialise, 0

    def materialise(part: Part) -> None:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise MemoryError("no room")
        real(part)

    monkeypatch.setattr(engine, "materialise", materialise)
    num_parts = sum(len(group.parts) for group in handle._engine.groups)
    for at in range(num_parts):
        check(model, reference, inputs())
        _edit_in_place(model)
        _edit_in_place(reference)
        for _ in range(2):
            num_left = at
            with pytest.raises(MemoryError):
                handle.remove()
            assert handle.is_active
            assert_at_rest(model, reference)
        check(model, reference, inputs(), passes=2)
    num_left = num_parts - 1
    with pytest.raises(MemoryError):
        handle.remove()
    num_left = num_parts
    handle.remove()
    assert_at_rest(model, reference)
    assert_own_memory(model)
    assert_same(run(model, inputs()), run(reference, inputs()))


_PEAK_OF_REMOVE = """
import contextlib
from group_offload.runtime.groups import build
build.SEGMENT_BYTES = 32 << 20
peak = lambda: next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))
where = contextlib.nullcontext()
if sys.argv[1] == "mapped twice":
    from tests.support.simulated import SimulatedDevice, use_simulated_device
    where = use_simulated_device(SimulatedDevice())
with where:
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(24))
    handle = apply_group_offloading(model, "cpu")
    with contextlib.suppress(OSError):
        open("/proc/self/clear_refs", "w").write("5")  # forget the peak
    before = peak()
    handle.remove()
print(peak() - before, sum(weight.nbytes for weight in model.parameters()))
"""


@pytest.mark.parametrize("memory", ["pageable", "mapped twice"])
def test_remove_takes_no_second_copy_of_the_model(memory: str) -> None:
    done = run_python(_PEAK_OF_REMOVE, memory)
    assert done.returncode == 0, done.stderr[-2000:]
    more, model = map(int, done.stdout.split())
    assert model == 24 << 24 and more < model / 4


def test_remove_keeps_hooks_that_came_later(offload: Offload) -> None:
    model, reference = pair()
    handle = offload(model)
    calls: list[str] = []
    model.blocks[1].register_forward_hook(lambda *args: calls.append("block"))
    model.register_forward_pre_hook(lambda *args: calls.append("root"), prepend=True)
    handle.remove()
    assert_same(run(model, inputs()), run(reference, inputs()))
    assert calls == ["root", "block"]


def test_removed_model_trains(offload: Offload) -> None:
    model, reference = pair()
    handle = offload(model)
    run(model, inputs())
    remove_group_offloading(model)
    assert not handle.is_active
    for twin in (model, reference):
        twin(inputs()).square().sum().backward()
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert_at_rest(model, reference)


def test_applying_twice_is_refused(offload: Offload) -> None:
    model, reference = pair()
    handle = offload(model)
    with pytest.raises(StateError, match="remove_group_offloading"):
        offload(model)
    with pytest.raises(StateError, match="remove_group_offloading"):
        offload(nn.Sequential(model))
    check(model, reference, inputs())
    handle.remove()
    offload(model)
    check(model, reference, inputs())


@pytest.mark.parametrize("path", ["blocks", "blocks.1", "blocks.1.up", "proj_in", "norm"])
def test_applying_to_a_part_is_refused(path: str, offload: Offload) -> None:
    model, reference = pair()
    offload(model)
    with pytest.raises(StateError, match="remove_group_offloading"):
        offload(model.get_submodule(path))
    check(model, reference, inputs())


def test_applying_again_with_other_options(tmp_path: Path) -> None:
    model, reference = pair()
    for _ in range(2):
        for level in LEVELS:
            for folder in (None, tmp_path):
                handle = offload_to(folder, model, level)
                check(model, reference, inputs(), passes=2)
                handle.remove()
                assert_own_memory(model)
    assert_same(run(model, inputs()), run(reference, inputs()))


@pytest.mark.parametrize("is_run", [False, True])
def test_dropped_model_is_collected(is_run: bool, offload: Offload) -> None:
    model, _ = pair()
    handle = offload(model)
    if is_run:
        run(model, inputs())
    engine, weight, block = weakref.ref(handle._engine), weakref.ref(model.gain), weakref.ref(model.blocks[0])
    del model, handle
    gc.collect()
    assert engine() is None and weight() is None and block() is None


def test_removed_model_is_collected(offload: Offload) -> None:
    model, _ = pair()
    handle = offload(model)
    run(model, inputs())
    engine = weakref.ref(handle._engine)
    handle.remove()
    gc.collect()
    assert engine() is None
    weight = weakref.ref(model.gain)
    del model, handle
    gc.collect()
    assert weight() is None


def test_replaced_weights_are_freed(offload: Offload) -> None:
    """What no module holds any more goes with the next forward."""
    model, _ = pair()
    offload(model)
    run(model, inputs())
    weight, block = weakref.ref(model.blocks[1].up.weight), weakref.ref(model.blocks[2])
    model.blocks[1].up.weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))
    del model.blocks[2]
    run(model, inputs())
    run(model, inputs())
    gc.collect()
    assert weight() is None and block() is None


# ---------------------------------------------------------------- tensor subclasses


class Quantised(torch.Tensor):
    """An int8 weight with a scale for each row, as quantisation libraries wrap them."""

    qdata: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls: type, qdata: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, qdata.shape, strides=qdata.stride(), dtype=scale.dtype, device=qdata.device, requires_grad=False
        )

    def __init__(self, qdata: torch.Tensor, scale: torch.Tensor) -> None:
        self.qdata, self.scale = qdata, scale

    @classmethod
    def of(cls, weight: torch.Tensor) -> Quantised:
        scale = weight.detach().abs().amax(1, keepdim=True) / 127
        return cls((weight.detach() / scale).round().to(torch.int8), scale)

    def dequantised(self) -> torch.Tensor:
        return self.qdata.to(self.scale.dtype) * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["qdata", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> Quantised:
        return cls(inner["qdata"], inner["scale"])

    def __repr__(self, **_: Any) -> str:
        return f"Quantised({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten, kwargs = torch.ops.aten, kwargs or {}
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            return return_and_correct_aliasing(
                func, args, kwargs, cls(func(args[0].qdata, **kwargs), func(args[0].scale, **kwargs))
            )
        if func is aten._to_copy.default:
            dtype, device = kwargs.get("dtype") or args[0].dtype, kwargs.get("device")
            return cls(args[0].qdata.to(device, copy=True), args[0].scale.to(device, dtype, copy=True))
        if func is aten.copy_.default and isinstance(args[1], cls):
            args[0].qdata.copy_(args[1].qdata)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        if func is aten.mul_.Tensor:
            args[0].scale.mul_(args[1])
            return args[0]
        plain = torch.utils._pytree.tree_map_only(cls, cls.dequantised, (args, kwargs))
        return func(*plain[0], **plain[1])


class QuantisedModel(Model):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                layer.weight = nn.Parameter(Quantised.of(layer.weight), requires_grad=False)


def test_tensor_subclass(offload: Offload) -> None:
    model, reference = pair(QuantisedModel)
    handle = offload(model)
    check(model, reference, inputs())
    assert isinstance(model.blocks[0].up.weight, nn.Parameter)
    assert type(model.blocks[0].up.weight.data) is Quantised
    assert handle.stats().rebuilds == 0
    assert_own_memory(model)
    handle.remove()
    assert_at_rest(model, reference)
    assert_same(run(model, inputs()), run(reference, inputs()))


def test_tensor_subclass_as_buffer(offload: Offload) -> None:
    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", Quantised.of(torch.randn(WIDTH, WIDTH)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.weight)

    model, reference = pair(Wrapped(Buffered(), Buffered()).eval())
    handle = offload(model)
    check(model, reference, inputs())
    handle.remove()
    assert_at_rest(model, reference)


def _quantised_edit_scale(weight: Any) -> None:
    weight.scale.mul_(2)


def _quantised_edit_through_wrapper(weight: Any) -> None:
    with torch.no_grad():
        weight.mul_(2)


def _quantised_edit_qdata(weight: Any) -> None:
    weight.qdata.data[0, 0] = 5


def _quantised_replace_scale(weight: Any) -> None:
    weight.scale = weight.scale * 2


def _quantised_replace_inner_data(weight: Any) -> None:
    weight.scale.data = weight.scale.data * 2


QUANTISED_EDITS = [
    _quantised_edit_scale,
    _quantised_edit_through_wrapper,
    _quantised_edit_qdata,
    _quantised_replace_scale,
    _quantised_replace_inner_data,
]
# In a forward, an edit of a parameter through `.data` leaves no trace: docs/troubleshooting.md names this limit.
QUANTISED_EDITS_IN_FORWARD = [edit for edit in QUANTISED_EDITS if edit is not _quantised_edit_qdata]


@pytest.mark.parametrize("make", [lambda x: x.conj(), lambda x: x.conj().imag], ids=["conjugated", "negated"])
def test_lazy_views_are_refused(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("table", make(torch.randn(5, dtype=torch.complex64)))
    with pytest.raises(ModuleError, match="table"):
        apply_group_offloading(model, "cpu")


@pytest.mark.parametrize("edit", QUANTISED_EDITS, ids=lambda edit: edit.__name__.removeprefix("_quantised_"))
def test_edit_of_a_tensor_subclass(edit: Callable[[Any], None], offload_either: Offload) -> None:
    model, reference = pair(QuantisedModel)
    handle = offload_either(model)
    run(model, inputs())
    for twin in (model, reference):
        edit(twin.blocks[1].up.weight)
    check(model, reference, inputs())
    handle.remove()
    assert_at_rest(model, reference)
    assert_same(run(model, inputs()), run(reference, inputs()))


@pytest.mark.parametrize("edit", QUANTISED_EDITS_IN_FORWARD, ids=lambda edit: edit.__name__.removeprefix("_quantised_"))
def test_edit_of_a_tensor_subclass_in_forward(edit: Callable[[Any], None], offload_either: Offload) -> None:
    model, reference = pair(QuantisedModel)
    offload_either(model)
    for twin in (model, reference):
        twin.blocks[1].up.register_forward_hook(lambda module, args, output: edit(module.weight))
    check(model, reference, inputs())


def test_tensor_subclass_is_tied(offload: Offload) -> None:
    model, reference = pair(QuantisedModel)
    for twin in (model, reference):
        twin.blocks[2].up.weight = twin.blocks[0].up.weight
    offload(model)
    check(model, reference, inputs())


def test_tensor_subclass_is_replaced_cast_and_loaded(offload: Offload) -> None:
    model, reference = pair(QuantisedModel)
    offload(model)
    run(model, inputs())
    other = make(QuantisedModel, seed=1)
    for twin in (model, reference):
        twin.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    check(model, reference, inputs())
    for twin in (model, reference):
        twin.load_state_dict(copy.deepcopy(make(QuantisedModel, seed=2).state_dict()))
    check(model, reference, inputs())
    for twin in (model, reference):
        twin.blocks[1].up.weight = nn.Parameter(torch.ones(2 * WIDTH, WIDTH))
    check(model, reference, inputs())
    for twin in (model, reference):
        twin.blocks[1].up.weight = nn.Parameter(Quantised.of(torch.randn(2 * WIDTH, WIDTH,
                                                generator=torch.Generator().manual_seed(3))), requires_grad=False)  # fmt: skip
    check(model, reference, inputs())


def test_tensor_subclass_deepcopy_and_state_dict(offload: Offload) -> None:
    model, reference = pair(QuantisedModel)
    offload(model)
    run(model, inputs())
    twin = copy.deepcopy(model)
    assert_at_rest(twin, reference)
    assert_same(run(twin, inputs()), run(reference, inputs()))
    expected = dict(plain_tensors(reference))
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Quantised):
            assert same_bits(tensor.qdata, expected[f"{name}.qdata"])
            assert same_bits(tensor.scale, expected[f"{name}.scale"])


def test_forward_that_raises_puts_tensor_subclasses_back(offload: Offload) -> None:
    model, reference = pair(QuantisedModel)
    offload(model)
    weights = {name: id(weight) for name, weight in model.named_parameters()}

    def fail(*args: Any) -> None:
        raise KeyboardInterrupt

    hook = model.blocks[1].up.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        run(model, inputs())
    hook.remove()
    assert {name: id(weight) for name, weight in model.named_parameters()} == weights
    assert_at_rest(model, reference)
    check(model, reference, inputs())


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
def test_torchao(offload: Offload) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = make(Model)
    quantize_(model, Int8WeightOnlyConfig())
    model, reference = pair(model)
    handle = offload(model)
    check(model, reference, inputs())
    handle.remove()
    assert_same(run(model, inputs()), run(reference, inputs()))


@pytest.mark.skipif(importlib.util.find_spec("optimum") is None, reason="needs optimum-quanto")
def test_quanto(offload: Offload) -> None:
    quanto = pytest.importorskip("optimum.quanto")

    def quantised() -> nn.Module:  # its tensors cannot be deep-copied
        model = make(Model)
        quanto.quantize(model, weights=quanto.qint8)
        quanto.freeze(model)
        return model

    model, reference = quantised(), quantised()
    handle = offload(model)
    check(model, reference, inputs())
    handle.remove()
    assert_same(run(model, inputs()), run(reference, inputs()))


# ---------------------------------------------------------------- modules that cannot be offloaded yet


def test_weights_of_fsdp2_are_refused() -> None:
    """Before, and when they become such in place of offloaded ones."""
    done = run_python(
        """
        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from group_offload import ModuleError, apply_group_offloading

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))

        def refused(call):
            try:
                call()
            except ModuleError as error:
                assert "weight is a DTensor" in str(error) and "CPUOffloadPolicy" in str(error), error
            else:
                raise AssertionError

        model = fully_shard(nn.Sequential(nn.Linear(8, 8)), mesh=mesh)
        refused(lambda: apply_group_offloading(model, "cpu"))
        model = nn.Sequential(nn.Linear(8, 8))
        apply_group_offloading(model, "cpu")
        fully_shard(model, mesh=mesh)
        refused(lambda: model(torch.zeros(1, 8)))
        dist.destroy_process_group()
        """
    )
    assert done.returncode == 0, done.stderr
