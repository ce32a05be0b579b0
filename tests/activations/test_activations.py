"""Activation offloading through its public calls: the bits of training with it are those of training without."""

from __future__ import annotations

import copy
import gc
import logging
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from group_offload import ConfigError, DeviceError, ModuleError, StateError
from group_offload.activations import apply_activation_offloading
from group_offload.activations.config import ActivationConfig
from group_offload.activations.gates import GroupGate
from group_offload.activations.offloader import DeviceOffloader
from group_offload.base.saved import hooks_in_force

from ..support.activations import DEVICES, Calls, check, offload, on, random_training
from ..support.simulated import SimulatedDevice
from ..support.training import (
    CHECKPOINTS,
    DIM,
    Put,
    TrainingModel,
    assert_same_bits,
    autocast,
    data,
    make,
    may_respect_hooks,
    plain,
    reentrant,
    selective,
    stopped_backward,
    stopped_forward,
    train,
    two_by_two,
)
from ..support.tuning import tune

# ---------------------------------------------------------------- bits


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(rng=st.randoms(use_true_random=False), device=st.sampled_from(DEVICES))
def test_bits_of_random_training(rng: random.Random, device: str) -> None:
    """Hazard: `retain_graph` and double backward break a tracker of saved tensors."""
    random_training(rng, device)


@pytest.mark.parametrize("run_block", CHECKPOINTS)
def test_bits_with_checkpointing(run_block: Any) -> None:
    """Each checkpoint saves its input and the shared tensor: before its group begins, so that those of the first one stay,
    or (reentrant) after its forward. The head saves what the last block gave."""
    stats = check(plain, "random", model=lambda: make(run_block=run_block))
    num_checkpoints = 4 if run_block is reentrant else 3
    assert stats.saved_tensors == stats.passes * (2 * num_checkpoints + 1) and stats.offloads > 0
    for step in (autocast, two_by_two, stopped_forward, stopped_backward):
        check(step, "random", model=lambda: make(run_block=run_block))


@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")  # with None: torch asks for a choice
@pytest.mark.parametrize("respect", [None, True, False])
def test_bits_with_selective_checkpointing(respect: bool | None) -> None:
    """With 3 kept groups, copies to host memory start inside a checkpoint: more groups come than are expected at first.
    Hazard: a selective checkpoint counts our copies as operations of the forward, and hands out wrong results."""
    if respect is not None and not may_respect_hooks():
        pytest.skip("came with torch 2.15")
    named: dict[str, Any] = {} if respect is None else {"respect_saved_tensors_hooks": respect}
    model = partial(make, run_block=partial(selective, **named), order=[0, 1, 2, 3, 1])
    for step in (plain, two_by_two):
        for keep_last in (1, 3):
            check(step, model=model, keep_last=keep_last)


def test_order_is_not_trusted() -> None:
    """Groups that are left out, called again, or in another order than in the forward before."""

    def routed(model: Any, put: Put) -> torch.Tensor:
        losses = []
        for model.order in ([0, 1, 2, 3], [3, 3, 0], [0], [2, 2, 1, 3, 0, 1]):
            losses.append(plain(model, put))
        return torch.stack(losses)

    for device in ("cpu", "random"):
        check(routed, device)


# ---------------------------------------------------------------- memory


def peaks(num_blocks: int, **options: Any) -> tuple[int, int, int]:
    """Device memory before a step, after its forward, and the most there was; the host runs far ahead."""
    model = make(num_blocks)
    with on("lazy", model) as (put, _):
        device: SimulatedDevice = put.__self__  # type: ignore[attr-defined]
        handle = offload(model, **options) if options else None
        plain(model, put)
        x = data(0, put)
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
        model.zero_grad()
    return before, after, peak


@pytest.mark.parametrize("keep_last", [0, 3])
def test_device_memory_is_the_formula(keep_last: int) -> None:
    """After forward: the groups that were kept, and what two groups save that is on its way; however many there are.

    In backward a group and the next one are there besides the kept ones, and gradients.
    """
    model = make(6)
    handle = offload(model, keep_last=0)
    plain(model, torch.clone)
    group = handle.stats().offloaded_bytes // 6
    weights = sum(parameter.nbytes for parameter in make(10).parameters())
    before, after, peak = peaks(10, keep_last=keep_last)
    assert after - before <= (keep_last + 2) * group * 1.1 + 4096
    assert peak - before <= weights + (keep_last + 4) * group
    assert peaks(10)[1] - before > 9 * group


