"""Between forwards, weights are on the CPU, true, and in memory of their own; `remove` gives the module back as it was."""

from __future__ import annotations

import gc
import io
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from group_offload import StateError, remove_group_offloading
from group_offload.runtime import engine

from ...support.asserts import assert_at_rest, assert_own_memory, assert_same, named_tensors, same_bits, snapshot
from ...support.edits import edit_in_place
from ...support.faults import raise_at
from ...support.inside import engine_of
from ...support.models import WIDTH, inputs
from ...support.processes import run_python
from ...support.rigs import Offload, check, offload_to, pair, run


def test_state_dict(offload: Offload) -> None:
    """As it is, and saved: no uninitialized memory, and no larger than that of the resident model. What was taken while
    offloaded reads the weights as long as it is held, also after `remove`."""
    model, reference = pair()
    handle = offload(model)
    state, expected = model.state_dict(), reference.state_dict()
    run(model, inputs())
    file, plain = io.BytesIO(), io.BytesIO()
    torch.save(model.state_dict(), file)
    torch.save(expected, plain)
    assert len(file.getvalue()) < 1.5 * len(plain.getvalue())
    file.seek(0)
    handle.remove()
    del model, handle
    gc.collect()
    for found in (state, torch.load(file)):
        assert list(found) == list(expected)
        assert all(same_bits(found[name], expected[name]) for name in expected)


def test_a_default_device(folder: Path | None) -> None:
    """`torch.set_default_device("cuda")`, as user interfaces have it: what the engine makes for itself is not made there."""
    model, reference = pair(nn.Linear, 10, 10)  # with room around its tensors
    for _ in range(2):
        expected = run(reference, torch.ones(1, 10))
        with torch.device("meta"):
            handle = offload_to(folder, model)
            for _ in range(2):
                assert_same(run(model, torch.ones(1, 10, device="cpu")), expected)
            with torch.no_grad():
                for twin in (model, reference):
                    twin.weight.mul_(0.5)
            assert_same(run(model, torch.ones(1, 10, device="cpu")), run(reference, torch.ones(1, 10, device="cpu")))
            handle.remove()


# ---------------------------------------------------------------- removed


def test_remove_gives_the_module_back(offload: Offload) -> None:
    """Meanwhile weights are the same tensors, true, and in memory of their own."""
    model, reference = pair()
    calls: list[str] = []
    model.blocks[1].register_forward_pre_hook(lambda *args: calls.append("pre"))
    model.register_forward_hook(lambda *args, **kwargs: calls.append("root"), with_kwargs=True, always_call=True)
    original = model.blocks[0].forward
    model.blocks[0].forward = lambda x: original(x)
    before = snapshot(model)
    tensors = {name: id(tensor) for name, tensor in named_tensors(model)}
    handle = offload(model)
    for _ in range(2):
        assert_at_rest(model, reference)
        assert_own_memory(model)
        assert all(tensor.is_leaf and tensor.requires_grad for tensor in model.parameters())
        run(model, inputs())
        assert {name: id(tensor) for name, tensor in named_tensors(model)} == tensors
    edit_in_place(model)
    edit_in_place(reference)
    late = model.blocks[0].register_forward_hook(lambda *args: calls.append("late"))
    handle.remove()
    assert_same(run(model, inputs()), run(reference, inputs()))
    assert calls == ["pre", "root", "pre", "root", "late", "pre", "root"]
    late.remove()
    assert snapshot(model) == before
    assert_at_rest(model, reference)
    assert_own_memory(model)
    assert not handle.is_active
    handle.remove()  # nothing more to do
    remove_group_offloading(model)
    with pytest.raises(StateError):
        handle.stats()


def test_remove_that_finds_no_room_loses_nothing(offload: Offload, monkeypatch: pytest.MonkeyPatch) -> None:
    """What got memory of its own before keeps it; the next forward takes all up again, or `remove()` goes on."""
    model, reference = pair()
    handle = offload(model)

    def fail(at: int) -> None:
        with monkeypatch.context() as patch:
            raise_at(patch, engine, "materialize", at + 1, MemoryError("no room"), ever_after=True)
            with pytest.raises(MemoryError):
                handle.remove()
        assert handle.is_active
        assert_at_rest(model, reference)

    def num_parts() -> int:
        return sum(len(group.parts) for group in engine_of(handle).groups)

    for at in range(num_parts()):
        check(model, reference, inputs())
        edit_in_place(model)
        edit_in_place(reference)
        fail(at)
        fail(at)
        check(model, reference, inputs(), passes=2)
    fail(num_parts() - 1)  # edited weights have left their files
    handle.remove()
    assert_at_rest(model, reference)
    assert_own_memory(model)
    assert_same(run(model, inputs()), run(reference, inputs()))


_PEAK = """
import contextlib
from functools import partial
from group_offload.api import offload
from group_offload.base.tuning import tune
from group_offload.config import ModelOptions, OffloadConfig
tune(segment_bytes=32 << 20)
peak = lambda: next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))
where = contextlib.nullcontext()

if sys.argv[1] == "mapped twice":
    from tests.support.simulated import SimulatedDevice, use_simulated_device
    where = use_simulated_device(SimulatedDevice())
with where:
    model = Blocks(*(nn.Linear(2048, 2048, bias=False) for _ in range(24))).requires_grad_(False)
    held, folder = model.state_dict(), sys.argv[2] if sys.argv[1] in ("edited", "cast") else None
    config = OffloadConfig.from_options(ModelOptions(onload_device="cpu", offload_to_disk_path=folder), model)
    cast = partial(offload, model, config, dict.fromkeys(held, torch.bfloat16))
    step = cast if sys.argv[1] == "cast" else offload(model, config).remove
    if sys.argv[1] == "edited":
        for number in range(24):
            model.blocks[number].weight.mul_(2)
        step = partial(model, torch.ones(1, 2048))
    with contextlib.suppress(OSError):
        open("/proc/self/clear_refs", "w").write("5")  # forget the peak
    before = peak()
    step()
print(peak() - before, 24 << 24)
"""


@pytest.mark.parametrize("memory", ["pageable", "mapped twice", "edited", "cast"])
def test_no_second_copy_of_the_model(memory: str, tmp_path: Path) -> None:
    """As `remove()` gives weights memory of their own, edited ones of files move to RAM, or cast ones go to files
    (diffusers #10847, #11106)."""
    done = run_python(_PEAK, memory, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    more, model = map(int, done.stdout.split())
    assert model == 24 << 24 and more < model / 4


def test_applying_twice(offload: Offload) -> None:
    """A second call with other options is never ignored silently, nor pins anything again."""
    model, reference = pair()
    handle = offload(model)
    assert offload(model) is handle
    with pytest.raises(StateError, match="remove_group_offloading"):
        offload(model, non_blocking=True)
    parts = (model.get_submodule(path) for path in ("blocks", "blocks.1", "blocks.1.up", "norm"))
    for other in (nn.Sequential(model), *parts):
        with pytest.raises(StateError, match=r"is already offloaded.*Call remove_group_offloading\(\) on "):
            offload(other)
    check(model, reference, inputs())
    handle.remove()
    offload(model)
    check(model, reference, inputs())


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
