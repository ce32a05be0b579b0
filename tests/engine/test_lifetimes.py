"""When memory comes back: reference counting alone frees a model that is removed or dropped, with all that it took."""

from __future__ import annotations

import copy
import gc
import operator
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from group_offload import ModuleError, StateError, apply_group_offloading, enable_group_offload
from group_offload.base import release
from group_offload.runtime.measure.recorder import Recorder
from group_offload.stores import pinned

from ..support import backward, training
from ..support.inside import engine_of
from ..support.models import Model, inputs, make
from ..support.on_device import forward
from ..support.rigs import offload_to, run
from ..support.simulated import SimulatedDevice, use_simulated_device
from ..support.training import CHECKPOINTS, reentrant


@contextmanager
def counted() -> Iterator[None]:
    """Python's collector finds no cycle inside of this."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _lora(model: nn.Module, x: Any, call: Callable[..., Any]) -> None:
    """An adapter that is trained over frozen weights."""
    model.requires_grad_(False)
    model.blocks[1].adapter = nn.Linear(4, 4)
    with torch.enable_grad():
        output = model(x)
    if output.requires_grad:
        output.square().mean().backward()


def _peft(model: nn.Module, x: Any, call: Callable[..., Any]) -> None:
    """A LoRA of peft, in a forward with a graph and one without."""
    peft = pytest.importorskip("peft")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["up", "down"], r=2), model)
    with torch.enable_grad():
        call(model, x)
    call(model, x)


USES: dict[str, Callable[..., Any]] = {
    "never called": lambda model, x, call: None,
    "called": lambda model, x, call: [call(model, x) for _ in range(2)],
    "replaced": lambda model, x, call: [
        call(model, x),
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
        call(model, x),
    ],
    "part called": lambda model, x, call: [call(model, x), model.blocks[0]],
    "with a graph": _lora,
    "with a LoRA of peft": _peft,
    "with hooks": lambda model, x, call: [
        [part.register_forward_hook(lambda *_: None) for part in model.modules()],
        call(model, x),
    ],
    "compiled": lambda model, x, call: [[block.compile(backend="eager") for block in model.blocks], call(model, x)],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "ram": {},
    "file": {},
    "leaves": {"level": "leaf_level"},
    "just in time": {"record_stream": True},
    "budget": {"vram_budget": 1 << 20},
    "shared passes": {"interleave_forwards": True},
}


def alive(*references: weakref.ref[Any]) -> list[bool]:
    return [each() is not None for each in references]


def never_offloaded(use: str) -> list[bool]:
    """What stays of a model that was never offloaded: torch's compiled calls are cycles."""
    with counted():
        model = make(Model)
        USES[use](model, inputs(), lambda model, x: run(model, x))
        gone = [weakref.ref(each) for each in (model, model.gain, model.blocks[0])]
        del model
        return alive(*gone)