def test_nothing_is_fetched_late_and_the_host_never_waits() -> None:
    """Hazard: nothing is prefetched in backward (torchtune, TRL)."""
    model = make()
    with on("lazy", model) as (put, _):
        device: SimulatedDevice = put.__self__  # type: ignore[attr-defined]
        handle = offload(model)
        train(model, plain, put)
        stats = handle.stats()
        assert stats.stalls == 0
        # The tensor for all blocks is there, as the last one needs it, and so is what left last.
        assert 0 < stats.reloads < stats.offloads - stats.passes
        assert device.num_host_waits == 0
        assert stats.host_bytes == device.pinned_bytes > 0
        handle.remove()
        assert device.pinned_bytes == 0


@pytest.mark.parametrize(("device", "num_shapes"), [("cpu", 1000), ("eager", 50)])
def test_host_memory_is_bounded_for_any_shapes(device: str, num_shapes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is always a graph that is alive. Shapes that come again take no more."""
    tune(monkeypatch, activation_segment_bytes=4096)
    model, rng = make(2), random.Random(0)
    with on(device, model) as (put, _):
        handle = offload(model, keep_last=0)
        graphs: deque[torch.Tensor] = deque(maxlen=3)
        shapes = rng.sample(range(1, num_shapes + 1), num_shapes)
        for num_samples in shapes:
            graphs.append(model(put(torch.randn(num_samples, 2, DIM))).square().mean())
        stats = handle.stats()
        assert stats.host_bytes <= 2 * stats.peak_used_host_bytes
        assert device == "cpu" or stats.host_bytes == put.__self__.pinned_bytes  # type: ignore[attr-defined]
        graphs.clear()
        handle.remove()


def test_dropped_graphs_free_themselves() -> None:
    """Hazard: a reference cycle keeps dropped graphs."""
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
    """Storages that come and go at the same address during one forward. Hazard: an address is used again, and taken for
    the tensor that was there before."""

    def fleeting(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = x @ w
        for _ in range(100):
            x = torch.sin(x * 1.1)  # its input is in host memory only afterwards, and the address is free again
        return x

    check_gradients(Calls(fleeting, fleeting, fleeting))


def test_host_memory_that_cannot_be_pinned(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations stay on the device, with one warning."""
    monkeypatch.setattr(SimulatedDevice, "pin", lambda *args, **kwargs: False)
    with caplog.at_level(logging.WARNING, "group_offload"):
        stats = check(plain, "random")
    assert stats.offloads == 0 and 0 < check(plain, "cpu").offloaded_bytes <= stats.refused_bytes
    assert [record.message.partition(" 16 KiB")[0] for record in caplog.records] == ["Couldn't pin"]


# ---------------------------------------------------------------- what is saved


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    model(x).square().sum().backward()
    found = [x.grad, *(parameter.grad for parameter in model.parameters())]
    return [gradient for gradient in found if gradient is not None]


def check_gradients(model: nn.Module, device: str = "cpu", **options: Any) -> None:
    """They are the same bits with and without."""
    torch.manual_seed(0)
    x = torch.randn(DIM, DIM)
    twin = copy.deepcopy(model)
    torch.manual_seed(7)
    expected = gradients(twin, x)
    with on(device, model) as (put, get):
        handle = offload(model, **{"keep_last": 0, **options})
        torch.manual_seed(7)
        assert_same_bits(gradients(model, put(x)), expected, get)
        handle.remove()


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
    "changed where nothing was saved": lambda x, w: (lambda y: (lambda z: (y.add_(5), z.sin())[1])(y + 1))(x @ w),
    "double": lambda x, w: torch.sin((x @ w).double()).float(),
}


@pytest.mark.parametrize("function", VIEWS.values(), ids=VIEWS)
def test_views(function: Any) -> None:
    """Hazard: `y` and `y.t()` are taken for one tensor, so gradients are wrong (ms-swift #10157)."""
    check_gradients(Calls(function, function, function), "random")


