"""Activation offloading through its public calls: the bits of training with it are those of training without."""

from __future__ import annotations

import copy
import gc
import json
import logging
import pickle
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from group_offload import ConfigError, DeviceError, GroupFileError, ModuleError, StateError
from group_offload.activations import (
    activation_offloading,
    apply_activation_offloading,
    no_activation_offloading,
    spill,
)
from group_offload.activations.offloader import DeviceOffloader
from group_offload.activations.streams import CopyStreams
from group_offload.base.reading import read_part
from group_offload.base.saved import hooks_in_force

from ..support.activations import DEVICES, Call, Calls, check, offload, on
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.training import (
    CHECKPOINTS,
    DIM,
    STEPS,
    TOKENS,
    Put,
    Step,
    TrainingBlock,
    TrainingModel,
    assert_same_bits,
    autocast,
    data,
    doubled,
    make,
    may_respect_hooks,
    plain,
    reentrant,
    retained,
    selective,
    stopped_backward,
    train,
    two_by_two,
)


def half_retained(model: nn.Module, put: Put) -> torch.Tensor:
    """A graph that backward began with, and that is kept while another forward runs."""
    loss = model(data(1, put)).square().mean()
    torch.autograd.grad(loss, [model.head.weight], retain_graph=True)  # type: ignore[list-item, union-attr]
    result = plain(model, put)
    loss.backward()
    return result


# ---------------------------------------------------------------- bits


def test_training_repeats_itself() -> None:
    assert_same_bits(train(make(), plain), train(make(), plain))


@pytest.mark.parametrize("device", ["cpu", "random"])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_bits(step: Step, device: str) -> None:
    stats = check(step, device)
    assert stats.offloads > 0
    assert stats.shared_tensors > 0


@pytest.mark.parametrize("run_block", CHECKPOINTS)
@pytest.mark.parametrize("step", [plain, autocast, two_by_two, stopped_backward])
def test_bits_with_checkpointing(step: Step, run_block: Any) -> None:
    stats = check(step, "random", model=lambda: make(run_block=run_block))
    if step is plain:
        # Each checkpoint saves its input and the shared tensor: before its group begins, so that those of the first one
        # stay, or (reentrant) after its forward. The head saves what the last block gave.
        num_checkpoints = 4 if run_block is reentrant else 3
        assert stats.saved_tensors == stats.passes * (2 * num_checkpoints + 1)
    assert stats.offloads > 0


@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")  # with None: torch asks for a choice
@pytest.mark.parametrize("respect", [None, True, False])
@pytest.mark.parametrize("step", [plain, two_by_two])
def test_bits_with_selective_checkpointing(step: Step, respect: bool | None) -> None:
    """With 3 kept groups, copies to RAM begin inside of a checkpoint: more groups come than are expected at first."""
    if respect is not None and not may_respect_hooks():
        pytest.skip("came with torch 2.15")
    named: dict[str, Any] = {} if respect is None else {"respect_saved_tensors_hooks": respect}
    run_block = partial(selective, **named)
    for keep_last in (1, 3):
        check(step, model=lambda: make(run_block=run_block, order=[0, 1, 2, 3, 1]), keep_last=keep_last)


@pytest.mark.parametrize("device", ["cpu", "random"])
@pytest.mark.parametrize("run_block", CHECKPOINTS[1:])
def test_bits_of_retained_graphs_with_checkpointing(run_block: Any, device: str) -> None:
    check(retained, device, model=lambda: make(run_block=run_block))
    check(doubled, device, model=lambda: make(run_block=run_block))


def skip_some(tensor: torch.Tensor, fqn: str) -> bool:
    return tensor.shape[-1] == 2 * DIM or fqn == "blocks.1"


