"""Modules of every kind, and tensors of every dtype, shape and stride, give the bits of their resident twin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from group_offload import ModuleError, apply_group_offloading

from ...support.asserts import assert_at_rest, assert_same, named_tensors, same_bits
from ...support.kinds import KINDS
from ...support.models import WIDTH, Block, inputs
from ...support.rigs import Offload, check, pair, run, run_onloaded


@pytest.mark.parametrize("kind", KINDS)
def test_module_of_every_kind(kind: str, folder: Path | None, offload: Offload) -> None:
    """Lists in lists, which are never called; a root that has lists only; modules that read a weight of another one without a
    call, as `MultiheadAttention.out_proj` (diffusers #14551)."""
    torch.manual_seed(0)
    model, reference = pair(KINDS[kind]().eval())
    handle = offload(model)
    assert_at_rest(model, reference)
    brought = []
    for _ in range(4):  # layers are joined in the second pass, which brings all again
        before = handle.stats()
        check(model, reference, inputs(0, 2, 3, WIDTH), passes=1)
        after = handle.stats()
        num_bytes = sum(after.bytes_onloaded.values()) - sum(before.bytes_onloaded.values())
        brought.append((after.onloads - before.onloads, num_bytes))
    stats = handle.stats()
    assert stats.passes == 4 and stats.rebuilds == 0 and stats.tensors_brought_back == 0
    assert bool(brought[0][0]) == (folder is not None) and brought[2] == brought[3]
    if folder is None:
        assert brought[0] == brought[2]
    else:  # what came from files is brought again unless it was in a slot all the time
        assert brought[0][1] - stats.peak_device_bytes <= brought[2][1] <= brought[1][1] <= brought[0][1]
    handle.remove()
    assert_same(run(model, inputs(0, 2, 3, WIDTH)), run(reference, inputs(0, 2, 3, WIDTH)))
    assert_at_rest(model, reference)


def test_list_as_root_whose_elements_are_called(offload: Offload) -> None:
    model, reference = pair(nn.ModuleList(Block() for _ in range(3)).eval())
    offload(model)
    for block, twin in zip(model, reference, strict=True):
        assert_same(run_onloaded(model, inputs(), call=block), run(twin, inputs()))
    assert_at_rest(model, reference)


# ---------------------------------------------------------------- tensors


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
    """Those that are not contiguous cannot be written to files as they are."""
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


@pytest.mark.parametrize("make", [lambda x: x.conj(), lambda x: x.conj().imag], ids=["conjugated", "negated"])
def test_lazy_views_are_refused(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("table", make(torch.randn(5, dtype=torch.complex64)))
    with pytest.raises(ModuleError, match="table"):
        apply_group_offloading(model, "cpu")