def columns(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    a, b = (x @ w).unsafe_chunk(2, -1)
    return a.sigmoid_() * b.tanh_() @ w[: DIM // 2]


def rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    a, b = (x @ w).unsafe_chunk(2)
    return (a.sigmoid_() @ w + b.tanh_() @ w)[:2].mean(0) + x


@pytest.mark.parametrize("function", [columns, rows])
def test_parts_of_a_tensor_that_have_versions_of_their_own(function: Any) -> None:
    """Hazard: one part's copy is taken for another's (`unsafe_chunk`, a GRU's gates): gradients are silently wrong.

    (Not on the simulated device: there a copy of a part reads what lies between its rows.)
    """
    check_gradients(Calls(function, function, function))


def test_what_moves_is_what_is_needed() -> None:
    """Bytes that are saved many times move once, and a small view does not take its storage along. Hazard: views that share
    bytes are told apart, and each is copied."""
    model = Calls(lambda x, w: torch.sin(x) * torch.cos(x) * x.t() * torch.cos(x[1:]).sum())
    handle = offload(model, keep_last=0)
    gradients(model, torch.randn(DIM, DIM))
    stats = handle.stats()
    assert stats.shared_tensors >= 3
    assert stats.offloads < stats.saved_tensors - 2
    model = Calls(lambda x, w: torch.sin((x @ w)[2:4]).sum() + x.sum() * 0)
    handle = offload(model, keep_last=0, skip=lambda tensor, _: tensor.shape == (DIM, DIM))
    gradients(model, torch.randn(DIM, DIM))
    assert 0 < handle.stats().offloaded_bytes < 1024 // 2


def test_parameters_never_move() -> None:
    """Nor do their views, autocast's copies of them, or buffers. Hazard: parameters are copied, or held while FSDP2
    resizes them."""
    model = Calls(
        lambda x, w: F.linear(F.linear(x.detach(), w), w.view(-1).view(DIM, DIM)),
        lambda x, w: F.linear(F.linear(x, w), w.detach()),
    )
    seen: list[torch.Tensor] = []
    offload(model, keep_last=0, skip=lambda tensor, _: seen.append(tensor) or False)
    model(torch.randn(4, DIM)).sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.blocks[0].function = model.blocks[1].function = lambda x, w: F.linear(F.linear(x, w), w)
        loss = model(torch.randn(4, DIM)).sum()
    loss.backward()
    assert seen and all(tensor.shape[0] == 4 for tensor in seen)


def test_forwards_without_backward_are_left_alone() -> None:
    """And those around which hooks are forbidden, or of forward-mode differentiation, whose zeros have no memory at all."""
    model, resident = make().eval(), make().eval()
    handle = offload(model)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            model(data(0, torch.clone))
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        plain(model, torch.clone)
    assert handle.stats().passes == 0
    x, tangent = data(0, torch.clone), data(1, torch.clone)
    with forward_ad.dual_level():
        ours, expected = (forward_ad.unpack_dual(each(forward_ad.make_dual(x, tangent))) for each in (model, resident))
    assert torch.equal(ours.tangent, expected.tangent)


# ---------------------------------------------------------------- in-place changes


SPOILS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]] = {
    "result": lambda x, w, y: y.add_(1),
    "a part": lambda x, w, y: y.view(-1)[3:5].zero_(),
    "weight": lambda x, w, y: w.data.mul_(2) is torch.autograd.graph.increment_version(w),
}


