"""How a model is called: parts without the model, inputs that move or stay, forwards that raise, in threads."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from group_offload import StateError
from group_offload.base.tensors import map_tensors
from group_offload.runtime import passes
from group_offload.runtime.deadlock import where_it_waits

from ...support.asserts import assert_at_rest, assert_same
from ...support.edits import edit_in_place, edit_through_data
from ...support.inside import engine_of
from ...support.models import WIDTH, Blocks, Model, inputs, make
from ...support.participants import in_threads
from ...support.reading import eventually
from ...support.rigs import Offload, check, offload_to, pair, run, run_onloaded
from ...support.tuning import tune


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
    """`text_encoder.text_model.final_layer_norm(x)`, as pipelines do that skip layers of CLIP. And peft looks whether
    `_compiled_call_impl` is true."""
    model, reference = pair(Encoder)
    handle = offload_either(model)
    assert not any(getattr(module, "_compiled_call_impl", False) for module in model.modules())
    x, inner = inputs(), "text_model.embeddings"
    for part in ("text_model.norm", inner, f"{inner}.0", "text_model", "", "text_model.norm"):
        for _ in range(2):
            before = handle.stats().forward_passes
            expected = run(reference.get_submodule(part), x)
            assert_same(run_onloaded(model, x, call=model.get_submodule(part)), expected)
            assert handle.stats().forward_passes == before + 1
            assert_at_rest(model, reference)
    for twin in (model, reference):
        twin.norms_itself = True  # outside of the call whose weights it uses, inside of a forward
    for _ in range(2):
        assert_same(run_onloaded(model, x), run(reference, x))


def test_a_block_of_another_offloaded_model_is_refused(offload_either: Offload, tmp_path: Path) -> None:
    """It would belong to two offloaded models."""
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


# ---------------------------------------------------------------- inputs


class TakesAll(Model):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, dict[str, Any]]:  # type: ignore[override]
        return super().forward(x), kwargs


class Skips(TakesAll):
    _skip_keys = ["cache"]


@pytest.mark.parametrize(("kind", "options"), [(TakesAll, {"exclude_kwargs": ["cache"]}), (Skips, {})])
def test_inputs_stay_that_are_excluded_or_there_already(kind: Any, options: Any, offload_either: Offload) -> None:
    """By an option, or by the model's class."""
    model, reference = pair(kind)
    handle = offload_either(model, **options)
    elsewhere = [torch.empty(3, device="meta")]
    values = {"a": [inputs(), 3], "b": {"c": (inputs(),)}, "d": inputs(), "e": None, "f": object(), "cache": elsewhere}
    output, received = run(model, inputs(), **values)
    assert_same(output, run(reference, inputs())[0])
    assert received.keys() == values.keys() and all(received[name] is values[name] for name in values)
    with pytest.raises(NotImplementedError):
        run(model, inputs(), other=elsewhere)
    handle.remove()
    offload_either(model, exclude_kwargs=[])
    with pytest.raises(NotImplementedError):
        run(model, inputs(), cache=elsewhere)


def test_an_input_that_is_given_twice_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard: `attention(x, x, x)` takes the way for other keys, since `query is key` no more."""
    model, x = Model(), torch.ones(2, device="meta")  # which is not the onload device
    gates = engine_of(offload_to(None, model))._gates
    monkeypatch.setattr(gates.backend, "bring", lambda tensor, non_blocking: torch.empty(tensor.shape))
    (one, (other,)), named = gates.move_inputs((x, [x]), {"key": x, "value": torch.ones(2, device="meta")})
    assert one is other is named["key"] is not x and named["value"] is not one


def test_lengths_of_packed_sequences_stay_on_the_cpu() -> None:
    """Hazard: torch refuses a `PackedSequence` whose lengths are on the device, so an LSTM could be given none."""
    packed = pack_sequence([inputs(0, 3, WIDTH), inputs(1, 2, WIDTH)])
    moved = map_tensors({"x": [packed]}, torch.clone)["x"][0]
    assert isinstance(moved, PackedSequence)
    assert moved.data is not packed.data and moved.batch_sizes is packed.batch_sizes


# ---------------------------------------------------------------- forwards that raise


def test_forward_that_raises_and_is_caught_inside(offload: Offload) -> None:
    """A block fails, the model goes on without it."""

    class Catching(Model):
        def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
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


def test_remove_in_the_middle_of_a_forward_is_refused(offload: Offload) -> None:
    model, reference = pair()
    handle = offload(model)
    hook = model.blocks[1].register_forward_hook(lambda *args: handle.remove())
    with pytest.raises(StateError, match="remove"):
        run(model, inputs())
    hook.remove()
    check(model, reference, inputs())


# ---------------------------------------------------------------- threads


def test_blocks_that_a_forward_calls_in_threads_are_refused(
    offload_either: Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward waits for the threads: they must not wait for it."""
    tune(monkeypatch, turn_timeout_seconds=0.2)

    class Branches(Blocks):
        max_workers = 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.max_workers:
                return sum(block(x) for block in self.blocks)
            with ThreadPoolExecutor(self.max_workers) as pool:
                return sum(pool.map(lambda block: block(x), self.blocks))

    model, reference = pair(Branches(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))))
    handle = offload_either(model)
    with pytest.raises(StateError, match="in another thread than a forward that is in progress"):
        run(model, inputs())
    model.max_workers = 0
    assert_same(run_onloaded(model, inputs()), run(reference, inputs()))
    handle.remove()


