"""Modules of every kind, and tensors of every dtype, shape, stride and class, give the bits of their resident twin."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from group_offload import ModuleError, apply_group_offloading, weights

from ...support.asserts import assert_at_rest, assert_own_memory, assert_same, named_tensors, same_bits
from ...support.models import WIDTH, Block, Blocks, Model, inputs, make
from ...support.on_device import Twins, raise_interrupt
from ...support.quantized import Quantized
from ...support.rigs import Offload, check, gradient_of_input, pair, run
from ...support.simulated import SimulatedDevice, use_simulated_device


class ReadsItsParts(nn.Linear):
    """A layer with weights that reads those of its children, in ways that its source does not tell."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.parts = nn.ModuleList([nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)])
        self.gain = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down, up = [part.weight for part in self.parts]
        weights = dict(self.named_parameters())
        return F.linear(x * weights["gain.weight"] + weights["bias"], self.weight + up @ down)


def wrapped(*layers: nn.Module) -> Blocks:
    """Each layer inside a block of its own."""
    return Blocks(*(nn.Sequential(layer) for layer in layers))


class Doubled(nn.Linear):
    """torch's own steps around `forward` are others here."""

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super()._call_impl(*args, **kwargs)


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


class Containers(nn.Module):
    """Lists and dicts of parameters and of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({"a": Block(), "b": Block()})
        self.heads = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.gains = nn.ParameterDict({"a": torch.rand(WIDTH), "b": torch.rand(WIDTH)})
        self.shifts = nn.ParameterList([torch.rand(WIDTH), torch.rand(WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for shift, head, (name, expert) in zip(self.shifts, self.heads, self.experts.items(), strict=True):
            x = head(expert(x)) * self.gains[name] + shift
        return x


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.mha(x, x, x, need_weights=False)[0])


class PlainNorm(nn.Module):
    """It has a name for a weight, and no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("weight", None)