OPTIONS: list[dict[str, Any]] = [
    {"keep_last": 0},
    {"keep_last": 3},
    {"keep_last": 9},
    {"prefetch": 0},
    {"prefetch": 3},
    {"max_inflight_bytes": 0},
    {"max_inflight_bytes": 3000},
    {"min_bytes": 1500},
    {"host_budget_bytes": 20_000},
    {"host_budget_bytes": 0},
    {"skip": skip_some},
    {"groups": ["blocks.1", "blocks.2", "head"]},
    {"groups": TrainingBlock, "keep_last": 2},
    {"groups": nn.Linear},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_bits_with_options(options: dict[str, Any]) -> None:
    check(retained, "lazy", **options)


@pytest.mark.parametrize("device", ["cpu", "random"])
@pytest.mark.parametrize("budget", [6_000, 24_000])
@pytest.mark.parametrize("step", [plain, retained, two_by_two, stopped_backward])
def test_bits_past_the_budget_of_ram(step: Step, budget: int, device: str, tmp_path: Path) -> None:
    stats = check(step, device, host_budget_bytes=budget, disk_path=tmp_path)
    assert stats.written_bytes > 0 and stats.read_bytes > 0
    assert stats.refused_bytes == 0
    assert stats.host_bytes <= budget
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", [stopped_backward, half_retained])
def test_what_was_read_in_vain_makes_room(step: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward that stopped leaves reads behind, of a graph that is dropped or kept: they never take others' RAM."""

    def read_slowly(fd: int, part: memoryview, position: int) -> int:
        time.sleep(0.005)
        return read_part(fd, part, position)

    monkeypatch.setattr(spill, "read_part", read_slowly)
    for budget in (3_584, 6_000, 24_000):
        assert check(step, "cpu", host_budget_bytes=budget, disk_path=tmp_path).refused_bytes == 0


@pytest.mark.parametrize("budget", [24_000, 1 << 20])
def test_nothing_grows_with_the_number_of_steps(budget: int, tmp_path: Path) -> None:
    model = make()
    offload(model, host_budget_bytes=budget, disk_path=tmp_path)
    train(model, plain, num_steps=2)
    gc.collect()
    tracemalloc.start()
    train(model, plain, num_steps=2)
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    train(model, plain, num_steps=20)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 40_000  # 90,000 if a reference to each tensor is left


def test_a_trace_has_the_file_in_it(tmp_path: Path) -> None:
    model = make()
    handle = offload(model, host_budget_bytes=6_000, disk_path=tmp_path)
    train(model, plain, num_steps=1)
    before = handle.stats()
    with pytest.raises(GroupFileError, match="not a folder"), handle.trace(tmp_path / "nowhere" / "trace.json"):
        pytest.fail("the block ran")
    with suppress(KeyError), handle.trace(tmp_path / "trace.json"):  # the file is written nevertheless
        train(model, plain, num_steps=1)
        raise KeyError
    after = handle.stats()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    sizes: dict[str, int] = defaultdict(int)
    for event in events:
        if event["ph"] == "X":
            sizes[lanes[event["tid"]].rstrip(" 0123456789")] += event["args"].get("bytes", 0)
    assert 0 < sizes["file writes"] <= after.written_bytes - before.written_bytes
    assert 0 < sizes["file reads"] <= after.read_bytes - before.read_bytes
    assert sizes["D2H"] == after.offloaded_bytes - before.offloaded_bytes
    assert 0 < sizes["H2D"] <= after.reloaded_bytes - before.reloaded_bytes
    handle.remove()


def test_order_is_not_trusted() -> None:
    """Groups that are left out, called again, or in another order than in the pass before."""

    def routed(model: Any, put: Put) -> torch.Tensor:
        model.order = {0: [0, 1, 2, 3], 1: [3, 3, 0], 2: [0], 3: [2, 2, 1, 3, 0, 1]}[model.turn % 4]
        model.turn += 1
        return plain(model, put)

    def repeated(model: nn.Module, put: Put) -> torch.Tensor:
        return torch.stack([routed(model, put) for _ in range(4)])

    for device in DEVICES:
        check(repeated, device, model=lambda: make(turn=0))


# ---------------------------------------------------------------- memory


def saved_bytes_per_group() -> int:
    model = make(6)
    handle = offload(model, keep_last=0)
    plain(model, torch.clone)
    stats = handle.stats()
    handle.remove()
    return stats.offloaded_bytes // 6


def peaks(num_blocks: int, **options: Any) -> tuple[int, int, int]:
    """Device memory before a step, after its forward, and the most there was; the host runs far ahead."""
    device = SimulatedDevice(0, "lazy")
    model = make(num_blocks)
    with use_simulated_device(device), device.running():
        for parameter in model.parameters():
            parameter.data = device.put(parameter.data)
        handle = offload(model, **options) if options else None
        plain(model, device.put)
        x = data(0, device.put)
        for meter in (device.memory, device.activations):
            meter.peak = meter.now
        before = device.bytes_in_use()
        loss = model(x).square().mean()
        device.synchronize()
        after = device.bytes_in_use()
        loss.backward()
        peak = device.memory.peak + device.activations.peak  # not at one moment: an upper bound
        if handle is not None:
            handle.remove()
        del loss, x
        for parameter in model.parameters():
            parameter.grad = None
    return before, after, peak


def test_device_memory_does_not_grow_with_the_number_of_groups() -> None:
    resident = peaks(12)[1] - peaks(6)[1]
    with_options = {"keep_last": 1}
    small, large = peaks(6, **with_options), peaks(12, **with_options)
    weights = 6 * sum(p.nbytes for p in TrainingBlock().parameters())
    assert resident - weights > 4 * saved_bytes_per_group()
    kept = large[1] - large[0] - (small[1] - small[0])
    assert kept < 0.1 * (resident - weights)
    assert large[2] - large[0] - (small[2] - small[0]) < 0.1 * (resident - weights) + weights  # gradients


@pytest.mark.parametrize("keep_last", [0, 1, 3])
def test_what_stays_on_the_device_is_the_formula(keep_last: int) -> None:
    """After forward: the groups that were kept, and what two groups save that is on its way."""
    group = saved_bytes_per_group()
    before, after, _ = peaks(10, keep_last=keep_last)
    assert after - before <= (keep_last + 2) * group * 1.1 + 4096


def test_bytes_in_flight_are_bounded() -> None:
    for bound in (0, 2048, 8192):
        for device in ("lazy", "random"):
            stats = check(plain, device, max_inflight_bytes=bound)
            assert stats.peak_inflight_bytes <= bound
    assert check(plain, "lazy").peak_inflight_bytes <= 3 * saved_bytes_per_group()


def test_nothing_is_fetched_late_and_the_host_never_waits() -> None:
    device = SimulatedDevice(0, "lazy")
    model = make()
    with use_simulated_device(device), device.running():
        for parameter in model.parameters():
            parameter.data = device.put(parameter.data)
        handle = offload(model)
        train(model, plain, device.put)
        stats = handle.stats()
        assert stats.stalls == 0
        assert (
            stats.reloads == stats.offloads - stats.passes
        )  # the tensor for all blocks is there: the last one needs it
        assert device.num_host_waits == 0
        assert handle.stats().pinned_bytes == device.pinned_bytes > 0
        handle.remove()
        assert device.pinned_bytes == 0


def test_the_last_group_is_not_known_at_first() -> None:
    """The blocks run backwards, and in the second pass three more: what was kept for the wrong reason leaves late."""
    model = make(order=[3, 2, 1, 0])
    handle = offload(model)
    plain(model, torch.clone)
    first = handle.stats()
    assert first.kept_bytes > 0 and first.offloads == first.reloads + 1  # the tensor for all blocks is there
    model.order = [0, 1, 2, 3, 0, 1, 2]
    plain(model, torch.clone)
    second = handle.stats()
    model.zero_grad()
    plain(model, torch.clone)
    third = handle.stats()
    late = second.kept_bytes - first.kept_bytes - (third.kept_bytes - second.kept_bytes)
    assert late > 0  # from the third pass on only the real last group is kept
    assert second.offloaded_bytes - first.offloaded_bytes == third.offloaded_bytes - second.offloaded_bytes


def test_ram_is_reused_step_after_step() -> None:
    model = make()
    handle = offload(model)
    train(model, plain, num_steps=1)
    once = handle.stats().host_bytes
    train(model, plain, num_steps=4)
    assert handle.stats().host_bytes == once
    handle.remove()


def test_dropped_graphs_free_themselves() -> None:
    model = make()
    handle = offload(model)
    gc.disable()  # nothing waits for the garbage collector: there are no cycles
    try:
        loss = model(data(0, torch.clone)).square().mean()
        assert handle.stats().used_host_bytes > 0
        del loss
        assert handle.stats().used_host_bytes == 0
    finally:
        gc.enable()


def test_no_address_is_taken_for_another() -> None:
    """Storages that come and go at the same address while a pass is open."""

    class Fleeting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
                for _ in range(100):
                    x = torch.sin(x * 1.1)  # saves what is in RAM alone after that, and takes its address again
            return x

    torch.manual_seed(0)
    model = Fleeting()
    twin = copy.deepcopy(model)
    handle = offload(model, keep_last=0)
    assert_same_bits(train(model, plain), train(twin, plain))
    assert handle.stats().used_host_bytes == 0


# ---------------------------------------------------------------- what is saved


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    model(x).square().sum().backward()
    found = [x.grad, *(parameter.grad for parameter in model.parameters())]
    return [gradient for gradient in found if gradient is not None]


VIEWS: dict[str, Callable[..., torch.Tensor]] = {
    "a tensor times its transpose": lambda x, w: (lambda y: y @ y.t())(x @ w),
    "its transpose times a tensor": lambda x, w: (lambda y: y.t() @ y)(x @ w),
    "chunks": lambda x, w: (lambda a, b: torch.sin(a) * torch.cos(b) @ w[: DIM // 2])(*(x @ w).chunk(2, -1)),
    "expand": lambda x, w: torch.sin((x @ w).mean(0, keepdim=True).expand(DIM, DIM)) * (x @ w),
    "overlapping windows": lambda x, w: torch.sin((x @ w).flatten().unfold(0, DIM, 3))[:DIM] @ w,
    "a small view of a large tensor": lambda x, w: torch.sin((x @ w)[3:5, 2:9]).sum() * torch.cos(x),
    "two views of one dtype each": lambda x, w: (
        torch.view_as_real(torch.view_as_complex((x @ w).view(DIM, -1, 2)).exp()).flatten(1).sin()
    ),
    "conjugated": lambda x, w: (lambda z: (z.conj() * z).real)(torch.complex(x, x @ w)),
    "an in-place activation": lambda x, w: torch.relu_(x @ w) @ w,
    "a scalar": lambda x, w: (x @ w) * (x * x).sum(),
    "boolean mask": lambda x, w: torch.where(x > 0, x @ w, x),
    "indices": lambda x, w: (x @ w).max(-1).values[:, None] * x,
    "a view of the weight": lambda x, w: (x @ w.t()) @ w.view(DIM, DIM).diagonal().diag(),
    "empty": lambda x, w: torch.cat([x @ w, torch.sin(x[:0])]),
    "double": lambda x, w: torch.sin((x @ w).double()).float(),
}


@pytest.mark.parametrize("device", ["cpu", "random"])
@pytest.mark.parametrize("function", VIEWS.values(), ids=VIEWS)
def test_views(function: Any, device: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(DIM, DIM)
    model = Calls(function, function, function)
    expected = gradients(copy.deepcopy(model), x)
    with on(device, model) as (put, get):
        handle = offload(model, keep_last=0)
        actual = gradients(model, put(x))
        assert_same_bits(actual, expected, get)
        handle.remove()


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.cell(x, torch.cos(x))
        return result


@pytest.mark.parametrize(
    "block",
    [
        Cell,
        # Not on the simulated device: there a copy of a part reads what lies in between its rows.
        lambda: Call(
            lambda x, w: (lambda a, b: a.sigmoid_() * b.tanh_() @ w[: DIM // 2])(*(x @ w).unsafe_chunk(2, -1))
        ),
        lambda: Call(
            lambda x, w: (lambda a, b: a.sigmoid_() @ w + b.tanh_() @ w)(*(x @ w).unsafe_chunk(2))[:2].mean(0) + x
        ),
    ],
    ids=["GRU", "columns", "rows"],
)
def test_parts_of_a_tensor_that_have_versions_of_their_own(block: Callable[[], nn.Module]) -> None:
    """They are changed in place one after another: a part's version says nothing of another part's bytes."""
    torch.manual_seed(0)
    model = Calls()
    model.blocks.extend(block() for _ in range(3))
    x = torch.randn(DIM, DIM)
    expected = gradients(copy.deepcopy(model), x)
    offload(model, keep_last=0)
    assert_same_bits(gradients(model, x), expected)


def test_bytes_that_are_saved_many_times_move_once() -> None:
    model = Calls(lambda x, w: torch.sin(x) * torch.cos(x) * x.t() * torch.cos(x[1:]).sum())
    handle = offload(model, keep_last=0)
    gradients(model, torch.randn(DIM, DIM))
    stats = handle.stats()
    assert stats.shared_tensors >= 3
    assert stats.offloads < stats.saved_tensors - 2


def test_a_small_view_does_not_take_its_storage_along() -> None:
    model = Calls(lambda x, w: torch.sin((x @ w)[2:4]).sum() + x.sum() * 0)
    handle = offload(model, keep_last=0, skip=lambda tensor, _: tensor.shape == (DIM, DIM))
    gradients(model, torch.randn(DIM, DIM))
    assert 0 < handle.stats().offloaded_bytes < 1024 // 2


def test_parameters_never_move() -> None:
    """Nor do their views, autocast's copies of them, or buffers."""
    model = Calls(
        lambda x, w: F.linear(F.linear(x.detach(), w), w.view(-1).view(DIM, DIM)),
        lambda x, w: F.linear(F.linear(x, w), w.detach()),
    )
    seen: list[torch.Tensor] = []
    handle = offload(model, keep_last=0, skip=lambda tensor, _: seen.append(tensor) or False)
    model(torch.randn(4, DIM)).sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.blocks[0].function = model.blocks[1].function = lambda x, w: F.linear(F.linear(x, w), w)
        loss = model(torch.randn(4, DIM)).sum()
    loss.backward()
    assert seen and all(tensor.shape[0] == 4 for tensor in seen)
    handle.remove()


def test_what_is_outside_of_groups_stays() -> None:
    model = make()
    names: list[str] = []
    handle = offload(model, groups=["blocks.2"], keep_last=0, skip=lambda tensor, fqn: names.append(fqn) or False)
    plain(model, torch.clone)
    assert set(names) == {"blocks.2"}
    handle.remove()


def test_no_activation_offloading() -> None:
    model = make(run_block=lambda block, *args: _without(block, *args))
    handle = offload(model, keep_last=0)
    plain(model, torch.clone)
    assert handle.stats().saved_tensors == 1  # the head's
    with no_activation_offloading():
        plain(model, torch.clone)
    assert handle.stats().saved_tensors == 1
    handle.remove()


def _without(block: nn.Module, *args: torch.Tensor) -> torch.Tensor:
    with no_activation_offloading(), no_activation_offloading():
        result: torch.Tensor = block(*args)
    return result


def test_forward_mode_differentiation() -> None:
    """Its zeros have no memory at all."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(3)])
    x, tangent = torch.randn(2, DIM), torch.randn(2, DIM)

    def jvp() -> torch.Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(model(forward_ad.make_dual(x, tangent))).tangent

    expected = jvp()
    with activation_offloading(model, device="cpu", min_bytes=0):
        assert torch.equal(jvp(), expected)


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        nested = torch.nested.as_nested_tensor([y[:1], y[1:]])
        return torch.nested.to_padded_tensor(nested * nested, 0.0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_stay() -> None:
    model = nn.Sequential(Padded(), Padded())
    x = torch.randn(3, DIM)
    model(x).sum().backward()
    expected = model[0].layer.weight.grad  # type: ignore[union-attr]
    model.zero_grad()
    with activation_offloading(model, device="cpu", min_bytes=0) as handle:
        model(x).sum().backward()
        assert handle.stats().offloads > 0
    assert torch.equal(model[0].layer.weight.grad, expected)


def test_where_hooks_are_forbidden_nothing_is_offloaded() -> None:
    model = TrainingModel()
    with activation_offloading(model, device="cpu", min_bytes=0) as handle:
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            plain(model, torch.clone)
        assert handle.stats().offloads == 0
        plain(model, torch.clone)
        assert handle.stats().offloads > 0


def test_forwards_without_gradients_are_left_alone() -> None:
    model = make()
    handle = offload(model)
    with torch.no_grad():
        model(data(0, torch.clone))
    with torch.inference_mode():
        model(data(0, torch.clone))
    assert handle.stats().passes == 0
    handle.remove()


# ---------------------------------------------------------------- in-place changes


def spoil_result(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.sigmoid(x @ w)
    z = y * 2
    y.add_(1)
    return z + y


def spoil_input(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    z = torch.sin(y)
    y.view(-1)[3:5].zero_()
    return z


def spoil_weight(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    z = x @ w
    with torch.no_grad():
        w.mul_(2)
    return z


def change_nothing_that_counts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Adding saves nothing, so its operands may change."""
    y = x @ w
    z = y + 1
    y.add_(5)
    return z.sin()


@pytest.mark.parametrize("min_bytes", [0, 1 << 20])
@pytest.mark.parametrize("spoil", [spoil_result, spoil_input, spoil_weight])
def test_in_place_changes_are_errors_as_without(spoil: Any, min_bytes: int) -> None:
    x = torch.randn(DIM, DIM)
    for model, expected in ((Calls(spoil, spoil), RuntimeError), (Calls(spoil, spoil), StateError)):
        if expected is StateError:
            offload(model, keep_last=0, min_bytes=min_bytes)
        with pytest.raises(expected, match="has been modified by an inplace operation"):
            gradients(model, x)


def test_in_place_changes_that_are_allowed() -> None:
    model = Calls(change_nothing_that_counts, change_nothing_that_counts)
    x = torch.randn(DIM, DIM)
    expected = gradients(copy.deepcopy(model), x)
    offload(model, keep_last=0)
    assert_same_bits(gradients(model, x), expected)


class ChangedByBackward(torch.autograd.Function):
    """Computes its gradient in the memory of what it has saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return x.mul_(2).mul_(gradient)


@pytest.mark.parametrize("device", ["cpu", "random"])
@pytest.mark.parametrize("options", [{"keep_last": 0}, {"keep_last": 9}, {"keep_last": 0, "prefetch": 0}], ids=str)
def test_a_backward_that_changes_what_others_have_saved_is_an_error(options: dict[str, Any], device: str) -> None:
    """`exp` has saved its result too. Without offloading it is autograd's error."""
    for expected in (RuntimeError, StateError):
        model = Calls(*[lambda x, w: ChangedByBackward.apply(torch.exp(x @ w * 0.1))] * 2)
        with on(device, model) as (put, _):
            if expected is StateError:
                offload(model, **options)
            loss = model(put(torch.randn(DIM, DIM))).mean()
            with pytest.raises(expected, match="modified by an inplace operation"):
                loss.backward()


def test_a_second_backward_over_what_the_first_one_changed_is_an_error() -> None:
    for expected in (RuntimeError, StateError):
        model = Calls(*[lambda x, w: ChangedByBackward.apply(x @ w * 0.1)] * 2)
        if expected is StateError:
            offload(model, keep_last=0)
        loss = model(torch.randn(DIM, DIM)).mean()
        loss.backward(retain_graph=True)
        with pytest.raises(expected, match="modified by an inplace operation"):
            loss.backward()


def test_an_error_of_the_last_copy_leaves_no_hooks_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the input is saved. An operation might yet fill it, so it is copied after the forward: that finds no RAM."""
    model = Calls(lambda x, w: w.sum() * x)
    offload(model, keep_last=0)
    with monkeypatch.context() as patch:
        patch.setattr(DeviceOffloader, "offload", no_ram)
        with pytest.raises(MemoryError):
            model(torch.randn(DIM, DIM))
    assert hooks_in_force() is None
    gradients(model, torch.randn(DIM, DIM))


def no_ram(*args: object) -> None:
    raise MemoryError


@pytest.mark.parametrize("keep_last", [0, 9])
def test_an_operation_that_fills_what_it_has_saved(keep_last: int) -> None:
    """`rrelu` saves its noise before it draws it, and does not raise its version."""
    model = Calls(*[lambda x, w: F.rrelu(x @ w * 0.1, training=True)] * 3)
    x = torch.randn(DIM, DIM)
    expected = copy.deepcopy(model)
    offload(model, keep_last=keep_last)
    torch.manual_seed(7)
    expected_bits = gradients(expected, x)
    torch.manual_seed(7)
    assert_same_bits(gradients(model, x), expected_bits)


def test_bytes_that_changed_are_saved_again() -> None:
    """A graph that nobody runs backward holds the first version; the second one is another stash."""
    held: list[torch.Tensor] = []

    def saved_two_times(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        held.append(torch.sin(y))
        y.add_(1)
        return torch.sin(y) * (x @ w)

    model = Calls(saved_two_times, saved_two_times)
    x = torch.randn(DIM, DIM)
    expected = gradients(copy.deepcopy(model), x)
    offload(model, keep_last=0)
    assert_same_bits(gradients(model, x), expected)
    with pytest.raises(StateError, match="modified by an inplace operation"):
        held[-1].sum().backward()


class _Aligned(torch.autograd.Function):
    """Notes where in its storage, or in memory, a tensor lies when it is saved, and when it comes back."""

    seen: list[int] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        _Aligned.seen.append(x.storage_offset() * x.itemsize % 256)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        _Aligned.seen.append(x.data_ptr() % 256)
        return gradient[0] * 2


def test_tensors_come_back_aligned_as_they_were() -> None:
    """Some kernels round by alignment."""
    for rows in (slice(3, 5), slice(1, 16), slice(5, 6)):
        _Aligned.seen.clear()
        model = Calls(lambda x, w, rows=rows: _Aligned.apply((x @ w)[rows]))
        offload(model, keep_last=0)
        gradients(model, torch.randn(DIM, DIM))
        before, after = _Aligned.seen
        assert before == after


def test_what_backward_saves_is_left_alone() -> None:
    """A gradient inside of forward, and recomputation of the whole model."""
    in_backward: list[bool] = []

    def note(tensor: torch.Tensor, fqn: str) -> bool:
        in_backward.append(torch._C._current_graph_task_id() != -1)
        return False

    def penalised(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x @ w)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope * y

    model = Calls(penalised, penalised)
    x = torch.randn(DIM, DIM)
    expected = gradients(copy.deepcopy(model), x)
    handle = offload(model, keep_last=0, skip=note)
    assert_same_bits(gradients(model, x), expected)
    handle.remove()

    for use_reentrant in (True, False):
        whole = Calls(*[VIEWS["chunks"]] * 3)
        expected = gradients(copy.deepcopy(whole), x)
        handle = offload(whole, keep_last=0, skip=note)
        start = x.clone().requires_grad_()
        checkpoint(whole, start, use_reentrant=use_reentrant).square().sum().backward()
        assert_same_bits([start.grad, *(p.grad for p in whole.parameters())], expected)  # type: ignore[list-item]
        assert handle.stats().passes == 0  # forward without gradients, or hidden by the checkpoint's own hooks
        handle.remove()
    assert in_backward and not any(in_backward)


# ---------------------------------------------------------------- applying


def test_without_an_accelerator_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("group_offload.activations.config.default_device", lambda: torch.device("cpu"))
    with pytest.raises(DeviceError, match=r"sees no accelerator here.*pass device='cpu'"):
        apply_activation_offloading(make())
    with pytest.raises(DeviceError), activation_offloading(make()):
        pass


def test_applying_again_changes_nothing() -> None:
    model = make()
    handle = offload(model)
    assert offload(model) is handle
    assert len(model._forward_pre_hooks) == 1
    with pytest.raises(StateError, match=r"other options.*remove\(\)"):
        offload(model, keep_last=2)
    with pytest.raises(ModuleError, match=r"group of another module"):
        offload(nn.Sequential(model.blocks[0]))
    handle.remove()
    handle.remove()
    assert offload(model, keep_last=2) is not handle


def test_the_module_stays_as_it_was() -> None:
    model = make()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    keys = list(model.state_dict())
    handle = offload(model)
    assert list(model.state_dict()) == keys
    assert "forward" not in model.__dict__ and type(model) is TrainingModel
    handle.remove()
    for name, module in model.named_modules():
        assert {k: v for k, v in module.__dict__.items() if v or k in before[name]} == before[name]


def test_copies_of_the_module_are_not_offloaded() -> None:
    model = Calls(spoil_input)
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    handle = offload(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(torch.randn(2, DIM)).sum().backward()
        assert handle.stats().passes == 0
        offload(twin).remove()
    model(torch.randn(2, DIM)).sum().backward()
    assert handle.stats().passes == 1


def test_the_with_form() -> None:
    expected = train(make(), plain)

    def inside(model: nn.Module, put: Put) -> torch.Tensor:
        with activation_offloading(model, device="cpu", min_bytes=0) as handle:
            loss = model(data(0, put)).square().mean()
        assert handle.stats().offloads > 0 and not handle.is_active
        loss.backward()
        return loss.detach()

    def around(model: nn.Module, put: Put) -> torch.Tensor:
        with activation_offloading(model, device="cpu", min_bytes=0):
            return plain(model, put)

    for step in (inside, around):
        assert_same_bits(train(make(), step), expected)
    model = make()
    handle = offload(model)
    with activation_offloading(model, device="cpu", min_bytes=0) as inner:
        assert inner is handle
    assert handle.is_active


@pytest.mark.parametrize("device", DEVICES)
def test_removed_between_forward_and_backward(device: str) -> None:
    def step(model: nn.Module, put: Put) -> torch.Tensor:
        handle = offload(model)
        loss = model(data(0, put)).square().mean()
        handle.remove()
        loss.backward()
        return loss.detach()

    model = make()
    expected = train(make(), step)
    with on(device, model) as (put, get):
        assert_same_bits(train(model, step, put), expected, get)


def test_an_interrupt_leaves_no_hooks_behind() -> None:
    """torch runs no hooks after Ctrl-C: the next forward, or `remove`, cleans up."""
    model = make()
    expected = train(make(), plain)

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    for clean_up in ("forward", "remove"):
        model = make()
        handle = offload(model)
        hook = model.blocks[2].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(data(0, torch.clone))
        hook.remove()
        if clean_up == "remove":
            handle.remove()
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert_same_bits(train(model, plain), expected)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("device", ["cpu", "random"])
def test_an_interrupt_of_the_work_on_activations(
    device: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can tell what is where: graphs from before refuse, and what is under way is waited for."""
    expected = train(make(), plain)
    model = make()
    with on(device, model) as (put, get):
        handle = offload(model)
        assert handle._gate is not None
        loss = model(data(0, put)).square().mean()
        earlier = handle._gate.session.offloaders
        drained: list[CopyStreams] = []
        drain, copy_back = CopyStreams.drain, CopyStreams.copy_back

        def copy_back_in_part(*args: Any) -> Any:
            copy_back(*args)
            raise error

        def drain_and_note(streams: CopyStreams) -> None:
            drained.append(streams)
            drain(streams)

        with monkeypatch.context() as patch:
            patch.setattr(CopyStreams, "copy_back", copy_back_in_part)
            patch.setattr(CopyStreams, "drain", drain_and_note)
            with pytest.raises(error):
                loss.backward(retain_graph=True)
        assert drained == [each._streams for each in earlier]
        with pytest.raises(StateError, match="Call the forward again"):
            loss.backward()
        model.zero_grad()
        torch.manual_seed(0)
        assert_same_bits(train(model, plain, put), expected, get)
        assert not {*handle._gate.session.offloaders} & {*earlier}


def test_hooks_around_ours_get_what_we_leave() -> None:
    packed: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tuple(tensor.shape))
        return tensor.detach()

    def inside(model: nn.Module, put: Put) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(data(0, put)).square().mean()
        loss.backward()
        return loss.detach()

    expected = train(make(), plain)
    model = make()
    offload(model)
    assert_same_bits(train(model, inside), expected)
    assert (DIM, DIM) in packed or (DIM, 2 * DIM) in packed  # weights
    assert (2, TOKENS, DIM) in packed  # of the last group


def test_groups() -> None:
    assert offload(make()).groups == tuple(f"blocks.{index}" for index in range(4))
    assert offload(make(), groups=["head", "blocks"]).groups == (*(f"blocks.{index}" for index in range(4)), "head")
    assert offload(make(2), groups=nn.LayerNorm).groups == ("blocks.0.norm", "blocks.1.norm")
    assert offload(nn.ModuleDict({"list": nn.ModuleList([nn.Linear(1, 1)])})).groups == ("list.0",)
    with pytest.raises(ConfigError, match=r"'block.1'.*\['blocks.1'"):
        offload(make(), groups="block.1")
    with pytest.raises(ConfigError, match="no module of that class"):
        offload(make(), groups=[nn.Conv2d])
    with pytest.raises(ModuleError, match=r"Linear has no ModuleList.*groups="):
        offload(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_last": -1}, "keep_last=-1"),
        ({"prefetch": 1.5}, "prefetch=1.5"),
        ({"min_bytes": True}, "min_bytes=True"),
        ({"host_budget_bytes": -2}, "host_budget_bytes=-2"),
        ({"max_inflight_bytes": "1"}, "max_inflight_bytes='1'"),
        ({"disk_path": "/tmp"}, "disk_path is for activations past host_budget_bytes"),
        ({"skip": 3}, "skip=3"),
        ({"groups": [3]}, "groups names 3"),
        ({"groups": []}, "groups is empty"),
        ({"device": "nowhere"}, "device='nowhere'"),
        ({"device": "meta"}, "meta"),
    ],
    ids=str,
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        offload(make(), **options)


# ---------------------------------------------------------------- RAM and files


def test_without_room_it_stays_on_the_device_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "group_offload"):
        stats = check(plain, "random", host_budget_bytes=20_000)
    assert stats.refused_bytes > 0 and stats.offloads > 0 and stats.host_bytes <= 20_000
    assert len([record for record in caplog.records if "host_budget_bytes" in record.message]) == 1


def test_what_is_larger_than_all_the_ram_that_may_be_taken_stays(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Also with a file, which is reached through that RAM."""
    with caplog.at_level(logging.WARNING, "group_offload"):
        stats = check(plain, "random", host_budget_bytes=64, disk_path=tmp_path)
    everything = check(plain, "random")
    assert stats.offloads == 0 and 0 < stats.refused_bytes <= everything.offloaded_bytes + everything.kept_bytes
    (record,) = [record for record in caplog.records if "host_budget_bytes" in record.message]
    assert "larger than host_budget_bytes=64" in record.message and "disk_path" not in record.message


def test_ram_that_cannot_be_locked(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with caplog.at_level(logging.WARNING, "group_offload"):
        monkeypatch.setattr(SimulatedDevice, "pin", lambda *args, **kwargs: False)
        stats = check(plain, "random")
    assert stats.offloads == 0 and stats.refused_bytes > 0
    assert "Could not page-lock" in caplog.text


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(fd: int, start: int, num_bytes: int) -> None:
        raise OSError(28, "No space left on device")

    model = make()
    handle = offload(model, host_budget_bytes=10_000, disk_path=tmp_path)
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(GroupFileError, match=rf"No room for .* bytes.*{tmp_path}.*No space left"):
        plain(model, torch.clone)
    monkeypatch.undo()
    model.zero_grad()
    gc.collect()
    assert_same_bits(train(model, plain), train(make(), plain))
    handle.remove()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    model = make()
    offload(model, host_budget_bytes=10_000, disk_path=tmp_path / "missing")
    with pytest.raises(GroupFileError, match="missing"):
        plain(model, torch.clone)


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_a_drive_that_fails(call: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*args: Any) -> int:
        raise OSError(5, "Input/output error")

    model = make()
    handle = offload(model, host_budget_bytes=10_000, disk_path=tmp_path)
    monkeypatch.setattr(f"os.{call}", fail)
    with pytest.raises(GroupFileError, match=r"Could not (write|read) .* bytes of activations.*Input/output error"):
        plain(model, torch.clone)
    monkeypatch.undo()
    gc.collect()
    model.zero_grad()
    assert_same_bits(train(model, plain), train(make(), plain))
    gc.collect()
    assert handle.stats().file_bytes == 0
    handle.remove()


def test_what_could_not_be_read_ahead_is_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A retained graph survives a drive that failed once: the bytes are still in the file."""
    model = make()
    offload(model, host_budget_bytes=10_000, disk_path=tmp_path)
    torch.manual_seed(1)
    loss = model(data(0, torch.clone)).square().mean()

    def fail(*args: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.preadv", fail)
    with pytest.raises(GroupFileError):
        loss.backward(retain_graph=True)
    monkeypatch.undo()
    model.zero_grad()
    loss.backward()
    twin = make()
    torch.manual_seed(1)
    plain(twin, torch.clone)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)