@pytest.mark.parametrize("calls_a_part", [False, True])
def test_a_forward_that_works_in_threads_of_its_own_lets_others_wait(
    calls_a_part: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread calls the same model meanwhile, as servers do; or a part of it, while the forward gets on."""
    tune(monkeypatch, turn_timeout_seconds=0.05)
    began, got_on, is_over, looks = threading.Event(), threading.Event(), threading.Event(), []

    def look(thread: int) -> Any:
        found = where_it_waits(thread)
        looks.append(found)
        got_on.clear()
        assert eventually(lambda: got_on.is_set() or is_over.is_set())
        return found

    monkeypatch.setattr(passes, "where_it_waits", look)

    class Tiled(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](x)
            began.set()
            while calls_a_part and is_offloaded and len(looks) < 4:
                pool.submit(time.sleep, 1e-3).result()
                got_on.set()
            pool.submit(time.sleep, 0.3).result()
            got_on.set()
            return self.blocks[1](x)

    model, reference = pair(Tiled(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))))
    x, is_offloaded = inputs(), False
    with ThreadPoolExecutor(4) as pool:
        wanted = [run(called, x) for called in (reference, reference.blocks[0] if calls_a_part else reference)]
        began.clear()
        handle, is_offloaded = offload_to(None, model), True
        first = pool.submit(run_onloaded, model, x)
        first.add_done_callback(lambda _: is_over.set())
        assert began.wait(240)
        second = pool.submit(run_onloaded, model, x, call=model.blocks[0] if calls_a_part else model)
        for found, expected in zip((first, second), wanted, strict=True):
            assert_same(found.result(), expected)
    handle.remove()


def test_applying_and_running_in_threads(offload: Offload) -> None:
    model, reference = pair()
    handle = offload(model)
    expected = [run(reference, inputs(seed)) for seed in range(3)]
    twins = [pair(make(Model, 2, seed=seed)) for seed in range(4)]

    def run_often(seed: int) -> None:
        for _ in range(8):
            assert_same(run(model, inputs(seed)), expected[seed])

    def apply_all() -> None:
        for other, other_reference in twins:
            handle = offload(other)
            check(other, other_reference, inputs())
            handle.remove()

    in_threads([*(partial(run_often, seed) for seed in range(3)), apply_all])
    assert handle.stats().forward_passes == 24
    assert_at_rest(model, reference)


# ---------------------------------------------------------------- inference mode


@pytest.mark.parametrize("is_made_inside", [True, False])
@pytest.mark.parametrize("is_used_inside", [True, False])
def test_inference_mode(is_made_inside: bool, is_used_inside: bool, offload: Offload) -> None:
    """A module is made, offloaded, edited or called there, or not."""
    with torch.inference_mode(is_made_inside):
        model, reference = pair()
    with torch.inference_mode(is_used_inside):
        handle = offload(model)
    assert is_made_inside or not any(tensor.is_inference() for tensor in model.parameters())
    for edit in (edit_in_place if is_made_inside is is_used_inside else edit_through_data, edit_through_data):
        expected = run(reference, inputs())
        with torch.inference_mode():
            assert_same(model(inputs()), expected)
        assert is_made_inside or not any(tensor.is_inference() for tensor in model.parameters())
        assert_at_rest(model, reference)
        with torch.inference_mode(is_used_inside and is_made_inside):
            check(model, reference, inputs())
            edit(model)
            edit(reference)
            check(model, reference, inputs())
    handle.remove()
    assert_at_rest(model, reference)