@pytest.mark.parametrize("min_bytes", [0, 1 << 20])
@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
def test_in_place_changes_are_errors_as_without(spoil: Any, min_bytes: int) -> None:
    """Hazard: hooks switch off autograd's check of in-place changes: gradients are silently wrong."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.sigmoid(x @ w)
        z = torch.sin(y)
        spoil(x, w, y)
        return z + y

    x = torch.randn(DIM, DIM)
    for expected in (RuntimeError, StateError):
        model = Calls(function, function)
        if expected is StateError:
            offload(model, keep_last=0, min_bytes=min_bytes)
        with pytest.raises(expected, match="has been modified by an inplace operation"):
            gradients(model, x)


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


@pytest.mark.parametrize("options", [{"keep_last": 0}, {"keep_last": 9}, {"keep_last": 0, "prefetch": 0}], ids=str)
def test_a_backward_that_changes_what_others_have_saved_is_an_error(options: dict[str, Any]) -> None:
    """`exp` has saved its result too. Without offloading it is autograd's error. Hazard: a backward computes in the
    memory of what it has saved, and the next node computes with that."""
    for expected in (RuntimeError, StateError):
        model = Calls(*[lambda x, w: ChangedByBackward.apply(torch.exp(x @ w * 0.1))] * 2)
        with on("random", model) as (put, _):
            if expected is StateError:
                offload(model, **options)
            loss = model(put(torch.randn(DIM, DIM))).mean()
            with pytest.raises(expected, match="modified by an inplace operation"):
                loss.backward()


def test_an_operation_that_fills_what_it_has_saved() -> None:
    """`rrelu` saves its noise before it draws it, and does not raise its version. Hazard: an operation fills a tensor
    after autograd has saved it: what was copied has no values yet."""
    check_gradients(Calls(*[lambda x, w: F.rrelu(x @ w * 0.1, training=True)] * 3))


def test_bytes_that_changed_are_saved_again() -> None:
    """A graph that nobody runs backward holds the first version; the second one is another stash."""
    held: list[torch.Tensor] = []

    def saved_twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        held.append(torch.sin(y))
        y.add_(1)
        return torch.sin(y) * (x @ w)

    check_gradients(Calls(saved_twice, saved_twice))
    with pytest.raises(StateError, match="modified by an inplace operation"):
        held[-1].sum().backward()


def test_tensors_come_back_aligned_as_they_were() -> None:
    """Some kernels round by alignment."""
    for part in (slice(3, 5), slice(1, 16), slice(5, 6)):
        views: list[torch.Tensor] = []

        def sine(x: torch.Tensor, w: torch.Tensor, part: slice = part, views: Any = views) -> torch.Tensor:
            views.append((x @ w)[part])
            views.append(torch.sin(views[0]))
            return views[1]

        model = Calls(sine)
        offload(model, keep_last=0)
        model(torch.randn(DIM, DIM))
        view, result = views
        came_back: Any = result.grad_fn._saved_self  # type: ignore[union-attr]
        assert came_back.data_ptr() % 256 == view.storage_offset() * view.itemsize % 256


def test_what_backward_saves_is_left_alone() -> None:
    """A gradient inside of forward, and recomputation of the whole model. Hazard: hooks inside a checkpoint shadow it,
    and what it recomputes is offloaded again."""
    in_backward: list[bool] = []

    def note(tensor: torch.Tensor, fqn: str) -> bool:
        in_backward.append(torch._C._current_graph_task_id() != -1)
        return False

    def penalized(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x @ w)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope * y

    check_gradients(Calls(penalized, penalized), skip=note)
    x = torch.randn(DIM, DIM)
    for use_reentrant in (True, False):
        whole, start = Calls(*[VIEWS["chunks"]] * 3), x.clone().requires_grad_()
        expected = gradients(copy.deepcopy(whole), x)
        handle = offload(whole, keep_last=0, skip=note)
        checkpoint(whole, start, use_reentrant=use_reentrant).square().sum().backward()
        assert_same_bits([start.grad, *(p.grad for p in whole.parameters())], expected)  # type: ignore[list-item]
        assert handle.stats().passes == 0  # forward without gradients, or hidden by the checkpoint's own hooks
    assert in_backward and not any(in_backward)


# ---------------------------------------------------------------- applying


def test_without_an_accelerator_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard: no accelerator: a crash deep inside (ms-swift #7201)."""
    monkeypatch.setattr("group_offload.activations.config.default_device", lambda: torch.device("cpu"))
    with pytest.raises(DeviceError, match=r"sees no accelerator here.*pass device='cpu'"):
        apply_activation_offloading(make())


