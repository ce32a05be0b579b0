"""Modules of every kind give the bits of their resident twin."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ...support.asserts import assert_at_rest, assert_same
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
    for _ in range(3):
        before = handle.stats()
        check(model, reference, inputs(0, 2, 3, WIDTH), passes=1)
        after = handle.stats()
        num_bytes = sum(after.bytes_onloaded.values()) - sum(before.bytes_onloaded.values())
        brought.append((after.onloads - before.onloads, num_bytes))
    stats = handle.stats()
    assert stats.passes == 3 and stats.rebuilds == 0 and stats.tensors_brought_back == 0
    assert bool(brought[0][0]) == (folder is not None) and brought[1] == brought[2]
    if folder is None:
        assert brought[0] == brought[1]
    else:  # what came from files is brought again unless it was in a slot all the time
        assert brought[0][1] - stats.peak_device_bytes <= brought[1][1] <= brought[0][1]
    handle.remove()
    assert_same(run(model, inputs(0, 2, 3, WIDTH)), run(reference, inputs(0, 2, 3, WIDTH)))
    assert_at_rest(model, reference)


def test_list_as_root_whose_elements_are_called(offload: Offload) -> None:
    model, reference = pair(nn.ModuleList(Block() for _ in range(3)).eval())
    offload(model)
    for block, twin in zip(model, reference, strict=True):
        assert_same(run_onloaded(model, inputs(), call=block), run(twin, inputs()))
    assert_at_rest(model, reference)