ENDS = ["removed", "dropped", "dropped, but for its handle", "given up on the meta device"]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(("use", "options"), [*zip(USES, cycle(OPTIONS)), *zip(cycle(USES), list(OPTIONS)[::-1])])
def test_memory_comes_back_at_once(
    options: str, use: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not when the garbage collector runs. RAM is given back by other threads: nothing else keeps it then."""
    expected, kept = never_offloaded(use), []

    def drop(memory: list[object]) -> None:
        tensors = [weakref.ref(each) for each in memory if isinstance(each, torch.Tensor)]
        memory.clear()
        kept.extend(each for each in tensors if each() is not None)

    monkeypatch.setattr(pinned, "release_later", drop)
    with use_simulated_device(SimulatedDevice(0, "random")) as device, counted():
        model = make(Model)
        handle = offload_to(tmp_path if options == "file" else None, model, **OPTIONS[options])
        USES[use](model, inputs(), lambda model, x: forward(device, model, x))
        engine_left = weakref.ref(engine_of(handle))
        gone = [weakref.ref(each) for each in (model, model.gain, model.blocks[0])]
        weights = [weakref.ref(each) for each in (*model.parameters(), *model.buffers())]
        if end == "given up on the meta device":
            model.to("meta")
            device.synchronize()
            assert not any(alive(*weights)) and not device.pinned_bytes and not device.memory.now
            for _ in range(2):
                with pytest.raises(ModuleError, match=r"was moved to the meta device .* load the model again"):
                    forward(device, model, inputs())
        if end in ("removed", "given up on the meta device"):
            handle.remove()
            device.synchronize()
            assert not device.memory.now and not device.pinned_bytes
        del model
        if end != "dropped, but for its handle":
            del handle
        elif not any(expected):
            assert not handle.is_active
            with pytest.raises(StateError, match="The offloaded model is gone"):
                handle.stats()
            handle.remove()
        device.synchronize()
        release.wait_for_releases()  # of what was laid out again before
        assert alive(*gone)[::2] == expected[::2] and engine_left() is None
        assert not any(alive(*weights)) or any(expected)
        assert not device.memory.now and not kept
        assert not device.pinned_bytes or any(expected)


@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize("what", ["text_encoder", "transformer", "vae", "all", "all, but for its handles"])
def test_what_a_pipeline_gives_up(what: str, is_called: bool) -> None:
    """As users do with a text encoder once prompts are encoded (diffusers #10078), or with all of it."""
    from ..support import tiny_models

    def given_up(offloads: bool) -> list[bool]:
        pipe: Any = tiny_models.flux_pipeline()
        handles = enable_group_offload(pipe, onload_device="cpu") if offloads else {}
        if is_called:
            tiny_models.run(pipe)
        names = ["transformer", "vae", "text_encoder", "text_encoder_2"] if what.startswith("all") else [what]
        models = [getattr(pipe, name) for name in names]
        gone = [weakref.ref(each) for model in models for each in (model, next(model.parameters()))]
        del models
        if what == "all":
            handles.clear()
        if what.startswith("all"):
            del pipe
            assert not any(handle.is_active for handle in handles.values())
        else:
            setattr(pipe, what, None)
        return alive(*gone)

    with counted():
        assert all(map(operator.le, given_up(True), given_up(False)))


@pytest.mark.parametrize("whole", [False, True], ids=["a model", "the pipeline"])
def test_a_component_that_is_given_up_on_the_meta_device(whole: bool) -> None:
    """diffusers' `to` would leave its own models where they are, as they are offloaded."""
    from ..support import tiny_models

    pipe = tiny_models.flux_pipeline()
    handles = enable_group_offload(pipe, onload_device="cpu")
    with counted():
        old = [weakref.ref(each) for name in handles for each in getattr(pipe, name).parameters()]
        for target in [pipe] if whole else [getattr(pipe, name) for name in handles]:
            target.to("meta" if whole else torch.device("meta"))
        assert not any(alive(*old)) and not any(handle.stats().host_bytes for handle in handles.values())


@pytest.mark.parametrize("keeps_handle", [False, True])
def test_a_part_that_outlives_its_model(keeps_handle: bool) -> None:
    model, reference = make(Model), make(Model)
    kept = [apply_group_offloading(model, "cpu")][: int(keeps_handle)]
    run(model, inputs())
    block = model.blocks[1]
    del model
    expected = run(reference.blocks[1], inputs())
    assert torch.equal(run(block, inputs()), expected)
    assert "_compiled_call_impl" not in block.__dict__ and not block._forward_pre_hooks
    handle = apply_group_offloading(block, "cpu")
    for each in (handle, *kept):
        assert torch.equal(run(block, inputs()), expected)
        if each is not handle:
            each.remove()
    assert torch.equal(run(block, inputs()), expected)
    del block
    with pytest.raises(StateError, match="Keep a reference to the model"):
        _ = handle.module


@pytest.mark.parametrize("run_block", [*CHECKPOINTS, None])
def test_a_checkpoint_calls_blocks_of_a_model_that_was_dropped(run_block: Any) -> None:
    """Or, with None, parts of a block, and not the block."""
    gradients, gone = [], []
    for offloads in (False, True):
        with use_simulated_device(SimulatedDevice(0, "random")) as device, counted():
            is_in_parts = run_block is None
            model: Any = backward.make(run_part=reentrant) if is_in_parts else training.make(run_block=run_block)
            model.requires_grad_(False)
            put = device.put if offloads else torch.clone
            if offloads:
                apply_group_offloading(model, "cpu")
            x = put(torch.ones(2, training.DIM)).requires_grad_()
            with device.running():
                loss = model(x).square().mean()
                gone.append(weakref.ref(model))
                del model
                assert alive(gone[-1]) == [offloads]
                loss.backward()
            device.synchronize()
            gradients.append(device.get(x.grad) if offloads else x.grad)
            del loss
            assert not alive(gone[-1])[0]
    assert torch.equal(*gradients)


@pytest.mark.parametrize(
    ("what", "first", "last", "most"), [("shapes", 2_000, 10_000, 25_000), ("threads", 60, 180, 5_000)]
)
def test_memory_of_the_host_does_not_grow(
    what: str, first: int, last: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text encoder, or `generate()`, has a new shape in each call; a server has a new thread, or model, for each request."""

    def small() -> nn.Module:
        return nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)).eval()

    model, x, traced, timed = small(), torch.ones(10_000, 1), [], [0]
    handle = apply_group_offloading(model, "cpu", interleave_forwards=what != "shapes")
    begin = Recorder.begin

    def counting(recorder: Recorder, kind: Any, stream: Any) -> None:
        timed[0] += kind is not None
        begin(recorder, kind, stream)

    def step(number: int) -> None:
        if what == "shapes":
            run(model, x[:number])
            return
        other = small()
        apply_group_offloading(other, "cpu")
        for each in (model, other):
            thread = threading.Thread(target=run, args=(each, x[:1]))
            thread.start()
            thread.join()

    monkeypatch.setattr(Recorder, "begin", counting)
    tracemalloc.start()
    try:
        for number in range(1, last + 1):
            step(number)
            if number % first == 0:
                gc.collect()
                traced.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    # What leaks grows all the time; a table that is made larger grows once.
    assert min(after - before for before, after in pairwise(traced)) < most, traced
    assert timed[0] < 1_500  # to measure costs the host time
    handle.remove()