def test_a_model_on_two_devices_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its weights are there, or what it saves. It leaves no hooks behind, and one of them can be chosen."""
    monkeypatch.setattr(ActivationConfig, "offloads", lambda *_: True)
    with_weights, with_saved = make(), make()
    with_weights.extra = nn.Linear(1, 1, device="meta")
    with_saved.run_block = lambda block, x, y: block(x, y) + torch.sin(x.to("meta")).sum().new_zeros((), device="cpu")
    for model in (with_weights, with_saved):
        handle = offload(model)
        with pytest.raises(ModuleError, match=r"TrainingModel runs on cpu and on meta.*Pass device='meta'"):
            model(data(0, torch.clone))
        assert hooks_in_force() is None
    monkeypatch.undo()
    plain(model, torch.clone)
    assert handle.stats().offloads > 0


def test_applying_again_changes_nothing() -> None:
    """Hazard: a module is wrapped twice, and calls itself forever, or is another class than before (FastVideo #1106)."""
    model = make()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    keys = list(model.state_dict())
    handle = offload(model)
    assert offload(model) is handle
    assert len(model._forward_pre_hooks) == 1 and list(model.state_dict()) == keys
    assert "forward" not in model.__dict__ and type(model) is TrainingModel
    with pytest.raises(StateError, match=r"other options.*remove\(\)"):
        offload(model, keep_last=2)
    with pytest.raises(ModuleError, match=r"group of another module"):
        offload(nn.Sequential(model.blocks[0]))
    twin = copy.deepcopy(model)
    plain(twin, torch.clone)
    assert handle.stats().passes == 0
    offload(twin, keep_last=2).remove()
    handle.remove()
    handle.remove()
    for name, module in model.named_modules():
        assert {k: v for k, v in module.__dict__.items() if v or k in before[name]} == before[name]
    assert offload(model, keep_last=2) is not handle


def test_an_interrupt_while_it_is_applied_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: GroupGate) -> None:
        place(self)
        if self.name == "blocks.1":
            raise KeyboardInterrupt

    model, place = make(), GroupGate.place
    with monkeypatch.context() as patch:
        patch.setattr(GroupGate, "place", interrupt)
        with pytest.raises(KeyboardInterrupt):
            offload(model)
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in model.modules())
    assert offload(model).is_active


def test_groups() -> None:
    assert offload(make()).groups == tuple(f"blocks.{index}" for index in range(4))
    assert offload(make(), groups=["head", "blocks"]).groups == (*(f"blocks.{index}" for index in range(4)), "head")
    assert offload(make(2), groups=nn.LayerNorm).groups == ("blocks.0.norm", "blocks.1.norm")
    assert offload(nn.ModuleDict({"list": nn.ModuleList([nn.Linear(1, 1)])})).groups == ("list.0",)
    with pytest.raises(ConfigError, match=r"'block.1'.*Did you mean 'blocks.1'"):
        offload(make(), groups="block.1")
    with pytest.raises(ConfigError, match="does not have"):
        offload(make(), groups=[nn.Conv2d])
    with pytest.raises(ModuleError, match=r"Linear has no ModuleList.*groups="):
        offload(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_last": -1}, "keep_last=-1"),
        ({"prefetch": 1.5}, "prefetch=1.5"),
        ({"min_bytes": True}, "min_bytes=True"),
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


# ---------------------------------------------------------------- errors and interrupts


def test_removed_between_forward_and_backward() -> None:
    """By the end of a `with` block."""

    def step(model: nn.Module, put: Put) -> torch.Tensor:
        with offload(model) as handle:
            loss = model(data(0, put)).square().mean()
        assert handle.stats().offloads > 0 and not handle.is_active
        loss.backward()
        return loss.detach()

    expected = train(make(), plain)
    for device in DEVICES:
        model = make()
        with on(device, model) as (put, get):
            assert_same_bits(train(model, step, put), expected, get)


def test_an_error_of_the_last_copy_leaves_no_hooks_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the input is saved. An operation might yet fill it, so it is copied after the forward: that finds no RAM.
    Hazard: an error of a copy after the forward leaves saved-tensor hooks in force."""

    def no_ram(*args: object) -> None:
        raise MemoryError

    model = Calls(lambda x, w: w.sum() * x)
    offload(model, keep_last=0)
    with monkeypatch.context() as patch:
        patch.setattr(DeviceOffloader, "offload", no_ram)
        with pytest.raises(MemoryError):
            model(torch.randn(DIM, DIM))
    assert hooks_in_force() is None
    gradients(model, torch.randn(DIM, DIM))


@pytest.mark.parametrize("is_removed", [False, True])
def test_an_interrupt_leaves_no_hooks_behind(is_removed: bool) -> None:
    """torch runs no hooks after Ctrl-C: the next forward, or `remove`, cleans up."""

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    model = make()
    handle = offload(model)
    hook = model.blocks[2].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(data(0, torch.clone))
    hook.remove()
    if is_removed:
        handle.remove()
        assert hooks_in_force() is None
    assert_same_bits(train(model, plain), train(make(), plain))
    assert hooks_in_force() is None
