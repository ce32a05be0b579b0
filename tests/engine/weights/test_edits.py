"""Everything that users do to weights between forwards is in the next forward's output, and is kept by `remove`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ...support.asserts import assert_at_rest, assert_same
from ...support.edits import any_edit, edit_one_element_through_data
from ...support.models import inputs
from ...support.rigs import Offload, check, offload_to, pair, run, run_onloaded


@any_edit
def test_edit_after_a_forward(edit: Callable[[Any], None], offload_either: Offload) -> None:
    """And before the first one, twice, and right before `remove`."""
    for num_before, num_after in ((0, 1), (2, 3), (1, 0)):
        model, reference = pair()
        handle = offload_either(model)
        check(model, reference, inputs(), passes=num_before)
        for twin in (model, reference):
            edit(twin)
        x = inputs().to(next(reference.parameters()).dtype)
        if num_after:
            assert_at_rest(model, reference)
            check(model, reference, x, passes=num_after)
            assert handle.stats().rebuilds <= 2
            for twin in (model, reference):
                twin.gain.data.mul_(2)
                twin.blocks[0].down.weight.data.mul_(2)
            assert_at_rest(model, reference)
            check(model, reference, x)
        handle.remove()
        assert_at_rest(model, reference)
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
                edit_one_element_through_data(twin)
                twin.gain.data[0] += 1
            check(model, reference, inputs(), passes=1)


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
    """`share_memory()`, or a queue of processes, moves weights at rest."""
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