class ReadsChildren(nn.Module):
    """Computes with weights of its children, and calls one of them too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table = nn.Linear(WIDTH, WIDTH), nn.Embedding(WIDTH, WIDTH)
        self.block, self.norm = Block(), PlainNorm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._mixed(F.layer_norm(self.inner(self.block(x)), (WIDTH,), self.norm.weight))

    def _mixed(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.block.up.weight
        return F.linear(F.linear(x, self.inner.weight, self.inner.bias) @ self.table.weight, weight)[..., :WIDTH]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x)[0])


class Recursive(Block):
    """A block that calls itself."""

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = super().forward(x)
        return self(x, depth - 1) + self.scale if depth else x


class SharedModule(Blocks):
    """One module object inside of three blocks, and once more at the root."""

    def __init__(self) -> None:
        shared = nn.Linear(WIDTH, WIDTH)
        super().__init__(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), shared) for _ in range(3)))
        self.out = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(super().forward(x))


def shared_block() -> nn.Module:
    """The same block object at three places of the list."""
    shared = Block()
    return Blocks(shared, Block(), shared, shared)


def weight_normed() -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "model": Model,
    "deep lists": DeepLists,
    "containers": Containers,
    "containers in blocks": lambda: wrapped(Containers(), Containers()),
    "MultiheadAttention": lambda: wrapped(Attention(), Attention()),
    "MultiheadAttention as root": Attention,
    "reads children": lambda: wrapped(ReadsChildren(), ReadsChildren()),
    "reads children as root": ReadsChildren,
    "TransformerEncoder": encoder,
    "LSTM": lambda: wrapped(Recurrent(), Recurrent()),
    "LSTM as child": Recurrent,
    "recursive": lambda: Blocks(Recursive(), Recursive()),
    "shared module": SharedModule,
    "shared block": shared_block,
    "reads_its_parts": lambda: wrapped(ReadsItsParts(), nn.Linear(WIDTH, WIDTH), ReadsItsParts()),
    "steps of its own": lambda: wrapped(Doubled(WIDTH, WIDTH), Doubled(WIDTH, WIDTH)),
    "weight_norm": lambda: wrapped(weight_normed(), nn.Linear(WIDTH, WIDTH)),
    "spectral_norm, which has buffers": lambda: wrapped(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))),
    "Linear as root": lambda: nn.Linear(WIDTH, WIDTH),
    "weight_norm as root": weight_normed,
    "Block as root": Block,
}


@pytest.mark.parametrize("kind", KINDS)
def test_module_of_every_kind(kind: str, folder: Path | None, offload: Offload) -> None:
    """Lists in lists, which are never called; a root that has lists only; modules that read a weight of another one without a
    call, as `MultiheadAttention.out_proj` (diffusers #14551). Then gradients, with and without a checkpoint."""
    torch.manual_seed(0)
    model, reference = pair(KINDS[kind]().eval().requires_grad_(False))
    x, handle = inputs(0, 2, 3, WIDTH), offload(model)
    assert_at_rest(model, reference)
    brought = []
    for _ in range(4):  # layers are joined in the second pass, which brings all again
        before = sum(handle.stats().bytes_onloaded.values())
        check(model, reference, x, passes=1)
        brought.append(sum(handle.stats().bytes_onloaded.values()) - before)
    stats = handle.stats()
    assert stats.forward_passes == 4 and stats.rebuilds == 0 and stats.tensors_copied_back == 0
    assert bool(brought[0]) == (folder is not None) and brought[2] == brought[3] <= brought[1] <= brought[0]
    # What came from files is brought again unless it was in a slot all the time.
    assert brought[0] - brought[2] <= stats.peak_device_bytes
    for is_checkpointing in (False, True):
        assert_same(*(gradient_of_input(each, x, is_checkpointing=is_checkpointing) for each in (model, reference)))
        assert_at_rest(model, reference)
    handle.remove()
    assert_same(run(model, x), run(reference, x))
    assert_at_rest(model, reference)


# ---------------------------------------------------------------- tensors


class Holder(nn.Module):
    """Returns its tensor as it is onloaded."""

    def __init__(self, tensor: torch.Tensor, *, is_buffer: bool) -> None:
        super().__init__()
        if is_buffer:
            self.register_buffer("tensor", tensor)
        else:
            self.tensor = nn.Parameter(tensor, requires_grad=False)
        self.register_buffer("neighbor", torch.arange(3))

    def forward(self, found: list[Any]) -> list[Any]:
        return [*found, (self.tensor.detach().clone(), self.tensor.stride(), self.neighbor + 1)]


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
    """Those that are not contiguous cannot be written to files as they are."""
    torch.manual_seed(0)
    model = Blocks(*(Holder(tensor, is_buffer=is_buffer) for tensor in (FORMS[form](), FORMS[form](), torch.randn(4))))
    # Not a deepcopy of the module: that would lose strides and conjugation.
    expected = [(t.detach().clone(memory_format=torch.preserve_format), t.stride()) for _, t in named_tensors(model)]
    handle = offload_either(model)

    def assert_true() -> None:
        for (name, tensor), (value, stride) in zip(named_tensors(model), expected, strict=True):
            assert same_bits(tensor, value) and tensor.stride() == stride, name

    assert_true()
    for _ in range(2):
        output = run(model, [])
        assert_true()
        for block, (value, stride, neighbor) in zip(model.blocks, output, strict=True):
            assert same_bits(value, block.tensor) and stride == block.tensor.stride()
            assert torch.equal(neighbor, torch.tensor([1, 2, 3]))
    handle.remove()
    assert_true()
    if form == "complex64":
        for make in (torch.conj, lambda x: x.conj().imag):
            model.register_buffer("table", make(FORMS[form]()))
            with pytest.raises(ModuleError, match="table"):
                offload_either(model)


# ---------------------------------------------------------------- tensor subclasses, as quantization libraries make them


class QuantizedModel(Model):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                layer.weight = nn.Parameter(Quantized.of(layer.weight), requires_grad=False)
        self.register_buffer("rotation", Quantized.of(torch.randn(WIDTH, WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.linear(x, self.rotation))


def test_tensor_subclass(offload: Offload) -> None:
    """Its plain tensors are pinned and copied ahead, as those of torchao (diffusers #13281, #13276, #13305, #13713)."""
    model, reference = pair(QuantizedModel)
    handle = offload(model)
    check(model, reference, inputs())
    assert isinstance(model.blocks[0].up.weight, nn.Parameter)
    assert type(model.blocks[0].up.weight.data) is Quantized
    assert handle.stats().rebuilds == 0
    assert_own_memory(model)
    assert_at_rest(copy.deepcopy(model), reference)
    weights = {name: id(weight) for name, weight in model.named_parameters()}
    hook = model.blocks[1].up.register_forward_hook(raise_interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(model, inputs())
    hook.remove()
    assert {name: id(weight) for name, weight in model.named_parameters()} == weights
    check(model, reference, inputs())
    handle.remove()
    assert_at_rest(model, reference)
    assert_same(run(model, inputs()), run(reference, inputs()))


class Repacked(Quantized):
    """As quanto's int4 on a GPU, which the wrapper names wherever its tensors are."""

    @staticmethod
    def __new__(cls: type, qdata: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=torch.float32, device="cuda:0")

    def to(self, *_: Any) -> Any:
        return Quantized(self.qdata, self.scale)


def test_packed_for_the_cpu(offload: Offload, monkeypatch: pytest.MonkeyPatch) -> None:
    """quanto's int4 in RAM: kernels of a GPU can't read it."""

    def moved(tensor: Any, _: torch.device) -> torch.Tensor:
        refuse()
        return Repacked(tensor.qdata, tensor.scale) if isinstance(tensor, Quantized) else tensor

    refuse, error = Mock(), torch.OutOfMemoryError()
    model, reference = pair(QuantizedModel)
    monkeypatch.setattr(Quantized, "optimize", lambda self: self, raising=False)
    monkeypatch.setattr(weights, "moved", moved)
    for twin in (model, reference):
        twin.blocks[2].up.weight = twin.blocks[0].up.weight
    refuse.side_effect = chain([None, None, error], repeat(None))
    with pytest.raises(torch.OutOfMemoryError):
        offload(model)
    assert_at_rest(model, reference)
    handle = offload(model)
    assert type(model.blocks[1].up.weight.data) is Repacked
    assert model.blocks[2].up.weight is model.blocks[0].up.weight
    assert_same(run(model, inputs()), run(reference, inputs()))
    refuse.side_effect = chain([None, error], repeat(None))
    with pytest.raises(torch.OutOfMemoryError):
        handle.remove()
    handle.remove()
    assert_at_rest(model, reference)


QUANTIZED_EDITS: dict[str, Callable[[Any], object]] = {
    "the scale": lambda weight: weight.scale.mul_(2),
    "through the wrapper": torch.no_grad()(lambda weight: weight.mul_(2)),
    "one element through data": lambda weight: weight.qdata.data[0, 0].fill_(5),
    "another scale": lambda weight: setattr(weight, "scale", weight.scale * 2),
    "other data of the scale": lambda weight: setattr(weight.scale, "data", weight.scale.data * 2),
}
"""In a forward, an edit of a parameter through `.data` leaves no trace: docs/troubleshooting.md names this limit."""


BESIDE_EDITS: dict[str, Callable[[Any], object]] = {
    "in place": lambda weight: weight.statistics.scale.mul_(2),
    "replaced": lambda weight: setattr(weight.statistics, "scale", weight.statistics.scale * 2),
    "another object": lambda weight: setattr(weight, "statistics", Statistics(weight.statistics.scale * 2)),
}


@pytest.mark.parametrize("edit", QUANTIZED_EDITS)
@pytest.mark.parametrize("where", ["between", "inside"])
def test_edit_of_a_tensor_subclass(edit: str, where: str, offload_either: Offload) -> None:
    """Between forwards, and in a hook inside of each."""
    if where == "inside" and "one element" in edit:
        pytest.skip("leaves no trace")
    change = QUANTIZED_EDITS[edit]
    model, reference = pair(QuantizedModel)
    handle = offload_either(model)
    for twin in (model, reference):
        run(twin, inputs())
        up = twin.blocks[1].up
        if where == "inside":
            up.register_forward_hook(lambda module, args, output: (change(module.weight), None)[1])
        else:
            change(up.weight)
    check(model, reference, inputs())
    handle.remove()
    assert_at_rest(model, reference)


def test_tensor_subclass_is_replaced_cast_and_loaded(offload: Offload) -> None:
    model, reference = pair(QuantizedModel)
    offload(model)
    run(model, inputs())

    def set_weight(twin: Any, weight: torch.Tensor) -> None:
        twin.blocks[1].up.weight = nn.Parameter(weight.clone(), requires_grad=False)

    states = [make(QuantizedModel, seed=seed).state_dict() for seed in (1, 2)]
    quantized = Quantized.of(inputs(3, 2 * WIDTH, WIDTH))
    changes: list[Callable[[Any], object]] = [
        lambda twin: twin.load_state_dict(copy.deepcopy(states[0]), assign=True),
        lambda twin: twin.load_state_dict(copy.deepcopy(states[1])),
        lambda twin: set_weight(twin, torch.ones(2 * WIDTH, WIDTH)),
        lambda twin: set_weight(twin, quantized),
    ]
    for change in changes:
        for twin in (model, reference):
            change(twin)
        check(model, reference, inputs())


# ------------------------------------------------------------------------------------------------ classes that say nothing


class Packed(torch.Tensor):
    """Bytes in a subclass that knows how to read them, as GGUF's parameters are."""

    @staticmethod
    def __new__(cls: type, data: torch.Tensor, factor: float = 0.25) -> Any:
        found: Any = torch.Tensor._make_subclass(cls, data, False)
        found.factor = factor
        return found


class Statistics:
    def __init__(self, scale: torch.Tensor) -> None:
        self.scale, self.name = scale, "rows"


class ScaledBeside(nn.Parameter):
    """Scales as attributes of the parameter, as bitsandbytes keeps them. One of them is also a property, with another value."""

    statistics: Statistics

    @property
    def offset(self) -> torch.Tensor:
        found: torch.Tensor = vars(self)["offset"] / 4
        return found

    @classmethod
    def of(cls, weight: torch.Tensor) -> ScaledBeside:
        scale = weight.detach().abs().amax(1, keepdim=True) / 127
        found = torch.Tensor._make_subclass(cls, (weight.detach() / scale).round().to(torch.int8), False)
        vars(found).update(offset=torch.full((1,), 0.5), statistics=Statistics(scale))
        return found

    def __deepcopy__(self, memo: Any) -> ScaledBeside:
        twin = torch.Tensor._make_subclass(type(self), self.data.clone(), False)
        vars(twin).update(offset=vars(self)["offset"].clone(), statistics=Statistics(self.statistics.scale.clone()))
        return twin


class PackedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("packed", Packed(torch.randint(0, 9, (WIDTH, WIDTH), dtype=torch.uint8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.packed.as_subclass(torch.Tensor).to(x.dtype) * 0.25)


class ScaledLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = ScaledBeside.of(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        return F.linear(x, weight.data.to(x.dtype) * weight.statistics.scale + weight.offset)


@pytest.mark.parametrize("layer", [PackedLinear, ScaledLinear])
def test_a_class_that_nobody_knows_moves_as_bytes(layer: type[nn.Module], offload: Offload) -> None:
    # Classes without new_empty cannot be deep-copied.
    """As GGUF's parameters, which do not tell what is inside (diffusers #14691, #14698). Edits of attributes are seen."""
    model, reference = (make(lambda: wrapped(*(layer() for _ in range(3)))) for _ in range(2))
    handle = offload(model)
    check(model, reference, inputs())
    assert handle.stats().rebuilds == 0
    for edit in BESIDE_EDITS.values() if layer is ScaledLinear else ():
        for twin in (model, reference):
            edit(twin.blocks[1][0].weight)
        check(model, reference, inputs())
    handle.remove()
    assert_at_rest(model, reference)
    assert_same(run(model, inputs()), run(reference, inputs()))


def test_attributes_of_a_weight_land_in_slots() -> None:
    """As bitsandbytes keeps scales (diffusers #10653)."""
    model = wrapped(*(ScaledLinear() for _ in range(4))).eval()
    with use_simulated_device(SimulatedDevice(3)) as device, Twins(device, model) as twins:
        twins.run(3, inputs())
        stats = twins.handle.stats()
        assert stats.pinned_bytes == stats.host_bytes > 0
        waits = device.num_host_waits
        twins.step(x=inputs())
        assert device.num_host_waits == waits


class Opaque(torch.Tensor):
    """No memory of its own, and no word of what is inside."""

    inside: torch.Tensor

    @staticmethod
    def __new__(cls: type, inside: torch.Tensor) -> Any:
        found: Any = torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype, device=inside.device)
        found.inside = inside
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = torch.utils._pytree.tree_map_only(cls, lambda tensor: tensor.inside, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        return cls(result) if func is torch.ops.aten.detach.default else result


def test_an_opaque_class_is_named(tmp_path: Path) -> None:
    model = make(Model)
    model.blocks[1].up.weight = nn.Parameter(Opaque(model.blocks[1].up.weight.detach()), requires_grad=False)
    before = run(model, inputs())
    for options in ({}, {"offload_type": "leaf_level"}, {"offload_to_disk_path": tmp_path}):
        with pytest.raises(
            ModuleError, match=r"blocks\.1\.up\.weight is a .*\.Opaque, .*__tensor_flatten__.*exclude_modules"
        ):
            apply_group_offloading(model, "cpu", **options)
    assert_same(run(model, inputs()), before)
