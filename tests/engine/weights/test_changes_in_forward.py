"""Tensors that a forward changes itself keep what it gave them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from ...support.asserts import assert_at_rest, assert_same
from ...support.models import WIDTH, Blocks, Stop, inputs
from ...support.rigs import Offload, check, gradient_of_input, pair, run, run_onloaded


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
    "counter through data": CountingThroughData,
    "buffer from nothing": Replacing,
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


@pytest.mark.parametrize("has_graph", [False, True], ids=["", "gradients"])
@pytest.mark.parametrize("kind", CHANGING)
def test_forward_changes_its_own_tensors(kind: str, has_graph: bool, offload_either: Offload) -> None:
    """Buffers would be reset in each pass with streams, and lost with files. A gradient is right, or an error if there is one
    without offloading. A counter costs one rebuild at most, in which it leaves its file for RAM."""
    torch.manual_seed(0)
    model, reference = pair(Around(CHANGING[kind]).requires_grad_(False))
    x = inputs(0, 4, 3, WIDTH)
    handle = offload_either(model)
    was_in_files = handle.stats().file_bytes > 0
    for _ in range(4):
        try:
            expected = gradient_of_input(reference, x) if has_graph else run(reference, x)
        except RuntimeError:
            expected = None
        try:
            assert_same(gradient_of_input(model, x) if has_graph else run_onloaded(model, x), expected)
        except RuntimeError:
            # The new parameter requires gradients, and is offloaded.
            assert has_graph and (expected is None or kind == "codebook, other parameter")
        assert_at_rest(model, reference)
    assert kind != "counter" or handle.stats().rebuilds == was_in_files
    handle.remove()
    assert_at_rest(model, reference)
    assert_same(run(model, x), run(reference, x))


def test_statistics_are_those_of_training_only(offload_either: Offload) -> None:
    torch.manual_seed(0)
    model, reference = pair(Around(CHANGING["BatchNorm"]))
    handle = offload_either(model)
    for is_training in (True, False, True):
        before = handle.stats().tensors_copied_back
        check(model.train(is_training), reference.train(is_training), inputs(0, 4, 3, WIDTH))
        assert is_training or handle.stats().tensors_copied_back == before


class Edited(nn.Module):
    """Edits its weights in a call as `edit` says, which counts the calls of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.edit: Callable[[Edited, int], None] | None = None
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.edit is not None:
            with torch.no_grad():
                self.edit(self, self.num_calls)
        self.num_calls += 1
        return torch.tanh(x @ self.w.float() + torch.copysign(x, self.v[0]))


class Twice(Blocks):
    """Calls each of its blocks twice in a pass."""

    def __init__(self) -> None:
        super().__init__(*(Edited() for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


def to_another_form_and_back(module: Edited, call: int) -> None:
    """Before the first of two calls, and before the second one."""
    module.w.data = (module.w.data * 2).to(torch.float32 if call % 2 else torch.float64)


def to_the_other_zero(module: Edited, call: int) -> None:
    module.v.data = torch.zeros_like(module.v) if call % 2 else -torch.zeros_like(module.v)


def in_place_and_then_by_a_copy(module: Edited, call: int) -> None:
    """The copy has the bits that its place in the slot has by then."""
    module.w.add_(1)
    module.w.data = module.w.data.clone()


def in_the_place_of_another_one(module: Edited, call: int) -> None:
    """What `v` has is edited through `w`, which gets memory of its own again."""
    kept, module.w.data = module.w.data.clone(), module.v.data
    module.w.add_(1)
    module.w.data = kept


EDITS = (to_another_form_and_back, to_the_other_zero, in_place_and_then_by_a_copy, in_the_place_of_another_one)


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_edits_that_leave_few_traces(edit: Callable[[Edited, int], None], offload: Offload) -> None:
    """In one pass, and not in the passes before and after it."""
    torch.manual_seed(0)
    model, reference = pair(Twice().eval())
    handle = offload(model)
    x = inputs(0, 4, WIDTH)
    for each in (None, edit, None):
        for block in (*model.blocks, *reference.blocks):
            block.edit = each
        check(model, reference, x, passes=1)
    blocks: Any = model.blocks
    assert all(block.w.data_ptr() != block.v.data_ptr() for block in blocks)
    handle.remove()
    assert_at_rest(model, reference)


def to_double(module: Edited, call: int) -> None:
    module.w.data = module.w.data.double()


def to_double_and_stop(module: Edited, call: int) -> None:
    to_double(module, call)
    raise Stop


@pytest.mark.parametrize("edit", [to_double, to_double_and_stop], ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("puts_back", [False, True])
def test_a_cast_that_is_undone_after_the_pass(
    puts_back: bool, edit: Callable[[Edited, int], None], offload: Offload
) -> None:
    """A forward casts a weight, and its caller casts it back, or puts back what was there, as pipelines do around a decoder:
    the next forward computes with that value, and not with what the last one left."""
    torch.manual_seed(0)
    model, reference = pair(Twice().eval())
    handle = offload(model)
    x = inputs(0, 4, WIDTH)
    check(model, reference, x, passes=1)
    for _ in range(2):
        blocks = [*model.blocks, *reference.blocks]
        before = [block.w.data if puts_back else None for block in blocks]  # what is kept is laid out elsewhere
        for block in blocks:
            block.edit = edit
        for each in (model, reference):
            with suppress(Stop):
                run(each, x)
        for block, value in zip(blocks, before, strict=True):
            block.edit = None
            block.w.data = block.w.data.float() + 1 if value is None else value
        check(model, reference, x, passes=2)
    handle.remove()
    assert_at_rest(model, reference)
